"""Tests of the parts of baselines.models against NumPy oracles that follow their docstrings."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from baselines.models import gat
from baselines.models import gcn
from baselines.models import parts
from baselines.models import sage
from baselines.models import structure
from benchmarks import train as benchmark
from tests import graphs
from tpu_graphs.dataset import statistics
from tpu_graphs.modules import module as module_lib

_LAYERS = {'SAGE': sage.SAGELayer, 'ResGCN': gcn.GCNLayer, 'GATv2': gat.GATv2Layer}
# Each edge is a consumer and an operand. There are repeated edges, a loop and an op without edges.
_EDGES = np.array([[1, 0], [2, 0], [3, 1], [3, 2], [3, 2], [4, 4]])


def _relations(edges, directed):
  """Returns a list of (sender, receiver) for each relation."""
  operands = [(operand, consumer) for consumer, operand in edges]
  consumers = [(receiver, sender) for sender, receiver in operands]
  return [operands, consumers] if directed else [operands + consumers]


def _kernels(layer):
  """Returns the kernels of a layer by name, as float64 arrays."""
  kernels = layer._project.kernels.numpy().astype(np.float64)
  if isinstance(layer, gcn.GCNLayer):
    return {str(r): kernel for r, kernel in enumerate(kernels)}
  if not isinstance(layer, gat.GATv2Layer):
    return {'self': kernels[0], **{str(r): kernel for r, kernel in enumerate(kernels[1:])}}
  found = {'self': kernels[0]}
  for r, attend in enumerate(layer._attend):
    found |= {
      f'{r} query': kernels[1 + 2 * r],
      f'{r} value': kernels[2 + 2 * r],
      f'{r} score': attend._score.numpy().astype(np.float64),
    }
  return found


def _update(name, kernels, x, relations):
  """Computes the update of a layer: [N, K, any] -> [N, K, H]."""
  n = len(x)
  if name == 'ResGCN':
    total = 0
    for r, edges in enumerate(relations):
      adjacency = np.eye(n)
      for sender, receiver in edges:
        adjacency[receiver, sender] += 1
      rows, columns = np.diag(adjacency.sum(1) ** -0.5), np.diag(adjacency.sum(0) ** -0.5)
      total = total + np.einsum('ij,jkf,fh->ikh', rows @ adjacency @ columns, x, kernels[str(r)])
    return total
  result = x @ kernels['self']
  for r, edges in enumerate(relations):
    for i in range(n):
      senders = [sender for sender, receiver in edges if receiver == i]
      if senders and name == 'SAGE':
        result[i] += np.mean(x[senders], axis=0) @ kernels[str(r)]
      elif senders and name == 'GATv2':
        result[i] += _attended(kernels, r, x[i], x[senders])
  return result


def _attended(kernels, r, own, senders):
  """Attends from an op, [K, F], to its senders, [number of senders, K, F]; returns [K, H]."""
  score = kernels[f'{r} score']
  result = np.zeros((len(own), score.size))
  width = score.shape[1]
  for k in range(len(own)):
    query, values = own[k] @ kernels[f'{r} query'], senders[:, k] @ kernels[f'{r} value']
    for head in range(len(score)):
      mine = slice(head * width, (head + 1) * width)
      sums = query[mine] + values[:, mine]
      logits = np.where(sums > 0, sums, 0.2 * sums) @ score[head]
      weights = np.exp(logits) / np.exp(logits).sum()
      result[k, mine] = weights @ values[:, mine]
  return result


def _standardize(x):
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)


@pytest.mark.parametrize('directed', [True, False], ids=['directed', 'undirected'])
@pytest.mark.parametrize('name', _LAYERS)
def test_layer_equals_naive_loops(name, directed):
  rng = np.random.default_rng(1)
  layer = _LAYERS[name](dataclasses.replace(graphs.PARTS, directed=directed))
  state = rng.normal(size=(6, 3, 8)).astype(np.float32)
  batch = graphs.batch([graphs.module('tile', n=6, seed=7, edge_index=_EDGES)])
  messages = structure.Structure.of(batch, directed=directed).between_ops
  layer(state, messages)
  for weight in layer.weights:
    weight.assign_add(rng.normal(scale=0.3, size=weight.shape))
  update = _update(name, _kernels(layer), state.astype(np.float64), _relations(_EDGES, directed))
  expected = _standardize(state + np.maximum(update + layer._activate.bias.numpy(), 0))
  np.testing.assert_allclose(layer(state, messages), expected, atol=1e-5)


def _normalize(kind, name, x):
  stats = graphs.column_statistics(kind)['features'][name]
  log, constant = stats['log'], stats['constant']
  std = np.where(np.array(log['std']) > 0, log['std'], 1)
  result = (np.sign(x) * np.log1p(np.abs(x)) - log['mean']) / std
  result[..., constant] = 0
  return result


def _inputs(model, module):
  """Returns the input of each op, [N, F], and of its config, [N, K, any]; 0 without a config."""
  feat = _normalize(module.kind, 'feat', module.node_feat.astype(np.float64))
  embedding = model._op_input._embed.embeddings.numpy()
  ops = np.concatenate([embedding[module.node_opcode], feat], axis=1)
  if module.kind == 'tile':
    config = _normalize('tile', 'config_feat', module.config_feat.astype(np.float64))
    return ops, np.repeat(config[np.newaxis], module.num_ops, axis=0)
  configs = np.zeros((module.num_ops, module.num_configs, 132))
  for j, i in enumerate(module.node_config_ids):
    for k in range(module.num_configs):
      configs[i, k] = _layout(module.node_config_feat[k, j], feat[i])
  return ops, configs


def _layout(layout, feat):
  """Computes the input of a model from an op's layout config, int8 [18]."""
  # The README of TpuGraphs gives this column as shape_dimensions_0.
  first = 21
  onehot = np.zeros((18, 7))
  for slot, value in enumerate(layout):
    onehot[slot, int(value) + 1] = 1
  lengths = [feat[first + value] if value >= 0 else 0 for value in layout[:6]]
  return np.concatenate([onehot.reshape(-1), lengths])


