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
  """What decides the content of a dataset directory.

  Attributes:
    collection: such as 'tile:xla'; its first word is the kind of the input.
    split: 'train', 'valid' or 'test' for all modules; None takes the folder that a file lies in
      if it has one of these names, and else a hash of the module's graph: 80 % train, 10 %
      valid, 10 % test.
    num_shards: files per split, fewer where a split has fewer records; None leaves it to the
      size of the input.
    on_error: 'fail' stops at the first input that cannot be used, 'skip' lists it in
      `rejected.jsonl` and goes on.
    max_rejected_fraction: the conversion fails where more than this share of the input files
      cannot be used.
    max_array_bytes: inputs with a larger array are refused before it is allocated; see
      `npz.stream`.
    configs: which configs of each module are kept.
    records: how modules become records. Its seed also decides the hashed split and the order of
      the records.
    choices: how the features of ops are made.
    hlo_stage: which programs of a folder that is an XLA dump; see `dumps.find`.
    keep_hops: layout only: graphs are reduced to what is so many edges from a configurable op; see
      `reduction.keep_hops`. The hashed split goes by the whole graph. A module without
      configurable ops stays whole, as do all for None.
    rest: with `keep_hops`, what becomes of the other ops, one of `reduction.RESTS`; None is the
      first of them.
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
    else:
      if self.kind == 'tile':
        raise errors.InputError(
          'tile modules have no configurable ops',
          where='--keep_hops',
          found=self.collection,
          expected='a collection of kind layout',
          fix='leave the flag out',
        )
      object.__setattr__(self, 'rest', self.rest or reduction.RESTS[0])
      reduction.check(self.keep_hops, self.rest)
    dumps.check_stage(self.hlo_stage, where='--hlo_stage')
    if self.num_shards is not None and self.num_shards < 1:
      raise errors.InputError(
        'too few shards', where='--num_shards', found=self.num_shards, expected='>= 1'
      )
    if not 0 <= self.max_rejected_fraction <= 1:
      raise errors.InputError(
        'no share',
        where='--max_rejected_fraction',
        found=self.max_rejected_fraction,
        expected='0 to 1',
      )

  @property
  def kind(self) -> str:
    return module_lib.kind_of_collection(self.collection)

  def to_json(self) -> dict[str, Any]:
    """The options as the manifest shows them."""
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
