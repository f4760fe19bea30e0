"""Metrics of how scores rank the configs of a module: top-k error, OPA and Kendall's tau-b.

OPA is the ordered pair accuracy. Conventions of every function here:
  runtimes: int64 [C] in ns, or float64 [C] relative to a normalizer (`module.relative_runtime`);
    > 0, lower is better. Narrower floats are refused: runtimes near 1e9 ns would tie in float32.
    Configs that were not measured must have been left out.
  scores: floats or integers [C], lower = predicted faster, compared in their own precision. NaN
    is refused. Infinities are ordinary values: they order as usual and equal ones are ties, so
    scores that overflowed gain nothing.
  A metric is *undefined* where there is nothing to rank: no two configs have different runtimes,
    as with one config or none. The functions of one module then return NaN; `summarize` leaves
    such modules out of the means and counts them.

Pairs are counted exactly, in O(C log C): a million configs have 5e11 pairs, more than int32 or
float32 can count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import fractions
import math
import types
from typing import Any

import numpy as np

from tpu_graphs import errors

# Kind of module -> the k of the top-k errors that are reported.
TOP_KS: Mapping[str, tuple[int, ...]] = types.MappingProxyType(
  {'tile': (1, 5, 10), 'layout': (1, 10, 100)}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairCounts:
  """Counts of the C * (C - 1) / 2 pairs of a module's configs.

  Pairs are distinguished by how the order of scores agrees with the order of runtimes.

  Attributes:
    concordant: number of pairs whose config with the lower runtime has the lower score.
    discordant: number of pairs whose config with the lower runtime has the higher score.
    tied_scores: number of pairs with equal scores and different runtimes.
    tied_runtimes: number of pairs with equal runtimes and different scores.
    tied_both: number of pairs with equal runtimes and equal scores.
  """

  concordant: int
  discordant: int
  tied_scores: int
  tied_runtimes: int
  tied_both: int

  @property
  def comparable(self) -> int:
    """Returns the number of pairs with different runtimes, which a ranking gets right or wrong."""
    return self.concordant + self.discordant + self.tied_scores

  @property
  def opa(self) -> float:
    """Returns the ordered pair accuracy, see the function `opa`."""
    return self.concordant / self.comparable if self.comparable else math.nan

  @property
  def kendall_tau(self) -> float:
    """Returns Kendall's tau-b, see the function `kendall_tau`."""
    different_scores = self.concordant + self.discordant + self.tied_runtimes
    # These are Python ints, since the product exceeds int64 from about 80,000 configs on.
    product = self.comparable * different_scores
    return (self.concordant - self.discordant) / math.sqrt(product) if product else math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleMetrics:
  """The metrics of one module, from `evaluate_module`.

  `summarize` takes the metrics of any number of modules, in any order.

  Attributes:
    module_id: the module's name.
    num_configs: number of configs that were ranked, C.
    opa: ordered pair accuracy, see `opa`; NaN where undefined.
    kendall_tau: Kendall's tau-b, see `kendall_tau`; NaN where undefined.
    top_k_error: k -> top-k error, see `top_k_error`; NaN where undefined.
    pairs: counts from which `opa` and `kendall_tau` are computed.
  """

  module_id: str
  num_configs: int
  opa: float
  kendall_tau: float
  top_k_error: Mapping[int, float]
  pairs: PairCounts

  @property
  def values(self) -> dict[str, float]:
    """Returns the metrics by name: 'opa', 'kendall_tau', and 'top_<k>_error' for each k."""
    values = {'opa': self.opa, 'kendall_tau': self.kendall_tau}
    for k, error in self.top_k_error.items():
      values[f'top_{k}_error'] = error
    return values


