"""Tests of tpu_graphs.metrics.submission.

Rows and scores are worked out by hand; there are perfect rankings and malformed files.
"""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import scipy.stats

from tpu_graphs import errors
from tpu_graphs.metrics import submission

_UNMEASURED = -1


def _measured(module_id, runtimes, config_id=None):
  runtimes = np.array(runtimes)
  config_id = np.arange(runtimes.size) if config_id is None else np.array(config_id)
  return submission.Measured(module_id, config_id, runtimes)


def _parse(*lines):
  return submission.parse('\n'.join([submission.HEADER, *lines, '']), path='s.csv')


def _score(collection, line, *modules, **options):
  parsed = _parse(*([line] if isinstance(line, str) else line))
  return submission.score_collection(parsed, collection, modules, **options)


def test_numbers_of_the_competition():
  assert sum(submission.ROWS.values()) == 894
  assert dict(submission.ROWS) == {
    'tile:xla': 844,
    'layout:xla:default': 8,
    'layout:xla:random': 8,
    'layout:nlp:default': 17,
    'layout:nlp:random': 17,
  }


def test_rows_worked_out_by_hand():
  config_id, order = np.arange(7), np.array([6, 2, 0, 1, 3, 5, 4])
  assert submission.row('tile:xla', 'm', config_id, order) == 'tile:xla:m,6;2;0;1;3'
  assert (
    submission.row('layout:nlp:default', 'm', config_id, order)
    == 'layout:nlp:default:m,6;2;0;1;3;5;4'
  )
  assert submission.row('tile:xla', 'm', np.array([1, 0]), np.array([0, 1])) == 'tile:xla:m,1;0'


@pytest.mark.parametrize(
  ('collection', 'module_id', 'config_id', 'message'),
  [
    pytest.param(
      'tile:xlb',
      'm',
      [0],
      "not a collection of the competition: found 'tile:xlb', expected tile:xla, ",
      id='other',
    ),
    pytest.param(
      'tile:xla',
      'm',
      [0, 1, 3],
      'tile:xla:m: configs left out: found 3 configs, without position 2',
      id='hole',
    ),
    pytest.param(
      'tile:xla', 'm', [1, 2], 'configs left out: found 2 configs, without position 0', id='first'
    ),
    pytest.param('tile:xla', 'm', [], 'configs left out: found 0 configs', id='none'),
    pytest.param('tile:xla', 'a,b', [0], 'tile:xla:a,b: name cannot be written', id='comma'),
    pytest.param('tile:xla', 'a"b', [0], 'name cannot be written', id='quote'),
  ],
)
def test_refuses_rows(collection, module_id, config_id, message):
  with pytest.raises(errors.InputError, match=message):
    submission.row(collection, module_id, np.array(config_id, np.int64), np.arange(len(config_id)))


def test_missing_rows_are_reported():
  assert submission.missing_rows(submission.ROWS) == []
  assert submission.missing_rows({**submission.ROWS, 'tile:xla': 843, 'layout:nlp:random': 18}) == [
    'tile:xla: 843 of 844 rows',
    'layout:nlp:random: 18 of 17 rows',
  ]
  assert len(submission.missing_rows({})) == 5


@pytest.mark.parametrize(
  ('positions', 'score'),
  [
    ('0;1;2;3;4', 1),
    ('5;6;1;2;3', 2 - 12 / 10),
    ('6;5;4;3;2', 2 - 14 / 10),
    ('6;5;4;3;2;0;1', 2 - 14 / 10),
    ('1;6;5;4;0', 1),
  ],
)
def test_tile_score_worked_out_by_hand(positions, score):
  module = _measured('m', [10, 12, 14, 16, 18, 20, 22])
  found = _score('tile:xla', f'tile:xla:m,{positions}', module)
  assert found == submission.CollectionScore(
    score=pytest.approx(score), rows=1, undefined=0, unmeasured=0, missing=0
  )


def test_tile_score_can_be_negative_and_is_relative_to_normalizers():
  module = _measured('m', [0.25, 1.0, 1.5, 2.0, 1.0, 1.0])
  assert _score('tile:xla', 'tile:xla:m,1;2;3;4;5', module).score == 2 - 4


def test_layout_score_worked_out_by_hand():
  # In the order 0, 3, 1, 2, the pairs (1, 3) and (2, 3) of the runtimes 10, 20, 20, 30 are wrong,
  # the pair (1, 2) ties, and three pairs are right.
  module = _measured('m', [10, 20, 20, 30])
  found = _score('layout:xla:random', 'layout:xla:random:m,0;3;1;2', module)
  assert found.score == pytest.approx((3 - 2) / (5 * 6) ** 0.5)
  assert found.score == pytest.approx(scipy.stats.kendalltau([10, 30, 20, 20], range(4)).statistic)


