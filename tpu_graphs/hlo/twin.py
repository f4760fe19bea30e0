"""The implementation in Python, with protobuf's own parser and NumPy.

Its results are equal to the results of the native implementation.
"""

from __future__ import annotations

from collections.abc import Iterator
import functools
import itertools
from typing import Any

from google.protobuf import message as protobuf_message
import numpy as np

from tpu_graphs.hlo import extract
from tpu_graphs.hlo import graph
from tpu_graphs.hlo import protos
from tpu_graphs.hlo import ragged
from tpu_graphs.modules import features

_CLASSES = {
  'TuningData': protos.TuningData,
  'ModuleTuningData': protos.ModuleTuningData,
  'HloProto': protos.HloProto,
  'HloModuleProto': protos.HloModuleProto,
}


def parse(type_name: str, data: bytes) -> Document | None:
  """Parses `data` as a message of the type; returns None if `data` is not such a message."""
  try:
    return Document(type_name, _CLASSES[type_name].FromString(data))
  # Protobuf in pure Python raises the latter two.
  except (protobuf_message.DecodeError, UnicodeDecodeError, RecursionError):
    return None


class Document:
  """See `graph.Document`."""

  def __init__(self, type_name: str, message: Any):
    self._tunings = message.modules if type_name == 'TuningData' else [message]
    self._type_name = type_name
    self.num_tunings = len(self._tunings)
    self.num_buffer_allocations = (
      len(message.buffer_assignment.buffer_allocations) if type_name == 'HloProto' else 0
    )

  @functools.cached_property
  def knows_opcode(self) -> bool:
    opcodes = features.opcodes()
    return any(
      instruction.opcode in opcodes
      for module in self._modules()
      for computation in module.computations
      for instruction in computation.instructions
    )

  def names(self) -> list[str]:
    names = []
    for module in self._modules():
      names.append(module.name)
      names.extend(computation.name for computation in module.computations)
    return [name for name in names if name]

  def _modules(self) -> Iterator[Any]:
    return (_module(self._type_name, message) for message in self._tunings)

  def tuning(self, index: int) -> graph.Tuning:
    return Tuning(self._type_name, self._tunings[index])


def _module(type_name: str, message: Any) -> Any:
  """Returns the HLO module of a tuning, an empty message where there is none."""
  if type_name == 'HloModuleProto':
    return message
  if type_name == 'HloProto':
    return message.hlo_module
  return message.module


class Tuning:
  """See `graph.Tuning`."""

  def __init__(self, type_name: str, message: Any):
    field = {'HloModuleProto': None, 'HloProto': 'hlo_module'}.get(type_name, 'module')
    is_measured = type_name in ('TuningData', 'ModuleTuningData')
    self._module = _module(type_name, message)
    self._runs = message.runs if is_measured else []
    self.has_module = field is None or message.HasField(field)
    self.name = self._module.name
    self.fingerprint = message.fingerprint if is_measured else 0
    self.num_ops = sum(len(computation.instructions) for computation in self._module.computations)
    self.config_nodes = np.array(message.config_index_to_node if is_measured else [], np.uint64)
    self.run_flags = np.array([_flags(run) for run in self._runs], np.uint8)
    self.run_time = np.array([run.profile.compute_time_ns for run in self._runs], np.int64)

  def graph(self, layout_padding: int) -> graph.Graph:
    try:
      return extract.graph(self._module, layout_padding)
    except extract.Fault as fault:
      raise graph.broken(self, *fault.args) from None

  def tile_configs(self, positions: list[int]) -> np.ndarray:
    configs = [self._runs[position].op_config.tile_size_config for position in positions]
    bounds = (
      [config.kernel_bounds for config in configs],
      [config.output_bounds for config in configs],
      [config.input_bounds for config in configs],
    )
    blocks = [ragged.Ragged.of(lists).summary(6, empty_product=0) for lists in bounds]
    return np.concatenate(blocks, axis=1).astype(np.float32)

  def layout_configs(self, positions: list[int]) -> np.ndarray:
    num_nodes, num_tensors = self.config_nodes.size, len(features.LAYOUT_TENSORS)
    limits = np.iinfo(np.int8)
    result = np.full(
      (len(positions), num_nodes, num_tensors, features.LAYOUT_DIMENSIONS), -1, np.int8
    )
    for config, position in zip(result, positions, strict=True):
      nodes = self._runs[position].module_config.layout_config.nodes
      if len(nodes) != num_nodes:
        raise graph.broken(self, graph.Rule.NODE_COUNT, position, 0, len(nodes))
      per_node = ragged.Ragged.of([range(len(node.tensors)) for node in nodes])
      tensors = itertools.chain.from_iterable(node.tensors for node in nodes)
      layouts = ragged.Ragged.of([tensor.dims for tensor in tensors])
      dims = layouts.first(features.LAYOUT_DIMENSIONS, fill=-1)
      # The first invalid node is reported. A wrong number of tensors counts before a wrong
      # dimension in the same node.
      bad = (dims < limits.min) | (dims > limits.max)
      bad_node = num_nodes
      if bad.any():
        bad_tensor = int(np.argmax(bad.any(axis=1)))
        bad_node = int(per_node.row[bad_tensor])
      too_many = np.flatnonzero(per_node.lengths > num_tensors)
      if too_many.size and too_many[0] <= bad_node:
        node = int(too_many[0])
        found = int(per_node.lengths[node])
        raise graph.broken(self, graph.Rule.TENSOR_COUNT, position, node, found)
      if bad.any():
        raise graph.broken(self, graph.Rule.DIMENSION, position, bad_node, int(dims[bad][0]))
      config[per_node.row, per_node.values] = dims
    return result.reshape(len(positions), num_nodes, features.NUM_LAYOUT_FEATURES)

  def find(self, index: int) -> tuple[str, str, int]:
    for computation in self._module.computations:
      if index < len(computation.instructions):
        instruction = computation.instructions[index]
        return computation.name, instruction.name, instruction.id
      index -= len(computation.instructions)
    return '', '', 0

  def hlo(self) -> bytes:
    return self._module.SerializeToString()


def _flags(run: Any) -> int:
  flags = 0
  if run.error:
    flags |= graph.RunFlag.ERROR
  if run.HasField('profile'):
    flags |= graph.RunFlag.PROFILE
  if run.op_config.HasField('tile_size_config'):
    flags |= graph.RunFlag.TILE_CONFIG
  if run.HasField('module_config'):
    flags |= graph.RunFlag.MODULE_CONFIG
  if run.is_default:
    flags |= graph.RunFlag.DEFAULT
  return flags
