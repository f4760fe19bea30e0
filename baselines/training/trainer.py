"""Training: a model, its optimizer, and the steps that bring them forward, on one device or
several.
"""

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

# Kind -> what the best epoch is chosen by unless told otherwise.
SELECTION_METRIC = {'tile': 'opa', 'layout': 'kendall_tau'}
PRECISIONS = ('float32', 'mixed_bfloat16')


@dataclasses.dataclass(frozen=True)
class TrainOptions:
  """How a model is trained; stored with the run.

  Attributes:
    epochs: passes over the records of the train split.
    batch_size: modules per step on average, over all replicas; small modules come more, large
      ones fewer at a time.
    configs_per_module: configs sampled of each module, each time it is seen.
    config_sampling: see `batching.BatchOptions`.
    packs: parts that each step's modules are packed into, shared out evenly to the replicas; 0:
      one per replica. Runs with as many packs learn the same from any number of replicas.
    shapes: number of static shapes that packs are padded to, for which XLA compiles the step; 0:
      shapes are dynamic; None: 1 on a TPU, else 0.
    max_ops: limit of ops per pack; None: by `batch_size`.
    oversize: what happens to a larger module, see `batching.BatchOptions`.
    loss: as `losses.parse_loss` takes it.
    learning_rate: of AdamW; it falls to zero along a half cosine.
    warmup: share of the steps over which the learning rate first rises from zero.
    weight_decay: of AdamW, for the matrices that multiply features: not for biases,
      normalisation and embeddings.
    clip_norm: gradients whose global norm is larger are scaled down to it.
    ema: decay per step of the average of weights that is judged and saved; 0: the weights
      themselves are.
    precision: of the layers, one of `PRECISIONS`; weights and losses are float32 always.
    metric: by which the best epoch is chosen; None: by `SELECTION_METRIC`.
    patience: stop after so many epochs without a better one; 0: never.
    seed: of weights, order and samples.
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
        'not a number from 0', where='--weight_decay', found=self.weight_decay
      )
    if self.precision not in PRECISIONS:
      raise errors.InputError(
        'unknown precision',
        where='--precision',
        found=self.precision,
        expected=' or '.join(PRECISIONS),
      )

  def resolve(self, kind: str, strategy: tf.distribute.Strategy) -> TrainOptions:
    """The same with `metric`, `packs` and `shapes` filled in for the kind of the data and the
    devices.

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
        fix='leave it out: packs are filled to one shape there',
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
      raise errors.InputError(
        'batch size does not fit the devices',
        where='--batch_size',
        found=self.batch_size,
        expected=f'a multiple of {packs} {"packs" if self.packs else "replicas"}',
      )
    metric = self.metric or SELECTION_METRIC[kind]
    known = ('opa', 'opa_pooled', 'kendall_tau', *(f'top_{k}_error' for k in metrics.TOP_KS[kind]))
    if metric not in known:
      raise errors.InputError(
        'unknown metric', where='--metric', found=metric, expected=' or '.join(known)
      )
    return dataclasses.replace(self, packs=packs, metric=metric, shapes=shapes)


def make_schedule(
  options: TrainOptions, steps: int
) -> tf.keras.optimizers.schedules.LearningRateSchedule:
  """The learning rate over so many steps in all: 0 to the highest along a line, back to 0 along
  a half cosine.
  """
  warmup = round(options.warmup * steps)
  return tf.keras.optimizers.schedules.CosineDecay(
    0.0 if warmup else options.learning_rate,
    max(steps - warmup, 1),
    warmup_steps=warmup,
    warmup_target=options.learning_rate if warmup else None,
  )


def is_better(metric: str, value: float | None, best: float | None) -> bool:
  """Whether `value` of a metric is better than `best`, where None is undefined: worse than any
  number.
  """
  if value is None or best is None:
    return best is None
  return value < best if metric.endswith('_error') else value > best


