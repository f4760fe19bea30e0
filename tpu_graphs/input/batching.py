"""Dataset directories -> tf.data of padded batches, for training and for scoring.

A batch is a GraphTensor of B components. The last component is padding, and so is any other
component without a record. Sizes: K configs of each module, N ops, E edges, NC configurable ops.

| part | feature | type | padding |
|---|---|---|---|
| context | config_id | int64 [B, K] | -1 |
| | config_runtime | int64 [B, K], ns; -1 where not measured | -1 |
| | config_runtime_normalizer | int64 [B, K], ns, tile only | -1 |
| | relative_runtime | int64 [B, K], compared by losses; see `loading` | -1 |
| | config_feat | float32 [B, K, 24], tile only | 0 |
| | module_id | string [B], on request only: strings cannot be sent to a TPU | '' |
| node set op | opcode, computation | int64 [N] | 0 |
| | feat | float32 [N, 140] | 0 |
| | extra_feat | float32 [N, number of extra features], where there are any | 0 |
| node set config_op | config_feat | int8 [NC, K, 18], layout only | -1 |
| edge set operand | | E edges from op to op | between ops of padding |
| edge set configures | | NC edges from config_op to op, layout only | to ops of padding |

There is at least one op of padding. B is static; N, E and NC are static with `shapes`.

Records are read round-robin from their shards into a pool of some 12 MB, which each record leaves
after a random time, and packed until a batch has as many ops as `batch_size` modules of mean size.
The seed and the number of the epoch alone decide the order, so that reading can resume anywhere.
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
_FOR_SAMPLES = 3  # Smaller numbers are used for the seeds of the order.
_FOR_RANGES = 1 << 32  # Larger than the number of any pack.
# Converting TF-GNN's functions with AutoGraph would take seconds.
_UNCONVERTED = tf.autograph.experimental.do_not_convert


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
  """Returns batches of a split, as the module's docstring describes them.

  A training step takes a global batch: from each of `num_inputs` pipelines the next `replicas`
  elements, each of which holds `packs` packs. All elements of a global batch have the same shapes.
  Packs of padding alone fill up the last global batch of an epoch, and further global batches of an
  input whose shards are used up before the shards of another input.

  Args:
    directory: a dataset directory or its path.
    split: 'train', 'valid' or 'test'.
    options: how batches are made.
    epoch: number of the first epoch. Its batches do not depend on earlier epochs.
    first_batch: number of global batches of the first epoch to leave out, since they were seen.
    epochs: number of epochs; None never ends.
    packs: number of packs in an element; its sizes are so many times the sizes of `Budget`.
    replicas: number of devices that this input feeds in turn.
    num_inputs: number of input pipelines that share the shards of the split.
    input_index: index of this input pipeline.
    chunked: instead of a sample of the configs of each measured record, in shuffled order, take
      all configs of all records in their order, K at a time: a component for each chunk.
    with_ids: whether batches have `module_id`.

  Raises:
    InputError: see `directory_lib.open_directory` and `packing.Plan`; or `input_index` is not an
      index of an input.
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

  end = epoch + epochs if epochs is not None else tf.int64.max
  numbers = tf.data.Dataset.range(epoch, end)
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
  """Returns the `packing.Plan` that `batches` follows with the same arguments.

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
  """Returns the number of global batches that `batches` yields in an epoch with the same arguments.

  The number differs a little between epochs.

  Raises:
    InputError: see `batches`.
  """
  return plan_of(directory, split, options, **arguments).batches_per_epoch(epoch)


def of_module(
  module: module_lib.Module, *, configs_per_module: int, with_ids: bool = False
) -> tf.data.Dataset:
  """Returns all configs of one module, K at a time, as batches of two components.

  The second component is padding.
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
  """Returns the elements of an epoch as serialized records, from number `first`, int64, on."""
  packs = plan.packs
  planned = plan.epoch(epoch, input_index)
  seed = loading.mix(plan.options.seed, epoch, _FOR_SAMPLES + input_index)
  bounds = planned.pack_starts[::packs]  # In items, [number of elements + 1].
  shards = plan.directory.split(plan.split)

  def read(paths: tf.Tensor) -> tf.data.Dataset:
    files = tf.data.Dataset.from_tensor_slices(paths)
    return packing.round_robin(files, tf.data.TFRecordDataset, shards)

  paths = tf.data.Dataset.from_tensor_slices(planned.files)
  serialized = paths.batch(packing.CYCLE).flat_map(read)
  # The elements that are left when all records are read come with an empty block at the end.
  no_records = tf.data.Dataset.from_tensors(tf.constant([], tf.string))
  blocks = serialized.batch(plan.block).concatenate(no_records)

  def elements_within(items: tf.Tensor) -> tf.Tensor:
    """Returns the number of elements that end within the first `items` items."""
    return tf.searchsorted(bounds[1:], [items], side='right', out_type=tf.int64)[0]

  def take(
    state: tuple[tf.Tensor, ...], numbered: tuple[tf.Tensor, tf.Tensor]
  ) -> tuple[tuple[tf.Tensor, ...], dict[str, tf.Tensor]]:
    """Reads a block into the pool, and takes the records of a round and the elements from it.

    The elements are those that end in this round. The records of an element that begins and does
    not end are carried to the next round.
    """
    number, newest = numbered
    carried, *pool = state
    pool.append(newest)
    leaving = []
    for i, block in enumerate(pool, start=1 - len(pool)):
      first_record = tf.maximum((number + i) * plan.block, 0)
      rounds = planned.rounds[first_record:][: tf.shape(block)[0]]
      leaving.append(tf.boolean_mask(block, rounds == number))
    data = tf.concat(leaving, 0)
    begin = tf.where(number > 0, planned.round_ends[tf.maximum(number - 1, 0)], 0)
    end = planned.round_ends[number]
    opened = tf.where(number > 0, elements_within(begin), 0)
    closed = elements_within(end)
    rest = tf.gather(data, planned.places[tf.maximum(bounds[closed], begin) : end])
    kept = tf.where(closed == opened, tf.shape(carried)[0], 0)
    next_carried = tf.concat([carried[:kept], rest], 0)
    taken = {
      'data': data,
      'carried': carried,
      'begin': begin,
      'opened': opened,
      'closed': closed,
    }
    return (next_carried, *pool[1:]), taken

  def elements(taken: dict[str, tf.Tensor]) -> tf.data.Dataset:
    def element(number: tf.Tensor) -> dict[str, tf.Tensor]:
      starts = planned.pack_starts[number * packs : (number + 1) * packs + 1]
      begin, end = starts[0], starts[packs]
      kept = tf.where(begin < taken['begin'], tf.shape(taken['carried'])[0], 0)
      places = planned.places[tf.maximum(begin, taken['begin']) : end]
      of_round = tf.gather(taken['data'], places)
      pack_numbers = number * packs + tf.range(packs, dtype=tf.int64)
      return {
        'records': tf.concat([taken['carried'][:kept], of_round], 0),
        'items': planned.items[begin:end],
        'pack_starts': tf.ensure_shape(starts - begin, [packs + 1]),
        'shape': planned.shapes[number // plan.replicas],
        'seeds': seed + pack_numbers[:, tf.newaxis],
      }

    return tf.data.Dataset.range(tf.maximum(taken['opened'], first), taken['closed']).map(element)

  initial_state = (tf.constant([], tf.string),) * plan.max_rounds
  taken = blocks.prefetch(1).enumerate().scan(initial_state, take)
  return taken.flat_map(elements)


def _to_graph(
  plan: packing.Plan, with_ids: bool, element: dict[str, tf.Tensor]
) -> tfgnn.GraphTensor:
  """Returns the batch of an element of `_packs`."""
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
      numbers = 2 * (starts[1:] - starts[:-1])
      ranges = tf.reshape(_uniform(element['seeds'] + _FOR_RANGES, numbers), [-1, 2])
    chosen, real = decoding.sample_configs(
      parsed,
      1 - draws,
      components=components,
      configs=options.configs_per_module,
      sampling=options.config_sampling,
    )
  totals = None
  if options.shapes:
    totals = {}
    for name in ('ops', 'edges', 'config_ops'):
      sizes = [getattr(budget, name) * plan.packs for budget in plan.budgets]
      totals[name] = sizes[0] if len(sizes) == 1 else tf.gather(sizes, element['shape'])
  return decoder.graph(parsed, chosen, real, totals=totals, draws=ranges)


def _uniform(seeds: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
  """Draws numbers for all packs, float32 in [0, 1), one pack after the other.

  Args:
    seeds: int64 [packs, 2], the seed of each pack.
    numbers: int [packs], how many numbers are drawn for each pack.
  """
  draws = []
  for number, seed in zip(tf.unstack(numbers), tf.unstack(seeds), strict=True):
    draws.append(tf.random.stateless_uniform([number], seed))
  return tf.concat(draws, 0)
