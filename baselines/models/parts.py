"""The parts that models are put together from.

Shapes: B modules, K configs each, N ops, NC configurable ops, H hidden units. States are [N, K, H].
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

import numpy as np
import tensorflow as tf
import tensorflow_gnn as tfgnn

from tpu_graphs import features
from tpu_graphs import statistics as statistics_lib

Statistics = Mapping[str, statistics_lib.ColumnStatistics]

# Layout values are -1 ("no dimension") to 5, and what is larger is taken for the last.
_LAYOUT_VALUES = features.LAYOUT_DIMENSIONS + 1
_FIRST_DIMENSION = features.node_feature_names().index('shape_dimensions_0')


@dataclasses.dataclass(frozen=True)
class PartOptions:
  """Sizes of the layers of a model.

  Attributes:
    hidden: H.
    layers: number of message passing layers.
    opcode_embedding: size of the embedding of an opcode.
  """
  hidden: int = 64
  layers: int = 3
  opcode_embedding: int = 64


class Normalizer(tf.keras.layers.Layer):
  """Standardises sign(x) * log1p(|x|) of each column by the statistics of the train split; constant columns become 0.

  The statistics are weights that are not trained, so a model's checkpoint holds them.
  """

  def __init__(self, statistics: statistics_lib.ColumnStatistics):
    super().__init__()
    self._statistics = statistics

  def build(self, input_shape):
    scale = np.where(self._statistics.constant, 0.0, 1.0 / np.maximum(self._statistics.log_std, 1e-6))
    for name, value in (('mean', self._statistics.log_mean), ('scale', scale)):
      weight = self.add_weight(name, shape=value.shape, trainable=False,
                               initializer=tf.keras.initializers.Constant(value.astype(np.float32)))
      setattr(self, name, weight)
    super().build(input_shape)

  def call(self, x):
    x = tf.cast(x, tf.float32)
    return (tf.sign(x) * tf.math.log1p(tf.abs(x)) - self.mean) * self.scale


class OpEncoder(tf.keras.layers.Layer):
  """What is known of each op without any config: GraphTensor -> [N, H], without an activation."""

  def __init__(self, options: PartOptions, statistics: Statistics):
    super().__init__()
    self._normalize = Normalizer(statistics['feat'])
    self._normalize_extra = Normalizer(statistics['extra_feat']) if 'extra_feat' in statistics else None
    self._embed = tf.keras.layers.Embedding(features.NUM_OPCODES, options.opcode_embedding)
    self._hidden = tf.keras.layers.Dense(options.hidden, activation='relu')
    self._project = tf.keras.layers.Dense(options.hidden)

  def call(self, graph: tfgnn.GraphTensor) -> tf.Tensor:
    op = graph.node_sets['op']
    parts = [self._embed(op['opcode']), self._normalize(op['feat'])]
    if self._normalize_extra is not None:
      parts.append(self._normalize_extra(op['extra_feat']))
    return self._project(self._hidden(tf.concat(parts, axis=-1)))


class TileConfigEncoder(tf.keras.layers.Layer):
  """Configs of modules: GraphTensor -> [B, K, H], without an activation."""

  def __init__(self, options: PartOptions, statistics: Statistics):
    super().__init__()
    self._normalize = Normalizer(statistics['config_feat'])
    self._project = tf.keras.layers.Dense(options.hidden)

  def call(self, graph: tfgnn.GraphTensor) -> tf.Tensor:
    return self._project(self._normalize(graph.context['config_feat']))

  def to_ops(self, graph: tfgnn.GraphTensor, encoded: tf.Tensor) -> tf.Tensor:
    """[B, K, H] -> [N, K, H]: every op sees its module's config."""
    return tfgnn.broadcast_context_to_nodes(graph, 'op', feature_value=encoded)

  def to_modules(self, graph: tfgnn.GraphTensor, encoded: tf.Tensor) -> tf.Tensor:
    """[B, K, H] as it is."""
    del graph
    return encoded


