"""Where ops and configs meet: the two joins of the TpuGraphs paper (Phothilimthana et al., 2023,
arXiv 2308.13490).
"""

from __future__ import annotations

import tensorflow as tf
import tensorflow_gnn as tfgnn

from baselines.models import parts
from baselines.models import structure as structure_lib


class EarlyJoin(tf.keras.Model):
  """What is known of ops and configs stands side by side from the start; messages pass for each
  config on its own.

  The first layer is relu(update(concatenation of an op's and its config's input) + b). Where the
  update is linear, it is computed as the sum of one over ops without configs and one over
  configs alone; else a dense layer over the concatenation comes before all layers, as such a
  sum. So nothing of size ops x configs x inputs is ever made.
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
    first = layer if options.layers and layer.LINEAR else parts.NoMessages
    self._of_ops, self._of_configs, self._activate = (
      first(options),
      first(options),
      parts.BiasRelu(),
    )
    self._layers = [layer(options) for _ in range(options.layers - (first is layer))]
    self._head = parts.Head(options)

  def call(self, graph: tfgnn.GraphTensor) -> tf.Tensor:
    structure = structure_lib.Structure.of(graph, directed=self._directed)
    ops = self._of_ops.update(
      tf.expand_dims(self._op_input(graph), 1), structure.between_ops
    )  # [N, 1, H]
    configs = self._of_configs.update(self._config_input(graph), structure.of_configs)  # [N, K, H]
    state = self._activate(ops + configs)
    for layer in self._layers:
      state = layer(state, structure.between_ops)
    return self._head(parts.pool_ops(structure.modules, state))


class LateJoin(tf.keras.Model):
  """Messages pass between ops that know no config, K times less work; the configs are joined to
  the result.

  The first layer is relu(update(an op's input) + b). Tile: then a dense layer over the
  concatenation of the pooled ops
  of a module and its config. Layout: one over each configurable op and its config, whose mean
  over the module is concatenated to the pooled ops instead. Both are computed as sums of a part
  per op or module and a part per config.
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
    self._of_ops, self._of_configs = (
      tf.keras.layers.Dense(options.hidden),
      tf.keras.layers.Dense(options.hidden),
    )
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
    return self._head(tf.nn.relu(pooled + self._of_configs(configs)))  # Of [B, K, H].


class _JoinConfigOps(tf.keras.layers.Layer):
  """Configs [NC, K, 132] with the state of all ops [N, 1, H] -> what both mean to each module
  [B, K, H].
  """

  def __init__(self, options: parts.PartOptions):
    super().__init__()
    self._of_ops, self._of_configs = (
      tf.keras.layers.Dense(options.hidden),
      tf.keras.layers.Dense(options.hidden),
    )

  def call(
    self, configs: tf.Tensor, state: tf.Tensor, structure: structure_lib.Structure
  ) -> tf.Tensor:
    ops = self._of_ops(structure.configures.reversed().sum(state))  # [NC, 1, H]
    return structure.config_modules.mean(tf.nn.relu(ops + self._of_configs(configs)))
