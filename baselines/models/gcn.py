"""Graph convolution.

Source: Kipf, Welling: Semi-supervised classification with graph convolutional networks, 2017, arXiv
1609.02907.
"""

from __future__ import annotations

import tensorflow as tf

from baselines.models import parts
from baselines.models import structure


class GCNLayer(parts.MessageLayer):
  """Graph convolution layer: update = sum over relations r of D_r^-1/2 (A_r + I) D'_r^-1/2 H W_r.

  A_r[i, j] is the number of times that op j sends to op i via r. The diagonals D and D' hold the
  sums of rows and columns of A_r + I. With one relation for both directions, A is symmetric and
  D = D'; the layer is then the convolution of Kipf and Welling. With operands and consumers as two
  relations, it is Dir-GCN (Rossi et al., 2023, arXiv 2305.10498) with self-loops.
  """

  def __init__(self, options: parts.PartOptions):
    super().__init__()
    self._project = parts.Projections(options.num_relations, options.hidden)

  def update(self, state: tf.Tensor, messages: structure.Messages) -> tf.Tensor:
    return messages.convolve(self._project(state))