@dataclasses.dataclass(frozen=True)
class Steps:
  """What some steps came to.

  Attributes:
    count: number of steps taken: fewer than asked for if the last one was not finite.
    loss: sum of their mean losses over modules.
    configs: number of configs in them.
    comparable: number of modules with two different runtimes in them.
    norm: global norm of the gradient of the last step, before it was clipped.
    losses: float32 [replicas, B], of the modules of the last step.
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
  """A model, its optimizer, and the steps that bring them forward.

  Attributes:
    strategy: where.
    options: how, resolved.
    directory: what on.
    model: that is trained.
    judged: a model of float32 layers with the weights that are evaluated and saved; see
      `update_judged`.
    plan: of the batches.
    optimizer: of `model`.
    schedule: the learning rate by the number of steps done.
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
      InputError: the split is missing or has no measured module, or the batch cannot be shared
        out to the replicas.
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
      self.optimizer.exclude_from_weight_decay(
        var_list=[
          weight
          for weight in self.model.trainable_variables
          if weight.shape.rank < 2 or 'embedding' in weight.name
        ]
      )
      self.optimizer.build(self.model.trainable_variables)
    self._gradients = tf.function(
      self._gradients, jit_compile=bool(options.shapes), autograph=False
    )
    self._take = tf.function(self._take)

  def steps_in_epoch(self, epoch: int) -> int:
    """Number of steps of an epoch, counted from 1."""
    return self.plan.batches_per_epoch(epoch - 1)

  def batches(self, epoch: int, step: int = 0) -> Any:
    """The batches from after `step` steps of an epoch on, and those of all later epochs, as a
    distributed dataset.
    """
    # Where TensorFlow does not know that there is no end, it makes empty batches for an end, which
    # TF-GNN cannot.
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
    """Takes steps over the next `count` batches of an iterator over `batches(...)`; stops after
    one not finite.
    """
    taken = [value.numpy() for value in self._take(batches, tf.constant(count))]
    count, loss, configs, comparable, norm = (value.item() for value in taken[:5])
    return Steps(count, loss, int(configs), int(comparable), norm, taken[5])

  def _take(self, batches, count):
    taken, total, counts, norm = tf.constant(0), tf.constant(0.0), tf.zeros([2]), tf.constant(0.0)
    of_modules = tf.zeros([0, 0])
    for _ in tf.range(count):
      tf.autograph.experimental.set_loop_options(
        shape_invariants=[(of_modules, tf.TensorShape([None, None]))]
      )
      results = self.strategy.run(self._replica_step, args=(next(batches),))
      # Summed over the replicas already, so all have the same.
      loss, step_counts, norm, of_modules = (
        self.strategy.experimental_local_results(r)[0] for r in results
      )
      if self.options.ema:
        self._update_average()
      taken, total, counts = taken + 1, total + loss, counts + step_counts
      if not tf.math.is_finite(loss + norm):
        break
    comparable, configs = tf.unstack(counts)
    return taken, total, configs, comparable, norm, of_modules

  @tf.autograph.experimental.do_not_convert  # Converting all layers would take seconds.
  def _replica_step(self, graph: tfgnn.GraphTensor):
    context = tf.distribute.get_replica_context()
    of_modules, gradients = self._gradients(graph)
    of_replica = tf.equal(tf.range(context.num_replicas_in_sync), context.replica_id_in_sync_group)
    of_modules = tf.where(of_replica[:, tf.newaxis], of_modules, 0.0)  # [replicas, B]
    counts = tf.stack(
      [
        tf.reduce_sum(tf.cast(losses.is_comparable(graph.context['relative_runtime']), tf.float32)),
        tf.math.count_nonzero(graph.context['config_id'] != loading.PADDING, dtype=tf.float32),
      ]
    )
    *gradients, of_modules, counts = context.all_reduce(
      tf.distribute.ReduceOp.SUM, [*gradients, of_modules, counts]
    )
    # The mean is over the modules of all replicas, so that two replicas do what one does with twice
    # the packs.
    comparable = tf.maximum(counts[0], 1.0)
    gradients, norm = tf.clip_by_global_norm(
      [gradient / comparable for gradient in gradients], self.options.clip_norm
    )
    self.optimizer.apply_gradients(
      zip(gradients, self.model.trainable_variables, strict=True), skip_gradients_aggregation=True
    )
    return tf.reduce_sum(of_modules) / comparable, counts, norm, of_modules

  def _gradients(self, graph: tfgnn.GraphTensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Losses of the modules [B], and the gradients of their sum."""
    with tf.GradientTape() as tape:
      of_modules = self._loss(graph.context['relative_runtime'], self.model(graph, training=True))
      total = tf.reduce_sum(of_modules)
    gradients = tape.gradient(
      total, self.model.trainable_variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return of_modules, [tf.convert_to_tensor(gradient) for gradient in gradients]

  def _update_average(self) -> None:
    # The first steps count for less than --ema says, or else the fresh weights would be remembered
    # for long.
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
    """Of the next step."""
    return float(self.schedule(self.optimizer.iterations))

  def update_judged(self) -> None:
    """Brings `judged` up to date: where weights are not averaged, it takes over those of
    `model`.
    """
    if not self.options.ema:
      self._copy_weights()

  def _copy_weights(self) -> None:
    for copy, weight in zip(self.judged.weights, self.model.weights, strict=True):
      copy.assign(weight)

  def module_ids(self, epoch: int, step: int) -> list[list[str]]:
    """The modules of a step of an epoch, steps counted from 0: per replica those in the order of
    `Steps.losses`.
    """
    return [
      [name.decode() for name in graph.context['module_id'].numpy()]
      for index in range(self._sharing['num_inputs'])
      for graph in self._batches(epoch, step, index, with_ids=True).take(self._sharing['replicas'])
    ]


@contextlib.contextmanager
def _precision(policy: str) -> Iterator[None]:
  """Layers made inside the block compute by this policy of Keras."""
  before = tf.keras.mixed_precision.global_policy()
  tf.keras.mixed_precision.set_global_policy(policy)
  try:
    yield
  finally:
    tf.keras.mixed_precision.set_global_policy(before)
