"""Tests of tpu_graphs.hlo: the arrays of published files, and files of each type."""

import logging
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs.hlo import protos

pytestmark = pytest.mark.usefixtures('each_implementation')

_ARRAYS = (
  'node_opcode',
  'node_feat',
  'edge_index',
  'node_splits',
  'node_config_ids',
  'node_config_feat',
  'config_feat',
  'config_runtime',
  'config_runtime_normalizers',
)
_MODULES = sorted(path.stem for path in (testing.GOLDEN / 'modules').glob('*.npz'))
_CORNERS = ('dup_called', 'empty', 'features', 'graph', 'single')


def _assert_golden(module, npz_path):
  with np.load(npz_path) as golden:
    assert set(golden.files) <= set(_ARRAYS)
    for name in golden.files:
      array = getattr(module, name)
      assert array.shape == golden[name].shape, name
      # `node_feat` and `config_feat` hold no NaN, so equal values are equal bits but for the sign
      # of zero.
      np.testing.assert_array_equal(array, golden[name], err_msg=name)
      assert not np.signbit(array[array == 0]).any(), name


def test_there_are_goldens():
  assert len(_MODULES) == 6


@pytest.mark.parametrize('stem', _MODULES)
def test_program(stem):
  [module] = hlo.from_file(testing.GOLDEN / 'modules' / f'{stem}.pb', kind='layout')
  _assert_golden(module, testing.GOLDEN / 'modules' / f'{stem}.npz')
  assert module.kind == 'layout'
  assert module.num_configs == module.num_config_ops == 0


@pytest.mark.parametrize('kind', ['layout', None])
@pytest.mark.parametrize('stem', _CORNERS)
def test_layout_corner_case(stem, kind):
  [module] = hlo.from_file(testing.GOLDEN / 'corner' / f'{stem}.pb', kind=kind)
  _assert_golden(module, testing.GOLDEN / 'corner' / f'{stem}.npz')


@pytest.mark.parametrize('kind', ['tile', None])
def test_tile_corner_cases(kind):
  path = testing.GOLDEN / 'corner' / 'tile_sel.pb'
  extraction = hlo.read(path.read_bytes(), kind=kind, name=str(path))
  assert len(extraction.modules) == 3
  for i, module in enumerate(extraction.modules):
    _assert_golden(module, testing.GOLDEN / 'corner' / f'tile_sel_{i}.npz')
  assert extraction.skipped == {
    hlo.SKIPPED_FEW_RUNS: 1,
    hlo.SKIPPED_WITHOUT_HLO: 1,
    hlo.SKIPPED_WITHOUT_TILES: 1,
  }
  assert extraction.modules[0].dropped_runs == {
    hlo.RUN_FAILED: 1,
    hlo.RUN_WITHOUT_PROFILE: 1,
    hlo.RUN_TOO_SHORT: 1,
  }


@pytest.mark.parametrize(
  ('stem', 'reason'),
  [
    ('self_edge', 'refers to itself'),
    ('missing_operand', 'unknown operand id'),
    ('layout_zero_time', 'without a time'),
    ('layout_4tensors', 'too many tensors'),
    ('tile_nodefault', 'no default'),
  ],
)
def test_refused_corner_case(stem, reason):
  path = testing.GOLDEN / 'corner' / f'{stem}.pb'
  with pytest.raises(errors.InputError, match=reason) as caught:
    hlo.from_file(path)
  assert caught.value.path == str(path)
  assert caught.value.where
  assert caught.value.found
  assert caught.value.expected


def test_every_corner_case_is_tested():
  stems = {path.stem for path in (testing.GOLDEN / 'corner').glob('*.pb')}
  assert stems == {
    *_CORNERS,
    'tile_sel',
    'self_edge',
    'missing_operand',
    'layout_zero_time',
    'layout_4tensors',
    'tile_nodefault',
  }


@testing.needs_shared
def test_published_layout_file():
  [module] = hlo.from_file(testing.SHARED / 'data' / 'module_tuning_data_layout.pb', kind='layout')
  _assert_golden(module, testing.SHARED / 'golden' / 'layout.npz')
  assert (module.num_ops, module.num_edges, module.num_config_ops, module.num_configs) == (
    3163,
    5112,
    62,
    112,
  )
  assert module.dropped_runs == {hlo.RUN_FAILED: 10}
  assert module.config_id[-1] < 122  # Dropped runs count in the positions too.
  assert module.module_id == f'main__.10904_{1647297092728839203:016x}'


