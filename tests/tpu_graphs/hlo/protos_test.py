"""Tests of tpu_graphs.hlo.protos: the reduced messages against TensorFlow's full messages."""

import os
import pathlib
import subprocess
import sys

from google.protobuf import descriptor
import pytest

from tests import testing
from tpu_graphs.hlo import protos

# Messages that TensorFlow does not have, copied from the tuning.proto of the dataset: field name ->
# number, type, repeated.
_TUNING = {
  'TuningData': {'modules': (1, 'message', True)},
  'ModuleTuningData': {
    'module': (1, 'message', False),
    'fingerprint': (2, 'uint64', False),
    'runs': (3, 'message', True),
    'config_index_to_node': (4, 'uint64', True),
  },
  'ConfigProfile': {
    'op_config': (1, 'message', False),
    'module_config': (2, 'message', False),
    'error': (3, 'bool', False),
    'profile': (4, 'message', False),
    'is_default': (5, 'bool', False),
  },
  'HloOpConfig': {'tile_size_config': (1, 'message', False)},
  'TileSizeConfig': {
    'kernel_bounds': (1, 'int64', True),
    'output_bounds': (2, 'int64', True),
    'input_bounds': (3, 'int64', True),
  },
  'HloModuleConfig': {'layout_config': (1, 'message', False)},
  'LayoutConfig': {'nodes': (1, 'message', True)},
  'NodeLayoutConfig': {'tensors': (1, 'message', True)},
  'TensorLayoutConfig': {'dims': (1, 'int32', True)},
}


def _assert_subset(own, full, seen):
  """Checks that each field of the descriptor `own`, and of its messages, is a field of `full`."""
  if own.name in seen:
    return
  seen.add(own.name)
  for field in own.fields:
    other = full.fields_by_name[field.name]
    assert (field.number, field.type, field.label) == (other.number, other.type, other.label), (
      own.name,
      field.name,
    )
    if field.message_type:
      _assert_subset(field.message_type, other.message_type, seen)
    elif field.enum_type:
      names = {value.number: value.name for value in other.enum_type.values}
      assert {value.number: value.name for value in field.enum_type.values}.items() <= names.items()


def test_messages_are_equal_to_xla():
  hlo_pb2 = pytest.importorskip('tensorflow.compiler.xla.service.hlo_pb2')
  xla_data_pb2 = pytest.importorskip('tensorflow.compiler.xla.xla_data_pb2')
  seen = set()
  _assert_subset(protos.HloProto.DESCRIPTOR, hlo_pb2.HloProto.DESCRIPTOR, seen)
  messages = protos.HloProto.DESCRIPTOR.file.message_types_by_name
  _assert_subset(messages['ExecutionProfile'], xla_data_pb2.ExecutionProfile.DESCRIPTOR, seen)
  assert seen | set(_TUNING) == set(messages)
  assert not seen & set(_TUNING)


@pytest.mark.parametrize('name', _TUNING)
def test_messages_are_equal_to_the_dataset(name):
  message = protos.TuningData.DESCRIPTOR.file.message_types_by_name[name]
  expected = {
    field: (number, getattr(descriptor.FieldDescriptor, f'TYPE_{type_name.upper()}'), repeated)
    for field, (number, type_name, repeated) in _TUNING[name].items()
  }
  assert {
    field.name: (field.number, field.type, field.label == descriptor.FieldDescriptor.LABEL_REPEATED)
    for field in message.fields
  } == expected


def test_tuning_data_of_full_messages():
  """Checks that bytes written with TensorFlow's classes are read as the same values."""
  hlo_pb2 = pytest.importorskip('tensorflow.compiler.xla.service.hlo_pb2')
  full = hlo_pb2.HloModuleProto(name='m', entry_computation_name='e', id=3)
  computation = full.computations.add(name='c', id=-5, root_id=1 << 40)
  instruction = computation.instructions.add(
    name='i', opcode='convolution', id=1 << 40, operand_ids=[1, 2, 1]
  )
  instruction.shape.element_type = 19  # F8E5M2, which the reduced enum lacks.
  instruction.shape.dimensions.extend([-1, 1 << 62])
  instruction.shape.layout.minor_to_major.extend([1, 0])
  instruction.window.dimensions.add(size=3, window_reversal=True)
  instruction.metadata.op_name = 'ignored'
  reduced = protos.HloModuleProto.FromString(full.SerializeToString())
  [own] = reduced.computations[0].instructions
  assert (reduced.name, reduced.computations[0].id, own.id, list(own.operand_ids)) == (
    'm',
    -5,
    1 << 40,
    [1, 2, 1],
  )
  assert (own.shape.element_type, list(own.shape.dimensions)) == (19, [-1, 1 << 62])
  assert own.window.dimensions[0].window_reversal
  assert reduced.SerializeToString(deterministic=True)


@pytest.mark.parametrize('implementation', ['upb', 'python'])
def test_both_implementations_of_protobuf(implementation):
  code = """
import sys
import numpy as np
from google.protobuf.internal import api_implementation
from tpu_graphs import errors
from tpu_graphs import hlo
assert api_implementation.Type() == sys.argv[2]
folder = sys.argv[1]
for stem in ('features', 'graph', 'empty'):
  [module] = hlo.from_file(f'{folder}/{stem}.pb')
  with np.load(f'{folder}/{stem}.npz') as golden:
    for name in golden.files:
      np.testing.assert_array_equal(getattr(module, name), golden[name])
assert len(hlo.from_file(f'{folder}/tile_sel.pb')) == 3
for data in (b'\\n\\x04\\n\\x02\\xff\\xfe', b'\\n\\x7f', bytes(20), b'HloModule m'):
  try:
    hlo.from_bytes(data)
  except errors.InputError:
    continue
  sys.exit(f'accepted: {data!r}')
"""
  subprocess.run(
    [sys.executable, '-c', code, testing.GOLDEN / 'corner', implementation],
    check=True,
    cwd=pathlib.Path(__file__).parents[3],
    env={**os.environ, 'PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION': implementation},
  )
