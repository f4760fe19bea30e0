"""The configs of each module that are judged, listed in a JSON file as published protocols do.

  {"unet_3d.4x4.bf16": [0, 17, 17, 40], "resnet50.2x2.fp32": [3, 1]}

Positions count the configs of the source from 0, as `config_id` does. A position that is listed
twice counts twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
import dataclasses
import json
from typing import Any

import numpy as np

from tpu_graphs import errors


@dataclasses.dataclass(frozen=True, eq=False)
class ConfigIndices:
  """The positions that a file lists.

  Attributes:
    path: path of the file, for errors.
    positions: module_id -> int64 [K], K >= 1.
  """

  path: str
  positions: Mapping[str, np.ndarray]

  def repeated(self) -> dict[str, int]:
    """Returns the number of repeated positions of each module that has any."""
    counts = {}
    for name, positions in self.positions.items():
      count = positions.size - np.unique(positions).size
      if count:
        counts[name] = count
    return counts

  def check_modules(self, module_ids: Collection[str]) -> None:
    """Checks that all listed modules are among `module_ids`, the modules of the data.

    Raises:
      InputError: there are unknown modules; the error names them.
    """
    unknown = sorted(self.positions.keys() - set(module_ids))
    if unknown:
      raise errors.InputError(
        'unknown module',
        path=self.path,
        found=errors.some(unknown),
        expected=f'modules of the split: {errors.some(sorted(module_ids))}',
      )

  def rows(self, module_id: str, config_id: np.ndarray) -> np.ndarray:
    """Returns the rows of the configs of a module that are judged.

    Args:
      module_id: one of `positions`.
      config_id: int64 [C], the ids of the module's configs, in any order.

    Returns:
      int64 [K] with config_id[rows] == positions, so that `runtime[rows]` and `score[rows]` are
      judged.

    Raises:
      InputError: the module lacks one of the configs; the error names it.
    """
    positions = self.positions[module_id]
    with errors.in_file(self.path):
      return rows_of(positions, config_id, where=module_id)


def parse(text: str, *, path: str) -> ConfigIndices:
  """Parses the content of a JSON file; `path` is named in errors.

  Raises:
    InputError: the content is not JSON, or not an object of lists of positions; the error names
      module and position.
  """
  with errors.in_file(path):
    try:
      content = json.loads(text, object_pairs_hook=_without_repeats)
    except (json.JSONDecodeError, RecursionError) as error:
      raise errors.InputError('damaged JSON', found=error) from error
    if not isinstance(content, dict) or not content:
      raise errors.InputError(
        'not a map of modules',
        found=errors.brief(json.dumps(content)),
        expected='{"MODULE": [POSITION, ...], ...}',
      )
    positions = {name: _positions(name, listed) for name, listed in content.items()}
    return ConfigIndices(path, positions)


def rows_of(positions: np.ndarray, config_id: np.ndarray, *, where: str) -> np.ndarray:
  """Finds configs by their positions in the source.

  Args:
    positions: int64 [K].
    config_id: int64 [C], distinct, in any order.
    where: name of the module or row, for errors.

  Returns:
    int64 [K] with config_id[rows] == positions.

  Raises:
    InputError: a position is not in `config_id`.
  """
  order = np.argsort(config_id)
  ascending = config_id[order]
  places = np.searchsorted(ascending, positions)
  missing = np.append(ascending, -1)[places] != positions
  if missing.any():
    position = int(positions[np.argmax(missing)])
    expected = 'none, it has no config'
    fix = None
    if ascending.size:
      last = int(ascending[-1])
      expected = f'one of {ascending.size} configs, 0 to {last}'
      if position < last:
        fix = (
          'convert the data with all configs: this one failed, was a duplicate or was not sampled'
        )
    raise errors.InputError(
      'no such config', where=where, found=position, expected=expected, fix=fix
    )
  return order[places]


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
  content: dict[str, Any] = {}
  for name, value in pairs:
    if name in content:
      raise errors.InputError('module occurs twice', where=name)
    content[name] = value
  return content


def _positions(name: str, positions: Any) -> np.ndarray:
  if not isinstance(positions, list) or not positions:
    raise errors.InputError(
      'not a list of positions',
      where=name,
      found=errors.brief(json.dumps(positions)),
      expected='[POSITION, ...]',
    )
  for i, position in enumerate(positions):
    # A bool is an instance of int too, but not a position.
    if type(position) is not int or not 0 <= position < 2**63:
      raise errors.InputError(
        'not a position',
        where=f'{name}[{i}]',
        found=errors.brief(json.dumps(position)),
        expected='an integer >= 0',
      )
  return np.array(positions, np.int64)
