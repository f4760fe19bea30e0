"""Statistics of feature columns: what a model needs to normalise its inputs.

They are computed over the train split only, stored with the data, and copied into each run so
that a model never depends on data at hand. Every column is described twice, as it is (x) and as
sign(x) * log1p(|x|), since HLO features span nine decades.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import functools
from typing import Any

import numpy as np

from tpu_graphs import errors
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import streams

FORMAT_VERSION = 1
# Feature -> number of its columns; 'extra_feat', beside these, has as many as the user likes.
NUM_COLUMNS = {
  'feat': features.NUM_NODE_FEATURES,
  'config_feat': features.NUM_TILE_FEATURES,
  'node_config_feat': features.NUM_LAYOUT_FEATURES,
}


@dataclasses.dataclass(frozen=True)
class Moments:
  """Minimum, maximum, mean and sum of squared deviations of `count` rows, each float64 [columns].

  Merging follows Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing
  sample variances, 1979.
  """

  count: int
  min: np.ndarray
  max: np.ndarray
  mean: np.ndarray
  m2: np.ndarray

  @classmethod
  def of(cls, values: np.ndarray, weights: np.ndarray | None = None) -> Moments:
    """Moments of the rows of `values`, [rows, columns], each counted `weights` [rows, columns]
    times (default once).
    """
    values = np.asarray(values, np.float64)
    if values.shape[0] == 0:
      columns = values.shape[1]
      return cls(
        0, np.full(columns, np.inf), np.full(columns, -np.inf), np.zeros(columns), np.zeros(columns)
      )
    if weights is None:
      mean = values.mean(axis=0)
      return cls(
        values.shape[0],
        values.min(axis=0),
        values.max(axis=0),
        mean,
        np.square(values - mean).sum(axis=0),
      )
    present = weights > 0
    count = int(weights[:, 0].sum())
    mean = (values * weights).sum(axis=0) / max(count, 1)
    return cls(
      count,
      np.where(present, values, np.inf).min(axis=0),
      np.where(present, values, -np.inf).max(axis=0),
      mean,
      (np.square(values - mean) * weights).sum(axis=0),
    )

  def merge(self, other: Moments) -> Moments:
    """Moments of both sets of rows together."""
    count = self.count + other.count
    delta = other.mean - self.mean
    share = other.count / count if count else 0.0
    return Moments(
      count,
      np.minimum(self.min, other.min),
      np.maximum(self.max, other.max),
      self.mean + delta * share,
      self.m2 + other.m2 + np.square(delta) * self.count * share,
    )

  @property
  def std(self) -> np.ndarray:
    """Population standard deviation, float64 [columns]."""
    return np.sqrt(self.m2 / max(self.count, 1))

  def to_json(self) -> dict[str, Any]:
    columns = {'min': self.min, 'max': self.max, 'mean': self.mean, 'std': self.std}
    return {
      name: [0.0] * array.size if self.count == 0 else array.tolist()
      for name, array in columns.items()
    }


@dataclasses.dataclass(frozen=True)
class Statistics:
  """Feature -> moments of its columns, plain and as signed logarithm.

  Features are 'feat', 'extra_feat' where there are any, and 'config_feat' or 'node_config_feat'.
  """

  plain: Mapping[str, Moments]
  log: Mapping[str, Moments]

  @classmethod
  def of(cls, module: module_lib.Module) -> Statistics:
    """Statistics of one module: each op, each config and each op's config counts once."""
    accumulator = Accumulator(module)
    for block in streams.ConfigStream.of(module).blocks():
      accumulator.add(block)
    return accumulator.statistics()

  def merge(self, other: Statistics) -> Statistics:
    """Statistics of both sets of modules together."""
    return Statistics(
      {name: moments.merge(other.plain[name]) for name, moments in self.plain.items()},
      {name: moments.merge(other.log[name]) for name, moments in self.log.items()},
    )

  def to_json(self) -> dict[str, Any]:
    """The content of `statistics.json`, as described in docs/formats.md."""
    return {
      'format_version': FORMAT_VERSION,
      'features': {
        name: {
          'count': plain.count,
          **plain.to_json(),
          'log': self.log[name].to_json(),
          'constant': np.flatnonzero(~(plain.min < plain.max)).tolist(),
        }
        for name, plain in self.plain.items()
      },
    }


