"""Tests of tpu_graphs.modules.reduction: a naive reduction with sets and dicts is the oracle."""

import collections
import dataclasses
import math

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import records
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import reduction
from tpu_graphs.sources import npz

_SETTINGS = hypothesis.settings(max_examples=300, deadline=None)
_FIELDS = tuple(field.name for field in dataclasses.fields(module_lib.Module))
both = pytest.mark.parametrize('rest', reduction.RESTS)


def make(n, edges, config_ops, *, computation=None, splits=(0,), seed=0, **over):
  """Returns a layout module with three configs, whose ops all differ in opcode and features."""
  rng = np.random.default_rng(seed)
  feat = np.zeros((n, 140), np.float32)
  feat[:, :4] = np.stack(
    [np.arange(n) % 2, np.arange(n), rng.integers(-3, 3 * 10**9, n), rng.random(n)], axis=1
  )
  fields = {
    'module_id': 'm',
    'kind': 'layout',
    'node_opcode': np.arange(n) % 120 + 1,
    'node_feat': feat,
    'edge_index': np.array(edges, int).reshape(-1, 2),
    'node_splits': np.array(splits),
    'computation': computation,
    'config_runtime': np.array([9, 8, 7]),
    'config_id': np.array([4, 0, 2]),
    'default_config': 2,
    'node_config_ids': np.array(config_ops, int),
    'dropped_runs': {'slow': 3},
    'unknown_opcodes': {},
    'node_config_feat': rng.integers(-1, 5, (3, len(config_ops), 18)).astype(np.int8),
    'extra_feat': np.arange(2 * n, dtype=np.float32).reshape(n, 2),
  }
  return module_lib.Module(**{**fields, **over})


def naive(module, hops, rest):
  """Reduces a module with sets and dicts.

  Returns:
    The reduced module's ops, each a list of ops of `module`; its edges; its splits; the places of
    its configurable ops; and the set of ops of `module` that are kept.
  """
  neighbours = collections.defaultdict(set)
  for a, b in module.edge_index.tolist():
    neighbours[a].add(b)
    neighbours[b].add(a)
  distance = dict.fromkeys(module.node_config_ids.tolist(), 0)
  queue = collections.deque(distance)
  while queue:
    op = queue.popleft()
    for other in neighbours[op]:
      if other not in distance:
        distance[other] = distance[op] + 1
        queue.append(other)
  kept = {op for op, d in distance.items() if d <= hops}
  groups = collections.defaultdict(list)
  for op in range(module.num_ops):
    if op in kept:
      groups['kept', op].append(op)
    elif rest == 'summary':
      groups['computation', module.computation[op]].append(op)
  ops = sorted(groups.values())  # Groups are ordered by their first op.
  place = {op: i for i, group in enumerate(ops) for op in group}
  edges, seen = [], set()
  for a, b in module.edge_index.tolist():
    if a in place and b in place:
      edge = place[a], place[b]
      if a in kept and b in kept:
        edges.append(edge)
      elif edge[0] != edge[1] and edge not in seen:
        seen.add(edge)
        edges.append(edge)
  splits = [sum(group[0] < split for group in ops) for split in module.node_splits]
  return ops, edges, splits, [place[op] for op in module.node_config_ids.tolist()], kept


def mean(values):
  """Returns one feature of a summary, from the values of the ops that it merges."""
  logs = [math.copysign(math.log1p(abs(value)), value) for value in values]
  average = math.fsum(logs) / len(logs)
  return math.copysign(math.expm1(abs(average)), average)


def check(module, hops, rest):
  """Compares `keep_hops` with the oracle; returns the result."""
  before = {
    name: np.copy(getattr(module, name))
    for name in _FIELDS
    if isinstance(getattr(module, name), np.ndarray)
  }
  found = reduction.keep_hops(module, hops, rest=rest)
  for name, array in before.items():
    np.testing.assert_array_equal(getattr(module, name), array)  # The source is unchanged.
  ops, edges, splits, config_ops, kept = naive(module, hops, rest)
  first = [group[0] for group in ops]
  assert found.edge_index.tolist() == [list(edge) for edge in edges]
  assert found.node_splits.tolist() == splits
  assert found.node_config_ids.tolist() == config_ops
  assert found.computation.tolist() == module.computation[first].tolist()
  assert found.node_opcode.tolist() == [module.node_opcode[op] if op in kept else 0 for op in first]
  for name in ('node_feat', 'extra_feat'):
    feat = getattr(module, name).astype(float).tolist()
    expected = [
      feat[group[0]]
      if group[0] in kept
      else [mean(column) for column in zip(*(feat[op] for op in group), strict=True)]
      for group in ops
    ]
    shape = len(ops), getattr(module, name).shape[1]
    np.testing.assert_allclose(
      getattr(found, name), np.reshape(expected, shape), rtol=1e-6, err_msg=name
    )
    assert getattr(found, name).dtype == np.float32
  for name in (
    'module_id',
    'kind',
    'config_runtime',
    'config_id',
    'node_config_feat',
    'dropped_runs',
    'default_config',
  ):
    np.testing.assert_array_equal(getattr(found, name), getattr(module, name))
  return found


