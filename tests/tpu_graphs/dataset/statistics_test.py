"""Tests of tpu_graphs.dataset.statistics: plain float64 NumPy on all rows at once is the oracle."""

import dataclasses
import functools
import json

import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import statistics
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib

_SETTINGS = hypothesis.settings(max_examples=50, deadline=None)
_VALUES = st.floats(-3e9, 3e9, width=32) | st.integers(-3, 3).map(float)
_ROWS = hnp.arrays(np.float32, st.tuples(st.integers(0, 6), st.just(3)), elements=_VALUES)


def _module(kind, seed, **sizes):
  arrays = {'tile': testing.tile_arrays, 'layout': testing.layout_arrays}[kind](seed=seed, **sizes)
  arrays['node_splits'] = np.array([0])
  if kind == 'layout':
    arrays['node_config_feat'] = arrays['node_config_feat'].astype(np.int8)
  rng = np.random.default_rng(seed)
  scale = 10.0 ** rng.integers(-3, 10, 140) * rng.choice([-1, 0, 1], 140)
  arrays['node_feat'] = (arrays['node_feat'] * scale).astype(np.float32)
  arrays['node_feat'][:, 5] = 7  # This column is equal in every module, so it is constant.
  config_id = np.arange(arrays['config_runtime'].size)
  return module_lib.Module(module_id=f'm{seed}', kind=kind, config_id=config_id, **arrays)


def _modules(kind):
  sizes = [
    {'n': 4, 'c': 6},
    {'n': 1, 'c': 1},
    {'n': 9, 'c': 3},
    {'n': 2, 'c': 0},
    {'n': 7, 'c': 20},
  ]
  own = {'nc': 1} if kind == 'layout' else {}
  return [_module(kind, seed, **size, **own) for seed, size in enumerate(sizes)]


def _assert_naive(moments, rows):
  rows = np.asarray(rows, np.float64)
  assert moments.count == rows.shape[0]
  np.testing.assert_array_equal(moments.min, rows.min(axis=0))
  np.testing.assert_array_equal(moments.max, rows.max(axis=0))
  scale = np.abs(rows).max(axis=0)
  np.testing.assert_array_less(np.abs(moments.mean - rows.mean(axis=0)), 1e-12 * scale + 1e-300)
  # A deviation far below the values themselves is lost in their rounding.
  np.testing.assert_array_less(
    np.abs(moments.std - rows.std(axis=0)), 1e-9 * rows.std(axis=0) + 1e-12 * scale + 1e-300
  )


def _assert_close(one, other, scale):
  assert one.count == other.count
  np.testing.assert_array_equal(one.min, other.min)
  np.testing.assert_array_equal(one.max, other.max)
  for name in ('mean', 'std'):
    np.testing.assert_allclose(
      getattr(one, name), getattr(other, name), rtol=1e-9, atol=1e-12 * scale
    )


def test_signed_log():
  x = np.array([-3e9, -1, -0.0, 0, 1, 3e9], np.float32)
  np.testing.assert_allclose(
    features.signed_log(x), [-np.log1p(3e9), -np.log(2), 0, 0, np.log(2), np.log1p(3e9)]
  )
  assert features.signed_log(x).dtype == np.float64


def test_hand_worked():
  moments = statistics.Moments.of(np.array([[1, 5], [2, 5], [3, 5], [6, 5]]))
  assert (moments.count, moments.min.tolist(), moments.max.tolist()) == (4, [1, 5], [6, 5])
  assert (moments.mean.tolist(), moments.m2.tolist()) == ([3, 5], [4 + 1 + 0 + 9, 0])
  assert moments.std.tolist() == [np.sqrt(14 / 4), 0]


@_SETTINGS
@hypothesis.given(rows=_ROWS.filter(len))
def test_moments_equal_numpy(rows):
  _assert_naive(statistics.Moments.of(rows), rows)


