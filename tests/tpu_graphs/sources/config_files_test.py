"""Tests of tpu_graphs.sources.config_files, via `candidates.read`: every form and every fault."""

import json
import math

import numpy as np
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import candidates

_TILE, _LAYOUT = features.tile_feature_names(), features.layout_feature_names()
# The name of the last op is the number of the first.
_NAMES = ['parameter.1', 'dot-π', 'add/2', 'copy', '0']
_LONG = [0] * 18


def _module(kind, **over):
  arrays = testing.arrays(kind, n=5, c=2, nc=2, **over)
  arrays['node_splits'] = np.array([0, 5])
  if kind == 'layout':
    arrays['node_config_feat'] = arrays['node_config_feat'].astype(np.int8)
  return module_lib.Module(module_id='m', kind=kind, config_id=np.arange(2), **arrays)


@pytest.fixture
def read(tmp_path):
  """Returns a function that reads configs from the text of a file."""

  def read(kind, suffix, text, *, module=None, names=None):
    path = tmp_path / f'cönfigs.{suffix}'
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return candidates.read(path, module or _module(kind), names=names)

  return read


def _lines(*rows):
  return '\n'.join(','.join(map(str, row)) for row in rows)


def test_tile_in_every_form(read):
  values = np.random.default_rng(0).normal(size=(3, 24)).astype(np.float32)
  rows = values.tolist()
  mixed = [
    rows[0],
    dict(zip(_TILE, rows[1], strict=True)),
    dict(reversed([*zip(_TILE, rows[2], strict=True)])),
  ]
  for suffix, text in (
    ('json', json.dumps(rows)),
    ('json', json.dumps(mixed)),
    ('csv', _lines(_TILE, *rows)),
    ('csv', _lines(_TILE[::-1], *(row[::-1] for row in rows)) + '\n\n'),
  ):
    found = read('tile', suffix, text)
    np.testing.assert_array_equal(found.config_feat, values)
    assert found.config_id.tolist() == [0, 1, 2]
    assert not found.is_measured


def test_layouts_as_lists(read):
  values = np.random.default_rng(0).integers(-1, 6, (3, 2, 18))
  found = read('layout', 'json', json.dumps(values.tolist()))
  np.testing.assert_array_equal(found.node_config_feat, values)
  assert found.node_config_ids.tolist() == [0, 1]


def test_lists_describe_convolutions_dots_and_reshapes_if_the_program_has_no_configs(read):
  opcode = np.array(
    [features.opcodes()[name] for name in ('add', 'reshape', 'convolution', 'copy', 'dot')]
  )
  module = _module(
    'layout',
    node_opcode=opcode,
    node_config_ids=np.zeros(0, int),
    node_config_feat=np.zeros((2, 0, 18), int),
  )
  found = read('layout', 'json', json.dumps([[_LONG] * 3]), module=module)
  assert found.node_config_ids.tolist() == [1, 2, 4]


@pytest.mark.parametrize('names', [None, _NAMES])
def test_layouts_by_op(read, names):
  first, second = (_NAMES[3], _NAMES[1]) if names else ('3', '1')
  content = [
    {first: {'output': [3, 0], 'kernel': [5, 4, 3, 2, 1, 0]}},
    {},
    {second: {'input': []}, first: {'input': [1]}},
  ]
  found = read('layout', 'json', json.dumps(content), names=names)
  assert found.node_config_ids.tolist() == [1, 3]
  expected = np.full((3, 2, 18), -1)
  expected[0, 1, :2], expected[0, 1, 12:], expected[2, 1, 6] = [3, 0], [5, 4, 3, 2, 1, 0], 1
  np.testing.assert_array_equal(found.node_config_feat, expected)


def test_layouts_as_csv(read):
  header = ['add/2/kernel_layout_0', 'dot-π/output_layout_1', 'dot-π/output_layout_0']
  found = read('layout', 'csv', '\ufeff' + _lines(header, [4, 0, 1], [-1, 2, 3]), names=_NAMES)
  assert found.node_config_ids.tolist() == [1, 2]
  expected = np.full((2, 2, 18), -1)
  expected[:, 1, 12], expected[:, 0, 0], expected[:, 0, 1] = [4, -1], [1, 3], [0, 2]
  np.testing.assert_array_equal(found.node_config_feat, expected)


def test_a_name_goes_before_a_position(read):
  found = read('layout', 'json', '[{"0": {"output": [1, 0]}}]', names=_NAMES)
  assert found.node_config_ids.tolist() == [4]


@pytest.mark.parametrize(
  ('text', 'where', 'reason'),
  [
    ('[[1,', None, 'not JSON'),
    ('', None, 'not JSON'),
    ('{}', None, 'not a list'),
    ('[]', None, 'not a list'),
    ('[7]', 'config 0', 'wrong config'),
    ('[[1, 2]]', 'config 0', 'wrong config'),
    (
      json.dumps([[0.5] * 24, [*[1] * 23, '1']]),
      f'config 1, {_TILE[23]}',
      "not a number: found '1'",
    ),
    (json.dumps([[*[1] * 23, True]]), f'config 0, {_TILE[23]}', 'not a number: found True'),
    (json.dumps([[*[1] * 23, math.nan]]), 'config_feat[0, 23]', 'not finite'),
    (json.dumps([dict.fromkeys(_TILE[1:], 1)]), 'config 0', 'expected kernel_bounds_0'),
    (
      json.dumps([{**dict.fromkeys(_TILE, 1), 'kernel_bound_0': 1}]),
      'config 0',
      "found 'kernel_bound_0'",
    ),
    (b'\xff', None, 'not UTF-8 text'),
  ],
)
def test_fault_in_tile_json(read, text, where, reason):
  with pytest.raises(errors.InputError, match=reason) as caught:
    read('tile', 'json', text)
  assert caught.value.where == where
  assert caught.value.path.endswith('cönfigs.json')


