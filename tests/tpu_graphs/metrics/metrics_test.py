"""Tests of tpu_graphs.metrics.metrics: hand-worked tables, a pairwise loop and SciPy as oracles."""

import itertools
import json
import math
import pickle

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import scipy.stats

from tpu_graphs import errors
from tpu_graphs.metrics import metrics
from tpu_graphs.modules import module

NAN = math.nan


def _naive_counts(runtimes, scores):
  counts = dict.fromkeys(
    ('concordant', 'discordant', 'tied_scores', 'tied_runtimes', 'tied_both'), 0
  )
  for (r1, s1), (r2, s2) in itertools.combinations(zip(runtimes, scores, strict=True), 2):
    if r1 == r2:
      counts['tied_both' if s1 == s2 else 'tied_runtimes'] += 1
    elif s1 == s2:
      counts['tied_scores'] += 1
    else:
      counts['concordant' if (r1 < r2) == (s1 < s2) else 'discordant'] += 1
  return metrics.PairCounts(**counts)


def _naive_top_k_error(runtimes, scores, k):
  chosen = sorted(range(len(scores)), key=lambda i: (scores[i], i))[:k]
  return (min(runtimes[i] for i in chosen) - min(runtimes)) / min(runtimes)


def _evaluate(module_id, runtimes, scores, ks=(1,)):
  return metrics.evaluate_module(
    module_id, np.array(runtimes, np.int64), np.array(scores, np.float32), ks=ks
  )


# A config's score is near its runtime, so that all kinds of pairs are frequent.
_SCORES = st.one_of(
  st.integers(1, 8).map(float), st.sampled_from([math.inf, -math.inf, 0.0, -0.0, 1e-45])
)
_CONFIGS = st.lists(st.tuples(st.integers(910_876_400, 910_876_408), _SCORES), max_size=70)


@pytest.mark.parametrize(
  ('runtimes', 'scores', 'opa', 'tau', 'top_1'),
  [
    pytest.param([10, 20, 30], [1, 2, 3], 1, 1, 0, id='perfect'),
    pytest.param([10, 20, 30], [3, 2, 1], 0, -1, 2, id='reversed'),
    pytest.param([20, 10, 30], [7, 7, 7], 0, NAN, 1, id='constant scores'),
    pytest.param([10, 10, 10], [1, 2, 3], NAN, NAN, NAN, id='equal runtimes'),
    pytest.param([10, 10], [5, 5], NAN, NAN, NAN, id='equal runtimes and scores'),
    pytest.param([10], [5], NAN, NAN, NAN, id='one config'),
    pytest.param([], [], NAN, NAN, NAN, id='no config'),
    # Pairs: (1, 2a) tied scores, (1, 2b) right, (1, 3) (2a, 3) (2b, 3) wrong, (2a, 2b) tied
    # runtimes.
    pytest.param(
      [1, 2, 2, 3], [1, 1, 2, 0], 1 / 5, (1 - 3) / math.sqrt(5 * 5), 2, id='ties in both'
    ),
    # One config, measured three times, has one score. Pairs: 3 among the copies are tied scores, 3
    # are right.
    pytest.param(
      [20, 22, 24, 10], [5, 5, 5, 1], 3 / 6, 3 / math.sqrt(6 * 3), 0, id='duplicates of a config'
    ),
    pytest.param(
      [10, 20, 30], [-math.inf, 0, math.inf], 1, 1, 0, id='infinite scores order as usual'
    ),
    pytest.param(
      [10, 20, 30],
      [math.inf, math.inf, 0],
      0,
      -2 / math.sqrt(3 * 2),
      2,
      id='equal infinite scores tie',
    ),
    pytest.param([10, 20], [0.0, -0.0], 0, NAN, 0, id='zeros of either sign tie'),
  ],
)
def test_hand_worked(runtimes, scores, opa, tau, top_1):
  runtimes, scores = np.array(runtimes, np.int64), np.array(scores, np.float32)
  assert metrics.opa(runtimes, scores) == pytest.approx(opa, rel=1e-15, nan_ok=True)
  assert metrics.kendall_tau(runtimes, scores) == pytest.approx(tau, rel=1e-15, nan_ok=True)
  assert metrics.top_k_error(runtimes, scores, 1) == pytest.approx(top_1, rel=1e-15, nan_ok=True)


