"""Node features as a user would write them, for the tests that load them by name."""

import numpy as np

from tpu_graphs.hlo import protos
from tpu_graphs.modules import feature_choices


@feature_choices.node_features('degree', columns=['operands', 'consumers é'])
def degree(module, hlo):
  del hlo
  return np.stack(
    [np.bincount(module.edge_index[:, side], minlength=module.num_ops) for side in (0, 1)], axis=1
  )


@feature_choices.node_features('shape', columns=['rank'])
def rank(module, hlo):
  """Returns the number of dimensions; -1 for npz files, which do not hold it."""
  if hlo is None:
    return np.full((module.num_ops, 1), -1.0)
  computations = protos.HloModuleProto.FromString(hlo).computations
  return np.array(
    [[len(op.shape.dimensions)] for ops in computations for op in ops.instructions], np.float64
  )


@feature_choices.node_features('unused places', columns=['of the layout'])
def unused_places(module, hlo):
  del hlo
  return (module.node_feat[:, -6:] < 0).sum(axis=1, keepdims=True)


@feature_choices.node_features('fails', columns=['x'])
def fails_on_two_ops(module, hlo):
  del hlo
  return np.full((module.num_ops, 1), 1 / (module.num_ops - 2))


HERE = __name__


def plain(module, hlo):
  return degree.function(module, hlo)
