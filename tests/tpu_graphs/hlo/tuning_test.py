"""Tests of tpu_graphs.hlo.tuning: the runs and modules of tuning data that are read."""

import numpy as np
import pytest

from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs.hlo import protos

pytestmark = pytest.mark.usefixtures('each_implementation')

_HLO = {
  'name': 'k',
  'computations': [{'id': 1, 'root_id': 1, 'instructions': [{'id': 1, 'opcode': 'add'}]}],
}


def _tile_run(time=100, **fields):
  return {
    'op_config': {'tile_size_config': {'output_bounds': [2, 3]}},
    'profile': {'compute_time_ns': time},
  } | fields


def _layout_run(time=100, nodes=(((1, 0), (0,), ()),), **fields):
  config = {'nodes': [{'tensors': [{'dims': dims} for dims in node]} for node in nodes]}
  return {'module_config': {'layout_config': config}, 'profile': {'compute_time_ns': time}} | fields


def _tile(*modules):
  return hlo.read(protos.TuningData(modules=modules).SerializeToString(), kind='tile', name='f.pb')


def _layout(*runs, nodes=(0,), **fields):
  data = protos.ModuleTuningData(
    **{'module': _HLO, 'runs': runs, 'config_index_to_node': nodes} | fields
  )
  [module] = hlo.read(data.SerializeToString(), kind='layout', name='f.pb').modules
  return module


def test_tile_runs_that_are_not_measurements_are_dropped_but_count_in_positions():
  runs = [
    _tile_run(error=True),
    _tile_run(1),
    _tile_run(2),
    _tile_run(0),
    _tile_run(-5, error=True),
    {'op_config': {'tile_size_config': {}}},
    _tile_run(2**40, is_default=True),
    _tile_run(2),
  ]
  [module] = _tile({'module': _HLO, 'runs': runs, 'fingerprint': 255}).modules
  assert module.module_id == 'k_00000000000000ff'
  assert module.config_id.tolist() == [2, 6, 7]
  assert module.config_runtime.tolist() == [2, 2**40, 2]
  assert module.config_runtime_normalizers.tolist() == [2**40] * 3
  assert module.dropped_runs == {
    hlo.RUN_FAILED: 2,
    hlo.RUN_TOO_SHORT: 2,
    hlo.RUN_WITHOUT_PROFILE: 1,
  }


def test_tile_normalizer_is_the_first_measured_default():
  runs = [
    _tile_run(7, is_default=True, error=True),
    _tile_run(1, is_default=True),
    _tile_run(9),
    _tile_run(8, is_default=True),
    _tile_run(6, is_default=True),
  ]
  [module] = _tile({'module': _HLO, 'runs': runs}).modules
  assert set(module.config_runtime_normalizers) == {8}


def test_tile_modules_of_one_name_share_the_last_normalizer_and_get_distinct_ids():
  def module(name, default, fingerprint):
    runs = [_tile_run(default, is_default=True), _tile_run(5)]
    return {'module': _HLO | {'name': name}, 'runs': runs, 'fingerprint': fingerprint}

  modules = _tile(
    module('a', 10, 1),
    module('b', 20, 1),
    module('a', 30, 1),
    module('a', 40, 2),
    module('a', 50, 1),
    # This module has only one run and is skipped.
    module('a', 60, 1) | {'runs': [_tile_run(60, is_default=True)]},
  ).modules
  assert [module.module_id for module in modules] == [
    'a_0000000000000001',
    'b_0000000000000001',
    'a_0000000000000001.1',
    'a_0000000000000002',
    'a_0000000000000001.2',
  ]
  assert [int(module.config_runtime_normalizers[0]) for module in modules] == [50, 20, 50, 50, 50]


def test_tile_config_features():
  bounds = {'kernel_bounds': [1, 2, 3, 4, 5, 6, 7], 'output_bounds': [], 'input_bounds': [2**62, 4]}
  run = _tile_run(is_default=True, op_config={'tile_size_config': bounds})
  [module] = _tile({'module': _HLO, 'runs': [run, _tile_run()]}).modules
  np.testing.assert_array_equal(
    module.config_feat,
    [
      [1, 2, 3, 4, 5, 6, 28, 5040] + [0] * 8 + [2.0**62, 4, 0, 0, 0, 0, 2.0**62, 0],
      [0] * 8 + [2, 3, 0, 0, 0, 0, 5, 6] + [0] * 8,
    ],
  )


