"""Tests of tpu_graphs.testing."""

import numpy as np
import pytest
import tensorflow as tf

from tests import testing as testing_lib
from tpu_graphs import testing
from tpu_graphs.compat import tfgnn
from tpu_graphs.input import loading
from tpu_graphs.modules import module as module_lib

_VECTOR = tf.TensorSpec([4], tf.float32)


def test_accepts_a_function_of_static_shapes():
  testing.assert_tpu_ready(lambda x: tf.reduce_sum(x * 2), _VECTOR)


def test_accepts_several_arguments_and_nests():
  spec = ({'a': _VECTOR, 'b': [tf.TensorSpec([], tf.int64)]}, tf.TensorSpec([2, 4], tf.float32))
  testing.assert_tpu_ready(lambda nest, y: nest['a'] + y * tf.cast(nest['b'][0], tf.float32), spec)


def test_accepts_a_tf_function_and_its_gradient():
  @tf.function
  def gradient(x):
    with tf.GradientTape() as tape:
      tape.watch(x)
      y = tf.reduce_sum(tf.square(x))
    return tape.gradient(y, x)

  testing.assert_tpu_ready(gradient, _VECTOR, inputs=[tf.ones(4), tf.zeros(4)])


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    (tf.TensorSpec([4], tf.string), '^spec: found a string'),
    (tf.TensorSpec([None, 4], tf.float32), r'^spec: found shape \(None, 4\), expected static'),
    (tf.TensorSpec(None, tf.float32), '^spec: found shape <unknown>, expected static'),
    (
      tf.RaggedTensorSpec([2, None], tf.float32),
      r'^spec: found shape \(2, None\), ragged, expected static',
    ),
    ({'a': [_VECTOR, tf.TensorSpec([], tf.string)]}, '^spec/a/1: found a string'),
    ((_VECTOR, {'b': tf.TensorSpec([None], tf.int32)}), '^spec/1/b: found shape'),
  ],
)
def test_refuses_strings_and_dynamic_shapes_by_name(spec, message):
  with pytest.raises(AssertionError, match=message):
    testing.assert_tpu_ready(lambda *_: tf.constant(0), spec)


def test_refuses_values_that_are_not_specs():
  with pytest.raises(TypeError, match=r'spec/1: found 3, expected a tf\.TypeSpec'):
    testing.assert_tpu_ready(lambda *_: tf.constant(0), (_VECTOR, 3))


@pytest.mark.parametrize(
  ('fn', 'operation'),
  [
    (lambda x: tf.strings.length(tf.strings.as_string(x)), 'AsString'),
    (lambda x: tf.raw_ops.SegmentSum(data=x, segment_ids=tf.cast(x, tf.int32)), 'SegmentSum'),
  ],
)
def test_refuses_what_xla_cannot_compile(fn, operation):
  with pytest.raises(AssertionError, match=f'not compiled by XLA: .*{operation}'):
    testing.assert_tpu_ready(fn, _VECTOR)


@pytest.mark.parametrize(
  ('fn', 'operation'),
  [
    (lambda x: tf.boolean_mask(x, x > 0), 'Where'),
    (lambda x: tf.where(x > 0), 'Where'),
    (lambda x: tf.unique(x)[0], 'Unique'),
  ],
)
def test_refuses_shapes_that_depend_on_values(fn, operation):
  with pytest.raises(
    AssertionError, match=rf'shape known only at run time, from {operation}.*\[<=4'
  ):
    testing.assert_tpu_ready(fn, _VECTOR)


def test_less_or_equal_is_not_a_shape():
  testing.assert_tpu_ready(lambda x: tf.where(x <= 3, x, 0), _VECTOR)


@pytest.mark.parametrize(
  ('inputs', 'message'),
  [
    (
      [tf.ones(4), tf.ones(5)],
      r'for input 1 of epoch 0: spec/0: found .*shape=\(5,\).*expected .*shape=\(4,\)',
    ),
    (
      [tf.ones(4, tf.float64)],
      'for input 0 of epoch 0: spec/0: found .*float64.*expected .*float32',
    ),
  ],
)
def test_refuses_inputs_that_trace_again(inputs, message):
  with pytest.raises(AssertionError, match=message):
    testing.assert_tpu_ready(lambda x: x + x, _VECTOR, inputs=inputs)


def test_inputs_that_change_from_epoch_to_epoch():
  class Growing:
    size = 1

    def __iter__(self):
      type(self).size += 1
      return iter([tf.ones(min(self.size, 2) + self.size // 4)])

  with pytest.raises(AssertionError, match='for input 0 of epoch 2'):
    testing.assert_tpu_ready(lambda x: x + x, tf.TensorSpec([2], tf.float32), inputs=Growing())


def test_a_dataset_gives_inputs():
  dataset = tf.data.Dataset.from_tensor_slices(tf.ones([6, 4])).batch(2, drop_remainder=True)
  testing.assert_tpu_ready(lambda x: x + x, tf.TensorSpec([2, 4], tf.float32), inputs=dataset)


@pytest.fixture(params=module_lib.KINDS)
def graph(request):
  """Returns a merged GraphTensor of one module without padding, with a string in its context."""
  arrays = testing_lib.arrays(request.param, n=5, c=3)
  if request.param == 'layout':
    arrays['node_config_feat'] = arrays['node_config_feat'].astype(np.int8)
  arrays |= {'node_splits': np.array([0, 5]), 'config_id': np.arange(3)}
  module = module_lib.Module(module_id='m', kind=request.param, **arrays)
  (graph,) = loading.of_module(module, configs_per_module=3)
  return graph


def _ops(graph):
  return tfgnn.pool_nodes_to_context(graph, 'op', 'mean', feature_name='feat')


def test_leaves_of_graphs_have_names(graph):
  with pytest.raises(AssertionError, match='spec/context/module_id: found a string'):
    testing.assert_tpu_ready(_ops, graph.spec)
  without = loading.without_strings(graph)
  testing.assert_tpu_ready(_ops, without.spec, inputs=[without])
  relaxed = without.spec.relax(num_nodes=True)
  with pytest.raises(AssertionError, match=r'spec/(op|config_op)/\w+: found shape \(None,'):
    testing.assert_tpu_ready(_ops, relaxed)
  relaxed = without.spec.relax(num_edges=True)
  with pytest.raises(
    AssertionError, match=r'spec/(operand|configures)/index 0: found shape \(None,\)'
  ):
    testing.assert_tpu_ready(_ops, relaxed)
