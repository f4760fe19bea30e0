"""Reads and writes TpuGraphs npz files.

A file is read in two passes. The first pass reads the directory of the zip and the npy headers,
which hold the names, dtypes and shapes; all are checked before any array is inflated. The second
pass reads the arrays. Layout configs, by far the largest array, are inflated in blocks and narrowed
to int8 on the way; `stream` yields them block by block. Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import errno
import io
import lzma
import math
import os
import pathlib
import struct
import tokenize
from typing import Any, BinaryIO, IO
import zipfile

import numpy as np

from tpu_graphs import errors
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import streams
from tpu_graphs.sources import zips

_BLOCK_BYTES = 1 << 20  # About this much is inflated at a time.
_MAX_HEADER_BYTES = 12 << 10  # NumPy refuses longer headers of an array.

# Name of an array -> (dtype kinds, shape).
_Specs = Mapping[str, tuple[str, tuple[Any, ...]]]

# Letters are sizes that must agree over the arrays of a file; see `Module`.
_GRAPH_ARRAYS = {
  'node_opcode': ('iu', ('N',)),
  'node_feat': ('f', ('N', features.NUM_NODE_FEATURES)),
  'edge_index': ('iu', ('E', 2)),
  'config_runtime': ('iu', ('C',)),
}
_CONFIG_ARRAYS: Mapping[str, _Specs] = {
  'tile': {'config_feat': ('f', ('C', features.NUM_TILE_FEATURES))},
  'layout': {
    'node_config_ids': ('iu', ('NC',)),
    'node_config_feat': ('fiu', ('C', 'NC', features.NUM_LAYOUT_FEATURES)),
  },
}
_KIND_ARRAYS: Mapping[str, _Specs] = {
  'tile': {**_CONFIG_ARRAYS['tile'], 'config_runtime_normalizers': ('iu', ('C',))},
  'layout': _CONFIG_ARRAYS['layout'],
}
# Some files lack these arrays: published tile files have no splits, and the last two exist only in
# files that `save` has written.
_OPTIONAL_ARRAYS = {
  'node_splits': ('iu', ('S',)),
  'computation': ('iu', ('N',)),
  'config_id': ('iu', ('C',)),
}

_STREAMED = 'node_config_feat'

# A zip member begins with a local header of this size, which a name and an extra field follow. The
# header holds their two lengths at the offset in the second line.
_LOCAL_HEADER_BYTES = 30
_LENGTHS_IN_LOCAL_HEADER = 26

SHORT_RUN = f'time < {module_lib.MIN_RUNTIME_NS} ns'
NO_NORMALIZER = 'no normalizer'


@dataclasses.dataclass(frozen=True)
class _Header:
  """Description of one array, from the zip directory and the npy header."""

  dtype: np.dtype
  shape: tuple[int, ...]
  fortran_order: bool
  body: int  # Offset of the first value, which follows the header.

  @property
  def nbytes(self) -> int:
    return self.dtype.itemsize * math.prod(self.shape)


def load(
  path: str | os.PathLike[str],
  *,
  kind: str | None = None,
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED,
  max_array_bytes: int = module_lib.DEFAULT_MAX_ARRAY_BYTES,
) -> module_lib.Module:
  """Reads and checks one npz file.

  Configs whose runtime (or, for tile, normalizer) is not a measurement are dropped and counted in
  `dropped_runs`. If that holds for every config, as in the published test files, all configs are
  kept as unmeasured.

  Args:
    path: a local file. Its stem becomes the `module_id`.
    kind: 'tile' or 'layout' to refuse the other kind; None accepts both.
    choices: how the features of ops are made; see `feature_choices.pad_layouts`. Extra features
      are computed without HLO.
    max_array_bytes: arrays that would inflate to more are refused before anything is allocated.

  Raises:
    InputError: the file is missing, damaged, or not a module. The error names the file, the array,
      the value found and the value expected.
  """
  path = os.fspath(path)
  try:
    with open(path, 'rb') as file:
      return read(file, path=path, kind=kind, choices=choices, max_array_bytes=max_array_bytes)
  except OSError as error:
    raise errors.InputError('cannot read file', path=path, found=error.strerror) from error


def read(
  file: BinaryIO,
  *,
  path: str,
  kind: str | None = None,
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED,
  max_array_bytes: int = module_lib.DEFAULT_MAX_ARRAY_BYTES,
) -> module_lib.Module:
  """Reads one module from an open, seekable file; see `load`.

  `path` gives the module its name and is named in errors.
  """
  return stream(file, path=path, kind=kind, choices=choices, max_array_bytes=max_array_bytes).load()


def stream(
  file: BinaryIO,
  *,
  path: str,
  kind: str | None = None,
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED,
  max_array_bytes: int = module_lib.DEFAULT_MAX_ARRAY_BYTES,
) -> streams.ConfigStream:
  """Reads a module, but leaves layout configs in the file; see `read`.

  The file must stay open while configs are read. Their values are checked only in the configs that
  are read. The checksum of their zip member is compared only if the member is compressed or read as
  a whole: from a member without compression, only the requested configs are read. Extra features
  are computed from the graph without its configs. `max_array_bytes` applies to the whole array of
  configs all the same: it limits what a file can make a reader write to disk.
  """
  head = _head(file)
  with errors.in_file(path), _damage_explained(head):
    # The archive is never closed: that would do nothing, because the file is the caller's.
    archive = zipfile.ZipFile(file)
    headers = _headers(archive, max_array_bytes)
    kind = _check_kind(headers, kind, _KIND_ARRAYS)
    known = {**_GRAPH_ARRAYS, **_KIND_ARRAYS[kind], **_OPTIONAL_ARRAYS}
    arrays = _arrays(archive, headers, known, leave=(_STREAMED,))
    if choices.layout_padding:
      feature_choices.pad_layouts(arrays['node_feat'])
    measured = _mark_unmeasured(kind, arrays)
    module_id = pathlib.PurePosixPath(path).name.removesuffix('.npz')
    outline = _outline(kind, module_id, arrays)

    def read_rows(rows: np.ndarray) -> Iterator[np.ndarray]:
      with errors.in_file(path), _damage_explained(head):
        yield from _config_blocks(archive, headers[_STREAMED], rows)

    if kind == 'tile':
      configs = streams.ConfigStream.of(choices.add_extra(outline))
    else:
      ids = arrays['node_config_ids']
      empty = np.zeros((0, ids.size, features.NUM_LAYOUT_FEATURES), np.int8)
      graph = dataclasses.replace(
        outline.select_configs(np.arange(0)), node_config_ids=ids, node_config_feat=empty
      )
      configs = streams.ConfigStream(
        graph=choices.add_extra(graph),
        config_runtime=outline.config_runtime,
        config_id=outline.config_id,
        config_runtime_normalizers=None,
        read=read_rows,
      )
    if outline.dropped_runs:
      configs = configs.select(np.flatnonzero(measured))
  return configs


def read_configs(
  file: BinaryIO, *, path: str, kind: str, max_array_bytes: int = module_lib.DEFAULT_MAX_ARRAY_BYTES
) -> dict[str, np.ndarray]:
  """Reads only the configs from an open, seekable npz file.

  The file need not hold any other array of a module; other arrays are ignored.

  Args:
    file: the file.
    path: the file's name, for errors.
    kind: 'tile' or 'layout'.
    max_array_bytes: arrays that would inflate to more are refused before anything is allocated.

  Returns:
    The arrays of a `Module` by name: config_feat, or node_config_ids and node_config_feat (int8).

  Raises:
    InputError: the file is damaged, has no configs or configs of the other kind, or has an array
      with a wrong dtype or shape.
  """
  with errors.in_file(path), _damage_explained(_head(file)), zipfile.ZipFile(file) as archive:
    headers = _headers(archive, max_array_bytes)
    kind = _check_kind(headers, kind, _CONFIG_ARRAYS)
    return _arrays(archive, headers, _CONFIG_ARRAYS[kind])


@dataclasses.dataclass(frozen=True)
class Blocks:
  """A float32 array for `write_arrays` that need not be in memory as a whole.

  Attributes:
    shape: the array's shape.
    blocks: the array's rows in order, any dtype [b, *shape[1:]]; read once.
  """

  shape: tuple[int, ...]
  blocks: Iterable[np.ndarray]


def save(module: module_lib.Module, path: str | os.PathLike[str]) -> None:
  """Writes `module` in the published form.

  `load` returns an equal module except for these fields:
  - `module_id` is the file's stem.
  - `unknown_opcodes` and `default_config` are lost, because npz files do not record them.
  - `dropped_runs` counts the unmeasured configs that `load` drops beside measured ones.

  Feature choices are made at each reading and are therefore not written. The file appears under its
  name only when it is complete.
  """
  save_stream(streams.ConfigStream.of(module), path)


def save_stream(stream: streams.ConfigStream, path: str | os.PathLike[str]) -> None:
  """Writes a module whose configs are read as they are written; see `save`."""
  graph = stream.graph
  arrays: dict[str, np.ndarray | Blocks] = {
    'node_opcode': graph.node_opcode,
    'edge_index': graph.edge_index,
    'node_feat': feature_choices.unpad_layouts(graph.node_feat),
    'node_splits': graph.node_splits[np.newaxis],
  }
  unmeasured = stream.config_runtime == module_lib.UNMEASURED
  arrays['config_runtime'] = np.where(unmeasured, 0, stream.config_runtime)
  if stream.config_runtime_normalizers is not None:
    arrays['config_runtime_normalizers'] = np.where(
      unmeasured, 1, stream.config_runtime_normalizers
    )
  if graph.node_config_ids is not None:
    arrays['node_config_ids'] = graph.node_config_ids
  if not np.array_equal(stream.config_id, np.arange(stream.num_configs)):
    arrays['config_id'] = stream.config_id
  segment = module_lib.segment_of_op(graph.node_splits)
  if not np.array_equal(graph.computation, segment):
    arrays['computation'] = graph.computation
  configs_name = 'config_feat' if graph.kind == 'tile' else _STREAMED
  configs_shape = (stream.num_configs, *stream.row_shape)
  arrays[configs_name] = Blocks(configs_shape, stream.blocks())
  write_arrays(path, arrays)


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray | Blocks]) -> None:
  """Writes a compressed npz file, which appears under its name only when it is complete."""
  target = pathlib.Path(path)
  temporary = target.with_name(f'.{target.name}.{os.getpid()}.partial')
  try:
    with zipfile.ZipFile(temporary, 'w', zipfile.ZIP_DEFLATED) as archive:
      for name, array in arrays.items():
        zips.write_member(archive, f'{name}.npy', _encoded(array))
    os.replace(temporary, target)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise


def _encoded(array: np.ndarray | Blocks) -> Iterator[bytes | memoryview]:
  """Yields the content of an npy file in C order."""
  blocks: Iterable[np.ndarray]
  if isinstance(array, Blocks):
    dtype, blocks = np.dtype(np.float32), array.blocks
  else:
    dtype, blocks = array.dtype, (array,)
  header = io.BytesIO()
  np.lib.format.write_array_header_1_0(
    header,
    {'descr': np.lib.format.dtype_to_descr(dtype), 'fortran_order': False, 'shape': array.shape},
  )
  yield header.getvalue()
  for block in blocks:
    yield np.asarray(block, dtype, order='C').data


def _head(file: BinaryIO) -> bytes:
  """Returns the first bytes of an open file and leaves the file at its start."""
  head = file.read(64)
  file.seek(0)
  return head


@contextlib.contextmanager
def _damage_explained(head: bytes) -> Iterator[None]:
  """Turns what zipfile and NumPy raise on a damaged file into an `InputError`.

  Args:
    head: the first bytes of the file.
  """
  try:
    yield
  except errors.InputError:
    raise
  # NumPy parses the header of an array as Python, hence SyntaxError and TokenError.
  except (
    zipfile.BadZipFile,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    SyntaxError,
    tokenize.TokenError,
    OSError,
  ) as error:
    # A damaged offset gives EINVAL, and damaged bz2 data an OSError without a number. Any other
    # number is a problem of the disk.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
      raise
    if not head:
      raise errors.InputError('empty file', found='0 bytes', expected='an npz file') from error
    if not head.startswith(b'PK'):
      raise errors.InputError(
        'not an npz file',
        found=errors.looks_like(head) or f'bytes {head[:16]!r}',
        expected='a zip archive of npy arrays',
        fix='download the file again',
      ) from error
    raise errors.InputError(
      'damaged or truncated npz file',
      found=str(error),
      expected='a complete zip archive',
      fix='download the file again',
    ) from error


def _array_names(archive: zipfile.ZipFile) -> list[str]:
  names = archive.namelist()
  for name in names:
    if not name.endswith('.npy'):
      raise errors.InputError(
        'member is not an npy array', where=name, expected='a name that ends in .npy'
      )
  return [name.removesuffix('.npy') for name in names]


def _headers(archive: zipfile.ZipFile, max_array_bytes: int) -> dict[str, _Header]:
  return {name: _header(archive, name, max_array_bytes) for name in _array_names(archive)}


def _header(archive: zipfile.ZipFile, name: str, max_array_bytes: int) -> _Header:
  info = archive.getinfo(f'{name}.npy')
  start = io.BytesIO(zips.Reader(archive, info.filename).read(_MAX_HEADER_BYTES))
  if np.lib.format.read_magic(start) == (1, 0):
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(start)
  else:
    shape, fortran_order, dtype = np.lib.format.read_array_header_2_0(start)
  header = _Header(dtype, shape, fortran_order, start.tell())
  if dtype.hasobject:
    raise errors.InputError(
      'pickled objects',
      where=name,
      found=dtype,
      expected='numbers',
      fix='save it as a plain numeric array; objects are never unpickled',
    )
  if header.nbytes > max_array_bytes:
    raise errors.InputError(
      'array too large',
      where=name,
      found=f'{header.nbytes} bytes as {list(shape)} {dtype}',
      expected=f'<= {max_array_bytes} bytes',
      fix='raise the limit if the file is right',
    )
  if header.body + header.nbytes != info.file_size:
    raise errors.InputError(
      'header does not fit the data',
      where=name,
      found=f'{info.file_size - header.body} bytes of data',
      expected=f'{header.nbytes} bytes for {list(shape)} {dtype}',
    )
  return header


def _check_kind(
  headers: dict[str, _Header], kind: str | None, kind_arrays: Mapping[str, _Specs]
) -> str:
  """Returns the kind of the file, which must be `kind` unless that is None."""
  kinds = [k for k, names in kind_arrays.items() if any(name in headers for name in names)]
  if len(kinds) != 1:
    arrays_of_kinds = [', '.join(names) for names in kind_arrays.values()]
    raise errors.InputError(
      'both a tile and a layout file' if kinds else 'neither a tile nor a layout file',
      found=f'arrays {", ".join(sorted(headers)) or "none"}',
      expected=' or '.join(arrays_of_kinds),
    )
  (found,) = kinds
  if kind is not None and kind != found:
    raise errors.InputError(
      'file of the other kind',
      found=f'a {found} file',
      expected=f'a {kind} file',
      fix=f'it belongs to a {found} collection or run',
    )
  return found


def _check_headers(headers: dict[str, _Header], known: _Specs) -> None:
  """Checks that every required array is there and that dtypes and shapes fit.

  The sizes of arrays must agree with each other where `known` has the same letter.
  """
  required = [name for name in known if name not in _OPTIONAL_ARRAYS]
  sizes: dict[str, tuple[int, str]] = {}  # Letter -> (size, the first array that has it).
  for name, (dtype_kinds, shape) in known.items():
    if name not in headers:
      if name in _OPTIONAL_ARRAYS:
        continue
      raise errors.InputError(
        'array missing',
        where=name,
        found=f'arrays {", ".join(headers)}',
        expected=f'arrays {", ".join(required)}',
      )
    header = headers[name]
    if header.dtype.kind not in dtype_kinds:
      families = {'f': 'float', 'iu': 'integer', 'fiu': 'float or integer'}
      raise errors.InputError(
        'wrong dtype', where=name, found=header.dtype, expected=families[dtype_kinds]
      )
    found = header.shape
    if name == 'node_splits' and len(found) == 2 and found[0] == 1:
      found = found[1:]
    expected: list[int | None] = []  # None stands for any size.
    texts: list[str] = []
    for size in shape:
      if not isinstance(size, str):
        expected.append(size)
        texts.append(str(size))
      elif size in sizes:
        size_of_letter, source = sizes[size]
        expected.append(size_of_letter)
        texts.append(f'{size_of_letter} (as in {source})')
      else:
        expected.append(None)
        texts.append(size)
    fits = len(found) == len(expected) and all(
      want in (None, got) for want, got in zip(expected, found, strict=True)
    )
    if not fits:
      raise errors.InputError(
        'wrong shape',
        where=name,
        found=list(header.shape),
        expected=f'[{", ".join(texts)}]',
      )
    for letter, size in zip(shape, found, strict=True):
      if isinstance(letter, str):
        sizes.setdefault(letter, (size, name))


def _arrays(
  archive: zipfile.ZipFile, headers: dict[str, _Header], known: _Specs, leave: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
  """Checks the headers of all `known` arrays, then reads the arrays without those in `leave`."""
  headers = {name: headers[name] for name in known if name in headers}
  _check_headers(headers, known)
  return {
    name: _array(archive, name, header) for name, header in headers.items() if name not in leave
  }


def _array(archive: zipfile.ZipFile, name: str, header: _Header) -> np.ndarray:
  """Inflates one array and compares its checksum; layout configs become int8."""
  if name == _STREAMED:
    configs = np.empty(header.shape, np.int8)
    streams.fill(configs, _config_blocks(archive, header, np.arange(header.shape[0])))
    return configs
  flat = np.empty(math.prod(header.shape), header.dtype)
  streams.fill(flat, _chunks(archive, name, header))
  if header.fortran_order:
    return np.ascontiguousarray(flat.reshape(header.shape[::-1]).T)
  return flat.reshape(header.shape)


def _chunks(archive: zipfile.ZipFile, name: str, header: _Header) -> Iterator[np.ndarray]:
  """Yields the values of an array in the order of the file, in chunks of shape [size]."""
  member = zips.Reader(archive, f'{name}.npy')
  member.read(header.body)
  itemsize = header.dtype.itemsize
  num_values = math.prod(header.shape)
  step = max(1, _BLOCK_BYTES // max(itemsize, 1))
  for start in range(0, num_values, step):
    size = min(step, num_values - start)
    yield np.frombuffer(_exactly(member, size * itemsize, name), header.dtype)


def _exactly(file: IO[bytes] | zips.Reader, size: int, name: str) -> bytes:
  data = file.read(size)
  if len(data) < size:
    raise EOFError(f'{name} ends early')
  return data


def _config_blocks(
  archive: zipfile.ZipFile, header: _Header, rows: np.ndarray
) -> Iterator[np.ndarray]:
  """Yields the layout configs at `rows`, ascending int64 [c], in blocks of int8 [b, NC, 18].

  `stream` describes what is checked.
  """
  if header.fortran_order:
    yield from _transposed_blocks(archive, header, rows)
    return
  row_bytes = math.prod(header.shape[1:]) * header.dtype.itemsize
  per_block = min(rows.size, streams.rows_per_block(math.prod(header.shape[1:])))
  block, filled = np.empty((0, *header.shape[1:]), np.int8), 0
  read = _rows_of_member(archive, header, row_bytes, whole=rows.size == header.shape[0])
  for group in _groups(rows, streams.rows_per_block(row_bytes, _BLOCK_BYTES)):
    first, size = int(group[0]), int(group[-1] - group[0]) + 1
    values = np.frombuffer(read(first, first + size), header.dtype).reshape(size, *header.shape[1:])
    if size != group.size:
      values = values[group - first]
    narrowed, bad = _narrow(values)
    if bad:
      index = [group[bad[0]], *bad[1:]]
      raise _not_small_integer(index, values[bad])
    while len(narrowed):
      if not filled:
        block = np.empty((per_block, *header.shape[1:]), np.int8)
      size = min(len(narrowed), per_block - filled)
      block[filled : filled + size] = narrowed[:size]
      narrowed, filled = narrowed[size:], filled + size
      if filled == per_block:
        yield block
        filled = 0
  # Reading up to the end compares the checksum of a compressed member.
  read(header.shape[0], header.shape[0])
  if filled:
    yield block[:filled]


def _groups(rows: np.ndarray, step: int) -> list[np.ndarray]:
  """Splits ascending `rows` into groups that are read together, with the rows between them.

  A group lies within `step` rows that begin at a multiple of `step`.
  """
  if not rows.size:
    return []
  starts = np.flatnonzero(np.diff(rows // step)) + 1
  return np.split(rows, starts)


def _rows_of_member(
  archive: zipfile.ZipFile, header: _Header, row_bytes: int, *, whole: bool
) -> Callable[[int, int], bytes]:
  """Returns a function that reads the configs [start, stop); calls must go forwards.

  A compressed member is inflated from its first byte on, so its checksum is compared if the last
  call reaches the end. In a member without compression, the other configs are skipped, unless
  `whole` is set.
  """
  info = archive.getinfo(f'{_STREAMED}.npy')
  member = zips.Reader(archive, info.filename)

  def inflate(start: int, stop: int) -> bytes:
    while (skipped := header.body + start * row_bytes - member.position) > 0:
      _exactly(member, min(_BLOCK_BYTES, skipped), _STREAMED)
    return _exactly(member, (stop - start) * row_bytes, _STREAMED)

  if whole or info.compress_type != zipfile.ZIP_STORED:
    return inflate
  file: IO[bytes] = archive.fp  # type: ignore[assignment]
  file.seek(info.header_offset + _LENGTHS_IN_LOCAL_HEADER)
  name_bytes, extra_bytes = struct.unpack('<HH', file.read(4))
  member_start = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
  data = member_start + header.body

  def seek(start: int, stop: int) -> bytes:
    file.seek(data + start * row_bytes)
    return _exactly(file, (stop - start) * row_bytes, _STREAMED)

  return seek


def _transposed_blocks(
  archive: zipfile.ZipFile, header: _Header, rows: np.ndarray
) -> Iterator[np.ndarray]:
  """Yields the blocks of an array in Fortran order, whose configs are scattered over the file.

  The whole array is first written to a temporary file as int8; see `_config_blocks`.
  """
  configs, *row_shape = header.shape
  start = 0
  with streams.temporary_file(math.prod(header.shape)) as file:
    for chunk in _chunks(archive, _STREAMED, header):
      narrowed, bad = _narrow(chunk)
      if bad:
        index = np.unravel_index(start + bad[0], header.shape, 'F')
        raise _not_small_integer(index, chunk[bad])
      file.write(narrowed.data)
      start += chunk.size
    for group in _groups(rows, streams.rows_per_block(math.prod(row_shape))):
      first, size = int(group[0]), int(group[-1] - group[0]) + 1
      block = np.empty((size, *row_shape), np.int8)
      for column in np.ndindex(*row_shape[::-1]):
        position = int(np.ravel_multi_index(column, row_shape[::-1]))
        file.seek(position * configs + first)
        block[:, column[1], column[0]] = np.frombuffer(file.read(size), np.int8)
      yield block[group - first]


def _narrow(values: np.ndarray) -> tuple[np.ndarray, tuple[int, ...] | None]:
  """Returns `values` as int8, and the index of the first value that int8 cannot hold or None."""
  with np.errstate(invalid='ignore'):
    narrowed = values.astype(np.int8)
  differs = narrowed != values
  if not differs.any():
    return narrowed, None
  index = np.unravel_index(int(np.argmax(differs)), values.shape)
  return narrowed, tuple(int(i) for i in index)


def _not_small_integer(index: Iterable[Any], value: Any) -> errors.InputError:
  return errors.InputError(
    'value not a small integer',
    where=f'{_STREAMED}{[int(i) for i in index]}',
    found=value,
    expected='a whole number from -128 to 127 (dimensions of a layout, or -1)',
  )


def _mark_unmeasured(kind: str, arrays: dict[str, Any]) -> np.ndarray:
  """Marks failed runs in `arrays` and returns which configs are measured, bool [C].

  Runtimes and normalizers in `arrays` become int64.
  """
  # Unsigned runtimes beyond int64 turn negative.
  runtime = arrays['config_runtime'].astype(np.int64, copy=False)
  negative = runtime < 0
  if negative.any():
    i = int(np.argmax(negative))
    raise errors.InputError(
      'runtime out of range',
      where=f'config_runtime[{i}]',
      found=arrays['config_runtime'][i],
      expected='0 ("not measured") to 2**63 - 1 ns',
    )
  short = runtime < module_lib.MIN_RUNTIME_NS
  no_normalizer = np.zeros_like(short)
  if kind == 'tile':
    normalizers = arrays['config_runtime_normalizers'].astype(np.int64, copy=False)
    no_normalizer = (normalizers < 1) & ~short
  unmeasured = short | no_normalizer
  arrays['dropped_runs'] = {}
  if not unmeasured.all():
    reasons = {SHORT_RUN: short, NO_NORMALIZER: no_normalizer}
    arrays['dropped_runs'] = {
      reason: int(mask.sum()) for reason, mask in reasons.items() if mask.any()
    }
  arrays['config_runtime'] = np.where(unmeasured, module_lib.UNMEASURED, runtime)
  if kind == 'tile':
    arrays['config_runtime_normalizers'] = np.where(unmeasured, module_lib.UNMEASURED, normalizers)
  return ~unmeasured


def _outline(kind: str, module_id: str, arrays: dict[str, Any]) -> module_lib.Module:
  """Returns the module of `arrays`, without the features of layout configs.

  A layout module looks as if it had no configurable op.
  """
  arrays = dict(arrays)
  c = arrays['config_runtime'].size
  n = arrays['node_opcode'].size
  splits = arrays.pop('node_splits', np.array([0, n])).reshape(-1)
  config_id = arrays.pop('config_id', np.arange(c))
  if kind == 'layout':
    arrays['node_config_ids'] = np.arange(0)
    arrays[_STREAMED] = np.zeros((c, 0, features.NUM_LAYOUT_FEATURES), np.int8)
  return module_lib.Module(
    module_id=module_id, kind=kind, node_splits=splits, config_id=config_id, **arrays
  )
