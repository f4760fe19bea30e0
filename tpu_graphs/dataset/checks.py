"""What complete checks share: the report, what is kept of a module, and work in several
processes.
"""

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
      cells = [
        list(self.rows[0]),
        *(
          [f'{cell:,}' if isinstance(cell, int) else cell for cell in row.values()]
          for row in self.rows
        ),
      ]
      widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
      lines += [
        '  '.join(
          [
            '',
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
          ]
        )
        for row in cells
      ]
    for what, found in (('fault', self.faults), ('warning', self.warnings)):
      lines += [f'  {what}: {" ".join(str(error).splitlines())}' for error in found]
    verdict = terminal.plural(len(self.faults), 'fault') if self.faults else 'sound'
    warnings = f', {terminal.plural(len(self.warnings), "warning")}' if self.warnings else ''
    return '\n'.join([*lines, f'  {verdict}{warnings}'])

  def to_json(self) -> dict[str, Any]:
    """The same as values that JSON can hold; faults and warnings have the parts of an
    `InputError`.
    """
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
  for first, second in itertools.combinations(
    [split for split in module_lib.SPLITS if split in names], 2
  ):
    if shared := [topology for topology in names[second] if topology in names[first]]:
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


def _from_pool(
  function: Callable[[_Task], _Result], tasks: Sequence[_Task], num_workers: int
) -> Iterator[_Result]:
  executor = concurrent.futures.ProcessPoolExecutor(
    num_workers,
    mp_context=multiprocessing.get_context('spawn'),  # TensorFlow does not survive a fork.
    initializer=signal.signal,
    initargs=(signal.SIGINT, signal.SIG_IGN),
  )  # This process is interrupted for all.
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
