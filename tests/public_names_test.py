"""Tests of the public names: `__all__` lists names that exist and load lazily.

The documents use no other names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
import importlib
import pathlib
import re
import subprocess
import sys
import types

import pytest

from tests import testing
import tpu_graphs

ROOT = testing.GOLDEN.parents[1]
PACKAGES = ('tpu_graphs', 'pipelines', 'baselines')
DOCUMENTS = sorted(
  path
  for pattern in ('README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'docs/*.md')
  for path in ROOT.glob(pattern)
)
HEAVY = ('absl', 'apache_beam', 'google', 'jax', 'numpy', 'tensorflow', 'tensorflow_gnn')

_DOTTED = re.compile(r'(?<![\w./-])(?:tpu_graphs|pipelines|baselines)(?:\.\w+)+\b')
_PATH = re.compile(
  r'(?<![\w./:-])(?:tpu_graphs|pipelines|baselines|tests|benchmarks|docs|fuzz)/[\w/]*(?:\.\w+)?'
)
_LAZY = ('tpu_graphs', 'tpu_graphs.dataset', 'tpu_graphs.input', 'tpu_graphs.sources')
_FILE = re.compile(r'\.(csv|html|md|npz|pb|pbtxt|py|sh|toml)$')
_PYTHON = re.compile(r'^```python\n(.*?)^```', re.MULTILINE | re.DOTALL)


def packages() -> list[str]:
  """Returns the dotted names of all packages."""
  files = [path for package in PACKAGES for path in (ROOT / package).rglob('__init__.py')]
  return sorted('.'.join(path.relative_to(ROOT).parent.parts) for path in files)


def private_part(dotted: str) -> str | None:
  """Returns the shortest beginning of a dotted name that is not public; None if all of it is.

  A package's names are public if its `__all__` lists them, other names if no underscore leads them.
  """
  first, *rest = dotted.split('.')
  value, path = importlib.import_module(first), first
  for name in rest:
    path = f'{path}.{name}'
    listed = getattr(value, '__all__', None) if isinstance(value, types.ModuleType) else None
    is_public = name in listed if listed is not None else not name.startswith('_')
    if not is_public or not hasattr(value, name):
      return path
    value = getattr(value, name)
  return None


def names_in_code(source: str) -> Iterator[str]:
  """Yields the dotted names that a program uses; aliases are resolved."""
  tree = ast.parse(source)
  meanings = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        name = alias.name if alias.asname else alias.name.partition('.')[0]
        meanings[alias.asname or name] = name
        yield alias.name
    elif isinstance(node, ast.ImportFrom):
      for alias in node.names:
        meanings[alias.asname or alias.name] = f'{node.module}.{alias.name}'
        yield f'{node.module}.{alias.name}'
  for node in ast.walk(tree):
    attributes = []
    while isinstance(node, ast.Attribute):
      attributes.append(node.attr)
      node = node.value
    if attributes and isinstance(node, ast.Name) and node.id in meanings:
      yield '.'.join([meanings[node.id], *reversed(attributes)])


def names_in(text: str) -> set[str]:
  """Returns the dotted names of our packages in the prose and the Python programs of a document."""
  names = set(_DOTTED.findall(text))
  for program in _PYTHON.findall(text):
    names |= {name for name in names_in_code(program) if name.partition('.')[0] in PACKAGES}
  return {name for name in names if not _FILE.search(name)}


def test_names_are_found_in_prose_and_programs():
  text = """
Use `tpu_graphs.a.b` and `tpu_graphs/x.py`, not github.com/x/tpu_graphs.c.

```python
import numpy as np
import tpu_graphs.d
from tpu_graphs import e as f, g
np.zeros(f.h(1).shape), g, tpu_graphs.i.j
```
"""
  assert names_in(text) == {
    'tpu_graphs.a.b',
    'tpu_graphs.d',
    'tpu_graphs.e',
    'tpu_graphs.e.h',
    'tpu_graphs.g',
    'tpu_graphs.i.j',
    'tpu_graphs.i',
  }


@pytest.mark.parametrize(
  ('name', 'private'),
  [
    ('tpu_graphs.rank', None),
    ('tpu_graphs.metrics.intervals.compare', None),
    ('tpu_graphs.metrics.metrics.opa', 'tpu_graphs.metrics.metrics'),
    ('tpu_graphs.sources.npz._GRAPH_ARRAYS', 'tpu_graphs.sources.npz._GRAPH_ARRAYS'),
    ('tpu_graphs.sources.npz.lode', 'tpu_graphs.sources.npz.lode'),
  ],
)
def test_private_part(name, private):
  assert private_part(name) == private


@pytest.mark.parametrize('package', packages())
def test_every_package_lists_its_public_names(package):
  module = importlib.import_module(package)
  assert isinstance(module.__all__, list)
  assert len(set(module.__all__)) == len(module.__all__)
  for name in module.__all__:
    assert hasattr(module, name), name
    assert name == '__version__' or not name.startswith('_')


@pytest.mark.parametrize('package', _LAZY)
def test_lazy_packages_show_their_names_to_people_and_type_checkers(package):
  module = importlib.import_module(package)
  assert dir(module) == sorted(module.__all__)
  source = pathlib.Path(module.__file__).read_text(encoding='utf-8')
  for name, home in module._HOMES.items():
    assert f'from {home} import {name} as {name}' in source
  with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nonsense'"):
    _ = module.nonsense


def test_importing_the_face_loads_nothing():
  code = f'import sys, tpu_graphs; print(sorted({set(HEAVY)} & set(sys.modules)))'
  result = subprocess.run([sys.executable, '-c', code], text=True, capture_output=True, check=True)
  assert result.stdout == '[]\n'


def test_type_and_error_are_the_same_objects_everywhere():
  assert tpu_graphs.Module is tpu_graphs.modules.Module
  assert tpu_graphs.InputError is importlib.import_module('tpu_graphs.errors').InputError


@pytest.mark.parametrize('path', DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_use_public_names(path):
  private = {name: private_part(name) for name in sorted(names_in(path.read_text('utf-8')))}
  assert {name: part for name, part in private.items() if part} == {}


@pytest.mark.parametrize('path', DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_name_files_that_exist(path):
  if not (ROOT / 'fuzz').exists():
    pytest.skip('needs the whole checkout')
  names = sorted(set(_PATH.findall(path.read_text('utf-8'))))
  assert [name for name in names if not (ROOT / name).exists()] == []


def test_documents_are_all_looked_at():
  assert {'README.md', 'CONTRIBUTING.md', 'metrics.md'} <= {path.name for path in DOCUMENTS}
  assert any('tpu_graphs.rank' in names_in(path.read_text('utf-8')) for path in DOCUMENTS)
