"""Scores of all configs of modules, for evaluation and ranking.

The modules come from a dataset directory, or a module is given as a `Module`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import itertools

import numpy as np
import tensorflow as tf

from tpu_graphs import errors
from tpu_graphs.compat import tfgnn
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.input import batching
from tpu_graphs.input import loading
from tpu_graphs.metrics import metrics
from tpu_graphs.modules import module as module_lib

# Number of configs that are scored at a time.
CHUNK = 64
# Small modules are scored several at a time, up to about this number of ops.
_OPS_PER_BATCH = 4096


@dataclasses.dataclass(frozen=True)
class ScoredModule:
  """The configs of a module with the scores that a model gives them.

  Attributes:
    module_id: the module's id.
    config_id: the ids of the configs, int64 [C].
    runtime: the runtimes in ns, int64 [C]; -1 where not measured.
    relative_runtime: the runtimes that metrics use, [C]; see `module.relative_runtime`.
    score: the scores, float32 [C], lower = predicted faster.
  """

  module_id: str
  config_id: np.ndarray
  runtime: np.ndarray
  relative_runtime: np.ndarray
  score: np.ndarray

  @property
  def order(self) -> np.ndarray:
    """Indices of the configs, predicted fastest first, int64 [C].

    Configs with equal scores keep their order in the source.
    """
    return np.argsort(self.score, kind='stable')

  @property
  def is_measured(self) -> bool:
    """Whether any config has a runtime."""
    return bool((self.runtime != module_lib.UNMEASURED).any())

  def measured(self) -> ScoredModule:
    """Returns the same module with its measured configs only."""
    kept = self.runtime != module_lib.UNMEASURED
    return dataclasses.replace(
      self,
      config_id=self.config_id[kept],
      runtime=self.runtime[kept],
      relative_runtime=self.relative_runtime[kept],
      score=self.score[kept],
    )


def judge(module: ScoredModule, ks: Sequence[int]) -> metrics.ModuleMetrics:
  """Computes the metrics of a module's measured configs."""
  measured = module.measured()
  return metrics.evaluate_module(module.module_id, measured.relative_runtime, measured.score, ks=ks)


@dataclasses.dataclass(frozen=True)
class Scorer:
  """A model as a function that is traced once; made by `make_scorer`.

  Attributes:
    function: function from `replicas` GraphTensors to as many scores, float32 [B, CHUNK] each.
    replicas: number of batches that are scored at a time, each on its own device.
    static_shapes: whether the batches of a split must be padded to one shape.
  """

  function: Callable[..., Sequence[tf.Tensor]]
  replicas: int
  static_shapes: bool

  def __call__(self, graphs: Sequence[tfgnn.GraphTensor]) -> list[np.ndarray]:
    """Scores 1 to `replicas` batches; returns float32 [B, CHUNK] for each."""
    repeated = [graphs[-1]] * (self.replicas - len(graphs))
    scores = self.function(*graphs, *repeated)
    arrays = [replica_scores.numpy() for replica_scores in scores]
    return arrays[: len(graphs)]


def make_scorer(
  model: tf.keras.Model,
  kind: str,
  *,
  num_extra: int = 0,
  strategy: tf.distribute.Strategy | None = None,
  static_shapes: bool = False,
) -> Scorer:
  """Makes a scorer.

  Args:
    model: the model to score with, see `baselines.models`.
    kind: 'tile' or 'layout'.
    num_extra: number of columns of extra features that the model takes.
    strategy: the strategy under which the model was made, to use all its devices; None: the device
      that TensorFlow chooses.
    static_shapes: whether to pad the batches of a split to one shape, and to compile the model for
      it with XLA. If not, the model is traced for batches of any size.
  """
  # Each worker of a cluster scores everything on its own devices.
  replicas = 1 if strategy is None else len(strategy.extended.worker_devices)
  compiled = tf.function(model, jit_compile=static_shapes, autograph=False)

  # If `strategy.run` were given `compiled` itself, MirroredStrategy would compile all replicas as
  # one program.
  def score(graph: tfgnn.GraphTensor) -> tf.Tensor:
    return compiled(graph)

  def function(*graphs: tfgnn.GraphTensor) -> Sequence[tf.Tensor]:
    if strategy is None:
      return [score(graph) for graph in graphs]
    values = strategy.experimental_distribute_values_from_function(
      lambda context: graphs[context.replica_id_in_sync_group % replicas]
    )
    return strategy.experimental_local_results(strategy.run(score, args=(values,)))

  signature = None if static_shapes else [_any_batch(kind, num_extra)] * replicas
  # AutoGraph would take seconds to convert all layers.
  unconverted = tf.autograph.experimental.do_not_convert(function)
  return Scorer(tf.function(unconverted, input_signature=signature), replicas, static_shapes)