@_SETTINGS
@hypothesis.given(
  parts=st.lists(_ROWS, min_size=1, max_size=5).filter(lambda parts: any(map(len, parts))),
  data=st.data(),
)
def test_merging_in_any_grouping_and_order(parts, data):
  rows = np.concatenate(parts)
  moments = [statistics.Moments.of(part) for part in data.draw(st.permutations(parts))]
  while len(moments) > 1:
    i = data.draw(st.integers(0, len(moments) - 2))
    moments[i : i + 2] = [moments[i].merge(moments[i + 1])]
  _assert_naive(moments[0], rows)


def test_no_rows():
  empty = statistics.Moments.of(np.zeros((0, 2)))
  some = statistics.Moments.of(np.array([[1.0, -4.0], [3.0, 8.0]]))
  assert empty.count == empty.merge(empty).count == 0
  assert empty.std.tolist() == [0, 0]
  assert empty.to_json() == {name: [0, 0] for name in ('min', 'max', 'mean', 'std')}
  for merged in (empty.merge(some), some.merge(empty)):
    assert merged.to_json() == some.to_json()
    assert merged.count == 2


@_SETTINGS
@hypothesis.given(
  values=hnp.arrays(np.int8, st.tuples(st.integers(0, 4), st.integers(0, 3), st.just(18)))
)
def test_counts_of_int8_give_the_same_moments(values):
  module = _module('layout', 0, n=4, c=values.shape[0], nc=0)
  module = module_lib.Module(
    **{
      **vars(module),
      'node_config_ids': np.zeros(values.shape[1], int),
      'node_config_feat': values,
    }
  )
  found = statistics.Statistics.of(module)
  rows = values.reshape(-1, 18)
  _assert_close(found.plain['node_config_feat'], statistics.Moments.of(rows), 128)
  _assert_close(found.log['node_config_feat'], statistics.Moments.of(features.signed_log(rows)), 5)


@pytest.mark.parametrize('kind', ['tile', 'layout'])
def test_statistics_equal_numpy_on_all_rows(kind):
  modules = _modules(kind)
  total = statistics.merge_all(map(statistics.Statistics.of, modules))
  rows = {'feat': np.concatenate([module.node_feat for module in modules])}
  if kind == 'tile':
    rows['config_feat'] = np.concatenate([module.config_feat for module in modules])
  else:
    rows['node_config_feat'] = np.concatenate(
      [module.node_config_feat.reshape(-1, 18) for module in modules]
    )
  assert set(total.plain) == set(total.log) == set(rows)
  for name, values in rows.items():
    values = values.astype(np.float64)
    _assert_naive(total.plain[name], values)
    _assert_naive(total.log[name], np.sign(values) * np.log1p(np.abs(values)))
  content = total.to_json()['features']
  for name, values in rows.items():
    assert content[name]['constant'] == np.flatnonzero((values == values[0]).all(axis=0)).tolist()
  assert 5 in content['feat']['constant']


@pytest.mark.parametrize('kind', ['tile', 'layout'])
def test_statistics_merge_in_any_grouping(kind):
  a, b, c, d, e = map(statistics.Statistics.of, _modules(kind))
  one = functools.reduce(lambda x, y: x.merge(y), [a, b, c, d, e])
  for other in (a.merge(b.merge(c.merge(d.merge(e)))), e.merge(d).merge(b.merge(a)).merge(c)):
    for name, moments in one.plain.items():
      _assert_close(
        other.plain[name], moments, np.maximum(np.abs(moments.min), np.abs(moments.max)).max()
      )
      _assert_close(other.log[name], one.log[name], 30)
  assert statistics.merge_all([a, b, c, d, e]).to_json() == one.to_json()


def test_merge_of_none_and_one():
  [part, *_] = map(statistics.Statistics.of, _modules('tile'))
  assert statistics.merge_all([]) is None
  assert statistics.merge_all([part]) is part


