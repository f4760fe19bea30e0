"""The options of a conversion."""

from __future__ import annotations

import dataclasses
from typing import Any

from tpu_graphs import errors
from tpu_graphs.dataset import records
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import reduction
from tpu_graphs.modules import selection
from tpu_graphs.sources import dumps


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
  """The options that decide the content of a dataset directory.

  Attributes:
    collection: Name of the collection, such as 'tile:xla'; its first word is the kind of the input.
    split: 'train', 'valid' or 'test' for all modules. None takes the name of the folder that a file
      lies in if that is one of these names, and otherwise a hash of the module's graph: 80 % train,
      10 % valid, 10 % test.
    num_shards: Number of files per split; a split with fewer records has fewer files. None derives
      the number from the size of the input.
    on_error: 'fail' stops at the first input that cannot be used; 'skip' lists it in
      `rejected.jsonl` and continues.
    max_rejected_fraction: Largest share of the input files that may be unusable; the conversion
      fails above it.
    max_array_bytes: Size limit of an array in the input. An input with a larger array is refused
      before the array is allocated; see `npz.stream`.
    configs: The configs of each module that are kept.
    records: How modules become records. Its seed also decides the hashed split and the order of
      the records.
    choices: How the features of ops are made.
    hlo_stage: Stage of the programs that are read from a folder that is an XLA dump; see
      `dumps.find`.
    keep_hops: Layout only: graphs keep the ops that are at most so many edges from a configurable
      op; see `reduction.keep_hops`. The hashed split depends on the whole graph. A module without
      configurable ops stays whole; with None, all modules do.
    rest: Treatment of the other ops with `keep_hops`, one of `reduction.RESTS`; None is the first
      of them.
  """

  collection: str
  split: str | None = None
  num_shards: int | None = None
  on_error: str = 'fail'
  max_rejected_fraction: float = 1.0
  max_array_bytes: int = module_lib.DEFAULT_MAX_ARRAY_BYTES
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
        raise errors.InputError(
          'no graph is reduced', where='--rest', found=self.rest, fix='give --keep_hops as well'
        )
    elif self.kind == 'tile':
      raise errors.InputError(
        'tile modules have no configurable ops',
        where='--keep_hops',
        found=self.collection,
        expected='a collection of kind layout',
        fix='leave the flag out',
      )
    else:
      object.__setattr__(self, 'rest', self.rest or reduction.RESTS[0])
      reduction.check(self.keep_hops, self.rest)
    dumps.check_stage(self.hlo_stage, where='--hlo_stage')
    if self.num_shards is not None and self.num_shards < 1:
      raise errors.InputError(
        'too few shards', where='--num_shards', found=self.num_shards, expected='>= 1'
      )
    if not 0 <= self.max_rejected_fraction <= 1:
      raise errors.InputError(
        'not a share',
        where='--max_rejected_fraction',
        found=self.max_rejected_fraction,
        expected='0 to 1',
      )

  @property
  def kind(self) -> str:
    """Returns 'tile' or 'layout'."""
    return module_lib.kind_of_collection(self.collection)

  def to_json(self) -> dict[str, Any]:
    """Returns the options as the manifest shows them."""
    return {
      'split': self.split,
      'num_shards': self.num_shards,
      'on_error': self.on_error,
      'max_array_bytes': self.max_array_bytes,
      'max_configs': self.configs.max_configs,
      'config_sampling': self.configs.sampling,
      'dedup_configs': self.configs.dedup,
      'max_configs_per_record': self.records.max_configs,
      'max_record_bytes': self.records.max_bytes,
      'seed': self.records.seed,
      'hlo_stage': self.hlo_stage,
      'keep_hops': self.keep_hops,
      'rest': self.rest,
      **self.choices.to_json(),
    }
