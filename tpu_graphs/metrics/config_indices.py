"""Which configs of each module are judged: the positions that a JSON file lists, as published
protocols fix them.

  {"unet_3d.4x4.bf16": [0, 17, 17, 40], "resnet50.2x2.fp32": [3, 1]}

Positions count the configs of the source from 0, as `config_id` does. One that is listed twice
counts twice.
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
  """The positions of a file.

  Attributes:
    path: of the file.
    positions: module_id -> int64 [K], K >= 1.
  """

  path: str
  positions: Mapping[str, np.ndarray]

  def repeated(self) -> dict[str, int]:
    """Module -> how many of its positions are listed before already; modules without any are
    left out.
    """
    counts = {
      name: positions.size - np.unique(positions).size for name, positions in self.positions.items()
    }
    return {name: count for name, count in counts.items() if count}

  def check_modules(self, module_ids: Collection[str]) -> None:
    """Refuses names that are not among `module_ids`, those of the data.

    Raises:
      InputError: there are any; names them.
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
    """Where the configs of a module are that are to be judged.

    Args:
      module_id: one of `positions`.
      config_id: int64 [C] of the module, in any order.

    Returns:
      int64 [K] with config_id[rows] == positions: `runtime[rows]` and `score[rows]` are what to
      judge.

    Raises:
      InputError: the module has no such config; names it.
    """
    positions = self.positions[module_id]
    with errors.in_file(self.path):
      return rows_of(positions, config_id, where=module_id)


def parse(text: str, *, path: str) -> ConfigIndices:
  """Parses the content of a JSON file; `path` serves in errors.

  Raises:
    InputError: it is no JSON, or no object of lists of positions; names module and position.
  """
  with errors.in_file(path):
    try:
      content = json.loads(text, object_pairs_hook=_without_repeats)
    except (json.JSONDecodeError, RecursionError) as error:
      raise errors.InputError('damaged JSON', found=error) from error
    if not isinstance(content, dict) or not content:
      raise errors.InputError(
        'no map of modules',
        found=errors.brief(json.dumps(content)),
        expected='{"MODULE": [POSITION, ...], ...}',
      )
    return ConfigIndices(
      path, {name: _positions(name, positions) for name, positions in content.items()}
    )


def rows_of(positions: np.ndarray, config_id: np.ndarray, *, where: str) -> np.ndarray:
  """Finds configs by their position in the source.

  Args:
    positions: int64 [K].
    config_id: int64 [C], distinct, in any order.
    where: what is looked for, for errors.

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
    last = int(ascending[-1]) if ascending.size else -1
    raise errors.InputError(
      'no such config',
      where=where,
      found=position,
      expected=f'one of {ascending.size} configs, 0 to {last}'
      if ascending.size
      else 'none, it has no config',
      fix='convert the data with all configs: this one was left out as failed, as a duplicate or by a sample'
      if position < last
      else None,
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
      'no list of positions',
      where=name,
      found=errors.brief(json.dumps(positions)),
      expected='[POSITION, ...]',
    )
  for i, position in enumerate(positions):
    if type(position) is not int or not 0 <= position < 2**63:  # A bool is an int.
      raise errors.InputError(
        'not a position',
        where=f'{name}[{i}]',
        found=errors.brief(json.dumps(position)),
        expected='an integer >= 0',
      )
  return np.array(positions, np.int64)
