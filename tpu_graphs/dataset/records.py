"""`Module` <-> tf.Example records -> GraphTensor.

A record is one serialized tf.Example in the encoding that tfgnn.parse_example reads with the
schema alone. It is
written here straight from the arrays and read straight into them, with neither TensorFlow nor a
protobuf library: Beam workers need not load TensorFlow, equal modules give equal bytes (protobuf
promises no order for a map), and a packed float list costs one copy.

Format: https://www.tensorflow.org/api_docs/python/tf/train/Example and
https://protobuf.dev/programming-guides/encoding; names of the features are those of
tfgnn.write_example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import hashlib
import itertools
import struct
from typing import Any, BinaryIO, IO, TYPE_CHECKING

import google_crc32c
import numpy as np

from tpu_graphs import errors
from tpu_graphs.dataset import schema
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import streams

if TYPE_CHECKING:
  from tpu_graphs.compat import tfgnn

_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3  # Field numbers of tf.train.Feature.
_STRINGS = ('context/module_id', 'context/node_config_feat')
_WITH_LENGTH = 2  # Wire type of all fields of a tf.Example.
_DAMAGED = {'fix': 'copy or convert the dataset again'}


@dataclasses.dataclass(frozen=True)
class RecordOptions:
  """How modules become records.

  Attributes:
    max_configs: a module with more configs is split over several records, each with the graph
      and a fair share.
    max_bytes: the same for the size of a record; a graph that is larger by itself is refused.
    seed: decides which configs go to which record.
  """

  max_configs: int = 1000
  max_bytes: int = 128 << 20
  seed: int = 0

  def __post_init__(self):
    for name in ('max_configs', 'max_bytes'):
      if getattr(self, name) < 1:
        raise errors.InputError(
          'limit too small', where=name, found=getattr(self, name), expected='>= 1'
        )


@dataclasses.dataclass(frozen=True)
class Record:
  """A serialized tf.Example and what a writer needs to know of it.

  Attributes:
    module_id: of the module.
    part: which record of the module this is, from 0.
    measured: whether any config of the module is measured.
    sizes: 'ops', 'edges', 'config_ops', 'configs' -> their number in this record.
    data: the serialized tf.Example.
  """

  module_id: str
  part: int
  measured: bool
  sizes: Mapping[str, int]
  data: bytes


def encode(module: module_lib.Module, options: RecordOptions = RecordOptions()) -> Iterator[Record]:
  """Encodes `module` as one or more records; each holds the whole graph, together they hold each
  config once.

  Raises:
    InputError: the graph does not fit into `options.max_bytes` with even one config.
  """
  return encode_stream(streams.ConfigStream.of(module), options)


def encode_stream(
  stream: streams.ConfigStream,
  options: RecordOptions = RecordOptions(),
  *,
  observe: Callable[[np.ndarray], None] | None = None,
) -> Iterator[Record]:
  """`encode` of a module whose configs are read as they are needed.

  All are read before the first record is given. Until then many configs lie in a temporary file,
  each where its record will be, so one record and one block of configs is all that is in memory.

  Args:
    stream: the module.
    options: see `encode`.
    observe: is called with each block of features as it is read.

  Raises:
    InputError: see `encode`, or the configs cannot be read.
  """
  graph = stream.graph
  encoded_graph = [part for name, value in _graph_features(graph) for part in _entry(name, value)]
  parts = _deal(stream, sum(map(len, encoded_graph)), options)
  place = np.empty(stream.num_configs, np.int64)
  place[np.concatenate(parts)] = np.arange(place.size)
  with streams.temporary_file(place.size * stream.row_bytes) as file:
    done = 0
    for block in stream.blocks():
      if observe:
        observe(block)
      _write_rows(file, place[done : done + len(block)], block)
      done += len(block)
    file.seek(0)
    for part, chosen in enumerate(parts):
      content = file.read(chosen.size * stream.row_bytes)
      configs = [
        piece
        for name, value in _config_features(stream, chosen, content)
        for piece in _entry(name, value)
      ]
      sizes = {
        'ops': graph.num_ops,
        'edges': graph.num_edges,
        'config_ops': graph.num_config_ops,
        'configs': chosen.size,
      }
      yield Record(
        graph.module_id, part, stream.is_measured, sizes, _example([*configs, *encoded_graph])
      )


def _write_rows(file: IO[bytes], places: np.ndarray, rows: np.ndarray) -> None:
  """Writes each of `rows`, [b, ...], at its place, int64 [b], counted in rows; neighbours in one
  go.
  """
  order = np.argsort(places)
  ordered, places = rows[order], places[order]
  starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
  for start, stop in itertools.pairwise([*starts.tolist(), places.size]):
    file.seek(int(places[start]) * rows[0].nbytes)
    file.write(ordered[start:stop].tobytes())


def encode_whole(module: module_lib.Module) -> bytes:
  """Encodes `module` as one record, whatever its size."""
  (record,) = encode(
    module, RecordOptions(max_configs=max(1, module.num_configs), max_bytes=1 << 40)
  )
  return record.data


def decode(data: bytes, *, num_extra: int = 0) -> module_lib.Module:
  """The module in a record, with the configs that this record holds; `encode_whole` gives the
  same bytes again.

  Records do not tell `dropped_runs`, `unknown_opcodes` and `default_config`. Of computations and
  segments they tell
  `computation`: its boundaries become the `node_splits`, unless it does not ascend or counts
  beyond the number of ops.

  Args:
    data: the serialized tf.Example.
    num_extra: number of columns of `extra_feat`.

  Raises:
    InputError: it is damaged, or its features are not those of the schema.
  """
  try:
    found = _read_features(data)
    module_id = bytes(found.pop('context/module_id')).decode()
    opcode, computation = found.pop('nodes/op.opcode'), found.pop('nodes/op.computation')
    edge_index = np.stack(
      [found.pop('edges/operand.#target'), found.pop('edges/operand.#source')], axis=1
    )
    runtime, config_id = found.pop('context/config_runtime'), found.pop('context/config_id')
    n, c = opcode.size, runtime.size
    node_feat = found.pop('nodes/op.feat').reshape(n, features.NUM_NODE_FEATURES)
    own: dict[str, Any] = {}  # What not every module has.
    if num_extra:
      own['extra_feat'] = found.pop('nodes/op.extra_feat').reshape(n, num_extra)
    sizes = {
      'nodes/op.#size': n,
      'edges/operand.#size': len(edge_index),
      'context/config_id.d1': c,
      'context/config_runtime.d1': c,
    }
    if 'context/node_config_feat' in found:
      kind, ids = 'layout', found.pop('edges/configures.#target')
      layouts = np.frombuffer(found.pop('context/node_config_feat'), np.int8)
      own['node_config_ids'] = ids
      own['node_config_feat'] = layouts.reshape(c, ids.size, features.NUM_LAYOUT_FEATURES)
      sizes |= {'nodes/config_op.#size': ids.size, 'edges/configures.#size': ids.size}
      if not np.array_equal(found.pop('edges/configures.#source'), np.arange(ids.size)):
        raise ValueError('configurable ops that are not in order')
    else:
      kind = 'tile'
      own['config_feat'] = found.pop('context/config_feat').reshape(c, features.NUM_TILE_FEATURES)
      own['config_runtime_normalizers'] = found.pop('context/config_runtime_normalizer')
      sizes |= {'context/config_feat.d1': c, 'context/config_runtime_normalizer.d1': c}
    for name, size in sizes.items():
      if not np.array_equal(value := found.pop(name), [size]):
        raise ValueError(f'{name} {value} beside {size}')
    if found:
      raise ValueError(f'feature {min(found)} that is not in the schema')
    splits = _boundaries(computation)
  except KeyError as error:
    raise errors.InputError(
      'feature missing in a record', where=error.args[0], **_DAMAGED
    ) from error
  except (IndexError, ValueError) as error:
    raise errors.InputError('damaged record', found=error, **_DAMAGED) from error
  return module_lib.Module(
    module_id=module_id,
    kind=kind,
    node_opcode=opcode,
    node_feat=node_feat,
    edge_index=edge_index,
    node_splits=splits,
    computation=computation,
    config_runtime=runtime,
    config_id=config_id,
    **own,
  )


def decode_module_id(data: bytes) -> str:
  """The `module_id` in a record; nothing else is decoded.

  Raises:
    InputError: it is damaged.
  """
  try:
    return bytes(_read_features(data)['context/module_id']).decode()
  except (IndexError, KeyError, ValueError) as error:
    raise errors.InputError('damaged record', found=error, **_DAMAGED) from error


def merge(parts: Sequence[module_lib.Module]) -> module_lib.Module:
  """The module whose records were decoded as `parts`, in memory; see `streams.merged`.

  Raises:
    InputError: a config occurs twice.
  """
  with streams.merged(parts) as stream:
    return stream.load()


def to_graph_tensor(module: module_lib.Module) -> tfgnn.GraphTensor:
  """The GraphTensor of a whole module, as tfgnn reads it from a record."""
  from tpu_graphs.compat import tfgnn

  return tfgnn.parse_single_example(
    schema.graph_spec(module.kind, num_extra=module.num_extra), encode_whole(module)
  )


def write_tfrecords(file: BinaryIO, records: Iterable[bytes]) -> tuple[int, int]:
  """Writes records in the uncompressed TFRecord format; returns the file's number of bytes and
  its crc32c.

  Format: https://www.tensorflow.org/tutorials/load_data/tfrecord. (Beam's own sink offers no
  order within a file.)
  """
  size = checksum = 0
  for record in records:
    length = struct.pack('<Q', len(record))
    for part in (length, _masked_crc(length), record, _masked_crc(record)):
      file.write(part)
      checksum = google_crc32c.extend(checksum, part)
      size += len(part)
  return size, checksum


def read_tfrecord(file: BinaryIO) -> bytes | None:
  """Reads the record that begins where `file` stands, as `write_tfrecords` writes it; None at
  the end of the file.

  Raises:
    InputError: it is damaged or cut off.
  """
  start = file.tell()
  if not (length := file.read(8)):
    return None
  if file.read(4) == _masked_crc(length):
    data = file.read(int.from_bytes(length, 'little'))
    if file.read(4) == _masked_crc(data):
      return data
  raise errors.InputError(
    'damaged record', where=f'byte {start}', expected='the checksum of its data', **_DAMAGED
  )


def _masked_crc(data: bytes) -> bytes:
  crc = google_crc32c.value(data)
  return struct.pack('<I', ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _deal(
  stream: streams.ConfigStream, graph_bytes: int, options: RecordOptions
) -> list[np.ndarray]:
  """Indices of the configs of each record, ascending."""
  config_bytes = (
    30 + stream.row_bytes
  )  # At most 10 bytes each for id, runtime and normalizer, beside the features.
  room = (options.max_bytes - graph_bytes - 1024) // config_bytes
  if room < 1:
    raise errors.InputError(
      'module too large for a record',
      where=stream.graph.module_id,
      found=f'{graph_bytes} bytes of graph and {config_bytes} of each config',
      expected=f'<= {options.max_bytes} bytes',
      fix='raise --max_record_bytes',
    )
  parts = -(-stream.num_configs // min(options.max_configs, room))
  if parts <= 1:
    return [np.arange(stream.num_configs)]
  name = hashlib.blake2b(stream.graph.module_id.encode(), digest_size=8).digest()
  order = np.random.default_rng([options.seed, int.from_bytes(name, 'little')]).permutation(
    stream.num_configs
  )
  return [np.sort(order[part::parts]) for part in range(parts)]


def _graph_features(module: module_lib.Module) -> Iterator[tuple[str, bytes | np.ndarray]]:
  yield 'context/module_id', module.module_id.encode()
  yield 'edges/operand.#size', np.array([module.num_edges])
  yield 'edges/operand.#source', module.edge_index[:, 1]
  yield 'edges/operand.#target', module.edge_index[:, 0]
  yield 'nodes/op.#size', np.array([module.num_ops])
  yield 'nodes/op.computation', module.computation
  if module.num_extra:
    yield 'nodes/op.extra_feat', module.extra_feat
  yield 'nodes/op.feat', module.node_feat
  yield 'nodes/op.opcode', module.node_opcode
  if module.node_config_ids is not None:
    yield 'edges/configures.#size', np.array([module.num_config_ops])
    yield 'edges/configures.#source', np.arange(module.num_config_ops)
    yield 'edges/configures.#target', module.node_config_ids
    yield 'nodes/config_op.#size', np.array([module.num_config_ops])


def _config_features(
  stream: streams.ConfigStream, chosen: np.ndarray, content: bytes
) -> Iterator[tuple[str, bytes | np.ndarray]]:
  """Of the configs at `chosen`, the `content` of whose features is given."""
  ragged = {'config_id': stream.config_id[chosen], 'config_runtime': stream.config_runtime[chosen]}
  if stream.config_runtime_normalizers is not None:
    ragged['config_feat'] = np.frombuffer(content, np.float32)
    ragged['config_runtime_normalizer'] = stream.config_runtime_normalizers[chosen]
  for name, array in ragged.items():
    yield f'context/{name}', array
    yield (
      f'context/{name}.d1',
      np.array([chosen.size]),
    )  # The row length, without which nothing parses.
  if stream.config_runtime_normalizers is None:
    yield 'context/node_config_feat', content


def _entry(name: str, value: bytes | np.ndarray) -> list[bytes]:
  """One entry of the map `Features.feature`, tag and length included, in pieces: a copy of large
  ones is dear.
  """
  if isinstance(value, bytes):
    field, content = _BYTES_LIST, value
  elif value.dtype.kind == 'f':
    field, content = _FLOAT_LIST, value.astype('<f4', copy=False).tobytes()
  else:
    field, content = _INT64_LIST, varints(value.astype(np.int64, copy=False))
  header, size = b'', len(content)
  for number in (
    1,
    field,
    2,
  ):  # The values in their list, in the feature, in the value of the entry.
    header = _header(number, size) + header
    size = len(content) + len(header)
  key = name.encode()
  header = _header(1, len(key)) + key + header
  return [_header(1, len(header) + len(content)), header, content]


def _example(pieces: list[bytes]) -> bytes:
  return b''.join([_header(1, sum(map(len, pieces))), *pieces])


def _header(field: int, length: int) -> bytes:
  """Tag and length of a protobuf field with `length` bytes."""
  header = bytearray([field << 3 | _WITH_LENGTH])
  while length > 0x7F:
    header.append(length & 0x7F | 0x80)
    length >>= 7
  header.append(length)
  return bytes(header)


def varints(values: np.ndarray) -> bytes:
  """The concatenated protobuf varints of an int64 [n]; a negative value takes ten bytes."""
  unsigned = values.view(np.uint64)
  if unsigned.max(initial=0) < 0x80:  # As are most of a record.
    return unsigned.astype(np.uint8).tobytes()
  num_bytes = np.ones(values.shape, np.int64)
  for limit in range(7, 64, 7):
    num_bytes += unsigned >= np.uint64(1 << limit)
  width = int(num_bytes.max(initial=1))
  shifts = np.arange(0, 7 * width, 7, dtype=np.uint64)
  digits = (unsigned[:, np.newaxis] >> shifts & np.uint64(0x7F)).astype(np.uint8)  # [n, width]
  position = np.arange(width)
  digits[position < num_bytes[:, np.newaxis] - 1] |= 0x80
  return digits[position < num_bytes[:, np.newaxis]].tobytes()


def _read_features(data: bytes) -> dict[str, Any]:
  """Name -> array, or bytes where it is one of `_STRINGS`, of each feature of a tf.Example.

  Raises:
    IndexError, ValueError: it is none, or a feature is of another type.
  """
  found: dict[str, Any] = {}
  for _, content in _fields(memoryview(data)):
    for _, entry in _fields(content):
      key, feature = (body for _, body in _fields(entry))
      [(field, body)] = _fields(feature)
      values = [value for _, value in _fields(body)]
      joined = values[0] if len(values) == 1 else b''.join(values)
      name = bytes(key).decode()
      if (field == _BYTES_LIST) != (name in _STRINGS):
        raise ValueError(f'{name} of another type')
      found[name] = (
        joined
        if field == _BYTES_LIST
        else from_varints(joined)
        if field == _INT64_LIST
        else np.frombuffer(joined, '<f4').astype(np.float32)
      )  # Aligned, as the record's bytes are not.
  return found


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
  """The number and content of each of a message's fields, which all have a length."""
  at = 0
  while at < len(data):
    tag, size = data[at], 0
    for shift in range(0, 70, 7):  # At most 10 bytes.
      at += 1
      size |= (data[at] & 0x7F) << shift
      if data[at] < 0x80:
        break
    end = at + 1 + size
    if tag & 7 != _WITH_LENGTH or end > len(data):
      raise ValueError('no tf.Example')
    yield tag >> 3, data[at + 1 : end]
    at = end


