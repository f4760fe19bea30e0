"""The steps of `pipelines/convert.py`: files -> records in spill files -> shards -> the
manifest.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping
import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import os
import pickle
import tempfile
import time
from typing import Any, BinaryIO

import apache_beam as beam
from apache_beam.io import filesystems
import numpy as np

from pipelines.conversion import options as options_lib
from pipelines.conversion import output
from pipelines.conversion import spill
from pipelines.runners import beam as beam_lib
from tpu_graphs import errors
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.dataset import records
from tpu_graphs.dataset import schema
from tpu_graphs.dataset import statistics
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import reduction
from tpu_graphs.modules import selection
from tpu_graphs.modules import streams
from tpu_graphs.sources import readers
from tpu_graphs.sources import zips

_BLOCK_BYTES = 1 << 20  # Of input that is read at a time.
_STATISTICS_BUCKETS = 64
_NO_SPACE = frozenset(
  (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
)  # Nothing that is read is at fault.
_OPCODE_LENGTH = (
  100  # Of an opcode's name in the manifest; a damaged file may have a name of any length.
)


@dataclasses.dataclass(frozen=True)
class Item:
  """A record on its way to its shard. Items are ordered by `key`, a hash, so neighbours in a
  shard are unrelated.

  Attributes:
    key: of the record, in its split.
    split: of the module.
    path: of the source.
    module_id, part, measured, sizes: see `records.Record`.
    place: where its data lies.
  """

  key: int
  split: str
  path: str
  module_id: str
  part: int
  measured: bool
  sizes: Mapping[str, int]
  place: spill.Place


def split_of(module: module_lib.Module, path: str, options: options_lib.ConvertOptions) -> str:
  """The split of a module; see `ConvertOptions.split`. Equal graphs without a folder always
  share their split.
  """
  if options.split:
    return options.split
  folder = path.replace('\\', '/').split('/')[-2:-1]
  if folder and folder[0] in module_lib.SPLITS:
    return folder[0]
  share = _hash(options.records.seed, module.topology_fingerprint()) / 2**64
  return 'train' if share < 0.8 else 'valid' if share < 0.9 else 'test'


def _hash(seed: int, *parts: bytes) -> int:
  """A 64-bit hash that is the same on every machine."""
  digest = hashlib.blake2b(digest_size=8, key=str(seed).encode())
  for part in parts:
    digest.update(len(part).to_bytes(8, 'little') + part)
  return int.from_bytes(digest.digest(), 'little')


def _size_and_hash(file: BinaryIO) -> tuple[int, int]:
  """The number of bytes of an open file, and a hash of its content; it is left at its start.

  Of a zip file its directory is hashed, which has size and CRC-32 of each member: reading all
  took as long as converting it.
  """
  size = file.seek(0, os.SEEK_END)
  file.seek(zips.directory_start(file))
  digest = hashlib.blake2b(size.to_bytes(8, 'little'), digest_size=8, key=b'0')
  while block := file.read(_BLOCK_BYTES):
    digest.update(block)
  file.seek(0)
  return size, int.from_bytes(digest.digest(), 'little')


class ReadModules(beam.DoFn):
  """Path -> `Item`s; beside them, by tag, what becomes of everything else in the file."""

  REJECTED, STATISTICS, COUNTS, SOURCE, OPCODES = (
    'rejected',
    'statistics',
    'counts',
    'source',
    'opcodes',
  )

  def __init__(self, directory: str, options: options_lib.ConvertOptions):
    self._directory = directory
    self._options = options
    self._spill: spill.Writer | None = None
    self._counters = {
      name: beam.metrics.Metrics.counter('convert', name)
      for name in (
        'files',
        'bytes',
        'modules',
        'configs',
        'dropped_runs',
        'rejected',
        'removed_ops',
        'removed_edges',
      )
    }
    self._milliseconds = beam.metrics.Metrics.distribution('convert', 'milliseconds_per_file')

  def start_bundle(self):
    self._spill = spill.Writer(self._directory)

  def finish_bundle(self):
    with output.writing(output.spill_folder(self._directory)):
      self._spill.close()

  def process(self, path: str):
    start = time.monotonic()
    size = fingerprint = 0  # Of what cannot be read.
    try:
      with beam_lib.open_seekable(path) as file:
        with beam_lib.reading(path):
          size, fingerprint = _size_and_hash(file)
        yield from self._modules(file, path)
    except errors.InputError as error:
      yield from self._reject(error)
    yield beam.pvalue.TaggedOutput(self.SOURCE, (1, size, fingerprint))
    self._counters['files'].inc()
    self._counters['bytes'].inc(size)
    self._milliseconds.update(int(1e3 * (time.monotonic() - start)))

  def _modules(self, file: BinaryIO, path: str):
    modules, skipped = readers.stream(
      file,
      path=path,
      kind=self._options.kind,
      choices=self._options.choices,
      max_array_bytes=self._options.max_array_bytes,
    )
    for reason, count in skipped.items():
      yield self._count('skipped', reason, count)
    for module in modules:
      try:
        with errors.in_file(path), beam_lib.reading(path):
          outputs = list(self._outputs(module, path))  # All or nothing.
      except errors.InputError as error:
        if self._options.on_error == 'fail':
          raise
        yield from self._reject(error)
      else:
        yield from outputs

  def _outputs(self, module: streams.ConfigStream, path: str):
    whole = module.graph
    if self._options.keep_hops is not None and whole.num_config_ops:
      module = dataclasses.replace(
        module, graph=reduction.keep_hops(whole, self._options.keep_hops, rest=self._options.rest)
      )
    selected = selection.select(module, self._options.configs)
    module, graph = selected.stream, module.graph
    split = split_of(whole, path, self._options)  # The same, whatever is left of it.
    own = statistics.Accumulator(graph) if split == 'train' else None
    num_records = 0
    for record in records.encode_stream(
      module, self._options.records, observe=own.add if own else None
    ):
      num_records += 1
      key = _hash(self._options.records.seed, record.module_id.encode(), str(record.part).encode())
      yield Item(
        key,
        split,
        path,
        record.module_id,
        record.part,
        record.measured,
        record.sizes,
        self._write(record.data),
      )
    yield self._count('records', split, num_records)
    for reason, count in graph.dropped_runs.items():
      yield self._count('dropped', reason, count)
      self._counters['dropped_runs'].inc(count)
    for what, count in (
      ('deduplicated', selected.deduplicated),
      ('sampled_out', selected.sampled_out),
    ):
      if count:
        yield self._count('left_out', what, count)
    for what, count in (
      ('removed_ops', whole.num_ops - graph.num_ops),
      ('removed_edges', whole.num_edges - graph.num_edges),
    ):
      if count:
        yield self._count('left_out', what, count)
        self._counters[what].inc(count)
    for opcode, count in whole.unknown_opcodes.items():
      yield beam.pvalue.TaggedOutput(self.OPCODES, (opcode[:_OPCODE_LENGTH], count))
    if own:
      bucket = _hash(0, graph.module_id.encode()) % _STATISTICS_BUCKETS
      place = self._write(pickle.dumps(own.statistics()))
      yield beam.pvalue.TaggedOutput(self.STATISTICS, (bucket, (graph.module_id, place)))
      yield self._count('made', 'statistics', 1)
    self._counters['modules'].inc()
    self._counters['configs'].inc(module.num_configs)

  def _count(self, what: str, reason: str, count: int) -> beam.pvalue.TaggedOutput:
    return beam.pvalue.TaggedOutput(self.COUNTS, ((what, reason), count))

  def _write(self, data: bytes) -> spill.Place:
    with output.writing(output.spill_folder(self._directory)):
      return self._spill.write(data)

  def _reject(self, error: errors.InputError) -> Iterator[beam.pvalue.TaggedOutput]:
    if isinstance(error, output.WriteError):
      raise error
    if isinstance(error.__cause__, OSError) and error.__cause__.errno in _NO_SPACE:
      with output.writing(
        tempfile.gettempdir()
      ):  # Where a copy of the input, or its configs, did not fit.
        raise error.__cause__
    self._counters['rejected'].inc()
    if self._options.on_error == 'fail':
      output.report_failure(self._directory, error)
      raise error
    yield beam.pvalue.TaggedOutput(self.REJECTED, error.to_dict())
    yield self._count('made', 'rejected inputs', 1)


class AssignShards(beam.DoFn):
  """`Item` -> ((split, shard, number of shards), item), dealing the items of a split to its
  shards in key order.
  """

  def __init__(self, num_shards: int):
    self._num_shards = num_shards

  def process(self, item: Item, keys: Mapping[str, np.ndarray]):
    split_keys = keys[item.split]
    num_shards = min(self._num_shards, len(split_keys))
    yield (
      (item.split, int(np.searchsorted(split_keys, np.uint64(item.key))) % num_shards, num_shards),
      item,
    )


class WriteShard(beam.DoFn):
  """((split, shard, number of shards), items) -> `manifest.Shard`, writing the TFRecord file."""

  def __init__(self, directory: str):
    self._directory = directory

  def process(
    self, element: tuple[tuple[str, int, int], Iterable[Item]]
  ) -> Iterator[manifest_lib.Shard]:
    (split, shard, num_shards), items = element
    items = sorted(items, key=lambda item: (item.key, item.path))
    for item, following in itertools.pairwise(items):
      if item.key == following.key:
        error = errors.InputError(
          'module_id occurs twice',
          path=following.path,
          where=item.module_id,
          found=f'also in {item.path}',
          expected=f'distinct names in split {split}',
          fix='rename one, or convert them into two datasets',
        )
        output.report_failure(self._directory, error)
        raise error
    name = f'{split}/part-{shard:05d}-of-{num_shards:05d}.tfrecord'
    folder, path = output.join(self._directory, split), output.join(self._directory, name)
    if not filesystems.FileSystems.exists(folder):
      with contextlib.suppress(OSError):  # Another worker may be first.
        filesystems.FileSystems.mkdirs(folder)
    # The same step may run twice at a time, so each attempt has a name of its own until it is done.
    temporary = f'{path}.{time.monotonic_ns():x}.partial'
    with output.writing(path):
      with (
        spill.Reader(self._directory) as reader,
        filesystems.FileSystems.create(
          temporary, compression_type=filesystems.CompressionTypes.UNCOMPRESSED
        ) as file,
      ):
        size, checksum = records.write_tfrecords(file, (reader.read(item.place) for item in items))
      beam_lib.rename(temporary, path)
    sizes = [item.sizes for item in items]
    first = [item for item in items if item.part == 0]
    yield manifest_lib.Shard(
      name=name,
      records=len(items),
      modules=len(first),
      measured=sum(item.measured for item in first),
      without_configs=sum(not item.sizes['configs'] for item in first),
      configs=sum(size['configs'] for size in sizes),
      bytes=size,
      crc32c=f'{checksum:08x}',
      max_sizes={name: max(size[name] for size in sizes) for name in sizes[0]},
      total_sizes={name: sum(size[name] for size in sizes) for name in sizes[0]},
    )


class MergeStatistics(beam.DoFn):
  """(bucket, (module_id, place) of each module) -> (bucket, number of modules, their statistics
  merged by name).
  """

  def __init__(self, directory: str):
    self._directory = directory

  def process(self, element: tuple[int, Iterable[tuple[str, spill.Place]]]):
    bucket, places = element
    places = sorted(places, key=lambda pair: pair[0])
    with spill.Reader(self._directory) as reader:
      yield (
        bucket,
        len(places),
        statistics.merge_all(pickle.loads(reader.read(place)) for _, place in places),
      )


class Publish(beam.DoFn):
  """Writes everything but the shards; the manifest last."""

  def __init__(self, directory: str, options: options_lib.ConvertOptions):
    self._directory = directory
    self._options = options

  def process(
    self,
    _,
    shards: list[manifest_lib.Shard],
    rejected: list[dict[str, Any]],
    counts: list[tuple[tuple[str, str], int]],
    source: tuple[int, int, int],
    opcodes: list[tuple[str, int]],
    parts: list[tuple[int, int, statistics.Statistics]],
  ) -> Iterator[manifest_lib.Manifest]:
    def count(what):
      return {reason: number for (found, reason), number in sorted(counts) if found == what}

    by_split = collections.defaultdict(list)
    for shard in shards:
      by_split[shard.name.partition('/')[0]].append(shard)
    files, size, digest = source
    manifest = manifest_lib.Manifest(
      collection=self._options.collection,
      kind=self._options.kind,
      options=self._options.to_json(),
      splits={
        split: manifest_lib.Split.of(by_split[split])
        for split in module_lib.SPLITS
        if split in by_split
      },
      rejected_inputs=dict(sorted(collections.Counter(row['reason'] for row in rejected).items())),
      skipped_modules=count('skipped'),
      dropped_runs=count('dropped'),
      source={'files': files, 'bytes': size, 'fingerprint': f'{digest:016x}'},
      unknown_opcodes=dict(opcodes),
      deduplicated_configs=count('left_out').get('deduplicated', 0),
      sampled_out_configs=count('left_out').get('sampled_out', 0),
      removed_ops=count('left_out').get('removed_ops', 0),
      removed_edges=count('left_out').get('removed_edges', 0),
    )
    rows = sorted(rejected, key=lambda row: json.dumps(row, sort_keys=True))
    listing = ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)
    made, arrived = (
      count('made'),
      {
        'inputs': files,
        'rejected inputs': len(rows),
        'statistics': sum(number for _, number, _ in parts),
      },
    )
    lost = _lost(
      'records', {split: part.records for split, part in manifest.splits.items()}, count('records')
    )
    for what, number in arrived.items():
      lost = lost or _lost(what, number, made.get(what, 0))
    if error := lost or self._failure(manifest, rows):
      if rows and not lost:
        place = output.rejected_path(self._directory)
        with output.writing(place):
          beam_lib.write_atomically(place, listing.encode())
        error.fix = f'{place} lists them'
      output.report_failure(self._directory, error)
      raise error
    # Buckets are merged in order, and modules in a bucket as well: floating point sums depend on
    # it.
    total = statistics.merge_all(part for _, _, part in sorted(parts, key=lambda part: part[0]))
    output.publish(
      self._directory,
      manifest=manifest,
      files={
        manifest_lib.SCHEMA_NAME: schema.text(
          self._options.kind, num_extra=self._options.choices.num_extra
        ),
        manifest_lib.STATISTICS_NAME: json.dumps(
          (total or statistics.Statistics({}, {})).to_json(), indent=1
        )
        + '\n',
        manifest_lib.REJECTED_NAME: listing,
      },
    )
    yield manifest

  def _failure(
    self, manifest: manifest_lib.Manifest, rejected: list[dict[str, Any]]
  ) -> errors.InputError | None:
    """Why this must not be published, if so."""
    paths = {row['path'] for row in rejected}
    first, reasons = (
      min(paths, default=None),
      json.dumps({**manifest.rejected_inputs, **manifest.skipped_modules}),
    )
    if not manifest.splits:
      return errors.InputError('no usable module in the input', found=reasons, path=first)
    files, most = manifest.source['files'], self._options.max_rejected_fraction
    if len(paths) > most * files:
      return errors.InputError(
        'too many inputs rejected',
        found=f'{len(paths)} of {files}, {reasons}',
        path=first,
        expected=f'at most a share of {most} (--max_rejected_fraction)',
      )
    return None


def _lost(what: str, arrived: Any, made: Any) -> errors.InputError | None:
  """The error that what was counted where it was made has not all arrived, if so."""
  if arrived == made:
    return None
  return errors.InputError(
    f'{what} lost between the steps',
    found=f'{json.dumps(arrived)} arrived',
    expected=f'{json.dumps(made)}, as many as were made',
    fix='convert again; if it happens again, with another Beam runner',
  )
