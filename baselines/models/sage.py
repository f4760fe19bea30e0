"""GraphSAGE.

Source: Hamilton, Ying, Leskovec: Inductive representation learning on large graphs, 2017, arXiv
1706.02216.
"""

from __future__ import annotations

import tensorflow as tf

from baselines.models import parts
from baselines.models import structure


class SAGELayer(parts.MessageLayer):
  """GraphSAGE layer with the mean aggregator.

  For each op i, update_i = W h_i + sum over relations r of V_r mean(h_j over ops j that send to i
  via r). With operands and consumers as two relations, this is Dir-SAGE (Rossi et al.: Edge
  directionality improves learning on heterophilic graphs, 2023, arXiv 2305.10498). The layer
  normalisation takes the place of the paper's normalisation of states to length 1: TF-GNN's version
  would mix configs along their dimension.
  """

  def __init__(self, options: parts.PartOptions):
    super().__init__()
    self._project = parts.Projections(1 + options.num_relations, options.hidden)

  def update(self, state: tf.Tensor, messages: structure.Messages) -> tf.Tensor:
    itself, *sent = self._project(state)
    return messages.mean(itself, sent)
