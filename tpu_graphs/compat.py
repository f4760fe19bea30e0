"""TF-GNN and TF-Ranking with TensorFlow 2.15, or 2.16 to 2.20 with legacy Keras.

Since TensorFlow 2.16 `tf.keras` is Keras 3, with which neither library works, unless tf_keras is
installed and the environment variable TF_USE_LEGACY_KERAS is set before `tf.keras` is first used.
Importing this module sets it, so TF-GNN is imported as

  from tpu_graphs.compat import tfgnn

Raises:
  InputError: at the import, if the TensorFlow or Keras that is installed or already in use cannot
    work.
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
  """Makes `tf.keras` Keras 2.

  Raises:
    InputError: the TensorFlow, tf_keras or Keras found cannot work.
  """
  version = tuple(int(part) for part in tf.__version__.split('.')[:2])
  if not _OLDEST <= version <= _NEWEST:
    raise errors.InputError(
      'version of TensorFlow is not supported',
      found=tf.__version__,
      expected='2.15 to 2.20',
      fix="pip install 'tensorflow==2.15.*'; for newer versions see docs/newer_tensorflow.md",
    )
  if version > _OLDEST:
    os.environ[_LEGACY_KERAS] = '1'
  if os.environ.get(_LEGACY_KERAS) in ('1', 'true', 'True'):
    series = '.'.join(map(str, version))
    if version > _OLDEST:
      fix = f"pip install --no-deps 'tf_keras=={series}.*'"
    else:
      fix = f'unset {_LEGACY_KERAS}'
    try:
      import tf_keras
    except ImportError as error:
      raise errors.InputError(
        'tf_keras cannot be imported', found=error, expected=f'{series}.*', fix=fix
      ) from None
    if not tf_keras.__version__.startswith(f'{series}.'):
      raise errors.InputError(
        'version of tf_keras differs from the version of TensorFlow',
        found=tf_keras.__version__,
        expected=f'{series}.*',
        fix=fix,
      )
  if hasattr(tf.keras, 'version'):  # Keras 2 has no such function.
    if version > _OLDEST:
      fix = f'set {_LEGACY_KERAS}=1, or import tpu_graphs.compat before using tf.keras'
    else:
      fix = "pip install 'keras==2.15.*'"
    raise errors.InputError(
      'tf.keras is Keras 3', found=tf.keras.version(), expected='Keras 2', fix=fix
    )


_use_keras_2()
import tensorflow_gnn as tfgnn  # noqa: E402, F401


@functools.cache
def ranking_losses() -> types.ModuleType:
  """Returns `tensorflow_ranking.keras.losses`, imported without the rest of TF-Ranking.

  The packages around it import the estimators, which need `tf.estimator`; TensorFlow 2.16 removed
  it. Empty packages therefore stand in for these packages while the losses are imported.

  Raises:
    InputError: TF-Ranking is not installed.
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
    # A later import of TF-Ranking itself must load the whole library.
    for name in stand_ins:
      del sys.modules[name]
