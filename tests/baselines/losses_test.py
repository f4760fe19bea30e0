"""Tests of baselines.losses against NumPy oracles of one module in float64."""

import functools
import math

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import scipy.special
import tensorflow as tf

from baselines import losses
from tpu_graphs import compat
from tpu_graphs import errors
from tpu_graphs.metrics import metrics


def _naive_list_mle(runtimes, scores):
  return np.mean(
    [
      scipy.special.logsumexp(-scores[runtimes >= r]) + s
      for r, s in zip(runtimes, scores, strict=True)
    ]
  )


def _naive_pairwise_hinge(runtimes, scores):
  return np.mean(
    [
      max(0, 1 - (scores[j] - scores[i]))
      for i in range(len(scores))
      for j in range(len(scores))
      if runtimes[i] < runtimes[j]
    ]
  )


def _naive_pairwise_logistic(runtimes, scores):
  return np.mean(
    [
      np.logaddexp(0, scores[i] - scores[j])
      for i in range(len(scores))
      for j in range(len(scores))
      if runtimes[i] < runtimes[j]
    ]
  )


def _naive_rank(runtimes):
  return np.array([np.sum(runtimes < r) for r in runtimes])


def _naive_softmax(runtimes, scores):
  shares = 1 / (1 + _naive_rank(runtimes))
  return -np.sum(shares / shares.sum() * scipy.special.log_softmax(-scores))


def _naive_approx_ndcg(runtimes, scores):
  gains = 1 / (1 + _naive_rank(runtimes))
  smooth_rank = [
    0.5 + sum(scipy.special.expit((s - other) / 0.1) for other in scores) for s in scores
  ]
  ideal = np.sum(-np.sort(-gains) / np.log1p(np.arange(1, len(gains) + 1)))
  return 1 - np.sum(gains / np.log1p(smooth_rank)) / ideal


def _naive_mse(runtimes, scores):
  logs = np.array(
    [math.log1p((int(r) - int(runtimes.min())) / int(runtimes.min())) for r in runtimes]
  )
  return np.mean(((logs - logs.mean()) / logs.std() - scores) ** 2)


_ORACLES = {
  'list_mle': _naive_list_mle,
  'pairwise_hinge': _naive_pairwise_hinge,
  'pairwise_logistic': _naive_pairwise_logistic,
  'softmax': _naive_softmax,
  'approx_ndcg': _naive_approx_ndcg,
  'mse': _naive_mse,
}
# These losses depend only on the order of runtimes.
_BY_ORDER = [name for name in _ORACLES if name != 'mse']

each_loss = pytest.mark.parametrize('name', list(_ORACLES))
each_loss_by_order = pytest.mark.parametrize('name', _BY_ORDER)


def _value_and_gradient(loss, runtimes, scores):
  with tf.GradientTape() as tape:
    tape.watch(scores)
    value = loss(runtimes, scores)
  return value, tape.gradient(value, scores)


def _compute(name, runtimes, scores, dtype=tf.float32):
  """Computes the value, [B], and the gradient, [B, K], of a loss of lists of rows."""
  value, gradient = _value_and_gradient(
    losses.LOSSES[name], tf.constant(runtimes, tf.int64), tf.constant(scores, dtype)
  )
  assert value.dtype == tf.float32
  assert gradient.dtype == dtype
  return value.numpy(), tf.cast(gradient, tf.float64).numpy()


def _random_module(seed, size, spread=1.0):
  """Draws runtimes, [size], near 1e9 and with ties, and scores, float32 [size]."""
  rng = np.random.default_rng(seed)
  runtimes = rng.integers(910_876_400, 910_876_400 + size, size)
  scores = rng.normal(scale=spread, size=size).astype(np.float32)
  return runtimes, scores


def _pad(array, size, value):
  return np.concatenate((array, np.full(size, value, array.dtype)))


def test_each_loss_has_an_oracle():
  assert list(losses.LOSSES) == list(_ORACLES)


