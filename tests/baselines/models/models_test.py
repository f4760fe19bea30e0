"""Tests of the properties that every model of baselines.models has."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from baselines import losses
from baselines import models
from baselines.models import parts
from tests import graphs
from tpu_graphs import errors
from tpu_graphs import testing
from tpu_graphs.modules import module as module_lib

_K = graphs.K


@pytest.fixture(
  scope='session',
  params=[(name, kind) for name in models.MODELS for kind in module_lib.KINDS],
  ids='-'.join,
)
def named(request):
  """Returns kind and model, directed for tile and undirected for layout."""
  name, kind = request.param
  return kind, graphs.model(name, kind, dataclasses.replace(graphs.PARTS, directed=kind == 'tile'))


def test_models_of_the_paper():
  assert set(models.MODELS) == {
    'MLP',
    'EarlyJoinSAGE',
    'LateJoinSAGE',
    'EarlyJoinResGCN',
    'LateJoinResGCN',
    'EarlyJoinGATv2',
    'LateJoinGATv2',
  }
  assert set(models.DEFAULT_MODEL.values()) <= set(models.MODELS)


def test_scores_distinguish_configs_and_modules(named):
  kind, model = named
  scores = model(graphs.batch([graphs.module(kind, seed=1), graphs.module(kind, seed=2)])).numpy()
  assert scores.shape == (2, _K)
  assert scores.dtype == np.float32
  # Some scores may be equal: a small MLP has configs for which no unit of a layer is active.
  assert np.unique(scores).size > _K


def test_score_depends_on_no_other_config(named):
  kind, model = named
  module = graphs.module(kind, seed=3)
  together = model(graphs.batch([module])).numpy()[0]
  for i in (0, 4):
    alone = model(graphs.batch([module.select_configs([i])], size=1)).numpy()[0, 0]
    np.testing.assert_allclose(alone, together[i], rtol=1e-4, atol=1e-5)
  chosen = [4, 1, 3]
  padded = model(graphs.batch([module.select_configs(chosen)], size=_K)).numpy()[0, :3]
  np.testing.assert_allclose(padded, together[chosen], rtol=1e-4, atol=1e-5)


def test_score_depends_on_no_other_module_or_padding(named):
  kind, model = named
  modules = [graphs.module(kind, n=n, seed=n) for n in (1, 7, 3, 5)]
  alone = np.concatenate([model(graphs.batch([module])).numpy() for module in modules])
  together = model(graphs.batch(modules)).numpy()
  np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)
  larger = graphs.split([*modules, graphs.module(kind, n=9)])
  padded = model(graphs.batch(modules, pad_to=larger)).numpy()
  assert padded.shape == (5, _K)
  assert np.isfinite(padded).all()
  np.testing.assert_allclose(padded[:4], alone, rtol=1e-4, atol=1e-5)


def _relabelled(module, new):
  """Returns the module with op i as op new[i], and with edges and configurable ops reordered."""
  old = np.argsort(new)
  arrays = {
    'node_opcode': module.node_opcode[old],
    'node_feat': module.node_feat[old],
    'edge_index': new[module.edge_index][::-1],
    'computation': module.computation[old],
  }
  if module.kind == 'layout':
    arrays['node_config_ids'] = new[module.node_config_ids][::-1]
    arrays['node_config_feat'] = module.node_config_feat[:, ::-1]
  fields = {name: getattr(module, name) for name in module.__dataclass_fields__}
  return module_lib.Module(**{**fields, **arrays})


def test_order_of_ops_has_no_effect(named):
  kind, model = named
  module = graphs.module(
    kind, n=6, seed=4, edge_index=np.array([[1, 0], [2, 0], [3, 1], [3, 2], [5, 4], [5, 0]])
  )
  other = _relabelled(module, np.array([3, 5, 0, 1, 4, 2]))
  np.testing.assert_allclose(
    model(graphs.batch([other])), model(graphs.batch([module])), rtol=1e-4, atol=1e-5
  )


def test_edges_matter_to_message_passing_only(named):
  kind, model = named
  module = graphs.module(kind, n=5, seed=5)
  without = graphs.module(kind, n=5, seed=5, edge_index=np.zeros((0, 2), np.int64))
  same = np.allclose(model(graphs.batch([module])), model(graphs.batch([without])), atol=1e-5)
  assert same == (type(model).__name__ == 'MLP')


@pytest.mark.parametrize('name', ['EarlyJoinSAGE', 'EarlyJoinResGCN', 'LateJoinGATv2'])
def test_direction_of_edges_matters_to_directed_models_only(name):
  edges = np.array([[1, 0], [2, 0], [3, 1]])
  for directed in (True, False):
    model = graphs.model(name, 'tile', dataclasses.replace(graphs.PARTS, directed=directed))
    scores, reverse = (
      model(graphs.batch([graphs.module('tile', seed=6, edge_index=index)])).numpy()
      for index in (edges, edges[:, ::-1])
    )
    assert np.allclose(scores, reverse, atol=1e-5) == (not directed)


@pytest.mark.parametrize(
  'corner',
  [
    {'n': 1},
    {'n': 4, 'edge_index': np.zeros((0, 2), np.int64)},
    {'c': 1},
    {'n': 3, 'edge_index': np.array([[1, 1], [1, 1], [0, 2], [2, 0]])},
  ],
)
def test_corner_cases_are_finite(named, corner):
  kind, model = named
  batch = graphs.batch([graphs.module(kind, **corner), graphs.module(kind)])
  with tf.GradientTape() as tape:
    scores = model(batch, training=True)
    total = tf.reduce_sum(scores)
  assert np.isfinite(scores).all()
  gradients = tape.gradient(total, model.trainable_variables)
  assert all(np.isfinite(tf.convert_to_tensor(gradient)).all() for gradient in gradients)


@pytest.mark.parametrize('name', models.MODELS)
def test_no_configurable_op_gives_equal_finite_scores(name):
  scores = graphs.model(name, 'layout')(graphs.batch([graphs.module('layout', nc=0)])).numpy()
  assert np.isfinite(scores).all()
  np.testing.assert_allclose(scores, scores[:, :1].repeat(_K, 1), rtol=1e-5)


def test_gradient_reaches_every_weight(named):
  kind, model = named
  # Attention needs an op with several operands and one with several consumers.
  edges = np.array([[1, 0], [2, 0], [3, 1], [3, 2]])
  batch = graphs.batch(
    [graphs.module(kind, n=7, seed=7, edge_index=edges), graphs.module(kind, n=3, seed=3)]
  )
  with tf.GradientTape() as tape:
    scores = model(batch, training=True)
    loss = tf.reduce_sum(tf.square(scores) + scores)
  gradients = tape.gradient(loss, model.trainable_variables)
  for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
    assert gradient is not None, variable.name
    assert np.abs(tf.convert_to_tensor(gradient)).max() > 0, variable.name


def test_ready_for_tpu_with_gradients(named):
  kind, model = named
  modules = [graphs.module(kind, n=n, seed=n) for n in (1, 7, 3, 5, 2, 4)]
  batches = graphs.batches(modules, 2, pad_to=graphs.split(modules))

  def step(graph):
    with tf.GradientTape() as tape:
      scores = model(graph, training=True)
      total = tf.reduce_sum(losses.list_mle(graph.context['relative_runtime'], scores))
    return scores, tape.gradient(total, model.trainable_variables, unconnected_gradients='zero')

  testing.assert_tpu_ready(step, batches[0].spec, inputs=batches)
  compiled = tf.function(model, jit_compile=True)
  np.testing.assert_allclose(compiled(batches[1]), model(batches[1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', losses.LOSSES)
def test_losses_are_ready_for_tpu_with_gradients(name):
  def step(runtimes, scores):
    with tf.GradientTape() as tape:
      tape.watch(scores)
      total, count = losses.sum_over_modules(losses.LOSSES[name](runtimes, scores), runtimes)
    return total, count, tape.gradient(total, scores)

  inputs = [
    (tf.constant([[5, 3 + i, -1], [4, 4, 9]], tf.int64), tf.random.normal([2, 3])) for i in (0, 7)
  ]
  spec = (tf.TensorSpec([2, 3], tf.int64), tf.TensorSpec([2, 3], tf.float32))
  testing.assert_tpu_ready(step, spec, inputs=inputs)


@pytest.mark.parametrize('kind', module_lib.KINDS)
@pytest.mark.parametrize('name', models.MODELS)
def test_learns(name, kind):
  model = graphs.fresh_model(name, kind)
  batch = graphs.batch([graphs.module(kind, n=n, seed=n) for n in (4, 6)])
  optimizer = tf.keras.optimizers.Adam(1e-2)
  history = []
  for _ in range(20):
    with tf.GradientTape() as tape:
      scores = model(batch, training=True)
      loss = tf.reduce_mean(losses.list_mle(batch.context['relative_runtime'], scores))
    optimizer.minimize(loss, model.trainable_variables, tape=tape)
    history.append(float(loss))
  assert history[-1] < 0.9 * history[0], history


@pytest.mark.parametrize('name', models.MODELS)
def test_mixed_precision_gives_float32_scores_and_weights(name, mixed_precision):
  del mixed_precision
  model = graphs.model(name, 'layout')
  batch = graphs.batch([graphs.module('layout', seed=1), graphs.module('layout', seed=2)])
  with tf.GradientTape() as tape:
    scores = model(batch, training=True)
    total = tf.reduce_sum(scores)
  assert scores.dtype == tf.float32
  assert {weight.dtype for weight in model.weights} == {tf.float32}
  gradients = tape.gradient(total, model.trainable_variables)
  assert all(np.isfinite(tf.convert_to_tensor(gradient)).all() for gradient in gradients)
  tf.keras.mixed_precision.set_global_policy('float32')
  exact = graphs.model(name, 'layout')
  exact.set_weights(model.get_weights())
  exact = exact(batch).numpy()
  assert not np.array_equal(scores, exact)
  np.testing.assert_allclose(scores, exact, rtol=0.1, atol=0.1)


@pytest.fixture
def mixed_precision():
  tf.keras.mixed_precision.set_global_policy('mixed_bfloat16')
  yield
  tf.keras.mixed_precision.set_global_policy('float32')


def test_weights_are_saved_and_restored(named, tmp_path):
  kind, model = named
  weights, batch = model.get_weights(), graphs.batch([graphs.module(kind)])
  before = model(batch).numpy()
  path = tf.train.Checkpoint(model=model).write(str(tmp_path / 'checkpoint'))
  model.set_weights([weight + 1 for weight in weights])
  assert not np.allclose(model(batch), before)
  tf.train.Checkpoint(model=model).read(path).assert_consumed()
  np.testing.assert_array_equal(model(batch), before)


@pytest.mark.parametrize('name', models.MODELS)
def test_no_layers(name):
  model = graphs.model(name, 'tile', parts.PartOptions(hidden=4, layers=0, opcode_embedding=2))
  assert model(graphs.batch([graphs.module('tile')])).shape == (1, _K)


def test_options_survive_json():
  options = models.ModelOptions(
    'LateJoinGATv2', 'layout', dataclasses.replace(graphs.PARTS, directed=False)
  )
  stored = json.loads(json.dumps(dataclasses.asdict(options)))
  sizes = parts.PartOptions(**stored['parts'])
  assert models.ModelOptions(stored['name'], stored['kind'], sizes) == options


def test_unknown_model_is_refused():
  with pytest.raises(errors.InputError, match=r'unknown model.*GPT.*EarlyJoinSAGE'):
    models.ModelOptions('GPT', 'tile')


def test_unknown_kind_is_refused():
  with pytest.raises(errors.InputError, match='unknown kind: found graph, expected tile or layout'):
    models.ModelOptions('MLP', 'graph')


def test_hidden_units_that_heads_do_not_divide_are_refused():
  odd = parts.PartOptions(hidden=10, attention_heads=4)
  with pytest.raises(errors.InputError, match='found 10, expected a multiple of 4'):
    models.ModelOptions('EarlyJoinGATv2', 'tile', odd)
  assert models.ModelOptions('EarlyJoinSAGE', 'tile', odd).parts.hidden == 10


def test_normalizer_is_part_of_the_weights(named):
  _, model = named
  names = [weight.name for weight in model.non_trainable_weights]
  assert any('mean' in name for name in names)
  assert any('scale' in name for name in names)
