"""Tests of `kill -9` at any moment of a conversion.

Nothing looks finished afterwards, and the same command makes the same dataset.
"""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib

ROOT = testing.GOLDEN.parents[1]
FILES = 250  # Converting so many files takes some seconds.
MOMENTS = 5
PROCESSES = ('--', '--direct_running_mode=multi_processing', '--direct_num_workers=2')

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def raw(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('raw')
  for i in range(FILES):
    np.savez(folder / f'm{i}.npz', **testing.tile_arrays(n=2 + i % 50, c=1 + i % 30, seed=i))
  return folder


@contextlib.contextmanager
def started(raw, directory, *args):
  """Runs a conversion in a process group of its own, and kills it at the end of the block."""
  environment = {
    **os.environ,
    'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]),
  }
  with open(f'{directory}.log', 'ab') as log:
    process = subprocess.Popen(
      [
        sys.executable,
        str(ROOT / 'pipelines/convert.py'),
        '--collection=tile:x',
        f'--input={raw}',
        f'--output={directory}',
        '--num_shards=4',
        '--max_configs_per_record=8',
        *args,
      ],
      env=environment,
      start_new_session=True,
      stdout=log,
      stderr=log,
    )
  try:
    yield process
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(raw, directory) -> None:
  """Runs a conversion to its end."""
  with started(raw, directory) as process:
    assert process.wait() == 0, pathlib.Path(f'{directory}.log').read_text()


def wait_for_begin(directory, process) -> float:
  """Waits until a conversion begins to work, and returns the time."""
  while not (directory / 'in_progress.json').exists():
    assert process.poll() is None
    time.sleep(0.002)
  return time.monotonic()


def tree(directory) -> dict[str, bytes | None]:
  """Returns name -> content of all files below a directory, and None for folders."""
  return {
    str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
    for path in sorted(directory.rglob('*'))
  }


@pytest.fixture(scope='module')
def undisturbed(raw, tmp_path_factory) -> tuple[dict[str, bytes | None], float]:
  """The files of a conversion that nobody disturbs, and its duration in seconds."""
  directory = tmp_path_factory.mktemp('undisturbed') / 'o'
  with started(raw, directory) as process:
    begin = wait_for_begin(directory, process)
    assert process.wait() == 0
    seconds = time.monotonic() - begin
  return tree(directory), seconds


def check_that_it_is_interrupted(directory) -> None:
  assert (directory / 'in_progress.json').exists()
  assert not (directory / 'manifest.json').exists()
  with pytest.raises(errors.InputError):
    directory_lib.open_directory(str(directory))


def test_at_random_moments(raw, undisturbed, tmp_path):
  expected, seconds = undisturbed
  generator = random.Random(0)
  found = set()
  for i in range(MOMENTS):
    directory = tmp_path / f'o{i}'
    with started(raw, directory) as process:
      wait_for_begin(directory, process)
      time.sleep(0.9 * seconds * (i + generator.random()) / MOMENTS)
    # A run that was faster than the first may already have published.
    if (directory / 'manifest.json').exists():
      assert {name: tree(directory).get(name) for name in expected} == expected
      if not (directory / 'in_progress.json').exists():
        continue
    else:
      check_that_it_is_interrupted(directory)
      found.add(len(tree(directory)))
    run(raw, directory)
    assert tree(directory) == expected
  assert found


def test_with_its_worker_processes(raw, undisturbed, tmp_path):
  directory = tmp_path / 'o'
  with started(raw, directory, *PROCESSES) as process:
    while not list(directory.glob('.spill/*')):  # The workers write these files.
      assert process.poll() is None
      time.sleep(0.002)
  check_that_it_is_interrupted(directory)
  run(raw, directory)
  assert tree(directory) == undisturbed[0]


def test_twice(raw, undisturbed, tmp_path):
  """Interrupts also the second run, which cleans up."""
  directory = tmp_path / 'o'
  for seconds in (0.5, 0):
    with started(raw, directory) as process:
      wait_for_begin(directory, process)
      time.sleep(seconds)
    check_that_it_is_interrupted(directory)
  run(raw, directory)
  assert tree(directory) == undisturbed[0]
