"""Tests of pipelines.convert: what Beam writes equals what the library makes in memory, and what it refuses."""

import collections
import itertools
import json
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys

import apache_beam as beam
from apache_beam.internal import pickler
from apache_beam.runners.portability.fn_api_runner import fn_runner
import google_crc32c
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from pipelines import convert
from pipelines import convert_steps
from pipelines import output
from pipelines import spill
from tests import testing
from tpu_graphs import errors
from tpu_graphs import module as module_lib
from tpu_graphs import npz
from tpu_graphs import readers
from tpu_graphs import records
from tpu_graphs import schema
from tpu_graphs import statistics

ROOT = testing.GOLDEN.parents[1]
TWO_PROCESSES = ('--direct_running_mode=multi_processing', '--direct_num_workers=2')


def options(collection='tile:xla', **kwargs):
  own = {name: kwargs.pop(name) for name in ('split', 'num_shards', 'on_error') if name in kwargs}
  return convert.ConvertOptions(collection=collection, **own, records=records.RecordOptions(**kwargs))


def save(path, arrays):
  path.parent.mkdir(parents=True, exist_ok=True)
  np.savez(path, **arrays)
  return str(path)


def save_tiles(folder, number, **kwargs):
  """Tile files whose graphs, features and numbers of configs all differ."""
  return [save(folder / f'm{i}.npz', testing.tile_arrays(n=2 + i % 7, c=1 + i % 5, seed=i, **kwargs))
          for i in range(number)]


def run(inputs, directory, opts, **kwargs):
  inputs = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
  return convert.convert(inputs=[str(name) for name in inputs], directory=str(directory), options=opts, **kwargs)


def tree(directory):
  """Name -> content of all files."""
  return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob('*') if path.is_file()}


def read_shard(path):
  """The records of a TFRecord file, by the format's description: length, its crc, data, its crc."""
  found, data = [], path.read_bytes()
  while data:
    (length,) = struct.unpack('<Q', data[:8])
    found.append(data[12:12 + length])
    data = data[16 + length:]
  return found


def read_split(directory, split):
  return [record for path in sorted(directory.glob(f'{split}/*')) for record in read_shard(path)]


def read_all(directory):
  """Split -> multiset of records."""
  splits = {split: collections.Counter(read_split(directory, split)) for split in ('train', 'valid', 'test')}
  return {split: found for split, found in splits.items() if found}


def in_memory(paths, opts):
  """What `read_all` should give, and the merged statistics of train."""
  splits, total = collections.defaultdict(collections.Counter), None
  for path in sorted(paths):
    for module in readers.from_file(path, kind=opts.kind).modules:
      split = convert_steps.split_of(module, path, opts)
      splits[split].update(record.data for record in records.encode(module, opts.records))
      if split == 'train':
        own = statistics.Statistics.of(module)
        total = own if total is None else total.merge(own)
  return dict(splits), total


def assert_close(found, expected):
  if isinstance(expected, dict):
    assert found.keys() == expected.keys()
    for name in expected:
      assert_close(found[name], expected[name])
  else:
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def parse(record):
  """Feature -> list of values."""
  import tensorflow as tf
  example = tf.train.Example.FromString(record)
  return {name: list(getattr(feature, feature.WhichOneof('kind')).value)
          for name, feature in example.features.feature.items()}


# The real files.


@testing.needs_shared
def test_tile_protobuf(tmp_path):
  manifest = run(testing.SHARED / 'data/op_tuning_data.pb', tmp_path / 'o', options())
  assert sum(split.modules for split in manifest.splits.values()) == 15
  assert sum(split.configs for split in manifest.splits.values()) == 752
  assert sum(manifest.dropped_runs.values()) == 2
  found = [record for split in manifest.splits for record in read_split(tmp_path / 'o', split)]
  parsed = [parse(record) for record in found]
  assert len({features['context/module_id'][0] for features in parsed}) == 15
  assert sum(len(features['context/config_runtime']) for features in parsed) == 752
  assert all(min(features['context/config_runtime']) >= 2 for features in parsed)
  assert all(min(features['context/config_runtime_normalizer']) >= 1 for features in parsed)
  text = convert.describe(manifest)
  assert all(f'{count} run{"s" if count > 1 else ""} dropped: {reason}' in text
             for reason, count in manifest.dropped_runs.items())


@testing.needs_shared
def test_layout_protobuf(tmp_path):
  manifest = run(testing.SHARED / 'data/module_tuning_data_layout.pb', tmp_path / 'o', options('layout:xla:random'))
  (split,) = manifest.splits.values()
  assert (split.modules, split.records, split.configs) == (1, 1, 112)
  sizes = {'ops': 3163, 'edges': 5112, 'config_ops': 62, 'configs': 112}
  assert split.total_sizes == split.max_sizes == sizes
  assert sum(manifest.dropped_runs.values()) == 10
  ((found, _),) = next(iter(read_all(tmp_path / 'o').values())).items()
  features = parse(found)
  assert features['nodes/op.#size'] == [3163]
  assert features['edges/operand.#size'] == [5112] == [len(features['edges/operand.#source'])]
  assert features['nodes/config_op.#size'] == [62] == [len(features['edges/configures.#target'])]
  assert len(features['context/config_runtime']) == 112
  assert len(features['context/node_config_feat'][0]) == 112 * 62 * 18


