"""Tests of pipelines.conversion.output: directories to overwrite, and interrupted runs."""

import os

import pytest

from pipelines.conversion import output
from pipelines.runners import beam as beam_lib
from tpu_graphs import errors

REQUEST = {'collection': 'tile:xla', 'seed': 0}
SHARDS = (
  'train/part-00000-of-00002.tfrecord',
  'train/part-00001-of-00002.tfrecord',
  'valid/part-00000-of-00001.tfrecord',
)


def fill(directory, *names, text='x'):
  for name in names:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding='utf-8')
  return directory


@pytest.fixture
def place(tmp_path):
  return tmp_path / 'größe 数据'


@pytest.fixture
def dataset(place):
  return fill(place, 'manifest.json', 'schema.pbtxt', 'statistics.json', 'rejected.jsonl', *SHARDS)


@pytest.fixture
def unfinished(place):
  output.begin(str(place), request=REQUEST, overwrite=False)
  return fill(place, *SHARDS, f'{SHARDS[0]}.1f.partial', 'schema.pbtxt.71.partial')


def begin(directory, request=REQUEST, overwrite=False):
  output.begin(str(directory), request=request, overwrite=overwrite)
  assert output.list_files(str(directory)) == ['in_progress.json']


def refused(directory, reason, **kwargs):
  before = output.list_files(str(directory))
  with pytest.raises(errors.InputError) as caught:
    begin(directory, **kwargs)
  assert (caught.value.reason, caught.value.path) == (reason, str(directory))
  assert output.list_files(str(directory)) == before
  return caught.value


def test_list_files(tmp_path):
  fill(tmp_path, 'b', 'a/c', 'a/.d', 'ü/ö/x y')
  (tmp_path / 'empty').mkdir()
  for directory in (str(tmp_path), f'{tmp_path}/'):
    assert output.list_files(directory) == ['a/.d', 'a/c', 'b', 'ü/ö/x y']
  assert output.list_files(str(tmp_path / 'nope')) == []


def test_begin_makes_the_directory(place):
  begin(place / 'deep' / 'er')


def test_begin_takes_an_empty_directory(place):
  place.mkdir()
  begin(place)


@pytest.mark.parametrize('after', range(4))
def test_interrupted_end_leaves_the_mark_or_nothing(unfinished, monkeypatch, after):
  fill(unfinished, 'manifest.json', '.spill/00ff')
  delete, deleted = beam_lib.filesystems.FileSystems.delete, []

  def interrupted(paths):
    if len(deleted) == after:
      raise KeyboardInterrupt
    deleted.extend(paths)
    delete(paths)

  monkeypatch.setattr(beam_lib.filesystems.FileSystems, 'delete', interrupted)
  with pytest.raises(KeyboardInterrupt):
    output.end(str(unfinished))
  assert (unfinished / 'in_progress.json').exists()


def test_dataset_is_refused_unless_overwritten(dataset):
  error = refused(dataset, 'output exists')
  assert '--overwrite' in error.fix
  begin(dataset, overwrite=True)


@pytest.mark.parametrize(
  'name',
  [
    'notes.txt',
    'train/notes.txt',
    'train/part-00000-of-00002.tfrecord.bak',
    'train/part-list.csv',
    'film.partial',
    'train/film.partial',
    'extra/part-00000-of-00002.tfrecord',
    'part-00000-of-00002.tfrecord',
    'manifest.json/x',
  ],
)
@pytest.mark.parametrize('overwrite', [False, True])
@pytest.mark.parametrize('beside', [(), ('in_progress.json', *SHARDS), ('manifest.json', *SHARDS)])
def test_foreign_files_are_never_touched(place, name, overwrite, beside):
  if name.startswith('manifest.json/') and 'manifest.json' in beside:
    pytest.skip('a file cannot be a folder as well')
  fill(place, name, *beside)
  if 'manifest.json' in beside and not overwrite:
    refused(place, 'output exists')
  else:
    error = refused(place, 'output exists and is not a dataset', overwrite=overwrite)
    assert error.found == name


