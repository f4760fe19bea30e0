"""Tests of tpu_graphs.views.summary.

Summaries equal naive counts, and computations are found in files without them.
"""

import collections
import dataclasses
import io
import json
import math

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from tests import testing
from tpu_graphs import hlo
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import npz
from tpu_graphs.sources import readers
from tpu_graphs.views import summary

NAMES = features.opcode_names()
IS_ROOT = features.node_feature_names().index('is_root')


def make(kind='tile', c=6, nc=2, module_id='m', seed=0, **over):
  arrays = {
    **testing.arrays(kind, c=c, nc=nc, seed=seed),
    'node_splits': np.array([0, 4]),
    'config_id': np.arange(c),
  }
  if kind == 'layout':
    arrays['node_config_feat'] = arrays['node_config_feat'].astype(np.int8)
  return module_lib.Module(module_id=module_id, kind=kind, **{**arrays, **over})


def graph(roots, edges, splits, **over):
  """Makes a module with roots, edges (consumer, operand) and segments.

  The last of the `splits` is the number of ops.
  """
  n = splits[-1]
  feat = np.zeros((n, 140), np.float32)
  feat[roots, IS_ROOT] = 1
  return make(
    node_opcode=np.ones(n, np.uint8),
    node_feat=feat,
    edge_index=np.array(edges, np.int64).reshape(-1, 2),
    node_splits=np.array(splits),
    **over,
  )


def naive(module):
  """Counts one by one."""
  vectors = module.config_feat if module.kind == 'tile' else module.node_config_feat
  distinct = {tuple(float(value) for value in np.ravel(vector)) for vector in vectors}
  measured = [i for i, runtime in enumerate(module.config_runtime.tolist()) if runtime != -1]
  runtimes = [int(module.config_runtime[i]) for i in measured]
  ratio = None
  if module.kind == 'tile' and measured:
    ratio = min(
      int(module.config_runtime[i]) / int(module.config_runtime_normalizers[i]) for i in measured
    )
  elif module.default_config is not None:
    default = [
      int(module.config_runtime[i])
      for i in measured
      if module.config_id[i] == module.default_config
    ]
    ratio = min(runtimes) / default[0] if default else None
  opcodes = collections.Counter(NAMES[opcode] for opcode in module.node_opcode.tolist())
  return {
    'ops': len(module.node_opcode),
    'edges': len(module.edge_index),
    'configs': len(module.config_runtime),
    'distinct_configs': len(distinct),
    'measured': len(measured),
    'fastest_ns': min(runtimes, default=None),
    'slowest_ns': max(runtimes, default=None),
    'best_ratio': ratio,
    'opcodes': opcodes,
  }


@st.composite
def modules(draw):
  kind = draw(st.sampled_from(module_lib.KINDS))
  c = draw(st.integers(0, 8))
  nc = draw(st.integers(0, 3))
  rng = np.random.default_rng(draw(st.integers(0, 2**32)))
  runtime = np.where(rng.random(c) < 0.3, -1, rng.integers(2, 10 ** draw(st.integers(1, 15)), c))
  over = {
    'config_runtime': runtime,
    'node_opcode': rng.integers(1, 5, 4),
    'config_id': rng.permutation(c + 3)[:c],
  }
  if kind == 'tile':
    # There are few different values, so that some vectors are equal.
    over['config_feat'] = np.zeros((c, 24), np.float32)
    over['config_feat'][:, [0, 23]] = rng.choice(np.array([-0.0, 0.0, 1.5], np.float32), (c, 2))
    over['config_runtime_normalizers'] = np.where(runtime == -1, -1, rng.integers(1, 1000, c))
  else:
    over['node_config_feat'] = np.repeat(rng.integers(-1, 1, (c, nc, 1)), 18, axis=2)
    over['default_config'] = (
      int(rng.choice(over['config_id'])) if c and rng.random() < 0.7 else None
    )
  return make(kind, c, nc, **over)


@given(modules())
@settings(deadline=None)
def test_numbers_are_the_naive_ones(module):
  found = dataclasses.asdict(summary.summarize_module(module))
  expected = naive(module)
  assert {name: found[name] for name in expected} == expected
  assert list(found['opcodes'].items()) == sorted(
    found['opcodes'].items(), key=lambda item: (-item[1], item[0])
  )
  assert found['config_ops'] == module.num_config_ops
  # Exact types are compared, since NumPy scalars are not fit for JSON.
  assert all(type(value) in (int, float, str, dict, type(None)) for value in found.values())