def test_perfect_and_reversed_are_exactly_one_and_minus_one():
  for n in (2, 3, 1000, 100_001):
    runtimes = np.arange(1, n + 1)
    assert metrics.kendall_tau(runtimes, runtimes.astype(np.float64)) == 1
    assert metrics.kendall_tau(runtimes, -runtimes.astype(np.float64)) == -1
    assert metrics.opa(runtimes, runtimes.astype(np.float64)) == 1


@pytest.mark.parametrize(('k', 'error'), [(1, 2), (2, 2), (3, 1), (4, 0), (5, 0), (10**9, 0)])
def test_top_k_error_by_k(k, error):
  assert (
    metrics.top_k_error(np.array([300, 100, 200, 400]), np.array([0.1, 0.4, 0.3, 0.2]), k) == error
  )


def test_top_k_error_takes_tied_scores_by_position():
  runtimes, scores = np.array([300, 200, 100, 400]), np.array([1, 0, 1, 1], np.float32)
  assert [metrics.top_k_error(runtimes, scores, k) for k in (1, 2, 3)] == [1, 1, 0]
  # The arrays are so long that a sort that is not stable would show.
  rng = np.random.default_rng(0)
  runtimes, scores = rng.permutation(2000) + 1, rng.integers(0, 4, 2000).astype(np.float32)
  for k in (1, 5, 10, 100, 600):
    assert metrics.top_k_error(runtimes, scores, k) == _naive_top_k_error(runtimes, scores, k)


def test_runtimes_that_tie_in_float32_keep_their_order():
  runtimes = np.arange(910_876_401, 910_876_407)
  assert np.unique(runtimes.astype(np.float32)).size < 6
  scores = np.arange(6, dtype=np.float32)
  assert metrics.opa(runtimes, scores) == 1
  assert metrics.kendall_tau(runtimes, scores) == 1
  assert metrics.top_k_error(runtimes, -scores, 5) == 1 / 910_876_401


def test_runtimes_beyond_float64_are_subtracted_as_integers():
  runtimes = np.array([2**60, 2**60 + 1])
  assert metrics.top_k_error(runtimes, np.array([1.0, 0.0]), 1) == 2.0**-60
  assert metrics.opa(runtimes, np.array([0.0, 1.0])) == 1


def test_narrow_integers_do_not_wrap():
  assert (
    metrics.top_k_error(np.array([1, 120, 100], np.int8), np.array([2, 0, 1], np.int8), 1) == 119
  )
  assert metrics.top_k_error(
    np.array([3, 200], np.uint8), np.array([1, 0], np.uint8), 1
  ) == pytest.approx(197 / 3)


def test_scores_are_compared_in_their_own_precision():
  runtimes, scores = np.array([10, 20]), np.array([1, 1 + 1e-12])
  assert metrics.opa(runtimes, scores) == 1
  assert metrics.opa(runtimes, scores.astype(np.float32)) == 0
  assert metrics.opa(runtimes, np.array([2**53, 2**53 + 1])) == 1


def test_tile_is_judged_relative_to_the_normalizer():
  # In ns the second config is the faster one; relative to the default config of the same run the
  # second config is slower.
  runtimes = module.relative_runtime(np.array([1000, 900]), np.array([2000, 900]))
  assert runtimes.tolist() == [0.5, 1]
  assert metrics.opa(runtimes, np.array([0.0, 1.0])) == 1
  assert metrics.top_k_error(runtimes, np.array([1.0, 0.0]), 1) == 1
  # Both runs have the ratio 0.5, so there is nothing to rank.
  equal = module.relative_runtime(np.array([1000, 500]), np.array([2000, 1000]))
  assert math.isnan(metrics.opa(equal, np.array([0.0, 1.0])))


@hypothesis.given(_CONFIGS)
def test_pair_counts_equal_a_loop_over_pairs(configs):
  runtimes, scores = [r for r, _ in configs], [s for _, s in configs]
  counts = metrics.pair_counts(np.array(runtimes, np.int64), np.array(scores, np.float64))
  assert counts == _naive_counts(runtimes, scores)
  assert counts.concordant + counts.discordant + counts.tied_scores == counts.comparable
  assert all(type(value) is int for value in vars(counts).values())


