"""Lists of different lengths in one array."""

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
    """Builds lists from sequences of int64 values, such as repeated fields of a message."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    values = np.fromiter(itertools.chain.from_iterable(rows), np.int64, lengths.sum())
    return cls(values, lengths)

  @property
  def row(self) -> np.ndarray:
    """The index of the list of each value, int64 [V]."""
    return np.repeat(np.arange(self.lengths.size), self.lengths)

  @property
  def position(self) -> np.ndarray:
    """The position of each value in its list, int64 [V]."""
    starts = np.cumsum(self.lengths) - self.lengths
    return np.arange(self.values.size) - np.repeat(starts, self.lengths)

  def first(self, width: int, *, fill: int = 0) -> np.ndarray:
    """Returns the first values of each list, int64 [R, width].

    Shorter lists are padded with `fill`; longer lists are cut off.
    """
    table = np.full((self.lengths.size, width), fill, np.int64)
    position = self.position
    kept = position < width
    table[self.row[kept], position[kept]] = self.values[kept]
    return table

  def summary(self, width: int, *, empty_product: int = 1) -> np.ndarray:
    """Returns the first values, the sum and the product of each list, int64 [R, width + 2].

    Sum and product cover all values of a list, and wrap around as in C++.
    """
    filled = self.lengths > 0
    starts = (np.cumsum(self.lengths) - self.lengths)[filled]
    table = np.zeros((self.lengths.size, width + 2), np.int64)
    table[:, :width] = self.first(width)
    table[:, width + 1] = empty_product
    if starts.size:  # `reduceat` needs strictly ascending starts, so empty lists are left out.
      table[filled, width] = np.add.reduceat(self.values, starts)
      table[filled, width + 1] = np.multiply.reduceat(self.values, starts)
    return table
