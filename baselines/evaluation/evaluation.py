"""What an evaluation knows of each module: how well its configs are ranked, and how simple
rankings would do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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

# The k of the curves of top-k errors; those of `metrics.TOP_KS` are among them.
CURVE_KS = (
  1,
  2,
  3,
  4,
  5,
  6,
  7,
  8,
  9,
  10,
  12,
  15,
  20,
  25,
  30,
  40,
  50,
  60,
  80,
  100,
  150,
  200,
  300,
  500,
  700,
  1000,
)
MAX_POINTS = 2000  # Configs of a module that are kept.
TASK_BYTES = 64 << 20  # Of shards that are scored together: to start takes a second.
VIEWS = (
  'all',
  'listed',
)  # Which configs are judged: all that are measured, or those that a file lists.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
  """How well configs of a module are ranked.

  Attributes:
    metrics: of the model, for the k of `metrics.TOP_KS`.
    curve: k of `CURVE_KS` -> top-k error of the model; NaN where undefined.
    random: k of `CURVE_KS` -> what the top-k error of a random ranking is on average; NaN where
      undefined.
    default: how much slower the default config is than the best, as a top-k error; below 0 where
      it is faster than all that were measured. NaN where undefined or not known: only tile data
        tells its time.
  """

  metrics: metrics.ModuleMetrics
  curve: Mapping[int, float]
  random: Mapping[int, float]
  default: float

  @property
  def is_defined(self) -> bool:
    """Whether any two runtimes differ."""
    return self.metrics.pairs.comparable > 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
  """What is kept of a scored module.

  Attributes:
    module_id: its name.
    num_configs: number of its configs, measured or not.
    verdicts: view -> verdict; a view without measured configs is missing.
    slowdown: float64 [P], P <= MAX_POINTS + 1, of measured configs: relative runtime / that of
      the fastest. They are evenly spread over the order of the scores, and the fastest is among
      them.
    score: float32 [P], of the same, ascending.
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
    label: what it is called beside others.
    split: 'train', 'valid' or 'test'.
    folder: where the result lies.
    modules: all of the split, sorted by name.
    num_ops: module -> number of ops.
    metrics: the content of `metrics.json`.
  """

  run: runs.Run
  label: str
  split: str
  folder: str
  modules: Sequence[Judged]
  num_ops: Mapping[str, int]
  metrics: Mapping[str, Any]

  def verdicts(self, view: str) -> list[Verdict]:
    """Those of the modules that have one in this view."""
    return [module.verdicts[view] for module in self.modules if view in module.verdicts]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """A run with another one on a split.

  Attributes:
    split: 'train', 'valid' or 'test'.
    view: which configs, one of `VIEWS`.
    label: of the run.
    base: label of the run that it is compared with.
    paired: differences are the run - the other.
  """

  split: str
  view: str
  label: str
  base: str
  paired: intervals.PairedComparison


def tasks(
  directory: directory_lib.DatasetDirectory, split: str
) -> Iterator[directory_lib.DatasetDirectory]:
  """Shares out the shards of a split, some `TASK_BYTES` at a time: yields the directory as if it
  had these only.

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
  return dataclasses.replace(
    directory, manifest=dataclasses.replace(directory.manifest, splits=splits)
  )