@hypothesis.given(
  _CONFIGS.filter(lambda configs: len({r for r, _ in configs}) > 1), st.integers(1, 80)
)
def test_top_k_error_equals_a_sort(configs, k):
  runtimes, scores = [r for r, _ in configs], [s for _, s in configs]
  assert metrics.top_k_error(np.array(runtimes), np.array(scores), k) == _naive_top_k_error(
    runtimes, scores, k
  )


@hypothesis.given(_CONFIGS.filter(lambda configs: len(configs) > 1))
def test_kendall_tau_equals_scipy(configs):
  runtimes, scores = (
    np.array([r for r, _ in configs], np.int64),
    np.array([s for _, s in configs], np.float64),
  )
  expected = scipy.stats.kendalltau(runtimes, scores).statistic
  assert metrics.kendall_tau(runtimes, scores) == pytest.approx(expected, abs=1e-12, nan_ok=True)


@hypothesis.given(_CONFIGS, st.randoms(use_true_random=False))
def test_pair_counts_do_not_depend_on_the_order_of_configs(configs, random):
  shuffled = random.sample(configs, len(configs))
  first, second = (
    metrics.pair_counts(
      np.array([r for r, _ in c], np.int64), np.array([s for _, s in c], np.float64)
    )
    for c in (configs, shuffled)
  )
  assert first == second


@pytest.mark.parametrize('size', [127, 128, 129, 1000, 4095, 4096, 4097])
def test_inversions_at_sizes_around_powers_of_two(size):
  rng = np.random.default_rng(size)
  runtimes, scores = rng.permutation(size) + 1, rng.permutation(size).astype(np.float32)
  by_runtime = scores[np.argsort(runtimes)]
  assert (
    metrics.pair_counts(runtimes, scores).discordant
    == np.triu(by_runtime[:, None] > by_runtime).sum()
  )


def test_tau_of_100_000_configs_with_many_ties():
  rng = np.random.default_rng(0)
  runtimes = rng.integers(1, 300, 100_000)
  scores = (runtimes + rng.integers(0, 300, 100_000)).astype(np.float32)
  tau = metrics.kendall_tau(runtimes, scores)
  assert tau == pytest.approx(scipy.stats.kendalltau(runtimes, scores).statistic, abs=1e-12)
  assert 0.3 < tau < 0.7


@pytest.mark.slow
def test_a_million_configs():
  rng = np.random.default_rng(0)
  # More than half of the runtimes occur more than once, and many scores are equal.
  runtimes = rng.integers(10**11, 10**11 + 10**6, 10**6)
  noise = rng.normal(scale=5e5, size=10**6)
  scores = ((runtimes - 10**11 + noise) / 1e3).astype(np.float16)
  counts = metrics.pair_counts(runtimes, scores)
  assert counts.kendall_tau == pytest.approx(
    scipy.stats.kendalltau(runtimes, scores).statistic, abs=1e-12
  )
  expected = sum(math.comb(int(n), 2) for n in np.unique(runtimes, return_counts=True)[1])
  assert counts.tied_runtimes + counts.tied_both == expected
  assert counts.comparable + expected == math.comb(10**6, 2)


