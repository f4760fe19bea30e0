"""Smaller graphs for layout modules: the configurable ops and what is near them.

```
module = reduction.keep_hops(npz.load('unet3d.npz'), 2, rest='summary')
```
A config decides the time of the ops that it configures, and of those around them that are given
other layouts by it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tpu_graphs import errors
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib

RESTS = ('drop', 'summary')
_BLOCK_ROWS = 1 << 13  # Ops whose features are averaged at a time.


def check(hops: int, rest: str) -> None:
  """Raises `InputError` where `keep_hops` cannot take these arguments."""
  if hops < 0:
    raise errors.InputError('too few hops', where='hops', found=hops, expected='>= 0')
  if rest not in RESTS:
    raise errors.InputError(
      'unknown way to reduce', where='rest', found=repr(rest), expected=' or '.join(RESTS)
    )


def keep_hops(module: module_lib.Module, hops: int, *, rest: str = 'drop') -> module_lib.Module:
  """`module` with only those ops that are at most `hops` edges, in either direction, away from a
  configurable op.

  Ops and edges keep their order, and ops their `computation`. With `rest='summary'`, all other
  ops of a computation become one, in the place of the first of them. Its opcode is 0 (unknown).
  Each of its features is such that sign(x) * log1p(|x|), which is what models look at, is the
  mean over the ops that became it. (Where these are zeros and ones, it grows with the share p of
  ones from 0 to 1, as 2**p - 1.) The edges between these ops and all others become its own, each
  pair of ops once; those among them are gone.

  Args:
    module: a layout module.
    hops: >= 0.
    rest: what becomes of the other ops, one of `RESTS`.

  Returns:
    The module itself if no op is left out. Else `unknown_opcodes` is empty if an op left out has
    the opcode 0: whose the names are is not known. Configs and all else stay as they are.

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
  stands, becomes = (
    kept.copy(),
    np.arange(module.num_ops),
  )  # Which ops have a successor in their place, and which.
  if rest == 'summary':
    _, first, group = np.unique(module.computation[others], return_index=True, return_inverse=True)
    summaries = others[first]
    stands[summaries] = True
    becomes[others] = summaries[group]
  index = np.concatenate(
    [[0], np.cumsum(stands)]
  )  # Of each op in the result; number N would be the next.
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
  """Whether each op is at most `hops` edges away from a configurable one, bool [N]."""
  near = np.zeros(module.num_ops, bool)
  near[module.node_config_ids] = True
  if not hops or not module.num_edges:
    return near
  ends = np.concatenate([module.edge_index, module.edge_index[:, ::-1]])
  neighbours = ends[np.argsort(ends[:, 0]), 1]  # Of op 0, op 1, ...
  counts = np.bincount(ends[:, 0], minlength=module.num_ops)
  starts = np.cumsum(counts) - counts
  reached = np.flatnonzero(near)
  for _ in range(
    hops
  ):  # All that is done in a hop is in proportion to the edges at the ops that it starts from.
    number = counts[reached]
    first = starts[reached] - (np.cumsum(number) - number)
    reached = neighbours[np.repeat(first, number) + np.arange(number.sum())]
    reached = np.unique(reached[~near[reached]])
    if not reached.size:
      break
    near[reached] = True
  return near


def _merged(edges: np.ndarray, kept: np.ndarray) -> np.ndarray:
  """`edges`, int64 [E, 2], with those at any op that is not `kept`, bool [N], only once and not
  from it to itself.
  """
  merged = ~kept[edges].all(axis=1)
  which = np.flatnonzero(merged & (edges[:, 0] != edges[:, 1]))
  _, first = np.unique(edges[which] @ [kept.size, 1], return_index=True)
  chosen = ~merged
  chosen[which[first]] = True
  return edges[chosen]


def _mean(feat: np.ndarray, rows: np.ndarray, group: np.ndarray) -> np.ndarray:
  """The mean of each group of rows on the scale of `signed_log`, scaled back.

  Args:
    feat: float32 [N, K].
    rows: int64 [R], the rows of `feat` that count.
    group: int64 [R], the group of each of them; with G groups, each of 0 to G - 1 has a row.

  Returns:
    float32 [G, K].
  """
  columns = feat.shape[1]
  order = np.argsort(group, kind='stable')
  rows, group, counts = rows[order], group[order], np.bincount(group)
  sums = np.zeros((counts.size, columns))
  for start in range(0, rows.size, _BLOCK_ROWS):
    block, owner = (
      feat[rows[start : start + _BLOCK_ROWS]].reshape(-1),
      group[start : start + _BLOCK_ROWS],
    )
    nonzero = np.flatnonzero(block)  # Most values are 0.
    place = ((owner - owner[0])[:, np.newaxis] * columns + np.arange(columns)).reshape(-1)[nonzero]
    part = sums[owner[0] : owner[-1] + 1]
    part += np.bincount(
      place, weights=features.signed_log(block[nonzero]), minlength=part.size
    ).reshape(part.shape)
  mean = sums / counts[:, np.newaxis]
  return (np.sign(mean) * np.expm1(np.abs(mean))).astype(np.float32)
