"""Tests of tpu_graphs.sources.npz with np.load as the oracle, and with every kind of bad file."""

import io
import os
import pathlib
import stat

import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np
import pytest

from tests import testing
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import streams
from tpu_graphs.sources import npz
from tpu_graphs.sources import zips

_PUBLISHED = sorted((testing.SHARED / 'data/npz').rglob('*.npz'))
_SETTINGS = hypothesis.settings(max_examples=40, deadline=None)


def _read(arrays, **options):
  return npz.read(io.BytesIO(testing.npz_bytes(arrays)), path='d/m.npz', **options)


@testing.needs_shared
def test_there_are_published_files():
  assert len(_PUBLISHED) == 7


@testing.needs_shared
@pytest.mark.parametrize('path', _PUBLISHED, ids=lambda path: '-'.join(path.parts[-5:]))
def test_published_file_equals_what_numpy_reads(path):
  module = npz.load(path)
  assert module.module_id == path.stem
  assert module.kind == path.relative_to(testing.SHARED / 'data/npz').parts[0]
  assert module.is_measured == ('test' not in path.parts)
  assert module.dropped_runs == {}
  with np.load(path) as arrays:
    for name in arrays.files:
      expected = arrays[name]
      if name == 'node_splits':
        expected = expected.reshape(-1)
      if name.startswith('config_runtime') and not module.is_measured:
        assert (getattr(module, name) == -1).all()
      else:
        np.testing.assert_array_equal(getattr(module, name), expected, err_msg=name)
    assert module.num_configs == arrays['config_runtime'].size > 1
  np.testing.assert_array_equal(module.config_id, np.arange(module.num_configs))


@testing.needs_shared
@pytest.mark.parametrize('path', _PUBLISHED, ids=lambda path: '-'.join(path.parts[-5:]))
def test_published_file_round_trip(path, tmp_path):
  module = npz.load(path)
  npz.save(module, tmp_path / path.name)
  testing.assert_equal_modules(npz.load(tmp_path / path.name, kind=module.kind), module)


@st.composite
def _modules(draw):
  kind = draw(st.sampled_from(module_lib.KINDS))
  n, c, nc = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(0, 3))
  ops = st.integers(0, n - 1)
  edges = draw(st.lists(st.tuples(ops, ops), max_size=6))
  floats = {
    'elements': st.floats(width=32, allow_nan=False, allow_infinity=False),
    'fill': st.just(0.0),
  }
  measured = draw(st.booleans())
  times = st.integers(module_lib.MIN_RUNTIME_NS, 2**63 - 1)
  fields = {
    'node_opcode': draw(hnp.arrays(np.uint8, n, elements=st.integers(0, 120))),
    'node_feat': feature_choices.unpad_layouts(draw(hnp.arrays(np.float32, (n, 140), **floats))),
    'edge_index': np.array(edges, np.int64).reshape(-1, 2),
    'node_splits': np.array([0, *sorted(draw(st.lists(st.integers(0, n), max_size=3))), n]),
    'computation': draw(st.none() | hnp.arrays(np.int64, n, elements=st.integers(0, 2**40))),
    'config_runtime': draw(hnp.arrays(np.int64, c, elements=times)) if measured else np.full(c, -1),
    'config_id': draw(
      st.just(np.arange(c))
      | hnp.arrays(np.int64, c, elements=st.integers(0, 2**63 - 1), unique=True)
    ),
  }
  if kind == 'tile':
    fields['config_feat'] = draw(hnp.arrays(np.float32, (c, 24), **floats))
    normalizers = hnp.arrays(np.int64, c, elements=st.integers(1, 2**63 - 1))
    fields['config_runtime_normalizers'] = draw(normalizers) if measured else np.full(c, -1)
  else:
    fields['node_config_ids'] = draw(hnp.arrays(np.int64, nc, elements=ops))
    fields['node_config_feat'] = draw(hnp.arrays(np.int8, (c, nc, 18), fill=st.just(-1)))
  stem = draw(
    st.text(
      st.characters(exclude_categories=['C'], exclude_characters='/'), min_size=1, max_size=20
    )
  )
  return module_lib.Module(module_id=f'é{stem}', kind=kind, **fields)


