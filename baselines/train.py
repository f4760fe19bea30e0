"""Trains a model that ranks the configs of a module, on a dataset directory made by convert.

  python baselines/train.py --data=data/tile --out=runs/tile

The run directory holds what evaluate.py and rank.py need: options, feature statistics and the
weights of the epoch that was best on the validation split. The same command resumes a training that
was stopped. SIGTERM saves its state first and exits with 75, SIGINT (Ctrl-C) with 130.
See docs/training.md for details.
"""

from __future__ import annotations

# This import comes before TensorFlow, to silence the log of TensorFlow.
import baselines  # noqa: F401

# isort: split

from collections.abc import Callable, Sequence
import dataclasses
import os
import platform
import signal
import sys
from typing import TypeVar

import tensorflow as tf

from baselines import losses
from baselines import models
from baselines.models import parts
from baselines.training import checkpoints
from baselines.training import host
from baselines.training import interrupts as interrupts_lib
from baselines.training import loop
from baselines.training import runs
from baselines.training import strategies
from baselines.training import trainer as trainer_lib
import tpu_graphs
from tpu_graphs import cli
from tpu_graphs import errors
from tpu_graphs.compat import tfgnn
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.input import decoding
from tpu_graphs.input import packing
from tpu_graphs.modules import module as module_lib

TrainOptions = trainer_lib.TrainOptions
# EX_TEMPFAIL of sysexits.h: a temporary failure; the user is invited to retry.
PREEMPTED = 75
STEPS_PER_CALL = 10
CHECKPOINT_MINUTES = 10.0
_Options = TypeVar('_Options')


def train(
  *,
  data: str,
  out: str,
  model: models.ModelOptions | None = None,
  options: TrainOptions | None = None,
  strategy: tf.distribute.Strategy | None = None,
  valid_split: str | None = None,
  overwrite: bool = False,
  steps_per_call: int = STEPS_PER_CALL,
  checkpoint_minutes: float = CHECKPOINT_MINUTES,
  interrupts: interrupts_lib.Interrupts | None = None,
  progress: Callable[[str], None] = print,
) -> runs.Run:
  """Trains a model and writes its run directory, or resumes a training that was stopped.

  Args:
    data: path of the dataset directory.
    out: path of the run directory to write.
    model: the model to train; by default the best baseline for the kind of the data.
    options: options of the training.
    strategy: the distribution strategy, which names the devices; by default one device.
    valid_split: the split that chooses the best epoch; by default 'valid', or 'train' where nothing
      in 'valid' is measured.
    overwrite: whether to replace an existing run, finished or not.
    steps_per_call: number of steps that are taken without returning to Python.
    checkpoint_minutes: maximum age of the last state. A state is saved at the end of each epoch,
      and during an epoch when the last state is older than this.
    interrupts: the signals received. If it has been entered, in the main thread, SIGTERM and SIGINT
      stop the training once its state is saved.
    progress: called with lines to show.

  Returns:
    The run as it was written, with the best weights.

  Raises:
    InputError: data, options or output cannot be used, or a loss or gradient is not finite.
    Interrupted: a signal stopped the training; the same call resumes it.
  """
  directory = directory_lib.open_directory(data)
  model = model or models.ModelOptions(models.DEFAULT_MODEL[directory.kind], directory.kind)
  if model.kind != directory.kind:
    raise errors.InputError(
      'model of the other kind', path=data, found=directory.kind, expected=model.kind
    )
  options = options or TrainOptions()
  strategy = strategy or tf.distribute.OneDeviceStrategy('/cpu:0')
  is_chief = strategies.is_chief(strategy)
  with directory_lib.damage_explained(directory):
    trainer = trainer_lib.Trainer(model, options, strategy, directory=directory)
    valid_split = _valid_split(directory, valid_split, progress)
    position = checkpoints.Progress()
    states = checkpoints.States(
      os.path.join(out, runs.STATE_NAME),
      position,
      is_chief=is_chief,
      model=trainer.model,
      judged=trainer.judged,
      optimizer=trainer.optimizer,
    )
    resumes = not overwrite and runs.is_interrupted(out)
    config = {
      'training': dataclasses.asdict(trainer.options),
      'valid_split': valid_split,
      'data': {
        'path': data,
        'collection': directory.manifest.collection,
        'source': dict(directory.manifest.source),
        'options': dict(directory.manifest.options),
      },
      'versions': {
        'tpu_graphs': tpu_graphs.__version__,
        'tensorflow': tf.__version__,
        'tensorflow_gnn': tfgnn.__version__,
        'python': platform.python_version(),
      },
    }
    writer = runs.Writer(
      out,
      options=model,
      model=trainer.judged,
      statistics=directory.statistics,
      choices=directory.manifest.choices,
      overwrite=overwrite,
      resumes=resumes,
      is_chief=is_chief,
      config=config,
    )
    with writer:
      shards = directory.split('train')
      num_weights = sum(int(tf.size(weight)) for weight in trainer.model.trainable_variables)
      progress(
        f'{model.name}, {num_weights:,} weights; '
        f'{directory.manifest.collection}: {shards.modules:,} modules, {shards.configs:,} configs; '
        f'{trainer.steps_in_epoch(1):,} steps per epoch'
      )
      progress(f'train: {trainer.plan.describe()}')
      if resumes:
        states.restore(progress)
        if position.best_epoch:
          writer.check_best()
        progress(f'resuming at epoch {position.epoch}, after step {position.step}')
      loop.Loop(
        trainer,
        writer=writer,
        states=states,
        progress=position,
        interrupts=interrupts or interrupts_lib.Interrupts(),
        valid_split=valid_split,
        steps_per_call=steps_per_call,
        checkpoint_minutes=checkpoint_minutes,
        show=progress,
      ).run()
  # This call returns once all workers have made it, so the run is written by then.
  strategies.any_worker(strategy, False)
  return runs.load(out)


