"""Tests of baselines.submission: from runs and data to the CSV and its score."""

import csv

import numpy as np
import pytest
import scipy.stats

from baselines import submission as command
from pipelines import convert
from pipelines.conversion import options as options_lib
from tests import testing
from tpu_graphs import cli
from tpu_graphs import errors
from tpu_graphs.dataset import records
from tpu_graphs.metrics import submission

pytestmark = pytest.mark.usefixtures('each_run_loaded_once', 'each_pipeline_made_once')
_COLLECTIONS = {'tile': 'tile:xla', 'layout': 'layout:nlp:random'}
_CONFIGS = {'a': 70, 'b-π': 5, 'c': 3}


def _convert(folder, kind, sources, **options):
  for name, arrays in sources.items():
    path = folder / 'raw' / f'{name}.npz'
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
  directory = str(folder / 'data')
  options = {
    'collection': _COLLECTIONS[kind],
    'records': records.RecordOptions(max_configs=50),
    **options,
  }
  convert.convert(
    inputs=[str(folder / 'raw')], directory=directory, options=options_lib.ConvertOptions(**options)
  )
  return directory


@pytest.fixture(scope='session')
def runtimes():
  """Returns module -> runtimes in ns, for both kinds; normalizers differ from config to config."""
  rng = np.random.default_rng(0)
  return {name: rng.choice(10_000, c, replace=False) + 1000 for name, c in _CONFIGS.items()}


def _normalizers(c):
  return np.arange(c) % 3 * 500 + 1000


@pytest.fixture(scope='session')
def data(tmp_path_factory, runtimes):
  """Returns kind -> dataset directory."""
  directories = {}
  for kind in _COLLECTIONS:
    sources = {}
    for name, runtime in runtimes.items():
      over = {'config_runtime_normalizers': _normalizers(runtime.size)} if kind == 'tile' else {}
      for split in ('train', 'valid'):
        sources[f'{split}/{name}'] = testing.arrays(
          kind, n=3, c=runtime.size, nc=1, config_runtime=runtime, **over
        )
      sources[f'test/{name}'] = testing.arrays(
        kind, n=3, c=runtime.size, nc=1, config_runtime=np.zeros(runtime.size, np.int64)
      )
    directories[kind] = _convert(tmp_path_factory.mktemp(f'submission_{kind}'), kind, sources)
  return directories


@pytest.fixture(scope='session')
def run(data, tmp_path_factory):
  """Returns kind -> run directory of an untrained model."""
  folder = tmp_path_factory.mktemp('submission_runs')
  return {
    kind: testing.write_run(str(folder / kind), directory) for kind, directory in data.items()
  }


@pytest.fixture(scope='session')
def run_flags(run, data):
  return [
    *(f'--run={_COLLECTIONS[kind]}={path}' for kind, path in run.items()),
    *(f'--data={path}' for path in data.values()),
  ]


def _main(*args):
  return cli.main(['tpu-graphs', 'submission', *args])


def _rankings(path):
  csv.field_size_limit(1 << 20)
  with open(path, encoding='utf-8', newline='') as file:
    return {
      row['ID']: [int(i) for i in row['TopConfigs'].split(';')] for row in csv.DictReader(file)
    }


def _write_perfect(path, runtimes, *, sign=1):
  lines = ['ID,TopConfigs']
  for name, runtime in runtimes.items():
    lines.append(
      f'tile:xla:{name},'
      + ';'.join(map(str, np.argsort(sign * runtime / _normalizers(runtime.size))[:5]))
    )
    lines.append(f'layout:nlp:random:{name},' + ';'.join(map(str, np.argsort(sign * runtime))))
  path.write_text('\n'.join(lines), encoding='utf-8')
  return str(path)


