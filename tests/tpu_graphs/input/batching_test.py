"""Tests of tpu_graphs.input.batching: batches are compared with the arrays they are made of."""

import collections
import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import records
from tpu_graphs.input import batching
from tpu_graphs.input import decoding
from tpu_graphs.input import loading
from tpu_graphs.input import packing
from tpu_graphs.sources import npz

_K = 5
_INTS = ('config_id', 'config_runtime', 'config_runtime_normalizer', 'relative_runtime')
_SHAPES = pytest.mark.parametrize('shapes', [None, 1, 3])


def _arrays(kind, n, c, seed, **over):
  return testing.arrays(kind, n=n, c=c, seed=seed, nc=min(n, 3), **over)


def _sources(kind):
  """Returns arrays by split/stem.

  There are modules with one op, no edge, C = 1, C < K, C == K, C > K, a unicode name, ties, and
  with no or some runtimes.
  """
  runtime = np.arange(1, 10) * 1000
  sources = {
    'train/one': _arrays(kind, 1, 1, 1),
    'train/few': _arrays(kind, 3, 3, 2),
    'train/equal': _arrays(kind, 4, _K, 3),
    'train/many-π模': _arrays(kind, 7, 30, 4),
    'train/ties': _arrays(kind, 5, 9, 5, config_runtime=np.full(9, 7000)),
    'train/no-edge': _arrays(kind, 3, 7, 6, edge_index=np.zeros((0, 2), np.int64)),
    'train/large': _arrays(kind, 19, 8, 7),
    'valid/other': _arrays(kind, 6, 11, 9),
    'train/unmeasured': _arrays(kind, 2, 4, 8, config_runtime=np.zeros(4, np.int64)),
    **{f'train/more-{i}': _arrays(kind, 3 + i, 4 + i, 10 + i) for i in range(6)},
  }
  if kind == 'layout':
    sources['train/fixed'] = testing.layout_arrays(n=3, c=5, nc=0, seed=20)
    sources['train/last'] = testing.layout_arrays(
      n=6, c=9, nc=2, seed=21, node_config_ids=np.array([4, 5]), config_runtime=runtime
    )
  return sources


@pytest.fixture(scope='session')
def sources(kind):
  return _sources(kind)


@pytest.fixture(scope='session')
def directory(kind, sources, tmp_path_factory):
  folder = tmp_path_factory.mktemp(f'batching_{kind}')
  return directory_lib.open_directory(testing.convert_arrays(folder, kind, sources, num_shards=3))


@pytest.fixture(scope='session')
def measured(sources):
  """Returns the names of the modules of the train split that are measured."""
  return {name.removeprefix('train/') for name in sources if name.startswith('train/')} - {
    'unmeasured'
  }


def _options(**over):
  return batching.BatchOptions(**{'batch_size': 3, 'configs_per_module': _K, **over})


def _batches(directory, *, epochs=1, with_ids=True, split='train', options=None, **over):
  return list(
    batching.batches(
      directory, split, options or _options(), epochs=epochs, with_ids=with_ids, **over
    )
  )


@dataclasses.dataclass
class _Component:
  """A component as NumPy arrays: features by name, ends of edges counted from its own first op."""

  module_id: str
  context: dict
  ops: dict
  edges: np.ndarray
  layouts: np.ndarray
  configured: np.ndarray


