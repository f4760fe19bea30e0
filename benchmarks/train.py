"""Speed and memory of training on tile modules, compared with a naive way to do the same.

  python -m benchmarks.train            # every model; some ten minutes
  python -m benchmarks.train --batch_size=100 --only=EarlyJoinSAGE
  python -m benchmarks.train --quick    # EarlyJoinSAGE and the naive job, one round each

Whole steps are measured, from records on disk to changed weights: modules of some 40 ops with 10
configs each, 3 layers of 64 hidden units. Each job is a process of its own; the jobs take steps
round-robin, so that all share the machine with the same other processes. `net MB` is a job's peak
less the peak of an idle process with the same imports.

The naive job trains EarlyJoinSAGE, the same mathematics, as it is written down: it parses and
samples record by record, concatenates opcode embedding, features and config for every op and
config, and gathers and scatters again in each layer.
"""

from __future__ import annotations

import baselines  # noqa: F401  # Before TensorFlow, to quiet it.

# isort: split

import argparse
from collections.abc import Iterator, Sequence
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf
import tensorflow_gnn as tfgnn

from baselines import losses
from baselines import models
from baselines.models import parts
from baselines.training import host
from baselines.training import trainer as trainer_lib
from benchmarks import memory
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import schema
from tpu_graphs.dataset import statistics as statistics_lib
from tpu_graphs.input import loading
from tpu_graphs.modules import features

_ROOT = pathlib.Path(__file__).parents[1]
_NAIVE, _IDLE, _STATIC = 'naive', 'idle', ', static shapes'
_MODEL = 'EarlyJoinSAGE'
_CONFIGS = 10
_SIZES = parts.PartOptions(hidden=64, layers=3, opcode_embedding=64)
_RECORDS = 1000
_WARM_UP = 20  # Number of steps before the first measurement.


class NaiveEarlyJoinSAGE(tf.keras.Model):
  """The model EarlyJoinSAGE of `baselines.models` as written down, with Keras and TF-GNN alone."""

  def __init__(self, options: parts.PartOptions, statistics: parts.Statistics):
    super().__init__()
    self.normalize_op = parts.Normalizer(statistics['feat'])
    self.normalize_config = parts.Normalizer(statistics['config_feat'])
    self.embed = tf.keras.layers.Embedding(features.NUM_OPCODES, options.opcode_embedding)
    self.rounds = [_NaiveSAGELayer(options) for _ in range(options.layers)]
    self.normalize = [
      tf.keras.layers.LayerNormalization(center=False, scale=False) for _ in self.rounds[1:]
    ]
    self.head = tf.keras.layers.Dense(options.hidden, activation='relu')
    self.score = tf.keras.layers.Dense(1)

  def call(self, graph: tfgnn.GraphTensor) -> tf.Tensor:
    config = self.normalize_config(graph.context['config_feat'])  # [B, K, 24]
    config = tfgnn.broadcast_context_to_nodes(graph, 'op', feature_value=config)  # [N, K, 24]
    op = graph.node_sets['op']
    op = tf.concat([self.embed(op['opcode']), self.normalize_op(op['feat'])], axis=-1)  # [N, 204]
    op = tf.repeat(op[:, tf.newaxis], tf.shape(config)[1], axis=1)  # [N, K, 204]
    state = self.rounds[0](graph, tf.concat([op, config], axis=-1))  # [N, K, H]
    for layer, normalize in zip(self.rounds[1:], self.normalize, strict=True):
      state = normalize(state + layer(graph, state))
    pooled = [
      tfgnn.pool_nodes_to_context(graph, 'op', reduce, feature_value=state)
      for reduce in ('mean', 'max_no_inf')
    ]
    return tf.squeeze(self.score(self.head(tf.concat(pooled, axis=-1))), axis=-1)

  def take_weights_of(self, model: tf.keras.Model) -> None:
    """Copies the weights of an EarlyJoinSAGE of the same sizes; both must be built."""
    for own, other in (
      (self.normalize_op, model._op_input._normalize),
      (self.embed, model._op_input._embed),
      (self.normalize_config, model._config_input._normalize),
      (self.head, model._head._hidden),
      (self.score, model._head._score),
    ):
      own.set_weights(other.get_weights())
    first = [model._of_ops._project.kernels, model._of_configs._project.kernels]
    kernels = [np.concatenate(first, axis=1)]
    kernels += [layer._project.kernels for layer in model._layers]
    for layer, own in zip(self.rounds, kernels, strict=True):
      for dense, kernel in zip((layer.itself, layer.operands, layer.consumers), own, strict=True):
        dense.kernel.assign(kernel)
    activations = [model._activate] + [layer._activate for layer in model._layers]
    for layer, activate in zip(self.rounds, activations, strict=True):
      layer.itself.bias.assign(activate.bias)


