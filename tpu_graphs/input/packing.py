"""The plan of the batches of an epoch, decided by the sizes of the records alone.

The sizes of all records of a split are read once. Everything else follows from them, the seed and
the number of the epoch, for all input workers alike: the order in which records are read and
shuffled, the packs, their shapes, and the number of batches. So each worker knows that the others
make as many batches as it does, and of the same shapes.

Records are packed with next-fit: with room for 10 ops, records of 6, 3, 4 and 5 ops make the packs
(6, 3) and (4, 5).
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

CYCLE = 16  # Number of shards that are read round-robin.
OVERSIZE = ('fail', 'skip', 'segment')
_OPS = 1  # Index of the ops among the fields of `Budget`.
_POOL_BYTES = 12 << 20  # Bytes of the records that are held to be shuffled.
_MAX_ROUNDS = 8  # Number of rounds that a record may stay in the pool.
_PASS_BYTES = 1 << 20  # Bytes of the records that are parsed for their sizes at a time.
_READ_AHEAD_BYTES = 1 << 18  # Records of more bytes on average are not read ahead.
_MAX_SLACK = 1.5  # Edges and configurable ops in a pack, over their mean times `batch_size`.
_MULTIPLE = 8  # Static sizes are multiples of this, as devices like them.
_MAX_CANDIDATES = 200  # Number of sizes among which static sizes are chosen.
_LEAST_PADDING = np.array([1, 1, 0, 0])  # Padding that each pack needs, in the order of `Budget`.
_NAMED = 3  # Number of the modules that are too large which a message names.


@dataclasses.dataclass(frozen=True, eq=False)
class RecordSizes:
  """The sizes of the R records of a split, in the order of the shards.

  Attributes:
    shard: int64 [R], number of the record's shard.
    position: int64 [R], position in the shard.
    sizes: int64 [R, 3], numbers of ops, edges and configurable ops.
    configs: int64 [R], number of configs.
    measured: bool [R], whether any config is measured.
  """

  shard: np.ndarray
  position: np.ndarray
  sizes: np.ndarray
  configs: np.ndarray
  measured: np.ndarray


def round_robin(
  files: tf.data.Dataset, read: Callable[..., tf.data.Dataset], shards: manifest_lib.Split
) -> tf.data.Dataset:
  """Reads `CYCLE` files at a time with `read`, and yields an element of each in turn.

  Where the records of `shards` are small, each file has a reader of its own, which reads some
  records ahead.
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

  found = [np.zeros((0, 6), np.int64)]
  for some in _over_records(directory, split, sizes):
    found.append(some.numpy())
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
  starts = np.cumsum(counts) - counts
  return RecordSizes(
    shard=rows[:, 0],
    position=np.arange(len(rows)) - np.repeat(starts, counts),
    sizes=rows[:, 1:4],
    configs=rows[:, 4],
    measured=rows[:, 5] > 0,
  )


