"""Tests of tpu_graphs.dataset.directory_validation: each kind of damage is reported with its place.

The directories are checked with `validation.validate`.
"""

import dataclasses
import io
import json
import pathlib
import shutil

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tests import testing
from tests import user_features
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.dataset import records
from tpu_graphs.dataset import schema
from tpu_graphs.dataset import validation
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import npz


def sources(kind):
  """Returns split/stem -> arrays of modules of all sorts.

  The modules have one or several records, one or several ops, and some have no runtimes.
  """
  return {
    'train/one': testing.arrays(kind, n=1, c=1, seed=1, nc=1),
    'train/few': testing.arrays(kind, n=3, c=3, seed=2),
    'train/many-π模': testing.arrays(kind, n=7, c=13, seed=3),
    'train/more': testing.arrays(kind, n=6, c=9, seed=4),
    'train/unmeasured': testing.arrays(
      kind, n=5, c=4, seed=5, config_runtime=np.zeros(4, np.int64)
    ),
    'valid/other': testing.arrays(kind, n=4, c=6, seed=6),
    'test/unlike': testing.arrays(kind, n=9, c=2, seed=7),
  }


@pytest.fixture(scope='session')
def converted(kind, tmp_path_factory):
  return testing.convert_arrays(
    tmp_path_factory.mktemp(f'validation_{kind}'),
    kind,
    sources(kind),
    num_shards=2,
    records=records.RecordOptions(max_configs=4),
  )


@pytest.fixture
def directory(converted, tmp_path):
  """A copy of a sound dataset directory, to be damaged."""
  return pathlib.Path(shutil.copytree(converted, tmp_path / 'data'))


def shards(directory, split='train'):
  return sorted((pathlib.Path(directory) / split).iterdir())


def read(path):
  with open(path, 'rb') as file:
    return list(iter(lambda: records.read_tfrecord(file), None))


def read_all(path):
  """Returns the records of a shard before the first damaged record."""
  found = []
  with open(path, 'rb') as file:
    try:
      while (data := records.read_tfrecord(file)) is not None:
        found.append(data)
    except ValueError:
      pass
  return found


def edit_json(path, edit):
  content = json.loads(path.read_text())
  edit(content)
  path.write_text(json.dumps(content))


def edit_shard(directory, path, **values):
  """Sets fields of a shard in the manifest and keeps the sums over its split right."""
  manifest = directory_lib.read_manifest(str(directory))
  name = path.relative_to(directory).as_posix()
  split = name.partition('/')[0]
  changed = manifest_lib.Split.of(
    dataclasses.replace(shard, **values) if shard.name == name else shard
    for shard in manifest.splits[split].shards
  )
  (directory / 'manifest.json').write_text(
    dataclasses.replace(manifest, splits={**manifest.splits, split: changed}).dumps()
  )


def rewrite(directory, path, data):
  """Writes the records `data` as a shard, with its size and checksum in the manifest."""
  with open(path, 'wb') as file:
    size, checksum = records.write_tfrecords(file, data)
  edit_shard(directory, path, bytes=size, crc32c=f'{checksum:08x}')


def lines(directory):
  """Returns the faults as text, with paths below the directory."""
  report = validation.validate(directory)
  assert not report.warnings
  assert report.is_sound == (not report.faults)
  return [str(fault).removeprefix(f'{directory}/') for fault in report.faults]


def test_sound(directory, kind):
  report = validation.validate(directory)
  assert report.is_sound, report.describe()
  assert report.title == f'dataset directory of {kind}:x'
  sizes = {
    split: sum(path.stat().st_size for path in shards(directory, split))
    for split in module_lib.SPLITS
  }
  columns = ('split', 'modules', 'measured', 'configs', 'records', 'shards', 'bytes')
  assert [tuple(row) for row in report.rows] == [columns] * 3
  assert [tuple(row.values()) for row in report.rows] == [
    ('train', 5, 4, 30, 10, 2, sizes['train']),
    ('valid', 1, 1, 6, 2, 2, sizes['valid']),
    ('test', 1, 1, 2, 1, 1, sizes['test']),
  ]
  assert report.warnings == ()


