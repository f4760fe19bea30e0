"""Tests of baselines.train: it learns, repeats itself, does the same on several devices, and refuses in one line."""

import csv
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from baselines import models
from baselines import runs
from baselines import scoring
from baselines import train
from baselines.models import parts
from tests import testing
from tpu_graphs import cli
from tpu_graphs import datasets
from tpu_graphs import errors
from tpu_graphs import metrics

_PARTS = parts.PartOptions(hidden=8, layers=1, opcode_embedding=4)
# Adding a constant to all scores changes no loss by order, so that Adam makes random steps for the last bias out of
# what is rounded off. With some mse each weight has a gradient, and weights can be compared.
_LOSS = 'list_mle:1,mse:1'
_CPU = tf.distribute.OneDeviceStrategy('/cpu:0')


def _planted(kind, n, c, seed):
  """A module whose runtimes grow with one column of its configs."""
  if kind == 'tile':
    arrays = testing.tile_arrays(n=n, c=c, seed=seed)
    order = arrays['config_feat'][:, 3]
  else:
    arrays = testing.layout_arrays(n=n, c=c, nc=2, seed=seed)
    order = arrays['node_config_feat'][:, :, 0].sum(1)
  arrays['config_runtime'] = (10_000 + 1000 * order).astype(np.int64)
  return arrays


def _unmeasured(kind, n, c, seed):
  return {**_planted(kind, n, c, seed), 'config_runtime': np.zeros(c, np.int64)}


def _options(**over):
  return train.TrainOptions(**{'epochs': 3, 'batch_size': 4, 'configs_per_module': 8, **over})


def _model(kind):
  return models.ModelOptions(models.DEFAULT_MODEL[kind], kind, _PARTS)


@pytest.fixture(scope='session')
def data(kind, tmp_path_factory):
  """Eight modules to train on, one of them without runtimes and one with one config."""
  return testing.convert_arrays(tmp_path_factory.mktemp(f'train_{kind}'), kind, {
      **{f'train/m{i}': _planted(kind, 3 + i % 3, 24, i) for i in range(6)},
      'train/single': _planted(kind, 3, 1, 10), 'train/unmeasured': _unmeasured(kind, 3, 9, 11),
      'valid/v': _planted(kind, 4, 24, 12), 'valid/single': _planted(kind, 2, 1, 13),
      'test/hidden': _unmeasured(kind, 2, 5, 14)})


@pytest.fixture(scope='session')
def trained(kind, data, tmp_path_factory):
  """A run of three epochs."""
  out = str(tmp_path_factory.mktemp(f'train_run_{kind}') / 'run')
  # A learning rate at which the last epoch need not be the best.
  return train.train(data=data, out=out, model=_model(kind), options=_options(learning_rate=0.05))


def _history(run):
  with open(os.path.join(run.path, runs.HISTORY_NAME), encoding='utf-8', newline='') as file:
    return list(csv.DictReader(file))


def _judged(run, data, split):
  """`metrics.summarize` of a run on a split."""
  scorer = scoring.make_scorer(run.model, run.kind)
  return metrics.summarize(scoring.judge(module, metrics.TOP_KS[run.kind]) for module in scoring.score_split(
      scorer, datasets.open_directory(data), split) if module.is_measured)


@pytest.mark.slow
def test_planted_order_is_learned(kind, data, tmp_path):
  run = train.train(data=data, out=str(tmp_path / 'run'), model=_model(kind), valid_split='train',
                    options=_options(epochs=40, learning_rate=0.02, configs_per_module=16))
  losses = [float(row['loss']) for row in _history(run)]
  assert np.isfinite(losses).all()
  assert losses[-1] < losses[0] - 0.3
  assert _judged(run, data, 'train')['opa'] > 0.9


def test_checkpoint_holds_the_best_epoch(kind, data, trained):
  metric = train.SELECTION_METRIC[kind]
  values = [float(row[f'valid_{metric}']) for row in _history(trained)]
  assert len(values) == 3
  (checkpoint,) = [name for name in os.listdir(os.path.join(trained.path, 'checkpoint')) if name.endswith('.index')]
  assert checkpoint == f'ckpt-{1 + int(np.argmax(values))}.index'
  assert _judged(trained, data, 'valid')[metric] == pytest.approx(max(values), abs=1e-5)