def score_modules(
  scorer: scoring.Scorer, directory: directory_lib.DatasetDirectory, split: str
) -> Iterator[scoring.ScoredModule]:
  """Scores a split task by task, as workers do, so that scores are the same to the last bit;
  sorted by name.

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
  """The module whose configs `parts` share out, in any order; its configs are sorted by
  `config_id`.
  """
  names = [
    field.name for field in dataclasses.fields(scoring.ScoredModule) if field.name != 'module_id'
  ]
  arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
  order = np.argsort(arrays['config_id'], kind='stable')
  return scoring.ScoredModule(
    module_id=parts[0].module_id, **{name: array[order] for name, array in arrays.items()}
  )


def judge(
  module: scoring.ScoredModule, kind: str, indices: config_indices_lib.ConfigIndices | None = None
) -> Judged:
  """Judges a module.

  Args:
    module: with all of its configs.
    kind: 'tile' or 'layout'.
    indices: the configs of the view 'listed', where they are wanted.

  Raises:
    InputError: the module lacks a config of `indices`.
  """
  measured = module.measured()
  views = {'all': measured}
  if indices is not None and module.module_id in indices.positions:
    rows = indices.rows(module.module_id, module.config_id)
    views['listed'] = dataclasses.replace(
      module,
      **{
        name: getattr(module, name)[rows]
        for name in ('config_id', 'runtime', 'relative_runtime', 'score')
      },
    ).measured()
  verdicts = {
    view: _verdict(configs, kind) for view, configs in views.items() if configs.config_id.size
  }
  order = measured.order
  if order.size:
    spread = np.linspace(0, order.size - 1, min(order.size, MAX_POINTS)).round().astype(np.int64)
    fastest = np.argmin(measured.relative_runtime[order])
    order = order[np.union1d(spread, fastest)]
  runtime = measured.relative_runtime[order]
  return Judged(
    module_id=module.module_id,
    num_configs=module.config_id.size,
    verdicts=verdicts,
    slowdown=runtime / runtime.min() if order.size else np.zeros(0),
    score=measured.score[order],
  )


def _verdict(module: scoring.ScoredModule, kind: str) -> Verdict:
  runtimes = module.relative_runtime
  judged = metrics.evaluate_module(module.module_id, runtimes, module.score, ks=CURVE_KS)
  default = math.nan
  # Where all normalizers are 1 ns there is no default config; the public test files fill them in
  # so.
  if kind == 'tile' and judged.pairs.comparable and (runtimes != module.runtime).any():
    default = float(1 / runtimes.min() - 1)
  return Verdict(
    metrics=dataclasses.replace(
      judged, top_k_error={k: judged.top_k_error[k] for k in metrics.TOP_KS[kind]}
    ),
    curve=judged.top_k_error,
    random=random_top_k_errors(runtimes, CURVE_KS),
    default=default,
  )


def random_top_k_errors(runtimes: np.ndarray, ks: Sequence[int]) -> dict[int, float]:
  """The mean of the top-k error over all orders of the configs.

  Args:
    runtimes: int64 or float64 [C], > 0.
    ks: k >= 1.

  Returns:
    k -> error; NaN where no two runtimes differ.
  """
  c = runtimes.size
  if not c or runtimes.min() == runtimes.max():
    return dict.fromkeys(ks, math.nan)
  ascending = np.sort(runtimes)
  error = (ascending - ascending[0]) / ascending[0]
  means = {}
  for k in ks:
    k_of_c = min(k, c)
    # Chance that the fastest of k is the i-th of all: (C - 1 - i choose k - 1) / (C choose k), for
    # i = 0 to C - k.
    i = np.arange(c - k_of_c)
    chance = k_of_c / c * np.cumprod(np.append(1.0, (c - i - k_of_c) / (c - 1 - i)))
    means[k] = float(chance @ error[: chance.size])
  return means


def summarize(verdicts: Sequence[Verdict], kind: str) -> dict[str, Any]:
  """The means over modules, fit for JSON.

  Returns:
    'model', 'random', 'default', 'oracle': as `metrics.summarize` gives them, for the model, for
    a random ranking on
      average, for trying nothing but the default config (which has top-k errors alone), and for
      the best ranking.
    'intervals': metric -> `intervals.Interval` of the model as a dict.
    All of them None without verdicts.
  """
  if not verdicts:
    return dict.fromkeys(('model', 'intervals', 'random', 'default', 'oracle'))
  results = [verdict.metrics for verdict in verdicts]
  model = metrics.summarize(results)
  top_names = {f'top_{k}_error': k for k in metrics.TOP_KS[kind]}

  def simple(opa: float, tau: float, of_verdict) -> dict[str, Any]:
    columns = {
      'opa': [opa if verdict.is_defined else math.nan for verdict in verdicts],
      'kendall_tau': [tau if verdict.is_defined else math.nan for verdict in verdicts],
      **{name: [of_verdict(verdict, k) for verdict in verdicts] for name, k in top_names.items()},
    }
    means = {name: mean(column) for name, column in columns.items()}
    return {
      **model,
      **means,
      'opa_pooled': means['opa'],
      'undefined': {name: sum(map(math.isnan, column)) for name, column in columns.items()},
    }

  return {
    'model': model,
    'intervals': {
      name: dataclasses.asdict(interval)
      for name, interval in intervals.of_table(module_table.ModuleTable.of(results)).items()
    },
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
  """The content of `metrics.json`: the means over `modules`, all of a split, and what they are
  of.
  """
  verdicts = {
    view: [module.verdicts[view] for module in modules if view in module.verdicts] for view in VIEWS
  }
  listed = None
  if indices is not None:
    names = [module.module_id for module in modules if module.module_id in indices.positions]
    repeated = indices.repeated()
    listed = {
      'path': indices.path,
      'modules': len(names),
      'positions': sum(indices.positions[name].size for name in names),
      'repeated_positions': sum(repeated.get(name, 0) for name in names),
      **summarize(verdicts['listed'], run.kind),
    }
  return {
    'run': run.path,
    'data': directory.path,
    'split': split,
    'collection': directory.manifest.collection,
    'model_name': run.options.name,
    'unmeasured_modules': len(modules) - len(verdicts['all']),
    **summarize(verdicts['all'], run.kind),
    'listed': listed,
  }


def mean(values: Iterable[float]) -> float | None:
  """The mean of the values that are not NaN; None without any."""
  defined = [value for value in values if not math.isnan(value)]
  return math.fsum(defined) / len(defined) if defined else None


def num_ops(directory: directory_lib.DatasetDirectory, split: str) -> dict[str, int]:
  """Module -> its number of ops, read without decoding anything else.

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
