"""Tests of tpu_graphs.dataset: validation of trees (tree_validation), and reports (checks).

The tests of checks include work in several processes.
"""

import io
import os
import shutil

import numpy as np
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs.dataset import checks
from tpu_graphs.dataset import validation

CORNER = testing.GOLDEN / 'corner'


def write(folder, files):
  """Writes name -> arrays of an npz file, bytes, or a file to copy."""
  for name, content in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
      np.savez(path, **content)
    elif isinstance(content, bytes):
      path.write_bytes(content)
    else:
      shutil.copy(content, path)


def row(folder, **counts):
  """Returns the row of a report; counts that are not given are 0."""
  columns = (
    'files',
    'faults',
    'modules',
    'skipped',
    'measured',
    'configs',
    'duplicates',
    'dropped runs',
  )
  return {'folder': folder, **{name: counts.get(name.replace(' ', '_'), 0) for name in columns}}


def texts(path, errors_found):
  """Returns the errors as text, with paths below `path`."""
  return [str(error).removeprefix(f'{path}/') for error in errors_found]


def repeated(kind, **over):
  """Returns arrays of seven configs; the last three are equal to the first."""
  arrays = testing.arrays(kind, c=7, **over)
  name = {'tile': 'config_feat', 'layout': 'node_config_feat'}[kind]
  arrays[name][4:] = arrays[name][0]
  return arrays


def test_sound_tree(tmp_path, kind):
  write(
    tmp_path,
    {
      f'{kind}/x/train/a.npz': testing.arrays(kind, n=4, c=6),
      f'{kind}/x/train/b.npz': repeated(kind, n=5),
      f'{kind}/x/valid/c.npz': testing.arrays(kind, n=6, c=3, config_runtime=np.array([0, 1, 5])),
      f'{kind}/x/test/d.npz': testing.arrays(kind, n=7, c=2, config_runtime=np.zeros(2, np.int64)),
      'README.txt': b'other',
      f'{kind}/x/train/.complete.json': b'hidden',
      '.hidden/e.npz': b'hidden',
    },
  )
  report = validation.validate(tmp_path)
  assert report.is_sound
  assert report.title == '4 raw files, 1 other not read'
  assert list(report.rows) == [
    row(f'{kind}/x/test', files=1, modules=1, configs=2),
    row(f'{kind}/x/train', files=2, modules=2, measured=2, configs=13, duplicates=3),
    row(f'{kind}/x/valid', files=1, modules=1, measured=1, configs=1, dropped_runs=2),
  ]
  assert report.warnings == ()


def test_every_bad_file_is_reported(tmp_path):
  file = io.BytesIO()
  np.savez(file, **testing.tile_arrays())
  write(
    tmp_path,
    {
      'a.npz': testing.tile_arrays(),
      'b.npz': b'<html>404</html>',
      'c.npz': file.getvalue()[:-100],
      'd.npz': b'',
      'e.npz': testing.tile_arrays(node_opcode=None),
      'f.npz': testing.tile_arrays(edge_index=np.array([[9, 0]])),
      'g.npz': testing.tile_arrays(seed=1),
      'h.pb': b'',
      'i.pb': CORNER / 'self_edge.pb',
      'j.npz': testing.tile_arrays(node_feat=np.full((4, 140), np.nan, np.float32)),
    },
  )
  report = validation.validate(tmp_path)
  found = texts(tmp_path, report.faults)
  expected = [
    'b.npz: not an npz file',
    'c.npz: damaged or truncated npz file',
    'd.npz: empty file',
    'e.npz: node_opcode: array missing',
    'f.npz: edge_index[0, 0]: value out of range',
    'h.pb: ',
    'i.pb: ',
    'j.npz: node_feat[0, 0]: value not finite',
  ]
  assert len(found) == len(expected)
  for line, start in zip(found, expected, strict=True):
    assert line.startswith(start)
  assert list(report.rows) == [row('.', files=10, faults=8, modules=2, measured=2, configs=12)]


