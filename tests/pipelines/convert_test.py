"""Tests of pipelines.convert: Beam writes the records that the library makes in memory.

Other tests here check where the output is written.
"""

import collections
import itertools
import json
import shutil
import signal
import subprocess
import sys

import google_crc32c
import numpy as np
import pytest

from pipelines import convert
from pipelines.conversion import description
from pipelines.conversion import spill
from pipelines.conversion import steps
from tests import converting
from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import records
from tpu_graphs.dataset import schema
from tpu_graphs.dataset import statistics
from tpu_graphs.sources import npz

# The real files.


@testing.needs_shared
def test_tile_protobuf(tmp_path):
  manifest = converting.run(
    testing.SHARED / 'data/op_tuning_data.pb', tmp_path / 'o', converting.options()
  )
  assert sum(split.modules for split in manifest.splits.values()) == 15
  assert sum(split.configs for split in manifest.splits.values()) == 752
  assert sum(manifest.dropped_runs.values()) == 2
  found = [
    record for split in manifest.splits for record in converting.read_split(tmp_path / 'o', split)
  ]
  parsed = [converting.parse(record) for record in found]
  assert len({features['context/module_id'][0] for features in parsed}) == 15
  assert sum(len(features['context/config_runtime']) for features in parsed) == 752
  assert all(min(features['context/config_runtime']) >= 2 for features in parsed)
  assert all(min(features['context/config_runtime_normalizer']) >= 1 for features in parsed)
  text = description.describe(manifest)
  assert all(
    f'{count} run{"s" if count > 1 else ""} dropped: {reason}' in text
    for reason, count in manifest.dropped_runs.items()
  )


@testing.needs_shared
def test_layout_protobuf(tmp_path):
  manifest = converting.run(
    testing.SHARED / 'data/module_tuning_data_layout.pb',
    tmp_path / 'o',
    converting.options('layout:xla:random'),
  )
  (split,) = manifest.splits.values()
  assert (split.modules, split.records, split.configs) == (1, 1, 112)
  sizes = {'ops': 3163, 'edges': 5112, 'config_ops': 62, 'configs': 112}
  assert split.total_sizes == split.max_sizes == sizes
  assert sum(manifest.dropped_runs.values()) == 10
  ((found, _),) = next(iter(converting.read_all(tmp_path / 'o').values())).items()
  features = converting.parse(found)
  assert features['nodes/op.#size'] == [3163]
  assert features['edges/operand.#size'] == [5112] == [len(features['edges/operand.#source'])]
  assert features['nodes/config_op.#size'] == [62] == [len(features['edges/configures.#target'])]
  assert len(features['context/config_runtime']) == 112
  assert len(features['context/node_config_feat'][0]) == 112 * 62 * 18


REAL = {
  'tile:xla': ('train', 'valid', 'test'),
  'layout:xla:default': ('train', 'test'),
  'layout:xla:random': ('valid', 'test'),
}


@testing.needs_shared
@pytest.mark.slow
@pytest.mark.parametrize('collection', list(REAL))
def test_real_npz_files(tmp_path, collection):
  root = testing.SHARED / 'data/npz'
  opts = converting.options(collection, num_shards=1)
  manifest = converting.run(root, tmp_path / 'o', opts)
  folder = root.joinpath(*collection.split(':'))
  paths = [str(path) for path in folder.rglob('*.npz')]
  expected, total = converting.in_memory(paths, opts)
  assert (
    tuple(manifest.splits)
    == REAL[collection]
    == tuple(sorted(expected, key=list(REAL['tile:xla']).index))
  )
  assert converting.read_all(tmp_path / 'o') == expected
  if total is not None:
    converting.assert_close(
      json.loads((tmp_path / 'o/statistics.json').read_text()), total.to_json()
    )
  for split in manifest.splits:
    runtimes = collections.defaultdict(dict)
    for record in converting.read_split(tmp_path / 'o', split):
      features = converting.parse(record)
      name = features['context/module_id'][0].decode()
      runtimes[name].update(
        zip(features['context/config_id'], features['context/config_runtime'], strict=True)
      )
    for path in (folder / split).glob('*.npz'):
      raw = np.load(path)['config_runtime']
      found = runtimes.pop(path.stem)
      assert sorted(found) == list(range(len(raw)))
      expected_runtimes = raw.astype(np.int64) if split != 'test' else np.full(len(raw), -1)
      assert np.array_equal([found[i] for i in range(len(raw))], expected_runtimes)
      if path.stem == 'unet3d':
        assert max(found.values()) > np.iinfo(np.int32).max
    assert not runtimes
    assert manifest.splits[split].measured == (
      0 if split == 'test' else manifest.splits[split].modules
    )