def _components(graph):
  """Returns all components of a batch, padding included."""

  def starts(part):
    return np.concatenate([[0], np.cumsum(part.sizes.numpy())])

  context = {name: value.numpy() for name, value in graph.context.features.items()}
  ops, operand = graph.node_sets['op'], graph.edge_sets['operand'].adjacency
  edges = np.stack([operand.target.numpy(), operand.source.numpy()], axis=1)
  of_op, of_edge = starts(ops), starts(graph.edge_sets['operand'])
  features = {name: value.numpy() for name, value in ops.features.items()}
  layouts, configured, of_config_op = (
    np.zeros((0, 0, 18), np.int8),
    np.zeros(0, int),
    np.zeros(of_op.size, int),
  )
  if 'config_op' in graph.node_sets:
    layouts = graph.node_sets['config_op']['config_feat'].numpy()
    configures = graph.edge_sets['configures']
    of_config_op, configured = (
      starts(graph.node_sets['config_op']),
      configures.adjacency.target.numpy(),
    )
    np.testing.assert_array_equal(configures.adjacency.source, np.arange(len(layouts)))
    np.testing.assert_array_equal(starts(configures), of_config_op)
  assert (of_op[-1], of_edge[-1], of_config_op[-1]) == (
    len(features['feat']),
    len(edges),
    len(layouts),
  )
  components = []
  for i in range(of_op.size - 1):
    op, edge, config_op = (slice(*of[i : i + 2]) for of in (of_op, of_edge, of_config_op))
    values = {name: value[i] for name, value in context.items()}
    components.append(
      _Component(
        values.pop('module_id', b'').decode(),
        values,
        {name: value[op] for name, value in features.items()},
        edges[edge] - op.start,
        layouts[config_op],
        configured[config_op] - op.start,
      )
    )
  return components


def _real(graph):
  """Returns the components of modules; checks the components of padding.

  The last component of padding has at least one op.
  """
  components = _components(graph)
  real = [component for component in components if component.module_id]
  padding = components[len(real) :]
  assert padding
  for component in padding:
    for name, value in component.context.items():
      assert (value == (-1 if name in _INTS else 0)).all(), name
    for name, value in component.ops.items():
      assert not value.any(), name
    assert (component.layouts == -1).all()
  for component in padding[:-1]:
    assert not component.ops['opcode'].size + len(component.edges) + component.configured.size
  num_ops = padding[-1].ops['opcode'].size
  assert num_ops >= 1
  for ends in (padding[-1].edges, padding[-1].configured):
    assert ((ends >= 0) & (ends < num_ops)).all()
  return real