REAL = {'tile:xla': ('train', 'valid', 'test'), 'layout:xla:default': ('train', 'test'),
        'layout:xla:random': ('valid', 'test')}


@testing.needs_shared
@pytest.mark.slow
@pytest.mark.parametrize('collection', list(REAL))
def test_real_npz_files(tmp_path, collection):
  root = testing.SHARED / 'data/npz'
  opts = options(collection, num_shards=1)
  manifest = run(root, tmp_path / 'o', opts)
  folder = root.joinpath(*collection.split(':'))
  paths = [str(path) for path in folder.rglob('*.npz')]
  expected, total = in_memory(paths, opts)
  assert tuple(manifest.splits) == REAL[collection] == tuple(sorted(expected, key=list(REAL['tile:xla']).index))
  assert read_all(tmp_path / 'o') == expected
  if total is not None:
    assert_close(json.loads((tmp_path / 'o/statistics.json').read_text()), total.to_json())
  for split in manifest.splits:
    runtimes = collections.defaultdict(dict)
    for record in read_split(tmp_path / 'o', split):
      features = parse(record)
      name = features['context/module_id'][0].decode()
      runtimes[name].update(zip(features['context/config_id'], features['context/config_runtime'], strict=True))
    for path in (folder / split).glob('*.npz'):
      raw = np.load(path)['config_runtime']
      found = runtimes.pop(path.stem)
      assert sorted(found) == list(range(len(raw)))
      expected_runtimes = raw.astype(np.int64) if split != 'test' else np.full(len(raw), -1)
      assert np.array_equal([found[i] for i in range(len(raw))], expected_runtimes)
      if path.stem == 'unet3d':
        assert max(found.values()) > np.iinfo(np.int32).max
    assert not runtimes
    assert manifest.splits[split].measured == (0 if split == 'test' else manifest.splits[split].modules)


# In memory == Beam.


@pytest.fixture(scope='module')
def tiles(tmp_path_factory):
  """A folder with 40 tile files."""
  folder = tmp_path_factory.mktemp('tiles')
  save_tiles(folder, 40)
  return folder


OPTIONS = options(num_shards=3, max_configs=2)


@pytest.fixture(scope='module')
def converted(tiles, tmp_path_factory):
  """The folder `tiles` as a dataset, by one process."""
  directory = tmp_path_factory.mktemp('converted') / 'o'
  manifest = run(tiles, directory, OPTIONS)
  return directory, manifest


def test_records_equal_those_in_memory(tiles, converted):
  expected, _ = in_memory(map(str, tiles.iterdir()), OPTIONS)
  assert set(expected) == {'train', 'valid', 'test'}
  assert read_all(converted[0]) == expected


def test_statistics_equal_those_in_memory(tiles, converted):
  _, total = in_memory(map(str, tiles.iterdir()), OPTIONS)
  assert_close(json.loads((converted[0] / 'statistics.json').read_text()), total.to_json())


def test_layout_equals_in_memory(tmp_path):
  paths = [save(tmp_path / f'in/m{i}.npz', testing.layout_arrays(n=3 + i, c=1 + i, nc=i % 3, seed=i)) for i in range(6)]
  opts = options('layout:own', split='train', num_shards=2, max_configs=3)
  run(tmp_path / 'in', tmp_path / 'o', opts)
  expected, total = in_memory(paths, opts)
  assert read_all(tmp_path / 'o') == expected
  assert_close(json.loads((tmp_path / 'o/statistics.json').read_text()), total.to_json())


def test_no_train_split_has_no_statistics(tiles, tmp_path):
  run(tiles, tmp_path / 'o', options(split='test'))
  assert statistics.parse(json.loads((tmp_path / 'o/statistics.json').read_text())) == {}


def test_manifest_tells_the_truth(tiles, converted):
  directory, manifest = converted
  assert {name for name in tree(directory) if '/' not in name} == {
      'manifest.json', 'schema.pbtxt', 'statistics.json', 'rejected.jsonl'}
  assert (directory / 'schema.pbtxt').read_text() == schema.text('tile')
  assert (directory / 'rejected.jsonl').read_bytes() == b''
  assert {name for name in tree(directory) if '/' in name} == {
      shard.name for split in manifest.splits.values() for shard in split.shards}
  modules = [npz.load(path) for path in tiles.iterdir()]
  assert sum(split.modules for split in manifest.splits.values()) == len(modules) == 40
  assert sum(split.measured for split in manifest.splits.values()) == 40
  assert sum(split.configs for split in manifest.splits.values()) == sum(module.num_configs for module in modules)
  for split in manifest.splits.values():
    for shard in split.shards:
      data = (directory / shard.name).read_bytes()
      found = [parse(record) for record in read_shard(directory / shard.name)]
      ops = [features['nodes/op.#size'][0] for features in found]
      configs = [len(features['context/config_id']) for features in found]
      assert (shard.bytes, shard.crc32c) == (len(data), f'{google_crc32c.value(data):08x}')
      assert (shard.records, shard.configs) == (len(found), sum(configs))
      assert (shard.max_sizes['ops'], shard.total_sizes['ops']) == (max(ops), sum(ops))
      assert shard.max_sizes['configs'] == max(configs) <= 2
  assert manifest.source['files'] == 40
  assert manifest.source['bytes'] == sum(path.stat().st_size for path in tiles.iterdir())
  assert manifest.options == {'split': None, 'num_shards': 3, 'on_error': 'fail', 'max_configs_per_record': 2,
                              'max_record_bytes': 128 << 20, 'seed': 0, 'hlo_stage': 'after', 'layout_padding': 0,
                              'extra_features': [], 'max_array_bytes': 16 << 30, 'max_configs': None,
                              'config_sampling': 'uniform', 'dedup_configs': 'off'}


