"""Tests of tpu_graphs.metrics.config_indices.

Positions are found in any order, and invalid positions are refused by name.
"""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tpu_graphs import errors
from tpu_graphs.metrics import config_indices
from tpu_graphs.metrics import metrics


def _parse(text):
  return config_indices.parse(text, path='p.json')


def test_rows_of_a_module():
  indices = _parse('{"m": [7, 0, 7, 3], "größe": [1]}')
  config_id = np.array([3, 9, 7, 0])
  assert indices.rows('m', config_id).tolist() == [2, 3, 2, 0]
  assert indices.positions['größe'].tolist() == [1]
  assert indices.repeated() == {'m': 1}


def test_repeated_positions_count_twice_in_metrics():
  rows = _parse('{"m": [0, 0, 2]}').rows('m', np.arange(3))
  runtimes, scores = np.array([10, 30, 20]), np.array([1, 2, 3])
  result = metrics.evaluate_module('m', runtimes[rows], scores[rows], ks=(1,))
  assert result.num_configs == 3
  assert (result.pairs.concordant, result.pairs.tied_both) == (2, 1)


@hypothesis.given(st.lists(st.integers(0, 50), unique=True, min_size=1), st.data())
def test_rows_of_finds_every_position(config_id, data):
  positions = data.draw(st.lists(st.sampled_from(config_id), min_size=1))
  config_id, positions = np.array(config_id), np.array(positions)
  rows = config_indices.rows_of(positions, config_id, where='m')
  assert config_id[rows].tolist() == positions.tolist()


@pytest.mark.parametrize(
  ('config_id', 'positions', 'message'),
  [
    pytest.param([0, 1, 2], [1, 3], 'found 3, expected one of 3 configs, 0 to 2$', id='behind'),
    pytest.param(
      [0, 2],
      [0, 1],
      'found 1, expected one of 2 configs, 0 to 2; convert the data with all configs',
      id='hole',
    ),
    pytest.param([5, 2], [0], 'found 0, .*; convert', id='before'),
    pytest.param([], [0], 'found 0, expected none, it has no config$', id='no config'),
  ],
)
def test_position_without_config_is_refused(config_id, positions, message):
  indices = _parse(f'{{"a": {positions}}}')
  with pytest.raises(errors.InputError, match=f'^p.json: a: no such config: {message}'):
    indices.rows('a', np.array(config_id, np.int64))


def test_unknown_modules_are_refused():
  indices = _parse('{"b": [1], "a": [1], "c": [0]}')
  indices.check_modules(['a', 'b', 'c', 'd'])
  with pytest.raises(
    errors.InputError, match=r'^p\.json: unknown module: found b, c, expected .*split: a, d$'
  ):
    indices.check_modules(['d', 'a'])


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    pytest.param('', 'damaged JSON', id='empty'),
    pytest.param('{"a": [1', 'damaged JSON', id='cut off'),
    pytest.param('[' * 100_000, 'damaged JSON', id='deep'),
    pytest.param('[1, 2]', r'not a map of modules: found \[1, 2\], expected {"MODULE"', id='list'),
    pytest.param('{}', 'not a map of modules: found {}', id='nothing'),
    pytest.param('{"a": [1], "a": [2]}', 'a: module occurs twice', id='module twice'),
    pytest.param(
      '{"a": 1}', r'a: not a list of positions: found 1, expected \[POSITION', id='number'
    ),
    pytest.param('{"a": []}', r'a: not a list of positions: found \[\]', id='empty list'),
    pytest.param('{"a": {"b": 1}}', 'a: not a list of positions: found {"b": 1}', id='map'),
    pytest.param(
      '{"a": [0, -1]}', r'a\[1\]: not a position: found -1, expected an integer >= 0', id='negative'
    ),
    pytest.param('{"a": [1.0]}', r'a\[0\]: not a position: found 1.0', id='float'),
    pytest.param('{"a": [true]}', r'a\[0\]: not a position: found true', id='bool'),
    pytest.param('{"a": ["1"]}', r'a\[0\]: not a position: found "1"', id='text'),
    pytest.param('{"a": [9223372036854775808]}', r'a\[0\]: not a position', id='beyond int64'),
  ],
)
def test_refuses(text, message):
  with pytest.raises(errors.InputError, match=f'^p.json: {message}'):
    _parse(text)
