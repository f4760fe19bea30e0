"""Beam for command lines: options behind `--`, the local runner, files on any file system."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence, Set
import contextlib
import difflib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from typing import BinaryIO

import apache_beam as beam
from apache_beam.io import filesystems
from apache_beam.io import localfilesystem
from apache_beam.options import pipeline_options
from apache_beam.portability import python_urns
from apache_beam.runners.portability.fn_api_runner import fn_runner
from apache_beam.runners.portability.fn_api_runner import worker_handlers
from apache_beam.transforms import environments
from google.protobuf import json_format
from google.protobuf import text_format
import grpc

from tpu_graphs import errors

# Starting worker processes takes seconds, so smaller inputs are converted within the main process.
_BYTES_WORTH_PROCESSES = 64 << 20
# A job server must answer within this time; Beam itself would wait for minutes without a message.
_SECONDS_FOR_JOB_SERVER = 10


def pipeline(args: Sequence[str], *, input_bytes: int) -> beam.Pipeline:
  """Returns a pipeline with the Beam options `args`.

  Without `--runner`, and for DirectRunner, the pipeline runs on this machine with FnApiRunner
  (DirectRunner would try to download another runner first). Where the input is large it uses a
  process per core, unless `args` say otherwise. DaskRunner is the runner of
  `pipelines/runners/dask_runner.py`.

  Raises:
    InputError: Beam does not know an option or the runner, the extra of the runner is not
      installed, or a job server does not answer.
  """
  name = _runner_name(args)
  # The Dask runner is imported first, since its import makes its options known to Beam.
  runner = _dask_runner() if name == 'dask' else None
  _check(args)
  options = pipeline_options.PipelineOptions(list(args))
  if name in ('direct', 'fnapi'):
    direct_options = options.view_as(pipeline_options.DirectOptions)
    given = {arg.partition('=')[0] for arg in args}
    runner = _local_runner(direct_options, given, large=input_bytes >= _BYTES_WORTH_PROCESSES)
  if endpoint := options.view_as(pipeline_options.PortableOptions).job_endpoint:
    _check_job_server(endpoint)
  try:
    return beam.Pipeline(runner, options)
  except (ValueError, ImportError, AttributeError) as error:
    found = ' '.join(str(error).split())
    # Some runners check the values of their options.
    if found.startswith('Pipeline has validations errors'):
      raise errors.InputError('wrong Beam option', found=found.partition(': ')[2]) from error
    raise errors.InputError(
      'runner cannot be used',
      where='--runner',
      found=found,
      fix='name a runner of Apache Beam, such as FnApiRunner or DataflowRunner',
    ) from error


def _local_runner(
  options: pipeline_options.DirectOptions, given: Set[str], *, large: bool
) -> fn_runner.FnApiRunner:
  """Returns an FnApiRunner, and sets those `options` that the user has not `given`."""
  # An exception reports the outcome once, so Beam's log is not needed.
  logging.getLogger('apache_beam').setLevel(logging.CRITICAL)
  # Otherwise a timer empties the buffers of data for workers while they are written to, without a
  # lock: on busy machines elements were lost without any report.
  worker_handlers.DATA_BUFFER_TIME_LIMIT_MS = 0
  # With Beam's default for the mode, a number of workers has no effect.
  if '--direct_running_mode' not in given:
    several = options.direct_num_workers != 1 if '--direct_num_workers' in given else large
    options.direct_running_mode = 'multi_processing' if several else 'in_memory'
  if '--direct_num_workers' not in given and options.direct_running_mode != 'in_memory':
    options.direct_num_workers = os.cpu_count()
  if options.direct_running_mode != 'multi_processing':
    return fn_runner.FnApiRunner()
  # With Beam's own command, worker processes log every step to the terminal; their exceptions come
  # back anyway. Ctrl-C must not reach the workers: if a worker ended too early, each thread here
  # that waits for it would complain.
  options.direct_running_mode = None
  worker = (
    f'{shlex.quote(sys.executable)} -m apache_beam.runners.worker.sdk_worker_main 2>{os.devnull}'
  )
  command = f"trap '' INT; exec {worker}"
  return fn_runner.FnApiRunner(environments.SubprocessSDKEnvironment.from_command_string(command))


@worker_handlers.WorkerHandler.register_environment(python_urns.SUBPROCESS_SDK, bytes)
class _Worker(worker_handlers.GrpcWorkerHandler):
  """A worker process.

  Beam's own class waits for the process in a thread, forever if it is interrupted during the start.
  """

  def __init__(self, command: bytes, *args):
    super().__init__(*args)
    self._command = command.decode()

  def start_worker(self) -> None:
    descriptor = self.control_api_service_descriptor()
    options = self.provision_info.provision_info.pipeline_options
    environment = {
      **os.environ,
      'WORKER_ID': self.worker_id,
      'CONTROL_API_SERVICE_DESCRIPTOR': text_format.MessageToString(descriptor),
      'PIPELINE_OPTIONS': json_format.MessageToJson(options),
    }
    self._process = subprocess.Popen(self._command, shell=True, env=environment)
    atexit.register(self.stop_worker)

  def stop_worker(self) -> None:
    atexit.unregister(self.stop_worker)
    self._process.terminate()
    self._process.wait()


def _dask_runner() -> beam.runners.runner.PipelineRunner:
  try:
    from pipelines.runners import dask_runner
  except ImportError as error:
    raise errors.InputError(
      'runner cannot be used', where='--runner', found=error, fix="pip install 'tpu_graphs[dask]'"
    ) from error
  return dask_runner.DaskRunner()


def _check_job_server(endpoint: str) -> None:
  with grpc.insecure_channel(endpoint) as channel:
    try:
      grpc.channel_ready_future(channel).result(_SECONDS_FOR_JOB_SERVER)
    except grpc.FutureTimeoutError as error:
      raise errors.InputError(
        'no job server',
        where='--job_endpoint',
        found=endpoint,
        expected='HOST:PORT of a running job server',
      ) from error


def _runner_name(args: Sequence[str]) -> str:
  """Returns the runner's short name: 'dask' for --runner=DaskRunner, 'direct' without a runner."""
  parser = _Parser(allow_abbrev=False, add_help=False)
  pipeline_options.StandardOptions._add_argparse_args(parser)
  known, _ = parser.parse_known_args(args)
  return str(known.runner or 'direct').lower().removesuffix('runner')


