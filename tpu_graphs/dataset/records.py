"""Converts modules to tf.Example records and back, and to GraphTensors.

A record is one serialized tf.Example in the encoding that tfgnn.parse_example reads with the
schema alone. This module writes it straight from the arrays and reads it straight into them, with
neither TensorFlow nor a protobuf library: Beam workers need not load TensorFlow, equal modules give
equal bytes (protobuf promises no order for a map), and a packed float list costs one copy.

Format: https://www.tensorflow.org/api_docs/python/tf/train/Example and
https://protobuf.dev/programming-guides/encoding; the features have the names that
tfgnn.write_example gives them.
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
  """Options that decide how modules become records.

  A module that exceeds a limit is split over several records, each with the graph and an equal
  share of the configs.

  Attributes:
    max_configs: largest number of configs in a record.
    max_bytes: largest size of a record; a graph that is larger by itself is refused.
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
  """A serialized tf.Example with the facts that a writer needs.

  Attributes:
    module_id: name of the module.
    part: position of this record among the records of the module, from 0.
    measured: True if any config of the module is measured.
    sizes: 'ops', 'edges', 'config_ops', 'configs' -> their number in this record.
    data: the serialized tf.Example.
  """

  module_id: str
  part: int
  measured: bool
  sizes: Mapping[str, int]
  data: bytes


def encode(module: module_lib.Module, options: RecordOptions = RecordOptions()) -> Iterator[Record]:
  """Encodes `module` as one or more records.

  Each record holds the whole graph; together the records hold each config once.

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
  """Encodes a module whose configs are read block by block; see `encode`.

  All configs are read before the first record is yielded. Until then many configs lie in a
  temporary file, each at the place of its record, so memory holds only one record and one block of
  configs.

  Args:
    stream: the module.
    options: limits of a record, and the seed.
    observe: a function that is called with each block of features when it is read.

  Raises:
    InputError: the graph does not fit into `options.max_bytes` with even one config, or the
      configs cannot be read.
  """
  graph = stream.graph
  encoded_graph = []
  for name, value in _graph_features(graph):
    encoded_graph += _entry(name, value)
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
      encoded = []
      for name, value in _config_features(stream, chosen, content):
        encoded += _entry(name, value)
      sizes = {
        'ops': graph.num_ops,
        'edges': graph.num_edges,
        'config_ops': graph.num_config_ops,
        'configs': chosen.size,
      }
      # No local name keeps the record alive while the next record is made.
      yield Record(
        graph.module_id, part, stream.is_measured, sizes, _example(encoded + encoded_graph)
      )


def _write_rows(file: IO[bytes], places: np.ndarray, rows: np.ndarray) -> None:
  """Writes each row at its place in the file, neighbours together.

  Args:
    file: a file of rows of equal size.
    places: int64 [b], distinct positions counted in rows.
    rows: [b, ...].
  """
  order = np.argsort(places)
  ordered, places = rows[order], places[order]
  starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
  for start, stop in itertools.pairwise([*starts.tolist(), places.size]):
    file.seek(int(places[start]) * rows[0].nbytes)
    file.write(ordered[start:stop].tobytes())


def encode_whole(module: module_lib.Module) -> bytes:
  """Encodes `module` as one record of any size."""
  options = RecordOptions(max_configs=max(1, module.num_configs), max_bytes=1 << 40)
  (record,) = encode(module, options)
  return record.data


def decode(data: bytes, *, num_extra: int = 0) -> module_lib.Module:
  """Decodes the module in a record, with the configs that this record holds.

  `encode_whole` of the module gives the same bytes again.

  Records do not hold `dropped_runs`, `unknown_opcodes` and `default_config`. Computations and
  segments are known from `computation` only: its boundaries become the `node_splits`, unless it
  does not ascend or counts beyond the number of ops.

  Args:
    data: the serialized tf.Example.
    num_extra: number of columns of `extra_feat`.

  Raises:
    InputError: the record is damaged, or its features do not match the schema.
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
    own: dict[str, Any] = {}  # Arrays that some modules lack.
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
      value = found.pop(name)
      if not np.array_equal(value, [size]):
        raise ValueError(f'{name} {value} instead of [{size}]')
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
  """Decodes the `module_id` in a record and no other feature.

  Raises:
    InputError: the record is damaged.
  """
  try:
    return bytes(_read_features(data)['context/module_id']).decode()
  except (IndexError, KeyError, ValueError) as error:
    raise errors.InputError('damaged record', found=error, **_DAMAGED) from error


def merge(parts: Sequence[module_lib.Module]) -> module_lib.Module:
  """Returns the module whose records were decoded as `parts`, in memory; see `streams.merged`.

  Raises:
    InputError: a config occurs twice.
  """
  with streams.merged(parts) as stream:
    return stream.load()


def to_graph_tensor(module: module_lib.Module) -> tfgnn.GraphTensor:
  """Returns the GraphTensor of a whole module, as tfgnn reads it from a record."""
  from tpu_graphs.compat import tfgnn

  return tfgnn.parse_single_example(
    schema.graph_spec(module.kind, num_extra=module.num_extra), encode_whole(module)
  )


