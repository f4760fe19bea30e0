"""TF-GNN and TF-Ranking with every TensorFlow that is supported: 2.15, and 2.16 to 2.20 with
legacy Keras.

From 2.16 on `tf.keras` is Keras 3, in which neither library works, unless tf_keras is installed
and the environment variable TF_USE_LEGACY_KERAS is set before `tf.keras` is first used.
Importing this module sees to it, so TF-GNN is imported as

  from tpu_graphs.compat import tfgnn

Raises:
  InputError: at the import, if the TensorFlow or Keras that is installed, or already in use,
    cannot work.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import types

import tensorflow as tf

from tpu_graphs import errors

_OLDEST, _NEWEST = (2, 15), (2, 20)
_LEGACY_KERAS = 'TF_USE_LEGACY_KERAS'
_RANKING_PACKAGES = (
  'tensorflow_ranking',
  'tensorflow_ranking.python',
  'tensorflow_ranking.python.keras',
)


def _use_keras_2() -> None:
  version = tuple(int(part) for part in tf.__version__.split('.')[:2])
  if not _OLDEST <= version <= _NEWEST:
    raise errors.InputError(
      'version of TensorFlow is not supported',
      found=tf.__version__,
      expected='2.15 to 2.20',
      fix="pip install 'tensorflow==2.15.*'; newer ones: docs/newer_tensorflow.md",
    )
  if version > _OLDEST:
    os.environ[_LEGACY_KERAS] = '1'
  if os.environ.get(_LEGACY_KERAS) in ('1', 'true', 'True'):
    series = '.'.join(map(str, version))
    fix = (
      f"pip install --no-deps 'tf_keras=={series}.*'"
      if version > _OLDEST
      else f'unset {_LEGACY_KERAS}'
    )
    try:
      import tf_keras
    except ImportError as error:
      raise errors.InputError(
        'tf_keras cannot be imported', found=error, expected=f'{series}.*', fix=fix
      ) from None
    if not tf_keras.__version__.startswith(f'{series}.'):
      raise errors.InputError(
        'version of tf_keras is not that of TensorFlow',
        found=tf_keras.__version__,
        expected=f'{series}.*',
        fix=fix,
      )
  if hasattr(tf.keras, 'version'):  # Keras 2 has no such function.
    raise errors.InputError(
      'tf.keras is Keras 3',
      found=tf.keras.version(),
      expected='Keras 2',
      fix=f'set {_LEGACY_KERAS}=1, or import tpu_graphs.compat before using tf.keras'
      if version > _OLDEST
      else "pip install 'keras==2.15.*'",
    )


_use_keras_2()
import tensorflow_gnn as tfgnn  # noqa: E402, F401


@functools.cache
def ranking_losses() -> types.ModuleType:
  """`tensorflow_ranking.keras.losses`, without the rest of TF-Ranking.

  The packages around it import the estimators, which need `tf.estimator`, gone in TensorFlow 2.16.
  Nothing but empty packages stands in for them while the losses are imported.
  """
  spec = importlib.util.find_spec(_RANKING_PACKAGES[0])
  if spec is None or not spec.submodule_search_locations:
    raise errors.InputError(
      'TF-Ranking is not installed', fix="pip install --no-deps 'tensorflow-ranking==0.5.*'"
    )
  folder = os.path.dirname(spec.submodule_search_locations[0])
  stand_ins = [name for name in _RANKING_PACKAGES if name not in sys.modules]
  for name in stand_ins:
    package = types.ModuleType(name)
    package.__path__ = [os.path.join(folder, *name.split('.'))]
    sys.modules[name] = package
  try:
    return importlib.import_module('tensorflow_ranking.python.keras.losses')
  finally:
    for name in stand_ins:
      del sys.modules[name]  # Whoever imports TF-Ranking itself gets the whole.
