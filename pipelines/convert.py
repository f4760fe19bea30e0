"""Converts programs (TpuGraphs npz files, HLO protobufs or text) into a dataset directory of GraphTensor records.

  python pipelines/convert.py --collection=tile:xla --input='raw/*.npz' --output=data/tile

Options of Apache Beam go behind a bare `--`. The output directory is described in docs/formats.md.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import sys
import time
from typing import Any

import apache_beam as beam
from apache_beam.io import filesystems
from apache_beam.io import fileio
import numpy as np

from pipelines import beam as beam_lib
from pipelines import output
from tpu_graphs import cli
from tpu_graphs import dumps
from tpu_graphs import errors
from tpu_graphs import feature_choices
from tpu_graphs import manifest as manifest_lib
from tpu_graphs import module as module_lib
from tpu_graphs import readers
from tpu_graphs import records
from tpu_graphs import schema
from tpu_graphs import statistics

_SUFFIXES = ('.npz', '.pb')
_BYTES_PER_SHARD = 8 << 20  # Of compressed input; the default for the number of shards.
_STATISTICS_BUCKETS = 64
_OPCODE_LENGTH = 100  # Of an opcode's name in the manifest; a damaged file may have a name of any length.
_OPCODES_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
  """What decides the content of a dataset directory.

  Attributes:
    collection: such as 'tile:xla'; its first word is the kind of the input.
    split: 'train', 'valid' or 'test' for all modules; None takes the folder that a file lies in if it has one of these
      names, and else a hash of the module's graph: 80 % train, 10 % valid, 10 % test.
    num_shards: files per split, fewer where a split has fewer records; None leaves it to the size of the input.
    on_error: 'fail' stops at the first input that cannot be used, 'skip' lists it in `rejected.jsonl` and goes on.
    records: how modules become records. Its seed also decides the hashed split and the order of the records.
    choices: how the features of ops are made.
    hlo_stage: which programs of a folder that is an XLA dump; see `dumps.find`.
  """
  collection: str
  split: str | None = None
  num_shards: int | None = None
  on_error: str = 'fail'
  records: records.RecordOptions = records.RecordOptions()
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED
  hlo_stage: str = 'after'

  def __post_init__(self):
    module_lib.kind_of_collection(self.collection)
    dumps.check_stage(self.hlo_stage, where='--hlo_stage')
    if self.num_shards is not None and self.num_shards < 1:
      raise errors.InputError('too few shards', where='--num_shards', found=self.num_shards, expected='>= 1')

  @property
  def kind(self) -> str:
    return module_lib.kind_of_collection(self.collection)


@dataclasses.dataclass(frozen=True)
class _Item:
  """A record on its way to its shard. Items are ordered by `key`, a hash, so neighbours in a shard are unrelated."""
  key: int
  split: str
  path: str
  record: records.Record


@dataclasses.dataclass(frozen=True)
class Inputs:
  """The input of a conversion.

  Attributes:
    patterns: globs, each of which matches at least one file.
    files: number of files they match (twice if by two patterns).
    bytes: their size.
  """
  patterns: tuple[str, ...]
  files: int
  bytes: int


def find_inputs(inputs: Sequence[str], collection: str, hlo_stage: str = 'after') -> Inputs:
  """Turns files, globs and directories into patterns, and looks what they match.

  A directory may be the root of a TpuGraphs tree (with a folder per part of the collection's name, such as tile/xla),
  a folder with train, valid and test, or a plain folder of files. Of one that XLA wrote with --xla_dump_to, the
  programs of the stage `hlo_stage` are taken and nothing else.

  Raises:
    InputError: a file system is not available, an input matches no file, a dump has no program of the stage, or a
      file's name is not in Unicode.
  """
  if not inputs:
    raise errors.InputError('no input', where='--input', expected='files, globs or folders')
  patterns: list[str] = []
  entries: list[filesystems.FileMetadata] = []
  for name in inputs:
    beam_lib.check_file_system('--input', name)
    tree = output.join(name, *collection.split(':'))
    # Beam finds nothing by a local glob without a folder before it.
    groups: Iterable[list[str]] = [[name if '://' in name or name.startswith(('/', './', '../')) else f'./{name}']]
    if not any(character in name for character in '*?['):
      folders = [[output.join(tree, split) for split in manifest_lib.SPLITS], [tree],
                 [output.join(name, split) for split in manifest_lib.SPLITS], [name]]
      groups = ([pattern for folder in group for pattern in _patterns_in(folder, hlo_stage)] for group in folders)
      if not os.path.isdir(name):
        groups = itertools.chain(groups, [[name]])
    for group in groups:
      results = filesystems.FileSystems.match(group)
      if any(result.metadata_list for result in results):
        break
    else:
      raise errors.InputError('nothing matches', where='--input', found=name,
                              expected=f'a file, a glob, or a folder with {" or ".join(_SUFFIXES)} files')
    for result in results:
      if result.metadata_list:
        patterns.append(result.pattern)
        entries.extend(result.metadata_list)
  for entry in entries:
    if any('\ud800' <= character <= '\udfff' for character in entry.path):  # Bytes that are no UTF-8.
      raise errors.InputError('file name not in Unicode', where='--input', found=ascii(entry.path),
                              fix='rename the file')
  return Inputs(tuple(patterns), len(entries), sum(entry.size_in_bytes for entry in entries))


def _patterns_in(folder: str, hlo_stage: str) -> list[str]:
  """Globs of what is read in a folder; files of a dump that no glob can tell from others are named one by one."""
  [listing] = filesystems.FileSystems.match([output.join(folder, '*module_*_optimizations.*')])
  paths = [entry.path for entry in listing.metadata_list]
  with errors.in_file(folder):
    chosen = set(dumps.find(paths, stage=hlo_stage))
  if not chosen:
    return [output.join(folder, f'*{suffix}') for suffix in _SUFFIXES]
  patterns = []
  for ending in dumps.ENDINGS:
    found = {path for path in paths if path.endswith(ending)}
    patterns.extend([output.join(folder, f'*module_*{ending}')] if found <= chosen else sorted(found & chosen))
  return patterns


def split_of(module: module_lib.Module, path: str, options: ConvertOptions) -> str:
  """The split of a module; see `ConvertOptions.split`. Equal graphs without a folder always share their split."""
  if options.split:
    return options.split
  folder = path.replace('\\', '/').split('/')[-2:-1]
  if folder and folder[0] in manifest_lib.SPLITS:
    return folder[0]
  share = _hash(options.records.seed, module.topology_fingerprint()) / 2**64
  return 'train' if share < 0.8 else 'valid' if share < 0.9 else 'test'


def _hash(seed: int, *parts: bytes) -> int:
  """A 64-bit hash that is the same on every machine."""
  digest = hashlib.blake2b(digest_size=8, key=str(seed).encode())
  for part in parts:
    digest.update(len(part).to_bytes(8, 'little') + part)
  return int.from_bytes(digest.digest(), 'little')


class ReadModules(beam.DoFn):
  """Path -> `_Item`s; beside them, by tag, what becomes of everything else in the file."""

  REJECTED, STATISTICS, COUNTS, SOURCE, OPCODES = 'rejected', 'statistics', 'counts', 'source', 'opcodes'

  def __init__(self, directory: str, options: ConvertOptions):
    self._directory = directory
    self._options = options
    self._modules = beam.metrics.Metrics.counter('convert', 'modules')
    self._configs = beam.metrics.Metrics.counter('convert', 'configs')
    self._rejected = beam.metrics.Metrics.counter('convert', 'rejected')
    self._milliseconds = beam.metrics.Metrics.distribution('convert', 'milliseconds_per_file')

  def process(self, path: str):
    start = time.monotonic()
    try:
      data = beam_lib.read_bytes(path)
      yield beam.pvalue.TaggedOutput(self.SOURCE, (1, len(data), _hash(0, data)))
      extraction = readers.from_bytes(data, path=path, kind=self._options.kind, choices=self._options.choices)
    except errors.InputError as error:
      yield self._reject(error)
      return
    for reason, count in extraction.skipped.items():
      yield self._count('skipped', reason, count)
    for module in extraction.modules:
      try:
        with errors.in_file(path):
          encoded = list(records.encode(module, self._options.records))
      except errors.InputError as error:
        yield self._reject(error)
        continue
      yield from self._outputs(module, path, encoded)
    self._milliseconds.update(int(1e3 * (time.monotonic() - start)))

  def _outputs(self, module: module_lib.Module, path: str, encoded: list[records.Record]):
    split = split_of(module, path, self._options)
    for record in encoded:
      key = _hash(self._options.records.seed, module.module_id.encode(), str(record.part).encode())
      yield _Item(key, split, path, record)
    for reason, count in module.dropped_runs.items():
      yield self._count('dropped', reason, count)
    for opcode, count in module.unknown_opcodes.items():
      yield beam.pvalue.TaggedOutput(self.OPCODES, (opcode[:_OPCODE_LENGTH], count))
    if split == 'train':
      bucket = _hash(0, module.module_id.encode()) % _STATISTICS_BUCKETS
      yield beam.pvalue.TaggedOutput(self.STATISTICS, (bucket, (module.module_id, statistics.Statistics.of(module))))
    self._modules.inc()
    self._configs.inc(module.num_configs)

  def _count(self, what: str, reason: str, count: int) -> beam.pvalue.TaggedOutput:
    return beam.pvalue.TaggedOutput(self.COUNTS, ((what, reason), count))

  def _reject(self, error: errors.InputError) -> beam.pvalue.TaggedOutput:
    self._rejected.inc()
    if self._options.on_error == 'fail':
      output.report_failure(self._directory, error)
      raise error
    return beam.pvalue.TaggedOutput(self.REJECTED, error.to_dict())


class AssignShards(beam.DoFn):
  """`_Item` -> ((split, shard, number of shards), item), dealing the items of a split to its shards in key order."""

  def __init__(self, num_shards: int):
    self._num_shards = num_shards

  def process(self, item: _Item, keys: Mapping[str, np.ndarray]):
    split_keys = keys[item.split]
    num_shards = min(self._num_shards, len(split_keys))
    yield (item.split, int(np.searchsorted(split_keys, np.uint64(item.key))) % num_shards, num_shards), item


class WriteShard(beam.DoFn):
  """((split, shard, number of shards), items) -> `manifest.Shard`, writing the TFRecord file."""

  def __init__(self, directory: str):
    self._directory = directory

  def process(self, element: tuple[tuple[str, int, int], Iterable[_Item]]) -> Iterator[manifest_lib.Shard]:
    (split, shard, num_shards), items = element
    items = sorted(items, key=lambda item: (item.key, item.path))
    for item, following in itertools.pairwise(items):
      if item.key == following.key:
        error = errors.InputError(
            'module_id occurs twice', path=following.path, where=item.record.module_id, found=f'also in {item.path}',
            expected=f'distinct names in split {split}', fix='rename one, or convert them into two datasets')
        output.report_failure(self._directory, error)
        raise error
    name = f'{split}/part-{shard:05d}-of-{num_shards:05d}.tfrecord'
    folder, path = output.join(self._directory, split), output.join(self._directory, name)
    if not filesystems.FileSystems.exists(folder):
      with contextlib.suppress(OSError):  # Another worker may be first.
        filesystems.FileSystems.mkdirs(folder)
    # The same step may run twice at a time, so each attempt has a name of its own until it is done.
    temporary = f'{path}.{time.monotonic_ns():x}.partial'
    with filesystems.FileSystems.create(
        temporary, compression_type=filesystems.CompressionTypes.UNCOMPRESSED) as file:
      size, checksum = records.write_tfrecords(file, (item.record.data for item in items))
    beam_lib.rename(temporary, path)
    sizes = [item.record.sizes for item in items]
    first = [item.record for item in items if item.record.part == 0]
    yield manifest_lib.Shard(
        name=name, records=len(items), modules=len(first), measured=sum(record.measured for record in first),
        without_configs=sum(not record.sizes['configs'] for record in first),
        configs=sum(size['configs'] for size in sizes), bytes=size, crc32c=f'{checksum:08x}',
        max_sizes={name: max(size[name] for size in sizes) for name in sizes[0]},
        total_sizes={name: sum(size[name] for size in sizes) for name in sizes[0]})


class Publish(beam.DoFn):
  """Writes everything but the shards; the manifest last."""

  def __init__(self, directory: str, options: ConvertOptions):
    self._directory = directory
    self._options = options

  def process(self, _, shards: list[manifest_lib.Shard], rejected: list[dict[str, Any]],
              counts: list[tuple[tuple[str, str], int]], source: tuple[int, int, int], opcodes: list[tuple[str, int]],
              parts: list[tuple[int, statistics.Statistics]]) -> Iterator[manifest_lib.Manifest]:
    def count(what):
      return {reason: number for (found, reason), number in sorted(counts) if found == what}

    by_split = collections.defaultdict(list)
    for shard in shards:
      by_split[shard.name.partition('/')[0]].append(shard)
    files, size, digest = source
    manifest = manifest_lib.Manifest(
        collection=self._options.collection, kind=self._options.kind, options=_recorded(self._options),
        splits={split: manifest_lib.Split.of(by_split[split]) for split in manifest_lib.SPLITS if split in by_split},
        rejected_inputs=dict(sorted(collections.Counter(row['reason'] for row in rejected).items())),
        skipped_modules=count('skipped'), dropped_runs=count('dropped'),
        source={'files': files, 'bytes': size, 'fingerprint': f'{digest:016x}'}, unknown_opcodes=dict(opcodes))
    if not shards:
      error = errors.InputError(
          'no usable module in the input', found=json.dumps({**manifest.rejected_inputs, **manifest.skipped_modules}),
          path=min((row['path'] for row in rejected if row['path']), default=None))
      output.report_failure(self._directory, error)
      raise error
    # Buckets are merged in order, and modules in a bucket as well: floating point sums depend on it.
    total = statistics.merge_all(part for _, part in sorted(parts, key=lambda pair: pair[0]))
    rows = sorted(rejected, key=lambda row: json.dumps(row, sort_keys=True))
    output.publish(self._directory, manifest=manifest, files={
        manifest_lib.SCHEMA_NAME: schema.text(self._options.kind, num_extra=self._options.choices.num_extra),
        manifest_lib.STATISTICS_NAME: json.dumps((total or statistics.Statistics({}, {})).to_json(), indent=1) + '\n',
        manifest_lib.REJECTED_NAME: ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)})
    yield manifest


def _recorded(options: ConvertOptions) -> dict[str, Any]:
  """The options as the manifest shows them."""
  return {'split': options.split, 'num_shards': options.num_shards, 'on_error': options.on_error,
          'max_configs_per_record': options.records.max_configs, 'max_record_bytes': options.records.max_bytes,
          'seed': options.records.seed, 'hlo_stage': options.hlo_stage, **options.choices.to_json()}


def _merge_bucket(element: tuple[int, Iterable[tuple[str, statistics.Statistics]]]):
  bucket, named = element
  return bucket, statistics.merge_all(part for _, part in sorted(named, key=lambda pair: pair[0]))


def _add_sources(sources: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
  files = size = digest = 0
  for source in sources:
    files, size, digest = files + source[0], size + source[1], (digest + source[2]) % 2**64
  return files, size, digest


def _keys_by_split(keys: Iterable[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
  return {split: np.sort(np.array(list(values), np.uint64)) for split, values in keys}


@dataclasses.dataclass(eq=False)
class Convert(beam.PTransform):
  """PCollection of file patterns -> PCollection of the one `manifest.Manifest`, having written the directory.

  The directory must have been made ready by `output.begin`.

  Attributes:
    directory: where to write.
    options: see `ConvertOptions`; `num_shards` must be given, since the size of the input is not known here.
  """
  directory: str
  options: ConvertOptions

  def __post_init__(self):
    if self.options.num_shards is None:
      raise errors.InputError('number of shards missing', where='num_shards', expected='>= 1')

  def expand(self, patterns: beam.PCollection) -> beam.PCollection:
    read = (
        patterns
        | 'Match' >> fileio.MatchAll()
        | 'Path' >> beam.Map(lambda metadata: metadata.path.removeprefix('./'))
        | 'Distinct' >> beam.Distinct()
        | 'Spread' >> beam.Reshuffle()
        | 'Read' >> beam.ParDo(ReadModules(self.directory, self.options)).with_outputs(
            ReadModules.REJECTED, ReadModules.STATISTICS, ReadModules.COUNTS, ReadModules.SOURCE,
            ReadModules.OPCODES, main='items'))
    keys = (
        read.items
        | 'Key' >> beam.Map(lambda item: (item.split, item.key))
        | 'Keys' >> beam.GroupByKey()
        | 'Order' >> beam.CombineGlobally(beam.combiners.ToListCombineFn())
        | 'Index' >> beam.Map(_keys_by_split))
    shards = (
        read.items
        | 'Assign' >> beam.ParDo(AssignShards(self.options.num_shards), beam.pvalue.AsSingleton(keys))
        | 'Group' >> beam.GroupByKey()
        | 'Write' >> beam.ParDo(WriteShard(self.directory)))
    buckets = (
        read[ReadModules.STATISTICS]
        | 'Bucket' >> beam.GroupByKey()
        | 'Statistics' >> beam.Map(_merge_bucket))
    counts = read[ReadModules.COUNTS] | 'Count' >> beam.CombinePerKey(sum)
    source = read[ReadModules.SOURCE] | 'Source' >> beam.CombineGlobally(_add_sources)
    opcodes = (
        read[ReadModules.OPCODES]
        | 'Opcodes' >> beam.CombinePerKey(sum)
        | 'Frequent' >> beam.combiners.Top.Smallest(manifest_lib.MAX_UNKNOWN_OPCODES,
                                                    key=lambda pair: (-pair[1], pair[0])))
    return (
        patterns.pipeline
        | 'Start' >> beam.Create([None])
        | 'Publish' >> beam.ParDo(
            Publish(self.directory, self.options), beam.pvalue.AsList(shards),
            beam.pvalue.AsList(read[ReadModules.REJECTED]), beam.pvalue.AsList(counts),
            beam.pvalue.AsSingleton(source), beam.pvalue.AsSingleton(opcodes), beam.pvalue.AsList(buckets)))


def convert(*, inputs: Sequence[str], directory: str, options: ConvertOptions, overwrite: bool = False,
            beam_args: Sequence[str] = ()) -> manifest_lib.Manifest:
  """Runs a conversion to its end.

  Args:
    inputs: files, globs or directories; see `find_inputs`.
    directory: the dataset directory to write.
    options: what decides its content.
    overwrite: replace a dataset that exists. It is removed at the start.
    beam_args: options of Apache Beam.

  Returns:
    The manifest.

  Raises:
    InputError: input, output or options cannot be used. Nothing is left in `directory` then.
  """
  beam_lib.check_file_system('--output', directory)
  found = find_inputs(inputs, options.collection, options.hlo_stage)
  if options.num_shards is None:
    options = dataclasses.replace(options, num_shards=-(-max(found.bytes, 1) // _BYTES_PER_SHARD))
  pipeline = beam_lib.pipeline(beam_args, input_bytes=found.bytes)
  request = {'collection': options.collection, 'inputs': sorted(inputs), **_recorded(options)}
  output.begin(directory, request=request, overwrite=overwrite)
  try:
    _ = pipeline | 'Patterns' >> beam.Create(found.patterns) | 'Convert' >> Convert(directory, options)
    pipeline.run().wait_until_finish()
  except Exception as error:
    if reported := output.abandon(directory):
      raise reported from error
    raise
  output.end(directory)
  path = output.join(directory, manifest_lib.FILE_NAME)
  return manifest_lib.loads(beam_lib.read_bytes(path).decode(), path=path)


def describe(manifest: manifest_lib.Manifest) -> str:
  """A table of what a conversion wrote and left out, to be printed."""
  rows = [('split', 'modules', 'configs', 'records', 'shards', 'MiB', '')]
  for name, split in manifest.splits.items():
    unmeasured = split.modules - split.measured
    rows.append((name, f'{split.modules:,}', f'{split.configs:,}', f'{split.records:,}', str(len(split.shards)),
                 f'{split.bytes / 2**20:.1f}', f'{unmeasured} unmeasured' if unmeasured else ''))
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  lines = ['  '.join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:],
                                                                                          strict=True))]).rstrip()
           for row in rows]
  left_out = (('run', 'dropped', manifest.dropped_runs), ('module', 'skipped', manifest.skipped_modules),
              ('input', f'rejected (see {manifest_lib.REJECTED_NAME})', manifest.rejected_inputs))
  for thing, what, reasons in left_out:
    lines.extend(f'{count:,} {thing}{"s" if count > 1 else ""} {what}: {reason}' for reason, count in reasons.items())
  if without := sum(split.without_configs for split in manifest.splits.values()):
    lines.append(f'{without:,} module{"s" if without > 1 else ""} without configs: nothing to train on; to rank such '
                 'a program, give rank its --configs')
  if manifest.unknown_opcodes:
    lines.append(_describe_opcodes(manifest.unknown_opcodes))
  return '\n'.join(lines)


def _describe_opcodes(opcodes: Mapping[str, int]) -> str:
  # A name is whatever the file says.
  shown = [f'{name if name.isprintable() and name else ascii(name)} {count:,}'
           for name, count in itertools.islice(opcodes.items(), _OPCODES_SHOWN)]
  if len(opcodes) > len(shown):
    shown.append(f'and {len(opcodes) - len(shown)} more in {manifest_lib.FILE_NAME}')
  total = sum(opcodes.values())
  return f'{total:,} op{"s" if total > 1 else ""} of unknown opcodes (id 0): {", ".join(shown)}'


def _define_flags(flag_values) -> None:
  from absl import flags
  flags.DEFINE_multi_string('input', None, 'Files, globs or folders of npz or pb files, separated by commas or in '
                            'several --input; a folder may be the root of a TpuGraphs tree, or what XLA wrote with '
                            '--xla_dump_to. HLO text is read as well, where it is named or matched by a glob.',
                            flag_values=flag_values)
  flags.DEFINE_string('output', None, 'Dataset directory to write.', flag_values=flag_values)
  flags.DEFINE_string('collection', None, "Name of the collection, 'tile:NAME' or 'layout:NAME', such as "
                      "'layout:xla:random'.", flag_values=flag_values)
  flags.DEFINE_enum('split', None, manifest_lib.SPLITS, 'Split for all modules. Default: the folder (train, valid or '
                    'test) that a file lies in, else a hash of its graph.', flag_values=flag_values)
  flags.DEFINE_enum('hlo_stage', 'after', dumps.STAGES, 'Which programs of an XLA dump: after or before the passes of '
                    'the compiler, or all.', flag_values=flag_values)
  flags.DEFINE_integer('num_shards', None, 'Files per split. Default: by the size of the input.', lower_bound=1,
                       flag_values=flag_values)
  defaults = records.RecordOptions()
  flags.DEFINE_integer('max_configs_per_record', defaults.max_configs, 'Modules with more configs become several '
                       'records.', lower_bound=1, flag_values=flag_values)
  flags.DEFINE_integer('max_record_bytes', defaults.max_bytes, 'The same by size.', lower_bound=1,
                       flag_values=flag_values)
  flags.DEFINE_enum('on_error', 'fail', ['fail', 'skip'], 'Whether to stop at an input that cannot be used, or to list '
                    'it in rejected.jsonl and go on.', flag_values=flag_values)
  flags.DEFINE_enum('layout_padding', '0', list(map(str, feature_choices.LAYOUT_PADDINGS)), 'Fills the unused ones of '
                    'the node features layout_minor_to_major: 0 as published, -1 to tell "no dimension" from '
                    '"dimension 0".', flag_values=flag_values)
  flags.DEFINE_multi_string('extra_features', None, 'package.module:attribute of node features of your own, a function '
                            'under @feature_choices.node_features. May be given several times.',
                            flag_values=flag_values)
  flags.DEFINE_integer('seed', 0, 'Decides hashed splits, and the order of configs and records.',
                       lower_bound=0, upper_bound=2**32 - 1, flag_values=flag_values)
  flags.DEFINE_bool('overwrite', False, 'Replace a dataset that exists; it is removed at the start.',
                    flag_values=flag_values)
  for name in ('input', 'output', 'collection'):
    flags.mark_flag_as_required(name, flag_values=flag_values)


def _job(flag_values, beam_args: list[str]) -> int:
  options = ConvertOptions(
      collection=flag_values.collection, split=flag_values.split, num_shards=flag_values.num_shards,
      on_error=flag_values.on_error, hlo_stage=flag_values.hlo_stage,
      records=records.RecordOptions(max_configs=flag_values.max_configs_per_record,
                                    max_bytes=flag_values.max_record_bytes, seed=flag_values.seed),
      choices=feature_choices.FeatureChoices(
          layout_padding=int(flag_values.layout_padding),
          extra=tuple(feature_choices.load(source) for source in flag_values.extra_features or ())))
  start = time.monotonic()
  inputs = [name for names in flag_values.input for name in names.split(',')]
  manifest = convert(inputs=inputs, directory=flag_values.output, options=options,
                     overwrite=flag_values.overwrite, beam_args=beam_args)
  print(f'{manifest.collection} -> {flag_values.output} in {time.monotonic() - start:.1f} s')
  print(describe(manifest))
  return 0


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__, passthrough=True)


if __name__ == '__main__':
  from pipelines import convert as this  # By its own name, so that workers can import the DoFns.
  sys.exit(this.main(sys.argv))
