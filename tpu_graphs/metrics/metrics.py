"""How well scores rank the configs of a module: top-k error, ordered pair accuracy (OPA) and
Kendall's tau-b.

Conventions of every function here:
  runtimes: int64 [C] in ns, or float64 [C] relative to a normalizer (`module.relative_runtime`);
    > 0, lower is better. Narrower floats are refused: runtimes near 1e9 ns would tie in float32.
    Configs that were not measured must have been left out.
  scores: floats or integers [C], lower = predicted faster, compared in their own precision. NaN
    is refused. Infinities are ordinary values: they order as usual and equal ones are ties, so
      scores that overflowed gain nothing.
  A metric is *undefined* where there is nothing to rank: no two configs have different runtimes,
    so also with one config or none. The functions of one module then return NaN; `summarize`
    leaves such modules out of the means and counts them.

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

# The k of the top-k errors that are reported for each kind.
TOP_KS: Mapping[str, tuple[int, ...]] = types.MappingProxyType(
  {'tile': (1, 5, 10), 'layout': (1, 10, 100)}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairCounts:
  """The C * (C - 1) / 2 pairs of a module's configs, by how the order of scores agrees with the
  order of runtimes.

  Attributes:
    concordant: the config with the lower runtime has the lower score.
    discordant: the config with the lower runtime has the higher score.
    tied_scores: equal scores, different runtimes.
    tied_runtimes: equal runtimes, different scores.
    tied_both: equal runtimes and equal scores.
  """

  concordant: int
  discordant: int
  tied_scores: int
  tied_runtimes: int
  tied_both: int

  @property
  def comparable(self) -> int:
    """Number of pairs with different runtimes: those that a ranking gets right or wrong."""
    return self.concordant + self.discordant + self.tied_scores

  @property
  def opa(self) -> float:
    """See the function `opa`."""
    return self.concordant / self.comparable if self.comparable else math.nan

  @property
  def kendall_tau(self) -> float:
    """See the function `kendall_tau`."""
    different_scores = self.concordant + self.discordant + self.tied_runtimes
    # Python ints: the product of two numbers of pairs exceeds int64 from about 80,000 configs on.
    product = self.comparable * different_scores
    return (self.concordant - self.discordant) / math.sqrt(product) if product else math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleMetrics:
  """Metrics of one module, from `evaluate_module`; `summarize` takes any number of them, in any
  order.

  Attributes:
    module_id: the module's name.
    num_configs: number of configs that were ranked, C.
    opa: see `opa`; NaN where undefined.
    kendall_tau: see `kendall_tau`; NaN where undefined.
    top_k_error: k -> see `top_k_error`; NaN where undefined.
    pairs: what `opa` and `kendall_tau` come from.
  """

  module_id: str
  num_configs: int
  opa: float
  kendall_tau: float
  top_k_error: Mapping[int, float]
  pairs: PairCounts

  @property
  def values(self) -> dict[str, float]:
    """Each metric by name: 'opa', 'kendall_tau', and 'top_<k>_error' for each k."""
    return {
      'opa': self.opa,
      'kendall_tau': self.kendall_tau,
      **{f'top_{k}_error': error for k, error in self.top_k_error.items()},
    }


class Summary:
  """What is known of any number of modules together: grows by modules and merges with others, as
  Beam combines.

  Sums are exact, so the result depends neither on the order of modules nor on how they were
  merged. Of a module its name is kept and nothing else.
  """

  def __init__(self):
    self._module_ids: set[str] = set()
    self._ks: list[int] | None = None  # None before the first module.
    self._num_configs = 0
    self._concordant = 0
    self._comparable = 0
    self._sums = dict.fromkeys(('opa', 'kendall_tau'), fractions.Fraction())
    self._defined = dict.fromkeys(self._sums, 0)

  @classmethod
  def of(cls, results: Iterable[ModuleMetrics]) -> Summary:
    """The summary of some modules; raises as `add` does."""
    summary = cls()
    for module in results:
      summary.add(module)
    return summary

  def add(self, module: ModuleMetrics) -> None:
    """Counts a module in.

    Raises:
      InputError: it is there already, or was evaluated for other k than the others.
    """
    self._check(module.module_id, module.module_id in self._module_ids, list(module.top_k_error))
    self._module_ids.add(module.module_id)
    self._num_configs += module.num_configs
    self._concordant += module.pairs.concordant
    self._comparable += module.pairs.comparable
    for name, value in module.values.items():
      is_defined = not math.isnan(value)
      self._defined[name] = self._defined.get(name, 0) + is_defined
      self._sums[name] = self._sums.get(name, fractions.Fraction()) + (
        fractions.Fraction(value) if is_defined else 0
      )

  def merge(self, other: Summary) -> None:
    """Counts in all modules of `other`, which stays as it is.

    Raises:
      InputError: a module is in both, or they were evaluated for different k.
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
    """See `summarize`."""
    num_modules = len(self._module_ids)
    return {
      'num_modules': num_modules,
      'num_configs': self._num_configs,
      **{
        name: float(total / self._defined[name]) if self._defined[name] else None
        for name, total in self._sums.items()
      },
      'opa_pooled': self._concordant / self._comparable if self._comparable else None,
      'undefined': {name: num_modules - count for name, count in self._defined.items()},
    }

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
  """Whether more is better for a metric named as in `ModuleMetrics.values`."""
  return not name.endswith('_error')


