"""Any raw file of measured programs -> modules."""

from __future__ import annotations

import io
import os

from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs import npz


def from_file(path: str | os.PathLike[str], *, kind: str | None = None) -> hlo.Extraction:
  """Reads a local file; see `from_bytes`.

  Raises:
    InputError: the file cannot be read, or not as modules of this kind.
  """
  path = os.fspath(path)
  try:
    with open(path, 'rb') as file:
      data = file.read()
  except OSError as error:
    raise errors.InputError('cannot read file', path=path, found=error.strerror) from error
  return from_bytes(data, path=path, kind=kind)


def from_bytes(data: bytes, *, path: str, kind: str | None = None) -> hlo.Extraction:
  """Reads the content of an npz file or an HLO protobuf.

  Args:
    data: the whole file.
    path: its name, which tells npz from protobuf (an unknown suffix leaves it to the content) and serves in errors.
    kind: 'tile' or 'layout' to refuse the other; None takes what the file holds.

  Raises:
    InputError: the content cannot be read as modules of this kind.
  """
  is_npz = path.endswith('.npz') or (not path.endswith(('.pb', '.binpb')) and data.startswith(b'PK'))
  if is_npz:
    return hlo.Extraction(modules=(npz.read(io.BytesIO(data), path=path, kind=kind),), skipped={})
  with errors.in_file(path):
    return hlo.read(data, kind=kind, name=path)
