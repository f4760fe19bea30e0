"""Tests of baselines.evaluate: its numbers against numbers computed from source files."""

import csv
import itertools
import json
import pathlib
import shutil

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import scipy.stats

from baselines import evaluate
from baselines import scoring
from baselines.evaluation import evaluation
from baselines.evaluation import report
from baselines.training import runs
from tests import testing
from tpu_graphs import cli
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import records
from tpu_graphs.metrics import intervals
from tpu_graphs.metrics import module_table

_KS = {'tile': (1, 5, 10), 'layout': (1, 10, 100)}
pytestmark = pytest.mark.usefixtures('each_run_loaded_once', 'each_pipeline_made_once')
# Tests of features that both kinds share run for one kind, since each evaluation takes seconds.
tile_alone = pytest.mark.parametrize('kind', ['tile'], indirect=True, scope='session')


def _arrays(kind, n, c, seed, **over):
  over = {'config_runtime': np.random.default_rng(seed).integers(1000, 3000, c), **over}
  return testing.arrays(kind, n=n, c=c, seed=seed, nc=1, **over)


@pytest.fixture(scope='session')
def sources(kind):
  zeros = np.zeros(4, np.int64)
  return {
    'train/a': _arrays(kind, 3, 9, 0),
    'valid/split-over-records': _arrays(kind, 3, 130, 1),
    'valid/short-π': _arrays(kind, 2, 4, 2),
    'valid/one': _arrays(kind, 1, 1, 3),
    'valid/ties': _arrays(kind, 2, 5, 4, config_runtime=np.full(5, 7000)),
    'valid/unmeasured': _arrays(kind, 2, 4, 5, config_runtime=zeros),
    'test/hidden': _arrays(kind, 3, 4, 6, config_runtime=zeros),
  }


@pytest.fixture(scope='session')
def data(kind, sources, tmp_path_factory):
  return testing.convert_arrays(
    tmp_path_factory.mktemp(f'evaluate_{kind}'),
    kind,
    sources,
    records=records.RecordOptions(max_configs=50),
    num_shards=3,
  )


@pytest.fixture(scope='session')
def run(kind, data, tmp_path_factory):
  """Writes the run directory of an untrained model."""
  return testing.write_run(str(tmp_path_factory.mktemp(f'evaluate_run_{kind}') / 'run'), data)


@pytest.fixture(scope='session')
def other_run(data, tmp_path_factory):
  """Writes the run directory of the same model with other weights."""
  return testing.write_run(str(tmp_path_factory.mktemp('evaluate_other') / 'other'), data, seed=1)


@pytest.fixture(scope='session')
def valid(data, run, tmp_path_factory):
  """Evaluates the valid split; returns the folder with the result."""
  out = tmp_path_factory.mktemp('evaluate_out')
  evaluate.evaluate(run=run, data=data, split='valid', out=str(out))
  return out


def _rows(path):
  with open(path, encoding='utf-8', newline='') as file:
    return list(csv.DictReader(file))


def _metrics(folder):
  return json.loads((pathlib.Path(folder) / runs.METRICS_NAME).read_text())


def _rankings(folder):
  return {
    row['module_id']: [int(i) for i in row['config_ids'].split(';')]
    for row in _rows(folder / runs.RANKINGS_NAME)
  }


def _metrics_by_hand(kind, ranking, arrays):
  """Computes OPA, Kendall tau and top-k errors of a ranking of distinct scores."""
  runtime = arrays['config_runtime'] / arrays.get('config_runtime_normalizers', 1)
  ranked = runtime[ranking]
  if np.unique(runtime).size < 2:
    return {}
  pairs = [a < b for a, b in itertools.combinations(ranked, 2) if a != b]
  return {
    'opa': np.mean(pairs),
    'kendall_tau': scipy.stats.kendalltau(ranked, np.arange(ranked.size)).statistic,
    **{f'top_{k}_error': ranked[:k].min() / runtime.min() - 1 for k in _KS[kind]},
  }


