"""Dataset directories -> tf.data of decoded GraphTensors.

A decoded GraphTensor differs from a record (docs/formats.md) only in its configs: K configs as
dense tensors, or all configs, where K stands for a ragged dimension.

| part | feature | type |
|---|---|---|
| context | module_id | string [1] |
| | config_id | int64 [1, K]; -1 is padding |
| | config_runtime | int64 [1, K], ns; -1 where not measured |
| | config_runtime_normalizer | int64 [1, K], ns, tile only |
| | relative_runtime | int64 [1, K], compared by losses: in ns; for tile see below |
| | config_feat | float32 [1, K, 24], tile only |
| node set config_op | config_feat | int8 [NC, K, 18], layout only |

The relative_runtime of tile is runtime / normalizer in units of 2^-32.
"""

from __future__ import annotations

from collections.abc import Mapping
import os

import tensorflow as tf

from tpu_graphs import errors
from tpu_graphs.compat import tfgnn
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import records
from tpu_graphs.dataset import schema
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib

PADDING = -1  # `config_id` of a config that fills up a module with fewer than K configs.
_SHUFFLE_BYTES = 256 << 20
# Converting TF-GNN's functions with AutoGraph would take seconds.
_UNCONVERTED = tf.autograph.experimental.do_not_convert
_FIXED_POINT = 2.0**32
NO_LAYOUT = -1  # Value of padded layout configs.
# Context feature -> value of padded configs; 0 for other features.
CONFIG_FILLERS = {
  'config_id': PADDING,
  'config_runtime': module_lib.UNMEASURED,
  'config_runtime_normalizer': module_lib.UNMEASURED,
  'relative_runtime': module_lib.UNMEASURED,
}


