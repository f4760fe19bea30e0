"""Complete checks of what is on disk: a dataset directory, or a tree of raw files of programs.

```
report = validation.validate('data/layout')
print(report.describe(), report.is_sound)
```

All is read, one record or block of configs at a time; of each module and config only digests are kept. What makes the
data wrong is a fault; what a user should know of, such as equal graphs in train and test, is a warning.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import concurrent.futures
from concurrent.futures import process as futures_process
import dataclasses
import functools
import itertools
import multiprocessing
import os
import signal
from typing import Any, TypeVar

import numpy as np

from tpu_graphs import errors
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.modules import selection
from tpu_graphs.sources import dumps
from tpu_graphs.sources import readers
from tpu_graphs.sources import transfer
from tpu_graphs.views import summary

SUFFIXES = ('.npz', '.pb')  # What is read in a tree of raw files, beside the programs of XLA dumps.

_BYTES_WORTH_PROCESSES = 64 << 20  # Starting processes takes seconds.
_Task = TypeVar('_Task')
_Result = TypeVar('_Result')


@dataclasses.dataclass(frozen=True)
class Report:
  """What was found.

  Attributes:
    path: of the dataset directory or of the tree.
    title: what it is.
    rows: a row per split, or per folder of a tree: column -> value.
    faults: what is wrong.
    warnings: what is not wrong, but should be known.
  """
  path: str
  title: str
  rows: tuple[Mapping[str, str | int], ...]
  faults: tuple[errors.InputError, ...]
  warnings: tuple[errors.InputError, ...] = ()

  @property
  def is_sound(self) -> bool:
    return not self.faults

  def describe(self) -> str:
    """A table, a line per fault and warning, and the verdict."""
    lines = [f'{self.path}: {self.title}']
    if self.rows:
      cells = [list(self.rows[0]), *([f'{cell:,}' if isinstance(cell, int) else cell for cell in row.values()]
                                     for row in self.rows)]
      widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
      lines += ['  '.join(['', row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(
          row[1:], widths[1:], strict=True))]) for row in cells]
    for what, found in (('fault', self.faults), ('warning', self.warnings)):
      lines += [f'  {what}: {" ".join(str(error).splitlines())}' for error in found]
    verdict = summary.plural(len(self.faults), 'fault') if self.faults else 'sound'
    warnings = f', {summary.plural(len(self.warnings), "warning")}' if self.warnings else ''
    return '\n'.join([*lines, f'  {verdict}{warnings}'])

  def to_json(self) -> dict[str, Any]:
    """The same as values that JSON can hold; faults and warnings have the parts of an `InputError`."""
    return {'path': self.path, 'title': self.title, 'sound': self.is_sound, 'rows': [dict(row) for row in self.rows],
            'faults': [fault.to_dict() for fault in self.faults],
            'warnings': [warning.to_dict() for warning in self.warnings]}


def validate(path: str | os.PathLike[str], *, num_workers: int | None = 1,
             progress: transfer.Progress | None = None) -> Report:
  """Checks a dataset directory, or every file of programs in a folder and the folders in it.

  Args:
    path: of the directory or folder, or of one file of programs. A dataset directory may be on any file system that
      TensorFlow reads.
    num_workers: processes to use; None takes one per core where the data is large. More than one are started by
      `multiprocessing`, so that a program must call this under `if __name__ == '__main__'`.
    progress: shows how far it is.

  Raises:
    InputError: there is nothing to check, or a worker process died.
  """
  path = os.fspath(path)
  own_names = (manifest_lib.FILE_NAME, manifest_lib.SCHEMA_NAME, manifest_lib.STATISTICS_NAME)
  read = functools.partial(in_processes, num_workers=num_workers, name=path, progress=progress)
  if '://' in path or any(os.path.exists(os.path.join(path, name)) for name in own_names):
    from tpu_graphs.dataset import directory_validation  # Here, since it loads TensorFlow.
    return directory_validation.validate_directory(path, read)
  return _validate_tree(path, read)


def in_processes(function: Callable[[_Task], _Result], tasks: Sequence[_Task], sizes: Sequence[int], *,
                 num_workers: int | None, name: str, progress: transfer.Progress | None) -> Iterator[_Result]:
  """`function` of each task, in order, from several processes where it pays.

  Args:
    function: what to do; it, tasks and results must be picklable.
    tasks: for what.
    sizes: bytes of each task.
    num_workers: see `validate`, as is `progress`.
    name: what the progress is called.
    progress: shows how far it is.

  Raises:
    InputError: a process died.
  """
  if num_workers is None:
    num_workers = len(os.sched_getaffinity(0)) if sum(sizes) >= _BYTES_WORTH_PROCESSES else 1
  num_workers = min(num_workers, len(tasks))
  if progress:
    progress.start(name, sum(sizes), 0)
  results = _from_pool(function, tasks, num_workers) if num_workers > 1 else map(function, tasks)
  done = 0
  try:
    for result, size in zip(results, sizes, strict=True):
      yield result
      done += size
      if progress:
        progress.advance(done)
  finally:
    if progress:
      progress.end(done)


def _from_pool(function: Callable[[_Task], _Result], tasks: Sequence[_Task], num_workers: int) -> Iterator[_Result]:
  executor = concurrent.futures.ProcessPoolExecutor(
      num_workers, mp_context=multiprocessing.get_context('spawn'),  # TensorFlow does not survive a fork.
      initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))  # This process is interrupted for all.
  try:
    yield from executor.map(function, tasks)
  except futures_process.BrokenProcessPool as error:
    raise errors.InputError('a worker process died', expected='enough memory for a module per process',
                            fix='give --num_workers=1') from error
  finally:
    executor.shutdown(cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class Found:
  """What is kept of a module, or of the part of it that a record holds.

  Attributes:
    module_id: its name.
    kind: 'tile' or 'layout'.
    where: the file, and the record in it.
    topology: `Module.topology_fingerprint`.
    measured: whether any config is.
    configs: their number.
  """
  module_id: str
  kind: str
  where: str
  topology: bytes
  measured: bool
  configs: int


def leaks(path: str, splits: Mapping[str, Iterable[Found]]) -> Iterator[errors.InputError]:
  """A warning for each two splits with equal graphs."""
  names: dict[str, dict[bytes, list[str]]] = {}  # Split -> topology -> modules.
  for split, modules in splits.items():
    names[split] = collections.defaultdict(list)
    for module in modules:
      names[split][module.topology].append(module.module_id)
  for first, second in itertools.combinations([split for split in manifest_lib.SPLITS if split in names], 2):
    if shared := [topology for topology in names[second] if topology in names[first]]:
      number = sum(len(names[second][topology]) for topology in shared)
      total = summary.plural(sum(map(len, names[second].values())), 'module')
      alike = f'{names[second][shared[0]][0]} like {names[first][shared[0]][0]}'
      yield errors.InputError(f'graphs of {second} occur in {first}', path=path,
                              found=f'{number:,} of {total}, such as {alike}', expected='graphs of its own')


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
  found: tuple[Found, ...] = ()
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
        found.append(Found(module_id=graph.module_id, kind=graph.kind, where=path, measured=module.is_measured,
                           topology=graph.topology_fingerprint(), configs=module.num_configs))
        dropped += sum(graph.dropped_runs.values())
        duplicates += module.num_configs - np.unique(selection.digests(module)).size
  except errors.InputError as error:
    return _File(path, fault=error)
  except OSError as error:
    return _File(path, fault=errors.InputError('cannot read file', path=path, found=error.strerror))
  return _File(path, tuple(found), skipped=sum(skipped.values()), duplicates=duplicates, dropped=dropped)


def _validate_tree(path: str, read: Callable[..., Iterator[_File]]) -> Report:
  folders, others = _find_files(path)
  paths = [file for files in folders.values() for file in files]
  if not paths:
    raise errors.InputError(
        'nothing to check', path=path, expected=f'files named *{" or *".join(SUFFIXES)}, or a dataset directory',
        found=summary.plural(others, 'other file') if os.path.exists(path) else 'nothing')
  results = read(_read_file, paths, [os.path.getsize(file) for file in paths])
  faults: list[errors.InputError] = []
  rows: list[Mapping[str, str | int]] = []
  modules: dict[str, dict[str, Found]] = {}  # Folder -> module_id -> module.
  for folder, files in folders.items():
    parts = list(itertools.islice(results, len(files)))
    modules[folder] = {}
    in_folder = list(_folder_faults(parts, modules[folder]))
    rows.append({
        'folder': os.path.relpath(folder, path) if os.path.isdir(path) else folder, 'files': len(files),
        'faults': len(in_folder), 'modules': len(modules[folder]), 'skipped': sum(part.skipped for part in parts),
        'measured': sum(module.measured for module in modules[folder].values()),
        'configs': sum(module.configs for module in modules[folder].values()),
        'duplicates': sum(part.duplicates for part in parts), 'dropped runs': sum(part.dropped for part in parts)})
    faults += in_folder
  next(results, None)  # Ends the progress.
  splits: dict[str, dict[str, Iterable[Found]]] = collections.defaultdict(dict)  # Folder -> split -> modules.
  for folder in modules:
    parent, name = os.path.split(folder)
    if name in manifest_lib.SPLITS:
      splits[parent][name] = modules[folder].values()
  warnings = [leak for parent, parts in splits.items() for leak in leaks(parent, parts)]
  title = summary.plural(len(paths), 'raw file') + (f', {summary.plural(others, "other")} not read' if others else '')
  return Report(path, title, tuple(rows), tuple(faults), tuple(warnings))


def _find_files(path: str) -> tuple[dict[str, list[str]], int]:
  """The files of programs by their folder, and the number of other files; hidden ones do not count."""
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
  """The programs that convert reads if the files of a folder are an XLA dump, or those of the other stage."""
  try:
    return dumps.find(paths)
  except errors.InputError:
    return dumps.find(paths, stage='all')


def _folder_faults(files: Iterable[_File], modules: dict[str, Found]) -> Iterator[errors.InputError]:
  """What is wrong with the files of a folder, which convert takes together; fills `modules` by their names."""
  for file in files:
    if file.fault:
      yield file.fault
    first = next(iter(modules.values()), None)
    if first and any(module.kind != first.kind for module in file.found):
      yield errors.InputError('file of another kind than the folder', path=file.path,
                              found=f'a {file.found[0].kind} file', expected=f'a {first.kind} file as {first.where}')
    for module in file.found:
      known = modules.setdefault(module.module_id, module)
      if known is not module:
        yield errors.InputError('module_id occurs twice', path=file.path, where=module.module_id,
                                found=f'also in {known.where}', expected='distinct names in a folder',
                                fix='rename one')
