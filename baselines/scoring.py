"""Scores of all configs of modules, from a dataset directory or from a `Module`: what evaluation
and ranking share.
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

CHUNK = 64  # Configs that are scored at a time.
_OPS_PER_BATCH = 4096  # Small modules are scored several at a time, up to about so many ops.


@dataclasses.dataclass(frozen=True)
class ScoredModule:
  """The configs of a module with what a model says of them.

  Attributes:
    module_id: of the module.
    config_id: int64 [C].
    runtime: int64 [C], ns, -1 where not measured.
    relative_runtime: [C], what metrics judge by; see `module.relative_runtime`.
    score: float32 [C], lower = predicted faster.
  """

  module_id: str
  config_id: np.ndarray
  runtime: np.ndarray
  relative_runtime: np.ndarray
  score: np.ndarray

  @property
  def order(self) -> np.ndarray:
    """Indices of the configs, predicted fastest first; equal scores keep their order in the
    source. int64 [C].
    """
    return np.argsort(self.score, kind='stable')

  @property
  def is_measured(self) -> bool:
    """Whether any config has a runtime."""
    return bool((self.runtime != module_lib.UNMEASURED).any())

  def measured(self) -> ScoredModule:
    """The same module with its measured configs only."""
    kept = self.runtime != module_lib.UNMEASURED
    return dataclasses.replace(
      self,
      **{
        name: getattr(self, name)[kept]
        for name in ('config_id', 'runtime', 'relative_runtime', 'score')
      },
    )


def judge(module: ScoredModule, ks: Sequence[int]) -> metrics.ModuleMetrics:
  """The metrics of a module's measured configs."""
  measured = module.measured()
  return metrics.evaluate_module(module.module_id, measured.relative_runtime, measured.score, ks=ks)


