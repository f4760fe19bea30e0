"""Tests of tpu_graphs.input.loading: graphs are compared with the arrays of the source."""

import collections
import json
import shutil

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.dataset import records
from tpu_graphs.input import loading
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import npz

_K = 8
_FILLERS = {
  'config_id': -1,
  'config_runtime': -1,
  'config_runtime_normalizer': -1,
  'relative_runtime': -1,
}


def _arrays(kind, n, c, seed, **over):
  return testing.arrays(kind, n=n, c=c, seed=seed, nc=min(n, 2), **over)


def _sources(kind):
  """Returns arrays by split/stem.

  There are modules with one op, one config, C < K, C == K, C > K, a unicode name, all ties, and
  no runtimes.
  """
  sources = {
    'train/one': _arrays(kind, 1, 1, 1),
    'train/few': _arrays(kind, 3, 3, 2),
    'train/equal': _arrays(kind, 4, _K, 3),
    'train/many-π模': _arrays(kind, 7, 30, 4),
    'train/ties': _arrays(kind, 5, 9, 5, config_runtime=np.full(9, 7000)),
    'train/unmeasured': _arrays(kind, 2, 4, 6, config_runtime=np.zeros(4, np.int64)),
    'valid/other': _arrays(kind, 6, 11, 7),
  }
  if kind == 'layout':
    sources['train/fixed'] = testing.layout_arrays(n=3, c=5, nc=0, seed=8)
  return sources


@pytest.fixture(scope='session')
def sources(kind):
  return _sources(kind)


@pytest.fixture(scope='session')
def directory(kind, sources, tmp_path_factory):
  return testing.convert_arrays(
    tmp_path_factory.mktemp(f'datasets_{kind}'), kind, sources, num_shards=2
  )


@pytest.fixture(scope='session')
def split_directory(kind, sources, tmp_path_factory):
  """Converts the same modules with at most four configs in a record."""
  return testing.convert_arrays(
    tmp_path_factory.mktemp(f'datasets_split_{kind}'),
    kind,
    sources,
    num_shards=2,
    records=records.RecordOptions(max_configs=4),
  )


@pytest.fixture
def damaged(directory, tmp_path):
  """Copies the directory, so that the copy can be damaged."""
  return shutil.copytree(directory, tmp_path / 'copy')


def _dense(value, axis):
  """Returns the content of `value` as [K, ...], where `axis` counts the configs."""
  if isinstance(value, tf.RaggedTensor):
    value = value.to_tensor()
  return np.moveaxis(value.numpy(), axis, 0)


def _configs(graph):
  """Returns features [K, ...] by name; layouts are 'config_feat' [K, NC, 18]."""
  context = {
    name: _dense(value[0], 0)
    for name, value in graph.context.features.items()
    if name != 'module_id'
  }
  if 'config_op' in graph.node_sets:
    layouts = _dense(graph.node_sets['config_op']['config_feat'], 1)
    # A ragged tensor without rows does not hold the length of a row.
    if not layouts.shape[1]:
      layouts = np.zeros((len(context['config_id']), 0, 18), np.int8)
    context['config_feat'] = layouts
  return context


def _expected(arrays):
  """Returns the features of all configs of the source, as `_configs` does for a graph."""
  runtime = arrays['config_runtime'].astype(np.int64)
  unmeasured = runtime == 0
  result = {
    'config_id': np.arange(runtime.size),
    'config_runtime': np.where(unmeasured, -1, runtime),
  }
  if 'config_feat' in arrays:
    normalizer = arrays['config_runtime_normalizers']
    result['config_runtime_normalizer'] = np.where(unmeasured, -1, normalizer)
    result['config_feat'] = arrays['config_feat']
    ratio = [round(int(r) * 2**32 / int(n)) for r, n in zip(runtime, normalizer, strict=True)]
    result['relative_runtime'] = np.where(unmeasured, -1, ratio)
  else:
    result['relative_runtime'] = result['config_runtime']
    result['config_feat'] = arrays['node_config_feat'].astype(np.int8)
  return result


def _id(graph):
  (module_id,) = graph.context['module_id'].numpy()
  return module_id.decode()


