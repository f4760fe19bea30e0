"""Tests of baselines.serving.saved_model: served models score as in training, in any batch."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from baselines import models
from baselines.serving import saved_model
from tests import graphs
from tpu_graphs.dataset import records

# More configs than are scored at a time below.
_CONFIGS = 40


def _modules(kind):
  """Makes modules of different sizes.

  They have several chunks of configs; one config of one op without edges; a name in Unicode; and,
  for layout, no configurable ops.
  """
  modules = [
    graphs.module(kind, n=5, c=_CONFIGS, seed=1),
    graphs.module(kind, n=1, c=1, seed=2),
    dataclasses.replace(graphs.module(kind, n=9, c=3, seed=3), module_id='π/∅'),
  ]
  return [*modules, graphs.module(kind, n=4, c=2, seed=4, nc=0)] if kind == 'layout' else modules


def _tensors(module):
  return {name: tf.constant(array) for name, array in saved_model.arrays_of(module).items()}


@pytest.fixture(autouse=True)
def eagerly():
  """Runs functions eagerly: tracing takes seconds per model, and tests of export_model do it."""
  with pytest.MonkeyPatch.context() as patch:
    # With this, 16 configs are scored at a time.
    patch.setattr(saved_model, '_ROWS', 1)
    tf.config.run_functions_eagerly(True)
    yield
  tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize('name', models.MODELS)
def test_scores_are_the_scores_of_the_model(kind, name):
  model = graphs.model(name, kind)
  served = saved_model.ServedModel(model, kind)
  modules = _modules(kind)
  found = served.examples(tf.constant([records.encode_whole(module) for module in modules]))
  assert found['num_configs'].numpy().tolist() == [module.num_configs for module in modules]
  assert found['scores'].shape == found['config_id'].shape == [len(modules), _CONFIGS]
  for i, module in enumerate(modules):
    expected = model(graphs.batch([module], size=module.num_configs)).numpy()[0]
    np.testing.assert_allclose(
      served.tensors(_tensors(module))['scores'], expected, rtol=1e-5, atol=1e-5
    )
    scores, ids = found['scores'].numpy()[i], found['config_id'].numpy()[i]
    np.testing.assert_allclose(scores[: module.num_configs], expected, rtol=1e-5, atol=1e-5)
    assert (scores[module.num_configs :] == np.inf).all()
    assert ids.tolist() == [*range(module.num_configs), *[-1] * (_CONFIGS - module.num_configs)]


def test_no_record_and_no_config(kind):
  served = saved_model.ServedModel(graphs.model('MLP', kind), kind)
  found = served.examples(tf.constant([], tf.string))
  assert found['scores'].shape == found['config_id'].shape == [0, 0]
  assert found['num_configs'].shape == [0]
  empty = graphs.module(kind, c=0)
  assert served.tensors(_tensors(empty))['scores'].shape == [0]
  assert served.examples(tf.constant([records.encode_whole(empty)]))['scores'].shape == [1, 0]


@pytest.mark.parametrize(
  ('name', 'change', 'message'),
  [
    ('edge_index', lambda edges: edges + 1, 'edge_index out of range'),
    ('edge_index', lambda edges: edges - 1, 'edge_index below 0'),
    ('opcode', lambda opcodes: opcodes + 120, 'opcode out of range'),
    ('opcode', lambda opcodes: opcodes[1:], 'different numbers'),
    ('feat', lambda feat: feat[1:], 'different numbers'),
  ],
)
def test_arrays_that_do_not_fit(kind, name, change, message):
  served = saved_model.ServedModel(graphs.model('MLP', kind), kind)
  arrays = _tensors(graphs.module(kind))
  with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=message):
    served.tensors({**arrays, name: change(arrays[name])})


@pytest.mark.parametrize('change', [lambda ids: ids + 5, lambda ids: ids - 5, lambda ids: ids[1:]])
def test_configurable_ops_that_do_not_fit(change):
  served = saved_model.ServedModel(graphs.model('MLP', 'layout'), 'layout')
  arrays = _tensors(graphs.module('layout'))
  with pytest.raises(
    (tf.errors.InvalidArgumentError, ValueError), match=r'node_config_ids|different numbers'
  ):
    served.tensors({**arrays, 'node_config_ids': change(arrays['node_config_ids'])})


def test_record_of_the_other_kind(kind):
  other = 'layout' if kind == 'tile' else 'tile'
  served = saved_model.ServedModel(graphs.model('MLP', kind), kind)
  with pytest.raises(tf.errors.InvalidArgumentError):
    served.examples(tf.constant([records.encode_whole(graphs.module(other))]))
