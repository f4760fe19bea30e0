"""Tests of pipelines.runners.beam: Beam options of a command line, the local runner, and files."""

import os

import apache_beam as beam
from apache_beam.options import pipeline_options
from apache_beam.runners.portability.fn_api_runner import fn_runner
from apache_beam.runners.portability.fn_api_runner import worker_handlers
from apache_beam.runners.worker import data_plane
from apache_beam.testing import util as testing_util
from apache_beam.transforms import environments
import pytest

from pipelines.runners import beam as beam_lib
from tpu_graphs import errors

SMALL, LARGE = 1000, 1 << 40


def direct_options(args, input_bytes):
  pipeline = beam_lib.pipeline(args, input_bytes=input_bytes)
  assert isinstance(pipeline.runner, fn_runner.FnApiRunner)
  options = pipeline.options.view_as(pipeline_options.DirectOptions)
  # multi_processing is an environment of the runner here, and no longer an option; see
  # `_local_runner`.
  processes = isinstance(
    pipeline.runner._default_environment, environments.SubprocessSDKEnvironment
  )
  mode = 'multi_processing' if processes else options.direct_running_mode
  return mode, options.direct_num_workers


CORES = os.cpu_count()


@pytest.mark.parametrize(
  ('args', 'input_bytes', 'expected'),
  [
    ([], SMALL, ('in_memory', 1)),
    ([], LARGE, ('multi_processing', CORES)),
    (['--runner=DirectRunner'], SMALL, ('in_memory', 1)),
    (['--runner', 'direct'], LARGE, ('multi_processing', CORES)),
    (['--runner=FnApiRunner'], LARGE, ('multi_processing', CORES)),
    (['--direct_num_workers=8'], SMALL, ('multi_processing', 8)),  # Beam itself would use one.
    (['--direct_num_workers', '8'], LARGE, ('multi_processing', 8)),
    (['--direct_num_workers=1'], LARGE, ('in_memory', 1)),
    (['--direct_num_workers=0'], SMALL, ('multi_processing', 0)),  # 0 is Beam's word for all cores.
    (['--direct_running_mode=in_memory'], LARGE, ('in_memory', 1)),
    (['--direct_running_mode=multi_processing'], SMALL, ('multi_processing', CORES)),
    (
      ['--direct_running_mode=multi_processing', '--direct_num_workers=2'],
      SMALL,
      ('multi_processing', 2),
    ),
    (
      ['--direct_running_mode=multi_threading', '--direct_num_workers=3'],
      LARGE,
      ('multi_threading', 3),
    ),
  ],
)
def test_local_runner(args, input_bytes, expected):
  assert direct_options(args, input_bytes) == expected


def test_other_options_reach_the_pipeline():
  pipeline = beam_lib.pipeline(['--job_name=x', '--temp_location=/t'], input_bytes=SMALL)
  options = pipeline.options.view_as(pipeline_options.GoogleCloudOptions)
  assert (options.job_name, options.temp_location) == ('x', '/t')


@pytest.mark.parametrize(
  ('args', 'reason', 'found', 'fix'),
  [
    (
      ['--runer=DirectRunner'],
      'unknown Beam option',
      '--runer=DirectRunner',
      'did you mean --runner?',
    ),
    (
      ['--direct_num_worker=2'],
      'unknown Beam option',
      '--direct_num_worker=2',
      'did you mean --direct_num_workers?',
    ),
    (['--runner=DirectRunner', '--qqqqqqqq'], 'unknown Beam option', '--qqqqqqqq', None),
    (['stray'], 'unknown Beam option', 'stray', None),
    (
      ['--direct_num=2'],
      'unknown Beam option',
      '--direct_num=2',
      'did you mean --direct_num_workers?',
    ),
    (
      ['--runner=DirectRunner', '--runner=FnApiRunner'],
      'Beam option given twice',
      '--runner=DirectRunner --runner=FnApiRunner',
      None,
    ),
    (
      ['--runner', 'DirectRunner', '--runner', 'DirectRunner'],
      'Beam option given twice',
      '--runner --runner',
      None,
    ),
  ],
)
def test_wrong_options(args, reason, found, fix):
  with pytest.raises(errors.InputError) as caught:
    beam_lib.pipeline(args, input_bytes=SMALL)
  assert (caught.value.reason, caught.value.found) == (reason, found)
  assert fix is None or caught.value.fix == fix


@pytest.mark.parametrize(
  ('arg', 'names'),
  [
    ('--direct_num_workers=two', ('--direct_num_workers', 'two')),
    ('--direct_running_mode=threads', ('--direct_running_mode', 'threads', 'multi_processing')),
    ('--runner', ('--runner',)),
  ],
)
def test_wrong_values(arg, names):
  with pytest.raises(errors.InputError, match='wrong Beam option') as caught:
    beam_lib.pipeline([arg], input_bytes=SMALL)
  assert all(name in str(caught.value) for name in names)


