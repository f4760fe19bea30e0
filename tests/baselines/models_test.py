"""Tests of baselines.models against NumPy oracles, and of what every model promises."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_gnn as tfgnn

from baselines import models
from baselines.models import gcn
from baselines.models import parts
from baselines.models import sage
from tests import testing
from tpu_graphs import datasets
from tpu_graphs import errors
from tpu_graphs import manifest as manifest_lib
from tpu_graphs import module as module_lib
from tpu_graphs import records
from tpu_graphs import statistics

_PARTS = parts.PartOptions(hidden=8, layers=2, opcode_embedding=4)
_K = 6


def _module(kind, n=5, c=_K, seed=0, **over):
  if kind == 'tile':
    arrays = testing.tile_arrays(n=n, c=c, seed=seed, **over)
  else:
    arrays = testing.layout_arrays(n=n, c=c, seed=seed, **{'nc': min(n, 3), **over})
    arrays['node_config_feat'] = arrays['node_config_feat'].astype(np.int8)
  arrays.update(node_splits=np.array([0, n]), config_id=np.arange(c))
  return module_lib.Module(module_id=f'm{seed}', kind=kind, **arrays)


def _graphs(kind, data, size):
  """A dataset of a GraphTensor per serialized module, with its configs padded to `size`."""
  return datasets._chunks(tf.data.Dataset.from_tensor_slices(data), kind, size).map(datasets.without_strings)


def _batch(modules, size=_K, pad_to=None):
  (batch,) = _batches(modules[0].kind, tuple(map(records.encode_whole, modules)), len(modules), size, _Hashed(pad_to))
  return batch


@dataclasses.dataclass(frozen=True)
class _Hashed:
  """Makes a split a key by its content: all models are tried on the same batches, which are slow to make."""
  split: manifest_lib.Split | None

  def __hash__(self):
    return hash(str(self.split))


@functools.lru_cache(maxsize=200)
def _batches(kind, data, batch_size, size, pad_to):
  return list(datasets.batch(_graphs(kind, list(data), size), batch_size, pad_to=pad_to.split))


def _split(modules):
  """A split with room for each of the modules."""
  sizes = {'ops': max(m.num_ops for m in modules), 'edges': max(m.num_edges for m in modules),
           'config_ops': max(m.num_config_ops for m in modules), 'configs': max(m.num_configs for m in modules)}
  return manifest_lib.Split(0, 0, 0, 0, 0, sizes, sizes, ())


def _model(name, kind, options=_PARTS):
  tf.keras.utils.set_random_seed(0)
  total = statistics.merge_all(statistics.Statistics.of(_module(kind, seed=seed)) for seed in range(4))
  model = models.build(models.ModelOptions(name, kind, options), statistics.parse(total.to_json()))
  rng = np.random.default_rng(0)
  for weight in model.trainable_variables:  # Biases too, which begin with 0 and would hide mistakes.
    weight.assign_add(rng.normal(scale=0.2, size=weight.shape))
  return model


@pytest.fixture(scope='session', params=[(name, kind) for name in models.MODELS for kind in module_lib.KINDS],
                ids='-'.join)
def named(request):
  """Kind and model."""
  name, kind = request.param
  return kind, _model(name, kind)


def test_scores_tell_configs_and_modules_apart(named):
  kind, model = named
  scores = model(_batch([_module(kind, seed=1), _module(kind, seed=2)])).numpy()
  assert scores.shape == (2, _K)
  assert scores.dtype == np.float32
  assert np.unique(scores).size > _K  # Not all: a small MLP has configs for which no unit of a layer is active.


def test_score_depends_on_no_other_config(named):
  kind, model = named
  module = _module(kind, seed=3)
  together = model(_batch([module])).numpy()[0]
  for i in (0, 4):
    alone = model(_batch([module.select_configs([i])], size=1)).numpy()[0, 0]
    np.testing.assert_allclose(alone, together[i], rtol=1e-4, atol=1e-5)
  chosen = [4, 1, 3]
  padded = model(_batch([module.select_configs(chosen)], size=_K)).numpy()[0, :3]
  np.testing.assert_allclose(padded, together[chosen], rtol=1e-4, atol=1e-5)


def test_score_depends_on_no_other_module_or_padding(named):
  kind, model = named
  modules = [_module(kind, n=n, seed=n) for n in (1, 7, 3, 5)]
  alone = np.concatenate([model(_batch([module])).numpy() for module in modules])
  together = model(_batch(modules)).numpy()
  np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)
  padded = model(_batch(modules, pad_to=_split([*modules, _module(kind, n=9)]))).numpy()
  assert padded.shape == (5, _K)
  assert np.isfinite(padded).all()
  np.testing.assert_allclose(padded[:4], alone, rtol=1e-4, atol=1e-5)


def _relabelled(module, new):
  """The same module with op i as op new[i], edges and configurable ops in another order too."""
  old = np.argsort(new)
  arrays = {'node_opcode': module.node_opcode[old], 'node_feat': module.node_feat[old],
            'edge_index': new[module.edge_index][::-1], 'computation': module.computation[old]}
  if module.kind == 'layout':
    arrays['node_config_ids'] = new[module.node_config_ids][::-1]
    arrays['node_config_feat'] = module.node_config_feat[:, ::-1]
  fields = {name: getattr(module, name) for name in module.__dataclass_fields__}
  return module_lib.Module(**{**fields, **arrays})


def test_order_of_ops_has_no_effect(named):
  kind, model = named
  module = _module(kind, n=6, seed=4, edge_index=np.array([[1, 0], [2, 0], [3, 1], [3, 2], [5, 4], [5, 0]]))
  other = _relabelled(module, np.array([3, 5, 0, 1, 4, 2]))
  np.testing.assert_allclose(model(_batch([other])), model(_batch([module])), rtol=1e-4, atol=1e-5)


def test_edges_matter_to_message_passing_only(named):
  kind, model = named
  module = _module(kind, n=5, seed=5)
  without = _module(kind, n=5, seed=5, edge_index=np.zeros((0, 2), np.int64))
  same = np.allclose(model(_batch([module])), model(_batch([without])), atol=1e-5)
  assert same == (type(model).__name__ == 'MLP')


@pytest.mark.parametrize('corner', [{'n': 1}, {'n': 4, 'edge_index': np.zeros((0, 2), np.int64)}, {'c': 1},
                                    {'n': 3, 'edge_index': np.array([[1, 1], [1, 1], [0, 2], [2, 0]])}])
def test_corner_cases_are_finite(named, corner):
  kind, model = named
  batch = _batch([_module(kind, **corner), _module(kind)])
  with tf.GradientTape() as tape:
    scores = model(batch, training=True)
    total = tf.reduce_sum(scores)
  assert np.isfinite(scores).all()
  assert all(np.isfinite(tf.convert_to_tensor(gradient)).all()
             for gradient in tape.gradient(total, model.trainable_variables))


@pytest.mark.parametrize('name', models.MODELS)
def test_no_configurable_op_gives_equal_finite_scores(name):
  scores = _model(name, 'layout')(_batch([_module('layout', nc=0)])).numpy()
  assert np.isfinite(scores).all()
  np.testing.assert_allclose(scores, scores[:, :1].repeat(_K, 1), rtol=1e-5)


def test_gradient_reaches_every_weight(named):
  kind, model = named
  with tf.GradientTape() as tape:
    scores = model(_batch([_module(kind, n=n, seed=n) for n in (7, 3, 5)]), training=True)
    loss = tf.reduce_sum(tf.square(scores) + scores)
  gradients = tape.gradient(loss, model.trainable_variables)
  for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
    assert gradient is not None, variable.name
    assert np.abs(tf.convert_to_tensor(gradient)).max() > 0, variable.name


def test_compiled_by_xla_with_static_shapes(named):
  kind, model = named
  modules = [_module(kind, n=n, seed=n) for n in (1, 7, 3, 5, 2, 4)]
  batches = _batches(kind, tuple(map(records.encode_whole, modules)), 2, _K, _Hashed(_split(modules)))
  traces = []

  @tf.function(jit_compile=True)
  def step(graph):
    traces.append(graph)
    with tf.GradientTape() as tape:
      scores = model(graph, training=True)
      total = tf.reduce_sum(scores)
    return scores, tape.gradient(total, model.trainable_variables, unconnected_gradients='zero')

  for batch in batches:
    scores, _ = step(batch)
    np.testing.assert_allclose(scores, model(batch), rtol=1e-5, atol=1e-5)
  assert len(traces) == 1
  text = step.experimental_get_compiler_ir(batches[0])(stage='hlo')
  assert 'ENTRY' in text
  assert '<=' not in text  # A bounded dynamic shape, as in f32[<=10].


def test_model_describes_its_sizes():
  model = _model('MLP', 'tile', parts.PartOptions(hidden=3, layers=0, opcode_embedding=2))
  assert model(_batch([_module('tile')])).shape == (1, _K)


def test_unknown_model_is_refused():
  with pytest.raises(errors.InputError, match=r'unknown model.*GPT.*EarlyJoinSAGE'):
    models.ModelOptions('GPT', 'tile')


def test_unknown_kind_is_refused():
  with pytest.raises(errors.InputError, match='unknown kind: found graph, expected tile or layout'):
    models.ModelOptions('MLP', 'graph')


def test_normalizer_by_hand():
  column = statistics.ColumnStatistics(count=2, log_mean=np.array([1.0, 2.0, 5.0]), log_std=np.array([2.0, 0.5, 0.0]),
                                       constant=np.array([False, False, True]))
  x = np.array([[np.expm1(3.0), -np.expm1(1.0), 7.0]], np.float32)
  np.testing.assert_allclose(parts.Normalizer(column)(x), [[1.0, -6.0, 0.0]], atol=1e-5)


def test_normalizer_is_part_of_the_weights(named):
  _, model = named
  names = [weight.name for weight in model.non_trainable_weights]
  assert any('mean' in name for name in names)
  assert any('scale' in name for name in names)


def _weights(layer):
  return [weight.numpy().astype(np.float64) for weight in layer.weights]


def _encode(kind, model, module):
  """The input of an EarlyJoin's first layer by NumPy, a dense layer over concatenated inputs: [N, K, H]."""
  stats = json.loads(json.dumps(statistics.merge_all(
      statistics.Statistics.of(_module(kind, seed=seed)) for seed in range(4)).to_json()))['features']

  def normalize(name, x):
    log, constant = stats[name]['log'], stats[name]['constant']
    result = (np.sign(x) * np.log1p(np.abs(x)) - log['mean']) / np.where(np.array(log['std']) > 0, log['std'], 1)
    result[..., constant] = 0
    return result

  ops, configs = model._encode_ops, model._encode_configs
  (embedding,) = _weights(ops._embed)
  feat = normalize('feat', module.node_feat.astype(np.float64))
  kernel, bias = _weights(ops._hidden)
  hidden = np.maximum(np.concatenate([embedding[module.node_opcode], feat], 1) @ kernel + bias, 0)  # [N, H]
  op_kernel, op_bias = _weights(ops._project)
  config_kernel, config_bias = _weights(configs._project)
  joined_kernel = np.concatenate([op_kernel, config_kernel])
  states = np.zeros((module.num_ops, module.num_configs, op_bias.size))
  for k in range(module.num_configs):
    for i in range(module.num_ops):
      if kind == 'tile':
        config = normalize('config_feat', module.config_feat[k].astype(np.float64))
        bias = op_bias + config_bias
      elif i in module.node_config_ids:
        config = _layout(module.node_config_feat[k, list(module.node_config_ids).index(i)], feat[i])
        bias = op_bias + config_bias
      else:
        config, bias = np.zeros(len(config_kernel)), op_bias
      states[i, k] = np.maximum(np.concatenate([hidden[i], config]) @ joined_kernel + bias, 0)
  return states


