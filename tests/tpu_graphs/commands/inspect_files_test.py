"""Tests of tpu_graphs/commands/inspect_files.py: `tpu-graphs inspect`, as a user runs it."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from tests import testing
from tpu_graphs import cli
from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs.commands import inspect_files
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import npz
from tpu_graphs.sources import readers
from tpu_graphs.views import drawing
from tpu_graphs.views import summary

ROOT = pathlib.Path(__file__).parents[3]
CORNER = testing.GOLDEN / 'corner'
EXTRACTOR = 'the native extension' if hlo.implementation() == 'native' else 'pure Python'
HLO_LINE = f'HLO is extracted by {EXTRACTOR}.'


def run(capsys, *args):
  """Returns the exit code, the lines of stdout and the lines of stderr."""
  code = cli.main(['tpu-graphs', 'inspect', *map(str, args)])
  out, err = capsys.readouterr()
  assert out == '' or out.endswith('\n')
  return code, out.splitlines(), err.splitlines()


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """Makes a working directory with files to inspect.

  They are tile.npz, layout.npz, test.npz without runtimes, empty.npz of 0 bytes, and text.npz.
  """
  monkeypatch.chdir(tmp_path)
  opcodes = np.array(
    [features.opcodes()[name] for name in ('parameter', 'constant', 'dot', 'dot')], np.uint8
  )
  edges = np.array([[2, 0], [3, 1], [3, 2]])
  graph = {'node_opcode': opcodes, 'edge_index': edges, 'node_feat': np.zeros((4, 140), np.float32)}
  vectors = np.zeros((4, 24), np.float32)
  vectors[3] = 1
  np.savez(
    'tile.npz',
    **testing.tile_arrays(
      c=4,
      config_feat=vectors,
      config_runtime=np.array([800, 1500, 2000, 0]),
      config_runtime_normalizers=np.full(4, 1000),
      **graph,
    ),
  )
  np.savez(
    'layout.npz',
    **testing.layout_arrays(c=2000, config_runtime=np.arange(4, 2004) * 1_000_000, **graph),
  )
  np.savez(
    'test.npz',
    **testing.tile_arrays(
      config_runtime=np.zeros(6, int), config_runtime_normalizers=np.ones(6, int)
    ),
  )
  pathlib.Path('empty.npz').touch()
  pathlib.Path('text.npz').write_text('hello')
  return tmp_path


def test_one_tile_module(folder, capsys):
  assert run(capsys, 'tile.npz') == (
    0,
    [
      'tile.npz: npz, 1 tile module',
      '  module        tile',
      '  graph         4 ops, 3 edges, 1 computation',
      '  configs       3, 1 distinct, all measured',
      '  runtime       800 ns to 2.00 µs',
      '  best/default  0.800',
      '  opcodes       2 dot, 1 constant, 1 parameter',
      f'  dropped runs  {npz.SHORT_RUN}: 1',
      HLO_LINE,
    ],
    [],
  )


def test_one_layout_module(folder, capsys):
  assert run(capsys, 'layout.npz') == (
    0,
    [
      'layout.npz: npz, 1 layout module',
      '  module        layout',
      '  graph         4 ops, 3 edges, 1 computation',
      '  configurable  2 ops',
      '  configs       2,000, 2,000 distinct, all measured',
      '  runtime       4.00 ms to 2.00 s',
      '  best/default  not known: the file does not name the default config',
      '  opcodes       2 dot, 1 constant, 1 parameter',
      HLO_LINE,
    ],
    [],
  )


def test_without_runtimes_and_without_configs(folder, capsys):
  _, lines, _ = run(capsys, 'test.npz')
  assert lines[3] == '  configs       6, 6 distinct, none measured'
  assert not any(line.startswith(('  runtime', '  best/default')) for line in lines)
  _, lines, _ = run(capsys, CORNER / 'single.pb')
  assert '  configs       none' in lines


def test_unknown_opcodes_by_name(capsys):
  code, lines, _ = run(capsys, CORNER / 'features.pb')
  assert code == 0
  assert '  unknown       1 (no name), 1 Abs, 1 erf, 1 topk' in lines


def test_characters_that_cannot_be_printed(folder, capsys):
  shutil.copy('tile.npz', 'a\n\x1b[1m.npz')
  code, lines, _ = run(capsys, 'a\n\x1b[1m.npz', 'tile.npz')
  assert code == 0
  assert lines[3].startswith('  a\ufffd\ufffd[1m.npz ')
  assert not any('\x1b' in line for line in lines)


def test_several_modules(capsys):
  extraction = readers.from_file(CORNER / 'tile_sel.pb')
  assert len(extraction.modules) == 3
  assert extraction.skipped
  code, lines, _ = run(capsys, CORNER / 'tile_sel.pb')
  assert code == 0
  assert lines[0].endswith('tile_sel.pb: TuningData, 3 tile modules')
  assert (
    ' '.join(lines[2].split())
    == 'module ops edges tations configs distinct fastest slowest default'
  )
  for line, module in zip(lines[3:6], extraction.modules, strict=True):
    assert line.split()[:3] == [module.module_id, str(module.num_ops), str(module.num_edges)]
  total = summary.summarize(extraction).total
  assert lines[6].split()[:3] == ['total', str(total.ops), str(total.edges)]
  assert len({len(line) for line in lines[2:7]}) == 1
  (skipped,) = [line for line in lines if line.startswith('  skipped')]
  for reason, count in extraction.skipped.items():
    assert f'{reason}: {count}' in skipped


def test_several_files(folder, capsys):
  code, lines, err = run(capsys, 'tile.npz', 'layout.npz', 'tile.npz', 'test.npz')
  assert (code, err) == (0, [])
  assert lines[0] == f'3 files in {folder}'
  assert [line.split() for line in lines[2:7]] == [
    [
      'file',
      'type',
      'modules',
      'ops',
      'ops',
      'configs',
      'distinct',
      'fastest',
      'slowest',
      'default',
    ],
    ['tile.npz', 'npz', 'tile', '1', '4', '-', '3', '1', '800', 'ns', '2.00', 'µs', '0.800'],
    [
      'layout.npz',
      'npz',
      'layout',
      '1',
      '4',
      '2',
      '2,000',
      '2,000',
      '4.00',
      'ms',
      '2.00',
      's',
      '-',
    ],
    ['test.npz', 'npz', 'tile', '1', '4', '-', '6', '6', '-', '-', '-'],
    ['total', '3', '12', '2', '2,009', '2,007', '800', 'ns', '2.00', 's', '0.800'],
  ]


def test_empty_columns_are_left_out(capsys):
  _, lines, _ = run(capsys, CORNER / 'single.pb', CORNER / 'graph.pb')
  assert lines[1].split() == ['file', 'type', 'modules', 'ops']


def test_bad_files_do_not_hide_the_good(folder, capsys):
  code, lines, err = run(capsys, 'empty.npz', 'tile.npz', 'nothing.pb', 'text.npz', 'layout.npz')
  assert code == 1
  assert lines[0].startswith('2 files in ')
  assert len(err) == 3
  assert [line.split(': ')[:2] for line in err] == [
    ['error', 'empty.npz'],
    ['error', 'nothing.pb'],
    ['error', 'text.npz'],
  ]


def test_only_bad_files(folder, capsys):
  code, lines, err = run(capsys, 'empty.npz', folder)
  assert (code, lines, len(err)) == (1, [], 2)


def many(count, **over):
  module = summary.summarize_module(readers.from_file('tile.npz').modules[0])
  modules = tuple(
    summary.dataclasses.replace(module, module_id=f'kernel_{i}', **over) for i in range(count)
  )
  return summary.FileSummary(type_name='TuningData', modules=modules, skipped={})


def test_long_lists_are_cut(folder):
  lines = inspect_files.describe({'a.pb': many(35)}).splitlines()
  assert [line.split()[0] for line in lines[3:33]] == [f'kernel_{i}' for i in range(30)]
  assert lines[33] == '  … and 5 more, which --all shows'
  assert lines[34].split()[:2] == ['total', '140']
  lines = inspect_files.describe({'a.pb': many(35)}, max_rows=None).splitlines()
  assert lines[37].split()[0] == 'kernel_34'
  assert not any('more' in line for line in lines)
  lines = inspect_files.describe({f'{i}.pb': many(1) for i in range(31)}).splitlines()
  assert '  … and 1 more, which --all shows' in lines
  assert inspect_files.describe({'a.pb': many(0)}) == 'a.pb: TuningData, 0 modules'


def test_all_lists_all(folder, capsys):
  for i in range(32):
    shutil.copy('test.npz', f'{i}.npz')
  paths = [f'{i}.npz' for i in range(32)]
  assert any('… and 2 more' in line for line in run(capsys, *paths)[1])
  _, lines, _ = run(capsys, '--all', *paths)
  assert sum(line.startswith('  ') and '.npz' in line for line in lines) == 32


def test_names_of_any_length_fit(folder):
  huge = many(
    3,
    ops=10**7,
    edges=10**7,
    computations=10**5,
    config_ops=10**4,
    configs=10**6,
    distinct_configs=10**6,
  )
  long = 'a' * 50 + '日本' + 'b' * 200
  modules = tuple(summary.dataclasses.replace(module, module_id=long) for module in huge.modules)
  file = summary.dataclasses.replace(huge, modules=modules, type_name='ModuleTuningData')
  path = f'/{"folder/" * 30}program.npz'
  for text in (
    inspect_files.describe({path: file}),
    inspect_files.describe({path: file, '/x.npz': file}),
    inspect_files.describe({path: summary.dataclasses.replace(file, modules=modules[:1])}),
  ):
    lines = text.splitlines()
    assert max(len(line) for line in lines if long not in line and path not in line) <= 120
  rows = inspect_files.describe({path: file, '/x.npz': file}).splitlines()
  assert any(re.match(r'  ….*der/program\.npz ', row) for row in rows)
  assert any(
    re.match(r'  aaa.*….*bbb ', row) for row in inspect_files.describe({path: file}).splitlines()
  )


@pytest.mark.parametrize(
  ('nanoseconds', 'text'),
  [
    (None, '-'),
    (2, '2 ns'),
    (999, '999 ns'),
    (1000, '1.00 µs'),
    (1234, '1.23 µs'),
    (9994, '9.99 µs'),
    (9996, '10.0 µs'),
    (99_960, '100 µs'),
    (999_499, '999 µs'),
    (999_501, '1.00 ms'),
    (12_345_678, '12.3 ms'),
    (999_999_999, '1.00 s'),
    (71_000_000_000, '71.0 s'),
    (2**63 - 1, '9,220,000,000 s'),
  ],
)
def test_durations(nanoseconds, text):
  assert inspect_files._duration(nanoseconds) == text


def test_json(folder, capsys):
  code, lines, err = run(capsys, '--json', 'tile.npz', 'empty.npz', CORNER / 'tile_sel.pb')
  assert (code, len(err)) == (1, 1)
  document = json.loads('\n'.join(lines))
  assert document['implementation'] == hlo.implementation()
  tile, bad, several = document['files']
  assert tile == {
    'path': 'tile.npz',
    **summary.to_json(summary.summarize(readers.from_file('tile.npz'))),
  }
  assert tile['modules'][0]['fastest_ns'] == 800
  assert list(bad) == ['path', 'error']
  assert errors.InputError(**bad['error']).path == bad['path'] == 'empty.npz'
  assert 'error: ' + str(errors.InputError(**bad['error'])) == err[0]
  assert (several['type'], len(several['modules'])) == ('TuningData', 3)
  assert several['skipped'] == readers.from_file(CORNER / 'tile_sel.pb').skipped


@pytest.mark.parametrize('by', ['index', 'name'])
def test_one_of_several_modules(capsys, by):
  module = readers.from_file(CORNER / 'tile_sel.pb').modules[2]
  wanted = {'index': '2', 'name': module.module_id}[by]
  _, lines, _ = run(capsys, CORNER / 'tile_sel.pb', f'--module={wanted}')
  assert lines[0].endswith(': TuningData, 1 tile module')
  assert lines[1].split() == ['module', module.module_id]
  code, lines, _ = run(capsys, CORNER / 'tile_sel.pb', f'--module={wanted}', '--dot')
  assert code == 0
  assert '\n'.join([*lines, '']) == drawing.dot(module)


@pytest.mark.parametrize('wanted', ['3', '-1', '', 'x', '²', '0.0'])
def test_no_such_module(capsys, wanted):
  code, lines, (error,) = run(capsys, CORNER / 'tile_sel.pb', f'--module={wanted}')
  assert (code, lines) == (1, [])
  names = [module.module_id for module in readers.from_file(CORNER / 'tile_sel.pb').modules]
  assert error.endswith(
    f'--module: no such module: found {wanted!r}, expected 0 ({names[0]}) or 1 ({names[1]}) '
    f'or 2 ({names[2]})'
  )


def test_name_counts_before_position():
  modules = readers.from_file(CORNER / 'tile_sel.pb').modules
  named = tuple(
    module_lib.dataclasses.replace(module, module_id=name)
    for module, name in zip(modules, ('1', '0', 'x'), strict=True)
  )
  selected = inspect_files.select(hlo.Extraction(named, {}, 'TuningData'), '1')
  assert [module.module_id for module in selected.modules] == ['1']


def test_drawing_needs_one_module(capsys):
  code, lines, (error,) = run(capsys, CORNER / 'tile_sel.pb', '--dot')
  assert (code, lines) == (1, [])
  assert 'not one module to draw: found 3 modules, expected --module=0 (' in error
  with pytest.raises(errors.InputError, match='found 0 modules, expected a file with a module'):
    inspect_files.draw(hlo.Extraction((), {}, 'TuningData'))


def test_max_ops(capsys):
  program = testing.GOLDEN / 'modules/convnet_train_unopt.pb'
  counts = [
    sum('fillcolor' in line for line in run(capsys, program, '--dot', *flags)[1])
    for flags in ([], ['--max_ops=237'], ['--max_ops=40'])
  ]
  assert counts[0] == readers.from_file(program).modules[0].num_ops == 238
  assert counts[0] > counts[1] > 40 >= counts[2]


def test_output(folder, capsys):
  for flags in (['--dot'], ['--json'], []):
    _, lines, _ = run(capsys, 'tile.npz', *flags)
    assert run(capsys, 'tile.npz', *flags, '--output=out') == (0, [], [])
    assert pathlib.Path('out').read_text(encoding='utf-8').splitlines() == lines
  assert run(capsys, 'tile.npz', '--output=no/out') == (
    1,
    [],
    ['error: no/out: cannot write: found No such file or directory'],
  )


@pytest.mark.skipif(shutil.which('dot') is None, reason='needs Graphviz')
def test_svg(folder, capsys):
  assert run(capsys, 'layout.npz', '--svg', '--output=a.svg') == (0, [], [])
  texts = [
    element.text for element in ElementTree.parse('a.svg').iter() if element.tag.endswith('}text')
  ]
  assert texts.count('dot') == 2
  assert 'configurable' in texts


def test_svg_without_graphviz_is_refused(folder, capsys, monkeypatch):
  monkeypatch.setenv('PATH', str(folder))
  code, lines, (error,) = run(capsys, 'layout.npz', '--svg')
  assert (code, lines) == (1, [])
  assert 'apt-get install graphviz' in error
  assert '--dot' in error


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    ([], 'no FILE given; --help shows the usage'),
    (['a', 'b', '--svg'], '2 files; --dot, --svg and --module take one'),
    (['a', 'b', '--module=x'], '2 files; --dot, --svg and --module take one'),
    (['a', '--dot', '--json'], 'At most one of (json, dot, svg) must be True.'),
    (['a', '--max_ops=0'], 'flag --max_ops=0: 0 is not a positive integer'),
  ],
)
def test_usage_errors(capsys, args, message):
  code, lines, (error,) = run(capsys, *args)
  assert (code, lines) == (2, [])
  assert error.startswith('error: ')
  assert error.endswith(message)


def test_script_runs_as_it_stands(folder):
  """Runs the script, whose folder Python puts first on its path.

  No file in that folder may have the name of a standard module.
  """
  result = subprocess.run(
    [sys.executable, ROOT / 'tpu_graphs/commands/inspect_files.py', 'tile.npz'],
    text=True,
    capture_output=True,
    check=False,
    encoding='utf-8',
  )
  assert (result.returncode, result.stderr) == (0, '')
  assert result.stdout.startswith('tile.npz: npz, 1 tile module\n')
  files = [path for name in ('pipelines', 'baselines') for path in (ROOT / name).glob('*.py')]
  assert len(files) > 6
  assert not {path.stem for path in files} & set(sys.stdlib_module_names)


def test_needs_neither_beam_nor_tensorflow(folder):
  code = (
    "import sys; from tpu_graphs import cli; cli.main(['p', 'inspect', 'tile.npz'])\n"
    "print([name for name in ('apache_beam', 'tensorflow', 'jax') if name in sys.modules])"
  )
  result = subprocess.run(
    [sys.executable, '-c', code], text=True, capture_output=True, check=False, encoding='utf-8'
  )
  assert result.stdout.splitlines()[-1] == '[]', result.stderr


@testing.needs_shared
def test_real_files_read_well(capsys):
  paths = sorted(
    str(path)
    for pattern in ('npz/**/*.npz', 'hlo/*', '*.pb')
    for path in (testing.SHARED / 'data').glob(pattern)
  )
  code, lines, err = run(capsys, *paths)
  assert (code, err) == (0, [])
  assert lines[0] == f'{len(paths)} files in {testing.SHARED / "data"}'
  assert max(map(len, lines)) <= 120
  assert 'ragged-all-to-all' in next(line for line in lines if line.startswith('  unknown'))
  for path in paths:
    code, lines, err = run(capsys, path)
    assert (code, err) == (0, [])
    assert max(map(len, lines[1:])) <= 120