class Summary:
  """A summary of any number of modules, to which modules are added and summaries merged.

  Beam combines with it. Sums are exact, so the result depends neither on the order of modules nor
  on how they were merged. Only the name of each module is kept.
  """

  def __init__(self):
    self._module_ids: set[str] = set()
    # The k of the top-k errors are not known before the first module.
    self._ks: list[int] | None = None
    self._num_configs = 0
    self._concordant = 0
    self._comparable = 0
    self._sums = dict.fromkeys(('opa', 'kendall_tau'), fractions.Fraction())
    self._defined = dict.fromkeys(self._sums, 0)

  @classmethod
  def of(cls, results: Iterable[ModuleMetrics]) -> Summary:
    """Returns the summary of some modules; raises the errors of `add`."""
    summary = cls()
    for module in results:
      summary.add(module)
    return summary

  def add(self, module: ModuleMetrics) -> None:
    """Adds a module.

    Raises:
      InputError: the module was added before, or was evaluated for other k than the others.
    """
    self._check(module.module_id, module.module_id in self._module_ids, list(module.top_k_error))
    self._module_ids.add(module.module_id)
    self._num_configs += module.num_configs
    self._concordant += module.pairs.concordant
    self._comparable += module.pairs.comparable
    for name, value in module.values.items():
      is_defined = not math.isnan(value)
      exact = fractions.Fraction(value) if is_defined else fractions.Fraction()
      self._defined[name] = self._defined.get(name, 0) + is_defined
      self._sums[name] = self._sums.get(name, fractions.Fraction()) + exact

  def merge(self, other: Summary) -> None:
    """Adds all modules of `other`, which stays as it is.

    Raises:
      InputError: a module is in both, or the modules were evaluated for different k.
    """
    if other._ks is None:
      return
    common = self._module_ids & other._module_ids
    self._check(min(common or other._module_ids), bool(common), other._ks)
    self._module_ids |= other._module_ids
    self._num_configs += other._num_configs
    self._concordant += other._concordant
    self._comparable += other._comparable
    for name, value in other._sums.items():
      self._sums[name] = self._sums.get(name, fractions.Fraction()) + value
      self._defined[name] = self._defined.get(name, 0) + other._defined[name]

  def result(self) -> dict[str, Any]:
    """Returns the means over modules, see `summarize`."""
    num_modules = len(self._module_ids)
    result: dict[str, Any] = {'num_modules': num_modules, 'num_configs': self._num_configs}
    for name, total in self._sums.items():
      defined = self._defined[name]
      result[name] = float(total / defined) if defined else None
    result['opa_pooled'] = self._concordant / self._comparable if self._comparable else None
    result['undefined'] = {name: num_modules - count for name, count in self._defined.items()}
    return result

  def _check(self, module_id: str, is_known: bool, ks: list[int]) -> None:
    if is_known:
      raise errors.InputError(
        'module evaluated twice',
        where=module_id,
        expected='one result per module',
        fix='bring the configs of all records of a module together before they are evaluated',
      )
    if self._ks is None:
      self._ks = ks
    if set(ks) != set(self._ks):
      raise errors.InputError(
        'modules evaluated for different k', where=module_id, found=ks, expected=self._ks
      )


def higher_is_better(name: str) -> bool:
  """Returns whether more is better for a metric named as in `ModuleMetrics.values`."""
  return not name.endswith('_error')


def opa(runtimes: Any, scores: Any) -> float:
  """Returns the ordered pair accuracy of scores.

  It is the share of pairs with different runtimes whose faster config has the strictly lower
  score.

  Args:
    runtimes: int64 or float64 [C].
    scores: floats or integers [C].

  Returns:
    0 (reversed) to 1 (perfect); 0 for constant scores; NaN where no two runtimes differ.

  Raises:
    InputError: input that breaks the conventions at the top of this file.
  """
  return pair_counts(runtimes, scores).opa


def kendall_tau(runtimes: Any, scores: Any) -> float:
  """Returns Kendall's rank correlation tau-b of runtimes and scores.

  It is (concordant - discordant) / sqrt(pairs with different runtimes * pairs with different
  scores), see Kendall, The treatment of ties in ranking problems, 1945.

  Args:
    runtimes: int64 or float64 [C].
    scores: floats or integers [C].

  Returns:
    -1 (reversed) to 1 (perfect); NaN where no two runtimes or no two scores differ.

  Raises:
    InputError: input that breaks the conventions at the top of this file.
  """
  return pair_counts(runtimes, scores).kendall_tau