def test_rankings_hold_every_config_of_every_module_once(valid, sources):
  rankings = _rankings(valid)
  names = [name.removeprefix('valid/') for name in sources if name.startswith('valid/')]
  assert sorted(rankings) == sorted(names)
  for name, ranking in rankings.items():
    assert sorted(ranking) == list(range(sources[f'valid/{name}']['config_runtime'].size))


def test_metrics_equal_metrics_computed_by_hand(kind, valid, sources):
  result = json.loads((valid / runs.METRICS_NAME).read_text())
  per_module = {row['module_id']: row for row in _rows(valid / runs.PER_MODULE_NAME)}
  expected = {
    name: _metrics_by_hand(kind, ranking, sources[f'valid/{name}'])
    for name, ranking in _rankings(valid).items()
    if name != 'unmeasured'
  }
  assert per_module.keys() == expected.keys()
  for name, row in per_module.items():
    for metric, value in expected[name].items():
      assert float(row[metric]) == pytest.approx(value, abs=1e-9), (name, metric)
  defined = [values for values in expected.values() if values]
  assert len(defined) == 2
  for metric in defined[0]:
    assert result['model'][metric] == pytest.approx(
      np.mean([values[metric] for values in defined]), abs=1e-9
    )
    assert result['model']['undefined'][metric] == 2
  assert (result['model']['num_modules'], result['model']['num_configs']) == (4, 130 + 4 + 1 + 5)
  assert result['unmeasured_modules'] == 1


def test_random_ranking_stands_beside(kind, valid):
  result = json.loads((valid / runs.METRICS_NAME).read_text())
  model, random = result['model'], result['random']
  assert model.keys() == random.keys()
  assert random['num_modules'] == model['num_modules']
  assert random['opa'] == pytest.approx(0.5, abs=0.15)
  assert random['kendall_tau'] == pytest.approx(0, abs=0.25)
  errors_of_random = [random[f'top_{k}_error'] for k in _KS[kind]]
  assert errors_of_random == sorted(errors_of_random, reverse=True)
  assert errors_of_random[0] > 0


def test_split_without_runtimes_is_ranked_not_judged(data, run, tmp_path):
  results, _, _ = evaluate.evaluate_all(runs=[run], data=data, splits=['test'], out=str(tmp_path))
  result = results[0].metrics
  assert result['model'] is result['random'] is None
  assert result['unmeasured_modules'] == 1
  assert json.loads((tmp_path / runs.METRICS_NAME).read_text()) == result
  assert _rows(tmp_path / runs.PER_MODULE_NAME) == []
  assert sorted(_rankings(tmp_path)['hidden']) == [0, 1, 2, 3]
  assert 'ranked, not judged' in evaluate.describe(results)
  assert '0.0' not in evaluate.describe(results)


def test_second_evaluation_replaces_the_first(data, run, valid, tmp_path):
  shutil.copytree(valid, tmp_path / 'out')
  evaluate.evaluate(run=run, data=data, split='train', out=str(tmp_path / 'out'))
  assert list(_rankings(tmp_path / 'out')) == ['a']
  assert json.loads((tmp_path / 'out' / runs.METRICS_NAME).read_text())['split'] == 'train'
  names = (
    runs.METRICS_NAME,
    runs.PER_MODULE_NAME,
    runs.RANKINGS_NAME,
    'report.html',
    'report.json',
  )
  assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == sorted(names)


def test_other_kind_is_refused(kind, run, tmp_path):
  other = 'layout' if kind == 'tile' else 'tile'
  data = testing.convert_arrays(tmp_path, other, {'valid/a': _arrays(other, 2, 3, 0)})
  with pytest.raises(
    errors.InputError, match=f'run of the other kind: found {kind}, expected {other}'
  ):
    evaluate.evaluate(run=run, data=data, split='valid', out=str(tmp_path / 'out'))
  assert not (tmp_path / 'out').exists()


