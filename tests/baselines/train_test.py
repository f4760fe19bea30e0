"""Tests of baselines.train: it learns, resumes as if it had not been stopped, and refuses in one
line.
"""

import csv
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from baselines import models
from baselines import scoring
from baselines import train
from baselines.models import parts
from baselines.training import checkpoints
from baselines.training import interrupts
from baselines.training import loop
from baselines.training import runs
from baselines.training import trainer as trainer_lib
from tests import testing
from tpu_graphs import cli
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.metrics import metrics

pytestmark = pytest.mark.usefixtures('each_pipeline_made_once')
_PARTS = parts.PartOptions(hidden=8, layers=1, opcode_embedding=4)
_TIMES = ('steps_per_second', 'configs_per_second')
_planted = testing.planted_arrays


def _unmeasured(kind, n, c, seed):
  return {**_planted(kind, n, c, seed), 'config_runtime': np.zeros(c, np.int64)}


def _options(**over):
  return train.TrainOptions(**{'epochs': 3, 'batch_size': 4, 'configs_per_module': 8, **over})


def _model(kind, name=None):
  return models.ModelOptions(name or models.DEFAULT_MODEL[kind], kind, _PARTS)


@pytest.fixture(scope='session')
def data(kind, tmp_path_factory):
  """Converts eight modules to train on, one without runtimes and one with a single config."""
  return testing.convert_arrays(
    tmp_path_factory.mktemp(f'train_{kind}'),
    kind,
    {
      **{f'train/m{i}': _planted(kind, 3 + i % 3, 24, i) for i in range(6)},
      'train/single': _planted(kind, 3, 1, 10),
      'train/unmeasured': _unmeasured(kind, 3, 9, 11),
      'valid/v': _planted(kind, 4, 24, 12),
      'valid/single': _planted(kind, 2, 1, 13),
      'test/hidden': _unmeasured(kind, 2, 5, 14),
    },
  )


@pytest.fixture(scope='session')
def trained(kind, data, tmp_path_factory):
  """Trains a run of three epochs."""
  out = str(tmp_path_factory.mktemp(f'train_run_{kind}') / 'run')
  # At this learning rate, the last epoch need not be the best.
  return train.train(data=data, out=out, model=_model(kind), options=_options(learning_rate=0.05))


def _history(run):
  with open(os.path.join(run.path, runs.HISTORY_NAME), encoding='utf-8', newline='') as file:
    return list(csv.DictReader(file))


def _judged(run, data, split):
  """Returns `metrics.summarize` of a run on a split."""
  scorer = scoring.make_scorer(run.model, run.kind)
  return metrics.summarize(
    scoring.judge(module, metrics.TOP_KS[run.kind])
    for module in scoring.score_split(scorer, directory_lib.open_directory(data), split)
    if module.is_measured
  )


@pytest.mark.slow
def test_planted_order_is_learned(kind, data, tmp_path):
  run = train.train(
    data=data,
    out=str(tmp_path / 'run'),
    model=_model(kind),
    valid_split='train',
    options=_options(epochs=20, batch_size=2, learning_rate=0.02, configs_per_module=16),
  )
  losses = [float(row['loss']) for row in _history(run)]
  assert np.isfinite(losses).all()
  assert losses[-1] < losses[0] - 0.3
  assert _judged(run, data, 'train')['opa'] > 0.9


def test_checkpoint_holds_the_best_epoch(kind, data, trained):
  metric = trainer_lib.SELECTION_METRIC[kind]
  values = [float(row[f'valid_{metric}']) for row in _history(trained)]
  assert len(values) == 3
  (checkpoint,) = [
    name for name in os.listdir(os.path.join(trained.path, 'checkpoint')) if name.endswith('.index')
  ]
  assert checkpoint == f'ckpt-{1 + int(np.argmax(values))}.index'
  assert _judged(trained, data, 'valid')[metric] == pytest.approx(max(values), abs=1e-5)


