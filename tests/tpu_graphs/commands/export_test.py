"""Tests of tpu_graphs/commands/export.py: flags, exit codes, one line per mistake."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests import testing
from tpu_graphs import cli
from tpu_graphs.commands import export

ROOT = testing.GOLDEN.parents[1]


@pytest.fixture(scope='module')
def dataset(tmp_path_factory):
  """Returns a dataset directory of tile modules in two splits."""
  return testing.convert_arrays(
    tmp_path_factory.mktemp('dataset'),
    'tile',
    {
      'train/a': testing.tile_arrays(c=1500),
      'train/b': testing.tile_arrays(n=5, seed=1),
      'valid/c': testing.tile_arrays(seed=2),
    },
  )


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  """Returns the working directory."""
  monkeypatch.setenv('TF_CPP_MIN_LOG_LEVEL', '2')
  monkeypatch.chdir(tmp_path)
  return tmp_path


def command(*args, **flags):
  flags = {'output': 'out', 'format': 'npz', **flags}
  return [
    'export.py',
    *(f'--{name}={value}' for name, value in flags.items() if value is not None),
    *args,
  ]


def names(folder):
  return sorted(path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file())


def test_output_shows_what_was_written(dataset, folder, capsys):
  assert export.main(command(data=dataset)) == 0
  out, err = capsys.readouterr()
  first, *rows = out.splitlines()
  assert err == ''
  assert first.startswith('tile:x as npz in ')
  assert [row.split() for row in rows] == [
    ['train', '2', 'modules', '1,506', 'configs', '0.1', 'MiB', 'out/npz/tile/x/train'],
    ['valid', '1', 'modules', '6', 'configs', '0.0', 'MiB', 'out/npz/tile/x/valid'],
  ]
  assert names(folder) == [
    f'out/npz/tile/x/{name}'
    for name in (
      'train/a.npz',
      'train/b.npz',
      'train/index.json',
      'valid/c.npz',
      'valid/index.json',
    )
  ]


def test_losses_are_reported(folder, capsys):
  from tpu_graphs.modules import feature_choices

  data = testing.convert_arrays(
    folder,
    'tile',
    {'train/a': testing.tile_arrays()},
    choices=(feature_choices.FeatureChoices(layout_padding=-1)),
  )
  assert export.main(command(data=data)) == 0
  assert 'not in npz files: layouts are padded with 0 as published' in capsys.readouterr().out


def test_split_and_overwrite(dataset, folder, capsys):
  assert export.main(command(data=dataset, split='valid')) == 0
  assert names(folder) == ['out/npz/tile/x/valid/c.npz', 'out/npz/tile/x/valid/index.json']
  capsys.readouterr()
  assert export.main(command(data=dataset)) == 1
  out, err = capsys.readouterr()
  assert out == ''
  assert err == (
    'error: out/npz/tile/x/valid: output exists: found an export, '
    'expected no folder or an empty one; give --overwrite to replace it\n'
  )
  assert export.main(command('--overwrite', data=dataset)) == 0
  assert len(names(folder)) == 5


@pytest.mark.parametrize(
  ('flags', 'code', 'words'),
  [
    ({'data': None}, 2, ['--data is required']),
    ({'output': None}, 2, ['--output is required']),
    ({'format': None}, 2, ['--format is required']),
    ({'format': 'csv'}, 2, ['--format', 'csv', 'npz']),
    ({'split': 'dev'}, 2, ['--split', 'dev']),
    ({'splits': 'valid'}, 2, ['--splits', 'did you mean --split?']),
    ({'split': 'test'}, 1, ['split missing', 'test']),
    ({'data': 'nope'}, 1, ['nope', 'no dataset']),
    ({'output': ''}, 1, ['local folder']),
    ({'output': 'gs://b/o'}, 1, ['gs://b/o', 'local folder']),
  ],
)
def test_mistakes_are_reported_in_one_line(dataset, folder, capsys, flags, code, words):
  assert export.main(command(**{'data': dataset, **flags})) == code
  out, err = capsys.readouterr()
  assert out == ''
  assert err.startswith('error: ')
  assert err.count('\n') == 1
  assert all(word in err for word in words), err
  assert not os.listdir(folder)


@pytest.mark.skipif(
  importlib.util.find_spec('torch_geometric') is not None, reason='PyTorch Geometric is installed'
)
def test_without_pytorch_geometric(dataset, folder, capsys):
  assert export.main(command(data=dataset, format='pyg')) == 1
  err = capsys.readouterr().err
  assert err.endswith('; pip install torch torch_geometric\n')
  assert err.count('\n') == 1


def test_help(capsys):
  assert cli.main(['tpu-graphs', 'export', '--help']) == 0
  out = capsys.readouterr().out
  for part in (
    'usage: tpu-graphs export [flags]',
    '--data',
    '--format=npz|pyg',
    '--split',
    '--[no]overwrite',
  ):
    assert part in out


def test_no_beam_is_loaded(dataset, folder):
  code = (
    'import sys; from tpu_graphs.commands import export; code = export.main(sys.argv); '
    'sys.exit(code or int("apache_beam" in sys.modules))'
  )
  result = subprocess.run(
    [sys.executable, '-c', code, *command(data=dataset)[1:]],
    text=True,
    capture_output=True,
    check=False,
    cwd=folder,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
  )
  assert result.returncode == 0, result.stderr
