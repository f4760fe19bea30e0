"""Tests of the command line of pipelines/convert.py: one line per mistake, exit codes, no files."""

import json
import os
import subprocess
import sys

from apache_beam.io import filesystems
import numpy as np
import pytest

from pipelines import convert
from tests import testing

ROOT = testing.GOLDEN.parents[1]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  """The working directory, with one good folder `in` of three files, and damaged files in `bad`."""
  monkeypatch.chdir(tmp_path)
  for name in ('in', 'bad', 'layout'):
    os.mkdir(name)
  for i in range(3):
    np.savez(f'in/m{i}.npz', **testing.tile_arrays(n=3 + i, seed=i))
  np.savez('layout/m.npz', **testing.layout_arrays())
  with open('in/m0.npz', 'rb') as file:
    (tmp_path / 'bad/truncated.npz').write_bytes(file.read()[:500])
  (tmp_path / 'bad/html.npz').write_text('<html>404</html>')
  (tmp_path / 'bad/zero.npz').write_bytes(b'')
  (tmp_path / 'bad/zero.pb').write_bytes(b'')
  return tmp_path


def command(*args, **flags):
  """Returns arguments for a good conversion, changed by `flags` (None omits a flag) and `args`."""
  flags = {'collection': 'tile:own', 'input': 'in', 'output': 'o', **flags}
  return [
    'convert.py',
    *(f'--{name}={value}' for name, value in flags.items() if value is not None),
    *args,
  ]


def files(folder):
  return sorted(str(path.relative_to(folder)) for path in folder.rglob('*'))


@pytest.fixture
def fails(folder, capfd):
  """Runs a command that must fail in one line; returns the exit code and the line.

  The command must write nothing but `leaves`.
  """

  def run(*args, leaves=(), **flags):
    before = files(folder)
    code = convert.main(command(*args, **flags))
    out, err = capfd.readouterr()
    assert out == ''
    assert err.startswith('error: ')
    assert err.endswith('\n')
    assert err.count('\n') == 1
    assert files(folder) == sorted([*before, *leaves])
    return code, err

  return run


def test_good(folder, capfd):
  assert convert.main(command(num_shards=2, split='train')) == 0
  out, err = capfd.readouterr()
  assert err == ''
  first, header, row = out.splitlines()
  assert first.startswith('tile:own -> o in ')
  assert header.split() == ['split', 'modules', 'configs', 'records', 'shards', 'MiB']
  assert row.split()[:5] == ['train', '3', '18', '3', '2']
  assert [name for name in files(folder) if name.startswith('o/train/')] == [
    'o/train/part-00000-of-00002.tfrecord',
    'o/train/part-00001-of-00002.tfrecord',
  ]


def test_flags_reach_the_options(folder):
  code = convert.main(
    command(
      '--overwrite',
      split='valid',
      num_shards=3,
      max_configs_per_record=4,
      seed=9,
      max_record_bytes=1_000_000,
      on_error='skip',
      input='in,bad/*',
      hlo_stage='before',
      max_rejected_fraction=0.8,
      max_array_bytes=1_000_000,
      max_configs=4,
      config_sampling='spread',
      dedup_configs='min',
    )
  )
  assert code == 0
  manifest = json.loads((folder / 'o/manifest.json').read_text())
  assert manifest['options'] == {
    'split': 'valid',
    'num_shards': 3,
    'on_error': 'skip',
    'max_configs_per_record': 4,
    'max_record_bytes': 1_000_000,
    'seed': 9,
    'hlo_stage': 'before',
    'layout_padding': 0,
    'extra_features': [],
    'max_array_bytes': 1_000_000,
    'max_configs': 4,
    'config_sampling': 'spread',
    'dedup_configs': 'min',
    'keep_hops': None,
    'rest': None,
  }
  assert manifest['splits']['valid']['records'] == 3
  assert sum(manifest['rejected_inputs'].values()) == 4


@pytest.mark.parametrize(
  ('args', 'rest'), [([], 'drop'), (['--rest=drop'], 'drop'), (['--rest=summary'], 'summary')]
)
def test_reduction(folder, capfd, args, rest):
  assert convert.main(command('--keep_hops=0', *args, input='layout', collection='layout:own')) == 0
  options = json.loads((folder / 'o/manifest.json').read_text())['options']
  assert (options['keep_hops'], options['rest']) == (0, rest)
  out, err = capfd.readouterr()
  expected = {
    'drop': '2 ops and 2 edges removed: more than 0 hops from the configurable ops',
    'summary': (
      '1 op and 1 edge removed: more than 0 hops from the configurable ops; '
      'the rest of each computation is one op'
    ),
  }
  assert out.splitlines()[-1] == expected[rest]
  assert err == ''


