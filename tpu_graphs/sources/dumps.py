"""Finds the programs in a folder that XLA has written with --xla_dump_to.

XLA may dump the HLO of each program that it compiles before and after its passes, as a protobuf
(--xla_dump_hlo_as_proto), as text, or both, among many other files:
```
module_0003.jit_step.before_optimizations.hlo.pb
module_0003.jit_step.cpu_after_optimizations.hlo.pb
module_0003.jit_step.cpu_after_optimizations.txt
module_0003.jit_step.cpu_after_optimizations-buffer-assignment.txt
```
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
import re

from tpu_graphs import errors

TYPE_NAME = 'XLA dump'
STAGES = ('after', 'before', 'all')
# The endings of the names of programs, protobufs first. Some compilers put the device before the
# ending, such as 'sm_8.0_gpu_'.
ENDINGS = (
  'after_optimizations.hlo.pb',
  'before_optimizations.hlo.pb',
  'after_optimizations.txt',
  'before_optimizations.txt',
)

# The first group distinguishes programs. It may begin with a timestamp, which XLA writes with
# --xla_dump_include_timestamp.
_PROGRAM = re.compile(
  r'(?P<program>(?:\d+\.)?module_(?P<number>\d+)(?:\..+?)?)\.'
  r'(?:(?:sm_\d+\.\d+[a-z]*_)?\w+_)?(?P<stage>after|before)_optimizations\.(?P<type>hlo\.pb|txt)'
)


def check_stage(stage: str, *, where: str) -> None:
  """Refuses a stage that is not in `STAGES`.

  Raises:
    InputError: the stage is unknown; the error names `where`.
  """
  if stage not in STAGES:
    raise errors.InputError(
      'unknown stage', where=where, found=repr(stage), expected=', '.join(STAGES)
    )


def find(paths: Iterable[str], *, stage: str = 'after') -> list[str]:
  """Returns the files of one folder that are to be read as programs.

  Args:
    paths: paths of any files; only their last parts matter.
    stage: 'after' the passes of XLA, 'before' them, or 'all' for both. The text of a program at a
      stage is chosen only if there is no protobuf.

  Returns:
    Sorted paths; none if no file is a program.

  Raises:
    InputError: there are programs, but none of the stage; or the stage is unknown.
  """
  check_stage(stage, where='stage')
  found: dict[tuple[str, str], dict[str, str]] = collections.defaultdict(dict)
  for path in paths:
    program = _match(path)
    if program:
      found[program['program'], program['stage']][program['type']] = path
  chosen = []
  for (_, program_stage), path_of_type in found.items():
    if stage in (program_stage, 'all'):
      chosen.append(path_of_type.get('hlo.pb') or path_of_type['txt'])
  if found and not chosen:
    _, other = next(iter(found))
    raise errors.InputError(
      'XLA dump without programs of the stage',
      found=f'{len(found)} of stage {other!r}',
      expected=f'stage {stage!r}',
    )
  return sorted(chosen)


def number_of_text(path: str) -> str | None:
  """Returns the number that XLA gave to a program whose text the file is.

  Any other file, such as a protobuf, gives None.
  """
  program = _match(path)
  return program['number'] if program and program['type'] == 'txt' else None


def _match(path: str) -> re.Match[str] | None:
  return _PROGRAM.fullmatch(path.replace('\\', '/').rpartition('/')[2])
