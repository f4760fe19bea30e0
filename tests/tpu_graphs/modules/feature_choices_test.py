"""Tests of tpu_graphs.modules.feature_choices: layout padding against HLO, and user features."""

import dataclasses
import os
import pathlib
import pickle
import subprocess
import sys

from apache_beam.internal import pickler
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from tests import testing
from tests import user_features
from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs.hlo import protos
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import npz
from tpu_graphs.sources import readers

_PADDED = feature_choices.FeatureChoices(layout_padding=-1)
_ROOT = pathlib.Path(__file__).parents[3]
_MODULES = sorted((testing.GOLDEN / 'modules').glob('*.pb'))
_REAL = [
  (testing.SHARED / 'data/module_tuning_data_layout.pb', 'layout', ['layout']),
  (testing.SHARED / 'data/op_tuning_data.pb', 'tile', [f'tile_{i}' for i in range(10)]),
]


def _module(n=4, **fields):
  """Returns a tile module with a chain of n ops."""
  arrays = {
    **testing.tile_arrays(n=n, c=2),
    'node_splits': np.array([0, n]),
    'config_id': np.arange(2),
    **fields,
  }
  return module_lib.Module(module_id='é', kind='tile', **arrays)


def _extra(function, columns=('a', 'b'), name='mine', source=None):
  return feature_choices.NodeFeatures(name=name, columns=columns, function=function, source=source)


def _refusal(call, *args, **kwargs):
  with pytest.raises(errors.InputError) as caught:
    call(*args, **kwargs)
  assert '\n' not in str(caught.value)
  return caught.value


# The padding of layouts.


def _published_row(dimensions, layout):
  """Returns the published features, float32 [140], of an op with this shape and layout."""
  row = np.zeros(140, np.float32)
  total, product = 0, 1
  for size in dimensions:
    total, product = total + size, product * size
  values = {'shape_dimensions_sum': total, 'shape_dimensions_product': product}
  values.update((f'shape_dimensions_{i}', size) for i, size in enumerate(dimensions[:6]))
  values.update((f'layout_minor_to_major_{i}', place) for i, place in enumerate(layout[:6]))
  for name, value in values.items():
    row[features.node_feature_names().index(name)] = value
  return row


def _padded_layouts(rows):
  feat = np.array(rows, np.float32).reshape(-1, 140)
  others = feat[:, :134].copy()
  feature_choices.pad_layouts(feat)
  np.testing.assert_array_equal(feat[:, :134], others)
  return feat[:, 134:].tolist()


@settings(max_examples=300, deadline=None)
@given(
  st.lists(st.integers(0, 2**20), max_size=8).flatmap(
    lambda dimensions: st.tuples(st.just(dimensions), st.permutations(range(len(dimensions))))
  )
)
def test_every_layout_is_recovered(shape):
  dimensions, layout = shape
  assert _padded_layouts([_published_row(dimensions, layout)]) == [(list(layout) + [-1] * 6)[:6]]


@pytest.mark.parametrize(
  'dimensions',
  [[], [0, 3], [3, 0], [1, 1], [2, 2], [0, 0, 1], [5] * 6, [0] * 5 + [7], [0] * 6 + [3], [1] * 7],
)
def test_shape_without_layout(dimensions):
  assert _padded_layouts([_published_row(dimensions, [])]) == [[-1] * 6]


@pytest.mark.parametrize('dimensions', [[1], [0], [12], [0, 0], [0] * 7])
def test_shapes_without_layout_that_look_as_if_they_had_one_dimension(dimensions):
  assert _padded_layouts([_published_row(dimensions, [])]) == [[0] + [-1] * 5]


def test_padding_of_no_ops():
  assert _padded_layouts([]) == []