def test_run_records_its_data_and_options(data, trained):
  assert trained.config['data']['path'] == data
  assert trained.config['training']['learning_rate'] == 0.05
  assert trained.config['valid_split'] == 'valid'
  assert trained.config['versions']['tensorflow'] == tf.__version__


def _without_times(run):
  return [
    {name: value for name, value in row.items() if name not in _TIMES} for row in _history(run)
  ]


def _assert_same(run, expected):
  """Checks that two runs learned the same, bit by bit."""
  assert _without_times(run) == _without_times(expected)
  for weight, other in zip(run.model.weights, expected.model.weights, strict=True):
    np.testing.assert_array_equal(weight, other)


def test_same_seed_gives_the_same_run(kind, data, trained, tmp_path):
  again = train.train(
    data=data, out=str(tmp_path / 'again'), model=_model(kind), options=_options(learning_rate=0.05)
  )
  _assert_same(again, trained)


def test_lines_show_the_speed(arguments, tmp_path, monkeypatch):
  monkeypatch.setattr(loop, '_PROGRESS_SECONDS', -1.0)
  lines = []
  train.train(**arguments, out=str(tmp_path / 'run'), progress=lines.append)
  number = r'[\d,]+'
  speed = rf'{number}\.\d steps/s  {number} configs/s'
  steps = [line for line in lines if '  step ' in line]
  assert len(steps) == 9
  assert re.fullmatch(rf'epoch 1/3  step 1/3  loss \d+\.\d{{4}}  {speed}', steps[0])
  for line in steps[1:]:
    assert re.fullmatch(
      rf'epoch \d/3  step \d/3  loss \d+\.\d{{4}}  {speed}  (\d+ min )?\d+ s left', line
    )


def test_history_has_a_row_for_each_epoch(kind, trained):
  rows = _history(trained)
  k = metrics.TOP_KS[kind][1]
  assert list(rows[0]) == [
    'epoch',
    'loss',
    f'valid_{trainer_lib.SELECTION_METRIC[kind]}',
    f'valid_top_{k}_error',
    'learning_rate',
    *_TIMES,
  ]
  assert [row['epoch'] for row in rows] == ['1', '2', '3']
  rates = [float(row['learning_rate']) for row in rows]
  assert 0.05 > rates[0] > rates[1] > rates[2]
  assert all(float(row[name]) > 0 for row in rows for name in _TIMES)


def test_curves_for_tensorboard(kind, trained):
  (path,) = tf.io.gfile.glob(os.path.join(trained.path, runs.TENSORBOARD_NAME, 'events.*'))
  curves = {}
  for event in tf.compat.v1.train.summary_iterator(path):
    for value in event.summary.value:
      curves.setdefault(value.tag, []).append((event.step, float(tf.make_ndarray(value.tensor))))
  assert {
    'loss',
    'learning_rate',
    'gradient_norm',
    f'valid/{trainer_lib.SELECTION_METRIC[kind]}',
  } <= curves.keys()
  losses = [float(row['loss']) for row in _history(trained)]
  assert [value for _, value in curves['loss']] == pytest.approx(losses, rel=1e-5)
  steps = [step for step, _ in curves['loss']]
  assert len(set(steps)) == 3
  assert steps == sorted(steps)


def test_finished_run_leaves_no_state(trained):
  assert sorted(os.listdir(trained.path)) == sorted(
    [runs.CONFIG_NAME, runs.STATISTICS_NAME, runs.HISTORY_NAME, 'checkpoint', runs.TENSORBOARD_NAME]
  )


class _Killed(BaseException):
  """Exception that ends a training as if its process had been killed."""


@pytest.fixture
def at_call(monkeypatch):
  """Returns a function that sets an action before a call for steps, by the number of the call."""

  def happen(number, action):
    calls = []

    def counted(self, batches, count):
      calls.append(count)
      if len(calls) == number:
        action()
      return take(self, batches, count)

    monkeypatch.setattr(trainer_lib.Trainer, 'take', counted)

  take = trainer_lib.Trainer.take
  return happen


