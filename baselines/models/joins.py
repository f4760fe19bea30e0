"""Joins of ops and configs: the early join and the late join of the TpuGraphs paper.

Source: Phothilimthana et al., 2023, arXiv 2308.13490.
"""

from __future__ import annotations

import tensorflow as tf
import tensorflow_gnn as tfgnn

from baselines.models import parts
from baselines.models import structure as structure_lib


class EarlyJoin(tf.keras.Model):
  """Model that joins configs to ops before message passing, which then runs for each config.

  The first layer is relu(update(concatenation of an op's input and its config's input) + b). Where
  the update is linear, it is computed as the sum of an update of ops without configs and an update
  of configs alone. Otherwise a dense layer over the concatenation precedes all message passing
  layers and is computed as such a sum. So no tensor of size ops x configs x inputs is ever made.
  """

  def __init__(
    self,
    layer: type[parts.MessageLayer],
    kind: str,
    options: parts.PartOptions,
    statistics: parts.Statistics,
  ):
    super().__init__()
    self._directed = options.directed
    self._op_input = parts.OpInput(options, statistics)
    self._config_input = parts.CONFIG_INPUTS[kind](statistics)
    starts_with_messages = options.layers > 0 and layer.LINEAR
    first = layer if starts_with_messages else parts.NoMessages
    self._of_ops = first(options)
    self._of_configs = first(options)
    self._activate = parts.BiasRelu()
    remaining = options.layers - 1 if starts_with_messages else options.layers
    self._layers = [layer(options) for _ in range(remaining)]
    self._head = parts.Head(options)

  def call(self, graph: tfgnn.GraphTensor) -> tf.Tensor:
    structure = structure_lib.Structure.of(graph, directed=self._directed)
    op_input = tf.expand_dims(self._op_input(graph), 1)  # [N, 1, F]
    ops = self._of_ops.update(op_input, structure.between_ops)  # [N, 1, H]
    configs = self._of_configs.update(self._config_input(graph), structure.of_configs)  # [N, K, H]
    state = self._activate(ops + configs)
    for layer in self._layers:
      state = layer(state, structure.between_ops)
    return self._head(parts.pool_ops(structure.modules, state))


class LateJoin(tf.keras.Model):
  """Model that joins configs to ops after message passing, which takes K times less work.

  The first layer is relu(update(an op's input) + b). For tile, a dense layer follows over the
  concatenation of a module's pooled ops and its config. For layout, a dense layer over each
  configurable op and its config comes first, and the mean of its results over the module takes the
  place of the config in that concatenation. Each dense layer over a concatenation is computed as
  the sum of a part per op or module and a part per config.
  """

  def __init__(
    self,
    layer: type[parts.MessageLayer],
    kind: str,
    options: parts.PartOptions,
    statistics: parts.Statistics,
  ):
    super().__init__()
    self._directed = options.directed
    self._op_input = parts.OpInput(options, statistics)
    self._config_input = parts.CONFIG_INPUTS[kind](statistics)
    self._first = layer(options) if options.layers else parts.NoMessages(options)
    self._activate = parts.BiasRelu()
    self._layers = [layer(options) for _ in range(options.layers - 1)]
    self._join_ops = _JoinConfigOps(options) if kind == 'layout' else None
    self._of_ops = tf.keras.layers.Dense(options.hidden)
    self._of_configs = tf.keras.layers.Dense(options.hidden)
    self._head = parts.Head(options)

  def call(self, graph: tfgnn.GraphTensor) -> tf.Tensor:
    structure = structure_lib.Structure.of(graph, directed=self._directed)
    ops = tf.expand_dims(self._op_input(graph), 1)  # [N, 1, F]
    state = self._activate(self._first.update(ops, structure.between_ops))  # [N, 1, H]
    for layer in self._layers:
      state = layer(state, structure.between_ops)
    configs = self._config_input(graph)
    if self._join_ops is not None:
      configs = self._join_ops(configs, state, structure)  # [B, K, H]
    pooled = self._of_ops(parts.pool_ops(structure.modules, state))  # [B, 1, H]
    joined = tf.nn.relu(pooled + self._of_configs(configs))  # [B, K, H]
    return self._head(joined)


class _JoinConfigOps(tf.keras.layers.Layer):
  """Dense layer over each configurable op and its config, averaged over each module.

  It maps configs [NC, K, 132] and the state of all ops [N, 1, H] to [B, K, H].
  """

  def __init__(self, options: parts.PartOptions):
    super().__init__()
    self._of_ops = tf.keras.layers.Dense(options.hidden)
    self._of_configs = tf.keras.layers.Dense(options.hidden)

  def call(
    self, configs: tf.Tensor, state: tf.Tensor, structure: structure_lib.Structure
  ) -> tf.Tensor:
    ops = self._of_ops(structure.configures.reversed().sum(state))  # [NC, 1, H]
    joined = tf.nn.relu(ops + self._of_configs(configs))  # [NC, K, H]
    return structure.config_modules.mean(joined)