@_SETTINGS
@hypothesis.given(module=_modules())
def test_round_trip(tmp_path_factory, module):
  path = tmp_path_factory.mktemp('npz') / f'{module.module_id}.npz'
  npz.save(module, path)
  loaded = npz.load(path)
  assert loaded.module_id == module.module_id
  assert loaded.dropped_runs == {}
  testing.assert_equal_modules(loaded, module)


@pytest.mark.parametrize(
  ('mk', 'extra'), [(testing.tile_arrays, set()), (testing.layout_arrays, {'node_splits'})]
)
def test_saved_file_has_the_published_form(mk, extra, tmp_path):
  npz.save(_read(mk()), tmp_path / 'a.npz')
  with np.load(tmp_path / 'a.npz') as arrays:
    assert set(arrays.files) == set(mk()) | extra | {'node_splits'}
    assert arrays['node_splits'].tolist() == [[0, 4]]
    assert arrays['config_runtime'].tolist() == mk()['config_runtime'].tolist()


@pytest.mark.parametrize(
  ('mk', 'sizes'),
  [
    (testing.tile_arrays, {'n': 1, 'c': 1}),
    (testing.layout_arrays, {'n': 1, 'c': 1, 'nc': 1}),
    (testing.layout_arrays, {'nc': 0}),
    (testing.tile_arrays, {'c': 0}),
    (testing.layout_arrays, {'c': 0, 'nc': 0}),
  ],
)
def test_smallest_modules(mk, sizes, tmp_path):
  module = _read(mk(**sizes))
  assert (module.num_ops, module.num_configs) == (sizes.get('n', 4), sizes.get('c', 6))
  assert module.num_edges == module.num_ops - 1
  assert module.num_config_ops == sizes.get('nc', 0)
  npz.save(module, tmp_path / 'm.npz')
  testing.assert_equal_modules(npz.load(tmp_path / 'm.npz'), module)


@pytest.mark.parametrize('splits', [None, [0], [[0]], [0, 4], [[0, 4]], [[0, 2]], [0, 2, 4]])
@pytest.mark.parametrize('mk', [testing.tile_arrays, testing.layout_arrays])
def test_forms_of_node_splits(splits, mk):
  module = _read(mk(node_splits=None if splits is None else np.array(splits)))
  expected = [0, 2, 4] if splits is not None and 2 in np.ravel(splits) else [0, 4]
  assert module.node_splits.tolist() == expected
  assert module.computation.tolist() == ([0, 0, 1, 1] if len(expected) == 3 else [0] * 4)


@pytest.mark.parametrize(
  'dtype', [np.int8, np.int16, np.int64, np.float16, np.float32, np.float64, '>f4', '>i8']
)
@pytest.mark.parametrize('order', ['C', 'F'])
def test_layout_configs_of_any_dtype_and_order(dtype, order):
  values = np.random.default_rng(0).integers(-1, 6, (6, 2, 18))
  module = _read(testing.layout_arrays(node_config_feat=np.array(values, dtype=dtype, order=order)))
  assert module.node_config_feat.dtype == np.int8
  assert module.node_config_feat.flags.c_contiguous
  np.testing.assert_array_equal(module.node_config_feat, values)


def test_layout_configs_over_several_blocks(monkeypatch):
  monkeypatch.setattr(npz, '_BLOCK_BYTES', 40)
  monkeypatch.setattr(streams, 'BLOCK_BYTES', 80)
  for order in 'CF':
    arrays = testing.layout_arrays()
    expected = arrays['node_config_feat']
    module = _read({**arrays, 'node_config_feat': np.asarray(expected, order=order)})
    np.testing.assert_array_equal(module.node_config_feat, expected)
    np.testing.assert_array_equal(module.node_feat, arrays['node_feat'])


