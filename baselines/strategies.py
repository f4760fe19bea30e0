"""Where to train: TPU, several GPUs, or one device."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from tpu_graphs import errors

STRATEGIES = ('auto', 'tpu', 'mirrored', 'one_device')
_LOCAL_TPUS = ('', 'local')


def make(name: str, *, tpu: str | None, paths: Mapping[str, str]) -> tf.distribute.Strategy:
  """Makes a distribution strategy.

  Args:
    name: 'tpu', 'mirrored' (all GPUs, or the logical CPU devices), 'one_device', or 'auto': TPU if `tpu` is given, else
      mirrored if there are several GPUs, else one device.
    tpu: name or address of a TPU; '' or 'local' for that of a TPU VM.
    paths: flag -> path that the devices' hosts read or write.

  Raises:
    InputError: the strategy does not fit the machine, or a remote TPU could not reach a path. That is told before
      anything is connected to.
  """
  if name == 'auto':
    name = 'tpu' if tpu is not None else 'mirrored' if len(tf.config.list_logical_devices('GPU')) > 1 else 'one_device'
  if name != 'tpu' and tpu is not None:
    raise errors.InputError('TPU given for another strategy', where='--tpu', found=f'--strategy={name}',
                            expected='--strategy=tpu or auto')
  if name == 'tpu':
    return _tpu(tpu or '', paths)
  if name == 'mirrored':
    devices = tf.config.list_logical_devices('GPU') or tf.config.list_logical_devices('CPU')
    return tf.distribute.MirroredStrategy([device.name for device in devices])
  return tf.distribute.OneDeviceStrategy('/gpu:0' if tf.config.list_logical_devices('GPU') else '/cpu:0')


def _tpu(tpu: str, paths: Mapping[str, str]) -> tf.distribute.Strategy:
  if tpu not in _LOCAL_TPUS:
    for flag, path in paths.items():
      if not path.startswith('gs://'):
        raise errors.InputError('local path given to a remote TPU', where=flag, found=path, expected='a path on gs://',
                                fix='copy it there, or use --tpu=local on a TPU VM')
  try:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(tpu=tpu)
  except (ValueError, tf.errors.OpError) as error:
    raise errors.InputError('TPU not found', where='--tpu', found=f'{tpu or "local"} ({" ".join(str(error).split())})',
                            fix='check the name, or choose another --strategy') from error
  return tf.distribute.TPUStrategy(resolver)