def test_run_tells_how_it_came_about(data, trained):
  assert trained.config['data']['path'] == data
  assert trained.config['training']['learning_rate'] == 0.05
  assert trained.config['valid_split'] == 'valid'
  assert trained.config['versions']['tensorflow'] == tf.__version__


def test_same_seed_gives_the_same_run(kind, data, trained, tmp_path):
  def without_time(run):
    return [{name: value for name, value in row.items() if name != 'steps_per_second'} for row in _history(run)]

  again = train.train(data=data, out=str(tmp_path / 'again'), model=_model(kind),
                      options=_options(learning_rate=0.05))
  assert without_time(again) == without_time(trained)
  for weight, expected in zip(again.model.weights, trained.model.weights, strict=True):
    np.testing.assert_array_equal(weight, expected)


def test_seed_changes_the_weights(kind, data):
  first, second = (train.Trainer(_model(kind), _options(seed=seed), _CPU, directory=datasets.open_directory(data))
                   for seed in (0, 1))
  assert not np.allclose(first.model.trainable_variables[0], second.model.trainable_variables[0])


def _steps(kind, data, count, **options):
  """Losses and weights after `count` steps."""
  trainer = train.Trainer(_model(kind), _options(**options), _CPU, directory=datasets.open_directory(data))
  batches = iter(trainer.batches)
  losses = [float(trainer.step(next(batches))) for _ in range(count)]
  return losses, [weight.numpy() for weight in trainer.model.weights], trainer


@pytest.mark.slow
def test_static_shapes_train_the_same(kind, data):
  losses, weights, _ = _steps(kind, data, 5, loss=_LOSS)
  static_losses, static_weights, trainer = _steps(kind, data, 5, loss=_LOSS, static_shapes=True)
  specs = tf.nest.flatten(trainer.batches.element_spec, expand_composites=True)
  assert all(spec.shape.is_fully_defined() and spec.dtype != tf.string for spec in specs)
  assert trainer._gradients.experimental_get_tracing_count() == 1
  np.testing.assert_allclose(static_losses, losses, rtol=1e-4)
  for weight, expected in zip(static_weights, weights, strict=True):
    np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-4)


_TWO_DEVICES = """
import sys
import numpy as np
import tensorflow as tf
cpu = tf.config.list_physical_devices('CPU')[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from baselines import models, strategies, train
from baselines.models import parts
from tpu_graphs import datasets
kind, data, static = sys.argv[1], datasets.open_directory(sys.argv[2]), sys.argv[3] == 'True'
options = train.TrainOptions(epochs=3, batch_size=4, configs_per_module=8, static_shapes=static, loss=sys.argv[4])
model = models.ModelOptions(models.DEFAULT_MODEL[kind], kind, parts.PartOptions(8, 1, 4))
results = []
for name, replicas in (('one_device', 1), ('mirrored', 2)):
  strategy = strategies.make(name, tpu=None, paths={})
  assert strategy.num_replicas_in_sync == replicas
  trainer = train.Trainer(model, options, strategy, directory=data)
  batches = iter(trainer.batches)
  before = [weight.numpy() for weight in trainer.model.trainable_variables]
  losses = [float(trainer.step(next(batches))) for _ in range(4)]
  weights = [weight.numpy() for weight in trainer.model.weights]
  assert any(np.abs(a - b.numpy()).max() > 1e-3 for a, b in zip(before, trainer.model.trainable_variables))
  results.append((trainer.steps_per_epoch, losses, weights))
(steps, losses, weights), (other_steps, other_losses, other_weights) = results
assert steps == other_steps
np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
for weight, other in zip(weights, other_weights):
  np.testing.assert_allclose(other, weight, atol=1e-5)
try:
  train.Trainer(model, train.TrainOptions(batch_size=3), strategy, directory=data)
except ValueError as error:
  print(error)
"""


