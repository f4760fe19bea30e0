"""Speed and memory of reading HLO protobuf files, from bytes in memory to checked arrays.

  python -m benchmarks.hlo    # the modules in tests/golden/modules, and a large module made of them
  python -m benchmarks.hlo --repeats=50 a.pb b.pb

Both implementations are measured in turn. The large module repeats the last file. Its memory is
measured in a process of its own: the peak less the memory before the file was read, as a multiple
of file and arrays together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
import dataclasses
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import google.protobuf
from google.protobuf.internal import api_implementation
import numpy as np

from tpu_graphs import hlo
from tpu_graphs.hlo import implementations
from tpu_graphs.hlo import protos

_MODULES = pathlib.Path(__file__).parents[1] / 'tests' / 'golden' / 'modules'
_IMPLEMENTATIONS = (implementations.NATIVE, implementations.PYTHON)


def repeated(data: bytes, num_ops: int) -> bytes:
  """Returns a ModuleTuningData with copies of the computations of the first module in a file.

  It has at least `num_ops` ops.
  """
  source = protos.HloModuleProto.FromString(hlo.read(data).program(0))
  instructions = [
    instruction for computation in source.computations for instruction in computation.instructions
  ]
  copies = -(-num_ops // len(instructions))
  shift = 1 + max(instruction.id for instruction in instructions)
  computation_shift = 1 + max(computation.id for computation in source.computations)
  parts = []
  for _ in range(copies):
    parts.append(source.SerializeToString())
    for computation in source.computations:
      computation.id += computation_shift
      computation.root_id += shift
      for instruction in computation.instructions:
        instruction.id += shift
        instruction.operand_ids[:] = [key + shift for key in instruction.operand_ids]
        instruction.called_computation_ids[:] = [
          key + computation_shift for key in instruction.called_computation_ids
        ]
  # A parser merges messages that follow each other, so the copies become one module.
  messages = []
  for part in parts:
    module = protos.HloModuleProto.FromString(part)
    messages.append(protos.ModuleTuningData(module=module).SerializeToString())
  return b''.join(messages)


def measure(data: bytes, repeats: int) -> tuple[int, dict[str, list[float]]]:
  """Measures the implementations in turn.

  Returns:
    The number of ops, and implementation -> seconds of each repeat.
  """
  ops, seconds = 0, {}
  # The repeat before the first warms up.
  for repeat in range(-1, repeats):
    for name in _IMPLEMENTATIONS:
      with _chosen(name):
        start = time.perf_counter()
        modules = hlo.read(data).modules
        elapsed = time.perf_counter() - start
      ops = sum(module.num_ops for module in modules)
      if repeat >= 0:
        seconds.setdefault(name, []).append(elapsed)
  return ops, seconds


def peak_memory(path: pathlib.Path, implementation: str) -> float:
  """Measures the peak memory of reading a file, in a process of its own.

  Returns:
    The peak as a multiple of the file and its arrays.
  """
  result = subprocess.run(
    [sys.executable, '-m', 'benchmarks.hlo', '--memory_of', str(path)],
    check=True,
    capture_output=True,
    text=True,
    env={**os.environ, implementations.VARIABLE: implementation},
  )
  return float(result.stdout)


def _print_memory(path: pathlib.Path) -> None:
  """Prints the peak memory of reading a file, as a multiple of the file and its arrays."""
  # Reading another file first loads all code.
  hlo.read((_MODULES / 'convnet_train_unopt.pb').read_bytes())
  before = _resident()
  peak = 0
  done = threading.Event()

  def watch():
    # The peak that the system counts is no help: it begins with the peak of the parent process.
    nonlocal peak
    while not done.wait(0.001):
      peak = max(peak, _resident())

  watcher = threading.Thread(target=watch)
  watcher.start()
  data = path.read_bytes()
  [module] = hlo.read(data).modules
  done.set()
  watcher.join()
  arrays = sum(value.nbytes for value in vars(module).values() if isinstance(value, np.ndarray))
  print((peak - before) / (len(data) + arrays))


def _resident() -> int:
  """Returns the bytes of memory that the process uses."""
  return int(pathlib.Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()


@dataclasses.dataclass
class _chosen:
  """A block in which HLO is read with one implementation."""

  name: str

  def __enter__(self):
    os.environ[implementations.VARIABLE] = self.name
    implementations._active.cache_clear()

  def __exit__(self, *_):
    del os.environ[implementations.VARIABLE]
    implementations._active.cache_clear()


def _row(
  name: str, data: bytes, repeats: int, memory: Callable[[str], float] | None = None
) -> Iterator[str]:
  """Yields a line of the table for each implementation."""
  ops, seconds = measure(data, repeats)
  for implementation, times in seconds.items():
    median = statistics.median(times)
    per_op = []
    for value in (min(times), median, max(times)):
      text = f'{value / ops * 1e6:.2f}' if ops else '-'
      per_op.append(f'{text:>7}')
    peak = f'{memory(implementation):.2f}' if memory else ''
    row = (
      f'{name:34} {implementation:8} {ops:9,} {len(data) / 2**20:7.2f} {median * 1e3:10.2f}  '
      f'{" ".join(per_op)}  {peak:>6}'
    )
    yield row.rstrip()


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    'files',
    nargs='*',
    type=pathlib.Path,
    help='files to read; default: the files in tests/golden/modules',
  )
  parser.add_argument('--repeats', type=int, default=20, help='repeats per file')
  parser.add_argument(
    '--large', type=int, default=500_000, help='ops of the large module; 0 leaves it out'
  )
  parser.add_argument('--memory_of', type=pathlib.Path, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.repeats < 1:
    parser.error('--repeats must be at least 1')
  if args.memory_of:
    _print_memory(args.memory_of)
    return

  print(
    f'{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}; '
    f'Python {platform.python_version()}, NumPy {np.__version__}, '
    f'protobuf {google.protobuf.__version__} ({api_implementation.Type()}); {args.repeats} repeats'
  )
  print(f'{"":34} {"":8} {"":>9} {"":>7} {"median":>10}  {"µs/op":^23}  {"peak":>6}')
  print(
    f'{"file":34} {"by":8} {"ops":>9} {"MiB":>7} {"ms":>10}  '
    f'{"best":>7} {"median":>7} {"worst":>7}  {"memory":>6}'
  )
  paths = args.files or sorted(_MODULES.glob('*.pb'))
  for path in paths:
    print(*_row(path.name, path.read_bytes(), args.repeats), sep='\n')
  if args.large:
    data = repeated(paths[-1].read_bytes(), args.large)
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'large.pb'
      path.write_bytes(data)
      rows = _row(
        f'{paths[-1].stem} x N', data, min(args.repeats, 3), lambda name: peak_memory(path, name)
      )
      print(*rows, sep='\n')


if __name__ == '__main__':
  main()
