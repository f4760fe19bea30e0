"""Tests of tpu_graphs.dataset.records: decoding records, merging shares, reading TFRecord files."""

import dataclasses
import io
import itertools

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import records
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import npz

_SETTINGS = hypothesis.settings(max_examples=100, deadline=None)
_INT64 = (
  st.integers(-(2**63), 2**63 - 1)
  | st.integers(0, 63).map(lambda i: (1 << i) - 1)
  | st.integers(0, 200)
)
_UNMEASURED = {'config_runtime': np.zeros(6, int)}
_CASES = {
  'ordinary': {},
  'without configs': {'c': 0},
  'one op': {'n': 1, 'c': 1, 'nc': 1},
  'without configurable ops': {'nc': 0},
  'nothing but an op': {'n': 1, 'c': 0, 'nc': 0},
  'not measured': _UNMEASURED,
  'large times': {
    'config_runtime': np.array([910876401, 910876402, 2**31, 2**53 + 1, 2**62, 2**63 - 1])
  },
  'large': {'n': 300, 'c': 200, 'nc': 5},
  'runs dropped': {'config_runtime': np.array([5, 0, 7, 1, 8, 9])},
}


def _module(kind, name='é', extra=None, **over):
  file = io.BytesIO()
  np.savez(file, **testing.arrays(kind, **over))
  module = npz.read(file, path=f'{name}.npz')
  return module if extra is None else dataclasses.replace(module, extra_feat=extra)


def _assert_equal(found, expected, but=()):
  for field in dataclasses.fields(module_lib.Module):
    one, other = getattr(found, field.name), getattr(expected, field.name)
    if field.name not in but:
      assert type(one) is type(other), field.name
      np.testing.assert_array_equal(one, other, err_msg=field.name)
      assert getattr(one, 'dtype', None) == getattr(other, 'dtype', None), field.name


def _damaged(data, **options):
  with pytest.raises(errors.InputError) as caught:
    records.decode(data, **options)
  return caught.value


# Records.


@pytest.mark.parametrize('over', _CASES.values(), ids=_CASES.keys())
def test_decode_is_the_inverse(kind, over):
  module = _module(kind, **over)
  data = records.encode_whole(module)
  found = records.decode(data)
  _assert_equal(found, module, but=['dropped_runs'])
  assert records.encode_whole(found) == data
  assert records.decode_module_id(data) == 'é'


@pytest.mark.parametrize('n', [1, 4])
def test_extra_features(kind, n):
  module = _module(kind, n=n, nc=1, extra=np.arange(3 * n, dtype=np.float32).reshape(n, 3))
  data = records.encode_whole(module)
  _assert_equal(records.decode(data, num_extra=3), module)
  assert 'extra_feat' in str(_damaged(data))
  _damaged(data, num_extra=2)
  assert _damaged(records.encode_whole(_module(kind)), num_extra=3).where == 'nodes/op.extra_feat'


def test_records_that_another_program_wrote(kind):
  """tf.train.Example promises no order of features, and writes nothing for an empty list."""
  for over in ({}, {'c': 0, 'nc': 0, 'n': 1}):
    module = _module(kind, **over)
    features = tf.train.Example.FromString(records.encode_whole(module)).features.feature
    for names in (sorted(features), sorted(features, reverse=True)):
      parts = [
        tf.train.Example(features=tf.train.Features(feature={name: features[name]}))
        for name in names
      ]
      # Protobuf merges concatenated messages.
      data = b''.join(part.SerializeToString() for part in parts)
      _assert_equal(records.decode(data), module)


@pytest.mark.parametrize(
  ('splits', 'expected'),
  [
    ([0, 6], [0, 6]),
    ([0], [0, 6]),
    ([0, 1, 6], [0, 1, 6]),
    ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]),
    ([0, 0, 6], [0, 0, 6]),
    ([0, 2, 2, 2, 6], [0, 2, 2, 2, 6]),
    ([0, 3, 6, 6], [0, 3, 6]),
  ],
)
def test_segments(splits, expected):
  """Records keep all segments but empty segments at the end."""
  module = _module('layout', n=6, node_splits=np.array([splits]))
  found = records.decode(records.encode_whole(module))
  assert found.node_splits.tolist() == expected
  _assert_equal(found, module, but=['node_splits'])


@pytest.mark.parametrize(
  ('computation', 'expected'),
  [
    ([0, 0, 1, 1], [0, 2, 4]),
    ([1, 1, 1, 3], [0, 0, 3, 3, 4]),
    ([0, 1, 0, 1], [0, 4]),
    ([2, 1, 0, 0], [0, 4]),
    ([0, 0, 1, 4], [0, 4]),
    ([0, 0, 1, 2**62], [0, 4]),
  ],
)
def test_computations(computation, expected):
  module = _module('tile', computation=np.array(computation))
  found = records.decode(records.encode_whole(module))
  assert found.node_splits.tolist() == expected
  assert found.computation.tolist() == computation


def test_fields_that_records_do_not_hold(kind):
  module = dataclasses.replace(
    _module(kind), dropped_runs={'x': 1}, unknown_opcodes={'topk': 1}, default_config=2
  )
  found = records.decode(records.encode_whole(module))
  assert (found.dropped_runs, found.unknown_opcodes, found.default_config) == ({}, {}, None)


def test_each_feature_is_needed(kind):
  example = tf.train.Example.FromString(records.encode_whole(_module(kind)))
  for name in list(example.features.feature):
    less = tf.train.Example.FromString(example.SerializeToString())
    del less.features.feature[name]
    error = _damaged(less.SerializeToString())
    # Without this feature, a record is taken for a record of a tile module.
    if name != 'context/node_config_feat':
      assert (error.reason, error.where) == ('feature missing in a record', name)


