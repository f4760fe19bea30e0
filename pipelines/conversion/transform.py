"""The conversion as a PTransform: the graph of its steps."""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses

import apache_beam as beam
from apache_beam.io import fileio
import numpy as np

from pipelines.conversion import options as options_lib
from pipelines.conversion import steps
from tpu_graphs import errors
from tpu_graphs.dataset import manifest as manifest_lib


def _add_sources(sources: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
  total_files = total_size = total_digest = 0
  for files, size, digest in sources:
    total_files += files
    total_size += size
    # Digests are added, since a sum does not depend on the order of the files.
    total_digest = (total_digest + digest) % 2**64
  return total_files, total_size, total_digest


def _keys_by_split(keys: Iterable[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
  return {split: np.sort(np.array(list(values), np.uint64)) for split, values in keys}


@dataclasses.dataclass(eq=False)
class Convert(beam.PTransform):
  """The conversion: PCollection of file patterns -> PCollection of the one `manifest.Manifest`.

  It writes the directory, which `output.begin` must have made ready.

  Attributes:
    directory: Directory to write to.
    options: Options that decide the content. `num_shards` must be given, since the size of the
      input is not known here.
  """

  directory: str
  options: options_lib.ConvertOptions

  def __post_init__(self):
    if self.options.num_shards is None:
      raise errors.InputError('number of shards missing', where='num_shards', expected='>= 1')

  def expand(self, patterns: beam.PCollection) -> beam.PCollection:
    paths = (
      patterns
      | 'Match' >> fileio.MatchAll()
      | 'Path' >> beam.Map(lambda metadata: metadata.path.removeprefix('./'))
      | 'Distinct' >> beam.Distinct()
    )

    tags = steps.ReadModules
    read_modules = beam.ParDo(steps.ReadModules(self.directory, self.options)).with_outputs(
      tags.REJECTED, tags.STATISTICS, tags.COUNTS, tags.SOURCE, tags.OPCODES, main='items'
    )
    read = paths | 'Spread' >> beam.Reshuffle() | 'Read' >> read_modules

    keys = (
      read.items
      | 'Key' >> beam.Map(lambda item: (item.split, item.key))
      | 'Keys' >> beam.GroupByKey()
      | 'Order' >> beam.CombineGlobally(beam.combiners.ToListCombineFn())
      | 'Index' >> beam.Map(_keys_by_split)
    )
    assign_shards = beam.ParDo(
      steps.AssignShards(self.options.num_shards), beam.pvalue.AsSingleton(keys)
    )
    shards = (
      read.items
      | 'Assign' >> assign_shards
      | 'Group' >> beam.GroupByKey()
      | 'Write' >> beam.ParDo(steps.WriteShard(self.directory))
    )

    buckets = (
      read[tags.STATISTICS]
      | 'Bucket' >> beam.GroupByKey()
      | 'Statistics' >> beam.ParDo(steps.MergeStatistics(self.directory))
    )

    found = paths | 'Found' >> beam.Map(lambda _: (('made', 'inputs'), 1))
    counts = (
      (read[tags.COUNTS], found) | 'Counts' >> beam.Flatten() | 'Count' >> beam.CombinePerKey(sum)
    )

    source = read[tags.SOURCE] | 'Source' >> beam.CombineGlobally(_add_sources)

    most_frequent = beam.combiners.Top.Smallest(
      manifest_lib.MAX_UNKNOWN_OPCODES, key=lambda pair: (-pair[1], pair[0])
    )
    opcodes = (
      read[tags.OPCODES] | 'Opcodes' >> beam.CombinePerKey(sum) | 'Frequent' >> most_frequent
    )

    publish = beam.ParDo(
      steps.Publish(self.directory, self.options),
      beam.pvalue.AsList(shards),
      beam.pvalue.AsList(read[tags.REJECTED]),
      beam.pvalue.AsList(counts),
      beam.pvalue.AsSingleton(source),
      beam.pvalue.AsSingleton(opcodes),
      beam.pvalue.AsList(buckets),
    )
    return patterns.pipeline | 'Start' >> beam.Create([None]) | 'Publish' >> publish
