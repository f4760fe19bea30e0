"""Trains a model that ranks the configs of a module, on a dataset directory that convert has
written.

  python baselines/train.py --data=data/tile --out=runs/tile

The run directory holds what evaluate.py and rank.py need: options, feature statistics and the
weights of the epoch that was best on the validation split. Training that was stopped goes on
where it was by the same command. SIGTERM saves its state first and exits with 75, SIGINT
(Ctrl-C) with 130. docs/training.md tells more.
"""

from __future__ import annotations

import baselines  # noqa: F401  # Before TensorFlow, to quiet it.

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
# sysexits.h: a temporary failure; the user is invited to retry.
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
  """Trains a model and writes its run directory, or goes on with a training that was stopped.

  In the main thread, SIGTERM and SIGINT end it once the state is saved.

  Args:
    data: dataset directory.
    out: run directory to write.
    model: what to train; by default the best baseline for the kind of the data.
    options: how.
    strategy: where; by default one device.
    valid_split: by which the best epoch is chosen; by default 'valid', or 'train' where nothing
      in 'valid' is measured.
    overwrite: replace a run that exists, finished or not.
    steps_per_call: steps that are taken without coming back to Python.
    checkpoint_minutes: a state is saved at the end of each epoch, and in between when the last
      is older than this.
    interrupts: entered, if signals are to stop it.
    progress: is given lines to show.

  Returns:
    The run as it was written, with the best weights.

  Raises:
    InputError: data, options or output cannot be used, or a loss or gradient is not finite.
    Interrupted: it was stopped by a signal, and the same call goes on.
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
    goes_on = not overwrite and runs.is_interrupted(out)
    writer = runs.Writer(
      out,
      options=model,
      model=trainer.judged,
      statistics=directory.statistics,
      choices=directory.manifest.choices,
      overwrite=overwrite,
      goes_on=goes_on,
      is_chief=is_chief,
      config={
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
      },
    )
    with writer:
      shards = directory.split('train')
      progress(
        f'{model.name}, {sum(int(tf.size(v)) for v in trainer.model.trainable_variables):,} weights; '
        f'{directory.manifest.collection}: {shards.modules:,} modules, {shards.configs:,} configs; '
        f'{trainer.steps_in_epoch(1):,} steps per epoch'
      )
      progress(f'train: {trainer.plan.describe()}')
      if goes_on:
        states.restore(progress)
        if position.best_epoch:
          writer.check_best()
        progress(f'going on at epoch {position.epoch}, after step {position.step}')
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
  strategies.any_worker(strategy, False)  # Waits until the run is written.
  return runs.load(out)


def _valid_split(
  directory: directory_lib.DatasetDirectory, chosen: str | None, progress: Callable[[str], None]
) -> str:
  measured = [name for name, split in directory.manifest.splits.items() if split.measured]
  if chosen is None and 'valid' not in measured:
    progress('nothing in the valid split is measured: the best epoch is chosen by the train split')
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
  enum(
    'model',
    None,
    models.MODELS,
    'What to train. Default: '
    + ', '.join(f'{model} for {kind}' for kind, model in models.DEFAULT_MODEL.items())
    + '.',
  )
  integer('hidden', sizes.hidden, 'Hidden units of each layer.', 1)
  integer('layers', sizes.layers, 'Message passing layers.', 0)
  integer('opcode_embedding', sizes.opcode_embedding, 'Size of the embedding of an opcode.', 1)
  boolean(
    'directed',
    sizes.directed,
    'Whether messages from operands and from consumers have weights of their own.',
  )
  integer('attention_heads', sizes.attention_heads, 'Of GATv2; they share the hidden units out.', 1)
  integer('epochs', options.epochs, 'Passes over the train split.', 1)
  integer('batch_size', options.batch_size, 'Modules per step on average, over all devices.', 1)
  integer('configs_per_module', options.configs_per_module, 'Configs sampled of each module.', 2)
  enum(
    'config_sampling',
    options.config_sampling,
    decoding.CONFIG_SAMPLINGS,
    'Which configs are sampled.',
  )
  string(
    'loss',
    options.loss,
    f'One of {", ".join(losses.LOSSES)}, or a weighted sum such as list_mle:1,mse:0.1.',
  )
  number('learning_rate', options.learning_rate, 'Of AdamW; falls to 0 along a half cosine.')
  number(
    'warmup',
    options.warmup,
    'Share of the steps over which the learning rate first rises from 0.',
    1.0,
  )
  number(
    'weight_decay',
    options.weight_decay,
    'Of AdamW; biases, normalisation and embeddings are spared.',
  )
  number('clip_norm', options.clip_norm, 'Largest global norm of the gradients.')
  number(
    'ema',
    options.ema,
    'Judge and save an average of the weights with this decay per step, such as 0.99; 0: the '
    'weights as they are.',
    1.0,
  )
  enum(
    'precision',
    options.precision,
    trainer_lib.PRECISIONS,
    'Of the layers; weights and losses are float32 always.',
  )
  enum(
    'valid_split',
    None,
    module_lib.SPLITS,
    'By which the best epoch is chosen. Default: valid, or train where nothing in it is measured.',
  )
  string(
    'metric',
    None,
    'By which the best epoch is chosen: opa, kendall_tau or top_K_error. Default: '
    + ', '.join(f'{metric} for {kind}' for kind, metric in trainer_lib.SELECTION_METRIC.items())
    + '.',
  )
  integer(
    'patience', options.patience, 'Stop after so many epochs without a better one; 0: never.', 0
  )
  integer('seed', options.seed, 'Of weights, order and samples.', 0, 2**32 - 1)
  enum(
    'strategy',
    'auto',
    strategies.STRATEGIES,
    'Where to train. auto: TPU if --tpu is given, else all GPUs, else '
    'the CPU. multi_worker: on the machines that TF_CONFIG names, by the same command on each.',
  )
  string('tpu', None, "Name or address of a TPU; 'local' on a TPU VM.")
  integer(
    'packs',
    options.packs,
    'Parts that the modules of a step are packed into, shared out evenly to the devices; '
    'with the same number, runs on one and on several devices learn the same. 0: one per device.',
    0,
  )
  integer(
    'shapes',
    None,
    'Pad packs to so many static shapes and compile the step with XLA; 0: as large as they are. '
    'Default: 1 on TPU, else 0.',
    0,
  )
  integer(
    'max_ops',
    None,
    'Limit of ops per pack. Default: by --batch_size, and no less than the largest module.',
    1,
  )
  enum(
    'oversize',
    options.oversize,
    packing.OVERSIZE,
    'What to do with a module that has more than --max_ops ops.',
  )
  integer(
    'steps_per_call', STEPS_PER_CALL, 'Steps that are taken without coming back to Python.', 1
  )
  number(
    'checkpoint_minutes',
    CHECKPOINT_MINUTES,
    'The state of training is saved after each epoch, and in between '
    'when the last one is older than this.',
  )
  boolean('overwrite', False, 'Replace a run that exists, finished or not.')
  for name in ('data', 'out'):
    flags.mark_flag_as_required(name, flag_values=flag_values)


def _from_flags(options: type[_Options], flag_values) -> _Options:
  """Options of a dataclass whose fields have flags of the same names."""
  return options(
    **{field.name: flag_values[field.name].value for field in dataclasses.fields(options)}
  )


def _job(flag_values, _) -> int:
  kind = directory_lib.open_directory(flag_values.data).kind
  host.tune(kind)
  strategy = strategies.make(
    flag_values.strategy,
    tpu=flag_values.tpu,
    paths={'--data': flag_values.data, '--out': flag_values.out},
  )
  try:
    with (
      interrupts_lib.Interrupts() as interrupts
    ):  # After the strategy, since one for a cluster handles SIGTERM, too.
      run = train(
        data=flag_values.data,
        out=flag_values.out,
        strategy=strategy,
        overwrite=flag_values.overwrite,
        valid_split=flag_values.valid_split,
        steps_per_call=flag_values.steps_per_call,
        checkpoint_minutes=flag_values.checkpoint_minutes,
        interrupts=interrupts,
        model=models.ModelOptions(
          flag_values.model or models.DEFAULT_MODEL[kind],
          kind,
          _from_flags(parts.PartOptions, flag_values),
        ),
        options=_from_flags(TrainOptions, flag_values),
      )
  except interrupts_lib.Interrupted as interrupted:
    same = 'the same command without --overwrite' if flag_values.overwrite else 'the same command'
    return cli.fail(
      cli.INTERRUPTED if interrupted.signal == signal.SIGINT else PREEMPTED,
      f'{interrupted}, the state is saved; {same} goes on from it',
    )
  print(f'wrote {run.path}')
  return 0


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