def test_protobufs(tmp_path):
  write(tmp_path, {'train/a.pb': CORNER / 'tile_sel.pb'})
  report = validation.validate(tmp_path)
  extraction = hlo.from_file(CORNER / 'tile_sel.pb', kind='tile')
  assert report.is_sound
  (found,) = report.rows
  assert (found['modules'], found['measured']) == (3, 3)
  assert found['configs'] == sum(module.num_configs for module in extraction)


def test_a_name_that_occurs_twice_in_a_folder(tmp_path):
  for folder in ('a', 'b'):
    write(tmp_path, {f'{folder}/1.pb': CORNER / 'graph.pb'})
  assert validation.validate(tmp_path).is_sound
  write(tmp_path, {'b/2.pb': CORNER / 'graph.pb'})
  report = validation.validate(tmp_path)
  [module] = hlo.from_file(CORNER / 'graph.pb', kind='layout')
  assert texts(tmp_path, report.faults) == [
    f'b/2.pb: {module.module_id}: module_id occurs twice: found also in {tmp_path}/b/1.pb, '
    'expected distinct names in a folder; rename one'
  ]


def test_a_file_of_another_kind_in_a_folder(tmp_path):
  write(
    tmp_path,
    {
      'x/a.npz': testing.tile_arrays(),
      'x/b.npz': testing.layout_arrays(seed=1),
      'x/c.npz': testing.tile_arrays(seed=2),
      'y/a.npz': testing.layout_arrays(),
    },
  )
  assert texts(tmp_path, validation.validate(tmp_path).faults) == [
    'x/b.npz: file of another kind than the folder: found a layout file, '
    f'expected a tile file like {tmp_path}/x/a.npz'
  ]


def test_equal_graphs_in_two_splits_are_a_warning(tmp_path, kind):
  same, other = testing.arrays(kind, seed=1), testing.arrays(kind, n=5, seed=2)
  write(
    tmp_path,
    {
      'x/train/a.npz': same,
      'x/train/b.npz': other,
      'x/valid/c.npz': same,
      'x/valid/d.npz': same,
      'x/valid/e.npz': testing.arrays(kind, n=6),
      'x/test/f.npz': other,
      'y/test/g.npz': same,
      'y/other/h.npz': same,
    },
  )
  report = validation.validate(tmp_path)
  assert report.is_sound
  assert texts(tmp_path, report.warnings) == [
    'x: graphs of valid occur in train: found 2 of 3 modules, such as c like a, '
    'expected graphs of its own',
    'x: graphs of test occur in train: found 1 of 1 module, such as f like b, '
    'expected graphs of its own',
  ]


def test_an_xla_dump_is_read_as_convert_reads_it(tmp_path):
  program = testing.GOLDEN / 'modules'
  first, second = sorted(program.glob('*.pb'))[:2]
  start = tmp_path / 'dump' / 'module_0001.jit_f'
  write(
    tmp_path,
    {
      f'dump/{start.name}.cpu_after_optimizations.hlo.pb': first,
      f'dump/{start.name}.before_optimizations.hlo.pb': second,
      f'dump/{start.name}.cpu_after_optimizations-memory-usage-report.pb': b'no program',
      'before/module_0001.jit_f.before_optimizations.hlo.pb': second,
    },
  )
  report = validation.validate(tmp_path)
  assert report.is_sound, report.describe()
  assert report.title == '2 raw files, 2 others not read'
  assert [found['folder'] for found in report.rows] == ['before', 'dump']


def test_one_file(tmp_path, monkeypatch):
  write(tmp_path, {'a.npz': testing.tile_arrays(), 'b.npz': b'bad'})
  monkeypatch.chdir(tmp_path)
  assert list(validation.validate('a.npz').rows) == [
    row('.', files=1, modules=1, measured=1, configs=6)
  ]
  assert not validation.validate(tmp_path / 'b.npz').is_sound


@pytest.mark.parametrize(
  ('files', 'found'),
  [
    ({}, '0 other files'),
    ({'a.txt': b'x', 'b/c.md': b'x'}, '2 other files'),
    ({'.a.npz': b'x'}, '0 other files'),
  ],
)
def test_nothing_to_check(tmp_path, files, found):
  write(tmp_path, files)
  with pytest.raises(errors.InputError) as caught:
    validation.validate(tmp_path)
  assert str(caught.value) == (
    f'{tmp_path}: nothing to check: found {found}, expected files named *.npz or *.pb, or a '
    'dataset directory'
  )