@each_loss
@pytest.mark.parametrize('size', [2, 3, 8, 40])
def test_equals_the_oracle_where_some_are_unmeasured(name, size):
  runtimes, scores = _random_module(size, size)
  # At least two runtimes must differ.
  runtimes[0] += size
  expected = _ORACLES[name](runtimes, scores.astype(np.float64))
  expected_gradient = []
  for i in range(size):
    step = np.zeros(size)
    step[i] = 1e-6
    expected_gradient.append(
      (_ORACLES[name](runtimes, scores + step) - _ORACLES[name](runtimes, scores - step)) / 2e-6
    )
  # Measured configs stand between unmeasured ones.
  places = np.sort(np.random.default_rng(0).choice(3 * size, size, replace=False))
  all_runtimes, all_scores = np.full(3 * size, -1), np.full(3 * size, 7, np.float32)
  all_runtimes[places], all_scores[places] = runtimes, scores

  value, gradient = _compute(name, [all_runtimes], [all_scores])
  np.testing.assert_allclose(value, [expected], rtol=2e-5)
  np.testing.assert_allclose(gradient[0][places], expected_gradient, rtol=1e-4, atol=1e-5)
  assert np.count_nonzero(np.delete(gradient[0], places)) == 0


@st.composite
def _modules(draw):
  """Draws runtimes, [K], at least two of them different, and scores, [K]; both have ties.

  Some runtimes are unmeasured.
  """
  size = draw(st.integers(2, 12))
  start = draw(st.sampled_from([1, 910_876_401, 2**60]))
  runtimes = draw(
    st.lists(st.sampled_from([-1, *range(start, start + 4)]), min_size=size, max_size=size)
  )
  hypothesis.assume(len(set(runtimes) - {-1}) > 1)
  scores = draw(st.lists(st.integers(-64, 64), min_size=size, max_size=size))
  return np.array(runtimes), np.array(scores) / 16


@each_loss
@hypothesis.given(module=_modules())
@hypothesis.settings(deadline=None, max_examples=30)
def test_equals_the_oracle_at_any_ties_and_unmeasured_configs(name, module):
  runtimes, scores = module
  measured = runtimes > 0
  value, gradient = _compute(name, [runtimes], [scores])
  np.testing.assert_allclose(
    value, [_ORACLES[name](runtimes[measured], scores[measured])], rtol=1e-4, atol=1e-5
  )
  assert np.count_nonzero(gradient[0][~measured]) == 0
  if name in _BY_ORDER:
    # A common offset of scores changes nothing.
    np.testing.assert_allclose(gradient.sum(), 0, atol=1e-5)


def test_hand_worked():
  # The scores of the faster and the slower config are 0 and log(3), so the faster config is drawn
  # first with probability 3/4.
  value, gradient = _compute('list_mle', [[10, 20]], [[0, math.log(3)]])
  np.testing.assert_allclose(value, [-math.log(3 / 4) / 2], rtol=1e-6)
  np.testing.assert_allclose(gradient, [[1 / 8, -1 / 8]], rtol=1e-6)
  # There are three pairs: 10 before 20 by 2 (no loss), 10 before 30 by 0.5, 20 before 30 by -1.5.
  value, gradient = _compute('pairwise_hinge', [[10, 20, 30]], [[0, 2, 0.5]])
  np.testing.assert_allclose(value, [(0 + 0.5 + 2.5) / 3], rtol=1e-6)
  np.testing.assert_allclose(gradient, [[1 / 3, 1 / 3, -2 / 3]], rtol=1e-6)
  # The right order of the first pair has odds 3 : 1. Equal scores have odds 1 : 1, and a gradient.
  value, gradient = _compute('pairwise_logistic', [[10, 20], [10, 20]], [[0, math.log(3)], [5, 5]])
  np.testing.assert_allclose(value, [-math.log(3 / 4), math.log(2)], rtol=1e-6)
  np.testing.assert_allclose(gradient, [[1 / 4, -1 / 4], [1 / 2, -1 / 2]], rtol=1e-6)
  # Ranks 1, 2, 2 give shares of 1/2, 1/4, 1/4; equal scores give each 1/3.
  value, gradient = _compute('softmax', [[10, 20, 20]], [[5, 5, 5]])
  np.testing.assert_allclose(value, [math.log(3)], rtol=1e-6)
  np.testing.assert_allclose(gradient, [[1 / 2 - 1 / 3, 1 / 4 - 1 / 3, 1 / 4 - 1 / 3]], rtol=1e-5)
  # log 10 and log 1000 are -1 and 1 once standardised.
  value, gradient = _compute('mse', [[10, 1000]], [[-1, 3]])
  np.testing.assert_allclose(value, [(0 + 4) / 2], rtol=1e-5)
  np.testing.assert_allclose(gradient, [[0, 2]], atol=1e-5)