@pytest.fixture(scope='session')
def tile_data(tmp_path_factory):
  """Converts data for tests that do not depend on the kind: three steps of two modules an epoch."""
  return testing.convert_arrays(
    tmp_path_factory.mktemp('train'),
    'tile',
    {
      **{f'train/m{i}': _planted('tile', 3, 12, i) for i in range(6)},
      'valid/v': _planted('tile', 4, 12, 12),
      'valid/w': _planted('tile', 3, 12, 13),
    },
  )


@pytest.fixture(scope='session')
def arguments(tile_data):
  """Returns arguments of a small training that uses everything that has a state."""
  return {
    'data': tile_data,
    'model': _model('tile', 'MLP'),
    'steps_per_call': 1,
    'checkpoint_minutes': 0,
    'options': _options(batch_size=2, ema=0.5, weight_decay=0.01, warmup=0.2, learning_rate=0.05),
  }


@pytest.fixture(scope='session')
def unbroken(arguments, tmp_path_factory):
  return train.train(**arguments, out=str(tmp_path_factory.mktemp('unbroken') / 'run'))


@pytest.fixture(scope='session')
def killed(arguments, tmp_path_factory):
  """Starts a training and kills it after the first step of its second epoch."""

  def take(self, batches, count):
    calls.append(count)
    if len(calls) == 5:
      raise _Killed
    return original(self, batches, count)

  calls, original = [], trainer_lib.Trainer.take
  out = tmp_path_factory.mktemp('killed') / 'run'
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(trainer_lib.Trainer, 'take', take)
    with pytest.raises(_Killed):
      train.train(**arguments, out=str(out))
  assert _states(out) == ['000002-00000000', '000002-00000001']
  return out


@pytest.fixture
def stopped(killed, tmp_path):
  """Copies the killed training."""
  return shutil.copytree(killed, tmp_path / 'run')


def _states(out):
  return checkpoints.stored(str(out / runs.STATE_NAME))


def test_killed_training_is_resumed_as_if_it_had_not_been_killed(arguments, unbroken, stopped):
  lines = []
  run = train.train(**arguments, out=str(stopped), progress=lines.append)
  assert 'resuming at epoch 2, after step 1' in lines
  _assert_same(run, unbroken)
  assert not (stopped / runs.STATE_NAME).exists()


@pytest.fixture
def terminate():
  """Returns a function that sends SIGTERM twice, as some schedulers do.

  SIGTERM is ignored from then on, so its handler is restored after the test.
  """

  def kill():
    for _ in range(2):
      os.kill(os.getpid(), signal.SIGTERM)

  before = signal.getsignal(signal.SIGTERM)
  yield kill
  signal.signal(signal.SIGTERM, before)


def _interrupted(**arguments):
  with pytest.raises(interrupts.Interrupted) as info, interrupts.Interrupts() as entered:
    train.train(**arguments, interrupts=entered)
  assert info.value.signal == signal.SIGTERM
  assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_signal_saves_the_state(arguments, unbroken, tmp_path, at_call, terminate):
  out = tmp_path / 'run'
  rarely = {**arguments, 'checkpoint_minutes': 1000}
  at_call(5, terminate)
  _interrupted(**rarely, out=str(out))
  assert _states(out) == ['000002-00000000', '000002-00000002']
  _assert_same(train.train(**rarely, out=str(out)), unbroken)


def test_signal_while_the_model_is_made(arguments, unbroken, tmp_path, terminate):
  out, lines = tmp_path / 'run', []
  _interrupted(**arguments, out=str(out), progress=lambda _: terminate())
  assert _states(out) == ['000001-00000000']
  _assert_same(train.train(**arguments, out=str(out), progress=lines.append), unbroken)
  assert 'resuming at epoch 1, after step 0' in lines


