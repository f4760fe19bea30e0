"""What XLA writes with --xla_dump_to: which of the files are programs, and which of these are read.

Of each program that it compiles, XLA may dump the HLO before and after its passes, as a protobuf
(--xla_dump_hlo_as_proto), as text, or both, among many files of other content:
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
# How the names of programs end; protobufs first. Before it some compilers put the device, such as
# 'sm_8.0_gpu_'.
ENDINGS = (
  'after_optimizations.hlo.pb',
  'before_optimizations.hlo.pb',
  'after_optimizations.txt',
  'before_optimizations.txt',
)

# The first group tells one program from another; the time before it is that of
# --xla_dump_include_timestamp.
_PROGRAM = re.compile(
  r'(?P<program>(?:\d+\.)?module_(?P<number>\d+)(?:\..+?)?)\.'
  r'(?:(?:sm_\d+\.\d+[a-z]*_)?\w+_)?(?P<stage>after|before)_optimizations\.(?P<type>hlo\.pb|txt)'
)


def check_stage(stage: str, *, where: str) -> None:
  """Refuses what is none of `STAGES`.

  Raises:
    InputError: see above; it names `where`.
  """
  if stage not in STAGES:
    raise errors.InputError(
      'unknown stage', where=where, found=repr(stage), expected=', '.join(STAGES)
    )


def find(paths: Iterable[str], *, stage: str = 'after') -> list[str]:
  """Those of the files of one folder that are to be read; none if no program is among them.

  Args:
    paths: of any files; only their last parts matter.
    stage: 'after' the passes of XLA, 'before' them, or 'all' for both. Of a program and stage,
      text is taken only where there is no protobuf.

  Returns:
    Sorted paths.

  Raises:
    InputError: there are programs, but none of the stage; or no such stage.
  """
  check_stage(stage, where='stage')
  found: dict[tuple[str, str], dict[str, str]] = collections.defaultdict(dict)
  for path in paths:
    if program := _match(path):
      found[program['program'], program['stage']][program['type']] = path
  chosen = [
    types.get('hlo.pb') or types['txt'] for (_, at), types in found.items() if stage in (at, 'all')
  ]
  if found and not chosen:
    other = next(at for _, at in found)
    raise errors.InputError(
      'XLA dump without programs of the stage',
      found=f'{len(found)} of stage {other!r}',
      expected=f'stage {stage!r}',
    )
  return sorted(chosen)


def number_of_text(path: str) -> str | None:
  """The number that XLA gave to the program whose text this file of a dump is; None for any
  other file.
  """
  program = _match(path)
  return program['number'] if program and program['type'] == 'txt' else None


def _match(path: str) -> re.Match[str] | None:
  return _PROGRAM.fullmatch(path.replace('\\', '/').rpartition('/')[2])