def test_processes_find_the_same(directory):
  path = shards(directory)[1]
  path.write_bytes(path.read_bytes()[:-10])
  shards(directory, 'valid')[0].unlink()
  reports = [validation.validate(directory, num_workers=workers).to_json() for workers in (1, 2)]
  assert reports[0] == reports[1]
  assert len(reports[0]['faults']) == 3


def test_extra_features_and_padding(tmp_path, kind):
  choices = feature_choices.FeatureChoices(layout_padding=-1, extra=(user_features.degree,))
  directory = testing.convert_arrays(tmp_path, kind, sources(kind), choices=choices)
  assert lines(directory) == []


def test_no_train_split(tmp_path, kind):
  directory = testing.convert_arrays(tmp_path, kind, {'valid/a': testing.arrays(kind)})
  assert lines(directory) == []


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_is_reported_with_its_record(converted, tmp_path_factory, data):
  directory = pathlib.Path(shutil.copytree(converted, tmp_path_factory.mktemp('flip') / 'data'))
  path = data.draw(st.sampled_from(shards(directory)))
  ends = np.cumsum([len(record) + 16 for record in read(path)])
  content = bytearray(path.read_bytes())
  at = data.draw(st.integers(0, len(content) - 1))
  content[at] ^= 1 << data.draw(st.integers(0, 7))
  path.write_bytes(content)
  number = int(np.searchsorted(ends, at, side='right'))
  record, checksum = lines(directory)
  start = 0 if number == 0 else ends[number - 1]
  assert record == (
    f'train/{path.name}: record {number}: byte {start}: damaged record: '
    'expected the checksum of its data; copy or convert the dataset again'
  )
  assert checksum.startswith(f'train/{path.name}: damaged shard: found crc32c ')


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_truncated_shard(converted, tmp_path_factory, data):
  directory = pathlib.Path(shutil.copytree(converted, tmp_path_factory.mktemp('cut') / 'data'))
  path = data.draw(st.sampled_from(shards(directory)))
  ends = [0, *np.cumsum([len(record) + 16 for record in read(path)])]
  size = data.draw(st.sampled_from(ends[:-1]) | st.integers(0, ends[-1] - 1))
  path.write_bytes(path.read_bytes()[:size])
  first, *rest = lines(directory)
  assert first == (
    f'train/{path.name}: shard of wrong size: found {size} bytes, expected {ends[-1]} bytes; '
    'copy or convert the dataset again'
  )
  assert [line.partition(': byte')[0] for line in rest] == (
    [] if size in ends else [f'train/{path.name}: record {int(np.searchsorted(ends, size)) - 1}']
  )


def test_a_longer_shard(directory):
  path = shards(directory)[0]
  with open(path, 'ab') as file:
    file.write(b'surplus')
  size, damage = lines(directory)
  assert size.startswith(f'train/{path.name}: shard of wrong size')
  assert damage.startswith(f'train/{path.name}: record {len(read_all(path))}: byte ')


def module(kind, name, **arrays):
  """Returns a module of four ops and four configs."""
  file = io.BytesIO()
  np.savez(file, **testing.arrays(kind, n=4, c=4, **arrays))
  return npz.read(file, path=f'{name}.npz')


def spoiled(kind, **features):
  """Returns a record with features that no `Module` may have; None removes a feature."""
  example = tf.train.Example.FromString(records.encode_whole(module(kind, 'wrong')))
  for name, values in features.items():
    feature = example.features.feature[name]
    if values is None:
      del example.features.feature[name]
    elif feature.WhichOneof('kind') == 'bytes_list':
      feature.bytes_list.value[:] = [values]
    else:
      getattr(feature, feature.WhichOneof('kind')).value[:] = np.ravel(values).tolist()
  return example.SerializeToString()