def _flat(graph):
  """Returns the content of a graph as a list of arrays."""
  values = [
    value
    for part in (graph.context, *graph.node_sets.values())
    for _, value in sorted(part.features.items())
  ]
  values += [part.sizes for part in (*graph.node_sets.values(), *graph.edge_sets.values())]
  values += [
    index
    for edges in graph.edge_sets.values()
    for index in (edges.adjacency.source, edges.adjacency.target)
  ]
  return [
    (value.to_tensor() if isinstance(value, tf.RaggedTensor) else value).numpy() for value in values
  ]


def _assert_equal(graphs, others):
  graphs, others = list(graphs), list(others)
  assert len(graphs) == len(others)
  for graph, other in zip(graphs, others, strict=True):
    for value, expected in zip(_flat(graph), _flat(other), strict=True):
      np.testing.assert_array_equal(value, expected)


def _assert_rows(configs, arrays):
  """Checks that real rows of `configs` equal the row of their config_id in `arrays`.

  Each id occurs once, and the other rows are padding.
  """
  expected = _expected(arrays)
  assert configs.keys() == expected.keys()
  real = configs['config_id'] != -1
  ids = configs['config_id'][real]
  assert len(set(ids)) == len(ids)
  for name, values in configs.items():
    np.testing.assert_array_equal(values[real], expected[name][ids], err_msg=name)
    filler = _FILLERS.get(name, -1 if values.dtype == np.int8 else 0)
    assert (values[~real] == filler).all(), name
  return ids


def test_all_configs_equal_the_source(kind, directory, sources):
  seen = []
  for split in ('train', 'valid'):
    for graph in loading.load(directory, split):
      name = f'{split}/{_id(graph)}'
      seen.append(name)
      arrays, configs = sources[name], _configs(graph)
      for feature, expected in _expected(arrays).items():
        np.testing.assert_array_equal(configs[feature], expected, err_msg=f'{name} {feature}')
      assert graph.context['config_id'].dtype == graph.context['relative_runtime'].dtype == tf.int64
      op = graph.node_sets['op']
      np.testing.assert_array_equal(op['opcode'], arrays['node_opcode'])
      np.testing.assert_array_equal(op['feat'], arrays['node_feat'])
      operand = graph.edge_sets['operand'].adjacency
      np.testing.assert_array_equal(
        np.stack([operand.target, operand.source], 1), arrays['edge_index']
      )
      if kind == 'layout':
        np.testing.assert_array_equal(
          graph.edge_sets['configures'].adjacency.target, arrays['node_config_ids']
        )
        assert graph.node_sets['config_op']['config_feat'].dtype == tf.int8
  assert sorted(seen) == sorted(sources)


@pytest.mark.parametrize('size', [1, _K, 100])
def test_sample_holds_right_rows_and_padding(directory, sources, size):
  dataset = loading.load(directory, 'train', configs_per_module=size)
  for name, value in dataset.element_spec.context_spec.features_spec.items():
    if name != 'module_id':
      assert value.shape[:2] == [1, size]
  for graph in dataset:
    arrays = sources[f'train/{_id(graph)}']
    configs = _configs(graph)
    assert {values.shape[0] for values in configs.values()} == {size}
    assert len(_assert_rows(configs, arrays)) == min(size, arrays['config_runtime'].size)


def test_samples_are_uniform_over_epochs(directory):
  counts = collections.Counter()
  drawn = set()
  epochs = 60
  for graph in loading.load(directory, 'train', configs_per_module=5, epochs=epochs):
    if _id(graph) == 'many-π模':
      ids = _configs(graph)['config_id'].tolist()
      counts.update(ids)
      drawn.add(tuple(sorted(ids)))
  # 60 * 5 draws of 30 configs give 10 of each on average, with a deviation of 2.9.
  assert set(counts) == set(range(30))
  assert max(counts.values()) <= 22
  assert len(drawn) > epochs // 2


def test_modules_do_not_share_their_sample(tmp_path, kind):
  # With equal positions in every module, the configs of modules would depend on each other.
  directory = testing.convert_arrays(
    tmp_path, kind, {f'train/m{i}': _arrays(kind, 2, 40, i) for i in range(4)}
  )
  samples = {
    tuple(_configs(graph)['config_id'])
    for graph in loading.load(directory, 'train', configs_per_module=5)
  }
  assert len(samples) == 4