def _layout(layout, feat):
  """One op's layout config, int8 [18], as what its dense layer is given."""
  first = 21  # README of TpuGraphs: shape_dimensions_0.
  onehot = np.zeros((18, 7))
  for slot, value in enumerate(layout):
    onehot[slot, int(value) + 1] = 1
  lengths = [feat[first + value] if value >= 0 else 0 for value in layout[:6]]
  return np.concatenate([onehot.reshape(-1), lengths])


@pytest.mark.parametrize('name', ['EarlyJoinSAGE', 'ResGCN'])
def test_early_join_equals_dense_layer_over_concatenation(name, kind):
  model = _model(name, kind)
  module = _module(kind, n=6, seed=6)
  seen = []
  first = model._layers[0]
  model._layers[0] = lambda graph, state: (seen.append(state.numpy()), first(graph, state))[1]
  model(_batch([module]))
  np.testing.assert_allclose(seen[0], _encode(kind, model, module), rtol=1e-4, atol=1e-5)


# Repeated edges, a loop, an op without any edge.
_EDGES = np.array([[1, 0], [2, 0], [3, 1], [3, 2], [3, 2], [4, 4]])


def _layer_case(layer):
  """A layer, its input state and its output on a graph of _EDGES."""
  module = _module('tile', n=6, seed=7, edge_index=_EDGES)
  rng = np.random.default_rng(1)
  state = rng.normal(size=(6, 3, 8)).astype(np.float32)
  graph = _batch([module])
  layer(graph, state)
  for weight in layer.weights:
    weight.assign_add(rng.normal(scale=0.3, size=weight.shape))
  return state.astype(np.float64), layer(graph, state).numpy()