BOTH = module_lib.KINDS


@pytest.mark.parametrize(
  ('kinds', 'features', 'message'),
  [
    (
      BOTH,
      {'edges/operand.#target': [1, 4, 2]},
      'edge_index[1, 0]: value out of range: found 4, expected 0 to 3',
    ),
    (
      BOTH,
      {'edges/operand.#source': [0, 0, -1]},
      'edge_index[2, 1]: value out of range: found -1, expected 0 to 3',
    ),
    (
      BOTH,
      {'nodes/op.opcode': [1, 121, 2, 3]},
      'node_opcode[1]: value out of range: found 121, expected 0 to 120',
    ),
    (
      BOTH,
      {'nodes/op.feat': np.full((4, 140), np.nan)},
      'node_feat[0, 0]: value not finite: found nan, expected a finite float32',
    ),
    (
      ('tile',),
      {'context/config_feat': np.full((4, 24), -np.inf)},
      'config_feat[0, 0]: value not finite: found -inf, expected a finite float32',
    ),
    (
      ('layout',),
      {'edges/configures.#target': [0, 7]},
      'node_config_ids[1]: value out of range: found 7, expected 0 to 3',
    ),
    (
      ('layout',),
      {'edges/configures.#source': [1, 0]},
      'damaged record: found configurable ops that are not in order',
    ),
    (
      BOTH,
      {'nodes/op.computation': [0, 0, -5, 0]},
      'computation[2]: value out of range: found -5, expected >= 0',
    ),
    (
      BOTH,
      {'context/config_id': [1, 2, 2, 3]},
      'config_id: repeated value: expected distinct positions',
    ),
    (
      BOTH,
      {'context/config_id': [1, 2, -2, 3]},
      'config_id[2]: value out of range: found -2, expected >= 0',
    ),
    (
      BOTH,
      {'context/config_runtime': [5, 5, 1, 5]},
      'config_runtime: time too short to be a measurement: found 1 ns, expected >= 2 ns, or -1',
    ),
    (
      ('tile',),
      {'context/config_runtime_normalizer': [5, 0, 5, 5]},
      'config_runtime_normalizers[1]: normalizer does not fit the runtime: '
      'found 0 beside a runtime of 2000',
    ),
    (BOTH, {'nodes/op.feat': np.zeros((3, 140))}, 'damaged record: found cannot reshape'),
    (BOTH, {'context/config_id': [1, 2, 3]}, 'config_id: wrong shape: found [3], expected [4]'),
    (
      BOTH,
      {'context/config_id.d1': [3]},
      'damaged record: found context/config_id.d1 [3] instead of [4]',
    ),
    (BOTH, {'nodes/op.#size': [5]}, 'damaged record: found nodes/op.#size [5] instead of [4]'),
    (
      ('layout',),
      {'context/node_config_feat': bytes(3 * 2 * 18)},
      'damaged record: found cannot reshape',
    ),
    (('tile',), {'context/config_feat': np.zeros((3, 24))}, 'damaged record: found cannot reshape'),
    (BOTH, {'nodes/op.feat': None}, 'nodes/op.feat: feature missing in a record'),
    (BOTH, {'context/module_id': b'\xff'}, 'damaged record: found '),
  ],
)
def test_a_wrong_record_with_right_checksums(directory, kind, kinds, features, message):
  if kind not in kinds:
    pytest.skip('a feature of the other kind')
  (path,) = shards(directory, 'test')
  good = [records.encode_whole(module(kind, name)) for name in ('a', 'b')]
  rewrite(directory, path, [good[0], spoiled(kind, **features), good[1]])
  (line,) = lines(directory)
  name = '' if 'context/module_id' in features else ' (wrong)'
  assert line.startswith(f'test/{path.name}: record 1{name}: {message}')


