"""Tests of baselines.serving.ranking and `tpu_graphs.rank`.

They cover own programs and configs, refusals, notes and explanations.
"""

import dataclasses
import io
import json
import math
import warnings

import numpy as np
import pytest

from baselines import scoring
from baselines.serving import ranking
from baselines.training import runs
from tests import testing
from tests import user_features
import tpu_graphs
from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import features
from tpu_graphs.modules import reduction
from tpu_graphs.sources import candidates
from tpu_graphs.sources import npz

_PROGRAM = testing.GOLDEN / 'modules' / 'convnet_train_unopt.pb'
# More configs than are scored at a time.
_CONFIGS = 70
_of_layouts = pytest.mark.parametrize('kind', ['layout'], indirect=True)
_of_tiles = pytest.mark.parametrize('kind', ['tile'], indirect=True)


@pytest.fixture(scope='session')
def folder(kind, tmp_path_factory):
  """Makes a folder with raw/train/a.npz, data and run."""
  folder = tmp_path_factory.mktemp(f'ranking_{kind}')
  testing.write_run(
    str(folder / 'run'),
    testing.convert_arrays(folder, kind, {'train/a': testing.arrays(kind, 5, _CONFIGS, 1)}),
  )
  return folder


@pytest.fixture(scope='session')
def ranker(folder):
  return ranking.Ranker(folder / 'run')


@pytest.fixture(scope='session')
def module(folder):
  return npz.load(folder / 'raw' / 'train' / 'a.npz')


def _arrays(module):
  names = ('config_feat',) if module.kind == 'tile' else ('node_config_ids', 'node_config_feat')
  return {name: getattr(module, name) for name in names}


def test_library_call_takes_a_run_by_its_path(folder, module):
  found = tpu_graphs.rank(str(folder / 'run'), folder / 'raw' / 'train' / 'a.npz')
  assert sorted(found.order) == list(range(_CONFIGS))
  assert (np.diff(found.scores[found.order]) >= 0).all()
  assert found.module.module_id == module.module_id
  with pytest.raises(AttributeError, match='no attribute'):
    tpu_graphs.ranks  # noqa: B018


def test_configs_in_every_form_are_the_same(ranker, module, tmp_path):
  expected = ranker.rank(module)
  # The run was trained on this module, so there is nothing to note.
  assert expected.notes == ()
  arrays = _arrays(module)
  np.savez(tmp_path / 'c.npz', **arrays)
  names = (
    features.tile_feature_names()
    if module.kind == 'tile'
    else [
      f'{node}/{name}'
      for node in module.node_config_ids
      for name in features.layout_feature_names()
    ]
  )
  values = next(reversed(arrays.values()))
  rows = values.reshape(_CONFIGS, -1).tolist()
  (tmp_path / 'c.json').write_text(json.dumps(values.tolist()), encoding='utf-8')
  (tmp_path / 'c.csv').write_text(
    '\n'.join(','.join(map(str, row)) for row in [names, *rows]), encoding='utf-8'
  )
  for given in (arrays, values, tmp_path / 'c.npz', str(tmp_path / 'c.json'), tmp_path / 'c.csv'):
    found = tpu_graphs.rank(ranker, module, given)
    np.testing.assert_array_equal(found.scores, expected.scores)
    np.testing.assert_array_equal(found.order, expected.order)
    assert not found.module.is_measured


def test_scores_are_the_scores_of_evaluation(ranker, module):
  scorer = scoring.make_scorer(ranker.run.model, module.kind)
  expected = scoring.score_module(scorer, module).score
  np.testing.assert_allclose(ranker.rank(module).scores, expected, rtol=1e-5, atol=1e-6)


def test_score_that_is_not_a_number(ranker, module):
  broken = ranking.Ranker(ranker.run.path)
  for variable in broken.run.model.trainable_variables:
    variable.assign(np.full(variable.shape, np.nan))
  with pytest.raises(errors.InputError, match='score not finite'):
    broken.rank(module)


def test_scores_that_are_all_the_same_are_noted(ranker, module):
  dead = ranking.Ranker(ranker.run.path)
  for variable in dead.run.model.trainable_variables:
    variable.assign(np.zeros(variable.shape))
  found = dead.rank(module)
  np.testing.assert_array_equal(found.order, np.arange(module.num_configs))
  assert f'all {module.num_configs} configs have the same score' in found.notes[0]
  assert not any('same score' in note for note in ranker.rank(module).notes)
  assert not any('same score' in note for note in dead.rank(module.select_configs([0])).notes)