@pytest.mark.parametrize('kind', ['tile', 'layout'])
def test_round_trip_through_json(kind):
  total = statistics.merge_all(map(statistics.Statistics.of, _modules(kind)))
  content = json.loads(json.dumps(total.to_json(), allow_nan=False))
  parsed = statistics.parse(content)
  assert set(parsed) == set(total.plain)
  for name, columns in parsed.items():
    assert columns.count == total.plain[name].count
    np.testing.assert_array_equal(columns.log_mean, total.log[name].mean)
    np.testing.assert_array_equal(columns.log_std, total.log[name].std)
    np.testing.assert_array_equal(columns.constant, total.plain[name].min == total.plain[name].max)
    assert columns.constant.dtype == bool
    assert {'min', 'max', 'mean', 'std'} <= set(content['features'][name])


@pytest.mark.parametrize(
  ('kind', 'feature', 'size'), [('tile', 'config_feat', 24), ('layout', 'node_config_feat', 18)]
)
def test_no_configs_are_all_constant_and_finite(kind, feature, size):
  content = json.loads(
    json.dumps(statistics.Statistics.of(_module(kind, 0, c=0)).to_json(), allow_nan=False)
  )
  columns = statistics.parse(content)[feature]
  assert (columns.count, columns.constant.all()) == (0, True)
  assert columns.log_mean.tolist() == columns.log_std.tolist() == [0] * size


def test_no_train_modules():
  assert statistics.parse(statistics.Statistics({}, {}).to_json()) == {}


def test_extra_features():
  extra_feat = np.array([[1, 7, -1e30], [3, 7, 0], [3, 7, 5], [5, 7, 1e30]], np.float32)
  parts = [
    statistics.Statistics.of(
      dataclasses.replace(_module('tile', seed), extra_feat=extra_feat + shift)
    )
    for seed, shift in ((0, 0), (1, np.float32([2, 0, 0])))
  ]
  content = json.loads(json.dumps(statistics.merge_all(parts).to_json(), allow_nan=False))
  columns = statistics.parse(content, num_extra=3)['extra_feat']
  both = np.concatenate([extra_feat, extra_feat + np.float32([2, 0, 0])]).astype(np.float64)
  log = np.sign(both) * np.log1p(np.abs(both))
  assert columns.count == 8
  np.testing.assert_allclose(columns.log_mean, log.mean(axis=0), atol=1e-12)
  np.testing.assert_allclose(columns.log_std, log.std(axis=0), atol=1e-12)
  assert columns.constant.tolist() == [False, True, False]


@pytest.mark.parametrize(('found', 'expected'), [(3, 0), (0, 3), (3, 2)])
def test_other_number_of_extra_features(found, expected):
  module = dataclasses.replace(_module('tile', 0), extra_feat=np.zeros((4, found), np.float32))
  with pytest.raises(errors.InputError, match='damaged statistics'):
    statistics.parse(statistics.Statistics.of(module).to_json(), num_extra=expected)
  assert statistics.parse(statistics.Statistics({}, {}).to_json(), num_extra=expected) == {}


@pytest.mark.parametrize(
  'content', [{}, {'format_version': 2, 'features': {}}, {'format_version': '1'}]
)
def test_other_version(content):
  with pytest.raises(errors.InputError, match='statistics of another format') as caught:
    statistics.parse(content)
  assert (caught.value.where, caught.value.expected) == ('format_version', '1')


@pytest.mark.parametrize(
  'damage',
  [
    lambda content: content.pop('features'),
    lambda content: content['features']['feat'].pop('log'),
    lambda content: content['features']['feat'].update(constant=[140]),
    lambda content: content['features']['feat']['log'].update(mean=['x']),
  ],
)
def test_damaged_statistics_are_refused(damage):
  content = statistics.Statistics.of(_module('tile', 0)).to_json()
  damage(content)
  with pytest.raises(errors.InputError, match='damaged statistics'):
    statistics.parse(content)
