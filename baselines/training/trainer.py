"""A trainer: a model, its optimizer, and the steps that train them, on one device or several."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import math
from typing import Any

import tensorflow as tf

from baselines import losses
from baselines import models
from baselines.training import strategies
from tpu_graphs import errors
from tpu_graphs.compat import tfgnn
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import statistics as statistics_lib
from tpu_graphs.input import batching
from tpu_graphs.input import loading
from tpu_graphs.metrics import metrics

# The metric that chooses the best epoch by default, for each kind of data.
SELECTION_METRIC = {'tile': 'opa', 'layout': 'kendall_tau'}
PRECISIONS = ('float32', 'mixed_bfloat16')


@dataclasses.dataclass(frozen=True)
class TrainOptions:
  """The options of a training; stored with the run.

  Attributes:
    epochs: number of passes over the records of the train split.
    batch_size: number of modules per step on average, over all replicas. A step has more modules if
      they are small and fewer if they are large.
    configs_per_module: number of configs sampled of each module, each time it is seen.
    config_sampling: the method of sampling, see `batching.BatchOptions`.
    packs: number of parts that each step's modules are packed into, divided evenly among the
      replicas; 0: one per replica. Runs with the same number of packs learn the same on any number
      of replicas.
    shapes: number of static shapes that packs are padded to, for which XLA compiles the step; 0:
      shapes are dynamic; None: 1 on a TPU, else 0.
    max_ops: maximum number of ops per pack; None: chosen from `batch_size`.
    oversize: treatment of larger modules, see `batching.BatchOptions`.
    loss: the loss, in the form that `losses.parse_loss` reads.
    learning_rate: highest learning rate of AdamW; the rate falls to zero along a half cosine.
    warmup: share of the steps over which the learning rate first rises from zero.
    weight_decay: weight decay of AdamW, for the matrices that multiply features: not for biases,
      normalisation and embeddings.
    clip_norm: maximum global norm of the gradients; larger gradients are scaled down to it.
    ema: decay per step of the average of weights that is judged and saved; 0: the weights
      themselves are judged and saved.
    precision: precision of the layers, one of `PRECISIONS`; weights and losses are always float32.
    metric: metric that chooses the best epoch; None: the metric in `SELECTION_METRIC`.
    patience: number of epochs without a better one after which training stops; 0: never.
    seed: seed of weights, order and samples.
  """

  epochs: int = 20
  batch_size: int = 8
  configs_per_module: int = 16
  config_sampling: str = 'uniform'
  packs: int = 0
  shapes: int | None = None
  max_ops: int | None = None
  oversize: str = 'fail'
  loss: str = 'list_mle'
  learning_rate: float = 1e-3
  warmup: float = 0.0
  weight_decay: float = 0.0
  clip_norm: float = 1.0
  ema: float = 0.0
  precision: str = 'float32'
  metric: str | None = None
  patience: int = 0
  seed: int = 0

  def __post_init__(self):
    losses.parse_loss(self.loss)
    for name in ('learning_rate', 'clip_norm'):
      if not 0 < getattr(self, name) < math.inf:
        raise errors.InputError(
          'not a positive number', where=f'--{name}', found=getattr(self, name)
        )
    for name in ('warmup', 'ema'):
      if not 0 <= getattr(self, name) < 1:
        raise errors.InputError(
          'not a share', where=f'--{name}', found=getattr(self, name), expected='>= 0 and < 1'
        )
    if not 0 <= self.weight_decay < math.inf:
      raise errors.InputError(
        'not a finite number >= 0', where='--weight_decay', found=self.weight_decay
      )
    if self.precision not in PRECISIONS:
      raise errors.InputError(
        'unknown precision',
        where='--precision',
        found=self.precision,
        expected=' or '.join(PRECISIONS),
      )

  def resolve(self, kind: str, strategy: tf.distribute.Strategy) -> TrainOptions:
    """Returns the options with `metric`, `packs` and `shapes` filled in for data and devices.

    Args:
      kind: kind of the data, 'tile' or 'layout'.
      strategy: the strategy, which names the devices.

    Raises:
      InputError: there is no such metric, or the devices cannot take such batches.
    """
    replicas = strategy.num_replicas_in_sync
    is_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
    shapes = int(is_tpu) if self.shapes is None else self.shapes
    if is_tpu and shapes != 1:
      raise errors.InputError(
        'shapes do not fit a TPU',
        where='--shapes',
        found=shapes,
        expected='1',
        fix='omit --shapes: packs are padded to one shape on a TPU',
      )
    packs = self.packs or replicas
    if packs % replicas:
      raise errors.InputError(
        'packs do not fit the devices',
        where='--packs',
        found=packs,
        expected=f'a multiple of {replicas} replicas',
      )
    if self.batch_size % packs:
      noun = 'packs' if self.packs else 'replicas'
      raise errors.InputError(
        'batch size does not fit the devices',
        where='--batch_size',
        found=self.batch_size,
        expected=f'a multiple of {packs} {noun}',
      )
    metric = self.metric or SELECTION_METRIC[kind]
    top_k_errors = [f'top_{k}_error' for k in metrics.TOP_KS[kind]]
    known = ('opa', 'opa_pooled', 'kendall_tau', *top_k_errors)
    if metric not in known:
      raise errors.InputError(
        'unknown metric', where='--metric', found=metric, expected=' or '.join(known)
      )
    return dataclasses.replace(self, packs=packs, metric=metric, shapes=shapes)


def make_schedule(
  options: TrainOptions, steps: int
) -> tf.keras.optimizers.schedules.LearningRateSchedule:
  """Makes the schedule of the learning rate over `steps` steps in all.

  The rate rises from 0 to the highest rate along a line over the warmup, then falls to 0 along a
  half cosine.
  """
  warmup = round(options.warmup * steps)
  return tf.keras.optimizers.schedules.CosineDecay(
    0.0 if warmup else options.learning_rate,
    max(steps - warmup, 1),
    warmup_steps=warmup,
    warmup_target=options.learning_rate if warmup else None,
  )


def is_better(metric: str, value: float | None, best: float | None) -> bool:
  """Returns whether `value` of a metric is better than `best`.

  None is an undefined value, which is worse than any number.
  """
  if value is None or best is None:
    return best is None
  if metric.endswith('_error'):
    return value < best
  return value > best


@dataclasses.dataclass(frozen=True)
class Steps:
  """The result of a call that takes several steps.

  Attributes:
    count: number of steps taken, fewer than requested if the last one was not finite.
    loss: sum over the steps of the mean loss over modules.
    configs: number of configs in the steps.
    comparable: number of modules with two different runtimes in the steps.
    norm: global norm of the gradient of the last step, before it was clipped.
    losses: losses of the modules of the last step, float32 [replicas, B].
  """

  count: int
  loss: float
  configs: int
  comparable: int
  norm: float
  losses: Any

  @property
  def is_finite(self) -> bool:
    return math.isfinite(self.loss) and math.isfinite(self.norm)


class Trainer:
  """A model, its optimizer, and the steps that train them.

  Attributes:
    strategy: the strategy, which names the devices.
    options: the options, resolved.
    directory: the dataset directory.
    model: the model that is trained.
    judged: a model of float32 layers with the weights that are evaluated and saved; see
      `update_judged`.
    plan: the plan of the batches.
    optimizer: the optimizer of `model`.
    schedule: the schedule of the learning rate, by the number of steps done.
  """

  def __init__(
    self,
    model_options: models.ModelOptions,
    options: TrainOptions,
    strategy: tf.distribute.Strategy,
    *,
    directory: directory_lib.DatasetDirectory,
    split: str = 'train',
  ):
    """Makes a trainer with fresh weights.

    Raises:
      InputError: the split is missing or has no measured module, or the batch cannot be divided
        evenly among the replicas.
    """
    shards = directory.split(split)
    if not shards.measured:
      raise errors.InputError(
        'nothing to learn from',
        path=directory.path,
        found=f'no measured module in {split}',
        fix='convert with runtimes, or with --split=train',
      )
    self.options = options = options.resolve(directory.kind, strategy)
    self.strategy = strategy
    self.directory = directory
    self._split = split
    self._batching = batching.BatchOptions(
      batch_size=options.batch_size // options.packs,
      configs_per_module=options.configs_per_module,
      config_sampling=options.config_sampling,
      shapes=options.shapes or None,
      max_ops=options.max_ops,
      oversize=options.oversize,
      seed=options.seed,
    )
    num_inputs = strategies.num_inputs(strategy)
    self._sharing = {
      'packs': options.packs // strategy.num_replicas_in_sync,
      'num_inputs': num_inputs,
      'replicas': strategy.num_replicas_in_sync // num_inputs,
    }
    self.plan = batching.plan_of(directory, split, self._batching, **self._sharing)
    self._loss = losses.make_loss(losses.parse_loss(options.loss))
    tf.keras.utils.set_random_seed(options.seed)
    with strategy.scope():
      statistics = statistics_lib.parse(
        directory.statistics, num_extra=directory.manifest.choices.num_extra
      )
      with _precision(options.precision):
        self.model = models.build(model_options, statistics)
      self.judged = models.build(model_options, statistics)
      self._copy_weights()
      self.schedule = make_schedule(options, options.epochs * self.steps_in_epoch(1))
      # With a weight decay, Keras' Adam is AdamW.
      self.optimizer = tf.keras.optimizers.Adam(
        self.schedule, weight_decay=options.weight_decay or None
      )
      spared = [
        weight
        for weight in self.model.trainable_variables
        if weight.shape.rank < 2 or 'embedding' in weight.name
      ]
      self.optimizer.exclude_from_weight_decay(var_list=spared)
      self.optimizer.build(self.model.trainable_variables)
    self._gradients = tf.function(
      self._gradients, jit_compile=bool(options.shapes), autograph=False
    )
    self._take = tf.function(self._take)

  def steps_in_epoch(self, epoch: int) -> int:
    """Returns the number of steps of an epoch; epochs are counted from 1."""
    return self.plan.batches_per_epoch(epoch - 1)

  def batches(self, epoch: int, step: int = 0) -> Any:
    """Makes a distributed dataset of the batches after the first `step` steps of an epoch.

    The batches of all later epochs follow without end.
    """
    # Unless TensorFlow knows that the dataset has no end, it makes empty batches for the end, which
    # TF-GNN does not support.
    endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
    return self.strategy.distribute_datasets_from_function(
      lambda context: self._batches(epoch, step, context.input_pipeline_id).apply(endless)
    )

  def _batches(
    self, epoch: int, step: int, input_index: int, with_ids: bool = False
  ) -> tf.data.Dataset:
    return batching.batches(
      self.directory,
      self._split,
      self._batching,
      epoch=epoch - 1,
      first_batch=step,
      input_index=input_index,
      with_ids=with_ids,
      **self._sharing,
    )

  def take(self, batches: Iterator[Any], count: int) -> Steps:
    """Takes steps over the next `count` batches of an iterator over `batches(...)`.

    It stops after a step whose loss or gradient is not finite.
    """
    *scalars, of_modules = [value.numpy() for value in self._take(batches, tf.constant(count))]
    count, loss, configs, comparable, norm = (scalar.item() for scalar in scalars)
    return Steps(count, loss, int(configs), int(comparable), norm, of_modules)

  def _take(self, batches, count):
    taken = tf.constant(0)
    total = tf.constant(0.0)
    counts = tf.zeros([2])
    norm = tf.constant(0.0)
    of_modules = tf.zeros([0, 0])
    for _ in tf.range(count):
      tf.autograph.experimental.set_loop_options(
        shape_invariants=[(of_modules, tf.TensorShape([None, None]))]
      )
      results = self.strategy.run(self._replica_step, args=(next(batches),))
      # The results are summed over the replicas already, so all replicas have the same results.
      loss, step_counts, norm, of_modules = (
        self.strategy.experimental_local_results(r)[0] for r in results
      )
      if self.options.ema:
        self._update_average()
      taken += 1
      total += loss
      counts += step_counts
      if not tf.math.is_finite(loss + norm):
        break
    comparable, configs = tf.unstack(counts)
    return taken, total, configs, comparable, norm, of_modules

  # AutoGraph would take seconds to convert all layers.
  @tf.autograph.experimental.do_not_convert
  def _replica_step(self, graph: tfgnn.GraphTensor):
    context = tf.distribute.get_replica_context()
    of_modules, gradients = self._gradients(graph)
    of_replica = tf.equal(tf.range(context.num_replicas_in_sync), context.replica_id_in_sync_group)
    of_modules = tf.where(of_replica[:, tf.newaxis], of_modules, 0.0)  # [replicas, B]
    is_comparable = losses.is_comparable(graph.context['relative_runtime'])
    is_config = graph.context['config_id'] != loading.PADDING
    num_comparable = tf.reduce_sum(tf.cast(is_comparable, tf.float32))
    num_configs = tf.math.count_nonzero(is_config, dtype=tf.float32)
    counts = tf.stack([num_comparable, num_configs])
    *gradients, of_modules, counts = context.all_reduce(
      tf.distribute.ReduceOp.SUM, [*gradients, of_modules, counts]
    )
    # The mean is over the modules of all replicas, so that two replicas compute the same as one
    # replica with twice the packs.
    comparable = tf.maximum(counts[0], 1.0)
    means = [gradient / comparable for gradient in gradients]
    gradients, norm = tf.clip_by_global_norm(means, self.options.clip_norm)
    self.optimizer.apply_gradients(
      zip(gradients, self.model.trainable_variables, strict=True), skip_gradients_aggregation=True
    )
    return tf.reduce_sum(of_modules) / comparable, counts, norm, of_modules

  def _gradients(self, graph: tfgnn.GraphTensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Computes the losses of the modules, [B], and the gradients of their sum."""
    with tf.GradientTape() as tape:
      scores = self.model(graph, training=True)
      of_modules = self._loss(graph.context['relative_runtime'], scores)
      total = tf.reduce_sum(of_modules)
    gradients = tape.gradient(
      total, self.model.trainable_variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return of_modules, [tf.convert_to_tensor(gradient) for gradient in gradients]

  def _update_average(self) -> None:
    # The decay is smaller than --ema in the first steps, because the fresh weights would otherwise
    # remain in the average for long.
    done = tf.cast(self.optimizer.iterations, tf.float32)
    change = 1 - tf.minimum(self.options.ema, done / (done + 9))
    for average, weight in zip(
      self.judged.trainable_variables, self.model.trainable_variables, strict=True
    ):
      self.strategy.extended.update(
        average,
        lambda average, weight, change: average.assign_sub(change * (average - weight)),
        args=(weight, change),
      )

  @property
  def learning_rate(self) -> float:
    """Learning rate of the next step."""
    return float(self.schedule(self.optimizer.iterations))

  def update_judged(self) -> None:
    """Brings `judged` up to date.

    If weights are not averaged, it takes the weights of `model`; averages are always up to date.
    """
    if not self.options.ema:
      self._copy_weights()

  def _copy_weights(self) -> None:
    for copy, weight in zip(self.judged.weights, self.model.weights, strict=True):
      copy.assign(weight)

  def module_ids(self, epoch: int, step: int) -> list[list[str]]:
    """Returns the names of each replica's modules in a step of an epoch.

    Steps are counted from 0. Names have the same order as `Steps.losses`; padding has the name ''.
    """
    names = []
    for index in range(self._sharing['num_inputs']):
      batches = self._batches(epoch, step, index, with_ids=True)
      for graph in batches.take(self._sharing['replicas']):
        names.append([name.decode() for name in graph.context['module_id'].numpy()])
    return names


@contextlib.contextmanager
def _precision(policy: str) -> Iterator[None]:
  """Applies a Keras precision policy to the layers made inside the block."""
  before = tf.keras.mixed_precision.global_policy()
  tf.keras.mixed_precision.set_global_policy(policy)
  try:
    yield
  finally:
    tf.keras.mixed_precision.set_global_policy(before)