@pytest.mark.parametrize('overwrite', [False, True])
def test_shards_without_mark_are_somebody_elses(place, overwrite):
  refused(fill(place, *SHARDS), 'output exists and is not a dataset', overwrite=overwrite)


def test_unfinished_run_is_repeated(unfinished):
  begin(unfinished)


def test_run_interrupted_after_it_has_published_is_repeated(unfinished):
  fill(unfinished, 'manifest.json', '.spill/00ff')
  refused(
    unfinished,
    'output holds an unfinished conversion with other options',
    request={**REQUEST, 'seed': 1},
  )
  begin(unfinished)


def test_unfinished_run_of_another_request(unfinished):
  other = {**REQUEST, 'seed': 1}
  error = refused(
    unfinished, 'output holds an unfinished conversion with other options', request=other
  )
  assert '--overwrite' in error.fix
  begin(unfinished, request=other, overwrite=True)
  # The mark is now the mark of the other request.
  refused(unfinished, 'output holds an unfinished conversion with other options')


def test_order_of_the_request_does_not_matter(unfinished):
  begin(unfinished, request=dict(reversed(REQUEST.items())))


@pytest.mark.parametrize('after', range(7))
def test_interrupted_clearing_is_repeated(dataset, monkeypatch, after):
  delete, deleted = beam_lib.filesystems.FileSystems.delete, []

  def interrupted(paths):
    if len(deleted) == after:
      raise KeyboardInterrupt
    deleted.extend(paths)
    delete(paths)

  with monkeypatch.context() as patch:
    patch.setattr(beam_lib.filesystems.FileSystems, 'delete', interrupted)
    with pytest.raises(KeyboardInterrupt):
      output.begin(str(dataset), request=REQUEST, overwrite=True)
  # A half-deleted dataset has no manifest.
  assert ('manifest.json' in os.listdir(dataset)) == (after == 0)
  begin(dataset, overwrite=True)


def test_interrupted_before_the_mark_has_its_name(place):
  begin(fill(place, 'in_progress.json.123.partial'))


@pytest.mark.parametrize('name', ['out[1]', 'out*', 'ou?'])
def test_glob_characters_are_refused(tmp_path, name):
  # A pattern would match these directories.
  fill(tmp_path, 'out1/in_progress.json', 'out/in_progress.json')
  with pytest.raises(errors.InputError, match='glob character'):
    output.begin(str(tmp_path / name), request=REQUEST, overwrite=True)
  assert output.list_files(str(tmp_path)) == ['out/in_progress.json', 'out1/in_progress.json']


def test_place_that_cannot_be_written(tmp_path):
  fill(tmp_path, 'file')
  for path in (tmp_path / 'file', tmp_path / 'file' / 'below'):
    with pytest.raises(errors.InputError, match='cannot write') as caught:
      output.begin(str(path), request=REQUEST, overwrite=True)
    assert caught.value.path == str(path)
  assert (tmp_path / 'file').read_text() == 'x'


def test_end_leaves_only_what_is_published(unfinished):
  fill(unfinished, 'manifest.json', 'statistics.json', 'failure.json')
  output.end(str(unfinished))
  assert output.list_files(str(unfinished)) == sorted(['manifest.json', 'statistics.json', *SHARDS])


def test_abandon_removes_all(unfinished):
  assert output.abandon(str(unfinished)) is None
  assert not unfinished.exists()


def test_abandon_returns_the_error_of_a_step(unfinished):
  error = errors.InputError('bad', path='ü', where='w', found=3, expected='4', fix='repair')
  output.report_failure(str(unfinished), errors.InputError('earlier'))
  output.report_failure(str(unfinished), error)
  reported = output.abandon(str(unfinished))
  assert type(reported) is errors.InputError
  assert reported.to_dict() == error.to_dict()
  assert not unfinished.exists()


def test_abandon_empties_a_linked_directory(unfinished, tmp_path):
  link = tmp_path / 'link'
  link.symlink_to(unfinished)
  output.report_failure(str(link), errors.InputError('bad'))
  assert output.abandon(str(link)).reason == 'bad'
  assert output.list_files(str(unfinished)) == []