def test_signal_while_an_epoch_is_judged(arguments, unbroken, tmp_path, monkeypatch, terminate):
  def scorer(*args, **options):
    def traced(*graphs):
      calls.append(graphs)
      # The signal arrives while AutoGraph works, which treats any exception as an error of its own.
      terminate()
      return made.function(*graphs)

    made = make_scorer(*args, **options)
    return dataclasses.replace(made, function=tf.function(traced))

  out, calls, make_scorer = tmp_path / 'run', [], scoring.make_scorer
  with monkeypatch.context() as patch:
    patch.setattr(scoring, 'make_scorer', scorer)
    patch.setattr(scoring, '_OPS_PER_BATCH', 1)
    patch.setattr(scoring, '_split_batches', scoring._split_batches.__wrapped__)
    _interrupted(**arguments, out=str(out))
  assert _states(out)[-1] == '000001-00000003'
  assert len(calls) == 1
  assert not (out / runs.HISTORY_NAME).exists()
  _assert_same(train.train(**arguments, out=str(out)), unbroken)


@pytest.mark.parametrize(
  ('number', 'code', 'reason'),
  [
    (signal.SIGTERM, train.PREEMPTED, 'by SIGTERM'),
    (signal.SIGINT, cli.INTERRUPTED, 'by SIGINT'),
    (None, train.PREEMPTED, 'because another worker was stopped'),
  ],
)
@pytest.mark.usefixtures('terminate')
def test_exit_code_shows_the_signal(tile_data, tmp_path, monkeypatch, capsys, number, code, reason):
  def interrupted(**_):
    raise interrupts.Interrupted(number)

  monkeypatch.setattr(train, 'train', interrupted)
  for flags, same in (
    ([], 'the same command'),
    (['--overwrite'], 'the same command without --overwrite'),
  ):
    assert (
      cli.main(['tpu-graphs', 'train', f'--data={tile_data}', f'--out={tmp_path}', *flags]) == code
    )
    assert (
      capsys.readouterr().err
      == f'error: stopped {reason}, the state is saved; {same} resumes from it\n'
    )


def test_damaged_newest_state_is_skipped(arguments, unbroken, stopped):
  lines = []
  newest = max((stopped / runs.STATE_NAME).glob('*.data-*'))
  newest.write_bytes(newest.read_bytes()[:100])
  run = train.train(**arguments, out=str(stopped), progress=lines.append)
  assert any(line.startswith('warning: ') and 'damaged state' in line for line in lines)
  assert 'resuming at epoch 2, after step 0' in lines
  _assert_same(run, unbroken)


def test_only_damaged_states_are_an_error(arguments, stopped):
  for path in (stopped / runs.STATE_NAME).glob('*.data-*'):
    path.unlink()
  error = _refusal(**arguments, out=str(stopped))
  assert (error.reason, error.path) == (
    'no state of the interrupted run can be read',
    f'{stopped}/{runs.STATE_NAME}',
  )
  assert '--overwrite' in error.fix


def test_options_that_differ_from_the_interrupted_run(arguments, stopped):
  before = _states(stopped)
  other = {
    'options': dataclasses.replace(arguments['options'], learning_rate=0.5, seed=3),
    'model': models.ModelOptions('MLP', 'tile', dataclasses.replace(_PARTS, hidden=9)),
  }
  error = _refusal(**{**arguments, **other}, out=str(stopped))
  assert error.reason == 'interrupted run had other options'
  assert error.found == 'model.parts.hidden=9, training.learning_rate=0.5, training.seed=3'
  assert error.expected == 'model.parts.hidden=8, training.learning_rate=0.05, training.seed=0'
  assert '--overwrite' in error.fix
  assert _states(stopped) == before