def _valid_split(
  directory: directory_lib.DatasetDirectory, chosen: str | None, progress: Callable[[str], None]
) -> str:
  """Returns the split that chooses the best epoch: the chosen one, 'valid' or 'train'."""
  measured = [name for name, split in directory.manifest.splits.items() if split.measured]
  if chosen is None and 'valid' not in measured:
    progress('nothing in the valid split is measured: the train split chooses the best epoch')
    return 'train'
  chosen = chosen or 'valid'
  if chosen not in measured:
    raise errors.InputError(
      'nothing measured in the split',
      where='--valid_split',
      found=chosen,
      expected=' or '.join(measured),
    )
  return chosen


def _define_flags(flag_values) -> None:
  from absl import flags

  options, sizes = TrainOptions(), parts.PartOptions()

  def integer(name, default, text, lower=None, upper=None):
    flags.DEFINE_integer(
      name, default, text, lower_bound=lower, upper_bound=upper, flag_values=flag_values
    )

  def number(name, default, text, upper=None):
    flags.DEFINE_float(
      name, default, text, lower_bound=0.0, upper_bound=upper, flag_values=flag_values
    )

  def string(name, default, text):
    flags.DEFINE_string(name, default, text, flag_values=flag_values)

  def boolean(name, default, text):
    flags.DEFINE_bool(name, default, text, flag_values=flag_values)

  def enum(name, default, values, text):
    flags.DEFINE_enum(name, default, list(values), text, flag_values=flag_values)

  string('data', None, 'Dataset directory that convert has written.')
  string('out', None, 'Run directory to write.')
  default_models = ', '.join(f'{model} for {kind}' for kind, model in models.DEFAULT_MODEL.items())
  enum('model', None, models.MODELS, f'Model to train. Default: {default_models}.')
  integer('hidden', sizes.hidden, 'Hidden units of each layer.', 1)
  integer('layers', sizes.layers, 'Message passing layers.', 0)
  integer('opcode_embedding', sizes.opcode_embedding, 'Size of the embedding of an opcode.', 1)
  boolean(
    'directed',
    sizes.directed,
    'Whether messages from operands and messages from consumers have separate weights.',
  )
  integer(
    'attention_heads',
    sizes.attention_heads,
    'Attention heads of GATv2, among which the hidden units are divided evenly.',
    1,
  )
  integer('epochs', options.epochs, 'Passes over the train split.', 1)
  integer('batch_size', options.batch_size, 'Modules per step on average, over all devices.', 1)
  integer('configs_per_module', options.configs_per_module, 'Configs sampled of each module.', 2)
  enum(
    'config_sampling',
    options.config_sampling,
    decoding.CONFIG_SAMPLINGS,
    'How configs are sampled.',
  )
  string(
    'loss',
    options.loss,
    f'One of {", ".join(losses.LOSSES)}, or a weighted sum such as list_mle:1,mse:0.1.',
  )
  number(
    'learning_rate',
    options.learning_rate,
    'Highest learning rate of AdamW; the rate falls to 0 along a half cosine.',
  )
  number(
    'warmup',
    options.warmup,
    'Share of the steps over which the learning rate first rises from 0.',
    1.0,
  )
  number(
    'weight_decay',
    options.weight_decay,
    'Weight decay of AdamW; not for biases, normalisation and embeddings.',
  )
  number('clip_norm', options.clip_norm, 'Maximum global norm of the gradients.')
  number(
    'ema',
    options.ema,
    'Judge and save an average of the weights with this decay per step, such as 0.99; 0: the '
    'weights themselves.',
    1.0,
  )
  enum(
    'precision',
    options.precision,
    trainer_lib.PRECISIONS,
    'Precision of the layers; weights and losses are always float32.',
  )
  enum(
    'valid_split',
    None,
    module_lib.SPLITS,
    'Split that chooses the best epoch. Default: valid, or train where nothing in valid is '
    'measured.',
  )
  default_metrics = ', '.join(
    f'{metric} for {kind}' for kind, metric in trainer_lib.SELECTION_METRIC.items()
  )
  string(
    'metric',
    None,
    'Metric that chooses the best epoch: opa, kendall_tau or top_K_error. '
    f'Default: {default_metrics}.',
  )
  integer(
    'patience',
    options.patience,
    'Stop after this number of epochs without a better one; 0: never.',
    0,
  )
  integer('seed', options.seed, 'Seed of weights, order and samples.', 0, 2**32 - 1)
  enum(
    'strategy',
    'auto',
    strategies.STRATEGIES,
    'Where to train. auto: TPU if --tpu is given, else all GPUs, else the CPU. multi_worker: on '
    'the machines that TF_CONFIG names, with the same command on each.',
  )
  string('tpu', None, "Name or address of a TPU; 'local' on a TPU VM.")
  integer(
    'packs',
    options.packs,
    'Parts that the modules of a step are packed into, divided evenly among the devices. With the '
    'same number, runs on one device and on several devices learn the same. 0: one per device.',
    0,
  )
  integer(
    'shapes',
    None,
    'Number of static shapes that packs are padded to, for which XLA compiles the step; 0: packs '
    'are not padded. Default: 1 on TPU, else 0.',
    0,
  )
  integer(
    'max_ops',
    None,
    'Maximum number of ops per pack. Default: chosen from --batch_size, and at least the number of '
    'ops of the largest module.',
    1,
  )
  enum(
    'oversize',
    options.oversize,
    packing.OVERSIZE,
    'What to do with a module that has more than --max_ops ops.',
  )
  integer('steps_per_call', STEPS_PER_CALL, 'Steps that are taken without returning to Python.', 1)
  number(
    'checkpoint_minutes',
    CHECKPOINT_MINUTES,
    'The state of training is saved after each epoch, and during an epoch when the last state is '
    'older than this.',
  )
  boolean('overwrite', False, 'Replace an existing run, finished or not.')
  for name in ('data', 'out'):
    flags.mark_flag_as_required(name, flag_values=flag_values)


