"""What both implementations of the extractor give: the arrays of a graph, or the fault that
forbids one.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import enum
from typing import Protocol

import numpy as np

from tpu_graphs import errors
from tpu_graphs.modules import features


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
  """The graph of a module: the fields of the same names of `tpu_graphs.modules.module.Module`.

  Attributes:
    node_opcode: uint8 [N].
    node_feat: float32 [N, 140].
    edge_index: int64 [E, 2], rows (consumer, operand), sorted.
    node_splits: int64 [S + 1] or [S]: the last entry, N, may be missing, `Module` appends it.
    computation: int64 [N].
    unknown_opcodes: name -> number of ops.
  """

  node_opcode: np.ndarray
  node_feat: np.ndarray
  edge_index: np.ndarray
  node_splits: np.ndarray
  computation: np.ndarray
  unknown_opcodes: Mapping[str, int]

  @classmethod
  def of(cls, *, computation_sizes: np.ndarray, ends_segment: np.ndarray, **arrays) -> Graph:
    """A graph by its arrays and, for each computation, its number of instructions and whether a
    segment ends there.
    """
    ends = np.cumsum(computation_sizes, dtype=np.int64)[ends_segment.astype(bool)]
    return cls(
      node_splits=np.concatenate([np.zeros(1, np.int64), ends]),
      computation=np.repeat(np.arange(computation_sizes.size), computation_sizes),
      **arrays,
    )


class RunFlag(enum.IntFlag):
  """What is known of a run; the numbers are those of the native extension."""

  ERROR = 1
  PROFILE = 2
  TILE_CONFIG = 4
  MODULE_CONFIG = 8
  DEFAULT = 16


class Rule(enum.IntEnum):
  """A rule that is broken; the numbers are those of the native extension."""

  UNKNOWN_OPERAND = 0
  UNKNOWN_COMPUTATION = 1
  MISSING_ROOT = 2
  SELF_REFERENCE = 3
  NODE_COUNT = 4
  TENSOR_COUNT = 5
  DIMENSION = 6


class Tuning(Protocol):
  """A module with its runs, as a file holds them.

  Attributes:
    has_module: whether there is an HLO module.
    name: of the HLO module.
    fingerprint: 0 where there is none.
    num_ops: N.
    config_nodes: uint64 [NC], indices of the configurable ops, unchecked.
    run_flags: uint8 [R], a `RunFlag` for each run.
    run_time: int64 [R], ns.
  """

  has_module: bool
  name: str
  fingerprint: int
  num_ops: int
  config_nodes: np.ndarray
  run_flags: np.ndarray
  run_time: np.ndarray

  def graph(self, layout_padding: int) -> Graph:
    """The graph; `layout_padding` fills the unused places of layouts. Raises InputError."""

  def tile_configs(self, positions: list[int]) -> np.ndarray:
    """float32 [size of positions, 24], the configs of the runs at `positions`."""

  def layout_configs(self, positions: list[int]) -> np.ndarray:
    """int8 [size of positions, NC, 18], the configs of the runs at `positions`. Raises
    InputError.
    """

  def find(self, index: int) -> tuple[str, str, int]:
    """Name of the computation, name and id of the instruction at `index`."""

  def hlo(self) -> bytes:
    """The serialized HloModuleProto."""


class Document(Protocol):
  """A file as a message of one type.

  Attributes:
    num_tunings: number of modules with their runs.
    knows_opcode: whether any instruction has an opcode of the table.
    num_buffer_allocations: of an HloProto.
  """

  num_tunings: int
  knows_opcode: bool
  num_buffer_allocations: int

  def names(self) -> list[str]:
    """The names of all modules and computations that have one."""

  def tuning(self, index: int) -> Tuning:
    """The module at `index` with its runs."""


def broken(tuning: Tuning, rule: Rule, index: int, node: int, value: int) -> errors.InputError:
  """The error for a rule that is broken.

  Args:
    tuning: where.
    rule: which.
    index: of the instruction or, for rules of configs, the run.
    node: of the config.
    value: the id, count or dimension that breaks it.
  """
  if rule in (Rule.NODE_COUNT, Rule.TENSOR_COUNT, Rule.DIMENSION):
    run, limits = f'runs[{index}]', np.iinfo(np.int8)
    if rule == Rule.NODE_COUNT:
      return errors.InputError(
        'config of a different number of ops',
        where=run,
        found=f'{value} nodes',
        expected=f'{tuning.config_nodes.size}, one per config_index_to_node',
      )
    if rule == Rule.TENSOR_COUNT:
      return errors.InputError(
        'too many tensors in a config',
        where=f'{run}, node {node}',
        found=f'{value} tensors',
        expected=f'at most {len(features.LAYOUT_TENSORS)}: {", ".join(features.LAYOUT_TENSORS)}',
      )
    return errors.InputError(
      'layout dimension out of range',
      where=f'{run}, node {node}',
      found=value,
      expected=f'{limits.min} to {limits.max}',
    )
  computation, instruction, key = tuning.find(index)
  where = (
    f'module {tuning.name!r}, computation {computation!r}, instruction {instruction!r} '
    f'(index {index}, id {key})'
  )
  if rule == Rule.SELF_REFERENCE:
    return errors.InputError(
      'instruction that refers to itself',
      where=where,
      found=f'id {value} among its operands or roots of called computations',
      expected='ids of other instructions',
    )
  reason, expected = {
    Rule.UNKNOWN_OPERAND: ('unknown operand id', 'the id of an instruction of this module'),
    Rule.UNKNOWN_COMPUTATION: ('unknown computation id', 'the id of a computation of this module'),
    Rule.MISSING_ROOT: (
      'called computation without root',
      'a computation with the root_id of an instruction of this module',
    ),
  }[rule]
  return errors.InputError(reason, where=where, found=f'id {value}', expected=expected)
