"""Tests of tpu_graphs.dataset.records: tfgnn and protobuf are the oracles of every byte."""

import dataclasses
import io
import itertools
import subprocess
import sys

from google.protobuf.internal import encoder
import google_crc32c
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tests import testing
from tpu_graphs import errors
from tpu_graphs.compat import tfgnn
from tpu_graphs.dataset import records
from tpu_graphs.dataset import schema
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import npz

_SETTINGS = hypothesis.settings(max_examples=50, deadline=None)
_INT64 = (
  st.integers(-(2**63), 2**63 - 1)
  | st.integers(0, 63).map(lambda i: (1 << i) - 1)
  | st.integers(0, 62).map(lambda i: 1 << i)
)


def _module(mk, name='é', **sizes):
  file = io.BytesIO()
  np.savez(file, **mk(**sizes))
  return npz.read(file, path=f'{name}.npz')


_T, _L = testing.tile_arrays, testing.layout_arrays
_UNMEASURED = {'config_runtime': np.zeros(6, int)}
_CASES = {
  'tile': (_T, {}),
  'layout': (_L, {}),
  'tile without configs': (_T, {'c': 0}),
  'layout without configs': (_L, {'c': 0}),
  'tile, one op': (_T, {'n': 1, 'c': 1}),
  'layout, one op': (_L, {'n': 1, 'c': 1, 'nc': 1}),
  'layout without configurable ops': (_L, {'nc': 0}),
  'nothing but an op': (_L, {'n': 1, 'c': 0, 'nc': 0}),
  'tile, not measured': (_T, _UNMEASURED),
  'layout, not measured': (_L, _UNMEASURED),
  'large times': (
    _L,
    {'config_runtime': np.array([910876401, 910876402, 2**31, 2**53 + 1, 2**62, 2**63 - 1])},
  ),
  'large': (_T, {'n': 300, 'c': 200}),
}


def _cases():
  return pytest.mark.parametrize(('mk', 'over'), _CASES.values(), ids=_CASES.keys())


def _graph_tensor(module):
  """Returns the GraphTensor of a module, built piece by piece as the schema describes it."""
  c, n = module.num_configs, module.num_ops
  ragged = {'config_id': module.config_id, 'config_runtime': module.config_runtime}
  context = {'module_id': tf.constant([module.module_id])}
  if module.kind == 'tile':
    ragged |= {
      'config_feat': module.config_feat,
      'config_runtime_normalizer': module.config_runtime_normalizers,
    }
  else:
    context['node_config_feat'] = tf.constant([module.node_config_feat.tobytes()])
  context |= {
    name: tf.RaggedTensor.from_row_lengths(array, np.array([c])) for name, array in ragged.items()
  }
  op_features = {
    'opcode': module.node_opcode.astype(np.int64),
    'feat': module.node_feat,
    'computation': module.computation,
  }
  if module.num_extra:
    op_features['extra_feat'] = module.extra_feat
  op = tfgnn.NodeSet.from_fields(sizes=[n], features=op_features)
  node_sets = {'op': op}
  edges = {'operand': ('op', 'op', module.edge_index[:, 1], module.edge_index[:, 0])}
  if module.kind == 'layout':
    node_sets['config_op'] = tfgnn.NodeSet.from_fields(sizes=[module.num_config_ops], features={})
    edges['configures'] = (
      'config_op',
      'op',
      np.arange(module.num_config_ops),
      module.node_config_ids,
    )
  edge_sets = {
    name: tfgnn.EdgeSet.from_fields(
      sizes=[len(one)],
      features={},
      adjacency=tfgnn.Adjacency.from_indices(
        (source, tf.constant(one, tf.int64)), (target, tf.constant(other, tf.int64))
      ),
    )
    for name, (source, target, one, other) in edges.items()
  }
  return tfgnn.GraphTensor.from_pieces(
    context=tfgnn.Context.from_fields(features=context), node_sets=node_sets, edge_sets=edge_sets
  )


def _example(data):
  return tf.train.Example.FromString(data)


@_cases()
def test_record_is_what_tfgnn_writes(mk, over):
  module = _module(mk, **over)
  [record] = records.encode(module)
  expected = _graph_tensor(module)
  tfgnn.check_compatible_with_schema_pb(expected, schema.graph_schema(module.kind))
  assert _example(record.data) == tfgnn.write_example(expected)
  assert (record.module_id, record.part, record.measured) == ('é', 0, module.is_measured)
  assert record.sizes == {
    'ops': module.num_ops,
    'edges': module.num_edges,
    'config_ops': module.num_config_ops,
    'configs': module.num_configs,
  }


