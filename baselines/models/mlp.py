"""Model without message passing, which shows how much the edges of graphs contribute."""

from __future__ import annotations

import tensorflow as tf
import tensorflow_gnn as tfgnn

from baselines.models import parts
from baselines.models import structure as structure_lib


class MLP(tf.keras.Model):
  """Dense layers over the pooled encodings of ops and the encodings of configs."""

  def __init__(self, kind: str, options: parts.PartOptions, statistics: parts.Statistics):
    super().__init__()
    self._op_input = parts.OpInput(options, statistics)
    self._config_input = parts.CONFIG_INPUTS[kind](statistics)
    self._encode_ops = tf.keras.layers.Dense(options.hidden, activation='relu')
    self._of_ops = tf.keras.layers.Dense(options.hidden)
    self._of_configs = tf.keras.layers.Dense(options.hidden)
    self._layers = [
      tf.keras.layers.Dense(options.hidden, activation='relu') for _ in range(options.layers)
    ]
    self._head = parts.Head(options)

  def call(self, graph: tfgnn.GraphTensor) -> tf.Tensor:
    structure = structure_lib.Structure.of(graph, directed=False)
    pooled = parts.pool_ops(structure.modules, self._encode_ops(self._op_input(graph)))  # [B, 2 H]
    configs = self._of_configs(self._config_input(graph))
    configs = self._config_input.to_modules(structure, configs)  # [B, K, H]
    state = tf.nn.relu(tf.expand_dims(self._of_ops(pooled), 1) + configs)
    for layer in self._layers:
      state = layer(state)
    return self._head(state)
