"""The files that a conversion reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
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
    patterns: Globs, each of which matches at least one file.
    files: Number of matched files. A file that two patterns match counts twice.
    bytes: Total size of these files.
  """

  patterns: tuple[str, ...]
  files: int
  bytes: int


def find_inputs(inputs: Sequence[str], collection: str, hlo_stage: str = 'after') -> Inputs:
  """Returns the patterns for files, globs and directories, with the number and size of matches.

  A directory may be the root of a TpuGraphs tree (with a folder per part of the collection's
  name, such as tile/xla), a folder with train, valid and test, or a plain folder of files. In a
  directory that XLA wrote with --xla_dump_to, only the programs of the stage `hlo_stage` are taken.

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
    for group in _pattern_groups(name, collection, hlo_stage):
      results = filesystems.FileSystems.match(group)
      matched = [result for result in results if result.metadata_list]
      if matched:
        break
    else:
      raise errors.InputError(
        'nothing matches',
        where='--input',
        found=name,
        expected=f'a file, a glob, or a folder with {" or ".join(_SUFFIXES)} files',
      )
    for result in matched:
      patterns.append(result.pattern)
      entries.extend(result.metadata_list)
  for entry in entries:
    # Bytes of a file name that are not UTF-8 arrive as lone surrogates.
    if any('\ud800' <= character <= '\udfff' for character in entry.path):
      raise errors.InputError(
        'file name not in Unicode', where='--input', found=ascii(entry.path), fix='rename the file'
      )
  return Inputs(tuple(patterns), len(entries), sum(entry.size_in_bytes for entry in entries))


def _pattern_groups(name: str, collection: str, hlo_stage: str) -> Iterator[list[str]]:
  """Yields lists of globs for one input; the first list that matches a file is the one to use.

  Later folders are looked at only where earlier ones give nothing.
  """
  if any(character in name for character in '*?['):
    # Beam finds nothing with a local glob that does not begin with a folder.
    anchored = '://' in name or name.startswith(('/', './', '../'))
    yield [name if anchored else f'./{name}']
    return
  tree = output.join(name, *collection.split(':'))
  places = (
    [output.join(tree, split) for split in module_lib.SPLITS],
    [tree],
    [output.join(name, split) for split in module_lib.SPLITS],
    [name],
  )
  for folders in places:
    yield [pattern for folder in folders for pattern in _patterns_in(folder, hlo_stage)]
  if not os.path.isdir(name):
    yield [name]


def _patterns_in(folder: str, hlo_stage: str) -> list[str]:
  """Returns globs for the files to read in a folder.

  Files of a dump that no glob can distinguish from others are named one by one.
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
    if found <= chosen:
      patterns.append(output.join(folder, f'*module_*{ending}'))
    else:
      patterns.extend(sorted(found & chosen))
  return patterns