def write_tfrecords(file: BinaryIO, records: Iterable[bytes]) -> tuple[int, int]:
  """Writes records in the uncompressed TFRecord format.

  Format: https://www.tensorflow.org/tutorials/load_data/tfrecord. (Beam's own sink offers no
  order within a file.)

  Returns:
    The number of bytes written and their crc32c.
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
  """Reads the record at the position of `file`, as `write_tfrecords` writes it.

  Returns None at the end of the file.

  Raises:
    InputError: the record is damaged or cut off.
  """
  start = file.tell()
  length = file.read(8)
  if not length:
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
  """Returns for each record the indices of its configs, ascending."""
  # Besides the features, id, runtime and normalizer take at most 10 bytes each.
  config_bytes = 30 + stream.row_bytes
  room = (options.max_bytes - graph_bytes - 1024) // config_bytes
  if room < 1:
    raise errors.InputError(
      'module too large for a record',
      where=stream.graph.module_id,
      found=f'{graph_bytes} bytes of graph and {config_bytes} bytes per config',
      expected=f'<= {options.max_bytes} bytes',
      fix='raise --max_record_bytes',
    )
  parts = -(-stream.num_configs // min(options.max_configs, room))
  if parts <= 1:
    return [np.arange(stream.num_configs)]
  name = hashlib.blake2b(stream.graph.module_id.encode(), digest_size=8).digest()
  rng = np.random.default_rng([options.seed, int.from_bytes(name, 'little')])
  order = rng.permutation(stream.num_configs)
  return [np.sort(order[part::parts]) for part in range(parts)]


def _graph_features(module: module_lib.Module) -> Iterator[tuple[str, bytes | np.ndarray]]:
  """Yields the name and value of each feature of the graph."""
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
  """Yields the name and value of each feature of the configs at the indices `chosen`.

  `content` is the bytes of their `config_feat` or `node_config_feat`.
  """
  ragged = {'config_id': stream.config_id[chosen], 'config_runtime': stream.config_runtime[chosen]}
  if stream.config_runtime_normalizers is not None:
    ragged['config_feat'] = np.frombuffer(content, np.float32)
    ragged['config_runtime_normalizer'] = stream.config_runtime_normalizers[chosen]
  for name, array in ragged.items():
    yield f'context/{name}', array
    # tfgnn cannot parse a ragged feature without its row length.
    yield f'context/{name}.d1', np.array([chosen.size])
  if stream.config_runtime_normalizers is None:
    yield 'context/node_config_feat', content


def _entry(name: str, value: bytes | np.ndarray) -> list[bytes]:
  """Returns one entry of the map `Features.feature`, with tag and length, in pieces.

  Joining the pieces here would copy large values once more.
  """
  if isinstance(value, bytes):
    field, content = _BYTES_LIST, value
  elif value.dtype.kind == 'f':
    field, content = _FLOAT_LIST, value.astype('<f4', copy=False).tobytes()
  else:
    field, content = _INT64_LIST, varints(value.astype(np.int64, copy=False))
  header, size = b'', len(content)
  # The values lie in a list, the list in a feature, and the feature in the value of the entry.
  for number in (1, field, 2):
    header = _header(number, size) + header
    size = len(content) + len(header)
  key = name.encode()
  header = _header(1, len(key)) + key + header
  return [_header(1, len(header) + len(content)), header, content]


def _example(pieces: list[bytes]) -> bytes:
  return b''.join([_header(1, sum(map(len, pieces))), *pieces])


def _header(field: int, length: int) -> bytes:
  """Returns the tag and length of a protobuf field with `length` bytes."""
  header = bytearray([field << 3 | _WITH_LENGTH])
  while length > 0x7F:
    header.append(length & 0x7F | 0x80)
    length >>= 7
  header.append(length)
  return bytes(header)


def varints(values: np.ndarray) -> bytes:
  """Returns the concatenated protobuf varints of an int64 [n]; negative values take ten bytes."""
  unsigned = values.view(np.uint64)
  # Most arrays of a record hold small values only, and each of these takes one byte.
  if unsigned.max(initial=0) < 0x80:
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
  """Returns name -> array for the features of a tf.Example; `_STRINGS` have bytes instead.

  Raises:
    IndexError, ValueError: `data` is not a tf.Example, or a feature has another type.
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
        raise ValueError(f'{name} has another type')
      if field == _BYTES_LIST:
        found[name] = joined
      elif field == _INT64_LIST:
        found[name] = from_varints(joined)
      else:
        # The copy is aligned, which the bytes of the record are not.
        found[name] = np.frombuffer(joined, '<f4').astype(np.float32)
  return found


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
  """Yields the number and content of each field of a message; every field has a length.

  Raises:
    IndexError, ValueError: the message is damaged, or a field has no length.
  """
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
      raise ValueError('not a tf.Example')
    yield tag >> 3, data[at + 1 : end]
    at = end


def from_varints(data: bytes | memoryview) -> np.ndarray:
  """Returns the int64 [n] in concatenated protobuf varints: the inverse of `varints`.

  Raises:
    ValueError: the last varint is cut off, or a varint is too long.
  """
  digits = np.frombuffer(data, np.uint8)
  ends = np.flatnonzero(digits < 0x80) + 1
  starts = np.concatenate([[0], ends[:-1]])[: ends.size]
  end = ends[-1] if ends.size else 0
  if end != digits.size or (ends - starts).max(initial=0) > 10:
    raise ValueError('not a list of varints')
  if ends.size == digits.size:
    return digits.astype(np.int64)
  shifts = 7 * (np.arange(digits.size) - np.repeat(starts, ends - starts))
  shifted = (digits & 0x7F).astype(np.uint64) << shifts.astype(np.uint64)
  return np.add.reduceat(shifted, starts).view(np.int64)


def _boundaries(computation: np.ndarray) -> np.ndarray:
  """Returns the `node_splits` whose segment indices are `computation`, int64 [N].

  Returns [0, N] if there is no op, or if `computation` does not ascend or leaves 0..N-1.
  """
  n = computation.size
  if n == 0 or computation[0] < 0 or computation[-1] >= n or (np.diff(computation) < 0).any():
    return np.array([0, n])
  return np.searchsorted(computation, np.arange(computation[-1] + 2))