@pytest.mark.slow
def test_two_devices_train_as_one(kind, data):
  # Logical devices cannot be set once TensorFlow has started, so this needs a process of its own; one for each kind,
  # of which the second also takes static shapes.
  static = str(kind == 'layout')
  process = subprocess.run([sys.executable, '-c', _TWO_DEVICES, kind, data, static, _LOSS], capture_output=True,
                           text=True, check=False)
  assert process.returncode == 0, process.stderr[-3000:]
  assert 'batch size does not fit the devices' in process.stdout
  assert 'found 3, expected a multiple of 2 replicas' in process.stdout


def test_split_smaller_than_a_batch_still_trains(tmp_path, kind):
  data = testing.convert_arrays(
      tmp_path, kind, {'train/a': _planted(kind, 3, 12, 0), 'train/b': _planted(kind, 2, 3, 1)})
  losses, _, trainer = _steps(kind, data, 2, batch_size=64)
  assert trainer.steps_per_epoch == 1
  assert min(losses) > 0


def test_modules_that_teach_nothing_do_not_count(tmp_path, kind):
  module = {'train/a': _planted(kind, 3, 8, 0)}
  rest = {'train/single': _planted(kind, 3, 1, 1), 'train/unmeasured': _unmeasured(kind, 3, 9, 2),
          'train/ties': {**_planted(kind, 3, 9, 3), 'config_runtime': np.full(9, 5000)}}
  total = []
  for name, sources in (('alone', module), ('together', {**module, **rest})):
    (tmp_path / name).mkdir()
    directory = datasets.open_directory(testing.convert_arrays(tmp_path / name, kind, sources))
    trainer = train.Trainer(_model(kind), _options(), _CPU, directory=directory)
    for weight in trainer.model.non_trainable_weights:  # The statistics of the two differ.
      weight.assign(tf.ones_like(weight))
    total.append(float(trainer.step(next(iter(trainer.batches)))))
  assert total[0] > 0
  assert total[1] == pytest.approx(total[0], rel=1e-5)


def _refusal(**arguments):
  with pytest.raises(errors.InputError) as info:
    train.train(**arguments)
  return info.value


def test_existing_run_is_refused(kind, data, trained):
  error = _refusal(data=data, out=trained.path, model=_model(kind), options=_options())
  assert (error.reason, error.path) == ('output exists', trained.path)
  assert len(_history(trained)) == 3


def test_run_that_died_before_its_first_epoch_can_be_repeated(kind, data, tmp_path):
  class Stopped(Exception):
    pass

  def stop(line):
    raise Stopped(line)

  arguments = {'data': data, 'out': str(tmp_path / 'run'), 'model': _model(kind), 'options': _options(epochs=1)}
  with pytest.raises(Stopped):
    train.train(**arguments, progress=stop)
  assert os.path.exists(tmp_path / 'run' / runs.CONFIG_NAME)
  assert len(_history(train.train(**arguments))) == 1


def test_nothing_measured_is_refused(tmp_path, kind):
  data = testing.convert_arrays(tmp_path, kind, {'train/a': _unmeasured(kind, 3, 5, 0)})
  error = _refusal(data=data, out=str(tmp_path / 'run'))
  assert error.reason == 'nothing to learn from'
  assert not (tmp_path / 'run').exists()


def test_missing_train_split_is_refused(tmp_path, kind):
  data = testing.convert_arrays(tmp_path, kind, {'valid/a': _planted(kind, 3, 5, 0)})
  assert _refusal(data=data, out=str(tmp_path / 'run')).reason == 'split missing'


def test_unmeasured_valid_split_is_refused_if_chosen(kind, data, tmp_path):
  error = _refusal(data=data, out=str(tmp_path / 'run'), model=_model(kind), valid_split='test')
  assert (error.reason, error.found) == ('nothing measured in the split', 'test')