@pytest.mark.parametrize(('shuffle', 'global_seed'), [(False, None), (True, 3)])
def test_seed_decides_everything(directory, shuffle, global_seed):
  if global_seed is not None:
    tf.random.set_seed(global_seed)

  def load(**options):
    return loading.load(
      directory, 'train', configs_per_module=3, shuffle=shuffle, **{'seed': 5, **options}
    )

  whole = list(load(epochs=3))
  first, second, third = (
    whole[i : i + len(whole) // 3] for i in range(0, len(whole), len(whole) // 3)
  )
  _assert_equal(whole, load(epochs=3))
  _assert_equal(load(first_epoch=2), third)
  _assert_equal(load(first_epoch=2, epochs=None).take(2), third[:2])
  for other in (load(seed=6), second, third):
    with pytest.raises(AssertionError):
      _assert_equal(other, first)


def test_shuffle_gives_each_record_once_in_another_order(directory, sources):
  train = sorted(name.removeprefix('train/') for name in sources if name.startswith('train/'))
  names = [
    _id(graph)
    for graph in loading.load(directory, 'train', configs_per_module=1, shuffle=True, epochs=5)
  ]
  epochs = [tuple(names[i : i + len(train)]) for i in range(0, len(names), len(train))]
  assert all(sorted(epoch) == train for epoch in epochs)
  assert len(set(epochs)) > 1


def test_without_shuffle_records_keep_their_order(directory):
  names = [_id(graph) for graph in loading.load(directory, 'train', configs_per_module=1, epochs=3)]
  assert names[: len(names) // 3] * 3 == names


@pytest.mark.parametrize('size', [1, 5, _K, 64])
def test_chunks_cover_each_config_once_in_order(directory, sources, size):
  ids = collections.defaultdict(list)
  for graph in loading.load(directory, 'train', configs_per_module=size, chunked=True):
    name = f'train/{_id(graph)}'
    configs = _configs(graph)
    assert configs['config_id'].shape == (size,)
    ids[name].extend(_assert_rows(configs, sources[name]))
  assert ids == {
    name: list(range(arrays['config_runtime'].size))
    for name, arrays in sources.items()
    if name.startswith('train/')
  }


def test_records_of_a_split_module_hold_each_config_once(split_directory, sources):
  ids, count = collections.defaultdict(list), collections.Counter()
  for graph in loading.load(split_directory, 'train', configs_per_module=3, chunked=True):
    name = f'train/{_id(graph)}'
    ids[name].extend(_assert_rows(_configs(graph), sources[name]))
  for graph in loading.load(split_directory, 'train'):
    count[f'train/{_id(graph)}'] += 1
  for name, found in ids.items():
    assert sorted(found) == list(range(sources[name]['config_runtime'].size))
    assert count[name] == -(-len(found) // 4)


def test_of_module_equals_load(directory, kind, sources, tmp_path):
  np.savez(tmp_path / 'other.npz', **sources['valid/other'])
  _assert_equal(
    loading.of_module(npz.load(tmp_path / 'other.npz', kind=kind), configs_per_module=4),
    loading.load(directory, 'valid', configs_per_module=4, chunked=True),
  )


def _relative(tmp_path, runtime, normalizers):
  if normalizers is None:
    arrays = testing.layout_arrays(n=1, nc=1, c=len(runtime), config_runtime=np.array(runtime))
  else:
    arrays = testing.tile_arrays(
      n=1,
      c=len(runtime),
      config_runtime=np.array(runtime),
      config_runtime_normalizers=np.array(normalizers),
    )
  directory = testing.convert_arrays(
    tmp_path, 'layout' if normalizers is None else 'tile', {'train/a': arrays}
  )
  (graph,) = loading.load(directory, 'train')
  return _configs(graph)['relative_runtime']


@pytest.mark.parametrize('normalizer', [None, 1, 910_876_403, 2**31])
def test_relative_runtime_distinguishes_neighbours_near_1e9(tmp_path, normalizer):
  runtime = np.arange(910_876_401, 910_876_407)
  relative = _relative(tmp_path, runtime, None if normalizer is None else np.full(6, normalizer))
  assert (np.diff(relative) > 0).all()
  if normalizer is None:
    np.testing.assert_array_equal(relative, runtime)


def test_relative_runtime_by_hand(tmp_path):
  # The ratios are 1/2, 2/4 (a tie), 3/1, and one below the resolution, which must not become 0 or
  # "not measured".
  relative = _relative(tmp_path, [1000, 2000, 3000, 2], [2000, 4000, 1000, 2**62])
  np.testing.assert_array_equal(relative, [2**31, 2**31, 3 * 2**32, 1])


@given(st.lists(st.tuples(st.integers(2, 10**12), st.integers(1, 10**12)), min_size=2, max_size=30))
@settings(deadline=None, max_examples=50)
def test_relative_runtime_keeps_the_order_of_the_ratio(pairs):
  runtime, normalizer = np.array(pairs).T
  relative = loading.relative_runtimes(
    {'config_runtime': tf.constant(runtime), 'config_runtime_normalizer': tf.constant(normalizer)}
  ).numpy()
  ratio = module_lib.relative_runtime(runtime, normalizer)
  order = np.argsort(ratio, kind='stable')
  steps, differences = np.diff(relative[order]), np.diff(ratio[order])
  assert (relative > 0).all()
  assert (steps >= 0).all()
  assert (steps[differences == 0] == 0).all()
  # Only ratios within the range that differ by more than the resolution are compared.
  assert (steps[(differences > 2.0**-32) & (ratio[order][1:] < 2**20)] > 0).all()


@pytest.mark.parametrize('size', [1, 2, 3])
def test_batch_equals_its_graphs_side_by_side(directory, size):
  alone = list(loading.load(directory, 'train', configs_per_module=_K))
  batches = list(
    loading.batch(
      loading.load(directory, 'train', configs_per_module=_K), size, drop_remainder=False
    )
  )
  assert len(batches) == -(-len(alone) // size)
  for i, batch in enumerate(batches):
    _assert_merged(batch, alone[i * size : (i + 1) * size])


def _assert_merged(batch, graphs):
  for name, value in batch.context.features.items():
    np.testing.assert_array_equal(
      value[: len(graphs)], np.concatenate([g.context[name] for g in graphs]), err_msg=name
    )
  offsets = {}
  for name, nodes in batch.node_sets.items():
    sizes = [int(g.node_sets[name].total_size) for g in graphs]
    np.testing.assert_array_equal(nodes.sizes[: len(graphs)], sizes)
    offsets[name] = np.cumsum([0, *sizes])
    for feature, value in nodes.features.items():
      np.testing.assert_array_equal(
        value[: sum(sizes)], np.concatenate([g.node_sets[name][feature] for g in graphs])
      )
  for name, edges in batch.edge_sets.items():
    sizes = [int(g.edge_sets[name].total_size) for g in graphs]
    np.testing.assert_array_equal(edges.sizes[: len(graphs)], sizes)
    for tag in (0, 1):
      nodes = edges.adjacency.node_set_name(tag)
      expected = [
        g.edge_sets[name].adjacency[tag].numpy() + offsets[nodes][i] for i, g in enumerate(graphs)
      ]
      np.testing.assert_array_equal(edges.adjacency[tag][: sum(sizes)], np.concatenate(expected))


def test_batch_drops_the_remainder(directory):
  alone = list(loading.load(directory, 'train', configs_per_module=2))
  batches = loading.batch(loading.load(directory, 'train', configs_per_module=2), 4)
  assert len(list(batches)) == len(alone) // 4
  assert batches.element_spec.context_spec.features_spec['config_id'].shape == [4, 2]


def test_smallest_module_is_one_of_its_kind(kind):
  (graph,) = loading.of_module(module_lib.smallest_module(kind), configs_per_module=2)
  np.testing.assert_array_equal(_configs(graph)['config_id'], [0, -1])
  assert graph.node_sets['op'].total_size == 1


def _shard(directory, split='train'):
  return sorted((directory / split).iterdir())[0]


def _refusal(directory, split='train'):
  with pytest.raises(errors.InputError) as info:
    loading.load(str(directory), split)
  return info.value


def test_sound_directory_has_sound_shards(directory):
  directory_lib.open_directory(directory).check_shards()


def test_missing_shard_is_named(damaged):
  shard = _shard(damaged)
  shard.unlink()
  error = _refusal(damaged)
  assert (error.reason, error.path) == ('shard missing', str(shard))


def test_missing_folder_of_shards_is_named(damaged):
  shard = _shard(damaged)
  shutil.rmtree(shard.parent)
  assert _refusal(damaged).path == str(shard)


def test_extra_shard_is_named(damaged):
  extra = damaged / 'train' / 'part-00000-of-00009.tfrecord'
  shutil.copy(_shard(damaged), extra)
  error = _refusal(damaged)
  assert (error.reason, error.path) == ('extra file', str(extra))


def test_shards_of_a_split_that_the_manifest_lacks_are_named(damaged):
  extra = damaged / 'test' / 'part-00000-of-00001.tfrecord'
  extra.parent.mkdir()
  shutil.copy(_shard(damaged), extra)
  error = _refusal(damaged)
  assert (error.reason, error.path) == ('extra file', str(extra))


@pytest.mark.parametrize('kept', [0, -10])
def test_truncated_shard_is_named(damaged, kept):
  shard = _shard(damaged)
  shard.write_bytes(shard.read_bytes()[:kept])
  error = _refusal(damaged)
  assert (error.reason, error.path) == ('shard of wrong size', str(shard))
  assert error.found == f'{shard.stat().st_size} bytes'


@pytest.mark.parametrize(
  ('position', 'options'),
  [
    (0, {}),
    (9, {'configs_per_module': 2}),
    (50, {'configs_per_module': 2, 'chunked': True}),
    (-1, {'configs_per_module': 2, 'shuffle': True}),
  ],
)
def test_flipped_byte_is_named(damaged, position, options):
  shard = _shard(damaged)
  data = bytearray(shard.read_bytes())
  data[position] ^= 0x10
  shard.write_bytes(data)
  # The length is the same, so that only reading finds the damage.
  directory = directory_lib.open_directory(damaged)
  with pytest.raises(errors.InputError) as info, directory_lib.damage_explained(directory):
    list(loading.load(directory, 'train', **options))
  assert (info.value.reason, info.value.path) == ('damaged shard', str(shard))


def test_other_errors_pass_while_shards_are_sound(directory):
  with (
    pytest.raises(tf.errors.InvalidArgumentError),
    directory_lib.damage_explained(directory_lib.open_directory(directory)),
  ):
    raise tf.errors.InvalidArgumentError(None, None, 'of another cause')


def test_missing_split_is_named(directory):
  error = _refusal(directory, 'test')
  assert (error.reason, error.expected, error.path) == ('split missing', 'test', directory)


def test_missing_manifest_is_named(damaged):
  (damaged / manifest_lib.FILE_NAME).unlink()
  error = _refusal(damaged)
  assert (error.reason, error.path) == ('no dataset', str(damaged))
  assert manifest_lib.FILE_NAME in str(error)


def test_no_directory(tmp_path):
  assert _refusal(tmp_path / 'nothing').reason == 'no dataset'


@pytest.mark.parametrize('text', ['', '{', '[]', '{"format_version": 99}'])
@pytest.mark.parametrize('name', [manifest_lib.FILE_NAME, manifest_lib.STATISTICS_NAME])
def test_damaged_description_is_named(damaged, name, text):
  (damaged / name).write_text(text)
  assert _refusal(damaged).path == str(damaged / name)


def test_incomplete_statistics_are_named(damaged):
  path = damaged / manifest_lib.STATISTICS_NAME
  content = json.loads(path.read_text())
  del content['features']['feat']['log']
  path.write_text(json.dumps(content))
  assert _refusal(damaged).path == str(path)


def test_missing_statistics_are_named(damaged):
  (damaged / manifest_lib.STATISTICS_NAME).unlink()
  assert _refusal(damaged).path == str(damaged / manifest_lib.STATISTICS_NAME)


@pytest.mark.parametrize('size', [0, -1])
def test_sample_of_nothing_is_refused(directory, size):
  with pytest.raises(errors.InputError, match='configs_per_module'):
    loading.load(directory, 'train', configs_per_module=size)