def opa(runtimes: Any, scores: Any) -> float:
  """Ordered pair accuracy: the share of pairs with different runtimes whose faster config has
  the strictly lower score.

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
  """Kendall's rank correlation tau-b of runtimes and scores (Kendall, The treatment of ties in
  ranking problems, 1945).

  (concordant - discordant) / sqrt(pairs with different runtimes * pairs with different scores).

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
  """How much slower the best of the k configs with the lowest scores is than the best of all,
  relative to the latter.

  (min runtime over the k lowest scores - min runtime) / min runtime. The slowdown is this plus
  one. Where scores tie, the config that comes first is taken first, so constant scores choose
  the first k configs.

  Args:
    runtimes: int64 or float64 [C].
    scores: floats or integers [C].
    k: number of configs that would be tried, >= 1; all of them where k > C.

  Returns:
    0 (a best config is among them) or more; NaN where no two runtimes differ.

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
  """All metrics of one module.

  Args:
    module_id: the module's name, for errors and reports.
    runtimes: int64 or float64 [C], of all measured configs of the module: metrics of parts of a
      module cannot be put together.
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
  """Means over modules, each module counting the same however many configs it has.

  Sums are exact, so the numbers do not depend on the order of `results`.

  Args:
    results: one per module, all for the same ks.

  Returns:
    A dict for JSON, free of NaN:
      'num_modules', 'num_configs': int.
      'opa', 'kendall_tau', 'top_<k>_error' for each k: mean over the modules where it is
      defined; None if none. No
        module, no k.
      'opa_pooled': right share of the comparable pairs of all modules, dominated by modules with
      many configs; or None. 'undefined': name of each mean -> number of modules that it leaves out.

  Raises:
    InputError: a module occurs twice, or modules were evaluated for different ks.
  """
  return Summary.of(results).result()


def _check(runtimes: Any, scores: Any) -> tuple[np.ndarray, np.ndarray]:
  """The arguments as arrays, once they keep the conventions at the top of this file."""
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
  for k in ks:
    if k < 1:
      raise errors.InputError('number out of range', where='k', found=k, expected='>= 1')
  if runtimes.size == 0 or runtimes.min() == runtimes.max():
    return dict.fromkeys(ks, math.nan)
  best_so_far = np.minimum.accumulate(runtimes[np.argsort(scores, kind='stable')])
  best = best_so_far[-1]
  return {k: float((best_so_far[min(k, runtimes.size) - 1] - best) / best) for k in ks}


def _count_pairs(runtimes: np.ndarray, scores: np.ndarray) -> PairCounts:
  """See `pair_counts`.

  By the algorithm of Knight (A computer method for calculating Kendall's tau with ungrouped
  data, 1966).
  """
  # Once sorted by runtime, discordant pairs are the inversions among the scores. Ties in either
  # must not be inversions: equal runtimes are sorted by score, and equal scores are numbered in the
  # order in which they stand.
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
  """Number of pairs of equal elements of a sorted array; bool [C - 1], for each element but the
  first.
  """
  sizes = np.diff(np.flatnonzero(np.concatenate(([True], ~same_as_previous, [True]))))
  return int((sizes * (sizes - 1) // 2).sum())


def _count_inversions(permutation: np.ndarray) -> int:
  """Number of pairs i < j with permutation[i] > permutation[j], for a permutation of 0 to n - 1,
  int64 [n].

  Goes from the highest bit of the values to the lowest, with the values parted by the bits above
  and in their original order within a part. Two values form an inversion at the first bit in
  which they differ, if the one with the bit set comes first. In a permutation of 0 to 2**m - 1
  half of each part has the bit set, so that no part needs its own loop.
  """
  size = 1 << (permutation.size - 1).bit_length()
  values = np.arange(
    size
  )  # Values beyond n stand in their places after all others, and add no inversion.
  values[: permutation.size] = permutation
  inversions = 0
  half = size // 2
  while half:
    parts = size // (2 * half)
    is_set = (values & half) != 0
    set_before = np.cumsum(is_set)[
      ~is_set
    ]  # [size / 2], for each value with the bit unset, over all parts.
    inversions += int(set_before.sum()) - half * half * math.comb(
      parts, 2
    )  # Less those set in earlier parts.
    values = np.stack(
      (values[~is_set].reshape(parts, half), values[is_set].reshape(parts, half)), axis=1
    ).reshape(-1)
    half //= 2
  return inversions
