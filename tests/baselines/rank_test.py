"""Tests of baselines.rank, through the command."""

import csv
import io

import numpy as np
import pytest
import tensorflow as tf

from baselines import evaluate
from baselines import models
from baselines import runs
from baselines.models import parts
from tests import testing
from tpu_graphs import cli
from tpu_graphs import datasets
from tpu_graphs import module as module_lib
from tpu_graphs import statistics

_CONFIGS = 70  # More than are scored at a time.


def _arrays(kind, n, c, seed, **over):
  if kind == 'tile':
    return testing.tile_arrays(n=n, c=c, seed=seed, **over)
  return testing.layout_arrays(n=n, c=c, nc=2, seed=seed, **over)


@pytest.fixture(scope='session', params=module_lib.KINDS)
def kind(request):
  return request.param


@pytest.fixture(scope='session')
def folder(kind, tmp_path_factory):
  """Holds raw/valid/*.npz, data and run."""
  folder = tmp_path_factory.mktemp(f'rank_{kind}')
  data = testing.convert_arrays(folder, kind, {
      'train/a': _arrays(kind, 3, 9, 0), 'valid/many-π': _arrays(kind, 5, _CONFIGS, 1),
      'valid/hidden': _arrays(kind, 3, 4, 6, config_runtime=np.zeros(4, np.int64))})
  content = datasets.open_directory(data).statistics
  options = models.ModelOptions(models.DEFAULT_MODEL[kind], kind, parts.PartOptions(4, 1, 3))
  tf.keras.utils.set_random_seed(0)
  model = models.build(options, statistics.parse(content))
  runs.Writer(str(folder / 'run'), config={}, options=options, model=model, statistics=content, overwrite=False).save(1)
  return folder


def _rank(folder, name, *flags):
  return cli.main(['tpu-graphs', 'rank', f'--run={folder / "run"}', f'--input={folder / "raw" / name}', *flags])


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


def test_order_is_that_of_evaluate(folder, tmp_path, capsys):
  evaluate.evaluate(run=str(folder / 'run'), data=str(folder / 'data'), split='valid', out=str(tmp_path))
  with open(tmp_path / runs.RANKINGS_NAME, encoding='utf-8', newline='') as file:
    rankings = {row['module_id']: row['config_ids'].split(';') for row in csv.DictReader(file)}
  assert sorted(rankings) == ['hidden', 'many-π']
  for name, ranking in rankings.items():
    assert _rank(folder, f'valid/{name}.npz', '--csv') == 0
    assert [row['config_id'] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))] == ranking


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
  assert [row['runtime_ns'] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))] == [''] * 4


def _refusal(capsys):
  captured = capsys.readouterr()
  assert captured.out == ''
  assert captured.err.count('\n') == 1
  return captured.err


def test_file_of_the_other_kind_is_one_line(folder, kind, capsys):
  other = 'layout' if kind == 'tile' else 'tile'
  np.savez(folder / 'raw' / 'other.npz', **_arrays(other, 3, 4, 0))
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
  assert 'no run' in _refusal(capsys)


def test_top_of_nothing_is_a_usage_error(folder, capsys):
  assert _rank(folder, 'valid/hidden.npz', '--top=0') == 2
  assert 'top' in _refusal(capsys)