@given(
  st.lists(st.integers(0, 9), max_size=7).flatmap(
    lambda dimensions: st.tuples(st.just(dimensions), st.permutations(range(len(dimensions))))
  )
)
@settings(max_examples=50, deadline=None)
def test_padding_and_back(shape):
  row = _published_row(*shape)[np.newaxis]
  padded = row.copy()
  feature_choices.pad_layouts(padded)
  again = padded.copy()
  feature_choices.pad_layouts(again)
  np.testing.assert_array_equal(again, padded)
  np.testing.assert_array_equal(feature_choices.unpad_layouts(padded), row)
  assert feature_choices.unpad_layouts(row) is row


def _places(path):
  """Returns a list [N, 6] for each module: the first places of each op's layout in the protobuf."""
  data = path.read_bytes()
  parents = (
    protos.TuningData.FromString(data).modules
    if 'op_tuning' in path.name
    else [protos.ModuleTuningData.FromString(data)]
  )
  return [
    [
      (list(op.shape.layout.minor_to_major) + [-1] * 6)[:6]
      for ops in parent.module.computations
      for op in ops.instructions
    ]
    for parent in parents
  ]


@pytest.mark.parametrize('path', _MODULES, ids=lambda path: path.stem)
def test_published_file_gives_what_hlo_gives(path):
  [module] = hlo.read(path.read_bytes(), kind='layout', choices=_PADDED).modules
  [places] = _places(path)
  np.testing.assert_array_equal(module.node_feat[:, 134:], places)
  with np.load(path.with_suffix('.npz')) as golden:
    feat = golden['node_feat']
  feature_choices.pad_layouts(feat)
  np.testing.assert_array_equal(feat, module.node_feat)


@testing.needs_shared
@pytest.mark.parametrize(('path', 'kind', 'goldens'), _REAL, ids=['layout', 'tile'])
def test_published_real_file_gives_what_hlo_gives(path, kind, goldens):
  modules = readers.from_file(path, kind=kind, choices=_PADDED).modules
  for golden, module, places in zip(goldens, modules, _places(path), strict=False):
    np.testing.assert_array_equal(module.node_feat[:, 134:], places)
    found = npz.load(testing.SHARED / f'golden/{golden}.npz', choices=_PADDED)
    np.testing.assert_array_equal(found.node_feat, module.node_feat)


def test_saved_file_has_the_published_padding(tmp_path):
  path = _MODULES[0]
  padded, published = (
    hlo.read(path.read_bytes(), kind='layout', choices=choices).modules[0]
    for choices in (_PADDED, feature_choices.PUBLISHED)
  )
  npz.save(padded, tmp_path / 'm.npz')
  assert padded.node_feat.min() == -1
  np.testing.assert_array_equal(npz.load(tmp_path / 'm.npz').node_feat, published.node_feat)
  np.testing.assert_array_equal(
    npz.load(tmp_path / 'm.npz', choices=_PADDED).node_feat, padded.node_feat
  )


# A user's own features.


def test_columns_stand_side_by_side():
  choices = feature_choices.FeatureChoices(extra=(user_features.degree, user_features.rank))
  module = choices.add_extra(_module(), None)
  assert module.extra_feat.dtype == np.float32
  assert module.extra_feat.tolist() == [[0, 1, -1], [1, 1, -1], [1, 1, -1], [1, 0, -1]]
  assert choices.extra_columns == ('degree.operands', 'degree.consumers é', 'shape.rank')
  assert choices.num_extra == 3
  assert choices.add_extra(module, None).extra_feat.shape == (4, 3)


def test_module_without_extra_features_is_unchanged():
  module = _module()
  assert feature_choices.PUBLISHED.add_extra(module, b'') is module
  assert feature_choices.PUBLISHED.num_extra == 0


def test_module_without_ops():
  module = _module(0, edge_index=np.zeros((0, 2), int))
  assert feature_choices.FeatureChoices(extra=(user_features.degree,)).add_extra(
    module
  ).extra_feat.shape == (0, 2)


