"""The life of a dataset directory: refused or cleared, in progress, published.

While a conversion runs, the directory holds `in_progress.json`; at the end `manifest.json`
appears instead. So what was interrupted can be told from what is finished, and from a directory
of somebody else's, also on file systems where directories cannot be renamed.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import json
import posixpath
import re
from typing import Any

from apache_beam.io import filesystems

from pipelines.runners import beam as beam_lib
from tpu_graphs import errors
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.modules import module as module_lib

IN_PROGRESS_NAME = 'in_progress.json'
FAILURE_NAME = 'failure.json'
_OWN_NAMES = (
  manifest_lib.FILE_NAME,
  manifest_lib.SCHEMA_NAME,
  manifest_lib.STATISTICS_NAME,
  manifest_lib.REJECTED_NAME,
  IN_PROGRESS_NAME,
  FAILURE_NAME,
)
_SPILL_FOLDER = '.spill'
_OWN = re.compile(
  rf'({"|".join(map(re.escape, _OWN_NAMES))}|({"|".join(module_lib.SPLITS)})/part-\d+-of-\d+\.tfrecord)'
  r'(\.[0-9a-f]+\.partial)?'  # The suffix of a file that is not yet complete.
  rf'|{re.escape(_SPILL_FOLDER)}/[0-9a-f]+'
)


class WriteError(errors.InputError):
  """What cannot be written: however bad inputs are dealt with, this ends a conversion."""

  def __init__(self, reason: str, *, path: str, **parts: str | None):
    """As Beam makes errors anew by their first argument alone, it cannot do so with this one,
    and tells its text.
    """
    super().__init__(reason, path=path, **parts)


_WRITE_ERROR = re.compile(
  rf'{re.escape(__name__)}\.{WriteError.__name__}: (.*?)( \[while running |$)', re.MULTILINE
)


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
  """Turns what a file system raises inside the block into a `WriteError` for `path`."""
  try:
    yield
  except OSError as error:  # Beam's errors as well.
    raise WriteError(
      'cannot write',
      path=path,
      found=' '.join(str(error.strerror or error).split()),
      expected='free space, and the right to write there',
    ) from error


def write_error_in(error: BaseException) -> errors.InputError | None:
  """The `WriteError` of a step in the error that a runner makes of it, if there is one.

  It comes this way and not by `report_failure`, since that writes, too.
  """
  found = _WRITE_ERROR.search(str(error))
  return errors.InputError(found[1]) if found else None


def join(directory: str, *names: str) -> str:
  """Path of a file below `directory` on any file system."""
  return posixpath.join(directory, *names)


def spill_folder(directory: str) -> str:
  """Where steps of the conversion leave for each other what is large; gone when the dataset is
  published.
  """
  return join(directory, _SPILL_FOLDER)


def rejected_path(directory: str) -> str:
  """Where the list of refused inputs lies after a conversion that failed because of them: beside
  `directory`.
  """
  return f'{directory.rstrip("/")}.{manifest_lib.REJECTED_NAME}'


def list_files(directory: str) -> list[str]:
  """Paths of all files at any depth below `directory`, relative to it; none if it does not
  exist.
  """
  root = directory.rstrip('/') + '/'
  (result,) = filesystems.FileSystems.match([root + '**'])
  return sorted(
    entry.path[len(root) :] for entry in result.metadata_list if not entry.path.endswith('/')
  )


def begin(directory: str, *, request: dict[str, Any], overwrite: bool) -> None:
  """Makes `directory` ready to be written.

  Args:
    directory: the dataset directory to be.
    request: what decides the result. A directory left by an interrupted run of the same request
      is cleared.
    overwrite: clear a dataset, or what an interrupted run of another request left, instead of
      refusing.

  Raises:
    InputError: the directory holds a dataset, an unfinished one of another request, or files of
      somebody else; or it cannot be written.
  """
  if any(character in directory for character in '*?['):  # Beam deletes by pattern.
    raise errors.InputError(
      'output cannot have a glob character in its name',
      path=directory,
      expected='a name without * ? [',
    )
  files = list_files(directory)
  # With the mark of a conversion still beside it, a manifest is that of one interrupted at its very
  # end.
  if manifest_lib.FILE_NAME in files and IN_PROGRESS_NAME not in files and not overwrite:
    raise errors.InputError(
      'output exists',
      path=directory,
      found='a dataset',
      expected='no directory or an empty one',
      fix='give --overwrite to replace it',
    )
  foreign = [name for name in files if not _OWN.fullmatch(name)]
  started = any(name.startswith((manifest_lib.FILE_NAME, IN_PROGRESS_NAME)) for name in files)
  if foreign or (files and not started):
    raise errors.InputError(
      'output exists and is no dataset',
      path=directory,
      found=(foreign or files)[0],
      expected='no directory or an empty one',
      fix='choose another place',
    )
  marker = join(directory, IN_PROGRESS_NAME)
  text = json.dumps(request, sort_keys=True)
  if IN_PROGRESS_NAME in files and not overwrite and beam_lib.read_bytes(marker).decode() != text:
    raise errors.InputError(
      'output holds an unfinished conversion with other options',
      path=directory,
      fix='repeat its command to finish it, or give --overwrite',
    )
  with writing(directory):
    if not filesystems.FileSystems.exists(directory):
      filesystems.FileSystems.mkdirs(directory)
    # First the mark, so that a directory whose clearing is interrupted can still be told from
    # somebody else's.
    beam_lib.write_atomically(marker, text.encode())
    _delete(directory, [name for name in files if name != IN_PROGRESS_NAME])


def publish(directory: str, *, manifest: manifest_lib.Manifest, files: dict[str, str]) -> None:
  """Writes `files` (name -> content) and, last, the manifest."""
  for name, content in (*files.items(), (manifest_lib.FILE_NAME, manifest.dumps())):
    path = join(directory, name)
    with writing(path):
      beam_lib.write_atomically(path, content.encode())


def end(directory: str) -> None:
  """Removes from a published directory the mark of a conversion in progress, and what steps
  left, done or failed.

  Beside it, the list of inputs that an earlier conversion refused goes, too.
  """
  with writing(directory):
    if filesystems.FileSystems.exists(rejected_path(directory)):
      filesystems.FileSystems.delete([rejected_path(directory)])
    _delete(
      directory,
      [
        name
        for name in list_files(directory)
        if name in (IN_PROGRESS_NAME, FAILURE_NAME)
        or name.endswith('.partial')
        or name.startswith(f'{_SPILL_FOLDER}/')
      ],
    )


def abandon(directory: str) -> errors.InputError | None:
  """Removes what a failed conversion left; returns the error that a step reported by
  `report_failure`, if any.

  What cannot be removed stays, with the mark of a conversion in progress.
  """
  files = list_files(directory)
  reported = None
  if FAILURE_NAME in files:
    reported = errors.InputError(**json.loads(beam_lib.read_bytes(join(directory, FAILURE_NAME))))
  with contextlib.suppress(
    OSError
  ):  # A link to a directory stays, too, and an object store has no directories.
    _delete(directory, files)
    filesystems.FileSystems.delete([directory.rstrip('/')])
  return reported


def report_failure(directory: str, error: errors.InputError) -> None:
  """Leaves `error` where the main process finds it: runners do not carry exceptions over
  unchanged.
  """
  with writing(directory):
    beam_lib.write_atomically(join(directory, FAILURE_NAME), json.dumps(error.to_dict()).encode())


def _delete(directory: str, files: list[str]) -> None:
  """Deletes `files`, the manifest first, so that a half-deleted dataset is none, and the mark of
  a conversion last.
  """
  ordered = sorted(
    files, key=lambda name: (name != manifest_lib.FILE_NAME, name == IN_PROGRESS_NAME, name)
  )
  for name in ordered:
    if name == IN_PROGRESS_NAME and filesystems.FileSystems.exists(spill_folder(directory)):
      filesystems.FileSystems.delete(
        [spill_folder(directory)]
      )  # Empty by now. An object store has no folders.
    filesystems.FileSystems.delete([join(directory, name)])
