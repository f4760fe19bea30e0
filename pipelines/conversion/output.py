"""The life of a dataset directory: refused or cleared, in progress, published.

While a conversion runs, the directory holds `in_progress.json`; at the end `manifest.json`
appears instead. These marks distinguish an interrupted conversion from a finished dataset and from
a directory of somebody else, also on file systems where directories cannot be renamed.
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
_ANY_OWN_NAME = '|'.join(map(re.escape, _OWN_NAMES))
_ANY_SPLIT = '|'.join(module_lib.SPLITS)
# Matches the files that a conversion writes; `.partial` marks a file that is not yet complete.
_OWN = re.compile(
  rf'({_ANY_OWN_NAME}|({_ANY_SPLIT})/part-\d+-of-\d+\.tfrecord)'
  r'(\.[0-9a-f]+\.partial)?'
  rf'|{re.escape(_SPILL_FOLDER)}/[0-9a-f]+'
)


class WriteError(errors.InputError):
  """A failure to write, which ends a conversion whatever `on_error` says about bad inputs."""

  def __init__(self, reason: str, *, path: str, **parts: str | None):
    """Requires `path`, so that Beam cannot rebuild the error from its first argument alone.

    Beam then reports the text of this error.
    """
    super().__init__(reason, path=path, **parts)


_WRITE_ERROR = re.compile(
  rf'{re.escape(__name__)}\.{WriteError.__name__}: (.*?)( \[while running |$)', re.MULTILINE
)


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
  """Converts an error of a file system inside the block to a `WriteError` for `path`."""
  try:
    yield
  except OSError as error:  # This includes Beam's own file system errors.
    raise WriteError(
      'cannot write',
      path=path,
      found=' '.join(str(error.strerror or error).split()),
      expected='free space, and the right to write there',
    ) from error


def write_error_in(error: BaseException) -> errors.InputError | None:
  """Returns the `WriteError` of a step that is named in a runner's error, or None.

  A `WriteError` is not passed on through `report_failure`, since that function writes as well.
  """
  found = _WRITE_ERROR.search(str(error))
  return errors.InputError(found[1]) if found else None


def join(directory: str, *names: str) -> str:
  """Returns the path of a file below `directory` on any file system."""
  return posixpath.join(directory, *names)


def spill_folder(directory: str) -> str:
  """Returns the folder through which steps pass large data to each other.

  The folder is gone when the dataset is published.
  """
  return join(directory, _SPILL_FOLDER)


def rejected_path(directory: str) -> str:
  """Returns the path, beside `directory`, for the inputs that made a conversion fail."""
  return f'{directory.rstrip("/")}.{manifest_lib.REJECTED_NAME}'


def list_files(directory: str) -> list[str]:
  """Returns the sorted paths of all files below `directory`, at any depth and relative to it.

  A directory that does not exist has no files.
  """
  root = directory.rstrip('/') + '/'
  (result,) = filesystems.FileSystems.match([root + '**'])
  paths = [entry.path for entry in result.metadata_list]
  return sorted(path[len(root) :] for path in paths if not path.endswith('/'))


def begin(directory: str, *, request: dict[str, Any], overwrite: bool) -> None:
  """Prepares `directory` for a conversion.

  Args:
    directory: Path of the dataset directory to write.
    request: Everything that decides the result. A directory left by an interrupted run of the
      same request is cleared.
    overwrite: Whether to clear a dataset, or the files of an interrupted run of another request,
      instead of refusing.

  Raises:
    InputError: the directory holds a dataset, an unfinished dataset of another request, or files
      of somebody else; or it cannot be written.
  """
  if any(character in directory for character in '*?['):  # Beam deletes by pattern.
    raise errors.InputError(
      'output cannot have a glob character in its name',
      path=directory,
      expected='a name without * ? [',
    )
  files = list_files(directory)
  # A manifest beside the mark of a conversion in progress belongs to a conversion that was
  # interrupted at its very end.
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
      'output exists and is not a dataset',
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
    # The mark comes first, so that a directory whose clearing is interrupted can still be
    # distinguished from a directory of somebody else.
    beam_lib.write_atomically(marker, text.encode())
    _delete(directory, [name for name in files if name != IN_PROGRESS_NAME])


def publish(directory: str, *, manifest: manifest_lib.Manifest, files: dict[str, str]) -> None:
  """Writes `files` (name -> content), and the manifest last."""
  for name, content in (*files.items(), (manifest_lib.FILE_NAME, manifest.dumps())):
    path = join(directory, name)
    with writing(path):
      beam_lib.write_atomically(path, content.encode())


def end(directory: str) -> None:
  """Removes the mark of a conversion in progress, and the leftovers of steps, done or failed.

  The directory must be published. The list of inputs that an earlier conversion rejected, which
  lies beside the directory, is removed as well.
  """
  with writing(directory):
    if filesystems.FileSystems.exists(rejected_path(directory)):
      filesystems.FileSystems.delete([rejected_path(directory)])
    leftovers = []
    for name in list_files(directory):
      is_mark = name in (IN_PROGRESS_NAME, FAILURE_NAME)
      is_unfinished = name.endswith('.partial')
      is_spilled = name.startswith(f'{_SPILL_FOLDER}/')
      if is_mark or is_unfinished or is_spilled:
        leftovers.append(name)
    _delete(directory, leftovers)


def abandon(directory: str) -> errors.InputError | None:
  """Removes the files of a failed conversion, and returns the error of `report_failure`, if any.

  Files that cannot be removed stay, with the mark of a conversion in progress.
  """
  files = list_files(directory)
  reported = None
  if FAILURE_NAME in files:
    parts = json.loads(beam_lib.read_bytes(join(directory, FAILURE_NAME)))
    reported = errors.InputError(**parts)
  # A link to a directory cannot be removed either, and an object store has no directories.
  with contextlib.suppress(OSError):
    _delete(directory, files)
    filesystems.FileSystems.delete([directory.rstrip('/')])
  return reported


def report_failure(directory: str, error: errors.InputError) -> None:
  """Writes `error` to a file for the main process: runners do not pass exceptions on unchanged."""
  content = json.dumps(error.to_dict()).encode()
  with writing(directory):
    beam_lib.write_atomically(join(directory, FAILURE_NAME), content)


def _delete(directory: str, files: list[str]) -> None:
  """Deletes `files`: the manifest first, the mark of a conversion in progress last.

  With the manifest gone, a half-deleted directory does not pass for a dataset.
  """
  ordered = sorted(
    files, key=lambda name: (name != manifest_lib.FILE_NAME, name == IN_PROGRESS_NAME, name)
  )
  for name in ordered:
    if name == IN_PROGRESS_NAME and filesystems.FileSystems.exists(spill_folder(directory)):
      # The folder is empty by now. In an object store it does not exist.
      filesystems.FileSystems.delete([spill_folder(directory)])
    filesystems.FileSystems.delete([join(directory, name)])