@_of_layouts
def test_program_in_every_form_is_the_same(ranker):
  program = hlo.read(_PROGRAM.read_bytes(), kind='layout').program(0)
  [module] = hlo.from_bytes(program, kind='layout')
  with pytest.warns(ranking.RankingWarning, match='outside the range'):
    expected = tpu_graphs.rank(ranker, _PROGRAM, 9, seed=3)
  with pytest.warns(ranking.RankingWarning, match='outside the range'):
    found = tpu_graphs.rank(ranker, program, 9, seed=3)
  np.testing.assert_array_equal(found.scores, expected.scores)
  proposed = candidates.random_layouts(program, module, count=9, seed=3)
  with pytest.warns(ranking.RankingWarning, match='outside the range'):
    found = tpu_graphs.rank(ranker, proposed)
  np.testing.assert_array_equal(found.scores, expected.scores)
  with pytest.raises(errors.InputError, match='no HLO to make random configs of'):
    ranker.rank(module, 9)
  with pytest.raises(errors.InputError, match='no config to rank'):
    ranker.rank(module)


@_of_layouts
def test_configs_by_the_names_of_ops(ranker, tmp_path):
  [(module, program)] = ranker.read(_PROGRAM)
  nodes = candidates.configurable_ops(module)
  name = candidates.op_names(program)[nodes[1]]
  (tmp_path / 'c.json').write_text(json.dumps([{name: {'output': [1, 0]}}, {}]), encoding='utf-8')
  found = ranker.rank(module, tmp_path / 'c.json', program=program).module
  assert found.node_config_ids.tolist() == [nodes[1]]
  assert found.node_config_feat[:, 0].tolist() == [[1, 0, *[-1] * 16], [-1] * 18]


def test_module_that_does_not_fit(ranker, module, kind):
  other_kind = 'layout' if kind == 'tile' else 'tile'
  wrong = {
    'padding': dataclasses.replace(module, node_feat=-np.ones_like(module.node_feat)),
    'extra features': dataclasses.replace(module, extra_feat=np.ones((5, 2), np.float32)),
    'no config to rank': module.select_configs(np.arange(0)),
    'other kind': npz.read(io.BytesIO(testing.npz_bytes(testing.arrays(other_kind))), path='m.npz'),
  }
  for message, each in wrong.items():
    with pytest.raises(errors.InputError, match=message):
      tpu_graphs.rank(ranker, each)


@pytest.mark.parametrize('shape', [(2, 17), (24,), (2, 3, 4, 18)])
def test_configs_that_do_not_fit(ranker, module, shape):
  with pytest.raises(errors.InputError, match='wrong shape'):
    ranker.rank(module, np.zeros(shape, np.float32))
  other = 'node_config_feat' if module.kind == 'tile' else 'config_feat'
  with pytest.raises(errors.InputError, match='wrong arrays'):
    ranker.rank(module, {other: np.zeros((2, 24))})


@_of_layouts
def test_wrong_number_of_configurable_ops_and_fractions(ranker, module):
  for nc in (1, 3):
    with pytest.raises(errors.InputError, match=rf'found \[4, {nc}, 18\], expected \[4, 2, 18\]'):
      ranker.rank(module, np.zeros((4, nc, 18), np.int8))
  with pytest.raises(errors.InputError, match='wrong dtype'):
    ranker.rank(module, np.full((4, 2, 18), 0.5))


@_of_tiles
def test_random_configs_are_of_no_use_for_tiles(ranker, module):
  with pytest.raises(errors.InputError, match='they are layouts'):
    ranker.rank(module, 3)


def _notes(caught):
  return [str(each.message) for each in caught if each.category is ranking.RankingWarning]


def test_values_that_training_has_not_seen_are_named(ranker, module):
  feat = module.node_feat.copy()
  columns = [features.node_feature_names().index(f'shape_dimensions_{i}') for i in (2, 4)]
  feat[1, columns] = 3.5, 512.0
  low, high = (bound(module.node_feat[:, columns[1]]) for bound in (np.min, np.max))
  configs = {name: array.copy() for name, array in _arrays(module).items()}
  name, values = configs.popitem()
  values[3, ..., 7] = 77
  # Such values are noted and not refused.
  with pytest.warns(ranking.RankingWarning) as caught:
    tpu_graphs.rank(ranker, dataclasses.replace(module, node_feat=feat), {**configs, name: values})
  of_ops, of_configs = _notes(caught)
  assert of_ops.startswith(
    'values outside the range of the training data in 2 of 140 columns of the features of ops: '
    f'shape_dimensions_4 512 ({low:g} to {high:g}), shape_dimensions_2 3.5 ('
  )
  column = (
    features.tile_feature_names() if module.kind == 'tile' else features.layout_feature_names()
  )[7]
  assert f'of the configs: {column} 77 (' in of_configs


