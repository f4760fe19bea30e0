"""The conversion as a PTransform: the steps and how they are joined."""

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
  files = size = digest = 0
  for source in sources:
    files, size, digest = files + source[0], size + source[1], (digest + source[2]) % 2**64
  return files, size, digest


def _keys_by_split(keys: Iterable[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
  return {split: np.sort(np.array(list(values), np.uint64)) for split, values in keys}


@dataclasses.dataclass(eq=False)
class Convert(beam.PTransform):
  """PCollection of file patterns -> PCollection of the one `manifest.Manifest`, having written
  the directory.

  The directory must have been made ready by `output.begin`.

  Attributes:
    directory: where to write.
    options: see `ConvertOptions`; `num_shards` must be given, since the size of the input is not
      known here.
  """

  directory: str
  options: options_lib.ConvertOptions

  def __post_init__(self):
    if self.options.num_shards is None:
      raise errors.InputError('number of shards missing', where='num_shards', expected='>= 1')

  def expand(self, patterns: beam.PCollection) -> beam.PCollection:
    tags = steps.ReadModules
    paths = (
      patterns
      | 'Match' >> fileio.MatchAll()
      | 'Path' >> beam.Map(lambda metadata: metadata.path.removeprefix('./'))
      | 'Distinct' >> beam.Distinct()
    )
    read = (
      paths
      | 'Spread' >> beam.Reshuffle()
      | 'Read'
      >> beam.ParDo(steps.ReadModules(self.directory, self.options)).with_outputs(
        tags.REJECTED, tags.STATISTICS, tags.COUNTS, tags.SOURCE, tags.OPCODES, main='items'
      )
    )
    keys = (
      read.items
      | 'Key' >> beam.Map(lambda item: (item.split, item.key))
      | 'Keys' >> beam.GroupByKey()
      | 'Order' >> beam.CombineGlobally(beam.combiners.ToListCombineFn())
      | 'Index' >> beam.Map(_keys_by_split)
    )
    shards = (
      read.items
      | 'Assign'
      >> beam.ParDo(steps.AssignShards(self.options.num_shards), beam.pvalue.AsSingleton(keys))
      | 'Group' >> beam.GroupByKey()
      | 'Write' >> beam.ParDo(steps.WriteShard(self.directory))
    )
    buckets = (
      read[tags.STATISTICS]
      | 'Bucket' >> beam.GroupByKey()
      | 'Statistics' >> beam.ParDo(steps.MergeStatistics(self.directory))
    )
    counts = (
      (read[tags.COUNTS], paths | 'Found' >> beam.Map(lambda _: (('made', 'inputs'), 1)))
      | 'Counts' >> beam.Flatten()
      | 'Count' >> beam.CombinePerKey(sum)
    )
    source = read[tags.SOURCE] | 'Source' >> beam.CombineGlobally(_add_sources)
    opcodes = (
      read[tags.OPCODES]
      | 'Opcodes' >> beam.CombinePerKey(sum)
      | 'Frequent'
      >> beam.combiners.Top.Smallest(
        manifest_lib.MAX_UNKNOWN_OPCODES, key=lambda pair: (-pair[1], pair[0])
      )
    )
    return (
      patterns.pipeline
      | 'Start' >> beam.Create([None])
      | 'Publish'
      >> beam.ParDo(
        steps.Publish(self.directory, self.options),
        beam.pvalue.AsList(shards),
        beam.pvalue.AsList(read[tags.REJECTED]),
        beam.pvalue.AsList(counts),
        beam.pvalue.AsSingleton(source),
        beam.pvalue.AsSingleton(opcodes),
        beam.pvalue.AsList(buckets),
      )
    )
