"""Bytes too many to travel between the steps of a pipeline: they lie in files, and only their
places travel.

A runner may hold in memory whatever passes from step to step, and limits its size. So a step
appends what is large to a file below the output, on whatever file system that is, and a later
step reads it there.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from typing import BinaryIO
import uuid

from apache_beam.io import filesystems

from pipelines.conversion import output

_MAX_OPEN = 16  # Files that a reader holds open.


@dataclasses.dataclass(frozen=True)
class Place:
  """Where some bytes lie: in which file of the folder, from where on, and how many."""

  name: str
  offset: int
  size: int


class Writer:
  """Appends to a file of its own. What is written can be read once it is closed."""

  def __init__(self, directory: str):
    """`directory` is that of the output. Attempts of a step that run twice never meet: the name
    is random.
    """
    self._name = uuid.uuid4().hex
    self._path = output.join(output.spill_folder(directory), self._name)
    self._file: BinaryIO | None = None
    self._size = 0

  def write(self, data: bytes) -> Place:
    if self._file is None:
      self._file = filesystems.FileSystems.create(
        self._path, compression_type=filesystems.CompressionTypes.UNCOMPRESSED
      )
    self._file.write(data)
    self._size += len(data)
    return Place(self._name, self._size - len(data), len(data))

  def close(self) -> None:
    if self._file is not None:
      self._file.close()


class Reader(contextlib.ExitStack):
  """Reads what a `Writer` has written; a context manager."""

  def __init__(self, directory: str):
    super().__init__()
    self._folder = output.spill_folder(directory)
    self._files: collections.OrderedDict[str, BinaryIO] = (
      collections.OrderedDict()
    )  # The one last used is last.
    self.callback(self._close_down_to, 0)

  def read(self, place: Place) -> bytes:
    """The bytes at `place`.

    Raises:
      OSError: they are not all there.
    """
    if place.name not in self._files:
      self._close_down_to(_MAX_OPEN - 1)
      self._files[place.name] = filesystems.FileSystems.open(
        output.join(self._folder, place.name),
        compression_type=filesystems.CompressionTypes.UNCOMPRESSED,
      )
    self._files.move_to_end(place.name)
    file = self._files[place.name]
    file.seek(place.offset)
    data = file.read(place.size)
    if len(data) != place.size:
      raise OSError(f'{output.join(self._folder, place.name)}: {place} is cut off')
    return data

  def _close_down_to(self, number: int) -> None:
    while len(self._files) > number:
      self._files.popitem(last=False)[1].close()
