"""Tests of tpu_graphs.modules.module: every `Module` is well formed, and its properties."""

import dataclasses
import tracemalloc

import numpy as np
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs.modules import module as module_lib


def _module(kind='tile', module_id='m', **over):
  arrays = {'tile': testing.tile_arrays, 'layout': testing.layout_arrays}[kind]()
  arrays['node_splits'] = np.array([0, 4])
  if kind == 'layout':
    arrays['node_config_feat'] = arrays['node_config_feat'].astype(np.int8)
  fields = {'config_id': np.arange(6), **arrays, **over}
  return module_lib.Module(module_id=module_id, kind=kind, **fields)


@pytest.mark.parametrize(
  'collection', ['tile:xla', 'layout:xla:random', 'layout:nlp:default', 'tile:own name']
)
def test_kind_of_collection(collection):
  assert module_lib.kind_of_collection(collection) == collection.split(':')[0]


@pytest.mark.parametrize('collection', ['', 'tile', 'tile:', 'Tile:xla', 'xla:tile', 'layouts:xla'])
def test_unknown_kind_of_collection(collection):
  with pytest.raises(errors.InputError, match='collection of unknown kind') as caught:
    module_lib.kind_of_collection(collection)
  assert caught.value.found == repr(collection)
  assert "'tile:NAME'" in caught.value.expected


def test_dtypes_and_sizes():
  tile, layout = _module('tile'), _module('layout')
  assert (tile.num_ops, tile.num_edges, tile.num_configs, tile.num_config_ops) == (4, 3, 6, 0)
  assert (layout.num_ops, layout.num_edges, layout.num_configs, layout.num_config_ops) == (
    4,
    3,
    6,
    2,
  )
  dtypes = {
    'node_opcode': 'u1',
    'node_feat': 'f4',
    'edge_index': 'i8',
    'node_splits': 'i8',
    'computation': 'i8',
    'config_runtime': 'i8',
    'config_id': 'i8',
    'extra_feat': 'f4',
  }
  own = {
    'tile': {'config_feat': 'f4', 'config_runtime_normalizers': 'i8'},
    'layout': {'node_config_ids': 'i8', 'node_config_feat': 'i1'},
  }
  for module in (tile, layout):
    for name, dtype in {**dtypes, **own[module.kind]}.items():
      assert getattr(module, name).dtype == np.dtype(dtype), name


