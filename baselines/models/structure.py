"""What a batch of graphs is connected by, as indices: worked out once per batch and shared by
all layers.

Everything here has static shapes wherever the graph has, and compiles under XLA: sums go by
unsorted segments.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools

import tensorflow as tf
import tensorflow_gnn as tfgnn


@tf.custom_gradient
def take(values: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
  """Rows of `values`, [n, ...], by int32 [m] -> [m, ...].

  Unlike that of tf.gather, the gradient is dense from the start.
  """
  num_rows = tf.shape(values)[0]
  return tf.gather(values, indices), lambda upstream: (sum_by(upstream, indices, num_rows), None)


@tf.custom_gradient
def sum_by(values: tf.Tensor, indices: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
  """Sums of the rows of `values`, [m, ...], that have the same index -> [num_rows, ...]; summed
  in float32.

  The gradient is a plain gather: that of tf.math.unsorted_segment_sum goes over all rows three
  times more, to leave out negative indices, of which there are none here.
  """
  sums = tf.math.unsorted_segment_sum(tf.cast(values, tf.float32), indices, num_rows)
  return tf.cast(sums, values.dtype), lambda upstream: (take(upstream, indices), None, None)


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
  """A partition of n rows into groups, some of which may be empty.

  Attributes:
    index: int32 [n], the group of each row.
    number: int32 scalar, G, the number of groups.
  """

  index: tf.Tensor
  number: tf.Tensor

  @functools.cached_property
  def sizes(self) -> tf.Tensor:
    """float32 [G]."""
    return tf.math.unsorted_segment_sum(
      tf.ones_like(self.index, tf.float32), self.index, self.number
    )

  def spread(self, values: tf.Tensor) -> tf.Tensor:
    """To each row what its group has: [G, ...] -> [n, ...]."""
    return take(values, self.index)

  def sum(self, values: tf.Tensor) -> tf.Tensor:
    """[n, ...] -> [G, ...]."""
    return sum_by(values, self.index, self.number)

  def mean(self, values: tf.Tensor) -> tf.Tensor:
    """[n, ...] -> [G, ...]; 0 for a group without rows."""
    return _scale_rows(self.sum(values), tf.math.reciprocal_no_nan(self.sizes))

  def maximum(self, values: tf.Tensor) -> tf.Tensor:
    """[n, ...] -> [G, ...]; 0 for a group without rows. Rows that are the maximum together share
    the gradient.
    """

    @tf.custom_gradient
    def highest(values: tf.Tensor) -> tf.Tensor:
      result = tf.math.unsorted_segment_max(values, self.index, self.number)

      def gradient(upstream: tf.Tensor) -> tf.Tensor:
        is_highest = tf.cast(tf.equal(values, self.spread(result)), values.dtype)
        return is_highest * self.spread(tf.math.divide_no_nan(upstream, self.sum(is_highest)))

      return result, gradient

    return tf.where(_column(self.sizes > 0, values), highest(values), tf.zeros([], values.dtype))

  def softmax(self, values: tf.Tensor) -> tf.Tensor:
    """Over the rows of each group, for all else on its own: [n, ...] -> [n, ...]."""
    shifted = values - self.spread(self.maximum(tf.stop_gradient(values)))
    weights = tf.exp(shifted)
    return weights / self.spread(self.sum(weights))


@dataclasses.dataclass(frozen=True, eq=False)
class Relation:
  """Edges as a sparse matrix: M of them, each from a sender to a receiver.

  Attributes:
    senders: the edges by sender.
    receivers: the edges by receiver.
  """

  senders: Groups
  receivers: Groups

  def reversed(self) -> Relation:
    return Relation(self.receivers, self.senders)

  def sum(self, state: tf.Tensor) -> tf.Tensor:
    """For each receiver the sum of what it is sent: [S, ...] -> [R, ...]."""
    return self.receivers.sum(self.senders.spread(state))

  def mean(self, state: tf.Tensor) -> tf.Tensor:
    """For each receiver the mean of what it is sent, 0 where it is sent nothing: [S, ...] -> [R,
    ...].
    """
    return self.receivers.mean(self.senders.spread(state))

  @functools.cached_property
  def convolved_ones(self) -> tf.Tensor:
    """`convolve` of ones: float32 [N]."""
    return self.convolve(tf.ones_like(self.receivers.sizes))

  def convolve(self, state: tf.Tensor) -> tf.Tensor:
    """The product of D^-1/2 (A + I) D'^-1/2 and the state of N ops that are senders and
    receivers: [N, ...] both.

    A[i, j] is the number of edges from j to i, D and D' hold the sums of rows and columns of A + I.
    """
    scaled = _scale_rows(state, tf.math.rsqrt(1 + self.senders.sizes))
    return _scale_rows(scaled + self.sum(scaled), tf.math.rsqrt(1 + self.receivers.sizes))


@dataclasses.dataclass(frozen=True, eq=False)
class BetweenOps:
  """Messages between ops, each of which has a state of its own.

  Attributes:
    relations: R of them, each from N ops to N ops.
  """

  relations: tuple[Relation, ...]

  def here(self, state: tf.Tensor) -> tf.Tensor:
    """The state of each op, [N, ...], without any message."""
    return state

  def mean(self, itself: tf.Tensor, sent: Sequence[tf.Tensor]) -> tf.Tensor:
    """itself_i + the sum over relations of the mean of what op i is sent: each [N, ...] -> [N,
    ...].
    """
    return tf.add_n(
      [
        itself,
        *(relation.mean(state) for relation, state in zip(self.relations, sent, strict=True)),
      ]
    )

  def convolve(self, sent: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum over relations of `Relation.convolve`: each [N, ...] -> [N, ...]."""
    return tf.add_n(
      [relation.convolve(state) for relation, state in zip(self.relations, sent, strict=True)]
    )


