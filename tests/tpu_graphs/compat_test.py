"""Tests of tpu_graphs.compat: accepted versions of TensorFlow and Keras, messages for others."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import types

import pytest
import tensorflow as tf

from tpu_graphs import compat
from tpu_graphs import errors

ROOT = pathlib.Path(__file__).parents[2]
# Imports of libraries that differ between versions of TensorFlow, or must not precede `compat`.
_IMPORT = re.compile(
  r'^ *(?:import|from) (keras|tf_keras|tensorflow_ranking|tensorflow_gnn|tensorflow\.\S+)\b',
  re.MULTILINE,
)
_NEWER = tuple(map(int, tf.__version__.split('.')[:2])) > (2, 15)

newer_only = pytest.mark.skipif(not _NEWER, reason='before TensorFlow 2.16 tf.keras is Keras 2')


def _fake(monkeypatch, version, *, tf_keras=None, legacy=None, keras_version=None):
  """Lets `compat` see another TensorFlow, tf_keras, TF_USE_LEGACY_KERAS and, if 3, Keras."""
  keras = types.SimpleNamespace()
  if keras_version:
    keras.version = lambda: keras_version
  monkeypatch.setattr(compat, 'tf', types.SimpleNamespace(__version__=version, keras=keras))
  monkeypatch.setitem(
    sys.modules, 'tf_keras', tf_keras and types.SimpleNamespace(__version__=tf_keras)
  )
  monkeypatch.setenv('TF_USE_LEGACY_KERAS', legacy or '')


def _python(code, *path):
  env = {name: value for name, value in os.environ.items() if name != 'TF_USE_LEGACY_KERAS'}
  return subprocess.run(
    [sys.executable, '-c', code],
    text=True,
    capture_output=True,
    check=False,
    cwd=ROOT,
    env={**env, 'PYTHONPATH': os.pathsep.join(map(str, (*path, ROOT)))},
  )


@pytest.mark.parametrize(
  ('package', 'allowed'),
  [
    ('tpu_graphs', set()),
    ('pipelines', set()),
    ('tests', set()),
    # `import baselines` imports `compat` first.
    ('baselines', {'tensorflow_gnn', 'tensorflow.core.protobuf'}),
    ('benchmarks', {'tensorflow_gnn'}),
  ],
)
def test_nothing_else_imports_what_depends_on_the_version(package, allowed):
  files = [
    path for path in (ROOT / package).rglob('*.py') if path != ROOT / 'tpu_graphs' / 'compat.py'
  ]
  assert files
  assert {
    (path.relative_to(ROOT).as_posix(), name)
    for path in files
    for name in _IMPORT.findall(path.read_text(encoding='utf-8'))
    if name not in allowed
  } == set()


def test_keras_matches_the_version():
  assert tf.keras.layers.Layer.__module__.partition('.')[0] == ('tf_keras' if _NEWER else 'keras')
  assert (os.environ.get('TF_USE_LEGACY_KERAS') == '1') is _NEWER


@pytest.mark.parametrize(
  ('version', 'tf_keras', 'legacy'),
  [
    ('2.15.0', None, None),
    ('2.15.1', None, '0'),
    ('2.15.1', '2.15.1', 'True'),
    ('2.16.2', '2.16.0', None),
    ('2.20.0-rc0', '2.20.1', '0'),
  ],
)
def test_accepts(monkeypatch, version, tf_keras, legacy):
  _fake(monkeypatch, version, tf_keras=tf_keras, legacy=legacy)
  compat._use_keras_2()
  assert os.environ['TF_USE_LEGACY_KERAS'] == (
    (legacy or '') if version.startswith('2.15') else '1'
  )


@pytest.mark.parametrize(
  ('version', 'faked', 'message'),
  [
    pytest.param(
      '2.14.1', {}, 'not supported: found 2.14.1, expected 2.15 to 2.20; pip install', id='old'
    ),
    pytest.param(
      '2.21.0',
      {'tf_keras': '2.21.0'},
      'TensorFlow is not supported: found 2.21.0, .*docs/newer_tensorflow',
      id='new',
    ),
    pytest.param(
      '2.18.1',
      {},
      r"tf_keras cannot be imported: found .*tf_keras.*; pip install .*'tf_keras==2\.18\.\*'",
      id='no tf_keras',
    ),
    pytest.param(
      '2.15.1',
      {'legacy': '1'},
      r'tf_keras cannot be imported: .*; unset TF_USE_LEGACY_KERAS$',
      id='no tf_keras, asked for',
    ),
    pytest.param('2.2.0', {'tf_keras': '2.20.1'}, 'not supported', id='2.2 is before 2.15'),
    pytest.param(
      '2.20.0',
      {'tf_keras': '2.19.0'},
      r"differs from the version of TensorFlow: found 2\.19\.0, .*'tf_keras==2\.20\.\*'",
      id='another tf_keras',
    ),
    pytest.param(
      '2.17.0',
      {'tf_keras': '2.17.0', 'keras_version': '3.5.0'},
      'Keras 3: found 3.5.0, expected Keras 2; '
      'set TF_USE_LEGACY_KERAS=1, or import tpu_graphs.compat',
      id='Keras 3 in use',
    ),
    pytest.param(
      '2.15.1',
      {'keras_version': '3.5.0'},
      r"Keras 3: found 3.5.0, .*; pip install 'keras==2\.15\.\*'$",
      id='Keras 3 in 2.15',
    ),
  ],
)
def test_refuses(monkeypatch, version, faked, message):
  _fake(monkeypatch, version, **faked)
  with pytest.raises(errors.InputError, match=message) as caught:
    compat._use_keras_2()
  assert '\n' not in str(caught.value)


def test_a_command_says_in_one_line_that_the_version_is_not_supported(tmp_path):
  (tmp_path / 'tensorflow.py').write_text("__version__ = '2.21.0'\n")
  code = (
    'import sys; from tpu_graphs import cli; '
    "sys.exit(cli.main(['tpu-graphs', 'evaluate', '--help']))"
  )
  result = _python(code, tmp_path)
  assert (result.returncode, result.stdout) == (1, '')
  assert re.fullmatch(
    r'error: version of TensorFlow is not supported: found 2\.21\.0, .*\n', result.stderr
  )


def test_modules_without_tensorflow_work_with_any_version(tmp_path):
  (tmp_path / 'tensorflow.py').write_text("__version__ = '2.21.0'\n")
  code = (
    'from tpu_graphs import hlo; from tpu_graphs.dataset import records, schema; '
    "print(len(schema.text('tile')) > 0)"
  )
  result = _python(code, tmp_path)
  assert result.stdout == 'True\n', result.stderr


@newer_only
@pytest.mark.slow
def test_reports_keras_3_in_use():
  result = _python('import tensorflow as tf; tf.keras.layers; from tpu_graphs.input import loading')
  assert result.returncode == 1
  assert re.search(
    r'tf\.keras is Keras 3: found 3\..*, expected Keras 2; set TF_USE_LEGACY_KERAS=1', result.stderr
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  'statement',
  [
    'import baselines',
    'from tpu_graphs.dataset import schema; schema.graph_spec("tile")',
    'import tensorflow; from tpu_graphs.input import loading',
  ],
)
def test_any_first_import_selects_keras_2(statement):
  result = _python(f'{statement}\nimport tensorflow as tf\nprint(tf.keras.layers.Layer.__module__)')
  assert result.stdout.partition('.')[0] == ('tf_keras' if _NEWER else 'keras'), result.stderr


def test_ranking_losses_leave_tf_ranking_itself_alone():
  code = """
import sys
from tpu_graphs import compat
losses = compat.ranking_losses()
assert losses.SoftmaxLoss and compat.ranking_losses() is losses
left = [name for name in ('tensorflow_ranking', 'tensorflow_ranking.python') if name in sys.modules]
assert not left, left
assert 'tensorflow_ranking.python.estimator' not in sys.modules
"""
  if not _NEWER:
    code += """
tfr = __import__('tensorflow_ranking')
assert tfr.keras.losses.SoftmaxLoss is losses.SoftmaxLoss
assert tfr.keras.metrics.NDCGMetric and tfr.data
"""
  result = _python(code)
  assert result.returncode == 0, result.stderr


def test_reports_that_tf_ranking_is_missing(monkeypatch):
  monkeypatch.setattr(compat.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(errors.InputError, match='TF-Ranking is not installed; pip install --no-deps'):
    compat.ranking_losses.__wrapped__()