def _over_records(directory: directory_lib.DatasetDirectory, split: str, function) -> Iterator:
  """Yields the results of `function` for some records at a time, each shard in its order.

  The arguments of `function` are the number of the shard and some of its records, string [b].
  """
  shards = directory.split(split)
  block = max(1, min(256, _PASS_BYTES * shards.records // max(shards.bytes, 1)))
  paths = [os.path.join(directory.path, shard.name) for shard in shards.shards]

  def read(i: tf.Tensor, path: tf.Tensor) -> tf.data.Dataset:
    blocks = tf.data.TFRecordDataset(path).batch(block)
    return blocks.map(lambda records: function(i, records))

  files = tf.data.Dataset.from_tensor_slices(paths).enumerate()
  results = round_robin(files, read, shards)
  with directory_lib.damage_explained(directory):
    yield from results


@dataclasses.dataclass(frozen=True)
class Budget:
  """The sizes that a pack is padded to, padding included.

  Attributes:
    components: number of modules, and one for the padding.
    ops: number of ops.
    edges: number of edges between ops.
    config_ops: number of configurable ops.
  """

  components: int
  ops: int
  edges: int
  config_ops: int


def next_fit(sizes: tf.Tensor, limits: tf.Tensor, block_ends: tf.Tensor) -> tf.Tensor:
  """Puts items, in their order, into packs: a pack ends where the next item would exceed a limit.

  Args:
    sizes: int64 [I, D], sizes of the items.
    limits: int64 [D], limits of the sums over a pack; an item that is larger makes a pack alone.
    block_ends: int64 [I], end of the range of items that each item may share a pack with.

  Returns:
    bool [I], whether a pack begins with the item.
  """
  number = sizes.shape[0]
  sums = tf.transpose(tf.pad(tf.cumsum(sizes), [[1, 0], [0, 0]]))  # [D, I + 1]
  most = sums[:, :-1] + limits[:, tf.newaxis]
  fitting = tf.searchsorted(sums, most, side='right', out_type=tf.int64) - 1
  each = tf.range(number, dtype=tf.int64)
  following = tf.maximum(tf.minimum(tf.reduce_min(fitting, 0), block_ends), each + 1)
  # A pack that begins with item i is followed by a pack that begins with item following[i], so the
  # starts of packs are reached from the first start of each block by such steps. Each round doubles
  # the length of the steps, so that a logarithmic number of rounds reaches all starts.
  following = tf.concat([following, [number]], 0)
  starts = tf.concat([[True], block_ends[1:] != block_ends[:-1], [False]], 0)[: number + 1]
  for _ in range(math.ceil(math.log2(number + 1))):
    reached = tf.math.unsorted_segment_max(tf.cast(starts, tf.int32), following, number + 1)
    starts |= reached > 0
    following = tf.gather(following, following)
  return starts[:number]


def least_padding(sizes: np.ndarray, number: int) -> list[int]:
  """Returns the static sizes that need the least padding in total, ascending.

  Each size is padded to the smallest static size that fits it.

  Args:
    sizes: int64 [P], sizes of the packs.
    number: the most static sizes.
  """
  rounded = -(-sizes // _MULTIPLE) * _MULTIPLE
  candidates, counts = np.unique(rounded, return_counts=True)
  if candidates.size > _MAX_CANDIDATES:
    # Candidates are left out evenly, but never the last, which all sizes fit.
    kept = np.unique(np.linspace(candidates.size - 1, 0, _MAX_CANDIDATES).astype(int))
    counts = np.add.reduceat(counts, np.concatenate([[0], kept[:-1] + 1]))
    candidates = candidates[kept]
  upto = np.concatenate([[0], np.cumsum(counts)])
  # cost[j] is the total of the sizes up to candidate j - 1, padded to the rungs so far, the last of
  # which is candidate j - 1.
  cost = np.where(np.arange(candidates.size + 1) > 0, np.inf, 0.0)
  choices = []
  # padded[i, j] is the total of the sizes from candidate i to candidate j, all padded to j.
  padded = (upto[np.newaxis, 1:] - upto[:-1, np.newaxis]) * candidates
  index = np.arange(candidates.size)
  padded = np.where(index[:, np.newaxis] <= index, padded, np.inf)
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
  """The options of batches.

  Attributes:
    batch_size: number of modules in a pack, on average: a pack takes about as many ops as this
      number of modules of mean size.
    configs_per_module: number of configs of each module, K.
    config_sampling: the way to draw K configs from a record, see `decoding.sample_configs`.
      Configs without a runtime are taken only where fewer than K are measured.
    shapes: None for packs of any size; n for at most n static shapes, each pack padded to the
      smallest that fits it.
    max_ops: the most ops of a pack; None for no limit.
    oversize: treatment of a record with more than `max_ops` ops. 'fail' refuses it, 'skip' leaves
      it out, and 'segment' keeps a range of `max_ops` ops that is drawn again each epoch, with the
      edges and configurable ops inside and the runtimes of the whole module:
      https://arxiv.org/abs/2305.12322.
    seed: seed of the order and of samples.
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
      value = getattr(self, name)
      if value not in known:
        raise errors.InputError(f'unknown {name}', found=repr(value), expected=' or '.join(known))


@dataclasses.dataclass(frozen=True, eq=False)
class EpochPlan:
  """The records that one input reads in an epoch, and their packs.

  Items are records or, where configs come in chunks, chunks of records.

  Attributes:
    files: string [F], the shards in the order in which they are read.
    items: int64 [I], numbers of the items in the order of packs.
    rounds: int64 [R], the round in which each record leaves the pool, for the records in the order
      in which they are read.
    places: int64 [I], place of each item's record among the records that leave in the same round.
    round_ends: int64 [W + 1], number of items up to the end of each round and of an empty round
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
  """An epoch of all inputs, one after the other.

  It has F shards, R records, I items, W rounds, P packs and G global batches.

  Attributes:
    files: int64 [F], numbers of the shards in the order in which they are read.
    items: int64 [I]; see `EpochPlan`.
    rounds: int64 [R], as in `EpochPlan`, but counted over all inputs.
    places: int64 [I]; see `EpochPlan`.
    round_ends: int64 [W], number of items up to the end of each round.
    starts: int64 [P], number of items before each pack.
    inputs: int64 [P], index of the input of each pack.
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
  """A plan of how the records of a split become batches.

  Attributes:
    directory: the dataset directory.
    split: 'train', 'valid' or 'test'.
    options: the options of batches.
    packs: number of packs in an element, see `batching.batches`.
    replicas: number of devices that an input feeds in turn, see `batching.batches`.
    num_inputs: number of inputs that share the shards, see `batching.batches`.
    chunked: whether configs come in chunks, see `batching.batches`.
    block: number of records that are read in a round.
    max_rounds: number of rounds that a record may stay in the pool, including the round in which
      its block is read.
    first_config: int64 [I], first config of each item; 0 where configs are sampled.
    budgets: sizes to pad a pack to, ascending; a single one without `options.shapes`, where the
      number of components alone counts.
    unmeasured: number of records that are left out because none of their configs is measured.
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
    """Plans batches.

    The sizes of all records are read for that, once for each `directory` and split.

    Raises:
      InputError: the split is missing or damaged, has nothing to learn from or fewer shards than
        inputs; or `options` do not allow a module's size.
    """
    for name, value in (('packs', packs), ('replicas', replicas), ('num_inputs', num_inputs)):
      if value < 1:
        raise errors.InputError('number too small', where=name, found=value, expected='>= 1')
    if chunked and options.oversize == 'segment':
      raise errors.InputError(
        'scoring needs whole modules',
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
    self._num_items = np.where(kept, chunks, 0)  # [R], number of items of each record.
    record = np.repeat(np.arange(kept.size), self._num_items)  # [I], record of each item.
    if not record.size:
      raise errors.InputError(
        'nothing to score' if chunked else 'nothing to learn from',
        path=directory.path,
        where=split,
        found=(
          f'{self.unmeasured} of {kept.size} records without runtimes, '
          f'{len(self.oversize)} modules too large'
        ),
        expected='records with configs' if chunked else 'measured modules',
        fix='raise --max_ops' if self.oversize else 'choose or convert another split',
      )
    self._first_item = np.cumsum(self._num_items) - self._num_items
    chunk = np.arange(record.size) - self._first_item[record]
    self.first_config = chunk * options.configs_per_module
    components = np.ones((record.size, 1), np.int64)
    self._sizes = np.concatenate([components, sizes[record]], axis=1)
    self._arrange(found, len(shards.shards))
    self._learn_budgets()

  def _arrange(self, found: RecordSizes, num_files: int) -> None:
    """Sets the attributes that are the same in all epochs, in the order of inputs."""
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
    rounds = -(-records // self.block)
    self._record_ends = np.concatenate([[0], np.cumsum(records)])
    self._round_ends = np.concatenate([[0], np.cumsum(rounds)])
    # [R]: place of each record among the records that its input reads.
    place = np.arange(records.sum()) - np.repeat(self._record_ends[:-1], records)
    self._first_round = place // self.block + np.repeat(self._round_ends[:-1], records)
    self._last_round = np.repeat(self._round_ends[1:] - 1, records)

  def _learn_budgets(self) -> None:
    """Learns the limits of a pack and the shapes that packs are padded to from epoch 0."""
    options = self.options
    means = self._sizes.mean(axis=0)
    largest = self._sizes.max(axis=0)
    ops = math.ceil(options.batch_size * means[_OPS])
    if options.shapes == 1:
      # A single shape has room for the largest module anyway.
      ops = max(ops, largest[_OPS])
    ops = min(ops, options.max_ops or ops)
    slack = np.ceil(_MAX_SLACK * options.batch_size * means).astype(np.int64)
    self._limits = np.maximum(slack, largest)
    self._limits[_OPS] = ops
    packed = self._pack(tf.constant(0, tf.int64))
    totals, groups = packed.totals.numpy(), packed.groups.numpy()
    # Other epochs keep to the sizes of this one.
    shared = totals[totals[:, _OPS] <= ops]
    self._limits = shared.max(axis=0) if shared.size else np.ones_like(self._limits)
    rungs = least_padding(groups[:, _OPS] + 1, options.shapes or 1)
    largest_below = [groups[groups[:, _OPS] < rung].max(axis=0) for rung in rungs]
    budgets = np.array(largest_below) + _LEAST_PADDING
    budgets = -(-budgets // _MULTIPLE) * _MULTIPLE
    budgets[:, 0] = totals[:, 0].max() + 1
    self.budgets = tuple(Budget(*budget) for budget in budgets.tolist())

  def _order(self, epoch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the order in which files and records are read and packed.

    Returns:
      files: int64 [F], the files in the order in which they are read.
      rounds: int64 [R], the round in which each record leaves, for records in the order in which
        they are read.
      records: int64 [R], the records in the order in which they are packed.
      places: int64 [R], the place of each packed record among the records of its round.
    """

    def random(number: int, purpose: int, below: int = 1 << 31) -> tf.Tensor:
      """Returns random keys, int64 [number], or ascending keys where configs come in chunks."""
      if self.chunked:
        return tf.range(number, dtype=tf.int64)
      seed = loading.mix(self.options.seed, epoch, purpose)
      return tf.random.stateless_uniform([number], seed, maxval=below, dtype=tf.int64)

    num_files = self._input_of_file.size
    files = tf.argsort((self._input_of_file << 31) + random(num_files, 0), stable=True)
    firsts = np.cumsum(self._files_per_input) - self._files_per_input
    read_as = tf.cast(tf.math.invert_permutation(files), tf.int64)
    rank_in_input = read_as - firsts[self._input_of_file]
    # `CYCLE` files are read round-robin, a record of each in turn, then the next files.
    rank = tf.gather(rank_in_input, self._shard)
    cycle = self._input_of_file[self._shard] * num_files + rank // CYCLE
    turn = cycle * (self._position.max() + 1) + self._position
    read = tf.argsort(turn * CYCLE + rank % CYCLE)
    rounds = tf.constant(self._first_round)
    if self.max_rounds > 1:
      rounds = tf.minimum(rounds + random(rounds.shape[0], 2, self.max_rounds), self._last_round)
    # Records leave round by round, within a round in the order in which they are read.
    leaving = tf.math.invert_permutation(tf.argsort(rounds, stable=True))
    shuffled = tf.argsort(rounds * (1 << 31) + random(rounds.shape[0], 1), stable=True)
    ordered = tf.gather(rounds, shuffled)
    round_starts = tf.searchsorted(ordered, ordered, out_type=tf.int64)
    places = tf.cast(tf.gather(leaving, shuffled), tf.int64) - round_starts
    return files, rounds, tf.gather(read, shuffled), places

  def _pack(self, epoch: tf.Tensor) -> _Packed:
    """Packs the records of an epoch, int64 scalar, for all inputs."""
    files, rounds, records, places = self._order(epoch)
    numbers = tf.gather(self._num_items, records)
    ends = tf.cumsum(numbers)
    first = tf.gather(self._first_item, records) - (ends - numbers)
    items = tf.repeat(first, numbers) + tf.range(len(self._sizes), dtype=tf.int64)
    sizes = tf.ensure_shape(tf.gather(self._sizes, items), self._sizes.shape)
    # Items share packs only with items of the same input.
    block_ends = tf.constant(self._item_ends[1:][self._input_of_item])
    is_start = next_fit(sizes, tf.constant(self._limits), block_ends)
    starts = tf.where(is_start)[:, 0]
    pack_of_item = tf.cumsum(tf.cast(is_start, tf.int64)) - 1
    totals = tf.math.segment_sum(sizes, pack_of_item)
    inputs = tf.gather(self._input_of_item, starts)
    packs = tf.math.bincount(tf.cast(inputs, tf.int32), minlength=self.num_inputs, dtype=tf.int64)
    first_pack = tf.gather(tf.cumsum(packs, exclusive=True), inputs)
    number = tf.range(tf.shape(starts, tf.int64)[0]) - first_pack
    group = number // (self.packs * self.replicas)
    # [W], number of records that leave in each round.
    leaving = tf.math.bincount(
      tf.cast(rounds, tf.int32), minlength=self._round_ends[-1], dtype=tf.int64
    )
    item_ends = tf.pad(ends, [[1, 0]])
    return _Packed(
      files=files,
      items=items,
      rounds=rounds,
      places=tf.repeat(places, numbers),
      round_ends=tf.gather(item_ends, tf.cumsum(leaving)),
      starts=starts,
      inputs=inputs,
      totals=totals,
      groups=tf.math.unsorted_segment_max(totals, group, tf.reduce_max(group) + 1),
    )

  def _shapes(self, groups: tf.Tensor) -> tf.Tensor:
    """Returns the index of the smallest budget that each pack of a group fits into, int64 [G].

    Args:
      groups: int64 [G, 4], the largest sizes of a pack in each group.
    """
    budgets = np.array([dataclasses.astuple(budget) for budget in self.budgets])
    fits = tf.reduce_all(groups[:, tf.newaxis] <= budgets - _LEAST_PADDING, axis=2)
    return tf.argmax(fits, axis=1)

  def epoch(self, epoch: tf.Tensor, input_index: int) -> EpochPlan:
    """Returns the plan of an epoch, int64 scalar, for one input, eagerly or in a graph."""
    packed = self._pack(epoch)
    number = tf.shape(packed.groups, tf.int64)[0] * self.packs * self.replicas
    begin, end = self._item_ends[input_index : input_index + 2].tolist()
    first, last = self._round_ends[input_index : input_index + 2].tolist()
    records = slice(*self._record_ends[input_index : input_index + 2].tolist())
    starts = tf.boolean_mask(packed.starts, packed.inputs == input_index) - begin
    missing = number + 1 - tf.shape(starts, tf.int64)[0]
    starts = tf.pad(starts, [[0, missing]], constant_values=end - begin)
    last_file = np.cumsum(self._files_per_input)[input_index]
    first_file = last_file - self._files_per_input[input_index]
    files = packed.files[first_file:last_file]
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
    """Returns the number of global batches in an epoch; it differs a little between epochs."""
    return int(self._pack(tf.constant(epoch, tf.int64)).groups.shape[0])

  def describe(self) -> str:
    """Returns a description of the packs of epoch 0 and of the records that are left out."""
    packed = self._pack(tf.constant(0, tf.int64))
    totals = packed.totals.numpy()
    unit = 'chunks' if self.chunked else 'modules'
    text = (
      f'{len(totals):,} packs of <= {totals[:, _OPS].max():,} ops, '
      f'{totals[:, 0].mean():.1f} {unit} on average'
    )
    if self.options.shapes:
      sizes = np.array([budget.ops for budget in self.budgets])
      names = ' or '.join(f'{size:,}' for size in sizes)
      packs_in_group = self.packs * self.replicas * self.num_inputs
      padded = sizes[self._shapes(packed.groups).numpy()].sum() * packs_in_group
      text += f', padded to {names}: {totals[:, _OPS].sum() / padded:.0%} filled'
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
  """Applies `options.max_ops` to records.

  Args:
    directory: the dataset directory.
    split: name of the split.
    options: the options of batches.
    sizes: int64 [R, 3], as in `RecordSizes`.
    kept: bool [R], whether the record is used.

  Returns:
    sizes: int64 [R, 3], sizes of the records after cutting them to segments.
    kept: bool [R], whether the record is still used.
    oversize: (module id, ops) of the modules that are too large, largest first.

  Raises:
    InputError: a module is too large and `options.oversize` is 'fail'.
  """
  if options.max_ops is None or not (kept & (sizes[:, 0] > options.max_ops)).any():
    return sizes, kept, ()
  large = np.flatnonzero(sizes[:, 0] > options.max_ops)
  found = list(_read_large(directory, split, options.max_ops))
  modules = {}
  for record, (name, *_) in zip(large, found, strict=True):
    if kept[record]:
      modules[name] = int(sizes[record, 0])
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
    most_edges = _most_inside(*edges, num_ops, options.max_ops)
    most_config_ops = _most_inside(*configured, num_ops, options.max_ops)
    sizes[record] = [options.max_ops, most_edges, most_config_ops]
  return sizes, kept, oversize


def _named(oversize: Sequence[tuple[str, int]]) -> str:
  """Names some of the modules that are too large, and the number of the others."""
  named = ', '.join(f'{name} ({ops:,} ops)' for name, ops in oversize[:_NAMED])
  if len(oversize) > _NAMED:
    named += f' and {len(oversize) - _NAMED:,} more'
  return named


def _most_inside(low: np.ndarray, high: np.ndarray, num_ops: int, length: int) -> int:
  """Returns the most edges that any range of `length` ops has inside.

  Args:
    low: int64 [E], the first op of each edge.
    high: int64 [E], the last op of each edge.
    num_ops: number of ops of the module.
    length: number of ops in a range.
  """
  # The ranges with an edge inside begin from `first` to `last`.
  first = np.maximum(high - length + 1, 0)
  last = np.minimum(low, num_ops - length)
  fits = first <= last
  begins = np.bincount(first[fits], minlength=num_ops + 2)
  ends = np.bincount(last[fits] + 1, minlength=num_ops + 2)
  return int(np.cumsum(begins - ends).max())


def _read_large(
  directory: directory_lib.DatasetDirectory, split: str, max_ops: int
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]]:
  """Reads the records with more than `max_ops` ops.

  Yields:
    For each of them, in the order of the shards: module id; the first and the last op of each edge;
    the configurable ops twice, as if each were an edge to itself.
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
    source = parsed['edges/operand.#source']
    target = parsed['edges/operand.#target']
    configured = parsed['edges/configures.#target']
    for i, name in enumerate(parsed['context/module_id'].numpy()):
      ends = np.stack([source[i].numpy(), target[i].numpy()])
      edges = (ends.min(axis=0), ends.max(axis=0))
      config_ops = configured[i].numpy()
      found.append((int(shard), (name.decode(), edges, (config_ops, config_ops))))
  for _, large in sorted(found, key=lambda each: each[0]):
    yield large