@pytest.mark.parametrize(
  ('data', 'message'),
  [
    (b'', 'feature missing in a record'),
    (b'\xff' * 20, 'damaged record'),
    (b'{"a": 1}', 'damaged record'),
  ],
)
def test_data_that_is_not_a_record(directory, data, message):
  (path,) = shards(directory, 'test')
  rewrite(directory, path, [data, *read(path)])
  (line,) = lines(directory)
  assert line.startswith(f'test/{path.name}: record 0: ')
  assert message in line


def test_a_record_of_the_other_kind(directory, kind):
  other = next(name for name in module_lib.KINDS if name != kind)
  (path,) = shards(directory, 'test')
  rewrite(directory, path, [*read(path), records.encode_whole(module(other, 'alien'))])
  assert lines(directory) == [
    f'test/{path.name}: record 1 (alien): record of the other kind: found a {other} module, '
    f'expected a {kind} module; copy or convert the dataset again'
  ]


def test_every_wrong_record_is_reported(directory, kind):
  (path,) = shards(directory, 'test')
  wrong = spoiled(kind, **{'context/config_id': [0, 0, 0, 0]})
  rewrite(directory, path, [wrong, *read(path), wrong, wrong])
  assert [line.split(': ')[1] for line in lines(directory)] == [
    f'record {i} (wrong)' for i in (0, 2, 3)
  ]


def test_a_shard_that_is_sound_but_not_the_one_that_was_written(directory):
  path = shards(directory)[0]
  first, second, *rest = read(path)
  with open(path, 'wb') as file:
    records.write_tfrecords(file, [second, first, *rest])
  (line,) = lines(directory)
  assert line.startswith(f'train/{path.name}: damaged shard: found crc32c ')


def test_a_config_that_occurs_twice(directory):
  """The record occurs again in another shard; each record by itself is right."""
  source, path = shards(directory)
  several = next(data for data in read(source) if records.decode_module_id(data) == 'many-π模')
  number, ids = len(read(path)), records.decode(several).config_id
  rewrite(directory, path, [*read(path), several])
  assert lines(directory)[-1] == (
    f'train/{path.name}: record {number} (many-π模): config occurs twice: '
    f'found config_id {min(ids)} again, expected each config of a module once'
  )


def test_records_of_a_module_with_different_graphs(directory, kind):
  (path,) = shards(directory, 'test')
  parts = [
    module(kind, 'same').select_configs([0, 1]),
    module(kind, 'same', seed=1).select_configs([2, 3]),
  ]
  rewrite(directory, path, [records.encode_whole(part) for part in parts])
  assert lines(directory)[-1] == (
    f'test/{path.name}: record 1 (same): records of one module with different graphs: '
    f'found another graph than in test/{path.name}, record 0, expected the same graph'
  )


@pytest.mark.parametrize(
  ('field', 'split'),
  [
    ('modules', True),
    ('measured', True),
    ('without_configs', True),
    ('records', False),
    ('configs', False),
  ],
)
def test_a_wrong_count(directory, field, split):
  path = shards(directory, 'test')[0]
  right = getattr(directory_lib.read_manifest(str(directory)).splits['test'], field)
  edit_shard(directory, path, **{field: right + 3})
  place = 'test' if split else f'test/{path.name}'
  assert lines(directory) == [
    f'{place}: {field}: count differs from manifest.json: found {right}, '
    f'expected {right + 3}; copy or convert the dataset again'
  ]


@pytest.mark.parametrize('sizes', ['max_sizes', 'total_sizes'])
@pytest.mark.parametrize('name', ['ops', 'edges', 'config_ops', 'configs'])
def test_a_wrong_size(directory, sizes, name):
  path = shards(directory, 'test')[0]
  right = getattr(directory_lib.read_manifest(str(directory)).splits['test'], sizes)
  edit_shard(directory, path, **{sizes: {**right, name: right[name] + 1}})
  (line,) = lines(directory)
  assert line.startswith(
    f'test/{path.name}: {sizes} of {name}: count differs from manifest.json: '
    f'found {right[name]}, expected {right[name] + 1};'
  )


