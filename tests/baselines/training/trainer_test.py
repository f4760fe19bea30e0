"""Tests of baselines.training.trainer: steps are the same in each run, on any number of devices and
with static shapes.
"""

import itertools
import json
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from baselines import losses as losses_lib
from baselines import models
from baselines import train
from baselines.models import parts
from baselines.training import checkpoints
from baselines.training import runs
from baselines.training import trainer as trainer_lib
from tests import testing
from tpu_graphs import errors
from tpu_graphs import testing as tpu_testing
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.input import batching
from tpu_graphs.input import loading

pytestmark = pytest.mark.usefixtures('each_pipeline_made_once')
_PARTS = parts.PartOptions(hidden=8, layers=1, opcode_embedding=4)
# Adding a constant to all scores changes no loss that depends on order only, so Adam would make
# random steps for the last bias out of rounding errors. With some mse each weight has a gradient,
# so that weights can be compared.
_LOSS = 'list_mle:1,mse:1'
_CPU = tf.distribute.OneDeviceStrategy('/cpu:0')
_EXTRAS = {'ema': 0.9, 'weight_decay': 0.1, 'warmup': 0.5}


@pytest.fixture(scope='session')
def data(kind, tmp_path_factory):
  """Converts eight modules in two shards, one without runtimes and one with a single config."""
  return testing.convert_arrays(
    tmp_path_factory.mktemp(f'training_{kind}'),
    kind,
    {
      **{f'train/m{i}': testing.planted_arrays(kind, 3 + i % 3, 24, i) for i in range(6)},
      'train/single': testing.planted_arrays(kind, 3, 1, 10),
      'train/unmeasured': _unmeasured(kind, 3, 9, 11),
    },
    num_shards=2,
  )


@pytest.fixture(scope='session')
def tile_data(tmp_path_factory):
  """Converts four modules, for tests that do not depend on the kind."""
  return testing.convert_arrays(
    tmp_path_factory.mktemp('training'),
    'tile',
    {f'train/m{i}': testing.planted_arrays('tile', 3, 12, i) for i in range(4)},
  )


def _mlp(data, **options):
  return _trainer('tile', data, name='MLP', **{'batch_size': 1, **options})


def _unmeasured(kind, n, c, seed):
  return {**testing.planted_arrays(kind, n, c, seed), 'config_runtime': np.zeros(c, np.int64)}


def _options(**over):
  return trainer_lib.TrainOptions(
    **{'epochs': 3, 'batch_size': 4, 'configs_per_module': 8, 'loss': _LOSS, **over}
  )


def _trainer(kind, data, name=None, **options):
  model = models.ModelOptions(name or models.DEFAULT_MODEL[kind], kind, _PARTS)
  return trainer_lib.Trainer(
    model, _options(**options), _CPU, directory=directory_lib.open_directory(data)
  )


def _train(trainer, counts):
  """Takes calls of so many steps each; returns their mean losses, and the weights afterwards."""
  batches = iter(trainer.batches(1))
  taken = [trainer.take(batches, count) for count in counts]
  assert all(steps.is_finite for steps in taken)
  return [steps.loss / steps.count for steps in taken], [
    weight.numpy() for weight in trainer.model.weights
  ]


def _assert_close(weights, expected, **tolerance):
  for weight, other in zip(weights, expected, strict=True):
    np.testing.assert_allclose(weight, other, **tolerance)


@pytest.fixture(scope='session')
def five_steps(kind, data):
  """Returns losses and weights of five steps."""
  return _train(_trainer(kind, data), [1] * 5)


def test_five_steps_twice_are_the_same(kind, data, five_steps):
  losses, weights = _train(_trainer(kind, data), [1] * 5)
  assert len(losses) == 5
  assert losses == five_steps[0]
  _assert_close(weights, five_steps[1], rtol=0)


def test_seed_changes_the_weights(tile_data):
  first, second = (_mlp(tile_data, seed=seed) for seed in (0, 1))
  assert not np.allclose(first.model.trainable_variables[0], second.model.trainable_variables[0])


