"""Losses that train scores to rank the configs of each module. The only file that uses TF-Ranking.

Every loss has the contract `loss(runtimes, scores) -> float32 [B]`, for a batch of B modules with
up to K configs each.

- runtimes: int64 [B, K], >= 1, lower is better, in any unit (tile: fixed point of runtime /
  normalizer). An entry is -1 where a config was not measured and as padding. Such an entry has
  gradient 0 and no effect on the value or on the gradient of the others. Runtimes are compared as
  int64, because 910876401 and 910876402 would be equal as float32.
- scores: floats [B, K], lower = predicted faster. They are cast to float32, because bfloat16 breaks
  most losses.
- result: a mean over the configs of a module, or over its pairs of configs, so it does not depend
  on the amount of padding. It is 0, with gradient 0, for a module in which no two runtimes differ.
  Means over modules must leave such modules out, see `sum_over_modules`.

Runtimes below 1 other than -1 are refused: 0 means "no label" in the public test files, and negated
runtimes would all count as padding. In eager mode, an `InputError` is raised. A tf.function cannot
raise once XLA has compiled it, so the reader of the records must check them. If the reader does
not, the loss of the module is NaN.

Higher is better in TF-Ranking, for labels and for logits. The sign is changed in one place,
`_Lists.of`.

Every loss compiles under XLA, with static and dynamic shapes, and gives the same value each time.
Every loss but `mse` needs memory for a few float32 [B, K, K]. The losses of TF-Ranking draw random
numbers to shuffle ties. That has no effect here, except that
`tf.config.experimental.enable_op_determinism` requires a `tf.random.set_seed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
import types
from typing import Any

import tensorflow as tf

from tpu_graphs import compat
from tpu_graphs import errors
from tpu_graphs.modules import module

Loss = Callable[[Any, Any], tf.Tensor]


def list_mle(runtimes: Any, scores: Any) -> tf.Tensor:
  """Computes ListMLE, divided by the number of configs.

  Source: Xia et al., Listwise approach to learning to rank, 2008. With logit = -score, the loss is
  the mean over configs i of log(sum of exp(logit_j) over j not faster than i) - logit_i. That is
  the negative log-likelihood that configs are drawn in the order of their runtimes, each with its
  softmax probability among the remaining configs. Configs with equal runtimes all compete with
  each other (Breslow's treatment of ties), so that their order has no effect.

  TF-Ranking's ListMLELoss is not used: it is -inf where the spread of scores is about 104 or more,
  counts padding and shuffles ties.
  """
  lists = _Lists.of(runtimes, scores)
  not_faster = lists.valid[:, tf.newaxis, :] & ~lists.faster()
  # Entry [b, i, j] of `differences`, [B, K, K], is the logit of j minus the logit of i. XLA makes
  # O(K**2) of tf.math.cumulative_logsumexp after a sort too, which is 17 times slower on CPU at
  # K = 1000. The masked value is finite, so that the gradient of rows without any valid entry is
  # finite too.
  differences = lists.logits[:, tf.newaxis, :] - lists.logits[:, :, tf.newaxis]
  masked = tf.where(not_faster, differences, tf.float32.min)
  losses = tf.reduce_logsumexp(masked, axis=2)  # [B, K]
  return lists.finish(lists.mean(losses))


def pairwise_hinge(runtimes: Any, scores: Any) -> tf.Tensor:
  """Computes the pairwise hinge loss.

  The loss is the mean of max(0, 1 - (score of the slower - score of the faster)) over pairs of
  configs with different runtimes. TF-Ranking's PairwiseHingeLoss gives the sums over pairs.
  """
  lists = _Lists.of(runtimes, scores)
  rank = lists.rank()
  slowest = tf.reduce_sum(tf.cast(lists.valid, tf.float32), axis=1, keepdims=True) - 1
  labels = tf.where(lists.valid, slowest - rank, -1.0)  # Integers, exact up to K = 2**24.
  sums = _tf_ranking_loss('PairwiseHingeLoss')(labels, lists.logits)  # [B, K]
  total = tf.reduce_sum(sums, axis=1)
  num_pairs = tf.reduce_sum(rank, axis=1)
  return lists.finish(tf.math.divide_no_nan(total, num_pairs))


def pairwise_logistic(runtimes: Any, scores: Any) -> tf.Tensor:
  """Computes the pairwise logistic loss.

  The loss is the mean of log(1 + exp(score of the faster - score of the slower)) over pairs of
  configs with different runtimes.

  TF-Ranking's PairwiseLogisticLoss is not used: it gives sums over pairs, and pairs with equal
  scores have gradient 0, because it is built from relu and abs. These are all pairs if a model
  starts with equal scores.
  """
  lists = _Lists.of(runtimes, scores)
  pairs = lists.faster()
  # Entry [b, i, j] of `differences`, [B, K, K], is the score of j minus the score of i.
  differences = lists.logits[:, :, tf.newaxis] - lists.logits[:, tf.newaxis, :]
  total = tf.reduce_sum(tf.where(pairs, tf.math.softplus(differences), 0.0), axis=[1, 2])
  num_pairs = tf.reduce_sum(tf.cast(pairs, tf.float32), axis=[1, 2])
  return lists.finish(tf.math.divide_no_nan(total, num_pairs))


def softmax(runtimes: Any, scores: Any) -> tf.Tensor:
  """Computes the cross-entropy between the softmax of -scores and shares proportional to 1 / rank.

  The rank is 1 + the number of faster configs; configs with equal runtimes have equal shares.
  TF-Ranking's SoftmaxLoss computes the cross-entropy.
  """
  lists = _Lists.of(runtimes, scores)
  shares = tf.where(lists.valid, 1 / (1 + lists.rank()), 0.0)
  shares = tf.math.divide_no_nan(shares, tf.reduce_sum(shares, axis=1, keepdims=True))
  labels = tf.where(lists.valid, shares, -1.0)
  # TF-Ranking gives padding a logit of log(1e-10), which is negligible beside a logit of 0.
  logits = lists.logits_below_zero()
  return lists.finish(_tf_ranking_loss('SoftmaxLoss')(labels, logits))


def approx_ndcg(runtimes: Any, scores: Any) -> tf.Tensor:
  """Computes 1 - a smooth NDCG.

  Source: Qin et al., A general approximation framework for direct optimization of IR measures,
  2010. The gain of a config is 1 / (1 + the number of faster configs). TF-Ranking's ApproxNDCGLoss
  computes the NDCG with its temperature of 0.1, so the gradient vanishes where neighbouring scores
  are several units apart.
  """
  lists = _Lists.of(runtimes, scores)
  gains = 1 / (1 + lists.rank())
  # TF-Ranking's gain is 2**label - 1.
  labels = tf.where(lists.valid, tf.math.log1p(gains) / math.log(2.0), -1.0)
  negative_ndcg = _tf_ranking_loss('ApproxNDCGLoss')(labels, lists.logits_below_zero())  # [B, 1]
  return lists.finish(1 + tf.squeeze(negative_ndcg, axis=1))


def mse(runtimes: Any, scores: Any) -> tf.Tensor:
  """Computes the mean over configs of (score - target)**2.

  The targets are log runtimes, standardised within the module. Unlike the other losses, this loss
  trains scores of a known scale, so it is useful as a small addition to one of them. TF-Ranking's
  MeanSquaredLoss is not used, because it would mask all negative targets.
  """
  lists = _Lists.of(runtimes, scores)
  lowest = tf.reduce_min(tf.where(lists.valid, lists.runtimes, tf.int64.max), axis=1, keepdims=True)
  excess = tf.where(lists.valid, lists.runtimes - lowest, 0)  # int64: exact.
  logs = tf.math.log1p(tf.cast(excess, tf.float32) / tf.cast(lowest, tf.float32))
  # Logs are scaled to at most 1, because the square of 1e-19 underflows.
  logs = tf.math.divide_no_nan(logs, tf.reduce_max(logs, axis=1, keepdims=True))
  logs -= lists.mean(logs)[:, tf.newaxis]
  deviation = tf.sqrt(lists.mean(tf.square(logs)))[:, tf.newaxis]
  # The targets are compared with logits, which are negated scores.
  targets = -tf.math.divide_no_nan(logs, deviation)
  return lists.finish(lists.mean(tf.square(lists.logits - targets)))


LOSSES: Mapping[str, Loss] = types.MappingProxyType(
  {
    'list_mle': list_mle,
    'pairwise_hinge': pairwise_hinge,
    'pairwise_logistic': pairwise_logistic,
    'softmax': softmax,
    'approx_ndcg': approx_ndcg,
    'mse': mse,
  }
)


def make_loss(spec: str | Mapping[str, float]) -> Loss:
  """Makes a loss from a name, or a weighted sum of losses.

  Args:
    spec: a key of `LOSSES`, or weights by name, such as {'list_mle': 1, 'mse': 0.1}.

  Raises:
    InputError: there is no name, a name is unknown, or a weight is not a positive number.
  """
  weights = {spec: 1.0} if isinstance(spec, str) else dict(spec)
  _check_weights(weights)

  def loss(runtimes: Any, scores: Any) -> tf.Tensor:
    terms = [weight * LOSSES[name](runtimes, scores) for name, weight in weights.items()]
    return tf.add_n(terms)

  return loss


def parse_loss(text: str) -> dict[str, float]:
  """Reads a loss from a command line, such as 'list_mle' or 'list_mle:1,mse:0.1'.

  Returns:
    The weights by name, for `make_loss`. A name without a weight has weight 1.

  Raises:
    InputError: see `make_loss`; or a name is repeated, or a weight is not a number.
  """
  weights: dict[str, float] = {}
  for part in text.split(','):
    name, separator, weight = (piece.strip() for piece in part.partition(':'))
    if name in weights:
      raise errors.InputError(
        'loss named twice', where='loss', found=repr(text), expected=f'{name!r} once'
      )
    try:
      weights[name] = float(weight) if separator else 1.0
    except ValueError:
      raise errors.InputError(
        'weight of a loss is not a number',
        where='loss',
        found=repr(part),
        expected="NAME:WEIGHT, such as 'list_mle:1,mse:0.1'",
      ) from None
  _check_weights(weights)
  return weights


def is_comparable(runtimes: Any) -> tf.Tensor:
  """Returns for each module whether a loss can learn from it, bool [B].

  A loss can learn from a module if two of its measured runtimes differ.

  Args:
    runtimes: int64 [B, K].
  """
  runtimes = tf.convert_to_tensor(runtimes)
  lowest = tf.reduce_min(tf.where(runtimes > 0, runtimes, tf.int64.max), axis=1)
  return tf.reduce_max(runtimes, axis=1) > lowest


def sum_over_modules(losses: tf.Tensor, runtimes: Any) -> tuple[tf.Tensor, tf.Tensor]:
  """Sums losses over modules, leaving out modules without two different runtimes.

  The mean over a batch that is spread over replicas is the sum of the replicas' sums divided by the
  sum of their counts (with `tf.math.divide_no_nan`, since a batch may have no such module). It
  differs from the mean of the replicas' means.

  Args:
    losses: float32 [B], from a loss of this file.
    runtimes: int64 [B, K], as given to the loss.

  Returns:
    The sum of the losses and the number of modules in the sum, both float32 scalars.
  """
  total = tf.reduce_sum(losses)
  count = tf.reduce_sum(tf.cast(is_comparable(runtimes), tf.float32))
  return total, count


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Lists:
  """The arguments of a loss, checked, with the sign that TF-Ranking expects.

  Attributes:
    runtimes: the runtimes as given, int64 [B, K].
    valid: whether each config was measured, bool [B, K].
    logits: the negated scores, float32 [B, K], higher = predicted faster; 0 where not valid, even
      if the score is NaN.
    refused: whether each module has a runtime that is neither >= 1 nor -1, bool [B]; never true in
      eager mode.
  """

  runtimes: tf.Tensor
  valid: tf.Tensor
  logits: tf.Tensor
  refused: tf.Tensor

  @classmethod
  def of(cls, runtimes: Any, scores: Any) -> _Lists:
    """Checks the arguments of a loss and changes the sign of the scores."""
    runtimes, scores = tf.convert_to_tensor(runtimes), tf.convert_to_tensor(scores)
    if runtimes.dtype != tf.int64:
      raise errors.InputError(
        'wrong dtype', where='runtimes', found=runtimes.dtype.name, expected='int64'
      )
    if not scores.dtype.is_floating:
      raise errors.InputError(
        'wrong dtype', where='scores', found=scores.dtype.name, expected='a float dtype'
      )
    if not runtimes.shape.is_compatible_with([None, None]):
      raise errors.InputError(
        'wrong shape', where='runtimes', found=runtimes.shape, expected='[B, K]'
      )
    if not scores.shape.is_compatible_with(runtimes.shape):
      raise errors.InputError(
        'wrong shape',
        where='scores',
        found=scores.shape,
        expected=f'{runtimes.shape}, the shape of the runtimes',
      )
    valid = runtimes > 0
    refused = ~valid & (runtimes != module.UNMEASURED)
    if tf.executing_eagerly() and tf.reduce_any(refused):
      index = tf.where(refused)[0].numpy().tolist()
      raise errors.InputError(
        'runtime out of range',
        where=f'runtimes{index}',
        found=runtimes[index].numpy(),
        expected=f'>= 1, or {module.UNMEASURED} where not measured',
        fix='give runtimes as measured: lower is better, not negated',
      )
    return cls(
      runtimes=runtimes,
      valid=valid,
      logits=tf.where(valid, -tf.cast(scores, tf.float32), 0.0),
      refused=tf.reduce_any(refused, axis=1),
    )

  def faster(self) -> tf.Tensor:
    """Returns the faster configs, bool [B, K, K].

    Entry [b, i, j] is true if configs i and j of module b were measured and j is faster than i.
    """
    is_faster = self.runtimes[:, tf.newaxis, :] < self.runtimes[:, :, tf.newaxis]
    return self.valid[:, tf.newaxis, :] & is_faster

  def rank(self) -> tf.Tensor:
    """Counts the configs faster than each config, float32 [B, K]; 0 where not valid."""
    return tf.reduce_sum(tf.cast(self.faster(), tf.float32), axis=2)

  def logits_below_zero(self) -> tf.Tensor:
    """Shifts the logits so that the highest logit of each module is 0, float32 [B, K].

    Entries that are not valid are 0.
    """
    valid_logits = tf.where(self.valid, self.logits, tf.float32.min)
    highest = tf.reduce_max(valid_logits, axis=1, keepdims=True)
    return tf.where(self.valid, self.logits - tf.stop_gradient(highest), 0.0)

  def mean(self, values: tf.Tensor) -> tf.Tensor:
    """Averages the valid entries of each module: float32 [B, K] -> [B]; 0 where there is none."""
    total = tf.reduce_sum(tf.where(self.valid, values, 0.0), axis=1)
    count = tf.reduce_sum(tf.cast(self.valid, tf.float32), axis=1)
    return tf.math.divide_no_nan(total, count)

  def finish(self, losses: tf.Tensor) -> tf.Tensor:
    """Replaces the losses, float32 [B], of modules that give no loss.

    The loss is 0 for modules without two different runtimes and NaN for refused modules.
    """
    losses = tf.where(is_comparable(self.runtimes), losses, 0.0)
    return tf.where(self.refused, math.nan, losses)


def _check_weights(weights: Mapping[str, float]) -> None:
  known = ', '.join(LOSSES)
  if not weights:
    raise errors.InputError('no loss', where='loss', expected=f'one or more of {known}')
  for name, weight in weights.items():
    if name not in LOSSES:
      raise errors.InputError(
        'unknown loss', where='loss', found=repr(name), expected=f'one of {known}'
      )
    if not 0 < weight < math.inf:
      raise errors.InputError(
        'weight of a loss out of range',
        where='loss',
        found=f'{name}:{weight}',
        expected='a positive number',
      )


@functools.cache
def _tf_ranking_loss(name: str) -> tf.keras.losses.Loss:
  """Makes a Keras loss of TF-Ranking without reduction over the batch."""
  return getattr(compat.ranking_losses(), name)(reduction=tf.keras.losses.Reduction.NONE)
