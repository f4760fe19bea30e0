"""Shared parts of the complete checks: the report, the facts of a module, work in processes."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import concurrent.futures
from concurrent.futures import process as futures_process
import dataclasses
import itertools
import multiprocessing
import os
import signal
from typing import Any, TypeVar

from tpu_graphs import errors
from tpu_graphs import terminal
from tpu_graphs.modules import module as module_lib

# Less data is read in this process, since starting others takes seconds.
_BYTES_WORTH_PROCESSES = 64 << 20
_Task = TypeVar('_Task')
_Result = TypeVar('_Result')


@dataclasses.dataclass(frozen=True)
class Report:
  """The result of a complete check.

  Attributes:
    path: path of the dataset directory or of the tree.
    title: a few words that name the kind of data at `path`.
    rows: a row per split, or per folder of a tree: column -> value.
    faults: errors that make the data wrong.
    warnings: facts that a user should know although the data is not wrong.
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
    """Returns a text for people: a table, a line per fault and warning, and the verdict."""
    lines = [f'{self.path}: {self.title}']
    if self.rows:
      cells = [list(self.rows[0])]
      for row in self.rows:
        cells.append([f'{cell:,}' if isinstance(cell, int) else cell for cell in row.values()])
      widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
      for first, *others in cells:
        numbers = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append('  '.join(['', first.ljust(widths[0]), *numbers]))
    for label, found in (('fault', self.faults), ('warning', self.warnings)):
      lines += [f'  {label}: {" ".join(str(error).splitlines())}' for error in found]
    verdict = terminal.plural(len(self.faults), 'fault') if self.faults else 'sound'
    if self.warnings:
      verdict += f', {terminal.plural(len(self.warnings), "warning")}'
    lines.append(f'  {verdict}')
    return '\n'.join(lines)

  def to_json(self) -> dict[str, Any]:
    """Returns the report as JSON values; faults and warnings have the parts of an `InputError`."""
    return {
      'path': self.path,
      'title': self.title,
      'sound': self.is_sound,
      'rows': [dict(row) for row in self.rows],
      'faults': [fault.to_dict() for fault in self.faults],
      'warnings': [warning.to_dict() for warning in self.warnings],
    }


@dataclasses.dataclass(frozen=True)
class Found:
  """The facts that are kept of a module, or of the part of a module that one record holds.

  Attributes:
    module_id: name of the module.
    kind: 'tile' or 'layout'.
    where: the file, with the record in a shard.
    topology: result of `Module.topology_fingerprint`.
    measured: True if any config is measured.
    configs: number of configs.
  """

  module_id: str
  kind: str
  where: str
  topology: bytes
  measured: bool
  configs: int


def leaks(path: str, splits: Mapping[str, Iterable[Found]]) -> Iterator[errors.InputError]:
  """Yields a warning for each pair of splits that have equal graphs."""
  names: dict[str, dict[bytes, list[str]]] = {}  # Split -> topology -> module_ids.
  for split, modules in splits.items():
    names[split] = collections.defaultdict(list)
    for module in modules:
      names[split][module.topology].append(module.module_id)
  present = [split for split in module_lib.SPLITS if split in names]
  for first, second in itertools.combinations(present, 2):
    shared = [topology for topology in names[second] if topology in names[first]]
    if not shared:
      continue
    number = sum(len(names[second][topology]) for topology in shared)
    total = terminal.plural(sum(map(len, names[second].values())), 'module')
    alike = f'{names[second][shared[0]][0]} like {names[first][shared[0]][0]}'
    yield errors.InputError(
      f'graphs of {second} occur in {first}',
      path=path,
      found=f'{number:,} of {total}, such as {alike}',
      expected='graphs of its own',
    )


def in_processes(
  function: Callable[[_Task], _Result],
  tasks: Sequence[_Task],
  sizes: Sequence[int],
  *,
  num_workers: int | None,
  name: str,
  progress: terminal.Progress | None,
) -> Iterator[_Result]:
  """Yields `function(task)` for each task, in order, from several processes where that pays.

  Args:
    function: a function of one task; the function, tasks and results must be picklable.
    tasks: the arguments, one per call.
    sizes: number of bytes of each task.
    num_workers: number of processes; see `validation.validate`.
    name: name shown with the progress.
    progress: shows how many bytes are done.

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


def _from_pool(
  function: Callable[[_Task], _Result], tasks: Sequence[_Task], num_workers: int
) -> Iterator[_Result]:
  executor = concurrent.futures.ProcessPoolExecutor(
    num_workers,
    # TensorFlow does not survive a fork.
    mp_context=multiprocessing.get_context('spawn'),
    # Workers ignore an interrupt: this process receives it and ends the work.
    initializer=signal.signal,
    initargs=(signal.SIGINT, signal.SIG_IGN),
  )
  try:
    yield from executor.map(function, tasks)
  except futures_process.BrokenProcessPool as error:
    raise errors.InputError(
      'a worker process died',
      expected='enough memory for a module per process',
      fix='give --num_workers=1',
    ) from error
  finally:
    executor.shutdown(cancel_futures=True)
