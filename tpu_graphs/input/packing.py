"""Which records make up which batch of an epoch, decided by their sizes alone.

The sizes of all records of a split are read once. From them, the seed and the number of the
epoch follows everything
else, for all input workers alike: the order in which records are read and shuffled, the packs,
their shapes, and how many batches there are. So each worker knows that the others make as many
batches as it does, and of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import math
import os

import numpy as np
import tensorflow as tf

from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.input import decoding
from tpu_graphs.input import loading
from tpu_graphs.modules import module as module_lib

CYCLE = 16  # Shards that are read by turns.
OVERSIZE = ('fail', 'skip', 'segment')
_OPS = 1  # Its place among the fields of `Budget`.
_POOL_BYTES = 12 << 20  # Of the records that are held to be shuffled.
_MAX_ROUNDS = 8  # That a record may stay in the pool.
_PASS_BYTES = 1 << 20  # Of the records that are parsed for their sizes at a time.
_READ_AHEAD_BYTES = 1 << 18  # Of a record; larger ones are not read ahead.
_MAX_COMPONENTS = 1.5  # Modules in a pack, over `batch_size`.
_MAX_SLACK = 1.5  # Edges and configurable ops in a pack, over their mean times `batch_size`.
_MULTIPLE = 8  # Static sizes are multiples of this, as devices like them.
_MAX_CANDIDATES = 200
_NAMED = 3  # Of the modules that are too large, those that are named.


@dataclasses.dataclass(frozen=True, eq=False)
class RecordSizes:
  """Of each record of a split, in the order of the shards.

  Attributes:
    shard: int64 [R], number of its shard.
    position: int64 [R], in the shard.
    sizes: int64 [R, 3], ops, edges and configurable ops.
    configs: int64 [R].
    measured: bool [R], whether any config is.
  """

  shard: np.ndarray
  position: np.ndarray
  sizes: np.ndarray
  configs: np.ndarray
  measured: np.ndarray


def by_turns(
  files: tf.data.Dataset, read: Callable[..., tf.data.Dataset], shards: manifest_lib.Split
) -> tf.data.Dataset:
  """What `read` makes of `CYCLE` of the files at a time, an element of each in turn.

  Where the records of `shards` are small, each file has a reader of its own, which reads some of
  them ahead.
  """
  is_small = shards.bytes <= _READ_AHEAD_BYTES * shards.records
  parallel = {'num_parallel_calls': tf.data.AUTOTUNE, 'deterministic': True} if is_small else {}
  return files.interleave(read, cycle_length=CYCLE, **parallel)


@functools.lru_cache(maxsize=4)
def read_sizes(directory: directory_lib.DatasetDirectory, split: str) -> RecordSizes:
  """Reads the sizes of all records of a split.

  Raises:
    InputError: the split is missing, or a shard is damaged or does not hold as many records as
      the manifest says.
  """
  size = tf.io.FixedLenFeature([], tf.int64)
  wanted = {
    'nodes/op.#size': size,
    'edges/operand.#size': size,
    'context/config_runtime': tf.io.RaggedFeature(tf.int64, row_splits_dtype=tf.int64),
  }
  if directory.kind == 'layout':
    wanted['nodes/config_op.#size'] = size

  def sizes(shard: tf.Tensor, records: tf.Tensor) -> tf.Tensor:
    parsed = tf.io.parse_example(records, wanted)
    runtime = parsed['context/config_runtime']
    measured = tf.reduce_any(runtime != module_lib.UNMEASURED, axis=1)
    ops = parsed['nodes/op.#size']
    return tf.stack(
      [
        tf.fill(tf.shape(ops), shard),
        ops,
        parsed['edges/operand.#size'],
        parsed.get('nodes/config_op.#size', tf.zeros_like(ops)),
        runtime.row_lengths(),
        tf.cast(measured, tf.int64),
      ],
      axis=1,
    )

  found = [
    np.zeros((0, 6), np.int64),
    *(rows.numpy() for rows in _over_records(directory, split, sizes)),
  ]
  rows = np.concatenate(found)
  rows = rows[np.argsort(rows[:, 0], kind='stable')]
  shards = directory.split(split).shards
  counts = np.bincount(rows[:, 0], minlength=len(shards))
  for shard, count in zip(shards, counts.tolist(), strict=True):
    if count != shard.records:
      raise errors.InputError(
        'shard of wrong length',
        path=os.path.join(directory.path, shard.name),
        found=f'{count} records',
        expected=f'{shard.records} of {manifest_lib.FILE_NAME}',
        fix='copy or convert the dataset again',
      )
  position = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
  return RecordSizes(rows[:, 0], position, rows[:, 1:4], rows[:, 4], rows[:, 5] > 0)


def _over_records(directory: directory_lib.DatasetDirectory, split: str, function) -> Iterator:
  """What `function` makes of (number of the shard, some of its records, string [b]), each shard
  in its order.
  """
  shards = directory.split(split)
  block = max(1, min(256, _PASS_BYTES * shards.records // max(shards.bytes, 1)))
  paths = [os.path.join(directory.path, shard.name) for shard in shards.shards]
  read = by_turns(
    tf.data.Dataset.from_tensor_slices(paths).enumerate(),
    lambda i, path: (
      tf.data.TFRecordDataset(path).batch(block).map(lambda records: function(i, records))
    ),
    shards,
  )
  with directory_lib.damage_explained(directory):
    yield from read


@dataclasses.dataclass(frozen=True)
class Budget:
  """Sizes that a pack is padded to, padding included.

  Attributes:
    components: modules, and one for the padding.
    ops: ops.
    edges: edges between ops.
    config_ops: configurable ops.
  """

  components: int
  ops: int
  edges: int
  config_ops: int


def next_fit(sizes: tf.Tensor, limits: tf.Tensor, block_ends: tf.Tensor) -> tf.Tensor:
  """Puts items, in their order, into packs: a pack ends where the next item would exceed a limit.

  Args:
    sizes: int64 [I, D].
    limits: int64 [D] of the sums over a pack; an item that is larger makes a pack alone.
    block_ends: int64 [I], end of the range of items that each may share a pack with.

  Returns:
    bool [I], whether a pack begins there.
  """
  number = sizes.shape[0]
  sums = tf.transpose(tf.pad(tf.cumsum(sizes), [[1, 0], [0, 0]]))  # [D, I + 1]
  fitting = (
    tf.searchsorted(sums, sums[:, :-1] + limits[:, tf.newaxis], side='right', out_type=tf.int64) - 1
  )
  each = tf.range(number, dtype=tf.int64)
  following = tf.maximum(tf.minimum(tf.reduce_min(fitting, 0), block_ends), each + 1)
  # The starts of packs are those that are reached from the first by steps to the following. With as
  # many steps at a time as were found starts before, that takes a logarithmic number of rounds.
  following = tf.concat([following, [number]], 0)
  starts = tf.concat([[True], block_ends[1:] != block_ends[:-1], [False]], 0)[: number + 1]
  for _ in range(math.ceil(math.log2(number + 1))):
    reached = tf.math.unsorted_segment_max(tf.cast(starts, tf.int32), following, number + 1)
    starts |= reached > 0
    following = tf.gather(following, following)
  return starts[:number]


def least_padding(sizes: np.ndarray, number: int) -> list[int]:
  """At most `number` static sizes, ascending, for `sizes`, int64 [P], each padded to the
  smallest that fits: those with the least padding in all.
  """
  candidates, counts = np.unique(-(-sizes // _MULTIPLE) * _MULTIPLE, return_counts=True)
  if candidates.size > _MAX_CANDIDATES:  # Of many, some are left out evenly, but never the last.
    kept = np.unique(np.linspace(candidates.size - 1, 0, _MAX_CANDIDATES).astype(int))
    counts = np.add.reduceat(counts, np.concatenate([[0], kept[:-1] + 1]))
    candidates = candidates[kept]
  upto = np.concatenate([[0], np.cumsum(counts)])
  # cost[j]: of all sizes below j with the rungs so far, the last of which is candidate j - 1.
  cost = np.where(np.arange(candidates.size + 1) > 0, np.inf, 0.0)
  choices = []
  padded = (
    upto[np.newaxis, 1:] - upto[:-1, np.newaxis]
  ) * candidates  # [i, j]: candidates i to j padded to j.
  padded = np.where(
    np.arange(candidates.size)[:, np.newaxis] <= np.arange(candidates.size), padded, np.inf
  )
  for _ in range(min(number, candidates.size)):
    whole = cost[:-1, np.newaxis] + padded
    choices.append(np.argmin(whole, 0))
    cost = np.concatenate([[np.inf], np.min(whole, 0)])
  rungs, last = [], candidates.size - 1
  for choice in reversed(choices):
    rungs.append(int(candidates[last]))
    last = int(choice[last]) - 1
  return rungs[::-1]


@dataclasses.dataclass(frozen=True)
class BatchOptions:
  """What batches are made of.

  Attributes:
    batch_size: modules of a pack, on average: it takes about so many ops as this number of
      modules of mean size.
    configs_per_module: K.
    config_sampling: how K configs are drawn of a record, see `decoding.sample_configs`. Of those
      that are not measured any are taken only where the others are fewer than K.
    shapes: None for packs of any size; n for at most n static shapes, each pack padded to the
      smallest that fits it.
    max_ops: the most ops of a pack; None for no limit.
    oversize: what becomes of a record with more. 'fail' refuses it, 'skip' leaves it out, and
      'segment' keeps a range of `max_ops` ops that is drawn anew each epoch, with the edges and
      configurable ops inside and the runtimes of
      the whole: https://arxiv.org/abs/2305.12322.
    seed: of the order and of samples.
  """

  batch_size: int = 8
  configs_per_module: int = 16
  config_sampling: str = 'uniform'
  shapes: int | None = None
  max_ops: int | None = None
  oversize: str = 'fail'
  seed: int = 0

  def __post_init__(self):
    for name in ('batch_size', 'configs_per_module', 'shapes', 'max_ops'):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise errors.InputError('number too small', where=name, found=value, expected='>= 1')
    for name, known in (('config_sampling', decoding.CONFIG_SAMPLINGS), ('oversize', OVERSIZE)):
      if getattr(self, name) not in known:
        raise errors.InputError(
          f'unknown {name}', found=repr(getattr(self, name)), expected=' or '.join(known)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class EpochPlan:
  """What one input reads in an epoch. Items are records or, where configs come in chunks, chunks
  of them.

  Attributes:
    files: string [F], the shards in the order in which they are read.
    items: int64 [I], numbers of the items in the order of packs.
    rounds: int64 [R], the round in which each record leaves the pool, in the order in which they
      are read.
    places: int64 [I], of the records of items among those that leave in the same round.
    round_ends: int64 [W + 1], number of items up to the end of each round and of an empty one
      after the last.
    pack_starts: int64 [number of packs + 1], number of items before each pack; packs of padding
      are at the end.
    shapes: int64 [G], index of the budget of each global batch.
  """

  files: tf.Tensor
  items: tf.Tensor
  rounds: tf.Tensor
  places: tf.Tensor
  round_ends: tf.Tensor
  pack_starts: tf.Tensor
  shapes: tf.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class _Packed:
  """An epoch of all inputs, one after the other: F shards, R records, I items, W rounds, P
  packs, G global batches.

  Attributes:
    files: int64 [F], in the order in which they are read.
    items, places: int64 [I]; see `EpochPlan`.
    rounds: int64 [R], as in `EpochPlan`, but counted over all inputs.
    round_ends: int64 [W], number of items up to the end of each round.
    starts: int64 [P], number of items before each pack.
    inputs: int64 [P], of each pack.
    totals: int64 [P, 4], sizes of each pack.
    groups: int64 [G, 4], the largest sizes of a pack in each global batch.
  """

  files: tf.Tensor
  items: tf.Tensor
  rounds: tf.Tensor
  places: tf.Tensor
  round_ends: tf.Tensor
  starts: tf.Tensor
  inputs: tf.Tensor
  totals: tf.Tensor
  groups: tf.Tensor


class Plan:
  """How the records of a split become batches.

  Attributes:
    directory: the dataset directory.
    split: 'train', 'valid' or 'test'.
    options: as given.
    packs, replicas, num_inputs, chunked: as given; see `batching.batches`.
    block: number of records that are read in a round.
    max_rounds: number of rounds that a record may stay in the pool, that of its block included.
    first_config: int64 [I], of each item; 0 where configs are sampled.
    budgets: sizes to pad a pack to, ascending; without `options.shapes` one, of which the
      components only count.
    unmeasured: number of records left out because none of their configs is measured.
    oversize: (module id, ops) of the modules that are larger than `options.max_ops`, largest first.
  """

  def __init__(
    self,
    directory: directory_lib.DatasetDirectory,
    split: str,
    options: BatchOptions,
    *,
    packs: int = 1,
    replicas: int = 1,
    num_inputs: int = 1,
    chunked: bool = False,
  ):
    """Plans batches. The sizes of all records are read for that, once for each `directory` and
    split.

    Raises:
      InputError: the split is missing, damaged, has nothing to learn from, or fewer shards than
        there are inputs; or `options` do not allow for a module's size.
    """
    for name, value in (('packs', packs), ('replicas', replicas), ('num_inputs', num_inputs)):
      if value < 1:
        raise errors.InputError('number too small', where=name, found=value, expected='>= 1')
    if chunked and options.oversize == 'segment':
      raise errors.InputError(
        'configs of a whole module wanted',
        where='oversize',
        found="'segment'",
        expected='fail or skip',
      )
    shards = directory.split(split)
    if len(shards.shards) < num_inputs:
      raise errors.InputError(
        'fewer shards than inputs',
        path=os.path.join(directory.path, split),
        found=f'{len(shards.shards)} shards for {num_inputs} inputs',
        expected='a shard for each',
        fix=f'convert with --num_shards={num_inputs} or more',
      )
    self.directory, self.split, self.options = directory, split, options
    self.packs, self.replicas, self.num_inputs, self.chunked = packs, replicas, num_inputs, chunked
    pool = max(1, _POOL_BYTES * shards.records // max(shards.bytes, 1))
    if pool >= shards.records and not chunked:
      self.block, self.max_rounds = shards.records, 1
    else:
      self.block = -(-pool // _MAX_ROUNDS)
      self.max_rounds = 1 if chunked else -(-pool // self.block)
    found = read_sizes(directory, split)
    kept = np.ones(found.configs.size, bool) if chunked else found.measured
    self.unmeasured = int((~kept).sum())
    sizes, kept, self.oversize = _limited(directory, split, options, found.sizes, kept)
    chunks = -(-found.configs // options.configs_per_module) if chunked else 1
    self._num_items = np.where(kept, chunks, 0)  # Of each record.
    record = np.repeat(np.arange(kept.size), self._num_items)  # Of each item.
    if not record.size:
      raise errors.InputError(
        'nothing to score' if chunked else 'nothing to learn from',
        path=directory.path,
        where=split,
        found=f'{self.unmeasured} of {kept.size} records without runtimes, {len(self.oversize)} modules too large',
        expected='records with configs' if chunked else 'measured modules',
        fix='raise --max_ops' if self.oversize else 'choose or convert another split',
      )
    self._first_item = np.cumsum(self._num_items) - self._num_items
    self.first_config = (
      np.arange(record.size) - self._first_item[record]
    ) * options.configs_per_module
    self._sizes = np.concatenate([np.ones((record.size, 1), np.int64), sizes[record]], axis=1)
    self._arrange(found, len(shards.shards))
    self._learn_budgets()

  def _arrange(self, found: RecordSizes, num_files: int) -> None:
    """Sets what is the same in all epochs. Everything is in the order of inputs."""
    self._paths = [
      os.path.join(self.directory.path, shard.name)
      for shard in self.directory.split(self.split).shards
    ]
    self._input_of_file = np.arange(num_files) % self.num_inputs
    self._shard, self._position = found.shard, found.position
    inputs = np.arange(self.num_inputs)
    of_record = self._input_of_file[found.shard]
    records = np.bincount(of_record, minlength=self.num_inputs)
    items = np.bincount(of_record, self._num_items, self.num_inputs).astype(np.int64)
    self._files_per_input = np.bincount(self._input_of_file, minlength=self.num_inputs)
    self._item_ends = np.concatenate([[0], np.cumsum(items)])
    self._input_of_item = np.repeat(inputs, items)
    place = np.arange(records.sum()) - np.repeat(
      np.cumsum(records) - records, records
    )  # In what the input reads.
    rounds = -(-records // self.block)
    self._record_ends, self._round_ends = (
      np.concatenate([[0], np.cumsum(numbers)]) for numbers in (records, rounds)
    )
    self._first_round = place // self.block + np.repeat(self._round_ends[:-1], records)
    self._last_round = np.repeat(self._round_ends[1:] - 1, records)

  def _learn_budgets(self) -> None:
    """Sets the limits of a pack and the shapes that they are padded to, by the packs of epoch 0."""
    options, means, largest = self.options, self._sizes.mean(axis=0), self._sizes.max(axis=0)
    ops = math.ceil(options.batch_size * means[_OPS])
    if options.shapes == 1:
      ops = max(ops, largest[_OPS])  # There is room anyway.
    ops = min(ops, options.max_ops or ops)
    slack = np.ceil(_MAX_SLACK * options.batch_size * means).astype(np.int64)
    self._limits = np.maximum(slack, largest)
    self._limits[_OPS] = ops
    packed = self._pack(tf.constant(0, tf.int64))
    totals, groups = packed.totals.numpy(), packed.groups.numpy()
    # Other epochs keep to the sizes of this one.
    shared = totals[totals[:, _OPS] <= ops]
    self._limits = shared.max(axis=0) if shared.size else np.ones_like(self._limits)
    room = np.array([1, 1, 0, 0])  # For padding.
    rungs = least_padding(groups[:, _OPS] + 1, options.shapes or 1)
    budgets = np.array([groups[groups[:, _OPS] < rung].max(axis=0) for rung in rungs]) + room
    budgets = -(-budgets // _MULTIPLE) * _MULTIPLE
    budgets[:, 0] = totals[:, 0].max() + 1
    self.budgets = tuple(Budget(*budget) for budget in budgets.tolist())

  def _order(self, epoch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """The files as they are read; the round of each record, as they are read; the records as
    they are packed, and the place of each among those of its round.
    """

    def random(number: int, purpose: int, below: int = 1 << 31) -> tf.Tensor:
      if self.chunked:
        return tf.range(number, dtype=tf.int64)
      seed = loading.mix(self.options.seed, epoch, purpose)
      return tf.random.stateless_uniform([number], seed, maxval=below, dtype=tf.int64)

    files = tf.argsort(
      (self._input_of_file << 31) + random(self._input_of_file.size, 0), stable=True
    )
    firsts = np.cumsum(self._files_per_input) - self._files_per_input
    rank = (
      tf.cast(tf.math.invert_permutation(files), tf.int64) - firsts[self._input_of_file]
    )  # In its input.
    # Some files are read by turns, a record of each, then the next ones.
    rank = tf.gather(rank, self._shard)
    turn = self._input_of_file[self._shard] * self._input_of_file.size + rank // CYCLE
    turn = turn * (self._position.max() + 1) + self._position
    read = tf.argsort(turn * CYCLE + rank % CYCLE)
    rounds = tf.constant(self._first_round)
    if self.max_rounds > 1:
      rounds = tf.minimum(rounds + random(rounds.shape[0], 2, self.max_rounds), self._last_round)
    leaving = tf.math.invert_permutation(
      tf.argsort(rounds, stable=True)
    )  # As they are read, but round by round.
    shuffled = tf.argsort(rounds * (1 << 31) + random(rounds.shape[0], 1), stable=True)
    ordered = tf.gather(rounds, shuffled)
    places = tf.cast(tf.gather(leaving, shuffled), tf.int64) - tf.searchsorted(
      ordered, ordered, out_type=tf.int64
    )
    return files, rounds, tf.gather(read, shuffled), places

  def _pack(self, epoch: tf.Tensor) -> _Packed:
    files, rounds, records, places = self._order(epoch)
    numbers = tf.gather(self._num_items, records)
    ends = tf.cumsum(numbers)
    first = tf.gather(self._first_item, records) - (ends - numbers)
    items = tf.repeat(first, numbers) + tf.range(len(self._sizes), dtype=tf.int64)
    sizes = tf.ensure_shape(tf.gather(self._sizes, items), self._sizes.shape)
    is_start = next_fit(
      sizes, tf.constant(self._limits), tf.constant(self._item_ends[1:][self._input_of_item])
    )
    starts = tf.where(is_start)[:, 0]
    totals = tf.math.segment_sum(sizes, tf.cumsum(tf.cast(is_start, tf.int64)) - 1)
    inputs = tf.gather(self._input_of_item, starts)
    packs = tf.math.bincount(tf.cast(inputs, tf.int32), minlength=self.num_inputs, dtype=tf.int64)
    number = tf.range(tf.shape(starts, tf.int64)[0]) - tf.gather(
      tf.cumsum(packs, exclusive=True), inputs
    )
    group = number // (self.packs * self.replicas)
    left = tf.math.bincount(
      tf.cast(rounds, tf.int32), minlength=self._round_ends[-1], dtype=tf.int64
    )  # In each round.
    return _Packed(
      files=files,
      items=items,
      rounds=rounds,
      places=tf.repeat(places, numbers),
      round_ends=tf.gather(tf.pad(ends, [[1, 0]]), tf.cumsum(left)),
      starts=starts,
      inputs=inputs,
      totals=totals,
      groups=tf.math.unsorted_segment_max(totals, group, tf.reduce_max(group) + 1),
    )

  def _shapes(self, groups: tf.Tensor) -> tf.Tensor:
    """The smallest budget that each pack of a group fits into, int64 [G]; `groups` as in
    `_Packed`.
    """
    room = np.array([dataclasses.astuple(budget) for budget in self.budgets]) - np.array(
      [1, 1, 0, 0]
    )
    return tf.argmax(tf.reduce_all(groups[:, tf.newaxis] <= room, axis=2), axis=1)

  def epoch(self, epoch: tf.Tensor, input_index: int) -> EpochPlan:
    """The plan of an epoch, int64 scalar, for one input; eagerly or in a graph."""
    packed = self._pack(epoch)
    number = tf.shape(packed.groups, tf.int64)[0] * self.packs * self.replicas
    begin, end = self._item_ends[input_index : input_index + 2].tolist()
    first, last = self._round_ends[input_index : input_index + 2].tolist()
    records = slice(*self._record_ends[input_index : input_index + 2].tolist())
    starts = tf.boolean_mask(packed.starts, packed.inputs == input_index) - begin
    starts = tf.pad(
      starts, [[0, number + 1 - tf.shape(starts, tf.int64)[0]]], constant_values=end - begin
    )
    num_files = np.cumsum(self._files_per_input)
    files = packed.files[
      num_files[input_index] - self._files_per_input[input_index] : num_files[input_index]
    ]
    round_ends = tf.concat([packed.round_ends[first:last] - begin, [end - begin]], 0)
    return EpochPlan(
      files=tf.gather(self._paths, files),
      items=packed.items[begin:end],
      rounds=packed.rounds[records] - first,
      places=packed.places[begin:end],
      round_ends=round_ends,
      pack_starts=starts,
      shapes=self._shapes(packed.groups),
    )

  def batches_per_epoch(self, epoch: int) -> int:
    """The number of global batches in an epoch; it differs a little from one to another."""
    return int(self._pack(tf.constant(epoch, tf.int64)).groups.shape[0])

  def describe(self) -> str:
    """What packs are like, by those of epoch 0, and what is left out."""
    packed = self._pack(tf.constant(0, tf.int64))
    totals = packed.totals.numpy()
    text = (
      f'{len(totals):,} packs of <= {totals[:, _OPS].max():,} ops, {totals[:, 0].mean():.1f} '
      f'{"chunks" if self.chunked else "modules"} on average'
    )
    if self.options.shapes:
      sizes = np.array([budget.ops for budget in self.budgets])
      padded = (
        sizes[self._shapes(packed.groups).numpy()].sum()
        * self.packs
        * self.replicas
        * self.num_inputs
      )
      text += f', padded to {" or ".join(f"{each:,}" for each in sizes)}: {totals[:, _OPS].sum() / padded:.0%} filled'
    if self.unmeasured:
      text += f'; {self.unmeasured:,} records without runtimes left out'
    if self.oversize:
      treatment = 'left out' if self.options.oversize == 'skip' else 'taken in segments'
      text += (
        f'; {len(self.oversize):,} of more than {self.options.max_ops:,} ops {treatment}: '
        f'{_named(self.oversize)}'
      )
    return text


def _limited(
  directory: directory_lib.DatasetDirectory,
  split: str,
  options: BatchOptions,
  sizes: np.ndarray,
  kept: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, tuple[tuple[str, int], ...]]:
  """Applies `max_ops`: sizes and kept of `RecordSizes` as they are then, and the modules that
  are too large.
  """
  if options.max_ops is None or not (kept & (sizes[:, 0] > options.max_ops)).any():
    return sizes, kept, ()
  large = np.flatnonzero(sizes[:, 0] > options.max_ops)
  found = list(_read_large(directory, split, options.max_ops))
  modules = {
    name: int(sizes[record, 0])
    for record, (name, *_) in zip(large, found, strict=True)
    if kept[record]
  }
  oversize = tuple(sorted(modules.items(), key=lambda module: (-module[1], module[0])))
  if options.oversize == 'fail':
    raise errors.InputError(
      'modules too large',
      path=directory.path,
      where=split,
      found=_named(oversize),
      expected=f'<= {options.max_ops:,} ops',
      fix='raise --max_ops, or train with --oversize=skip or --oversize=segment',
    )
  if options.oversize == 'skip':
    kept = kept.copy()
    kept[large] = False
    return sizes, kept, oversize
  sizes = sizes.copy()
  for record, (_, edges, configured) in zip(large, found, strict=True):
    num_ops = int(sizes[record, 0])
    sizes[record] = [
      options.max_ops,
      *(_most_inside(*ends, num_ops, options.max_ops) for ends in (edges, configured)),
    ]
  return sizes, kept, oversize


def _named(oversize: Sequence[tuple[str, int]]) -> str:
  """Some of the modules that are too large, and how many more there are."""
  named = ', '.join(f'{name} ({ops:,} ops)' for name, ops in oversize[:_NAMED])
  return named + (f' and {len(oversize) - _NAMED:,} more' if len(oversize) > _NAMED else '')


def _most_inside(low: np.ndarray, high: np.ndarray, num_ops: int, length: int) -> int:
  """The most edges, between the ops int64 [E] `low` <= `high`, that any range of `length` of the
  ops has inside.
  """
  first, last = (
    np.maximum(high - length + 1, 0),
    np.minimum(low, num_ops - length),
  )  # Of ranges with the edge inside.
  first, last = first[first <= last], last[first <= last]
  changes = np.bincount(first, minlength=num_ops + 2) - np.bincount(last + 1, minlength=num_ops + 2)
  return int(np.cumsum(changes).max())


def _read_large(
  directory: directory_lib.DatasetDirectory, split: str, max_ops: int
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]]:
  """Of each record with more ops, in the order of the shards: module id, ends of edges, and
  configurable ops twice.
  """
  ints = tf.io.RaggedFeature(tf.int64, row_splits_dtype=tf.int64)
  wanted = {
    'context/module_id': tf.io.FixedLenFeature([], tf.string),
    'edges/operand.#source': ints,
    'edges/operand.#target': ints,
    'edges/configures.#target': ints,
  }
  size = {'nodes/op.#size': tf.io.FixedLenFeature([], tf.int64)}

  def parse(shard: tf.Tensor, records: tf.Tensor) -> tuple[tf.Tensor, Mapping[str, tf.Tensor]]:
    is_large = tf.io.parse_example(records, size)['nodes/op.#size'] > max_ops
    return shard, tf.io.parse_example(tf.boolean_mask(records, is_large), wanted)

  found = []
  for shard, parsed in _over_records(directory, split, parse):
    source, target, configured = (
      parsed[f'edges/{name}']
      for name in ('operand.#source', 'operand.#target', 'configures.#target')
    )
    for i, name in enumerate(parsed['context/module_id'].numpy()):
      ends = np.stack([source[i].numpy(), target[i].numpy()])
      found.append(
        (
          int(shard),
          name.decode(),
          (ends.min(axis=0), ends.max(axis=0)),
          (configured[i].numpy(),) * 2,
        )
      )
  for _, *large in sorted(found, key=lambda each: each[0]):
    yield tuple(large)
