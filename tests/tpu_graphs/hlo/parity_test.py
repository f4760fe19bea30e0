"""Parity tests: the native extension and its Python twin return equal results for any bytes.

The messages are valid, damaged or hostile.
"""

import logging
import pathlib
import struct
import subprocess
import sys

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs.dataset import records
from tpu_graphs.hlo import implementations
from tpu_graphs.hlo import protos
from tpu_graphs.hlo import twin

native = pytest.importorskip('tpu_graphs.hlo.native', exc_type=ImportError)

_TYPES = ('TuningData', 'ModuleTuningData', 'HloProto', 'HloModuleProto')
_FILES = sorted(testing.GOLDEN.glob('*/*.pb'))


def _outcome(call, *args):
  """Returns the result or error of a call in a form that compares shape, dtype and every bit."""
  try:
    result = call(*args)
  except errors.InputError as error:
    return error.to_dict()
  arrays = vars(result) if hasattr(result, 'node_feat') else {'': result}
  return {
    name: (value.shape, value.dtype, value.tobytes()) if isinstance(value, np.ndarray) else value
    for name, value in arrays.items()
  }


def assert_same(data: bytes) -> int:
  """Compares all results of both implementations for `data`.

  Returns:
    The number of message types that `data` parses as.
  """
  parsed = 0
  for name in _TYPES:
    ours, theirs = native.parse(name, data), twin.parse(name, data)
    assert (ours is None) == (theirs is None), name
    if ours is None:
      continue
    parsed += 1
    assert ours.knows_opcode == theirs.knows_opcode
    assert ours.names() == theirs.names()
    assert ours.num_buffer_allocations == theirs.num_buffer_allocations
    assert ours.num_tunings == theirs.num_tunings
    for i in range(ours.num_tunings):
      _assert_same_tuning(ours.tuning(i), theirs.tuning(i))
  return parsed


def _assert_same_tuning(ours, theirs):
  for name in ('has_module', 'name', 'fingerprint', 'num_ops'):
    assert getattr(ours, name) == getattr(theirs, name), name
  for name in ('config_nodes', 'run_flags', 'run_time'):
    a, b = getattr(ours, name), getattr(theirs, name)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)
  assert protos.HloModuleProto.FromString(ours.hlo()) == protos.HloModuleProto.FromString(
    theirs.hlo()
  )
  for padding in (0, -1):
    assert _outcome(ours.graph, padding) == _outcome(theirs.graph, padding)
  for i in {0, ours.num_ops // 2, ours.num_ops - 1} & set(range(ours.num_ops)):
    assert ours.find(i) == theirs.find(i)
  for positions in ([], list(range(ours.run_time.size))):
    assert _outcome(ours.tile_configs, positions) == _outcome(theirs.tile_configs, positions)
    assert _outcome(ours.layout_configs, positions) == _outcome(theirs.layout_configs, positions)


def _varint(value):
  return records.varints(np.array([value - (1 << 64) if value >> 63 else value], np.int64))


def _field(number, wire_type, body):
  return _varint(number << 3 | wire_type) + body


def _delimited(body):
  return _varint(len(body)) + body


_NUMBERS = st.one_of(
  st.integers(0, 9),
  st.sampled_from([2**24 + 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63, 2**64 - 1]),
  st.integers(0, 2**64 - 1),
)
_VALUES = {
  0: _NUMBERS.map(_varint) | st.just(b'\x80' * 9 + b'\x7f'),
  1: st.integers(0, 2**64 - 1).map(lambda value: struct.pack('<Q', value)),
  2: st.binary(max_size=6).map(_delimited),
  5: st.integers(0, 2**32 - 1).map(lambda value: struct.pack('<I', value)),
}
_NUMBERS_UNKNOWN = st.sampled_from([7, 19, 31, 59, 1000, 2**29 - 1])


@st.composite
def _unknown(draw, depth=0):
  """Draws a field that the schema does not know, of any number and wire type, or a group."""
  number = draw(_NUMBERS_UNKNOWN)
  wire_type = draw(st.sampled_from([0, 1, 2, 3, 5] if depth < 3 else [0, 1, 2, 5]))
  if wire_type == 3:
    inner = b''.join(draw(st.lists(_unknown(depth=depth + 1), max_size=2)))
    return _field(number, 3, inner + _field(number, 4, b''))
  return _field(number, wire_type, draw(_VALUES[wire_type]))


_OPCODES = st.sampled_from(['add', 'fusion', 'erf', 'while', '', 'Abs'])
_NAMES = st.one_of(
  st.sampled_from(['main', 'while.1', 'cond', 'a_cluster', '']), st.text(max_size=4)
)
_KEYS = st.integers(0, 4).map(_varint)
_IDS = frozenset(['id', 'root_id', 'operand_ids', 'called_computation_ids'])


@st.composite
def _message(draw, descriptor, depth=0):
  """Draws the bytes of a message.

  Fields are in any order, some of them twice, packed or not, of wrong types, or unknown.
  """
  parts = []
  fields = [field for field in descriptor.fields if field.message_type is None or depth < 8]
  for field in draw(st.lists(st.sampled_from(fields), max_size=6)) if fields else []:
    parts.append(draw(_known(field, depth)))
  if draw(st.integers(0, 9)) == 0:
    parts.append(draw(_unknown()))
  return b''.join(parts)


@st.composite
def _known(draw, field, depth):
  kind = draw(st.integers(0, 19))
  if kind == 0:  # The wire type may differ from the schema.
    wire_type = draw(st.sampled_from([0, 1, 2, 5]))
    return _field(field.number, wire_type, draw(_VALUES[wire_type]))
  if field.message_type is not None:
    return _field(field.number, 2, _delimited(draw(_message(field.message_type, depth + 1))))
  if field.type == field.TYPE_STRING:
    text = draw(_OPCODES if field.name == 'opcode' else _NAMES).encode()
    return _field(field.number, 2, _delimited(text if kind > 1 else text + b'\xed\xa0\x80'))
  values = _KEYS if field.name in _IDS else _VALUES[0]
  if field.label == field.LABEL_REPEATED and draw(st.booleans()):
    return _field(field.number, 2, _delimited(b''.join(draw(st.lists(values, max_size=9)))))
  return _field(field.number, 0, draw(values))


_DESCRIPTORS = [getattr(protos, name).DESCRIPTOR for name in _TYPES]


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(_DESCRIPTORS).flatmap(_message))
def test_random_messages(data):
  assert_same(data)