@pytest.mark.parametrize('mk', [testing.tile_arrays, testing.layout_arrays])
@pytest.mark.parametrize(
  'change',
  [
    np.asfortranarray,
    lambda a: a.astype(a.dtype.newbyteorder('>')),
    lambda a: a.astype(np.float64 if a.dtype.kind == 'f' else np.int64),
    lambda a: a.astype(np.float64 if a.dtype.kind == 'f' else np.uint64),
  ],
  ids=['fortran', 'big-endian', 'wide', 'unsigned'],
)
def test_other_dtypes_and_orders_are_equal(mk, change):
  arrays = mk()
  testing.assert_equal_modules(
    _read({name: change(array) for name, array in arrays.items()}), _read(arrays)
  )


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_stored_and_deflated(save):
  data = testing.npz_bytes(testing.layout_arrays(), save)
  testing.assert_equal_modules(
    npz.read(io.BytesIO(data), path='m.npz'), _read(testing.layout_arrays())
  )


def test_unknown_arrays_are_ignored():
  module = _read(testing.tile_arrays(note=np.array(['text'])))
  testing.assert_equal_modules(module, _read(testing.tile_arrays()))


def test_path_gives_the_name():
  data = testing.npz_bytes(testing.tile_arrays())
  for path, name in (('gs://b/c.d.npz', 'c.d'), ('é', 'é'), ('/x/y.npz.npz', 'y.npz')):
    assert npz.read(io.BytesIO(data), path=path).module_id == name


# Arrays are missing, or have a wrong shape, dtype or value.


@pytest.mark.parametrize(
  ('mk', 'name'),
  [
    *[
      (testing.tile_arrays, name)
      for name in (
        'node_opcode',
        'node_feat',
        'edge_index',
        'config_runtime',
        'config_feat',
        'config_runtime_normalizers',
      )
    ],
    *[
      (testing.layout_arrays, name)
      for name in (
        'node_opcode',
        'node_feat',
        'edge_index',
        'config_runtime',
        'node_config_ids',
        'node_config_feat',
      )
    ],
  ],
)
def test_missing_array(mk, name):
  error = testing.refused_npz(testing.npz_bytes(mk(**{name: None})))
  assert (error.reason, error.where) == ('array missing', name)
  assert name not in error.found.replace(f'{name}_', '').replace(',', '').split()
  assert name in error.expected.replace(',', '').split()


def test_neither_or_both_kinds():
  error = testing.refused_npz(
    testing.npz_bytes(testing.tile_arrays(config_feat=None, config_runtime_normalizers=None))
  )
  assert error.reason == 'neither a tile nor a layout file'
  assert error.found == 'arrays config_runtime, edge_index, node_feat, node_opcode'
  error = testing.refused_npz(
    testing.npz_bytes({**testing.tile_arrays(), **testing.layout_arrays()})
  )
  assert error.reason == 'both a tile and a layout file'
  assert error.expected


@pytest.mark.parametrize(
  ('mk', 'kind', 'other'),
  [(testing.tile_arrays, 'tile', 'layout'), (testing.layout_arrays, 'layout', 'tile')],
)
def test_requested_kind(mk, kind, other):
  assert _read(mk(), kind=kind).kind == kind
  error = testing.refused_npz(testing.npz_bytes(mk()), kind=other)
  assert (error.reason, error.found, error.expected) == (
    'file of the other kind',
    f'a {kind} file',
    f'a {other} file',
  )


_T, _L = testing.tile_arrays, testing.layout_arrays