def _from_flags(options: type[_Options], flag_values) -> _Options:
  """Makes options of a dataclass whose fields have flags of the same names."""
  names = [field.name for field in dataclasses.fields(options)]
  return options(**{name: flag_values[name].value for name in names})


def _job(flag_values, _) -> int:
  kind = directory_lib.open_directory(flag_values.data).kind
  host.tune(kind)
  strategy = strategies.make(
    flag_values.strategy,
    tpu=flag_values.tpu,
    paths={'--data': flag_values.data, '--out': flag_values.out},
  )
  try:
    # The context begins after the strategy is made, because the strategy of a cluster handles
    # SIGTERM too.
    with interrupts_lib.Interrupts() as interrupts:
      model_name = flag_values.model or models.DEFAULT_MODEL[kind]
      sizes = _from_flags(parts.PartOptions, flag_values)
      run = train(
        data=flag_values.data,
        out=flag_values.out,
        strategy=strategy,
        overwrite=flag_values.overwrite,
        valid_split=flag_values.valid_split,
        steps_per_call=flag_values.steps_per_call,
        checkpoint_minutes=flag_values.checkpoint_minutes,
        interrupts=interrupts,
        model=models.ModelOptions(model_name, kind, sizes),
        options=_from_flags(TrainOptions, flag_values),
      )
  except interrupts_lib.Interrupted as interrupted:
    code = cli.INTERRUPTED if interrupted.signal == signal.SIGINT else PREEMPTED
    same = 'the same command without --overwrite' if flag_values.overwrite else 'the same command'
    return cli.fail(code, f'{interrupted}, the state is saved; {same} resumes from it')
  print(f'wrote {run.path}')
  return 0


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
