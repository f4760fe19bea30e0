"""Lists of different lengths, laid out in one array."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
  """Lists of integers of different lengths.

  Attributes:
    values: int64 [V], the lists one after the other.
    lengths: int64 [R], the length of each list.
  """

  values: np.ndarray
  lengths: np.ndarray

  @classmethod
  def of(cls, rows: Sequence[Any]) -> Ragged:
    """Of sequences of integers in the range of int64, such as repeated fields of a message."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return cls(np.fromiter(itertools.chain.from_iterable(rows), np.int64, lengths.sum()), lengths)

  @property
  def row(self) -> np.ndarray:
    """int64 [V], the list that each value lies in."""
    return np.repeat(np.arange(self.lengths.size), self.lengths)

  @property
  def position(self) -> np.ndarray:
    """int64 [V], the position of each value in its list."""
    return np.arange(self.values.size) - np.repeat(
      np.cumsum(self.lengths) - self.lengths, self.lengths
    )

  def first(self, width: int, *, fill: int = 0) -> np.ndarray:
    """int64 [R, width]: the first values of each list, shorter ones filled up, longer ones cut
    off.
    """
    table = np.full((self.lengths.size, width), fill, np.int64)
    position = self.position
    kept = position < width
    table[self.row[kept], position[kept]] = self.values[kept]
    return table

  def summary(self, width: int, *, empty_product: int = 1) -> np.ndarray:
    """int64 [R, width + 2]: the first values, then sum and product over all values, which wrap
    around as in C++.
    """
    filled = self.lengths > 0
    starts = (np.cumsum(self.lengths) - self.lengths)[filled]
    table = np.zeros((self.lengths.size, width + 2), np.int64)
    table[:, :width] = self.first(width)
    table[:, width + 1] = empty_product
    if starts.size:  # `reduceat` wants strictly ascending starts: empty lists have none.
      table[filled, width] = np.add.reduceat(self.values, starts)
      table[filled, width + 1] = np.multiply.reduceat(self.values, starts)
    return table