@pytest.mark.parametrize('kind', module_lib.KINDS)
def test_equal_configs_are_one(kind):
  name = {'tile': 'config_feat', 'layout': 'node_config_feat'}[kind]
  module = make(kind)
  same = np.repeat(getattr(module, name)[:1], 6, axis=0)
  assert summary.summarize_module(module).distinct_configs == 6
  assert summary.summarize_module(dataclasses.replace(module, **{name: same})).distinct_configs == 1


def test_layout_configs_without_configurable_ops_are_equal():
  assert summary.summarize_module(make('layout', nc=0)).distinct_configs == 1
  assert summary.summarize_module(make('layout', nc=0, c=0)).distinct_configs == 0


def test_configs_in_any_memory_order():
  module = make('layout', c=50, seed=3)
  turned = dataclasses.replace(module, node_config_feat=np.asfortranarray(module.node_config_feat))
  assert not turned.node_config_feat.flags.c_contiguous
  assert summary.summarize_module(turned) == summary.summarize_module(module)


@pytest.mark.parametrize(('default', 'ratio'), [(None, None), (10, 0.5), (11, 1.0), (12, None)])
def test_layout_ratio_needs_a_measured_default(default, ratio):
  module = make(
    'layout',
    c=3,
    config_id=np.array([10, 11, 12]),
    config_runtime=np.array([200, 100, -1]),
    default_config=default,
  )
  assert summary.summarize_module(module).best_ratio == ratio


def test_tile_ratio_is_of_the_same_run():
  module = make(
    'tile',
    c=2,
    config_runtime=np.array([100, 300]),
    config_runtime_normalizers=np.array([100, 600]),
  )
  assert summary.summarize_module(module).best_ratio == 0.5


def test_unknown_opcodes_are_apart():
  opcodes = {'node_opcode': np.array([0, 0, 0, 2])}
  found = summary.summarize_module(make(**opcodes))
  assert (found.opcodes, found.unknown_opcodes) == ({NAMES[2]: 1}, {'<unknown>': 3})
  found = summary.summarize_module(make(**opcodes, unknown_opcodes={'a': 1, 'b': 2}))
  assert list(found.unknown_opcodes.items()) == [('b', 2), ('a', 1)]


def test_no_ops():
  found = summary.summarize_module(graph([], [], [0]))
  assert (found.ops, found.edges, found.computations, found.opcodes) == (0, 0, 0, {})


def test_total():
  tile = make(
    'tile',
    c=2,
    config_runtime=np.array([100, 400]),
    config_runtime_normalizers=np.array([200, 200]),
    node_opcode=[1, 1, 2, 0],
    dropped_runs={'a': 1},
  )
  layout = make(
    'layout',
    c=3,
    config_runtime=np.array([10, 20, -1]),
    default_config=1,
    node_opcode=[2, 2, 2, 3],
    dropped_runs={'b': 5, 'a': 1},
  )
  total = summary.total(
    [summary.summarize_module(module) for module in (tile, layout, make('layout', c=0))]
  )
  assert (total.ops, total.edges, total.configs, total.measured, total.config_ops) == (
    12,
    9,
    5,
    4,
    4,
  )
  assert (total.fastest_ns, total.slowest_ns) == (10, 400)
  assert total.best_ratio == pytest.approx(math.sqrt(0.5 * 0.5))
  assert list(total.dropped_runs.items()) == [('b', 5), ('a', 2)]
  assert sum(total.opcodes.values()) == 11
  assert total.unknown_opcodes == {'<unknown>': 1}


def test_total_of_nothing():
  total = summary.total([])
  assert (total.ops, total.configs, total.fastest_ns, total.best_ratio, total.opcodes) == (
    0,
    0,
    None,
    None,
    {},
  )


def test_geometric_mean_does_not_underflow():
  part = summary.summarize_module(
    make('tile', c=1, config_runtime=np.array([2]), config_runtime_normalizers=np.array([2**62]))
  )
  assert summary.total([part] * 100).best_ratio == pytest.approx(2**-61)