@testing.needs_shared
def test_published_tile_file():
  extraction = hlo.read((testing.SHARED / 'data' / 'op_tuning_data.pb').read_bytes(), kind='tile')
  modules = extraction.modules
  for i in range(10):
    _assert_golden(modules[i], testing.SHARED / 'golden' / f'tile_{i}.npz')
  assert (len(modules), sum(module.num_configs for module in modules), extraction.skipped) == (
    15,
    752,
    {},
  )
  assert [sum(module.dropped_runs.values()) for module in modules] == [0, 2] + [0] * 13
  assert len({module.module_id for module in modules}) == 15


@testing.needs_shared
@pytest.mark.parametrize('kind', ['layout', None])
def test_program_of_today(kind):
  paths = sorted((testing.SHARED / 'data' / 'hlo').glob('*.hlo_module.pb'))
  assert paths
  for path in paths:
    [module] = hlo.from_file(path, kind=kind)
    assert module.num_ops > 0
    assert module.num_edges > 0
    assert (module.num_configs, module.num_config_ops) == (0, 0)


def _program(name='main'):
  """Returns a program of two ops, negate(parameter)."""
  module = protos.HloModuleProto(name=name)
  entry = module.computations.add(name='entry', id=1, root_id=8)
  entry.instructions.add(name='p', opcode='parameter', id=7)
  entry.instructions.add(name='n', opcode='negate', id=8, operand_ids=[7])
  return module


@pytest.mark.parametrize('kind', ['layout', None])
def test_program_without_runs(kind):
  program = _program('日本')
  files = [
    program.SerializeToString(),
    protos.HloProto(hlo_module=program).SerializeToString(),
    protos.ModuleTuningData(module=program).SerializeToString(),
  ]
  ids = []
  for data in files:
    [module] = hlo.from_bytes(data, kind=kind)
    assert (module.num_ops, module.num_configs, module.num_config_ops, module.is_measured) == (
      2,
      0,
      0,
      False,
    )
    np.testing.assert_array_equal(module.edge_index, [[1, 0]])
    ids.append(module.module_id)
  assert ids[1] == ids[2]  # Both files have the same bytes.
  assert ids[0] != ids[1]
  assert '日本_0000000000000000' not in ids  # A digest takes the place of the fingerprint.
  assert all(
    len(module_id) == len('日本_') + 16 and module_id.startswith('日本_') for module_id in ids
  )
  [changed] = hlo.from_bytes(files[0] + files[0], kind=kind)
  assert changed.module_id not in ids


def test_buffers_of_a_program_are_not_a_run():
  program = protos.HloProto(hlo_module=_program())
  program.buffer_assignment.buffer_allocations.add()
  [module] = hlo.from_bytes(program.SerializeToString())
  assert module.dropped_runs == {}
  assert module.num_ops == 2


def test_computation_index():
  program = _program()
  program.computations.add(name='empty', id=2)
  program.computations.add(name='while', id=3).instructions.add(opcode='add', id=9)
  program.computations.add(name='body', id=4).instructions.add(opcode='add', id=10)
  [module] = hlo.from_bytes(program.SerializeToString())
  np.testing.assert_array_equal(module.computation, [0, 0, 2, 3])
  np.testing.assert_array_equal(module.node_splits, [0, 3, 4])


def test_kind_that_does_not_exist():
  with pytest.raises(errors.InputError, match='unknown kind'):
    hlo.read(_program().SerializeToString(), kind='layouts')


def test_skipped_modules_are_logged_in_one_line(caplog):
  path = testing.GOLDEN / 'corner' / 'tile_sel.pb'
  with caplog.at_level(logging.WARNING):
    hlo.from_file(path)
  [record] = caplog.records
  assert str(path) in record.getMessage()
  assert hlo.SKIPPED_FEW_RUNS in record.getMessage()


@pytest.mark.parametrize('path', ['missing.pb', '.'])
def test_file_that_cannot_be_opened(path, tmp_path):
  with pytest.raises(errors.InputError, match='cannot be read') as caught:
    hlo.from_file(tmp_path / path)
  assert caught.value.path == str(tmp_path / path)


def test_import_is_cheap_and_leaves_the_default_pool_alone():
  code = """
import sys
from tpu_graphs import hlo
from google.protobuf import descriptor_pool
[module] = hlo.from_file(sys.argv[1])
assert module.num_ops == 238, module.num_ops
assert 'tensorflow' not in sys.modules
for name in ('xla.HloModuleProto', 'tpu_graphs.hlo.HloModuleProto'):
  try:
    descriptor_pool.Default().FindMessageTypeByName(name)
  except KeyError:
    pass
  else:
    sys.exit('registered: ' + name)
"""
  path = testing.GOLDEN / 'modules' / 'convnet_train_unopt.pb'
  subprocess.run(
    [sys.executable, '-c', code, path], check=True, cwd=pathlib.Path(__file__).parents[3]
  )
