"""Tests of pipelines.convert: feature choices, unknown opcodes, and programs without configs."""

import collections
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from pipelines import convert
from pipelines.conversion import description
from pipelines.conversion import options as options_lib
from pipelines.conversion import output
from tests import testing
from tests import user_features
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.dataset import records
from tpu_graphs.dataset import schema
from tpu_graphs.dataset import statistics
from tpu_graphs.hlo import protos
from tpu_graphs.input import loading
from tpu_graphs.modules import feature_choices
from tpu_graphs.sources import readers

_ROOT = testing.GOLDEN.parents[1]
_CHOICES = feature_choices.FeatureChoices(-1, (user_features.degree, user_features.rank))
_TILES = str(testing.GOLDEN / 'corner/tile_sel.pb')


def _convert(
  tmp_path, inputs, choices=feature_choices.PUBLISHED, *, collection='tile:own', name='o', **options
):
  return convert.convert(
    inputs=[str(path) for path in inputs],
    directory=str(tmp_path / name),
    options=options_lib.ConvertOptions(
      collection=collection, split='train', choices=choices, **options
    ),
  )


@pytest.fixture
def tiles(tmp_path):
  """Files of both sources: two npz files and a protobuf of three modules."""
  for i in range(2):
    np.savez(tmp_path / f'm{i}.npz', **testing.tile_arrays(n=3 + i, seed=i))
  return [tmp_path / 'm0.npz', tmp_path / 'm1.npz', _TILES]