def test_a_split_that_is_not_the_sum_of_its_shards(directory):
  edit_json(
    directory / 'manifest.json', lambda content: content['splits']['train'].update(configs=31)
  )
  assert lines(directory) == [
    'manifest.json: damaged manifest: found split train is not the sum of its shards; '
    'convert the data again'
  ]


@pytest.mark.parametrize('content', [None, '', '{', '{}', '[]', 'null', '{"format_version": 99}'])
def test_a_missing_or_damaged_manifest(directory, content):
  path = directory / 'manifest.json'
  path.unlink() if content is None else path.write_text(content)
  report = validation.validate(directory)
  assert (len(report.faults), report.rows) == (1, ())
  assert report.faults[0].path == str(directory if content is None else path)


def test_all_faults_of_files_are_reported(directory):
  first, second = shards(directory)
  first.unlink()
  second.write_bytes(second.read_bytes() + b'x')
  (directory / 'valid' / 'part-00009-of-00009.tfrecord').write_bytes(b'')
  for name in ('schema.pbtxt', 'statistics.json', 'rejected.jsonl'):
    (directory / name).unlink()
  found = [': '.join(line.split(': ')[:2]).partition(';')[0] for line in lines(directory)]
  assert found == [
    f'train/{first.name}: shard missing',
    f'train/{second.name}: shard of wrong size',
    'valid/part-00009-of-00009.tfrecord: extra file',
    'statistics.json: file missing',
    'schema.pbtxt: file missing',
    'rejected.jsonl: file missing',
    f'train/{second.name}: record {len(read_all(second))}',
  ]


def change(content, *keys, value=None, by=0.0):
  """Sets the value at `keys`, or adds `by` to it."""
  for key in keys[:-1]:
    content = content[key]
  content[keys[-1]] = content[keys[-1]] + by if value is None else value


@pytest.mark.parametrize(
  'keys',
  [
    ('count',),
    ('min', 3),
    ('max', 3),
    ('mean', 3),
    ('std', 3),
    ('log', 'min', 3),
    ('log', 'max', 3),
    ('log', 'mean', 3),
    ('log', 'std', 3),
  ],
)
@pytest.mark.parametrize('feature', ['feat', 'own'])
def test_a_wrong_statistic(directory, kind, feature, keys):
  name = (
    {'tile': 'config_feat', 'layout': 'node_config_feat'}[kind] if feature == 'own' else feature
  )
  path = directory / 'statistics.json'
  edit_json(path, lambda content: change(content, 'features', name, *keys, by=1))
  where = ' '.join(key for key in keys if key != 3) + ('[3]' if 3 in keys else '')
  (line,) = lines(directory)
  assert line.startswith(
    f'statistics.json: {name}: {where}: statistics differ from the records: found '
  )


def test_rounding_is_not_a_difference(directory):
  def round_all(content):
    for columns in content['features'].values():
      for part in (columns, columns['log']):
        for key in ('min', 'max', 'mean', 'std'):
          part[key] = [value * (1 + 1e-9) for value in part[key]]

  edit_json(directory / 'statistics.json', round_all)
  assert lines(directory) == []


@pytest.mark.parametrize(
  ('keys', 'value', 'message'),
  [
    (
      ('feat', 'constant'),
      [0, 1],
      'feat: constant: statistics differ from the records: found [0, 1], expected [',
    ),
    (
      ('feat', 'min'),
      [1.0],
      'feat: min: statistics differ from the records: found another number of columns',
    ),
    (('feat', 'min'), 'x', 'feat: min: statistics differ'),
    (('feat', 'max'), None, 'feat: max: statistics differ'),
    (
      ('feat', 'min'),
      [float('nan')] * 140,
      'feat: min[0]: statistics differ from the records: found nan',
    ),
    (('feat', 'log', 'mean'), [1.0], 'damaged statistics'),
    (('feat',), {}, 'damaged statistics'),
    (('other',), {}, 'damaged statistics'),
  ],
)
def test_damaged_statistics(directory, keys, value, message):
  edit_json(
    directory / 'statistics.json',
    lambda content: change(content['features'], *keys, value=value or {}),
  )
  (line,) = lines(directory)
  assert line.startswith(f'statistics.json: {message}')


