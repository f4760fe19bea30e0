"""GATv2 (Brody, Alon, Yahav: How attentive are graph attention networks?, 2021, arXiv 2105.14491)."""

from __future__ import annotations

import tensorflow as tf

from baselines.models import parts
from baselines.models import structure


class GATv2Layer(parts.MessageLayer):
  """update_i = W h_i + sum over relations r and ops j that send to i by r of a_ij V_r h_j, for each head.

  a_ij is the softmax over these j of v_r . leaky_relu(Q_r h_i + V_r h_j), with a slope of 0.2. All of it is done for
  each config on its own. W takes the place of self-loops: an op without neighbours has nothing to attend to.
  """

  LINEAR = False

  def __init__(self, options: parts.PartOptions):
    super().__init__()
    self._self = tf.keras.layers.Dense(options.hidden, use_bias=False)
    self._attend = [_Attention(options) for _ in range(options.num_relations)]

  def update(self, state: tf.Tensor, messages: structure.BetweenOps) -> tf.Tensor:
    return tf.add_n([self._self(state), *(attend(state, relation) for attend, relation in
                                          zip(self._attend, messages.relations, strict=True))])


class _Attention(tf.keras.layers.Layer):
  """What each op is sent by one relation, weighted by attention."""

  def __init__(self, options: parts.PartOptions):
    super().__init__()
    self._heads = options.attention_heads
    self._query = tf.keras.layers.Dense(options.hidden, use_bias=False)
    self._value = tf.keras.layers.Dense(options.hidden, use_bias=False)

  def build(self, input_shape):
    self._score = self.add_weight('score', shape=[self._heads, self._query.units // self._heads])
    super().build(input_shape)

  def call(self, state: tf.Tensor, relation: structure.Relation) -> tf.Tensor:
    """[N, K, any] -> [N, K, H]."""
    values = relation.senders.spread(self._by_head(self._value(state)))  # [M, K, heads, H / heads]
    queries = relation.receivers.spread(self._by_head(self._query(state)))
    scores = tf.reduce_sum(tf.nn.leaky_relu(queries + values) * self._score, axis=-1, keepdims=True)
    weights = relation.receivers.softmax(scores)  # [M, K, heads, 1]
    sums = relation.receivers.sum(weights * values)  # [N, K, heads, H / heads]
    return tf.reshape(sums, [-1, tf.shape(state)[1], self._query.units])

  def _by_head(self, state: tf.Tensor) -> tf.Tensor:
    """[N, K, H] -> [N, K, heads, H / heads]."""
    return tf.reshape(state, [-1, tf.shape(state)[1], self._heads, state.shape[2] // self._heads])
