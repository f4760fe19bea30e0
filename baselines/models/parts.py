"""Parts that models are assembled from.

Shapes: B modules, K configs each, N ops, NC configurable ops, H hidden units. States are [N, K, H].
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math

import numpy as np
import tensorflow as tf
import tensorflow_gnn as tfgnn

from baselines.models import structure as structure_lib
from tpu_graphs.dataset import statistics as statistics_lib
from tpu_graphs.modules import features

Statistics = Mapping[str, statistics_lib.ColumnStatistics]

# Layout values are -1 ("no dimension") to 5. Larger values are treated as 5.
_LAYOUT_VALUES = features.LAYOUT_DIMENSIONS + 1
_FIRST_DIMENSION = features.node_feature_names().index('shape_dimensions_0')


@dataclasses.dataclass(frozen=True)
class PartOptions:
  """Sizes of the layers of a model.

  Attributes:
    hidden: number of hidden units, H.
    layers: number of message passing layers.
    opcode_embedding: size of the embedding of an opcode.
    directed: whether messages from operands and messages from consumers have separate weights. If
      not, both are neighbours in one undirected graph.
    attention_heads: number of attention heads of GATv2; each has H / attention_heads units.
  """

  hidden: int = 64
  layers: int = 3
  opcode_embedding: int = 64
  directed: bool = True
  attention_heads: int = 4

  @property
  def num_relations(self) -> int:
    """Number of relations in `structure.BetweenOps.relations`."""
    return 2 if self.directed else 1


class Normalizer(tf.keras.layers.Layer):
  """Layer that standardises sign(x) * log1p(|x|) of each column; constant columns become 0.

  It uses the statistics of the train split. They are weights that are not trained, so the
  checkpoint of a model holds them.
  """

  def __init__(self, statistics: statistics_lib.ColumnStatistics):
    # The layer computes in float32 under mixed precision too, because values reach 3e9.
    super().__init__(dtype=tf.float32)
    self._statistics = statistics

  def build(self, input_shape):
    inverse_std = 1.0 / np.maximum(self._statistics.log_std, 1e-6)
    scale = np.where(self._statistics.constant, 0.0, inverse_std)
    for name, value in (('mean', self._statistics.log_mean), ('scale', scale)):
      weight = self.add_weight(
        name,
        shape=value.shape,
        trainable=False,
        initializer=tf.keras.initializers.Constant(value.astype(np.float32)),
      )
      setattr(self, name, weight)
    super().build(input_shape)

  def call(self, x):
    x = tf.cast(x, tf.float32)
    return (tf.sign(x) * tf.math.log1p(tf.abs(x)) - self.mean) * self.scale


class LayerNorm(tf.keras.layers.Layer):
  """Layer normalisation over the last dimension: (x - mean) / sqrt(variance + 1e-3).

  Source: Ba, Kiros, Hinton, 2016. The layer computes in float32. It has no gain and no bias, which
  Xu et al. (Understanding and improving layer normalization, 2019) found to be of no help.
  """

  def call(self, x):
    return tf.cast(_standardize(tf.cast(x, tf.float32)), self.compute_dtype)


@tf.custom_gradient
def _standardize(x: tf.Tensor) -> tf.Tensor:
  def mean(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(values, axis=-1, keepdims=True)

  centered = x - mean(x)
  scale = tf.math.rsqrt(mean(tf.square(centered)) + 1e-3)
  result = centered * scale

  # This explicit gradient takes half as many passes over the data as the derived gradient.
  def gradient(upstream: tf.Tensor) -> tf.Tensor:
    return scale * (upstream - mean(upstream) - result * mean(upstream * result))

  return result, gradient


class OpInput(tf.keras.layers.Layer):
  """Embedded opcode and normalised features of each op, without configs: GraphTensor -> [N, F]."""

  def __init__(self, options: PartOptions, statistics: Statistics):
    super().__init__()
    self._normalize = Normalizer(statistics['feat'])
    self._normalize_extra = None
    if 'extra_feat' in statistics:
      self._normalize_extra = Normalizer(statistics['extra_feat'])
    self._embed = tf.keras.layers.Embedding(features.NUM_OPCODES, options.opcode_embedding)

  def call(self, graph: tfgnn.GraphTensor) -> tf.Tensor:
    op = graph.node_sets['op']
    known = [self._embed(op['opcode']), self._normalize(op['feat'])]
    if self._normalize_extra is not None:
      known.append(self._normalize_extra(op['extra_feat']))
    return tf.concat([tf.cast(part, self.compute_dtype) for part in known], axis=-1)


class TileConfigInput(tf.keras.layers.Layer):
  """Normalised configs of modules: GraphTensor -> [B, K, 24]."""

  def __init__(self, statistics: Statistics):
    super().__init__()
    self._normalize = Normalizer(statistics['config_feat'])

  def call(self, graph: tfgnn.GraphTensor) -> tf.Tensor:
    return self._normalize(graph.context['config_feat'])

  def to_modules(self, structure: structure_lib.Structure, encoded: tf.Tensor) -> tf.Tensor:
    """Returns `encoded`, [B, K, H], unchanged."""
    del structure
    return encoded


class LayoutConfigInput(tf.keras.layers.Layer):
  """Configs of configurable ops: GraphTensor -> [NC, K, 132].

  A layout lists dimensions by their number, so each value is encoded as a category. The lengths of
  the minor dimensions decide whether an output layout is fast, so these lengths are looked up and
  added as features.
  """

  def __init__(self, statistics: Statistics):
    super().__init__(dtype=tf.float32)
    self._normalize = Normalizer(statistics['feat'])

  def call(self, graph: tfgnn.GraphTensor) -> tf.Tensor:
    layouts = tf.cast(graph.node_sets['config_op']['config_feat'], tf.int32)  # [NC, K, 18]
    indices = tf.clip_by_value(layouts + 1, 0, _LAYOUT_VALUES - 1)
    categories = tf.one_hot(indices, _LAYOUT_VALUES)  # [NC, K, 18, 7]
    normalized = self._normalize(graph.node_sets['op']['feat'])  # [N, 140]
    of_edges = tfgnn.broadcast_node_to_edges(
      graph, 'configures', tfgnn.TARGET, feature_value=normalized
    )
    of_config_ops = tfgnn.pool_edges_to_node(
      graph, 'configures', tfgnn.SOURCE, 'sum', feature_value=of_edges
    )  # [NC, 140]
    end = _FIRST_DIMENSION + features.LAYOUT_DIMENSIONS
    lengths = of_config_ops[:, _FIRST_DIMENSION:end]  # [NC, 6]
    # The axes of `output` are NC, K, slot and dimension: [NC, K, 6, 6].
    output = categories[:, :, : features.LAYOUT_DIMENSIONS, 1:]
    minor_to_major = tf.einsum('nksd,nd->nks', output, lengths)
    flat = tf.reshape(categories, [-1, tf.shape(layouts)[1], layouts.shape[2] * _LAYOUT_VALUES])
    return tf.concat([flat, minor_to_major], axis=-1)

  def to_modules(self, structure: structure_lib.Structure, encoded: tf.Tensor) -> tf.Tensor:
    """Returns the mean over the configurable ops of each module: [NC, K, H] -> [B, K, H]."""
    return structure.config_modules.mean(encoded)


CONFIG_INPUTS = {'tile': TileConfigInput, 'layout': LayoutConfigInput}


class BiasRelu(tf.keras.layers.Layer):
  """Bias and ReLU, relu(x + b) with one b for each column: [..., H] -> [..., H]."""

  def build(self, input_shape):
    self.bias = self.add_weight('bias', shape=input_shape[-1:], initializer='zeros')
    super().build(input_shape)

  def call(self, x):
    return _bias_relu(x, tf.convert_to_tensor(self.bias))


@tf.custom_gradient
def _bias_relu(x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
  result = tf.nn.relu(tf.nn.bias_add(x, bias))

  def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    of_x = tf.raw_ops.ReluGrad(gradients=upstream, features=result)
    rows = tf.reshape(of_x, [-1, bias.shape[0]])
    # On CPU, a matrix product with ones is several times as fast as the sum over rows.
    of_bias = tf.matmul(tf.ones([1, tf.shape(rows)[0]], rows.dtype), rows)
    return of_x, tf.squeeze(of_bias, axis=0)

  return result, gradient


class Projections(tf.keras.layers.Layer):
  """Linear maps of one input, each with its own matrix: [..., F] -> a list of [..., H].

  Attributes:
    kernels: the matrices, [number, F, H]. They are one variable, because an optimizer takes about
      twenty operations for each variable.
  """

  def __init__(self, number: int, units: int):
    super().__init__()
    self._shape = [number, units]

  def build(self, input_shape):
    number, units = self._shape
    # Glorot and Bengio, 2010, give this limit; it holds for each of the matrices.
    limit = math.sqrt(6 / (input_shape[-1] + units))
    self.kernels = self.add_weight(
      'kernels',
      [number, input_shape[-1], units],
      initializer=tf.keras.initializers.RandomUniform(-limit, limit),
    )
    super().build(input_shape)

  def call(self, x):
    number, units = self._shape
    rows = tf.reshape(x, [-1, x.shape[-1]])
    shape = tf.concat([tf.shape(x)[:-1], [units]], axis=0)
    kernels = tf.unstack(self.kernels, number)
    return [tf.reshape(tf.matmul(rows, kernel), shape) for kernel in kernels]


class MessageLayer(tf.keras.layers.Layer):
  """One round of message passing with a residual: h' = LayerNorm(h + relu(update(h) + b)).

  Subclasses are made from `PartOptions`. Each config is computed separately: the dimension K is
  kept throughout.

  Attributes:
    LINEAR: whether the update of a concatenation is the sum of updates of its parts, each with its
      own weights.
  """

  LINEAR = True

  def __init__(self):
    super().__init__()
    self._activate = BiasRelu()
    self._normalize = LayerNorm()

  def update(self, state: tf.Tensor, messages: structure_lib.Messages) -> tf.Tensor:
    """Computes the update of each op, [N, K, H], from states.

    The states are [N, K, any] with messages `BetweenOps`, [B, K, any] with `FromModules`, and
    [NC, K, any] with `FromConfigOps`.
    """
    raise NotImplementedError

  def call(self, state: tf.Tensor, messages: structure_lib.BetweenOps) -> tf.Tensor:
    """Passes messages once: [N, K, H] -> [N, K, H]."""
    return self._normalize(state + self._activate(self.update(state, messages)))


class NoMessages(MessageLayer):
  """Dense layer without messages: update = W h."""

  def __init__(self, options: PartOptions):
    super().__init__()
    self._project = Projections(1, options.hidden)

  def update(self, state: tf.Tensor, messages: structure_lib.Messages) -> tf.Tensor:
    [projected] = self._project(state)
    return messages.here(projected)


class Head(tf.keras.layers.Layer):
  """Joined state per module -> score: [B, K, any] -> float32 [B, K]."""

  def __init__(self, options: PartOptions):
    super().__init__()
    self._hidden = tf.keras.layers.Dense(options.hidden, activation='relu')
    # Scores are float32 under mixed precision too, because they differ only slightly.
    self._score = tf.keras.layers.Dense(1, dtype=tf.float32)

  def call(self, state: tf.Tensor) -> tf.Tensor:
    return tf.squeeze(self._score(self._hidden(state)), axis=-1)


def pool_ops(modules: structure_lib.Groups, state: tf.Tensor) -> tf.Tensor:
  """Concatenates mean and maximum over the ops of each module: [N, ..., H] -> [B, ..., 2 H]."""
  return tf.concat([modules.mean(state), modules.maximum(state)], axis=-1)
