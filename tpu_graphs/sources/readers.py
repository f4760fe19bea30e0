"""Any raw file of programs -> modules."""

from __future__ import annotations

import collections
from collections.abc import Mapping
import dataclasses
import io
import os
from typing import BinaryIO

from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import streams
from tpu_graphs.sources import dumps
from tpu_graphs.sources import npz


def from_file(
  path: str | os.PathLike[str],
  *,
  kind: str | None = None,
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED,
  stage: str = 'after',
) -> hlo.Extraction:
  """Reads a local file, see `from_bytes`, or all programs of a folder that XLA wrote with
  --xla_dump_to.

  Args:
    path: of the file or folder.
    kind: see `from_bytes`, as is `choices`.
    stage: which programs of a folder; see `dumps.find`.

  Raises:
    InputError: it cannot be read, or not as modules of this kind.
  """
  path = os.fspath(path)
  if os.path.isdir(path):
    with errors.in_file(path):
      return _from_dump(path, kind, choices, stage)
  try:
    with open(path, 'rb') as file:
      data = file.read()
  except OSError as error:
    raise errors.InputError('cannot read file', path=path, found=error.strerror) from error
  return from_bytes(data, path=path, kind=kind, choices=choices)


def _from_dump(
  folder: str, kind: str | None, choices: feature_choices.FeatureChoices, stage: str
) -> hlo.Extraction:
  paths = dumps.find((os.path.join(folder, name) for name in os.listdir(folder)), stage=stage)
  if not paths:
    raise errors.InputError(
      'folder without programs',
      expected=f"an XLA dump, with names such as 'module_0000.jit_f.{dumps.ENDINGS[0]}'",
      fix='give one file, or the folder of a dump',
    )
  parts = [from_file(path, kind=kind, choices=choices) for path in paths]
  skipped = sum((collections.Counter(part.skipped) for part in parts), collections.Counter())
  return hlo.Extraction(
    modules=tuple(module for part in parts for module in part.modules),
    skipped=dict(skipped),
    type_name=dumps.TYPE_NAME,
    tunings=tuple(tuning for part in parts for tuning in part.tunings),
  )


def from_bytes(
  data: bytes,
  *,
  path: str,
  kind: str | None = None,
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED,
  max_array_bytes: int = module_lib.DEFAULT_MAX_ARRAY_BYTES,
) -> hlo.Extraction:
  """Reads the content of an npz file, an HLO protobuf or HLO text.

  Args:
    data: the whole file.
    path: its name, which tells npz from the rest (an unknown suffix leaves it to the content)
      and serves in errors. The `module_id` of text from an XLA dump ends with the program's
      number there: text of equal programs may be equal.
    kind: 'tile' or 'layout' to refuse the other; None takes what the file holds.
    choices: how the features of ops are made.
    max_array_bytes: larger arrays are refused before anything is allocated.

  Raises:
    InputError: the content cannot be read as modules of this kind.
  """
  if _is_npz(path, data):
    module = npz.read(
      io.BytesIO(data), path=path, kind=kind, choices=choices, max_array_bytes=max_array_bytes
    )
    return hlo.Extraction(modules=(module,), skipped={}, type_name='npz')
  with errors.in_file(path):
    extraction = hlo.read(
      data, kind=kind, name=path, choices=choices, max_array_bytes=max_array_bytes
    )
  number = dumps.number_of_text(path)
  if number is None:
    return extraction
  return dataclasses.replace(
    extraction,
    modules=tuple(
      dataclasses.replace(module, module_id=f'{module.module_id}.{number}')
      for module in extraction.modules
    ),
  )


def stream(
  file: BinaryIO,
  *,
  path: str,
  kind: str | None = None,
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED,
  max_array_bytes: int = module_lib.DEFAULT_MAX_ARRAY_BYTES,
) -> tuple[list[streams.ConfigStream], Mapping[str, int]]:
  """As `from_bytes` from an open, seekable file, but leaves the configs of npz files there; see
  `npz.stream`.

  Returns:
    The modules, which can be read while the file is open, and those skipped, as in
    `hlo.Extraction`.
  """
  head = file.read(2)
  file.seek(0)
  if _is_npz(path, head):
    return [
      npz.stream(file, path=path, kind=kind, choices=choices, max_array_bytes=max_array_bytes)
    ], {}
  extraction = from_bytes(
    file.read(), path=path, kind=kind, choices=choices, max_array_bytes=max_array_bytes
  )
  return [streams.ConfigStream.of(module) for module in extraction.modules], extraction.skipped


def _is_npz(path: str, head: bytes) -> bool:
  return path.endswith('.npz') or (not path.endswith(('.pb', '.binpb')) and head.startswith(b'PK'))