def test_rows_rank_every_config_of_the_test_split(run, data, run_flags, tmp_path, capsys):
  out = tmp_path / 'deep' / 'submission.csv'
  assert _main(*run_flags, f'--out={out}', '--partial') == 0
  found = _rankings(out)
  assert list(found) == [
    f'{collection}:{name}' for collection in _COLLECTIONS.values() for name in _CONFIGS
  ]
  for name, c in _CONFIGS.items():
    assert sorted(found[f'layout:nlp:random:{name}']) == list(range(c))
    assert len(set(found[f'tile:xla:{name}'])) == min(5, c)
  printed = capsys.readouterr().out
  assert printed.startswith(
    f'wrote {out}: 6 rows\nnot complete: tile:xla: 3 of 844 rows, layout:xla:default: 0 of 8'
  )
  assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_score_of_a_model_equals_the_score_computed_by_hand(
  run, data, run_flags, runtimes, tmp_path, capsys
):
  out = tmp_path / 'submission.csv'
  assert _main(*run_flags, '--split=valid', f'--out={out}') == 0
  assert capsys.readouterr().out == f'wrote {out}: 6 rows\n'
  found = command.score(path=str(out), data=list(data.values()), split='valid')
  rankings = _rankings(out)
  tile, layout = [], []
  for name, runtime in runtimes.items():
    relative = runtime / _normalizers(runtime.size)
    tile.append(2 - relative[rankings[f'tile:xla:{name}']].min() / relative.min())
    ranking = rankings[f'layout:nlp:random:{name}']
    layout.append(scipy.stats.kendalltau(runtime[ranking], np.arange(runtime.size)).statistic)
  assert {name: result.score for name, result in found.items()} == {
    'tile:xla': pytest.approx(np.mean(tile)),
    'layout:nlp:random': pytest.approx(np.mean(layout)),
  }
  assert (
    _main(f'--score={out}', *(f'--data={path}' for path in data.values()), '--split=valid') == 0
  )
  printed = capsys.readouterr().out
  assert f'{np.mean([np.mean(tile), np.mean(layout)]):.4f}  of 2 of 5 collections' in printed
  assert f'{np.mean(tile):.4f}' in printed


def test_perfect_ranking_scores_one_and_reversed_layout_minus_one(data, runtimes, tmp_path):
  for sign, layout_score in ((1, 1), (-1, -1)):
    path = _write_perfect(tmp_path / 's.csv', runtimes, sign=sign)
    found = command.score(path=path, data=list(data.values()), split='valid')
    assert found['layout:nlp:random'] == submission.CollectionScore(
      score=pytest.approx(layout_score), rows=3, undefined=0, unmeasured=0, missing=0
    )
    if sign == 1:
      assert found['tile:xla'].score == 1
      assert submission.overall(found.values()) == pytest.approx(1)


def test_only_the_collections_of_the_data_are_scored(data, runtimes, tmp_path):
  path = _write_perfect(tmp_path / 's.csv', runtimes)
  assert list(command.score(path=path, data=[data['tile']], split='valid')) == ['tile:xla']


def test_partial_scores_the_rows_there(data, runtimes, tmp_path, capsys):
  path = _write_perfect(tmp_path / 's.csv', {name: runtimes[name] for name in ('a', 'c')})
  flags = [f'--score={path}', f'--data={data["layout"]}', '--split=valid']
  assert _main(*flags) == 1
  assert (
    'row missing: found no row for layout:nlp:random:b-π, expected all 3' in capsys.readouterr().err
  )
  assert _main(*flags, '--partial') == 0
  assert '1.0000  1 without a row' in capsys.readouterr().out


def test_public_test_split_cannot_be_scored(data, runtimes, tmp_path, capsys):
  path = _write_perfect(tmp_path / 's.csv', runtimes)
  assert _main(f'--score={path}', *(f'--data={path}' for path in data.values())) == 1
  captured = capsys.readouterr()
  assert captured.out == ''
  assert 'no row to score: found tile:xla: 3 modules without runtimes' in captured.err
  assert '--split=valid' in captured.err


def test_incomplete_submission_is_refused_before_the_work(run_flags, tmp_path, capsys):
  assert _main(*run_flags, f'--out={tmp_path / "s.csv"}') == 1
  assert (
    'submission incomplete: found tile:xla: 3 of 844 rows, layout:xla:default: 0 of 8'
    in capsys.readouterr().err
  )
  assert list(tmp_path.iterdir()) == []


