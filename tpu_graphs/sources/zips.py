"""Members of zip files, read and written by ISA-L: it inflates in half the time of zlib, and
compresses in a quarter.

All else is left to zipfile: it finds the members, and refuses what it cannot read.
"""

from __future__ import annotations

from collections.abc import Iterable
import copy
from typing import BinaryIO
import zipfile
import zlib

from isal import isal_zlib

_INPUT_BYTES, _OUTPUT_BYTES = (
  32 << 10,
  256 << 10,
)  # Inflated at a time: what stays in the cache of a core.
_LEVEL = 1  # Of compression. Higher ones of ISA-L give hardly less.


class Reader:
  """Reads a member from its start on. With its last byte, its checksum is compared.

  Attributes:
    position: number of bytes that have been read.
  """

  def __init__(self, archive: zipfile.ZipFile, name: str):
    """Opens the member `name` of `archive`; raises what zipfile raises on a damaged one."""
    self._info = archive.getinfo(name)
    self._crc = 0
    self._inflating = None
    self.position = 0
    info = self._info
    if info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
      if info.compress_type == zipfile.ZIP_DEFLATED:
        self._inflating = isal_zlib.decompressobj(-zlib.MAX_WBITS)
      info = copy.copy(info)  # From here on zipfile gives the bytes as they are in the file.
      info.compress_type, info.file_size = zipfile.ZIP_STORED, info.compress_size
      del info.CRC
    self._file = archive.open(info)

  def read(self, size: int) -> bytes:
    """The next `size` bytes, fewer only where the member ends.

    Raises:
      BadZipFile: the data is damaged, or its checksum is another.
    """
    size = min(size, self._info.file_size - self.position)
    pieces = []
    while size and (piece := self._next(min(size, _OUTPUT_BYTES))):
      pieces.append(piece)
      self._crc = isal_zlib.crc32(piece, self._crc)
      self.position += len(piece)
      size -= len(piece)
    if self.position == self._info.file_size and self._crc != self._info.CRC:
      raise zipfile.BadZipFile(f'Bad CRC-32 for file {self._info.filename!r}')
    return pieces[0] if len(pieces) == 1 else b''.join(pieces)

  def _next(self, size: int) -> bytes:
    """At least one and at most `size` of the bytes that follow; none at the end of the data."""
    if self._inflating is None:
      return self._file.read(size)
    try:
      while True:
        data = self._inflating.unconsumed_tail or self._file.read(_INPUT_BYTES)
        piece = self._inflating.decompress(data, size)
        if piece or not data or self._inflating.eof:
          return piece
    except isal_zlib.error as error:  # type: ignore[misc]  # Its stub takes the class for an instance.
      raise zipfile.BadZipFile(f'{error} in file {self._info.filename!r}') from error


def write_member(archive: zipfile.ZipFile, name: str, blocks: Iterable[bytes | memoryview]) -> None:
  """Writes `blocks`, one after the other, as the member `name` of an archive opened for writing
  with ZIP_DEFLATED.
  """
  with archive.open(name, 'w', force_zip64=True) as member:
    member._compressor = isal_zlib.compressobj(  # type: ignore[attr-defined]  # zipfile knows zlib only.
      _LEVEL, isal_zlib.DEFLATED, -zlib.MAX_WBITS
    )
    for block in blocks:
      member.write(block)


def directory_start(file: BinaryIO) -> int:
  """Where in an open, seekable file the directory of a zip archive begins, which reaches to the
  end; 0 if it is none.

  The directory has size and CRC-32 of each member, so it tells of two archives whether they hold
  the same, without the members being read. It tells nothing of damage done to them afterwards.
  """
  try:
    return zipfile.ZipFile(file).start_dir
  except (zipfile.BadZipFile, NotImplementedError, ValueError):
    return 0