def _layer_norm(x, layer):
  gamma, beta = _weights(layer)
  mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
  return (x - mean) / np.sqrt(variance + layer.epsilon) * gamma + beta


def test_gcn_layer_equals_naive_matrix():
  layer = gcn.GCNLayer(8)
  state, output = _layer_case(layer)
  adjacency = np.eye(6)
  for consumer, operand in _EDGES:
    adjacency[consumer, operand] += 1
    adjacency[operand, consumer] += 1
  degree = np.diag(adjacency.sum(1) ** -0.5)
  kernel, bias = _weights(layer._dense)
  convolved = np.einsum('ij,jkh->ikh', degree @ adjacency @ degree, state) @ kernel + bias
  np.testing.assert_allclose(output, _layer_norm(state + np.maximum(convolved, 0), layer._normalize), atol=1e-5)


def test_sage_layer_equals_naive_means():
  layer = sage.SAGELayer(8)
  state, output = _layer_case(layer)
  self_kernel, self_bias = _weights(layer._self)
  (operand_kernel,), (consumer_kernel,) = _weights(layer._operands), _weights(layer._consumers)
  expected = np.empty_like(state)
  for i in range(6):
    operands = [state[o] for c, o in _EDGES if c == i] or [np.zeros((3, 8))]
    consumers = [state[c] for c, o in _EDGES if o == i] or [np.zeros((3, 8))]
    expected[i] = (state[i] @ self_kernel + self_bias + np.mean(operands, 0) @ operand_kernel +
                   np.mean(consumers, 0) @ consumer_kernel)
  np.testing.assert_allclose(output, _layer_norm(state + np.maximum(expected, 0), layer._normalize), atol=1e-5)


def test_pool_ops_is_mean_and_maximum_per_module():
  modules = [_module('tile', n=n, seed=n) for n in (3, 1)]
  state = np.random.default_rng(0).normal(size=(4, 2, 5)).astype(np.float32)
  pooled = parts.pool_ops(_batch(modules), state)
  expected = [np.concatenate([part.mean(0), part.max(0)], -1) for part in (state[:3], state[3:])]
  np.testing.assert_allclose(pooled, expected, rtol=1e-6)


def test_neighbours_of_an_op_by_direction():
  graph = _batch([_module('tile', n=6, edge_index=_EDGES)])
  state = np.arange(6, dtype=np.float32)[:, np.newaxis] + 1
  operands = parts.pool_neighbours(graph, state, towards=tfgnn.TARGET, reduce='sum')
  consumers = parts.pool_neighbours(graph, state, towards=tfgnn.SOURCE, reduce='sum')
  np.testing.assert_array_equal(operands[:, 0], [0, 1, 1, 2 + 3 + 3, 5, 0])
  np.testing.assert_array_equal(consumers[:, 0], [2 + 3, 4, 4 + 4, 0, 5, 0])