@pytest.mark.parametrize(
  ('mk', 'name', 'array', 'found', 'expected'),
  [
    (_T, 'node_opcode', np.zeros((), int), '[]', '[N]'),
    (_T, 'node_opcode', np.zeros((4, 1), int), '[4, 1]', '[N]'),
    (_T, 'node_feat', np.zeros((4, 139)), '[4, 139]', '[4 (as in node_opcode), 140]'),
    (_T, 'node_feat', np.zeros((3, 140)), '[3, 140]', '[4 (as in node_opcode), 140]'),
    (_T, 'node_feat', np.zeros(560), '[560]', '[4 (as in node_opcode), 140]'),
    (_T, 'edge_index', np.zeros((2, 7), int), '[2, 7]', '[E, 2]'),
    (_T, 'edge_index', np.zeros(6, int), '[6]', '[E, 2]'),
    (_T, 'config_runtime', np.full((6, 1), 5), '[6, 1]', '[C]'),
    (_T, 'config_runtime', np.full(5, 5), '[6, 24]', '[5 (as in config_runtime), 24]'),
    (_T, 'config_feat', np.zeros((6, 23)), '[6, 23]', '[6 (as in config_runtime), 24]'),
    (_T, 'config_feat', np.zeros((5, 24)), '[5, 24]', '[6 (as in config_runtime), 24]'),
    (_T, 'config_runtime_normalizers', np.full(7, 5), '[7]', '[6 (as in config_runtime)]'),
    (_T, 'config_id', np.arange(5), '[5]', '[6 (as in config_runtime)]'),
    (_T, 'computation', np.zeros(5, int), '[5]', '[4 (as in node_opcode)]'),
    (_T, 'node_splits', np.zeros((2, 2), int), '[2, 2]', '[S]'),
    (_T, 'node_splits', np.zeros((1, 1, 2), int), '[1, 1, 2]', '[S]'),
    (_L, 'node_config_ids', np.array([[0, 1]]), '[1, 2]', '[NC]'),
    (
      _L,
      'node_config_ids',
      np.array([0]),
      '[6, 2, 18]',
      '[6 (as in config_runtime), 1 (as in node_config_ids), 18]',
    ),
    (
      _L,
      'node_config_feat',
      np.zeros((6, 2, 17)),
      '[6, 2, 17]',
      '[6 (as in config_runtime), 2 (as in node_config_ids), 18]',
    ),
    (
      _L,
      'node_config_feat',
      np.zeros((5, 2, 18)),
      '[5, 2, 18]',
      '[6 (as in config_runtime), 2 (as in node_config_ids), 18]',
    ),
    (
      _L,
      'node_config_feat',
      np.zeros((6, 36)),
      '[6, 36]',
      '[6 (as in config_runtime), 2 (as in node_config_ids), 18]',
    ),
  ],
)
def test_wrong_shape(mk, name, array, found, expected):
  error = testing.refused_npz(testing.npz_bytes(mk(**{name: array})))
  assert (error.reason, error.found, error.expected) == ('wrong shape', found, expected)
  # The error names the array of a pair that is checked later.
  assert error.where == name or f'(as in {name})' in error.expected


@pytest.mark.parametrize(
  ('mk', 'name', 'dtype', 'expected'),
  [
    (_T, 'node_opcode', 'float32', 'integer'),
    (_T, 'node_feat', 'int64', 'float'),
    (_T, 'edge_index', 'float64', 'integer'),
    (_T, 'config_runtime', 'float64', 'integer'),
    (_T, 'config_feat', 'int8', 'float'),
    (_T, 'config_runtime_normalizers', 'bool', 'integer'),
    (_L, 'node_config_ids', 'float32', 'integer'),
    (_L, 'node_config_feat', 'complex64', 'float or integer'),
    (_L, 'node_splits', '<U1', 'integer'),
    (_L, 'node_config_feat', '<U8', 'float or integer'),
  ],
)
def test_wrong_dtype(mk, name, dtype, expected):
  error = testing.refused_npz(testing.npz_bytes(mk(**{name: mk()[name].astype(dtype)})))
  assert (error.where, error.reason, error.found, error.expected) == (
    name,
    'wrong dtype',
    dtype,
    expected,
  )


def _changed(array, index, value):
  array = array.copy()
  array[index] = value
  return array