@pytest.mark.parametrize('directed', [True, False], ids=['directed', 'undirected'])
@pytest.mark.parametrize('kind', module_lib.KINDS)
@pytest.mark.parametrize('name', _LAYERS)
def test_early_join_equals_first_layer_over_concatenation(name, kind, directed, monkeypatch):
  # The first layer of a GATv2 model is a dense layer.
  layers = 1 if name != 'GATv2' else 0
  model = graphs.model(
    f'EarlyJoin{name}', kind, dataclasses.replace(graphs.PARTS, directed=directed, layers=layers)
  )
  module = graphs.module(kind, n=6, seed=6, edge_index=_EDGES)
  seen, original = [], parts.pool_ops

  def pool_ops(modules, state):
    seen.append(state)
    return original(modules, state)

  monkeypatch.setattr(parts, 'pool_ops', pool_ops)
  model(graphs.batch([module, graphs.module(kind, n=2, seed=3)]))
  ops, configs = _inputs(model, module)
  x = np.concatenate([np.repeat(ops[:, np.newaxis], module.num_configs, axis=1), configs], axis=-1)
  of_ops, of_configs = _kernels(model._of_ops), _kernels(model._of_configs)
  kernels = {part: np.concatenate([of_ops[part], of_configs[part]]) for part in of_ops}
  if layers:
    update = _update(name, kernels, x, _relations(_EDGES, directed))
  else:
    update = _update('dense', kernels, x, [])
  expected = np.maximum(update + model._activate.bias.numpy(), 0)
  assert (expected > 0).any()
  np.testing.assert_allclose(seen[0][:6], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('kind', module_lib.KINDS)
def test_late_join_equals_dense_layers_over_concatenations(kind):
  model = graphs.model('LateJoinSAGE', kind, dataclasses.replace(graphs.PARTS, layers=1))
  module = graphs.module(kind, n=6, seed=6, edge_index=_EDGES)
  ops, configs = _inputs(model, module)
  relations = _relations(_EDGES, True)
  update = _update('SAGE', _kernels(model._first), ops[:, np.newaxis], relations)
  state = np.maximum(update + model._activate.bias.numpy(), 0)[:, 0]  # [N, H]

  def dense(own, other, x, y):
    """Computes a dense layer over the concatenation of x and y; its weights are in two parts."""
    kernel = np.concatenate([own.kernel.numpy(), other.kernel.numpy()])
    return np.concatenate([x, y]) @ kernel + own.bias.numpy() + other.bias.numpy()

  pooled = np.concatenate([state.mean(0), state.max(0)])
  hidden, score = model._head._hidden, model._head._score
  for k, found in enumerate(model(graphs.batch([module])).numpy()[0]):
    config = configs[0, k]
    if kind == 'layout':
      own, other = model._join_ops._of_ops, model._join_ops._of_configs
      of_ops = [dense(own, other, state[i], configs[i, k]) for i in module.node_config_ids]
      config = np.mean(np.maximum(of_ops, 0), axis=0)
    joined = np.maximum(dense(model._of_ops, model._of_configs, pooled, config), 0)
    joined = np.maximum(joined @ hidden.kernel.numpy() + hidden.bias.numpy(), 0)
    expected = joined @ score.kernel.numpy() + score.bias.numpy()
    np.testing.assert_allclose(found, expected[0], rtol=1e-4, atol=1e-5)


def test_equals_the_naive_formulation_of_the_benchmark():
  options = dataclasses.replace(graphs.PARTS, layers=3)
  model = graphs.model('EarlyJoinSAGE', 'tile', options)
  naive = benchmark.NaiveEarlyJoinSAGE(options, statistics.parse(graphs.column_statistics('tile')))
  batch = graphs.batch(
    [
      graphs.module('tile', n=6, seed=1, edge_index=_EDGES),
      graphs.module('tile', n=1, seed=2),
      graphs.module('tile', n=4, seed=3, edge_index=np.zeros((0, 2), np.int64)),
    ]
  )
  naive(batch)
  naive.take_weights_of(model)
  np.testing.assert_allclose(naive(batch), model(batch), rtol=1e-4, atol=1e-5)
  target = tf.random.normal([3, graphs.K])
  gradients = []
  for other in (naive, model):
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum(tf.square(other(batch, training=True) - target))
    embed = naive.embed if other is naive else model._op_input._embed
    gradients.append(tape.gradient(loss, embed.embeddings))
  np.testing.assert_allclose(*map(tf.convert_to_tensor, gradients), rtol=1e-3, atol=1e-5)


def test_normalizer_by_hand():
  column = statistics.ColumnStatistics(
    count=2,
    log_mean=np.array([1.0, 2.0, 5.0]),
    log_std=np.array([2.0, 0.5, 0.0]),
    constant=np.array([False, False, True]),
  )
  x = np.array([[np.expm1(3.0), -np.expm1(1.0), 7.0]], np.float32)
  np.testing.assert_allclose(parts.Normalizer(column)(x), [[1.0, -6.0, 0.0]], atol=1e-5)


def _gradient(function, *inputs):
  """Returns value and gradients of the function, with weights that make all gradients differ."""
  inputs = [tf.constant(x) for x in inputs]
  with tf.GradientTape() as tape:
    tape.watch(inputs)
    result = function(*inputs)
    weights = tf.random.stateless_normal(tf.shape(result), seed=[1, 2])
    total = tf.reduce_sum(result * weights)
  return [result, *map(tf.convert_to_tensor, tape.gradient(total, inputs))]


def _assert_same(ours, theirs):
  for own, other in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)


