"""Tests of the sampling of configs in tpu_graphs.input.decoding."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tpu_graphs.input import decoding
from tpu_graphs.modules import selection

_SAMPLINGS = pytest.mark.parametrize('sampling', decoding.CONFIG_SAMPLINGS)


def _draw(runtimes, *, configs, sampling='uniform', seed=0, normalizers=None):
  """Draws configs; returns the ids of each record without padding, and checks the padding."""
  values = np.concatenate([np.zeros(0, np.int64), *(np.array(row, np.int64) for row in runtimes)])
  ragged = tf.RaggedTensor.from_row_lengths(values, np.array([*map(len, runtimes)], np.int32))
  parsed = {'context/config_runtime': ragged}
  if normalizers:
    parsed['context/config_runtime_normalizer'] = ragged.with_flat_values(
      np.concatenate(normalizers)
    )
  draws = 1 - tf.random.stateless_uniform([sum(map(len, runtimes))], [seed, 0])
  chosen, real = decoding.sample_configs(
    parsed, draws, components=len(runtimes) + 2, configs=configs, sampling=sampling
  )
  assert chosen.shape == real.shape == [len(runtimes) + 2, configs]
  assert not real[len(runtimes) :].numpy().any()
  for number, row in zip(map(len, runtimes), real.numpy(), strict=False):
    np.testing.assert_array_equal(row, np.arange(configs) < number)
  return [tf.boolean_mask(chosen[i], real[i]).numpy().tolist() for i in range(len(runtimes))]


@_SAMPLINGS
def test_draws_each_config_once_at_most(sampling):
  runtimes = [[5], [7, 7, 7], [], list(range(1, 41)), [3, 1, 2, 4, 5]]
  for configs in (1, 4, 5, 60):
    for chosen, values in zip(
      _draw(runtimes, configs=configs, sampling=sampling), runtimes, strict=True
    ):
      assert len(set(chosen)) == len(chosen) == min(configs, len(values))
      assert set(chosen) <= set(range(len(values)))


@_SAMPLINGS
def test_draws_of_no_record(sampling):
  assert _draw([], configs=3, sampling=sampling) == []


@_SAMPLINGS
def test_unmeasured_configs_are_taken_last(sampling):
  runtimes = [[-1, 3000, -1, 1000, 2000, -1], [1, -1]]
  fillers = set()
  for seed in range(30):
    few, _ = _draw(runtimes, configs=2, sampling=sampling, seed=seed)
    assert set(few) < {1, 3, 4}
    many, all_of_two = _draw(runtimes, configs=4, sampling=sampling, seed=seed)
    assert set(many[:3]) == {1, 3, 4}
    assert all_of_two == [0, 1]
    fillers.add(many[3])
  assert fillers == {0, 2, 5}


def _frequencies(runtimes, number=2000, **arguments):
  """Returns how often each config is the first that is drawn from a record."""
  counts = collections.Counter(
    chosen[0] for chosen in _draw([runtimes] * number, configs=1, **arguments)
  )
  return np.array([counts[i] for i in range(len(runtimes))]) / number


def test_uniform_draws_any_config_alike():
  np.testing.assert_allclose(_frequencies([10, 20, 30, 40, 50]), 0.2, atol=0.04)


def test_biased_draws_in_proportion_to_the_rank():
  weights = 1 / np.array([3, 1, 2, 4])
  np.testing.assert_allclose(
    _frequencies([30, 10, 20, 40], sampling='fastest_biased'), weights / weights.sum(), atol=0.04
  )


def test_biased_compares_runtimes_over_normalizers():
  found = _frequencies([100, 90, 80], sampling='fastest_biased', normalizers=[[100, 30, 20]] * 2000)
  np.testing.assert_allclose(found, np.array([6, 3, 2]) / 11, atol=0.04)


def test_earlier_ones_of_ties_rank_first():
  np.testing.assert_allclose(
    _frequencies([7, 7, 7], sampling='fastest_biased'), np.array([6, 3, 2]) / 11, atol=0.04
  )


def test_samplings_are_those_of_the_conversion():
  assert set(decoding.CONFIG_SAMPLINGS) < set(selection.SAMPLINGS)


def test_consecutive_configs():
  ids = tf.ragged.constant([list(range(7)), [3], []], tf.int64, row_splits_dtype=tf.int32)
  chosen, real = decoding.consecutive_configs(
    {'context/config_id': ids}, tf.constant([4, 0, 0]), components=5, configs=4
  )
  np.testing.assert_array_equal(chosen[:2], [[4, 5, 6, 7], [0, 1, 2, 3]])
  np.testing.assert_array_equal(tf.reduce_sum(tf.cast(real, tf.int32), 1), [3, 1, 0, 0, 0])
