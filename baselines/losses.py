"""Losses that train scores to rank the configs of each module. The only file that uses TF-Ranking.

The contract of every loss, `loss(runtimes, scores) -> float32 [B]`, for a batch of B modules
with up to K configs each:
  runtimes: int64 [B, K], >= 1, lower is better, in any unit (tile: fixed point of runtime /
    normalizer). -1 where a config was not measured, and as padding: such an entry has gradient 0
    and no effect on the value or on the gradient
    of the others. Runtimes are compared as int64: as float32, 910876401 and 910876402 would be
      equal.
  scores: floats [B, K], lower = predicted faster; cast to float32, because bfloat16 breaks most
  losses. The result is a mean over a module's configs, or over its pairs of configs, so it does
  not depend on how far the batch
    is padded. It is 0, with gradient 0, for a module in which no two runtimes differ. Means over
    modules must leave
    such modules out: `sum_over_modules`.
  Runtimes below 1 other than -1 are refused: 0 stands for "no label" in the public test files,
  and negated runtimes
    would all count as padding. In eager mode that is an `InputError`. A tf.function cannot raise
    once XLA has compiled
    it: whoever reads the records must have checked them, and if not, the module's loss is NaN.

Higher is better in TF-Ranking, for labels and for logits. The sign is turned in one place,
`_Lists.of`.

Every loss compiles under XLA, with static and dynamic shapes, gives the same value each time,
and needs memory for a few float32 [B, K, K], `mse` excepted. The losses of TF-Ranking draw
random numbers to shuffle ties, which has no effect here, but makes
`tf.config.experimental.enable_op_determinism` want a `tf.random.set_seed`.
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
  """ListMLE (Xia et al., Listwise approach to learning to rank, 2008), divided by the number of
  configs.

  With logit = -score, the mean over configs i of log(sum of exp(logit_j) over j not faster than
  i) - logit_i: the negative log-likelihood that configs are drawn in the order of their
  runtimes, each with its softmax probability among those left. Configs with equal runtimes all
  compete with each other (Breslow's treatment of ties), so that their order has no effect.

  TF-Ranking's ListMLELoss is -inf from a spread of scores of about 104 on, counts padding and
  shuffles ties.
  """
  lists = _Lists.of(runtimes, scores)
  not_faster = lists.valid[:, tf.newaxis, :] & ~lists.faster()
  # A matrix rather than tf.math.cumulative_logsumexp after a sort: XLA makes O(K**2) of that too,
  # 17 times slower on CPU at K = 1000. The masked value is finite, so that the gradient of rows
  # without any valid entry is.
  differences = (
    lists.logits[:, tf.newaxis, :] - lists.logits[:, :, tf.newaxis]
  )  # [B, K, K], [b, i, j]: j's less i's.
  losses = tf.reduce_logsumexp(tf.where(not_faster, differences, tf.float32.min), axis=2)  # [B, K]
  return lists.finish(lists.mean(losses))


def pairwise_hinge(runtimes: Any, scores: Any) -> tf.Tensor:
  """Mean over pairs of configs with different runtimes of max(0, 1 - (score of the slower -
  score of the faster)).

  By TF-Ranking's PairwiseHingeLoss, which gives sums over pairs.
  """
  lists = _Lists.of(runtimes, scores)
  rank = lists.rank()
  slowest = tf.reduce_sum(tf.cast(lists.valid, tf.float32), axis=1, keepdims=True) - 1
  labels = tf.where(lists.valid, slowest - rank, -1.0)  # Integers, exact up to K = 2**24.
  sums = _tf_ranking_loss('PairwiseHingeLoss')(labels, lists.logits)  # [B, K]
  return lists.finish(
    tf.math.divide_no_nan(tf.reduce_sum(sums, axis=1), tf.reduce_sum(rank, axis=1))
  )


def pairwise_logistic(runtimes: Any, scores: Any) -> tf.Tensor:
  """Mean over pairs of configs with different runtimes of log(1 + exp(score of the faster -
  score of the slower)).

  TF-Ranking's PairwiseLogisticLoss gives sums over pairs, and pairs with equal scores, all of
  them if a model starts
  with equal scores, have gradient 0 in it: it is built from relu and abs.
  """
  lists = _Lists.of(runtimes, scores)
  pairs = lists.faster()
  differences = (
    lists.logits[:, :, tf.newaxis] - lists.logits[:, tf.newaxis, :]
  )  # [B, K, K]: score of j less that of i.
  total = tf.reduce_sum(tf.where(pairs, tf.math.softplus(differences), 0.0), axis=[1, 2])
  return lists.finish(
    tf.math.divide_no_nan(total, tf.reduce_sum(tf.cast(pairs, tf.float32), axis=[1, 2]))
  )


def softmax(runtimes: Any, scores: Any) -> tf.Tensor:
  """Cross-entropy of the softmax of -scores to a distribution that gives each config a share
  proportional to 1 / rank.

  The rank is 1 + the number of faster configs; configs with equal runtimes have equal shares. By
  TF-Ranking's SoftmaxLoss.
  """
  lists = _Lists.of(runtimes, scores)
  shares = tf.where(lists.valid, 1 / (1 + lists.rank()), 0.0)
  shares = tf.math.divide_no_nan(shares, tf.reduce_sum(shares, axis=1, keepdims=True))
  # TF-Ranking gives padding a logit of log(1e-10), which is next to nothing beside a logit of 0.
  logits = lists.logits_below_zero()
  return lists.finish(_tf_ranking_loss('SoftmaxLoss')(tf.where(lists.valid, shares, -1.0), logits))


def approx_ndcg(runtimes: Any, scores: Any) -> tf.Tensor:
  """1 - a smooth NDCG (Qin et al., A general approximation framework for direct optimization of
  IR measures, 2010).

  The gain of a config is 1 / (1 + the number of faster configs). By TF-Ranking's ApproxNDCGLoss
  with its temperature of
  0.1: the gradient vanishes where neighbouring scores are several units apart.
  """
  lists = _Lists.of(runtimes, scores)
  gains = 1 / (1 + lists.rank())
  labels = tf.where(
    lists.valid, tf.math.log1p(gains) / math.log(2.0), -1.0
  )  # TF-Ranking's gain is 2**label - 1.
  negative_ndcg = tf.squeeze(
    _tf_ranking_loss('ApproxNDCGLoss')(labels, lists.logits_below_zero()), axis=1
  )  # [B]
  return lists.finish(1 + negative_ndcg)


def mse(runtimes: Any, scores: Any) -> tf.Tensor:
  """Mean over configs of (score - target)**2, where targets are log runtimes, standardised
  within the module.

  Trains scores of a known scale, unlike the other losses, so it serves as a small addition to
  one of them. TF-Ranking's MeanSquaredLoss would mask all negative targets.
  """
  lists = _Lists.of(runtimes, scores)
  lowest = tf.reduce_min(tf.where(lists.valid, lists.runtimes, tf.int64.max), axis=1, keepdims=True)
  excess = tf.where(lists.valid, lists.runtimes - lowest, 0)  # int64: exact.
  logs = tf.math.log1p(tf.cast(excess, tf.float32) / tf.cast(lowest, tf.float32))
  logs = tf.math.divide_no_nan(
    logs, tf.reduce_max(logs, axis=1, keepdims=True)
  )  # The squares of 1e-19 underflow.
  logs -= lists.mean(logs)[:, tf.newaxis]
  deviation = tf.sqrt(lists.mean(tf.square(logs)))[:, tf.newaxis]
  targets = -tf.math.divide_no_nan(logs, deviation)  # Of logits.
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
  """A loss by name, or a weighted sum of losses.

  Args:
    spec: a key of `LOSSES`, or name -> weight, such as {'list_mle': 1, 'mse': 0.1}.

  Raises:
    InputError: no name, an unknown name, or a weight that is not a positive number.
  """
  weights = {spec: 1.0} if isinstance(spec, str) else dict(spec)
  _check_weights(weights)

  def loss(runtimes: Any, scores: Any) -> tf.Tensor:
    return tf.add_n([weight * LOSSES[name](runtimes, scores) for name, weight in weights.items()])

  return loss


def parse_loss(text: str) -> dict[str, float]:
  """Reads a loss from a command line, 'list_mle' or 'list_mle:1,mse:0.1', as name -> weight for
  `make_loss`.

  A name without weight has weight 1.

  Raises:
    InputError: as for `make_loss`, and where a name is repeated or a weight is not a number.
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
  """Whether a loss can learn from a module: bool [B], two of its measured runtimes differ; from
  int64 [B, K].
  """
  runtimes = tf.convert_to_tensor(runtimes)
  lowest = tf.reduce_min(tf.where(runtimes > 0, runtimes, tf.int64.max), axis=1)
  return tf.reduce_max(runtimes, axis=1) > lowest


def sum_over_modules(losses: tf.Tensor, runtimes: Any) -> tuple[tf.Tensor, tf.Tensor]:
  """What the mean loss over modules is made of; modules without two different runtimes are left
  out.

  The mean over a batch that is spread over replicas is the sum of their sums / the sum of their
  counts (`tf.math.divide_no_nan`: a batch may have no such module). The mean of the replicas'
  means is something else.

  Args:
    losses: float32 [B], from a loss of this file.
    runtimes: int64 [B, K], what the loss was given.

  Returns:
    Sum of the losses and number of modules that it covers, both float32 scalars.
  """
  return tf.reduce_sum(losses), tf.reduce_sum(tf.cast(is_comparable(runtimes), tf.float32))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Lists:
  """The arguments of a loss, checked, with the sign that TF-Ranking wants.

  Attributes:
    runtimes: int64 [B, K], as given.
    valid: bool [B, K], which configs were measured.
    logits: float32 [B, K], higher = predicted faster; 0 where not valid, also in place of NaN.
    refused: bool [B], modules with a runtime that is neither >= 1 nor -1; none in eager mode.
  """

  runtimes: tf.Tensor
  valid: tf.Tensor
  logits: tf.Tensor
  refused: tf.Tensor

  @classmethod
  def of(cls, runtimes: Any, scores: Any) -> _Lists:
    """Checks the arguments of a loss and turns the sign of the scores."""
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
        expected=f'{runtimes.shape}, as the runtimes',
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
        fix='give runtimes as they were measured: lower is better, not negated',
      )
    return cls(
      runtimes=runtimes,
      valid=valid,
      logits=tf.where(valid, -tf.cast(scores, tf.float32), 0.0),
      refused=tf.reduce_any(refused, axis=1),
    )

  def faster(self) -> tf.Tensor:
    """bool [B, K, K]: [b, i, j] is whether configs i and j of module b were measured and j is
    faster than i.
    """
    return self.valid[:, tf.newaxis, :] & (
      self.runtimes[:, tf.newaxis, :] < self.runtimes[:, :, tf.newaxis]
    )

  def rank(self) -> tf.Tensor:
    """float32 [B, K]: number of configs that are faster than each; 0 where not valid."""
    return tf.reduce_sum(tf.cast(self.faster(), tf.float32), axis=2)

  def logits_below_zero(self) -> tf.Tensor:
    """float32 [B, K]: the logits shifted so that the highest of each module is 0; 0 where not
    valid.
    """
    highest = tf.reduce_max(
      tf.where(self.valid, self.logits, tf.float32.min), axis=1, keepdims=True
    )
    return tf.where(self.valid, self.logits - tf.stop_gradient(highest), 0.0)

  def mean(self, values: tf.Tensor) -> tf.Tensor:
    """float32 [B]: mean over the valid entries of float32 [B, K]; 0 where there is none."""
    total = tf.reduce_sum(tf.where(self.valid, values, 0.0), axis=1)
    return tf.math.divide_no_nan(total, tf.reduce_sum(tf.cast(self.valid, tf.float32), axis=1))

  def finish(self, losses: tf.Tensor) -> tf.Tensor:
    """float32 [B]: the losses, but 0 for modules without two different runtimes and NaN for
    those that are refused.
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
  """A Keras loss of TF-Ranking that leaves reduction over the batch to us."""
  return getattr(compat.ranking_losses(), name)(reduction=tf.keras.losses.Reduction.NONE)