# The same records in memory and with Beam.


@pytest.fixture(scope='module')
def tiles(tmp_path_factory):
  """A folder with 40 tile files."""
  folder = tmp_path_factory.mktemp('tiles')
  converting.save_tiles(folder, 40)
  return folder


OPTIONS = converting.options(num_shards=3, max_configs=2)


@pytest.fixture(scope='module')
def converted(tiles, tmp_path_factory):
  """The folder `tiles` as a dataset that one process has written."""
  directory = tmp_path_factory.mktemp('converted') / 'o'
  manifest = converting.run(tiles, directory, OPTIONS)
  return directory, manifest


def test_records_equal_those_in_memory(tiles, converted):
  expected, _ = converting.in_memory(map(str, tiles.iterdir()), OPTIONS)
  assert set(expected) == {'train', 'valid', 'test'}
  assert converting.read_all(converted[0]) == expected


def test_statistics_equal_those_in_memory(tiles, converted):
  _, total = converting.in_memory(map(str, tiles.iterdir()), OPTIONS)
  converting.assert_close(
    json.loads((converted[0] / 'statistics.json').read_text()), total.to_json()
  )


def test_layout_equals_in_memory(tmp_path):
  paths = [
    converting.save(
      tmp_path / f'in/m{i}.npz', testing.layout_arrays(n=3 + i, c=1 + i, nc=i % 3, seed=i)
    )
    for i in range(6)
  ]
  opts = converting.options('layout:own', split='train', num_shards=2, max_configs=3)
  converting.run(tmp_path / 'in', tmp_path / 'o', opts)
  expected, total = converting.in_memory(paths, opts)
  assert converting.read_all(tmp_path / 'o') == expected
  converting.assert_close(json.loads((tmp_path / 'o/statistics.json').read_text()), total.to_json())


def test_no_train_split_has_no_statistics(tiles, tmp_path):
  converting.run(tiles, tmp_path / 'o', converting.options(split='test'))
  assert statistics.parse(json.loads((tmp_path / 'o/statistics.json').read_text())) == {}


def test_manifest_agrees_with_the_files(tiles, converted):
  directory, manifest = converted
  assert {name for name in converting.tree(directory) if '/' not in name} == {
    'manifest.json',
    'schema.pbtxt',
    'statistics.json',
    'rejected.jsonl',
  }
  assert (directory / 'schema.pbtxt').read_text() == schema.text('tile')
  assert (directory / 'rejected.jsonl').read_bytes() == b''
  assert {name for name in converting.tree(directory) if '/' in name} == {
    shard.name for split in manifest.splits.values() for shard in split.shards
  }
  modules = [npz.load(path) for path in tiles.iterdir()]
  assert sum(split.modules for split in manifest.splits.values()) == len(modules) == 40
  assert sum(split.measured for split in manifest.splits.values()) == 40
  assert sum(split.configs for split in manifest.splits.values()) == sum(
    module.num_configs for module in modules
  )
  for split in manifest.splits.values():
    for shard in split.shards:
      data = (directory / shard.name).read_bytes()
      found = [converting.parse(record) for record in converting.read_shard(directory / shard.name)]
      ops = [features['nodes/op.#size'][0] for features in found]
      configs = [len(features['context/config_id']) for features in found]
      assert (shard.bytes, shard.crc32c) == (len(data), f'{google_crc32c.value(data):08x}')
      assert (shard.records, shard.configs) == (len(found), sum(configs))
      assert (shard.max_sizes['ops'], shard.total_sizes['ops']) == (max(ops), sum(ops))
      assert shard.max_sizes['configs'] == max(configs) <= 2
  assert manifest.source['files'] == 40
  assert manifest.source['bytes'] == sum(path.stat().st_size for path in tiles.iterdir())
  assert manifest.options == {
    'split': None,
    'num_shards': 3,
    'on_error': 'fail',
    'max_configs_per_record': 2,
    'max_record_bytes': 128 << 20,
    'seed': 0,
    'hlo_stage': 'after',
    'layout_padding': 0,
    'extra_features': [],
    'max_array_bytes': 16 << 30,
    'max_configs': None,
    'config_sampling': 'uniform',
    'dedup_configs': 'off',
    'keep_hops': None,
    'rest': None,
  }


@pytest.mark.slow
def test_two_processes_give_the_same_bytes(tiles, converted, tmp_path):
  converting.run(tiles, tmp_path / 'o', OPTIONS, beam_args=converting.TWO_PROCESSES)
  assert converting.tree(tmp_path / 'o') == converting.tree(converted[0])


