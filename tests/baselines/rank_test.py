"""Tests of baselines.rank, through the command."""

import csv
import dataclasses
import io
import json
import math
import re

import numpy as np
import pytest

from baselines import evaluate
from baselines import rank
from baselines import scoring
from baselines.serving import ranking as ranking_lib
from baselines.training import runs
from pipelines import convert
from pipelines.conversion import options as options_lib
from tests import testing
from tpu_graphs import cli
from tpu_graphs import hlo
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.hlo import protos
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import features
from tpu_graphs.sources import candidates
from tpu_graphs.sources import npz
from tpu_graphs.sources import readers

# More configs than are scored at a time.
_CONFIGS = 70
_OUTSIDE = 'values outside the range of the training data'
_PROGRAM = testing.GOLDEN / 'modules' / 'convnet_train_unopt.pb'
# This file has three tile modules, two of the same name.
_SEVERAL = testing.GOLDEN / 'corner' / 'tile_sel.pb'
_of_tiles, _of_layouts = (
  pytest.mark.parametrize('kind', [kind], indirect=True) for kind in ('tile', 'layout')
)

pytestmark = pytest.mark.usefixtures('each_run_loaded_once')


@pytest.fixture(scope='session')
def folder(kind, tmp_path_factory):
  """Makes a folder with raw/valid/*.npz, data and run."""
  folder = tmp_path_factory.mktemp(f'rank_{kind}')
  data = testing.convert_arrays(
    folder,
    kind,
    {
      'train/a': testing.arrays(kind, 3, 9, 0),
      'valid/many-π': testing.arrays(kind, 5, _CONFIGS, 1),
      'valid/hidden': testing.arrays(kind, 3, 4, 6, config_runtime=np.zeros(4, np.int64)),
    },
  )
  testing.write_run(str(folder / 'run'), data)
  return folder


def _ranked(folder, name, *args, **options):
  """Returns the ranking as the library gives it."""
  ranker = ranking_lib.Ranker(folder / 'run')
  [(module, program)] = ranker.read(folder / 'raw' / name)
  return ranker.rank(module, *args, program=program, **options)


def _rank(folder, name, *flags):
  return cli.main(
    ['tpu-graphs', 'rank', f'--run={folder / "run"}', f'--input={folder / "raw" / name}', *flags]
  )


def test_csv_holds_every_config_once_fastest_first(folder, capsys):
  assert _rank(folder, 'valid/many-π.npz', '--csv') == 0
  rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
  assert list(rows[0]) == ['module_id', 'rank', 'config_id', 'score', 'runtime_ns']
  assert {row['module_id'] for row in rows} == {'many-π'}
  assert [int(row['rank']) for row in rows] == list(range(1, _CONFIGS + 1))
  assert sorted(int(row['config_id']) for row in rows) == list(range(_CONFIGS))
  scores = [float(row['score']) for row in rows]
  assert scores == sorted(scores)
  assert all(int(row['runtime_ns']) == (int(row['config_id']) + 1) * 1000 for row in rows)


def test_order_is_the_order_of_evaluate(folder, tmp_path, capsys):
  evaluate.evaluate(
    run=str(folder / 'run'), data=str(folder / 'data'), split='valid', out=str(tmp_path)
  )
  with open(tmp_path / runs.RANKINGS_NAME, encoding='utf-8', newline='') as file:
    rankings = {row['module_id']: row['config_ids'].split(';') for row in csv.DictReader(file)}
  assert sorted(rankings) == ['hidden', 'many-π']
  for name, ranking in rankings.items():
    assert _rank(folder, f'valid/{name}.npz', '--csv') == 0
    assert [
      row['config_id'] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))
    ] == ranking


@pytest.mark.parametrize(('top', 'shown'), [(1, 1), (3, 3), (_CONFIGS + 30, _CONFIGS)])
def test_table_shows_the_best(folder, top, shown, capsys):
  assert _rank(folder, 'valid/many-π.npz', '--csv') == 0
  rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
  assert _rank(folder, 'valid/many-π.npz', f'--top={top}') == 0
  title, _, *lines = capsys.readouterr().out.splitlines()
  assert title == f'many-π: best {shown} of {_CONFIGS} configs'
  assert [line.split()[1] for line in lines] == [row['config_id'] for row in rows[:shown]]
  assert lines[0].split()[3] == f'{int(rows[0]["runtime_ns"]):,}'