@st.composite
def modules(draw):
  n = draw(st.integers(1, 9))
  op = st.integers(0, n - 1)
  edges = draw(st.lists(st.tuples(op, op), max_size=12))
  config_ops = draw(st.lists(op, min_size=1, max_size=3))
  computation = draw(st.none() | st.lists(st.integers(0, 3), min_size=n, max_size=n).map(np.array))
  splits = [0, *sorted(draw(st.lists(st.integers(0, n), max_size=3)))]
  extra = np.zeros((n, draw(st.integers(0, 2))), np.float32)
  return make(
    n,
    edges,
    config_ops,
    computation=computation,
    splits=splits,
    extra_feat=extra,
    seed=draw(st.integers(0, 99)),
  )


@_SETTINGS
@hypothesis.given(
  module=modules(),
  hops=st.integers(0, 4),
  rest=st.sampled_from(reduction.RESTS),
  block_rows=st.integers(1, 9),
)
def test_equals_the_naive_reduction(module, hops, rest, block_rows):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(reduction, '_BLOCK_ROWS', block_rows)
    check(module, hops, rest)


CHAIN = [(i + 1, i) for i in range(6)]  # 0 -> 1 -> ... -> 6.


@pytest.mark.parametrize(
  ('hops', 'ops'), [(0, [3]), (1, [2, 3, 4]), (2, [1, 2, 3, 4, 5]), (3, range(7)), (99, range(7))]
)
def test_hops_count_in_both_directions(hops, ops):
  found = check(make(7, CHAIN, [3]), hops, 'drop')
  assert found.node_feat[:, 1].tolist() == list(ops)


@both
def test_a_large_module(rest):
  """Reduces several blocks of ops, whose many computations are interleaved, with many hops."""
  n = 3 * reduction._BLOCK_ROWS
  rng = np.random.default_rng(0)
  edges = np.stack([np.arange(2, n), np.arange(2, n) - rng.integers(1, 3, n - 2)], axis=1)
  edges = edges[rng.random(n - 2) < 0.7]
  feat = np.zeros((n, 140), np.float32)
  feat[np.arange(n), rng.integers(0, 140, n)] = rng.integers(-9, 3 * 10**9, n)
  module = make(
    n, edges, rng.integers(0, n, 9), computation=rng.integers(0, 700, n), node_feat=feat
  )
  assert 9 < check(module, 1000, rest).num_ops < n


@both
def test_all_kept(rest):
  for module, hops in (
    (make(7, CHAIN, [3]), 3),
    (make(2, [], [1, 0]), 0),
    (make(1, [(0, 0)], [0]), 0),
  ):
    assert reduction.keep_hops(module, hops, rest=rest) is module


def test_no_hops():
  module = make(5, [(1, 0), (2, 1), (3, 2), (3, 1), (4, 3)], [1, 3])
  found = check(module, 0, 'drop')
  assert found.edge_index.tolist() == [[1, 0]]
  found = check(module, 0, 'summary')  # Ops 0, 2 and 4 become op 0, before ops 1 and 3.
  assert found.edge_index.tolist() == [[1, 0], [0, 1], [2, 0], [2, 1], [0, 2]]
  assert found.node_opcode.tolist() == [0, 2, 4]


@both
def test_ops_that_are_not_connected(rest):
  """Checks ops 3 to 5, which no configurable op reaches."""
  found = check(make(6, [(1, 0), (2, 1), (4, 3), (5, 4)], [0]), 10, rest)
  assert found.num_ops == (3 if rest == 'drop' else 4)
  assert found.edge_index.tolist() == [[1, 0], [2, 1]]


def test_one_summary_for_each_computation():
  # The ops by computation are 0 1 2 | 3 4 | 5 6 7. Op 1 is configurable, op 2 calls the computation
  # of op 4, and op 6 calls the computation of op 2.
  module = make(
    8,
    [(1, 0), (2, 1), (2, 4), (4, 3), (6, 5), (6, 2), (7, 6)],
    [1],
    computation=np.array([0, 0, 0, 1, 1, 2, 2, 2]),
    splits=[0, 5, 8],
  )
  found = check(module, 0, 'summary')
  assert found.computation.tolist() == [0, 0, 1, 2]
  assert found.node_opcode.tolist() == [0, 2, 0, 0]
  assert found.edge_index.tolist() == [[1, 0], [0, 1], [0, 2], [3, 0]]
  assert found.node_splits.tolist() == [0, 3, 4]


