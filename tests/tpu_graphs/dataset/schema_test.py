"""Tests of tpu_graphs.dataset.schema: the contract with other programs, spelt out."""

import subprocess
import sys

from google.protobuf import text_format
import pytest
import tensorflow as tf

from tpu_graphs import errors
from tpu_graphs.compat import tfgnn
from tpu_graphs.dataset import schema

_CONTEXT = {
  'tile': {
    'module_id': (tf.string, []),
    'config_id': (tf.int64, [-1]),
    'config_feat': (tf.float32, [-1, 24]),
    'config_runtime': (tf.int64, [-1]),
    'config_runtime_normalizer': (tf.int64, [-1]),
  },
  'layout': {
    'module_id': (tf.string, []),
    'config_id': (tf.int64, [-1]),
    'node_config_feat': (tf.string, []),
    'config_runtime': (tf.int64, [-1]),
  },
}
_OP = {'opcode': (tf.int64, []), 'feat': (tf.float32, [140]), 'computation': (tf.int64, [])}
_EDGES = {
  'tile': {'operand': ('op', 'op')},
  'layout': {'operand': ('op', 'op'), 'configures': ('config_op', 'op')},
}


def _features(message):
  return {
    name: (tf.as_dtype(feature.dtype), [dim.size for dim in feature.shape.dim])
    for name, feature in message.features.items()
  }


@pytest.mark.parametrize('kind', ['tile', 'layout'])
def test_content(kind):
  proto = schema.graph_schema(kind)
  assert _features(proto.context) == _CONTEXT[kind]
  assert {name: _features(nodes) for name, nodes in proto.node_sets.items()} == {
    'op': _OP,
    **({'config_op': {}} if kind == 'layout' else {}),
  }
  ends = {name: (edges.source, edges.target) for name, edges in proto.edge_sets.items()}
  assert ends == _EDGES[kind]
  assert all(not edges.features for edges in proto.edge_sets.values())


@pytest.mark.parametrize('kind', ['tile', 'layout'])
def test_text_path_and_proto_are_one(kind):
  assert tfgnn.read_schema(schema.path(kind)) == schema.graph_schema(kind)
  with open(schema.path(kind), encoding='utf-8') as file:
    assert file.read() == schema.text(kind)


@pytest.mark.parametrize('kind', ['tile', 'layout'])
def test_text_states_the_edge_direction(kind):
  direction = (
    'From an op (SOURCE, the producer) to each op that uses its result (TARGET, the consumer).'
  )
  assert direction in schema.text(kind)


@pytest.mark.parametrize('kind', ['tile', 'layout'])
def test_spec_is_of_one_record(kind):
  spec = schema.graph_spec(kind)
  assert spec.rank == 0
  assert set(spec.context_spec.features_spec) == set(_CONTEXT[kind])


@pytest.mark.parametrize('num_extra', [1, 7])
@pytest.mark.parametrize('kind', ['tile', 'layout'])
def test_extra_features_are_one_more_feature_of_ops(kind, num_extra):
  proto, base = schema.graph_schema(kind, num_extra=num_extra), schema.graph_schema(kind)
  assert _features(proto.node_sets['op']) == {**_OP, 'extra_feat': (tf.float32, [num_extra])}
  assert text_format.Parse(schema.text(kind, num_extra=num_extra), tfgnn.GraphSchema()) == proto
  del proto.node_sets['op'].features['extra_feat']
  assert proto == base
  op = schema.graph_spec(kind, num_extra=num_extra).node_sets_spec['op']
  assert op['extra_feat'].shape == [None, num_extra]


@pytest.mark.parametrize('kind', ['tile', 'layout'])
def test_no_extra_features(kind):
  assert schema.text(kind, num_extra=0) == schema.text(kind)


@pytest.mark.parametrize(
  'function', [schema.text, schema.path, schema.graph_schema, schema.graph_spec]
)
def test_unknown_kind(function):
  with pytest.raises(
    errors.InputError, match=r"unknown kind: found '\.\./tile', expected tile or layout"
  ):
    function('../tile')


def test_import_is_cheap():
  code = (
    'import sys; from tpu_graphs.dataset import manifest, records, schema, statistics; '
    'from tpu_graphs.sources import npz, readers; '
    'schema.text("tile"); '
    'print([m for m in ("tensorflow", "apache_beam", "absl") if m in sys.modules])'
  )
  run = subprocess.run([sys.executable, '-c', code], check=True, capture_output=True, text=True)
  assert run.stdout == '[]\n'