def top_k_error(runtimes: Any, scores: Any, k: int) -> float:
  """Returns how much slower the best of the k lowest-scored configs is than the best of all.

  It is (min runtime over the k lowest scores - min runtime) / min runtime; the slowdown is this
  plus one. Where scores tie, the config that comes first is taken first, so constant scores choose
  the first k configs.

  Args:
    runtimes: int64 or float64 [C].
    scores: floats or integers [C].
    k: number of configs that would be tried, >= 1; all configs where k > C.

  Returns:
    0 (a best config is among the k) or more; NaN where no two runtimes differ.

  Raises:
    InputError: k < 1, or input that breaks the conventions at the top of this file.
  """
  return _top_k_errors(*_check(runtimes, scores), (k,))[k]


def pair_counts(runtimes: Any, scores: Any) -> PairCounts:
  """Counts pairs of configs by their order in runtimes and in scores, exactly and in O(C log C).

  Args:
    runtimes: int64 or float64 [C].
    scores: floats or integers [C].

  Returns:
    The counts; all 0 for fewer than two configs.

  Raises:
    InputError: input that breaks the conventions at the top of this file.
  """
  return _count_pairs(*_check(runtimes, scores))


def evaluate_module(
  module_id: str, runtimes: Any, scores: Any, *, ks: Sequence[int]
) -> ModuleMetrics:
  """Returns all metrics of one module.

  Args:
    module_id: the module's name, for errors and reports.
    runtimes: int64 or float64 [C], runtimes of all measured configs of the module: metrics of
      parts of a module cannot be put together.
    scores: floats or integers [C].
    ks: the k of the top-k errors, such as `TOP_KS['tile']`.

  Raises:
    InputError: k < 1, or input that breaks the conventions at the top of this file; `where`
      names the module.
  """
  try:
    runtimes, scores = _check(runtimes, scores)
    top_k_errors = _top_k_errors(runtimes, scores, ks)
  except errors.InputError as error:
    error.where = f'{module_id}, {error.where}'
    raise
  pairs = _count_pairs(runtimes, scores)
  return ModuleMetrics(
    module_id=module_id,
    num_configs=runtimes.size,
    opa=pairs.opa,
    kendall_tau=pairs.kendall_tau,
    top_k_error=top_k_errors,
    pairs=pairs,
  )


def summarize(results: Iterable[ModuleMetrics]) -> dict[str, Any]:
  """Returns means over modules; each module counts the same however many configs it has.

  Sums are exact, so the numbers do not depend on the order of `results`.

  Args:
    results: one per module, all for the same ks.

  Returns:
    A dict for JSON, free of NaN:
      'num_modules', 'num_configs': int.
      'opa', 'kendall_tau', 'top_<k>_error' for each k: mean over the modules where the metric is
        defined; None if there are none. Without modules there is no k.
      'opa_pooled': share of the comparable pairs of all modules that are ordered right, dominated
        by modules with many configs; None if there are no such pairs.
      'undefined': name of each mean -> number of modules that it leaves out.

  Raises:
    InputError: a module occurs twice, or modules were evaluated for different ks.
  """
  return Summary.of(results).result()


def _check(runtimes: Any, scores: Any) -> tuple[np.ndarray, np.ndarray]:
  """Returns the arguments as arrays after checking the conventions at the top of this file."""
  runtimes, scores = np.asarray(runtimes), np.asarray(scores)
  if runtimes.dtype.kind not in 'iu' and runtimes.dtype != np.float64:
    raise errors.InputError(
      'wrong dtype', where='runtimes', found=runtimes.dtype, expected='int64 or float64'
    )
  if scores.dtype.kind not in 'fiu':
    raise errors.InputError(
      'wrong dtype',
      where='scores',
      found=scores.dtype,
      expected='a number type of NumPy',
      fix='cast bfloat16 to float32',
    )
  if runtimes.ndim != 1:
    raise errors.InputError(
      'wrong shape', where='runtimes', found=list(runtimes.shape), expected='[C]'
    )
  if scores.shape != runtimes.shape:
    raise errors.InputError(
      'wrong shape',
      where='scores',
      found=list(scores.shape),
      expected=f'{list(runtimes.shape)}, one for each runtime',
    )
  bad = ~(np.isfinite(runtimes) & (runtimes > 0))
  if bad.any():
    i = int(np.argmax(bad))
    raise errors.InputError(
      'runtime is not a measurement',
      where=f'runtimes[{i}]',
      found=runtimes[i],
      expected='> 0',
      fix='leave out configs that were not measured',
    )
  bad = np.isnan(scores)
  if bad.any():
    raise errors.InputError(
      'score is NaN',
      where=f'scores[{int(np.argmax(bad))}]',
      found=f'NaN in {int(bad.sum())} of {scores.size} scores',
      expected='numbers',
    )
  return runtimes, scores


