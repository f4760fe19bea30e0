"""Tests of pipelines.convert with a user's own programs: folders that XLA dumped, and HLO text."""

import pathlib
import shutil
import subprocess
import sys

from apache_beam.io import filesystems
import pytest

from pipelines import convert
from pipelines.conversion import inputs as inputs_lib
from pipelines.conversion import options as options_lib
from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import records
from tpu_graphs.hlo import protos

_STAGES = {'before': 'before_optimizations', 'after': 'cpu_after_optimizations'}


def _program(name, size):
  """Returns a program of `size` ops as a protobuf and as text.

  The compiler that wrote the text is newer than the parser.
  """
  module = protos.HloModuleProto(name=name)
  computation = module.computations.add(name='e', id=1, root_id=size)
  lines = []
  for i in range(1, size + 1):
    instruction = computation.instructions.add(
      name=f'i{i}',
      id=i,
      opcode='negate' if i > 1 else 'parameter',
      operand_ids=[i - 1] if i > 1 else [],
    )
    instruction.shape.element_type = 11  # F32.
    root = 'ROOT ' if i == size else ''
    operand = f'i{i - 1}' if i > 1 else '0'
    lines.append(f'{root}i{i} = f32[] {instruction.opcode}({operand})')
  body = ', metadata={tomorrow=1}\n'.join(lines)
  text = f'HloModule {name}, is_scheduled=true\n\nENTRY e {{\n{body}\n}}\n'
  return {'hlo.pb': module.SerializeToString(), 'txt': text.encode()}


def _write_dump(folder, *, suffixes=('hlo.pb',), stages=('before', 'after'), names=('f', 'g.1')):
  """Writes programs of 2, 3, … ops, and the other files that XLA writes."""
  folder.mkdir(parents=True, exist_ok=True)
  sizes = iter(range(2, 100))
  for number, name in enumerate(names):
    stem = f'module_{number:04d}.jit_{name}'
    for stage in stages:
      program = _program(f'{name}-{stage}', next(sizes))
      for suffix in suffixes:
        (folder / f'{stem}.{_STAGES[stage]}.{suffix}').write_bytes(program[suffix])
    for other in (
      'cpu_after_optimizations-memory-usage-report.pb',
      'cpu_after_optimizations-buffer-assignment.txt',
      '0001.passes.after_x.before_y.hlo.pb',
      'ir-no-opt.ll',
      'o',
    ):
      (folder / f'{stem}.{other}').write_bytes(b'no program')
  return folder


def _convert(inputs, directory, **options):
  """Returns split -> names of the programs in it."""
  options = options_lib.ConvertOptions(**{'collection': 'layout:own', 'split': 'test', **options})
  manifest = convert.convert(
    inputs=[str(name) for name in inputs], directory=str(directory), options=options
  )
  assert manifest.options['hlo_stage'] == options.hlo_stage
  names = {split: [] for split in manifest.splits}
  for split, found in names.items():
    for path in (directory / split).iterdir():
      with open(path, 'rb') as file:
        while data := records.read_tfrecord(file):
          found.append(records.decode(data).module_id.partition('_')[0])
    found.sort()
  return names


def _matched(inputs, stage='after'):
  """Returns the files of dumps that a conversion would read."""
  found = inputs_lib.find_inputs([str(name) for name in inputs], 'layout:own', stage)
  paths = [
    entry.path
    for result in filesystems.FileSystems.match(list(found.patterns))
    for entry in result.metadata_list
  ]
  assert len(paths) == len(set(paths)) == found.files
  return sorted(pathlib.Path(path).name for path in paths)


def _name(number, name, stage, suffix='hlo.pb'):
  return f'module_000{number}.jit_{name}.{_STAGES[stage]}.{suffix}'


@pytest.mark.parametrize(
  ('collection', 'stage', 'suffixes'),
  [
    ('layout:own', None, ('hlo.pb',)),
    ('layout:own', 'all', ('txt',)),
    ('tile:own', 'before', ('hlo.pb', 'txt')),
  ],
)
def test_dump(tmp_path, collection, stage, suffixes):
  if suffixes == ('txt',):
    pytest.importorskip('jaxlib')
  dump = _write_dump(tmp_path / 'dump', suffixes=suffixes)
  names = {
    None: ['f-after', 'g.1-after'],
    'before': ['f-before', 'g.1-before'],
    'all': ['f-after', 'f-before', 'g.1-after', 'g.1-before'],
  }
  options = {} if stage is None else {'hlo_stage': stage}
  assert _convert([dump], tmp_path / 'o', collection=collection, **options) == {
    'test': names[stage]
  }


@pytest.mark.parametrize('suffixes', [('hlo.pb',), ('txt',), ('hlo.pb', 'txt')])
def test_stages(tmp_path, suffixes):
  dump = _write_dump(tmp_path, suffixes=suffixes)
  for stage, stages in {
    'after': ['after'],
    'before': ['before'],
    'all': ['before', 'after'],
  }.items():
    assert _matched([dump], stage) == [
      _name(i, name, each, suffixes[0]) for i, name in enumerate(('f', 'g.1')) for each in stages
    ]


