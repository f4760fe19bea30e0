"""Speed of ranking, in Python and with the exported model, for models and sizes of modules.

  python -m benchmarks.rank    # the default models; some ten minutes
  python -m benchmarks.rank --model=LateJoinSAGE --kind=layout --ops=300,3000 --configs=1000

Speeds are configs per second. Modules are random; of the N ops of a layout module, N / 15 are
configurable. `rank` is all that the command does for a module after the run is loaded. `tensors`
and `records` are the signatures of the exported model, loaded again from its files; `records` gets
three equal records at a time. All ways are measured in turn.
"""

from __future__ import annotations

import baselines  # noqa: F401  # Before TensorFlow, to quiet it.

# isort: split

import argparse
from collections.abc import Callable, Mapping
import os
import platform
import statistics
import tempfile
import time

import numpy as np
import tensorflow as tf

from baselines import export_model
from baselines import models
from baselines.serving import ranking
from baselines.serving import saved_model
from baselines.training import runs
from benchmarks import memory
from tpu_graphs.dataset import records
from tpu_graphs.dataset import statistics as statistics_lib
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import module as module_lib

_OPS = {'tile': (30, 300), 'layout': (300, 3000, 20_000)}
_ROWS = 4_000_000  # The most ops x configs of a module, unless --configs is given.
_MOST_CONFIGS = 2000
_BATCH = 3


def make_module(kind: str, ops: int, configs: int) -> module_lib.Module:
  """Returns a module of random features, in which each op has an edge from an earlier op."""
  rng = np.random.default_rng(ops)
  unmeasured = np.full(configs, module_lib.UNMEASURED)
  if kind == 'tile':
    own = {
      'config_feat': rng.random((configs, 24), np.float32),
      'config_runtime_normalizers': unmeasured,
    }
  else:
    config_ops = np.sort(rng.choice(ops, max(ops // 15, 1), replace=False))
    layouts = rng.integers(-1, 6, (configs, config_ops.size, 18), np.int8)
    own = {'node_config_ids': config_ops, 'node_config_feat': layouts}
  return module_lib.Module(
    module_id='random',
    kind=kind,
    node_opcode=rng.integers(1, 120, ops),
    node_splits=np.array([0, ops]),
    node_feat=rng.random((ops, 140), np.float32),
    config_runtime=unmeasured,
    config_id=np.arange(configs),
    edge_index=np.stack([np.arange(1, ops), rng.integers(0, np.arange(1, ops))], axis=1),
    **own,
  )


def write_run(path: str, kind: str, model: str) -> None:
  """Writes a run whose model has random weights and the usual sizes."""
  content = statistics_lib.Statistics.of(make_module(kind, 300, 20)).to_json()
  options = models.ModelOptions(model, kind)
  writer = runs.Writer(
    path,
    config={},
    options=options,
    model=models.build(options, statistics_lib.parse(content)),
    statistics=content,
    choices=feature_choices.PUBLISHED,
    overwrite=False,
  )
  writer.save(1)


def ways(
  ranker: ranking.Ranker,
  signatures: Mapping[str, Callable[..., dict[str, tf.Tensor]]],
  module: module_lib.Module,
) -> dict[str, tuple[Callable[[], object], int]]:
  """Returns name -> function that scores all configs of a module, and how many times it does."""
  tensors = {name: tf.constant(array) for name, array in saved_model.arrays_of(module).items()}
  examples = tf.constant([records.encode_whole(module)] * _BATCH)
  return {
    'rank': (lambda: ranker.rank(module).scores, 1),
    'tensors': (lambda: signatures['tensors'](**tensors)['scores'].numpy(), 1),
    'records': (lambda: signatures['serving_default'](examples=examples)['scores'].numpy(), _BATCH),
  }


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--kind', choices=list(_OPS), action='append', help='default: both')
  parser.add_argument(
    '--model',
    choices=list(models.MODELS),
    action='append',
    help='default: EarlyJoinSAGE, LateJoinSAGE, EarlyJoinResGCN, MLP',
  )
  parser.add_argument(
    '--ops', type=lambda text: [int(part) for part in text.split(',')], help='sizes of modules'
  )
  parser.add_argument('--configs', type=int, help='configs of each module')
  parser.add_argument('--repeats', type=int, default=3, help='repeats of each')
  args = parser.parse_args()
  print(
    f'{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}; '
    f'Python {platform.python_version()}, TensorFlow {tf.__version__}; median of {args.repeats}'
  )
  print(
    f'{"kind":7} {"model":16} {"ops":>6} {"configs":>7}  configs/s: '
    f'{"rank":>9} {"tensors":>9} {"records":>9}  {"peak MB":>7}'
  )
  for kind in args.kind or _OPS:
    for model in args.model or ('EarlyJoinSAGE', 'LateJoinSAGE', 'EarlyJoinResGCN', 'MLP'):
      with tempfile.TemporaryDirectory() as folder:
        run = os.path.join(folder, 'run')
        exported = os.path.join(folder, 'exported')
        write_run(run, kind, model)
        export_model.export_model(run=run, out=exported)
        ranker = ranking.Ranker(run)
        signatures = tf.saved_model.load(exported).signatures
        for ops in args.ops or _OPS[kind]:
          configs = args.configs or min(_ROWS // ops, _MOST_CONFIGS)
          jobs = ways(ranker, signatures, make_module(kind, ops, configs))
          seconds: dict[str, list[float]] = {name: [] for name in jobs}
          for i in range(args.repeats + 1):
            for name, (job, _) in jobs.items():
              start = time.perf_counter()
              job()
              # The first repeat is for tracing and memory.
              if i:
                seconds[name].append(time.perf_counter() - start)
          texts = []
          for name, (_, times) in jobs.items():
            speed = configs * times / statistics.median(seconds[name])
            texts.append(f'{speed:9,.0f}')
          speeds = ' '.join(texts)
          peak = memory.peak() / 1e6
          print(
            f'{kind:7} {model:16} {ops:6,} {configs:7,}             {speeds}  {peak:7,.0f}',
            flush=True,
          )


if __name__ == '__main__':
  main()