def test_command_prints_a_table_and_writes_below_the_run(data, run, valid, tmp_path, capsys):
  copy = str(shutil.copytree(run, tmp_path / 'run'))
  assert cli.main(['tpu-graphs', 'evaluate', f'--run={copy}', f'--data={data}']) == 0
  out = capsys.readouterr().out
  result = json.loads((valid / runs.METRICS_NAME).read_text())
  assert f'{result["model"]["opa"]:.4f}' in out
  assert f'undefined for 2 of {result["model"]["num_modules"]} modules' in out
  for name in (runs.PER_MODULE_NAME, runs.RANKINGS_NAME):
    assert (tmp_path / 'run' / 'valid' / name).read_bytes() == (valid / name).read_bytes()


def test_missing_split_is_one_line(run, tmp_path, kind, capsys):
  data = testing.convert_arrays(tmp_path, kind, {'train/a': _arrays(kind, 2, 3, 0)})
  assert cli.main(['tpu-graphs', 'evaluate', f'--run={run}', f'--data={data}']) == 1
  captured = capsys.readouterr()
  assert captured.out == ''
  assert captured.err.count('\n') == 1
  assert 'split missing' in captured.err


@pytest.mark.parametrize('place', ['', 'valid', 'deep/er'])
def test_result_in_the_data_is_refused(data, run, place):
  with pytest.raises(errors.InputError, match='result cannot lie in the data'):
    evaluate.evaluate(run=run, data=data, split='valid', out=f'{data}/{place}')
  # The data must still be whole.
  directory_lib.open_directory(data)


def test_place_that_cannot_be_written_is_refused(data, run, tmp_path):
  (tmp_path / 'file').write_text('x')
  with pytest.raises(errors.InputError, match='cannot write'):
    evaluate.evaluate(run=run, data=data, split='valid', out=str(tmp_path / 'file' / 'below'))


# Simple rankings.


@given(runtimes=st.lists(st.integers(1, 5), min_size=1, max_size=6), k=st.integers(1, 8))
def test_random_ranking_is_the_mean_over_all_orders(runtimes, k):
  found = evaluation.random_top_k_errors(np.array(runtimes), [k])[k]
  if len(set(runtimes)) == 1:
    assert np.isnan(found)
    return
  best = min(runtimes)
  expected = np.mean([min(order[:k]) / best - 1 for order in itertools.permutations(runtimes)])
  assert found == pytest.approx(expected, abs=1e-12)


def test_random_ranking_of_many_configs():
  runtimes = np.random.default_rng(0).integers(10**9, 2 * 10**9, 100_000)
  found = evaluation.random_top_k_errors(runtimes, evaluation.CURVE_KS)
  assert found[1] == pytest.approx((runtimes.mean() - runtimes.min()) / runtimes.min())
  assert list(found.values()) == sorted(found.values(), reverse=True)
  assert found[1000] > 0


def test_default_and_oracle_stand_beside(kind, valid, sources):
  result = _metrics(valid)
  if kind == 'tile':
    names = ('valid/split-over-records', 'valid/short-π')
    relative = [
      sources[name]['config_runtime'] / sources[name]['config_runtime_normalizers']
      for name in names
    ]
    expected = pytest.approx(np.mean([1 / values.min() - 1 for values in relative]))
  else:
    expected = None
  for k in _KS[kind]:
    assert result['default'][f'top_{k}_error'] == expected
    assert result['oracle'][f'top_{k}_error'] == 0
  assert result['default']['opa'] is None
  assert (
    result['oracle']['opa'],
    result['oracle']['kendall_tau'],
    result['oracle']['opa_pooled'],
  ) == (1, 1, 1)
  assert result['random']['opa'] == result['random']['opa_pooled'] == 0.5
  assert result['random']['kendall_tau'] == 0


def test_normalizers_of_one_give_no_default():
  module = scoring.ScoredModule(
    'm',
    np.arange(3),
    np.array([5, 7, 9]),
    np.array([5.0, 7.0, 9.0]),
    np.array([1, 2, 3], np.float32),
  )
  assert np.isnan(evaluation.judge(module, 'tile').verdicts['all'].default)


