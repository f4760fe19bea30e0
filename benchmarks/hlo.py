"""Speed of reading HLO protobuf files, parsing included, the file already in memory.

  python -m benchmarks.hlo                        # the modules in tests/golden/modules
  python -m benchmarks.hlo --repeats=50 a.pb b.pb
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import statistics
import time

from google.protobuf.internal import api_implementation
import google.protobuf
import numpy as np

from tpu_graphs import hlo

_MODULES = pathlib.Path(__file__).parents[1] / 'tests' / 'golden' / 'modules'


def measure(path: pathlib.Path, repeats: int) -> tuple[int, int, list[float]]:
  """Ops, bytes and the seconds that each repeat took."""
  data = path.read_bytes()
  ops = sum(module.num_ops for module in hlo.read(data, name=str(path)).modules)  # Warms up, too.
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    hlo.read(data)
    seconds.append(time.perf_counter() - start)
  return ops, len(data), seconds


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('files', nargs='*', type=pathlib.Path, help='files; without any, those in tests/golden/modules')
  parser.add_argument('--repeats', type=int, default=20, help='repeats per file')
  args = parser.parse_args()
  if args.repeats < 1:
    parser.error('--repeats must be at least 1')

  print(f'{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}; Python {platform.python_version()}, '
        f'NumPy {np.__version__}, protobuf {google.protobuf.__version__} ({api_implementation.Type()}); '
        f'{args.repeats} repeats')
  print(f'{"file":40} {"ops":>7} {"bytes":>9} {"best ms":>8} {"median ms":>9} {"best µs/op":>10}')
  for path in args.files or sorted(_MODULES.glob('*.pb')):
    ops, size, seconds = measure(path, args.repeats)
    per_op = f'{min(seconds) / ops * 1e6:.1f}' if ops else '-'
    print(f'{path.name:40} {ops:7} {size:9} {min(seconds) * 1e3:8.2f} {statistics.median(seconds) * 1e3:9.2f} '
          f'{per_op:>10}')


if __name__ == '__main__':
  main()
