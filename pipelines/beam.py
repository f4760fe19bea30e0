"""What every pipeline's command line needs of Beam: options behind `--`, the local runner, files on any file system."""

from __future__ import annotations

from collections.abc import Sequence, Set
import contextlib
import difflib
import logging
import os
import shlex
import sys

import apache_beam as beam
from apache_beam.io import filesystems
from apache_beam.options import pipeline_options
from apache_beam.runners.portability.fn_api_runner import fn_runner
from apache_beam.transforms import environments

from tpu_graphs import errors

# Starting worker processes takes seconds, so smaller inputs are converted within the main process.
_BYTES_WORTH_PROCESSES = 64 << 20


def pipeline(args: Sequence[str], *, input_bytes: int) -> beam.Pipeline:
  """A pipeline with the Beam options `args`.

  Without `--runner`, and for DirectRunner, it runs on this machine by FnApiRunner (DirectRunner would try to download
  another runner first): with a process per core where the input is large, unless `args` say otherwise.

  Raises:
    InputError: an option or runner that Beam does not know.
  """
  known = _parse(args)
  options = pipeline_options.PipelineOptions(list(args))
  runner = None
  if str(known['runner'] or 'direct').lower().removesuffix('runner') in ('direct', 'fnapi'):
    given = {arg.partition('=')[0] for arg in args}
    runner = _local_runner(options.view_as(pipeline_options.DirectOptions), given,
                           large=input_bytes >= _BYTES_WORTH_PROCESSES)
  try:
    return beam.Pipeline(runner, options)
  except (ValueError, ImportError, AttributeError) as error:
    raise errors.InputError('runner cannot be used', where='--runner', found=' '.join(str(error).split()),
                            fix='name a runner of Apache Beam, such as FnApiRunner or DataflowRunner') from error


def _local_runner(options: pipeline_options.DirectOptions, given: Set[str], *, large: bool) -> fn_runner.FnApiRunner:
  """An FnApiRunner for `options`, which are filled in where the user has not `given` them."""
  logging.getLogger('apache_beam').setLevel(logging.CRITICAL)  # The outcome is told by an exception, once.
  if '--direct_running_mode' not in given:  # Its default in Beam makes a number of workers have no effect.
    several = options.direct_num_workers != 1 if '--direct_num_workers' in given else large
    options.direct_running_mode = 'multi_processing' if several else 'in_memory'
  if '--direct_num_workers' not in given and options.direct_running_mode != 'in_memory':
    options.direct_num_workers = os.cpu_count()
  if options.direct_running_mode != 'multi_processing':
    return fn_runner.FnApiRunner()
  # Beam's own command for worker processes lets them log every step to the terminal. What they raise comes back anyway.
  options.direct_running_mode = None
  command = f'{shlex.quote(sys.executable)} -m apache_beam.runners.worker.sdk_worker_main 2>{os.devnull}'
  return fn_runner.FnApiRunner(environments.SubprocessSDKEnvironment.from_command_string(command))


def _parse(args: Sequence[str]) -> dict[str, object]:
  """Parses Beam options, refusing what Beam would drop with no more than a warning."""
  parser = _Parser(allow_abbrev=False, add_help=False)
  for options in pipeline_options.PipelineOptions.__subclasses__():
    options._add_argparse_args(parser)  # The hook through which Beam collects the options of all its parts.
  known, unknown = parser.parse_known_args(args)
  if unknown:
    flag = unknown[0].partition('=')[0]
    near = difflib.get_close_matches(flag, [name for action in parser._actions for name in action.option_strings], 1)
    raise errors.InputError('unknown Beam option', found=unknown[0], fix=f'did you mean {near[0]}?' if near else None)
  runners = [arg for arg in args if arg.partition('=')[0] == '--runner']
  if len(runners) > 1:
    raise errors.InputError('Beam option given twice', found=' '.join(runners), expected='one --runner')
  return vars(known)


class _Parser(pipeline_options._BeamArgumentParser):
  """Beam's parser with its errors as `InputError`; argparse would print a usage of four hundred lines."""

  def error(self, message: str):
    raise errors.InputError('wrong Beam option', found=message)


def check_file_system(flag: str, path: str) -> None:
  """Refuses a path whose file system cannot be reached, before any work is done.

  Raises:
    InputError: no path, unknown scheme, or a scheme whose extra is not installed.
  """
  if not path:
    raise errors.InputError('empty path', where=flag)
  scheme = path.partition('://')[0] if '://' in path else ''
  if scheme == 'gcs':
    raise errors.InputError('unknown file system', where=flag, found=path, fix='use gs://')
  try:
    filesystems.FileSystems.get_filesystem(path)
    filesystems.FileSystems.exists(path)  # Some schemes are known, but tell only now that their package is missing.
  except (ValueError, OSError, beam.io.filesystem.BeamIOError) as error:
    fix = {'gs': "pip install 'tpu_graphs[gcp]'"}.get(scheme, 'use a local path or gs://')
    raise errors.InputError('file system not available', where=flag, found=path, fix=fix) from error


def read_bytes(path: str) -> bytes:
  """The content of a file on any file system.

  Raises:
    InputError: it cannot be read.
  """
  try:
    with filesystems.FileSystems.open(path, compression_type=filesystems.CompressionTypes.UNCOMPRESSED) as file:
      return file.read()
  except (OSError, beam.io.filesystem.BeamIOError) as error:
    raise errors.InputError('cannot read file', path=path, found=error) from error


def write_atomically(path: str, data: bytes) -> None:
  """Writes a file so that it appears under its name only when it is complete."""
  temporary = f'{path}.{os.getpid()}.partial'
  with filesystems.FileSystems.create(temporary, compression_type=filesystems.CompressionTypes.UNCOMPRESSED) as file:
    file.write(data)
  rename(temporary, path)


def rename(source: str, target: str) -> None:
  """Moves a file over another that may exist: a step may run twice."""
  if filesystems.FileSystems.exists(target):
    with contextlib.suppress(OSError):  # Another attempt may be first.
      filesystems.FileSystems.delete([target])
  filesystems.FileSystems.rename([source], [target])