def test_unknown_runner():
  with pytest.raises(errors.InputError, match='runner cannot be used') as caught:
    beam_lib.pipeline(['--runner=NoSuchRunner'], input_bytes=SMALL)
  assert caught.value.where == '--runner'
  assert 'NoSuchRunner' in caught.value.found
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('path', 'reason', 'fix'),
  [
    ('', 'empty path', None),
    ('gcs://bucket/x', 'unknown file system', 'use gs://'),
    ('nope://bucket/x', 'file system not available', 'use a local path or gs://'),
  ],
)
def test_file_system_refused(path, reason, fix):
  with pytest.raises(errors.InputError) as caught:
    beam_lib.check_file_system('--output', path)
  assert (caught.value.reason, caught.value.where, caught.value.fix) == (reason, '--output', fix)


@pytest.mark.parametrize('path', ['x', '/a/b', 'a/*.npz', 'größe/数据'])
def test_local_paths_are_accepted(path):
  beam_lib.check_file_system('--input', path)


def test_google_storage_without_its_extra(monkeypatch):
  def get_filesystem(path):
    raise ValueError('Unable to get filesystem from specified path')

  monkeypatch.setattr(beam_lib.filesystems.FileSystems, 'get_filesystem', get_filesystem)
  with pytest.raises(errors.InputError) as caught:
    beam_lib.check_file_system('--input', 'gs://bucket/*.npz')
  assert (caught.value.where, caught.value.found) == ('--input', 'gs://bucket/*.npz')
  assert 'tpu_graphs[gcp]' in caught.value.fix


@pytest.mark.parametrize('name', ['x.bin', 'x.gz', 'größe_数据'])
@pytest.mark.parametrize('data', [b'', b'\x1f\x8b\x00no gzip\xff'])
def test_bytes_are_written_and_read_as_they_are(tmp_path, name, data):
  path = str(tmp_path / name)
  beam_lib.write_atomically(path, b'older')
  beam_lib.write_atomically(path, data)
  assert beam_lib.read_bytes(path) == data
  assert os.listdir(tmp_path) == [name]


def test_a_file_that_cannot_be_read(tmp_path):
  for path in (tmp_path, tmp_path / 'nope'):
    with pytest.raises(errors.InputError, match='cannot read file') as caught:
      beam_lib.read_bytes(str(path))
    assert caught.value.path == str(path)


def test_interrupted_write_leaves_the_old_content(tmp_path, monkeypatch):
  path = str(tmp_path / 'x')
  beam_lib.write_atomically(path, b'older')
  monkeypatch.setattr(beam_lib, 'rename', lambda source, target: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    beam_lib.write_atomically(path, b'newer')
  assert beam_lib.read_bytes(path) == b'older'
  assert all(name == 'x' or name.endswith('.partial') for name in os.listdir(tmp_path))


def test_rename_over_a_file_that_another_attempt_deletes(tmp_path, monkeypatch):
  (tmp_path / 'a').write_bytes(b'new')
  (tmp_path / 'b').write_bytes(b'old')
  delete = beam_lib.filesystems.FileSystems.delete

  def delete_twice(paths):
    delete(paths)
    delete(paths)

  monkeypatch.setattr(beam_lib.filesystems.FileSystems, 'delete', delete_twice)
  beam_lib.rename(str(tmp_path / 'a'), str(tmp_path / 'b'))
  assert os.listdir(tmp_path) == ['b']
  assert (tmp_path / 'b').read_bytes() == b'new'


@pytest.mark.parametrize('mode', ['multi_processing', 'multi_threading'])
def test_no_timer_empties_the_buffers_of_local_workers(mode, monkeypatch):
  """Checks the limit: the timer takes no lock while buffers are written to, and loses elements."""
  monkeypatch.setattr(worker_handlers, 'DATA_BUFFER_TIME_LIMIT_MS', 1000)
  servicers = []
  create = data_plane.BeamFnDataServicer
  monkeypatch.setattr(
    data_plane, 'BeamFnDataServicer', lambda limit: servicers.append(limit) or create(limit)
  )
  with beam_lib.pipeline(
    [f'--direct_running_mode={mode}', '--direct_num_workers=2'], input_bytes=SMALL
  ) as pipeline:
    numbers = pipeline | beam.Create(range(9)) | beam.Reshuffle() | beam.combiners.Count.Globally()
    testing_util.assert_that(numbers, testing_util.equal_to([9]))
  assert servicers
  assert set(servicers) == {0}