@pytest.mark.parametrize(
  ('over', 'where', 'reason', 'found'),
  [
    ({'kind': 'tiles'}, 'kind', 'unknown kind', "'tiles'"),
    ({'module_id': ''}, 'module_id', 'empty name', None),
    ({'module_id': 'a\udcff'}, 'module_id', 'name not in Unicode', "'a\\udcff'"),
    ({'config_feat': None}, 'config_feat', 'array missing', None),
    ({'node_config_ids': np.array([0])}, 'node_config_ids', 'array of the other kind', None),
    ({'node_opcode': np.array([1, 2, 3, 121])}, 'node_opcode[3]', 'value out of range', '121'),
    ({'node_opcode': np.array([1, -2, 3, 4])}, 'node_opcode[1]', 'value out of range', '-2'),
    ({'node_opcode': np.ones((4, 1), int)}, 'node_opcode', 'wrong shape', '[4, 1]'),
    ({'node_opcode': np.ones(4)}, 'node_opcode', 'wrong dtype', 'float64'),
    ({'node_feat': np.zeros((4, 139), np.float32)}, 'node_feat', 'wrong shape', '[4, 139]'),
    ({'node_feat': np.zeros((4, 140), int)}, 'node_feat', 'wrong dtype', 'int64'),
    ({'edge_index': np.array([[1, 0], [4, 0]])}, 'edge_index[1, 0]', 'value out of range', '4'),
    ({'edge_index': np.array([[1, -1]])}, 'edge_index[0, 1]', 'value out of range', '-1'),
    (
      {'edge_index': np.array([[2**63, 0]], np.uint64)},
      'edge_index[0, 0]',
      'value out of range',
      str(2**63),
    ),
    ({'node_splits': np.array([1, 4])}, 'node_splits', 'not a list of splits', '[1, 4]'),
    ({'node_splits': np.array([0, 3, 2])}, 'node_splits', 'not a list of splits', '[0, 3, 2]'),
    ({'node_splits': np.array([], int)}, 'node_splits', 'not a list of splits', '[]'),
    ({'node_splits': np.array([0, 5])}, 'node_splits[1]', 'value out of range', '5'),
    ({'computation': np.array([0, 0, 0])}, 'computation', 'wrong shape', '[3]'),
    ({'extra_feat': np.zeros((3, 2))}, 'extra_feat', 'wrong shape', '[3, 2]'),
    ({'extra_feat': np.zeros(4)}, 'extra_feat', 'wrong shape', '[4]'),
    ({'extra_feat': np.zeros((4, 2), int)}, 'extra_feat', 'wrong dtype', 'int64'),
    ({'default_config': 6}, 'default_config', 'no such config', '6'),
    ({'config_id': np.array([0, 1, 2, 3, 4, 0])}, 'config_id', 'repeated value', None),
    ({'config_id': np.arange(6) - 1}, 'config_id[0]', 'value out of range', '-1'),
    ({'config_id': np.arange(5)}, 'config_id', 'wrong shape', '[5]'),
    (
      {'config_runtime': np.array([9, 9, 9, 9, 9, -2])},
      'config_runtime[5]',
      'value out of range',
      '-2',
    ),
    (
      {'config_runtime': np.array([9, 9, 0, 9, 9, 9])},
      'config_runtime',
      'time too short to be a measurement',
      '0 ns',
    ),
    (
      {'config_runtime': np.array([9, 9, 9, 1, 9, 9])},
      'config_runtime',
      'time too short to be a measurement',
      '1 ns',
    ),
    (
      {'config_runtime_normalizers': np.array([5, 0, 5, 5, 5, 5])},
      'config_runtime_normalizers[1]',
      'normalizer does not fit the runtime',
      '0 beside a runtime of 2000',
    ),
    (
      {'config_runtime': np.full(6, -1)},
      'config_runtime_normalizers[0]',
      'normalizer does not fit the runtime',
      '2000 beside a runtime of -1',
    ),
  ],
)
def test_malformed(over, where, reason, found):
  fields = {
    field.name: getattr(_module(), field.name) for field in dataclasses.fields(module_lib.Module)
  }
  with pytest.raises(errors.InputError) as caught:
    module_lib.Module(**{**fields, **over})
  assert (caught.value.where, caught.value.reason, caught.value.found) == (where, reason, found)
  assert caught.value.expected or caught.value.fix


@pytest.mark.parametrize(
  ('value', 'found'), [(np.nan, 'nan'), (np.inf, 'inf'), (-np.inf, '-inf'), (1e39, '1e+39')]
)
@pytest.mark.parametrize('name', ['node_feat', 'config_feat', 'extra_feat'])
def test_not_finite(name, value, found):
  array = getattr(_module(extra_feat=np.ones((4, 8))), name).astype(np.float64)
  array[2, 7] = value
  with pytest.raises(errors.InputError, match='value not finite') as caught:
    _module(**{name: array})
  assert (caught.value.where, caught.value.found) == (f'{name}[2, 7]', found)


def test_check_makes_no_array_of_the_size_of_the_features():
  arrays = testing.tile_arrays(n=5000)
  tracemalloc.start()
  try:
    _module(**{**arrays, 'node_splits': np.array([0, 5000])})
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert peak < arrays['node_feat'].nbytes / 8  # A bool per feature would be a quarter.


def test_fields_that_few_sources_have_are_optional():
  module = _module()
  assert (module.num_extra, module.extra_feat.shape) == (0, (4, 0))
  assert (module.unknown_opcodes, module.default_config) == ({}, None)


def test_no_ops_allow_no_edges():
  empty = {
    'node_opcode': np.zeros(0, int),
    'node_feat': np.zeros((0, 140)),
    'node_splits': np.array([0]),
  }
  assert _module(**empty, edge_index=np.zeros((0, 2), int)).num_ops == 0
  with pytest.raises(errors.InputError, match='there is no op'):
    _module(**empty, edge_index=np.zeros((1, 2), int))


@pytest.mark.parametrize(
  ('splits', 'segments'),
  [
    ([0], [0, 0, 0, 0]),
    ([0, 4], [0, 0, 0, 0]),
    ([0, 1, 4], [0, 1, 1, 1]),
    ([0, 1], [0, 1, 1, 1]),
    ([0, 2, 2, 4], [0, 0, 2, 2]),
    ([0, 1, 2, 3, 4], [0, 1, 2, 3]),
  ],
)
def test_computation_defaults_to_the_segment(splits, segments):
  module = _module(node_splits=np.array(splits))
  assert module.computation.tolist() == segments
  assert module.node_splits[-1] == 4
  np.testing.assert_array_equal(module_lib.segment_of_op(module.node_splits), segments)