def test_list_mle_equals_the_loss_of_tf_ranking_where_the_latter_is_right():
  rng = np.random.default_rng(0)
  runtimes = np.stack([rng.permutation(20) for _ in range(4)]) + 1
  scores = rng.normal(size=(4, 20)).astype(np.float32)
  loss = compat.ranking_losses().ListMLELoss(reduction=tf.keras.losses.Reduction.NONE)
  expected = tf.reshape(loss(20.0 - runtimes, -scores), [4]) / 20
  np.testing.assert_allclose(losses.list_mle(runtimes, scores), expected, rtol=1e-5)


@each_loss
@pytest.mark.parametrize('padding', [1, 2, 61])
def test_padding_changes_neither_value_nor_gradient(name, padding):
  for runtimes, scores in (
    (np.array([3, 1, 2]), np.array([0.1, 0.3, 0.2], np.float32)),
    _random_module(1, 50, 30.0),
  ):
    value, gradient = _compute(name, [runtimes], [scores])
    for filler in (0, -1e6, 1e6, math.nan, math.inf):
      padded_value, padded_gradient = _compute(
        name, [_pad(runtimes, padding, -1)], [_pad(scores, padding, filler)]
      )
      np.testing.assert_allclose(padded_value, value, rtol=1e-6, atol=1e-7)
      np.testing.assert_allclose(padded_gradient[:, : len(scores)], gradient, rtol=1e-5, atol=1e-7)
      assert np.count_nonzero(padded_gradient[:, len(scores) :]) == 0


