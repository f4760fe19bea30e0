"""Scores of all configs of modules, from a dataset directory or from a `Module`: what evaluation and ranking share."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses

import numpy as np
import tensorflow as tf
import tensorflow_gnn as tfgnn

from tpu_graphs import datasets
from tpu_graphs import errors
from tpu_graphs import metrics
from tpu_graphs import module as module_lib

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
    """Indices of the configs, predicted fastest first; equal scores keep their order in the source. int64 [C]."""
    return np.argsort(self.score, kind='stable')

  @property
  def is_measured(self) -> bool:
    """Whether any config has a runtime."""
    return bool((self.runtime != module_lib.UNMEASURED).any())

  def measured(self) -> ScoredModule:
    """The same module with its measured configs only."""
    kept = self.runtime != module_lib.UNMEASURED
    return dataclasses.replace(self, **{name: getattr(self, name)[kept]
                                        for name in ('config_id', 'runtime', 'relative_runtime', 'score')})


def judge(module: ScoredModule, ks: Sequence[int]) -> metrics.ModuleMetrics:
  """The metrics of a module's measured configs."""
  measured = module.measured()
  return metrics.evaluate_module(module.module_id, measured.relative_runtime, measured.score, ks=ks)


Scorer = Callable[[tfgnn.GraphTensor], tf.Tensor]


def make_scorer(model: tf.keras.Model, kind: str, *, num_extra: int = 0) -> Scorer:
  """`model` as a tf.function that is traced once for batches of any size; GraphTensor -> float32 [B, CHUNK].

  Args:
    model: see `baselines.models`.
    kind: 'tile' or 'layout'.
    num_extra: number of columns of extra features that it takes.
  """
  smallest = datasets.smallest_module(kind, num_extra=num_extra)
  graphs = datasets.of_module(smallest, configs_per_module=CHUNK).map(datasets.without_strings)
  return tf.function(model, input_signature=[datasets.batch(graphs, 1, drop_remainder=False).element_spec])


def score_split(scorer: Scorer, directory: datasets.DatasetDirectory, split: str) -> Iterator[ScoredModule]:
  """Scores every config of every module of a split.

  Raises:
    InputError: the split is missing or damaged, or a score is NaN.
  """
  shards = directory.split(split)
  mean_ops = shards.total_sizes['ops'] / max(shards.records, 1)
  graphs = datasets.load(directory, split, configs_per_module=CHUNK, chunked=True)
  with datasets.damage_explained(directory):
    yield from _score(scorer, graphs, batch_size=max(1, int(_OPS_PER_BATCH / max(mean_ops, 1))))


def score_module(scorer: Scorer, module: module_lib.Module) -> ScoredModule:
  """Scores every config of one module.

  Raises:
    InputError: it has no config, or a score is NaN.
  """
  if not module.num_configs:
    raise errors.InputError('no config to score', where=module.module_id, found='a program without configs',
                            expected='at least one config')
  graphs = datasets.of_module(module, configs_per_module=CHUNK)
  (scored,) = _score(scorer, graphs, batch_size=1)
  return scored


def _score(scorer: Scorer, graphs: tf.data.Dataset, *, batch_size: int) -> Iterator[ScoredModule]:
  columns = ('config_id', 'config_runtime', 'config_runtime_normalizer')
  collected: dict[bytes, dict[str, list[np.ndarray]]] = collections.defaultdict(lambda: collections.defaultdict(list))
  for graph in datasets.batch(graphs, batch_size, drop_remainder=False).prefetch(tf.data.AUTOTUNE):
    context = graph.context.features
    values = {name: context[name].numpy() for name in columns if name in context}
    values['score'] = scorer(datasets.without_strings(graph)).numpy()
    for i, module_id in enumerate(context['module_id'].numpy()):
      real = values['config_id'][i] != datasets.PADDING
      for name, value in values.items():
        collected[module_id][name].append(value[i][real])
  for module_id in sorted(collected):
    arrays = {name: np.concatenate(parts) for name, parts in collected[module_id].items()}
    order = np.argsort(arrays['config_id'], kind='stable')  # Several records share a module's configs out.
    arrays = {name: array[order] for name, array in arrays.items()}
    name = module_id.decode()
    if not np.isfinite(arrays['score']).all():
      raise errors.InputError('score not finite', where=f'module {name}', found=arrays['score'][
          ~np.isfinite(arrays['score'])][0], fix='train again, with a lower learning rate')
    yield ScoredModule(
        module_id=name, config_id=arrays['config_id'], runtime=arrays['config_runtime'], score=arrays['score'],
        relative_runtime=module_lib.relative_runtime(arrays['config_runtime'],
                                                     arrays.get('config_runtime_normalizer')))
