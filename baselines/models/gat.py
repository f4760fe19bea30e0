"""GATv2, a layer of graph attention.

Source: Brody, Alon, Yahav: How attentive are graph attention networks?, 2021, arXiv 2105.14491.
"""

from __future__ import annotations

import tensorflow as tf

from baselines.models import parts
from baselines.models import structure


class GATv2Layer(parts.MessageLayer):
  """Message passing layer that weights each neighbour by attention.

  For each head, update_i = W h_i + sum of a_ij V_r h_j over relations r and over ops j that send
  to op i via r. a_ij is the softmax over these j of v_r . leaky_relu(Q_r h_i + V_r h_j), with a
  slope of 0.2. Each config is computed separately. W takes the place of self-loops, because an op
  without neighbours has nothing to attend to.
  """

  LINEAR = False

  def __init__(self, options: parts.PartOptions):
    super().__init__()
    # The projections are W, then Q_r and V_r of each relation.
    self._project = parts.Projections(1 + 2 * options.num_relations, options.hidden)
    self._attend = [_Attention(options) for _ in range(options.num_relations)]

  def update(self, state: tf.Tensor, messages: structure.BetweenOps) -> tf.Tensor:
    itself, *projected = self._project(state)
    queries, values = projected[::2], projected[1::2]
    relations = messages.relations
    attended = [
      attend(query, value, relation)
      for attend, query, value, relation in zip(
        self._attend, queries, values, relations, strict=True
      )
    ]
    return tf.add_n([itself, *attended])


class _Attention(tf.keras.layers.Layer):
  """Sum of the values that each op receives via one relation, weighted by attention."""

  def __init__(self, options: parts.PartOptions):
    super().__init__()
    self._shape = [options.attention_heads, options.hidden // options.attention_heads]

  def build(self, input_shape):
    self._score = self.add_weight('score', shape=self._shape)
    super().build(input_shape)

  def call(self, queries: tf.Tensor, values: tf.Tensor, relation: structure.Relation) -> tf.Tensor:
    """Attends with queries [N, K, H] to values [N, K, H]; returns [N, K, H]."""
    shape = tf.shape(values)
    by_head = tf.concat([shape[:-1], self._shape], axis=0)
    values = relation.senders.spread(tf.reshape(values, by_head))  # [M, K, heads, H / heads]
    queries = relation.receivers.spread(tf.reshape(queries, by_head))
    scores = tf.reduce_sum(tf.nn.leaky_relu(queries + values) * self._score, axis=-1, keepdims=True)
    weights = relation.receivers.softmax(scores)  # [M, K, heads, 1]
    attended = relation.receivers.sum(weights * values)  # [N, K, heads, H / heads]
    return tf.reshape(attended, shape)
