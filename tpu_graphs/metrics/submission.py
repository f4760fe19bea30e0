"""Submissions to the Kaggle competition on TpuGraphs, "Google - Fast or Slow? Predict AI Model
Runtime".

  ID,TopConfigs
  tile:xla:d6f5f54247bd1e58a10b9e7062c636ab,17;3;40;0;8
  layout:xla:random:cd708819d3f5103afd6460b15e74eaf3,5;2;0;1;4;3

A row is a module of a test split, by collection and file stem, and the positions of its configs,
predicted fastest
first: all of them for layout, the first five for tile. A row of tile scores 2 - (fastest of the
five / fastest of all), one less the top-5 error; a row of layout scores Kendall's tau-b. The
score of a submission is the mean over its collections of the means over their rows, so that a
collection of 8 modules counts as much as one of 844.
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
    line: number of its line, from 1.
    positions: int64 [K], distinct, predicted fastest first.
  """

  line: int
  positions: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Submission:
  """A file that was read.

  Attributes:
    path: of the file.
    rows: collection -> module_id -> row, with every collection of `ROWS`.
  """

  path: str
  rows: Mapping[str, Mapping[str, Row]]


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
  """What is known of a module that a submission ranks.

  Attributes:
    module_id: of the module.
    config_id: int64 [C].
    relative_runtime: [C], -1 where not measured; see `module.relative_runtime`.
  """

  module_id: str
  config_id: np.ndarray
  relative_runtime: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectionScore:
  """How well a submission does on one collection.

  Attributes:
    score: mean over the rows; None if none has a score.
    rows: number of rows that have a score.
    undefined: number of rows that have none, since there is nothing to rank in their modules.
    unmeasured: number of rows whose modules have no runtimes.
    missing: number of modules without a row.
  """

  score: float | None
  rows: int
  undefined: int
  unmeasured: int
  missing: int


def check_collection(collection: str) -> str:
  """`collection`, if it is one of the five.

  Raises:
    InputError: it is not.
  """
  if collection not in ROWS:
    raise errors.InputError(
      'no collection of the competition', found=repr(collection), expected=', '.join(ROWS)
    )
  return collection


def row(collection: str, module_id: str, config_id: np.ndarray, order: np.ndarray) -> str:
  """The line of a module, without its end.

  Args:
    collection: one of `ROWS`.
    module_id: of the module, the stem of its npz file.
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
    raise errors.InputError(
      'configs left out',
      where=where,
      found=f'{config_id.size} configs'
      + (f', without position {missing[0]}' if missing.size else ''),
      expected='all configs of the source',
      fix='convert the data without --max_configs and --dedup_configs',
    )
  ranked = config_id[
    order[:TOP_TILE_CONFIGS] if module_lib.kind_of_collection(collection) == 'tile' else order
  ]
  return f'{where},{";".join(map(str, ranked.tolist()))}'


def missing_rows(counts: Mapping[str, int]) -> list[str]:
  """What a submission lacks, in words.

  Args:
    counts: collection -> number of rows.

  Returns:
    For each collection with another number of rows than its public test split, both numbers.
  """
  return [
    f'{collection}: {counts.get(collection, 0)} of {expected} rows'
    for collection, expected in ROWS.items()
    if counts.get(collection, 0) != expected
  ]


def parse(text: str, *, path: str) -> Submission:
  """Parses a submission.

  Raises:
    InputError: the header is another, an id is unknown or occurs twice, or positions are no
      numbers or occur twice; names line and id.
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
      collection = next(
        (collection for collection in ROWS if name.startswith(f'{collection}:')), None
      )
      if collection is None or name == f'{collection}:':
        raise errors.InputError(
          'not an id',
          where=where,
          found=repr(errors.brief(name)),
          expected=f'COLLECTION:MODULE, where COLLECTION is one of {", ".join(ROWS)}',
        )
      known = rows[collection].setdefault(
        name.removeprefix(f'{collection}:'),
        Row(number, _parse_positions(positions, f'{where}, {name}')),
      )
      if known.line != number:
        raise errors.InputError(
          'id occurs twice', where=f'{where}, {name}', found=f'the id of line {known.line}'
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
    submission: what is scored.
    collection: one of `ROWS`.
    modules: all modules of a split of the collection.
    partial: whether modules may be without a row; they do not count.

  Raises:
    InputError: a row does not fit its module or has none, or a module has no row; names line and
      id.
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
      ranked = _ranked(rows[name], measured, kind, f'line {rows[name].line}, {collection}:{name}')
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
  """Indices of the measured configs that a row lists, in its order; None if the module has no
  runtimes.
  """
  indices = config_indices.rows_of(row.positions, measured.config_id, where=where)
  c = measured.config_id.size
  expected = c if kind == 'layout' else min(TOP_TILE_CONFIGS, c)
  if indices.size < expected:
    raise errors.InputError(
      'too few positions',
      where=where,
      found=indices.size,
      expected=(f'all {c} configs' if kind == 'layout' else f'at least {expected}'),
    )
  if (measured.relative_runtime == module_lib.UNMEASURED).all():
    return None
  ranked = indices[measured.relative_runtime[indices] != module_lib.UNMEASURED]
  if not ranked.size:
    raise errors.InputError(
      'no config with a runtime', where=where, found=f'{indices.size} configs without'
    )
  return ranked


def _score(ranked: np.ndarray, measured: Measured, kind: str) -> float:
  runtimes = measured.relative_runtime
  if kind == 'layout':
    return metrics.kendall_tau(runtimes[ranked], np.arange(ranked.size))
  best = runtimes[runtimes != module_lib.UNMEASURED].min()
  return float(2 - runtimes[ranked[:TOP_TILE_CONFIGS]].min() / best)


def overall(scores: Iterable[CollectionScore]) -> float | None:
  """The score of a submission: the mean over the collections that have one; None if none has."""
  defined = [result.score for result in scores if result.score is not None]
  return math.fsum(defined) / len(defined) if defined else None
