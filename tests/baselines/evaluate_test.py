"""Tests of baselines.evaluate: the numbers it writes, worked out again from the rankings and the source files."""

import csv
import itertools
import json
import shutil

import numpy as np
import pytest
import scipy.stats

from baselines import evaluate
from baselines import runs
from tests import testing
from tpu_graphs import cli
from tpu_graphs import datasets
from tpu_graphs import errors
from tpu_graphs import records

_KS = {'tile': (1, 5, 10), 'layout': (1, 10, 100)}


def _arrays(kind, n, c, seed, **over):
  over = {'config_runtime': np.random.default_rng(seed).integers(1000, 3000, c), **over}
  return testing.arrays(kind, n=n, c=c, seed=seed, nc=1, **over)


@pytest.fixture(scope='session')
def sources(kind):
  zeros = np.zeros(4, np.int64)
  return {'train/a': _arrays(kind, 3, 9, 0), 'valid/split-over-records': _arrays(kind, 3, 130, 1),
          'valid/short-π': _arrays(kind, 2, 4, 2), 'valid/one': _arrays(kind, 1, 1, 3),
          'valid/ties': _arrays(kind, 2, 5, 4, config_runtime=np.full(5, 7000)),
          'valid/unmeasured': _arrays(kind, 2, 4, 5, config_runtime=zeros),
          'test/hidden': _arrays(kind, 3, 4, 6, config_runtime=zeros)}


@pytest.fixture(scope='session')
def data(kind, sources, tmp_path_factory):
  return testing.convert_arrays(tmp_path_factory.mktemp(f'evaluate_{kind}'), kind, sources,
                                records=records.RecordOptions(max_configs=50))


@pytest.fixture(scope='session')
def run(kind, data, tmp_path_factory):
  """The run directory of a model as it is before training."""
  return testing.write_run(str(tmp_path_factory.mktemp(f'evaluate_run_{kind}') / 'run'), data)


@pytest.fixture(scope='session')
def valid(data, run, tmp_path_factory):
  """Folder with the result of the valid split."""
  out = tmp_path_factory.mktemp('evaluate_out')
  evaluate.evaluate(run=run, data=data, split='valid', out=str(out))
  return out


def _rows(path):
  with open(path, encoding='utf-8', newline='') as file:
    return list(csv.DictReader(file))


def _rankings(folder):
  return {row['module_id']: [int(i) for i in row['config_ids'].split(';')]
          for row in _rows(folder / runs.RANKINGS_NAME)}


def _metrics_by_hand(kind, ranking, arrays):
  """OPA, Kendall tau and top-k errors of a ranking of distinct scores."""
  runtime = arrays['config_runtime'] / arrays.get('config_runtime_normalizers', 1)
  ranked = runtime[ranking]
  if np.unique(runtime).size < 2:
    return {}
  pairs = [a < b for a, b in itertools.combinations(ranked, 2) if a != b]
  return {'opa': np.mean(pairs), 'kendall_tau': scipy.stats.kendalltau(ranked, np.arange(ranked.size)).statistic,
          **{f'top_{k}_error': ranked[:k].min() / runtime.min() - 1 for k in _KS[kind]}}


def test_rankings_hold_every_config_of_every_module_once(valid, sources):
  rankings = _rankings(valid)
  names = [name.removeprefix('valid/') for name in sources if name.startswith('valid/')]
  assert sorted(rankings) == sorted(names)
  for name, ranking in rankings.items():
    assert sorted(ranking) == list(range(sources[f'valid/{name}']['config_runtime'].size))


def test_metrics_equal_those_worked_out_by_hand(kind, valid, sources):
  result = json.loads((valid / runs.METRICS_NAME).read_text())
  per_module = {row['module_id']: row for row in _rows(valid / runs.PER_MODULE_NAME)}
  expected = {name: _metrics_by_hand(kind, ranking, sources[f'valid/{name}'])
              for name, ranking in _rankings(valid).items() if name != 'unmeasured'}
  assert per_module.keys() == expected.keys()
  for name, row in per_module.items():
    for metric, value in expected[name].items():
      assert float(row[metric]) == pytest.approx(value, abs=1e-9), (name, metric)
  defined = [values for values in expected.values() if values]
  assert len(defined) == 2
  for metric in defined[0]:
    assert result['model'][metric] == pytest.approx(np.mean([values[metric] for values in defined]), abs=1e-9)
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
  result = evaluate.evaluate(run=run, data=data, split='test', out=str(tmp_path))
  assert result['model'] is result['random'] is None
  assert result['unmeasured_modules'] == 1
  assert json.loads((tmp_path / runs.METRICS_NAME).read_text()) == result
  assert _rows(tmp_path / runs.PER_MODULE_NAME) == []
  assert sorted(_rankings(tmp_path)['hidden']) == [0, 1, 2, 3]
  assert 'ranked, not judged' in evaluate.describe(result)
  assert '0.0' not in evaluate.describe(result)


def test_second_evaluation_replaces_the_first(data, run, valid, tmp_path):
  shutil.copytree(valid, tmp_path / 'out')
  evaluate.evaluate(run=run, data=data, split='train', out=str(tmp_path / 'out'))
  assert list(_rankings(tmp_path / 'out')) == ['a']
  assert json.loads((tmp_path / 'out' / runs.METRICS_NAME).read_text())['split'] == 'train'
  names = (runs.METRICS_NAME, runs.PER_MODULE_NAME, runs.RANKINGS_NAME)
  assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == sorted(names)


def test_other_kind_is_refused(kind, run, tmp_path):
  other = 'layout' if kind == 'tile' else 'tile'
  data = testing.convert_arrays(tmp_path, other, {'valid/a': _arrays(other, 2, 3, 0)})
  with pytest.raises(errors.InputError, match=f'run of the other kind: found {kind}, expected {other}'):
    evaluate.evaluate(run=run, data=data, split='valid', out=str(tmp_path / 'out'))
  assert not (tmp_path / 'out').exists()


def test_command_prints_a_table_and_writes_below_the_run(data, run, valid, tmp_path, capsys):
  copy = str(shutil.copytree(run, tmp_path / 'run'))
  assert cli.main(['tpu-graphs', 'evaluate', f'--run={copy}', f'--data={data}']) == 0
  out = capsys.readouterr().out
  result = json.loads((valid / runs.METRICS_NAME).read_text())
  assert f'{result["model"]["opa"]:.4f}' in out
  assert 'undefined for 2 modules' in out
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
  datasets.open_directory(data)  # Still whole.


def test_place_that_cannot_be_written_is_refused(data, run, tmp_path):
  (tmp_path / 'file').write_text('x')
  with pytest.raises(errors.InputError, match='cannot write'):
    evaluate.evaluate(run=run, data=data, split='valid', out=str(tmp_path / 'file' / 'below'))