def test_a_folder_that_is_missing(tmp_path):
  with pytest.raises(errors.InputError, match='missing: nothing to check: found nothing'):
    validation.validate(tmp_path / 'missing')


def test_processes_find_the_same(tmp_path, kind):
  write(
    tmp_path,
    {f'train/{i}.npz': testing.arrays(kind, n=3 + i) if i % 3 else b'bad' for i in range(9)},
  )
  reports = [validation.validate(tmp_path, num_workers=workers).to_json() for workers in (1, 2)]
  assert reports[0] == reports[1]
  assert len(reports[0]['faults']) == 3


def in_processes(function, tasks, **options):
  """Calls `checks.in_processes` with two processes and tasks of 1 GiB."""
  return checks.in_processes(
    function,
    tasks,
    [1 << 30] * len(tasks),
    **{'num_workers': 2, 'name': 'x', 'progress': None, **options},
  )


def test_results_come_in_order():
  assert list(in_processes(abs, range(-20, 20))) == [abs(i) for i in range(-20, 20)]


def test_one_task_needs_no_process():
  # A lambda cannot be sent to another process.
  assert list(in_processes(lambda task: os.getpid(), [0])) == [os.getpid()]


def test_small_work_needs_no_process():
  results = checks.in_processes(
    lambda task: os.getpid(), [0, 1], [5, 5], num_workers=None, name='x', progress=None
  )
  assert list(results) == [os.getpid()] * 2


def test_a_process_that_dies_is_reported():
  with pytest.raises(errors.InputError, match=r'a worker process died: .*; give --num_workers=1'):
    list(in_processes(os._exit, [1, 1]))


def test_an_exception_comes_through():
  with pytest.raises(ValueError, match='invalid literal'):
    list(in_processes(int, ['1', 'x', '2']))


class Recorder:
  """A stand-in for `terminal.Progress` that records its calls."""

  def __init__(self):
    self.calls = []

  def __getattr__(self, name):
    return lambda *args: self.calls.append((name, *args))


def test_progress_counts_bytes():
  progress = Recorder()
  results = checks.in_processes(str, [1, 2], [10, 5], num_workers=1, name='x', progress=progress)
  assert list(results) == ['1', '2']
  assert progress.calls == [('start', 'x', 15, 0), ('advance', 10), ('advance', 15), ('end', 15)]


def test_describe():
  fault = errors.InputError('wrong\nthing', path='a')
  rows = ({'split': 'train', 'modules': 1234}, {'split': 'test', 'modules': 1})
  report = checks.Report('data', 'some data', rows, (fault, fault), (errors.InputError('odd'),))
  assert report.describe().splitlines() == [
    'data: some data',
    '  split  modules',
    '  train    1,234',
    '  test         1',
    '  fault: a: wrong thing',
    '  fault: a: wrong thing',
    '  warning: odd',
    '  2 faults, 1 warning',
  ]
  assert checks.Report('data', 'some data', (), ()).describe() == 'data: some data\n  sound'


def test_to_json():
  report = checks.Report(
    'data', 'some data', ({'split': 'train'},), (errors.InputError('wrong', path='a'),)
  )
  parts = {
    'reason': 'wrong',
    'path': 'a',
    'where': None,
    'found': None,
    'expected': None,
    'fix': None,
  }
  assert report.to_json() == {
    'path': 'data',
    'title': 'some data',
    'sound': False,
    'rows': [{'split': 'train'}],
    'faults': [parts],
    'warnings': [],
  }


@testing.needs_shared
def test_real_files():
  report = validation.validate(testing.SHARED / 'data' / 'npz')
  assert report.is_sound, report.describe()
  assert [(found['folder'], found['configs'], found['duplicates']) for found in report.rows] == [
    ('layout/xla/default/test', 1000, 6),
    ('layout/xla/default/train', 1159, 478),
    ('layout/xla/random/test', 1000, 0),
    ('layout/xla/random/valid', 481, 39),
    ('tile/xla/test', 25, 24),
    ('tile/xla/train', 2, 1),
    ('tile/xla/valid', 9, 1),
  ]
