"""Tests of baselines.scoring: every config is scored once, with any records and batches."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from baselines import models
from baselines import scoring
from baselines.models import parts
from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import records
from tpu_graphs.dataset import statistics
from tpu_graphs.metrics import metrics
from tpu_graphs.sources import npz

_PARTS = parts.PartOptions(hidden=4, layers=1, opcode_embedding=3)
_arrays = functools.partial(testing.arrays, nc=1)


@pytest.fixture(scope='session')
def folder(kind, tmp_path_factory):
  return tmp_path_factory.mktemp(f'scoring_{kind}')


@pytest.fixture(scope='session')
def directory(folder, kind):
  """Converts modules with one config, several chunks and records, no runtimes, and failed runs.

  One name has a character outside ASCII.
  """
  failed = np.where(np.arange(10) % 3 == 0, 0, np.arange(10) * 100 + 5000)
  return directory_lib.open_directory(
    testing.convert_arrays(
      folder,
      kind,
      {
        'train/one': _arrays(kind, 1, 1, 1),
        'train/many-π': _arrays(kind, 3, scoring.CHUNK * 2 + 5, 2),
        'train/unmeasured': _arrays(kind, 2, 4, 3, config_runtime=np.zeros(4, np.int64)),
        'train/failed': _arrays(kind, 4, 10, 4, config_runtime=failed),
      },
      records=records.RecordOptions(max_configs=70),
    )
  )


@pytest.fixture(scope='session')
def modules(folder, kind, directory):
  """Loads the modules from the source files, by name."""
  # The conversion of the directory wrote the source files.
  del directory
  paths = sorted((folder / 'raw' / 'train').iterdir())
  loaded = [npz.load(path, kind=kind) for path in paths]
  return {module.module_id: module for module in loaded}


@pytest.fixture(scope='session')
def model(kind, directory):
  tf.keras.utils.set_random_seed(0)
  options = models.ModelOptions(models.DEFAULT_MODEL[kind], kind, _PARTS)
  return models.build(options, statistics.parse(directory.statistics))


@pytest.fixture(scope='session')
def scorer(kind, model):
  return scoring.make_scorer(model, kind)


def test_split_holds_each_module_once_and_whole(directory, modules, scorer):
  assert directory.split('train').records > len(modules)
  scored = list(scoring.score_split(scorer, directory, 'train'))
  assert [module.module_id for module in scored] == sorted(modules, key=str.encode)
  for result in scored:
    module = modules[result.module_id]
    np.testing.assert_array_equal(result.config_id, module.config_id)
    np.testing.assert_array_equal(result.runtime, module.config_runtime)
    np.testing.assert_array_equal(result.relative_runtime, module.relative_runtime)
    assert result.is_measured == module.is_measured
    assert result.score.dtype == np.float32
    alone = scoring.score_module(scorer, module)
    np.testing.assert_allclose(result.score, alone.score, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(result.config_id, alone.config_id)


@pytest.mark.parametrize('ops', [1, 1 << 20])
def test_batch_size_has_no_effect(directory, scorer, monkeypatch, ops):
  expected = list(scoring.score_split(scorer, directory, 'train'))
  monkeypatch.setattr(scoring, '_OPS_PER_BATCH', ops)
  for result, other in zip(scoring.score_split(scorer, directory, 'train'), expected, strict=True):
    np.testing.assert_allclose(result.score, other.score, rtol=1e-4, atol=1e-5)


def test_scorer_is_traced_once(directory, modules, scorer):
  list(scoring.score_split(scorer, directory, 'train'))
  for module in modules.values():
    scoring.score_module(scorer, module)
  assert scorer.function.experimental_get_tracing_count() == 1


def test_static_shapes_give_the_same_scores(kind, directory, model, scorer):
  shapes = set()

  def model_seeing(graph):
    shapes.update(spec.shape for spec in tf.nest.flatten(graph.spec, expand_composites=True))
    return model(graph)

  static = scoring.make_scorer(
    model_seeing, kind, strategy=tf.distribute.OneDeviceStrategy('/cpu:0'), static_shapes=True
  )
  results = list(scoring.score_split(static, directory, 'train'))
  assert static.function.experimental_get_tracing_count() == 1
  assert all(shape.is_fully_defined() for shape in shapes)
  for result, expected in zip(
    results, scoring.score_split(scorer, directory, 'train'), strict=True
  ):
    np.testing.assert_allclose(result.score, expected.score, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(result.config_id, expected.config_id)


def test_module_without_config_is_refused(modules, scorer):
  with pytest.raises(errors.InputError, match='no config to score'):
    scoring.score_module(scorer, modules['failed'].select_configs([]))


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_score_that_is_not_finite_names_the_module(directory, modules, value):
  def model(graph):
    return tf.fill(tf.shape(graph.context['config_id']), np.float32(value))

  scorer = scoring.make_scorer(model, directory.kind)
  with pytest.raises(errors.InputError, match='module failed'):
    list(scoring.score_split(scorer, directory, 'train'))
  with pytest.raises(errors.InputError, match='module one'):
    scoring.score_module(scorer, modules['one'])


def test_missing_split_is_refused(directory, scorer):
  with pytest.raises(errors.InputError, match='split missing'):
    list(scoring.score_split(scorer, directory, 'test'))


def _scored(score, runtime):
  runtime = np.array(runtime)
  return scoring.ScoredModule(
    module_id='m',
    config_id=np.arange(len(score)) * 10,
    runtime=runtime,
    relative_runtime=runtime,
    score=np.array(score, np.float32),
  )


def test_order_is_ascending_and_keeps_ties():
  assert _scored([2, 1, 2, -1, 1], [5] * 5).order.tolist() == [3, 1, 4, 0, 2]


def test_judge_leaves_unmeasured_configs_out():
  judged = scoring.judge(_scored([0, 1, 2, 3], [-1, 10, 30, 20]), (1, 2))
  assert judged == metrics.evaluate_module(
    'm', np.array([10, 30, 20]), np.array([1, 2, 3], np.float32), ks=(1, 2)
  )
  assert judged.num_configs == 3
  assert judged.opa == 2 / 3
  assert not _scored([1, 2], [-1, -1]).is_measured
  assert _scored([1, 2], [-1, 5]).is_measured