@pytest.mark.parametrize(
  'read', [hlo.from_file, lambda *args, **kwargs: readers.from_file(*args, **kwargs).modules]
)
def test_function_gets_the_program_of_its_module(read):
  choices = feature_choices.FeatureChoices(extra=(user_features.rank,))
  path = testing.GOLDEN / 'corner/tile_sel.pb'
  modules = read(path, kind='tile', choices=choices)
  assert len(modules) == 3
  for module in modules:
    assert module.extra_feat.tolist() == [[1], [1]]
  [module] = read(_MODULES[0], kind='layout', choices=choices)
  expected = [
    [len(op.shape.dimensions)]
    for ops in protos.ModuleTuningData.FromString(_MODULES[0].read_bytes()).module.computations
    for op in ops.instructions
  ]
  assert module.extra_feat.tolist() == expected


def test_function_sees_the_padding_that_is_chosen(tmp_path):
  np.savez(tmp_path / 'm.npz', **testing.tile_arrays(node_feat=np.zeros((4, 140), np.float32)))
  for padding, expected in ((0, 0), (-1, 5)):
    choices = feature_choices.FeatureChoices(padding, (user_features.unused_places,))
    assert npz.load(tmp_path / 'm.npz', choices=choices).extra_feat.tolist() == [[expected]] * 4


@pytest.mark.parametrize(
  ('values', 'reason', 'found'),
  [
    (np.zeros((4, 3)), 'extra features of wrong shape', '[4, 3]'),
    (np.zeros(4), 'extra features of wrong shape', '[4]'),
    (np.zeros((3, 2)), 'extra features of wrong shape', '[3, 2]'),
    (None, 'extra features of wrong shape', '[]'),
    (np.full((4, 2), 'x'), 'extra features of wrong dtype', '<U1'),
    (np.full((4, 2), None), 'extra features of wrong dtype', 'object'),
    (np.full((4, 2), 1j), 'extra features of wrong dtype', 'complex128'),
    (np.array([[0, 0], [0, 0], [0, np.nan], [np.inf, 0]]), 'extra features not finite', 'nan'),
    (np.array([[0, 0], [0, 0], [0, -np.inf], [0, 0]]), 'extra features not finite', '-inf'),
    (np.array([[0, 0], [0, 0], [0, 1e39], [0, 0]]), 'extra features not finite', '1e+39'),
  ],
)
def test_wrong_values_name_function_and_module(values, reason, found):
  error = _refusal(
    feature_choices.FeatureChoices(extra=(_extra(lambda *_: values),)).add_extra, _module()
  )
  assert (error.reason, error.found) == (reason, found)
  assert error.where.startswith("mine for module 'é'")
  assert error.expected
  assert error.where.endswith(', op 2, b') == (reason == 'extra features not finite')


@pytest.mark.parametrize('dtype', ['f2', 'f8', 'i1', 'u8', '?'])
def test_any_numbers_become_float32(dtype):
  [extra] = feature_choices.FeatureChoices(extra=(_extra(lambda *_: np.ones((4, 2), dtype)),)).extra
  values = extra.compute(_module(), None)
  assert values.dtype == np.float32
  assert values.tolist() == [[1, 1]] * 4


@pytest.mark.parametrize(
  'raised', [ZeroDivisionError('by é'), errors.InputError('own'), KeyError(3), StopIteration()]
)
def test_exception_in_the_function_is_reported(raised):
  def function(*_):
    raise raised

  error = _refusal(
    feature_choices.FeatureChoices(extra=(_extra(function, source='a.b:c'),)).add_extra, _module()
  )
  assert error.reason == 'extra features failed'
  assert error.where == "a.b:c for module 'é'"
  assert error.found.startswith(type(raised).__name__)
  assert str(raised) in error.found
  assert error.__cause__ is raised


@pytest.mark.parametrize(
  ('fields', 'where'),
  [
    ({'name': ''}, 'name'),
    ({'name': 'a\udcff'}, 'name'),
    ({'name': 3}, 'name'),
    ({'columns': []}, 'columns'),
    ({'columns': ['a', '']}, 'columns'),
    ({'columns': 'ab'}, 'columns'),
    ({'columns': ['a', 2]}, 'columns'),
    ({'columns': ['a', 'b', 'a']}, 'mine'),
    ({'function': None}, 'mine'),
  ],
)
def test_wrong_description(fields, where):
  error = _refusal(_extra, **{'function': user_features.plain, **fields})
  assert error.where == where


