"""Judged modules: how well their configs are ranked, by a model and by simple rankings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import math
import os
from typing import Any

import numpy as np
import tensorflow as tf

from baselines import scoring
from baselines.training import runs
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.metrics import config_indices as config_indices_lib
from tpu_graphs.metrics import intervals
from tpu_graphs.metrics import metrics
from tpu_graphs.metrics import module_table

# Each k of the curves of top-k errors. The ks of `metrics.TOP_KS` must be among them.
CURVE_KS = (*range(1, 11), 12, 15, 20, 25, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 700, 1000)
# Number of configs of a module that are kept.
MAX_POINTS = 2000
# Bytes of shards that are scored as one task, since the start of a task takes a second.
TASK_BYTES = 64 << 20
# The configs that are judged: all measured configs, or the measured configs that a file lists.
VIEWS = ('all', 'listed')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
  """The quality of a ranking of a module's configs.

  Attributes:
    metrics: metrics of the model, for each k of `metrics.TOP_KS`.
    curve: k of `CURVE_KS` -> top-k error of the model; NaN where undefined.
    random: k of `CURVE_KS` -> mean top-k error of a random ranking; NaN where undefined.
    default: how much slower the default config is than the best, as a top-k error; below 0 where
      the default config is faster than all measured configs. NaN where undefined or where the
      runtime of the default config is not known: only tile data holds it.
  """

  metrics: metrics.ModuleMetrics
  curve: Mapping[int, float]
  random: Mapping[int, float]
  default: float

  @property
  def is_defined(self) -> bool:
    """Returns whether any two runtimes differ."""
    return self.metrics.pairs.comparable > 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
  """A scored module, reduced to what results and reports show.

  Attributes:
    module_id: name of the module.
    num_configs: number of its configs, measured or not.
    verdicts: view -> verdict; a view without measured configs is missing.
    slowdown: relative runtime / relative runtime of the fastest, float64 [P], of P measured
      configs, P <= MAX_POINTS + 1. The configs are evenly spread over the order of the scores, and
      the fastest is among them.
    score: scores of the same configs, float32 [P], ascending.
  """

  module_id: str
  num_configs: int
  verdicts: Mapping[str, Verdict]
  slowdown: np.ndarray
  score: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Result:
  """A run on a split.

  Attributes:
    run: the run.
    label: name of the run, different from the names of the other runs.
    split: 'train', 'valid' or 'test'.
    folder: path of the folder that holds the result.
    modules: all modules of the split, sorted by name.
    num_ops: module -> number of ops.
    metrics: content of `metrics.json`.
  """

  run: runs.Run
  label: str
  split: str
  folder: str
  modules: Sequence[Judged]
  num_ops: Mapping[str, int]
  metrics: Mapping[str, Any]

  def verdicts(self, view: str) -> list[Verdict]:
    """Returns the verdicts in a view, of the modules that have one."""
    return _verdicts(self.modules, view)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """A comparison of two runs on a split.

  Attributes:
    split: 'train', 'valid' or 'test'.
    view: the configs that are judged, one of `VIEWS`.
    label: label of the run.
    base: label of the run that it is compared with.
    paired: the comparison; its differences are run - base.
  """

  split: str
  view: str
  label: str
  base: str
  paired: intervals.PairedComparison


def tasks(
  directory: directory_lib.DatasetDirectory, split: str
) -> Iterator[directory_lib.DatasetDirectory]:
  """Yields the directory once for each task, as if it had the shards of that task only.

  The shards of a split are shared out in order; a task ends once its shards reach `TASK_BYTES`.

  Raises:
    InputError: there is no such split.
  """
  shards: list[manifest_lib.Shard] = []
  for shard in directory.split(split).shards:
    shards.append(shard)
    if sum(shard.bytes for shard in shards) >= TASK_BYTES:
      yield _with_shards(directory, split, shards)
      shards = []
  if shards:
    yield _with_shards(directory, split, shards)


def _with_shards(
  directory: directory_lib.DatasetDirectory, split: str, shards: Sequence[manifest_lib.Shard]
) -> directory_lib.DatasetDirectory:
  splits = {split: manifest_lib.Split.of(shards)}
  manifest = dataclasses.replace(directory.manifest, splits=splits)
  return dataclasses.replace(directory, manifest=manifest)


def score_modules(
  scorer: scoring.Scorer, directory: directory_lib.DatasetDirectory, split: str
) -> Iterator[scoring.ScoredModule]:
  """Scores the modules of a split and yields them sorted by name.

  A split is scored task by task, as Beam workers do, so that scores are the same to the last bit.

  Raises:
    InputError: see `scoring.score_split`.
  """
  parts: dict[str, list[scoring.ScoredModule]] = {}
  for task in tasks(directory, split):
    for part in scoring.score_split(scorer, task, split):
      parts.setdefault(part.module_id, []).append(part)
  for module_id in sorted(parts):
    yield merge(parts.pop(module_id))


def merge(parts: Sequence[scoring.ScoredModule]) -> scoring.ScoredModule:
  """Merges parts of a module, given in any order, and sorts its configs by `config_id`."""
  fields = dataclasses.fields(scoring.ScoredModule)
  names = [field.name for field in fields if field.name != 'module_id']
  arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
  order = np.argsort(arrays['config_id'], kind='stable')
  ordered = {name: array[order] for name, array in arrays.items()}
  return scoring.ScoredModule(module_id=parts[0].module_id, **ordered)


def judge(
  module: scoring.ScoredModule, kind: str, indices: config_indices_lib.ConfigIndices | None = None
) -> Judged:
  """Judges a module.

  Args:
    module: the module with all of its configs.
    kind: 'tile' or 'layout'.
    indices: the configs of the view 'listed'; None: there is no such view.

  Raises:
    InputError: the module lacks a config of `indices`.
  """
  measured = module.measured()
  views = {'all': measured}
  if indices is not None and module.module_id in indices.positions:
    rows = indices.rows(module.module_id, module.config_id)
    listed = dataclasses.replace(
      module,
      config_id=module.config_id[rows],
      runtime=module.runtime[rows],
      relative_runtime=module.relative_runtime[rows],
      score=module.score[rows],
    )
    views['listed'] = listed.measured()
  verdicts = {
    view: _verdict(configs, kind) for view, configs in views.items() if configs.config_id.size
  }
  order = measured.order
  slowdown = np.zeros(0)
  if order.size:
    spread = np.linspace(0, order.size - 1, min(order.size, MAX_POINTS)).round().astype(np.int64)
    fastest = np.argmin(measured.relative_runtime[order])
    order = order[np.union1d(spread, fastest)]
    runtime = measured.relative_runtime[order]
    slowdown = runtime / runtime.min()
  return Judged(
    module_id=module.module_id,
    num_configs=module.config_id.size,
    verdicts=verdicts,
    slowdown=slowdown,
    score=measured.score[order],
  )


def _verdict(module: scoring.ScoredModule, kind: str) -> Verdict:
  runtimes = module.relative_runtime
  judged = metrics.evaluate_module(module.module_id, runtimes, module.score, ks=CURVE_KS)
  top_k_error = {k: judged.top_k_error[k] for k in metrics.TOP_KS[kind]}
  default = math.nan
  # If all normalizers are 1 ns, they are not the runtimes of a default config: the public test
  # files hold such placeholders.
  has_default = kind == 'tile' and (runtimes != module.runtime).any()
  if has_default and judged.pairs.comparable:
    default = float(1 / runtimes.min() - 1)
  return Verdict(
    metrics=dataclasses.replace(judged, top_k_error=top_k_error),
    curve=judged.top_k_error,
    random=random_top_k_errors(runtimes, CURVE_KS),
    default=default,
  )


def _verdicts(modules: Iterable[Judged], view: str) -> list[Verdict]:
  return [module.verdicts[view] for module in modules if view in module.verdicts]


def random_top_k_errors(runtimes: np.ndarray, ks: Sequence[int]) -> dict[int, float]:
  """Computes the mean of the top-k error over all orders of the configs.

  Args:
    runtimes: runtimes of the configs, int64 or float64 [C], > 0.
    ks: each k >= 1.

  Returns:
    k -> mean error; NaN where no two runtimes differ.
  """
  c = runtimes.size
  if not c or runtimes.min() == runtimes.max():
    return dict.fromkeys(ks, math.nan)
  ascending = np.sort(runtimes)
  error = (ascending - ascending[0]) / ascending[0]
  means = {}
  for k in ks:
    k_of_c = min(k, c)
    # The fastest of k configs is the i-th fastest of all with the probability
    # (C - 1 - i choose k - 1) / (C choose k), for i = 0 to C - k.
    i = np.arange(c - k_of_c)
    chance = k_of_c / c * np.cumprod(np.append(1.0, (c - i - k_of_c) / (c - 1 - i)))
    means[k] = float(chance @ error[: chance.size])
  return means


def summarize(verdicts: Sequence[Verdict], kind: str) -> dict[str, Any]:
  """Computes the means over modules, fit for JSON.

  Returns:
    'model', 'random', 'default', 'oracle': means in the form of `metrics.summarize`: of the model;
      of a random ranking, on average; of the default config alone, which has top-k errors only; of
      the best ranking.
    'intervals': metric -> `intervals.Interval` of the model as a dict.
    Each of them is None if there are no verdicts.
  """
  if not verdicts:
    return dict.fromkeys(('model', 'intervals', 'random', 'default', 'oracle'))
  results = [verdict.metrics for verdict in verdicts]
  model = metrics.summarize(results)
  model_intervals = intervals.of_table(module_table.ModuleTable.of(results))

  def simple(
    opa: float, tau: float, top_k_error: Callable[[Verdict, int], float]
  ) -> dict[str, Any]:
    columns = {
      'opa': [opa if verdict.is_defined else math.nan for verdict in verdicts],
      'kendall_tau': [tau if verdict.is_defined else math.nan for verdict in verdicts],
    }
    for k in metrics.TOP_KS[kind]:
      columns[f'top_{k}_error'] = [top_k_error(verdict, k) for verdict in verdicts]
    means = {name: mean(column) for name, column in columns.items()}
    undefined = {name: sum(map(math.isnan, column)) for name, column in columns.items()}
    return {**model, **means, 'opa_pooled': means['opa'], 'undefined': undefined}

  return {
    'model': model,
    'intervals': {name: dataclasses.asdict(interval) for name, interval in model_intervals.items()},
    'random': simple(0.5, 0.0, lambda verdict, k: verdict.random[k]),
    'default': simple(math.nan, math.nan, lambda verdict, _: verdict.default),
    'oracle': simple(1.0, 1.0, lambda verdict, _: 0.0 if verdict.is_defined else math.nan),
  }


def metrics_json(
  run: runs.Run,
  directory: directory_lib.DatasetDirectory,
  split: str,
  modules: Sequence[Judged],
  indices: config_indices_lib.ConfigIndices | None = None,
) -> dict[str, Any]:
  """Makes the content of `metrics.json` from all modules of a split.

  Returns:
    Names of the run and its data, counts, and the means of `summarize`. 'listed' holds the path,
    counts and means of the configs of `indices`, or None.
  """
  judged = _verdicts(modules, 'all')
  listed = None
  if indices is not None:
    names = [module.module_id for module in modules if module.module_id in indices.positions]
    repeated = indices.repeated()
    listed = {
      'path': indices.path,
      'modules': len(names),
      'positions': sum(indices.positions[name].size for name in names),
      'repeated_positions': sum(repeated.get(name, 0) for name in names),
      **summarize(_verdicts(modules, 'listed'), run.kind),
    }
  return {
    'run': run.path,
    'data': directory.path,
    'split': split,
    'collection': directory.manifest.collection,
    'model_name': run.options.name,
    'unmeasured_modules': len(modules) - len(judged),
    **summarize(judged, run.kind),
    'listed': listed,
  }


def mean(values: Iterable[float]) -> float | None:
  """Computes the mean of the values that are not NaN; None if there are none."""
  defined = [value for value in values if not math.isnan(value)]
  return math.fsum(defined) / len(defined) if defined else None


def num_ops(directory: directory_lib.DatasetDirectory, split: str) -> dict[str, int]:
  """Reads the number of ops of each module, by module, and decodes nothing else.

  Raises:
    InputError: the split is missing or damaged.
  """
  spec = {
    'context/module_id': tf.io.FixedLenFeature([], tf.string),
    'nodes/op.#size': tf.io.FixedLenFeature([], tf.int64),
  }
  paths = [os.path.join(directory.path, shard.name) for shard in directory.split(split).shards]
  records = tf.data.TFRecordDataset(paths).map(lambda data: tf.io.parse_single_example(data, spec))
  with directory_lib.damage_explained(directory):
    return {
      record['context/module_id'].decode(): int(record['nodes/op.#size'])
      for record in records.as_numpy_iterator()
    }