@pytest.mark.parametrize(
  ('mk', 'name', 'index', 'value', 'expected'),
  [
    (_T, 'edge_index', (1, 0), 4, '0 to 3'),
    (_L, 'edge_index', (2, 1), -1, '0 to 3'),
    (_T, 'edge_index', (0, 0), 2**40, '0 to 3'),
    (_L, 'node_config_ids', (1,), 99, '0 to 3'),
    (_L, 'node_config_ids', (0,), -1, '0 to 3'),
    (_T, 'node_opcode', (3,), 121, '0 to 120'),
    (_T, 'node_opcode', (0,), 255, '0 to 120'),
    (_L, 'node_splits', (0, 1), 5, '0 to 4'),
  ],
)
def test_value_out_of_range(mk, name, index, value, expected):
  error = testing.refused_npz(testing.npz_bytes(mk(**{name: _changed(mk()[name], index, value)})))
  where = name + str([*index[-1:]] if name == 'node_splits' else [*index])
  assert (error.where, error.reason, error.found, error.expected) == (
    where,
    'value out of range',
    str(value),
    expected,
  )


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('name', ['node_feat', 'config_feat'])
def test_not_finite(name, value):
  error = testing.refused_npz(testing.npz_bytes(_T(**{name: _changed(_T()[name], (3, 5), value)})))
  assert (error.where, error.reason, error.found, error.expected) == (
    f'{name}[3, 5]',
    'value not finite',
    str(value),
    'a finite float32',
  )


@pytest.mark.parametrize('order', ['C', 'F'])
@pytest.mark.parametrize('value', [0.5, 128.0, -129.0, 256.0, 1e30, np.nan, np.inf])
def test_layout_config_that_is_not_a_small_integer(value, order):
  array = np.asarray(_changed(_L()['node_config_feat'], (4, 1, 7), value), order=order)
  error = testing.refused_npz(testing.npz_bytes(_L(node_config_feat=array)))
  assert (error.where, error.reason) == ('node_config_feat[4, 1, 7]', 'value not a small integer')
  assert (error.found, error.expected[:33]) == (
    str(np.float32(value)),
    'a whole number from -128 to 127 (',
  )


@pytest.mark.parametrize('value', [255, 128, 2**64 - 1])
def test_unsigned_layout_config_does_not_wrap(value):
  array = _changed(np.zeros((6, 2, 18), np.uint64), (0, 0, 3), value)
  error = testing.refused_npz(testing.npz_bytes(_L(node_config_feat=array)))
  assert (error.where, error.found) == ('node_config_feat[0, 0, 3]', str(value))


@pytest.mark.parametrize('mk', [_T, _L])
@pytest.mark.parametrize(
  ('value', 'dtype'), [(-1, np.int64), (-(2**63), np.int64), (2**63, np.uint64)]
)
def test_runtime_out_of_range(mk, value, dtype):
  runtime = _changed(np.full(6, 1000, dtype), 2, value)
  error = testing.refused_npz(testing.npz_bytes(mk(config_runtime=runtime)))
  assert (error.where, error.reason, error.found) == (
    'config_runtime[2]',
    'runtime out of range',
    str(value),
  )
  assert error.expected


def test_repeated_config_id():
  error = testing.refused_npz(testing.npz_bytes(_T(config_id=np.array([0, 1, 2, 3, 4, 4]))))
  assert (error.where, error.reason) == ('config_id', 'repeated value')


# Some runs are not measurements.


def test_failed_runs_are_dropped_and_counted():
  layout = _L(config_runtime=np.array([0, 3000, 1, 2, 0, 910876401]))
  module = _read(layout)
  assert module.config_runtime.tolist() == [3000, 2, 910876401]
  assert module.config_id.tolist() == [1, 3, 5]
  np.testing.assert_array_equal(module.node_config_feat, layout['node_config_feat'][[1, 3, 5]])
  assert module.dropped_runs == {'time < 2 ns': 3}