def test_layer_norm_and_its_gradient_equal_the_layer_of_keras():
  x = np.random.default_rng(0).normal(size=(5, 3, 8)).astype(np.float32)
  # The first rows have no variance.
  x[0] = 1.0
  keras = tf.keras.layers.LayerNormalization(center=False, scale=False)
  _assert_same(_gradient(parts.LayerNorm(), x), _gradient(keras, x))


def test_bias_and_relu_and_their_gradients():
  rng = np.random.default_rng(0)
  x, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 3, 8), (8,)))
  _assert_same(
    _gradient(parts._bias_relu, x, bias), _gradient(lambda x, bias: tf.nn.relu(x + bias), x, bias)
  )


# Groups 1 and 4 have no rows.
_GROUPS = np.array([2, 0, 2, 2, 0, 3], np.int32)


@pytest.mark.parametrize('shape', [(), (4,), (2, 3)])
def test_sums_and_gathers_and_their_gradients(shape):
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(6, *shape)).astype(np.float32)
  sums = rng.normal(size=(5, *shape)).astype(np.float32)
  _assert_same(
    _gradient(lambda x: structure.take(x, _GROUPS), sums),
    _gradient(lambda x: tf.gather(x, _GROUPS), sums),
  )
  _assert_same(
    _gradient(lambda x: structure.sum_by(x, _GROUPS, 5), rows),
    _gradient(lambda x: tf.math.unsorted_segment_sum(x, _GROUPS, 5), rows),
  )