@settings(deadline=None, max_examples=80)
@given(
  st.lists(
    _message(protos.HloModuleProto.DESCRIPTOR.fields_by_name['computations'].message_type),
    max_size=4,
  )
)
def test_random_computations(computations):
  assert assert_same(b''.join(_field(3, 2, _delimited(one)) for one in computations)) > 0


@settings(deadline=None, max_examples=80)
@given(
  st.lists(
    _message(protos.ModuleTuningData.DESCRIPTOR.fields_by_name['runs'].message_type), max_size=4
  ),
  st.integers(0, 3),
)
def test_random_runs(runs, num_nodes):
  assert_same(
    b''.join([_field(3, 2, _delimited(one)) for one in runs] + [_field(4, 0, b'\x00')] * num_nodes)
  )


@settings(deadline=None, max_examples=200)
@given(
  st.sampled_from([path for path in _FILES if path.stat().st_size < 2000]),
  st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=4),
  st.integers(0),
)
def test_damaged_files(path, changes, end):
  data = bytearray(path.read_bytes())
  for place, byte in changes:
    data[place % len(data)] = byte
  assert_same(bytes(data))
  assert_same(bytes(data[: end % len(data)]))


@pytest.mark.parametrize('path', _FILES, ids=lambda path: path.stem)
def test_golden_files(path):
  assert assert_same(path.read_bytes()) > 0


@testing.needs_shared
def test_real_files():
  data = testing.SHARED / 'data'
  paths = [
    data / 'op_tuning_data.pb',
    data / 'module_tuning_data_layout.pb',
    *sorted((data / 'hlo').glob('*.pb')),
  ]
  assert len(paths) > 4
  for path in paths:
    assert assert_same(path.read_bytes()) > 0


@pytest.mark.parametrize(
  'bad',
  [
    b'\x80',
    b'\xff' * 11,
    b'\x0a\xff\xff\xff\xff\x0f',
    b'\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01',
    b'\x00\x00',
    b'\x06',
    b'\x07\x01',
    b'\x0c',
    b'\x0b',
    b'\x0b\x14',
    b'\x03\x04',
    b'\x0d\x01',
    b'\x09\x01',
    b'\x80\x80\x80\x80\x10\x01',
    b'\x8a\x80\x80\x80\x80\x00\x00',
    b'\x8a\x80\x80\x80\x00\x00',
    b'\xfa\xff\xff\xff\x0f\x00',
    b'\x0a\x01',
    b'\x1a\x02\x12\x05',
    b'\x22\x01\x80',
    b'\x22\x0b' + b'\x80' * 11,
    b'\x22\x0a' + b'\xff' * 9 + b'\x7f',
  ],
  ids=lambda bad: bad.hex(),
)
def test_malformed_fields(bad):
  assert_same(bad)
  assert_same(b'\x0a' + _delimited(bad))
  assert_same(b'\x1a' + _delimited(b'\x12' + _delimited(bad)))