@pytest.mark.parametrize('kind', module_lib.KINDS)
def test_file_to_json_and_back(kind, tmp_path):
  path = tmp_path / 'ü "m".npz'
  np.savez(path, **testing.arrays(kind))
  file = summary.summarize(readers.from_file(path))
  read = json.loads(json.dumps(summary.to_json(file), allow_nan=False))
  assert list(read) == ['type', 'modules', 'skipped']
  assert (read['type'], read['skipped']) == ('npz', {})
  assert list(read['modules'][0])[:2] == ['module_id', 'kind']
  assert summary.ModuleSummary(**read['modules'][0]) == file.modules[0]
  assert (file.modules[0].module_id, file.modules[0].kind) == ('ü "m"', kind)


def test_json_keeps_all_digits():
  module = make(
    'tile', c=1, config_runtime=np.array([2**62 + 1]), config_runtime_normalizers=np.array([3])
  )
  file = summary.summarize(hlo.Extraction((module,), {'why': 2}, 'TuningData'))
  text = json.dumps(summary.to_json(file))
  assert str(2**62 + 1) in text
  assert json.loads(text)['modules'][0]['best_ratio'] == (2**62 + 1) / 3
  assert json.loads(text)['skipped'] == {'why': 2}


def test_unmeasured_file():
  data = io.BytesIO()
  np.savez(
    data,
    **testing.tile_arrays(
      config_runtime=np.zeros(6, int), config_runtime_normalizers=np.ones(6, int)
    ),
  )
  data.seek(0)
  found = summary.summarize_module(npz.read(data, path='a.npz'))
  assert (found.configs, found.measured) == (6, 0)
  assert (found.fastest_ns, found.slowest_ns, found.best_ratio) == (None, None, None)


def test_computations_that_the_source_gives_are_kept():
  computation = np.array([0, 2, 2, 1])
  module = graph([3], [], [0, 4], computation=computation)
  assert summary.computation_of_op(module) is module.computation


@pytest.mark.parametrize(
  ('roots', 'edges', 'splits', 'expected'),
  [
    pytest.param([], [], [0], [], id='no ops'),
    pytest.param([0], [], [0, 1], [0], id='one op'),
    pytest.param([], [(1, 0)], [0, 2], [0, 0], id='no roots'),
    pytest.param(
      [1, 4], [(1, 0), (3, 2), (4, 3), (4, 1)], [0, 5], [0, 0, 1, 1, 1], id='roots are last'
    ),
    pytest.param(
      [1, 4], [(1, 0), (2, 0), (4, 3), (3, 1)], [0, 5], [0, 0, 0, 1, 1], id='an op behind its root'
    ),
    pytest.param(
      [1, 4],
      [(1, 0), (4, 3), (5, 3)],
      [0, 6],
      [0, 0, 1, 1, 1, 1],
      id='the entry continues behind its root',
    ),
    pytest.param([1, 4], [(3, 1)], [0, 2, 5], [0, 0, 1, 1, 1], id='as the segments'),
    pytest.param([1, 2], [(2, 0)], [0, 3], [0, 0, 0], id='two roots in one: segments'),
    pytest.param([3], [(3, 0)], [0, 2, 4], [0, 0, 1, 1], id='across segments: segments'),
  ],
)
def test_computations_are_found_from_roots(roots, edges, splits, expected):
  module = graph(roots, edges, splits)
  assert summary.computation_of_op(module).tolist() == expected
  assert summary.summarize_module(module).computations == len(set(expected))


PROGRAMS = sorted((testing.GOLDEN / 'modules').glob('*.pb'))


@pytest.mark.parametrize('path', PROGRAMS, ids=lambda path: path.stem)
def test_computations_of_real_programs_are_found_from_the_graph(path):
  (module,) = hlo.from_file(path)
  blind = dataclasses.replace(module, computation=None)
  assert np.unique(module.computation).size > np.unique(blind.computation).size
  np.testing.assert_array_equal(summary.computation_of_op(blind), module.computation)


def test_golden_files_are_there():
  assert len(PROGRAMS) >= 6


@testing.needs_shared
def test_real_tuning_data():
  file = summary.summarize(readers.from_file(testing.SHARED / 'data/op_tuning_data.pb'))
  assert (file.type_name, len(file.modules), file.skipped) == ('TuningData', 15, {})
  assert (file.total.configs, file.total.dropped_runs) == (752, {hlo.RUN_FAILED: 2})
  path = testing.SHARED / 'data/npz/layout/xla/random/valid/unet_3d.4x4.bf16.npz'
  assert summary.summarize(readers.from_file(path)).total.distinct_configs == 442
