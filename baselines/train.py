"""Trains a model that ranks the configs of a module, on a dataset directory that convert has written.

  python baselines/train.py --data=data/tile --out=runs/tile

The run directory holds what evaluate.py and rank.py need: options, feature statistics and the weights of the epoch that
was best on the validation split.
"""

from __future__ import annotations

import baselines  # noqa: F401  # Before TensorFlow, to quiet it.

from collections.abc import Callable, Sequence
import dataclasses
import math
import platform
import sys
import time
from typing import Any

import tensorflow as tf
import tensorflow_gnn as tfgnn

from baselines import losses
from baselines import models
from baselines import runs
from baselines import scoring
from baselines import strategies
from baselines.models import parts
import tpu_graphs
from tpu_graphs import cli
from tpu_graphs import datasets
from tpu_graphs import errors
from tpu_graphs import manifest as manifest_lib
from tpu_graphs import metrics
from tpu_graphs import statistics as statistics_lib

# Kind -> what the best epoch is chosen by, higher is better.
SELECTION_METRIC = {'tile': 'opa', 'layout': 'kendall_tau'}
_PROGRESS_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class TrainOptions:
  """How a model is trained.

  Attributes:
    epochs: passes over the records of the train split.
    batch_size: modules per step, over all replicas.
    configs_per_module: configs sampled of each module, each time it is seen.
    loss: as `losses.parse_loss` takes it.
    learning_rate: of Adam at the start; it falls to zero along a half cosine.
    clip_norm: gradients whose global norm is larger are scaled down to it.
    seed: of weights, order and samples.
    static_shapes: pad each batch to the same shapes and compile the step with XLA, as a TPU needs it.
  """
  epochs: int = 20
  batch_size: int = 8
  configs_per_module: int = 16
  loss: str = 'list_mle'
  learning_rate: float = 1e-3
  clip_norm: float = 1.0
  seed: int = 0
  static_shapes: bool = False

  def __post_init__(self):
    losses.parse_loss(self.loss)
    for name in ('learning_rate', 'clip_norm'):
      if not 0 < getattr(self, name) < math.inf:
        raise errors.InputError('not a positive number', where=f'--{name}', found=getattr(self, name))