@pytest.mark.slow
def test_failure_in_another_process(tiles, tmp_path):
  shutil.copytree(tiles, tmp_path / 'in')
  (tmp_path / 'in/bad.npz').write_bytes(b'')
  with pytest.raises(errors.InputError, match='empty file') as caught:
    converting.run(tmp_path / 'in', tmp_path / 'o', OPTIONS, beam_args=converting.TWO_PROCESSES)
  assert caught.value.path == str(tmp_path / 'in/bad.npz')
  assert not (tmp_path / 'o').exists()


def test_order_of_inputs_does_not_matter(tiles, converted, tmp_path):
  paths = [str(path) for path in tiles.iterdir()]
  np.random.default_rng(0).shuffle(paths)
  converting.run(paths, tmp_path / 'o', OPTIONS)
  assert converting.tree(tmp_path / 'o') == converting.tree(converted[0])


def test_a_file_matched_twice_is_converted_once(tiles, converted, tmp_path):
  converting.run(
    [tiles / 'm*.npz', tiles, tiles / 'm1?.npz', tiles / 'm1.npz'], tmp_path / 'o', OPTIONS
  )
  assert converting.tree(tmp_path / 'o') == converting.tree(converted[0])


def test_relative_names_mean_the_same_file(tiles, converted, tmp_path, monkeypatch):
  monkeypatch.chdir(tiles)
  for i, inputs in enumerate((['*.npz'], ['.'], ['m[0-9].npz', './*.npz', 'm1.npz', './m2.npz'])):
    converting.run(inputs, tmp_path / str(i), OPTIONS)
    assert converting.tree(tmp_path / str(i)) == converting.tree(converted[0])


def test_another_seed_gives_another_order_of_the_same_records(tiles, tmp_path):
  found = []
  for seed in (0, 1, 1):
    directory = tmp_path / str(len(found))
    converting.run(tiles, directory, converting.options(split='train', num_shards=2, seed=seed))
    found.append(converting.read_split(directory, 'train'))
  assert found[0] != found[1] == found[2]
  assert collections.Counter(found[0]) == collections.Counter(found[1])


def test_neighbours_in_a_shard_are_unrelated(tiles, tmp_path):
  converting.run(tiles, tmp_path / 'o', converting.options(split='train', num_shards=1))
  names = [
    int(converting.parse(record)['context/module_id'][0].decode()[1:])
    for record in converting.read_split(tmp_path / 'o', 'train')
  ]
  assert sorted(names) == list(range(40))
  assert sum(following == name + 1 for name, following in itertools.pairwise(names)) < 8


def test_shards_are_balanced(tmp_path):
  converting.save_tiles(tmp_path / 'in', 100)
  manifest = converting.run(
    tmp_path / 'in', tmp_path / 'o', converting.options(split='train', num_shards=10)
  )
  names = [f'train/part-{i:05d}-of-00010.tfrecord' for i in range(10)]
  assert (
    sorted(name for name in converting.tree(tmp_path / 'o') if name.startswith('train/')) == names
  )
  shards = manifest.splits['train'].shards
  assert [shard.name for shard in shards] == names
  assert [shard.records for shard in shards] == [10] * 10
  assert max(shard.bytes for shard in shards) < 2 * min(shard.bytes for shard in shards)


def test_fewer_records_than_shards(tmp_path):
  converting.save_tiles(tmp_path / 'in', 3)
  converting.run(tmp_path / 'in', tmp_path / 'o', converting.options(split='valid', num_shards=8))
  assert sorted(name for name in converting.tree(tmp_path / 'o') if '/' in name) == [
    f'valid/part-{i:05d}-of-00003.tfrecord' for i in range(3)
  ]


