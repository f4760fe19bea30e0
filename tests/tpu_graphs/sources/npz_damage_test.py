"""Tests of tpu_graphs.sources.npz with files that are damaged, not npz, or far too large."""

import io
import tracemalloc
import zipfile

import numpy as np
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs.modules import streams
from tpu_graphs.sources import npz


def _read(arrays):
  return npz.read(io.BytesIO(testing.npz_bytes(arrays)), path='d/m.npz')


# Files are damaged.


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_truncated(save):
  data = testing.npz_bytes(testing.layout_arrays(n=2, c=2, nc=1), save)
  for end in [*range(2, len(data), 23), len(data) - 1]:
    error = testing.refused_npz(data[:end])
    assert error.reason == 'damaged or truncated npz file', end
    assert error.found
    assert error.expected == 'a complete zip archive'
    assert error.fix == 'download the file again'


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_flipped_byte_is_refused_or_harmless(save, tmp_path):
  """Flips bytes; some do not matter, such as a date, but a module that is read is right."""
  data = testing.npz_bytes(testing.layout_arrays(n=2, c=2, nc=1), save)
  expected = npz.read(io.BytesIO(data), path='m.npz')
  path = tmp_path / 'm.npz'
  refused = []
  for i in range(0, len(data), 5):
    damaged = bytearray(data)
    damaged[i] ^= 0xFF
    path.write_bytes(damaged)
    try:
      module = npz.load(path)
    except errors.InputError as error:
      refused.append((error.path, error.reason))
    else:
      testing.assert_equal_modules(module, expected)
  assert len(refused) > len(data) / 5 / 2
  assert {name for name, _ in refused} == {str(path)}
  assert 'cannot read file' not in {reason for _, reason in refused}


def test_flipped_byte_in_the_data():
  data = bytearray(testing.npz_bytes(testing.tile_arrays(), np.savez))
  with zipfile.ZipFile(io.BytesIO(data)) as archive:
    offset = archive.getinfo('node_feat.npy').header_offset
  data[offset + 400] ^= 1
  error = testing.refused_npz(bytes(data))
  assert error.reason == 'damaged or truncated npz file'
  assert "Bad CRC-32 for file 'node_feat.npy'" in error.found


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
@pytest.mark.parametrize('name', sorted(testing.layout_arrays()))
def test_checksum_is_compared(name, save):
  data = bytearray(testing.npz_bytes(testing.layout_arrays(n=100, c=100), save))
  # In an entry of the zip's directory, the name follows 46 bytes; the checksum is at 16.
  entry = data.rindex(f'{name}.npy'.encode()) - 46
  data[entry + 16] ^= 1
  error = testing.refused_npz(bytes(data))
  assert error.found == f"Bad CRC-32 for file '{name}.npy'"


@pytest.mark.parametrize('start', [b'(((', b'\n   ', b'\x00\x00\x00', b'"""'])
def test_damaged_header_of_a_large_array(start):
  """Damages a header, which is parsed before the checksum at the end can show the damage."""
  data = testing.npz_bytes(testing.tile_arrays(n=100), np.savez)
  header = data.index(b"{'descr'", data.index(b'node_feat.npy'))
  error = testing.refused_npz(data[:header] + start + data[header + len(start) :])
  assert error.reason == 'damaged or truncated npz file'
  assert error.found