def test_missing_runtimes_are_stated_not_zero(folder, capsys):
  assert _rank(folder, 'valid/hidden.npz') == 0
  assert capsys.readouterr().out.count('not measured') == 4
  assert _rank(folder, 'valid/hidden.npz', '--csv') == 0
  assert [row['runtime_ns'] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))] == [
    ''
  ] * 4


def _refusal(capsys):
  captured = capsys.readouterr()
  assert captured.out == ''
  assert captured.err.count('\n') == 1
  return captured.err


def test_file_of_the_other_kind_is_one_line(folder, kind, capsys):
  other = 'layout' if kind == 'tile' else 'tile'
  np.savez(folder / 'raw' / 'other.npz', **testing.arrays(other))
  assert _rank(folder, 'other.npz') == 1
  assert f'found a {other} file, expected a {kind} file' in _refusal(capsys)


@pytest.mark.parametrize('data', [b'', b'no zip'])
def test_damaged_file_is_one_line(folder, data, capsys):
  (folder / 'raw' / 'damaged.npz').write_bytes(data)
  assert _rank(folder, 'damaged.npz') == 1
  assert 'damaged.npz' in _refusal(capsys)


def test_missing_file_and_missing_run_are_one_line(folder, tmp_path, capsys):
  assert _rank(folder, 'nothing.npz') == 1
  assert 'nothing.npz' in _refusal(capsys)
  assert cli.main(['tpu-graphs', 'rank', f'--run={tmp_path}', '--input=a.npz']) == 1
  assert 'not a run directory' in _refusal(capsys)


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--top=0'], 'top'),
    (['--show=-1'], 'show'),
    (['--random_configs=0'], 'random_configs'),
    (['--configs=a.npz', '--random_configs=1'], 'only one of'),
    (['--csv', '--show=1'], 'only one of'),
    (['--csv', '--explain'], 'only one of'),
  ],
)
def test_usage_error(folder, capsys, flags, message):
  assert _rank(folder, 'valid/hidden.npz', *flags) == 2
  assert message in _refusal(capsys)


def _csv(capsys):
  return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


@pytest.fixture(scope='session')
def program():
  """Returns the serialized HloModuleProto of a real program."""
  return hlo.read(_PROGRAM.read_bytes(), kind='layout').program(0)


@pytest.fixture(params=['npz', 'HloModuleProto', 'HloProto'])
def own_program(request, folder, kind, program):
  """Returns the path of a file with a program, and the module in it."""
  path = folder / 'raw' / f'own-{request.param}.{"npz" if request.param == "npz" else "pb"}'
  if request.param == 'npz':
    npz.save(npz.load(folder / 'raw' / 'valid' / 'many-π.npz'), path)
  elif request.param == 'HloModuleProto':
    path.write_bytes(program)
  else:
    path.write_bytes(
      protos.HloProto(hlo_module=protos.HloModuleProto.FromString(program)).SerializeToString()
    )
  [module] = readers.from_file(path, kind=kind).modules
  return path, module


def test_configs_of_a_file_are_ranked(folder, kind, own_program, capsys):
  path, module = own_program
  arrays = testing.arrays(kind, c=_CONFIGS, seed=3)
  np.savez(folder / 'configs π.npz', **arrays)
  module = candidates.read(folder / 'configs π.npz', module)
  loaded = runs.load(str(folder / 'run'))
  scored = scoring.score_module(scoring.make_scorer(loaded.model, kind, num_extra=0), module)
  assert _rank(folder, path.name, f'--configs={folder / "configs π.npz"}', '--csv') == 0
  rows = _csv(capsys)
  assert [int(row['config_id']) for row in rows] == scored.order.tolist()
  np.testing.assert_allclose(
    [float(row['score']) for row in rows], np.sort(scored.score), rtol=1e-6
  )
  assert {row['runtime_ns'] for row in rows} == {''}


def test_program_without_configs_names_the_flags_to_give(folder, kind, program, capsys):
  (folder / 'raw' / 'bare.pb').write_bytes(program)
  assert _rank(folder, 'bare.pb') == 1
  message = _refusal(capsys)
  assert 'bare.pb' in message
  assert 'no config to rank' in message
  assert '--configs=FILE.npz' in message
  assert ('--random_configs=N' in message) == (kind == 'layout')


