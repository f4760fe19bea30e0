"""Tests of Ctrl-C during a conversion: one line, exit code 130, and no process left."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from pipelines.conversion import steps
from tests import converting

FILES = 400  # Converting so many files takes some seconds.
SECONDS = 60

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def tiles(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tiles')
  converting.save_tiles(folder, FILES)
  return folder


@contextlib.contextmanager
def started(inputs, directory, beam_args):
  """Runs a conversion in a process group of its own, as a shell makes one for a command."""
  command = [
    sys.executable,
    str(converting.ROOT / 'pipelines/convert.py'),
    '--collection=tile:x',
    f'--input={inputs}',
    f'--output={directory}',
    '--',
    *beam_args,
  ]
  process = subprocess.Popen(
    command,
    env=converting.subprocess_environment(),
    start_new_session=True,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  try:
    yield process
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def is_running(group) -> bool:
  try:
    os.killpg(group, 0)
  except ProcessLookupError:
    return False
  return True


def wait_until(holds):
  end = time.monotonic() + SECONDS
  while not holds():
    assert time.monotonic() < end
    time.sleep(0.002)


@pytest.mark.parametrize(
  'beam_args', [(), converting.TWO_PROCESSES], ids=['one process', 'two processes']
)
@pytest.mark.parametrize(
  ('name', 'seconds'), [('in_progress.json', 0.5), ('.spill', 0)], ids=['at the start', 'at work']
)
@pytest.mark.parametrize('kill', [os.killpg, os.kill], ids=['all', 'main process'])
def test_interrupt(tiles, tmp_path, beam_args, name, seconds, kill):
  directory = tmp_path / 'o'
  with started(tiles, directory, beam_args) as process:
    wait_until((directory / name).exists)
    time.sleep(seconds)
    kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (130, '', 'error: interrupted\n')
    wait_until(lambda: not is_running(process.pid))
  assert (directory / 'in_progress.json').exists()


@pytest.mark.parametrize('hides', [False, True])
def test_a_runner_that_hides_it(tiles, tmp_path, monkeypatch, hides):
  process = steps.WriteShard.process

  def interrupted(self, element):
    try:
      signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:
      if not hides:
        raise RuntimeError('KeyboardInterrupt') from error
    return process(self, element)

  monkeypatch.setattr(steps.WriteShard, 'process', interrupted)
  with pytest.raises(KeyboardInterrupt):
    converting.run(tiles / 'm1.npz', tmp_path / 'o', converting.options())
  assert (tmp_path / 'o/in_progress.json').exists()
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
