"""The interface of both implementations of the extractor: graph arrays, and errors of bad input."""

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
  """The graph of a module; its fields are fields of `tpu_graphs.modules.module.Module`.

  Attributes:
    node_opcode: uint8 [N].
    node_feat: float32 [N, 140].
    edge_index: int64 [E, 2], rows (consumer, operand), sorted.
    node_splits: int64 [S + 1] or [S]: the last entry, N, may be missing; `Module` appends it.
    computation: int64 [N].
    unknown_opcodes: name of an unknown opcode -> number of ops.
  """

  node_opcode: np.ndarray
  node_feat: np.ndarray
  edge_index: np.ndarray
  node_splits: np.ndarray
  computation: np.ndarray
  unknown_opcodes: Mapping[str, int]

  @classmethod
  def of(cls, *, computation_sizes: np.ndarray, ends_segment: np.ndarray, **arrays) -> Graph:
    """Returns a graph whose `node_splits` and `computation` are derived from its computations.

    Args:
      computation_sizes: int [computations], number of instructions of each computation.
      ends_segment: bool or int [computations], whether a segment ends with the computation.
      **arrays: the other fields.
    """
    ends = np.cumsum(computation_sizes, dtype=np.int64)[ends_segment.astype(bool)]
    return cls(
      node_splits=np.concatenate([np.zeros(1, np.int64), ends]),
      computation=np.repeat(np.arange(computation_sizes.size), computation_sizes),
      **arrays,
    )


class RunFlag(enum.IntFlag):
  """Properties of a run; the native extension uses the same numbers."""

  ERROR = 1
  PROFILE = 2
  TILE_CONFIG = 4
  MODULE_CONFIG = 8
  DEFAULT = 16


class Rule(enum.IntEnum):
  """Rules that input can break; the native extension uses the same numbers."""

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
    has_module: True if there is an HLO module.
    name: the name of the HLO module.
    fingerprint: the fingerprint of the HLO module; 0 where there is none.
    num_ops: the number N of ops.
    config_nodes: uint64 [NC], indices of the configurable ops, unchecked.
    run_flags: uint8 [R], a `RunFlag` for each run.
    run_time: int64 [R], the time of each run in ns.
  """

  has_module: bool
  name: str
  fingerprint: int
  num_ops: int
  config_nodes: np.ndarray
  run_flags: np.ndarray
  run_time: np.ndarray

  def graph(self, layout_padding: int) -> Graph:
    """Returns the graph.

    Args:
      layout_padding: the value of unused places in layouts.

    Raises:
      InputError: the module breaks a `Rule`.
    """

  def tile_configs(self, positions: list[int]) -> np.ndarray:
    """Returns the configs of the runs at `positions`, float32 [size of positions, 24]."""

  def layout_configs(self, positions: list[int]) -> np.ndarray:
    """Returns the configs of the runs at `positions`, int8 [size of positions, NC, 18].

    Raises:
      InputError: a config breaks a `Rule`.
    """

  def find(self, index: int) -> tuple[str, str, int]:
    """Returns computation name, instruction name and instruction id of the op at `index`."""

  def hlo(self) -> bytes:
    """Returns the serialized HloModuleProto."""


class Document(Protocol):
  """A file as a message of one type.

  Attributes:
    num_tunings: number of modules in the file.
    knows_opcode: True if any instruction has an opcode of the table.
    num_buffer_allocations: number of buffer allocations of an HloProto; 0 for other types.
  """

  num_tunings: int
  knows_opcode: bool
  num_buffer_allocations: int

  def names(self) -> list[str]:
    """Returns the names of all modules and computations that have a name."""

  def tuning(self, index: int) -> Tuning:
    """Returns the module at `index` with its runs."""


def broken(tuning: Tuning, rule: Rule, index: int, node: int, value: int) -> errors.InputError:
  """Returns the error for a broken rule.

  Args:
    tuning: the module that breaks the rule.
    rule: the broken rule.
    index: the index of the instruction or, for rules of configs, of the run.
    node: the index of the node of the config.
    value: the id, count or dimension that breaks the rule.
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