def test_saved_configs_are_in_order_and_can_be_ranked_again(folder, kind, capsys):
  out = folder / 'best.npz'
  assert _rank(folder, 'valid/many-π.npz', '--csv', f'--save_configs={out}') == 0
  rows = _csv(capsys)
  module = npz.load(folder / 'raw' / 'valid' / 'many-π.npz')
  with np.load(out) as saved:
    assert saved['config_id'].tolist() == [int(row['config_id']) for row in rows]
    np.testing.assert_allclose(saved['score'], [float(row['score']) for row in rows], rtol=1e-6)
    name = 'config_feat' if kind == 'tile' else 'node_config_feat'
    np.testing.assert_array_equal(saved[name], getattr(module, name)[saved['config_id']])
  assert _rank(folder, 'valid/many-π.npz', '--csv', f'--configs={out}') == 0
  again = _csv(capsys)
  assert [row['config_id'] for row in again] == [str(i) for i in range(_CONFIGS)]
  np.testing.assert_allclose(
    [float(row['score']) for row in again],
    [float(row['score']) for row in rows],
    rtol=1e-5,
    atol=1e-6,
  )


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--save_configs=best.csv', 'ends in .npz'),
    ('--configs=none.npz', 'none.npz: cannot read'),
    ('--save_configs=none/best.npz', 'none/best.npz: cannot write'),
  ],
)
def test_file_of_configs_that_cannot_be_used_is_one_line(folder, flag, message, capsys):
  assert _rank(folder, 'valid/hidden.npz', flag) == 1
  assert message in _refusal(capsys)


def test_show_describes_the_best_configs(folder, kind, capsys):
  assert _rank(folder, 'valid/many-π.npz', '--top=2') == 0
  table = capsys.readouterr().out
  assert _rank(folder, 'valid/many-π.npz', '--top=2', '--show=1') == 0
  shown = capsys.readouterr().out
  assert shown.startswith(table)
  best = int(table.splitlines()[2].split()[1])
  head, *lines = shown[len(table) :].splitlines()
  assert head == f'config {best}, rank 1:'
  module = npz.load(folder / 'raw' / 'valid' / 'many-π.npz')
  assert [line[2:] for line in lines] == candidates.describe(module, best).splitlines()


def test_default_config_is_marked_wherever_it_is(folder):
  ranking = _ranked(folder, 'valid/many-π.npz')
  for position in (0, 2, _CONFIGS - 1):
    module = ranking.best_first
    default = int(module.config_id[position])
    marked = dataclasses.replace(
      ranking, module=dataclasses.replace(ranking.module, default_config=default)
    )
    lines = rank.describe(marked, top=3).splitlines()[2:]
    assert len(lines) == max(3, min(4, position + 1))
    [line] = [line for line in lines if 'default' in line]
    assert [int(cell) for cell in line.split()[:2]] == [position + 1, module.config_id[position]]
  assert 'default' not in rank.describe(ranking, top=3)


def test_configs_in_any_order_of_their_ids(folder):
  module = npz.load(folder / 'raw' / 'valid' / 'many-π.npz')
  shuffled = module.select_configs(np.random.default_rng(0).permutation(_CONFIGS))
  npz.save(shuffled, folder / 'raw' / 'shuffled.npz')
  expected, ranking = _ranked(folder, 'valid/many-π.npz'), _ranked(folder, 'shuffled.npz')
  for name in ('config_id', 'config_runtime', 'config_feat', 'node_config_feat'):
    np.testing.assert_array_equal(
      getattr(ranking.best_first, name), getattr(expected.best_first, name)
    )


@pytest.fixture
def run(folder):
  return str(folder / 'run')


def _rank_program(run, path, *flags):
  return cli.main(['tpu-graphs', 'rank', f'--run={run}', f'--input={path}', *flags])


@_of_layouts
def test_random_configs(run, program, capsys):
  [module] = hlo.from_bytes(program, kind='layout')
  loaded = runs.load(run)
  rows = {}
  for seed in (0, 7):
    assert (
      _rank_program(run, _PROGRAM, f'--random_configs={_CONFIGS}', f'--seed={seed}', '--csv') == 0
    )
    rows[seed] = _csv(capsys)
    proposed = candidates.random_layouts(program, module, count=_CONFIGS, seed=seed)
    scored = scoring.score_module(
      scoring.make_scorer(loaded.model, 'layout', num_extra=0), proposed
    )
    assert [int(row['config_id']) for row in rows[seed]] == scored.order.tolist()
  assert rows[0] != rows[7]


