"""Thousands of files, one damaged in a hundred: good files are converted, bad files are listed."""

import io
import json
import struct
import zipfile

import numpy as np
import pytest

from tests import converting
from tests import testing
from tpu_graphs.dataset import records

FILES = 10_000
EVERY = 100  # One file of so many is damaged.
CONTENTS = 240  # Good files have so many different contents; their names all differ.
MAX_ARRAY_BYTES = 100_000
SIZES = range(3, 9)

pytestmark = pytest.mark.slow


def arrays(i, **over):
  """Returns arrays of file number `i`: 3 to 8 ops, as many configs, and 2 configurable ops."""
  return testing.layout_arrays(n=size_of(i), c=size_of(i), seed=i % CONTENTS, **over)


def size_of(i):
  return SIZES[i % len(SIZES)]


def npz(content, save=np.savez):
  file = io.BytesIO()
  save(file, **content)
  return file.getvalue()


# Each function damages a file in one way. It takes the number of the file and returns its bytes,
# the reason for which the file is refused, the array, and a part of `found`.


def no_bytes(i):
  return b'', 'empty file', None, '0 bytes'


def truncated(i):
  data = npz(arrays(i))
  return data[: len(data) * (1 + i % 97) // 99], 'damaged or truncated npz file', None, ''


def a_page(i):
  return f'<!DOCTYPE html><title>404</title>{i}'.encode(), 'not an npz file', None, 'HTML'


def wrong_byte(i):
  """Flips a bit in the last value of an array."""
  data = bytearray(npz(arrays(i)))
  with zipfile.ZipFile(io.BytesIO(data)) as archive:
    member = archive.infolist()[i % 7]
  # These are the lengths of the name and of the extra field.
  lengths = struct.unpack('<HH', data[member.header_offset + 26 : member.header_offset + 30])
  data[member.header_offset + 30 + sum(lengths) + member.file_size - 1] ^= 1
  return (
    bytes(data),
    'damaged or truncated npz file',
    None,
    f"Bad CRC-32 for file '{member.filename}'",
  )


def no_array(i):
  name = ('node_opcode', 'node_feat', 'edge_index', 'config_runtime')[i % 4]
  return npz(arrays(i, **{name: None})), 'array missing', name, 'arrays '


def wrong_shape(i):
  columns = 139 + 2 * (i % 2)
  content = arrays(i, node_feat=np.zeros((size_of(i), columns), np.float32))
  return npz(content), 'wrong shape', 'node_feat', f'[{size_of(i)}, {columns}]'


def with_value(i, name, value, row, *columns):
  """Returns the bytes of a file with a value at this place, and the name of the place."""
  content = arrays(i)
  content[name][row, *columns] = value
  return npz(content), f'{name}{[row, *columns]}'


def index_out_of_range(i):
  value = -1 if i % 2 else size_of(i)
  data, where = with_value(i, 'edge_index', value, 1, i % 2)
  return data, 'value out of range', where, str(value)


def not_a_number(i):
  value = (np.nan, np.inf, -np.inf)[i % 3]
  data, where = with_value(i, 'node_feat', value, i % 3, i % 140)
  return data, 'value not finite', where, str(value)


def pickled(i):
  name = ('node_feat', 'node_opcode', 'config_runtime', 'node_config_feat')[i % 4]
  return npz(arrays(i, **{name: np.array([{'i': i}], object)})), 'pickled objects', name, 'object'


def no_int8(i):
  value = (128.0, -129.0, 0.5)[i % 3]
  data, where = with_value(i, 'node_config_feat', value, i % 3, i % 2, i % 18)
  return data, 'value not a small integer', where, str(value)


def bomb(i):
  """Makes a small file with a large array of zeros."""
  content = arrays(i, node_feat=np.zeros((1000 + i, 140), np.float32))
  return (
    npz(content, np.savez_compressed),
    'array too large',
    'node_feat',
    f'{560 * (1000 + i)} bytes',
  )


def lying_header(i):
  """Makes the header claim one op too many."""
  shapes = [f'({size}, 140)'.encode() for size in (size_of(i), size_of(i) + 1)]
  with (
    zipfile.ZipFile(io.BytesIO(npz(arrays(i)))) as source,
    zipfile.ZipFile(out := io.BytesIO(), 'w') as archive,
  ):
    for name in source.namelist():
      archive.writestr(name, source.read(name).replace(*shapes))
  return (
    out.getvalue(),
    'header does not fit the data',
    'node_feat',
    f'{560 * size_of(i)} bytes of data',
  )


WAYS = (
  no_bytes,
  truncated,
  a_page,
  wrong_byte,
  no_array,
  wrong_shape,
  index_out_of_range,
  not_a_number,
  pickled,
  no_int8,
  bomb,
  lying_header,
)


def test_thousands_of_files_of_which_some_are_damaged(tmp_path):
  contents = [npz(arrays(i)) for i in range(CONTENTS)]
  assert CONTENTS % len(SIZES) == 0
  expected, good = {}, []
  for i in range(FILES):
    path = tmp_path / f'm{i}.npz'
    if i % EVERY == EVERY // 2:
      data, *expected[str(path)] = WAYS[i // EVERY % len(WAYS)](i)
      path.write_bytes(data)
    else:
      good.append(i)
      path.write_bytes(contents[i % CONTENTS])
  assert len(expected) == FILES // EVERY >= len(WAYS)

  opts = converting.options(
    'layout:many', on_error='skip', num_shards=4, max_array_bytes=MAX_ARRAY_BYTES
  )
  manifest = converting.run(tmp_path, tmp_path / 'o', opts)

  rows = [json.loads(line) for line in (tmp_path / 'o/rejected.jsonl').read_text().splitlines()]
  assert len(rows) == len(expected)
  for row in rows:
    reason, where, found = expected.pop(row['path'])
    assert (row['reason'], row['where']) == (reason, where), row
    assert found in row['found'], row
  assert not expected
  assert sum(manifest.rejected_inputs.values()) == len(rows)

  total = sum(size_of(i) for i in good)
  sizes = [split.total_sizes for split in manifest.splits.values()]
  for name, number in (
    ('ops', total),
    ('configs', total),
    ('edges', total - len(good)),
    ('config_ops', 2 * len(good)),
  ):
    assert sum(size[name] for size in sizes) == number, name
  names = [
    records.decode_module_id(record)
    for split in manifest.splits
    for record in converting.read_split(tmp_path / 'o', split)
  ]
  assert sorted(names) == sorted(f'm{i}' for i in good)
