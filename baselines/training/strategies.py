"""Distribution strategies: training on a TPU, several GPUs, several machines, or one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
import json
import os

import tensorflow as tf

from tpu_graphs import errors

STRATEGIES = ('auto', 'tpu', 'mirrored', 'multi_worker', 'one_device')
_CLUSTER = 'TF_CONFIG'
_LOCAL_TPUS = ('', 'local')


def make(name: str, *, tpu: str | None, paths: Mapping[str, str]) -> tf.distribute.Strategy:
  """Makes a distribution strategy.

  Args:
    name: 'tpu', 'mirrored' (all GPUs, or the logical CPU devices), 'multi_worker' (all GPUs, or
      the CPU, of each machine that the environment variable TF_CONFIG names), 'one_device', or
      'auto': TPU if `tpu` is given, else mirrored if there are several GPUs, else one device.
    tpu: name or address of a TPU; '' or 'local' for the TPU of a TPU VM.
    paths: paths that the devices' hosts read or write, by flag.

  Raises:
    InputError: the strategy does not fit the machine, or a remote TPU could not reach a path. This
      is checked before anything is connected.
  """
  if name == 'auto':
    if tpu is not None:
      name = 'tpu'
    elif len(tf.config.list_logical_devices('GPU')) > 1:
      name = 'mirrored'
    else:
      name = 'one_device'
  if name != 'tpu' and tpu is not None:
    raise errors.InputError(
      'TPU given for another strategy',
      where='--tpu',
      found=f'--strategy={name}',
      expected='--strategy=tpu or auto',
    )
  if name == 'tpu':
    return _tpu(tpu or '', paths)
  if name == 'multi_worker':
    _check_cluster()
    return tf.distribute.MultiWorkerMirroredStrategy()
  if name == 'mirrored':
    devices = tf.config.list_logical_devices('GPU') or tf.config.list_logical_devices('CPU')
    return tf.distribute.MirroredStrategy([device.name for device in devices])
  device = '/gpu:0' if tf.config.list_logical_devices('GPU') else '/cpu:0'
  return tf.distribute.OneDeviceStrategy(device)


def _check_cluster() -> None:
  text = os.environ.get(_CLUSTER, '')
  try:
    content = json.loads(text)
    task = content['task']
    _ = content['cluster'][task['type']][task['index']]
  except (LookupError, TypeError, ValueError) as error:
    raise errors.InputError(
      'no cluster to train on',
      where=_CLUSTER,
      found=repr(text),
      expected=(
        '{"cluster": {"worker": [ADDRESS:PORT, ...]}, "task": {"type": "worker", "index": N}}'
      ),
    ) from error


def _tpu(tpu: str, paths: Mapping[str, str]) -> tf.distribute.Strategy:
  if tpu not in _LOCAL_TPUS:
    local = {flag: path for flag, path in paths.items() if not path.startswith('gs://')}
    if local:
      raise errors.InputError(
        'local path given to a remote TPU',
        where=' and '.join(local),
        found=' and '.join(local.values()),
        expected='paths on gs://',
        fix='copy the files to gs://, or use --tpu=local on a TPU VM',
      )
  try:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu)
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
  except (ValueError, tf.errors.OpError) as error:
    raise errors.InputError(
      'TPU not found',
      where='--tpu',
      found=f'{tpu or "local"} ({" ".join(str(error).split())})',
      fix='check the name, or choose another --strategy',
    ) from error
  return tf.distribute.TPUStrategy(resolver)


def is_cluster(strategy: tf.distribute.Strategy) -> bool:
  """Returns whether several processes train together."""
  return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
  """Returns whether this process writes the files that all workers of a cluster share."""
  if not is_cluster(strategy):
    return True
  resolver = strategy.cluster_resolver
  first = 'chief' if 'chief' in resolver.cluster_spec().jobs else 'worker'
  return (resolver.task_type, resolver.task_id) == (first, 0)


def any_worker(strategy: tf.distribute.Strategy, value: bool) -> bool:
  """Returns whether `value` is true for any worker of a cluster, once all workers call this."""
  if not is_cluster(strategy):
    return value
  return _sum_of(strategy)(tf.constant(float(value))).numpy() > 0


@functools.lru_cache(maxsize=1)
def _sum_of(strategy: tf.distribute.Strategy) -> Callable[[tf.Tensor], tf.Tensor]:
  """Makes a function that sums a value over all replicas of a cluster."""

  def sum_of(value: tf.Tensor) -> tf.Tensor:
    of_replicas = strategy.run(lambda: value)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, of_replicas, axis=None)

  return tf.function(sum_of)


def num_inputs(strategy: tf.distribute.Strategy) -> int:
  """Returns the number of hosts that read input, each for its own replicas."""
  if is_cluster(strategy):
    jobs = strategy.cluster_resolver.cluster_spec().as_dict()
    return len(jobs.get('chief', ())) + len(jobs.get('worker', ()))
  if isinstance(strategy, tf.distribute.TPUStrategy):
    return strategy.extended.num_hosts
  return 1
