"""Complete checks of a tree of raw files of programs."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import os

import numpy as np

from tpu_graphs import errors
from tpu_graphs import terminal
from tpu_graphs.dataset import checks
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import selection
from tpu_graphs.sources import dumps
from tpu_graphs.sources import readers

# Files that are read in a tree of raw files, beside the programs of XLA dumps.
SUFFIXES = ('.npz', '.pb')


@dataclasses.dataclass(frozen=True)
class _File:
  """The facts that are kept of one raw file.

  Attributes:
    path: path of the file.
    found: modules of the file.
    fault: the reason why the file cannot be read.
    skipped: number of modules that the selection rules of the file's format leave out.
    duplicates: number of configs that are equal to another config of their module.
    dropped: number of runs that are not measurements.
  """

  path: str
  found: tuple[checks.Found, ...] = ()
  fault: errors.InputError | None = None
  skipped: int = 0
  duplicates: int = 0
  dropped: int = 0


def validate_tree(path: str, read: Callable[..., Iterator[_File]]) -> checks.Report:
  """Checks every file of programs in the folder or file `path`.

  Args:
    path: path of the folder or file.
    read: `checks.in_processes` with its options.

  Raises:
    InputError: there is nothing to check, or a worker process died.
  """
  folders, others = _find_files(path)
  paths = [file for files in folders.values() for file in files]
  if not paths:
    raise errors.InputError(
      'nothing to check',
      path=path,
      expected=f'files named *{" or *".join(SUFFIXES)}, or a dataset directory',
      found=terminal.plural(others, 'other file') if os.path.exists(path) else 'nothing',
    )
  results = read(_read_file, paths, [os.path.getsize(file) for file in paths])
  faults: list[errors.InputError] = []
  rows: list[Mapping[str, str | int]] = []
  modules: dict[str, dict[str, checks.Found]] = {}  # Folder -> module_id -> module.
  for folder, files in folders.items():
    parts = list(itertools.islice(results, len(files)))
    in_folder: dict[str, checks.Found] = {}
    found = list(_folder_faults(parts, in_folder))
    modules[folder] = in_folder
    rows.append(
      {
        'folder': os.path.relpath(folder, path) if os.path.isdir(path) else folder,
        'files': len(files),
        'faults': len(found),
        'modules': len(in_folder),
        'skipped': sum(part.skipped for part in parts),
        'measured': sum(module.measured for module in in_folder.values()),
        'configs': sum(module.configs for module in in_folder.values()),
        'duplicates': sum(part.duplicates for part in parts),
        'dropped runs': sum(part.dropped for part in parts),
      }
    )
    faults += found
  next(results, None)  # The generator ends the progress when it is exhausted.
  # Parent folder -> split -> modules.
  splits: dict[str, dict[str, Iterable[checks.Found]]] = collections.defaultdict(dict)
  for folder in modules:
    parent, name = os.path.split(folder)
    if name in module_lib.SPLITS:
      splits[parent][name] = modules[folder].values()
  warnings = [leak for parent, parts in splits.items() for leak in checks.leaks(parent, parts)]
  title = terminal.plural(len(paths), 'raw file')
  if others:
    title += f', {terminal.plural(others, "other")} not read'
  return checks.Report(path, title, tuple(rows), tuple(faults), tuple(warnings))


def _find_files(path: str) -> tuple[dict[str, list[str]], int]:
  """Returns folder -> files of programs, and the number of other files, without hidden files."""
  if os.path.isfile(path):
    return {os.path.dirname(path) or '.': [path]}, 0
  folders, others = {}, 0
  for folder, subfolders, names in os.walk(path):
    subfolders[:] = sorted(name for name in subfolders if not name.startswith('.'))
    paths = sorted(os.path.join(folder, name) for name in names if not name.startswith('.'))
    chosen = _programs_of_dump(paths) or [file for file in paths if file.endswith(SUFFIXES)]
    others += len(paths) - len(chosen)
    if chosen:
      folders[folder] = chosen
  return folders, others


def _programs_of_dump(paths: Sequence[str]) -> list[str]:
  """Returns the programs of an XLA dump that `convert` reads, or else the programs of any stage.

  The list is empty if `paths`, the files of one folder, are not an XLA dump.
  """
  try:
    return dumps.find(paths)
  except errors.InputError:
    return dumps.find(paths, stage='all')


def _read_file(path: str) -> _File:
  """Reads every module and config of a raw file."""
  found = []
  dropped = duplicates = 0
  try:
    with open(path, 'rb') as file:
      modules, skipped = readers.stream(file, path=path)
      for module in modules:
        graph = module.graph
        found.append(
          checks.Found(
            module_id=graph.module_id,
            kind=graph.kind,
            where=path,
            topology=graph.topology_fingerprint(),
            measured=module.is_measured,
            configs=module.num_configs,
          )
        )
        dropped += sum(graph.dropped_runs.values())
        duplicates += module.num_configs - np.unique(selection.digests(module)).size
  except errors.InputError as error:
    return _File(path, fault=error)
  except OSError as error:
    return _File(path, fault=errors.InputError('cannot read file', path=path, found=error.strerror))
  return _File(
    path, tuple(found), skipped=sum(skipped.values()), duplicates=duplicates, dropped=dropped
  )


def _folder_faults(
  files: Iterable[_File], modules: dict[str, checks.Found]
) -> Iterator[errors.InputError]:
  """Yields the errors in the files of a folder, which `convert` takes together.

  Args:
    files: the files of the folder.
    modules: module_id -> module; filled with the modules of `files`.
  """
  for file in files:
    if file.fault:
      yield file.fault
    first = next(iter(modules.values()), None)
    if first and any(module.kind != first.kind for module in file.found):
      yield errors.InputError(
        'file of another kind than the folder',
        path=file.path,
        found=f'a {file.found[0].kind} file',
        expected=f'a {first.kind} file like {first.where}',
      )
    for module in file.found:
      known = modules.setdefault(module.module_id, module)
      if known is not module:
        yield errors.InputError(
          'module_id occurs twice',
          path=file.path,
          where=module.module_id,
          found=f'also in {known.where}',
          expected='distinct names in a folder',
          fix='rename one',
        )
