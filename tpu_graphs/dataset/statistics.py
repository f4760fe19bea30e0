"""Statistics of feature columns, with which a model normalises its inputs.

They are computed over the train split only, stored with the data, and copied into each run, so
that a model never depends on the data at hand. Every column is described twice, as it is (x) and as
sign(x) * log1p(|x|), since HLO features span nine decades.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
from typing import Any

import numpy as np

from tpu_graphs import errors
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import streams

FORMAT_VERSION = 1
# Feature -> number of its columns. The user decides the number of columns of 'extra_feat'.
NUM_COLUMNS = {
  'feat': features.NUM_NODE_FEATURES,
  'config_feat': features.NUM_TILE_FEATURES,
  'node_config_feat': features.NUM_LAYOUT_FEATURES,
}


@dataclasses.dataclass(frozen=True)
class Moments:
  """Moments of the columns of `count` rows.

  Merging follows Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing
  sample variances, 1979.

  Attributes:
    count: number of rows.
    min: float64 [columns], minimum.
    max: float64 [columns], maximum.
    mean: float64 [columns], mean.
    m2: float64 [columns], sum of squared deviations from the mean.
  """

  count: int
  min: np.ndarray
  max: np.ndarray
  mean: np.ndarray
  m2: np.ndarray

  @classmethod
  def of(cls, values: np.ndarray, weights: np.ndarray | None = None) -> Moments:
    """Returns the moments of the rows of `values`.

    Args:
      values: [rows, columns].
      weights: [rows, columns], how often each value counts; None counts each value once.
    """
    values = np.asarray(values, np.float64)
    num_rows, num_columns = values.shape
    if num_rows == 0:
      return cls(
        count=0,
        min=np.full(num_columns, np.inf),
        max=np.full(num_columns, -np.inf),
        mean=np.zeros(num_columns),
        m2=np.zeros(num_columns),
      )
    if weights is None:
      mean = values.mean(axis=0)
      return cls(
        count=num_rows,
        min=values.min(axis=0),
        max=values.max(axis=0),
        mean=mean,
        m2=np.square(values - mean).sum(axis=0),
      )
    present = weights > 0
    count = int(weights[:, 0].sum())
    mean = (values * weights).sum(axis=0) / max(count, 1)
    return cls(
      count=count,
      min=np.where(present, values, np.inf).min(axis=0),
      max=np.where(present, values, -np.inf).max(axis=0),
      mean=mean,
      m2=(np.square(values - mean) * weights).sum(axis=0),
    )

  def merge(self, other: Moments) -> Moments:
    """Returns the moments of both sets of rows together."""
    count = self.count + other.count
    delta = other.mean - self.mean
    share = other.count / count if count else 0.0
    return Moments(
      count=count,
      min=np.minimum(self.min, other.min),
      max=np.maximum(self.max, other.max),
      mean=self.mean + delta * share,
      m2=self.m2 + other.m2 + np.square(delta) * self.count * share,
    )

  @property
  def std(self) -> np.ndarray:
    """Population standard deviation, float64 [columns]."""
    return np.sqrt(self.m2 / max(self.count, 1))

  def to_json(self) -> dict[str, Any]:
    """Returns 'min', 'max', 'mean' and 'std' -> a number per column; all are 0 without rows."""
    columns = {'min': self.min, 'max': self.max, 'mean': self.mean, 'std': self.std}
    return {
      name: [0.0] * array.size if self.count == 0 else array.tolist()
      for name, array in columns.items()
    }


@dataclasses.dataclass(frozen=True)
class Statistics:
  """Moments of the columns of each feature, plain and as signed logarithm.

  The features are 'feat', 'extra_feat' if modules have it, and 'config_feat' or
  'node_config_feat'.

  Attributes:
    plain: feature -> moments of x.
    log: feature -> moments of sign(x) * log1p(|x|).
  """

  plain: Mapping[str, Moments]
  log: Mapping[str, Moments]

  @classmethod
  def of(cls, module: module_lib.Module) -> Statistics:
    """Returns the statistics of one module: each op, config and config of an op counts once."""
    accumulator = Accumulator(module)
    for block in streams.ConfigStream.of(module).blocks():
      accumulator.add(block)
    return accumulator.statistics()

  def merge(self, other: Statistics) -> Statistics:
    """Returns the statistics of both sets of modules together."""
    return Statistics(
      {name: moments.merge(other.plain[name]) for name, moments in self.plain.items()},
      {name: moments.merge(other.log[name]) for name, moments in self.log.items()},
    )

  def to_json(self) -> dict[str, Any]:
    """Returns the content of `statistics.json`, as described in docs/formats.md."""
    described = {}
    for name, plain in self.plain.items():
      described[name] = {
        'count': plain.count,
        **plain.to_json(),
        'log': self.log[name].to_json(),
        'constant': np.flatnonzero(~(plain.min < plain.max)).tolist(),
      }
    return {'format_version': FORMAT_VERSION, 'features': described}


class Accumulator:
  """A builder of the statistics of a module whose configs come in blocks.

  The last bits of tile statistics depend on where the blocks begin, so the blocks must not depend
  on how the program runs; see `streams.ConfigStream`.
  """

  def __init__(self, module: module_lib.Module):
    """Begins with the ops of `module`; its configs are not read, only their kind."""
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
    else:
      # These are the largest arrays of a dataset: counting each int8 value takes one pass, where
      # moments in float64 take several.
      self._counts += _count_int8(block)

  def statistics(self) -> Statistics:
    """Returns the statistics of the module with the configs that were added."""
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
  """Merges `parts` in their order; returns None if there are none."""
  merged: Statistics | None = None
  for part in parts:
    merged = part if merged is None else merged.merge(part)
  return merged


@dataclasses.dataclass(frozen=True)
class ColumnStatistics:
  """Statistics of one feature as a model reads them; see `Moments`.

  Attributes:
    count: number of rows that were seen.
    log_mean: float64 [columns], mean of sign(x) * log1p(|x|).
    log_std: float64 [columns], population standard deviation of sign(x) * log1p(|x|).
    constant: bool [columns], True where the column had one value only.
  """

  count: int
  log_mean: np.ndarray
  log_std: np.ndarray
  constant: np.ndarray


def parse(content: Mapping[str, Any], *, num_extra: int = 0) -> dict[str, ColumnStatistics]:
  """Parses the content of `statistics.json`.

  Args:
    content: the JSON object in the file.
    num_extra: number of columns of extra features in the dataset or run with the file.

  Returns:
    Feature -> statistics.

  Raises:
    InputError: the content is damaged, of another format version, or of other data.
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
      arrays = (constant, result[name].log_mean, result[name].log_std)
      if any(array.shape != (expected,) for array in arrays):
        raise ValueError(f'{name} does not have {expected} columns')
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
  """Counts how often each value -128..127 occurs in each column.

  Args:
    values: int8 [..., columns], with an even number of columns.

  Returns:
    int64 [256, columns], a row per value from -128 on.
  """
  columns = values.shape[-1]
  # A pair of int8 columns is one column of uint16, so that one pass counts two columns.
  pairs = np.ascontiguousarray(values).reshape(-1, columns).view('<u2')
  counts = np.zeros((256, columns), np.int64)
  for i in range(columns // 2):
    both = np.bincount(pairs[:, i], minlength=1 << 16).reshape(256, 256)
    counts[:, 2 * i], counts[:, 2 * i + 1] = both.sum(axis=0), both.sum(axis=1)
  # The bytes were counted as uint8, whose order is 0..127, -128..-1.
  return np.roll(counts, 128, axis=0)
