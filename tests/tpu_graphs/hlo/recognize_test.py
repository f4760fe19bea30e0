"""Tests of tpu_graphs.hlo.recognize: wrong types, damage, and files that parse as several types."""

import contextlib
import itertools
import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs.hlo import protos

pytestmark = pytest.mark.usefixtures('each_implementation')

_LAYOUT = testing.GOLDEN / 'corner' / 'features.pb'
_TILE = testing.GOLDEN / 'corner' / 'tile_sel.pb'


def _error(data, kind=None):
  with pytest.raises(errors.InputError) as caught:
    hlo.read(data, kind=kind, name='dir/f.pb')
  assert caught.value.path == 'dir/f.pb'
  assert str(caught.value).startswith('dir/f.pb: ')
  return caught.value


@pytest.mark.parametrize('kind', ['tile', 'layout', None])
def test_empty_file(kind):
  error = _error(b'', kind)
  assert error.reason == 'empty file'
  assert error.found == '0 bytes'


def test_file_of_the_other_kind():
  program = protos.ModuleTuningData.FromString(_LAYOUT.read_bytes()).module
  for more in (
    {'fingerprint': 1},
    {'config_index_to_node': [0]},
    {'runs': [{'error': True}, {'error': True}]},
    {'runs': [{'module_config': {}, 'error': True}]},
  ):
    error = _error(protos.ModuleTuningData(module=program, **more).SerializeToString(), 'tile')
    assert (error.reason, error.found) == ('file of another kind', 'ModuleTuningData')
    assert error.expected == 'TuningData or HloProto or HloModuleProto'
    assert error.fix == 'it belongs to a layout collection or run'
  error = _error(_TILE.read_bytes(), 'layout')
  assert (error.reason, error.found) == ('file of another kind', 'TuningData')
  assert error.expected == 'ModuleTuningData or HloProto or HloModuleProto'
  assert error.fix == 'it belongs to a tile collection or run'


def test_program_without_runs_is_of_any_kind():
  program = protos.ModuleTuningData.FromString(_LAYOUT.read_bytes()).module
  buffers = protos.HloProto(hlo_module=program)
  buffers.buffer_assignment.buffer_allocations.add()
  for message, type_name in [
    (program, 'HloModuleProto'),
    (protos.HloProto(hlo_module=program), 'HloProto'),
    (buffers, 'HloProto'),
  ]:
    for kind in ('tile', 'layout', None):
      extraction = hlo.read(message.SerializeToString(), kind=kind)
      [module] = extraction.modules
      assert (extraction.type_name, module.kind) == (type_name, kind or 'layout')
      assert (module.num_configs, module.default_config) == (0, None)
      assert module.num_ops == sum(
        len(computation.instructions) for computation in program.computations
      )
      assert protos.HloModuleProto.FromString(extraction.program(0)) == program


@testing.needs_shared
def test_real_file_of_the_other_kind():
  data = testing.SHARED / 'data'
  assert _error((data / 'op_tuning_data.pb').read_bytes(), 'layout').found == 'TuningData'
  assert (
    _error((data / 'module_tuning_data_layout.pb').read_bytes(), 'tile').found == 'ModuleTuningData'
  )


@pytest.mark.parametrize('kind', ['tile', 'layout', None])
@pytest.mark.parametrize(
  ('data', 'found'),
  [
    (b'PK\x03\x04' + bytes(100), 'a zip or npz archive'),
    (b'\x1f\x8b\x08\x00', 'gzip data'),
    (b'<!DOCTYPE html><html>404</html>', 'HTML or XML'),
    (b'\n\n<html>', 'HTML or XML'),
    (
      b'version https://git-lfs.github.com/spec/v1\noid sha256:00',
      'a Git LFS pointer in place of the file',
    ),
    (json.dumps({'a': 1}).encode(), 'JSON'),
    (b'no such file\r\n', 'text'),
    (b'\n', 'text'),
  ],
)
def test_other_formats(data, found, kind):
  error = _error(data, kind)
  assert (error.reason, error.found) == ('not a protobuf', found)


