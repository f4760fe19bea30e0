"""Bootstrap confidence intervals of means over modules, and the paired comparison of two runs.

Modules are resampled, not configs: an interval estimates the metric on other modules of the same
kind. Intervals are bias-corrected and accelerated (BCa; Efron, Better bootstrap confidence
intervals, 1987), since metrics of modules are skewed: few are far off. They do not cover how
another training of the same model would turn out.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
import statistics

import numpy as np

from tpu_graphs import errors
from tpu_graphs.metrics import metrics
from tpu_graphs.metrics import module_table

MIN_MODULES = 3  # Fewer modules say nothing about other modules.
_BLOCK = 1 << 20  # Number of values that are drawn at a time.


@dataclasses.dataclass(frozen=True)
class BootstrapOptions:
  """The options of bootstrap intervals.

  Attributes:
    confidence: share of such intervals that hold the true mean, between 0 and 1.
    resamples: number of resamples.
    seed: seed of the resamples.
  """

  confidence: float = 0.95
  resamples: int = 10_000
  seed: int = 0

  def __post_init__(self):
    if not 0 < self.confidence < 1:
      raise errors.InputError(
        'number out of range',
        where='confidence',
        found=self.confidence,
        expected='more than 0, less than 1',
      )
    if self.resamples < 1:
      raise errors.InputError(
        'number out of range', where='resamples', found=self.resamples, expected='>= 1'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
  """A mean over modules and its confidence interval; `dataclasses.asdict` is fit for JSON.

  Attributes:
    mean: mean over the modules where the metric is defined; None if there are none.
    low: lower end; None for fewer modules than `MIN_MODULES`.
    high: upper end; None for fewer modules than `MIN_MODULES`.
    num_modules: number of modules where the metric is defined.
    undefined: number of modules where the metric is undefined, which are left out.
  """

  mean: float | None
  low: float | None
  high: float | None
  num_modules: int
  undefined: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """One metric of two runs, over the modules where it is defined for both runs.

  Attributes:
    wins: number of modules on which the first run is better.
    losses: number of modules on which the second run is better.
    ties: number of modules on which both runs are equal.
    difference: mean of first - second over the modules, and its interval. For errors, below 0 is
      better.
    p_value: p-value of the sign test: how likely wins and losses are at least as unequal if both
      runs were equally good; None where there are neither.
  """

  wins: int
  losses: int
  ties: int
  difference: Interval
  p_value: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedComparison:
  """Two runs on the same modules.

  Attributes:
    num_modules: number of modules that both runs have.
    only_first: modules that only the first run has, which are left out.
    only_second: modules that only the second run has, which are left out.
    metrics: name -> comparison.
  """

  num_modules: int
  only_first: tuple[str, ...]
  only_second: tuple[str, ...]
  metrics: Mapping[str, Comparison]


def of_mean(values: np.ndarray, options: BootstrapOptions = BootstrapOptions()) -> Interval:
  """Returns the mean of a metric over modules and its interval.

  Args:
    values: float64 [M], the metric of each module; NaN where undefined.
    options: how the interval is made.
  """
  defined = values[~np.isnan(values)]
  n = defined.size
  mean = math.fsum(defined) / n if n else None
  low = high = None
  if mean is not None and n >= MIN_MODULES:
    ends = mean + _bca(defined - mean, options)
    # A mean lies within the range of its values, except for rounding.
    low, high = np.clip(ends, defined.min(), defined.max()).tolist()
  return Interval(mean=mean, low=low, high=high, num_modules=n, undefined=values.size - n)


def of_table(
  table: module_table.ModuleTable, options: BootstrapOptions = BootstrapOptions()
) -> dict[str, Interval]:
  """Returns the mean of each metric over the modules and its interval."""
  return {name: of_mean(column, options) for name, column in table.values.items()}


def compare(
  first: module_table.ModuleTable,
  second: module_table.ModuleTable,
  options: BootstrapOptions = BootstrapOptions(),
) -> PairedComparison:
  """Compares two runs over the modules that both have.

  Raises:
    InputError: no module is in both, the metrics differ, or the runs judged different numbers of
      configs of a module.
  """
  if first.values.keys() != second.values.keys():
    raise errors.InputError(
      'different metrics',
      found=', '.join(second.values),
      expected=', '.join(first.values),
      fix='evaluate both runs in the same way',
    )
  rows_of_first = {module_id: row for row, module_id in enumerate(first.module_ids)}
  rows_of_second = {module_id: row for row, module_id in enumerate(second.module_ids)}
  common = sorted(rows_of_first.keys() & rows_of_second.keys())
  if not common:
    raise errors.InputError(
      'no module in common',
      found=errors.some(second.module_ids),
      expected=errors.some(first.module_ids),
      fix='evaluate both runs on the same split',
    )
  first = first.select([rows_of_first[module_id] for module_id in common])
  second = second.select([rows_of_second[module_id] for module_id in common])
  differs = first.num_configs != second.num_configs
  if differs.any():
    row = int(np.argmax(differs))
    raise errors.InputError(
      'judged by other configs',
      where=common[row],
      found=f'{second.num_configs[row]} configs',
      expected=first.num_configs[row],
      fix='evaluate both runs with the same --config_indices',
    )
  comparisons = {
    name: _compare(column - second.values[name], metrics.higher_is_better(name), options)
    for name, column in first.values.items()
  }
  return PairedComparison(
    num_modules=len(common),
    only_first=tuple(sorted(rows_of_first.keys() - common)),
    only_second=tuple(sorted(rows_of_second.keys() - common)),
    metrics=comparisons,
  )


def sign_test(wins: int, losses: int) -> float | None:
  """Returns the two-sided p-value of the exact sign test; None without wins and losses.

  Ties are left out.
  """
  n = wins + losses
  if not n:
    return None
  # `ways` counts the outcomes with i of the rarer result, `total` those with at most i.
  ways = total = 1
  for i in range(min(wins, losses)):
    ways = ways * (n - i) // (i + 1)
    total += ways
  return min(1.0, 2 * total / 2**n)


def _compare(
  difference: np.ndarray, higher_is_better: bool, options: BootstrapOptions
) -> Comparison:
  above, below = int((difference > 0).sum()), int((difference < 0).sum())
  wins, losses = (above, below) if higher_is_better else (below, above)
  return Comparison(
    wins=wins,
    losses=losses,
    ties=int((difference == 0).sum()),
    difference=of_mean(difference, options),
    p_value=sign_test(wins, losses),
  )


def _bca(deviations: np.ndarray, options: BootstrapOptions) -> np.ndarray:
  """Returns the ends of the interval of the mean, relative to the mean, float64 [2].

  Args:
    deviations: float64 [n], the values less their mean.
    options: how the interval is made.
  """
  largest = np.abs(deviations).max()
  if not largest:
    return np.zeros(2)
  means = _resampled_means(deviations, options)
  # The mean of a resample that holds each module once is the mean itself, except for rounding; such
  # resamples count half, as ties do.
  rounding = 1e-12 * largest
  below = ((means < -rounding).sum() + (np.abs(means) <= rounding).sum() / 2) / means.size
  normal = statistics.NormalDist()
  bias = normal.inv_cdf(min(max(below, 0.5 / means.size), 1 - 0.5 / means.size))
  # The acceleration comes from the jackknife, which for a mean needs no resamples.
  acceleration = (deviations**3).sum() / (6 * (deviations**2).sum() ** 1.5)
  shares = []
  for share in ((1 - options.confidence) / 2, (1 + options.confidence) / 2):
    shifted = bias + normal.inv_cdf(share)
    shares.append(normal.cdf(bias + shifted / (1 - acceleration * shifted)))
  return np.quantile(means, shares)


def _resampled_means(values: np.ndarray, options: BootstrapOptions) -> np.ndarray:
  """Returns the mean of each resample, float64 [resamples]."""
  rng = np.random.default_rng(options.seed)
  n = values.size
  rows = max(1, _BLOCK // n)
  means = []
  for start in range(0, options.resamples, rows):
    number = min(rows, options.resamples - start)
    drawn = rng.integers(n, size=(number, n))
    means.append(values[drawn].mean(axis=1))
  return np.concatenate(means)