@pytest.mark.parametrize('n', [0, 1, 4])
@pytest.mark.parametrize(('mk', 'num_extra'), [(_T, 1), (_L, 3)])
def test_extra_features(mk, num_extra, n):
  own = {'nc': 0} if mk is _L else {}
  extra_feat = np.arange(n * num_extra, dtype=np.float32).reshape(n, num_extra) - 2
  module = dataclasses.replace(_module(mk, n=n, **own), extra_feat=extra_feat)
  expected = _graph_tensor(module)
  tfgnn.check_compatible_with_schema_pb(
    expected, schema.graph_schema(module.kind, num_extra=num_extra)
  )
  [record] = records.encode(module)
  assert _example(record.data) == tfgnn.write_example(expected)
  np.testing.assert_array_equal(
    records.to_graph_tensor(module).node_sets['op']['extra_feat'], extra_feat
  )


@_cases()
def test_graph_tensor_fits_the_schema(mk, over):
  module = _module(mk, **over)
  graph = records.to_graph_tensor(module)
  tfgnn.check_compatible_with_schema_pb(graph, schema.graph_schema(module.kind))
  assert graph.context['module_id'].numpy().tolist() == ['é'.encode()]
  ragged = {'config_id': module.config_id, 'config_runtime': module.config_runtime}
  if module.kind == 'tile':
    ragged |= {
      'config_feat': module.config_feat,
      'config_runtime_normalizer': module.config_runtime_normalizers,
    }
  else:
    content = np.frombuffer(graph.context['node_config_feat'][0].numpy(), np.int8)
    np.testing.assert_array_equal(
      content.reshape(module.node_config_feat.shape), module.node_config_feat
    )
    np.testing.assert_array_equal(
      graph.edge_sets['configures'].adjacency.target, module.node_config_ids
    )
    np.testing.assert_array_equal(
      graph.edge_sets['configures'].adjacency.source, np.arange(module.num_config_ops)
    )
  for name, array in ragged.items():
    np.testing.assert_array_equal(graph.context[name][0], array, err_msg=name)
  op = graph.node_sets['op']
  np.testing.assert_array_equal(op['opcode'], module.node_opcode)
  np.testing.assert_array_equal(op['feat'], module.node_feat)
  np.testing.assert_array_equal(op['computation'], module.computation)


def test_one_config_is_one_slice():
  module = _module(_L, nc=3)
  data = records.to_graph_tensor(module).context['node_config_feat'][0].numpy()
  np.testing.assert_array_equal(
    np.frombuffer(data[4 * 54 : 5 * 54], np.int8).reshape(3, 18), module.node_config_feat[4]
  )


@pytest.mark.parametrize('mk', [_T, _L])
def test_edge_direction(mk):
  """In `b = f(a)`, op 0 (a) is the producer and op 1 (b) the consumer.

  The file stores the edge as [consumer, operand].
  """
  module = _module(mk, n=2, edge_index=np.array([[1, 0]]))
  adjacency = records.to_graph_tensor(module).edge_sets['operand'].adjacency
  assert adjacency[tfgnn.SOURCE].numpy().tolist() == [0]
  assert adjacency[tfgnn.TARGET].numpy().tolist() == [1]
  assert (adjacency.source_name, adjacency.target_name) == ('op', 'op')


def test_records_can_be_batched():
  modules = [_module(_L, c=c, n=n, nc=nc) for c, n, nc in ((2, 3, 1), (5, 1, 0), (0, 4, 4))]
  data = [record.data for module in modules for record in records.encode(module)]
  graph = tfgnn.parse_example(
    schema.graph_spec('layout'), tf.constant(data)
  ).merge_batch_to_components()
  assert graph.node_sets['op'].sizes.numpy().tolist() == [3, 1, 4]
  assert graph.context['config_runtime'].row_lengths().numpy().tolist() == [2, 5, 0]
  assert graph.edge_sets['configures'].adjacency.target.numpy().tolist() == [0, 4, 5, 6, 7]