def test_features_of_another_type_or_size(kind):
  data = records.encode_whole(_module(kind))
  changes = (
    tf.train.Feature(int64_list=tf.train.Int64List(value=[7])),
    tf.train.Feature(float_list=tf.train.FloatList(value=[7.0])),
    tf.train.Feature(bytes_list=tf.train.BytesList(value=[b'\xff\xfe'])),
    tf.train.Feature(),
  )
  for name in tf.train.Example.FromString(data).features.feature:
    for change in changes:
      example = tf.train.Example.FromString(data)
      example.features.feature[name].CopyFrom(change)
      assert _damaged(example.SerializeToString())


@pytest.mark.parametrize(
  ('name', 'values', 'words'),
  [
    ('nodes/op.unknown', [0], 'nodes/op.unknown'),
    ('nodes/op.#size', [5], 'nodes/op.#size'),
    ('edges/configures.#source', [1, 0], 'in order'),
    ('context/config_id.d1', [2, 4], 'context/config_id.d1'),
    ('edges/operand.#source', [0, 1, 4], 'edge_index[2, 1]'),
    ('context/config_id', [0, 1, 2, 2, 4, 5], 'repeated value'),
  ],
)
def test_senseless_values(name, values, words):
  example = tf.train.Example.FromString(records.encode_whole(_module('layout')))
  example.features.feature[name].int64_list.value[:] = values
  assert words in str(_damaged(example.SerializeToString()))


def test_every_truncation_is_refused(kind):
  data = records.encode_whole(_module(kind, n=2, c=2, nc=1))
  for size in range(len(data)):
    _damaged(data[:size])


@_SETTINGS
@hypothesis.given(data=st.binary(max_size=40))
def test_random_bytes_are_refused(data):
  _damaged(data)
  with pytest.raises(errors.InputError):
    records.decode_module_id(data)


@_SETTINGS
@hypothesis.given(
  position=st.integers(0, 10**6), value=st.integers(0, 255), which=st.sampled_from(module_lib.KINDS)
)
def test_any_changed_byte_is_refused_or_is_another_module(position, value, which):
  data = bytearray(records.encode_whole(_module(which, n=2, c=2, nc=1)))
  data[position % len(data)] = value
  try:
    module = records.decode(bytes(data))
  except errors.InputError:
    return
  # This may be shorter than `data`, where a changed varint may hold a digit too many.
  encoded = records.encode_whole(module)
  assert records.encode_whole(records.decode(encoded)) == encoded


# Varints.


@_SETTINGS
@hypothesis.given(values=st.lists(_INT64, max_size=12))
def test_varints_both_ways(values):
  found = records.from_varints(records.varints(np.array(values, np.int64)))
  assert found.dtype == np.int64
  assert found.tolist() == values


@pytest.mark.parametrize(
  'data', [b'\x80', b'\x01\xff', b'\x80' * 10 + b'\x01', b'\x01' + b'\x80' * 11 + b'\x01']
)
def test_data_that_is_not_varints(data):
  with pytest.raises(ValueError, match='varints'):
    records.from_varints(data)


# Shares.


@pytest.mark.parametrize('c', [2, 7, 100])
def test_merge_puts_shares_together(kind, c):
  module = _module(kind, c=c)
  parts = [
    records.decode(record.data)
    for record in records.encode(module, records.RecordOptions(max_configs=c // 2))
  ]
  assert len(parts) > 1
  for order in itertools.islice(itertools.permutations(parts), 6):
    _assert_equal(records.merge(order), module)


def test_merge_of_one_part_is_that_part():
  """The order of the configs stays as it is, so writing and reading change nothing."""
  module = _module('tile', config_id=np.array([5, 3, 9, 1, 0, 2]))
  [record] = records.encode(module)
  _assert_equal(records.merge([records.decode(record.data)]), module)


def test_merge_orders_configs_by_id():
  module = _module('layout', config_id=np.array([50, 30, 90, 10, 0, 20]))
  parts = [module.select_configs([2, 0, 4]), module.select_configs([5, 1, 3])]
  _assert_equal(records.merge(parts), module.select_configs(np.argsort(module.config_id)))


def test_merge_refuses_a_config_that_occurs_twice(kind):
  module = _module(kind)
  with pytest.raises(errors.InputError, match='config_id: repeated value'):
    records.merge([module.select_configs([0, 1]), module.select_configs([1, 2])])


# TFRecord files.

_CONTENTS = [b'hello', b'', bytes(range(256)), b'a' * 70000]


def _read_all(file):
  return list(iter(lambda: records.read_tfrecord(file), None))


@pytest.mark.parametrize('contents', [[], [b''], _CONTENTS])
def test_read_what_tensorflow_wrote(contents, tmp_path):
  with tf.io.TFRecordWriter(str(tmp_path / 'r')) as writer:
    for content in contents:
      writer.write(content)
  with open(tmp_path / 'r', 'rb') as file, tf.io.gfile.GFile(str(tmp_path / 'r'), 'rb') as other:
    assert _read_all(file) == _read_all(other) == contents


def test_read_from_a_position():
  file = io.BytesIO()
  records.write_tfrecords(file, _CONTENTS)
  file.seek(16 + 5 + 16)
  assert _read_all(file) == _CONTENTS[2:]


def test_damaged_files():
  file = io.BytesIO()
  records.write_tfrecords(file, [b'hello', b'you'])
  data = file.getvalue()
  cut = [data[:size] for size in range(1, len(data)) if size != 21]
  changed = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(len(data))]
  for i, damaged in enumerate([*cut, *changed]):
    with pytest.raises(errors.InputError, match='damaged record') as caught:
      _read_all(io.BytesIO(damaged))
    assert caught.value.where in ('byte 0', 'byte 21'), i
