"""`manifest.json`: the description of a dataset directory.

It is written last, so a directory without it is not a dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import json
from typing import Any

from tpu_graphs import errors
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import module as module_lib

FORMAT_VERSION = 1
FILE_NAME = 'manifest.json'
SCHEMA_NAME = 'schema.pbtxt'
STATISTICS_NAME = 'statistics.json'
REJECTED_NAME = 'rejected.jsonl'
MAX_UNKNOWN_OPCODES = 100


@dataclasses.dataclass(frozen=True)
class Shard:
  """One TFRecord file.

  Attributes:
    name: path below the dataset directory, such as 'train/part-00000-of-00016.tfrecord'.
    records: number of records.
    modules: number of modules whose first record lies in this file.
    measured: number of these modules with any measured config.
    without_configs: number of these modules without any config.
    configs: number of configs over the records.
    bytes: size of the file.
    crc32c: checksum of the file, eight hex digits.
    max_sizes: 'ops', 'edges', 'config_ops', 'configs' -> the largest number in any record.
    total_sizes: the same names -> the sum over the records.
  """

  name: str
  records: int
  modules: int
  measured: int
  configs: int
  bytes: int
  crc32c: str
  max_sizes: Mapping[str, int]
  total_sizes: Mapping[str, int]
  without_configs: int = 0


@dataclasses.dataclass(frozen=True)
class Split:
  """All shards of a split, with the sums of their fields and the maxima of `max_sizes`.

  The fields have the same names as in `Shard`.
  """

  records: int
  modules: int
  measured: int
  configs: int
  bytes: int
  max_sizes: Mapping[str, int]
  total_sizes: Mapping[str, int]
  shards: tuple[Shard, ...]
  without_configs: int = 0

  @classmethod
  def of(cls, shards: Iterable[Shard]) -> Split:
    """Returns the split that consists of `shards`, at least one."""
    shards = tuple(sorted(shards, key=lambda shard: shard.name))
    sums = {
      name: sum(getattr(shard, name) for shard in shards)
      for name in ('records', 'modules', 'measured', 'without_configs', 'configs', 'bytes')
    }
    sizes = shards[0].max_sizes
    return cls(
      **sums,
      shards=shards,
      max_sizes={name: max(shard.max_sizes[name] for shard in shards) for name in sizes},
      total_sizes={name: sum(shard.total_sizes[name] for shard in shards) for name in sizes},
    )


@dataclasses.dataclass(frozen=True)
class Manifest:
  """Content of `manifest.json`.

  Attributes:
    collection: name of the collection, such as 'tile:xla'.
    kind: 'tile' or 'layout'.
    options: the options of the conversion that decide its result; see also `choices`.
    splits: the splits that hold any record.
    rejected_inputs: reason -> number of inputs that could not be used; each input is a line of
      `rejected.jsonl`.
    skipped_modules: reason -> number of modules that the selection rules of their file format
      leave out.
    dropped_runs: reason -> number of runs that are not measurements and so are not among the
      configs.
    source: number of input files, their bytes, and a fingerprint of their contents that does not
      depend on their order.
    unknown_opcodes: opcodes that `features.opcodes` lacks -> number of ops, most frequent first,
      at most `MAX_UNKNOWN_OPCODES`.
    deduplicated_configs: number of configs left out because another config of the module has the
      same features.
    sampled_out_configs: number of configs left out by sampling.
    removed_ops: number of ops that the reduction of graphs has left out, less the ops that stand
      for others.
    removed_edges: number of edges that the reduction has left out, less the edges that stand for
      others.
    format_version: version of the format of this file and the directory. Fields that were added
      later and are missing have their defaults.
  """

  collection: str
  kind: str
  options: Mapping[str, Any]
  splits: Mapping[str, Split]
  rejected_inputs: Mapping[str, int]
  skipped_modules: Mapping[str, int]
  dropped_runs: Mapping[str, int]
  source: Mapping[str, Any]
  unknown_opcodes: Mapping[str, int] = dataclasses.field(default_factory=dict)
  deduplicated_configs: int = 0
  sampled_out_configs: int = 0
  removed_ops: int = 0
  removed_edges: int = 0
  format_version: int = FORMAT_VERSION

  @property
  def choices(self) -> feature_choices.FeatureChoices:
    """The choices with which the features of ops were made."""
    return feature_choices.FeatureChoices.from_json(self.options)

  def dumps(self) -> str:
    """Returns the content of `manifest.json`."""
    return json.dumps(dataclasses.asdict(self), indent=1) + '\n'


def loads(text: str, *, path: str) -> Manifest:
  """Parses the content of `manifest.json`; errors name `path`.

  Raises:
    InputError: the content is damaged or of another format version.
  """
  with errors.in_file(path):
    try:
      content = json.loads(text)
      version = content.get('format_version')
      if version != FORMAT_VERSION:
        raise errors.InputError(
          'dataset of another format',
          where='format_version',
          found=version,
          expected=FORMAT_VERSION,
          fix='convert the data again with this version',
        )
      splits = {}
      for name, fields in content.pop('splits').items():
        shards = tuple(Shard(**shard) for shard in fields['shards'])
        splits[name] = Split(**{**fields, 'shards': shards})
      manifest = Manifest(**content, splits=splits)
      if manifest.kind != module_lib.kind_of_collection(manifest.collection):
        raise ValueError(f'kind {manifest.kind} of collection {manifest.collection}')
      _ = manifest.choices  # Refuses options that are impossible.
      for name, split in splits.items():
        if split != Split.of(split.shards):
          raise ValueError(f'split {name} is not the sum of its shards')
      return manifest
    except errors.InputError:
      raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
      raise errors.InputError(
        'damaged manifest', found=error, fix='convert the data again'
      ) from error
