"""Connections of a batch of graphs as indices, computed once per batch and shared by all layers.

Everything here has static shapes wherever the graph has static shapes. Everything compiles under
XLA, because sums are computed via unsorted segments.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools

import tensorflow as tf
import tensorflow_gnn as tfgnn


@tf.custom_gradient
def take(values: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
  """Returns the rows of `values`, [n, ...], at `indices`, int32 [m]: -> [m, ...].

  Unlike the gradient of tf.gather, the gradient is dense from the start.
  """
  num_rows = tf.shape(values)[0]

  def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
    return sum_by(upstream, indices, num_rows), None

  return tf.gather(values, indices), gradient


@tf.custom_gradient
def sum_by(values: tf.Tensor, indices: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
  """Sums the rows of `values`, [m, ...], that have the same index: -> [num_rows, ...].

  The sums are computed in float32. The gradient is a plain gather: the gradient of
  tf.math.unsorted_segment_sum passes over all rows three more times to leave out negative indices,
  which do not occur here.
  """
  sums = tf.math.unsorted_segment_sum(tf.cast(values, tf.float32), indices, num_rows)

  def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, None, None]:
    return take(upstream, indices), None, None

  return tf.cast(sums, values.dtype), gradient


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
  """A partition of n rows into groups; groups may be empty.

  Attributes:
    index: the group of each row, int32 [n].
    number: the number of groups, G, int32 scalar.
  """

  index: tf.Tensor
  number: tf.Tensor

  @functools.cached_property
  def sizes(self) -> tf.Tensor:
    """Number of rows in each group, float32 [G]."""
    ones = tf.ones_like(self.index, tf.float32)
    return tf.math.unsorted_segment_sum(ones, self.index, self.number)

  def spread(self, values: tf.Tensor) -> tf.Tensor:
    """Copies the value of each group to its rows: [G, ...] -> [n, ...]."""
    return take(values, self.index)

  def sum(self, values: tf.Tensor) -> tf.Tensor:
    """Sums the rows of each group: [n, ...] -> [G, ...]."""
    return sum_by(values, self.index, self.number)

  def mean(self, values: tf.Tensor) -> tf.Tensor:
    """Averages the rows of each group: [n, ...] -> [G, ...]; 0 for a group without rows."""
    return _scale_rows(self.sum(values), tf.math.reciprocal_no_nan(self.sizes))

  def maximum(self, values: tf.Tensor) -> tf.Tensor:
    """Returns the maximum over the rows of each group: [n, ...] -> [G, ...].

    The maximum of a group without rows is 0. Rows that tie for the maximum share the gradient
    equally.
    """

    @tf.custom_gradient
    def highest(values: tf.Tensor) -> tf.Tensor:
      result = tf.math.unsorted_segment_max(values, self.index, self.number)

      def gradient(upstream: tf.Tensor) -> tf.Tensor:
        is_highest = tf.cast(tf.equal(values, self.spread(result)), values.dtype)
        share = tf.math.divide_no_nan(upstream, self.sum(is_highest))
        return is_highest * self.spread(share)

      return result, gradient

    has_rows = _column(self.sizes > 0, values)
    return tf.where(has_rows, highest(values), tf.zeros([], values.dtype))

  def softmax(self, values: tf.Tensor) -> tf.Tensor:
    """Computes the softmax over the rows of each group: [n, ...] -> [n, ...].

    Every position along the other dimensions has its own softmax.
    """
    shifted = values - self.spread(self.maximum(tf.stop_gradient(values)))
    weights = tf.exp(shifted)
    return weights / self.spread(self.sum(weights))


@dataclasses.dataclass(frozen=True, eq=False)
class Relation:
  """M edges, each from a sender to a receiver, as a sparse matrix.

  Attributes:
    senders: the edges grouped by sender.
    receivers: the edges grouped by receiver.
  """

  senders: Groups
  receivers: Groups

  def reversed(self) -> Relation:
    return Relation(self.receivers, self.senders)

  def sum(self, state: tf.Tensor) -> tf.Tensor:
    """Sums the states that each receiver is sent: [S, ...] -> [R, ...]."""
    return self.receivers.sum(self.senders.spread(state))

  def mean(self, state: tf.Tensor) -> tf.Tensor:
    """Averages the states that each receiver is sent: [S, ...] -> [R, ...].

    The mean is 0 for a receiver that is sent nothing.
    """
    return self.receivers.mean(self.senders.spread(state))

  @functools.cached_property
  def convolved_ones(self) -> tf.Tensor:
    """Result of `convolve` on ones, float32 [N]."""
    return self.convolve(tf.ones_like(self.receivers.sizes))

  def convolve(self, state: tf.Tensor) -> tf.Tensor:
    """Returns the product of D^-1/2 (A + I) D'^-1/2 and the state: [N, ...] -> [N, ...].

    The same N ops are senders and receivers. A[i, j] is the number of edges from j to i. The
    diagonals D and D' hold the sums of rows and columns of A + I.
    """
    scaled = _scale_rows(state, tf.math.rsqrt(1 + self.senders.sizes))
    return _scale_rows(scaled + self.sum(scaled), tf.math.rsqrt(1 + self.receivers.sizes))


@dataclasses.dataclass(frozen=True, eq=False)
class BetweenOps:
  """Messages between ops that each have their own state.

  Attributes:
    relations: R relations, each from N ops to N ops.
  """

  relations: tuple[Relation, ...]

  def here(self, state: tf.Tensor) -> tf.Tensor:
    """Returns the state of each op, [N, ...], without any message."""
    return state

  def mean(self, itself: tf.Tensor, sent: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds to `itself` the mean of the states that each op is sent, summed over relations.

    Args:
      itself: the term of each op itself, [N, ...].
      sent: the states that ops send via each relation, [N, ...] each.

    Returns:
      The sums, [N, ...].
    """
    means = [relation.mean(state) for relation, state in zip(self.relations, sent, strict=True)]
    return tf.add_n([itself, *means])

  def convolve(self, sent: Sequence[tf.Tensor]) -> tf.Tensor:
    """Sums `Relation.convolve` over relations: [N, ...] for each relation -> [N, ...]."""
    convolved = [
      relation.convolve(state) for relation, state in zip(self.relations, sent, strict=True)
    ]
    return tf.add_n(convolved)