@pytest.mark.parametrize(
  ('text', 'where', 'reason'),
  [
    ('[[]]', 'config 0', 'for each of 2 configurable ops'),
    ('[[[], []]]', 'config 0', 'wrong config'),
    (json.dumps([[_LONG, _LONG], [_LONG]]), 'config 1', 'wrong config'),
    (json.dumps([[_LONG, _LONG], {}]), 'config 1', 'in all configs a map'),
    (
      json.dumps([[_LONG, [*_LONG[1:], 1.0]]]),
      f'config 0, op 1, {_LAYOUT[17]}',
      'not a dimension: found 1.0',
    ),
    (
      json.dumps([[_LONG, [*_LONG[1:], 200]]]),
      f'config 0, op 1, {_LAYOUT[17]}',
      'not a dimension: found 200',
    ),
    ('[{"9": {}}]', 'config 0', 'expected a position, 0 to 4'),
    ('[{"1": [1, 0]}]', 'config 0, op 1', 'wrong layouts of an op'),
    ('[{"1": {"out": [1, 0]}}]', 'config 0, op 1', 'a map of output or input or kernel'),
    ('[{"1": {"output": 1}}]', 'config 0, op 1, output', 'wrong layout'),
    ('[{"1": {"output": [6, 5, 4, 3, 2, 1, 0]}}]', 'config 0, op 1, output', 'at most 6'),
    ('[{"1": {"output": [-1]}}]', 'config 0, op 1, output', 'not a dimension: found -1'),
    ('[{}, {"1": {"output": [1, 1]}}]', 'config 1, op 1, output', 'repeated dimension'),
  ],
)
def test_fault_in_layout_json(read, text, where, reason):
  with pytest.raises(errors.InputError, match=reason) as caught:
    read('layout', 'json', text)
  assert caught.value.where == where
  assert caught.value.path.endswith('cönfigs.json')


def test_name_that_no_op_has(read):
  with pytest.raises(errors.InputError, match="no such op: found 'dot', expected dot-π") as caught:
    read('layout', 'json', '[{"dot": {}}]', names=_NAMES)
  assert caught.value.where == 'config 0'
  with pytest.raises(errors.InputError, match='one of the 5 ops of the program'):
    read('layout', 'csv', 'zzz/output_layout_0\n1', names=_NAMES)


_ROW = [1] * 24


@pytest.mark.parametrize(
  ('kind', 'text', 'where', 'reason'),
  [
    ('tile', '', 'line 1', 'column missing'),
    ('tile', _lines(_TILE), None, 'without configs'),
    ('tile', _lines(_TILE[:-1], _ROW), 'line 1', f'expected {_TILE[-1]}'),
    ('tile', _lines([*_TILE, _TILE[3]], _ROW), 'line 1', f"repeated column: found '{_TILE[3]}'"),
    (
      'tile',
      _lines([*_TILE[:-1], 'input_bounds_products'], _ROW),
      'line 1',
      f'expected {_TILE[-1]}',
    ),
    (
      'tile',
      _lines(_TILE, _ROW, _ROW[1:]),
      'line 3',
      'wrong number of cells: found 23, expected 24',
    ),
    (
      'tile',
      _lines(_TILE, [], _ROW, ['x', *_ROW[1:]]),
      f'line 4, column {_TILE[0]}',
      "not a number: found 'x'",
    ),
    ('tile', _lines(_TILE, ['', *_ROW[1:]]), f'line 2, column {_TILE[0]}', 'not a number'),
    ('tile', _lines(_TILE, ['inf', *_ROW[1:]]), 'config_feat[0, 0]', 'not finite'),
    ('layout', _lines([_LAYOUT[0]], [1]), 'line 1', 'unknown column'),
    ('layout', _lines(['1/output'], [1]), 'line 1', 'unknown column'),
    ('layout', _lines(['7/output_layout_0'], [1]), 'line 1', 'no such op'),
    (
      'layout',
      _lines(['1/output_layout_0'], ['1.5']),
      'line 2, column 1/output_layout_0',
      "not a number: found '1.5'",
    ),
    (
      'layout',
      _lines(['1/output_layout_0'], [-2]),
      'line 2, column 1/output_layout_0',
      'not a dimension: found -2',
    ),
    ('layout', _lines(['1/output_layout_0']), None, 'without configs'),
    ('layout', 'a\x00b,"', 'line 1', 'unknown column|not CSV'),
  ],
)
def test_fault_in_csv(read, kind, text, where, reason):
  with pytest.raises(errors.InputError, match=reason) as caught:
    read(kind, 'csv', text)
  assert caught.value.where == where
  assert caught.value.path.endswith('cönfigs.csv')