class Trainer:
  """A model, its optimizer, and the step that brings them forward by one batch."""

  def __init__(self, model_options: models.ModelOptions, options: TrainOptions, strategy: tf.distribute.Strategy, *,
               directory: datasets.DatasetDirectory, split: str = 'train'):
    """Makes a trainer with fresh weights.

    Raises:
      InputError: the split is missing or has no measured module, or the batch cannot be shared out to the replicas.
    """
    shards = directory.split(split)
    replicas = strategy.num_replicas_in_sync
    if not shards.measured:
      raise errors.InputError('nothing to learn from', path=directory.path, found=f'no measured module in {split}',
                              fix='convert with runtimes, or with --split=train')
    if options.batch_size % replicas:
      raise errors.InputError('batch size does not fit the devices', where='--batch_size', found=options.batch_size,
                              expected=f'a multiple of {replicas} replicas')
    self._options = options
    self._strategy = strategy
    self._directory = directory
    self._split = split
    # A split smaller than the batch gives smaller batches rather than none.
    self._replica_batch = max(1, min(options.batch_size, shards.records) // replicas)
    self.steps_per_epoch = max(1, round(shards.records / (self._replica_batch * replicas)))
    self._loss = losses.make_loss(losses.parse_loss(options.loss))
    tf.keras.utils.set_random_seed(options.seed)
    with strategy.scope():
      statistics = statistics_lib.parse(directory.statistics, num_extra=directory.manifest.choices.num_extra)
      self.model = models.build(model_options, statistics)
      schedule = tf.keras.optimizers.schedules.CosineDecay(options.learning_rate, options.epochs * self.steps_per_epoch)
      self.optimizer = tf.keras.optimizers.Adam(schedule, global_clipnorm=options.clip_norm)
      self.optimizer.build(self.model.trainable_variables)
    # Endless batches for each replica.
    self.batches = strategy.distribute_datasets_from_function(self._replica_batches)
    self._gradients = tf.function(self._gradients, jit_compile=options.static_shapes)
    self._step = tf.function(self._step, input_signature=[self.batches.element_spec])

  def _replica_batches(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
    records = datasets.load(self._directory, self._split, configs_per_module=self._options.configs_per_module,
                            shuffle=True, seed=self._options.seed, epochs=None)
    records = records.shard(context.num_input_pipelines, context.input_pipeline_id).map(datasets.without_strings)
    pad_to = self._directory.split(self._split) if self._options.static_shapes else None
    return datasets.batch(records, self._replica_batch, pad_to=pad_to).prefetch(tf.data.AUTOTUNE)

  def step(self, batch: Any) -> tf.Tensor:
    """Takes one step over a (distributed) batch; returns its mean loss over modules, float32 scalar."""
    return self._step(batch)

  def _step(self, batch):
    loss = self._strategy.run(self._replica_step, args=(batch,))
    return self._strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)

  def _replica_step(self, graph: tfgnn.GraphTensor) -> tf.Tensor:
    # The mean is over the modules of all replicas, so that two replicas do what one does with twice the batch.
    runtimes = graph.context['relative_runtime']
    count = tf.reduce_sum(tf.cast(losses.is_comparable(runtimes), tf.float32))
    count = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, count)
    loss, gradients = self._gradients(graph, tf.maximum(count, 1.0))
    self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))  # Sums over replicas.
    return loss

  def _gradients(self, graph: tfgnn.GraphTensor, count: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    runtimes = graph.context['relative_runtime']
    with tf.GradientTape() as tape:
      total, _ = losses.sum_over_modules(self._loss(runtimes, self.model(graph, training=True)), runtimes)
      loss = total / count
    gradients = tape.gradient(loss, self.model.trainable_variables,
                              unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return loss, [tf.convert_to_tensor(gradient) for gradient in gradients]


def train(*, data: str, out: str, model: models.ModelOptions | None = None, options: TrainOptions = TrainOptions(),
          strategy: tf.distribute.Strategy | None = None, valid_split: str | None = None, overwrite: bool = False,
          progress: Callable[[str], None] = print) -> runs.Run:
  """Trains a model and writes its run directory.

  Args:
    data: dataset directory.
    out: run directory to write.
    model: what to train; by default the best baseline for the kind of the data.
    options: how.
    strategy: where; by default one device.
    valid_split: by which the best epoch is chosen; by default 'valid', or 'train' where nothing in 'valid' is measured.
    overwrite: replace a run that exists.
    progress: is given lines to show.

  Returns:
    The run as it was written, with the best weights.

  Raises:
    InputError: data, options or output cannot be used, or the loss is not finite.
  """
  directory = datasets.open_directory(data)
  model = model or models.ModelOptions(models.DEFAULT_MODEL[directory.kind], directory.kind)
  if model.kind != directory.kind:
    raise errors.InputError('model of the other kind', path=data, found=directory.kind, expected=model.kind)
  strategy = strategy or tf.distribute.OneDeviceStrategy('/cpu:0')
  trainer = Trainer(model, options, strategy, directory=directory)
  valid_split = _valid_split(directory, valid_split, progress)
  writer = runs.Writer(out, options=model, model=trainer.model, statistics=directory.statistics,
                       choices=directory.manifest.choices, overwrite=overwrite,
                       config={'training': dataclasses.asdict(options), 'valid_split': valid_split,
                               'data': {'path': data, 'collection': directory.manifest.collection,
                                        'source': dict(directory.manifest.source),
                                        'options': dict(directory.manifest.options)},
                               'versions': {'tpu_graphs': tpu_graphs.__version__, 'tensorflow': tf.__version__,
                                            'tensorflow_gnn': tfgnn.__version__, 'python': platform.python_version()}})
  shards = directory.split('train')
  progress(f'{model.name}, {sum(int(tf.size(v)) for v in trainer.model.trainable_variables):,} weights; '
           f'{directory.manifest.collection}: {shards.modules:,} modules, {shards.configs:,} configs; '
           f'{trainer.steps_per_epoch} steps per epoch')
  with datasets.damage_explained(directory):
    _train_epochs(trainer, directory, valid_split, options, writer, progress)
  return runs.load(out)


def _valid_split(directory: datasets.DatasetDirectory, chosen: str | None, progress: Callable[[str], None]) -> str:
  measured = [name for name, split in directory.manifest.splits.items() if split.measured]
  if chosen is None and 'valid' not in measured:
    progress('nothing in the valid split is measured: the best epoch is chosen by the train split')
    return 'train'
  chosen = chosen or 'valid'
  if chosen not in measured:
    raise errors.InputError('nothing measured in the split', where='--valid_split', found=chosen,
                            expected=' or '.join(measured))
  return chosen


def _train_epochs(trainer: Trainer, directory: datasets.DatasetDirectory, valid_split: str, options: TrainOptions,
                  writer: runs.Writer, progress: Callable[[str], None]) -> None:
  metric = SELECTION_METRIC[directory.kind]
  scorer = scoring.make_scorer(trainer.model, directory.kind, num_extra=directory.manifest.choices.num_extra)
  batches = iter(trainer.batches)
  best = None
  start = shown = time.monotonic()
  for epoch in range(1, options.epochs + 1):
    epoch_start = time.monotonic()
    total = tf.constant(0.0)
    for step in range(1, trainer.steps_per_epoch + 1):
      total += trainer.step(next(batches))
      if time.monotonic() - shown > _PROGRESS_SECONDS:
        shown = time.monotonic()
        progress(f'epoch {epoch}/{options.epochs}  step {step}/{trainer.steps_per_epoch}  '
                 f'loss {float(total) / step:.4f}')
    loss = float(total) / trainer.steps_per_epoch
    if not tf.math.is_finite(loss):
      raise errors.InputError('loss not finite', where=f'epoch {epoch}', found=loss,
                              fix='train with a lower --learning_rate')
    seconds = time.monotonic() - epoch_start
    valid = metrics.summarize(scoring.judge(module, metrics.TOP_KS[directory.kind])
                              for module in scoring.score_split(scorer, directory, valid_split) if module.is_measured)
    value = valid[metric]
    if loss == 0 and value is None:
      raise errors.InputError('nothing to learn', path=directory.path, found='no module with two different runtimes',
                              fix='measure more configs')
    row = {'epoch': epoch, 'loss': loss, **{f'{valid_split}_{name}': valid[name] for name in _shown(directory.kind)},
           'steps_per_second': trainer.steps_per_epoch / seconds}
    writer.add_epoch(row)
    is_best = best is None or (value is not None and value > best)
    if is_best:
      best = value
      writer.save(epoch)
    shown = time.monotonic()
    remaining = (shown - start) / epoch * (options.epochs - epoch)
    progress(f'epoch {epoch}/{options.epochs}  loss {loss:.4f}  ' + '  '.join(
        f'{valid_split} {name} {"n/a" if valid[name] is None else format(valid[name], ".4f")}'
        for name in _shown(directory.kind)) +
        f'  {row["steps_per_second"]:.1f} steps/s  {remaining:.0f} s left{"  best" if is_best else ""}')


def _shown(kind: str) -> tuple[str, ...]:
  """Metrics shown after each epoch: the one that the best is chosen by, and a middle top-k error."""
  return SELECTION_METRIC[kind], f'top_{metrics.TOP_KS[kind][1]}_error'


def _define_flags(flag_values) -> None:
  from absl import flags
  training, sizes = TrainOptions(), parts.PartOptions()
  flags.DEFINE_string('data', None, 'Dataset directory that convert has written.', flag_values=flag_values)
  flags.DEFINE_string('out', None, 'Run directory to write.', flag_values=flag_values)
  flags.DEFINE_enum('model', None, list(models.MODELS), 'What to train. Default: ' + ', '.join(
      f'{model} for {kind}' for kind, model in models.DEFAULT_MODEL.items()) + '.', flag_values=flag_values)
  flags.DEFINE_integer('hidden', sizes.hidden, 'Hidden units of each layer.', lower_bound=1, flag_values=flag_values)
  flags.DEFINE_integer('layers', sizes.layers, 'Message passing layers.', lower_bound=0, flag_values=flag_values)
  flags.DEFINE_integer('opcode_embedding', sizes.opcode_embedding, 'Size of the embedding of an opcode.', lower_bound=1,
                       flag_values=flag_values)
  flags.DEFINE_integer('epochs', training.epochs, 'Passes over the train split.', lower_bound=1,
                       flag_values=flag_values)
  flags.DEFINE_integer('batch_size', training.batch_size, 'Modules per step, over all devices.', lower_bound=1,
                       flag_values=flag_values)
  flags.DEFINE_integer('configs_per_module', training.configs_per_module, 'Configs sampled of each module.',
                       lower_bound=2, flag_values=flag_values)
  flags.DEFINE_string('loss', training.loss, f'One of {", ".join(losses.LOSSES)}, or a weighted sum such as '
                      'list_mle:1,mse:0.1.', flag_values=flag_values)
  flags.DEFINE_float('learning_rate', training.learning_rate, 'At the start; falls to 0 along a half cosine.',
                     lower_bound=0.0, flag_values=flag_values)
  flags.DEFINE_float('clip_norm', training.clip_norm, 'Largest global norm of the gradients.', lower_bound=0.0,
                     flag_values=flag_values)
  flags.DEFINE_integer('seed', training.seed, 'Of weights, order and samples.', lower_bound=0,
                       upper_bound=2**32 - 1, flag_values=flag_values)
  flags.DEFINE_enum('valid_split', None, manifest_lib.SPLITS, 'By which the best epoch is chosen. Default: valid, or '
                    'train where nothing in it is measured.', flag_values=flag_values)
  flags.DEFINE_enum('strategy', 'auto', strategies.STRATEGIES, 'Where to train. auto: TPU if --tpu is given, else all '
                    'GPUs, else the CPU.', flag_values=flag_values)
  flags.DEFINE_string('tpu', None, "Name or address of a TPU; 'local' on a TPU VM.", flag_values=flag_values)
  flags.DEFINE_bool('static_shapes', None, 'Pad each batch to the same shapes and compile the step with XLA. Default: '
                    'only on TPU.', flag_values=flag_values)
  flags.DEFINE_bool('overwrite', False, 'Replace a run that exists.', flag_values=flag_values)
  for name in ('data', 'out'):
    flags.mark_flag_as_required(name, flag_values=flag_values)


def _job(flag_values, _) -> int:
  strategy = strategies.make(flag_values.strategy, tpu=flag_values.tpu,
                             paths={'--data': flag_values.data, '--out': flag_values.out})
  static_shapes = flag_values.static_shapes
  if static_shapes is None:
    static_shapes = isinstance(strategy, tf.distribute.TPUStrategy)
  kind = datasets.open_directory(flag_values.data).kind
  run = train(
      data=flag_values.data, out=flag_values.out, strategy=strategy, overwrite=flag_values.overwrite,
      valid_split=flag_values.valid_split,
      model=models.ModelOptions(flag_values.model or models.DEFAULT_MODEL[kind], kind, parts.PartOptions(
          hidden=flag_values.hidden, layers=flag_values.layers, opcode_embedding=flag_values.opcode_embedding)),
      options=TrainOptions(
          epochs=flag_values.epochs, batch_size=flag_values.batch_size, loss=flag_values.loss, seed=flag_values.seed,
          configs_per_module=flag_values.configs_per_module, learning_rate=flag_values.learning_rate,
          clip_norm=flag_values.clip_norm, static_shapes=static_shapes))
  print(f'wrote {run.path}')
  return 0


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
