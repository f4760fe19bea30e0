"""Reads modules from any raw file of programs."""

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
  """Reads a local file, or all programs of a folder that XLA wrote with --xla_dump_to.

  Args:
    path: the file or folder.
    kind: see `from_bytes`.
    choices: see `from_bytes`.
    stage: which programs of a folder are read; see `dumps.find`.

  Raises:
    InputError: the file or folder cannot be read, or does not hold modules of this kind.
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
  files = [os.path.join(folder, name) for name in os.listdir(folder)]
  paths = dumps.find(files, stage=stage)
  if not paths:
    raise errors.InputError(
      'folder without programs',
      expected=f"an XLA dump, with names such as 'module_0000.jit_f.{dumps.ENDINGS[0]}'",
      fix='give one file, or the folder of a dump',
    )
  parts = [from_file(path, kind=kind, choices=choices) for path in paths]
  skipped: collections.Counter[str] = collections.Counter()
  for part in parts:
    skipped += collections.Counter(part.skipped)
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
    path: the file's name, also for errors. Its suffix distinguishes npz files from the rest; with
      an unknown suffix, the content decides. The `module_id` of text from an XLA dump ends with the
      program's number in the dump, because the texts of two programs may be equal.
    kind: 'tile' or 'layout' to refuse the other kind; None accepts both.
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
  numbered = tuple(
    dataclasses.replace(module, module_id=f'{module.module_id}.{number}')
    for module in extraction.modules
  )
  return dataclasses.replace(extraction, modules=numbered)


def stream(
  file: BinaryIO,
  *,
  path: str,
  kind: str | None = None,
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED,
  max_array_bytes: int = module_lib.DEFAULT_MAX_ARRAY_BYTES,
) -> tuple[list[streams.ConfigStream], Mapping[str, int]]:
  """Reads modules from an open, seekable file, but leaves the configs of npz files in it.

  See `from_bytes` for the arguments, and `npz.stream` for the configs.

  Returns:
    The modules, which can be read while the file is open, and `skipped` of `hlo.Extraction`.
  """
  head = file.read(2)
  file.seek(0)
  if _is_npz(path, head):
    module = npz.stream(
      file, path=path, kind=kind, choices=choices, max_array_bytes=max_array_bytes
    )
    return [module], {}
  extraction = from_bytes(
    file.read(), path=path, kind=kind, choices=choices, max_array_bytes=max_array_bytes
  )
  modules = [streams.ConfigStream.of(module) for module in extraction.modules]
  return modules, extraction.skipped


def _is_npz(path: str, head: bytes) -> bool:
  if path.endswith('.npz'):
    return True
  return head.startswith(b'PK') and not path.endswith(('.pb', '.binpb'))