class Accumulator:
  """Statistics of a module whose configs come in blocks; see `streams.ConfigStream`.

  They depend on where the blocks begin, for tile in the last bits, so these must not depend on
  how the program runs.
  """

  def __init__(self, module: module_lib.Module):
    """Begins with the ops of `module`, of whose configs only the kind counts."""
    values = {'feat': module.node_feat}
    if module.num_extra:
      values['extra_feat'] = module.extra_feat
    self._graph = _moments(values)
    self._configs = _moments({'config_feat': np.zeros((0, features.NUM_TILE_FEATURES))})
    self._counts = np.zeros((256, features.NUM_LAYOUT_FEATURES), np.int64)
    self._kind = module.kind

  def add(self, block: np.ndarray) -> None:
    """Adds configs, float [b, 24] or int8 [b, NC, 18]."""
    if self._kind == 'tile':
      self._configs = self._configs.merge(_moments({'config_feat': block}))
    else:  # One count per value instead of pass upon pass in float64: these are the largest arrays there are.
      self._counts += _count_int8(block)

  def statistics(self) -> Statistics:
    """Statistics of the module with the configs that were added."""
    configs = self._configs
    if self._kind == 'layout':
      levels = np.repeat(
        np.arange(-128.0, 128.0)[:, np.newaxis], features.NUM_LAYOUT_FEATURES, axis=1
      )
      configs = Statistics(
        {'node_config_feat': Moments.of(levels, self._counts)},
        {'node_config_feat': Moments.of(features.signed_log(levels), self._counts)},
      )
    return Statistics({**self._graph.plain, **configs.plain}, {**self._graph.log, **configs.log})


def _moments(values: Mapping[str, np.ndarray]) -> Statistics:
  return Statistics(
    {name: Moments.of(array) for name, array in values.items()},
    {name: Moments.of(features.signed_log(array)) for name, array in values.items()},
  )


def merge_all(parts: Iterable[Statistics]) -> Statistics | None:
  """All of `parts` merged in their order; None if there are none."""
  return functools.reduce(
    lambda total, part: part if total is None else total.merge(part), parts, None
  )


@dataclasses.dataclass(frozen=True)
class ColumnStatistics:
  """The statistics of one feature as a model reads them; see `Moments`. Arrays are float64
  [columns].

  Attributes:
    count: rows that were seen.
    log_mean: mean of sign(x) * log1p(|x|).
    log_std: its standard deviation.
    constant: bool, whether the column had one value only.
  """

  count: int
  log_mean: np.ndarray
  log_std: np.ndarray
  constant: np.ndarray


def parse(content: Mapping[str, Any], *, num_extra: int = 0) -> dict[str, ColumnStatistics]:
  """Reads the content of `statistics.json`.

  Args:
    content: of the file.
    num_extra: number of columns of extra features of the dataset or run that it belongs to.

  Raises:
    InputError: it is damaged, of another format version, or of other data.
  """
  result = {}
  try:
    if content.get('format_version') != FORMAT_VERSION:
      raise errors.InputError(
        'statistics of another format',
        where='format_version',
        found=content.get('format_version'),
        expected=FORMAT_VERSION,
        fix='convert the data again',
      )
    for name, columns in content['features'].items():
      constant = np.zeros(len(columns['mean']), bool)
      constant[columns['constant']] = True
      result[name] = ColumnStatistics(
        columns['count'],
        np.array(columns['log']['mean'], np.float64),
        np.array(columns['log']['std'], np.float64),
        constant,
      )
      expected = num_extra if name == 'extra_feat' else NUM_COLUMNS[name]
      if any(
        array.shape != (expected,)
        for array in (constant, result[name].log_mean, result[name].log_std)
      ):
        raise ValueError(f'{name} has not {expected} columns')
    if result and bool(num_extra) != ('extra_feat' in result):
      raise ValueError(f'{", ".join(result)} with {num_extra} columns of extra features')
  except errors.InputError:
    raise
  except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
    raise errors.InputError(
      'damaged statistics', found=repr(error), fix='convert the data again'
    ) from error
  return result


def _count_int8(values: np.ndarray) -> np.ndarray:
  """How often each value -128..127 occurs in each column of int8 [..., columns], columns even:
  int64 [256, columns].
  """
  columns = values.shape[-1]
  pairs = (
    np.ascontiguousarray(values).reshape(-1, columns).view('<u2')
  )  # Two columns are counted at a time.
  counts = np.zeros((256, columns), np.int64)
  for i in range(columns // 2):
    both = np.bincount(pairs[:, i], minlength=1 << 16).reshape(256, 256)
    counts[:, 2 * i], counts[:, 2 * i + 1] = both.sum(axis=0), both.sum(axis=1)
  return np.roll(counts, 128, axis=0)  # uint8 order is 0..127, -128..-1.
