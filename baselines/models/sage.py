"""GraphSAGE (Hamilton, Ying, Leskovec: Inductive representation learning on large graphs, 2017)."""

from __future__ import annotations

import tensorflow as tf
import tensorflow_gnn as tfgnn

from baselines.models import parts


class SAGELayer(tf.keras.layers.Layer):
  """One mean-aggregator layer over both directions of the operand edges, each with its own weights, and a residual.

  The state is normalised over H instead of to length 1: with a dimension of configs, the latter would mix them.
  """

  def __init__(self, hidden: int):
    super().__init__()
    self._self = tf.keras.layers.Dense(hidden)
    self._operands = tf.keras.layers.Dense(hidden, use_bias=False)
    self._consumers = tf.keras.layers.Dense(hidden, use_bias=False)
    self._normalize = tf.keras.layers.LayerNormalization()

  def call(self, graph: tfgnn.GraphTensor, state: tf.Tensor) -> tf.Tensor:
    """state: [N, K, H] -> [N, K, H]."""
    operands = parts.pool_neighbours(graph, state, towards=tfgnn.TARGET, reduce='mean')
    consumers = parts.pool_neighbours(graph, state, towards=tfgnn.SOURCE, reduce='mean')
    update = self._self(state) + self._operands(operands) + self._consumers(consumers)
    return self._normalize(state + tf.nn.relu(update))


class EarlyJoinSAGE(parts.EarlyJoin):
  """GraphSAGE over ops that know their config from the start; the best baseline of the TpuGraphs paper for tiles."""

  def __init__(self, kind: str, options: parts.PartOptions, statistics: parts.Statistics):
    super().__init__(kind, options, statistics, [SAGELayer(options.hidden) for _ in range(options.layers)])