class _NaiveSAGELayer(tf.keras.layers.Layer):
  """A SAGE layer that gathers and scatters the states of all ops and configs."""

  def __init__(self, options: parts.PartOptions):
    super().__init__()
    self.itself = tf.keras.layers.Dense(options.hidden)
    self.operands, self.consumers = (
      tf.keras.layers.Dense(options.hidden, use_bias=False) for _ in range(2)
    )

  def call(self, graph: tfgnn.GraphTensor, state: tf.Tensor) -> tf.Tensor:
    def mean(sender: int, receiver: int) -> tf.Tensor:
      messages = tfgnn.broadcast_node_to_edges(graph, 'operand', sender, feature_value=state)
      return tfgnn.pool_edges_to_node(graph, 'operand', receiver, 'mean', feature_value=messages)

    own = self.itself(state)
    of_operands = self.operands(mean(tfgnn.SOURCE, tfgnn.TARGET))
    of_consumers = self.consumers(mean(tfgnn.TARGET, tfgnn.SOURCE))
    return tf.nn.relu(own + of_operands + of_consumers)


def naive_batches(directory: directory_lib.DatasetDirectory, batch_size: int) -> tf.data.Dataset:
  """Returns endless batches of merged graphs; each record is parsed and sampled alone."""
  spec = schema.graph_spec(directory.kind)

  def sample(serialized: tf.Tensor) -> tfgnn.GraphTensor:
    graph = tfgnn.parse_single_example(spec, serialized)
    chosen = tf.random.shuffle(tf.range(loading.num_configs(graph)))[:_CONFIGS]
    decoded = loading.decode(graph, directory.kind, chosen=chosen, pad_to=_CONFIGS)
    return loading.without_strings(decoded)

  paths = [os.path.join(directory.path, shard.name) for shard in directory.split('train').shards]
  records = tf.data.Dataset.from_tensor_slices(paths).interleave(
    tf.data.TFRecordDataset, num_parallel_calls=2
  )
  graphs = records.repeat().shuffle(_RECORDS).map(sample, num_parallel_calls=tf.data.AUTOTUNE)
  merged = graphs.batch(batch_size, drop_remainder=True).map(
    lambda graph: graph.merge_batch_to_components(), num_parallel_calls=tf.data.AUTOTUNE
  )
  return merged.prefetch(tf.data.AUTOTUNE)


class NaiveTrainer:
  """A trainer of `NaiveEarlyJoinSAGE` that calls a function for each step."""

  def __init__(self, directory: directory_lib.DatasetDirectory, batch_size: int):
    self._batch_size = batch_size
    self._model = NaiveEarlyJoinSAGE(_SIZES, statistics_lib.parse(directory.statistics))
    self._optimizer = tf.keras.optimizers.AdamW(1e-3, global_clipnorm=1.0)
    self._loss = losses.make_loss('list_mle')
    self._batches = iter(naive_batches(directory, batch_size))
    self._step = tf.function(self._step, reduce_retracing=True)

  def take(self, steps: int) -> int:
    """Takes steps; returns the number of configs seen."""
    for _ in range(steps):
      value = self._step(next(self._batches))
    value.numpy()
    return steps * self._batch_size * _CONFIGS

  def _step(self, graph: tfgnn.GraphTensor) -> tf.Tensor:
    runtimes = graph.context['relative_runtime']
    with tf.GradientTape() as tape:
      value = tf.reduce_mean(self._loss(runtimes, self._model(graph, training=True)))
    self._optimizer.minimize(value, self._model.trainable_variables, tape=tape)
    return value


