"""Tests of a user's own features and of -1 as padding, from the source file to scores.

They convert, train, evaluate and rank.
"""

import csv
import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

from baselines import evaluate
from baselines import models
from baselines import train
from baselines.models import parts
from baselines.serving import ranking
from baselines.training import runs
from tests import testing
from tests import user_features
from tpu_graphs import cli
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.dataset import statistics
from tpu_graphs.input import batching
from tpu_graphs.input import loading
from tpu_graphs.modules import feature_choices
from tpu_graphs.sources import npz

_CHOICES = feature_choices.FeatureChoices(-1, (user_features.degree, user_features.rank))
_SOURCES = {
  'train/a': (3, 9, 0),
  'train/b': (6, 7, 1),
  'train/one': (1, 4, 2),
  'valid/π': (5, 12, 3),
}


@pytest.fixture(scope='session')
def kind():
  """Returns one kind, which is enough: ops and their features are alike in both kinds."""
  return 'layout'


@pytest.fixture(scope='session')
def folder(kind, tmp_path_factory):
  """Makes a folder with the sources, and their dataset directory with extra features."""
  folder = tmp_path_factory.mktemp(f'extra_features_{kind}')
  testing.convert_arrays(
    folder,
    kind,
    {name: testing.arrays(kind, n, c, seed, nc=1) for name, (n, c, seed) in _SOURCES.items()},
    choices=_CHOICES,
  )
  return folder


@pytest.fixture(scope='session')
def published(kind, tmp_path_factory):
  """Converts the same sources in the published form."""
  folder = tmp_path_factory.mktemp(f'published_{kind}')
  return testing.convert_arrays(
    folder,
    kind,
    {name: testing.arrays(kind, n, c, seed, nc=1) for name, (n, c, seed) in _SOURCES.items()},
  )


@pytest.fixture(scope='session')
def run(kind, folder):
  """Trains a model for two epochs with static shapes, as on a TPU; returns the run directory."""
  out = str(folder / 'run')
  train.train(
    data=str(folder / 'data'),
    out=out,
    progress=lambda _: None,
    model=models.ModelOptions(models.DEFAULT_MODEL[kind], kind, parts.PartOptions(4, 1, 3)),
    options=train.TrainOptions(epochs=2, batch_size=2, configs_per_module=4, shapes=1),
  )
  return out


def _expected(folder, module_id):
  """Computes the extra features of a module from its file."""
  [path] = folder.glob(f'raw/*/{module_id}.npz')
  with np.load(path) as arrays:
    n, edges = arrays['node_opcode'].size, arrays['edge_index']
  return [[np.sum(edges[:, 0] == i), np.sum(edges[:, 1] == i), -1] for i in range(n)]


@pytest.mark.parametrize(
  'options', [{}, {'configs_per_module': 5}, {'configs_per_module': 5, 'chunked': True}]
)
def test_every_op_has_its_features(folder, options):
  graphs = list(loading.load(str(folder / 'data'), 'train', **options))
  assert {graph.context['module_id'][0].numpy().decode() for graph in graphs} == {'a', 'b', 'one'}
  for graph in graphs:
    expected = _expected(folder, graph.context['module_id'][0].numpy().decode())
    np.testing.assert_array_equal(graph.node_sets['op']['extra_feat'], expected)


def test_padded_batch_keeps_them(folder):
  options = batching.BatchOptions(batch_size=3, configs_per_module=2, shapes=1)
  [batch] = batching.batches(str(folder / 'data'), 'train', options, epochs=1, with_ids=True)
  found = batch.node_sets['op']['extra_feat'].numpy()
  order = [name.decode() for name in batch.context['module_id'].numpy() if name]
  assert len(order) == 3
  expected = [row for name in order for row in _expected(folder, name)]
  np.testing.assert_array_equal(found[: len(expected)], expected)
  assert found.shape[1] == 3
  assert len(found) > len(expected)
  assert not found[len(expected) :].any()