@pytest.mark.parametrize(
  'choices', [_CHOICES, feature_choices.FeatureChoices(-1), feature_choices.PUBLISHED]
)
def test_beam_writes_what_is_made_in_memory(tiles, choices, tmp_path):
  manifest = _convert(tmp_path, tiles, choices)
  modules = [
    module
    for path in tiles
    for module in readers.from_file(path, kind='tile', choices=choices).modules
  ]
  found = collections.Counter()
  for path in (tmp_path / 'o/train').iterdir():
    found.update(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
  assert found == collections.Counter(records.encode_whole(module) for module in modules)
  assert manifest.choices == choices
  assert (tmp_path / 'o/schema.pbtxt').read_text() == schema.text(
    'tile', num_extra=choices.num_extra
  )
  total = statistics.merge_all(map(statistics.Statistics.of, modules)).to_json()
  written = json.loads((tmp_path / 'o/statistics.json').read_text())
  assert written['features'].keys() == total['features'].keys()
  for name, columns in total['features'].items():
    for column in ('min', 'max', 'mean', 'std'):
      np.testing.assert_allclose(
        written['features'][name][column], columns[column], rtol=1e-9, atol=1e-9
      )


def test_a_program_that_knows_the_schema_alone_reads_extra_features(tiles, tmp_path):
  _convert(tmp_path, tiles, _CHOICES)
  result = subprocess.run(
    [sys.executable, _ROOT / 'docs/read_records.py', tmp_path / 'o'],
    check=True,
    text=True,
    capture_output=True,
  )
  assert len(result.stdout.splitlines()) == 5
  for graph in loading.load(str(tmp_path / 'o'), 'train'):
    assert graph.node_sets['op']['extra_feat'].shape == [graph.node_sets['op'].total_size, 3]


def _command(*args, **flags):
  flags = {'collection': 'tile:own', 'input': _TILES, 'output': 'o', **flags}
  return convert.main(
    ['convert.py', *(f'--{name}={value}' for name, value in flags.items()), *args]
  )


def test_flags_reach_the_options(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert (
    _command(
      '--extra_features=tests.user_features:degree',
      '--extra_features=tests.user_features:rank',
      layout_padding=-1,
    )
    == 0
  )
  assert directory_lib.open_directory('o').manifest.choices == _CHOICES
  assert _command(output='p') == 0
  assert directory_lib.open_directory('p').manifest.choices == feature_choices.PUBLISHED


@pytest.mark.parametrize(
  ('flags', 'code', 'words'),
  [
    ({'layout_padding': 1}, 2, 'layout_padding'),
    ({'extra_features': ''}, 1, 'wrongly named'),
    ({'extra_features': 'tests.user_features:none'}, 1, 'no such extra features'),
    ({'extra_features': 'tests.user_features:plain'}, 1, 'not extra features'),
    ({'extra_features': 'no_such_package:f'}, 1, 'no_such_package'),
    ({'extra_features': 'tests.user_features:fails_on_two_ops'}, 1, 'ZeroDivisionError'),
  ],
)
def test_mistake_is_one_line(flags, code, words, tmp_path, monkeypatch, capfd):
  monkeypatch.chdir(tmp_path)
  assert _command(**flags) == code
  out, err = capfd.readouterr()
  assert (out, err.count('\n')) == ('', 1)
  assert words in err
  assert os.listdir(tmp_path) == []


def test_function_that_cannot_be_recorded_is_refused_at_once(tiles, tmp_path):
  @feature_choices.node_features('local', columns=['x'])
  def local(module, hlo):
    raise AssertionError

  with pytest.raises(errors.InputError, match='cannot be imported'):
    _convert(tmp_path, tiles, feature_choices.FeatureChoices(extra=(local,)))
  assert not (tmp_path / 'o').exists()


def test_module_on_which_the_function_fails_is_rejected(tmp_path):
  for n in (1, 2, 3):
    np.savez(tmp_path / f'm{n}.npz', **testing.tile_arrays(n=n))
  choices = feature_choices.FeatureChoices(extra=(user_features.fails_on_two_ops,))
  manifest = _convert(
    tmp_path, [tmp_path / f'm{n}.npz' for n in (1, 2, 3)], choices, on_error='skip'
  )
  assert manifest.rejected_inputs == {'extra features failed': 1}
  assert manifest.splits['train'].modules == 2
  [row] = map(json.loads, (tmp_path / 'o/rejected.jsonl').read_text().splitlines())
  assert row['path'].endswith('m2.npz')
  assert row['where'] == "tests.user_features:fails_on_two_ops for module 'm2'"


@pytest.mark.parametrize(
  'other', [feature_choices.PUBLISHED, feature_choices.FeatureChoices(-1, (user_features.rank,))]
)
def test_interrupted_conversion_is_not_completed_with_other_choices(
  tiles, other, tmp_path, monkeypatch
):
  def interrupt(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(convert.transform, 'Convert', interrupt)
    with pytest.raises(KeyboardInterrupt):
      _convert(tmp_path, tiles, _CHOICES)
  assert (tmp_path / 'o' / output.IN_PROGRESS_NAME).exists()
  with pytest.raises(errors.InputError, match='unfinished conversion with other options'):
    _convert(tmp_path, tiles, other)
  assert _convert(tmp_path, tiles, _CHOICES).choices == _CHOICES


def _program(path, opcodes):
  """Writes a layout module without configs, with one op per opcode; returns its path."""
  module = protos.HloModuleProto(name=path.stem)
  computation = module.computations.add(name='main', id=1, root_id=1)
  for i, opcode in enumerate(opcodes, start=1):
    computation.instructions.add(name=f'i{i}', id=i, opcode=opcode)
  path.write_bytes(protos.ModuleTuningData(module=module).SerializeToString())
  return path


def test_unknown_opcodes_are_counted_over_all_modules(tmp_path, capsys):
  inputs = [
    _program(tmp_path / 'a.pb', ['add', 'topk', 'zeta', 'topk', 'ragged-all-to-all', '']),
    _program(tmp_path / 'b.pb', ['topk', 'alpha', 'zeta', 'add']),
  ]
  manifest = _convert(tmp_path, inputs, collection='layout:own')
  assert list(manifest.unknown_opcodes.items()) == [
    ('topk', 3),
    ('zeta', 2),
    ('', 1),
    ('alpha', 1),
    ('ragged-all-to-all', 1),
  ]
  assert directory_lib.open_directory(str(tmp_path / 'o')).manifest == manifest
  assert (
    "8 ops of unknown opcodes (id 0): topk 3, zeta 2, '' 1, alpha 1, ragged-all-to-all 1"
    in description.describe(manifest).splitlines()
  )


def test_many_unknown_opcodes(tmp_path):
  names = [f'x{i:03}' for i in range(150)] + ['z' * 5000, 'line\nfeed', '\x1b[31m']
  manifest = _convert(
    tmp_path, [_program(tmp_path / 'a.pb', names + names[120:])], collection='layout:own'
  )
  expected = sorted(
    {**dict.fromkeys(names[:120], 1), **{name[:100]: 2 for name in names[120:]}}.items(),
    key=lambda pair: (-pair[1], pair[0]),
  )
  assert list(manifest.unknown_opcodes.items()) == expected[: manifest_lib.MAX_UNKNOWN_OPCODES]
  [line] = [
    line for line in description.describe(manifest).splitlines() if 'unknown opcodes' in line
  ]
  assert line.isprintable()
  assert line.endswith(', and 90 more in manifest.json')


def test_known_opcodes_are_not_reported(tiles, tmp_path):
  manifest = _convert(tmp_path, tiles)
  assert manifest.unknown_opcodes == {}
  assert 'opcode' not in description.describe(manifest)


def test_programs_without_configs_are_reported(tmp_path):
  np.savez(tmp_path / 'm.npz', **testing.layout_arrays())
  inputs = [
    tmp_path / 'm.npz',
    _program(tmp_path / 'a.pb', ['add']),
    _program(tmp_path / 'b.pb', ['add', 'dot']),
  ]
  for paths, without in ((inputs[:1], 0), (inputs[:2], 1), (inputs, 2)):
    manifest = _convert(tmp_path, paths, collection='layout:own', name=f'o{without}')
    assert manifest.splits['train'].without_configs == without
    lines = [
      line for line in description.describe(manifest).splitlines() if 'without configs' in line
    ]
    assert [line.split(' without')[0] for line in lines] == [[], ['1 module'], ['2 modules']][
      without
    ]