def test_wrong_choices():
  twice = (user_features.degree, _extra(user_features.plain, name='degree'))
  assert _refusal(feature_choices.FeatureChoices, extra=twice).found == 'degree'
  for padding in (1, -2, None, True, 0.0, '0'):
    assert _refusal(feature_choices.FeatureChoices, padding).expected == '0 or -1'


# Sources of functions.


def test_decorated_function_knows_its_source():
  assert user_features.degree.source == 'tests.user_features:degree'
  assert user_features.degree.columns == ('operands', 'consumers é')

  @feature_choices.node_features('local', columns=['x'])
  def local(module, hlo):
    del hlo
    return np.zeros((module.num_ops, 1))

  assert local.source is None
  assert (
    feature_choices.FeatureChoices(extra=(local,)).add_extra(_module()).extra_feat.tolist()
    == [[0]] * 4
  )


def test_load():
  loaded = feature_choices.load('tests.user_features:degree')
  assert loaded == user_features.degree
  assert loaded.function is user_features.degree.function


@pytest.mark.parametrize(
  ('source', 'reason', 'words'),
  [
    ('tests.user_features', 'extra features wrongly named', "'tests.user_features'"),
    (':degree', 'extra features wrongly named', ''),
    ('tests.user_features:', 'extra features wrongly named', ''),
    ('', 'extra features wrongly named', ''),
    (
      'no_such_package.x:f',
      'extra features cannot be imported',
      "No module named 'no_such_package'",
    ),
    ('tests.no_such:f', 'extra features cannot be imported', 'tests.no_such'),
    ('..tests:f', 'extra features cannot be imported', 'TypeError'),
    ('tests.user_features:none', 'no such extra features', 'no none in'),
    ('tests.user_features:HERE.none', 'no such extra features', ''),
    ('tests.user_features:HERE', 'not extra features', 'type str'),
    ('tests.user_features:plain', 'not extra features', 'type function'),
  ],
)
def test_load_of_what_is_not_there(source, reason, words):
  error = _refusal(feature_choices.load, source)
  assert error.reason == reason
  assert words in error.found


@pytest.mark.parametrize(
  'code', ['1 / 0', 'import no_such_package', 'syntax error', 'raise RuntimeError']
)
def test_load_of_a_module_that_fails(code, tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'failing_features.py').write_text(code)
  error = _refusal(feature_choices.load, 'failing_features:f')
  assert (error.reason, error.where) == ('extra features cannot be imported', 'failing_features:f')
  assert error.fix == 'fix that module'
  assert error.__cause__


def test_load_of_a_source_that_holds_features_of_another_source(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'alias_features.py').write_text('from tests.user_features import degree as mine')
  loaded = feature_choices.load('alias_features:mine')
  assert loaded.source == 'alias_features:mine'
  assert loaded.compute(_module(), None).shape == (4, 2)
  assert (
    feature_choices.FeatureChoices(extra=(loaded,)).to_json()['extra_features'][0]['source']
    == loaded.source
  )


def test_modules_in_the_current_directory_are_found(tmp_path):
  (tmp_path / 'here_features.py').write_text('from tests.user_features import rank')
  code = (
    'import sys; sys.path.remove(""); from tpu_graphs.modules import feature_choices; '
    'print(feature_choices.load("here_features:rank").name)'
  )
  result = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    check=True,
    cwd=tmp_path,
    env={**os.environ, 'PYTHONPATH': str(_ROOT)},
  )
  assert result.stdout == 'shape\n'


_BOTH = feature_choices.FeatureChoices(-1, (user_features.degree, user_features.rank))
_RECORD = {
  'layout_padding': -1,
  'extra_features': [
    {
      'name': 'degree',
      'columns': ['operands', 'consumers é'],
      'source': 'tests.user_features:degree',
    },
    {'name': 'shape', 'columns': ['rank'], 'source': 'tests.user_features:rank'},
  ],
}


