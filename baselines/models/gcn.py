"""Graph convolution (Kipf, Welling: Semi-supervised classification with graph convolutional networks, 2017)."""

from __future__ import annotations

import tensorflow as tf
import tensorflow_gnn as tfgnn

from baselines.models import parts


class GCNLayer(tf.keras.layers.Layer):
  """One convolution over the undirected graph with self-loops, D^-1/2 (A + A^T + I) D^-1/2, and a residual."""

  def __init__(self, hidden: int):
    super().__init__()
    self._dense = tf.keras.layers.Dense(hidden)
    self._normalize = tf.keras.layers.LayerNormalization()

  def call(self, graph: tfgnn.GraphTensor, state: tf.Tensor) -> tf.Tensor:
    """state: [N, K, H] -> [N, K, H]."""
    scale = tf.math.rsqrt(1 + _sum_neighbours(graph, tf.ones_like(state[:, :1, :1])))  # [N, 1, 1]
    scaled = state * scale
    return self._normalize(state + tf.nn.relu(self._dense(scale * (scaled + _sum_neighbours(graph, scaled)))))


def _sum_neighbours(graph: tfgnn.GraphTensor, state: tf.Tensor) -> tf.Tensor:
  return sum(parts.pool_neighbours(graph, state, towards=tag, reduce='sum') for tag in (tfgnn.SOURCE, tfgnn.TARGET))


class ResGCN(parts.EarlyJoin):
  """Residual graph convolutions over ops that know their config from the start."""

  def __init__(self, kind: str, options: parts.PartOptions, statistics: parts.Statistics):
    super().__init__(kind, options, statistics, [GCNLayer(options.hidden) for _ in range(options.layers)])