@pytest.mark.slow
def test_two_processes_give_the_same_bytes(tiles, converted, tmp_path):
  run(tiles, tmp_path / 'o', OPTIONS, beam_args=TWO_PROCESSES)
  assert tree(tmp_path / 'o') == tree(converted[0])


@pytest.mark.slow
def test_failure_in_another_process(tiles, tmp_path):
  shutil.copytree(tiles, tmp_path / 'in')
  (tmp_path / 'in/bad.npz').write_bytes(b'')
  with pytest.raises(errors.InputError, match='empty file') as caught:
    run(tmp_path / 'in', tmp_path / 'o', OPTIONS, beam_args=TWO_PROCESSES)
  assert caught.value.path == str(tmp_path / 'in/bad.npz')
  assert not (tmp_path / 'o').exists()


def test_order_of_inputs_is_nothing(tiles, converted, tmp_path):
  paths = [str(path) for path in tiles.iterdir()]
  np.random.default_rng(0).shuffle(paths)
  run(paths, tmp_path / 'o', OPTIONS)
  assert tree(tmp_path / 'o') == tree(converted[0])


def test_a_file_matched_twice_is_converted_once(tiles, converted, tmp_path):
  run([tiles / 'm*.npz', tiles, tiles / 'm1?.npz', tiles / 'm1.npz'], tmp_path / 'o', OPTIONS)
  assert tree(tmp_path / 'o') == tree(converted[0])


def test_another_seed_gives_another_order_of_the_same_records(tiles, tmp_path):
  found = []
  for seed in (0, 1, 1):
    directory = tmp_path / str(len(found))
    run(tiles, directory, options(split='train', num_shards=2, seed=seed))
    found.append(read_split(directory, 'train'))
  assert found[0] != found[1] == found[2]
  assert collections.Counter(found[0]) == collections.Counter(found[1])


def test_neighbours_in_a_shard_are_unrelated(tiles, tmp_path):
  run(tiles, tmp_path / 'o', options(split='train', num_shards=1))
  names = [int(parse(record)['context/module_id'][0].decode()[1:]) for record in read_split(tmp_path / 'o', 'train')]
  assert sorted(names) == list(range(40))
  assert sum(following == name + 1 for name, following in itertools.pairwise(names)) < 8


def test_shards_are_balanced(tmp_path):
  save_tiles(tmp_path / 'in', 100)
  manifest = run(tmp_path / 'in', tmp_path / 'o', options(split='train', num_shards=10))
  names = [f'train/part-{i:05d}-of-00010.tfrecord' for i in range(10)]
  assert sorted(name for name in tree(tmp_path / 'o') if name.startswith('train/')) == names
  shards = manifest.splits['train'].shards
  assert [shard.name for shard in shards] == names
  assert [shard.records for shard in shards] == [10] * 10
  assert max(shard.bytes for shard in shards) < 2 * min(shard.bytes for shard in shards)


def test_fewer_records_than_shards(tmp_path):
  save_tiles(tmp_path / 'in', 3)
  run(tmp_path / 'in', tmp_path / 'o', options(split='valid', num_shards=8))
  assert sorted(name for name in tree(tmp_path / 'o') if '/' in name) == [
      f'valid/part-{i:05d}-of-00003.tfrecord' for i in range(3)]


