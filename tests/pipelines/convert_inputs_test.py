"""Tests of pipelines.convert: finding inputs, the split of each module, and corner cases."""

import collections
import json
import os
import shutil

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from pipelines.conversion import description
from pipelines.conversion import inputs as inputs_lib
from pipelines.conversion import steps
from tests import converting
from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import records
from tpu_graphs.dataset import statistics
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import npz

# Splits.


def same_graph(topology, seed):
  """Returns arrays of a module: only `topology` decides the graph, `seed` changes the rest."""
  graph = testing.tile_arrays(n=2 + topology // 2, seed=topology)
  other = testing.tile_arrays(n=2 + topology // 2, c=1 + seed % 3, seed=1000 + seed)
  return {**other, 'node_opcode': graph['node_opcode'], 'edge_index': graph['edge_index']}


def test_equal_graphs_share_their_split(tmp_path):
  topology_of = {}
  for i in range(60):
    path = converting.save(tmp_path / f'in/m{i}.npz', same_graph(i % 12, i))
    (record,) = records.encode(npz.load(path))
    topology_of[record.data] = i % 12
  assert len({npz.load(path).topology_fingerprint() for path in (tmp_path / 'in').iterdir()}) == 12
  converting.run(tmp_path / 'in', tmp_path / 'o', converting.options())
  splits = collections.defaultdict(set)
  for split, found in converting.read_all(tmp_path / 'o').items():
    for record in found:
      splits[topology_of.pop(record)].add(split)
  assert not topology_of
  assert len(splits) == 12
  assert all(len(found) == 1 for found in splits.values())


def module_of(arrays):
  arrays = dict(arrays)
  return module_lib.Module(
    module_id='m',
    kind='tile',
    config_id=np.arange(len(arrays['config_runtime'])),
    node_splits=np.array([0]),
    **arrays,
  )


@given(
  topology=st.integers(0, 30),
  seeds=st.lists(st.integers(0, 99), min_size=2, max_size=2),
  seed=st.integers(0, 5),
  names=st.lists(st.text('abcé/.', max_size=6), min_size=2, max_size=2),
  reverse=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_split_depends_on_graph_and_seed_alone(topology, seeds, seed, names, reverse):
  first, second = (same_graph(topology, own) for own in seeds)
  if reverse:
    # The order of edges is not part of the graph.
    second['edge_index'] = second['edge_index'][::-1]
  found = {
    steps.split_of(module_of(arrays), f'd/{name}/m.npz', converting.options(seed=seed))
    for arrays, name in ((first, names[0]), (second, names[1]))
  }
  assert len(found) == 1
  assert found <= {'train', 'valid', 'test'}


def test_shares_of_the_splits():
  modules = [module_of(testing.tile_arrays(n=8, c=1, seed=i)) for i in range(1000)]
  for seed in (0, 1):
    opts = converting.options(seed=seed)
    shares = collections.Counter(steps.split_of(module, 'd/m.npz', opts) for module in modules)
    assert 740 < shares['train'] < 860
    assert 60 < shares['valid'] < 140
    assert 60 < shares['test'] < 140


@pytest.mark.parametrize(
  ('path', 'split'),
  [
    ('train/m.npz', 'train'),
    ('/d/valid/m.npz', 'valid'),
    ('gs://b/test/m.npz', 'test'),
    ('d\\test\\m.npz', 'test'),
    ('d/train/valid/m.npz', 'valid'),
  ],
)
def test_folder_decides(path, split):
  for seed in range(8):
    module = module_of(testing.tile_arrays(seed=seed))
    assert steps.split_of(module, path, converting.options()) == split
    assert steps.split_of(module, path, converting.options(split='test')) == 'test'


@pytest.mark.parametrize(
  'path', ['m.npz', 'train.npz', 'train', 'train/d/m.npz', 'trainx/m.npz', 'TRAIN/m.npz']
)
def test_other_folders_do_not(path):
  splits = {
    steps.split_of(module_of(testing.tile_arrays(seed=seed)), path, converting.options())
    for seed in range(40)
  }
  assert len(splits) > 1


def test_split_is_forced(tmp_path):
  for split in ('train', 'valid', 'test', 'other'):
    converting.save(tmp_path / f'in/{split}/{split}.npz', testing.tile_arrays())
  manifest = converting.run(
    tmp_path / 'in/*/*.npz', tmp_path / 'o', converting.options(split='valid')
  )
  assert list(manifest.splits) == ['valid']
  assert manifest.splits['valid'].modules == 4


def test_test_files_are_unmeasured(tmp_path):
  converting.save(tmp_path / 'in/train/m.npz', testing.tile_arrays())
  converting.save(
    tmp_path / 'in/test/m.npz',
    testing.tile_arrays(
      config_runtime=np.zeros(6, np.int64), config_runtime_normalizers=np.ones(6, np.int64)
    ),
  )
  manifest = converting.run(tmp_path / 'in', tmp_path / 'o', converting.options())
  assert [(name, split.modules, split.measured) for name, split in manifest.splits.items()] == [
    ('train', 1, 1),
    ('test', 1, 0),
  ]
  (record,) = converting.read_split(tmp_path / 'o', 'test')
  features = converting.parse(record)
  assert (
    features['context/config_runtime'] == features['context/config_runtime_normalizer'] == [-1] * 6
  )
  assert '1 unmeasured' in description.describe(manifest)


# Finding the input.


def found(inputs, collection='tile:xla'):
  return inputs_lib.find_inputs([str(name) for name in inputs], collection)


def test_tree_of_collections(tmp_path):
  for name in (
    'tile/xla/train/a',
    'tile/xla/test/b',
    'layout/xla/random/train/c',
    'layout/xla/default/valid/d',
  ):
    converting.save(tmp_path / f'{name}.npz', testing.tile_arrays())
  for root in (tmp_path, f'{tmp_path}/', tmp_path / 'tile/xla'):
    inputs = found([root])
    assert inputs.files == 2
    assert inputs.bytes == sum(path.stat().st_size for path in (tmp_path / 'tile').rglob('*.npz'))
  assert (
    found([tmp_path], 'layout:xla:random').files
    == found([tmp_path], 'layout:xla:default').files
    == 1
  )


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
  converting.save(tmp_path / 'a.npz', testing.tile_arrays())
  (tmp_path / 'empty').mkdir()
  with pytest.raises(errors.InputError, match='nothing matches') as caught:
    converting.run([tmp_path / 'a.npz', tmp_path / name], tmp_path / 'o', converting.options())
  assert (caught.value.where, caught.value.found) == ('--input', str(tmp_path / name))
  assert not (tmp_path / 'o').exists()


def test_no_input(tmp_path):
  with pytest.raises(errors.InputError, match='no input'):
    converting.run([], tmp_path / 'o', converting.options())


def test_name_that_is_not_unicode(tmp_path):
  path = os.fsencode(tmp_path) + b'/\xff.npz'
  shutil.copy(converting.save(tmp_path / 'a.npz', testing.tile_arrays()), path)
  with pytest.raises(errors.InputError, match='file name not in Unicode') as caught:
    converting.run(tmp_path, tmp_path / 'o', converting.options(on_error='skip'))
  assert caught.value.found.isascii()


@pytest.mark.parametrize(
  'kwargs',
  [
    {'collection': 'tail:xla'},
    {'collection': 'tile'},
    {'num_shards': 0},
    {'max_configs': 0},
    {'max_bytes': 0},
  ],
)
def test_wrong_options(kwargs):
  with pytest.raises(errors.InputError):
    converting.options(**kwargs)


# Corner cases.


def test_unicode_names(tmp_path):
  names = ('größe', '数据 1', "a'b", 'x.y', '🦊')
  paths = [
    converting.save(tmp_path / f'ein gabe/ü {name}.npz', testing.tile_arrays(seed=i))
    for i, name in enumerate(names)
  ]
  opts = converting.options(split='train')
  converting.run(tmp_path / 'ein gabe', tmp_path / 'aus gäbe', opts)
  assert converting.read_all(tmp_path / 'aus gäbe') == converting.in_memory(paths, opts)[0]
  found = {
    converting.parse(record)['context/module_id'][0].decode()
    for record in converting.read_split(tmp_path / 'aus gäbe', 'train')
  }
  assert found == {f'ü {name}' for name in names}


def test_smallest_modules(tmp_path):
  no_edges = np.zeros((0, 2), np.int64)
  tile = [
    converting.save(tmp_path / 'tile/one_op.npz', testing.tile_arrays(n=1)),
    converting.save(tmp_path / 'tile/no_edges.npz', testing.tile_arrays(n=5, edge_index=no_edges)),
    converting.save(tmp_path / 'tile/one_config.npz', testing.tile_arrays(c=1)),
    converting.save(tmp_path / 'tile/least.npz', testing.tile_arrays(n=1, c=1)),
  ]
  layout = [
    converting.save(tmp_path / 'layout/least.npz', testing.layout_arrays(n=1, c=1, nc=1)),
    converting.save(
      tmp_path / 'layout/nothing_to_configure.npz', testing.layout_arrays(n=3, c=1, nc=0)
    ),
  ]
  for kind, paths in (('tile', tile), ('layout', layout)):
    opts = converting.options(f'{kind}:own', split='train')
    manifest = converting.run(tmp_path / kind, tmp_path / f'o{kind}', opts)
    assert converting.read_all(tmp_path / f'o{kind}') == converting.in_memory(paths, opts)[0]
    assert manifest.splits['train'].modules == len(paths)
    statistics.parse(json.loads((tmp_path / f'o{kind}/statistics.json').read_text()))


def test_configs_are_distributed_to_several_records(tmp_path):
  converting.save(tmp_path / 'in/m.npz', testing.tile_arrays(c=25))
  opts = converting.options(split='train', num_shards=2, max_configs=10)
  manifest = converting.run(tmp_path / 'in', tmp_path / 'o', opts)
  split = manifest.splits['train']
  assert (split.modules, split.measured, split.records, split.configs) == (1, 1, 3, 25)
  parsed = [converting.parse(record) for record in converting.read_split(tmp_path / 'o', 'train')]
  assert sorted(len(features['context/config_id']) for features in parsed) == [8, 8, 9]
  assert sorted(i for features in parsed for i in features['context/config_id']) == list(range(25))
  for features in parsed:
    assert features['context/config_runtime'] == [
      1000 * (1 + i) for i in features['context/config_id']
    ]
    assert features['nodes/op.#size'] == [4]


def test_modules_of_a_protobuf(tmp_path):
  manifest = converting.run(
    testing.GOLDEN / 'corner/tile_sel.pb', tmp_path / 'o', converting.options(split='train')
  )
  assert (manifest.splits['train'].modules, manifest.splits['train'].configs) == (3, 10)
  assert manifest.dropped_runs == {'no profile': 1, 'run failed (error set)': 1, 'time <= 1 ns': 1}
  assert manifest.skipped_modules == {
    'a run without tile config': 1,
    'at most one run': 1,
    'no HLO module': 1,
  }
  assert sorted(
    converting.parse(record)['context/module_id'][0]
    for record in converting.read_split(tmp_path / 'o', 'train')
  ) == [b'a_000000000000000b', b'a_000000000000000e', b'e_0000000000000010']