def test_layout_compares_runtimes_as_integers():
  module = _measured('m', np.arange(910_876_401, 910_876_407))
  assert _score('layout:xla:random', 'layout:xla:random:m,0;1;2;3;4;5', module).score == 1


@hypothesis.given(
  st.dictionaries(
    st.sampled_from('abcdef'),
    st.lists(st.integers(2, 2**60), min_size=2, max_size=30, unique=True),
    min_size=1,
  ),
  st.randoms(),
)
@pytest.mark.parametrize('collection', submission.ROWS)
def test_perfect_and_reversed_ranking(collection, runtimes_of, random):
  modules = []
  for module_id, runtimes in runtimes_of.items():
    config_id = random.sample(range(len(runtimes)), len(runtimes))
    modules.append(_measured(module_id, runtimes, config_id))
  for sign, layout_score in ((1, 1), (-1, -1)):
    rows = [
      submission.row(
        collection, module.module_id, module.config_id, np.argsort(sign * module.relative_runtime)
      )
      for module in modules
    ]
    found = _score(collection, rows, *modules)
    assert found.rows == len(modules)
    if sign == 1 or collection != 'tile:xla':
      assert found.score == pytest.approx(layout_score)
    assert found.score <= 1


def test_score_is_the_mean_over_rows_then_over_collections():
  parsed = _parse('tile:xla:a,0;1', 'tile:xla:b,1;0', 'tile:xla:c,1;0', 'layout:xla:random:a,1;0')
  two = [_measured(name, [10, 20]) for name in 'abc']
  tile = submission.score_collection(parsed, 'tile:xla', two)
  layout = submission.score_collection(parsed, 'layout:xla:random', two[:1])
  assert (tile.score, layout.score) == (1, -1)
  assert submission.overall([tile, layout]) == 0
  assert submission.overall([]) is None


def test_nothing_to_rank_is_counted_and_left_out_for_layout_and_perfect_for_tile():
  for runtimes, positions in (([5], '0'), ([5, 5], '1;0')):
    found = _score(
      'layout:xla:random',
      [f'layout:xla:random:m,{positions}', 'layout:xla:random:n,0;1'],
      _measured('m', runtimes),
      _measured('n', [5, 6]),
    )
    assert (found.score, found.rows, found.undefined) == (1, 1, 1)
    assert (
      _score(
        'layout:xla:random', f'layout:xla:random:m,{positions}', _measured('m', runtimes)
      ).score
      is None
    )
    assert _score('tile:xla', f'tile:xla:m,{positions}', _measured('m', runtimes)).score == 1


def test_modules_without_runtimes_are_counted_not_scored():
  found = _score('tile:xla', 'tile:xla:m,1;0', _measured('m', [_UNMEASURED] * 2))
  assert found == submission.CollectionScore(
    score=None, rows=0, undefined=0, unmeasured=1, missing=0
  )


def test_configs_without_runtimes_are_left_out():
  module = _measured('m', [20, _UNMEASURED, 10, 30])
  assert _score('layout:xla:random', 'layout:xla:random:m,1;2;0;3', module).score == 1
  assert _score('tile:xla', 'tile:xla:m,1;0;3;2', module).score == 1


def test_row_with_no_runtime_at_all_is_refused():
  module = _measured('m', [_UNMEASURED] * 5 + [10])
  with pytest.raises(
    errors.InputError, match='line 2, tile:xla:m: no config with a runtime: found 5 configs without'
  ):
    _score('tile:xla', 'tile:xla:m,0;1;2;3;4', module)


def test_partial_counts_only_the_rows_there():
  modules = [_measured(name, [10, 20]) for name in 'abcde']
  found = _score('tile:xla', 'tile:xla:c,0;1', *modules, partial=True)
  assert (found.score, found.rows, found.missing) == (1, 1, 4)
  with pytest.raises(
    errors.InputError,
    match=r'^s.csv: row missing: found no row for tile:xla:a, tile:xla:b, '
    r'tile:xla:d, … \(4 in all\), expected all 5 modules of tile:xla; give --partial',
  ):
    _score('tile:xla', 'tile:xla:c,0;1', *modules)