def _top_k_errors(runtimes: np.ndarray, scores: np.ndarray, ks: Sequence[int]) -> dict[int, float]:
  """Returns the top-k error for each k, see `top_k_error`."""
  for k in ks:
    if k < 1:
      raise errors.InputError('number out of range', where='k', found=k, expected='>= 1')
  if runtimes.size == 0 or runtimes.min() == runtimes.max():
    return dict.fromkeys(ks, math.nan)
  by_score = runtimes[np.argsort(scores, kind='stable')]
  best_so_far = np.minimum.accumulate(by_score)
  best = best_so_far[-1]
  found = {}
  for k in ks:
    best_of_k = best_so_far[min(k, runtimes.size) - 1]
    found[k] = float((best_of_k - best) / best)
  return found


def _count_pairs(runtimes: np.ndarray, scores: np.ndarray) -> PairCounts:
  """Counts pairs for `pair_counts`, with Knight's algorithm.

  Knight, A computer method for calculating Kendall's tau with ungrouped data, 1966.
  """
  # After sorting by runtime, discordant pairs are the inversions among the scores. Ties must not be
  # inversions: equal runtimes are sorted by score, and equal scores are numbered in the order in
  # which they stand.
  order = np.lexsort((scores, runtimes))
  runtimes, scores = runtimes[order], scores[order]
  by_score = np.argsort(scores, kind='stable')
  position = np.empty_like(by_score)
  position[by_score] = np.arange(by_score.size)
  discordant = _count_inversions(position)

  same_runtime = runtimes[1:] == runtimes[:-1]
  tied_both = _count_pairs_in_runs(same_runtime & (scores[1:] == scores[:-1]))
  tied_runtimes = _count_pairs_in_runs(same_runtime) - tied_both
  scores = scores[by_score]
  tied_scores = _count_pairs_in_runs(scores[1:] == scores[:-1]) - tied_both
  concordant = math.comb(runtimes.size, 2) - discordant - tied_scores - tied_runtimes - tied_both
  return PairCounts(
    concordant=concordant,
    discordant=discordant,
    tied_scores=tied_scores,
    tied_runtimes=tied_runtimes,
    tied_both=tied_both,
  )


def _count_pairs_in_runs(same_as_previous: np.ndarray) -> int:
  """Counts the pairs of equal elements of a sorted array of C elements.

  Args:
    same_as_previous: bool [C - 1], for each element but the first.
  """
  is_bound = np.concatenate(([True], ~same_as_previous, [True]))
  sizes = np.diff(np.flatnonzero(is_bound))
  return int((sizes * (sizes - 1) // 2).sum())


def _count_inversions(permutation: np.ndarray) -> int:
  """Counts the pairs i < j with permutation[i] > permutation[j].

  Goes from the highest bit of the values to the lowest, with the values parted by the bits above
  and in their original order within a part. Two values form an inversion at the first bit in
  which they differ, if the value with the bit set comes first. In a permutation of 0 to 2**m - 1
  half of each part has the bit set, so that no part needs its own loop.

  Args:
    permutation: int64 [n], a permutation of 0 to n - 1.
  """
  size = 1 << (permutation.size - 1).bit_length()
  # Values beyond n stand in their places after all others, and add no inversion.
  values = np.arange(size)
  values[: permutation.size] = permutation
  inversions = 0
  half = size // 2
  while half:
    parts = size // (2 * half)
    is_set = (values & half) != 0
    # [size / 2]: number of values with the bit set before each value without it, over all parts.
    set_before = np.cumsum(is_set)[~is_set]
    # Values in earlier parts are counted too, but form no inversions at this bit.
    set_in_earlier_parts = half * half * math.comb(parts, 2)
    inversions += int(set_before.sum()) - set_in_earlier_parts
    unset_values = values[~is_set].reshape(parts, half)
    set_values = values[is_set].reshape(parts, half)
    values = np.stack((unset_values, set_values), axis=1).reshape(-1)
    half //= 2
  return inversions
