"""A model without message passing, to tell what the graph's edges are worth."""

from __future__ import annotations

import tensorflow as tf
import tensorflow_gnn as tfgnn

from baselines.models import parts


class MLP(tf.keras.Model):
  """Pooled op encodings beside pooled config encodings, through dense layers."""

  def __init__(self, kind: str, options: parts.PartOptions, statistics: parts.Statistics):
    super().__init__()
    self._encode_ops = parts.OpEncoder(options, statistics)
    self._encode_configs = parts.CONFIG_ENCODERS[kind](options, statistics)
    self._join = tf.keras.layers.Dense(options.hidden)
    self._layers = [tf.keras.layers.Dense(options.hidden, activation='relu') for _ in range(options.layers)]
    self._head = parts.Head(options)

  def call(self, graph: tfgnn.GraphTensor) -> tf.Tensor:
    ops = self._join(parts.pool_ops(graph, tf.nn.relu(self._encode_ops(graph))))  # [B, H]
    configs = self._encode_configs.to_modules(graph, self._encode_configs(graph))  # [B, K, H]
    state = tf.nn.relu(ops[:, tf.newaxis] + configs)
    for layer in self._layers:
      state = layer(state)
    return self._head(state)