@pytest.mark.parametrize(
  ('collection', 'line', 'message'),
  [
    pytest.param(
      'tile:xla',
      'tile:xla:m,0;1;2;3;6',
      'line 2, tile:xla:m: no such config: found 6, expected one of 6 configs',
      id='position out of range',
    ),
    pytest.param(
      'tile:xla',
      'tile:xla:m,0;1;2;3',
      'line 2, tile:xla:m: too few positions: found 4, expected at least 5',
      id='too few for tile',
    ),
    pytest.param(
      'layout:xla:random',
      'layout:xla:random:m,0;1;2;3;4',
      'line 2, layout:xla:random:m: too few positions: found 5, expected all 6 configs',
      id='no permutation',
    ),
    pytest.param(
      'tile:xla',
      ['tile:xla:m,0;1;2;3;4', 'tile:xla:n,0'],
      'line 3: unknown module: found tile:xla:n, expected a module of the split, such as m',
      id='unknown module',
    ),
  ],
)
@pytest.mark.parametrize(
  'runtimes', [[10] * 6, [_UNMEASURED] * 6], ids=['measured', 'not measured']
)
def test_rows_that_do_not_fit_the_data_are_refused(collection, line, message, runtimes):
  with pytest.raises(errors.InputError, match=f'^s.csv: {message}'):
    _score(collection, line, _measured('m', runtimes))


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    pytest.param('', 'line 1: wrong header: found nothing, expected ID,TopConfigs', id='empty'),
    pytest.param('id,topconfigs\n', "line 1: wrong header: found 'id,topconfigs'", id='header'),
    pytest.param('tile:xla:m,0\n', "line 1: wrong header: found 'tile:xla:m,0'", id='no header'),
    pytest.param(
      'ID,TopConfigs\ntile:xla:m\n',
      "line 2: row without a comma: found 'tile:xla:m'",
      id='no comma',
    ),
    pytest.param(
      'ID,TopConfigs\nm,0\n',
      "line 2: not an id: found 'm', expected COLLECTION:MODULE",
      id='no collection',
    ),
    pytest.param(
      'ID,TopConfigs\ntile:xla:,0\n', "line 2: not an id: found 'tile:xla:'", id='no module'
    ),
    pytest.param('ID,TopConfigs\n"tile:xla:m",0\n', 'line 2: not an id', id='quotes'),
    pytest.param(
      f'ID,TopConfigs\n{"x" * 99},0\n', f"line 2: not an id: found '{'x' * 40}…'", id='long'
    ),
    pytest.param(
      'ID,TopConfigs\n\ntile:xla:m,0;a;1\n',
      "line 3, tile:xla:m: not a position: found 'a'",
      id='text',
    ),
    pytest.param(
      'ID,TopConfigs\ntile:xla:m,\n',
      "line 2, tile:xla:m: not a position: found ''",
      id='no positions',
    ),
    pytest.param(
      'ID,TopConfigs\ntile:xla:m,0;1;\n', "not a position: found ''", id='semicolon at the end'
    ),
    pytest.param('ID,TopConfigs\ntile:xla:m,0; 1\n', "not a position: found ' 1'", id='blank'),
    pytest.param('ID,TopConfigs\ntile:xla:m,-1\n', "not a position: found '-1'", id='negative'),
    pytest.param('ID,TopConfigs\ntile:xla:m,1.0\n', "not a position: found '1.0'", id='float'),
    pytest.param('ID,TopConfigs\ntile:xla:m,٣\n', 'not a position', id='other digits'),
    pytest.param(f'ID,TopConfigs\ntile:xla:m,{"9" * 30}\n', 'not a position', id='beyond int64'),
    pytest.param(
      'ID,TopConfigs\ntile:xla:m,4;0;3;0;4\n',
      'line 2, tile:xla:m: position occurs twice: found 0',
      id='repeat',
    ),
    pytest.param(
      'ID,TopConfigs\ntile:xla:m,0\ntile:xla:m,1\n',
      'line 3, tile:xla:m: id occurs twice: found the id of line 2',
      id='id twice',
    ),
  ],
)
def test_refuses_malformed_files(text, message):
  with pytest.raises(errors.InputError, match=f'^s.csv: (.*: )?{message}'):
    submission.parse(text, path='s.csv')


def test_parse_reads_what_editors_and_other_programs_write():
  text = '\ufeffID,TopConfigs\r\ntile:xla:a,3;1\r\nlayout:nlp:random:größe:b,0\r\n\r\n'
  found = submission.parse(text, path='s.csv')
  rows = {
    collection: {name: (row.line, row.positions.tolist()) for name, row in rows.items()}
    for collection, rows in found.rows.items()
    if rows
  }
  assert rows == {'tile:xla': {'a': (2, [3, 1])}, 'layout:nlp:random': {'größe:b': (3, [0])}}


def test_a_long_row():
  order = np.random.default_rng(0).permutation(100_000)
  line = submission.row('layout:nlp:random', 'm', np.arange(order.size), order)
  assert _parse(line).rows['layout:nlp:random']['m'].positions.tolist() == order.tolist()
