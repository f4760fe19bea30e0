"""Dataset directories -> tf.data of padded batches, for training and for scoring.

A batch is a GraphTensor of B components, the last of which is padding, as are others that hold
no record. Sizes: K configs of each module, N ops, E edges, NC configurable ops.

| part | feature | type | padding |
|---|---|---|---|
| context | config_id | int64 [B, K] | -1 |
| | config_runtime | int64 [B, K], ns; -1 where not measured | -1 |
| | config_runtime_normalizer | int64 [B, K], ns, tile only | -1 |
| | relative_runtime | int64 [B, K], what losses compare; see `datasets` | -1 |
| | config_feat | float32 [B, K, 24], tile only | 0 |
| | module_id | string [B], on request only: strings cannot be sent to a TPU | '' |
| node set op | opcode, computation | int64 [N] | 0 |
| | feat | float32 [N, 140] | 0 |
| | extra_feat | float32 [N, number of extra features], where there are any | 0 |
| node set config_op | config_feat | int8 [NC, K, 18], layout only | -1 |
| edge set operand | | E edges from op to op | between ops of padding |
| edge set configures | | NC edges from config_op to op, layout only | to ops of padding |

There is at least one op of padding. B is static; N, E and NC are so with `shapes`.

Records are read from their shards by turns into a pool of some 12 MB, which each leaves after a
random time, and packed until the ops of a batch are as many as those of `batch_size` modules of
mean size. What comes at which place is decided by the seed and the number of the epoch alone, so
that reading can go on anywhere.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import tensorflow as tf

from tpu_graphs import errors
from tpu_graphs.compat import tfgnn
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import records
from tpu_graphs.input import decoding
from tpu_graphs.input import loading
from tpu_graphs.input import packing
from tpu_graphs.modules import module as module_lib

Budget = packing.Budget
BatchOptions = packing.BatchOptions
_FOR_SAMPLES = 3  # Numbers below are for the seeds of the order.
_FOR_RANGES = 1 << 32  # Beyond the number of any pack.
_UNCONVERTED = (
  tf.autograph.experimental.do_not_convert
)  # Converting what TF-GNN does would take seconds.


def batches(
  directory: directory_lib.DatasetDirectory | str | os.PathLike[str],
  split: str,
  options: BatchOptions,
  *,
  epoch: int = 0,
  first_batch: int = 0,
  epochs: int | None = None,
  packs: int = 1,
  replicas: int = 1,
  num_inputs: int = 1,
  input_index: int = 0,
  chunked: bool = False,
  with_ids: bool = False,
) -> tf.data.Dataset:
  """Batches of a split, as the module's docstring describes them.

  A step of training takes a global batch: from each of `num_inputs` pipelines the next
  `replicas` elements, each of which holds `packs` packs. All of these have the same shapes.
  Packs of nothing but padding fill up the last global batch of an epoch, and more of them for an
  input whose shards are used up before those of another.

  Args:
    directory: a dataset directory or its path.
    split: 'train', 'valid' or 'test'.
    options: what batches are made of.
    epoch: number of the first epoch. Its batches do not depend on those before.
    first_batch: how many global batches of the first epoch to leave out, as they were seen before.
    epochs: how many; None never ends.
    packs: packs in an element; its sizes are so many times those of `Budget`.
    replicas: devices that this input feeds in turn.
    num_inputs: input pipelines that share the shards of the split.
    input_index: which of them this is.
    chunked: instead of a sample of the configs of each measured record, in shuffled order, take
      all configs of all records in their order, K at a time: a component for each chunk.
    with_ids: whether there is `module_id`.

  Raises:
    InputError: see `directory_lib.open_directory` and `packing.Plan`; or there is no such input.
  """
  plan = plan_of(
    directory,
    split,
    options,
    packs=packs,
    replicas=replicas,
    num_inputs=num_inputs,
    chunked=chunked,
  )
  if not 0 <= input_index < num_inputs:
    raise errors.InputError(
      'no such input', where='input_index', found=input_index, expected=f'0 to {num_inputs - 1}'
    )

  def one_epoch(number: tf.Tensor) -> tf.data.Dataset:
    first = tf.where(number == epoch, tf.constant(first_batch * replicas, tf.int64), 0)
    return _packs(plan, number, input_index, first)

  numbers = tf.data.Dataset.range(epoch, epoch + epochs if epochs is not None else tf.int64.max)
  to_graph = _UNCONVERTED(functools.partial(_to_graph, plan, with_ids))
  elements = numbers.flat_map(_UNCONVERTED(one_epoch)).map(
    to_graph, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
  )
  return elements.prefetch(tf.data.AUTOTUNE)


def plan_of(
  directory: directory_lib.DatasetDirectory | str | os.PathLike[str],
  split: str,
  options: BatchOptions,
  **arguments: Any,
) -> packing.Plan:
  """The `packing.Plan` that `batches` follows with the same arguments: how many there are, of
  what sizes.

  Raises:
    InputError: see `batches`.
  """
  if not isinstance(directory, directory_lib.DatasetDirectory):
    directory = directory_lib.open_directory(directory)
  return packing.Plan(directory, split, options, **arguments)


def batches_per_epoch(
  directory: directory_lib.DatasetDirectory | str | os.PathLike[str],
  split: str,
  options: BatchOptions,
  *,
  epoch: int = 0,
  **arguments: Any,
) -> int:
  """How many global batches `batches` gives in an epoch with the same arguments; epochs differ a
  little.

  Raises:
    InputError: see `batches`.
  """
  return plan_of(directory, split, options, **arguments).batches_per_epoch(epoch)


def of_module(
  module: module_lib.Module, *, configs_per_module: int, with_ids: bool = False
) -> tf.data.Dataset:
  """All configs of one module, K at a time, as batches of two components, of which the second is
  padding.
  """
  decoder = decoding.Decoder(
    module.kind, components=2, num_extra=module.num_extra, with_ids=with_ids
  )

  def chunk(first: tf.Tensor) -> tfgnn.GraphTensor:
    parsed = decoder.parse(tf.constant([data]))
    chosen, real = decoding.consecutive_configs(
      parsed, tf.cast(first, tf.int32)[tf.newaxis], components=2, configs=configs_per_module
    )
    return decoder.graph(parsed, chosen, real)

  data = records.encode_whole(module)
  return tf.data.Dataset.range(0, module.num_configs, configs_per_module).map(_UNCONVERTED(chunk))


def _packs(
  plan: packing.Plan, epoch: tf.Tensor, input_index: int, first: tf.Tensor
) -> tf.data.Dataset:
  """Elements of an epoch as serialized records, from number `first`, int64 scalar, on."""
  packs = plan.packs
  planned = plan.epoch(epoch, input_index)
  seed = loading.mix(plan.options.seed, epoch, _FOR_SAMPLES + input_index)
  bounds = planned.pack_starts[::packs]  # In items, [number of elements + 1].
  shards = plan.directory.split(plan.split)
  in_turn = (
    tf.data.Dataset.from_tensor_slices(planned.files)
    .batch(packing.CYCLE)
    .flat_map(
      lambda files: packing.by_turns(
        tf.data.Dataset.from_tensor_slices(files), tf.data.TFRecordDataset, shards
      )
    )
  )
  blocks = in_turn.batch(plan.block).concatenate(
    tf.data.Dataset.from_tensors(tf.constant([], tf.string))
  )

  def take(
    state: tuple[tf.Tensor, ...], numbered: tuple[tf.Tensor, tf.Tensor]
  ) -> tuple[tuple[tf.Tensor, ...], dict[str, tf.Tensor]]:
    """Reads a block into the pool, takes the records of a round from there, and finds the
    elements that end with them; what begins and does not end is carried to the next round.
    """
    number, read = numbered
    carried, *pool = *state, read
    leaving = []
    for i, block in enumerate(pool, start=1 - len(pool)):
      rounds = planned.rounds[tf.maximum((number + i) * plan.block, 0) :][: tf.shape(block)[0]]
      leaving.append(tf.boolean_mask(block, rounds == number))
    data = tf.concat(leaving, 0)
    begin = tf.where(number > 0, planned.round_ends[tf.maximum(number - 1, 0)], 0)
    end = planned.round_ends[number]
    opened, closed = (
      tf.searchsorted(bounds[1:], [at], side='right', out_type=tf.int64)[0] for at in (begin, end)
    )
    opened = tf.where(number > 0, opened, 0)
    rest = tf.gather(data, planned.places[tf.maximum(bounds[closed], begin) : end])
    kept = tf.where(closed == opened, tf.shape(carried)[0], 0)
    return (tf.concat([carried[:kept], rest], 0), *pool[1:]), {
      'data': data,
      'carried': carried,
      'begin': begin,
      'opened': opened,
      'closed': closed,
    }

  def elements(taken: dict[str, tf.Tensor]) -> tf.data.Dataset:

    def element(number: tf.Tensor) -> dict[str, tf.Tensor]:
      starts = planned.pack_starts[number * packs : (number + 1) * packs + 1]
      begin, end = starts[0], starts[packs]
      kept = tf.where(begin < taken['begin'], tf.shape(taken['carried'])[0], 0)
      mine = tf.gather(taken['data'], planned.places[tf.maximum(begin, taken['begin']) : end])
      return {
        'records': tf.concat([taken['carried'][:kept], mine], 0),
        'items': planned.items[begin:end],
        'pack_starts': tf.ensure_shape(starts - begin, [packs + 1]),
        'shape': planned.shapes[number // plan.replicas],
        'seeds': seed + number * packs + tf.range(packs, dtype=tf.int64)[:, tf.newaxis],
      }

    return tf.data.Dataset.range(tf.maximum(taken['opened'], first), taken['closed']).map(element)

  taken = blocks.prefetch(1).enumerate().scan((tf.constant([], tf.string),) * plan.max_rounds, take)
  return taken.flat_map(elements)


def _to_graph(
  plan: packing.Plan, with_ids: bool, element: dict[str, tf.Tensor]
) -> tfgnn.GraphTensor:
  options = plan.options
  components = plan.budgets[0].components * plan.packs
  segmented = options.oversize == 'segment' and bool(plan.oversize)
  decoder = decoding.Decoder(
    plan.directory.kind,
    components,
    num_extra=plan.directory.manifest.choices.num_extra,
    with_ids=with_ids,
    segment_ops=options.max_ops if segmented else None,
  )
  parsed = decoder.parse(element['records'])
  ranges = None
  if plan.chunked:
    first = tf.cast(tf.gather(plan.first_config, element['items']), tf.int32)
    chosen, real = decoding.consecutive_configs(
      parsed, first, components=components, configs=options.configs_per_module
    )
  else:
    starts = element['pack_starts']
    config_starts = tf.gather(parsed['context/config_id'].row_splits, starts)
    draws = _uniform(element['seeds'], config_starts[1:] - config_starts[:-1])
    if segmented:
      ranges = tf.reshape(
        _uniform(element['seeds'] + _FOR_RANGES, 2 * (starts[1:] - starts[:-1])), [-1, 2]
      )
    chosen, real = decoding.sample_configs(
      parsed,
      1 - draws,
      components=components,
      configs=options.configs_per_module,
      sampling=options.config_sampling,
    )
  totals = None
  if options.shapes:
    sizes = {
      name: [getattr(budget, name) * plan.packs for budget in plan.budgets]
      for name in ('ops', 'edges', 'config_ops')
    }
    totals = {
      name: each[0] if len(each) == 1 else tf.gather(each, element['shape'])
      for name, each in sizes.items()
    }
  return decoder.graph(parsed, chosen, real, totals=totals, draws=ranges)


def _uniform(seeds: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
  """float32 in [0, 1): of each pack as many as `numbers`, int [packs], says, for its seed, int64
  [packs, 2].
  """
  return tf.concat(
    [
      tf.random.stateless_uniform([number], seed)
      for number, seed in zip(tf.unstack(numbers), tf.unstack(seeds), strict=True)
    ],
    0,
  )
