"""HLO module -> graph arrays, equal to the bit to the arrays of the published TpuGraphs dataset.

The rules follow the extractor in google-research-datasets/tpu_graphs, `process_data/xla`:
`hlo_encoder.cc` and `featurizers.h`. Where that extractor ends the process, `Fault` is raised here.
Values are first collected from the messages, field by field, and then arranged with NumPy, which
is several times as fast as one row at a time.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import functools
from typing import Any

import numpy as np

from tpu_graphs.hlo import graph as graph_lib
from tpu_graphs.hlo import protos
from tpu_graphs.hlo import ragged
from tpu_graphs.modules import features

_SEGMENT_NAMES = ('cluster', 'while', 'cond')
_ALL = slice(None)
# Attribute of a WindowDimension -> first column. `window_reversal` is missing here because it is
# counted, not summed.
_WINDOW = {
  'size': 'window_size_0',
  'stride': 'window_stride_0',
  'padding_low': 'window_padding_low_0',
  'padding_high': 'window_padding_high_0',
  'window_dilation': 'window_window_dilation_0',
  'base_dilation': 'window_base_dilation_0',
}
_SLICE = {
  'start': 'slice_dims_start_0',
  'stride': 'slice_dims_stride_0',
  'limit': 'slice_dims_limit_0',
}
_PADDING = {
  'edge_padding_low': 'padding_config_edge_padding_low_0',
  'edge_padding_high': 'padding_config_edge_padding_high_0',
}
_CONVOLUTION = {
  'input_batch_dimension': 'convolution_dim_numbers_input_batch_dim',
  'input_feature_dimension': 'convolution_dim_numbers_input_feature_dim',
  'kernel_input_feature_dimension': 'convolution_dim_numbers_kernel_input_feature_dim',
  'kernel_output_feature_dimension': 'convolution_dim_numbers_kernel_output_feature_dim',
  'output_batch_dimension': 'convolution_dim_numbers_output_batch_dim',
  'output_feature_dimension': 'convolution_dim_numbers_output_feature_dim',
}
_CONVOLUTION_SPATIAL = {
  'input_spatial_dimensions': 'convolution_dim_numbers_input_spatial_dims_0',
  'kernel_spatial_dimensions': 'convolution_dim_numbers_kernel_spatial_dims_0',
}


class Fault(Exception):
  """A broken rule; its arguments are the arguments of `graph.broken` without the first."""


def graph(module: Any, layout_padding: int) -> graph_lib.Graph:
  """Returns the graph of an `HloModuleProto`.

  The nodes are the instructions of all computations, in the order of the message.

  Args:
    module: the message.
    layout_padding: the value of unused places in layouts.

  Raises:
    Fault: an instruction refers to itself, or to an instruction or computation that does not exist.
  """
  sizes = np.array([len(computation.instructions) for computation in module.computations], np.int64)
  instructions = [
    instruction for computation in module.computations for instruction in computation.instructions
  ]
  names = [instruction.opcode for instruction in instructions]
  opcodes = features.opcodes()
  ids = [opcodes.get(name, features.UNKNOWN_OPCODE) for name in names]
  unknown = collections.Counter(name for name in names if name not in opcodes)
  ends_segment = [
    any(part in computation.name for part in _SEGMENT_NAMES) for computation in module.computations
  ]
  return graph_lib.Graph.of(
    node_opcode=np.array(ids, np.uint8),
    node_feat=_node_feat(module, instructions, sizes, layout_padding),
    edge_index=_edge_index(module, instructions),
    computation_sizes=sizes,
    ends_segment=np.array(ends_segment, bool),
    unknown_opcodes=dict(sorted(unknown.items())),
  )


def _edge_index(module: Any, instructions: list[Any]) -> np.ndarray:
  """Returns the edges, int64 [E, 2], rows (consumer, operand), sorted."""
  # Ids are opaque keys of the whole module. Where instructions share an id, it stands for the last
  # of them, for consumers too.
  index_of_id = {instruction.id: index for index, instruction in enumerate(instructions)}
  root_of_computation = {computation.id: computation.root_id for computation in module.computations}

  operands = ragged.Ragged.of([instruction.operand_ids for instruction in instructions])
  operand = _find(index_of_id, operands.values)
  _check(operand >= 0, operands, graph_lib.Rule.UNKNOWN_OPERAND)
  called = ragged.Ragged.of([instruction.called_computation_ids for instruction in instructions])
  called_ids = called.values.tolist()
  exists = np.array([key in root_of_computation for key in called_ids], bool)
  _check(exists, called, graph_lib.Rule.UNKNOWN_COMPUTATION)
  root_ids = np.array([root_of_computation[key] for key in called_ids], np.int64)
  root = _find(index_of_id, root_ids)
  _check(root >= 0, called, graph_lib.Rule.MISSING_ROOT)

  # An operand counts once per instruction, a called computation as often as it is called.
  n = max(len(instructions), 1)
  distinct = np.unique(operands.row * n + operand)
  own = _find(index_of_id, _scalar(instructions, 'id'))
  caller = np.concatenate([distinct // n, called.row])
  edges = np.stack([own[caller], np.concatenate([distinct % n, root])], axis=1)
  itself = np.flatnonzero(edges[:, 0] == edges[:, 1])
  if itself.size:
    index = int(caller[itself[0]])
    raise Fault(graph_lib.Rule.SELF_REFERENCE, index, 0, instructions[index].id)
  return edges[np.lexsort((edges[:, 1], edges[:, 0]))]


def _find(index_of_id: dict[int, int], ids: np.ndarray) -> np.ndarray:
  """Returns the index of each id, int64 [size of ids], -1 where there is none."""
  return np.array([index_of_id.get(key, -1) for key in ids.tolist()], np.int64)


def _check(good: np.ndarray, ids: ragged.Ragged, rule: graph_lib.Rule) -> None:
  """Raises `Fault` for the first id that is not good."""
  if not good.all():
    bad = int(np.argmin(good))
    raise Fault(rule, int(ids.row[bad]), 0, int(ids.values[bad]))


@functools.cache
def _columns() -> dict[str, int]:
  return {name: column for column, name in enumerate(features.node_feature_names())}


def _node_feat(
  module: Any, instructions: list[Any], sizes: np.ndarray, layout_padding: int
) -> np.ndarray:
  """Returns the features, float32 [N, 140], columns named by `features.node_feature_names()`."""
  feat = np.zeros((len(instructions), features.NUM_NODE_FEATURES), np.float32)
  products = [column for name, column in _columns().items() if name.endswith('_product')]
  feat[:, products] = 1  # The product of no values is 1.

  root_id = np.repeat(_scalar(module.computations, 'root_id'), sizes)
  _put(feat, _ALL, 'is_root', _scalar(instructions, 'id') == root_id)
  for name in ('parameter_number', 'feature_group_count', 'batch_group_count', 'is_stable'):
    _put(feat, _ALL, name, _scalar(instructions, name))
  dimensions = ragged.Ragged.of([instruction.dimensions for instruction in instructions])
  _put(feat, _ALL, 'dimensions_0', dimensions.first(6))

  shapes = [instruction.shape for instruction in instructions]
  _put_element_type(feat, shapes)
  shape_dimensions = ragged.Ragged.of([shape.dimensions for shape in shapes])
  _put(feat, _ALL, 'shape_dimensions_0', shape_dimensions.summary(6))
  tuple_sizes = np.array([len(shape.tuple_shapes) for shape in shapes], np.int64)
  _put(feat, _ALL, 'shape_tuple_shapes_size', tuple_sizes)
  minor_to_major = ragged.Ragged.of([shape.layout.minor_to_major for shape in shapes])
  _put(feat, _ALL, 'layout_minor_to_major_0', minor_to_major.first(6, fill=layout_padding))

  # The features below are set on few ops; all other ops keep the zeros and ones from above.
  rows = _rows_with(instructions, 'window')
  windows = [instructions[row].window.dimensions for row in rows]
  for name, column in _WINDOW.items():
    _put(feat, rows, column, _attribute(windows, name).summary(6))
  reversal = _attribute(windows, 'window_reversal')
  true_count = reversal.summary(6)[:, 6:7]
  false_count = reversal.lengths[:, np.newaxis] - true_count
  reversal_columns = np.concatenate([reversal.first(6), true_count, false_count], axis=1)
  _put(feat, rows, 'window_window_reversal_0', reversal_columns)

  rows = _rows_with(instructions, 'convolution_dimension_numbers')
  numbers = [instructions[row].convolution_dimension_numbers for row in rows]
  for name, column in _CONVOLUTION.items():
    _put(feat, rows, column, _scalar(numbers, name))
  for name, column in _CONVOLUTION_SPATIAL.items():
    spatial = ragged.Ragged.of([getattr(number, name) for number in numbers])
    _put(feat, rows, column, spatial.first(4))

  rows = [row for row, instruction in enumerate(instructions) if instruction.slice_dimensions]
  slices = [instructions[row].slice_dimensions for row in rows]
  for name, column in _SLICE.items():
    _put(feat, rows, column, _attribute(slices, name).summary(2))
  rows = [row for row, instruction in enumerate(instructions) if instruction.dynamic_slice_sizes]
  sizes_of_slices = ragged.Ragged.of([instructions[row].dynamic_slice_sizes for row in rows])
  _put(feat, rows, 'dynamic_slice_sizes_0', sizes_of_slices.summary(2))
  rows = _rows_with(instructions, 'padding_config')
  paddings = [instructions[row].padding_config.dimensions for row in rows]
  for name, column in _PADDING.items():
    _put(feat, rows, column, _attribute(paddings, name).summary(2))
  return feat


def _put(feat: np.ndarray, rows: list[int] | slice, first_column: str, values: np.ndarray) -> None:
  """Writes `values`, [rows] or [rows, columns], from `first_column` on."""
  table = values if values.ndim == 2 else values[:, np.newaxis]
  column = _columns()[first_column]
  # int64 becomes float32 directly: a float64 between the two would round twice.
  feat[rows, column : column + table.shape[1]] = table.astype(np.float32)


def _put_element_type(feat: np.ndarray, shapes: list[Any]) -> None:
  first = _columns()['shape_element_type_is_invalid_type']
  column_of_type = {number: first + place for place, number in enumerate(protos.ELEMENT_TYPES)}
  columns = np.array([column_of_type.get(shape.element_type, -1) for shape in shapes], np.int64)
  rows = np.flatnonzero(columns >= 0)  # A type that the dataset does not know has no column.
  feat[rows, columns[rows]] = 1


def _rows_with(instructions: list[Any], field: str) -> list[int]:
  return [row for row, instruction in enumerate(instructions) if instruction.HasField(field)]


def _scalar(messages: Sequence[Any], name: str) -> np.ndarray:
  return np.fromiter((getattr(message, name) for message in messages), np.int64, len(messages))


def _attribute(rows: list[Any], name: str) -> ragged.Ragged:
  return ragged.Ragged.of([[getattr(message, name) for message in row] for row in rows])