@_of_layouts
def test_random_configs_as_a_table(run, program, tmp_path, capsys):
  out = tmp_path / 'best.npz'
  assert (
    _rank_program(
      run, _PROGRAM, '--random_configs=40', '--top=2', '--show=1', f'--save_configs={out}'
    )
    == 0
  )
  captured = capsys.readouterr()
  assert captured.err.startswith(f'note: {_OUTSIDE} in 140 of 140 columns of the features of ops: ')
  assert captured.err.count('\n') == 1
  title, _, *lines = captured.out.splitlines()
  assert title.endswith('best 2 of 40 configs')
  [default] = [line for line in lines if line.endswith('default')]
  assert default.split()[1] == '0'
  names = candidates.op_names(program)
  configurable = [
    line.split()[0] for line in lines if re.search(r' (convolution|dot|reshape) ', line)
  ]
  with np.load(out) as saved:
    assert configurable == [names[node] for node in saved['node_config_ids']]
    assert saved['node_config_feat'].shape == (40, len(configurable), 18)


@_of_layouts
def test_fewer_layouts_than_wanted_are_noted(run, tmp_path, capsys):
  message = protos.HloModuleProto(name='tiny')
  instructions = message.computations.add(name='entry', id=1, root_id=3).instructions
  for i, (opcode, operands) in enumerate(
    [('parameter', []), ('parameter', []), ('dot', [1, 2])], start=1
  ):
    instructions.add(
      name=f'{opcode}-π', opcode=opcode, id=i, operand_ids=operands
    ).shape.dimensions.extend([4, 4])
  (tmp_path / 'tiny.pb').write_bytes(message.SerializeToString())
  assert _rank_program(run, tmp_path / 'tiny.pb', '--random_configs=100', '--csv') == 0
  captured = capsys.readouterr()
  assert captured.out.count('\n') == 1 + 8
  first, second = captured.err.splitlines()
  assert first == 'note: the program has only 8 different layouts'
  assert second.startswith(f'note: {_OUTSIDE}')


def test_random_configs_need_hlo_and_layouts(folder, kind, capsys):
  assert _rank(folder, 'valid/hidden.npz', '--random_configs=3') == 1
  assert ('they are layouts' if kind == 'tile' else 'found an npz file') in _refusal(capsys)


def test_program_that_is_ranked_converts_as_well(folder, kind, program, tmp_path):
  (tmp_path / 'own.pb').write_bytes(program)
  convert.convert(
    inputs=[str(tmp_path / 'own.pb')],
    directory=str(tmp_path / 'data'),
    options=options_lib.ConvertOptions(collection=f'{kind}:own'),
  )
  splits = directory_lib.open_directory(str(tmp_path / 'data')).manifest.splits.values()
  assert (sum(split.modules for split in splits), sum(split.configs for split in splits)) == (1, 0)


@_of_layouts
def test_program_is_read_with_the_choices_of_the_run(program, tmp_path, kind, capsys):
  data = testing.convert_arrays(
    tmp_path,
    kind,
    {'train/a': testing.arrays(kind)},
    choices=feature_choices.FeatureChoices(layout_padding=-1),
  )
  run = testing.write_run(str(tmp_path / 'run'), data)
  loaded = runs.load(run)
  assert loaded.choices.layout_padding == -1
  scores = []
  for choices in ({}, {'choices': loaded.choices}):
    [module] = hlo.from_bytes(program, kind=kind, **choices)
    proposed = candidates.random_layouts(program, module, count=5, seed=0)
    scores.append(
      np.sort(
        scoring.score_module(scoring.make_scorer(loaded.model, kind, num_extra=0), proposed).score
      )
    )
  assert not np.allclose(*scores)
  assert _rank_program(run, _PROGRAM, '--random_configs=5', '--csv') == 0
  np.testing.assert_allclose([float(row['score']) for row in _csv(capsys)], scores[1], rtol=1e-5)


@pytest.mark.parametrize('flag', ['--configs=c.npz', '--random_configs=1', '--save_configs=c.npz'])
@_of_tiles
def test_several_modules_have_no_configs_in_common(run, flag, capsys):
  assert _rank_program(run, _SEVERAL, flag) == 1
  assert 'several modules: found 3: ' in _refusal(capsys)


@_of_tiles
def test_one_of_several_modules(run, tmp_path, capsys):
  names = [module.module_id for module in hlo.from_file(_SEVERAL, kind='tile')]
  np.savez(tmp_path / 'c.npz', config_feat=np.ones((2, 24), np.float32))
  for wanted in ('1', names[1]):
    assert (
      _rank_program(run, _SEVERAL, f'--module={wanted}', f'--configs={tmp_path / "c.npz"}', '--csv')
      == 0
    )
    assert {row['module_id'] for row in _csv(capsys)} == {names[1]}
  assert _rank_program(run, _SEVERAL, '--module=2', '--csv') == 0
  assert {row['module_id'] for row in _csv(capsys)} == {names[2]}
  for wanted in ('3', '-1', 'x', ''):
    assert _rank_program(run, _SEVERAL, f'--module={wanted}') == 1
    message = _refusal(capsys)
    assert 'no such module' in message
    assert f'expected 0 to 2, or {names[0]}, ' in message


