"""Tests of tpu_graphs.modules.streams: any rows are read and encoded in any blocks.

Memory does not depend on the number of configs.
"""

import io
import tracemalloc
import zipfile

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import records
from tpu_graphs.dataset import statistics
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import streams
from tpu_graphs.sources import npz

_SETTINGS = hypothesis.settings(
  max_examples=60,
  deadline=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
_SAVES = {'stored': np.savez, 'deflated': np.savez_compressed}


def open_npz(arrays, save=np.savez_compressed):
  return io.BytesIO(testing.npz_bytes(arrays, save))


def stream_of(file, **kwargs):
  return npz.stream(file, path='d/m.npz', **kwargs)


def joined(stream, rows):
  blocks = list(stream.read(np.asarray(rows, np.int64)))
  return np.concatenate(blocks) if blocks else np.zeros((0, *_features(stream.graph).shape[1:]))


def _features(module):
  return module.config_feat if module.kind == 'tile' else module.node_config_feat


# Reading.


@pytest.mark.parametrize('save', list(_SAVES))
@pytest.mark.parametrize('order', 'CF')
@hypothesis.given(
  c=st.integers(0, 12),
  nc=st.integers(0, 3),
  dtype=st.sampled_from(['f4', '>f4', 'i1', 'i8', 'f2']),
  block=st.sampled_from([1, 60, 300, 10_000]),
  chosen=st.sets(st.integers(0, 11)),
)
@_SETTINGS
def test_any_rows_of_an_npz_file(monkeypatch, save, order, c, nc, dtype, block, chosen):
  monkeypatch.setattr(npz, '_BLOCK_BYTES', block)
  monkeypatch.setattr(streams, 'BLOCK_BYTES', block)
  values = np.random.default_rng(c).integers(-1, 6, (c, nc, 18))
  arrays = testing.layout_arrays(
    c=c, nc=nc, node_config_feat=np.array(values, dtype=dtype, order=order)
  )
  stream = stream_of(open_npz(arrays, _SAVES[save]))
  rows = sorted(row for row in chosen if row < c)
  for _ in range(2):  # A stream can be read again.
    found = joined(stream, rows)
    assert found.shape == (len(rows), nc, 18)
    np.testing.assert_array_equal(found, values[rows])
  np.testing.assert_array_equal(joined(stream, range(c)), values)
  np.testing.assert_array_equal(stream.load().node_config_feat, values)
  selected = stream.select(np.array(rows, np.int64))
  np.testing.assert_array_equal(selected.load().node_config_feat, values[rows])
  assert selected.config_id.tolist() == rows


@pytest.mark.parametrize('kind', module_lib.KINDS)
def test_failed_runs_are_left_out(kind):
  runtime = np.array([5, 0, 7, 1, 9, 0])
  arrays = testing.arrays(kind, config_runtime=runtime)
  stream = stream_of(open_npz(arrays))
  module = npz.read(open_npz(arrays), path='d/m.npz')
  assert stream.config_id.tolist() == module.config_id.tolist() == [0, 2, 4]
  assert stream.graph.dropped_runs == module.dropped_runs == {npz.SHORT_RUN: 3}
  np.testing.assert_array_equal(
    _features(stream.load()),
    arrays['config_feat' if kind == 'tile' else 'node_config_feat'][[0, 2, 4]],
  )


def test_blocks_are_of_the_size_asked_for(monkeypatch):
  monkeypatch.setattr(streams, 'BLOCK_BYTES', 5 * 36)
  for stream in (
    stream_of(open_npz(testing.layout_arrays(c=12))),
    streams.ConfigStream.of(npz.read(open_npz(testing.layout_arrays(c=12)), path='m')),
  ):
    assert [len(block) for block in stream.blocks()] == [5, 5, 2]


@pytest.mark.parametrize('order', 'CF')
def test_only_rows_that_are_read_are_checked(order):
  values = np.zeros((6, 2, 18), np.float32, order)
  values[4, 1, 7] = 300
  stream = stream_of(open_npz(testing.layout_arrays(node_config_feat=values)))
  if order == 'C':  # In Fortran order, the values of all configs are interleaved.
    assert joined(stream, [0, 3, 5]).shape == (3, 2, 18)
  with pytest.raises(errors.InputError, match='value not a small integer') as caught:
    joined(stream, [0, 4])
  assert (caught.value.path, caught.value.where) == ('d/m.npz', 'node_config_feat[4, 1, 7]')


def damaged(save):
  """Returns a file whose config features do not match their checksum."""
  arrays = testing.layout_arrays(
    n=20, c=50, nc=20, node_config_feat=np.zeros((50, 20, 18), np.float32)
  )
  data = open_npz(arrays, save).getvalue()
  with zipfile.ZipFile(io.BytesIO(data)) as archive:
    crc = archive.getinfo('node_config_feat.npy').CRC
  return io.BytesIO(data.replace(crc.to_bytes(4, 'little'), (crc ^ 1).to_bytes(4, 'little')))


def test_checksum_of_a_compressed_member_is_compared_for_any_rows():
  stream = stream_of(damaged(np.savez_compressed))
  with pytest.raises(errors.InputError, match='Bad CRC-32') as caught:
    joined(stream, [3])
  assert caught.value.path == 'd/m.npz'


def test_checksum_of_a_stored_member_is_compared_if_all_is_read():
  stream = stream_of(damaged(np.savez))
  assert joined(stream, [3]).shape == (1, 20, 18)
  with pytest.raises(errors.InputError, match='Bad CRC-32'):
    joined(stream, range(50))


def test_little_of_a_stored_member_is_read():
  class Counting(io.BytesIO):
    total = 0

    def read(self, *args):
      data = super().read(*args)
      Counting.total += len(data)
      return data

  stream = stream_of(
    Counting(open_npz(testing.layout_arrays(n=100, c=1000, nc=100), np.savez).getvalue())
  )
  before = Counting.total
  joined(stream, [10, 999])
  # Two rows of 7,200 bytes, a header and a buffer of zipfile are read.
  assert Counting.total - before < 40_000


def test_array_limit_holds_for_configs_that_are_not_kept():
  file = open_npz(testing.layout_arrays(n=10, c=100, nc=10))
  with pytest.raises(errors.InputError, match='array too large') as caught:
    stream_of(file, max_array_bytes=71_999)
  assert caught.value.where == 'node_config_feat'
  file.seek(0)
  stream_of(file, max_array_bytes=72_000)


# Encoding.


def encoded(stream, **kwargs):
  return list(records.encode_stream(stream, records.RecordOptions(**kwargs)))


@pytest.mark.parametrize('kind', module_lib.KINDS)
@hypothesis.given(
  c=st.integers(0, 30),
  most=st.integers(1, 9),
  block=st.sampled_from([1, 100, 10_000]),
  on_disk=st.booleans(),
)
@_SETTINGS
def test_records_do_not_depend_on_blocks_or_files(monkeypatch, kind, c, most, block, on_disk):
  arrays = testing.arrays(kind, c=c)
  with monkeypatch.context() as patch:
    patch.setattr(streams, 'BLOCK_BYTES', block)
    patch.setattr(streams, 'IN_MEMORY_BYTES', -1 if on_disk else 1 << 30)
    found = encoded(stream_of(open_npz(arrays)), max_configs=most, seed=1)
  module = npz.read(open_npz(arrays), path='d/m.npz')
  assert found == list(records.encode(module, records.RecordOptions(max_configs=most, seed=1)))
  merged = records.merge([records.decode(record.data) for record in found])
  np.testing.assert_array_equal(_features(merged), _features(module))
  np.testing.assert_array_equal(merged.config_runtime, module.config_runtime)
  assert [record.part for record in found] == list(range(max(1, -(-c // most))))


def test_all_is_read_before_the_first_record():
  values = np.zeros((20, 2, 18), np.float32)
  values[19, 0, 0] = 0.5
  stream = stream_of(open_npz(testing.layout_arrays(c=20, node_config_feat=values)))
  with pytest.raises(errors.InputError, match='value not a small integer'):
    next(records.encode_stream(stream, records.RecordOptions(max_configs=1)))


@pytest.mark.parametrize('kind', module_lib.KINDS)
@pytest.mark.parametrize('block', [1, 1000, 1 << 20])
def test_statistics_of_blocks(monkeypatch, kind, block):
  arrays = testing.arrays(kind, c=40)
  expected = statistics.Statistics.of(npz.read(open_npz(arrays), path='m')).to_json()
  monkeypatch.setattr(streams, 'BLOCK_BYTES', block)
  stream = stream_of(open_npz(arrays))
  accumulator = statistics.Accumulator(stream.graph)
  for _ in records.encode_stream(stream, observe=accumulator.add):
    pass
  found = accumulator.statistics().to_json()['features']
  for name, columns in expected['features'].items():
    assert found[name]['count'] == columns['count']
    for key in ('min', 'max', 'mean', 'std'):
      np.testing.assert_allclose(found[name][key], columns[key], rtol=1e-12)
      np.testing.assert_allclose(found[name]['log'][key], columns['log'][key], rtol=1e-12)
    assert found[name]['constant'] == columns['constant']


# Parts.


@pytest.mark.parametrize('kind', module_lib.KINDS)
@hypothesis.given(
  c=st.integers(0, 30),
  nc=st.integers(0, 2),
  shares=st.integers(1, 5),
  seed=st.integers(0, 9),
  block=st.sampled_from([1, 100, 10_000]),
  on_disk=st.booleans(),
  chosen=st.sets(st.integers(0, 29)),
)
@_SETTINGS
def test_parts_put_together(monkeypatch, kind, c, nc, shares, seed, block, on_disk, chosen):
  module = npz.read(open_npz(testing.arrays(kind, c=c, nc=nc)), path='d/m.npz')
  order = np.random.default_rng(seed).permutation(c)
  parts = [module.select_configs(order[share::shares]) for share in range(shares)]
  expected = module if shares > 1 else parts[0]  # A single part keeps its order.
  rows = sorted(row for row in chosen if row < c)
  with monkeypatch.context() as patch:
    patch.setattr(streams, 'BLOCK_BYTES', block)
    patch.setattr(streams, 'IN_MEMORY_BYTES', -1 if on_disk else 1 << 30)
    with streams.merged(iter(parts)) as stream:
      testing.assert_equal_modules(stream.load(), expected)
      np.testing.assert_array_equal(joined(stream, rows), _features(expected)[rows])
      assert stream.num_configs == c


# Memory.


@pytest.mark.parametrize('save', list(_SAVES))
def test_memory_does_not_depend_on_the_number_of_configs(monkeypatch, save):
  for name, size in (('BLOCK_BYTES', 1 << 18), ('IN_MEMORY_BYTES', 1 << 18)):
    monkeypatch.setattr(streams, name, size)
  monkeypatch.setattr(npz, '_BLOCK_BYTES', 1 << 18)
  peaks = []
  for c in (1000, 8000):  # 2.3 and 18 MB as int8, four times that as float32.
    arrays = testing.layout_arrays(
      c=c, node_config_ids=np.zeros(128, int), node_config_feat=np.ones((c, 128, 18), np.float32)
    )
    file = open_npz(arrays, _SAVES[save])
    del arrays
    tracemalloc.start()
    count = sum(
      record.sizes['configs']
      for record in records.encode_stream(stream_of(file), records.RecordOptions(max_configs=100))
    )
    peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert count == c
  assert peaks[0] < 3 << 20
  assert peaks[1] < peaks[0] + (1 << 20)