def test_configs_left_out_on_conversion_are_refused(run, runtimes, tmp_path):
  failed = runtimes['a'].copy()
  failed[7] = 0
  data = _convert(
    tmp_path, 'tile', {'valid/a': testing.arrays('tile', n=3, c=70, config_runtime=failed)}
  )
  with pytest.raises(
    errors.InputError, match='tile:xla:a: configs left out: found 69 configs, without position 7'
  ):
    command.write(
      run_of={'tile:xla': run['tile']}, data=[data], split='valid', out=str(tmp_path / 's.csv')
    )
  assert not (tmp_path / 's.csv').exists()


def test_runs_and_data_must_go_together(run, data, tmp_path):
  def write(run_of, *directories, out=str(tmp_path / 's.csv')):
    command.write(run_of=run_of, data=directories, split='test', out=out, partial=True)

  tile, layout = data['tile'], data['layout']
  with pytest.raises(errors.InputError, match='collection without --run: found layout:nlp:random'):
    write({'tile:xla': run['tile']}, tile, layout)
  with pytest.raises(errors.InputError, match='collection without --data: found layout:nlp:random'):
    write({'tile:xla': run['tile'], 'layout:nlp:random': run['layout']}, tile)
  with pytest.raises(errors.InputError, match='run of the other kind: found layout, expected tile'):
    write({'tile:xla': run['layout']}, tile)
  with pytest.raises(errors.InputError, match='second directory of a collection: found tile:xla'):
    write({'tile:xla': run['tile']}, tile, tile)
  with pytest.raises(errors.InputError, match="not a collection of the competition: found 'tile'"):
    write({'tile': run['tile']}, tile)
  with pytest.raises(errors.InputError, match='cannot write: found a directory'):
    write({'tile:xla': run['tile']}, tile, out=str(tmp_path))
  (tmp_path / 'file').write_text('x')
  with pytest.raises(errors.InputError, match='cannot write'):
    write({'tile:xla': run['tile']}, tile, out=str(tmp_path / 'file' / 's.csv'))


def test_data_of_another_collection_is_refused(tmp_path):
  data = testing.convert_arrays(tmp_path, 'tile', {'valid/a': testing.tile_arrays()})
  with pytest.raises(
    errors.InputError,
    match="not a collection of the competition: found 'tile:x', expected tile:xla, ",
  ):
    command.score(path=__file__, data=[data], split='valid')


@pytest.mark.parametrize(
  ('flags', 'code', 'message'),
  [
    (['--data=d', '--run=tile:xla=r'], 2, 'either --run and --out, or --score must be given'),
    (['--data=d', '--out=o'], 2, 'either --run and --out, or --score must be given'),
    (['--data=d'], 2, 'either --run and --out, or --score must be given'),
    (['--data=d', '--run=tile:xla=r', '--out=o', '--score=s'], 2, 'either --run and --out'),
    (['--score=s'], 2, 'flag --data is required'),
    (
      ['--data=d', '--out=o', '--run=r'],
      1,
      "--run: not a run of a collection: found 'r', expected COLLECTION=RUN",
    ),
    (
      ['--data=d', '--out=o', '--run=tile:xla=r', '--run=tile:xla=q'],
      1,
      'second run of a collection',
    ),
    (['--data=d', '--score=missing.csv'], 1, 'missing.csv: file missing'),
  ],
)
def test_wrong_command_lines_are_one_line(flags, code, message, capsys):
  assert _main(*flags) == code
  captured = capsys.readouterr()
  assert message in captured.err
  assert captured.err.count('\n') == 1
  assert captured.out == ''


def test_damaged_file_is_one_line(data, runtimes, tmp_path, capsys):
  path = tmp_path / 's.csv'
  _write_perfect(path, runtimes)
  path.write_text(
    path.read_text(encoding='utf-8').replace('tile:xla:b-π,', 'tile:xla:b-π,x;'), encoding='utf-8'
  )
  assert _main(f'--score={path}', f'--data={data["tile"]}', '--split=valid') == 1
  assert capsys.readouterr().err == (
    f"error: {path}: line 4, tile:xla:b-π: not a position: found 'x', "
    "expected integers >= 0, separated by ';'\n"
  )
  path.write_bytes(b'ID,TopConfigs\ntile:xla:\xff,0\n')
  assert _main(f'--score={path}', f'--data={data["tile"]}', '--split=valid') == 1
  assert 'cannot read file' in capsys.readouterr().err
