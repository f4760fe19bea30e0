"""Tests of tpu_graphs.metrics.intervals.

SciPy is the oracle of intervals and p-values; comparisons are worked out by hand.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
import scipy.stats

from tpu_graphs import errors
from tpu_graphs.metrics import intervals
from tpu_graphs.metrics import module_table

NAN = math.nan


def _table(values, num_configs=5):
  """Returns a table from module -> metrics by name."""
  names = list(next(iter(values.values())))
  return module_table.ModuleTable(
    tuple(values),
    np.full(len(values), num_configs),
    {name: np.array([row[name] for row in values.values()], np.float64) for name in names},
  )


@pytest.mark.parametrize('size', [3, 4, 8, 100, 1500])
@pytest.mark.parametrize('confidence', [0.9, 0.95])
def test_interval_equals_scipy(size, confidence):
  # Multiples of the size have exact means, so that SciPy too finds equal a resample's mean and the
  # mean of all values.
  values = np.random.default_rng(size).lognormal(8, 1, size=size).round() * size
  for seed in (0, 1):
    found = intervals.of_mean(
      values, intervals.BootstrapOptions(confidence=confidence, resamples=2000, seed=seed)
    )
    expected = scipy.stats.bootstrap(
      (values,),
      np.mean,
      n_resamples=2000,
      confidence_level=confidence,
      method='BCa',
      random_state=np.random.default_rng(seed),
    ).confidence_interval
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert found.mean == values.mean()
    assert found.low < found.mean < found.high


def test_interval_holds_the_true_mean_about_as_often_as_it_says():
  rng = np.random.default_rng(0)
  options = intervals.BootstrapOptions(confidence=0.9, resamples=500)
  found = [intervals.of_mean(rng.exponential(size=40), options) for _ in range(400)]
  assert np.mean([interval.low <= 1 <= interval.high for interval in found]) == pytest.approx(
    0.88, abs=0.05
  )


def test_interval_of_two_distinct_values_worked_out_by_hand():
  # With 0 and 1 in equal shares there is neither bias nor acceleration, so that the ends are
  # quantiles of a binomial distribution.
  values = np.tile([0.0, 1.0], 50)
  found = intervals.of_mean(values, intervals.BootstrapOptions(resamples=20_000))
  low, high = scipy.stats.binom.ppf([0.025, 0.975], 100, 0.5) / 100
  assert (found.low, found.high) == (pytest.approx(low, abs=0.011), pytest.approx(high, abs=0.011))


@pytest.mark.parametrize(
  ('values', 'mean', 'num_modules', 'undefined'),
  [
    ([], None, 0, 0),
    ([NAN, NAN], None, 0, 2),
    ([0.5], 0.5, 1, 0),
    ([0.5, 1], 0.75, 2, 0),
    ([0.5, NAN, 1, NAN], 0.75, 2, 2),
  ],
)
def test_few_modules_have_no_interval(values, mean, num_modules, undefined):
  assert intervals.of_mean(np.array(values, np.float64)) == intervals.Interval(
    mean=mean, low=None, high=None, num_modules=num_modules, undefined=undefined
  )


def test_undefined_modules_are_left_out():
  values = np.array([0.1, 0.9, 0.4, 0.3])
  with_undefined = intervals.of_mean(np.array([0.1, NAN, 0.9, 0.4, NAN, 0.3]))
  assert with_undefined == dataclasses.replace(intervals.of_mean(values), undefined=2)


def test_equal_values_have_an_interval_of_no_width():
  assert intervals.of_mean(np.full(7, 0.1)) == intervals.Interval(
    mean=pytest.approx(0.1),
    low=pytest.approx(0.1),
    high=pytest.approx(0.1),
    num_modules=7,
    undefined=0,
  )


def test_interval_stays_within_the_values():
  values = np.zeros(1000)
  values[3] = 1
  found = intervals.of_mean(values)
  assert found.low == 0
  assert 0.001 < found.high < 0.01


def test_blocks_have_no_effect(monkeypatch):
  values = np.random.default_rng(0).random(10)
  expected = intervals.of_mean(values)
  for block in (1, 1000):
    monkeypatch.setattr(intervals, '_BLOCK', block)
    assert intervals.of_mean(values, intervals.BootstrapOptions()) == expected


def test_seed_decides():
  values = np.random.default_rng(0).random(10)
  first, again, other = (
    intervals.of_mean(values, intervals.BootstrapOptions(seed=seed)) for seed in (1, 1, 2)
  )
  assert first == again
  assert (first.low, first.high) != (other.low, other.high)


def test_of_table_gives_every_metric():
  table = _table(
    {
      'a': {'opa': 0.5, 'top_1_error': NAN},
      'b': {'opa': 1, 'top_1_error': 2},
      'c': {'opa': 0.9, 'top_1_error': 1},
      'd': {'opa': 0.8, 'top_1_error': 0},
    }
  )
  found = intervals.of_table(table)
  assert found == {name: intervals.of_mean(column) for name, column in table.values.items()}
  assert json.dumps(
    {name: dataclasses.asdict(interval) for name, interval in found.items()}, allow_nan=False
  )


def test_comparison_worked_out_by_hand():
  first = _table(
    {
      'a': {'opa': 0.9, 'top_1_error': 0.0},
      'b': {'opa': 0.8, 'top_1_error': 0.5},
      'c': {'opa': 0.7, 'top_1_error': 0.1},
      'd': {'opa': 0.5, 'top_1_error': 0.2},
      'e': {'opa': NAN, 'top_1_error': NAN},
      'x': {'opa': 0, 'top_1_error': 9},
    }
  )
  second = _table(
    {
      'a': {'opa': 0.5, 'top_1_error': 0.2},
      'b': {'opa': 0.9, 'top_1_error': 0.0},
      'c': {'opa': 0.7, 'top_1_error': 0.3},
      'd': {'opa': 0.4, 'top_1_error': 0.4},
      'e': {'opa': 0.5, 'top_1_error': NAN},
      'y': {'opa': 1, 'top_1_error': 0},
      'z': {'opa': 1, 'top_1_error': 0},
    }
  )
  found = intervals.compare(first, second)
  assert (found.num_modules, found.only_first, found.only_second) == (5, ('x',), ('y', 'z'))
  opa, top = found.metrics['opa'], found.metrics['top_1_error']
  assert (opa.wins, opa.losses, opa.ties) == (2, 1, 1)
  assert opa.difference.mean == pytest.approx((0.4 - 0.1 + 0 + 0.1) / 4)
  assert (opa.difference.num_modules, opa.difference.undefined) == (4, 1)
  assert opa.difference.low < opa.difference.mean < opa.difference.high
  assert opa.p_value == 1  # With 3 modules that differ: 2 * (1 + 3) / 8.
  assert (top.wins, top.losses, top.ties) == (3, 1, 0)  # Lower is better.
  assert top.difference.mean == pytest.approx((-0.2 + 0.5 - 0.2 - 0.2) / 4)
  assert top.p_value == 2 * (1 + 4) / 16


def test_comparison_turned_around():
  rng = np.random.default_rng(0)
  first, second = (
    _table({f'{i:02}': {'opa': value} for i, value in enumerate(rng.random(20).round(1))})
    for _ in 'ab'
  )
  found, turned = (
    intervals.compare(*pair).metrics['opa'] for pair in ((first, second), (second, first))
  )
  assert (found.wins, found.losses, found.ties) == (turned.losses, turned.wins, turned.ties)
  assert found.difference.mean == pytest.approx(-turned.difference.mean)
  assert found.p_value == turned.p_value


def test_pairing_finds_what_the_runs_alone_do_not_show():
  rng = np.random.default_rng(0)
  base = rng.random(30) * 0.5
  first, second = (
    _table({f'{i:02}': {'opa': value} for i, value in enumerate(values)})
    for values in (base + 0.02 + 0.01 * rng.random(30), base)
  )
  alone = [intervals.of_table(table)['opa'] for table in (first, second)]
  assert alone[0].low < alone[1].high
  found = intervals.compare(first, second).metrics['opa']
  assert 0.02 < found.difference.low < found.difference.high < 0.03
  assert found.p_value == pytest.approx(2**-29)


def test_run_compared_with_itself():
  table = _table(
    {name: {'opa': value} for name, value in zip('abcd', (0.1, 0.5, 0.9, NAN), strict=True)}
  )
  found = intervals.compare(table, table).metrics['opa']
  assert (found.wins, found.losses, found.ties, found.p_value) == (0, 0, 3, None)
  assert (found.difference.mean, found.difference.low, found.difference.high) == (0, 0, 0)


@pytest.mark.parametrize(
  ('second', 'message'),
  [
    pytest.param(
      _table({'a': {'kendall_tau': 1}}),
      'different metrics: found kendall_tau, expected opa',
      id='metrics',
    ),
    pytest.param(
      _table({'b': {'opa': 1}, 'c': {'opa': 1}}),
      'no module in common: found b, c, expected a',
      id='modules',
    ),
    pytest.param(
      _table({'a': {'opa': 1}}, num_configs=7),
      'a: judged by other configs: found 7 configs, expected 5',
      id='configs',
    ),
  ],
)
def test_refuses_what_cannot_be_compared(second, message):
  with pytest.raises(errors.InputError, match=f'^{message}'):
    intervals.compare(_table({'a': {'opa': 1}}), second)


@pytest.mark.parametrize(
  ('wins', 'losses'), [(1, 0), (0, 3), (2, 2), (8, 2), (500, 440), (0, 2000)]
)
def test_sign_test_equals_scipy(wins, losses):
  expected = scipy.stats.binomtest(wins, wins + losses).pvalue
  assert intervals.sign_test(wins, losses) == pytest.approx(expected, rel=1e-9)


def test_sign_test_without_any_difference():
  assert intervals.sign_test(0, 0) is None


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'confidence': 0}, 'confidence: number out of range'),
    ({'confidence': 1}, 'confidence: number out of range'),
    ({'confidence': 95}, 'confidence: number out of range: found 95'),
    ({'resamples': 0}, 'resamples: number out of range'),
  ],
)
def test_refuses_options(options, message):
  with pytest.raises(errors.InputError, match=message):
    intervals.BootstrapOptions(**options)