def test_without_measured_valid_split_the_train_split_decides(tmp_path, kind):
  data = testing.convert_arrays(
      tmp_path, kind, {'train/a': _planted(kind, 3, 9, 0), 'valid/b': _unmeasured(kind, 3, 5, 1)})
  lines = []
  run = train.train(data=data, out=str(tmp_path / 'run'), model=_model(kind), options=_options(epochs=1),
                    progress=lines.append)
  assert run.config['valid_split'] == 'train'
  assert 'nothing in the valid split is measured' in lines[0]


def test_model_of_the_other_kind_is_refused(kind, data, tmp_path):
  other = 'layout' if kind == 'tile' else 'tile'
  assert _refusal(data=data, out=str(tmp_path / 'run'), model=_model(other)).reason == 'model of the other kind'


def test_damaged_shard_is_named(kind, tmp_path):
  data = testing.convert_arrays(tmp_path, kind, {'train/a': _planted(kind, 3, 9, 0)})
  (shard,) = (tmp_path / 'data' / 'train').iterdir()
  content = bytearray(shard.read_bytes())
  content[50] ^= 1
  shard.write_bytes(content)
  error = _refusal(data=data, out=str(tmp_path / 'run'), model=_model(kind), options=_options())
  assert (error.reason, error.path) == ('damaged shard', str(shard))


def test_loss_that_is_not_finite_is_an_error(kind, data, tmp_path):
  error = _refusal(data=data, out=str(tmp_path / 'run'), model=_model(kind),
                   options=_options(learning_rate=1e38))
  assert error.reason in ('loss not finite', 'score not finite')


@pytest.mark.parametrize(('flags', 'code', 'message'), [
    (['--loss=hinge'], 1, "unknown loss: found 'hinge'"), (['--model=GPT'], 2, 'model'),
    (['--batch_size=0'], 2, 'batch_size'), (['--configs_per_module=1'], 2, 'configs_per_module'),
    (['--tpu=my-tpu'], 1, 'local path given to a remote TPU'), (['--data=nowhere'], 1, 'no dataset')])
def test_wrong_flags_are_one_line(data, tmp_path, monkeypatch, capsys, flags, code, message):
  def connect(tpu):
    raise AssertionError(f'connected to {tpu}')

  monkeypatch.setattr(tf.distribute.cluster_resolver.TPUClusterResolver, 'connect', connect)
  out = tmp_path / 'run'
  assert cli.main(['tpu-graphs', 'train', f'--data={data}', f'--out={out}', *flags]) == code
  captured = capsys.readouterr()
  assert captured.err.count('\n') == 1
  assert message in captured.err
  assert not out.exists()


def test_command_trains(data, tmp_path, capsys):
  out = str(tmp_path / 'run')
  flags = ['--epochs=1', '--hidden=4', '--layers=0', '--opcode_embedding=2', '--model=MLP', '--loss=list_mle:1,mse:0.1']
  assert cli.main(['tpu-graphs', 'train', f'--data={data}', f'--out={out}', *flags]) == 0
  assert f'wrote {out}' in capsys.readouterr().out
  assert runs.load(out).options.parts == parts.PartOptions(hidden=4, layers=0, opcode_embedding=2)


@pytest.mark.parametrize('arrays', [{'c': 1}, {'c': 6, 'config_runtime': np.full(6, 5000)}])
def test_nothing_to_learn_is_an_error(kind, tmp_path, arrays):
  make = testing.tile_arrays if kind == 'tile' else testing.layout_arrays
  data = testing.convert_arrays(tmp_path, kind, {'train/a': make(**arrays), 'train/b': make(n=3, seed=1, **arrays)})
  error = _refusal(data=data, out=str(tmp_path / 'run'), options=_options(), progress=lambda line: None)
  assert (error.reason, error.path) == ('nothing to learn', data)


@pytest.mark.parametrize('option', ['learning_rate', 'clip_norm'])
@pytest.mark.parametrize('value', [0.0, -1.0, float('nan'), float('inf')])
def test_numbers_that_cannot_train_are_refused(option, value):
  with pytest.raises(errors.InputError, match='not a positive number') as info:
    train.TrainOptions(**{option: value})
  assert info.value.where == f'--{option}'