def test_extra_features_beyond_the_range_are_named(kind, tmp_path):
  choices = feature_choices.FeatureChoices(
    extra=(feature_choices.load(f'{user_features.HERE}:degree'),)
  )
  run = testing.write_run(
    str(tmp_path / 'run'),
    testing.convert_arrays(tmp_path, kind, {'train/a': testing.arrays(kind, 3)}, choices=choices),
  )
  edges = np.array([[1, 0], [2, 0], [2, 0]])
  np.savez(tmp_path / 'b.npz', **testing.arrays(kind, 3, edge_index=edges))
  with pytest.warns(ranking.RankingWarning) as caught:
    tpu_graphs.rank(run, tmp_path / 'b.npz')
  # An op is the consumer (column 0 of edges) of two others, and the operand of three. The run was
  # trained on chains.
  assert _notes(caught) == [
    'values outside the range of the training data in 2 of 2 columns of the extra features: '
    'degree.consumers é 3 (0 to 1), degree.operands 2 (0 to 1)'
  ]


@_of_layouts
@pytest.mark.parametrize('rest', reduction.RESTS)
def test_graphs_are_reduced_as_the_training_data_was(folder, ranker, rest):
  data = testing.npz_bytes(testing.layout_arrays(12, 4, seed=5, node_config_ids=np.array([3, 4])))
  module = npz.read(io.BytesIO(data), path='m.npz')
  config = {**ranker.run.config, 'data': {'options': {'keep_hops': 1, 'rest': rest}}}
  reducing = ranking.Ranker(folder / 'run')
  reducing.run = dataclasses.replace(ranker.run, config=config)
  reduced = reduction.keep_hops(module, 1, rest=rest)
  assert reduced.num_ops < module.num_ops
  expected = ranker.rank(reduced).scores
  # A second reduction changes nothing.
  for given in (module, reduced):
    found = reducing.rank(given)
    np.testing.assert_allclose(found.scores, expected, rtol=1e-5, atol=1e-6)
    assert found.module is given
  assert not np.allclose(ranker.rank(module).scores, expected)


@pytest.mark.parametrize('configs', [1, 2, 9, 40])
def test_explanation_names_what_differs(ranker, module, configs):
  chosen = module.select_configs(np.arange(configs))
  found = ranker.rank(chosen, explain=3)
  if configs == 1:
    assert found.differences == ()
    return
  share = max(configs // 10, 1)
  best, worst = found.order[:share], found.order[-share:]
  differences = [each.difference for each in found.differences]
  assert differences == sorted(differences, reverse=True)
  assert len(differences) == (3 if module.kind == 'tile' else 2)
  for each in found.differences:
    if module.kind == 'tile':
      column = features.tile_feature_names().index(each.name)
      one, other = (chosen.config_feat[rows, column] for rows in (best, worst))
      naive = max(abs((one <= x).mean() - (other <= x).mean()) for x in (*one, *other))
      assert math.isnan(each.effect) == each.name.endswith(('sum', 'product'))
    else:
      op = chosen.node_config_ids.tolist().index(int(each.name))
      one, other = (
        [tuple(row) for row in chosen.node_config_feat[rows, op]] for rows in (best, worst)
      )
      naive = sum(abs(one.count(x) - other.count(x)) for x in {*one, *other}) / 2 / share
      assert each.opcode == features.opcode_names()[chosen.node_opcode[int(each.name)]]
      changed = chosen.node_config_feat[found.order[:1]].copy()
      changed[0, op] = each.worst
      rescored = ranker.rank(
        chosen, {'node_config_ids': chosen.node_config_ids, 'node_config_feat': changed}
      )
      assert each.effect == pytest.approx(rescored.scores[0] - found.scores.min(), abs=1e-5)
    assert each.difference == pytest.approx(naive)


@_of_tiles
def test_effect_of_a_bound_includes_its_sum_and_product(ranker, module):
  feat = np.zeros((2, 24), np.float32)
  feat[:, 8:16] = [[4, 2, 0, 0, 0, 0, 6, 8], [4, 3, 0, 0, 0, 0, 7, 12]]
  found = ranker.rank(module, feat, explain=24)
  assert [each.name for each in found.differences] == [
    'output_bounds_1',
    'output_bounds_sum',
    'output_bounds_product',
  ]
  assert found.differences[0].effect == pytest.approx(
    found.scores.max() - found.scores.min(), abs=1e-5
  )


@_of_layouts
def test_ops_that_are_alike_are_named_once(ranker, module):
  feat = np.repeat(np.random.default_rng(0).integers(-1, 5, (20, 1, 18)), 2, axis=1).astype(np.int8)
  [difference] = ranker.rank(module, feat, explain=5).differences
  assert difference.alike == 1
  equal = np.repeat(feat[:1], 3, axis=0)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    assert ranker.rank(module, equal, explain=5).differences == ()


def test_run_of_an_earlier_version_has_no_record_of_its_data(ranker, module):
  bare = runs.Run(ranker.run.path, {}, ranker.run.options, ranker.run.choices, ranker.run.model)
  older = ranking.Ranker(ranker.run.path)
  older.run = bare
  np.testing.assert_array_equal(older.rank(module).order, ranker.rank(module).order)