def test_intervals_stand_beside(valid):
  result = _metrics(valid)
  table = module_table.parse((valid / runs.PER_MODULE_NAME).read_text(), path='p')
  for name, expected in intervals.of_table(table).items():
    assert result['intervals'][name]['mean'] == pytest.approx(result['model'][name])
    assert (result['intervals'][name]['low'], result['intervals'][name]['undefined']) == (
      expected.low,
      expected.undefined,
    )


# Kept configs.


def test_kept_configs_hold_the_ends_and_the_fastest():
  rng = np.random.default_rng(0)
  c = 10_000
  runtime = rng.integers(1000, 2000, c)
  runtime[6789] = 500
  module = scoring.ScoredModule(
    'm', np.arange(c), runtime, runtime, rng.permutation(c).astype(np.float32)
  )
  kept = evaluation.judge(module, 'layout')
  assert evaluation.MAX_POINTS <= kept.score.size <= evaluation.MAX_POINTS + 1
  assert (np.diff(kept.score) > 0).all()
  assert (kept.score[0], kept.score[-1]) == (module.score.min(), module.score.max())
  assert kept.score[np.argmin(kept.slowdown)] == module.score[6789]
  assert kept.slowdown.min() == 1
  np.testing.assert_array_equal(
    np.rint(kept.slowdown * 500), [runtime[module.score == score][0] for score in kept.score]
  )


@pytest.fixture
def many_tasks(monkeypatch):
  """Makes each shard a task of its own, as large shards are."""
  monkeypatch.setattr(evaluation, 'TASK_BYTES', 1)


@tile_alone
def test_tasks_share_out_the_shards(data, monkeypatch):
  directory = directory_lib.open_directory(data)
  shards = directory.split('valid').shards
  assert len(shards) == 3
  for size, expected in ((1, [1, 1, 1]), (shards[0].bytes + 1, [2, 1]), (1 << 30, [3])):
    monkeypatch.setattr(evaluation, 'TASK_BYTES', size)
    found = [task.split('valid').shards for task in evaluation.tasks(directory, 'valid')]
    assert [len(one) for one in found] == expected
    assert sum(found, ()) == shards


def test_tasks_are_merged(data, run, kind, many_tasks):
  directory = directory_lib.open_directory(data)
  loaded = runs.load(run)
  scorer = scoring.make_scorer(loaded.model, kind)
  whole = {module.module_id: module for module in scoring.score_split(scorer, directory, 'valid')}
  parts = list(evaluation.score_modules(scorer, directory, 'valid'))
  assert [module.module_id for module in parts] == sorted(whole)
  for module in parts:
    expected = whole[module.module_id]
    for name in ('config_id', 'runtime', 'relative_runtime'):
      np.testing.assert_array_equal(getattr(module, name), getattr(expected, name))
    np.testing.assert_allclose(module.score, expected.score, rtol=1e-5, atol=1e-6)


# Listed configs.


@pytest.fixture
def indices(tmp_path):
  path = tmp_path / 'indices.json'
  path.write_text(
    json.dumps({'split-over-records': [129, 0, 77, 77, 3, 100, 0], 'unmeasured': [1]})
  )
  return str(path)