@_of_tiles
def test_file_whose_modules_are_all_skipped(run, tmp_path, capsys):
  tuning = protos.TuningData()
  tuning.modules.add().module.computations.add().instructions.add(opcode='add', id=1)
  (tmp_path / 'skipped.pb').write_bytes(tuning.SerializeToString())
  assert _rank_program(run, tmp_path / 'skipped.pb') == 1
  assert hlo.SKIPPED_FEW_RUNS in _refusal(capsys)


@pytest.mark.parametrize('suffix', ['json', 'csv'])
def test_configs_as_text(folder, kind, tmp_path, suffix, capsys):
  module = npz.load(folder / 'raw' / 'valid' / 'many-π.npz')
  if kind == 'tile':
    names, values = features.tile_feature_names(), module.config_feat
  else:
    names = [
      f'{node}/{name}'
      for node in module.node_config_ids
      for name in features.layout_feature_names()
    ]
    values = module.node_config_feat
  path = tmp_path / f'c.{suffix}'
  with open(path, 'w', encoding='utf-8') as file:
    if suffix == 'json':
      json.dump(values.tolist(), file)
    else:
      csv.writer(file).writerows([names, *values.reshape(_CONFIGS, -1).tolist()])
  assert _rank(folder, 'valid/many-π.npz', '--csv') == 0
  expected = [(row['config_id'], row['score']) for row in _csv(capsys)]
  assert _rank(folder, 'valid/many-π.npz', '--csv', f'--configs={path}') == 0
  assert [(row['config_id'], row['score']) for row in _csv(capsys)] == expected
  path.write_text('[[1, "x"]]' if suffix == 'json' else 'a,b', encoding='utf-8')
  assert _rank(folder, 'valid/many-π.npz', f'--configs={path}') == 1
  assert str(path) in _refusal(capsys)


def test_explanation_as_a_table(folder, kind, capsys):
  assert _rank(folder, 'valid/many-π.npz', '--top=2') == 0
  table = capsys.readouterr().out
  assert _rank(folder, 'valid/many-π.npz', '--top=2', '--explain', '--show=1') == 0
  shown = capsys.readouterr().out
  assert shown.startswith(table)
  title, head, *lines = shown[len(table) :].splitlines()
  differences = _ranked(folder, 'valid/many-π.npz', explain=10).differences
  assert title.startswith('columns of configs' if kind == 'tile' else 'configurable ops')
  assert head.split() == [
    *(['column'] if kind == 'tile' else ['op', 'opcode']),
    'differ',
    'best',
    'worst',
    'effect',
  ]
  for line, each in zip(lines, differences, strict=False):
    assert line.split()[0] == each.name
    assert f'{each.difference:.0%}' in line
    assert line.endswith(f'{each.effect:+.4f}') != math.isnan(each.effect)
  assert 'effect: ' in lines[len(differences)]
  assert lines[len(differences) + 1].startswith('config ')


@_of_tiles
def test_nothing_to_explain(run, tmp_path, capsys):
  np.savez(tmp_path / 'c.npz', config_feat=np.ones((3, 24), np.float32))
  assert (
    _rank_program(run, _SEVERAL, '--module=0', f'--configs={tmp_path / "c.npz"}', '--explain') == 0
  )
  assert (
    capsys.readouterr().out.splitlines()[-1]
    == 'the best and the worst predicted configs do not differ'
  )


@_of_tiles
def test_notes_on_many_modules_are_few(run, capsys):
  assert _rank_program(run, _SEVERAL, '--csv') == 0
  captured = capsys.readouterr()
  ranker = ranking_lib.Ranker(run)
  expected = [
    f'note: {module.module_id}: {note}'
    for module, program in ranker.read(str(_SEVERAL))
    for note in ranker.rank(module, program=program).notes
  ]
  assert len(expected) > 5
  assert sum(_OUTSIDE in note for note in expected) > 3
  *notes, last = captured.err.splitlines()
  assert notes == expected[:4]
  assert (
    last == f'note: {len(expected) - 4} more notes on other modules; '
    '--module=NAME shows the notes on one module'
  )
