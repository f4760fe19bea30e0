"""Tests of tpu_graphs/commands/validate.py: the command line, its output and exit codes."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import testing
from tpu_graphs.commands import validate

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  """Returns a folder with raw files in raw/ and their dataset directory in data/."""
  folder = tmp_path_factory.mktemp('validate')
  testing.convert_arrays(
    folder, 'tile', {'train/a': testing.tile_arrays(), 'valid/b': testing.tile_arrays(n=5, c=3)}
  )
  return folder


def run(*args):
  return validate.main(['validate.py', *map(str, args)])


def test_sound_directories(data, capsys, monkeypatch):
  monkeypatch.chdir(data)
  assert run('data', 'raw') == 0
  size = {
    split: (data / f'data/{split}/part-00000-of-00001.tfrecord').stat().st_size
    for split in ('train', 'valid')
  }
  assert capsys.readouterr().out.splitlines() == [
    'data: dataset directory of tile:x',
    '  split  modules  measured  configs  records  shards  bytes',
    f'  train        1         1        6        1       1  {size["train"]:,}',
    f'  valid        1         1        3        1       1  {size["valid"]:,}',
    '  sound',
    'raw: 2 raw files',
    '  folder  files  faults  modules  skipped  measured  configs  duplicates  dropped runs',
    '  train       1       0        1        0         1        6           0             0',
    '  valid       1       0        1        0         1        3           0             0',
    '  sound',
  ]


def test_a_fault_is_a_line_and_exit_code_1(data, tmp_path, capsys):
  (tmp_path / 'bad.npz').write_bytes(b'<html>')
  assert run(tmp_path, data / 'raw') == 1
  out = capsys.readouterr().out
  assert f'  fault: {tmp_path}/bad.npz: not an npz file: found HTML or XML, ' in out
  assert '\n  1 fault\n' in out
  assert out.endswith('  sound\n')


def test_a_warning_is_not_a_fault(tmp_path, capsys):
  for split in ('train', 'test'):
    (tmp_path / split).mkdir()
    np.savez(tmp_path / split / f'{split}.npz', **testing.tile_arrays())
  assert run(tmp_path) == 0
  assert capsys.readouterr().out.endswith(
    f'  warning: {tmp_path}: graphs of test occur in train: found 1 of 1 module, '
    'such as test like train, expected graphs of its own\n  sound, 1 warning\n'
  )


def test_json(data, tmp_path, capsys):
  (tmp_path / 'bad é.npz').write_bytes(b'')
  assert run('--json', data / 'data', tmp_path) == 1
  good, bad = json.loads(capsys.readouterr().out)
  assert (good['sound'], good['faults'], good['warnings']) == (True, [], [])
  assert [row['configs'] for row in good['rows']] == [6, 3]
  assert (bad['sound'], bad['path']) == (False, str(tmp_path))
  assert [fault['path'] for fault in bad['faults']] == [str(tmp_path / 'bad é.npz')]


@pytest.mark.parametrize(
  ('args', 'code', 'message'),
  [
    ([], 2, 'no DIR given; --help shows the usage'),
    (['--num_workers=0', 'x'], 2, 'flag --num_workers=0: 0 is not a positive integer'),
    (['--jsn', 'x'], 2, 'unknown flag --jsn (did you mean --json?)'),
    (['missing'], 1, 'missing: nothing to check: found nothing'),
  ],
)
def test_mistakes_are_reported_in_one_line(capsys, args, code, message):
  assert run(*args) == code
  out, err = capsys.readouterr()
  assert out == ''
  assert message in err
  assert err.count('\n') == 1


def start(*args):
  """Starts the command in a process group of its own, as a terminal does."""
  return subprocess.Popen(
    [sys.executable, '-m', 'tpu_graphs', 'validate', *map(str, args)],
    cwd=ROOT,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    start_new_session=True,
  )


@pytest.mark.parametrize('num_workers', [1, 2])
def test_an_interrupt_ends_all_processes_in_one_line(tmp_path, num_workers):
  names = [tmp_path / f'{i}.npz' for i in range(num_workers)]
  for name in names:
    os.mkfifo(name)  # A reader of the pipe waits until the pipe is written.
  with start(tmp_path, f'--num_workers={num_workers}') as process:
    writers = []
    until = time.monotonic() + 60
    while len(writers) < num_workers:
      assert time.monotonic() < until
      time.sleep(0.02)
      try:
        writers.append(os.open(names[len(writers)], os.O_WRONLY | os.O_NONBLOCK))
      except OSError:
        assert process.poll() is None  # There is no reader yet.
    os.killpg(process.pid, signal.SIGINT)
    for writer in writers:
      time.sleep(0.1)
      os.close(writer)
    out, err = process.communicate()
  assert (process.returncode, out, err) == (130, '', 'error: interrupted\n')


def test_processes_of_the_command(data, tmp_path):
  with start(data / 'raw', data / 'data', '--num_workers=2') as process:
    out, err = process.communicate()
  assert (process.returncode, err) == (0, '')
  assert out.count('  sound\n') == 2


def test_help(capsys):
  assert run('--help') == 0
  out = capsys.readouterr().out
  for part in ('[flags] DIR...', '--[no]json', '--num_workers=N', 'Exit code 0'):
    assert part in out