@pytest.mark.parametrize('present', ['feat', 'none'])
def test_features_that_are_missing_in_statistics(directory, kind, present):
  path = directory / 'statistics.json'
  edit_json(
    path,
    lambda content: content.update(
      features={name: columns for name, columns in content['features'].items() if name == present}
    ),
  )
  own = {'tile': 'config_feat', 'layout': 'node_config_feat'}[kind]
  assert lines(directory) == [
    f'statistics.json: {name}: feature missing; copy or convert the dataset again'
    for name in sorted({'feat', own} - {present})
  ]


def test_comments_of_the_schema_do_not_matter(directory):
  path = directory / 'schema.pbtxt'
  path.write_text('# Comment of another version.\n' + path.read_text())
  assert lines(directory) == []


def test_another_schema(directory, kind):
  path = directory / 'schema.pbtxt'
  path.write_text(schema.text(next(name for name in module_lib.KINDS if name != kind)))
  (line,) = lines(directory)
  assert line.startswith('schema.pbtxt: schema does not match the records: found ')


def test_a_damaged_schema(directory):
  (directory / 'schema.pbtxt').write_text('context {')
  (line,) = lines(directory)
  assert line.startswith('schema.pbtxt: damaged schema: found ')


def test_rejected_inputs(directory):
  path = directory / 'rejected.jsonl'
  # Some programs take these characters for line ends.
  row = {'reason': 'empty file', 'path': 'a\u2028b\x85c.npz'}
  path.write_text(2 * (json.dumps(row, ensure_ascii=False) + '\n'))
  assert lines(directory) == [
    'rejected.jsonl: empty file: count differs from manifest.json: found 2, expected 0; '
    'copy or convert the dataset again'
  ]
  edit_json(
    directory / 'manifest.json', lambda content: content.update(rejected_inputs={'empty file': 2})
  )
  assert lines(directory) == []
  edit_json(
    directory / 'manifest.json',
    lambda content: content.update(rejected_inputs={'a': 1, 'empty file': 2}),
  )
  assert [line.split(': ')[1] for line in lines(directory)] == ['a']


@pytest.mark.parametrize('content', ['{', '[]', '3', '{"path": "a"}'])
def test_a_damaged_list_of_rejected_inputs(directory, content):
  (directory / 'rejected.jsonl').write_text(content + '\n')
  (line,) = lines(directory)
  assert line.startswith('rejected.jsonl: damaged list')


def test_equal_graphs_in_two_splits_are_a_warning(tmp_path, kind):
  same = testing.arrays(kind, seed=1)
  directory = testing.convert_arrays(
    tmp_path,
    kind,
    {
      'train/a': same,
      'train/b': testing.arrays(kind, n=5, seed=2),
      'valid/c': same,
      'valid/d': same,
      'valid/e': testing.arrays(kind, n=6, seed=3),
      'test/b': testing.arrays(kind, n=7, seed=4),
    },
  )
  report = validation.validate(directory)
  assert report.is_sound
  assert [str(warning) for warning in report.warnings] == [
    f'{directory}: graphs of valid occur in train: found 2 of 3 modules, such as '
    f'{min(("c", "d"), key=report_order(directory).index)} like a, expected graphs of its own'
  ]


def report_order(directory):
  """Returns the names of the modules of the valid split in the order of their records."""
  return [
    records.decode_module_id(data) for path in shards(directory, 'valid') for data in read(path)
  ]