@dataclasses.dataclass(frozen=True, eq=False)
class FromModules:
  """The same for ops that all have the state of their module: nothing is sent, since it is known
  what comes.

  Attributes:
    modules: the ops by module.
    between: the messages.
  """

  modules: Groups
  between: BetweenOps

  def here(self, state: tf.Tensor) -> tf.Tensor:
    """[B, ...] -> [N, ...]."""
    return self.modules.spread(state)

  def mean(self, itself: tf.Tensor, sent: Sequence[tf.Tensor]) -> tf.Tensor:
    """As `BetweenOps.mean` of states that were spread: each [B, ...] -> [N, ...].

    Where there is a mean, it is the state of the module. So there are 2^R cases per module, and
    each op is one of them.
    """
    cases = tf.expand_dims(itself, 1)
    for state in sent:
      cases = tf.concat(
        [cases, cases + tf.expand_dims(state, 1)], axis=1
      )  # [B, 2, ...], [B, 4, ...]
    case_of = self.modules.index
    for relation in reversed(self.between.relations):
      case_of = 2 * case_of + tf.cast(relation.receivers.sizes > 0, tf.int32)
    return take(tf.reshape(cases, tf.concat([[-1], tf.shape(itself)[1:]], axis=0)), case_of)

  def convolve(self, sent: Sequence[tf.Tensor]) -> tf.Tensor:
    """As `BetweenOps.convolve` of states that were spread: each [B, ...] -> [N, ...]."""
    return tf.add_n(
      [
        _scale_rows(self.here(state), relation.convolved_ones)
        for relation, state in zip(self.between.relations, sent, strict=True)
      ]
    )


@dataclasses.dataclass(frozen=True, eq=False)
class FromConfigOps:
  """The same for configurable ops that have a state, where that of other ops is 0.

  Attributes:
    configures: from configurable ops to ops.
    between: the messages.
  """

  configures: Relation
  between: BetweenOps

  def here(self, state: tf.Tensor) -> tf.Tensor:
    """[NC, ...] -> [N, ...]."""
    return self.configures.sum(state)

  def mean(self, itself: tf.Tensor, sent: Sequence[tf.Tensor]) -> tf.Tensor:
    """As `BetweenOps.mean`: each [NC, ...] -> [N, ...]."""
    return self.between.mean(self.here(itself), [self.here(state) for state in sent])

  def convolve(self, sent: Sequence[tf.Tensor]) -> tf.Tensor:
    """As `BetweenOps.convolve`: each [NC, ...] -> [N, ...]."""
    return self.between.convolve([self.here(state) for state in sent])


Messages = BetweenOps | FromModules | FromConfigOps


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
  """The indices of a batch with B modules, N ops and, for layout, NC configurable ops.

  Attributes:
    modules: the ops by module.
    between_ops: from operands and from consumers, or one relation for both alike.
    config_modules: the configurable ops by module; None for tile.
    configures: from configurable ops to ops; None for tile.
  """

  modules: Groups
  between_ops: BetweenOps
  config_modules: Groups | None = None
  configures: Relation | None = None

  @classmethod
  def of(cls, graph: tfgnn.GraphTensor, *, directed: bool) -> Structure:
    """Of a batch of decoded graphs; `directed` keeps operands and consumers apart."""
    num_modules = tf.shape(graph.context['config_id'])[0]

    def by_module(name: str) -> Groups:
      return Groups(
        tfgnn.broadcast_context_to_nodes(graph, name, feature_value=tf.range(num_modules)),
        num_modules,
      )

    modules = by_module('op')
    num_ops = tf.shape(modules.index)[0]
    source, target = _ends(graph, 'operand')
    if directed:
      operands = Relation(Groups(source, num_ops), Groups(target, num_ops))
      between_ops = BetweenOps((operands, operands.reversed()))
    else:
      between_ops = BetweenOps(
        (
          Relation(
            Groups(tf.concat([source, target], 0), num_ops),
            Groups(tf.concat([target, source], 0), num_ops),
          ),
        )
      )
    if 'config_op' not in graph.node_sets:
      return cls(modules, between_ops)
    config_modules = by_module('config_op')
    source, target = _ends(graph, 'configures')
    configures = Relation(
      Groups(source, tf.shape(config_modules.index)[0]), Groups(target, num_ops)
    )
    return cls(modules, between_ops, config_modules, configures)

  @functools.cached_property
  def of_configs(self) -> FromModules | FromConfigOps:
    """Messages between ops that have no state but their config."""
    if self.configures is None:
      return FromModules(self.modules, self.between_ops)
    return FromConfigOps(self.configures, self.between_ops)


def _ends(graph: tfgnn.GraphTensor, edge_set: str) -> tuple[tf.Tensor, tf.Tensor]:
  """Source and target of each edge, int32 [M]."""
  adjacency = graph.edge_sets[edge_set].adjacency
  return tf.cast(adjacency[tfgnn.SOURCE], tf.int32), tf.cast(adjacency[tfgnn.TARGET], tf.int32)


def _scale_rows(values: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
  """Each row of `values`, [n, ...], times its own float32 of [n]."""
  return values * tf.cast(_column(scale, values), values.dtype)


def _column(values: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
  """[n] -> [n, 1, ...], with as many dimensions as `like`."""
  return tf.reshape(values, [-1] + [1] * (like.shape.rank - 1))