@dataclasses.dataclass(frozen=True)
class Scorer:
  """A model as a function that is traced once; `make_scorer` makes it.

  Attributes:
    function: `replicas` GraphTensors -> as many float32 [B, CHUNK].
    replicas: number of batches that are scored at a time, on a device each.
    static_shapes: whether it wants the batches of a split padded to one shape.
  """

  function: Callable[..., Sequence[tf.Tensor]]
  replicas: int
  static_shapes: bool

  def __call__(self, graphs: Sequence[tfgnn.GraphTensor]) -> list[np.ndarray]:
    """The scores of 1 to `replicas` batches, float32 [B, CHUNK] each."""
    filled = [*graphs, *[graphs[-1]] * (self.replicas - len(graphs))]
    return [scores.numpy() for scores in self.function(*filled)][: len(graphs)]


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
    model: see `baselines.models`.
    kind: 'tile' or 'layout'.
    num_extra: number of columns of extra features that it takes.
    strategy: under which the model was made, to use all its devices; None: where TensorFlow puts
      it.
    static_shapes: pad the batches of a split to one shape, and compile the model for it with
      XLA; else it is traced for batches of any size.
  """
  # Each worker of a cluster scores everything on its own devices.
  replicas = 1 if strategy is None else len(strategy.extended.worker_devices)
  compiled = tf.function(model, jit_compile=static_shapes, autograph=False)

  def score(
    graph: tfgnn.GraphTensor,
  ) -> tf.Tensor:  # Given `compiled`, MirroredStrategy compiles all replicas as one.
    return compiled(graph)

  def function(*graphs: tfgnn.GraphTensor) -> Sequence[tf.Tensor]:
    if strategy is None:
      return [score(graph) for graph in graphs]
    values = strategy.experimental_distribute_values_from_function(
      lambda context: graphs[context.replica_id_in_sync_group % replicas]
    )
    return strategy.experimental_local_results(strategy.run(score, args=(values,)))

  signature = None if static_shapes else [_any_batch(kind, num_extra)] * replicas
  unconverted = tf.autograph.experimental.do_not_convert(
    function
  )  # Converting all layers would take seconds.
  return Scorer(tf.function(unconverted, input_signature=signature), replicas, static_shapes)


@functools.cache  # It takes seconds to find.
def _any_batch(kind: str, num_extra: int) -> tfgnn.GraphTensorSpec:
  """What batches of any size have in common."""
  smallest = batching.of_module(
    module_lib.smallest_module(kind, num_extra=num_extra), configs_per_module=CHUNK
  )
  return loading.batch(smallest, 1, drop_remainder=False).element_spec


def score_split(
  scorer: Scorer, directory: directory_lib.DatasetDirectory, split: str
) -> Iterator[ScoredModule]:
  """Scores every config of every module of a split.

  Raises:
    InputError: the split is missing or damaged, or a score is NaN.
  """
  with directory_lib.damage_explained(directory):
    yield from _score(scorer, _split_batches(directory, split, static_shapes=scorer.static_shapes))


@functools.lru_cache(
  maxsize=4
)  # To make a pipeline takes seconds, and training scores a split after each epoch.
def _split_batches(
  directory: directory_lib.DatasetDirectory, split: str, *, static_shapes: bool
) -> tf.data.Dataset:
  shards = directory.split(split)
  mean_ops = shards.total_sizes['ops'] / max(shards.records, 1)
  options = batching.BatchOptions(
    batch_size=max(1, int(_OPS_PER_BATCH / max(mean_ops, 1))),
    configs_per_module=CHUNK,
    shapes=1 if static_shapes else None,
  )
  return batching.batches(directory, split, options, epochs=1, chunked=True, with_ids=True)


def score_module(scorer: Scorer, module: module_lib.Module) -> ScoredModule:
  """Scores every config of one module.

  Raises:
    InputError: it has no config, or a score is NaN.
  """
  if not module.num_configs:
    raise errors.InputError(
      'no config to score',
      where=module.module_id,
      found='a program without configs',
      expected='at least one config',
    )
  (scored,) = _score(scorer, batching.of_module(module, configs_per_module=CHUNK, with_ids=True))
  return scored


def _score(scorer: Scorer, batches: tf.data.Dataset) -> Iterator[ScoredModule]:
  columns = ('config_id', 'config_runtime', 'config_runtime_normalizer')
  collected: dict[bytes, dict[str, list[np.ndarray]]] = collections.defaultdict(
    lambda: collections.defaultdict(list)
  )
  iterator = iter(batches)
  while graphs := list(itertools.islice(iterator, scorer.replicas)):
    scores = scorer([loading.without_strings(graph) for graph in graphs])
    for graph, score in zip(graphs, scores, strict=True):
      context = graph.context.features
      values = {
        'score': score,
        **{name: context[name].numpy() for name in columns if name in context},
      }
      for i, module_id in enumerate(context['module_id'].numpy()):
        real = values['config_id'][i] != loading.PADDING
        if not real.any():  # A component of padding.
          continue
        for name, value in values.items():
          collected[module_id][name].append(value[i][real])
  for module_id in sorted(collected):
    arrays = {name: np.concatenate(parts) for name, parts in collected[module_id].items()}
    order = np.argsort(
      arrays['config_id'], kind='stable'
    )  # Several records share a module's configs out.
    arrays = {name: array[order] for name, array in arrays.items()}
    name = module_id.decode()
    if not np.isfinite(arrays['score']).all():
      raise errors.InputError(
        'score not finite',
        where=f'module {name}',
        found=arrays['score'][~np.isfinite(arrays['score'])][0],
        fix='train again, with a lower learning rate',
      )
    yield ScoredModule(
      module_id=name,
      config_id=arrays['config_id'],
      runtime=arrays['config_runtime'],
      score=arrays['score'],
      relative_runtime=module_lib.relative_runtime(
        arrays['config_runtime'], arrays.get('config_runtime_normalizer')
      ),
    )
