"""Speed and memory of the input pipeline on one core, compared with TF-GNN's own ops.

  python -m benchmarks.input    # 4,000 tile modules of 20 to 60 ops, 100 layout modules
  python -m benchmarks.input --kind=tile --modules=1000

The pipeline turns records into padded batches. TF-GNN's way parses each record with
`tfgnn.parse_single_example`, merges the modules of a batch, and pads them with
`tfgnn.pad_to_total_sizes`. All ways are run in turn, each in a process of its own on one core.
Batches are consumed inside a tf.function, as in training; `cpu` is the time that the process has
computed, `fill` the share of the ops that are not padding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import memory

if TYPE_CHECKING:
  import tensorflow as tf

_ROOT = pathlib.Path(__file__).parents[1]
_SIZES = {
  'tile': {'modules': 4000, 'ops': (20, 60), 'configs': (50, 300), 'batch_size': 10, 'chosen': 10},
  'layout': {
    'modules': 100,
    'ops': (500, 3000),
    'configs': (200, 600),
    'batch_size': 4,
    'chosen': 16,
  },
}


def write_modules(folder: pathlib.Path, kind: str, modules: int) -> None:
  """Writes npz files of random modules."""
  folder.mkdir(parents=True)
  sizes = _SIZES[kind]
  for seed in range(modules):
    rng = np.random.default_rng(seed)
    n, c = (int(rng.integers(low, high + 1)) for low, high in (sizes['ops'], sizes['configs']))
    arrays = {
      'node_feat': rng.random((n, 140), dtype=np.float32),
      'node_opcode': rng.integers(1, 120, n, np.uint8),
      'edge_index': np.stack([np.arange(1, n), rng.integers(0, np.arange(1, n))], axis=1),
      'config_runtime': rng.integers(1000, 1_000_000, c),
    }
    if kind == 'tile':
      arrays |= {
        'config_feat': rng.random((c, 24), dtype=np.float32),
        'config_runtime_normalizers': np.full(c, 9000),
      }
    else:
      nc = n // 15
      arrays |= {
        'node_config_ids': np.sort(rng.choice(n, nc, replace=False)),
        'node_splits': np.array([[0, n]]),
        'node_config_feat': rng.integers(-1, 6, (c, nc, 18)).astype(np.float32),
      }
    np.savez(folder / f'{seed}.npz', **arrays)


def by_tfgnn(data: str, kind: str) -> tf.data.Dataset:
  """Returns batches of a fixed number of modules, with room for as many of the largest."""
  import tensorflow as tf

  from tpu_graphs.compat import tfgnn
  from tpu_graphs.dataset import directory as directory_lib
  from tpu_graphs.input import loading

  directory = directory_lib.open_directory(data)
  size = _SIZES[kind]['batch_size']
  graphs = loading.load(
    directory, 'train', configs_per_module=_SIZES[kind]['chosen'], shuffle=True, epochs=None
  )
  merged = (
    graphs.map(loading.without_strings)
    .batch(size, drop_remainder=True)
    .map(lambda graph: graph.merge_batch_to_components(), num_parallel_calls=tf.data.AUTOTUNE)
  )
  largest = {name: each * size for name, each in directory.split('train').max_sizes.items()}
  nodes = {'op': 'ops', 'config_op': 'config_ops'}
  edges = {'operand': 'edges', 'configures': 'config_ops'}
  constraints = tfgnn.SizeConstraints(
    total_num_components=size + 1,
    total_num_nodes={name: largest[nodes[name]] + 1 for name in merged.element_spec.node_sets_spec},
    total_num_edges={name: largest[edges[name]] for name in merged.element_spec.edge_sets_spec},
  )
  padding = tfgnn.FeatureDefaultValues(
    context={'config_id': tf.constant(loading.PADDING, tf.int64)}
  )
  padded = merged.map(
    lambda graph: tfgnn.pad_to_total_sizes(graph, constraints, padding_values=padding)[0],
    num_parallel_calls=tf.data.AUTOTUNE,
  )
  return padded.prefetch(tf.data.AUTOTUNE)


def by_packs(**options) -> Callable[[str, str], tf.data.Dataset]:
  """Returns a function that makes the batches of `tpu_graphs.input.batching` with these options."""

  def make(data: str, kind: str) -> tf.data.Dataset:
    from tpu_graphs.input import batching

    sizes = _SIZES[kind]
    batch_options = batching.BatchOptions(
      batch_size=sizes['batch_size'], configs_per_module=sizes['chosen'], **options
    )
    return batching.batches(data, 'train', batch_options)

  return make


_BASE = 'TF-GNN ops, one shape'
_WAYS: dict[str, Callable[[str, str], tf.data.Dataset]] = {
  _BASE: by_tfgnn,
  'packs, one shape': by_packs(shapes=1),
  'packs, four shapes': by_packs(shapes=4),
  'packs, any size': by_packs(),
  'packs, one shape, fastest_biased': by_packs(shapes=1, config_sampling='fastest_biased'),
}


def run(way: str, data: str, kind: str, number: int) -> dict[str, float]:
  """Reads `number` batches on one core and measures it.

  Returns:
    ms: wall time per batch, in milliseconds.
    cpu: time of computing per batch, in milliseconds.
    modules: modules per batch.
    fill: share of the ops that are not padding.
    memory: the peak in MB, less the peak before.
  """
  os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
  import tensorflow as tf

  before = memory.peak()
  batches = iter(_WAYS[way](data, kind))

  @tf.function
  def consume(count: tf.Tensor) -> tf.Tensor:
    sums = tf.zeros([3], tf.int32)  # Numbers of modules, ops of modules, and ops with padding.
    for _ in tf.range(count):
      graph = next(batches)
      sizes, first = graph.node_sets['op'].sizes, graph.context['config_id'][:, 0]
      sums += [
        tf.math.count_nonzero(first >= 0, dtype=tf.int32),
        tf.reduce_sum(sizes[:-1]),
        tf.reduce_sum(sizes),
      ]
    return sums

  consume(tf.constant(max(number // 5, 1)))
  start, computed = time.perf_counter(), time.process_time()
  modules, real, ops = consume(tf.constant(number)).numpy().tolist()
  return {
    'ms': (time.perf_counter() - start) / number * 1e3,
    'cpu': (time.process_time() - computed) / number * 1e3,
    'modules': modules / number,
    'fill': real / ops,
    'memory': (memory.peak() - before) / 1e6,
  }


def table(kind: str, measured: dict[str, list[dict[str, float]]]) -> Iterator[str]:
  """Yields lines of text with the medians of each way, and the extremes of the time."""
  yield (
    f'{kind:34} {"ms per batch":>24} {"times":>6} {"cpu ms":>8} {"times":>6} {"modules":>8} '
    f'{"fill":>5} {"MB":>6}'
  )
  medians = {
    way: {name: statistics.median(result[name] for result in results) for name in results[0]}
    for way, results in measured.items()
  }
  for way, median in medians.items():
    times = [result['ms'] for result in measured[way]]
    spread = f'{median["ms"]:.2f} ({min(times):.2f}-{max(times):.2f})'
    # The ways are compared per module, since batches differ in their numbers of modules.
    faster = [
      medians[_BASE][name] / medians[_BASE]['modules'] * median['modules'] / median[name]
      for name in ('ms', 'cpu')
    ]
    yield (
      f'{way:34} {spread:>24} {faster[0]:6.1f} {median["cpu"]:8.2f} {faster[1]:6.1f} '
      f'{median["modules"]:8.1f} {median["fill"]:5.0%} {median["memory"]:6,.0f}'
    )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--kind', choices=list(_SIZES), action='append', help='default: both')
  parser.add_argument('--modules', type=int, help='number of modules')
  parser.add_argument(
    '--batches', type=int, default=400, help='batches that are read; a quarter of them for layout'
  )
  parser.add_argument('--repeats', type=int, default=3, help='rounds')
  parser.add_argument(
    '--folder', type=pathlib.Path, help='keeps the data here; default: a temporary folder'
  )
  parser.add_argument('--run', nargs=4, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.run:
    way, data, kind, number = args.run
    print(json.dumps(run(way, data, kind, int(number))))
    return
  folder = args.folder or pathlib.Path(tempfile.mkdtemp())
  try:
    import tensorflow as tf

    print(
      f'{platform.machine()}, one of {os.cpu_count()} CPUs, {platform.system()}; Python '
      f'{platform.python_version()}, TensorFlow {tf.__version__}; median of {args.repeats}',
      flush=True,
    )
    for kind in args.kind or _SIZES:
      modules = args.modules or _SIZES[kind]['modules']
      source, data = folder / f'{kind}_{modules}_npz', folder / f'{kind}_{modules}'
      if not data.exists():
        shutil.rmtree(source, ignore_errors=True)
        write_modules(source, kind, modules)
        command = [
          sys.executable,
          '-m',
          'tpu_graphs',
          'convert',
          f'--input={source}',
          f'--output={data}',
          f'--collection={kind}:benchmark',
          '--split=train',
          '--num_shards=8',
        ]
        subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.DEVNULL)
      number = args.batches if kind == 'tile' else max(args.batches // 4, 1)
      measured: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
      for _ in range(args.repeats):
        for way, results in measured.items():
          command = [
            sys.executable,
            '-m',
            'benchmarks.input',
            '--run',
            way,
            str(data),
            kind,
            str(number),
          ]
          done = subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.PIPE, text=True)
          results.append(json.loads(done.stdout.splitlines()[-1]))
      print('\n'.join(table(kind, measured)), flush=True)
  finally:
    if args.folder is None:
      shutil.rmtree(folder)


if __name__ == '__main__':
  main()
