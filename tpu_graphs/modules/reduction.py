"""Smaller graphs for layout modules: the configurable ops and the ops near them.

```
module = reduction.keep_hops(npz.load('unet3d.npz'), 2, rest='summary')
```
A config decides the time of the ops that it configures, and the time of the ops around them whose
layouts change with it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tpu_graphs import errors
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib

RESTS = ('drop', 'summary')
_BLOCK_ROWS = 1 << 13  # Number of ops whose features are averaged at a time.


def check(hops: int, rest: str) -> None:
  """Checks the arguments of `keep_hops`.

  Raises:
    InputError: `hops` is negative, or `rest` is not one of `RESTS`.
  """
  if hops < 0:
    raise errors.InputError('too few hops', where='hops', found=hops, expected='>= 0')
  if rest not in RESTS:
    raise errors.InputError(
      'unknown way to reduce', where='rest', found=repr(rest), expected=' or '.join(RESTS)
    )


def keep_hops(module: module_lib.Module, hops: int, *, rest: str = 'drop') -> module_lib.Module:
  """Keeps the ops of `module` within `hops` edges, in either direction, of a configurable op.

  Ops and edges keep their order, and ops keep their `computation`. With `rest='summary'`, all
  other ops of a computation are merged into one summary op, in the place of the first of them. Its
  opcode is 0 (unknown). Each feature x of the summary is chosen so that sign(x) * log1p(|x|), the
  scale that models use, is the mean over the merged ops. (If a feature of the merged ops is only
  zeros and ones, the summary has 2**p - 1, where p is the share of ones: 0 for none, 1 for all.)
  Edges between merged ops and other ops become edges of the summary, one per pair of ops; edges
  within a summary are dropped.

  Args:
    module: a layout module.
    hops: number of edges, >= 0.
    rest: what happens to the other ops, one of `RESTS`.

  Returns:
    The module itself if no op is left out. Otherwise `unknown_opcodes` is empty if an op that is
    left out has the opcode 0, because the source does not say which op has which name. Configs and
    all else are unchanged.

  Raises:
    InputError: the module has no configurable ops (a tile module never has), or an argument is
      out of range.
  """
  check(hops, rest)
  if not module.num_config_ops:
    raise errors.InputError(
      'no configurable ops to keep',
      where=module.module_id,
      found=f'a {module.kind} module',
      expected='a layout module with configurable ops',
      fix='leave its graph as it is',
    )
  kept = _near(module, hops)
  others = np.flatnonzero(~kept)
  if not others.size:
    return module
  # `stands` marks the ops whose place in the order stays; `becomes` maps each op to the op that
  # takes its edges.
  stands = kept.copy()
  becomes = np.arange(module.num_ops)
  if rest == 'summary':
    _, first, group = np.unique(module.computation[others], return_index=True, return_inverse=True)
    summaries = others[first]
    stands[summaries] = True
    becomes[others] = summaries[group]
  # `index` maps each op to its index in the result. A further entry, for N, serves `node_splits`.
  index = np.concatenate([[0], np.cumsum(stands)])
  edges = becomes[module.edge_index]
  edges = _merged(edges[stands[edges].all(axis=1)], kept)
  arrays = {
    name: getattr(module, name)[stands]
    for name in ('node_opcode', 'node_feat', 'extra_feat', 'computation')
  }
  if rest == 'summary':
    arrays['node_opcode'][index[summaries]] = features.UNKNOWN_OPCODE
    for name in ('node_feat', 'extra_feat'):
      arrays[name][index[summaries]] = _mean(getattr(module, name), others, group)
  unknown_left_out = (module.node_opcode[others] == features.UNKNOWN_OPCODE).any()
  return dataclasses.replace(
    module,
    **arrays,
    edge_index=index[edges],
    node_config_ids=index[module.node_config_ids],
    node_splits=index[module.node_splits],
    unknown_opcodes={} if unknown_left_out else module.unknown_opcodes,
  )


def _near(module: module_lib.Module, hops: int) -> np.ndarray:
  """Returns a mask, bool [N], of the ops at most `hops` edges away from a configurable op."""
  near = np.zeros(module.num_ops, bool)
  near[module.node_config_ids] = True
  if not hops or not module.num_edges:
    return near
  ends = np.concatenate([module.edge_index, module.edge_index[:, ::-1]])
  neighbours = ends[np.argsort(ends[:, 0]), 1]  # The neighbours of op 0, then of op 1, ...
  counts = np.bincount(ends[:, 0], minlength=module.num_ops)
  starts = np.cumsum(counts) - counts
  reached = np.flatnonzero(near)
  # The work of a hop is proportional to the number of edges at the ops that the hop starts from.
  for _ in range(hops):
    number = counts[reached]
    first = starts[reached] - (np.cumsum(number) - number)
    reached = neighbours[np.repeat(first, number) + np.arange(number.sum())]
    reached = np.unique(reached[~near[reached]])
    if not reached.size:
      break
    near[reached] = True
  return near


def _merged(edges: np.ndarray, kept: np.ndarray) -> np.ndarray:
  """Drops repeated edges and self-loops at ops that are not kept.

  Args:
    edges: int64 [E, 2].
    kept: bool [N].

  Returns:
    int64 [e, 2], the other edges in their order. Edges between two kept ops all stay.
  """
  merged = ~kept[edges].all(axis=1)
  which = np.flatnonzero(merged & (edges[:, 0] != edges[:, 1]))
  _, first = np.unique(edges[which] @ [kept.size, 1], return_index=True)
  chosen = ~merged
  chosen[which[first]] = True
  return edges[chosen]


def _mean(feat: np.ndarray, rows: np.ndarray, group: np.ndarray) -> np.ndarray:
  """Returns the mean of each group of rows on the scale of `signed_log`, scaled back.

  Args:
    feat: float32 [N, K].
    rows: int64 [R], the rows of `feat` that count.
    group: int64 [R], the group of each of these rows, 0 to G - 1; no group is empty.

  Returns:
    float32 [G, K].
  """
  columns = feat.shape[1]
  order = np.argsort(group, kind='stable')
  rows, group, counts = rows[order], group[order], np.bincount(group)
  sums = np.zeros((counts.size, columns))
  for start in range(0, rows.size, _BLOCK_ROWS):
    block = feat[rows[start : start + _BLOCK_ROWS]].reshape(-1)
    owner = group[start : start + _BLOCK_ROWS]
    nonzero = np.flatnonzero(block)  # Most values are 0.
    places = (owner - owner[0])[:, np.newaxis] * columns + np.arange(columns)
    part = sums[owner[0] : owner[-1] + 1]
    added = np.bincount(
      places.reshape(-1)[nonzero],
      weights=features.signed_log(block[nonzero]),
      minlength=part.size,
    )
    part += added.reshape(part.shape)
  mean = sums / counts[:, np.newaxis]
  return (np.sign(mean) * np.expm1(np.abs(mean))).astype(np.float32)
