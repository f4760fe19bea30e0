"""Selection of the configs of a module that are kept: distinct configs, and a sample of them."""

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
  """Choice of the configs of each module that `select` keeps.

  Duplicates are removed first, so a sample holds none.

  Attributes:
    max_configs: largest number of configs of a module; a module with more keeps a sample of this
      size. None keeps all.
    sampling: the way to draw the sample; see `sample`.
    dedup: the way to merge configs with the same features; see `deduplicate`.
    seed: the seed of the samples.
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
      value = getattr(self, name)
      if value not in known:
        raise errors.InputError(f'unknown {name}', found=repr(value), expected=' or '.join(known))


@dataclasses.dataclass(frozen=True, eq=False)
class Selected:
  """A module with the configs that are kept.

  Attributes:
    stream: the module.
    deduplicated: number of configs left out because another config has the same features.
    sampled_out: number of configs left out by the sample.
  """

  stream: streams.ConfigStream
  deduplicated: int
  sampled_out: int


def select(stream: streams.ConfigStream, selection: ConfigSelection) -> Selected:
  """Keeps the configs of a module that `selection` asks for.

  Features are read only to find duplicates.
  """
  distinct = deduplicate(stream, selection.dedup)
  kept = sample(distinct, selection)
  return Selected(
    kept, stream.num_configs - distinct.num_configs, distinct.num_configs - kept.num_configs
  )


def sample(stream: streams.ConfigStream, selection: ConfigSelection) -> streams.ConfigStream:
  """Keeps `max_configs` of a module's configs; `selection.sampling` says which.

  The choice depends only on the runtimes (for tile, runtime / normalizer), the seed and the
  `module_id`. Configs have ranks, 0 for the fastest to C - 1; of equally fast configs the earlier
  one comes first. With N = `max_configs`:
  - 'uniform': each config is equally likely.
  - 'spread': config i has the rank i * (C - 1) // (N - 1), evenly from the fastest to the slowest;
    N = 1 keeps the fastest. Nothing is random.
  - 'fastest_biased': configs are drawn one after the other, each with a probability in proportion
    to 1 / (rank + 1) among the configs that are left.

  Modules without any runtime are always sampled as 'uniform'. In other modules, configs without a
  runtime count as the slowest.
  """
  total, number = stream.num_configs, selection.max_configs
  if number is None or total <= number:
    return stream
  name = b'sample ' + stream.graph.module_id.encode()
  digest = hashlib.blake2b(name, digest_size=8).digest()
  rng = np.random.default_rng([selection.seed, int.from_bytes(digest, 'little')])
  by_rank = np.argsort(_unmeasured_last(stream), kind='stable')
  if selection.sampling == 'uniform' or not stream.is_measured:
    rows = rng.choice(total, number, replace=False)
  elif selection.sampling == 'spread':
    rows = by_rank[np.arange(number) * (total - 1) // max(number - 1, 1)]
  else:
    # Efraimidis, Spirakis: Weighted random sampling with a reservoir, 2006. Each config has an
    # exponential time divided by its weight, here 1 / (rank + 1), and the earliest are kept.
    times = rng.exponential(size=total) * np.arange(1, total + 1)
    rows = by_rank[np.argsort(times, kind='stable')[:number]]
  return stream.select(np.sort(rows))


def deduplicate(stream: streams.ConfigStream, dedup: str) -> streams.ConfigStream:
  """Keeps one config of each set of configs with equal features.

  All features are read, and compared via `digests`. The value of `dedup` decides which is kept:
  - 'off': all configs are kept, and nothing is read.
  - 'first': the first config.
  - 'min': the fastest config by runtime (for tile, by runtime / normalizer); of equally fast
    configs, the first.
  - 'mean': the first config, with the mean runtime of the set, rounded to whole ns. For tile, each
    runtime is first scaled to the normalizer of the first config, so the result is the mean of
    runtime / normalizer.

  Measured configs come before unmeasured ones, which do not count in the mean.
  """
  total = stream.num_configs
  if dedup == 'off' or total < 2:
    return stream
  _, group = np.unique(digests(stream), return_inverse=True)
  speed = _unmeasured_last(stream)
  priority = speed if dedup == 'min' else np.isinf(speed)
  order = np.lexsort((priority, group))  # The sort is stable: of equal configs, the first leads.
  _, first_of_group = np.unique(group[order], return_index=True)
  kept = order[first_of_group]
  rows = np.sort(kept)
  distinct = stream.select(rows)
  if dedup != 'mean' or not stream.is_measured:
    return distinct
  measured = np.isfinite(speed)
  runtime = stream.config_runtime[measured].astype(np.float64)
  normalizers = stream.config_runtime_normalizers
  if normalizers is not None:
    runtime *= normalizers[kept[group]][measured] / normalizers[measured]
  counts = np.bincount(group[measured], minlength=kept.size)
  sums = np.bincount(group[measured], weights=runtime, minlength=kept.size)
  mean = np.rint(sums / np.maximum(counts, 1))
  mean = np.maximum(mean, module_lib.MIN_RUNTIME_NS).astype(np.int64)
  several = counts[group[rows]] > 1
  mean_runtime = np.where(several, mean[group[rows]], distinct.config_runtime)
  return dataclasses.replace(distinct, config_runtime=mean_runtime)


def digests(stream: streams.ConfigStream) -> np.ndarray:
  """Returns a 128-bit hash of the features of each config, [C]; it reads all features.

  Equal features have equal hashes.
  """
  found = []
  for block in stream.blocks():
    if block.dtype.kind == 'f':
      block = block + np.float32(0)  # The sum turns -0 into 0, so that equal values hash equally.
    found += [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in block]
  return np.frombuffer(b''.join(found), 'V16')


def _unmeasured_last(stream: streams.ConfigStream) -> np.ndarray:
  """Returns `relative_runtime` of the configs, float64 [C], infinite where not measured."""
  return np.where(stream.config_runtime == module_lib.UNMEASURED, np.inf, stream.relative_runtime)