@pytest.mark.parametrize('suffixes', [('hlo.pb',), ('txt',), ('hlo.pb', 'txt')])
def test_job_does_not_name_the_files_of_a_dump(tmp_path, suffixes):
  dump = _write_dump(tmp_path, suffixes=suffixes)
  for stage, number in (('after', 1), ('before', 1), ('all', 2)):
    patterns = inputs_lib.find_inputs([str(dump)], 'tile:own', stage).patterns
    assert len(patterns) == number
    assert all('*' in pattern for pattern in patterns)


def test_text_beside_protobufs_of_other_programs(tmp_path):
  """Reads two dumps in one folder, one of them without protobufs."""
  dump = _write_dump(tmp_path, suffixes=('hlo.pb', 'txt'))
  (dump / _name(1, 'g.1', 'after')).unlink()
  assert _matched([dump]) == [_name(0, 'f', 'after'), _name(1, 'g.1', 'after', 'txt')]
  assert _matched([dump], 'all') == [
    _name(0, 'f', 'before'),
    _name(0, 'f', 'after'),
    _name(1, 'g.1', 'before'),
    _name(1, 'g.1', 'after', 'txt'),
  ]


def test_text_of_equal_programs(tmp_path):
  pytest.importorskip('jaxlib')
  dump = _write_dump(tmp_path / 'dump', suffixes=('txt',), names=('f',))
  shutil.copy(dump / _name(0, 'f', 'after', 'txt'), dump / _name(7, 'f', 'after', 'txt'))
  assert _convert([dump], tmp_path / 'o') == {'test': ['f-after', 'f-after']}


def test_folder_may_end_in_a_slash_and_be_relative(tmp_path, monkeypatch):
  _write_dump(tmp_path / 'dump')
  monkeypatch.chdir(tmp_path)
  for name in ('dump', 'dump/', './dump', tmp_path / 'dump'):
    assert _matched([name]) == [_name(0, 'f', 'after'), _name(1, 'g.1', 'after')]
  monkeypatch.chdir(tmp_path / 'dump')
  assert len(_matched(['.'])) == 2


def test_splits_may_be_dumps(tmp_path):
  _write_dump(tmp_path / 'raw' / 'train')
  _write_dump(tmp_path / 'raw' / 'valid', names=('h',))
  assert _convert([tmp_path / 'raw'], tmp_path / 'o', split=None) == {
    'train': ['f-after', 'g.1-after'],
    'valid': ['h-after'],
  }


def test_other_programs_in_the_folder_of_a_dump_are_not_read(tmp_path):
  dump = _write_dump(tmp_path)
  (dump / 'other.pb').write_bytes(b'')
  assert _matched([dump]) == [_name(0, 'f', 'after'), _name(1, 'g.1', 'after')]
  assert _matched([dump / 'other.pb']) == ['other.pb']


def test_stage_that_was_not_dumped(tmp_path):
  dump = _write_dump(tmp_path / 'dump', stages=('before',))
  with pytest.raises(errors.InputError, match='XLA dump without programs of the stage') as caught:
    _convert([dump], tmp_path / 'o')
  assert (caught.value.path, caught.value.found) == (str(dump), "2 of stage 'before'")
  assert not (tmp_path / 'o').exists()


def test_unknown_stage():
  with pytest.raises(errors.InputError, match='--hlo_stage: unknown stage'):
    options_lib.ConvertOptions(collection='tile:own', hlo_stage='middle')


def test_text_by_name_or_glob(tmp_path):
  pytest.importorskip('jaxlib')
  folder = tmp_path / 'in'
  folder.mkdir()
  for i, name in enumerate(('f.hlo', 'g.txt', 'h')):
    (folder / name).write_bytes(_program(name[0], 2 + i)['txt'])
  assert _convert([folder / '*.hlo', folder / 'g.txt', folder / 'h'], tmp_path / 'o') == {
    'test': ['f', 'g', 'h']
  }


@testing.needs_shared
def test_text_of_real_programs(tmp_path):
  pytest.importorskip('jaxlib')
  [names] = _convert([testing.SHARED / 'data/hlo/*.hlo'], tmp_path / 'text').values()
  [expected] = _convert([testing.SHARED / 'data/hlo/*.pb'], tmp_path / 'proto').values()
  assert names == expected
  assert len(names) == 7


def test_without_jaxlib(tmp_path):
  dump = _write_dump(tmp_path / 'dump', suffixes=('txt',))
  command = (
    'import sys; sys.modules["jaxlib"] = None\n'
    'from pipelines import convert; sys.exit(convert.main(sys.argv))'
  )
  result = subprocess.run(
    [
      sys.executable,
      '-c',
      command,
      f'--input={dump}',
      f'--output={tmp_path / "o"}',
      '--collection=tile:own',
    ],
    capture_output=True,
    text=True,
    cwd=testing.GOLDEN.parents[1],
  )
  assert result.returncode == 1
  assert result.stdout == ''
  assert result.stderr.count('\n') == 1
  assert 'HLO text cannot be read without jaxlib' in result.stderr
  assert '.cpu_after_optimizations.txt' in result.stderr