@pytest.mark.parametrize('kind', ['tile', 'layout', None])
@pytest.mark.parametrize(
  'data',
  [
    bytes(20),
    b'\x7fELF\x02\x01',
    b'\xff' * 30,
    b'\x08\x01',
    b'\x0b\x0e',
    b'\x12\x03abc',
    b'\n\x04\n\x02\xff\xfe',
    b'\n\x01\x99\x07',
    '\u65e5\u672c'.encode(),
  ],
)
def test_bytes_that_are_not_a_message(data, kind):
  assert _error(data, kind).reason == 'not a protobuf of a known type'


@pytest.mark.parametrize('kind', ['tile', None])
def test_truncated_file(kind):
  data = _TILE.read_bytes()
  tuning = protos.TuningData.FromString(data)
  # A cut between two modules leaves a whole message.
  whole = set(
    itertools.accumulate(
      protos.TuningData(modules=[module]).ByteSize() for module in tuning.modules
    )
  )
  assert max(whole) == len(data)
  for end in set(range(2, len(data))) - whole:
    error = _error(data[:end], kind)
    assert (error.reason, error.found) == ('file is cut off', f'{end} bytes')
    assert (
      error.expected == 'at least 3 bytes' if end == 2 else int(error.expected.split()[2]) > end
    )


def test_type_of_small_files_is_recognized():
  """Checks files with short names and few ops, which may parse as several types."""
  for name, opcode in itertools.product(['', 'e', 'empty', 'main', 'jit_f', 'ü'], ['add', 'erf']):
    program = protos.HloModuleProto(name=name)
    program.computations.add(name='main', id=1).instructions.add(opcode=opcode, id=1)
    runs = [
      {
        'op_config': {'tile_size_config': {'output_bounds': [1]}},
        'profile': {'compute_time_ns': 9},
        'is_default': True,
      }
    ] * 2
    tuning = protos.ModuleTuningData(module=program, runs=runs)
    [tile] = hlo.from_bytes(protos.TuningData(modules=[tuning]).SerializeToString())
    assert (tile.kind, tile.num_ops, tile.num_configs) == ('tile', 1, 2)
    for message in (protos.ModuleTuningData(module=program), program):
      [layout] = hlo.from_bytes(message.SerializeToString())
      assert (layout.kind, layout.num_ops, layout.module_id[:-17]) == ('layout', 1, name)


def test_kind_decides_where_the_file_shows_no_type():
  data = protos.ModuleTuningData(module={}).SerializeToString()
  [module] = hlo.from_bytes(data, kind='layout')
  assert module.num_ops == 0
  assert hlo.read(data, kind='tile').skipped == {hlo.SKIPPED_FEW_RUNS: 1}
  assert _error(data).reason == 'not a protobuf of a known type'


@pytest.mark.parametrize('depth', [50, 5000])
def test_deeply_nested_shape(depth):
  shape = b''
  for _ in range(depth):
    shape = b'\x22' + _varint(len(shape)) + shape  # tuple_shapes
  instruction = b'\x12\x03add\x1a' + _varint(len(shape)) + shape
  computation = b'\x12' + _varint(len(instruction)) + instruction
  data = b'\n\x01m\x1a' + _varint(len(computation)) + computation
  if depth < 90:  # The limit of protobuf is 100 levels.
    assert hlo.from_bytes(data)[0].node_feat[0, 29] == 1
  else:
    assert _error(data).reason == 'not a protobuf of a known type'


def _varint(value):
  encoded = bytearray()
  while value > 0x7F:
    encoded.append(value & 0x7F | 0x80)
    value >>= 7
  return bytes(encoded + bytes([value]))


@settings(deadline=None, max_examples=200)
@given(
  st.sampled_from([_LAYOUT, _TILE]),
  st.lists(st.tuples(st.integers(0), st.integers(0, 255)), min_size=1),
)
def test_damaged_file_is_read_or_refused(path, changes):
  data = bytearray(path.read_bytes())
  for place, byte in changes:
    data[place % len(data)] = byte
  for kind in ('tile', 'layout', None):
    with contextlib.suppress(errors.InputError):  # Any other exception is a fault.
      hlo.read(bytes(data), kind=kind)
