"""The metrics of many modules as columns, from results or from an evaluation's `per_module.csv`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import csv
import dataclasses
import io
import re
import sys

import numpy as np

from tpu_graphs import errors
from tpu_graphs.metrics import metrics

_ID, _CONFIGS = 'module_id', 'num_configs'
_COUNT = re.compile(r'[0-9]{1,15}')
_METRIC = re.compile(r'opa|kendall_tau|top_[1-9]\d*_error')
# All other metrics are errors, from 0 up.
_RANGES = {'opa': (0, 1), 'kendall_tau': (-1, 1)}


@dataclasses.dataclass(frozen=True, eq=False)
class ModuleTable:
  """The metrics of M modules, sorted by name.

  Attributes:
    module_ids: names, distinct.
    num_configs: int64 [M], number of configs that were ranked.
    values: name of a metric as in `metrics.ModuleMetrics.values` -> float64 [M], NaN where
      undefined.
  """

  module_ids: tuple[str, ...]
  num_configs: np.ndarray
  values: Mapping[str, np.ndarray]

  @classmethod
  def of(cls, results: Iterable[metrics.ModuleMetrics]) -> ModuleTable:
    """Returns the table of some results.

    Raises:
      InputError: a module occurs twice, or modules were evaluated for different ks.
    """
    results = sorted(results, key=lambda result: result.module_id)
    names = list(metrics.Summary.of(results).result()['undefined'])
    rows = [result.values for result in results]
    return cls(
      tuple(result.module_id for result in results),
      np.array([result.num_configs for result in results], np.int64),
      {name: np.array([row[name] for row in rows], np.float64) for name in names},
    )

  def select(self, rows: Sequence[int]) -> ModuleTable:
    """Returns a table of the modules at `rows`, which ascend."""
    return ModuleTable(
      tuple(self.module_ids[row] for row in rows),
      self.num_configs[rows],
      {name: column[rows] for name, column in self.values.items()},
    )


def parse(text: str, *, path: str) -> ModuleTable:
  """Reads the content of a `per_module.csv`.

  Args:
    text: a CSV with a header; columns 'module_id', 'num_configs', and any of 'opa',
      'kendall_tau' and 'top_<k>_error'. Other columns are not read. An empty cell or 'nan' is an
      undefined metric.
    path: path of the file, for errors.

  Raises:
    InputError: a column is missing or occurs twice, a row has more or fewer cells, a cell is not
      a number or out of range, or a module occurs twice; the error names the line.
  """
  with errors.in_file(path):
    reader = csv.reader(io.StringIO(text.removeprefix('\ufeff'), newline=''), strict=True)
    try:
      header = next(reader, [])
      names = _check_header(header)
      lines: dict[str, int] = {}
      rows = []
      for cells in reader:
        where = f'line {reader.line_num}'
        if len(cells) != len(header):
          raise errors.InputError(
            'wrong number of cells', where=where, found=len(cells), expected=len(header)
          )
        row = dict(zip(header, cells, strict=True))
        module_id = row[_ID]
        if module_id in lines:
          raise errors.InputError(
            'module occurs twice',
            where=where,
            expected='one row per module',
            found=f'{module_id}, as in line {lines[module_id]}',
          )
        lines[module_id] = reader.line_num
        count = _count(row, where)
        values = [_value(row, name, where) for name in names]
        rows.append((module_id, count, values))
    except csv.Error as error:
      raise errors.InputError(
        'damaged CSV', where=f'line {reader.line_num}', found=error
      ) from error
  rows.sort()
  columns = np.array([values for _, _, values in rows], np.float64).reshape(len(rows), len(names))
  return ModuleTable(
    tuple(module_id for module_id, _, _ in rows),
    np.array([count for _, count, _ in rows], np.int64),
    dict(zip(names, columns.T, strict=True)),
  )


def _check_header(header: Sequence[str]) -> list[str]:
  """Returns the names of the metrics."""
  names = [name for name in header if _METRIC.fullmatch(name)]
  missing = [name for name in (_ID, _CONFIGS) if name not in header]
  if not names:
    missing.append('opa')
  if missing:
    raise errors.InputError(
      'column missing',
      where='line 1',
      found=','.join(header) or 'nothing',
      expected=missing[0],
      fix='give the per_module.csv that evaluate has written',
    )
  repeated = [name for name in header if header.count(name) > 1]
  if repeated:
    raise errors.InputError('column twice', where='line 1', found=repeated[0])
  return names


def _count(row: Mapping[str, str], where: str) -> int:
  if not _COUNT.fullmatch(row[_CONFIGS]):
    raise errors.InputError(
      'not a number of configs',
      where=f'{where}, {_CONFIGS}',
      found=repr(row[_CONFIGS]),
      expected='an integer >= 0',
    )
  return int(row[_CONFIGS])


def _value(row: Mapping[str, str], name: str, where: str) -> float:
  try:
    value = float(row[name] or 'nan')
  except ValueError:
    raise errors.InputError(
      'not a number', where=f'{where}, {name}', found=repr(row[name])
    ) from None
  low, high = _RANGES.get(name, (0, sys.float_info.max))
  if value < low or value > high:
    expected = f'{low} to {high}' if name in _RANGES else f'>= {low}, finite'
    raise errors.InputError(
      'number out of range', where=f'{where}, {name}', found=row[name], expected=expected
    )
  return value
