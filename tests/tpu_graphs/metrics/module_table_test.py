"""Tests of tpu_graphs.metrics.module_table.

Columns of results and of CSV files are correct; damage is reported with its line.
"""

import math

import numpy as np
import pytest

from tpu_graphs import errors
from tpu_graphs.metrics import metrics
from tpu_graphs.metrics import module_table

_HEADER = 'module_id,num_configs,opa,kendall_tau,top_1_error,top_10_error'
_CSV = f'{_HEADER}\nb,3,0.5,-0.25,0.125,0\n"a,π",1,nan,,nan,nan\n'


def _evaluate(module_id, runtimes, scores, ks=(1, 10)):
  return metrics.evaluate_module(module_id, np.array(runtimes), np.array(scores), ks=ks)


def _content(table):
  return (
    table.module_ids,
    table.num_configs.tolist(),
    {name: column.tolist() for name, column in table.values.items()},
  )


def test_columns_of_results_are_sorted_by_module():
  results = [_evaluate('b', [10, 20, 30], [3, 2, 1]), _evaluate('a', [10], [1])]
  for order in (results, results[::-1]):
    table = module_table.ModuleTable.of(order)
    assert table.module_ids == ('a', 'b')
    assert table.num_configs.tolist() == [1, 3]
    np.testing.assert_equal(
      {name: column.tolist() for name, column in table.values.items()},
      {
        'opa': [math.nan, 0],
        'kendall_tau': [math.nan, -1],
        'top_1_error': [math.nan, 2],
        'top_10_error': [math.nan, 0],
      },
    )


def test_nothing():
  assert _content(module_table.ModuleTable.of([])) == ((), [], {'opa': [], 'kendall_tau': []})
  assert _content(module_table.parse(f'{_HEADER}\n', path='p'))[:2] == ((), [])


def test_results_are_checked_as_for_a_summary():
  a = _evaluate('a', [10], [1])
  with pytest.raises(errors.InputError, match=r'^a: module evaluated twice'):
    module_table.ModuleTable.of([a, a])
  with pytest.raises(errors.InputError, match='modules evaluated for different k'):
    module_table.ModuleTable.of([a, _evaluate('b', [10], [1], ks=(2,))])


def test_parse():
  table = module_table.parse(_CSV, path='p')
  assert table.module_ids == ('a,π', 'b')
  assert table.num_configs.tolist() == [1, 3]
  np.testing.assert_equal(
    _content(table)[2],
    {
      'opa': [math.nan, 0.5],
      'kendall_tau': [math.nan, -0.25],
      'top_1_error': [math.nan, 0.125],
      'top_10_error': [math.nan, 0],
    },
  )
  for same in (_CSV.replace('\n', '\r\n'), f'\ufeff{_CSV}'):
    np.testing.assert_equal(_content(module_table.parse(same, path='p')), _content(table))


def test_unknown_columns_are_not_read_and_metrics_may_be_fewer():
  table = module_table.parse(
    'program,opa,module_id,num_configs,top_01_error\nx,1,a,2,y\n', path='p'
  )
  assert _content(table) == (('a',), [2], {'opa': [1]})


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    pytest.param(
      '',
      r'line 1: column missing: found nothing, expected module_id; give the per_module',
      id='empty',
    ),
    pytest.param(
      'module_id,opa\n', 'line 1: column missing: .*expected num_configs', id='no num_configs'
    ),
    pytest.param(
      'module_id,num_configs,loss\n', 'line 1: column missing: .*expected opa', id='no metric'
    ),
    pytest.param(
      'module_id,num_configs,opa,opa\n', 'line 1: column twice: found opa', id='column twice'
    ),
    pytest.param(
      f'{_HEADER}\na,1,0\n', 'line 2: wrong number of cells: found 3, expected 6', id='cut off'
    ),
    pytest.param(
      f'{_HEADER}\na,1,0,0,0,0\n\n', 'line 3: wrong number of cells: found 0', id='empty line'
    ),
    pytest.param(
      f'{_HEADER}\na,1,0,0,0,0\na,1,0,0,0,0\n',
      'line 3: module occurs twice: found a, as in line 2',
      id='module twice',
    ),
    pytest.param(f'{_HEADER}\na,1,x,0,0,0\n', "line 2, opa: not a number: found 'x'", id='text'),
    pytest.param(
      f'{_HEADER}\na,,1,0,0,0\n',
      "line 2, num_configs: not a number of configs: found ''",
      id='no number of configs',
    ),
    pytest.param(
      f'{_HEADER}\na,nan,1,0,0,0\n',
      "line 2, num_configs: not a number of configs: found 'nan'",
      id='NaN configs',
    ),
    pytest.param(
      f'{_HEADER}\na,1.5,1,0,0,0\n',
      "num_configs: not a number of configs: found '1.5', expected an integer",
      id='half a config',
    ),
    pytest.param(
      f'{_HEADER}\na,-1,1,0,0,0\n',
      "num_configs: not a number of configs: found '-1'",
      id='negative configs',
    ),
    pytest.param(
      f'{_HEADER}\na,1,1.1,0,0,0\n',
      'opa: number out of range: found 1.1, expected 0 to 1',
      id='opa',
    ),
    pytest.param(
      f'{_HEADER}\na,1,1,-2,0,0\n',
      'kendall_tau: number out of range: found -2, expected -1 to 1',
      id='tau',
    ),
    pytest.param(
      f'{_HEADER}\na,1,1,0,-1,0\n',
      'top_1_error: number out of range: found -1, expected >= 0',
      id='error',
    ),
    pytest.param(
      f'{_HEADER}\na,1,1,0,inf,0\n',
      'top_1_error: number out of range: found inf, expected >= 0, finite',
      id='infinite',
    ),
    pytest.param(f'{_HEADER}\n"a,1,1,0,0,0\n', 'line 2: damaged CSV', id='quote not closed'),
  ],
)
def test_refuses(text, message):
  with pytest.raises(errors.InputError, match=f'^p.csv: .*{message}'):
    module_table.parse(text, path='p.csv')


def test_select():
  table = module_table.parse(_CSV, path='p').select([1])
  assert _content(table) == (
    ('b',),
    [3],
    {'opa': [0.5], 'kendall_tau': [-0.25], 'top_1_error': [0.125], 'top_10_error': [0]},
  )
