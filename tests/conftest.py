"""Fixtures that several test files share."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests import testing
from tpu_graphs import module as module_lib
from tpu_graphs.hlo import implementations

# TensorFlow may import JAX, which sets this to '1' where it is unset: the commands that tests start would inherit that
# and print TensorFlow's log, as they do in no shell.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


@pytest.fixture(params=[implementations.NATIVE, implementations.PYTHON], scope='module')
def each_implementation(request):
  """Runs a test file once with each implementation of the HLO extractor."""
  if request.param == implementations.NATIVE:
    pytest.importorskip('tpu_graphs.hlo._native', exc_type=ImportError)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv(implementations.VARIABLE, request.param)
    implementations._active.cache_clear()
    assert implementations.implementation() == request.param
    yield request.param
  implementations._active.cache_clear()


@pytest.fixture(scope='session', params=module_lib.KINDS)
def kind(request):
  """Runs a test once with each kind, 'tile' and 'layout'."""
  return request.param


@pytest.fixture(scope='session')
def built(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
  """The sdist, and the wheel built from the sdist; from a copy, so that the checkout stays clean."""
  root = testing.GOLDEN.parents[1]
  source = tmp_path_factory.mktemp('source')
  for name in testing.METADATA_FILES:
    shutil.copy(root / name, source)
  for name in (*testing.PACKAGES, 'tests'):
    shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns('__pycache__', 'golden', '*.so'))
  out = tmp_path_factory.mktemp('dist')
  command = [sys.executable, '-m', 'build', '--no-isolation', f'--outdir={out}', str(source)]
  result = subprocess.run(command, text=True, capture_output=True, check=False, cwd=out)
  assert result.returncode == 0, result.stdout + result.stderr
  (sdist,) = out.glob('*.tar.gz')
  (wheel,) = out.glob('*.whl')
  return sdist, wheel
