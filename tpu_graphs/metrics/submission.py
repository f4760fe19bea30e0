"""Submissions to the Kaggle competition "Google - Fast or Slow? Predict AI Model Runtime".

  ID,TopConfigs
  tile:xla:d6f5f54247bd1e58a10b9e7062c636ab,17;3;40;0;8
  layout:xla:random:cd708819d3f5103afd6460b15e74eaf3,5;2;0;1;4;3

The competition is on TpuGraphs. A row names a module of a test split by collection and file stem,
and lists the positions of its configs, predicted fastest first: all configs for layout, the first
five for tile. A row of tile scores 2 - (fastest of the five / fastest of all), one less the top-5
error; a row of layout scores Kendall's tau-b. The score of a submission is the mean over its
collections of the means over their rows, so that a collection of 8 modules counts as much as one
of 844.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import math
import re
import types

import numpy as np

from tpu_graphs import errors
from tpu_graphs.metrics import config_indices
from tpu_graphs.metrics import metrics
from tpu_graphs.modules import module as module_lib

# Collection -> number of modules of its public test split, in the order of the rows.
ROWS: Mapping[str, int] = types.MappingProxyType(
  {
    'tile:xla': 844,
    'layout:xla:default': 8,
    'layout:xla:random': 8,
    'layout:nlp:default': 17,
    'layout:nlp:random': 17,
  }
)
TOP_TILE_CONFIGS = 5
HEADER = 'ID,TopConfigs'
_POSITIONS = re.compile(r'[0-9]{1,18}(;[0-9]{1,18})*')


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
  """One row of a submission.

  Attributes:
    line: number of the line in the file, from 1.
    positions: int64 [K], distinct, predicted fastest first.
  """

  line: int
  positions: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Submission:
  """The content of a submission file.

  Attributes:
    path: path of the file, for errors.
    rows: collection -> module_id -> row, with every collection of `ROWS`.
  """

  path: str
  rows: Mapping[str, Mapping[str, Row]]


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
  """The measurements of a module that a submission ranks.

  Attributes:
    module_id: the module's name.
    config_id: int64 [C], positions of the configs in the source.
    relative_runtime: [C], -1 where not measured; see `module.relative_runtime`.
  """

  module_id: str
  config_id: np.ndarray
  relative_runtime: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectionScore:
  """The score of a submission on one collection.

  Attributes:
    score: mean over the rows; None if no row has a score.
    rows: number of rows that have a score.
    undefined: number of rows without a score, since their modules have nothing to rank.
    unmeasured: number of rows whose modules have no runtimes.
    missing: number of modules without a row.
  """

  score: float | None
  rows: int
  undefined: int
  unmeasured: int
  missing: int


def check_collection(collection: str) -> str:
  """Returns `collection` if it is one of the five.

  Raises:
    InputError: it is another.
  """
  if collection not in ROWS:
    raise errors.InputError(
      'not a collection of the competition', found=repr(collection), expected=', '.join(ROWS)
    )
  return collection


def row(collection: str, module_id: str, config_id: np.ndarray, order: np.ndarray) -> str:
  """Returns the line of a module, without the line end.

  Args:
    collection: one of `ROWS`.
    module_id: the module's name, the stem of its npz file.
    config_id: int64 [C], all positions of the source in any order.
    order: int64 [C], indices of the configs, predicted fastest first.

  Raises:
    InputError: a config of the source was left out, or the name cannot be in a CSV without quotes.
  """
  where = f'{check_collection(collection)}:{module_id}'
  if not set(',"\r\n').isdisjoint(module_id):
    raise errors.InputError(
      'name cannot be written', where=where, expected='a name without comma, quote and line end'
    )
  missing = np.setdiff1d(np.arange(config_id.max(initial=-1) + 1), config_id, assume_unique=True)
  if missing.size or not config_id.size:
    found = f'{config_id.size} configs'
    if missing.size:
      found += f', without position {missing[0]}'
    raise errors.InputError(
      'configs left out',
      where=where,
      found=found,
      expected='all configs of the source',
      fix='convert the data without --max_configs and --dedup_configs',
    )
  if module_lib.kind_of_collection(collection) == 'tile':
    order = order[:TOP_TILE_CONFIGS]
  positions = ';'.join(map(str, config_id[order].tolist()))
  return f'{where},{positions}'


def missing_rows(counts: Mapping[str, int]) -> list[str]:
  """Returns descriptions of the collections that lack rows, or have too many.

  Args:
    counts: collection -> number of rows.

  Returns:
    For each collection with another number of rows than its public test split, both numbers.
  """
  descriptions = []
  for collection, expected in ROWS.items():
    count = counts.get(collection, 0)
    if count != expected:
      descriptions.append(f'{collection}: {count} of {expected} rows')
  return descriptions


def parse(text: str, *, path: str) -> Submission:
  """Parses a submission.

  Raises:
    InputError: the header is another, an id is unknown or occurs twice, or positions are not
      numbers or occur twice; the error names line and id.
  """
  lines = text.removeprefix('\ufeff').splitlines()
  with errors.in_file(path):
    if not lines or lines[0] != HEADER:
      raise errors.InputError(
        'wrong header',
        where='line 1',
        expected=HEADER,
        found=repr(errors.brief(lines[0])) if lines else 'nothing',
      )
    rows: dict[str, dict[str, Row]] = {collection: {} for collection in ROWS}
    for number, line in enumerate(lines[1:], 2):
      if not line.strip():
        continue
      name, comma, positions = line.rpartition(',')
      where = f'line {number}'
      if not comma:
        raise errors.InputError(
          'row without a comma', where=where, found=repr(errors.brief(line)), expected=HEADER
        )
      collections = (known for known in ROWS if name.startswith(f'{known}:'))
      collection = next(collections, None)
      if collection is None or name == f'{collection}:':
        raise errors.InputError(
          'not an id',
          where=where,
          found=repr(errors.brief(name)),
          expected=f'COLLECTION:MODULE, where COLLECTION is one of {", ".join(ROWS)}',
        )
      where = f'{where}, {name}'
      parsed = Row(number, _parse_positions(positions, where))
      module_id = name.removeprefix(f'{collection}:')
      first = rows[collection].setdefault(module_id, parsed)
      if first is not parsed:
        raise errors.InputError(
          'id occurs twice', where=where, found=f'the id of line {first.line}'
        )
  return Submission(path, rows)


def _parse_positions(text: str, where: str) -> np.ndarray:
  if not _POSITIONS.fullmatch(text):
    bad = next(part for part in text.split(';') if not _POSITIONS.fullmatch(part))
    raise errors.InputError(
      'not a position',
      where=where,
      found=repr(errors.brief(bad)),
      expected="integers >= 0, separated by ';'",
    )
  positions = np.array(list(map(int, text.split(';'))), np.int64)
  values, counts = np.unique(positions, return_counts=True)
  if values.size < positions.size:
    raise errors.InputError(
      'position occurs twice', where=where, found=values[np.argmax(counts > 1)]
    )
  return positions


def score_collection(
  submission: Submission, collection: str, modules: Iterable[Measured], *, partial: bool = False
) -> CollectionScore:
  """Scores the rows of one collection.

  Args:
    submission: the submission.
    collection: one of `ROWS`.
    modules: all modules of a split of the collection.
    partial: whether modules may lack a row; modules without a row do not count.

  Raises:
    InputError: a row does not fit its module or names an unknown module, or a module has no row;
      the error names line and id.
  """
  rows = submission.rows[check_collection(collection)]
  kind = module_lib.kind_of_collection(collection)
  scores: list[float] = []
  seen: set[str] = set()
  missing: list[str] = []
  unmeasured = 0
  with errors.in_file(submission.path):
    for measured in modules:
      name = measured.module_id
      seen.add(name)
      if name not in rows:
        missing.append(f'{collection}:{name}')
        continue
      where = f'line {rows[name].line}, {collection}:{name}'
      ranked = _ranked(rows[name], measured, kind, where)
      if ranked is None:
        unmeasured += 1
      else:
        scores.append(_score(ranked, measured, kind))
    for name, unknown in rows.items():
      if name not in seen:
        raise errors.InputError(
          'unknown module',
          where=f'line {unknown.line}',
          found=f'{collection}:{name}',
          expected=f'a module of the split, such as {min(seen)}' if seen else None,
        )
    if missing and not partial:
      raise errors.InputError(
        'row missing',
        found=f'no row for {errors.some(missing)}',
        expected=f'all {len(seen)} modules of {collection}',
        fix='give --partial to leave them out',
      )
  defined = [score for score in scores if not math.isnan(score)]
  return CollectionScore(
    score=math.fsum(defined) / len(defined) if defined else None,
    rows=len(defined),
    undefined=len(scores) - len(defined),
    unmeasured=unmeasured,
    missing=len(missing),
  )


def _ranked(row: Row, measured: Measured, kind: str, where: str) -> np.ndarray | None:
  """Returns the indices of the measured configs that a row lists, in its order.

  Returns None if the module has no runtimes.
  """
  indices = config_indices.rows_of(row.positions, measured.config_id, where=where)
  c = measured.config_id.size
  expected = c if kind == 'layout' else min(TOP_TILE_CONFIGS, c)
  if indices.size < expected:
    raise errors.InputError(
      'too few positions',
      where=where,
      found=indices.size,
      expected=f'all {c} configs' if kind == 'layout' else f'at least {expected}',
    )
  is_measured = measured.relative_runtime != module_lib.UNMEASURED
  if not is_measured.any():
    return None
  ranked = indices[is_measured[indices]]
  if not ranked.size:
    raise errors.InputError(
      'no config with a runtime', where=where, found=f'{indices.size} configs without a runtime'
    )
  return ranked


def _score(ranked: np.ndarray, measured: Measured, kind: str) -> float:
  runtimes = measured.relative_runtime
  if kind == 'layout':
    return metrics.kendall_tau(runtimes[ranked], np.arange(ranked.size))
  best = runtimes[runtimes != module_lib.UNMEASURED].min()
  return float(2 - runtimes[ranked[:TOP_TILE_CONFIGS]].min() / best)


def overall(scores: Iterable[CollectionScore]) -> float | None:
  """Returns the mean score over the collections that have a score; None if none has one."""
  defined = [result.score for result in scores if result.score is not None]
  return math.fsum(defined) / len(defined) if defined else None
