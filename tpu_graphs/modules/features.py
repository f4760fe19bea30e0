"""Names and columns of the features, and the opcode table.

The tables come from the published TpuGraphs dataset. Column i of `Module.node_feat` is
`node_feature_names()[i]`; the config features have their own lists of names.
"""

from __future__ import annotations

import csv
import functools
import importlib.resources

import numpy as np

NUM_NODE_FEATURES = 140
NUM_TILE_FEATURES = 24
NUM_LAYOUT_FEATURES = 18
NUM_OPCODES = 121  # Ids 0 (unknown) to 120.
UNKNOWN_OPCODE = 0

# A layout config holds, per configurable op, the layouts of these tensors. Each layout has up to
# six dimensions, minor to major.
LAYOUT_TENSORS = ('output', 'input', 'kernel')
LAYOUT_DIMENSIONS = 6


def _table(name: str) -> list[dict[str, str]]:
  path = importlib.resources.files('tpu_graphs').joinpath(f'tables/{name}')
  text = path.read_text(encoding='utf-8')
  return list(csv.DictReader(text.splitlines()))


@functools.cache
def node_feature_names() -> tuple[str, ...]:
  """Returns the names of the 140 columns of `Module.node_feat`."""
  return tuple(row['name_readme'] for row in _table('node_features.csv'))


@functools.cache
def tile_feature_names() -> tuple[str, ...]:
  """Returns the names of the 24 columns of `Module.config_feat`."""
  return tuple(row['name'] for row in _table('tile_config_features.csv'))


@functools.cache
def layout_feature_names() -> tuple[str, ...]:
  """Returns the names of the 18 features on the last axis of `Module.node_config_feat`."""
  return tuple(
    f'{tensor}_layout_{i}' for tensor in LAYOUT_TENSORS for i in range(LAYOUT_DIMENSIONS)
  )


@functools.cache
def opcodes() -> dict[str, int]:
  """Returns opcode name -> id, 1 to 120; a missing name has the id `UNKNOWN_OPCODE`."""
  return {
    row['name']: int(row['id']) for row in _table('opcodes.csv') if row['status'] != 'unknown'
  }


@functools.cache
def opcode_names() -> tuple[str, ...]:
  """Returns the names of the opcodes, indexed by id; the name of id 0 is '<unknown>'."""
  names = ['<unknown>'] * NUM_OPCODES
  for name, opcode in opcodes().items():
    names[opcode] = name
  return tuple(names)


def signed_log(x: np.ndarray) -> np.ndarray:
  """Returns sign(x) * log1p(|x|), float64: the scale on which features of any size are compared."""
  x = np.asarray(x, np.float64)
  return np.sign(x) * np.log1p(np.abs(x))
