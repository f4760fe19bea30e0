"""Reads configs in JSON and CSV, as people and scripts write them.

- Tile, JSON: a list of configs. A config is a list of 24 numbers, or a map from the 24 column names
  to numbers.
- Tile, CSV: a line for each config, with the 24 columns in any order.
- Layout, JSON: a list of configs. A config is a list of 18 integers for each configurable op, or a
  map from op names to maps from `output`, `input` and `kernel` to lists of dimensions, minor to
  major. Dimensions that are not named are -1, which leaves them to the compiler.
- Layout, CSV: a line for each config, with columns such as `convolution.5/output_layout_0`.
  Missing columns of an op are -1.

`features` defines the column names. An op goes by its name in the HLO, or by its position among
the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import csv
import difflib
import io
import json
from typing import Any

import numpy as np

from tpu_graphs import errors
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib

_MAX_DIMENSION = 126  # Dimensions are stored as int8.
Arrays = dict[str, np.ndarray]  # Fields of a `Module` by name.


def parse_json(
  text: str, module: module_lib.Module, configurable: np.ndarray, names: Sequence[str] | None
) -> Arrays:
  """Reads configs in JSON.

  Args:
    text: the content of the file.
    module: the program.
    configurable: int64 [NC], the ops that a list of layouts describes.
    names: the names of the N ops; None if ops are named by their position only.

  Returns:
    `config_feat`, or `node_config_ids` and `node_config_feat`.

  Raises:
    InputError: the text is not JSON, or not of this form; the error names config, op and value.
  """
  try:
    content = json.loads(text)
  except ValueError as error:
    raise errors.InputError('not JSON', found=error) from error
  if not isinstance(content, list) or not content:
    raise errors.InputError(
      'not a list of configs', found=errors.brief(repr(content)), expected='[config, config, …]'
    )
  if module.kind == 'tile':
    tiles = [_tile(config, f'config {i}') for i, config in enumerate(content)]
    return {'config_feat': np.array(tiles, np.float32)}
  if not all(isinstance(config, dict) for config in content):
    return {
      'node_config_ids': configurable,
      'node_config_feat': _listed_layouts(content, configurable.size),
    }
  find_node = _finder(module, names)
  layouts_of_configs: list[dict[int, np.ndarray]] = []
  for i, config in enumerate(content):
    layouts = {}
    for op, layout in config.items():
      node = find_node(op, f'config {i}')
      layouts[node] = _layout(layout, f'config {i}, op {op}')
    layouts_of_configs.append(layouts)
  nodes = np.array(sorted({node for layouts in layouts_of_configs for node in layouts}), np.int64)
  shape = (len(layouts_of_configs), nodes.size, features.NUM_LAYOUT_FEATURES)
  feat = np.full(shape, -1, np.int8)
  for i, layouts in enumerate(layouts_of_configs):
    for node, layout in layouts.items():
      feat[i, np.searchsorted(nodes, node)] = layout
  return {'node_config_ids': nodes, 'node_config_feat': feat}


def _tile(config: Any, where: str) -> list[float]:
  columns = features.tile_feature_names()
  if isinstance(config, dict):
    _check_names(config, columns, where)
    config = [config[name] for name in columns]
  if not isinstance(config, list) or len(config) != len(columns):
    raise errors.InputError(
      'wrong config',
      where=where,
      found=errors.brief(repr(config)),
      expected=f'{len(columns)} numbers',
    )
  for name, value in zip(columns, config, strict=True):
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise errors.InputError(
        'not a number', where=f'{where}, {name}', found=errors.brief(repr(value))
      )
  return config


def _check_names(found: Sequence[str] | dict[str, Any], columns: Sequence[str], where: str) -> None:
  for name in found:
    if name not in columns:
      raise _unknown(name, columns, where)
  missing = [name for name in columns if name not in found]
  if missing:
    raise errors.InputError(
      'column missing', where=where, found=errors.some(list(found)), expected=errors.some(missing)
    )


def _unknown(name: str, known: Sequence[str], where: str) -> errors.InputError:
  near = difflib.get_close_matches(name, known, n=1)
  return errors.InputError(
    'unknown column',
    where=where,
    found=errors.brief(repr(name)),
    expected=near[0] if near else errors.some(list(known)),
  )


def _listed_layouts(content: list[Any], num_ops: int) -> np.ndarray:
  """Returns the layouts of configs that are lists, int8 [C, NC, 18]."""
  width = features.NUM_LAYOUT_FEATURES
  for i, config in enumerate(content):
    are_lists = isinstance(config, list) and all(isinstance(op, list) for op in config)
    if not are_lists or len(config) != num_ops or any(len(op) != width for op in config):
      raise errors.InputError(
        'wrong config',
        where=f'config {i}',
        found=errors.brief(repr(config)),
        expected=(
          f'a list of {width} integers for each of {num_ops} configurable ops, '
          'or in all configs a map of op names'
        ),
      )
    for j, op in enumerate(config):
      for value, name in zip(op, features.layout_feature_names(), strict=True):
        _check_dimension(value, f'config {i}, op {j}, {name}')
  return np.array(content, np.int8).reshape(-1, num_ops, width)


def _check_dimension(value: Any, where: str, *, low: int = -1) -> None:
  if type(value) is not int or not low <= value <= _MAX_DIMENSION:
    raise errors.InputError(
      'not a dimension',
      where=where,
      found=errors.brief(repr(value)),
      expected=f'an integer of {low} to {_MAX_DIMENSION}',
    )


def _finder(module: module_lib.Module, names: Sequence[str] | None) -> Callable[[str, str], int]:
  """Returns a function that finds the position of an op.

  The function takes the op's name or position as text, and where that occurs, for errors.
  """
  known = {name: node for node, name in enumerate(names or ())}

  def find(op: str, where: str) -> int:
    if op in known:
      return known[op]
    if op.isdecimal() and int(op) < module.num_ops:
      return int(op)
    if not known:
      raise errors.InputError(
        'no such op',
        where=where,
        found=errors.brief(repr(op)),
        expected=f'a position, 0 to {module.num_ops - 1}: the program has no op names',
      )
    near = ' or '.join(difflib.get_close_matches(op, known, n=3))
    raise errors.InputError(
      'no such op',
      where=where,
      found=errors.brief(repr(op)),
      expected=near or f'one of the {module.num_ops} ops of the program',
    )

  return find


def _layout(layout: Any, where: str) -> np.ndarray:
  """Returns the layouts of one op, int8 [18]."""
  if not isinstance(layout, dict) or not set(layout) <= set(features.LAYOUT_TENSORS):
    raise errors.InputError(
      'wrong layouts of an op',
      where=where,
      found=errors.brief(repr(layout)),
      expected=f'a map of {" or ".join(features.LAYOUT_TENSORS)} to lists of dimensions',
    )
  result = np.full((len(features.LAYOUT_TENSORS), features.LAYOUT_DIMENSIONS), -1, np.int8)
  for row, tensor in zip(result, features.LAYOUT_TENSORS, strict=True):
    order = layout.get(tensor, [])
    if not isinstance(order, list) or len(order) > features.LAYOUT_DIMENSIONS:
      raise errors.InputError(
        'wrong layout',
        where=f'{where}, {tensor}',
        found=errors.brief(repr(order)),
        expected=f'a list of at most {features.LAYOUT_DIMENSIONS} dimensions',
      )
    for value in order:
      _check_dimension(value, f'{where}, {tensor}', low=0)
    if len(set(order)) < len(order):
      raise errors.InputError(
        'repeated dimension',
        where=f'{where}, {tensor}',
        found=order,
        expected='distinct dimensions',
      )
    row[: len(order)] = order
  return result.reshape(-1)


def parse_csv(text: str, module: module_lib.Module, names: Sequence[str] | None) -> Arrays:
  """Reads configs in CSV; see `parse_json` for arguments and result.

  Raises:
    InputError: a column or value is missing, unknown or wrong; the error names line and column.
  """
  reader = csv.reader(io.StringIO(text, newline=''))
  try:
    header = next(reader, [])
    lines = [(reader.line_num, row) for row in reader if row]
  except csv.Error as error:
    raise errors.InputError('not CSV', where=f'line {reader.line_num}', found=error) from error
  repeated = sorted({name for name in header if header.count(name) > 1})
  if repeated:
    raise errors.InputError('repeated column', where='line 1', found=repr(repeated[0]))
  number: Callable[[str], float]
  if module.kind == 'tile':
    number = float
    _check_names(header, features.tile_feature_names(), 'line 1')
    places = [features.tile_feature_names().index(name) for name in header]
    width = features.NUM_TILE_FEATURES
  else:
    number = int
    find_node = _finder(module, names)
    ops_and_columns = [_op_and_column(name) for name in header]
    node_of_op = {op: find_node(op, 'line 1') for op, _ in ops_and_columns}
    nodes = np.array(sorted(set(node_of_op.values())), np.int64)
    places = [
      int(np.searchsorted(nodes, node_of_op[op])) * features.NUM_LAYOUT_FEATURES + column
      for op, column in ops_and_columns
    ]
    width = nodes.size * features.NUM_LAYOUT_FEATURES
  values = np.full((len(lines), width), -1.0)
  for row, (line, cells) in zip(values, lines, strict=True):
    if len(cells) != len(header):
      raise errors.InputError(
        'wrong number of cells', where=f'line {line}', found=len(cells), expected=len(header)
      )
    row[places] = [
      _number(cell, number, f'line {line}, column {name}')
      for cell, name in zip(cells, header, strict=True)
    ]
  if module.kind == 'tile':
    return {'config_feat': values.astype(np.float32)}
  layouts = values.astype(np.int8).reshape(-1, nodes.size, features.NUM_LAYOUT_FEATURES)
  return {'node_config_ids': nodes, 'node_config_feat': layouts}


def _op_and_column(name: str) -> tuple[str, int]:
  op, _, column = name.rpartition('/')
  if column not in features.layout_feature_names() or not op:
    raise errors.InputError(
      'unknown column',
      where='line 1',
      found=errors.brief(repr(name)),
      expected='OP/output_layout_0, where output may be input or kernel, and 0 up to 5',
    )
  return op, features.layout_feature_names().index(column)


def _number(cell: str, number: Callable[[str], float], where: str) -> float:
  try:
    value = number(cell)
  except ValueError as error:
    raise errors.InputError('not a number', where=where, found=errors.brief(repr(cell))) from error
  if number is int:
    _check_dimension(value, where)
  return value
