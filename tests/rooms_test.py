"""Tests of the order of rooms.

Each room imports only rooms above it in the drawing of CONTRIBUTING.md, and no import runs in a
circle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
import graphlib
import pathlib

import pytest

from tests import testing
from tpu_graphs import cli

ROOT = testing.GOLDEN.parents[1]
PACKAGES = ('tpu_graphs', 'pipelines', 'baselines')

# The most basic room comes first; CONTRIBUTING.md shows the rooms in the same order. A room is a
# folder with all that is in it, or the modules of a folder that are not in a room of their own.
ROOMS = (
  'tpu_graphs',
  'tpu_graphs.modules',
  'tpu_graphs.hlo',
  'tpu_graphs.metrics',
  'tpu_graphs.sources',
  'tpu_graphs.views',
  'tpu_graphs.dataset',
  'tpu_graphs.input',
  'tpu_graphs.commands',
  'pipelines.runners',
  'pipelines.conversion',
  'pipelines',
  'baselines.__init__',
  'baselines.models',
  'baselines.losses',
  'baselines.scoring',
  'baselines.training',
  'baselines.evaluation',
  'baselines.serving',
  'baselines',
)

# The face (`tpu_graphs`) and the commands name these modules in strings, and the face also names
# them for type checkers. They are loaded when they are used.
EXEMPT = {
  'tpu_graphs': {'baselines.serving.ranking', 'tpu_graphs.modules.module'},
  'tpu_graphs.cli': {module for module, _ in cli.COMMANDS.values()},
}


def module_paths() -> dict[str, pathlib.Path]:
  """Returns the file of each module, by the module's dotted name."""
  paths = {}
  for package in PACKAGES:
    for path in sorted((ROOT / package).rglob('*.py')):
      parts = path.relative_to(ROOT).with_suffix('').parts
      paths['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = path
  return paths


def imports_of(source: str, known: Mapping[str, object]) -> Iterator[str]:
  """Yields the known modules that a source imports anywhere, or names in a string."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom):
      for alias in node.names:
        names = (f'{node.module}.{alias.name}', node.module)
        yield from (name for name in names if name in known)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known:
      yield node.value


def room_of(module: str) -> str:
  """Returns the most special room that holds a module."""
  if module == 'baselines':
    return 'baselines.__init__'
  return max((room for room in ROOMS if f'{module}.'.startswith(f'{room}.')), key=len)


@pytest.fixture(scope='module')
def imports() -> dict[str, set[str]]:
  """Returns the modules that each module imports."""
  paths = module_paths()
  found = {}
  for module, path in paths.items():
    names = set(imports_of(path.read_text(encoding='utf-8'), paths))
    found[module] = names - EXEMPT.get(module, set()) - {module}
  return found


def test_imports_are_found_in_every_form():
  source = """
import a
from b import c
from b import d as e
from f import g
if TYPE_CHECKING:
  from h import i
def function():
  from j import k
  load('l.m')
"""
  known = dict.fromkeys(['a', 'b.c', 'b.d', 'f', 'h.i', 'j', 'j.k', 'l.m', 'n'])
  assert set(imports_of(source, known)) == {'a', 'b.c', 'b.d', 'f', 'h.i', 'j.k', 'j', 'l.m'}


def test_every_module_is_in_a_room(imports):
  assert len(imports) > 100
  assert {room_of(module) for module in imports} == set(ROOMS)


def test_each_room_imports_only_rooms_above_it(imports):
  upward = [
    f'{module} ({room_of(module)}) imports {name} ({room_of(name)})'
    for module, names in imports.items()
    for name in names
    if ROOMS.index(room_of(name)) > ROOMS.index(room_of(module))
  ]
  assert not upward


def test_no_circles(imports):
  # A package is imported before its modules, so an import of a module's own package is not counted.
  graph = {
    module: {name for name in names if not module.startswith(f'{name}.')}
    for module, names in imports.items()
  }
  graphlib.TopologicalSorter(graph).prepare()  # Raises CycleError with the modules of a circle.


def test_exemptions_are_needed():
  paths = module_paths()
  for module, exempt in EXEMPT.items():
    found = set(imports_of(paths[module].read_text(encoding='utf-8'), paths))
    assert exempt <= found