def _check(args: Sequence[str]) -> None:
  """Refuses Beam options that Beam would drop with only a warning."""
  parser = _Parser(allow_abbrev=False, add_help=False)
  for options in pipeline_options.PipelineOptions.__subclasses__():
    # Beam collects the options of all its parts through this hook.
    options._add_argparse_args(parser)
  _, unknown = parser.parse_known_args(args)
  if unknown:
    flag = unknown[0].partition('=')[0]
    names = [name for action in parser._actions for name in action.option_strings]
    near = difflib.get_close_matches(flag, names, 1)
    fix = f'did you mean {near[0]}?' if near else None
    raise errors.InputError('unknown Beam option', found=unknown[0], fix=fix)
  runners = [arg for arg in args if arg.partition('=')[0] == '--runner']
  if len(runners) > 1:
    raise errors.InputError(
      'Beam option given twice', found=' '.join(runners), expected='one --runner'
    )


class _Parser(pipeline_options._BeamArgumentParser):
  """Beam's parser, but with `InputError`s: argparse would print a usage of four hundred lines."""

  def error(self, message: str):
    raise errors.InputError('wrong Beam option', found=message)


def check_file_system(flag: str, path: str) -> None:
  """Refuses a path whose file system cannot be reached, before any work is done.

  Raises:
    InputError: the path is empty, its scheme is unknown, or the extra of the scheme is not
      installed.
  """
  if not path:
    raise errors.InputError('empty path', where=flag)
  scheme = path.partition('://')[0] if '://' in path else ''
  if scheme == 'gcs':
    raise errors.InputError('unknown file system', where=flag, found=path, fix='use gs://')
  try:
    filesystems.FileSystems.get_filesystem(path)
    # For some known schemes, a missing package shows only now.
    filesystems.FileSystems.exists(path)
  except (ValueError, OSError, beam.io.filesystem.BeamIOError) as error:
    fix = {'gs': "pip install 'tpu_graphs[gcp]'"}.get(scheme, 'use a local path or gs://')
    raise errors.InputError('file system not available', where=flag, found=path, fix=fix) from error


def read_bytes(path: str) -> bytes:
  """Returns the content of a file on any file system.

  Raises:
    InputError: the file cannot be read.
  """
  with reading(path), _open(path) as file:
    return file.read()


@contextlib.contextmanager
def open_seekable(path: str) -> Iterator[BinaryIO]:
  """Opens a file on any file system to be read in any order.

  A file that is not local is copied to a temporary file.

  Raises:
    InputError: the file cannot be read.
  """
  with contextlib.ExitStack() as stack:
    with reading(path):
      file = stack.enter_context(_open(path))
      file_system = filesystems.FileSystems.get_filesystem(path)
      if not isinstance(file_system, localfilesystem.LocalFileSystem):
        copy = stack.enter_context(tempfile.TemporaryFile())
        shutil.copyfileobj(file, copy, 1 << 20)
        copy.seek(0)
        file = copy
    yield file


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
  """Converts a failure to read inside the block to an `InputError` that names the file."""
  try:
    yield
  except (OSError, beam.io.filesystem.BeamIOError) as error:
    raise errors.InputError('cannot read file', path=path, found=error) from error


def _open(path: str) -> BinaryIO:
  return filesystems.FileSystems.open(
    path, compression_type=filesystems.CompressionTypes.UNCOMPRESSED
  )


def write_atomically(path: str, data: bytes) -> None:
  """Writes a file so that it appears under its name only when it is complete."""
  temporary = f'{path}.{os.getpid()}.partial'
  with filesystems.FileSystems.create(
    temporary, compression_type=filesystems.CompressionTypes.UNCOMPRESSED
  ) as file:
    file.write(data)
  rename(temporary, path)


def rename(source: str, target: str) -> None:
  """Moves a file to `target` and replaces a file there, since a step may run twice."""
  if filesystems.FileSystems.exists(target):
    with contextlib.suppress(OSError):  # Another attempt may have deleted the file first.
      filesystems.FileSystems.delete([target])
  filesystems.FileSystems.rename([source], [target])