def test_default_number_of_shards_follows_the_size(tmp_path, monkeypatch):
  save_tiles(tmp_path / 'in', 12)
  size = sum(path.stat().st_size for path in (tmp_path / 'in').iterdir())
  monkeypatch.setattr(convert, '_BYTES_PER_SHARD', size // 4 + 1)
  manifest = run(tmp_path / 'in', tmp_path / 'o', options(split='train'))
  assert len(manifest.splits['train'].shards) == manifest.options['num_shards'] == 4


@pytest.mark.parametrize('key', [0, 1, 5, 2**31, 2**53 + 1, 2**63, 2**64 - 2, 2**64 - 1])
def test_any_key_finds_its_place(key):
  """Among keys of 64 bits, which float64 cannot tell apart."""
  keys = np.unique(np.array([0, 1, 5, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1], np.uint64))
  item = convert_steps.Item(key, 'train', 'p', 'm', 0, True, {}, spill.Place('0', 0, 0))
  (((split, shard, num_shards), found),) = convert_steps.AssignShards(4).process(item, {'train': keys})
  assert (split, shard, num_shards) == ('train', keys.tolist().index(key) % 4, 4)
  assert found is item


# Splits.


def same_graph(topology, seed):
  """Arrays of a module whose graph depends on `topology` alone, and nothing else on it alone."""
  graph = testing.tile_arrays(n=2 + topology // 2, seed=topology)
  other = testing.tile_arrays(n=2 + topology // 2, c=1 + seed % 3, seed=1000 + seed)
  return {**other, 'node_opcode': graph['node_opcode'], 'edge_index': graph['edge_index']}


def test_equal_graphs_share_their_split(tmp_path):
  topology_of = {}
  for i in range(60):
    path = save(tmp_path / f'in/m{i}.npz', same_graph(i % 12, i))
    (record,) = records.encode(npz.load(path))
    topology_of[record.data] = i % 12
  assert len({npz.load(path).topology_fingerprint() for path in (tmp_path / 'in').iterdir()}) == 12
  run(tmp_path / 'in', tmp_path / 'o', options())
  splits = collections.defaultdict(set)
  for split, found in read_all(tmp_path / 'o').items():
    for record in found:
      splits[topology_of.pop(record)].add(split)
  assert not topology_of
  assert len(splits) == 12
  assert all(len(found) == 1 for found in splits.values())


def module_of(arrays):
  arrays = dict(arrays)
  return module_lib.Module(module_id='m', kind='tile', config_id=np.arange(len(arrays['config_runtime'])),
                           node_splits=np.array([0]), **arrays)


@given(topology=st.integers(0, 30), seeds=st.lists(st.integers(0, 99), min_size=2, max_size=2), seed=st.integers(0, 5),
       names=st.lists(st.text('abcé/.', max_size=6), min_size=2, max_size=2), reverse=st.booleans())
@settings(max_examples=50, deadline=None)
def test_split_depends_on_graph_and_seed_alone(topology, seeds, seed, names, reverse):
  first, second = (same_graph(topology, own) for own in seeds)
  if reverse:
    second['edge_index'] = second['edge_index'][::-1]  # The order of edges is not part of the graph.
  found = {convert_steps.split_of(module_of(arrays), f'd/{name}/m.npz', options(seed=seed))
           for arrays, name in ((first, names[0]), (second, names[1]))}
  assert len(found) == 1
  assert found <= {'train', 'valid', 'test'}


def test_shares_of_the_splits():
  modules = [module_of(testing.tile_arrays(n=8, c=1, seed=i)) for i in range(1000)]
  for seed in (0, 1):
    shares = collections.Counter(convert_steps.split_of(module, 'd/m.npz', options(seed=seed)) for module in modules)
    assert 740 < shares['train'] < 860
    assert 60 < shares['valid'] < 140
    assert 60 < shares['test'] < 140


@pytest.mark.parametrize(('path', 'split'), [
    ('train/m.npz', 'train'), ('/d/valid/m.npz', 'valid'), ('gs://b/test/m.npz', 'test'), ('d\\test\\m.npz', 'test'),
    ('d/train/valid/m.npz', 'valid')])
def test_folder_decides(path, split):
  for seed in range(8):
    module = module_of(testing.tile_arrays(seed=seed))
    assert convert_steps.split_of(module, path, options()) == split
    assert convert_steps.split_of(module, path, options(split='test')) == 'test'


@pytest.mark.parametrize('path', ['m.npz', 'train.npz', 'train', 'train/d/m.npz', 'trainx/m.npz', 'TRAIN/m.npz'])
def test_other_folders_do_not(path):
  splits = {convert_steps.split_of(module_of(testing.tile_arrays(seed=seed)), path, options()) for seed in range(40)}
  assert len(splits) > 1


def test_split_is_forced(tmp_path):
  for split in ('train', 'valid', 'test', 'other'):
    save(tmp_path / f'in/{split}/{split}.npz', testing.tile_arrays())
  manifest = run(tmp_path / 'in/*/*.npz', tmp_path / 'o', options(split='valid'))
  assert list(manifest.splits) == ['valid']
  assert manifest.splits['valid'].modules == 4


def test_test_files_are_unmeasured(tmp_path):
  save(tmp_path / 'in/train/m.npz', testing.tile_arrays())
  save(tmp_path / 'in/test/m.npz', testing.tile_arrays(config_runtime=np.zeros(6, np.int64),
                                                       config_runtime_normalizers=np.ones(6, np.int64)))
  manifest = run(tmp_path / 'in', tmp_path / 'o', options())
  assert [(name, split.modules, split.measured) for name, split in manifest.splits.items()] == [
      ('train', 1, 1), ('test', 1, 0)]
  (record,) = read_split(tmp_path / 'o', 'test')
  assert parse(record)['context/config_runtime'] == parse(record)['context/config_runtime_normalizer'] == [-1] * 6
  assert '1 unmeasured' in convert.describe(manifest)


# Finding the input.


def found(inputs, collection='tile:xla'):
  return convert.find_inputs([str(name) for name in inputs], collection)


def test_tree_of_collections(tmp_path):
  for name in ('tile/xla/train/a', 'tile/xla/test/b', 'layout/xla/random/train/c', 'layout/xla/default/valid/d'):
    save(tmp_path / f'{name}.npz', testing.tile_arrays())
  for root in (tmp_path, f'{tmp_path}/', tmp_path / 'tile/xla'):
    inputs = found([root])
    assert inputs.files == 2
    assert inputs.bytes == sum(path.stat().st_size for path in (tmp_path / 'tile').rglob('*.npz'))
  assert found([tmp_path], 'layout:xla:random').files == found([tmp_path], 'layout:xla:default').files == 1


def test_relative_names_mean_the_same_file(tiles, converted, tmp_path, monkeypatch):
  monkeypatch.chdir(tiles)
  for i, inputs in enumerate((['*.npz'], ['.'], ['m[0-9].npz', './*.npz', 'm1.npz', './m2.npz'])):
    run(inputs, tmp_path / str(i), OPTIONS)
    assert tree(tmp_path / str(i)) == tree(converted[0])


def test_folder_file_and_glob(tmp_path, monkeypatch):
  for name in ('a.npz', 'b.pb', 'c.txt', 'd'):
    (tmp_path / name).write_bytes(b'12')
  assert (found([tmp_path]).files, found([tmp_path]).bytes) == (2, 4)
  assert found([tmp_path / 'd']).files == 1
  assert found([tmp_path / '*']).files == 4
  monkeypatch.chdir(tmp_path)
  for name in ('*.npz', 'a.npz', './a.npz'):
    assert found([name]).files == 1
  assert found(['.']).files == 2


@pytest.mark.parametrize('name', ['nope', 'nope/*.npz', '*.npy', 'empty', 'a.npz/x'])
def test_nothing_matches(tmp_path, name):
  save(tmp_path / 'a.npz', testing.tile_arrays())
  (tmp_path / 'empty').mkdir()
  with pytest.raises(errors.InputError, match='nothing matches') as caught:
    run([tmp_path / 'a.npz', tmp_path / name], tmp_path / 'o', options())
  assert (caught.value.where, caught.value.found) == ('--input', str(tmp_path / name))
  assert not (tmp_path / 'o').exists()


def test_no_input(tmp_path):
  with pytest.raises(errors.InputError, match='no input'):
    run([], tmp_path / 'o', options())


def test_name_that_is_no_unicode(tmp_path):
  path = os.fsencode(tmp_path) + b'/\xff.npz'
  shutil.copy(save(tmp_path / 'a.npz', testing.tile_arrays()), path)
  with pytest.raises(errors.InputError, match='file name not in Unicode') as caught:
    run(tmp_path, tmp_path / 'o', options(on_error='skip'))
  assert caught.value.found.isascii()


@pytest.mark.parametrize('kwargs', [{'collection': 'tail:xla'}, {'collection': 'tile'}, {'num_shards': 0},
                                    {'max_configs': 0}, {'max_bytes': 0}])
def test_wrong_options(kwargs):
  with pytest.raises(errors.InputError):
    options(**kwargs)


# Corner cases.


def test_unicode_names(tmp_path):
  names = ('größe', '数据 1', "a'b", 'x.y', '🦊')
  paths = [save(tmp_path / f'ein gabe/ü {name}.npz', testing.tile_arrays(seed=i)) for i, name in enumerate(names)]
  opts = options(split='train')
  run(tmp_path / 'ein gabe', tmp_path / 'aus gäbe', opts)
  assert read_all(tmp_path / 'aus gäbe') == in_memory(paths, opts)[0]
  found = {parse(record)['context/module_id'][0].decode() for record in read_split(tmp_path / 'aus gäbe', 'train')}
  assert found == {f'ü {name}' for name in names}


def test_smallest_modules(tmp_path):
  no_edges = np.zeros((0, 2), np.int64)
  tile = [save(tmp_path / 'tile/one_op.npz', testing.tile_arrays(n=1)),
          save(tmp_path / 'tile/no_edges.npz', testing.tile_arrays(n=5, edge_index=no_edges)),
          save(tmp_path / 'tile/one_config.npz', testing.tile_arrays(c=1)),
          save(tmp_path / 'tile/least.npz', testing.tile_arrays(n=1, c=1))]
  layout = [save(tmp_path / 'layout/least.npz', testing.layout_arrays(n=1, c=1, nc=1)),
            save(tmp_path / 'layout/nothing_to_configure.npz', testing.layout_arrays(n=3, c=1, nc=0))]
  for kind, paths in (('tile', tile), ('layout', layout)):
    opts = options(f'{kind}:own', split='train')
    manifest = run(tmp_path / kind, tmp_path / f'o{kind}', opts)
    assert read_all(tmp_path / f'o{kind}') == in_memory(paths, opts)[0]
    assert manifest.splits['train'].modules == len(paths)
    statistics.parse(json.loads((tmp_path / f'o{kind}/statistics.json').read_text()))


def test_configs_are_dealt_to_several_records(tmp_path):
  save(tmp_path / 'in/m.npz', testing.tile_arrays(c=25))
  manifest = run(tmp_path / 'in', tmp_path / 'o', options(split='train', num_shards=2, max_configs=10))
  split = manifest.splits['train']
  assert (split.modules, split.measured, split.records, split.configs) == (1, 1, 3, 25)
  parsed = [parse(record) for record in read_split(tmp_path / 'o', 'train')]
  assert sorted(len(features['context/config_id']) for features in parsed) == [8, 8, 9]
  assert sorted(i for features in parsed for i in features['context/config_id']) == list(range(25))
  for features in parsed:
    assert features['context/config_runtime'] == [1000 * (1 + i) for i in features['context/config_id']]
    assert features['nodes/op.#size'] == [4]


def test_modules_of_a_protobuf(tmp_path):
  manifest = run(testing.GOLDEN / 'corner/tile_sel.pb', tmp_path / 'o', options(split='train'))
  assert (manifest.splits['train'].modules, manifest.splits['train'].configs) == (3, 10)
  assert manifest.dropped_runs == {'no profile': 1, 'run failed (error set)': 1, 'time <= 1 ns': 1}
  assert manifest.skipped_modules == {'a run without tile config': 1, 'at most one run': 1, 'no HLO module': 1}
  assert sorted(parse(record)['context/module_id'][0] for record in read_split(tmp_path / 'o', 'train')) == [
      b'a_000000000000000b', b'a_000000000000000e', b'e_0000000000000010']


# Damage.


def damage(folder):
  """Name -> reason of damaged files beside a good one in `folder`."""
  good = save(folder / 'good.npz', testing.tile_arrays())
  with open(good, 'rb') as file:
    (folder / 'truncated.npz').write_bytes(file.read()[:500])
  (folder / 'html.npz').write_text('<html>404</html>')
  (folder / 'zero.npz').write_bytes(b'')
  return {'truncated.npz': 'damaged or truncated npz file', 'html.npz': 'not an npz file', 'zero.npz': 'empty file'}


@pytest.mark.parametrize('name', ['truncated.npz', 'html.npz', 'zero.npz'])
def test_damaged_file_stops_all(tmp_path, name):
  reason = damage(tmp_path / 'in')[name]
  with pytest.raises(errors.InputError) as caught:
    run([tmp_path / 'in/good.npz', tmp_path / 'in' / name], tmp_path / 'o', options())
  assert (caught.value.reason, caught.value.path) == (reason, str(tmp_path / 'in' / name))
  assert not (tmp_path / 'o').exists()


@pytest.mark.parametrize(('name', 'collection'), [
    ('tile.npz', 'layout:own'), ('layout.npz', 'tile:own'), ('zero.pb', 'tile:own'), ('zero.pb', 'layout:own'),
    ('tile.pb', 'layout:own'), ('text.pb', 'tile:own')])
def test_wrong_file_leaves_nothing(tmp_path, name, collection):
  save(tmp_path / 'tile.npz', testing.tile_arrays())
  save(tmp_path / 'layout.npz', testing.layout_arrays())
  (tmp_path / 'zero.pb').write_bytes(b'')
  (tmp_path / 'text.pb').write_text('HloModule x\n')
  shutil.copy(testing.GOLDEN / 'corner/tile_sel.pb', tmp_path / 'tile.pb')
  with pytest.raises(errors.InputError) as caught:
    run(tmp_path / name, tmp_path / 'o', options(collection))
  assert caught.value.path == str(tmp_path / name)
  assert caught.value.expected
  assert '\n' not in str(caught.value)
  assert not (tmp_path / 'o').exists()


def test_bad_files_are_skipped(tmp_path):
  reasons = damage(tmp_path / 'in')
  os.remove(tmp_path / 'in/good.npz')
  paths = save_tiles(tmp_path / 'in', 9)
  opts = options(on_error='skip', split='train')
  manifest = run(tmp_path / 'in', tmp_path / 'o', opts)
  assert read_all(tmp_path / 'o') == in_memory(paths, opts)[0]
  assert manifest.splits['train'].modules == 9
  assert manifest.rejected_inputs == {'damaged or truncated npz file': 1, 'empty file': 1, 'not an npz file': 1}
  rows = [json.loads(line) for line in (tmp_path / 'o/rejected.jsonl').read_text(encoding='utf-8').splitlines()]
  assert {row['path']: row['reason'] for row in rows} == {
      str(tmp_path / 'in' / name): reason for name, reason in reasons.items()}
  assert len(rows) == 3
  text = convert.describe(manifest)
  assert all(f'1 input rejected (see rejected.jsonl): {reason}' in text for reason in reasons.values())


def test_array_at_fault_is_listed(tmp_path):
  save_tiles(tmp_path / 'in', 2)
  save(tmp_path / 'in/oob.npz', testing.tile_arrays(edge_index=np.array([[9, 0]])))
  run(tmp_path / 'in', tmp_path / 'o', options(on_error='skip'))
  (row,) = map(json.loads, (tmp_path / 'o/rejected.jsonl').read_text().splitlines())
  assert row['path'].endswith('oob.npz')
  assert (row['where'], row['found'], row['expected']) == ('edge_index[0, 0]', '9', '0 to 3')


def test_module_too_large_for_a_record(tmp_path):
  save_tiles(tmp_path / 'in', 2)
  path = save(tmp_path / 'in/large.npz', testing.tile_arrays(n=100))
  manifest = run(tmp_path / 'in', tmp_path / 'o', options(on_error='skip', max_bytes=30_000))
  assert manifest.rejected_inputs == {'module too large for a record': 1}
  with pytest.raises(errors.InputError, match='module too large for a record') as caught:
    run(tmp_path / 'in', tmp_path / 'p', options(max_bytes=30_000))
  assert caught.value.path == path


def test_all_bad(tmp_path):
  damage(tmp_path / 'in')
  os.remove(tmp_path / 'in/good.npz')
  (tmp_path / 'in/zero2.npz').write_bytes(b'')
  with pytest.raises(errors.InputError, match='no usable module') as caught:
    run(tmp_path / 'in', tmp_path / 'o', options(on_error='skip'))
  assert json.loads(caught.value.found) == {
      'damaged or truncated npz file': 1, 'empty file': 2, 'not an npz file': 1}
  assert not (tmp_path / 'o').exists()


@pytest.mark.parametrize('on_error', ['fail', 'skip'])
def test_name_twice_in_a_split(tmp_path, on_error):
  paths = [save(tmp_path / f'in/{folder}/m.npz', testing.tile_arrays(seed=i)) for i, folder in enumerate('ab')]
  with pytest.raises(errors.InputError, match='module_id occurs twice') as caught:
    run(tmp_path / 'in/*/*.npz', tmp_path / 'o', options(split='train', num_shards=5, on_error=on_error))
  assert all(path in str(caught.value) for path in paths)
  assert not (tmp_path / 'o').exists()


def test_name_in_two_splits(tmp_path):
  for split in ('train', 'valid'):
    save(tmp_path / f'in/{split}/m.npz', testing.tile_arrays())
  manifest = run(tmp_path / 'in', tmp_path / 'o', options())
  assert {name: split.modules for name, split in manifest.splits.items()} == {'train': 1, 'valid': 1}


# The place of the output.


def test_a_dataset_is_replaced_only_on_demand(tiles, tmp_path):
  directory = tmp_path / 'o'
  run(tiles, directory, options(split='train', num_shards=5))
  before = tree(directory)
  assert len([name for name in before if '/' in name]) == 5
  with pytest.raises(errors.InputError, match='output exists'):
    run(tiles, directory, options(split='train', num_shards=2))
  assert tree(directory) == before
  run(tiles, directory, options(split='train', num_shards=2), overwrite=True)
  assert sorted(name for name in tree(directory) if '/' in name) == [
      'train/part-00000-of-00002.tfrecord', 'train/part-00001-of-00002.tfrecord']
  run(tiles, tmp_path / 'fresh', options(split='train', num_shards=2))
  assert tree(directory) == tree(tmp_path / 'fresh')


def test_wrong_input_does_not_cost_the_dataset(tiles, tmp_path):
  run(tiles, tmp_path / 'o', OPTIONS)
  before = tree(tmp_path / 'o')
  for kwargs in ({'inputs': [tmp_path / 'nope']}, {'inputs': [tiles], 'beam_args': ['--nope']}):
    with pytest.raises(errors.InputError):
      run(kwargs.pop('inputs'), tmp_path / 'o', OPTIONS, overwrite=True, **kwargs)
    assert tree(tmp_path / 'o') == before


def test_input_folder_is_no_output(tmp_path):
  save_tiles(tmp_path, 3)
  before = tree(tmp_path)
  with pytest.raises(errors.InputError, match='no dataset'):
    run(tmp_path, tmp_path, options(), overwrite=True)
  assert tree(tmp_path) == before


def test_unknown_failure_leaves_nothing(tiles, tmp_path, monkeypatch):
  def write_tfrecords(file, data):
    raise RuntimeError('disk full')
  monkeypatch.setattr(records, 'write_tfrecords', write_tfrecords)
  with pytest.raises(Exception, match='disk full'):
    run(tiles, tmp_path / 'o', OPTIONS)
  assert not (tmp_path / 'o').exists()


KILLED = """
import os, signal, sys
from pipelines import convert
from tpu_graphs import records
write, calls = records.write_tfrecords, []
def write_half(file, data):
  calls.append(file)
  if len(calls) < 3:
    return write(file, data)
  file.write(b'half')
  file.flush()
  os.kill(os.getpid(), signal.SIGKILL)
records.write_tfrecords = write_half
convert.main(sys.argv)
"""


def subprocess_environment():
  return {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])}


@pytest.fixture(scope='module')
def killed(tiles, tmp_path_factory):
  """What `kill -9` in the middle of a conversion leaves."""
  directory = tmp_path_factory.mktemp('killed') / 'o'
  result = subprocess.run(
      [sys.executable, '-c', KILLED, '--collection=tile:xla', f'--input={tiles}', f'--output={directory}',
       '--num_shards=3', '--max_configs_per_record=2'], env=subprocess_environment(), check=False)
  assert result.returncode == -signal.SIGKILL
  names = list(tree(directory))
  assert sum(name.endswith('.tfrecord') for name in names) == 2
  assert sum(name.endswith('.partial') for name in names) == 1
  assert 'manifest.json' not in names
  return directory


@pytest.fixture
def interrupted(killed, tmp_path):
  return shutil.copytree(killed, tmp_path / 'o')


def test_the_same_command_completes_what_was_interrupted(interrupted, tiles, converted):
  run(tiles, interrupted, OPTIONS)
  assert tree(interrupted) == tree(converted[0])


def test_other_options_do_not_complete_it(interrupted, tiles, converted):
  before = tree(interrupted)
  for inputs, opts in ((tiles, options(num_shards=2, max_configs=2)), (tiles, options(num_shards=3)),
                       (tiles, options(num_shards=3, max_configs=2, seed=1)), (tiles / '*.npz', OPTIONS)):
    with pytest.raises(errors.InputError, match='unfinished conversion with other options'):
      run(inputs, interrupted, opts)
    assert tree(interrupted) == before
  run(tiles / '*.npz', interrupted, OPTIONS, overwrite=True)
  assert tree(interrupted) == tree(converted[0])


# The job.


def job(inputs, directory):
  """The pipeline of a conversion as a runner gets it, and label -> step."""
  pipeline = beam.Pipeline(fn_runner.FnApiRunner())
  patterns = found(inputs).patterns
  _ = pipeline | 'Patterns' >> beam.Create(patterns) | 'Convert' >> convert.Convert(str(directory), OPTIONS)
  proto = pipeline.to_runner_api()
  return proto, {step.unique_name: step for step in proto.components.transforms.values()}


def test_size_of_the_job_does_not_depend_on_the_number_of_files(tmp_path):
  sizes = []
  for first, last in ((0, 1), (1, 2000)):
    for i in range(first, last):
      (tmp_path / f'm{i}.npz').write_bytes(b'')
    sizes.append(len(job([tmp_path], '/o')[0].SerializeToString()))
  assert sizes[1] < sizes[0] + 1000 < 1 << 20  # Pickled steps differ by some bytes; 2000 names would be 10 kB and more.


def test_files_are_spread_before_they_are_read(tiles):
  _, steps = job([tiles], '/o')
  spread, read = steps['Convert/Spread'], steps['Convert/Read']
  assert spread.spec.urn == 'beam:transform:reshuffle:v1'
  assert set(spread.outputs.values()) == set(read.inputs.values())
  assert set(steps['Convert/Match'].outputs.values()) == set(steps['Convert/Path'].inputs.values())


def test_each_step_has_a_name(tiles):
  _, steps = job([tiles], '/o')
  names = {name.split('/')[1] for name in steps if name.startswith('Convert/')}
  assert names >= {'Match', 'Read', 'Assign', 'Write', 'Statistics', 'Publish'}
  assert all(name.isalpha() and name.istitle() for name in names), names


def test_transform_needs_a_number_of_shards():
  with pytest.raises(errors.InputError, match='number of shards missing'):
    convert.Convert('/o', options())


FRESH = """
import pickle, sys
from apache_beam.internal import pickler
standard, beams, path = pickle.load(sys.stdin.buffer)
for loaded in (pickle.loads(standard), pickler.loads(beams)):
  read, assign, write, merge, publish = loaded
  read.start_bundle()
  outputs = list(read.process(path))
  read.finish_bundle()
  (item,) = [output for output in outputs if type(output).__name__ == 'Item']
  import numpy as np
  ((key, same),) = assign.process(item, {item.split: np.array([item.key], np.uint64)})
  (shard,) = write.process((key, [same]))
  source = [output.value for output in outputs if getattr(output, 'tag', None) == 'source'][0]
  parts = [output.value for output in outputs if getattr(output, 'tag', None) == 'statistics']
  (total,) = merge.process((parts[0][0], [parts[0][1]]))
  counts = [output.value for output in outputs if getattr(output, 'tag', None) == 'counts']
  (manifest,) = publish.process(None, [shard], [], counts, source, [], [total])
assert 'absl.flags' not in sys.modules or not sys.modules['absl.flags'].FLAGS.is_parsed()
print(manifest.dumps())
"""


def test_steps_run_in_a_fresh_interpreter(tmp_path):
  path = save(tmp_path / 'in/train/m.npz', testing.tile_arrays())
  opts = options(num_shards=1)
  manifest = run(path, tmp_path / 'o', opts)
  directory = str(tmp_path / 'fresh')
  output.begin(directory, request={}, overwrite=False)
  steps = (convert_steps.ReadModules(directory, opts), convert_steps.AssignShards(1),
           convert_steps.WriteShard(directory), convert_steps.MergeStatistics(directory),
           convert_steps.Publish(directory, opts))
  message = pickle.dumps((pickle.dumps(steps), pickler.dumps(steps), path))
  result = subprocess.run([sys.executable, '-c', FRESH], input=message, capture_output=True, cwd=tmp_path,
                          env=subprocess_environment(), check=False)
  assert result.returncode == 0, result.stderr.decode()
  assert result.stdout.decode() == manifest.dumps() + '\n'
  output.end(directory)
  assert tree(tmp_path / 'fresh') == tree(tmp_path / 'o')