def _assert_configs(component, arrays, configs=_K):
  """Checks the configs of a component against `arrays`, and returns their ids.

  Each config is the config of its id, none occurs twice, and padding follows.
  """
  context, runtime = component.context, arrays['config_runtime'].astype(np.int64)
  ids = context['config_id'][context['config_id'] >= 0]
  real = np.arange(configs) < ids.size
  assert len(set(ids.tolist())) == ids.size
  expected = {
    'config_id': np.arange(runtime.size),
    'config_runtime': np.where(runtime == 0, -1, runtime),
  }
  if 'config_feat' in arrays:
    normalizer = arrays['config_runtime_normalizers']
    expected |= {
      'config_runtime_normalizer': np.where(runtime == 0, -1, normalizer),
      'config_feat': arrays['config_feat'],
      'relative_runtime': np.where(runtime == 0, -1, runtime * 2**32 // normalizer),
    }
  else:
    expected['relative_runtime'] = expected['config_runtime']
    layouts = arrays['node_config_feat'].astype(np.int8)[ids]
    np.testing.assert_array_equal(component.layouts[:, real], np.moveaxis(layouts, 0, 1))
    assert (component.layouts[:, ~real] == -1).all()
  assert context.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(context[name][real], value[ids], err_msg=name)
    assert (context[name][~real] == (-1 if name in _INTS else 0)).all(), name
  return ids.tolist()


def _assert_whole(component, arrays, configs=_K):
  """Checks that a component holds the whole graph of `arrays`, and configs; returns their ids."""
  np.testing.assert_array_equal(component.ops['opcode'], arrays['node_opcode'])
  np.testing.assert_array_equal(component.ops['feat'], arrays['node_feat'])
  np.testing.assert_array_equal(component.ops['computation'], np.zeros(len(arrays['node_opcode'])))
  np.testing.assert_array_equal(component.edges, arrays['edge_index'])
  np.testing.assert_array_equal(component.configured, arrays.get('node_config_ids', []))
  return _assert_configs(component, arrays, configs)


def _parts(graph, other):
  """Returns pairs of parts of two graphs that should be equal."""
  yield graph.context, other.context
  for sets, others in ((graph.node_sets, other.node_sets), (graph.edge_sets, other.edge_sets)):
    assert sets.keys() == others.keys()
    yield from ((sets[name], others[name]) for name in sets)


def _flat(graph):
  return [value.numpy() for value in tf.nest.flatten(graph, expand_composites=True)]


def _assert_equal(batches, others):
  assert len(batches) == len(others)
  for graph, other in zip(batches, others, strict=True):
    for value, expected in zip(_flat(graph), _flat(other), strict=True):
      np.testing.assert_array_equal(value, expected)


def _ids(batches):
  return [component.module_id for graph in batches for component in _real(graph)]


@_SHAPES
def test_an_epoch_holds_each_measured_module_once(directory, sources, measured, shapes):
  batches = _batches(directory, options=_options(shapes=shapes), epochs=2)
  for epoch in (0, 1):
    number = batching.batches_per_epoch(directory, 'train', _options(shapes=shapes), epoch=epoch)
    mine, batches = batches[:number], batches[number:]
    assert sorted(_ids(mine)) == sorted(measured)
    for component in (component for graph in mine for component in _real(graph)):
      arrays = sources[f'train/{component.module_id}']
      assert len(_assert_whole(component, arrays)) == min(_K, arrays['config_runtime'].size)
  assert not batches


@pytest.mark.parametrize(('shapes', 'size'), [(None, 4), (1, 1), (3, 4), (3, 1000)])
def test_a_batch_has_about_as_many_ops_as_asked_for(directory, sources, measured, shapes, size):
  plan = batching.plan_of(directory, 'train', _options(shapes=shapes, batch_size=size))
  sizes = [sources[f'train/{name}']['node_opcode'].size for name in measured]
  limit = max(np.ceil(size * np.mean(sizes)), max(sizes) if shapes == 1 else 0)
  for graph in _batches(directory, options=plan.options):
    ops = [component.ops['opcode'].size for component in _real(graph)]
    assert sum(ops) <= limit or len(ops) == 1
  if size == 1000:
    assert plan.batches_per_epoch(0) == 1


def test_chunks_equal_what_tfgnn_merges(directory):
  # TF-GNN makes the same with `tfgnn.parse_single_example` and `merge_batch_to_components`.
  [graph] = _batches(
    directory, split='valid', options=_options(batch_size=9, configs_per_module=4), chunked=True
  )
  alone = loading.load(directory, 'valid', configs_per_module=4, chunked=True)
  [merged] = loading.batch(alone, 3)
  components, others = _components(graph), _components(merged)
  assert len(others) == 3
  for component, other in zip(components, others, strict=False):
    for field in dataclasses.fields(_Component):
      np.testing.assert_equal(
        getattr(component, field.name), getattr(other, field.name), err_msg=field.name
      )
  for part, other in _parts(graph, merged):
    assert part.sizes.dtype == other.sizes.dtype
    assert {name: value.dtype for name, value in part.features.items()} == {
      name: value.dtype for name, value in other.features.items()
    }
  for name, edges in merged.edge_sets.items():
    assert graph.edge_sets[name].adjacency.source.dtype == edges.adjacency.source.dtype


@pytest.mark.parametrize('shapes', [None, 2])
def test_chunks_cover_all_configs_of_all_modules(directory, sources, shapes):
  found = collections.defaultdict(list)
  options = _options(shapes=shapes, batch_size=4)
  batches = _batches(directory, options=options, chunked=True)
  for component in (component for graph in batches for component in _real(graph)):
    found[component.module_id] += _assert_whole(component, sources[f'train/{component.module_id}'])
  assert found == {
    name.removeprefix('train/'): list(range(arrays['config_runtime'].size))
    for name, arrays in sources.items()
    if name.startswith('train/')
  }
  assert len(batches) == batching.batches_per_epoch(directory, 'train', options, chunked=True)


@pytest.mark.parametrize('configs', [1, 64])
def test_number_of_configs(directory, sources, configs):
  for graph in _batches(directory, options=_options(configs_per_module=configs)):
    for component in _real(graph):
      arrays = sources[f'train/{component.module_id}']
      assert len(_assert_whole(component, arrays, configs)) == min(
        configs, arrays['config_runtime'].size
      )


@pytest.mark.parametrize('epochs', [1, 3, None])
def test_static_batches_have_one_shape_and_no_strings(directory, epochs):
  batches = batching.batches(directory, 'train', _options(shapes=1), epochs=epochs)
  specs = tf.nest.flatten(batches.element_spec, expand_composites=True)
  assert all(spec.shape.is_fully_defined() for spec in specs)
  assert all(spec.dtype != tf.string for spec in specs)
  for graph in batches.take(20):
    for value, spec in zip(tf.nest.flatten(graph, expand_composites=True), specs, strict=True):
      assert value.shape == spec.shape


@_SHAPES
def test_components_are_static(directory, shapes):
  spec = batching.batches(directory, 'train', _options(shapes=shapes)).element_spec
  size = batching.plan_of(directory, 'train', _options(shapes=shapes)).budgets[0].components
  assert spec.context_spec.features_spec['config_id'].shape == [size, _K]
  assert spec.node_sets_spec['op'].sizes_spec.shape == [size]


def test_sizes_that_are_not_static_come_in_steps(directory):
  for graph in _batches(directory):
    sizes = graph.node_sets['op'].sizes.numpy()
    assert sizes.sum() % decoding.OPS_MULTIPLE == 0
    assert 1 <= sizes[-1] <= decoding.OPS_MULTIPLE


def test_a_pack_is_padded_to_the_smallest_shape_that_fits(directory):
  options = _options(shapes=3, batch_size=2)
  budgets = batching.plan_of(directory, 'train', options).budgets
  assert 1 < len(budgets) <= 3
  seen = set()
  for graph in _batches(directory, options=options, epochs=4):
    real = _real(graph)
    totals = [
      1 + sum(component.ops['opcode'].size for component in real),
      sum(len(component.edges) for component in real),
      sum(component.configured.size for component in real),
    ]
    fitting = [
      budget
      for budget in budgets
      if all(map(int.__le__, totals, (budget.ops, budget.edges, budget.config_ops)))
    ]
    assert graph.node_sets['op'].total_size == fitting[0].ops
    assert graph.edge_sets['operand'].total_size == fitting[0].edges
    seen.add(fitting[0])
  assert len(seen) > 1


def test_seed_and_epoch_decide_everything(directory):
  options = _options(shapes=2)
  first = _batches(directory, options=options, epochs=2)
  done = batching.batches_per_epoch(directory, 'train', options)
  tf.random.set_seed(7)
  _assert_equal(first, _batches(directory, options=options, epochs=2))
  _assert_equal(first[done:], _batches(directory, options=options, epoch=1))
  orders = [
    _ids(first[:done]),
    _ids(first[done:]),
    _ids(_batches(directory, options=_options(shapes=2, seed=1))),
  ]
  assert orders[0] not in orders[1:]
  assert orders[1] != orders[2]


def _hold(directory, monkeypatch, pool):
  """Lets the pool of the train split hold `pool` records."""
  split = directory.split('train')
  monkeypatch.setattr(packing, '_POOL_BYTES', pool * -(-split.bytes // split.records))


@pytest.mark.parametrize(('pool', 'packs'), [(1, 1), (4, 2), (9, 1), (100, 1)])
def test_reading_resumes_in_the_middle_of_an_epoch(directory, measured, monkeypatch, pool, packs):
  _hold(directory, monkeypatch, pool)
  monkeypatch.setattr(packing, 'CYCLE', 2)
  arguments = {
    'options': _options(shapes=2, batch_size=2),
    'epochs': 2,
    'replicas': 2,
    'packs': packs,
  }
  whole = _batches(directory, **arguments)
  number = batching.batches_per_epoch(
    directory, 'train', arguments['options'], replicas=2, packs=packs
  )
  assert number > 1
  assert sorted(_ids(whole[: 2 * number])) == sorted(measured)
  for done in (1, number):
    _assert_equal(whole[2 * done :], _batches(directory, first_batch=done, **arguments))


@pytest.mark.parametrize(('pool', 'read_ahead'), [(1, 0), (3, 1 << 18), (9, 0), (12, 1 << 18)])
def test_what_is_read_is_what_was_planned(directory, monkeypatch, pool, read_ahead):
  monkeypatch.setattr(packing, '_READ_AHEAD_BYTES', read_ahead)
  _hold(directory, monkeypatch, pool)
  options = _options(batch_size=2)
  shards = [
    tf.data.TFRecordDataset(f'{directory.path}/{shard.name}')
    for shard in directory.split('train').shards
  ]
  parse = decoding.Decoder(directory.kind, 1, with_ids=True).parse
  ids = [
    name.decode() for shard in shards for name in parse(list(shard))['context/module_id'].numpy()
  ]
  plans = [
    batching.plan_of(directory, 'train', options, num_inputs=2).epoch(tf.constant(3, tf.int64), i)
    for i in (0, 1)
  ]
  kept = np.flatnonzero(packing.read_sizes(directory, 'train').measured)
  for i, plan in enumerate(plans):
    found = _ids(_batches(directory, options=options, epoch=3, num_inputs=2, input_index=i))
    assert found == [ids[kept[item]] for item in plan.items.numpy()]


@pytest.mark.parametrize('shapes', [None, 2])
def test_two_packs_in_one_element_are_those_of_two_replicas(directory, shapes):
  options = _options(shapes=shapes, batch_size=2)
  merged = _batches(directory, options=options, packs=2, epochs=2)
  alone = _batches(directory, options=options, replicas=2, epochs=2)
  assert len(alone) == 2 * len(merged)
  for i, graph in enumerate(merged):
    pair = alone[2 * i : 2 * i + 2]
    real = [component for each in pair for component in _real(each)]
    for component, other in zip(_real(graph), real, strict=True):
      for field in dataclasses.fields(_Component):
        np.testing.assert_equal(getattr(component, field.name), getattr(other, field.name))
    assert graph.context['config_id'].shape[0] == 2 * pair[0].context['config_id'].shape[0]
    if shapes:
      for name, part in graph.node_sets.items():
        assert [2 * int(each.node_sets[name].total_size) for each in pair] == [
          int(part.total_size)
        ] * 2


@pytest.mark.parametrize('replicas', [1, 2])
def test_inputs_share_the_modules_and_agree_on_number_and_shapes(directory, measured, replicas):
  options = _options(shapes=3, batch_size=2)
  inputs = [
    _batches(directory, options=options, replicas=replicas, num_inputs=2, input_index=i)
    for i in (0, 1)
  ]
  assert sorted(_ids(inputs[0]) + _ids(inputs[1])) == sorted(measured)
  assert all(_ids(batches) for batches in inputs)
  number = batching.batches_per_epoch(directory, 'train', options, replicas=replicas, num_inputs=2)
  assert [len(batches) for batches in inputs] == [number * replicas] * 2
  for i in range(number):
    group = [graph for batches in inputs for graph in batches[i * replicas : (i + 1) * replicas]]
    assert len({int(graph.node_sets['op'].total_size) for graph in group}) == 1


def test_an_input_without_measured_modules_gives_padding(kind, tmp_path):
  sources = {'train/a': _arrays(kind, 3, 4, 0), 'train/b': _arrays(kind, 3, 4, 1)}
  for name in ('c', 'd'):
    sources[f'train/{name}'] = _arrays(kind, 3, 4, 2, config_runtime=np.zeros(4, np.int64))
  folder = directory_lib.open_directory(
    testing.convert_arrays(tmp_path, kind, sources, num_shards=4)
  )
  options = _options(batch_size=1, shapes=1)
  found = [_batches(folder, options=options, num_inputs=4, input_index=i) for i in range(4)]
  assert [len(batches) for batches in found] == [1] * 4
  assert sorted(name for batches in found for name in _ids(batches)) == ['a', 'b']
  assert any(not _ids(batches) for batches in found)


def test_records_of_one_module_are_seen_each(kind, sources, measured, tmp_path):
  folder = testing.convert_arrays(
    tmp_path, kind, sources, num_shards=2, records=records.RecordOptions(max_configs=4)
  )
  taken = collections.defaultdict(list)
  options = _options(configs_per_module=4, shapes=2)
  for graph in batching.batches(folder, 'train', options, epochs=1, with_ids=True):
    for component in _real(graph):
      taken[component.module_id] += _assert_whole(
        component, sources[f'train/{component.module_id}'], 4
      )
  assert {name: sorted(ids) for name, ids in taken.items()} == {
    name: list(range(sources[f'train/{name}']['config_runtime'].size)) for name in measured
  }


def test_a_split_of_one_record(directory, sources):
  for epoch_batches in (
    _batches(directory, split='valid', options=_options(batch_size=100, shapes=4)),
    _batches(directory, split='valid', options=_options(batch_size=1), packs=3),
  ):
    [graph] = epoch_batches
    [component] = _real(graph)
    _assert_whole(component, sources['valid/other'])


def test_modules_that_are_too_large_are_named(directory):
  with pytest.raises(errors.InputError) as info:
    batching.batches(directory, 'train', _options(max_ops=6))
  assert info.value.reason == 'modules too large'
  assert info.value.found.startswith('large (19 ops), more-5 (8 ops), many-π模 (7 ops) and ')
  batching.batches(directory, 'train', _options(max_ops=19))


def test_modules_that_are_too_large_are_left_out(directory, sources, measured):
  options = _options(max_ops=6, oversize='skip', shapes=1)
  plan = batching.plan_of(directory, 'train', options)
  large = {name: sources[f'train/{name}']['node_opcode'].size for name in measured}
  large = {name: ops for name, ops in large.items() if ops > 6}
  assert dict(plan.oversize) == large
  assert plan.oversize[0] == ('large', 19)
  named = 'large (19 ops), more-5 (8 ops), many-π模 (7 ops)'
  if len(large) > 3:
    named += f' and {len(large) - 3} more'
  assert f'{len(large)} of more than 6 ops left out: {named}' in plan.describe()
  batches = _batches(directory, options=options)
  assert sorted(_ids(batches)) == sorted(measured - large.keys())
  assert max(graph.node_sets['op'].total_size for graph in batches) <= 8


@pytest.mark.parametrize('shapes', [None, 1, 2])
def test_segments_of_modules_that_are_too_large(directory, sources, measured, shapes):
  length = 6
  options = _options(max_ops=length, oversize='segment', shapes=shapes, batch_size=1)
  plan = batching.plan_of(directory, 'train', options)
  assert 'in segments' in plan.describe()
  starts = collections.defaultdict(set)
  batches = _batches(directory, options=options, epochs=8)
  assert sorted(_ids(batches)) == sorted([*measured] * 8)
  for graph in batches:
    for component in _real(graph):
      arrays = sources[f'train/{component.module_id}']
      number = min(length, arrays['node_opcode'].size)
      assert component.ops['opcode'].size == number
      [start] = [
        i
        for i in range(arrays['node_opcode'].size - number + 1)
        if np.array_equal(component.ops['feat'], arrays['node_feat'][i : i + number])
      ]
      edges = arrays['edge_index'] - start
      inside = ((edges >= 0) & (edges < number)).all(axis=1)
      np.testing.assert_array_equal(component.edges, edges[inside])
      arrays = dict(arrays)
      if 'node_config_ids' in arrays:
        configured = arrays['node_config_ids'] - start
        inside = (configured >= 0) & (configured < number)
        assert inside.any() or not configured.size
        np.testing.assert_array_equal(component.configured, configured[inside])
        arrays['node_config_feat'] = arrays['node_config_feat'][:, inside]
      _assert_configs(component, arrays)
      starts[component.module_id].add(start)
  assert {name for name, found in starts.items() if len(found) > 1} <= dict(plan.oversize).keys()
  assert len(starts['large']) > 1


def test_segments_are_not_scored(directory):
  options = _options(max_ops=6, oversize='segment')
  with pytest.raises(errors.InputError, match=r'oversize.*segment.*fail or skip'):
    batching.plan_of(directory, 'train', options, chunked=True)


def test_segments_do_not_depend_on_the_elements_that_packs_are_in(directory):
  options = _options(max_ops=6, oversize='segment', batch_size=1)
  merged, alone = (
    _batches(directory, options=options, packs=3),
    _batches(directory, options=options, replicas=3),
  )
  real, others = (
    [component for graph in batches for component in _real(graph)] for batches in (merged, alone)
  )
  for component, other in zip(real, others, strict=True):
    np.testing.assert_equal(dataclasses.asdict(component), dataclasses.asdict(other))


@pytest.mark.parametrize('extra', [None, np.arange(15, dtype=np.float32).reshape(5, 3)])
@pytest.mark.parametrize('configs', [11, 4])
def test_chunks_of_a_module(kind, tmp_path, extra, configs):
  arrays = _arrays(kind, 5, configs, 0)
  np.savez(tmp_path / 'é.npz', **arrays)
  module = dataclasses.replace(npz.load(tmp_path / 'é.npz'), extra_feat=extra)
  ids = []
  for graph in batching.of_module(module, configs_per_module=4, with_ids=True):
    [component] = _real(graph)
    ids += _assert_whole(component, arrays, 4)
    assert component.module_id == 'é'
    if extra is not None:
      np.testing.assert_array_equal(component.ops['extra_feat'], extra)
  assert ids == list(range(configs))
  assert (
    'module_id' not in next(iter(batching.of_module(module, configs_per_module=4))).context.features
  )


@pytest.mark.parametrize(
  ('over', 'where'),
  [
    ({'batch_size': 0}, 'batch_size'),
    ({'configs_per_module': 0}, 'configs_per_module'),
    ({'shapes': 0}, 'shapes'),
    ({'max_ops': 0}, 'max_ops'),
    ({'config_sampling': 'best'}, "'best'"),
    ({'oversize': 'cut'}, "'cut'"),
  ],
)
def test_options_that_cannot_be_are_refused(over, where):
  with pytest.raises(errors.InputError, match=where):
    _options(**over)


@pytest.mark.parametrize(
  'over',
  [
    {'packs': 0},
    {'replicas': 0},
    {'num_inputs': 0},
    {'input_index': 1},
    {'num_inputs': 2, 'input_index': -1},
  ],
)
def test_places_that_cannot_be_are_refused(directory, over):
  with pytest.raises(errors.InputError, match=[*over][-1]):
    batching.batches(directory, 'train', _options(), **over)


def test_fewer_shards_than_inputs(directory):
  with pytest.raises(errors.InputError) as info:
    batching.batches(directory, 'train', _options(), num_inputs=4)
  assert (info.value.reason, info.value.found) == (
    'fewer shards than inputs',
    '3 shards for 4 inputs',
  )
  assert '--num_shards=4' in str(info.value)


def test_missing_split_is_named(directory):
  with pytest.raises(errors.InputError, match='split missing'):
    batching.batches(directory.path, 'test', _options())


def test_nothing_measured(kind, tmp_path):
  folder = testing.convert_arrays(
    tmp_path, kind, {'train/a': _arrays(kind, 2, 4, 0, config_runtime=np.zeros(4, int))}
  )
  with pytest.raises(
    errors.InputError, match=r'nothing to learn from.*1 of 1 records without runtimes'
  ):
    batching.batches(folder, 'train', _options())
  assert len(list(batching.batches(folder, 'train', _options(), epochs=1, chunked=True))) == 1


def test_describes_what_packs_are_like(directory, measured):
  plan = batching.plan_of(directory, 'train', _options(shapes=1))
  number = plan.batches_per_epoch(0)
  text = plan.describe()
  assert text.startswith(f'{number} packs of <= ')
  assert (
    f'{len(measured) / number:.1f} modules on average, padded to {plan.budgets[0].ops}: ' in text
  )
  assert text.endswith('% filled; 1 records without runtimes left out')