class Trainer:
  """A trainer of a model of `baselines`, epoch after epoch."""

  def __init__(
    self, directory: directory_lib.DatasetDirectory, name: str, batch_size: int, *, static: bool
  ):
    options = trainer_lib.TrainOptions(
      epochs=1000, batch_size=batch_size, configs_per_module=_CONFIGS, shapes=int(static)
    )
    self._trainer = trainer_lib.Trainer(
      models.ModelOptions(name, 'tile', _SIZES),
      options,
      tf.distribute.OneDeviceStrategy('/cpu:0'),
      directory=directory,
    )
    self._batches = iter(self._trainer.batches(1))
    self._epoch = self._left = 0

  def take(self, steps: int) -> int:
    """Takes steps; returns the number of configs seen."""
    configs = 0
    while steps:
      if not self._left:
        self._epoch += 1
        self._left = self._trainer.steps_in_epoch(self._epoch)
      taken = self._trainer.take(self._batches, min(steps, self._left))
      self._left -= taken.count
      steps -= taken.count
      configs += taken.configs
    return configs


def write_dataset(folder: pathlib.Path) -> str:
  """Converts random tile modules; returns the dataset directory."""
  # The jobs, which are processes of their own, do without Beam.
  from pipelines import convert
  from pipelines.conversion import options as options_lib

  raw = folder / 'raw' / 'train'
  raw.mkdir(parents=True)
  rng = np.random.default_rng(0)
  for i in range(_RECORDS):
    n, c = int(rng.integers(20, 61)), int(rng.integers(100, 301))
    edges = np.stack([np.arange(1, n), rng.integers(0, np.arange(1, n))], axis=1)
    edges = np.concatenate([edges, np.sort(rng.integers(0, n, (n // 4, 2)), axis=1)[:, ::-1]])
    is_set = rng.random((n, features.NUM_NODE_FEATURES)) < 0.3
    values = rng.integers(0, 1000, (n, features.NUM_NODE_FEATURES))
    feat = np.where(is_set, values, 0)
    np.savez(
      raw / f'{i}.npz',
      node_opcode=rng.integers(1, 100, n).astype(np.uint8),
      edge_index=edges,
      node_feat=feat.astype(np.float32),
      config_runtime=rng.integers(10**3, 10**6, c),
      config_feat=rng.integers(0, 64, (c, features.NUM_TILE_FEATURES)).astype(np.float32),
      config_runtime_normalizers=np.full(c, 10**4),
    )
  directory = str(folder / 'data')
  convert.convert(
    inputs=[str(folder / 'raw')],
    directory=directory,
    options=options_lib.ConvertOptions(collection='tile:benchmark'),
  )
  shutil.rmtree(folder / 'raw')
  return directory


def work(job: str, data: str, batch_size: int) -> None:
  """Takes as many steps as each line of input says, and prints the cost, as a worker does.

  A line of output holds seconds, CPU seconds, configs and peak memory in bytes.
  """
  directory = directory_lib.open_directory(data)
  if job not in (_IDLE, _NAIVE):
    host.tune(directory.kind)
  tf.constant(0.0).numpy()
  if job == _IDLE:
    take = int
  elif job == _NAIVE:
    take = NaiveTrainer(directory, batch_size).take
  else:
    name = job.removesuffix(_STATIC)
    take = Trainer(directory, name, batch_size, static=job.endswith(_STATIC)).take
  print('ready', flush=True)
  for line in sys.stdin:
    start, cpu = time.perf_counter(), time.process_time()
    configs = take(int(line))
    print(
      time.perf_counter() - start, time.process_time() - cpu, configs, memory.peak(), flush=True
    )


class Worker:
  """A job in a process of its own.

  Attributes:
    job: name of the job.
    step_ms: milliseconds per step, in each round.
    cpu_ms: milliseconds of computing per step, in each round; they say more than `step_ms` where
      others use the machine too.
    config_rate: configs per second, in each round.
    memory: peak in bytes.
  """

  def __init__(self, job: str, data: str, batch_size: int):
    self.job = job
    self.step_ms: list[float] = []
    self.cpu_ms: list[float] = []
    self.config_rate: list[float] = []
    self.memory = 0.0
    command = [
      sys.executable,
      '-m',
      'benchmarks.train',
      f'--job={job}',
      f'--data={data}',
      f'--batch_size={batch_size}',
    ]
    self._process = subprocess.Popen(
      command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    if self._process.stdout.readline() != 'ready\n':
      sys.exit(f'{job} failed')
    self._take(_WARM_UP)

  def _take(self, steps: int) -> tuple[float, float, float]:
    """Takes steps; returns seconds, CPU seconds and configs."""
    self._process.stdin.write(f'{steps}\n')
    self._process.stdin.flush()
    answer = self._process.stdout.readline()
    if not answer:
      sys.exit(f'{self.job} failed')
    seconds, cpu_seconds, configs, self.memory = map(float, answer.split())
    return seconds, cpu_seconds, configs

  def measure(self, steps: int) -> None:
    """Measures a round of steps."""
    seconds, cpu_seconds, configs = self._take(steps)
    self.cpu_ms.append(cpu_seconds / steps * 1e3)
    self.step_ms.append(seconds / steps * 1e3)
    self.config_rate.append(configs / seconds)

  def close(self) -> None:
    """Ends the process."""
    self._process.stdin.close()
    self._process.wait()


def table(workers: Sequence[Worker], idle: Worker) -> Iterator[str]:
  """Yields lines of text with medians, and their ratios to the naive job."""
  naive = next(worker for worker in workers if worker.job == _NAIVE)
  naive_median = statistics.median(naive.step_ms)
  naive_rate = statistics.median(naive.config_rate)
  naive_net = naive.memory - idle.memory
  yield (
    f'{"":29} {"ms per step":>20} {"CPU":>5} {"steps/s":>8} {"configs/s":>10} {"of naive":>9} '
    f'{"peak":>5} {"net of idle":>11} {"of":>5}'
  )
  yield (
    f'{"job":29} {"min":>6} {"median":>6} {"max":>6} {"ms":>5} {"of naive":>8} {"":>10} {"":>9} '
    f'{"MB":>5} {"MB":>11} {"naive":>5}'
  )
  for worker in workers:
    median = statistics.median(worker.step_ms)
    cpu = statistics.median(worker.cpu_ms)
    rate = statistics.median(worker.config_rate)
    net = worker.memory - idle.memory
    yield (
      f'{worker.job:29} {min(worker.step_ms):6.1f} {median:6.1f} {max(worker.step_ms):6.1f} '
      f'{cpu:5.1f} {naive_median / median:7.2f}x {rate:10,.0f} {rate / naive_rate:8.2f}x '
      f'{worker.memory / 1e6:5,.0f} {net / 1e6:11,.0f} {net / naive_net:4.2f}x'
    )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--batch_size', type=int, default=10, help='modules per step')
  parser.add_argument('--steps', type=int, default=100, help='steps per round')
  parser.add_argument('--rounds', type=int, default=7, help='rounds of all jobs')
  parser.add_argument(
    '--only', default='', help='measures only models with this text in their name'
  )
  parser.add_argument('--quick', action='store_true', help=f'one short round of {_MODEL} alone')
  parser.add_argument('--job', help=argparse.SUPPRESS)
  parser.add_argument('--data', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.job:
    work(args.job, args.data, args.batch_size)
    return
  names = [_MODEL] if args.quick else [name for name in models.MODELS if args.only in name]
  steps, rounds = (20, 1) if args.quick else (args.steps, args.rounds)
  with tempfile.TemporaryDirectory() as folder:
    data = write_dataset(pathlib.Path(folder))
    print(
      f'{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}; '
      f'Python {platform.python_version()}, TensorFlow {tf.__version__}, '
      f'TF-GNN {tfgnn.__version__}; {rounds} rounds of {steps} steps of '
      f'{args.batch_size} modules with {_CONFIGS} configs; {_SIZES}',
      flush=True,
    )
    idle = Worker(_IDLE, data, args.batch_size)
    jobs = [_NAIVE, *names]
    if _MODEL in names:
      jobs.append(_MODEL + _STATIC)
    workers = [Worker(job, data, args.batch_size) for job in jobs]
    try:
      for number in range(1, rounds + 1):
        for worker in workers:
          worker.measure(steps)
        times = '  '.join(f'{worker.job} {worker.step_ms[-1]:.1f} ms' for worker in workers)
        print(f'round {number}/{rounds}: {times}', file=sys.stderr, flush=True)
      print(*table(workers, idle), sep='\n')
    finally:
      for worker in (idle, *workers):
        worker.close()


if __name__ == '__main__':
  main()