@pytest.mark.parametrize(
  ('runtimes', 'scores', 'message'),
  [
    pytest.param(
      [10, 20], [1.0, NAN], r'scores\[1\]: score is NaN: found NaN in 1 of 2 scores', id='NaN score'
    ),
    pytest.param(
      [10, -1], [1.0, 2.0], r'runtimes\[1\]: .*found -1, expected > 0; leave out', id='unmeasured'
    ),
    pytest.param([0, 10], [1.0, 2.0], r'runtimes\[0\]: .*found 0', id='zero of a test file'),
    pytest.param([-10, -20], [1.0, 2.0], r'runtimes\[0\]: .*found -10', id='negated runtimes'),
    pytest.param([0.5, NAN], [1.0, 2.0], r'runtimes\[1\]: .*found nan', id='NaN runtime'),
    pytest.param([0.5, math.inf], [1.0, 2.0], r'runtimes\[1\]: .*found inf', id='infinite runtime'),
    pytest.param(
      np.array([10, 20], np.float32),
      [1.0, 2.0],
      'runtimes: wrong dtype: found float32',
      id='float32',
    ),
    pytest.param([10, 20], ['a', 'b'], 'scores: wrong dtype', id='text scores'),
    pytest.param(
      [10, 20],
      [1.0, 2.0, 3.0],
      r'scores: wrong shape: found \[3\], expected \[2\]',
      id='more scores',
    ),
    pytest.param(
      [10, 20],
      [[1.0], [2.0]],
      r'scores: wrong shape: found \[2, 1\]',
      id='scores with an axis too many',
    ),
    pytest.param([[10, 20]], [[1.0, 2.0]], r'runtimes: wrong shape: found \[1, 2\]', id='a batch'),
  ],
)
def test_refuses(runtimes, scores, message):
  runtimes, scores = np.array(runtimes), np.array(scores)
  for metric in (
    metrics.opa,
    metrics.kendall_tau,
    metrics.pair_counts,
    lambda r, s: metrics.top_k_error(r, s, 1),
  ):
    with pytest.raises(errors.InputError, match=message):
      metric(runtimes, scores)
  with pytest.raises(errors.InputError, match=f'^größe-1, {message}'):
    metrics.evaluate_module('größe-1', runtimes, scores, ks=(1,))


@pytest.mark.parametrize('k', [0, -1])
def test_refuses_k_below_one_also_where_undefined(k):
  for runtimes in ([10, 20], [10]):
    with pytest.raises(errors.InputError, match='expected >= 1'):
      metrics.top_k_error(np.array(runtimes), np.zeros(len(runtimes)), k)


def test_evaluate_module_holds_what_the_functions_give():
  rng = np.random.default_rng(0)
  runtimes, scores = rng.integers(1, 20, 30), rng.integers(0, 20, 30).astype(np.float32)
  result = metrics.evaluate_module('m', runtimes, scores, ks=metrics.TOP_KS['layout'])
  assert (result.module_id, result.num_configs) == ('m', 30)
  assert result.opa == metrics.opa(runtimes, scores)
  assert result.kendall_tau == metrics.kendall_tau(runtimes, scores)
  assert result.pairs == _naive_counts(runtimes, scores)
  assert result.top_k_error == {k: metrics.top_k_error(runtimes, scores, k) for k in (1, 10, 100)}
  assert pickle.loads(pickle.dumps(result)) == result


def test_summary_counts_modules_alike_and_gives_the_pooled_value_beside():
  right = _evaluate('six pairs right', [10, 20, 30, 40], [1, 2, 3, 4], ks=(1, 3))
  wrong = _evaluate('one pair wrong', [10, 40], [2, 1], ks=(1, 3))
  assert metrics.summarize([right, wrong]) == {
    'num_modules': 2,
    'num_configs': 6,
    'opa': 0.5,
    'kendall_tau': 0,
    'top_1_error': 1.5,
    'top_3_error': 0,
    'opa_pooled': 6 / 7,
    'undefined': {'opa': 0, 'kendall_tau': 0, 'top_1_error': 0, 'top_3_error': 0},
  }


def test_summary_leaves_undefined_modules_out_and_counts_them():
  wrong = _evaluate('wrong', [10, 40], [2, 1])
  nothing = [
    _evaluate('one config', [10], [1]),
    _evaluate('equal runtimes', [10, 10], [1, 2]),
    _evaluate('no config', [], []),
  ]
  constant = _evaluate('constant scores', [20, 10], [1, 1])
  summary = metrics.summarize([wrong, *nothing, constant])
  assert summary == {
    'num_modules': 5,
    'num_configs': 7,
    'opa': 0,
    'kendall_tau': -1,
    'top_1_error': 2,
    'opa_pooled': 0,
    'undefined': {'opa': 3, 'kendall_tau': 4, 'top_1_error': 3},
  }
  summary = metrics.summarize(nothing)
  assert summary == {
    'num_modules': 3,
    'num_configs': 3,
    'opa': None,
    'kendall_tau': None,
    'top_1_error': None,
    'opa_pooled': None,
    'undefined': {'opa': 3, 'kendall_tau': 3, 'top_1_error': 3},
  }
  assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_summary_of_nothing():
  assert metrics.summarize(iter(())) == {
    'num_modules': 0,
    'num_configs': 0,
    'opa': None,
    'kendall_tau': None,
    'opa_pooled': None,
    'undefined': {'opa': 0, 'kendall_tau': 0},
  }