def test_tile_modules_that_are_skipped():
  two = [_tile_run(is_default=True), _tile_run()]
  failed_layout_run = _layout_run(error=True)
  extraction = _tile(
    {'module': _HLO},
    {'module': _HLO, 'runs': two[:1]},
    {'runs': two[:1]},
    {'runs': two},
    {'module': _HLO, 'runs': [*two, failed_layout_run]},
    {'module': _HLO, 'runs': [*two, {'op_config': {}}]},
    {'module': _HLO, 'runs': two},
  )
  assert len(extraction.modules) == 1
  assert extraction.skipped == {
    hlo.SKIPPED_FEW_RUNS: 3,
    hlo.SKIPPED_WITHOUT_HLO: 1,
    hlo.SKIPPED_WITHOUT_TILES: 2,
  }


def test_tile_file_without_any_module_to_read():
  extraction = _tile({'runs': [_tile_run(), _tile_run()]})
  assert (extraction.modules, extraction.skipped) == ((), {hlo.SKIPPED_WITHOUT_HLO: 1})


def test_tile_module_without_default_refuses_the_file():
  good = {'module': _HLO, 'runs': [_tile_run(is_default=True), _tile_run()]}
  bad = {
    'module': _HLO | {'name': 'ß'},
    'runs': [_tile_run(), _tile_run(is_default=True, error=True)],
  }
  with pytest.raises(errors.InputError, match='no default run') as caught:
    _tile(good, bad)
  assert (caught.value.path, caught.value.where) == ('f.pb', "module 'ß'")
  assert '2 runs, 1 of them measured' in caught.value.found


def test_layout_runs_that_are_not_measurements_are_dropped_but_count_in_positions():
  tile = _tile_run()
  module = _layout(
    _layout_run(0, error=True),
    tile,
    {'module_config': {}},
    _layout_run(1),
    _layout_run(7, is_default=True),
    _layout_run(2),
    _layout_run(2**40),
    {'error': True},
    fingerprint=2**64 - 1,
  )
  assert module.module_id == 'k_ffffffffffffffff'
  assert module.config_id.tolist() == [4, 5, 6]
  assert module.config_runtime.tolist() == [7, 2, 2**40]
  assert module.dropped_runs == {
    hlo.RUN_FAILED: 2,
    hlo.RUN_WITHOUT_CONFIG: 1,
    hlo.RUN_WITHOUT_PROFILE: 1,
    hlo.RUN_TOO_SHORT: 1,
  }
  np.testing.assert_array_equal(
    module.node_config_feat, [[[1, 0, -1, -1, -1, -1, 0] + [-1] * 11]] * 3
  )
  assert module.node_config_feat.dtype == np.int8


def test_layout_without_default_drops_all_runs():
  module = _layout(_layout_run(5), _layout_run(1), _layout_run(7, is_default=True, error=True))
  assert (module.num_configs, module.num_config_ops) == (0, 1)
  assert module.node_config_feat.shape == (0, 1, 18)
  assert module.dropped_runs == {hlo.RUN_FAILED: 1, hlo.RUN_WITHOUT_DEFAULT: 2}


def test_layout_default_of_1_ns_still_makes_the_other_runs_count():
  module = _layout(_layout_run(1, is_default=True), _layout_run(5))
  assert (module.config_id.tolist(), module.dropped_runs) == ([1], {hlo.RUN_TOO_SHORT: 1})


def test_layout_without_runs():
  module = _layout()
  assert (module.num_configs, module.num_config_ops, module.dropped_runs) == (0, 1, {})


def test_layout_config_ops_in_file_order_with_six_dimensions_each():
  hlo_module = {
    'name': 'm',
    'computations': [{'instructions': [{'id': i, 'opcode': 'dot'} for i in range(3)]}],
  }
  nodes = (((7, 6, 5, 4, 3, 2, 1),), ())
  module = _layout(_layout_run(nodes=nodes, is_default=True), nodes=(2, 0), module=hlo_module)
  assert module.node_config_ids.tolist() == [2, 0]
  np.testing.assert_array_equal(
    module.node_config_feat, [[[7, 6, 5, 4, 3, 2] + [-1] * 12, [-1] * 18]]
  )