def test_given_computation_is_kept():
  assert _module(computation=np.array([3, 0, 0, 1])).computation.tolist() == [3, 0, 0, 1]


def test_relative_runtime_of_tile():
  result = module_lib.relative_runtime(np.array([3000, -1, 10]), np.array([2000, -1, 3]))
  assert result.dtype == np.float64
  assert result.tolist() == [1.5, -1.0, 10 / 3]
  np.testing.assert_array_equal(_module().relative_runtime, [0.5, 1, 1.5, 2, 2.5, 3])


def test_relative_runtime_of_layout_keeps_integers_apart():
  runtime = np.array([910876401, 910876402, -1, 2**53 + 1])
  result = module_lib.relative_runtime(runtime, None)
  assert result.dtype == np.int64
  assert result.tolist() == [910876401, 910876402, -1, 2**53 + 1]


def test_is_measured():
  unmeasured = np.full(6, -1)
  assert _module().is_measured
  assert not _module(config_runtime=unmeasured, config_runtime_normalizers=unmeasured).is_measured
  assert _module('layout', config_runtime=np.array([-1, -1, 5, -1, -1, -1])).is_measured


_EDGES = np.array([[1, 0], [3, 1], [3, 2], [2, 0]])


def test_fingerprint_depends_only_on_the_graph():
  base = _module(edge_index=_EDGES).topology_fingerprint()
  assert len(base) == 16
  assert _module(edge_index=_EDGES[::-1]).topology_fingerprint() == base
  assert _module(edge_index=_EDGES[[2, 0, 3, 1]].astype('>i4')).topology_fingerprint() == base
  assert (
    _module(
      edge_index=_EDGES,
      node_feat=np.ones((4, 140)),
      config_runtime=np.full(6, 7),
      module_id='other',
      node_splits=np.array([0, 2, 4]),
    ).topology_fingerprint()
    == base
  )
  layout = _module('layout', edge_index=_EDGES, node_opcode=_module().node_opcode)
  assert layout.topology_fingerprint() == base


@pytest.mark.parametrize(
  'edges',
  [
    _EDGES[:3],
    _EDGES[:0],
    _EDGES[:, ::-1],
    np.vstack([_EDGES, _EDGES[:1]]),
    [[1, 0], [3, 1], [3, 2], [2, 1]],
  ],
)
def test_fingerprint_differs_on_an_edge(edges):
  assert (
    _module(edge_index=np.array(edges)).topology_fingerprint()
    != _module(edge_index=_EDGES).topology_fingerprint()
  )


def test_fingerprint_differs_on_an_opcode():
  opcode = _module().node_opcode.copy()
  opcode[2] = 0
  assert _module(node_opcode=opcode).topology_fingerprint() != _module().topology_fingerprint()


@pytest.mark.parametrize('kind', ['tile', 'layout'])
@pytest.mark.parametrize('indices', [[5, 0, 3], [2], [], [0, 1, 2, 3, 4, 5]])
def test_select_configs(kind, indices):
  module = _module(
    kind,
    config_id=np.arange(6) * 10,
    dropped_runs={'failed': 3},
    unknown_opcodes={'é': 2},
    default_config=20,
    extra_feat=np.ones((4, 3), np.float32),
  )
  indices = np.array(indices, np.int64)
  selected = module.select_configs(indices)
  for name in (
    'config_runtime',
    'config_id',
    'config_feat',
    'config_runtime_normalizers',
    'node_config_feat',
  ):
    array = getattr(module, name)
    if array is None:
      assert getattr(selected, name) is None
    else:
      np.testing.assert_array_equal(getattr(selected, name), array[indices])
  for name in (
    'node_opcode',
    'node_feat',
    'edge_index',
    'node_splits',
    'computation',
    'node_config_ids',
    'extra_feat',
  ):
    np.testing.assert_array_equal(getattr(selected, name), getattr(module, name))
  for name in ('module_id', 'dropped_runs', 'unknown_opcodes'):
    assert getattr(selected, name) == getattr(module, name)
  assert selected.default_config == (20 if 2 in indices else None)