@pytest.mark.parametrize('name', models.MODELS)
def test_model_looks_at_them(folder, kind, name):
  stats = statistics.parse(
    directory_lib.open_directory(str(folder / 'data')).statistics, num_extra=3
  )
  assert stats['extra_feat'].constant.tolist() == [False, False, True]
  tf.keras.utils.set_random_seed(0)
  model = models.build(models.ModelOptions(name, kind, parts.PartOptions(8, 1, 3)), stats)
  module = npz.load(folder / 'raw/train/b.npz', choices=_CHOICES)

  def scores(change):
    [graph] = loading.of_module(module, configs_per_module=module.num_configs)
    extra_feat = graph.node_sets['op']['extra_feat'] + np.float32(change)
    node_sets = {'op': {**graph.node_sets['op'].features, 'extra_feat': extra_feat}}
    return model(loading.without_strings(graph.replace_features(node_sets=node_sets))).numpy()

  assert np.abs(scores([1, 0, 0]) - scores([0, 0, 0])).max() > 1e-4
  # The third column is constant in the train split.
  np.testing.assert_array_equal(scores([0, 0, 9]), scores([0, 0, 0]))


def test_run_records_the_choices(run):
  with open(f'{run}/{runs.CONFIG_NAME}', encoding='utf-8') as file:
    assert json.load(file)['feature_choices'] == _CHOICES.to_json()
  assert runs.load(run).choices == _CHOICES


def test_evaluation_and_ranking_of_the_source_agree(folder, run, tmp_path):
  evaluate.evaluate(run=run, data=str(folder / 'data'), split='valid', out=str(tmp_path))
  with open(tmp_path / runs.RANKINGS_NAME, encoding='utf-8', newline='') as file:
    [row] = csv.DictReader(file)
  best_first = ranking.rank(run, folder / 'raw/valid/π.npz').best_first
  assert row['config_ids'].split(';') == [str(i) for i in best_first.config_id]


@pytest.fixture
def renamed(run, folder, tmp_path):
  """Copies run and data, with features in a package that does not exist."""
  for source, name in ((run, runs.CONFIG_NAME), (folder / 'data', manifest_lib.FILE_NAME)):
    path = tmp_path / name.removesuffix('.json')
    shutil.copytree(source, path)
    text = (path / name).read_text(encoding='utf-8')
    (path / name).write_text(
      text.replace('tests.user_features', 'no_such_package'), encoding='utf-8'
    )
  return tmp_path


def test_evaluation_imports_no_features_and_ranking_does(renamed, folder, tmp_path):
  run, data = str(renamed / 'config'), str(renamed / 'manifest')
  assert evaluate.evaluate(run=run, data=data, split='valid', out=str(tmp_path / 'out'))['model']
  with pytest.raises(errors.InputError, match=r"cannot be imported.*'no_such_package'"):
    ranking.rank(run, folder / 'raw/valid/π.npz')


def test_features_of_the_same_name_from_another_package_differ(renamed, run, tmp_path):
  with pytest.raises(errors.InputError, match='feature choices differ'):
    evaluate.evaluate(
      run=run, data=str(renamed / 'manifest'), split='valid', out=str(tmp_path / 'out')
    )


def test_data_with_other_choices_is_refused(folder, published, run, tmp_path, capsys):
  out = tmp_path / 'out'
  for one, data in (
    (run, published),
    (testing.write_run(str(tmp_path / 'run'), published), str(folder / 'data')),
  ):
    assert (
      cli.main(['tpu-graphs', 'evaluate', f'--run={one}', f'--data={data}', f'--out={out}']) == 1
    )
    message = capsys.readouterr().err
    assert message.startswith(f'error: {data}: feature choices differ: found layout_padding ')
    for words in (
      'layout_padding 0, extra features none',
      'layout_padding -1',
      'degree (operands, consumers é)',
      'tests.user_features:rank',
      one,
      '--extra_features',
    ):
      assert words in message
    assert message.count('\n') == 1
  assert not out.exists()


def test_data_of_another_padding_is_refused(published, tmp_path):
  other = str(tmp_path / 'other')
  shutil.copytree(published, other)
  path = tmp_path / 'other' / manifest_lib.FILE_NAME
  path.write_text(path.read_text().replace('"layout_padding": 0', '"layout_padding": -1'))
  run = testing.write_run(str(tmp_path / 'run'), published)
  with pytest.raises(errors.InputError, match='feature choices differ'):
    evaluate.evaluate(run=run, data=other, split='valid', out=str(tmp_path / 'out'))


def test_statistics_of_other_data_are_refused(folder, published, tmp_path):
  shutil.copytree(folder / 'data', tmp_path / 'copy')
  shutil.copy(f'{published}/{manifest_lib.STATISTICS_NAME}', tmp_path / 'copy')
  with pytest.raises(errors.InputError, match='damaged statistics') as caught:
    directory_lib.open_directory(tmp_path / 'copy')
  assert caught.value.path == str(tmp_path / 'copy' / manifest_lib.STATISTICS_NAME)
