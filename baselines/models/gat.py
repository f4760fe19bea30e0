"""GATv2 (Brody, Alon, Yahav: How attentive are graph attention networks?, 2021, arXiv
2105.14491).
"""

from __future__ import annotations

import tensorflow as tf

from baselines.models import parts
from baselines.models import structure


class GATv2Layer(parts.MessageLayer):
  """update_i = W h_i + sum over relations r and ops j that send to i by r of a_ij V_r h_j, for
  each head.

  a_ij is the softmax over these j of v_r . leaky_relu(Q_r h_i + V_r h_j), with a slope of 0.2.
  All of it is done for each config on its own. W takes the place of self-loops: an op without
  neighbours has nothing to attend to.
  """

  LINEAR = False

  def __init__(self, options: parts.PartOptions):
    super().__init__()
    self._project = parts.Projections(
      1 + 2 * options.num_relations, options.hidden
    )  # W, then each Q_r and V_r.
    self._attend = [_Attention(options) for _ in range(options.num_relations)]

  def update(self, state: tf.Tensor, messages: structure.BetweenOps) -> tf.Tensor:
    itself, *projected = self._project(state)
    attended = [
      attend(queries, values, relation)
      for attend, queries, values, relation in zip(
        self._attend, projected[::2], projected[1::2], messages.relations, strict=True
      )
    ]
    return tf.add_n([itself, *attended])


class _Attention(tf.keras.layers.Layer):
  """What each op is sent by one relation, weighted by attention."""

  def __init__(self, options: parts.PartOptions):
    super().__init__()
    self._shape = [options.attention_heads, options.hidden // options.attention_heads]

  def build(self, input_shape):
    self._score = self.add_weight('score', shape=self._shape)
    super().build(input_shape)

  def call(self, queries: tf.Tensor, values: tf.Tensor, relation: structure.Relation) -> tf.Tensor:
    """[N, K, H] twice -> [N, K, H]."""
    shape = tf.shape(values)
    by_head = tf.concat([shape[:-1], self._shape], axis=0)
    values = relation.senders.spread(tf.reshape(values, by_head))  # [M, K, heads, H / heads]
    queries = relation.receivers.spread(tf.reshape(queries, by_head))
    scores = tf.reduce_sum(tf.nn.leaky_relu(queries + values) * self._score, axis=-1, keepdims=True)
    weights = relation.receivers.softmax(scores)  # [M, K, heads, 1]
    return tf.reshape(
      relation.receivers.sum(weights * values), shape
    )  # Of [N, K, heads, H / heads].
