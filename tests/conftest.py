"""Fixtures that several test files share."""

import collections
import fcntl
import functools
import gc
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests import testing
from tpu_graphs.hlo import implementations
from tpu_graphs.modules import module as module_lib

# TensorFlow may import JAX, which sets this to '1' where it is unset. The commands that tests start
# would inherit the value and print TensorFlow's log, which they do not in a shell.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


def pytest_configure(config):
  # pytest-xdist would begin with the files with the most tests, but other files take the longest.
  config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
  """Sorts the test files: first files with slow tests, then files with many tests.

  A long file at the end would leave all processes but one idle.
  """
  slow = {item.path for item in items if item.get_closest_marker('slow')}
  count = collections.Counter(item.path for item in items)
  items.sort(key=lambda item: (item.path not in slow, -count[item.path], item.path))


def pytest_collection_finish():
  """Saves a tenth of the time: garbage collections skip the imported modules, which stay anyway."""
  gc.collect()
  gc.freeze()
  gc.set_threshold(50_000, 20, 20)


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
  """Returns the sdist, and the wheel built from it; all processes of pytest-xdist share them."""
  folder = tmp_path_factory.getbasetemp()
  if 'PYTEST_XDIST_WORKER' in os.environ:
    folder = folder.parent  # The processes share this folder.
  out = folder / 'dist'
  with open(folder / 'dist.lock', 'wb') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not out.exists():
      _build(tmp_path_factory.mktemp('source'), out)
  (sdist,) = out.glob('*.tar.gz')
  (wheel,) = out.glob('*.whl')
  return sdist, wheel


def _build(source: pathlib.Path, out: pathlib.Path) -> None:
  """Builds the package from a copy in `source`, so that the checkout stays clean."""
  root = testing.GOLDEN.parents[1]
  for name in testing.METADATA_FILES:
    shutil.copy(root / name, source)
  for name in (*testing.PACKAGES, 'tests'):
    shutil.copytree(
      root / name, source / name, ignore=shutil.ignore_patterns('__pycache__', 'golden', '*.so')
    )
  command = [sys.executable, '-m', 'build', '--no-isolation', f'--outdir={out}', str(source)]
  result = subprocess.run(command, text=True, capture_output=True, check=False, cwd=out.parent)
  assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope='module')
def each_run_loaded_once():
  """Saves seconds per command: building, restoring and tracing the same model again."""
  from baselines import scoring
  from baselines.serving import ranking  # Imported here, since only some tests need it.
  from baselines.training import runs

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(runs, 'load', functools.cache(runs.load))
    patch.setattr(scoring, 'make_scorer', functools.cache(scoring.make_scorer))
    patch.setattr(ranking, 'Ranker', functools.cache(ranking.Ranker))
    yield


@pytest.fixture(scope='session')
def pipelines_made():
  """Returns a dict from the arguments of `batching.batches` to the pipeline it returned."""
  return {}


@pytest.fixture
def each_pipeline_made_once(pipelines_made, monkeypatch):
  """Saves seconds per training and evaluation: tracing the same input pipeline again.

  An input pipeline can be read many times.
  """
  from tpu_graphs.input import batching  # Imported here, since only some tests need it.

  batches = batching.batches

  def once(*args, **options):
    asked = repr((args, sorted(options.items())))
    if asked not in pipelines_made:
      pipelines_made[asked] = batches(*args, **options)
    return pipelines_made[asked]

  monkeypatch.setattr(batching, 'batches', once)