def test_failed_runs_of_tile():
  tile = _T(
    config_runtime=np.array([0, 3000, 1, 2, 5, 9]),
    config_runtime_normalizers=np.array([0, 7, 7, 0, -5, 1]),
  )
  module = _read(tile)
  assert module.config_runtime.tolist() == [3000, 9]
  assert module.config_runtime_normalizers.tolist() == [7, 1]
  assert module.config_id.tolist() == [1, 5]
  np.testing.assert_array_equal(module.config_feat, tile['config_feat'][[1, 5]])
  assert module.dropped_runs == {'time < 2 ns': 2, 'no normalizer': 2}


@pytest.mark.parametrize(
  ('mk', 'over'),
  [
    (_L, {'config_runtime': np.zeros(6, int)}),
    (_L, {'config_runtime': np.array([0, 1, 0, 1, 0, 1])}),
    (_T, {'config_runtime': np.zeros(6, int)}),
    (_T, {'config_runtime_normalizers': np.zeros(6, int)}),
    (_T, {'config_runtime': np.zeros(6, int), 'config_runtime_normalizers': np.ones(6, int)}),
  ],
)
def test_file_without_any_measurement(mk, over):
  module = _read(mk(**over))
  assert not module.is_measured
  assert module.config_runtime.tolist() == [-1] * 6
  assert module.config_id.tolist() == [0, 1, 2, 3, 4, 5]
  assert module.dropped_runs == {}
  if mk is _T:
    assert module.config_runtime_normalizers.tolist() == [-1] * 6


def test_saving_partly_measured_configs(tmp_path):
  module = _read(_L())
  partly = module_lib.Module(**{**vars(module), 'config_runtime': np.array([-1, 5, -1, 6, 7, 8])})
  npz.save(partly, tmp_path / 'm.npz')
  loaded = npz.load(tmp_path / 'm.npz')
  assert loaded.config_runtime.tolist() == [5, 6, 7, 8]
  assert loaded.config_id.tolist() == [1, 3, 4, 5]
  assert loaded.dropped_runs == {'time < 2 ns': 2}


# Saving is atomic.


def _full_disk(archive, *args):
  del args
  archive.fp.write(b'PK half a file')
  raise OSError(28, 'No space left on device')


@pytest.mark.parametrize('exists', [False, True])
def test_failing_save_keeps_the_old_file(exists, tmp_path, monkeypatch):
  path = tmp_path / 'm.npz'
  if exists:
    path.write_bytes(b'before')
  monkeypatch.setattr(zips, 'write_member', _full_disk)
  with pytest.raises(OSError, match='No space left'):
    npz.save(_read(_T()), path)
  assert [file.name for file in tmp_path.iterdir()] == ['m.npz'] * exists
  if exists:
    assert path.read_bytes() == b'before'


def test_file_appears_complete(tmp_path, monkeypatch):
  seen = []

  def replace(source, target):
    seen.append(npz.load(source).num_configs)
    assert not pathlib.Path(target).exists()
    os.rename(source, target)

  monkeypatch.setattr(os, 'replace', replace)
  npz.save(_read(_T()), tmp_path / 'm.npz')
  assert seen == [6]
  assert [file.name for file in tmp_path.iterdir()] == ['m.npz']


def test_save_replaces_and_repeats_bytes(tmp_path):
  (tmp_path / 'm.npz').write_bytes(b'before')
  npz.save(_read(_L()), tmp_path / 'm.npz')
  npz.save(_read(_L()), str(tmp_path / 'n.npz'))
  assert (tmp_path / 'm.npz').read_bytes() == (tmp_path / 'n.npz').read_bytes()


@pytest.mark.skipif(os.name != 'posix', reason='permissions of POSIX')
def test_saved_file_has_the_usual_permissions(tmp_path):
  (tmp_path / 'usual').touch()
  npz.save(_read(_T()), tmp_path / 'm.npz')
  modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ('usual', 'm.npz')]
  assert modes[0] == modes[1]