def test_maximum_and_its_gradient_with_ties_and_empty_groups():
  groups = structure.Groups(tf.constant(_GROUPS), tf.constant(5))
  # All values are below 0, the maximum of an empty group.
  rows = np.random.default_rng(0).integers(-3, 0, (6, 4)).astype(np.float32)
  value, gradient = _gradient(groups.maximum, rows)
  theirs, their_gradient = _gradient(lambda x: tf.math.unsorted_segment_max(x, _GROUPS, 5), rows)
  kept = [0, 2, 3]
  np.testing.assert_array_equal(value.numpy()[kept], theirs.numpy()[kept])
  np.testing.assert_array_equal(value.numpy()[[1, 4]], 0)
  np.testing.assert_allclose(gradient, their_gradient, rtol=1e-5)


def test_softmax_within_groups():
  groups = structure.Groups(tf.constant(_GROUPS), tf.constant(5))
  rows = np.random.default_rng(0).normal(scale=100, size=(6, 2)).astype(np.float32)
  expected = np.empty_like(rows)
  for group in set(_GROUPS):
    inside = np.equal(_GROUPS, group)
    expected[inside] = tf.nn.softmax(rows[inside], axis=0)
  np.testing.assert_allclose(groups.softmax(rows), expected, rtol=1e-5, atol=1e-7)


def test_pool_ops_is_mean_and_maximum_per_module():
  modules = [graphs.module('tile', n=n, seed=n) for n in (3, 1)]
  state = np.random.default_rng(0).normal(size=(4, 2, 5)).astype(np.float32)
  groups = structure.Structure.of(graphs.batch(modules), directed=True).modules
  pooled = parts.pool_ops(groups, tf.constant(state))
  expected = [np.concatenate([part.mean(0), part.max(0)], -1) for part in (state[:3], state[3:])]
  np.testing.assert_allclose(pooled, expected, rtol=1e-6)


def test_neighbours_of_an_op_by_direction():
  batch = graphs.batch([graphs.module('tile', n=6, edge_index=_EDGES)])
  state = np.arange(6, dtype=np.float32)[:, np.newaxis] + 1
  operands, consumers = structure.Structure.of(batch, directed=True).between_ops.relations
  (both,) = structure.Structure.of(batch, directed=False).between_ops.relations
  np.testing.assert_array_equal(operands.sum(state)[:, 0], [0, 1, 1, 2 + 3 + 3, 5, 0])
  np.testing.assert_array_equal(consumers.sum(state)[:, 0], [2 + 3, 4, 4 + 4, 0, 5, 0])
  np.testing.assert_array_equal(
    both.sum(state)[:, 0], operands.sum(state)[:, 0] + consumers.sum(state)[:, 0]
  )


def test_first_layer_makes_nothing_of_ops_times_configs_times_inputs():
  model = graphs.model('EarlyJoinSAGE', 'tile')
  batch = graphs.batch([graphs.module('tile', n=6, seed=7, edge_index=_EDGES)])
  function = tf.function(lambda: model(batch)).get_concrete_function()
  sizes = [
    tensor.shape.num_elements() or 0
    for operation in function.graph.get_operations()
    for tensor in operation.outputs
    if tensor.shape.is_fully_defined()
  ]
  # The states are among the tensors, so the sizes are known here.
  assert 6 * graphs.K * graphs.PARTS.hidden in sizes
  assert max(sizes) < 6 * graphs.K * (4 + 140 + 24)
