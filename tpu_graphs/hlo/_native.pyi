# Types of the extension that `cc/binding.cc` defines. `native.py` adapts it to the interface in
# `graph.py`.

import numpy as np

_Fault = tuple[int, int, int, int]

class OpcodeTable:
  def __init__(self, names: list[tuple[str, int]]) -> None: ...

class Tuning:
  has_module: bool
  name: str
  fingerprint: int
  num_ops: int
  config_nodes: np.ndarray
  run_flags: np.ndarray
  run_time: np.ndarray
  def graph(
    self, layout_padding: int
  ) -> tuple[
    _Fault | None, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, int]
  ]: ...
  def find(self, index: int) -> tuple[str, str, int]: ...
  def tile_configs(self, positions: list[int]) -> np.ndarray: ...
  def layout_configs(self, positions: list[int]) -> tuple[_Fault | None, np.ndarray]: ...
  def hlo(self) -> bytes: ...

class Document:
  num_tunings: int
  knows_opcode: bool
  num_buffer_allocations: int
  def names(self) -> list[str]: ...
  def tuning(self, index: int) -> Tuning: ...

def parse(data: bytes, type: int, opcodes: OpcodeTable) -> Document | None: ...