class LayoutConfigEncoder(tf.keras.layers.Layer):
  """Configs of configurable ops: GraphTensor -> [NC, K, H], without an activation.

  A layout lists dimensions by their number, so each value is taken as a category. What makes an output layout fast is
  how long its minor dimensions are; these lengths are looked up and given beside.
  """

  def __init__(self, options: PartOptions, statistics: Statistics):
    super().__init__()
    self._normalize = Normalizer(statistics['feat'])
    self._project = tf.keras.layers.Dense(options.hidden)

  def call(self, graph: tfgnn.GraphTensor) -> tf.Tensor:
    layouts = tf.cast(graph.node_sets['config_op']['config_feat'], tf.int32)  # [NC, K, 18]
    categories = tf.one_hot(tf.clip_by_value(layouts + 1, 0, _LAYOUT_VALUES - 1), _LAYOUT_VALUES)  # [NC, K, 18, 7]
    of_op = tfgnn.broadcast_node_to_edges(
        graph, 'configures', tfgnn.TARGET, feature_value=self._normalize(graph.node_sets['op']['feat']))
    of_op = tfgnn.pool_edges_to_node(graph, 'configures', tfgnn.SOURCE, 'sum', feature_value=of_op)  # [NC, 140]
    lengths = of_op[:, _FIRST_DIMENSION:_FIRST_DIMENSION + features.LAYOUT_DIMENSIONS]
    output = categories[:, :, :features.LAYOUT_DIMENSIONS, 1:]  # [NC, K, 6, 6]: slot, dimension.
    minor_to_major = tf.einsum('nksd,nd->nks', output, lengths)
    flat = tf.reshape(categories, [-1, tf.shape(layouts)[1], layouts.shape[2] * _LAYOUT_VALUES])
    return self._project(tf.concat([flat, minor_to_major], axis=-1))

  def to_ops(self, graph: tfgnn.GraphTensor, encoded: tf.Tensor) -> tf.Tensor:
    """[NC, K, H] -> [N, K, H]: a configurable op sees its config, others 0."""
    edges = tfgnn.broadcast_node_to_edges(graph, 'configures', tfgnn.SOURCE, feature_value=encoded)
    return tfgnn.pool_edges_to_node(graph, 'configures', tfgnn.TARGET, 'sum', feature_value=edges)

  def to_modules(self, graph: tfgnn.GraphTensor, encoded: tf.Tensor) -> tf.Tensor:
    """[NC, K, H] -> [B, K, H]: the mean over a module's configurable ops."""
    return tfgnn.pool_nodes_to_context(graph, 'config_op', 'mean', feature_value=encoded)


CONFIG_ENCODERS = {'tile': TileConfigEncoder, 'layout': LayoutConfigEncoder}


class Head(tf.keras.layers.Layer):
  """Joined state per module -> score: [B, K, any] -> [B, K]."""

  def __init__(self, options: PartOptions):
    super().__init__()
    self._hidden = tf.keras.layers.Dense(options.hidden, activation='relu')
    self._score = tf.keras.layers.Dense(1)

  def call(self, state: tf.Tensor) -> tf.Tensor:
    return tf.squeeze(self._score(self._hidden(state)), axis=-1)


def pool_ops(graph: tfgnn.GraphTensor, state: tf.Tensor) -> tf.Tensor:
  """Mean and maximum over the ops of each module, [N, ..., H] -> [B, ..., 2 H]."""
  return tf.concat([tfgnn.pool_nodes_to_context(graph, 'op', reduce, feature_value=state)
                    for reduce in ('mean', 'max_no_inf')], axis=-1)


class EarlyJoin(tf.keras.Model):
  """Ops and configs are joined first, then messages pass between ops, for each config on its own.

  Joining is a dense layer over the concatenation of an op's and its config's encoding. It is computed as the sum of a
  part per op and a part per config, so nothing of size ops x configs x inputs is ever made.
  """

  def __init__(self, kind: str, options: PartOptions, statistics: Statistics, layers: list[tf.keras.layers.Layer]):
    super().__init__()
    self._encode_ops = OpEncoder(options, statistics)
    self._encode_configs = CONFIG_ENCODERS[kind](options, statistics)
    self._layers = layers
    self._head = Head(options)

  def call(self, graph: tfgnn.GraphTensor) -> tf.Tensor:
    ops = self._encode_ops(graph)[:, tf.newaxis]  # [N, 1, H]
    configs = self._encode_configs.to_ops(graph, self._encode_configs(graph))  # [N, K, H]
    state = tf.nn.relu(ops + configs)
    for layer in self._layers:
      state = layer(graph, state)
    return self._head(pool_ops(graph, state))


def pool_neighbours(graph: tfgnn.GraphTensor, state: tf.Tensor, *, towards: int, reduce: str) -> tf.Tensor:
  """For each op, the reduction of `state` over its operands (towards TARGET) or consumers (SOURCE): [N, ...] both."""
  other = tfgnn.SOURCE if towards == tfgnn.TARGET else tfgnn.TARGET
  messages = tfgnn.broadcast_node_to_edges(graph, 'operand', other, feature_value=state)
  return tfgnn.pool_edges_to_node(graph, 'operand', towards, reduce, feature_value=messages)
