"""Dataset directories: opens those that are complete and refuses the others."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import json
import os
from typing import Any

import google_crc32c
import tensorflow as tf

from tpu_graphs import errors
from tpu_graphs import terminal
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.dataset import statistics as statistics_lib
from tpu_graphs.modules import module as module_lib


@dataclasses.dataclass(frozen=True, eq=False)
class DatasetDirectory:
  """A dataset directory whose shards were found complete.

  Attributes:
    path: path of the directory.
    manifest: the content of `manifest.json`.
    statistics: the content of `statistics.json`; `statistics.parse` reads it.
  """

  path: str
  manifest: manifest_lib.Manifest
  statistics: dict[str, Any]

  @property
  def kind(self) -> str:
    return self.manifest.kind

  def split(self, name: str) -> manifest_lib.Split:
    """Returns the split `name`.

    Raises:
      InputError: the dataset has no such split.
    """
    if name not in self.manifest.splits:
      raise errors.InputError(
        'split missing',
        path=self.path,
        found=' '.join(self.manifest.splits),
        expected=name,
        fix='choose another split, or convert with --split',
      )
    return self.manifest.splits[name]

  def check_shards(self) -> None:
    """Reads every shard and compares its checksum.

    Raises:
      InputError: a shard is damaged; the error names it.
    """
    for split in self.manifest.splits.values():
      for shard in split.shards:
        path = os.path.join(self.path, shard.name)
        checksum = 0
        with tf.io.gfile.GFile(path, 'rb') as file:
          while block := file.read(16 << 20):
            checksum = google_crc32c.extend(checksum, block)
        if f'{checksum:08x}' != shard.crc32c:
          raise errors.InputError(
            'damaged shard',
            path=path,
            found=f'crc32c {checksum:08x}',
            expected=shard.crc32c,
            fix='copy or convert the dataset again',
          )


def open_directory(directory: str | os.PathLike[str]) -> DatasetDirectory:
  """Opens a dataset directory whose shards are exactly those of its manifest, in full length.

  Raises:
    InputError: there is no dataset, or a shard is missing, extra or truncated; the error names it.
  """
  directory = os.fspath(directory)
  manifest = read_manifest(directory)
  for fault in shard_faults(directory, manifest):
    raise fault
  statistics = read_statistics(
    os.path.join(directory, manifest_lib.STATISTICS_NAME), num_extra=manifest.choices.num_extra
  )
  return DatasetDirectory(directory, manifest, statistics)


def read_manifest(directory: str) -> manifest_lib.Manifest:
  """Reads the manifest of a dataset directory.

  Raises:
    InputError: there is no manifest, or it is damaged or of another format version.
  """
  path = os.path.join(directory, manifest_lib.FILE_NAME)
  if not tf.io.gfile.exists(path):
    raise errors.InputError(
      'no dataset',
      path=directory,
      found=f'no {manifest_lib.FILE_NAME}',
      expected='a directory that convert has finished',
    )
  return manifest_lib.loads(read_text(path), path=path)


def shard_faults(directory: str, manifest: manifest_lib.Manifest) -> Iterator[errors.InputError]:
  """Yields an error for each shard that is missing, extra, or not as long as `manifest` says."""
  for name in module_lib.SPLITS:
    shards = manifest.splits[name].shards if name in manifest.splits else ()
    expected = {shard.name: shard.bytes for shard in shards}
    folder = os.path.join(directory, name)
    files = tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else ()
    found = {f'{name}/{file}' for file in files}
    for shard in sorted(found ^ set(expected)):
      is_missing = shard in expected
      yield errors.InputError(
        'shard missing' if is_missing else 'extra file',
        path=os.path.join(directory, shard),
        expected=f'the {terminal.plural(len(expected), "shard")} of {manifest_lib.FILE_NAME}',
        fix='copy or convert the dataset again' if is_missing else 'remove it',
      )
    for shard in sorted(found & set(expected)):
      length = tf.io.gfile.stat(os.path.join(directory, shard)).length
      if length != expected[shard]:
        yield errors.InputError(
          'shard of wrong size',
          path=os.path.join(directory, shard),
          found=f'{length} bytes',
          expected=f'{expected[shard]} bytes',
          fix='copy or convert the dataset again',
        )


def read_statistics(path: str, *, num_extra: int) -> dict[str, Any]:
  """Reads the content of a `statistics.json` and checks it with `statistics.parse`.

  Raises:
    InputError: the file is missing, damaged, of another format version, or of other data.
  """
  with errors.in_file(path):
    try:
      content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
      raise errors.InputError(
        'damaged statistics', found=error, fix='copy the directory again'
      ) from error
    statistics_lib.parse(content, num_extra=num_extra)
  return content


def read_text(path: str) -> str:
  """Reads a text file of a dataset or run directory.

  Raises:
    InputError: the file is missing, cannot be read, or is not text.
  """
  try:
    with tf.io.gfile.GFile(path) as file:
      return file.read()
  except tf.errors.NotFoundError as error:
    raise errors.InputError(
      'file missing', path=path, fix='check its name, or copy the directory it belongs to again'
    ) from error
  except (UnicodeDecodeError, tf.errors.OpError) as error:
    raise errors.InputError(
      'cannot read file', path=path, found=' '.join(str(error).split())
    ) from error


@contextlib.contextmanager
def damage_explained(directory: DatasetDirectory) -> Iterator[None]:
  """Names the damaged shard when reading fails inside the block.

  TensorFlow's own error names neither file nor record.

  Raises:
    InputError: a shard is damaged; any other error comes through unchanged.
  """
  try:
    yield
  except (tf.errors.DataLossError, tf.errors.InvalidArgumentError):
    directory.check_shards()
    raise
