"""The files that a conversion reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
import itertools
import os

from apache_beam.io import filesystems

from pipelines.conversion import output
from pipelines.runners import beam as beam_lib
from tpu_graphs import errors
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import dumps

_SUFFIXES = ('.npz', '.pb')


@dataclasses.dataclass(frozen=True)
class Inputs:
  """The input of a conversion.

  Attributes:
    patterns: globs, each of which matches at least one file.
    files: number of files they match (twice if by two patterns).
    bytes: their size.
  """

  patterns: tuple[str, ...]
  files: int
  bytes: int


def find_inputs(inputs: Sequence[str], collection: str, hlo_stage: str = 'after') -> Inputs:
  """Turns files, globs and directories into patterns, and looks what they match.

  A directory may be the root of a TpuGraphs tree (with a folder per part of the collection's
  name, such as tile/xla), a folder with train, valid and test, or a plain folder of files. Of
  one that XLA wrote with --xla_dump_to, the programs of the stage `hlo_stage` are taken and
  nothing else.

  Raises:
    InputError: a file system is not available, an input matches no file, a dump has no program
      of the stage, or a file's name is not in Unicode.
  """
  if not inputs:
    raise errors.InputError('no input', where='--input', expected='files, globs or folders')
  patterns: list[str] = []
  entries: list[filesystems.FileMetadata] = []
  for name in inputs:
    beam_lib.check_file_system('--input', name)
    tree = output.join(name, *collection.split(':'))
    # Beam finds nothing by a local glob without a folder before it.
    groups: Iterable[list[str]] = [
      [name if '://' in name or name.startswith(('/', './', '../')) else f'./{name}']
    ]
    if not any(character in name for character in '*?['):
      folders = [
        [output.join(tree, split) for split in module_lib.SPLITS],
        [tree],
        [output.join(name, split) for split in module_lib.SPLITS],
        [name],
      ]
      groups = (
        [pattern for folder in group for pattern in _patterns_in(folder, hlo_stage)]
        for group in folders
      )
      if not os.path.isdir(name):
        groups = itertools.chain(groups, [[name]])
    for group in groups:
      results = filesystems.FileSystems.match(group)
      if any(result.metadata_list for result in results):
        break
    else:
      raise errors.InputError(
        'nothing matches',
        where='--input',
        found=name,
        expected=f'a file, a glob, or a folder with {" or ".join(_SUFFIXES)} files',
      )
    for result in results:
      if result.metadata_list:
        patterns.append(result.pattern)
        entries.extend(result.metadata_list)
  for entry in entries:
    if any(
      '\ud800' <= character <= '\udfff' for character in entry.path
    ):  # Bytes that are no UTF-8.
      raise errors.InputError(
        'file name not in Unicode', where='--input', found=ascii(entry.path), fix='rename the file'
      )
  return Inputs(tuple(patterns), len(entries), sum(entry.size_in_bytes for entry in entries))


def _patterns_in(folder: str, hlo_stage: str) -> list[str]:
  """Globs of what is read in a folder; files of a dump that no glob can tell from others are
  named one by one.
  """
  [listing] = filesystems.FileSystems.match([output.join(folder, '*module_*_optimizations.*')])
  paths = [entry.path for entry in listing.metadata_list]
  with errors.in_file(folder):
    chosen = set(dumps.find(paths, stage=hlo_stage))
  if not chosen:
    return [output.join(folder, f'*{suffix}') for suffix in _SUFFIXES]
  patterns = []
  for ending in dumps.ENDINGS:
    found = {path for path in paths if path.endswith(ending)}
    patterns.extend(
      [output.join(folder, f'*module_*{ending}')] if found <= chosen else sorted(found & chosen)
    )
  return patterns