def test_full_disk_is_one_line(arguments, unbroken, tmp_path, monkeypatch):
  def write(*_):
    raise tf.errors.ResourceExhaustedError(None, None, 'No space left on device')

  out = tmp_path / 'run'
  with monkeypatch.context() as patch:
    patch.setattr(tf.train.Checkpoint, 'write', write)
    error = _refusal(**arguments, out=str(out))
  assert (error.reason, error.path) == ('cannot write', str(out / runs.STATE_NAME))
  assert 'No space left on device' in error.found
  _assert_same(train.train(**arguments, out=str(out)), unbroken)


def test_missing_weights_of_the_best_epoch(arguments, stopped):
  shutil.rmtree(stopped / 'checkpoint')
  error = _refusal(**arguments, out=str(stopped))
  assert (error.reason, error.path) == ('run without a checkpoint', str(stopped))
  assert '--overwrite' in error.fix


def test_second_training_of_a_run_is_refused(arguments, unbroken, stopped):
  def try_again(line):
    if line.startswith('resuming'):
      for over in ({}, {'overwrite': True}):
        found.append(_refusal(**arguments, **over, out=str(stopped)))

  found = []
  _assert_same(train.train(**arguments, out=str(stopped), progress=try_again), unbroken)
  assert [(error.reason, error.path) for error in found] == [('run in use', str(stopped))] * 2


def test_training_stops_early(arguments, tmp_path):
  out, lines = tmp_path / 'run', []
  # With a learning rate of almost 0, the first epoch stays the best.
  options = _options(epochs=9, patience=2, metric='top_1_error', learning_rate=1e-12)
  run = train.train(**{**arguments, 'options': options}, out=str(out), progress=lines.append)
  assert len(_history(run)) == 3
  assert list(_history(run)[0])[2:4] == ['valid_top_1_error', 'valid_opa']
  assert lines[-1] == 'no better epoch than 1 in 2: stopped early'
  assert not (out / runs.STATE_NAME).exists()
  (checkpoint,) = (out / 'checkpoint').glob('*.index')
  assert checkpoint.name == 'ckpt-1.index'


def test_loss_that_is_not_finite_names_its_modules(arguments, tmp_path, monkeypatch):
  def spoiled(self, epoch, step):
    ids = module_ids(self, epoch, step)
    asked.append((epoch, step, ids))
    return ids

  asked, module_ids = [], trainer_lib.Trainer.module_ids
  monkeypatch.setattr(trainer_lib.Trainer, 'module_ids', spoiled)
  options = _options(batch_size=2, learning_rate=1e30)
  error = _refusal(**{**arguments, 'options': options}, out=str(tmp_path / 'run'))
  ((epoch, step, ((*names,),)),) = asked
  assert (epoch, step) == (1, 1)
  assert error.reason == 'loss not finite'
  assert error.where.startswith('epoch 1, step 2, modules ')
  assert error.where.endswith(', '.join(sorted(filter(None, names))))
  assert '--learning_rate' in error.fix


def test_gradient_that_is_not_finite_names_all_modules(arguments, tmp_path, monkeypatch):
  monkeypatch.setattr(
    trainer_lib.Trainer,
    'take',
    lambda self, batches, count: trainer_lib.Steps(
      1, 0.5, 16, 2, float('inf'), np.zeros(np.array(self.module_ids(1, 0)).shape)
    ),
  )
  error = _refusal(**arguments, out=str(tmp_path / 'run'))
  assert (error.reason, error.found) == ('gradient not finite', 'inf')
  assert re.fullmatch(r'epoch 1, step 1, modules m\d, m\d', error.where)


def test_best_epoch_outlives_a_loss_that_is_not_finite(arguments, tmp_path, at_call, monkeypatch):
  def spoil():
    for weight in built[0].trainable_variables:
      weight.assign(tf.fill(weight.shape, np.nan))

  built, build = [], models.build
  monkeypatch.setattr(models, 'build', lambda *args: built.append(build(*args)) or built[-1])
  at_call(5, spoil)
  out = str(tmp_path / 'run')
  error = _refusal(**arguments, out=out)
  assert error.reason == 'loss not finite'
  assert error.where.startswith('epoch 2, step 2, modules m')
  assert 'this run keeps epoch 1, its best' in error.fix
  monkeypatch.undo()
  assert np.isfinite(_judged(runs.load(out), arguments['data'], 'valid')['opa'])


