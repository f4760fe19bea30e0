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

SUFFIXES = ('.npz', '.pb')  # What is read in a tree of raw files, beside the programs of XLA dumps.


@dataclasses.dataclass(frozen=True)
class _File:
  """What is in one raw file.

  Attributes:
    path: of the file.
    found: its modules.
    fault: why it cannot be read.
    skipped: number of modules that the selection rules of its format leave out.
    duplicates: number of configs that are equal to another of their module.
    dropped: number of runs that are no measurements.
  """

  path: str
  found: tuple[checks.Found, ...] = ()
  fault: errors.InputError | None = None
  skipped: int = 0
  duplicates: int = 0
  dropped: int = 0


def _read_file(path: str) -> _File:
  found, dropped, duplicates = [], 0, 0
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
            measured=module.is_measured,
            topology=graph.topology_fingerprint(),
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


def validate_tree(path: str, read: Callable[..., Iterator[_File]]) -> checks.Report:
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
    modules[folder] = {}
    in_folder = list(_folder_faults(parts, modules[folder]))
    rows.append(
      {
        'folder': os.path.relpath(folder, path) if os.path.isdir(path) else folder,
        'files': len(files),
        'faults': len(in_folder),
        'modules': len(modules[folder]),
        'skipped': sum(part.skipped for part in parts),
        'measured': sum(module.measured for module in modules[folder].values()),
        'configs': sum(module.configs for module in modules[folder].values()),
        'duplicates': sum(part.duplicates for part in parts),
        'dropped runs': sum(part.dropped for part in parts),
      }
    )
    faults += in_folder
  next(results, None)  # Ends the progress.
  splits: dict[str, dict[str, Iterable[checks.Found]]] = collections.defaultdict(
    dict
  )  # Folder -> split -> modules.
  for folder in modules:
    parent, name = os.path.split(folder)
    if name in module_lib.SPLITS:
      splits[parent][name] = modules[folder].values()
  warnings = [leak for parent, parts in splits.items() for leak in checks.leaks(parent, parts)]
  title = terminal.plural(len(paths), 'raw file') + (
    f', {terminal.plural(others, "other")} not read' if others else ''
  )
  return checks.Report(path, title, tuple(rows), tuple(faults), tuple(warnings))


def _find_files(path: str) -> tuple[dict[str, list[str]], int]:
  """The files of programs by their folder, and the number of other files; hidden ones do not
  count.
  """
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
  """The programs that convert reads if the files of a folder are an XLA dump, or those of the
  other stage.
  """
  try:
    return dumps.find(paths)
  except errors.InputError:
    return dumps.find(paths, stage='all')


def _folder_faults(
  files: Iterable[_File], modules: dict[str, checks.Found]
) -> Iterator[errors.InputError]:
  """What is wrong with the files of a folder, which convert takes together; fills `modules` by
  their names.
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
        expected=f'a {first.kind} file as {first.where}',
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
