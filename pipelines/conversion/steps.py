"""The steps of a conversion: files -> records in spill files -> shards -> the manifest."""

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

_BLOCK_BYTES = 1 << 20  # Input is read in blocks of this size.
_STATISTICS_BUCKETS = 64
# With these errors a place to write is at fault, not the input.
_NO_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS))
# The manifest shortens an opcode's name to so many characters: a damaged file may have a name of
# any length.
_OPCODE_LENGTH = 100


@dataclasses.dataclass(frozen=True)
class Item:
  """A record on its way to its shard.

  Items are ordered by `key`, a hash, so neighbours in a shard are unrelated.

  Attributes:
    key: Key of the record in its split.
    split: Split of the module.
    path: Path of the source file.
    module_id, part, measured, sizes: Attributes of the `records.Record`.
    place: Place of the record's data.
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
  """Returns the split of a module; see `ConvertOptions.split`.

  Equal graphs always share their split, unless a folder decides it.
  """
  if options.split:
    return options.split
  folder = path.replace('\\', '/').split('/')[-2:-1]
  if folder and folder[0] in module_lib.SPLITS:
    return folder[0]
  share = _hash(options.records.seed, module.topology_fingerprint()) / 2**64
  if share < 0.8:
    return 'train'
  return 'valid' if share < 0.9 else 'test'


def _hash(seed: int, *parts: bytes) -> int:
  """Returns a 64-bit hash that is the same on every machine."""
  digest = hashlib.blake2b(digest_size=8, key=str(seed).encode())
  for part in parts:
    digest.update(len(part).to_bytes(8, 'little') + part)
  return int.from_bytes(digest.digest(), 'little')


def _size_and_hash(file: BinaryIO) -> tuple[int, int]:
  """Returns the size of an open file in bytes and a hash of its content, and rewinds the file.

  For a zip file only its directory is hashed, which holds the size and CRC-32 of each member:
  reading the whole file took as long as converting it.
  """
  size = file.seek(0, os.SEEK_END)
  file.seek(zips.directory_start(file))
  digest = hashlib.blake2b(size.to_bytes(8, 'little'), digest_size=8, key=b'0')
  while block := file.read(_BLOCK_BYTES):
    digest.update(block)
  file.seek(0)
  return size, int.from_bytes(digest.digest(), 'little')


class ReadModules(beam.DoFn):
  """Step from a path to `Item`s, and to tagged outputs for everything else in the file."""

  REJECTED = 'rejected'
  STATISTICS = 'statistics'
  COUNTS = 'counts'
  SOURCE = 'source'
  OPCODES = 'opcodes'

  def __init__(self, directory: str, options: options_lib.ConvertOptions):
    self._directory = directory
    self._options = options
    self._spill: spill.Writer | None = None
    names = (
      'files',
      'bytes',
      'modules',
      'configs',
      'dropped_runs',
      'rejected',
      'removed_ops',
      'removed_edges',
    )
    self._counters = {name: beam.metrics.Metrics.counter('convert', name) for name in names}
    self._milliseconds = beam.metrics.Metrics.distribution('convert', 'milliseconds_per_file')

  def start_bundle(self):
    self._spill = spill.Writer(self._directory)

  def finish_bundle(self):
    with output.writing(output.spill_folder(self._directory)):
      self._spill.close()

  def process(self, path: str):
    start = time.monotonic()
    size = fingerprint = 0  # A file that cannot be read counts with these values.
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
          # A module whose configs fail halfway must leave no outputs, so they are collected first.
          outputs = list(self._outputs(module, path))
      except errors.InputError as error:
        if self._options.on_error == 'fail':
          raise
        yield from self._reject(error)
      else:
        yield from outputs

  def _outputs(self, module: streams.ConfigStream, path: str):
    whole = module.graph
    if self._options.keep_hops is not None and whole.num_config_ops:
      reduced = reduction.keep_hops(whole, self._options.keep_hops, rest=self._options.rest)
      module = dataclasses.replace(module, graph=reduced)
    selected = selection.select(module, self._options.configs)
    module, graph = selected.stream, module.graph
    # The whole graph decides, so that the split does not depend on `keep_hops`.
    split = split_of(whole, path, self._options)
    own = statistics.Accumulator(graph) if split == 'train' else None
    observe = own.add if own else None
    num_records = 0
    for record in records.encode_stream(module, self._options.records, observe=observe):
      num_records += 1
      key = _hash(self._options.records.seed, record.module_id.encode(), str(record.part).encode())
      yield Item(
        key=key,
        split=split,
        path=path,
        module_id=record.module_id,
        part=record.part,
        measured=record.measured,
        sizes=record.sizes,
        place=self._write(record.data),
      )
    yield self._count('records', split, num_records)
    for reason, count in graph.dropped_runs.items():
      yield self._count('dropped', reason, count)
      self._counters['dropped_runs'].inc(count)
    left_out = (('deduplicated', selected.deduplicated), ('sampled_out', selected.sampled_out))
    for what, count in left_out:
      if count:
        yield self._count('left_out', what, count)
    removed = (
      ('removed_ops', whole.num_ops - graph.num_ops),
      ('removed_edges', whole.num_edges - graph.num_edges),
    )
    for what, count in removed:
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
      # A copy of the input, or its configs, did not fit into the temporary folder.
      with output.writing(tempfile.gettempdir()):
        raise error.__cause__
    self._counters['rejected'].inc()
    if self._options.on_error == 'fail':
      output.report_failure(self._directory, error)
      raise error
    yield beam.pvalue.TaggedOutput(self.REJECTED, error.to_dict())
    yield self._count('made', 'rejected inputs', 1)


class AssignShards(beam.DoFn):
  """Step from an `Item` to ((split, shard, number of shards), item).

  The items of a split go to its shards round-robin, in the order of their keys.
  """

  def __init__(self, num_shards: int):
    self._num_shards = num_shards

  def process(self, item: Item, keys: Mapping[str, np.ndarray]):
    split_keys = keys[item.split]
    num_shards = min(self._num_shards, len(split_keys))
    rank = int(np.searchsorted(split_keys, np.uint64(item.key)))
    yield (item.split, rank % num_shards, num_shards), item


class WriteShard(beam.DoFn):
  """Step from ((split, shard, number of shards), items) to `manifest.Shard`.

  It writes the TFRecord file.
  """

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
    folder = output.join(self._directory, split)
    path = output.join(self._directory, name)
    if not filesystems.FileSystems.exists(folder):
      with contextlib.suppress(OSError):  # Another worker may have made the folder first.
        filesystems.FileSystems.mkdirs(folder)
    # The same step may run twice at a time, so each attempt writes under a name of its own.
    temporary = f'{path}.{time.monotonic_ns():x}.partial'
    uncompressed = filesystems.CompressionTypes.UNCOMPRESSED
    with output.writing(path):
      with (
        spill.Reader(self._directory) as reader,
        filesystems.FileSystems.create(temporary, compression_type=uncompressed) as file,
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
  """Step from (bucket, pairs (module_id, place)) to (bucket, number of modules, statistics).

  The statistics of the modules are merged in the order of their names.
  """

  def __init__(self, directory: str):
    self._directory = directory

  def process(self, element: tuple[int, Iterable[tuple[str, spill.Place]]]):
    bucket, places = element
    places = sorted(places, key=lambda pair: pair[0])
    with spill.Reader(self._directory) as reader:
      parts = (pickle.loads(reader.read(place)) for _, place in places)
      yield bucket, len(places), statistics.merge_all(parts)


class Publish(beam.DoFn):
  """Step that writes everything except the shards, and the manifest last."""

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
    splits = {
      split: manifest_lib.Split.of(by_split[split])
      for split in module_lib.SPLITS
      if split in by_split
    }
    rejections = collections.Counter(row['reason'] for row in rejected)
    left_out = count('left_out')
    files, size, digest = source
    manifest = manifest_lib.Manifest(
      collection=self._options.collection,
      kind=self._options.kind,
      options=self._options.to_json(),
      splits=splits,
      rejected_inputs=dict(sorted(rejections.items())),
      skipped_modules=count('skipped'),
      dropped_runs=count('dropped'),
      source={'files': files, 'bytes': size, 'fingerprint': f'{digest:016x}'},
      unknown_opcodes=dict(opcodes),
      deduplicated_configs=left_out.get('deduplicated', 0),
      sampled_out_configs=left_out.get('sampled_out', 0),
      removed_ops=left_out.get('removed_ops', 0),
      removed_edges=left_out.get('removed_edges', 0),
    )
    rows = sorted(rejected, key=lambda row: json.dumps(row, sort_keys=True))
    listing = ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)
    made = count('made')
    num_statistics = sum(number for _, number, _ in parts)
    # Each entry has a name, the count at the end, and the count where the things were made.
    balance = (
      ('records', {name: split.records for name, split in splits.items()}, count('records')),
      ('inputs', files, made.get('inputs', 0)),
      ('rejected inputs', len(rows), made.get('rejected inputs', 0)),
      ('statistics', num_statistics, made.get('statistics', 0)),
    )
    losses = [_lost(what, arrived, expected) for what, arrived, expected in balance]
    error = next((loss for loss in losses if loss), None)
    if error is None:
      error = self._failure(manifest, rows)
      if error and rows:
        place = output.rejected_path(self._directory)
        with output.writing(place):
          beam_lib.write_atomically(place, listing.encode())
        error.fix = f'{place} lists them'
    if error:
      output.report_failure(self._directory, error)
      raise error
    # Floating point sums depend on the order, so buckets are merged in order, as are the modules
    # within each bucket.
    in_order = sorted(parts, key=lambda part: part[0])
    total = statistics.merge_all(part for _, _, part in in_order)
    if total is None:
      total = statistics.Statistics({}, {})
    contents = {
      manifest_lib.SCHEMA_NAME: schema.text(
        self._options.kind, num_extra=self._options.choices.num_extra
      ),
      manifest_lib.STATISTICS_NAME: json.dumps(total.to_json(), indent=1) + '\n',
      manifest_lib.REJECTED_NAME: listing,
    }
    output.publish(self._directory, manifest=manifest, files=contents)
    yield manifest

  def _failure(
    self, manifest: manifest_lib.Manifest, rejected: list[dict[str, Any]]
  ) -> errors.InputError | None:
    """Returns the reason why the dataset must not be published, or None."""
    paths = {row['path'] for row in rejected}
    first = min(paths, default=None)
    reasons = json.dumps({**manifest.rejected_inputs, **manifest.skipped_modules})
    if not manifest.splits:
      return errors.InputError('no usable module in the input', found=reasons, path=first)
    files = manifest.source['files']
    most = self._options.max_rejected_fraction
    if len(paths) > most * files:
      return errors.InputError(
        'too many inputs rejected',
        found=f'{len(paths)} of {files}, {reasons}',
        path=first,
        expected=f'at most a share of {most} (--max_rejected_fraction)',
      )
    return None


def _lost(what: str, arrived: Any, made: Any) -> errors.InputError | None:
  """Returns the error for counts that differ where things were made and where they arrived."""
  if arrived == made:
    return None
  return errors.InputError(
    f'{what} lost between the steps',
    found=f'{json.dumps(arrived)} arrived',
    expected=f'{json.dumps(made)}, as many as were made',
    fix='convert again; if it happens again, with another Beam runner',
  )