@pytest.mark.slow
def test_process_that_is_killed_and_then_preempted_is_resumed(arguments, unbroken, tmp_path):
  out, options = tmp_path / 'run', arguments['options']
  changed = {
    field.name: getattr(options, field.name)
    for field in dataclasses.fields(options)
    if getattr(options, field.name) != field.default
  }
  command = [
    sys.executable,
    '-m',
    'baselines.train',
    f'--data={arguments["data"]}',
    f'--out={out}',
    '--model=MLP',
    f'--hidden={_PARTS.hidden}',
    f'--layers={_PARTS.layers}',
    f'--opcode_embedding={_PARTS.opcode_embedding}',
    '--steps_per_call=1',
    '--checkpoint_minutes=0',
    *(f'--{name}={value}' for name, value in changed.items()),
  ]
  for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, train.PREEMPTED)):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    before = _states(out)
    while process.poll() is None and _states(out) == before:
      time.sleep(0.02)
    process.send_signal(number)
    printed, error = process.communicate()
    assert process.returncode == code, error
    assert _states(out)
  assert 'resuming at epoch' in printed
  assert error.count('\n') == 1
  assert 'stopped by SIGTERM, the state is saved' in error
  _assert_same(train.train(**arguments, out=str(out)), unbroken)


def _refusal(**arguments):
  with pytest.raises(errors.InputError) as info:
    train.train(**arguments)
  return info.value


def test_existing_run_is_refused(kind, data, trained):
  error = _refusal(data=data, out=trained.path, model=_model(kind), options=_options())
  assert (error.reason, error.path) == ('output exists', trained.path)
  assert len(_history(trained)) == 3


def test_run_that_died_before_its_first_epoch_can_be_repeated(tile_data, tmp_path):
  def stop(line):
    raise _Killed(line)

  arguments = {
    'data': tile_data,
    'out': str(tmp_path / 'run'),
    'model': _model('tile', 'MLP'),
    'options': _options(epochs=1),
  }
  with pytest.raises(_Killed):
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
    tmp_path, kind, {'train/a': _planted(kind, 3, 9, 0), 'valid/b': _unmeasured(kind, 3, 5, 1)}
  )
  lines = []
  run = train.train(
    data=data,
    out=str(tmp_path / 'run'),
    model=_model(kind, 'MLP'),
    options=_options(epochs=1),
    progress=lines.append,
  )
  assert run.config['valid_split'] == 'train'
  assert 'nothing in the valid split is measured' in lines[0]


def test_model_of_the_other_kind_is_refused(kind, data, tmp_path):
  other = 'layout' if kind == 'tile' else 'tile'
  assert (
    _refusal(data=data, out=str(tmp_path / 'run'), model=_model(other)).reason
    == 'model of the other kind'
  )


def test_damaged_shard_is_named(kind, tmp_path):
  data = testing.convert_arrays(tmp_path, kind, {'train/a': _planted(kind, 3, 9, 0)})
  (shard,) = (tmp_path / 'data' / 'train').iterdir()
  content = bytearray(shard.read_bytes())
  content[50] ^= 1
  shard.write_bytes(content)
  error = _refusal(
    data=data, out=str(tmp_path / 'run'), model=_model(kind, 'MLP'), options=_options()
  )
  assert (error.reason, error.path) == ('damaged shard', str(shard))