@pytest.mark.parametrize(
  ('path', 'collection', 'words'),
  [
    ('bad/truncated.npz', 'tile:own', ['truncated']),
    ('bad/html.npz', 'tile:own', ['HTML']),
    ('bad/zero.npz', 'tile:own', ['empty']),
    ('bad/zero.pb', 'tile:own', ['0 bytes']),
    ('bad/zero.pb', 'layout:own', ['0 bytes']),
    ('in/m0.npz', 'layout:own', ['tile', 'layout']),
    ('layout/m.npz', 'tile:own', ['layout', 'tile']),
  ],
)
def test_damaged_input(fails, path, collection, words):
  code, line = fails(input=path, collection=collection)
  assert code == 1
  assert path in line
  assert all(word in line for word in words)


def test_one_bad_among_good(fails):
  code, line = fails(input='in,bad/zero.npz')
  assert code == 1
  assert 'bad/zero.npz' in line


def test_all_bad(fails):
  code, line = fails(input='bad/*.npz', on_error='skip', leaves=['o.rejected.jsonl'])
  assert code == 1
  assert 'no usable module' in line
  assert '"empty file": 1' in line
  assert line.endswith('; o.rejected.jsonl lists them\n')


@pytest.mark.parametrize('pattern', ['nope', 'nope/*.npz', '*.npz', 'in/nope-*'])
def test_nothing_matches(fails, pattern):
  code, line = fails(input=pattern)
  assert code == 1
  assert f'found {pattern},' in line


def test_bare_pattern(folder, monkeypatch):
  monkeypatch.chdir(folder / 'in')
  assert convert.main(command(input='*.npz', output='../o')) == 0


@pytest.mark.parametrize(
  ('args', 'words'),
  [
    (['--num_shard=3'], ['--num_shard ', 'did you mean --num_shards?']),
    (['--runner=DirectRunner'], ['--runner', 'Beam options go after a bare `--`']),
    (['--split=dev'], ['--split', 'dev', 'train', 'valid', 'test']),
    (['--on_error=ignore'], ['--on_error', 'ignore', 'skip']),
    (['--num_shards=0'], ['--num_shards', '0']),
    (['--num_shards=many'], ['--num_shards', 'many']),
    (['--max_configs_per_record=0'], ['--max_configs_per_record']),
    (['--keep_hops=-1'], ['--keep_hops', '-1']),
    (['--keep_hops=1', '--rest=merge'], ['--rest', 'merge', 'drop', 'summary']),
    (['in/m0.npz'], ['in/m0.npz', 'quotes']),
  ],
)
def test_wrong_flags(fails, args, words):
  code, line = fails(*args)
  assert code == 2
  assert all(word in line for word in words)


@pytest.mark.parametrize('name', ['input', 'output', 'collection'])
def test_required_flags(fails, name):
  assert fails(**{name: None}) == (2, f'error: flag --{name} is required\n')


@pytest.mark.parametrize(
  ('args', 'words'),
  [
    (['--runer=X'], ['--runer=X', 'did you mean --runner?']),
    (['--runner=DirectRunner', '--runer=X'], ['--runer=X', 'did you mean --runner?']),
    (['--direct_num_worker=2'], ['did you mean --direct_num_workers?']),
    (['--num_shards=2'], ['--num_shards=2']),
    (['--runner=DirectRunner', '--runner=FnApiRunner'], ['--runner', 'twice']),
    (['--runner=NoSuchRunner'], ['--runner', 'NoSuchRunner']),
    (['--direct_num_workers=x'], ['--direct_num_workers', "'x'"]),
  ],
)
def test_wrong_beam_options(fails, args, words):
  code, line = fails('--', *args)
  assert code == 1
  assert all(word in line for word in words)


