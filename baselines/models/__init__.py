"""Models that score configs; `build` makes a model from its options.

A model maps a batch of decoded GraphTensors (`tpu_graphs.input.loading`) with B components and K
configs each to scores, float32 [B, K], lower = predicted faster. The score of a config does not
depend on the other configs in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools

import tensorflow as tf

from baselines.models import gat
from baselines.models import gcn
from baselines.models import joins
from baselines.models import mlp
from baselines.models import parts
from baselines.models import sage
from tpu_graphs import errors
from tpu_graphs.dataset import records
from tpu_graphs.dataset import statistics as statistics_lib
from tpu_graphs.input import loading
from tpu_graphs.modules import module as module_lib

__all__ = ['DEFAULT_MODEL', 'MODELS', 'ModelOptions', 'build', 'parts']

_JOINS = {'EarlyJoin': joins.EarlyJoin, 'LateJoin': joins.LateJoin}
_LAYERS = {'SAGE': sage.SAGELayer, 'ResGCN': gcn.GCNLayer, 'GATv2': gat.GATv2Layer}
# Each name maps to a callable that makes the model from its kind, sizes and statistics.
MODELS = {
  join_name + layer_name: functools.partial(join, layer)
  for layer_name, layer in _LAYERS.items()
  for join_name, join in _JOINS.items()
}
MODELS['MLP'] = mlp.MLP
DEFAULT_MODEL = {'tile': 'EarlyJoinSAGE', 'layout': 'EarlyJoinResGCN'}


@dataclasses.dataclass(frozen=True)
class ModelOptions:
  """The options that a model is built from; stored with the run.

  Attributes:
    name: a key of `MODELS`, which names the place where configs are joined to ops and the kind of
      the message passing layers.
    kind: 'tile' or 'layout': what configs belong to.
    parts: the sizes of the model's layers.
  """

  name: str
  kind: str
  parts: parts.PartOptions = parts.PartOptions()

  def __post_init__(self):
    if self.name not in MODELS:
      raise errors.InputError(
        'unknown model', where='--model', found=self.name, expected=' or '.join(MODELS)
      )
    if self.kind not in module_lib.KINDS:
      raise errors.InputError(
        'unknown kind', where='kind', found=self.kind, expected=' or '.join(module_lib.KINDS)
      )
    if 'GATv2' in self.name and self.parts.hidden % self.parts.attention_heads:
      raise errors.InputError(
        'hidden units cannot be divided evenly among the attention heads',
        where='--hidden',
        found=self.parts.hidden,
        expected=f'a multiple of {self.parts.attention_heads}',
      )


def build(
  options: ModelOptions, statistics: Mapping[str, statistics_lib.ColumnStatistics]
) -> tf.keras.Model:
  """Makes a model with fresh weights.

  Args:
    options: see `ModelOptions`.
    statistics: statistics of the train split, with which the model normalises features. They become
      part of the model's weights. The model takes extra features if there are statistics of them.
  """
  model = MODELS[options.name](options.kind, options.parts, statistics)
  num_extra = statistics['extra_feat'].constant.size if 'extra_feat' in statistics else 0
  smallest = module_lib.smallest_module(options.kind, num_extra=num_extra)
  # Keras creates the weights in the first call. The graph for it is decoded directly, because a
  # tf.data pipeline takes seconds to make.
  graph = loading.decode(
    records.to_graph_tensor(smallest), options.kind, chosen=tf.range(1), pad_to=1
  )
  model(loading.without_strings(graph))
  return model
