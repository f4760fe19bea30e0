"""The protobuf messages that the extractor reads, reduced to the fields that are used.

Numbers, types and labels are taken from XLA's `xla_data.proto` and `hlo.proto`, and from the
`tuning.proto` of the published TpuGraphs dataset; all other fields of a file are ignored.
TensorFlow brings the full XLA messages, but importing it takes seconds, and it registers their
names in the default descriptor pool. The messages here have their own descriptor pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf import descriptor_pool
from google.protobuf import message_factory

_PACKAGE = 'tpu_graphs.hlo'
_Proto = descriptor_pb2.FieldDescriptorProto

# Number of an element type -> name, in the order of the one-hot columns of `Module.node_feat`.
# Other numbers are read as they are: enums are open in proto3.
ELEMENT_TYPES = {
  0: 'PRIMITIVE_TYPE_INVALID',
  1: 'PRED',
  2: 'S8',
  3: 'S16',
  4: 'S32',
  5: 'S64',
  6: 'U8',
  7: 'U16',
  8: 'U32',
  9: 'U64',
  10: 'F16',
  11: 'F32',
  12: 'F64',
  16: 'BF16',
  15: 'C64',
  18: 'C128',
  13: 'TUPLE',
  14: 'OPAQUE_TYPE',
  17: 'TOKEN',
}

_ENUMS = {'PrimitiveType': ELEMENT_TYPES}
_SCALARS = {
  'bool': _Proto.TYPE_BOOL,
  'int32': _Proto.TYPE_INT32,
  'int64': _Proto.TYPE_INT64,
  'string': _Proto.TYPE_STRING,
  'uint64': _Proto.TYPE_UINT64,
}


def _one(number: int, name: str, type_name: str) -> tuple[int, str, str, bool]:
  return number, name, type_name, False


def _many(number: int, name: str, type_name: str) -> tuple[int, str, str, bool]:
  return number, name, type_name, True


_MESSAGES = {
  'TuningData': [_many(1, 'modules', 'ModuleTuningData')],
  'ModuleTuningData': [
    _one(1, 'module', 'HloModuleProto'),
    _one(2, 'fingerprint', 'uint64'),
    _many(3, 'runs', 'ConfigProfile'),
    _many(4, 'config_index_to_node', 'uint64'),
  ],
  'ConfigProfile': [
    _one(1, 'op_config', 'HloOpConfig'),
    _one(2, 'module_config', 'HloModuleConfig'),
    _one(3, 'error', 'bool'),
    _one(4, 'profile', 'ExecutionProfile'),
    _one(5, 'is_default', 'bool'),
  ],
  'HloOpConfig': [_one(1, 'tile_size_config', 'TileSizeConfig')],
  'TileSizeConfig': [
    _many(1, 'kernel_bounds', 'int64'),
    _many(2, 'output_bounds', 'int64'),
    _many(3, 'input_bounds', 'int64'),
  ],
  'HloModuleConfig': [_one(1, 'layout_config', 'LayoutConfig')],
  'LayoutConfig': [_many(1, 'nodes', 'NodeLayoutConfig')],
  'NodeLayoutConfig': [_many(1, 'tensors', 'TensorLayoutConfig')],
  'TensorLayoutConfig': [_many(1, 'dims', 'int32')],
  'ExecutionProfile': [_one(4, 'compute_time_ns', 'int64')],
  'HloProto': [
    _one(1, 'hlo_module', 'HloModuleProto'),
    _one(3, 'buffer_assignment', 'BufferAssignmentProto'),
  ],
  # A ConfigProfile is field 3 of a ModuleTuningData as this message is field 3 of an HloProto. The
  # `buffer_allocations` distinguish the two.
  'BufferAssignmentProto': [_many(3, 'buffer_allocations', 'BufferAllocationProto')],
  'BufferAllocationProto': [],
  'HloModuleProto': [
    _one(1, 'name', 'string'),
    _many(3, 'computations', 'HloComputationProto'),
  ],
  'HloComputationProto': [
    _one(1, 'name', 'string'),
    _many(2, 'instructions', 'HloInstructionProto'),
    _one(5, 'id', 'int64'),
    _one(6, 'root_id', 'int64'),
  ],
  'HloInstructionProto': [
    _one(1, 'name', 'string'),
    _one(2, 'opcode', 'string'),
    _one(3, 'shape', 'ShapeProto'),
    _one(9, 'parameter_number', 'int64'),
    _many(14, 'dimensions', 'int64'),
    _one(15, 'window', 'Window'),
    _one(16, 'convolution_dimension_numbers', 'ConvolutionDimensionNumbers'),
    _many(17, 'slice_dimensions', 'SliceDimensions'),
    _many(20, 'dynamic_slice_sizes', 'int64'),
    _one(21, 'padding_config', 'PaddingConfig'),
    _one(35, 'id', 'int64'),
    _many(36, 'operand_ids', 'int64'),
    _many(38, 'called_computation_ids', 'int64'),
    _one(50, 'feature_group_count', 'int64'),
    _one(58, 'batch_group_count', 'int64'),
    _one(60, 'is_stable', 'bool'),
  ],
  'ShapeProto': [
    _one(2, 'element_type', 'PrimitiveType'),
    _many(3, 'dimensions', 'int64'),
    _many(4, 'tuple_shapes', 'ShapeProto'),
    _one(5, 'layout', 'LayoutProto'),
  ],
  'LayoutProto': [_many(1, 'minor_to_major', 'int64')],
  'Window': [_many(1, 'dimensions', 'WindowDimension')],
  'WindowDimension': [
    _one(1, 'size', 'int64'),
    _one(2, 'stride', 'int64'),
    _one(3, 'padding_low', 'int64'),
    _one(4, 'padding_high', 'int64'),
    _one(5, 'window_dilation', 'int64'),
    _one(6, 'base_dilation', 'int64'),
    _one(7, 'window_reversal', 'bool'),
  ],
  'ConvolutionDimensionNumbers': [
    _one(7, 'input_batch_dimension', 'int64'),
    _one(8, 'input_feature_dimension', 'int64'),
    _many(11, 'input_spatial_dimensions', 'int64'),
    _one(3, 'kernel_input_feature_dimension', 'int64'),
    _one(4, 'kernel_output_feature_dimension', 'int64'),
    _many(6, 'kernel_spatial_dimensions', 'int64'),
    _one(9, 'output_batch_dimension', 'int64'),
    _one(10, 'output_feature_dimension', 'int64'),
  ],
  'SliceDimensions': [
    _one(1, 'start', 'int64'),
    _one(2, 'limit', 'int64'),
    _one(3, 'stride', 'int64'),
  ],
  'PaddingConfig': [_many(1, 'dimensions', 'PaddingConfigDimension')],
  'PaddingConfigDimension': [
    _one(1, 'edge_padding_low', 'int64'),
    _one(2, 'edge_padding_high', 'int64'),
  ],
}
_ONEOF = {'ConfigProfile': ('config', ('op_config', 'module_config'))}

# An HloModuleProto reduced to its dots. These messages are separate because no graph depends on
# them: a file with a fault in a dot can still be read.
_DOT_MESSAGES = {
  'DotModule': [_many(3, 'computations', 'DotComputation')],
  'DotComputation': [_many(2, 'instructions', 'DotInstruction')],
  'DotInstruction': [_one(30, 'dot_dimension_numbers', 'DotDimensionNumbers')],
  'DotDimensionNumbers': [
    _many(1, 'lhs_contracting_dimensions', 'int64'),
    _many(2, 'rhs_contracting_dimensions', 'int64'),
    _many(3, 'lhs_batch_dimensions', 'int64'),
    _many(4, 'rhs_batch_dimensions', 'int64'),
  ],
}


def _file(
  name: str,
  messages: Mapping[str, list[tuple[int, str, str, bool]]],
  enums: Mapping[str, Mapping[int, str]],
) -> descriptor_pb2.FileDescriptorProto:
  file = descriptor_pb2.FileDescriptorProto(name=name, package=_PACKAGE, syntax='proto3')
  for enum_name, values in enums.items():
    enum = file.enum_type.add(name=enum_name)
    for number, value_name in values.items():
      enum.value.add(name=value_name, number=number)
  for message_name, fields in messages.items():
    message = file.message_type.add(name=message_name)
    oneof, members = _ONEOF.get(message_name, (None, ()))
    if oneof:
      message.oneof_decl.add(name=oneof)
    for number, name, type_name, repeated in fields:
      label = _Proto.LABEL_REPEATED if repeated else _Proto.LABEL_OPTIONAL
      field = message.field.add(name=name, number=number, label=label)
      if type_name in _SCALARS:
        field.type = _SCALARS[type_name]
      else:
        field.type = _Proto.TYPE_ENUM if type_name in _ENUMS else _Proto.TYPE_MESSAGE
        field.type_name = f'.{_PACKAGE}.{type_name}'
      if name in members:
        field.oneof_index = 0
  return file


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file('tpu_graphs/hlo.proto', _MESSAGES, _ENUMS))
_POOL.Add(_file('tpu_graphs/dot.proto', _DOT_MESSAGES, {}))


def _message_class(name: str) -> Any:
  return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f'{_PACKAGE}.{name}'))


TuningData = _message_class('TuningData')
ModuleTuningData = _message_class('ModuleTuningData')
HloProto = _message_class('HloProto')
HloModuleProto = _message_class('HloModuleProto')
DotModule = _message_class('DotModule')