@each_loss
def test_modules_of_a_batch_do_not_mix(name):
  (runtimes, scores), (more_runtimes, more_scores) = _random_module(0, 3), _random_module(1, 300)
  value, gradient = _compute(
    name, [_pad(runtimes, 297, -1), more_runtimes], [_pad(scores, 297, 1), more_scores]
  )
  alone, gradient_alone = _compute(name, [runtimes], [scores])
  more_alone, more_gradient_alone = _compute(name, [more_runtimes], [more_scores])
  np.testing.assert_allclose(value, [*alone, *more_alone], rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(gradient[:1, :3], gradient_alone, rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(gradient[1:], more_gradient_alone, rtol=1e-5, atol=1e-7)


@each_loss
def test_order_of_configs_has_no_effect_even_with_ties(name):
  runtimes = np.array([20, 10, 20, 30, 10, 20])
  scores = np.array([1.0, 0.0, 2.0, 3.0, 1.0, -1.0], np.float32)
  value, gradient = _compute(name, [runtimes], [scores])
  for seed in range(5):
    order = np.random.default_rng(seed).permutation(6)
    shuffled_value, shuffled_gradient = _compute(name, [runtimes[order]], [scores[order]])
    np.testing.assert_allclose(shuffled_value, value, rtol=1e-6)
    np.testing.assert_allclose(shuffled_gradient[0], gradient[0][order], rtol=1e-5, atol=1e-7)


@each_loss
def test_gives_the_same_bits_each_time(name):
  runtimes, scores = (tf.constant(array[np.newaxis]) for array in _random_module(0, 64))
  loss = tf.function(functools.partial(_value_and_gradient, losses.LOSSES[name]), jit_compile=True)
  first, *others = [loss(runtimes, scores) for _ in range(4)]
  for other in others:
    np.testing.assert_array_equal(first[0], other[0])
    np.testing.assert_array_equal(first[1], other[1])


@each_loss
@pytest.mark.parametrize('scale', [0.01, 1, 1000])
def test_right_order_costs_less_than_wrong_order(name, scale):
  runtimes = np.array([[10, 40, 20, 30]])
  right, wrong = (_compute(name, runtimes, scale * sign * runtimes / 10)[0] for sign in (1, -1))
  assert right < wrong


@each_loss
def test_gradient_lowers_the_score_of_the_faster(name):
  _, gradient = _compute(name, [[20, 10, 40, -1, 30]], [[0, 0, 0, 0, 0]])
  # Descent moves against the gradient.
  assert gradient[0][1] > 0
  assert gradient[0][2] < 0
  assert gradient[0][1] == gradient[0].max()


@each_loss
def test_descent_reaches_the_perfect_order(name):
  runtimes = np.array([60, 20, 50, 10, 40, 30]) + 10**9
  scores = tf.Variable([[0.0, 0.1, -0.1, 0.2, -0.2, 0.05]])
  assert metrics.opa(runtimes, scores[0].numpy()) < 0.5
  optimizer = tf.keras.optimizers.SGD(0.5)
  step = tf.function(functools.partial(_value_and_gradient, losses.LOSSES[name]), jit_compile=True)
  for _ in range(200):
    _, gradient = step(tf.constant(runtimes[np.newaxis]), scores.value())
    optimizer.apply_gradients([(gradient, scores)])
  assert metrics.opa(runtimes, scores[0].numpy()) == 1


@each_loss
@pytest.mark.parametrize('shape', [[3, 20], [None, None]])
def test_compiled_equals_eager(name, shape):
  modules = [_random_module(seed, 20) for seed in range(3)]
  runtimes, scores = np.stack([r for r, _ in modules]), np.stack([s for _, s in modules])
  runtimes[1, 1:] = -1
  runtimes[2, 5:9] = -1
  compiled = tf.function(
    functools.partial(_value_and_gradient, losses.LOSSES[name]),
    jit_compile=True,
    input_signature=[tf.TensorSpec(shape, tf.int64), tf.TensorSpec(shape, tf.float32)],
  )
  value, gradient = compiled(tf.constant(runtimes), tf.constant(scores))
  expected, expected_gradient = _compute(name, runtimes, scores)
  assert value.shape == 3
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


@each_loss
@pytest.mark.parametrize('dtype', [tf.bfloat16, tf.float16, tf.float64])
def test_scores_of_other_dtypes_are_computed_in_float32(name, dtype):
  runtimes, scores = _random_module(0, 30)
  # Scores rounded to bfloat16 are exact in each of the dtypes.
  scores = tf.cast(tf.cast(scores, tf.bfloat16), tf.float32).numpy()
  value, gradient = _compute(name, [runtimes], [scores], dtype)
  expected, expected_gradient = _compute(name, [runtimes], [scores])
  np.testing.assert_array_equal(value, expected)
  np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-2, atol=1e-6)


@each_loss
def test_computes_in_float32_under_mixed_bfloat16(name):
  runtimes, scores = _random_module(0, 64)
  rounded = tf.cast(scores[np.newaxis], tf.bfloat16)
  expected, expected_gradient = _compute(name, [runtimes], tf.cast(rounded, tf.float32))
  before = tf.keras.mixed_precision.global_policy()
  tf.keras.mixed_precision.set_global_policy('mixed_bfloat16')
  try:
    step = tf.function(
      functools.partial(_value_and_gradient, losses.LOSSES[name]), jit_compile=True
    )
    value, gradient = step(tf.constant(runtimes[np.newaxis]), rounded)
  finally:
    tf.keras.mixed_precision.set_global_policy(before)
  assert (value.dtype, gradient.dtype) == (tf.float32, tf.bfloat16)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  np.testing.assert_allclose(tf.cast(gradient, tf.float32), expected_gradient, rtol=1e-2, atol=1e-6)


@each_loss
@pytest.mark.parametrize(
  'runtimes',
  [
    pytest.param([5, -1, -1], id='one config'),
    pytest.param([5, 5, 5], id='equal runtimes'),
    pytest.param([5, -1, 5], id='equal runtimes and padding'),
    pytest.param([-1, -1, -1], id='nothing measured'),
  ],
)
def test_nothing_to_learn_is_0_and_left_out_of_the_mean(name, runtimes):
  batch, scores = [runtimes, [10, 20, 30]], [[1, 2, 1000], [3, 2, 1]]
  value, gradient = _compute(name, batch, scores)
  alone, gradient_alone = _compute(name, batch[1:], scores[1:])
  assert value[0] == 0
  assert np.count_nonzero(gradient[0]) == 0
  # The position of an entry in memory may change its last bit.
  np.testing.assert_allclose(value[1:], alone, rtol=1e-6)
  np.testing.assert_allclose(gradient[1:], gradient_alone, rtol=1e-6, atol=1e-7)
  total, count = losses.sum_over_modules(tf.constant(value), tf.constant(batch, tf.int64))
  assert (total.numpy(), count.numpy()) == (value[1], 1)


@each_loss
def test_lists_of_length_one(name):
  value, gradient = _compute(name, [[5], [-1]], [[2], [3]])
  np.testing.assert_array_equal(value, [0, 0])
  np.testing.assert_array_equal(gradient, [[0], [0]])


@each_loss
@pytest.mark.parametrize(
  'scores',
  [
    [5000, 1000, 9000],
    [9000, 5000, 1000],
    [-9000, 0, 9000],
    [1e6, 1e6, 1e6 + 1],
    [-9001, -9000, 1e4],
    [1e-30, 0, -1e-30],
  ],
)
def test_finite_and_right_at_any_spread(name, scores):
  runtimes = [1000, 2000, 3000]
  value, gradient = _compute(name, [runtimes], [scores])
  padded_value, padded_gradient = _compute(name, [[*runtimes, -1]], [[*scores, 0]])
  assert np.isfinite([*value, *padded_value]).all()
  assert np.isfinite(gradient).all()
  expected = _ORACLES[name](np.array(runtimes), np.array(scores, np.float64))
  np.testing.assert_allclose(value, [expected], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(padded_value, value, rtol=1e-6, atol=1e-7)
  np.testing.assert_allclose(padded_gradient[:, :3], gradient, rtol=1e-6, atol=1e-7)


@each_loss_by_order
def test_common_offset_of_scores_has_no_effect(name):
  runtimes = np.array([20, 10, 30, 10, 40, -1])
  scores = np.array([500, 123, 251, -70, 377, 0], np.float32) / 512
  value, gradient = _compute(name, [runtimes], [scores])
  # The sums of scores and offset are exact in float32.
  for offset in (-(2**14), 2**14):
    shifted_value, shifted_gradient = _compute(name, [runtimes], [scores + offset])
    np.testing.assert_allclose(shifted_value, value, rtol=1e-6)
    np.testing.assert_allclose(shifted_gradient, gradient, rtol=1e-5, atol=1e-6)


@each_loss
def test_score_of_nan_shows_in_the_loss(name):
  value, _ = _compute(name, [[10, 20, 30], [10, 20, 30]], [[1, math.nan, 2], [1, 2, 3]])
  assert np.isnan(value).tolist() == [True, False]


@each_loss_by_order
@pytest.mark.parametrize('start', [910_876_401, 2**53, 2**62])
def test_runtimes_that_tie_in_floats_keep_their_order(name, start):
  scores = [[3, 1, 2, 6, 4, 5]]
  value, gradient = _compute(name, [np.arange(start, start + 6)], scores)
  expected, expected_gradient = _compute(name, [np.arange(1, 7)], scores)
  np.testing.assert_array_equal(value, expected)
  np.testing.assert_array_equal(gradient, expected_gradient)


def test_mse_of_runtimes_that_hardly_differ():
  value = tf.function(losses.mse, jit_compile=True)(
    np.array([[2**60, 2**60 + 1]]), np.array([[-1.0, 3.0]])
  )
  np.testing.assert_allclose(value, [(0 + 4) / 2], rtol=1e-5)
  # The relative differences are about 1e-18.
  runtimes = np.array([0, 0, 0, 0, 0, 1, 1, 3, 3]) + 2**60
  value, _ = _compute('mse', [runtimes], [np.zeros(9)])
  np.testing.assert_allclose(value, [1], rtol=1e-5)


@pytest.mark.parametrize('start', [1, 910_876_401, 10**15])
def test_mse_of_near_and_far_runtimes(start):
  scores = np.array([3, 1, 2, 6], np.float32)
  for runtimes in (
    np.arange(start, start + 4),
    np.array([start, 2 * start, 10 * start, 5000 * start]),
  ):
    value, _ = _compute('mse', [runtimes], [scores])
    np.testing.assert_allclose(value, [_naive_mse(runtimes, scores.astype(np.float64))], rtol=1e-5)


@each_loss
@pytest.mark.parametrize(
  ('runtimes', 'message'),
  [
    pytest.param(
      [[10, 20, 30], [-10, -20, -30]], r'runtimes\[1, 0\]: .*found -10, .*not negated', id='negated'
    ),
    pytest.param(
      [[10, 20, 30], [5, -1, 0]],
      r'runtimes\[1, 2\]: .*found 0, expected >= 1, or -1',
      id='no label',
    ),
  ],
)
def test_refuses_invalid_runtimes(name, runtimes, message):
  runtimes, scores = tf.constant(runtimes, tf.int64), tf.constant([[1.0, 2, 3], [1, 2, 3]])
  with pytest.raises(errors.InputError, match=message):
    losses.LOSSES[name](runtimes, scores)
  value = tf.function(losses.LOSSES[name], jit_compile=True)(runtimes, scores)
  assert np.isnan(value).tolist() == [False, True]
  total, _ = losses.sum_over_modules(value, runtimes)
  assert np.isnan(total)


@each_loss
@pytest.mark.parametrize(
  ('runtimes', 'scores', 'message'),
  [
    pytest.param(
      np.ones((2, 3), np.float32),
      np.ones((2, 3)),
      'runtimes: wrong dtype: found float32, expected int64',
      id='float runtimes',
    ),
    pytest.param(
      np.ones((2, 3), np.int32),
      np.ones((2, 3)),
      'runtimes: wrong dtype: found int32',
      id='int32 runtimes',
    ),
    pytest.param(
      np.ones((2, 3), np.int64),
      np.ones((2, 3), np.int32),
      'scores: wrong dtype: found int32',
      id='scores',
    ),
    pytest.param(
      np.ones((2, 3), np.int64),
      np.ones((2, 3, 1)),
      r'scores: wrong shape: found \(2, 3, 1\)',
      id='rank 3',
    ),
    pytest.param(
      np.ones((2, 3), np.int64),
      np.ones((3, 3)),
      r'shape: found \(3, 3\), expected \(2, 3\)',
      id='sizes',
    ),
    pytest.param(
      np.ones(3, np.int64), np.ones(3), r'runtimes: wrong shape: found \(3,\)', id='one module'
    ),
  ],
)
def test_refuses_dtypes_and_shapes_also_in_a_graph(name, runtimes, scores, message):
  with pytest.raises(errors.InputError, match=message):
    losses.LOSSES[name](runtimes, scores)
  with pytest.raises(errors.InputError, match=message):
    tf.function(losses.LOSSES[name], autograph=False)(tf.constant(runtimes), tf.constant(scores))


def test_is_comparable():
  runtimes = tf.constant([[1, 2, -1], [1, 1, -1], [1, -1, -1], [-1, -1, -1], [5, 4, 5]], tf.int64)
  assert losses.is_comparable(runtimes).numpy().tolist() == [True, False, False, False, True]


def test_sums_of_replicas_give_the_mean_over_modules():
  runtimes = tf.constant(
    [[1, 2, 3], [1, 1, -1], [2, 1, -1], [-1, -1, -1], [3, 2, 1], [5, 5, 5]], tf.int64
  )
  scores = tf.random.stateless_normal([6, 3], seed=[0, 0])
  loss = losses.list_mle(runtimes, scores)
  replicas = zip(tf.split(runtimes, 3), tf.split(scores, 3), strict=True)
  sums = [losses.sum_over_modules(losses.list_mle(r, s), r) for r, s in replicas]
  assert sum(count.numpy() for _, count in sums) == 3
  mean = sum(total for total, _ in sums) / sum(count for _, count in sums)
  np.testing.assert_allclose(mean, np.mean(loss.numpy()[[0, 2, 4]]), rtol=1e-6)


def test_make_loss_by_name_and_as_a_sum():
  runtimes, scores = (array[np.newaxis] for array in _random_module(0, 10))
  np.testing.assert_array_equal(
    losses.make_loss('softmax')(runtimes, scores), losses.softmax(runtimes, scores)
  )
  loss = losses.make_loss({'list_mle': 2, 'mse': 0.1})
  expected = 2 * losses.list_mle(runtimes, scores) + 0.1 * losses.mse(runtimes, scores)
  np.testing.assert_allclose(loss(runtimes, scores), expected, rtol=1e-6)
  np.testing.assert_allclose(
    tf.function(loss, jit_compile=True)(runtimes, scores), expected, rtol=1e-5
  )


@pytest.mark.parametrize(
  ('text', 'weights'),
  [
    ('list_mle', {'list_mle': 1}),
    ('list_mle:1,mse:0.1', {'list_mle': 1, 'mse': 0.1}),
    (' softmax : 2e-1 , pairwise_hinge ', {'softmax': 0.2, 'pairwise_hinge': 1}),
  ],
)
def test_parse_loss(text, weights):
  assert losses.parse_loss(text) == weights


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (
      'listmle',
      "unknown loss: found 'listmle', expected one of list_mle, pairwise_hinge, pairwise_logistic, "
      'softmax, approx_ndcg, mse',
    ),
    ('', "unknown loss: found ''"),
    ('mse,', "unknown loss: found ''"),
    ('mse:1,mse:2', "named twice: .*'mse' once"),
    ('mse:', "not a number: found 'mse:'"),
    ('mse:1:2', 'not a number'),
    ('mse:big', "not a number: found 'mse:big'"),
    ('mse:0', 'out of range: found mse:0.0, expected a positive number'),
    ('mse:-1', 'out of range'),
    ('mse:nan', 'out of range'),
    ('mse:inf', 'out of range'),
  ],
)
def test_parse_loss_refuses(text, message):
  with pytest.raises(errors.InputError, match=f'^loss: .*{message}'):
    losses.parse_loss(text)


def test_make_loss_refuses():
  with pytest.raises(errors.InputError, match='unknown loss'):
    losses.make_loss('LIST_MLE')
  with pytest.raises(errors.InputError, match='no loss'):
    losses.make_loss({})
  with pytest.raises(errors.InputError, match='out of range'):
    losses.make_loss({'mse': 0})