@both
def test_equal_edges(rest):
  """Checks that equal edges stay between kept ops, and are merged at a summary."""
  found = check(make(4, [(1, 0), (1, 0), (2, 1), (2, 1), (3, 2), (3, 1)], [0]), 1, rest)
  assert found.edge_index.tolist() == [[1, 0], [1, 0], *([[2, 1]] if rest == 'summary' else [])]


def test_features_of_a_summary():
  feat = np.zeros((5, 140), np.float32)
  feat[:, 0] = 7, 1, 0, 0, 1  # The first op is configurable, four others become one.
  feat[:, 1] = 0, 5, 5, 5, 5
  feat[:, 2] = 0, -3, 3, 0, 0
  feat[:, 3] = 0, math.e**2 - 1, math.e**4 - 1, 0, math.e**6 - 1
  feat[:, 4] = np.finfo(np.float32).max
  feat[:, 5] = -1
  found = reduction.keep_hops(make(5, [], [0], node_feat=feat), 0, rest='summary')
  np.testing.assert_allclose(
    found.node_feat[1, :6],
    [2**0.5 - 1, 5, 0, math.e**3 - 1, np.finfo(np.float32).max, -1],
    rtol=1e-6,
  )
  assert not found.node_feat[1, 6:].any()
  assert found.node_feat[0].tolist() == feat[0].tolist()


def test_a_summary_of_one_op_keeps_its_features():
  rng = np.random.default_rng(0)
  feat = (
    rng.random((40, 140))
    * 10.0 ** rng.integers(-9, 30, (40, 140))
    * rng.choice([-1, 0, 1], (40, 140))
  )
  module = make(40, [], [0], computation=np.arange(40), node_feat=feat.astype(np.float32))
  found = reduction.keep_hops(module, 0, rest='summary')
  np.testing.assert_allclose(found.node_feat, module.node_feat, rtol=1e-6)
  np.testing.assert_array_equal(
    reduction.keep_hops(module, 0, rest='summary').node_feat, found.node_feat
  )


@both
@pytest.mark.parametrize(
  ('opcodes', 'names'),
  [([5, 0, 0, 7], {}), ([0, 5, 6, 7], {'erf': 1}), ([0, 5, 6, 0], {}), ([5, 6, 7, 8], {})],
)
def test_unknown_opcodes(rest, opcodes, names):
  """Checks that names stay only if all ops of unknown opcodes stay; op 0 is configurable."""
  module = make(
    4, [], [0], node_opcode=np.array(opcodes), unknown_opcodes={'erf': 1} if 0 in opcodes else {}
  )
  assert reduction.keep_hops(module, 0, rest=rest).unknown_opcodes == names


@both
def test_without_configs(rest):
  module = make(7, CHAIN, [3]).select_configs(np.zeros(0, int))
  assert reduction.keep_hops(module, 1, rest=rest).num_configs == 0


@both
def test_configurable_ops_may_repeat(rest):
  check(make(7, CHAIN, [5, 1, 5]), 0, rest)


@both
@pytest.mark.parametrize('kind', ['tile', 'layout'])
def test_no_configurable_ops(rest, kind, tmp_path):
  np.savez(tmp_path / 'a.npz', **testing.arrays(kind, nc=0))
  with pytest.raises(errors.InputError, match='no configurable ops to keep') as caught:
    reduction.keep_hops(npz.load(tmp_path / 'a.npz'), 1, rest=rest)
  assert caught.value.where == 'a'
  assert kind in caught.value.found


@pytest.mark.parametrize(('hops', 'rest', 'where'), [(-1, 'drop', 'hops'), (0, 'merge', 'rest')])
def test_arguments_out_of_range(hops, rest, where):
  with pytest.raises(errors.InputError) as caught:
    reduction.keep_hops(make(7, CHAIN, [3]), hops, rest=rest)
  assert caught.value.where == where


@testing.needs_shared
@both
def test_a_real_program(rest):
  module = npz.load(
    testing.SHARED / 'data/npz/layout/xla/random/valid/unet_3d.4x4.bf16.npz',
    choices=feature_choices.FeatureChoices(layout_padding=-1),
  )
  sizes = [check(module, hops, rest).num_ops for hops in (0, 1, 3)]
  assert sizes == sorted(sizes)
  assert 62 <= sizes[0] < sizes[2] < module.num_ops
  found = reduction.keep_hops(module, 3, rest=rest)
  assert (
    records.decode(records.encode_whole(found)).node_splits.tolist() == found.node_splits.tolist()
  )
