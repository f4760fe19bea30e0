"""Speed and memory of metrics: pairs of one module, intervals over many.

  python -m benchmarks.metrics
  python -m benchmarks.metrics --configs=100000 --repeats=10

Memory is the most that Python and NumPy hold at a time, inputs included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import os
import platform
import statistics
import time
import tracemalloc
from typing import Any

import numpy as np

from tpu_graphs.metrics import intervals
from tpu_graphs.metrics import metrics


def _jobs(
  configs: int, modules: int
) -> dict[str, tuple[str, Callable[[], tuple], Callable[..., Any]]]:
  """Returns name -> description of the input, function that makes the input, measured function."""
  rng = np.random.default_rng(0)

  def module() -> tuple[np.ndarray, np.ndarray]:
    # More than half of the runtimes occur more than once.
    runtimes = rng.integers(10**9, 10**9 + configs, configs)
    noise = rng.normal(scale=configs / 2, size=configs)
    return runtimes, (runtimes + noise).astype(np.float32)

  def values() -> tuple[np.ndarray]:
    return (rng.lognormal(size=modules),)

  of_configs, of_modules = f'{configs:,} configs', f'{modules:,} modules'
  return {
    'kendall_tau': (of_configs, module, metrics.kendall_tau),
    'opa': (of_configs, module, metrics.opa),
    'all metrics': (
      of_configs,
      module,
      lambda *args: metrics.evaluate_module('m', *args, ks=(1, 10, 100)),
    ),
    'bootstrap interval': (of_modules, values, intervals.of_mean),
  }


def _peak_memory(make: Callable[[], tuple], job: Callable[..., Any]) -> float:
  """Returns the most MiB that Python and NumPy hold at a time."""
  tracemalloc.start()
  job(*make())
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  return peak / 2**20


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--configs', type=int, default=1_000_000, help='configs of the module')
  parser.add_argument('--modules', type=int, default=1000, help='modules to resample')
  parser.add_argument('--repeats', type=int, default=5, help='repeats of each')
  args = parser.parse_args()
  if min(args.configs, args.modules, args.repeats) < 1:
    parser.error('--configs, --modules and --repeats must be at least 1')
  resamples = intervals.BootstrapOptions().resamples
  print(
    f'{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}; '
    f'Python {platform.python_version()}, NumPy {np.__version__}; {args.repeats} repeats; '
    f'{resamples:,} resamples'
  )
  print(f'{"":20}{"":>20}{"best s":>9}{"median s":>10}{"peak MiB":>10}')
  for name, (what, make, job) in _jobs(args.configs, args.modules).items():
    arguments = make()
    seconds = []
    for _ in range(args.repeats):
      start = time.perf_counter()
      job(*arguments)
      seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    peak = _peak_memory(make, job)
    print(f'{name:20}{what:>20}{min(seconds):9.3f}{median:10.3f}{peak:10.1f}')


if __name__ == '__main__':
  main()