@functools.cache
def _any_batch(kind: str, num_extra: int) -> tfgnn.GraphTensorSpec:
  """Returns the spec that batches of any size satisfy. The result is cached: it takes seconds."""
  smallest = module_lib.smallest_module(kind, num_extra=num_extra)
  dataset = batching.of_module(smallest, configs_per_module=CHUNK)
  return loading.batch(dataset, 1, drop_remainder=False).element_spec


def score_split(
  scorer: Scorer, directory: directory_lib.DatasetDirectory, split: str
) -> Iterator[ScoredModule]:
  """Scores every config of every module of a split.

  Raises:
    InputError: the split is missing or damaged, or a score is not finite.
  """
  with directory_lib.damage_explained(directory):
    batches = _split_batches(directory, split, static_shapes=scorer.static_shapes)
    yield from _score(scorer, batches)


# A pipeline takes seconds to make, and training scores a split after each epoch.
@functools.lru_cache(maxsize=4)
def _split_batches(
  directory: directory_lib.DatasetDirectory, split: str, *, static_shapes: bool
) -> tf.data.Dataset:
  shards = directory.split(split)
  mean_ops = shards.total_sizes['ops'] / max(shards.records, 1)
  batch_size = max(1, int(_OPS_PER_BATCH / max(mean_ops, 1)))
  options = batching.BatchOptions(
    batch_size=batch_size,
    configs_per_module=CHUNK,
    shapes=1 if static_shapes else None,
  )
  return batching.batches(directory, split, options, epochs=1, chunked=True, with_ids=True)


def score_module(scorer: Scorer, module: module_lib.Module) -> ScoredModule:
  """Scores every config of one module.

  Raises:
    InputError: the module has no config, or a score is not finite.
  """
  if not module.num_configs:
    raise errors.InputError(
      'no config to score',
      where=module.module_id,
      found='a program without configs',
      expected='at least one config',
    )
  batches = batching.of_module(module, configs_per_module=CHUNK, with_ids=True)
  (scored,) = _score(scorer, batches)
  return scored


def _score(scorer: Scorer, batches: tf.data.Dataset) -> Iterator[ScoredModule]:
  collected = _collect(scorer, batches)
  for module_id in sorted(collected):
    arrays = {name: np.concatenate(parts) for name, parts in collected[module_id].items()}
    # The configs of a module may come from several records, in any order.
    order = np.argsort(arrays['config_id'], kind='stable')
    arrays = {name: array[order] for name, array in arrays.items()}
    name = module_id.decode()
    is_finite = np.isfinite(arrays['score'])
    if not is_finite.all():
      raise errors.InputError(
        'score not finite',
        where=f'module {name}',
        found=arrays['score'][~is_finite][0],
        fix='train again, with a lower learning rate',
      )
    relative_runtime = module_lib.relative_runtime(
      arrays['config_runtime'], arrays.get('config_runtime_normalizer')
    )
    yield ScoredModule(
      module_id=name,
      config_id=arrays['config_id'],
      runtime=arrays['config_runtime'],
      score=arrays['score'],
      relative_runtime=relative_runtime,
    )


def _collect(scorer: Scorer, batches: tf.data.Dataset) -> dict[bytes, dict[str, list[np.ndarray]]]:
  """Scores batches; returns the pieces of each array of a module, by module id and array name."""
  columns = ('config_id', 'config_runtime', 'config_runtime_normalizer')
  collected: dict[bytes, dict[str, list[np.ndarray]]] = collections.defaultdict(
    lambda: collections.defaultdict(list)
  )
  iterator = iter(batches)
  while graphs := list(itertools.islice(iterator, scorer.replicas)):
    scores = scorer([loading.without_strings(graph) for graph in graphs])
    for graph, score in zip(graphs, scores, strict=True):
      context = graph.context.features
      values = {name: context[name].numpy() for name in columns if name in context}
      values['score'] = score
      for i, module_id in enumerate(context['module_id'].numpy()):
        is_real = values['config_id'][i] != loading.PADDING
        if not is_real.any():  # The component is padding.
          continue
        for name, value in values.items():
          collected[module_id][name].append(value[i][is_real])
  return collected