def test_record_and_back():
  assert _BOTH.to_json() == _RECORD
  read = feature_choices.FeatureChoices.from_json({**_RECORD, 'seed': 3})
  assert read == _BOTH
  assert hash(read) == hash(_BOTH)
  assert read.to_json() == _RECORD
  assert [extra.function for extra in read.resolve().extra] == [
    extra.function for extra in _BOTH.extra
  ]
  np.testing.assert_array_equal(
    read.add_extra(_module()).extra_feat, _BOTH.add_extra(_module()).extra_feat
  )


@pytest.mark.parametrize(
  'content', [{}, {'seed': 0}, {'layout_padding': 0}, {'extra_features': []}]
)
def test_record_of_earlier_versions(content):
  assert feature_choices.FeatureChoices.from_json(content) == feature_choices.PUBLISHED


@pytest.mark.parametrize(
  'change',
  [
    {'layout_padding': -1},
    {'extra': ()},
    {'extra': (user_features.degree, user_features.unused_places)},
    {'extra': (user_features.rank, user_features.degree)},
    {
      'extra': (
        user_features.degree,
        dataclasses.replace(user_features.rank, columns=['rank', 'more']),
      )
    },
    {'extra': (user_features.degree, dataclasses.replace(user_features.rank, name='other'))},
    {'extra': (user_features.degree, dataclasses.replace(user_features.rank, source='other:rank'))},
  ],
)
def test_different_choices_are_unequal(change):
  base = feature_choices.FeatureChoices(0, (user_features.degree, user_features.rank))
  other = dataclasses.replace(base, **change)
  assert other != base
  assert str(other) != str(base)


def test_reading_a_record_imports_nothing():
  content = {'extra_features': [{'name': 'a', 'columns': ['b'], 'source': 'no_such_package:f'}]}
  choices = feature_choices.FeatureChoices.from_json(content)
  assert choices.num_extra == 1
  assert choices.to_json() == {'layout_padding': 0, **content}
  for call in (choices.resolve, lambda: choices.add_extra(_module())):
    assert _refusal(call).reason == 'extra features cannot be imported'


@pytest.mark.parametrize(
  'change',
  [
    {'name': 'other'},
    {'columns': ['consumers é', 'operands']},
    {'columns': ['operands']},
    {'source': 'tests.user_features:rank'},
  ],
)
def test_features_that_have_changed_since_are_refused(change):
  record = {**_RECORD, 'extra_features': [{**_RECORD['extra_features'][0], **change}]}
  error = _refusal(feature_choices.FeatureChoices.from_json(record).resolve)
  assert error.reason == 'extra features have changed'
  assert error.found != error.expected


def test_features_that_cannot_be_imported_cannot_be_recorded():
  without = feature_choices.FeatureChoices(extra=(_extra(user_features.plain),))
  assert _refusal(without.to_json).reason == 'extra features that cannot be imported'
  wrong = feature_choices.FeatureChoices(
    extra=(_extra(user_features.plain, source='tests.user_features:plain'),)
  )
  assert _refusal(wrong.to_json).reason == 'not extra features'


@pytest.mark.parametrize(
  'dump_and_load',
  [
    lambda value: pickle.loads(pickle.dumps(value)),
    lambda value: pickler.loads(pickler.dumps(value)),
  ],
)
def test_pickles_hold_the_source(dump_and_load):
  copy = dump_and_load(_BOTH)
  assert copy == _BOTH
  assert copy.extra[0].function is None
  np.testing.assert_array_equal(
    copy.add_extra(_module()).extra_feat, _BOTH.add_extra(_module()).extra_feat
  )


def test_function_without_source_is_pickled_itself():
  extra = pickle.loads(pickle.dumps(_extra(user_features.plain)))
  assert extra.compute(_module(), None).shape == (4, 2)