# Field 4, tuple_shapes, is read; field 1 is unknown.
@pytest.mark.parametrize('field', [4, 1])
@pytest.mark.parametrize('depth', range(93, 102))
def test_depth_of_messages_and_groups(field, depth):
  shape = b''
  for _ in range(depth):
    shape = _field(4, 2, _delimited(shape))
  groups = b''.join(_field(9, 3, b'') for _ in range(depth)) + b''.join(
    _field(9, 4, b'') for _ in range(depth)
  )
  for inner in (shape, groups):
    instruction = _field(2, 2, _delimited(b'add')) + _field(3, 2, _delimited(inner))
    assert_same(_field(3, 2, _delimited(_field(2, 2, _delimited(instruction)))))
    assert_same(inner)
    assert_same(_field(field, 2, _delimited(inner)))


def test_float32_is_rounded_once():
  values = [9007199791611905, 2**24 + 1, 2**63 - 1, -(2**63), -(2**53) - 1, 16777219]
  module = protos.HloModuleProto(name='m')
  instruction = module.computations.add(root_id=1).instructions.add(
    opcode='add', id=1, parameter_number=values[0]
  )
  instruction.shape.dimensions.extend(values)
  data = module.SerializeToString()
  assert_same(data)
  feat = native.parse('HloModuleProto', data).tuning(0).graph(0).node_feat
  assert feat[0, 30] == np.float32(9007200328482816)


def test_memory_is_not_shared_with_the_file():
  """Checks that arrays stay valid after the document and its bytes are gone."""
  data = bytearray((testing.GOLDEN / 'modules' / 'convnet_train_unopt.pb').read_bytes())
  graph = native.parse('ModuleTuningData', bytes(data)).tuning(0).graph(0)
  expected = twin.parse('ModuleTuningData', bytes(data)).tuning(0).graph(0)
  for name, array in vars(expected).items():
    np.testing.assert_array_equal(getattr(graph, name), array)
    assert not isinstance(array, np.ndarray) or getattr(graph, name).flags.writeable


def test_wrong_arguments_of_the_extension_are_python_errors():
  tuning = native.parse(
    'ModuleTuningData', (testing.GOLDEN / 'corner' / 'graph.pb').read_bytes()
  ).tuning(0)
  with pytest.raises(IndexError):
    tuning.tile_configs([0])
  with pytest.raises(IndexError):
    native.parse('TuningData', b'').tuning(0)
  with pytest.raises(TypeError):
    native.parse('TuningData', 'text')
  assert tuning.find(10**9) == ('', '', 0)


def test_environment_chooses_the_implementation(monkeypatch):
  for name in ('native', 'python'):
    code = 'from tpu_graphs import hlo; print(hlo.implementation())'
    monkeypatch.setenv(implementations.VARIABLE, name)
    result = subprocess.run(
      [sys.executable, '-c', code], check=True, capture_output=True, text=True
    )
    assert result.stdout == f'{name}\n'
  monkeypatch.setenv(implementations.VARIABLE, 'rust')
  implementations._active.cache_clear()
  with pytest.raises(errors.InputError, match='unknown implementation'):
    hlo.implementation()
  implementations._active.cache_clear()


def test_without_the_extension_python_is_used_and_one_warning_says_so(monkeypatch, caplog):
  monkeypatch.delenv(implementations.VARIABLE, raising=False)
  monkeypatch.setitem(sys.modules, 'tpu_graphs.hlo.native', None)
  monkeypatch.delattr(sys.modules['tpu_graphs.hlo'], 'native')
  implementations._active.cache_clear()
  with caplog.at_level(logging.WARNING):
    for _ in range(3):
      [module] = hlo.from_file(testing.GOLDEN / 'corner' / 'graph.pb')
  assert module.num_ops > 0
  assert hlo.implementation() == 'python'
  assert len([record for record in caplog.records if 'not built' in record.getMessage()]) == 1
  monkeypatch.setenv(implementations.VARIABLE, 'native')
  implementations._active.cache_clear()
  with pytest.raises(errors.InputError, match='native extension missing'):
    hlo.implementation()
  implementations._active.cache_clear()


_CORPUS = pathlib.Path(__file__).parents[3] / 'fuzz' / 'corpus'


@pytest.mark.slow
@pytest.mark.skipif(not _CORPUS.is_dir(), reason='needs the inputs that `make fuzz` found')
def test_inputs_that_fuzzing_found():
  for path in _CORPUS.iterdir():
    assert_same(path.read_bytes())
