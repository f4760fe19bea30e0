"""Converts programs (TpuGraphs npz files, HLO protobufs or text) into a dataset directory of GraphTensor records.

  python pipelines/convert.py --collection=tile:xla --input='raw/*.npz' --output=data/tile

Options of Apache Beam go behind a bare `--`. The output directory is described in docs/formats.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import os
import signal
import sys
import threading
import time
from typing import Any

import apache_beam as beam
from apache_beam.io import fileio
from apache_beam.io import filesystems
import numpy as np

from pipelines.conversion import output
from pipelines.conversion import steps
from pipelines.runners import beam as beam_lib
from tpu_graphs import cli
from tpu_graphs import errors
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.dataset import records
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import reduction
from tpu_graphs.modules import selection
from tpu_graphs.sources import dumps
from tpu_graphs.sources import npz

_SUFFIXES = ('.npz', '.pb')
_BYTES_PER_SHARD = 8 << 20  # Of compressed input; the default for the number of shards.
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
    max_rejected_fraction: the conversion fails where more than this share of the input files cannot be used.
    max_array_bytes: inputs with a larger array are refused before it is allocated; see `npz.stream`.
    configs: which configs of each module are kept.
    records: how modules become records. Its seed also decides the hashed split and the order of the records.
    choices: how the features of ops are made.
    hlo_stage: which programs of a folder that is an XLA dump; see `dumps.find`.
    keep_hops: layout only: graphs are reduced to what is so many edges from a configurable op; see
      `reduction.keep_hops`. The hashed split goes by the whole graph. A module without configurable ops stays whole, as
      do all for None.
    rest: with `keep_hops`, what becomes of the other ops, one of `reduction.RESTS`; None is the first of them.
  """
  collection: str
  split: str | None = None
  num_shards: int | None = None
  on_error: str = 'fail'
  max_rejected_fraction: float = 1.0
  max_array_bytes: int = npz.DEFAULT_MAX_ARRAY_BYTES
  configs: selection.ConfigSelection = selection.ConfigSelection()
  records: records.RecordOptions = records.RecordOptions()
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED
  hlo_stage: str = 'after'
  keep_hops: int | None = None
  rest: str | None = None

  def __post_init__(self):
    module_lib.kind_of_collection(self.collection)
    if self.keep_hops is None:
      if self.rest is not None:
        raise errors.InputError('no graph is reduced', where='--rest', found=self.rest, fix='give --keep_hops as well')
    else:
      if self.kind == 'tile':
        raise errors.InputError('tile modules have no configurable ops', where='--keep_hops', found=self.collection,
                                expected='a collection of kind layout', fix='leave the flag out')
      object.__setattr__(self, 'rest', self.rest or reduction.RESTS[0])
      reduction.check(self.keep_hops, self.rest)
    dumps.check_stage(self.hlo_stage, where='--hlo_stage')
    if self.num_shards is not None and self.num_shards < 1:
      raise errors.InputError('too few shards', where='--num_shards', found=self.num_shards, expected='>= 1')
    if not 0 <= self.max_rejected_fraction <= 1:
      raise errors.InputError('no share', where='--max_rejected_fraction', found=self.max_rejected_fraction,
                              expected='0 to 1')

  @property
  def kind(self) -> str:
    return module_lib.kind_of_collection(self.collection)

  def to_json(self) -> dict[str, Any]:
    """The options as the manifest shows them."""
    return {'split': self.split, 'num_shards': self.num_shards, 'on_error': self.on_error,
            'max_array_bytes': self.max_array_bytes, 'max_configs': self.configs.max_configs,
            'config_sampling': self.configs.sampling, 'dedup_configs': self.configs.dedup,
            'max_configs_per_record': self.records.max_configs, 'max_record_bytes': self.records.max_bytes,
            'seed': self.records.seed, 'hlo_stage': self.hlo_stage, 'keep_hops': self.keep_hops, 'rest': self.rest,
            **self.choices.to_json()}


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
    tags = steps.ReadModules
    paths = (
        patterns
        | 'Match' >> fileio.MatchAll()
        | 'Path' >> beam.Map(lambda metadata: metadata.path.removeprefix('./'))
        | 'Distinct' >> beam.Distinct())
    read = (
        paths
        | 'Spread' >> beam.Reshuffle()
        | 'Read' >> beam.ParDo(steps.ReadModules(self.directory, self.options)).with_outputs(
            tags.REJECTED, tags.STATISTICS, tags.COUNTS, tags.SOURCE, tags.OPCODES, main='items'))
    keys = (
        read.items
        | 'Key' >> beam.Map(lambda item: (item.split, item.key))
        | 'Keys' >> beam.GroupByKey()
        | 'Order' >> beam.CombineGlobally(beam.combiners.ToListCombineFn())
        | 'Index' >> beam.Map(_keys_by_split))
    shards = (
        read.items
        | 'Assign' >> beam.ParDo(steps.AssignShards(self.options.num_shards), beam.pvalue.AsSingleton(keys))
        | 'Group' >> beam.GroupByKey()
        | 'Write' >> beam.ParDo(steps.WriteShard(self.directory)))
    buckets = (
        read[tags.STATISTICS]
        | 'Bucket' >> beam.GroupByKey()
        | 'Statistics' >> beam.ParDo(steps.MergeStatistics(self.directory)))
    counts = (
        (read[tags.COUNTS], paths | 'Found' >> beam.Map(lambda _: (('made', 'inputs'), 1)))
        | 'Counts' >> beam.Flatten()
        | 'Count' >> beam.CombinePerKey(sum))
    source = read[tags.SOURCE] | 'Source' >> beam.CombineGlobally(_add_sources)
    opcodes = (
        read[tags.OPCODES]
        | 'Opcodes' >> beam.CombinePerKey(sum)
        | 'Frequent' >> beam.combiners.Top.Smallest(manifest_lib.MAX_UNKNOWN_OPCODES,
                                                    key=lambda pair: (-pair[1], pair[0])))
    return (
        patterns.pipeline
        | 'Start' >> beam.Create([None])
        | 'Publish' >> beam.ParDo(
            steps.Publish(self.directory, self.options), beam.pvalue.AsList(shards),
            beam.pvalue.AsList(read[tags.REJECTED]), beam.pvalue.AsList(counts),
            beam.pvalue.AsSingleton(source), beam.pvalue.AsSingleton(opcodes), beam.pvalue.AsList(buckets)))


