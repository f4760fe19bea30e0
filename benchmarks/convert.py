"""Speed and memory of pipelines/convert.py, compared with NumPy reading the same npz files.

  python -m benchmarks.convert    # 100,000 configs of 300 ops, and 2,000 tile files; 7 GB of disk
  python -m benchmarks.convert --configs=10000 --tiles=200

Reading the files with NumPy and nothing else is the floor. All jobs are run in turn, each in a
process of its own, whose memory, including its workers, is measured as it runs. `net` is the time
less the time that the same command takes for one tiny file, nearly all of which is starting up.
`cpu` is `net` in seconds that all processes of the job have computed, which other jobs on the
machine change little.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import os
import pathlib
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile

import numpy as np

_ROOT = pathlib.Path(__file__).parents[1]
_ONE = ('--', '--direct_num_workers=1')
_TWO = ('--', '--direct_num_workers=2', '--direct_running_mode=multi_processing')
_BLOCK = 1000  # Number of configs that are made at a time.


@dataclasses.dataclass(frozen=True)
class Job:
  """A command to be measured.

  Attributes:
    name: name in the table.
    command: command of the process.
    start: name of the job that shows how long starting takes.
    floor: name of the job that this one is compared with.
    files: number of input files.
  """

  name: str
  command: tuple[str, ...]
  start: str | None = None
  floor: str | None = None
  files: int = 1


@dataclasses.dataclass(frozen=True)
class Result:
  """The cost of a job, for all its processes together.

  Attributes:
    seconds: wall time.
    cpu: seconds of computing.
    memory: the most bytes of memory.
  """

  seconds: float
  cpu: float
  memory: int


def write_layout(path: pathlib.Path, *, configs: int, ops: int, compression: int) -> None:
  """Writes a layout npz in which each configurable op has one of four layouts per config."""
  rng = np.random.default_rng(0)
  n = 10 * ops
  choices = np.sort(rng.integers(-1, 6, (ops, 4, 18)), axis=-1)[..., ::-1].astype(np.float32)

  def blocks() -> Iterator[np.ndarray]:
    for start in range(0, configs, _BLOCK):
      number = min(_BLOCK, configs - start)
      yield choices[np.arange(ops), rng.integers(0, 4, (number, ops))]

  arrays = {
    **_graph(rng, n),
    'node_splits': np.array([[0, n]]),
    'node_config_ids': np.arange(0, n, 10),
    'config_runtime': rng.integers(10**6, 10**8, configs),
  }
  with zipfile.ZipFile(path, 'w', compression) as archive:
    for name, array in arrays.items():
      _write_array(archive, name, array.dtype, array.shape, [array])
    _write_array(archive, 'node_config_feat', choices.dtype, (configs, ops, 18), blocks())


def _write_array(
  archive: zipfile.ZipFile,
  name: str,
  dtype: np.dtype,
  shape: tuple[int, ...],
  blocks: Iterable[np.ndarray],
) -> None:
  descr = np.lib.format.dtype_to_descr(dtype)
  header = {'descr': descr, 'fortran_order': False, 'shape': shape}
  with archive.open(f'{name}.npy', 'w', force_zip64=True) as member:
    np.lib.format.write_array_header_1_0(member, header)
    for block in blocks:
      member.write(block.tobytes())


def write_tile(path: pathlib.Path, seed: int) -> None:
  """Writes a tile npz of about the median size of the published ones."""
  rng = np.random.default_rng(seed)
  c = int(rng.integers(20, 400))
  np.savez_compressed(
    path,
    **_graph(rng, int(rng.integers(10, 80))),
    config_runtime=rng.integers(10**3, 10**6, c),
    config_feat=rng.integers(0, 64, (c, 24)).astype(np.float32),
    config_runtime_normalizers=np.full(c, 10**4),
  )


def _graph(rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
  edges = np.stack([np.arange(1, n), rng.integers(0, np.arange(1, n))], axis=1)
  feat = np.where(rng.random((n, 140)) < 0.1, rng.integers(0, 1000, (n, 140)), 0).astype(np.float32)
  return {
    'node_opcode': rng.integers(1, 100, n).astype(np.uint8),
    'node_feat': feat,
    'edge_index': edges,
  }


def measure(command: tuple[str, ...]) -> Result:
  """Runs a command to its end and measures it."""
  start = time.perf_counter()
  computed = _computed()
  peak = 0
  with tempfile.TemporaryFile() as log:
    process = subprocess.Popen(command, cwd=_ROOT, stdout=log, stderr=subprocess.STDOUT)
    while process.poll() is None:
      peak = max(peak, sum(map(_resident, _tree(process.pid))))
      time.sleep(0.02)
    seconds = time.perf_counter() - start
    if process.returncode:
      log.seek(0)
      sys.exit(f'{" ".join(command)}\n{log.read().decode(errors="replace")[-2000:]}')
  return Result(seconds, _computed() - computed, peak)


def _computed() -> float:
  """Returns the seconds that all processes which this one has waited for have computed.

  It includes the processes that those have waited for.
  """
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


def _tree(pid: int) -> Iterator[int]:
  """Yields a process and all processes that it has started."""
  yield pid
  for task in pathlib.Path(f'/proc/{pid}/task').glob('*/children'):
    try:
      children = task.read_text().split()
    except OSError:
      # The process has ended.
      continue
    for child in children:
      yield from _tree(int(child))


def _resident(pid: int) -> int:
  """Returns the bytes of memory that a process uses; 0 if it has ended."""
  try:
    return int(pathlib.Path(f'/proc/{pid}/statm').read_text().split()[1]) * resource.getpagesize()
  except (OSError, IndexError):
    return 0


def _read(path: pathlib.Path) -> None:
  """Reads all arrays of the npz files at `path` with NumPy, one after the other: the floor."""
  files = sorted(path.glob('*.npz')) if path.is_dir() else [path]
  for file in files:
    with np.load(file) as arrays:
      for name in arrays.files:
        _ = arrays[name]


def jobs(folder: pathlib.Path, sizes: argparse.Namespace) -> Iterator[Job]:
  """Makes the inputs in `folder`, unless they exist, and yields the jobs to measure on them."""
  output = folder / 'output'

  def convert(
    name: str, source: pathlib.Path, kind: str, *options: str, beam=_ONE, **kwargs
  ) -> Job:
    command = (
      sys.executable,
      '-m',
      'tpu_graphs',
      'convert',
      f'--input={source}',
      f'--output={output}',
      f'--collection={kind}:benchmark',
      '--split=train',
      '--overwrite',
      *options,
      *beam,
    )
    return Job(name, command, **kwargs)

  def floor(name: str, source: pathlib.Path, **kwargs) -> Job:
    return Job(name, (sys.executable, '-m', 'benchmarks.convert', f'--read={source}'), **kwargs)

  tiny, tiles = folder / 'tiny', folder / f'tiles_{sizes.tiles}'
  for place, number in ((tiny, 1), (tiles, sizes.tiles)):
    place.mkdir(exist_ok=True)
    for seed in range(len(list(place.iterdir())), number):
      write_tile(place / f'{seed}.npz', seed)
  yield floor('start NumPy', tiny)
  yield convert('start one process', tiny, 'tile')
  yield convert('start two processes', tiny, 'tile', beam=_TWO)
  for name, compression in (('compressed', zipfile.ZIP_DEFLATED), ('stored', zipfile.ZIP_STORED)):
    layout = folder / f'{name}_{sizes.configs}_{sizes.ops}.npz'
    if not layout.exists():
      write_layout(
        layout.with_suffix('.partial'),
        configs=sizes.configs,
        ops=sizes.ops,
        compression=compression,
      )
      layout.with_suffix('.partial').rename(layout)
    yield floor(f'NumPy {name}', layout, start='start NumPy')
    yield convert(
      f'layout {name}', layout, 'layout', start='start one process', floor=f'NumPy {name}'
    )
    yield convert(
      f'layout {name}, {sizes.max_configs} kept',
      layout,
      'layout',
      f'--max_configs={sizes.max_configs}',
      start='start one process',
      floor=f'NumPy {name}',
    )
  yield floor('NumPy tiles', tiles, start='start NumPy', files=sizes.tiles)
  yield convert(
    'tiles, one process',
    tiles,
    'tile',
    start='start one process',
    floor='NumPy tiles',
    files=sizes.tiles,
  )
  yield convert(
    'tiles, two processes',
    tiles,
    'tile',
    beam=_TWO,
    start='start two processes',
    floor='NumPy tiles',
    files=sizes.tiles,
  )


def table(measured: Mapping[Job, list[Result]]) -> Iterator[str]:
  """Yields lines of text with the median of each job."""

  def median(what: str) -> dict[str, float]:
    return {
      job.name: statistics.median(getattr(result, what) for result in results)
      for job, results in measured.items()
    }

  def without_start(totals: Mapping[str, float]) -> dict[str, float]:
    return {
      job.name: totals[job.name] - (totals[job.start] if job.start else 0) for job in measured
    }

  def of_floor(values: Mapping[str, float], job: Job) -> str:
    return f'{values[job.name] / values[job.floor]:.2f}' if job.floor else ''

  wall = median('seconds')
  memory = median('memory')
  net = without_start(wall)
  cpu = without_start(median('cpu'))
  yield (
    f'{"job":32} {"wall s":>8} {"net s":>8} {"of floor":>9} {"files/s":>9} '
    f'{"cpu s":>8} {"of floor":>9} {"peak MB":>9}'
  )
  for job in measured:
    rate = f'{job.files / net[job.name]:,.0f}' if job.files > 1 else ''
    yield (
      f'{job.name:32} {wall[job.name]:8.2f} {net[job.name]:8.2f} {of_floor(net, job):>9} {rate:>9} '
      f'{cpu[job.name]:8.2f} {of_floor(cpu, job):>9} {memory[job.name] / 1e6:9,.0f}'
    )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--configs', type=int, default=100_000, help='configs of the layout module')
  parser.add_argument(
    '--ops',
    type=int,
    default=300,
    help='configurable ops of the layout module; it has ten times as many ops in total',
  )
  parser.add_argument(
    '--max_configs',
    type=int,
    default=1000,
    help='configs of the layout module that are kept in the second run',
  )
  parser.add_argument('--tiles', type=int, default=2000, help='number of tile files')
  parser.add_argument('--repeats', type=int, default=3, help='rounds')
  parser.add_argument(
    '--only', default='', help='measures only starting up and jobs with this text in their name'
  )
  parser.add_argument(
    '--folder', type=pathlib.Path, help='keeps the inputs here; default: a temporary folder'
  )
  parser.add_argument('--read', type=pathlib.Path, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.read:
    _read(args.read)
    return
  folder = args.folder or pathlib.Path(tempfile.mkdtemp())
  try:
    folder.mkdir(parents=True, exist_ok=True)
    chosen = []
    for job in jobs(folder.resolve(), args):
      if args.only in job.name or job.name.startswith('start'):
        chosen.append(job)
    print(
      f'{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}; '
      f'Python {platform.python_version()}, NumPy {np.__version__}; median of {args.repeats}',
      flush=True,
    )
    measured: dict[Job, list[Result]] = {job: [] for job in chosen}
    for _ in range(args.repeats):
      for job, results in measured.items():
        results.append(measure(job.command))
    print(*table(measured), sep='\n')
  finally:
    shutil.rmtree(folder / 'output', ignore_errors=True)
    if not args.folder:
      shutil.rmtree(folder)


if __name__ == '__main__':
  main()