@hypothesis.given(st.lists(_CONFIGS, max_size=8), st.randoms(use_true_random=False))
def test_summary_does_not_depend_on_the_order_of_modules(modules, random):
  results = [
    _evaluate(str(i), [r for r, _ in configs], [s for _, s in configs], ks=(1, 5))
    for i, configs in enumerate(modules)
  ]
  expected = metrics.summarize(results)
  assert metrics.summarize(random.sample(results, len(results))) == expected
  assert json.loads(json.dumps(expected, allow_nan=False)) == expected


def test_summary_refuses_a_module_twice_and_different_ks():
  first = _evaluate('a', [10, 20], [1, 2])
  with pytest.raises(errors.InputError, match=r'^a: module evaluated twice'):
    metrics.summarize([first, _evaluate('a', [30, 40], [1, 2])])
  with pytest.raises(errors.InputError, match=r'^b: .*found \[1, 5\], expected \[1\]'):
    metrics.summarize([first, _evaluate('b', [30, 40], [1, 2], ks=(1, 5))])


def test_ks_are_those_of_the_field():
  assert dict(metrics.TOP_KS) == {'tile': (1, 5, 10), 'layout': (1, 10, 100)}


_RESULTS = [
  _evaluate('right', [10, 20, 30, 40], [1, 2, 3, 4]),
  _evaluate('wrong', [10, 40], [2, 1]),
  _evaluate('mostly right', [10, 20, 31], [1, 3, 2]),
  _evaluate('nothing to rank', [10], [1]),
  _evaluate('constant', [30, 10, 11], [0, 0, 0]),
  _evaluate('tenths', [10, 11, 12, 13], [3, 1, 2, 0]),
]


@hypothesis.given(st.permutations(_RESULTS), st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_summaries_merge_to_the_same_in_any_order_and_grouping(results, groups):
  parts = [
    metrics.Summary.of(r for r, g in zip(results, groups, strict=True) if g == group)
    for group in range(4)
  ]
  parts = [pickle.loads(pickle.dumps(part)) for part in parts]
  before = parts[3].result()
  merged = metrics.Summary()
  for part in parts:
    merged.merge(part)
  assert merged.result() == metrics.summarize(_RESULTS)
  assert parts[3].result() == before


def test_summary_means_are_the_exact_sums_rounded_once():
  # The values are thirds and tenths, and one large value that would swallow small ones in a float
  # sum.
  results = [_evaluate(str(i), [1, 1 + i], [1, 0]) for i in range(1, 40)] + [
    _evaluate('huge', [1, 2**62], [1, 0])
  ]
  values = [result.top_k_error[1] for result in results]
  assert metrics.summarize(results)['top_1_error'] == pytest.approx(
    math.fsum(values) / len(values), rel=1e-15
  )


def test_merge_refuses_a_module_of_both_and_other_ks():
  first = metrics.Summary.of(_RESULTS[:2])
  with pytest.raises(errors.InputError, match=r'^wrong: module evaluated twice'):
    first.merge(metrics.Summary.of([_RESULTS[2], _RESULTS[1]]))
  with pytest.raises(
    errors.InputError, match=r'^other: modules evaluated for different k: found \[5\], expected'
  ):
    first.merge(metrics.Summary.of([_evaluate('other', [10, 20], [1, 2], ks=(5,))]))
  assert first.result() == metrics.summarize(_RESULTS[:2])


def test_values_by_name_and_their_direction():
  values = _evaluate('m', [10, 20, 30], [3, 2, 1], ks=(1, 2)).values
  assert values == {'opa': 0, 'kendall_tau': -1, 'top_1_error': 2, 'top_2_error': 1}
  assert [metrics.higher_is_better(name) for name in values] == [True, True, False, False]