@contextlib.contextmanager
def _interrupt_kept() -> Iterator[None]:
  """Ctrl-C inside the block ends it by KeyboardInterrupt, also where Beam makes another error of one, or hides it."""
  ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # And nobody else's.
  if not ours or threading.current_thread() is not threading.main_thread():  # There alone signals arrive.
    yield
    return
  seen = []

  def interrupt(number, frame):
    seen.append(number)
    signal.default_int_handler(number, frame)

  signal.signal(signal.SIGINT, interrupt)
  try:
    yield
  except Exception as error:
    if seen:
      raise KeyboardInterrupt from error
    raise
  finally:
    signal.signal(signal.SIGINT, signal.default_int_handler)
  if seen:
    raise KeyboardInterrupt


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
    InputError: input, output or options cannot be used. Nothing is left in `directory` then, if it can be removed.
  """
  beam_lib.check_file_system('--output', directory)
  found = find_inputs(inputs, options.collection, options.hlo_stage)
  if options.num_shards is None:
    options = dataclasses.replace(options, num_shards=-(-max(found.bytes, 1) // _BYTES_PER_SHARD))
  pipeline = beam_lib.pipeline(beam_args, input_bytes=found.bytes)
  request = {'collection': options.collection, 'inputs': sorted(inputs), **options.to_json()}
  output.begin(directory, request=request, overwrite=overwrite)
  try:
    _ = pipeline | 'Patterns' >> beam.Create(found.patterns) | 'Convert' >> Convert(directory, options)
    with _interrupt_kept():
      pipeline.run().wait_until_finish()
  except Exception as error:
    if reported := output.abandon(directory) or output.write_error_in(error):
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
    lines.extend(f'{_number(count, thing)} {what}: {reason}' for reason, count in reasons.items())
  for count, why in ((manifest.deduplicated_configs, 'another of the module has the same features'),
                     (manifest.sampled_out_configs, 'not in the sample of its module')):
    if count:
      lines.append(f'{_number(count, "config")} left out: {why}')
  if manifest.removed_ops or manifest.removed_edges:
    instead = '; the rest of each computation is one op' if manifest.options['rest'] == 'summary' else ''
    lines.append(f'{_number(manifest.removed_ops, "op")} and {_number(manifest.removed_edges, "edge")} removed: more '
                 f'than {_number(manifest.options["keep_hops"], "hop")} from the configurable ops{instead}')
  if without := sum(split.without_configs for split in manifest.splits.values()):
    lines.append(f'{_number(without, "module")} without configs: nothing to train on; to rank such a program, give '
                 'rank its --configs')
  if manifest.unknown_opcodes:
    lines.append(_describe_opcodes(manifest.unknown_opcodes))
  return '\n'.join(lines)


def _number(count: int, thing: str) -> str:
  return f'{count:,} {thing}{"" if count == 1 else "s"}'


def _describe_opcodes(opcodes: Mapping[str, int]) -> str:
  # A name is whatever the file says.
  shown = [f'{name if name.isprintable() and name else ascii(name)} {count:,}'
           for name, count in itertools.islice(opcodes.items(), _OPCODES_SHOWN)]
  if len(opcodes) > len(shown):
    shown.append(f'and {len(opcodes) - len(shown)} more in {manifest_lib.FILE_NAME}')
  return f'{_number(sum(opcodes.values()), "op")} of unknown opcodes (id 0): {", ".join(shown)}'


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
  flags.DEFINE_float('max_rejected_fraction', 1.0, 'With --on_error=skip: fail, with nothing written but the list of '
                     'them, where more than this share of the input files cannot be used.',
                     lower_bound=0.0, upper_bound=1.0, flag_values=flag_values)
  flags.DEFINE_integer('max_array_bytes', npz.DEFAULT_MAX_ARRAY_BYTES, 'Input with a larger array cannot be used.',
                       lower_bound=1, flag_values=flag_values)
  flags.DEFINE_integer('max_configs', None, 'Keep a sample of the configs of modules with more.', lower_bound=1,
                       flag_values=flag_values)
  flags.DEFINE_enum('config_sampling', 'uniform', selection.SAMPLINGS, 'The sample: at random, evenly over the ranks '
                    'of the runtimes, or at random with a preference for the fastest.', flag_values=flag_values)
  flags.DEFINE_enum('dedup_configs', 'off', selection.DEDUPS, 'Keep one of several configs with the same features: the '
                    'first, that with the least runtime, or the first with the mean runtime.', flag_values=flag_values)
  flags.DEFINE_integer('keep_hops', None, 'Layout only: keep of each graph the ops that are at most so many edges, in '
                       'either direction, from a configurable op.', lower_bound=0, flag_values=flag_values)
  flags.DEFINE_enum('rest', None, reduction.RESTS, 'With --keep_hops: drop (the default) leaves the other ops out, '
                    'summary merges those of each computation into one op.', flag_values=flag_values)
  flags.DEFINE_enum('layout_padding', '0', list(map(str, feature_choices.LAYOUT_PADDINGS)), 'Fills the unused ones of '
                    'the node features layout_minor_to_major: 0 as published, -1 to tell "no dimension" from '
                    '"dimension 0".', flag_values=flag_values)
  flags.DEFINE_multi_string('extra_features', None, 'package.module:attribute of node features of your own, a function '
                            'under @feature_choices.node_features. May be given several times.',
                            flag_values=flag_values)
  flags.DEFINE_integer('seed', 0, 'Decides hashed splits, samples, and the order of configs and records.',
                       lower_bound=0, upper_bound=2**32 - 1, flag_values=flag_values)
  flags.DEFINE_bool('overwrite', False, 'Replace a dataset that exists; it is removed at the start.',
                    flag_values=flag_values)
  for name in ('input', 'output', 'collection'):
    flags.mark_flag_as_required(name, flag_values=flag_values)


def _job(flag_values, beam_args: list[str]) -> int:
  options = ConvertOptions(
      collection=flag_values.collection, split=flag_values.split, num_shards=flag_values.num_shards,
      on_error=flag_values.on_error, hlo_stage=flag_values.hlo_stage, keep_hops=flag_values.keep_hops,
      rest=flag_values.rest,
      max_rejected_fraction=flag_values.max_rejected_fraction, max_array_bytes=flag_values.max_array_bytes,
      configs=selection.ConfigSelection(max_configs=flag_values.max_configs, sampling=flag_values.config_sampling,
                                        dedup=flag_values.dedup_configs, seed=flag_values.seed),
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