def test_float32_does_not_merge_runtimes():
  runtime = np.arange(910876401, 910876407)
  context = records.to_graph_tensor(_module(_L, config_runtime=runtime)).context
  np.testing.assert_array_equal(context['config_runtime'][0], runtime)


@_cases()
def test_equal_modules_give_equal_bytes(mk, over):
  one, other = ([record.data for record in records.encode(_module(mk, **over))] for _ in range(2))
  assert one == other


# Varints.


def _library_varints(values):
  out = io.BytesIO()
  for value in values:
    encoder._EncodeSignedVarint(out.write, value)
  return out.getvalue()


@_SETTINGS
@hypothesis.given(values=st.lists(_INT64, max_size=12))
def test_varints_equal_the_library(values):
  array = np.array(values, np.int64)
  assert records.varints(array) == _library_varints(values)
  # The list begins with its tag, and the varints follow.
  serialized = tf.train.Int64List(value=values).SerializeToString()
  assert serialized.endswith(records.varints(array))


@pytest.mark.parametrize(
  ('value', 'data'),
  [
    (0, b'\x00'),
    (127, b'\x7f'),
    (128, b'\x80\x01'),
    (300, b'\xac\x02'),
    (-1, b'\xff' * 9 + b'\x01'),
    (2**63 - 1, b'\xff' * 8 + b'\x7f'),
    (-(2**63), b'\x80' * 9 + b'\x01'),
  ],
)
def test_varint_table(value, data):
  assert records.varints(np.array([value])) == data


def test_varints_of_a_column():
  edges = np.array([[1, 1000], [-1, 5]])
  assert records.varints(edges[:, 1]) == _library_varints([1000, 5])
  assert records.varints(edges[:0, 0]) == b''


# Splitting.


def _encode(module, **options):
  return list(records.encode(module, records.RecordOptions(**options)))


def _ids(record):
  return list(_example(record.data).features.feature['context/config_id'].int64_list.value)


@pytest.mark.parametrize('mk', [_T, _L])
@pytest.mark.parametrize(
  ('c', 'max_configs', 'sizes'),
  [
    (6, 6, [6]),
    (6, 7, [6]),
    (7, 6, [4, 3]),
    (7, 3, [3, 2, 2]),
    (5, 1, [1] * 5),
    (1, 1, [1]),
    (0, 1, [0]),
    (100, 33, [25] * 4),
  ],
)
def test_each_config_is_in_one_record(mk, c, max_configs, sizes):
  module = _module(mk, c=c)
  parts = _encode(module, max_configs=max_configs)
  assert [part.sizes['configs'] for part in parts] == sizes
  assert [part.part for part in parts] == list(range(len(sizes)))
  assert [len(_ids(part)) for part in parts] == sizes
  assert sorted(itertools.chain.from_iterable(map(_ids, parts))) == list(range(c))


@pytest.mark.parametrize('mk', [_T, _L])
def test_each_record_is_usable_alone(mk):
  module = _module(mk, c=11)
  whole = _example(_encode(module)[0].data).features.feature
  for part in _encode(module, max_configs=4):
    ids = np.array(_ids(part))
    [alone] = records.encode(module.select_configs(ids))
    assert part.data == alone.data
    features = _example(part.data).features.feature
    for name in whole:
      if not name.startswith('context/') or name == 'context/module_id':
        assert features[name] == whole[name], name


def test_measured_describes_the_module():
  runtime = np.array([-1, -1, -1, -1, -1, 5])
  module = module_lib.Module(**{**vars(_module(_L)), 'config_runtime': runtime})
  assert [part.measured for part in _encode(module, max_configs=1)] == [True] * 6


@pytest.mark.parametrize('mk', [_T, _L])
@pytest.mark.parametrize('room', [1, 2, 500, 1500])
def test_size_limit(mk, room):
  module = _module(mk, c=50)
  [bare] = _encode(module.select_configs(np.zeros(0, int)))
  limit = len(bare.data) + 1200 + room
  parts = _encode(module, max_bytes=limit)
  assert len(parts) > 1
  assert all(len(part.data) <= limit for part in parts)
  counts = [part.sizes['configs'] for part in parts]
  assert sum(counts) == 50
  assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize('mk', [_T, _L])
