"""Files for data that is too large to travel between the steps of a pipeline.

A runner may hold in memory all data that passes from step to step, and limits its size. So a step
appends large data to a file below the output, on the file system of the output, and only the place
of the data travels. A later step reads the data there.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from typing import BinaryIO
import uuid

from apache_beam.io import filesystems

from pipelines.conversion import output

_MAX_OPEN = 16  # Number of files that a reader holds open.


@dataclasses.dataclass(frozen=True)
class Place:
  """The place of some bytes in the spill folder.

  Attributes:
    name: Name of the file.
    offset: Position of the first byte in the file.
    size: Number of bytes.
  """

  name: str
  offset: int
  size: int


class Writer:
  """A writer that appends to a file of its own; the data can be read once the writer is closed."""

  def __init__(self, directory: str):
    """Chooses a random file name, so that two attempts of one step never share a file.

    Args:
      directory: Directory of the output.
    """
    self._name = uuid.uuid4().hex
    self._path = output.join(output.spill_folder(directory), self._name)
    self._file: BinaryIO | None = None
    self._size = 0

  def write(self, data: bytes) -> Place:
    """Appends `data` and returns its place; the first call creates the file."""
    if self._file is None:
      self._file = filesystems.FileSystems.create(
        self._path, compression_type=filesystems.CompressionTypes.UNCOMPRESSED
      )
    self._file.write(data)
    self._size += len(data)
    return Place(self._name, self._size - len(data), len(data))

  def close(self) -> None:
    """Closes the file, if there is one."""
    if self._file is not None:
      self._file.close()


class Reader(contextlib.ExitStack):
  """A reader of the data that `Writer`s have written; a context manager."""

  def __init__(self, directory: str):
    super().__init__()
    self._folder = output.spill_folder(directory)
    # The file used most recently comes last.
    self._files: collections.OrderedDict[str, BinaryIO] = collections.OrderedDict()
    self.callback(self._close_down_to, 0)

  def read(self, place: Place) -> bytes:
    """Returns the bytes at `place`.

    Raises:
      OSError: the file cannot be opened, or ends before the last byte.
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
      _, least_recent = self._files.popitem(last=False)
      least_recent.close()