@dataclasses.dataclass(frozen=True, eq=False)
class FromModules:
  """Messages between ops that all have the state of their module.

  Nothing is sent, because the state that would arrive is known beforehand.

  Attributes:
    modules: the ops grouped by module.
    between: the messages between ops.
  """

  modules: Groups
  between: BetweenOps

  def here(self, state: tf.Tensor) -> tf.Tensor:
    """Returns the state of each op, without any message: [B, ...] -> [N, ...]."""
    return self.modules.spread(state)

  def mean(self, itself: tf.Tensor, sent: Sequence[tf.Tensor]) -> tf.Tensor:
    """Computes `BetweenOps.mean` of the states copied to all ops: each [B, ...] -> [N, ...].

    Wherever an op is sent anything via a relation, the mean is the state of its module. So a module
    has 2^R cases, one for each subset of the relations, and each op belongs to one of them.
    """
    cases = tf.expand_dims(itself, 1)
    for state in sent:
      with_state = cases + tf.expand_dims(state, 1)
      cases = tf.concat([cases, with_state], axis=1)  # [B, 2, ...], then [B, 4, ...]
    case_of = self.modules.index
    for relation in reversed(self.between.relations):
      case_of = 2 * case_of + tf.cast(relation.receivers.sizes > 0, tf.int32)
    row_shape = tf.shape(itself)[1:]
    rows = tf.reshape(cases, tf.concat([[-1], row_shape], axis=0))
    return take(rows, case_of)

  def convolve(self, sent: Sequence[tf.Tensor]) -> tf.Tensor:
    """Computes `BetweenOps.convolve` of the states copied to all ops: each [B, ...] -> [N, ...]."""
    convolved = [
      _scale_rows(self.here(state), relation.convolved_ones)
      for relation, state in zip(self.between.relations, sent, strict=True)
    ]
    return tf.add_n(convolved)


