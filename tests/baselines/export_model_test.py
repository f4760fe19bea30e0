"""Tests of baselines.export_model.

An exported model loads without any of our code, and gives the scores of the model.
"""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from baselines import export_model
from baselines import scoring
from baselines.serving import saved_model
from baselines.training import runs
from tests import testing
from tests import user_features
from tpu_graphs import cli
from tpu_graphs import errors
from tpu_graphs.dataset import records
from tpu_graphs.modules import feature_choices
from tpu_graphs.sources import npz

_CHOICES = feature_choices.FeatureChoices(
  layout_padding=-1, extra=(feature_choices.load(f'{user_features.HERE}:degree'),)
)
# A client that cannot import our packages, nor packages that only training needs. Its arguments are
# the paths of the model, the requests and the answers.
_CLIENT = """
import sys

class Forbidden:
  def find_spec(self, name, path=None, target=None):
    package = name.partition('.')[0]
    if package in ('tpu_graphs', 'baselines', 'tensorflow_gnn', 'tensorflow_ranking'):
      raise ImportError('forbidden: ' + name)

sys.meta_path.insert(0, Forbidden())
import numpy as np
import tensorflow as tf

model, requests, answers = sys.argv[1:]
signatures = tf.saved_model.load(model).signatures
request = dict(np.load(requests))
examples = [bytes.fromhex(text) for text in request.pop('examples').tolist()]
examples = signatures['serving_default'](examples=tf.constant(examples))
tensors = signatures['tensors'](**{name: tf.constant(array) for name, array in request.items()})
np.savez(answers, tensors=tensors['scores'], **examples)
"""


@pytest.fixture(scope='session')
def folder(kind, tmp_path_factory):
  """Makes a folder with an exported model.

  The folder holds raw/train/*.npz, data, run with metrics of its valid split, and out, the
  exported model.
  """
  folder = tmp_path_factory.mktemp(f'export_{kind}')
  data = testing.convert_arrays(
    folder,
    kind,
    {
      'train/many': testing.arrays(kind, 5, 70, 1),
      'train/one-π': testing.arrays(kind, 3, 1, 2),
      'train/no-edge': testing.arrays(kind, 1, 3, 3, nc=1),
    },
    choices=_CHOICES,
  )
  run = testing.write_run(str(folder / 'run'), data)
  (folder / 'run' / 'valid').mkdir()
  (folder / 'run' / 'valid' / 'metrics.json').write_text(
    json.dumps(
      {
        'model': {
          'num_modules': 7,
          'opa': 0.8765,
          'top_5_error': None,
          'opa_pooled': 0.5,
          'undefined': {'opa': 3, 'top_5_error': 0},
        }
      }
    ),
    encoding='utf-8',
  )
  export_model.export_model(run=run, out=str(folder / 'out'))
  return folder


@pytest.fixture(scope='session')
def modules(folder, kind):
  """Returns the modules with the features that the run was trained with."""
  return [
    _CHOICES.add_extra(npz.load(path, kind=kind, choices=_CHOICES))
    for path in sorted((folder / 'raw' / 'train').iterdir())
  ]