def from_varints(data: bytes | memoryview) -> np.ndarray:
  """The int64 [n] in concatenated protobuf varints: the inverse of `varints`.

  Raises:
    ValueError: the last one is cut off, or one is too long.
  """
  digits = np.frombuffer(data, np.uint8)
  ends = np.flatnonzero(digits < 0x80) + 1
  starts = np.concatenate([[0], ends[:-1]])[: ends.size]
  if (ends[-1] if ends.size else 0) != digits.size or (ends - starts).max(initial=0) > 10:
    raise ValueError('no list of varints')
  if ends.size == digits.size:
    return digits.astype(np.int64)
  shifts = 7 * (np.arange(digits.size) - np.repeat(starts, ends - starts))
  return np.add.reduceat(
    (digits & 0x7F).astype(np.uint64) << shifts.astype(np.uint64), starts
  ).view(np.int64)


def _boundaries(computation: np.ndarray) -> np.ndarray:
  """The `node_splits` of which `computation`, int64 [N], is the segment; [0, N] where there are
  none or too many.
  """
  n = computation.size
  if n == 0 or computation[0] < 0 or computation[-1] >= n or (np.diff(computation) < 0).any():
    return np.array([0, n])
  return np.searchsorted(computation, np.arange(computation[-1] + 2))
