"""Tests of tpu_graphs.sources.zips, with zipfile as the oracle."""

import contextlib
import io
import zipfile

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tests import testing
from tpu_graphs.sources import zips

_SETTINGS = hypothesis.settings(max_examples=60, deadline=None)
_CONTENTS = st.one_of(
  st.binary(max_size=300),
  # The repeated data has up to 1.2 MB.
  st.builds(lambda data, times: data * times, st.binary(max_size=20), st.integers(0, 60_000)),
  st.builds(
    lambda seed, size: np.random.default_rng(seed).bytes(size),
    st.integers(0, 9),
    st.integers(0, 600_000),
  ),
)


def _zip(content, compression, level=None):
  file = io.BytesIO()
  with zipfile.ZipFile(file, 'w', compression, compresslevel=level) as archive:
    archive.writestr('before', b'something else')
    archive.writestr('a', content)
    archive.writestr('behind', b'something else')
  return file


def _read(file, name='a', size=1 << 16):
  """Returns the pieces that a member is read in; the last piece is empty."""
  reader = zips.Reader(zipfile.ZipFile(file), name)
  pieces = []
  while not pieces or pieces[-1]:
    pieces.append(reader.read(size))
    assert reader.position == sum(map(len, pieces))
  return pieces


@_SETTINGS
@hypothesis.given(
  content=_CONTENTS,
  size=st.sampled_from([1000, 4096, 300_000, 1 << 21]),
  level=st.integers(0, 9),
  compression=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2]),
)
def test_reads_what_was_written(content, size, level, compression):
  pieces = _read(_zip(content, compression, max(level, 1)), size=size)
  assert b''.join(pieces) == content
  assert {len(piece) for piece in pieces[:-2]} <= {size}


def test_one_byte_at_a_time():
  content = b'abracadabra' * 3
  pieces = _read(_zip(content, zipfile.ZIP_DEFLATED), size=1)
  assert pieces == [*(bytes([byte]) for byte in content), b'']


@_SETTINGS
@hypothesis.given(blocks=st.lists(_CONTENTS, max_size=4))
def test_zipfile_reads_what_is_written(blocks):
  file = io.BytesIO()
  with zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED) as archive:
    for name in ('a', 'b'):
      zips.write_member(archive, name, map(memoryview, blocks))
  with zipfile.ZipFile(file) as archive:
    assert archive.testzip() is None
    assert archive.read('a') == archive.read('b') == b''.join(blocks)
    info = archive.getinfo('b')
  assert (info.compress_type, info.file_size) == (zipfile.ZIP_DEFLATED, sum(map(len, blocks)))
  assert info.compress_size <= info.file_size * 1.01 + 100
  assert b''.join(_read(file, 'b')) == b''.join(blocks)


def test_arrays_are_compressed():
  values = np.tile(np.arange(18, dtype=np.float32), 10_000)
  file = io.BytesIO()
  with zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED) as archive:
    zips.write_member(archive, 'a', (part.data for part in np.split(values, 10)))
  assert b''.join(_read(file)) == values.tobytes()
  assert len(file.getvalue()) < values.nbytes / 20


@pytest.mark.parametrize(
  'compression', [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2]
)
def test_wrong_checksum(compression):
  data = bytearray(_zip(b'abracadabra' * 9, compression).getvalue())
  # In an entry of the directory, the name follows 46 bytes.
  entry = data.rindex(b'aPK\x01\x02') - 46
  data[entry + 16] ^= 1
  reader = zips.Reader(zipfile.ZipFile(io.BytesIO(data)), 'a')
  # zipfile reads all data of bzip2 at once.
  if compression != zipfile.ZIP_BZIP2:
    assert reader.read(98) == (b'abracadabra' * 9)[:98]
  with pytest.raises(zipfile.BadZipFile, match="Bad CRC-32 for file 'a'"):
    reader.read(1)


def test_changed_bytes_are_never_taken_for_the_content():
  content = b'abracadabra' * 30
  data = _zip(content, zipfile.ZIP_DEFLATED).getvalue()
  # The data of the second member begins behind its header of 30 bytes and its name of 1 byte.
  start = data.index(b'PK\x03\x04', 10) + 31
  for i in range(start, data.index(b'PK\x03\x04', start)):
    for bit in range(8):
      damaged = bytearray(data)
      damaged[i] ^= 1 << bit
      with contextlib.suppress(zipfile.BadZipFile):
        found = b''.join(_read(io.BytesIO(damaged)))
        # The length shows an early end.
        assert found == content or len(found) < len(content), (i, bit)


def test_data_that_is_longer_than_the_directory_says():
  data = bytearray(_zip(b'abracadabra' * 9, zipfile.ZIP_DEFLATED).getvalue())
  entry = data.rindex(b'aPK\x01\x02') - 46
  data[entry + 24 : entry + 28] = (50).to_bytes(4, 'little')
  with pytest.raises(zipfile.BadZipFile, match='Bad CRC-32'):
    _read(io.BytesIO(data))


# The directory of a zip identifies its content.


def _tail(data):
  file = io.BytesIO(data)
  start = zips.directory_start(file)
  return data[start:], start


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_directory_distinguishes_contents(save):
  arrays = testing.layout_arrays(c=500, seed=1)
  data = testing.npz_bytes(arrays, save)
  tail, start = _tail(data)
  assert data[start : start + 4] == b'PK\x01\x02'
  assert len(tail) < 1000 < start
  assert _tail(testing.npz_bytes(arrays, save))[0] == tail
  arrays['node_config_feat'][77, 1, 3] += 1
  changed, _ = _tail(testing.npz_bytes(arrays, save))
  assert changed != tail
  assert len(changed) == len(tail) or save is np.savez_compressed


@pytest.mark.parametrize('data', [b'', b'PK', b'PK\x05\x06', b'HloModule jit_f', bytes(100_000)])
def test_other_files_have_no_directory(data):
  assert zips.directory_start(io.BytesIO(data)) == 0


def test_damaged_directory(tmp_path):
  data = testing.npz_bytes(testing.tile_arrays())
  assert zips.directory_start(io.BytesIO(data[:-1])) == 0
  start = zips.directory_start(io.BytesIO(data))
  for i in range(start, len(data)):
    damaged = bytearray(data)
    damaged[i] ^= 0xFF
    (tmp_path / 'a').write_bytes(damaged)
    with open(tmp_path / 'a', 'rb') as file:
      assert 0 <= zips.directory_start(file) < len(data)
