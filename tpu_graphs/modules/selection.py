"""Which configs of a module are kept: those that differ, and a sample of them."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from tpu_graphs import errors
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import streams

SAMPLINGS = ('uniform', 'spread', 'fastest_biased')
DEDUPS = ('off', 'first', 'min', 'mean')


@dataclasses.dataclass(frozen=True)
class ConfigSelection:
  """What `select` keeps of the configs of each module. Duplicates are found first, so a sample
  holds none.

  Attributes:
    max_configs: a module with more keeps a sample of so many; None keeps all.
    sampling: how; see `sample`.
    dedup: what becomes of configs with the same features; see `deduplicate`.
    seed: of the samples.
  """

  max_configs: int | None = None
  sampling: str = 'uniform'
  dedup: str = 'off'
  seed: int = 0

  def __post_init__(self):
    if self.max_configs is not None and self.max_configs < 1:
      raise errors.InputError(
        'too few configs', where='max_configs', found=self.max_configs, expected='>= 1'
      )
    for name, known in (('sampling', SAMPLINGS), ('dedup', DEDUPS)):
      if getattr(self, name) not in known:
        raise errors.InputError(
          f'unknown {name}', found=repr(getattr(self, name)), expected=' or '.join(known)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Selected:
  """A module with the configs that are kept.

  Attributes:
    stream: the module.
    deduplicated: number of configs left out because another has the same features.
    sampled_out: number of configs left out by the sample.
  """

  stream: streams.ConfigStream
  deduplicated: int
  sampled_out: int


def select(stream: streams.ConfigStream, selection: ConfigSelection) -> Selected:
  """Keeps of a module's configs what `selection` says. Only duplicates are found by reading
  features.
  """
  distinct = deduplicate(stream, selection.dedup)
  kept = sample(distinct, selection)
  return Selected(
    kept, stream.num_configs - distinct.num_configs, distinct.num_configs - kept.num_configs
  )


def sample(stream: streams.ConfigStream, selection: ConfigSelection) -> streams.ConfigStream:
  """Keeps `max_configs` of a module's configs, decided by their runtimes (tile: over their
  normalizers) alone.

  With ranks 0 for the fastest to C - 1, and the earlier config before another that is as fast:
  - 'uniform': each config is as likely as any other.
  - 'spread': of N configs, number i is that of rank i * (C - 1) // (N - 1): the fastest, the
    slowest, and between them evenly many. One config is the fastest. Nothing is left to chance.
  - 'fastest_biased': drawn one after the other, each in proportion to 1 / (rank + 1) among those
  that are left.

  Modules that are not measured have no ranks: theirs is 'uniform'. Configs without a runtime
  beside others with one count as the slowest. The seed and the `module_id` decide what is drawn.
  """
  total, number = stream.num_configs, selection.max_configs
  if number is None or total <= number:
    return stream
  name = hashlib.blake2b(b'sample ' + stream.graph.module_id.encode(), digest_size=8).digest()
  rng = np.random.default_rng([selection.seed, int.from_bytes(name, 'little')])
  by_rank = np.argsort(_unmeasured_last(stream), kind='stable')
  if selection.sampling == 'uniform' or not stream.is_measured:
    rows = rng.choice(total, number, replace=False)
  elif selection.sampling == 'spread':
    rows = by_rank[np.arange(number) * (total - 1) // max(number - 1, 1)]
  else:
    # Efraimidis, Spirakis: Weighted random sampling with a reservoir, 2006: exponential times, each
    # over its weight.
    times = rng.exponential(size=total) * np.arange(1, total + 1)
    rows = by_rank[np.argsort(times, kind='stable')[:number]]
  return stream.select(np.sort(rows))


def deduplicate(stream: streams.ConfigStream, dedup: str) -> streams.ConfigStream:
  """Keeps one of each set of configs with equal features, which are all read to be compared by
  `digests`.

  - 'off': all are kept, and nothing is read.
  - 'first': the first.
  - 'min': the fastest, by runtime (tile: over its normalizer); of several the first.
  - 'mean': the first, with the mean runtime of all, rounded to whole ns. For tile each runtime
    is scaled to the normalizer of the first before, so it is the mean of runtime / normalizer.

  Configs that are not measured give way to those that are, and do not count in the mean.
  """
  total = stream.num_configs
  if dedup == 'off' or total < 2:
    return stream
  _, group = np.unique(digests(stream), return_inverse=True)
  speed = _unmeasured_last(stream)
  order = np.lexsort(
    (speed if dedup == 'min' else np.isinf(speed), group)
  )  # Stable: the first of equals comes first.
  kept = order[np.unique(group[order], return_index=True)[1]]  # Of each group.
  rows = np.sort(kept)
  distinct = stream.select(rows)
  if dedup != 'mean' or not stream.is_measured:
    return distinct
  measured = np.isfinite(speed)
  runtime, normalizers = (
    stream.config_runtime[measured].astype(np.float64),
    stream.config_runtime_normalizers,
  )
  if normalizers is not None:
    runtime *= normalizers[kept[group]][measured] / normalizers[measured]
  counts = np.bincount(group[measured], minlength=kept.size)
  sums = np.bincount(group[measured], weights=runtime, minlength=kept.size)
  mean = np.maximum(np.rint(sums / np.maximum(counts, 1)), module_lib.MIN_RUNTIME_NS).astype(
    np.int64
  )
  several = counts[group[rows]] > 1
  return dataclasses.replace(
    distinct, config_runtime=np.where(several, mean[group[rows]], distinct.config_runtime)
  )


def digests(stream: streams.ConfigStream) -> np.ndarray:
  """A hash of 128 bits of the features of each config, [C]; equal ones have equal hashes. All
  features are read.
  """
  found = []
  for block in stream.blocks():
    if block.dtype.kind == 'f':
      block = block + np.float32(0)  # -0 equals 0.
    found += [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in block]
  return np.frombuffer(b''.join(found), 'V16')


def _unmeasured_last(stream: streams.ConfigStream) -> np.ndarray:
  """`relative_runtime` of the configs, float64 [C], infinite where not measured."""
  return np.where(stream.config_runtime == module_lib.UNMEASURED, np.inf, stream.relative_runtime)