def load(
  directory: directory_lib.DatasetDirectory | str | os.PathLike[str],
  split: str,
  *,
  configs_per_module: int | None = None,
  chunked: bool = False,
  shuffle: bool = False,
  seed: int = 0,
  first_epoch: int = 0,
  epochs: int | None = 1,
) -> tf.data.Dataset:
  """Returns a dataset of decoded GraphTensors (see the module's docstring), one per record.

  Args:
    directory: a dataset directory or its path.
    split: 'train', 'valid' or 'test'.
    configs_per_module: K, the number of configs that are sampled from each record, again in each
      epoch, before they are decoded; a record with fewer is padded. None takes all configs in their
      order.
    chunked: instead of a sample, take all configs in their order in chunks of K: a GraphTensor
      per chunk.
    shuffle: whether the records come in another order each epoch; otherwise they come in the order
      of the shards.
    seed: decides samples and order, together with the epoch's number alone: epoch 3 is the same
      whether or not epochs 0 to 2 were read before.
    first_epoch: number of the first epoch.
    epochs: number of epochs; None never ends.

  Raises:
    InputError: see `open_directory` and `DatasetDirectory.split`.
  """
  if not isinstance(directory, directory_lib.DatasetDirectory):
    directory = directory_lib.open_directory(directory)
  if chunked and configs_per_module is None:
    raise errors.InputError(
      'size of the chunks missing', where='configs_per_module', expected='>= 1'
    )
  if configs_per_module is not None and configs_per_module < 1:
    raise errors.InputError(
      'too few configs', where='configs_per_module', found=configs_per_module, expected='>= 1'
    )
  shards = directory.split(split)
  paths = [os.path.join(directory.path, shard.name) for shard in shards.shards]
  window = max(1, min(shards.records, _SHUFFLE_BYTES * shards.records // max(shards.bytes, 1)))
  num_extra = directory.manifest.choices.num_extra
  spec = schema.graph_spec(directory.kind, num_extra=num_extra)

  def one_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
    files = tf.constant(paths)
    if shuffle:
      files = _permuted(files, mix(seed, epoch, 0))
    serialized = tf.data.Dataset.from_tensor_slices(files).interleave(
      tf.data.TFRecordDataset, cycle_length=min(len(paths), 16)
    )
    if shuffle:
      # tf.data's own shuffle takes no seed that depends on the epoch if the program has set a
      # global seed.
      windows = serialized.batch(window)
      serialized = windows.map(lambda data: _permuted(data, mix(seed, epoch, 1))).unbatch()
    return serialized.enumerate().map(lambda i, data: (data, mix(seed, epoch, 2 + i)))

  def decode_one(data: tf.Tensor, sample_seed: tf.Tensor) -> tfgnn.GraphTensor:
    graph = tfgnn.parse_single_example(spec, data)
    if configs_per_module is None:
      return decode(graph, directory.kind)
    order = _permuted(tf.range(num_configs(graph)), sample_seed)
    return decode(
      graph, directory.kind, chosen=order[:configs_per_module], pad_to=configs_per_module
    )

  end = first_epoch + epochs if epochs is not None else tf.int64.max
  numbers = tf.data.Dataset.range(first_epoch, end)
  serialized = numbers.flat_map(one_epoch)
  if chunked and configs_per_module is not None:
    without_seeds = serialized.map(lambda data, _: data)
    return _chunks(without_seeds, directory.kind, configs_per_module, num_extra=num_extra)
  return serialized.map(_UNCONVERTED(decode_one), num_parallel_calls=tf.data.AUTOTUNE)


def of_module(module: module_lib.Module, *, configs_per_module: int) -> tf.data.Dataset:
  """Returns all configs of one module in chunks of K, as `load` does with `chunked`."""
  return _chunks(
    tf.data.Dataset.from_tensors(records.encode_whole(module)),
    module.kind,
    configs_per_module,
    num_extra=module.num_extra,
  )


def _chunks(
  serialized: tf.data.Dataset, kind: str, size: int, *, num_extra: int = 0
) -> tf.data.Dataset:
  """Returns a GraphTensor for each chunk of `size` configs of the records."""
  spec = schema.graph_spec(kind, num_extra=num_extra)

  def of_record(graph: tfgnn.GraphTensor) -> tf.data.Dataset:
    total = num_configs(graph)

    def chunk(start: tf.Tensor) -> tfgnn.GraphTensor:
      start = tf.cast(start, tf.int32)
      chosen = tf.range(start, tf.minimum(start + size, total))
      return decode(graph, kind, chosen=chosen, pad_to=size)

    return tf.data.Dataset.range(0, tf.cast(total, tf.int64), size).map(_UNCONVERTED(chunk))

  graphs = serialized.map(
    _UNCONVERTED(lambda data: tfgnn.parse_single_example(spec, data)),
    num_parallel_calls=tf.data.AUTOTUNE,
  )
  return graphs.flat_map(_UNCONVERTED(of_record))


def num_configs(graph: tfgnn.GraphTensor) -> tf.Tensor:
  """Returns the number of configs C of one record's GraphTensor, int32 scalar."""
  return tf.shape(graph.context['config_id'].values)[0]


def _permuted(values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """Returns the rows of `values` in an order decided by `seed`, int64 [2], and their number."""
  rows = tf.range(tf.shape(values)[0])
  return tf.gather(values, tf.random.experimental.stateless_shuffle(rows, seed=seed))


def mix(seed: int, epoch: tf.Tensor, index: tf.Tensor | int) -> tf.Tensor:
  """Returns a seed, int64 [2], for number `index` of the random choices of an epoch."""
  key = tf.stack([tf.cast(seed, tf.int64), epoch])
  return tf.random.experimental.stateless_fold_in(key, tf.cast(index, tf.int64))


def decode(
  graph: tfgnn.GraphTensor, kind: str, *, chosen: tf.Tensor | None = None, pad_to: int | None = None
) -> tfgnn.GraphTensor:
  """Decodes the configs of one record.

  Args:
    graph: scalar GraphTensor of a record, as TF-GNN parses it.
    kind: 'tile' or 'layout'.
    chosen: int32 [k], indices of the configs to decode, or None for all.
    pad_to: K >= k, given with `chosen`: padding fills up the rest.

  Returns:
    A scalar GraphTensor as the module's docstring describes it.
  """
  context = {
    name: value.values if isinstance(value, tf.RaggedTensor) else value
    for name, value in graph.context.features.items()
  }
  take_all = chosen is None
  if take_all:
    chosen = tf.range(num_configs(graph))

  def finish(values: tf.Tensor, filler: int, axis: int) -> tf.Tensor:
    """Pads `axis` from size k to K, or makes it ragged."""
    if take_all:
      lengths = tf.fill([tf.shape(values)[0]], tf.shape(chosen)[0])
      flat = tf.reshape(values, [-1, *values.shape[2:]])
      return tf.RaggedTensor.from_row_lengths(flat, lengths)
    missing = pad_to - tf.shape(chosen)[0]
    padding = [[0, missing if i == axis else 0] for i in range(values.shape.rank)]
    padded = tf.pad(values, padding, constant_values=tf.constant(filler, values.dtype))
    shape = [pad_to if i == axis else size for i, size in enumerate(values.shape)]
    return tf.ensure_shape(padded, shape)

  values = {}
  for name in (*CONFIG_FILLERS, 'config_feat'):
    if name in context:
      values[name] = context[name] if take_all else tf.gather(context[name], chosen)
  values['relative_runtime'] = relative_runtimes(values)
  decoded = {'module_id': context['module_id']}
  for name, value in values.items():
    decoded[name] = finish(value[tf.newaxis], CONFIG_FILLERS.get(name, 0), 1)
  node_sets = {}
  if kind == 'layout':
    num_config_ops = graph.node_sets['config_op'].total_size
    length = tf.cast(num_config_ops, tf.int32) * features.NUM_LAYOUT_FEATURES
    # One slice of the bytes is one config, so that configs that are not sampled are never decoded.
    data = context['node_config_feat'][0]
    slices = tf.strings.substr(data, chosen * length, tf.ones_like(chosen) * length)
    layouts = tf.reshape(
      tf.io.decode_raw(slices, tf.int8),
      [tf.shape(chosen)[0], num_config_ops, features.NUM_LAYOUT_FEATURES],
    )
    layouts = tf.transpose(layouts, [1, 0, 2])  # [NC, k, 18]
    node_sets['config_op'] = {'config_feat': finish(layouts, NO_LAYOUT, 1)}
  return graph.replace_features(context=decoded, node_sets=node_sets)


def relative_runtimes(context: Mapping[str, tf.Tensor]) -> tf.Tensor:
  """Returns the runtimes that losses compare, int64, since float32 would merge different runtimes.

  Args:
    context: 'config_runtime' and, for tile, 'config_runtime_normalizer', int64 of one shape,
      which the result has too.
  """
  runtime = context['config_runtime']
  if 'config_runtime_normalizer' not in context:
    return runtime
  normalizer = tf.cast(tf.maximum(context['config_runtime_normalizer'], 1), tf.float64)
  ratio = tf.minimum(tf.cast(runtime, tf.float64) / normalizer, 2.0**30)
  fixed = tf.maximum(tf.cast(tf.round(ratio * _FIXED_POINT), tf.int64), 1)
  return tf.where(
    runtime == module_lib.UNMEASURED, tf.constant(module_lib.UNMEASURED, tf.int64), fixed
  )


def without_strings(graph: tfgnn.GraphTensor) -> tfgnn.GraphTensor:
  """Returns `graph` without its module ids: strings cannot be sent to a TPU."""
  context = {
    name: value for name, value in graph.context.features.items() if value.dtype != tf.string
  }
  return graph.replace_features(context=context)


def batch(
  dataset: tf.data.Dataset, batch_size: int, *, drop_remainder: bool = True
) -> tf.data.Dataset:
  """Merges each `batch_size` graphs into one GraphTensor with as many components.

  `batching` makes padded batches instead.

  Args:
    dataset: result of `load` with `configs_per_module`.
    batch_size: number of components, B.
    drop_remainder: whether a smaller last batch is left out, so that B is static.

  Returns:
    GraphTensors with B components: context features [B, K, ...].
  """
  return dataset.batch(batch_size, drop_remainder=drop_remainder).map(
    lambda graph: graph.merge_batch_to_components(), num_parallel_calls=tf.data.AUTOTUNE
  )