@pytest.mark.parametrize(
  ('run', 'nodes', 'reason', 'where', 'found'),
  [
    (_layout_run(0), (0,), 'run without a time that did not fail', 'runs[1]', 'compute_time_ns 0'),
    (
      _layout_run(-3),
      (0,),
      'run without a time that did not fail',
      'runs[1]',
      'compute_time_ns -3',
    ),
    (_layout_run(nodes=()), (0,), 'config of a different number of ops', 'runs[1]', '0 nodes'),
    (
      _layout_run(module_config={}),
      (0,),
      'config of a different number of ops',
      'runs[1]',
      '0 nodes',
    ),
    (
      _layout_run(nodes=(((),) * 4,)),
      (0,),
      'too many tensors in a config',
      'runs[1], node 0',
      '4 tensors',
    ),
    (
      _layout_run(nodes=(((1,), (0, 128)),)),
      (0,),
      'layout dimension out of range',
      'runs[1], node 0',
      '128',
    ),
    (
      _layout_run(nodes=(((-129,),),)),
      (0,),
      'layout dimension out of range',
      'runs[1], node 0',
      '-129',
    ),
  ],
)
def test_layout_run_that_is_refused(run, nodes, reason, where, found):
  with pytest.raises(errors.InputError) as caught:
    _layout(_layout_run(is_default=True), run, nodes=nodes)
  error = caught.value
  assert (error.reason, error.path, error.where, error.found) == (reason, 'f.pb', where, found)
  assert error.expected


@pytest.mark.parametrize('node', [1, 2**63, 2**64 - 1])
def test_layout_config_op_that_does_not_exist(node):
  with pytest.raises(errors.InputError) as caught:
    _layout(_layout_run(is_default=True), nodes=(node,))
  assert (caught.value.path, caught.value.where) == ('f.pb', 'node_config_ids[0]')
  assert caught.value.found == str(node)


def test_layout_dimensions_at_the_ends_of_int8():
  module = _layout(_layout_run(nodes=(((-128, 127),),), is_default=True))
  assert module.node_config_feat[0, 0, :2].tolist() == [-128, 127]


def test_module_that_is_too_large_is_refused_before_it_is_read():
  data = protos.ModuleTuningData(
    module=_HLO, runs=[_layout_run(is_default=True)], config_index_to_node=[0]
  )
  size = 561 + 18
  hlo.read(data.SerializeToString(), max_array_bytes=size)
  with pytest.raises(errors.InputError, match='module too large') as caught:
    hlo.read(data.SerializeToString(), name='f.pb', max_array_bytes=size - 1)
  assert (caught.value.path, caught.value.where) == ('f.pb', "module 'k'")
  assert caught.value.found == '1 ops and 1 configs, arrays of 579 bytes'


def test_default_config_is_the_config_of_the_first_kept_default_run():
  tile = [
    _tile_run(7, is_default=True, error=True),
    _tile_run(9),
    _tile_run(8, is_default=True),
    _tile_run(6, is_default=True),
  ]
  [module] = _tile({'module': _HLO, 'runs': tile}).modules
  assert module.default_config == 2
  assert _layout(_layout_run(5), _layout_run(6, is_default=True)).default_config == 1
  assert _layout(_layout_run(5), _layout_run(1, is_default=True)).default_config is None


def test_unknown_opcodes_are_counted_and_named_once(caplog):
  instructions = [
    {'id': i, 'opcode': opcode} for i, opcode in enumerate(['add', 'topk', 'erf', 'topk', ''])
  ]
  module = protos.HloModuleProto(name='m', computations=[{'id': 1, 'instructions': instructions}])
  [result] = hlo.from_bytes(module.SerializeToString(), name='f.pb')
  assert result.unknown_opcodes == {'topk': 2, 'erf': 1, '': 1}
  assert result.node_opcode.tolist() == [2, 0, 0, 0, 0]
  [record] = caplog.records
  assert (
    'f.pb: ops of unknown opcodes, read as opcode 0: 1 (), 1 (erf), 2 (topk)' in record.getMessage()
  )


def test_program_of_each_module_is_in_the_order_of_the_modules():
  runs = [_tile_run(is_default=True), _tile_run()]
  modules = [
    {'module': _HLO | {'name': name}, 'runs': runs[:size]}
    for name, size in (('a', 2), ('b', 1), ('c', 2))
  ]
  extraction = _tile(*modules)
  names = [protos.HloModuleProto.FromString(extraction.program(i)).name for i in range(2)]
  assert names == ['a', 'c'] == [module.module_id[0] for module in extraction.modules]
