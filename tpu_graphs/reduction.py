"""Smaller graphs for layout modules: the configurable ops and what is near them.

```
module = reduction.keep_hops(npz.load('unet3d.npz'), 2, rest='summary')
```
A config decides the time of the ops that it configures, and of those around them that are given other layouts by it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tpu_graphs import errors
from tpu_graphs import features
from tpu_graphs import module as module_lib
from tpu_graphs import statistics

RESTS = ('drop', 'summary')


def keep_hops(module: module_lib.Module, hops: int, *, rest: str = 'drop') -> module_lib.Module:
  """`module` with only those ops that are at most `hops` edges, in either direction, away from a configurable op.

  Ops and edges keep their order, and ops their `computation`. With `rest='summary'`, all other ops of a computation
  become one, in the place of the first of them. Its opcode is 0 (unknown). Each of its features is such that
  sign(x) * log1p(|x|), which is what models look at, is the mean over the ops that became it. (Where these are zeros
  and ones, it grows with the share p of ones from 0 to 1, as 2**p - 1.) The edges between these ops and all others
  become its own, each pair of ops once; those among them are gone.

  Args:
    module: a layout module.
    hops: >= 0.
    rest: what becomes of the other ops, one of `RESTS`.

  Returns:
    The module itself if no op is left out. Else `unknown_opcodes` is empty if an op left out has the opcode 0: whose
    the names are is not known. Configs and all else stay as they are.

  Raises:
    InputError: the module has no configurable ops (a tile module never has), or an argument is out of range.
  """
  if hops < 0:
    raise errors.InputError('too few hops', where='hops', found=hops, expected='>= 0')
  if rest not in RESTS:
    raise errors.InputError('unknown way to reduce', where='rest', found=repr(rest), expected=' or '.join(RESTS))
  if not module.num_config_ops:
    raise errors.InputError('no configurable ops to keep', where=module.module_id, found=f'a {module.kind} module',
                            expected='a layout module with configurable ops', fix='leave its graph as it is')
  kept = _near(module, hops)
  others = np.flatnonzero(~kept)
  if not others.size:
    return module
  stands, becomes = kept.copy(), np.arange(module.num_ops)  # Which ops have a successor in their place, and which.
  if rest == 'summary':
    _, first, group = np.unique(module.computation[others], return_index=True, return_inverse=True)
    summaries = others[first]
    stands[summaries] = True
    becomes[others] = summaries[group]
  index = np.concatenate([[0], np.cumsum(stands)])  # Of each op in the result; number N would be the next.
  edges = becomes[module.edge_index]
  edges = _merged(edges[stands[edges].all(axis=1)], kept)
  arrays = {name: getattr(module, name)[stands] for name in ('node_opcode', 'node_feat', 'extra_feat', 'computation')}
  if rest == 'summary':
    arrays['node_opcode'][index[summaries]] = features.UNKNOWN_OPCODE
    for name in ('node_feat', 'extra_feat'):
      arrays[name][index[summaries]] = _mean(getattr(module, name)[others], group, summaries.size)
  unknown_left_out = (module.node_opcode[others] == features.UNKNOWN_OPCODE).any()
  return dataclasses.replace(
      module, **arrays, edge_index=index[edges], node_config_ids=index[module.node_config_ids],
      node_splits=index[module.node_splits], unknown_opcodes={} if unknown_left_out else module.unknown_opcodes)


def _near(module: module_lib.Module, hops: int) -> np.ndarray:
  """Whether each op is at most `hops` edges away from a configurable one, bool [N]."""
  near = np.zeros(module.num_ops, bool)
  near[module.node_config_ids] = True
  consumer, operand = np.ascontiguousarray(module.edge_index.T)
  for _ in range(hops):
    leads_on = near[consumer] != near[operand]
    if not leads_on.any():
      break
    near[consumer[leads_on]] = near[operand[leads_on]] = True
  return near


def _merged(edges: np.ndarray, kept: np.ndarray) -> np.ndarray:
  """`edges`, int64 [E, 2], with those at any op that is not `kept`, bool [N], only once and not from it to itself."""
  merged = ~kept[edges].all(axis=1)
  which = np.flatnonzero(merged & (edges[:, 0] != edges[:, 1]))
  _, first = np.unique(edges[which] @ [kept.size, 1], return_index=True)
  chosen = ~merged
  chosen[which[first]] = True
  return edges[chosen]


def _mean(feat: np.ndarray, group: np.ndarray, num_groups: int) -> np.ndarray:
  """The mean of each group's rows on the scale of `signed_log`, scaled back.

  Args:
    feat: float32 [R, K].
    group: int64 [R], the group of each row, 0 to num_groups - 1, each with a row.
    num_groups: G.

  Returns:
    float32 [G, K].
  """
  columns = feat.shape[1]
  nonzero = np.flatnonzero(feat)  # Most values are 0.
  row, column = np.divmod(nonzero, max(columns, 1))
  sums = np.bincount(group[row] * columns + column, weights=statistics.signed_log(feat.reshape(-1)[nonzero]),
                     minlength=num_groups * columns)
  mean = sums.reshape(num_groups, columns) / np.bincount(group)[:, np.newaxis]
  return (np.sign(mean) * np.expm1(np.abs(mean))).astype(np.float32)