def test_both_limits(mk):
  module = _module(mk, c=50)
  [bare] = _encode(module.select_configs(np.zeros(0, int)))
  limit = len(bare.data) + 2400
  loose = _encode(module, max_bytes=limit)
  tight = _encode(module, max_bytes=limit, max_configs=2)
  assert len(loose) < len(tight) == 25


@pytest.mark.parametrize('mk', [_T, _L])
def test_largest_values_stay_in_the_limit(mk):
  """Ids and times may take ten and nine bytes."""
  c = 400
  module = _module(mk, c=c)
  large = {'config_id': np.arange(c) + 2**62, 'config_runtime': np.full(c, 2**63 - 1)}
  if module.kind == 'tile':
    large['config_runtime_normalizers'] = large['config_runtime']
  module = module_lib.Module(**{**vars(module), **large})
  for limit in range(6000, 20000, 500):
    assert all(len(part.data) <= limit for part in _encode(module, max_bytes=limit)), limit


@pytest.mark.parametrize('mk', [_T, _L])
def test_graph_too_large(mk):
  with pytest.raises(errors.InputError, match='module too large for a record') as caught:
    _encode(_module(mk, n=20), max_bytes=10_000)
  assert caught.value.where == 'é'
  assert 'bytes of graph' in caught.value.found
  assert caught.value.expected == '<= 10000 bytes'
  assert '--max_record_bytes' in caught.value.fix


def test_seed_and_name_decide_the_shares():
  def shares(name='m', **options):
    return [_ids(part) for part in _encode(_module(_T, name, c=60), max_configs=20, **options)]

  assert shares() == shares(seed=0)
  assert len({str(result) for result in (shares(), shares(seed=1), shares('other'))}) == 3
  assert all(ids == sorted(ids) for ids in shares())


def test_shares_are_fair_samples():
  """Sources sort configs by runtime, so a record of the first configs would hold fast ones only."""
  parts = _encode(_module(_T, c=2000), max_configs=500)
  for part in parts:
    # The limit is four standard deviations of this mean.
    assert abs(np.mean(_ids(part)) - 999.5) < 100


def test_shares_do_not_change():
  """The shares were recorded: if this fails, every split module gets other records than before."""
  parts = _encode(_module(_T, 'golden', c=7), max_configs=3, seed=5)
  assert [_ids(part) for part in parts] == [[0, 4, 6], [3, 5], [1, 2]]


@pytest.mark.parametrize('name', ['max_configs', 'max_bytes'])
@pytest.mark.parametrize('value', [0, -1])
def test_senseless_limits(name, value):
  with pytest.raises(errors.InputError, match='limit too small') as caught:
    records.RecordOptions(**{name: value})
  assert (caught.value.where, caught.value.found, caught.value.expected) == (
    name,
    str(value),
    '>= 1',
  )


def test_options_cannot_change():
  with pytest.raises(dataclasses.FrozenInstanceError):
    records.RecordOptions().seed = 1


# TFRecord files.


@pytest.mark.parametrize(
  'contents', [[], [b''], [b'hello'], [b'a' * 70000, b'', bytes(range(256))]]
)
def test_tfrecords_equal_tensorflow(contents, tmp_path):
  file = io.BytesIO()
  size, checksum = records.write_tfrecords(file, iter(contents))
  with tf.io.TFRecordWriter(str(tmp_path / 'r')) as writer:
    for content in contents:
      writer.write(content)
  assert file.getvalue() == (tmp_path / 'r').read_bytes()
  assert size == len(file.getvalue())
  assert checksum == google_crc32c.value(file.getvalue())


def test_reading_with_another_schema_fails():
  [record] = records.encode(_module(_T))
  with pytest.raises(tf.errors.InvalidArgumentError):
    tfgnn.parse_single_example(schema.graph_spec('layout'), record.data)


def test_encoding_loads_no_tensorflow(tmp_path):
  npz.save(_module(_L), tmp_path / 'm.npz')
  code = (
    'import sys; from tpu_graphs.dataset import records; from tpu_graphs.sources import npz; '
    '[record] = records.encode(npz.load(sys.argv[1])); '
    'names = ("tensorflow", "google.protobuf", "apache_beam"); '
    'print([name for name in names if name in sys.modules])'
  )
  run = subprocess.run(
    [sys.executable, '-c', code, tmp_path / 'm.npz'], check=True, capture_output=True, text=True
  )
  assert run.stdout == '[]\n'
