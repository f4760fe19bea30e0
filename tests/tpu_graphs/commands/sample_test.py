"""Tests of tpu_graphs/commands/sample.py: the command line, and the sample in other commands."""

import pytest

from pipelines.conversion import inputs as inputs_lib
from tpu_graphs.commands import sample
from tpu_graphs.sources import npz


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Returns the folder of the default sample."""
  path = tmp_path_factory.mktemp('sample') / 'new'
  assert sample.main(['sample.py', f'--output={path}']) == 0
  return path


@pytest.mark.parametrize('kind', ['tile', 'layout'])
def test_convert_finds_the_collection(folder, kind):
  inputs = inputs_lib.find_inputs([str(folder / 'npz')], f'{kind}:synthetic')
  paths = list((folder / 'npz' / kind).rglob('*.npz'))
  assert len(inputs.patterns) == 3
  assert inputs.files == len(paths) > 100


def test_no_graph_lies_in_two_splits(folder):
  for kind in ('tile', 'layout'):
    paths = list((folder / 'npz' / kind).rglob('*.npz'))
    assert len({npz.load(path).topology_fingerprint() for path in paths}) == len(paths)


def test_default_sample_is_small(folder):
  assert sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) < 8 << 20


def test_output_shows_what_was_written(tmp_path, capsys, monkeypatch):
  write_tree = sample.synthetic.write_tree
  monkeypatch.setattr(
    sample.synthetic,
    'write_tree',
    lambda output, *, seed: write_tree(output, seed=seed, tile=(3, 1, 0), layout=(1, 1, 1)),
  )
  assert sample.main(['sample.py', f'--output={tmp_path / "new"}', '--seed=5']) == 0
  out, err = capsys.readouterr()
  assert err == ''
  first, *lines = out.splitlines()
  assert 'synthetic' in first
  assert str(tmp_path / 'new') in first
  assert [line.split()[:3] for line in lines] == [
    ['tile:synthetic', 'train', '3'],
    ['tile:synthetic', 'valid', '1'],
    ['tile:synthetic', 'test', '0'],
    ['layout:synthetic', 'train', '1'],
    ['layout:synthetic', 'valid', '1'],
    ['layout:synthetic', 'test', '1'],
  ]
  configs = sum(
    npz.load(path).num_configs for path in (tmp_path / 'new/npz/tile/synthetic/train').iterdir()
  )
  assert lines[0].split()[4:] == [f'{configs:,}', 'configs']
  assert 'seed 5' in (tmp_path / 'new/README.txt').read_text()


@pytest.mark.parametrize(
  ('args', 'code', 'message'),
  [
    pytest.param([], 2, 'error: flag --output is required', id='no output'),
    pytest.param(['--output=x', '--seed=-1'], 2, 'seed', id='negative seed'),
    pytest.param(
      ['--output=x', '--sead=1'], 2, 'unknown flag --sead (did you mean --seed?)', id='unknown flag'
    ),
    pytest.param(['--output=full'], 1, 'error: full: folder not empty: found file', id='not empty'),
    pytest.param(['--output=full/file'], 1, 'error: full/file: cannot write folder', id='file'),
  ],
)
def test_mistakes_are_reported_in_one_line(tmp_path, monkeypatch, capsys, args, code, message):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'full').mkdir()
  (tmp_path / 'full/file').touch()
  assert sample.main(['sample.py', *args]) == code
  out, err = capsys.readouterr()
  assert out == ''
  assert message in err
  assert err.count('\n') == 1
  assert sorted(path.name for path in tmp_path.rglob('*')) == ['file', 'full']


def test_help(capsys):
  assert sample.main(['sample.py', '--help']) == 0
  out = capsys.readouterr().out
  for part in ('synthetic', '--output', '--seed', '(default: 0)'):
    assert part in out
