"""Tests of pipelines.convert with failing writes: a line names the place; nothing is published."""

import errno
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile

import pytest

from pipelines.conversion import output
from pipelines.conversion import spill
from pipelines.conversion import steps
from pipelines.runners import beam as beam_lib
from tests import converting
from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import records
from tpu_graphs.modules import streams

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
PROCESSES = pytest.mark.parametrize(
  'beam_args',
  [(), pytest.param(converting.TWO_PROCESSES, marks=pytest.mark.slow)],
  ids=['one process', 'two processes'],
)


@pytest.fixture(scope='module')
def tiles(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tiles')
  converting.save_tiles(folder, 12)
  return folder


def fails(inputs, directory, **kwargs):
  """Returns the error of a conversion that cannot write, and checks that it leaves nothing."""
  with pytest.raises(errors.InputError) as caught:
    converting.run(inputs, directory, converting.options(num_shards=2, **kwargs))
  assert not directory.exists()
  return str(caught.value)


def line(path, found=FULL.strerror):
  return f'{path}: cannot write: found {found}, expected free space, and the right to write there'


@pytest.mark.parametrize('on_error', ['fail', 'skip'])
@pytest.mark.parametrize('method', ['write', 'close'])
def test_records_on_their_way(tiles, tmp_path, monkeypatch, on_error, method):
  def fail(*args):
    raise FULL

  monkeypatch.setattr(spill.Writer, method, fail)
  assert fails(tiles, tmp_path / 'o', on_error=on_error) == line(tmp_path / 'o/.spill')
  assert os.listdir(tmp_path) == []


def test_shard(tiles, tmp_path, monkeypatch):
  def fail(file, data):
    raise PermissionError(errno.EACCES, 'Permission denied', 'x')

  monkeypatch.setattr(records, 'write_tfrecords', fail)
  found = fails(tiles, tmp_path / 'o', split='train')
  assert found in [
    line(tmp_path / f'o/train/part-0000{i}-of-00002.tfrecord', 'Permission denied')
    for i in range(2)
  ]


@pytest.fixture
def full_for(monkeypatch):
  """Makes writes fail for files whose names end in the argument."""

  def prepare(name):
    write = beam_lib.write_atomically

    def fail(path, data):
      if path.endswith(name):
        raise FULL
      write(path, data)

    monkeypatch.setattr(beam_lib, 'write_atomically', fail)

  return prepare


@pytest.mark.parametrize('name', ['schema.pbtxt', 'rejected.jsonl', 'manifest.json'])
def test_other_files(tiles, tmp_path, full_for, name):
  full_for(name)
  assert fails(tiles, tmp_path / 'o') == line(tmp_path / 'o' / name)


@pytest.mark.parametrize(
  ('on_error', 'name', 'place'),
  [('skip', 'o.rejected.jsonl', 'o.rejected.jsonl'), ('fail', 'failure.json', 'o')],
)
def test_report_of_a_bad_input(tmp_path, full_for, on_error, name, place):
  (tmp_path / 'in').mkdir()
  (tmp_path / 'in/zero.npz').write_bytes(b'')
  full_for(name)
  assert fails(tmp_path / 'in', tmp_path / 'o', on_error=on_error) == line(tmp_path / place)


@pytest.mark.parametrize('on_error', ['fail', 'skip'])
def test_temporary_directory(tmp_path, monkeypatch, on_error):
  """Checks that a file whose configs do not fit into the folder is not rejected for it."""

  class Full:
    def __init__(self, *args, **kwargs):
      raise FULL

  converting.save(tmp_path / 'in/m.npz', testing.layout_arrays(c=9))
  monkeypatch.setattr(streams, 'IN_MEMORY_BYTES', -1)
  monkeypatch.setattr(streams.tempfile, 'TemporaryFile', Full)
  with pytest.raises(errors.InputError) as caught:
    converting.run(
      tmp_path / 'in',
      tmp_path / 'o',
      converting.options('layout:own', num_shards=1, max_configs=4, on_error=on_error),
    )
  assert str(caught.value) == line(tempfile.gettempdir())


def test_what_cannot_be_read_is_the_input(tmp_path, monkeypatch):
  """Checks an error of the disk while configs are read."""
  converting.save(tmp_path / 'in/m.npz', testing.layout_arrays(c=9))
  converting.save(tmp_path / 'in/n.npz', testing.layout_arrays(c=3))
  encode = records.encode_stream

  def fail(stream, *args, **kwargs):
    if stream.num_configs == 9:
      raise OSError(errno.EIO, os.strerror(errno.EIO))
    return encode(stream, *args, **kwargs)

  monkeypatch.setattr(records, 'encode_stream', fail)
  manifest = converting.run(
    tmp_path / 'in', tmp_path / 'o', converting.options('layout:own', num_shards=1, on_error='skip')
  )
  assert manifest.rejected_inputs == {'cannot read file': 1}


def test_directory_that_cannot_be_cleared_is_not_a_dataset(tiles, tmp_path, monkeypatch):
  """Checks a failure whose own traces cannot be removed either."""

  def denied(*args):
    raise PermissionError(errno.EACCES, 'Permission denied')

  monkeypatch.setattr(spill.Writer, 'write', denied)
  monkeypatch.setattr(output, '_delete', lambda directory, names: denied() if names else None)
  with pytest.raises(errors.InputError) as caught:
    converting.run(tiles, tmp_path / 'o', converting.options(num_shards=2))
  assert str(caught.value) == line(tmp_path / 'o/.spill', 'Permission denied')
  assert [path.name for path in (tmp_path / 'o').iterdir()] == ['in_progress.json']


def command(inputs, directory, beam_args):
  return [
    sys.executable,
    str(converting.ROOT / 'pipelines/convert.py'),
    '--collection=tile:x',
    f'--input={inputs}',
    f'--output={directory}',
    '--',
    *beam_args,
  ]


def run(args, **kwargs):
  return subprocess.run(
    args,
    env=converting.subprocess_environment(),
    capture_output=True,
    text=True,
    check=False,
    **kwargs,
  )


@PROCESSES
def test_limit_of_file_sizes(tiles, tmp_path, beam_args):
  """Checks what a user sees: one line, exit code 1, nothing left."""
  limit = 4096  # The records of twelve files together exceed so many bytes.
  result = run(
    command(tiles, tmp_path / 'o', beam_args),
    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
  )
  assert result.stderr == f'error: {line(tmp_path / "o/.spill", os.strerror(errno.EFBIG))}\n'
  assert (result.returncode, result.stdout) == (1, '')
  assert os.listdir(tmp_path) == []


@PROCESSES
def test_full_disk(tmp_path, beam_args):
  """Uses a file system of its own, which is gone with the process."""
  disk = tmp_path / 'disk'
  disk.mkdir()
  on_disk = [
    'unshare',
    '--map-root-user',
    '--mount',
    'sh',
    '-c',
    'mount -t tmpfs -o size=64k tmpfs "$0" || exit 99; "$@"; echo $?; ls -A "$0"',
    str(disk),
  ]
  if shutil.which('unshare') is None or run([*on_disk, 'true']).returncode:
    pytest.skip('needs the right to mount')
  converting.save_tiles(tmp_path / 'in', 60)
  result = run([*on_disk, *command(tmp_path / 'in', disk / 'o', beam_args)])
  assert result.stderr == f'error: {line(disk / "o/.spill")}\n'
  assert result.stdout == '1\n'  # This is the exit code; `ls` lists no files.


def test_error_survives_what_runners_do():
  error = output.WriteError('cannot write', path='p', found='f', expected='e')
  assert pickle.loads(pickle.dumps(error)).to_dict() == error.to_dict()
  # Beam would rebuild the error like this, and lose the path.
  with pytest.raises(TypeError):
    output.WriteError('cannot write [while running a step]')
  shown = f'pipelines.conversion.output.WriteError: {error}'
  for text in (
    f"RuntimeError: {shown} [while running 'Convert/Read']\n\nmore",
    f'Traceback\n  x\n{shown}\n\nDuring handling of the above\nRuntimeError: x',
  ):
    assert str(output.write_error_in(RuntimeError(text))) == str(error)
  assert output.write_error_in(RuntimeError('cannot write')) is None


# Results of earlier runs, and results that are lost.


def test_list_of_an_earlier_failure_goes(tiles, tmp_path):
  (tmp_path / 'bad').mkdir()
  (tmp_path / 'bad/zero.npz').write_bytes(b'')
  listing = tmp_path / 'o.rejected.jsonl'
  for fixed in ([tiles], [tiles, tmp_path / 'bad']):
    assert fails(tmp_path / 'bad', tmp_path / 'o', on_error='skip').endswith(
      f'{listing} lists them'
    )
    assert listing.exists()
    converting.run(fixed, tmp_path / 'o', converting.options(num_shards=2, on_error='skip'))
    assert not listing.exists()
    shutil.rmtree(tmp_path / 'o')


@pytest.mark.parametrize(
  ('what', 'made'), [('statistics', 12), ('rejected inputs', 1), ('inputs', 13)]
)
def test_what_a_runner_loses_is_not_published(tiles, tmp_path, monkeypatch, what, made):
  shutil.copytree(tiles, tmp_path / 'in')
  (tmp_path / 'in/zero.npz').write_bytes(b'')
  process, lost = steps.ReadModules.process, []
  tag = {'statistics': 'statistics', 'rejected inputs': 'rejected', 'inputs': 'source'}[what]

  def lossy(self, path):
    for element in process(self, path):
      if getattr(element, 'tag', None) == tag and not lost:
        lost.append(element)
      else:
        yield element

  monkeypatch.setattr(steps.ReadModules, 'process', lossy)
  found = fails(tmp_path / 'in', tmp_path / 'o', split='train', on_error='skip')
  assert found.startswith(
    f'{what} lost between the steps: found {made - 1} arrived, expected {made}, as many as were '
  )
  assert not (tmp_path / 'o.rejected.jsonl').exists()


def test_file_that_a_runner_loses_is_missed(tiles, tmp_path, monkeypatch):
  process, lost = steps.ReadModules.process, []

  def lossy(self, path):
    if lost:
      yield from process(self, path)
    else:
      lost.append(path)

  monkeypatch.setattr(steps.ReadModules, 'process', lossy)
  assert fails(tiles, tmp_path / 'o').startswith(
    'inputs lost between the steps: found 11 arrived, expected 12, '
  )