def test_listed_configs_are_judged_beside_all(
  kind, data, run, valid, sources, indices, tmp_path, capsys
):
  command = [
    'tpu-graphs',
    'evaluate',
    f'--run={run}',
    f'--data={data}',
    f'--out={tmp_path / "out"}',
    f'--config_indices={indices}',
  ]
  assert cli.main(command) == 0
  assert '2 modules, 8 configs, 2 of them repeated' in capsys.readouterr().out
  result = _metrics(tmp_path / 'out')
  listed = result['listed']
  assert (listed['modules'], listed['positions'], listed['repeated_positions']) == (2, 8, 2)
  assert (listed['model']['num_modules'], listed['model']['num_configs']) == (1, 7)
  arrays = sources['valid/split-over-records']
  ranking = _rankings(valid)['split-over-records']
  chosen = sorted([129, 0, 77, 77, 3, 100, 0], key=ranking.index)
  relative = arrays['config_runtime'] / arrays.get('config_runtime_normalizers', 1)
  place = [ranking.index(i) for i in chosen]
  pairs = [
    (a, b)
    for a, b in itertools.combinations(range(7), 2)
    if relative[chosen[a]] != relative[chosen[b]]
  ]
  right = [
    (relative[chosen[a]] < relative[chosen[b]]) == (place[a] < place[b]) and place[a] != place[b]
    for a, b in pairs
  ]
  assert listed['model']['opa'] == pytest.approx(np.mean(right))
  assert listed['model']['kendall_tau'] == pytest.approx(
    scipy.stats.kendalltau(relative[chosen], place).statistic
  )
  (row,) = _rows(tmp_path / 'out' / runs.LISTED_NAME)
  assert (row['module_id'], row['num_configs']) == ('split-over-records', '7')
  for name in ('model', 'random', 'default', 'oracle'):
    assert result[name] == _metrics(valid)[name]


@tile_alone
@pytest.mark.parametrize(
  ('content', 'message'),
  [
    ({'nobody': [0]}, 'unknown module: found nobody'),
    ({'short-π': [4]}, 'short-π: no such config: found 4'),
  ],
)
def test_wrong_list_is_one_line_and_leaves_the_old_result(
  content, message, data, run, valid, tmp_path, capsys
):
  shutil.copytree(valid, tmp_path / 'out')
  (tmp_path / 'wrong.json').write_text(json.dumps(content))
  assert (
    cli.main(
      [
        'tpu-graphs',
        'evaluate',
        f'--run={run}',
        f'--data={data}',
        f'--out={tmp_path / "out"}',
        f'--config_indices={tmp_path / "wrong.json"}',
      ]
    )
    == 1
  )
  captured = capsys.readouterr()
  assert captured.err.count('\n') == 1
  assert 'wrong.json: ' in captured.err
  assert message in captured.err
  assert _tree(tmp_path / 'out') == _tree(valid)


def _tree(folder):
  return {
    str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()
  }


# Several runs and splits.


@tile_alone
def test_several_runs_and_splits(data, run, other_run, valid, tmp_path, capsys):
  out = tmp_path / 'out'
  assert (
    cli.main(
      [
        'tpu-graphs',
        'evaluate',
        f'--run={run},{other_run}',
        f'--data={data}',
        '--split=valid,test',
        f'--out={out}',
      ]
    )
    == 0
  )
  printed = capsys.readouterr().out
  assert sorted(_tree(out)) == sorted(
    [
      'report.html',
      'report.json',
      *(
        f'{label}/{split}/{name}'
        for label in ('run', 'other')
        for split in ('valid', 'test')
        for name in (runs.METRICS_NAME, runs.PER_MODULE_NAME, runs.RANKINGS_NAME)
      ),
    ]
  )
  assert (out / 'run/valid' / runs.RANKINGS_NAME).read_bytes() == (
    valid / runs.RANKINGS_NAME
  ).read_bytes()
  content = json.loads((out / 'report.json').read_text())
  assert [one['label'] for one in content['runs']] == ['run', 'other']
  assert [
    (one['split'], one['label'], one['base'], one['modules']) for one in content['comparisons']
  ] == [('valid', 'other', 'run', 4)]
  tables = [
    module_table.parse((out / label / 'valid' / runs.PER_MODULE_NAME).read_text(), path='p')
    for label in ('other', 'run')
  ]
  expected = intervals.compare(*tables).metrics['opa']
  row = content['comparisons'][0]['rows'][0]
  assert (row['metric'], row['better'], row['worse'], row['equal']) == (
    'opa',
    expected.wins,
    expected.losses,
    expected.ties,
  )
  assert row['mean'] == pytest.approx(expected.difference.mean)
  assert 'other against run, valid: 4 modules' in printed
  assert 'other against run, test' not in printed
  assert printed.endswith(f'wrote {out}/report.html\n')