@pytest.mark.parametrize('compression', [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damage_under_other_compressions(compression):
  file = io.BytesIO()
  with zipfile.ZipFile(file, 'w', compression) as archive:
    for name, array in testing.tile_arrays().items():
      stream = io.BytesIO()
      np.save(stream, array)
      archive.writestr(f'{name}.npy', stream.getvalue())
  data = file.getvalue()
  testing.assert_equal_modules(
    npz.read(io.BytesIO(data), path='m.npz'), _read(testing.tile_arrays())
  )
  # The range begins behind the zip's own header of the first array.
  for i in range(60, 400, 9):
    damaged = bytearray(data)
    damaged[i] ^= 0xFF
    assert testing.refused_npz(bytes(damaged)).reason == 'damaged or truncated npz file', i


@pytest.mark.parametrize(
  ('data', 'reason', 'found'),
  [
    (b'', 'empty file', '0 bytes'),
    (b'<html>404 not found</html>', 'not an npz file', 'HTML or XML'),
    (b'\x1f\x8b\x08' + bytes(60), 'not an npz file', 'gzip data'),
    (b'HloModule jit_f', 'not an npz file', 'HLO text'),
  ],
  ids=['empty', 'html', 'gzip', 'hlo'],
)
def test_not_an_npz(data, reason, found):
  error = testing.refused_npz(data)
  assert (error.reason, error.found) == (reason, found)
  assert error.expected


def test_npy_instead_of_npz():
  file = io.BytesIO()
  np.save(file, np.zeros(3))
  error = testing.refused_npz(file.getvalue())
  assert (error.reason, error.found, error.expected) == (
    'not an npz file',
    'an npy array',
    'a zip archive of npy arrays',
  )


def test_zip_of_something_else():
  file = io.BytesIO()
  with zipfile.ZipFile(file, 'w') as archive:
    archive.writestr('readme.txt', 'hello')
  error = testing.refused_npz(file.getvalue())
  assert (error.reason, error.where) == ('member is not an npy array', 'readme.txt')


def test_missing_file_and_directory(tmp_path):
  for path in (tmp_path / 'none.npz', tmp_path):
    with pytest.raises(errors.InputError) as caught:
      npz.load(path)
    assert (caught.value.reason, caught.value.path) == ('cannot read file', str(path))
    assert caught.value.found


def test_fault_of_the_disk_is_not_damage():
  class Disk(io.BytesIO):
    def read(self, *args):
      # This is behind the header of the first array, and not in the directory at the end.
      if 30 < self.tell() < 256:
        raise OSError(5, 'Input/output error')
      return super().read(*args)

  with pytest.raises(OSError, match='Input/output error'):
    npz.read(Disk(testing.npz_bytes(testing.tile_arrays())), path='m.npz')


# Some arrays must not be unpickled, or not even allocated.


class _Bomb:
  went_off = False

  def __reduce__(self):
    return setattr, (_Bomb, 'went_off', True)


@pytest.mark.parametrize('name', ['node_feat', 'anything'])
def test_objects_are_never_unpickled(name):
  error = testing.refused_npz(
    testing.npz_bytes(testing.tile_arrays(**{name: np.array([_Bomb()], dtype=object)}))
  )
  assert (error.where, error.reason, error.found) == (name, 'pickled objects', 'object')
  assert error.expected == 'numbers'
  assert not _Bomb.went_off


def _with_member(arrays, name, content):
  file = io.BytesIO(testing.npz_bytes({key: array for key, array in arrays.items() if key != name}))
  with zipfile.ZipFile(file, 'a', zipfile.ZIP_DEFLATED) as archive:
    archive.writestr(f'{name}.npy', content)
  return file.getvalue()


def _npy_header(shape, dtype):
  file = io.BytesIO()
  np.lib.format.write_array_header_1_0(
    file, {'descr': dtype, 'fortran_order': False, 'shape': shape}
  )
  return file.getvalue()


def _peak_bytes(function):
  tracemalloc.start()
  try:
    function()
    return tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()


def _check_refused_before_allocation(data, where, reason, **options):
  found = []
  assert _peak_bytes(lambda: found.append(testing.refused_npz(data, **options))) < 2 << 20
  assert (found[0].where, found[0].reason) == (where, reason)
  return found[0]


def test_header_over_the_limit():
  data = _with_member(testing.tile_arrays(), 'config_runtime', _npy_header((2**33,), '<i8'))
  error = _check_refused_before_allocation(data, 'config_runtime', 'array too large')
  assert (error.found, error.expected) == (
    f'{2**36} bytes as [{2**33}] int64',
    f'<= {16 << 30} bytes',
  )


@pytest.mark.parametrize(
  ('shape', 'dtype'), [((2**33,), '|i1'), ((7,), '<i8'), ((5,), '<i8'), ((0,), '<i8')]
)
def test_header_that_does_not_fit_the_data(shape, dtype):
  content = _npy_header(shape, dtype) + bytes(6 * 8)
  error = _check_refused_before_allocation(
    _with_member(testing.tile_arrays(), 'config_runtime', content),
    'config_runtime',
    'header does not fit the data',
  )
  assert error.found == '48 bytes of data'
  assert (
    error.expected
    == f'{shape[0] * np.dtype(dtype).itemsize} bytes for {list(shape)} {np.dtype(dtype)}'
  )


def test_zip_bomb():
  data = _with_member(
    testing.tile_arrays(), 'padding', _npy_header((8 << 20,), '|i1') + bytes(8 << 20)
  )
  assert len(data) < 40_000
  error = _check_refused_before_allocation(
    data, 'padding', 'array too large', max_array_bytes=4 << 20
  )
  assert error.expected == f'<= {4 << 20} bytes'
  npz.read(io.BytesIO(data), path='m.npz', max_array_bytes=8 << 20)


@pytest.mark.parametrize(
  'content',
  [
    b'',
    b'hello',
    b'\x93NUMPY',
    b'\x93NUMPY\x01\x00\x10\x00{not a header}',
    b'\x93NUMPY\x01\x00\xff\xff{',
  ],
)
def test_member_that_is_not_an_array(content):
  error = testing.refused_npz(_with_member(testing.tile_arrays(), 'node_feat', content))
  assert error.reason == 'damaged or truncated npz file'


def test_layout_configs_do_not_inflate_to_floats(monkeypatch):
  shape = (2000, 64, 18)  # 9 MB as float32, 2.3 MB as int8.
  data = testing.npz_bytes(
    testing.layout_arrays(
      c=2000, node_config_ids=np.zeros(64, int), node_config_feat=np.ones(shape, np.float32)
    )
  )
  monkeypatch.setattr(npz, '_BLOCK_BYTES', 1 << 18)
  monkeypatch.setattr(streams, 'BLOCK_BYTES', 1 << 18)
  assert _peak_bytes(lambda: npz.read(io.BytesIO(data), path='m.npz')) < 2 * np.prod(shape)