@pytest.mark.parametrize('args', [['--runner=DirectRunner'], ['--runner', 'FnApiRunner'], []])
def test_beam_options(args):
  assert convert.main(command('--', *args)) == 0


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    ({'collection': 'tail:xla'}, ['tail:xla', 'tile:NAME']),
    ({'collection': 'tile'}, ['tile:NAME']),
    ({'keep_hops': 2}, ['--keep_hops', 'tile', 'configurable ops', 'tile:own']),
    ({'rest': 'drop', 'collection': 'layout:own'}, ['--rest', 'drop', '--keep_hops']),
    ({'rest': 'summary'}, ['--rest', 'summary', '--keep_hops']),
    ({'input': ''}, ['--input']),
    ({'input': 'in,'}, ['--input']),
    ({'output': ''}, ['--output']),
    ({'output': 'in'}, ['in', 'not a dataset']),
    ({'output': 'in/m0.npz'}, ['in/m0.npz', 'cannot write']),
    ({'output': 'o[1]'}, ['o[1]', 'glob']),
    ({'output': 'gcs://b/o'}, ['--output', 'use gs://']),
    ({'input': 'gcs://b/*.npz'}, ['--input', 'use gs://']),
    ({'input': 'nope://b/*.npz'}, ['--input', 'nope://b/*.npz']),
  ],
)
def test_wrong_values(fails, flags, words):
  code, line = fails(**flags)
  assert code == 1
  assert all(word in line for word in words)


def _has_google_storage():
  try:
    filesystems.FileSystems.get_filesystem('gs://b/o')
  except ValueError:
    return False
  return True


@pytest.mark.skipif(_has_google_storage(), reason='the extra gcp is installed')
@pytest.mark.parametrize('flag', ['input', 'output'])
def test_google_storage_without_its_extra(fails, flag):
  code, line = fails(**{flag: 'gs://b/x'})
  assert code == 1
  assert f'--{flag}' in line
  assert "pip install 'tpu_graphs[gcp]'" in line


def test_name_twice(fails, folder):
  (folder / 'in2').mkdir()
  np.savez('in2/m1.npz', **testing.tile_arrays())
  code, line = fails(input='in,in2', split='train')
  assert code == 1
  assert 'in/m1.npz' in line
  assert 'in2/m1.npz' in line


def test_existing_output(folder, capfd):
  assert convert.main(command()) == 0
  before = files(folder)
  capfd.readouterr()
  assert convert.main(command()) == 1
  out, err = capfd.readouterr()
  assert (out, err.count('\n'), err.startswith('error: o: ')) == ('', 1, True)
  assert '--overwrite' in err
  assert files(folder) == before
  assert convert.main(command('--overwrite')) == 0


def test_help(capfd):
  assert convert.main(['convert.py', '--help']) == 0
  out, err = capfd.readouterr()
  assert err == ''
  for flag in (
    'input',
    'output',
    'collection',
    'split',
    'num_shards',
    'max_configs_per_record',
    'max_record_bytes',
    'on_error',
    'seed',
    'overwrite',
  ):
    assert flag in out
  assert '-- --runner=' in out


def _script(*args, **flags):
  environment = {
    **os.environ,
    'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]),
  }
  return subprocess.run(
    [sys.executable, str(ROOT / 'pipelines/convert.py'), *command(*args, **flags)[1:]],
    capture_output=True,
    text=True,
    env=environment,
    check=False,
  )


def test_script_fails_in_one_line(folder):
  result = _script(input='in,bad/html.npz')
  assert (result.returncode, result.stdout, result.stderr.count('\n')) == (1, '', 1)
  assert result.stderr.startswith('error: bad/html.npz: ')
  assert not (folder / 'o').exists()


@pytest.mark.slow
def test_script_in_several_processes(folder):
  """Checks that other processes find the steps of a main program by their names."""
  flags = {'num_shards': 2, 'split': 'train'}
  assert convert.main(command(**flags)) == 0
  result = _script(
    '--',
    '--runner=DirectRunner',
    '--direct_running_mode=multi_processing',
    '--direct_num_workers=2',
    output='p',
    **flags,
  )
  assert (result.returncode, result.stderr) == (0, '')
  expected = {
    path.relative_to(folder / 'o'): path.read_bytes()
    for path in (folder / 'o').rglob('*')
    if path.is_file()
  }
  assert {
    path.relative_to(folder / 'p'): path.read_bytes()
    for path in (folder / 'p').rglob('*')
    if path.is_file()
  } == expected
