"""Tests of tpu_graphs/commands/download.py as a command: flags, interruptions, then convert."""

import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time

import numpy as np
import pytest

from tests import file_server
from tests import testing
from tpu_graphs.commands import download
from tpu_graphs.sources import npz

ROOT = pathlib.Path(__file__).parents[3]
ARCHIVES = {split: f'npz_tile_xla_{split}.tar' for split in ('train', 'valid', 'test')}


@pytest.fixture(scope='module')
def archives():
  """Returns the archives of a tiny tile:xla: name -> content."""
  contents = {}
  for i, (split, name) in enumerate(ARCHIVES.items()):
    file, array_file = io.BytesIO(), io.BytesIO()
    np.savez(array_file, **testing.tile_arrays(n=300, seed=i))
    with tarfile.open(fileobj=file, mode='w') as archive:
      info = tarfile.TarInfo(f'npz/tile/xla/{split}/module_{split}.npz')
      info.size = array_file.tell()
      archive.addfile(info, io.BytesIO(array_file.getvalue()))
    contents[name] = file.getvalue()
  return contents


@pytest.fixture
def site(archives, monkeypatch):
  monkeypatch.setenv('no_proxy', '*')
  with file_server.serve() as site:
    for name, content in archives.items():
      site.put(name, content)
    yield site


def run(site, output, *args):
  return download.main(
    ['download.py', '--collection=tile:xla', f'--output={output}', f'--base_url={site.url}', *args]
  )


def start(site, output):
  """Starts the command in a process of its own."""
  return subprocess.Popen(
    [
      sys.executable,
      '-m',
      'tpu_graphs',
      'download',
      '--collection=tile:xla',
      '--split=train',
      f'--output={output}',
      f'--base_url={site.url}',
    ],
    cwd=ROOT,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


def test_downloads_what_convert_takes(site, tmp_path, capsys):
  assert run(site, tmp_path) == 0
  out, err = capsys.readouterr()
  assert err == ''
  lines = out.splitlines()
  assert [line.split()[0] for line in lines[:3]] == list(ARCHIVES.values())
  assert lines[3].startswith('to download  ')
  assert lines[4].endswith(' free')
  assert lines[-2].startswith(f'{ARCHIVES["test"]}: 1 file, ')
  assert (
    lines[-1] == f'next: tpu-graphs convert --collection=tile:xla --input={tmp_path}/npz --output=…'
  )
  assert npz.load(tmp_path / 'npz/tile/xla/train/module_train.npz').num_ops == 300

  from pipelines.conversion import inputs as inputs_lib

  found = inputs_lib.find_inputs([str(tmp_path / 'npz')], 'tile:xla')
  assert found.patterns == tuple(
    str(tmp_path / f'npz/tile/xla/{split}/*.npz') for split in ARCHIVES
  )
  assert found.files == 3


def test_dry_run_shows_the_sizes_only(site, tmp_path, capsys):
  assert run(site, tmp_path / 'out', '--split=valid,test', '--dry_run') == 0
  sizes = dict(re.findall(r'^(\S+\.tar) +(\S+ KiB)$', capsys.readouterr().out, re.MULTILINE))
  assert sizes == {
    name: f'{len(site.files[name]) / 1024:.1f} KiB'
    for name in (ARCHIVES['valid'], ARCHIVES['test'])
  }
  assert site.gets == []
  assert not (tmp_path / 'out').exists()


def test_a_second_run_has_nothing_to_do(site, tmp_path, capsys):
  assert run(site, tmp_path, '--keep_archives') == 0
  site.requests.clear()
  assert run(site, tmp_path) == 0
  assert site.requests == []
  assert capsys.readouterr().out.count('complete') == 3
  assert {path.name for path in tmp_path.glob('*.tar')} == set(ARCHIVES.values())


@pytest.mark.parametrize(
  ('args', 'code', 'message'),
  [
    (
      ['--collection=tile'],
      1,
      "--collection: unknown collection: found 'tile', expected tile:xla, ",
    ),
    (['--split=dev'], 1, "--split: unknown split: found 'dev', expected train, valid, test"),
    (['--base_url=ftp://x'], 1, '--base_url: not a URL: found ftp://x'),
    (
      ['--base_url=http://127.0.0.1:1'],
      1,
      'npz_tile_xla_train.tar: cannot reach the server: found Connection refused',
    ),
    (['--output=gs://a'], 1, '--output: not a local folder'),
    (['--outptu=x'], 2, 'unknown flag --outptu (did you mean --output?)'),
  ],
)
def test_mistakes_are_reported_in_one_line(site, tmp_path, capsys, args, code, message):
  assert run(site, tmp_path / 'out', *args) == code
  out, err = capsys.readouterr()
  assert out == ''
  assert message in err
  assert err.count('\n') == 1
  assert not (tmp_path / 'out').exists()


def test_a_missing_file_is_reported_before_anything_is_downloaded(site, tmp_path, capsys):
  del site.files[ARCHIVES['test']]
  assert run(site, tmp_path / 'out') == 1
  assert (
    f'{ARCHIVES["test"]}: server refuses the file: found HTTP status 404' in capsys.readouterr().err
  )
  assert site.gets == []


@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_download_is_resumed(site, tmp_path, signum):
  name, done = ARCHIVES['train'], threading.Event()

  def half(handler):
    handler.answer(send=100_000)
    handler.wfile.flush()
    done.wait(60)

  site.faults = [half]
  partial = tmp_path / f'{name}.partial'
  with start(site, tmp_path) as process:
    until = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size) and process.poll() is None:
      assert time.monotonic() < until
      time.sleep(0.02)
    process.send_signal(signum)
    err = process.communicate()[1]
  done.set()
  if signum == signal.SIGINT:
    assert (process.returncode, err) == (130, 'error: interrupted\n')
  assert sorted(os.listdir(tmp_path)) == ['.download.lock', partial.name, f'{partial.name}.json']
  received = partial.stat().st_size
  assert run(site, tmp_path, '--split=train') == 0
  assert site.gets == [None, f'bytes={received}-']
  assert npz.load(tmp_path / 'npz/tile/xla/train/module_train.npz').num_ops == 300
  assert sorted(os.listdir(tmp_path)) == ['.download.lock', 'npz']


def test_help(capsys):
  assert download.main(['download.py', '--help']) == 0
  out = capsys.readouterr().out
  for part in (
    'layout:nlp:random',
    '--[no]keep_archives',
    '--[no]dry_run',
    'http://download.tensorflow.org/',
  ):
    assert part in out
