"""The native implementation: `_native`, a C++ extension that `setup.py` builds from `cc/`."""

from __future__ import annotations

import functools

import numpy as np

from tpu_graphs.hlo import _native
from tpu_graphs.hlo import graph
from tpu_graphs.modules import features

# The C++ enum `FileType` has the same order.
_FILE_TYPES = ('TuningData', 'ModuleTuningData', 'HloProto', 'HloModuleProto')


def parse(type_name: str, data: bytes) -> Document | None:
  """Parses `data` as a message of the type; returns None if `data` is not such a message."""
  document = _native.parse(data, _FILE_TYPES.index(type_name), _opcodes())
  return None if document is None else Document(document)


@functools.cache
def _opcodes() -> _native.OpcodeTable:
  return _native.OpcodeTable(list(features.opcodes().items()))


class Document:
  """See `graph.Document`."""

  def __init__(self, document: _native.Document):
    self._document = document
    self.num_tunings = document.num_tunings
    self.knows_opcode = document.knows_opcode
    self.num_buffer_allocations = document.num_buffer_allocations
    self.names = document.names

    self._last: tuple[int, Tuning] | None = None

  def tuning(self, index: int) -> graph.Tuning:
    # Most files have one tuning, and callers ask for it more than once.
    if self._last is None or self._last[0] != index:
      self._last = index, Tuning(self._document.tuning(index))
    return self._last[1]


class Tuning:
  """See `graph.Tuning`."""

  def __init__(self, tuning: _native.Tuning):
    self._tuning = tuning
    self.has_module = tuning.has_module
    self.name = tuning.name
    self.fingerprint = tuning.fingerprint
    self.num_ops = tuning.num_ops
    self.config_nodes = tuning.config_nodes
    self.run_flags = tuning.run_flags
    self.run_time = tuning.run_time
    self.find = tuning.find
    self.hlo = tuning.hlo
    self.tile_configs = tuning.tile_configs

  def graph(self, layout_padding: int) -> graph.Graph:
    result = self._tuning.graph(layout_padding)
    fault, opcode, feat, edge_index, sizes, ends_segment, unknown_opcodes = result
    if fault is not None:
      raise graph.broken(self, graph.Rule(fault[0]), *fault[1:])
    return graph.Graph.of(
      node_opcode=opcode,
      node_feat=feat,
      edge_index=edge_index,
      computation_sizes=sizes,
      ends_segment=ends_segment,
      unknown_opcodes=unknown_opcodes,
    )

  def layout_configs(self, positions: list[int]) -> np.ndarray:
    fault, feat = self._tuning.layout_configs(positions)
    if fault is not None:
      raise graph.broken(self, graph.Rule(fault[0]), *fault[1:])
    return feat