def test_answers_without_our_code_equal_the_scores_of_the_model(folder, kind, modules, tmp_path):
  loaded = runs.load(str(folder / 'run'))
  scorer = scoring.make_scorer(loaded.model, kind, num_extra=2)
  expected = [scoring.score_module(scorer, module).score for module in modules]
  np.savez(
    tmp_path / 'requests.npz',
    examples=[records.encode_whole(module).hex() for module in modules],
    **saved_model.arrays_of(modules[0]),
  )
  (tmp_path / 'client.py').write_text(_CLIENT, encoding='utf-8')
  done = subprocess.run(
    [sys.executable, '-P', 'client.py', folder / 'out', 'requests.npz', 'answers.npz'],
    cwd=tmp_path,
    check=False,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  # TensorFlow must not warn about gradients, which nobody asks for.
  assert 'gradient' not in done.stderr
  with np.load(tmp_path / 'answers.npz') as answers:
    np.testing.assert_allclose(answers['tensors'], expected[0], rtol=1e-5, atol=1e-5)
    assert answers['num_configs'].tolist() == [70, 3, 1]
    for scores, ids, one in zip(answers['scores'], answers['config_id'], expected, strict=True):
      np.testing.assert_allclose(scores[: one.size], one, rtol=1e-5, atol=1e-5)
      assert (scores[one.size :] == np.inf).all()
      assert ids.tolist() == [*range(one.size), *[-1] * (70 - one.size)]


def test_signatures(folder, kind):
  found = tf.saved_model.load(str(folder / 'out')).signatures
  assert sorted(found) == ['serving_default', 'tensors']
  configs = {'config_feat'} if kind == 'tile' else {'node_config_ids', 'node_config_feat'}
  inputs = {name: set(signature.structured_input_signature[1]) for name, signature in found.items()}
  assert inputs == {
    'serving_default': {'examples'},
    'tensors': {'opcode', 'feat', 'extra_feat', 'edge_index', *configs},
  }
  outputs = {
    name: (spec.shape.rank, spec.dtype)
    for name, spec in found['serving_default'].structured_outputs.items()
  }
  assert outputs == {
    'scores': (2, tf.float32),
    'config_id': (2, tf.int64),
    'num_configs': (1, tf.int64),
  }
  assert {name: spec.shape.rank for name, spec in found['tensors'].structured_outputs.items()} == {
    'scores': 1
  }


def test_files_describe_the_inputs(folder, kind):
  extra = folder / 'out' / 'assets.extra'
  for name, original in (('statistics.json', 'run'), ('schema.pbtxt', 'data')):
    assert (extra / name).read_bytes() == (folder / original / name).read_bytes()
  content = json.loads((extra / 'model.json').read_text(encoding='utf-8'))
  assert content['model']['kind'] == kind
  assert feature_choices.FeatureChoices.from_json(content['feature_choices']) == _CHOICES
  opcodes = (extra / 'opcodes.csv').read_text(encoding='utf-8')
  assert 'convolution' in opcodes
  card = (folder / 'out' / 'README.md').read_text(encoding='utf-8')
  for expected in (
    f'# {content["model"]["name"]} ',
    '| layout padding | -1',
    'degree.operands, degree.consumers é',
    '| valid | 7 | 0.8765 (undefined for 3) |  |',
    '`extra_feat` float32 [N, 2]',
    '## Licence',
  ):
    assert expected in card
  assert 'opa_pooled' not in card


def test_card_of_a_run_on_reduced_graphs_and_its_path(folder):
  loaded = runs.load(str(folder / 'run'))
  config = {
    **loaded.config,
    'data': {
      'path': '/home/me/secret',
      'collection': 'layout:x:y',
      'options': {'keep_hops': 2, 'rest': 'summary'},
    },
    'versions': {'tensorflow': '2.15.1'},
  }
  files = export_model._extra_files(
    runs.Run(loaded.path, config, loaded.options, loaded.choices, loaded.model)
  )
  assert not any('secret' in text for text in files.values())
  for expected in ('layout:x:y', '`keep_hops` 2, `rest` summary', 'tensorflow 2.15.1'):
    assert expected in files['README.md']


def _export(folder, out, *flags):
  return cli.main(['tpu-graphs', 'export-model', f'--run={folder / "run"}', f'--out={out}', *flags])


def _refusal(capsys):
  captured = capsys.readouterr()
  assert captured.out == ''
  assert captured.err.count('\n') == 1
  return captured.err


def test_a_saved_model_is_replaced_only_on_demand(folder, tmp_path, capsys):
  out = tmp_path / 'served' / '1'
  shutil.copytree(folder / 'out', out)
  (out / 'old').write_text('', encoding='utf-8')
  # An interrupted export leaves this folder.
  (tmp_path / 'served' / '1.partial').mkdir()
  assert _export(folder, out) == 1
  assert 'give --overwrite' in _refusal(capsys)
  assert _export(folder, out, '--overwrite') == 0
  assert str(out) in capsys.readouterr().out
  assert not (out / 'old').exists()
  assert [path.name for path in out.parent.iterdir()] == ['1']
  assert (out / 'saved_model.pb').is_file()


@pytest.mark.parametrize('flags', [[], ['--overwrite']])
def test_other_files_are_not_replaced(folder, tmp_path, capsys, flags):
  (tmp_path / 'notes.txt').write_text('mine', encoding='utf-8')
  for out in (tmp_path, tmp_path / 'notes.txt'):
    assert _export(folder, out, *flags) == 1
    assert 'not a SavedModel' in _refusal(capsys)
  assert _export(folder, tmp_path / 'notes.txt' / 'x', *flags) == 1
  assert 'cannot write' in _refusal(capsys)
  assert pathlib.Path(tmp_path / 'notes.txt').read_text(encoding='utf-8') == 'mine'


def test_missing_run_and_damaged_metrics(folder, tmp_path, capsys):
  assert (
    cli.main(['tpu-graphs', 'export-model', f'--run={tmp_path}', f'--out={tmp_path / "out"}']) == 1
  )
  assert 'not a run directory' in _refusal(capsys)
  shutil.copytree(folder / 'run', tmp_path / 'run')
  (tmp_path / 'run' / 'valid' / 'metrics.json').write_text('{', encoding='utf-8')
  with pytest.raises(errors.InputError, match='damaged metrics'):
    export_model.card(runs.load(str(tmp_path / 'run')))