def test_default_number_of_shards_follows_the_size(tmp_path, monkeypatch):
  converting.save_tiles(tmp_path / 'in', 12)
  size = sum(path.stat().st_size for path in (tmp_path / 'in').iterdir())
  monkeypatch.setattr(convert, '_BYTES_PER_SHARD', size // 4 + 1)
  manifest = converting.run(tmp_path / 'in', tmp_path / 'o', converting.options(split='train'))
  assert len(manifest.splits['train'].shards) == manifest.options['num_shards'] == 4


@pytest.mark.parametrize('key', [0, 1, 5, 2**31, 2**53 + 1, 2**63, 2**64 - 2, 2**64 - 1])
def test_any_key_finds_its_place(key):
  """Looks up keys of 64 bits that float64 cannot distinguish."""
  keys = np.unique(
    np.array([0, 1, 5, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1], np.uint64)
  )
  item = steps.Item(key, 'train', 'p', 'm', 0, True, {}, spill.Place('0', 0, 0))
  (((split, shard, num_shards), found),) = steps.AssignShards(4).process(item, {'train': keys})
  assert (split, shard, num_shards) == ('train', keys.tolist().index(key) % 4, 4)
  assert found is item


# The place of the output.


def test_a_dataset_is_replaced_only_on_demand(tiles, tmp_path):
  directory = tmp_path / 'o'
  converting.run(tiles, directory, converting.options(split='train', num_shards=5))
  before = converting.tree(directory)
  assert len([name for name in before if '/' in name]) == 5
  with pytest.raises(errors.InputError, match='output exists'):
    converting.run(tiles, directory, converting.options(split='train', num_shards=2))
  assert converting.tree(directory) == before
  converting.run(tiles, directory, converting.options(split='train', num_shards=2), overwrite=True)
  assert sorted(name for name in converting.tree(directory) if '/' in name) == [
    'train/part-00000-of-00002.tfrecord',
    'train/part-00001-of-00002.tfrecord',
  ]
  converting.run(tiles, tmp_path / 'fresh', converting.options(split='train', num_shards=2))
  assert converting.tree(directory) == converting.tree(tmp_path / 'fresh')


def test_wrong_input_does_not_cost_the_dataset(tiles, tmp_path):
  converting.run(tiles, tmp_path / 'o', OPTIONS)
  before = converting.tree(tmp_path / 'o')
  for kwargs in ({'inputs': [tmp_path / 'nope']}, {'inputs': [tiles], 'beam_args': ['--nope']}):
    with pytest.raises(errors.InputError):
      converting.run(kwargs.pop('inputs'), tmp_path / 'o', OPTIONS, overwrite=True, **kwargs)
    assert converting.tree(tmp_path / 'o') == before


def test_input_folder_cannot_be_the_output(tmp_path):
  converting.save_tiles(tmp_path, 3)
  before = converting.tree(tmp_path)
  with pytest.raises(errors.InputError, match='not a dataset'):
    converting.run(tmp_path, tmp_path, converting.options(), overwrite=True)
  assert converting.tree(tmp_path) == before


def test_unknown_failure_leaves_nothing(tiles, tmp_path, monkeypatch):
  def write_tfrecords(file, data):
    raise RuntimeError('disk full')

  monkeypatch.setattr(records, 'write_tfrecords', write_tfrecords)
  with pytest.raises(Exception, match='disk full'):
    converting.run(tiles, tmp_path / 'o', OPTIONS)
  assert not (tmp_path / 'o').exists()


KILLED = """
import os, signal, sys
from pipelines import convert
from tpu_graphs.dataset import records
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


@pytest.fixture(scope='module')
def killed(tiles, tmp_path_factory):
  """The directory that `kill -9` in the middle of a conversion leaves."""
  directory = tmp_path_factory.mktemp('killed') / 'o'
  result = subprocess.run(
    [
      sys.executable,
      '-c',
      KILLED,
      '--collection=tile:xla',
      f'--input={tiles}',
      f'--output={directory}',
      '--num_shards=3',
      '--max_configs_per_record=2',
    ],
    env=converting.subprocess_environment(),
    check=False,
  )
  assert result.returncode == -signal.SIGKILL
  names = list(converting.tree(directory))
  assert sum(name.endswith('.tfrecord') for name in names) == 2
  assert sum(name.endswith('.partial') for name in names) == 1
  assert 'manifest.json' not in names
  return directory


@pytest.fixture
def interrupted(killed, tmp_path):
  return shutil.copytree(killed, tmp_path / 'o')


def test_the_same_command_completes_what_was_interrupted(interrupted, tiles, converted):
  converting.run(tiles, interrupted, OPTIONS)
  assert converting.tree(interrupted) == converting.tree(converted[0])


def test_other_options_do_not_complete_it(interrupted, tiles, converted):
  before = converting.tree(interrupted)
  for inputs, kwargs in (
    (tiles, {'num_shards': 2, 'max_configs': 2}),
    (tiles, {'num_shards': 3}),
    (tiles, {'num_shards': 3, 'max_configs': 2, 'seed': 1}),
    (tiles / '*.npz', {'num_shards': 3, 'max_configs': 2}),
  ):
    with pytest.raises(errors.InputError, match='unfinished conversion with other options'):
      converting.run(inputs, interrupted, converting.options(**kwargs))
    assert converting.tree(interrupted) == before
  converting.run(tiles / '*.npz', interrupted, OPTIONS, overwrite=True)
  assert converting.tree(interrupted) == converting.tree(converted[0])