@pytest.mark.parametrize(
  ('flags', 'code', 'message'),
  [
    (['--loss=hinge'], 1, "unknown loss: found 'hinge'"),
    (['--model=GPT'], 2, 'model'),
    (['--ema=1.5'], 2, 'ema'),
    (['--ema=1'], 1, '--ema: not a share'),
    (['--metric=loss'], 1, 'unknown metric'),
    (['--packs=3'], 1, '--batch_size'),
    (['--oversize=drop'], 2, 'oversize'),
    (['--precision=float16'], 2, 'precision'),
    (['--strategy=multi_worker'], 1, 'no cluster to train on'),
    (['--max_ops=1'], 1, 'modules too large'),
    (['--batch_size=0'], 2, 'batch_size'),
    (['--configs_per_module=1'], 2, 'configs_per_module'),
    (['--tpu=my-tpu'], 1, 'local path given to a remote TPU'),
    (['--data=nowhere'], 1, 'no dataset'),
  ],
)
def test_wrong_flags_are_one_line(tile_data, tmp_path, monkeypatch, capsys, flags, code, message):
  def connect(tpu):
    raise AssertionError(f'connected to {tpu}')

  monkeypatch.setattr(tf.distribute.cluster_resolver, 'TPUClusterResolver', connect)
  out = tmp_path / 'run'
  assert cli.main(['tpu-graphs', 'train', f'--data={tile_data}', f'--out={out}', *flags]) == code
  captured = capsys.readouterr()
  assert captured.err.count('\n') == 1
  assert message in captured.err
  assert not out.exists()


def test_command_trains(tile_data, tmp_path, capsys):
  out = str(tmp_path / 'run')
  flags = [
    '--epochs=1',
    '--hidden=4',
    '--layers=0',
    '--opcode_embedding=2',
    '--model=MLP',
    '--loss=list_mle:1,mse:0.1',
  ]
  assert cli.main(['tpu-graphs', 'train', f'--data={tile_data}', f'--out={out}', *flags]) == 0
  assert f'wrote {out}' in capsys.readouterr().out
  assert runs.load(out).options.parts == parts.PartOptions(hidden=4, layers=0, opcode_embedding=2)


@pytest.mark.parametrize('arrays', [{'c': 1}, {'c': 6, 'config_runtime': np.full(6, 5000)}])
def test_nothing_to_learn_is_an_error(tmp_path, arrays):
  data = testing.convert_arrays(
    tmp_path,
    'tile',
    {
      'train/a': testing.tile_arrays(**arrays),
      'train/b': testing.tile_arrays(n=3, seed=1, **arrays),
    },
  )
  error = _refusal(
    data=data, out=str(tmp_path / 'run'), model=_model('tile', 'MLP'), options=_options(epochs=1)
  )
  assert (error.reason, error.path) == ('nothing to learn', data)


def test_nothing_to_learn_though_the_valid_split_can_judge(tmp_path):
  data = testing.convert_arrays(
    tmp_path,
    'tile',
    {
      'train/a': testing.tile_arrays(c=6, config_runtime=np.full(6, 5000)),
      'valid/b': _planted('tile', 3, 9, 1),
    },
  )
  error = _refusal(
    data=data, out=str(tmp_path / 'run'), model=_model('tile', 'MLP'), options=_options(epochs=1)
  )
  assert (error.reason, error.path, error.where) == ('nothing to learn', data, 'train')


def test_valid_split_that_cannot_judge_is_reported_once(tmp_path):
  data = testing.convert_arrays(
    tmp_path,
    'tile',
    {
      'train/a': _planted('tile', 3, 9, 1),
      'valid/b': testing.tile_arrays(c=6, config_runtime=np.full(6, 5000)),
    },
  )
  lines = []
  run = train.train(
    data=data,
    out=str(tmp_path / 'run'),
    model=_model('tile', 'MLP'),
    options=_options(epochs=3),
    progress=lines.append,
  )
  (warning,) = [line for line in lines if line.startswith('warning: ')]
  assert 'opa of valid is undefined' in warning
  assert len(_history(run)) == 3
  assert (tmp_path / 'run/checkpoint/ckpt-3.index').exists()