@dataclasses.dataclass(frozen=True, eq=False)
class FromConfigOps:
  """Messages between ops where only configurable ops have a state; the state of other ops is 0.

  Attributes:
    configures: the relation from configurable ops to ops.
    between: the messages between ops.
  """

  configures: Relation
  between: BetweenOps

  def here(self, state: tf.Tensor) -> tf.Tensor:
    """Returns the state of each op, without any message: [NC, ...] -> [N, ...]."""
    return self.configures.sum(state)

  def mean(self, itself: tf.Tensor, sent: Sequence[tf.Tensor]) -> tf.Tensor:
    """Computes `BetweenOps.mean`: each [NC, ...] -> [N, ...]."""
    return self.between.mean(self.here(itself), [self.here(state) for state in sent])

  def convolve(self, sent: Sequence[tf.Tensor]) -> tf.Tensor:
    """Computes `BetweenOps.convolve`: each [NC, ...] -> [N, ...]."""
    return self.between.convolve([self.here(state) for state in sent])


Messages = BetweenOps | FromModules | FromConfigOps


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
  """The indices of a batch with B modules, N ops and, for layout, NC configurable ops.

  Attributes:
    modules: the ops grouped by module.
    between_ops: messages from operands and from consumers, with one relation for each or one
      relation for both.
    config_modules: the configurable ops grouped by module; None for tile.
    configures: the relation from configurable ops to ops; None for tile.
  """

  modules: Groups
  between_ops: BetweenOps
  config_modules: Groups | None = None
  configures: Relation | None = None

  @classmethod
  def of(cls, graph: tfgnn.GraphTensor, *, directed: bool) -> Structure:
    """Computes the structure of a batch of decoded graphs.

    Args:
      graph: the batch.
      directed: whether operands and consumers are separate relations.
    """
    num_modules = tf.shape(graph.context['config_id'])[0]

    def by_module(name: str) -> Groups:
      module_of = tfgnn.broadcast_context_to_nodes(graph, name, feature_value=tf.range(num_modules))
      return Groups(module_of, num_modules)

    modules = by_module('op')
    num_ops = tf.shape(modules.index)[0]
    source, target = _ends(graph, 'operand')
    if directed:
      operands = Relation(Groups(source, num_ops), Groups(target, num_ops))
      between_ops = BetweenOps((operands, operands.reversed()))
    else:
      senders = Groups(tf.concat([source, target], 0), num_ops)
      receivers = Groups(tf.concat([target, source], 0), num_ops)
      between_ops = BetweenOps((Relation(senders, receivers),))
    if 'config_op' not in graph.node_sets:
      return cls(modules, between_ops)
    config_modules = by_module('config_op')
    num_config_ops = tf.shape(config_modules.index)[0]
    source, target = _ends(graph, 'configures')
    configures = Relation(Groups(source, num_config_ops), Groups(target, num_ops))
    return cls(modules, between_ops, config_modules, configures)

  @functools.cached_property
  def of_configs(self) -> FromModules | FromConfigOps:
    """Messages between ops whose only state is their config."""
    if self.configures is None:
      return FromModules(self.modules, self.between_ops)
    return FromConfigOps(self.configures, self.between_ops)


def _ends(graph: tfgnn.GraphTensor, edge_set: str) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the source and the target of each edge, int32 [M] each."""
  adjacency = graph.edge_sets[edge_set].adjacency
  source = tf.cast(adjacency[tfgnn.SOURCE], tf.int32)
  target = tf.cast(adjacency[tfgnn.TARGET], tf.int32)
  return source, target


def _scale_rows(values: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
  """Multiplies each row of `values`, [n, ...], by its entry of `scale`, float32 [n]."""
  return values * tf.cast(_column(scale, values), values.dtype)


def _column(values: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
  """Reshapes `values` from [n] to [n, 1, ...], with as many dimensions as `like`."""
  return tf.reshape(values, [-1] + [1] * (like.shape.rank - 1))