@pytest.mark.slow
def test_static_shapes_train_the_same(kind, data, five_steps):
  shapes = 1 if kind == 'tile' else 2
  trainer = _trainer(kind, data, shapes=shapes)
  losses, weights = _train(trainer, [1, 1, 3])
  specs = tf.nest.flatten(trainer.batches(1).element_spec, expand_composites=True)
  assert all(spec.shape.is_fully_defined() or shapes > 1 for spec in specs)
  assert all(spec.dtype != tf.string for spec in specs)
  assert trainer._gradients.experimental_get_tracing_count() == 1
  assert trainer._take.experimental_get_tracing_count() == 1
  np.testing.assert_allclose(
    [*losses[:2], losses[2] * 3], [*five_steps[0][:2], sum(five_steps[0][2:])], rtol=1e-4
  )
  _assert_close(weights, five_steps[1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_step_of_all_losses_is_ready_for_tpu(kind, data):
  trainer = _trainer(kind, data, shapes=1, loss=','.join(f'{name}:1' for name in losses_lib.LOSSES))
  batches = batching.batches(data, 'train', trainer._batching, epochs=1)
  tpu_testing.assert_tpu_ready(trainer._gradients, batches.element_spec, inputs=batches)


def test_several_steps_per_call_are_the_same(tile_data):
  losses, weights = _train(_mlp(tile_data), [1] * 4)
  fewer, same_weights = _train(_mlp(tile_data), [3, 1])
  _assert_close(same_weights, weights, rtol=0)
  assert fewer[0] == pytest.approx(np.mean(losses[:3]), rel=1e-6)


def test_epochs_differ_and_can_be_read_from_any_step(kind, data):
  trainer = _trainer(kind, data, name='MLP', batch_size=2)

  def ids(epoch, step, count):
    return [
      graph.context['config_id'].numpy().tolist()
      for graph in itertools.islice(trainer.batches(epoch, step), count)
    ]

  steps, later = trainer.steps_in_epoch(1), trainer.steps_in_epoch(2)
  assert steps > 2
  both = ids(1, 0, steps + later)
  assert ids(1, 2, steps + later - 2) == both[2:]
  assert ids(2, 0, later) == both[steps:] != both[:steps]
  names = []
  for step in range(steps):
    (found,) = trainer.module_ids(1, step)
    assert [name != '' for name in found] == (np.array(both[step]) >= 0).any(axis=1).tolist()
    names += [name for name in found if name]
  assert sorted(names) == sorted([*(f'm{i}' for i in range(6)), 'single'])


def test_average_follows_the_weights(tile_data):
  trainer = _mlp(tile_data, ema=0.25, learning_rate=0.1)
  average = [weight.numpy() for weight in trainer.model.trainable_variables]
  batches = iter(trainer.batches(1))
  for step in range(1, 5):
    trainer.take(batches, 1)
    decay = min(0.25, step / (step + 9))
    average = [
      decay * old + (1 - decay) * new.numpy()
      for old, new in zip(average, trainer.model.trainable_variables, strict=True)
    ]
  trainer.update_judged()
  _assert_close(
    [weight.numpy() for weight in trainer.judged.trainable_variables], average, rtol=1e-4, atol=1e-6
  )


def test_without_average_the_weights_are_judged(tile_data):
  trainer = _mlp(tile_data)
  trainer.take(iter(trainer.batches(1)), 1)
  trainer.update_judged()
  _assert_close(trainer.judged.get_weights(), trainer.model.get_weights(), rtol=0)


def test_weight_decay_spares_biases_and_embeddings(tile_data):
  # Without gradients there is nothing but the decay.
  trainer = _mlp(tile_data, weight_decay=0.5, learning_rate=0.1)
  before = trainer.model.get_weights()
  trainer.optimizer.apply_gradients(
    [(tf.zeros_like(weight), weight) for weight in trainer.model.trainable_variables]
  )
  trainable = {id(weight) for weight in trainer.model.trainable_variables}
  decayed = []
  for weight, old in zip(trainer.model.weights, before, strict=True):
    spared = id(weight) not in trainable or weight.shape.rank < 2 or 'embedding' in weight.name
    np.testing.assert_allclose(weight, old * (1 if spared else 1 - 0.1 * 0.5), rtol=1e-5)
    decayed.append(not spared)
  assert any(decayed)
  assert not all(decayed)


def test_learning_rate_rises_and_falls():
  schedule = trainer_lib.make_schedule(_options(warmup=0.25, learning_rate=0.5), 40)
  rates = [float(schedule(step)) for step in range(41)]
  assert (rates[0], rates[10]) == (0, pytest.approx(0.5))
  assert rates[:11] == sorted(rates[:11])
  assert rates[10:] == sorted(rates[10:], reverse=True)
  assert rates[40] == pytest.approx(0, abs=1e-7)
  schedule = trainer_lib.make_schedule(_options(learning_rate=0.5), 40)
  assert [float(schedule(step)) for step in (0, 20, 40)] == pytest.approx([0.5, 0.25, 0], abs=1e-6)


@pytest.mark.slow
def test_mixed_precision_trains_nearly_the_same(kind, data, five_steps):
  trainer = _trainer(kind, data, precision='mixed_bfloat16')
  mixed, _ = _train(trainer, [1] * 5)
  assert mixed != five_steps[0]
  np.testing.assert_allclose(mixed, five_steps[0], rtol=0.05)
  assert {weight.dtype for weight in trainer.model.weights} == {tf.float32}
  graph = next(iter(trainer.batches(1)))
  assert trainer.model(graph).dtype == trainer.judged(graph).dtype == tf.float32
  assert tf.keras.mixed_precision.global_policy().name == 'float32'


def test_not_finite_step_is_the_last(tile_data):
  trainer = _mlp(tile_data, learning_rate=1e30)
  taken = trainer.take(iter(trainer.batches(1)), 4)
  assert taken.count == 2  # The first step spoils the weights.
  assert not taken.is_finite
  assert not np.isfinite(taken.losses).all()
  assert taken.losses.shape == np.array(trainer.module_ids(1, 1)).shape


_TWO_DEVICES = """
import dataclasses, json, sys
import numpy as np
import tensorflow as tf
cpu = tf.config.list_physical_devices('CPU')[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from baselines import models
from baselines import scoring
from baselines.models import parts
from baselines.training import strategies
from baselines.training import trainer as trainer_lib
from tpu_graphs.dataset import directory as directory_lib
kind, data, over = sys.argv[1], directory_lib.open_directory(sys.argv[2]), json.loads(sys.argv[3])
options = trainer_lib.TrainOptions(epochs=3, batch_size=4, configs_per_module=8, packs=2, **over)
model = models.ModelOptions(models.DEFAULT_MODEL[kind], kind, parts.PartOptions(8, 1, 4))
results = []
for name, replicas in (('one_device', 1), ('mirrored', 2)):
  strategy = strategies.make(name, tpu=None, paths={})
  assert strategy.num_replicas_in_sync == replicas
  trainer = trainer_lib.Trainer(model, options, strategy, directory=data)
  before = trainer.model.get_weights()
  steps = [trainer.steps_in_epoch(epoch) for epoch in (1, 2)]
  batches = iter(trainer.batches(1))
  losses = [trainer.take(batches, count).loss for count in (1, sum(steps) - 1)]
  trainer.update_judged()
  assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(before, trainer.model.get_weights()))
  static_shapes = bool(options.shapes)
  scorer = scoring.make_scorer(trainer.judged, kind, strategy=strategy, static_shapes=static_shapes)
  assert scorer.replicas == replicas
  scores = np.concatenate([module.score for module in scoring.score_split(scorer, data, 'train')])
  names = sorted(name for names in trainer.module_ids(1, 0) for name in names)
  weights = [*trainer.model.get_weights(), *trainer.judged.get_weights(), scores]
  results.append((steps, losses, weights, names))
(steps, losses, weights, names), (other_steps, other_losses, other_weights, other_names) = results
assert steps == other_steps
assert names == other_names
np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
for weight, other in zip(weights, other_weights, strict=True):
  np.testing.assert_allclose(other, weight, atol=1e-5)
try:
  trainer_lib.Trainer(model, trainer_lib.TrainOptions(batch_size=3), strategy, directory=data)
except ValueError as error:
  print(error)
"""


@pytest.mark.slow
def test_two_devices_train_as_one(kind, data):
  # Logical devices cannot be set once TensorFlow has started, so each kind needs its own process.
  # The process for layout also uses static shapes.
  over = {'loss': _LOSS, **_EXTRAS, 'shapes': int(kind == 'layout')}
  process = subprocess.run(
    [sys.executable, '-c', _TWO_DEVICES, kind, data, json.dumps(over)],
    capture_output=True,
    text=True,
    check=False,
  )
  assert process.returncode == 0, process.stderr[-3000:]
  assert 'batch size does not fit the devices' in process.stdout
  assert 'found 3, expected a multiple of 2 replicas' in process.stdout


def _start_workers(command):
  """Starts two processes of a command that form a cluster."""
  sockets = [socket.socket() for _ in range(2)]
  for each in sockets:
    each.bind(('localhost', 0))
  cluster = {'worker': [f'localhost:{each.getsockname()[1]}' for each in sockets]}
  for each in sockets:
    each.close()
  return [
    subprocess.Popen(
      command,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env={
        **os.environ,
        'TF_CONFIG': json.dumps({'cluster': cluster, 'task': {'type': 'worker', 'index': index}}),
      },
    )
    for index in range(2)
  ]


@pytest.mark.slow
def test_two_workers_train_as_one_and_stop_together(tmp_path):
  data = testing.convert_arrays(
    tmp_path,
    'tile',
    {f'train/m{i}': testing.planted_arrays('tile', 3, 8, i) for i in range(8)},
    num_shards=2,
  )
  out = tmp_path / 'run'
  epochs = 2
  command = [
    sys.executable,
    '-m',
    'baselines.train',
    f'--data={data}',
    f'--out={out}',
    '--model=MLP',
    '--hidden=8',
    '--layers=1',
    '--opcode_embedding=4',
    '--strategy=multi_worker',
    f'--epochs={epochs}',
    '--batch_size=4',
    '--configs_per_module=8',
    f'--loss={_LOSS}',
    '--steps_per_call=1',
  ]
  workers = _start_workers(command)
  while not (out / runs.CONFIG_NAME).exists() and all(worker.poll() is None for worker in workers):
    time.sleep(0.01)
  # Only the second worker receives the signal.
  workers[1].terminate()
  reasons = ('because another worker was stopped', 'by SIGTERM')
  for worker, reason in zip(workers, reasons, strict=True):
    _, error = worker.communicate()
    assert worker.returncode == train.PREEMPTED, error[-3000:]
    assert f'error: stopped {reason}, the state is saved' in error
  assert checkpoints.stored(str(out / runs.STATE_NAME))
  for worker in _start_workers(command):
    printed, error = worker.communicate()
    assert worker.returncode == 0, error[-3000:]
    assert 'resuming at epoch ' in printed
  # One trainer takes the inputs of both workers in one batch.
  trainer = _trainer('tile', data, name='MLP', packs=2, epochs=epochs)
  inputs = [
    batching.batches(data, 'train', trainer._batching, num_inputs=2, input_index=index)
    for index in range(2)
  ]
  both = loading.batch(
    tf.data.Dataset.choose_from_datasets(inputs, tf.data.Dataset.range(2).repeat()), 2
  )
  [best] = out.glob('checkpoint/ckpt-*.index')
  steps = [
    batching.batches_per_epoch(data, 'train', trainer._batching, epoch=epoch, num_inputs=2)
    for epoch in range(int(best.stem.removeprefix('ckpt-')))
  ]
  assert steps[0] == trainer.steps_in_epoch(1) > 1
  trainer.take(iter(both), sum(steps))
  _assert_close(runs.load(str(out)).model.get_weights(), trainer.model.get_weights(), atol=1e-5)


def test_split_smaller_than_a_batch_still_trains(tile_data):
  trainer = _mlp(tile_data, batch_size=64)
  assert trainer.steps_in_epoch(1) == 1
  assert min(_train(trainer, [1, 1])[0]) > 0


def test_modules_that_teach_nothing_do_not_count(tmp_path, kind):
  module = {'train/a': testing.planted_arrays(kind, 3, 8, 0)}
  rest = {
    'train/single': testing.planted_arrays(kind, 3, 1, 1),
    'train/unmeasured': _unmeasured(kind, 3, 9, 2),
    'train/ties': {**testing.planted_arrays(kind, 3, 9, 3), 'config_runtime': np.full(9, 5000)},
  }
  total = []
  for name, sources in (('alone', module), ('together', {**module, **rest})):
    (tmp_path / name).mkdir()
    trainer = _trainer(
      kind, testing.convert_arrays(tmp_path / name, kind, sources), name='MLP', batch_size=8
    )
    # The statistics of the two data sets differ.
    for weight in trainer.model.non_trainable_weights:
      weight.assign(tf.ones_like(weight))
    assert trainer.steps_in_epoch(1) == 1
    taken = trainer.take(iter(trainer.batches(1)), 1)
    total.append(taken.loss)
  assert total[0] > 0
  assert total[1] == pytest.approx(total[0], rel=1e-5)
  # Padding and modules without runtimes do not count as configs.
  assert taken.configs == 8 + 1 + 8


@pytest.mark.parametrize(
  ('options', 'where', 'found'),
  [
    ({'packs': 3, 'batch_size': 4}, '--batch_size', '4'),
    ({'metric': 'accuracy'}, '--metric', 'accuracy'),
    ({'metric': 'top_7_error'}, '--metric', 'top_7_error'),
  ],
)
def test_options_that_do_not_fit_are_refused(kind, options, where, found):
  with pytest.raises(errors.InputError) as info:
    _options(**options).resolve(kind, _CPU)
  assert (info.value.where, info.value.found) == (where, found)


def test_options_are_filled_in(kind):
  resolved = _options().resolve(kind, _CPU)
  assert (resolved.packs, resolved.shapes, resolved.metric) == (
    1,
    0,
    trainer_lib.SELECTION_METRIC[kind],
  )
  assert resolved.resolve(kind, _CPU) == resolved


class _Tpus(tf.distribute.TPUStrategy):
  """A strategy that claims two TPUs."""

  def __init__(self):
    pass

  num_replicas_in_sync = 2


def test_tpu_takes_one_static_shape():
  assert _options().resolve('tile', _Tpus()).shapes == 1
  assert _options().resolve('tile', _Tpus()).packs == 2
  for shapes in (0, 2):
    with pytest.raises(errors.InputError, match='shapes do not fit a TPU'):
      _options(shapes=shapes).resolve('tile', _Tpus())
  with pytest.raises(
    errors.InputError, match='packs do not fit the devices: found 3, expected a multiple of 2'
  ):
    _options(packs=3).resolve('tile', _Tpus())
  with pytest.raises(errors.InputError, match='found 5, expected a multiple of 2 replicas'):
    _options(batch_size=5).resolve('tile', _Tpus())


@pytest.mark.parametrize('option', ['learning_rate', 'clip_norm'])
@pytest.mark.parametrize('value', [0.0, -1.0, float('nan'), float('inf')])
def test_numbers_that_cannot_train_are_refused(option, value):
  with pytest.raises(errors.InputError, match='not a positive number') as info:
    trainer_lib.TrainOptions(**{option: value})
  assert info.value.where == f'--{option}'


@pytest.mark.parametrize(
  ('option', 'value'),
  [
    ('ema', 1.0),
    ('ema', -0.1),
    ('warmup', 1.0),
    ('warmup', float('nan')),
    ('weight_decay', -1.0),
    ('weight_decay', float('inf')),
    ('precision', 'float16'),
  ],
)
def test_other_numbers_out_of_range_are_refused(option, value):
  with pytest.raises(errors.InputError) as info:
    trainer_lib.TrainOptions(**{option: value})
  assert info.value.where == f'--{option}'


@pytest.mark.parametrize(
  ('metric', 'value', 'best', 'better'),
  [
    ('opa', 0.5, None, True),
    ('opa', 0.5, 0.4, True),
    ('opa', 0.5, 0.5, False),
    ('opa', None, 0.1, False),
    ('opa', None, None, True),
    ('top_5_error', 0.1, 0.2, True),
    ('top_5_error', 0.2, 0.1, False),
  ],
)
def test_better(metric, value, best, better):
  assert trainer_lib.is_better(metric, value, best) is better