@tile_alone
def test_one_report_may_lie_elsewhere(data, run, tmp_path):
  copy = shutil.copytree(run, tmp_path / 'run')
  evaluate.evaluate_all(
    runs=[str(copy)], data=data, splits=['train', 'test'], report=str(tmp_path / 'r' / 'x.html')
  )
  assert sorted(path.name for path in (tmp_path / 'r').iterdir()) == ['x.html', 'x.json']
  names = sorted([runs.METRICS_NAME, runs.PER_MODULE_NAME, runs.RANKINGS_NAME])
  for split in ('train', 'test'):
    assert sorted(path.name for path in (copy / split).iterdir()) == names


@pytest.mark.parametrize(
  ('paths', 'expected'),
  [(['runs/a'], ['a']), (['runs/a/', 'b'], ['a', 'b']), (['a/run', 'b/run/'], ['a_run', 'b_run'])],
)
def test_runs_have_different_labels(paths, expected):
  assert [evaluate._labels(paths)[path] for path in paths] == expected


@tile_alone
@pytest.mark.parametrize(
  ('flags', 'code', 'message'),
  [
    (['--split=valid,nope'], 2, 'must be of train, valid, test'),
    (['--split='], 2, 'must be of train, valid, test'),
    (['--split=valid,valid'], 1, '--split: given twice'),
    (['--run={run}/'], 1, '--run: given twice'),
    (['--run={run},'], 1, '--run: empty name'),
    (['--report=report.json'], 1, 'expected FILE.html'),
    (['--out='], 1, '--out: result cannot lie in the data'),
  ],
)
def test_wrong_flags_are_one_line(flags, code, message, data, run, capsys):
  flags = [flag.format(run=run) for flag in flags]
  assert cli.main(['tpu-graphs', 'evaluate', f'--run={run}', f'--data={data}', *flags]) == code
  captured = capsys.readouterr()
  assert captured.err.count('\n') == 1
  assert message in captured.err


# With a pipeline.


@tile_alone
def test_pipeline_gives_the_same(data, run, other_run, indices, many_tasks, tmp_path):
  trees = []
  for beam_args in ([], ['--runner=FnApiRunner']):
    out = tmp_path / f'out{len(trees)}'
    evaluate.evaluate_all(
      runs=[run, other_run],
      data=data,
      splits=['valid'],
      out=str(out),
      config_indices=indices,
      beam_args=beam_args,
    )
    tree = _tree(out)
    # The reports hold the command that made them, with the folder.
    for name in ('report.html', 'report.json'):
      tree[name] = tree[name].replace(str(out).encode(), b'OUT')
    trees.append(tree)
  assert trees[0] == trees[1]
  assert len(trees[0]) == 2 * 4 + 2


@tile_alone
def test_failure_in_a_pipeline_is_one_line(data, run, tmp_path, capsys):
  (tmp_path / 'wrong.json').write_text('{"one": [1]}')
  assert (
    cli.main(
      [
        'tpu-graphs',
        'evaluate',
        f'--run={run}',
        f'--data={data}',
        f'--out={tmp_path / "out"}',
        f'--config_indices={tmp_path / "wrong.json"}',
        '--',
        '--runner=FnApiRunner',
      ]
    )
    == 1
  )
  captured = capsys.readouterr()
  assert captured.err.count('\n') == 1
  assert 'wrong.json: one: no such config: found 1' in captured.err
  assert _tree(tmp_path / 'out') == {}


def test_report_is_written_beside_the_result(valid):
  content = json.loads((valid / 'report.json').read_text())
  assert content['results'][0]['views']['all']['numbers']['model'] == _metrics(valid)['model']
  assert (valid / runs.REPORT_NAME).read_text() == report.render(content)
