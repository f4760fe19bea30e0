"""Dataset directories -> tf.data of decoded GraphTensors.

A decoded GraphTensor differs from a record (docs/formats.md) only in its configs: K of them as dense tensors, or all of
them, where K stands for a ragged dimension.

| part | feature | type |
|---|---|---|
| context | module_id | string [1] |
| | config_id | int64 [1, K]; -1 is padding |
| | config_runtime | int64 [1, K], ns; -1 where not measured |
| | config_runtime_normalizer | int64 [1, K], ns, tile only |
| | relative_runtime | int64 [1, K], what losses compare: ns; for tile runtime / normalizer in units of 2^-32 |
| | config_feat | float32 [1, K, 24], tile only |
| node set config_op | config_feat | int8 [NC, K, 18], layout only |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import json
import os
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf

from tpu_graphs import errors
from tpu_graphs.compat import tfgnn
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.dataset import records
from tpu_graphs.dataset import schema
from tpu_graphs.dataset import statistics as statistics_lib
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib

PADDING = -1  # `config_id` of a config that fills up a module with fewer than K configs.
_SHUFFLE_BYTES = 256 << 20
_UNCONVERTED = tf.autograph.experimental.do_not_convert  # Converting what TF-GNN does would take seconds.
_FIXED_POINT = 2.0**32
NO_LAYOUT = -1  # What padded layout configs consist of.
# Context feature -> what padded configs have; 0 for the rest.
CONFIG_FILLERS = {'config_id': PADDING, 'config_runtime': module_lib.UNMEASURED,
                  'config_runtime_normalizer': module_lib.UNMEASURED, 'relative_runtime': module_lib.UNMEASURED}


@dataclasses.dataclass(frozen=True, eq=False)
class DatasetDirectory:
  """A dataset directory whose shards were found complete.

  Attributes:
    path: of the directory.
    manifest: its manifest.
    statistics: the content of `statistics.json`; `statistics.parse` reads it.
  """
  path: str
  manifest: manifest_lib.Manifest
  statistics: dict[str, Any]

  @property
  def kind(self) -> str:
    return self.manifest.kind

  def split(self, name: str) -> manifest_lib.Split:
    """The split `name`.

    Raises:
      InputError: there is no such split.
    """
    if name not in self.manifest.splits:
      raise errors.InputError('split missing', path=self.path, found=' '.join(self.manifest.splits), expected=name,
                              fix='choose another split, or convert with --split')
    return self.manifest.splits[name]

  def check_shards(self) -> None:
    """Reads every shard and compares its checksum.

    Raises:
      InputError: a shard is damaged; names it.
    """
    for split in self.manifest.splits.values():
      for shard in split.shards:
        path = os.path.join(self.path, shard.name)
        checksum = 0
        with tf.io.gfile.GFile(path, 'rb') as file:
          while block := file.read(16 << 20):
            checksum = google_crc32c.extend(checksum, block)
        if f'{checksum:08x}' != shard.crc32c:
          raise errors.InputError('damaged shard', path=path, found=f'crc32c {checksum:08x}', expected=shard.crc32c,
                                  fix='copy or convert the dataset again')


def open_directory(directory: str | os.PathLike[str]) -> DatasetDirectory:
  """Opens a dataset directory, checking that each shard of its manifest is there in full length and no other.

  Raises:
    InputError: no dataset, or missing, extra or truncated shards; names them.
  """
  directory = os.fspath(directory)
  manifest = read_manifest(directory)
  for fault in shard_faults(directory, manifest):
    raise fault
  statistics = read_statistics(os.path.join(directory, manifest_lib.STATISTICS_NAME),
                               num_extra=manifest.choices.num_extra)
  return DatasetDirectory(directory, manifest, statistics)


def read_manifest(directory: str) -> manifest_lib.Manifest:
  """The manifest of a dataset directory.

  Raises:
    InputError: there is none, or it is damaged or of another format version.
  """
  path = os.path.join(directory, manifest_lib.FILE_NAME)
  if not tf.io.gfile.exists(path):
    raise errors.InputError('no dataset', path=directory, found=f'no {manifest_lib.FILE_NAME}',
                            expected='a directory that convert has finished')
  return manifest_lib.loads(read_text(path), path=path)


def shard_faults(directory: str, manifest: manifest_lib.Manifest) -> Iterator[errors.InputError]:
  """What of the files in a dataset directory is missing, extra, or not as long as `manifest` says, one by one."""
  for name in manifest_lib.SPLITS:
    shards = manifest.splits[name].shards if name in manifest.splits else ()
    expected = {shard.name: shard.bytes for shard in shards}
    folder = os.path.join(directory, name)
    found = {f'{name}/{file}' for file in (tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else ())}
    for shard in sorted(found ^ set(expected)):
      yield errors.InputError('shard missing' if shard in expected else 'extra file',
                              path=os.path.join(directory, shard),
                              expected=f'the {len(expected)} shards of {manifest_lib.FILE_NAME}',
                              fix='copy or convert the dataset again' if shard in expected else 'remove it')
    for shard in sorted(found & set(expected)):
      length = tf.io.gfile.stat(os.path.join(directory, shard)).length
      if length != expected[shard]:
        yield errors.InputError('shard of wrong size', path=os.path.join(directory, shard), found=f'{length} bytes',
                                expected=f'{expected[shard]} bytes', fix='copy or convert the dataset again')


def read_statistics(path: str, *, num_extra: int) -> dict[str, Any]:
  """The content of a `statistics.json`, checked; see `statistics.parse`.

  Raises:
    InputError: it is missing, damaged, of another format version, or of other data.
  """
  with errors.in_file(path):
    try:
      content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
      raise errors.InputError('damaged statistics', found=error, fix='copy the directory again') from error
    statistics_lib.parse(content, num_extra=num_extra)
  return content


def read_text(path: str) -> str:
  """The content of a text file of a dataset or run directory.

  Raises:
    InputError: it is missing, cannot be read, or is no text.
  """
  try:
    with tf.io.gfile.GFile(path) as file:
      return file.read()
  except tf.errors.NotFoundError as error:
    raise errors.InputError('file missing', path=path,
                            fix='check its name, or copy the directory it belongs to again') from error
  except (UnicodeDecodeError, tf.errors.OpError) as error:
    raise errors.InputError('cannot read file', path=path, found=' '.join(str(error).split())) from error


@contextlib.contextmanager
def damage_explained(directory: DatasetDirectory) -> Iterator[None]:
  """Names the shard where reading fails inside the block: TensorFlow's error tells neither file nor record."""
  try:
    yield
  except (tf.errors.DataLossError, tf.errors.InvalidArgumentError):
    directory.check_shards()
    raise


def load(directory: DatasetDirectory | str | os.PathLike[str], split: str, *, configs_per_module: int | None = None,
         chunked: bool = False, shuffle: bool = False, seed: int = 0, first_epoch: int = 0,
         epochs: int | None = 1) -> tf.data.Dataset:
  """A dataset of decoded GraphTensors (see the module's docstring), one per record.

  Args:
    directory: a dataset directory or its path.
    split: 'train', 'valid' or 'test'.
    configs_per_module: K configs sampled anew from each record in each epoch, before they are decoded; a record with
      fewer is padded. None takes all of them in their order.
    chunked: instead of a sample, take all configs in their order in chunks of K: a GraphTensor per chunk.
    shuffle: whether the records come in another order each epoch; else always in the order of the shards.
    seed: decides samples and order, together with the epoch's number only: epoch 3 is the same whether or not epochs
      0 to 2 were read before.
    first_epoch: number of the first epoch.
    epochs: how many; None never ends.

  Raises:
    InputError: see `open_directory` and `DatasetDirectory.split`.
  """
  if not isinstance(directory, DatasetDirectory):
    directory = open_directory(directory)
  if chunked and configs_per_module is None:
    raise errors.InputError('size of the chunks missing', where='configs_per_module', expected='>= 1')
  if configs_per_module is not None and configs_per_module < 1:
    raise errors.InputError('too few configs', where='configs_per_module', found=configs_per_module, expected='>= 1')
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
        tf.data.TFRecordDataset, cycle_length=min(len(paths), 16))
    if shuffle:
      # tf.data's own shuffle takes no seed that depends on the epoch if the program has set a global seed.
      serialized = serialized.batch(window).map(lambda data: _permuted(data, mix(seed, epoch, 1))).unbatch()
    return serialized.enumerate().map(lambda i, data: (data, mix(seed, epoch, 2 + i)))

  def decode_one(data: tf.Tensor, sample_seed: tf.Tensor) -> tfgnn.GraphTensor:
    graph = tfgnn.parse_single_example(spec, data)
    if configs_per_module is None:
      return decode(graph, directory.kind)
    order = _permuted(tf.range(num_configs(graph)), sample_seed)
    return decode(graph, directory.kind, chosen=order[:configs_per_module], pad_to=configs_per_module)

  numbers = tf.data.Dataset.range(first_epoch, first_epoch + epochs if epochs is not None else tf.int64.max)
  serialized = numbers.flat_map(one_epoch)
  if chunked and configs_per_module is not None:
    return _chunks(serialized.map(lambda data, _: data), directory.kind, configs_per_module, num_extra=num_extra)
  return serialized.map(_UNCONVERTED(decode_one), num_parallel_calls=tf.data.AUTOTUNE)


def of_module(module: module_lib.Module, *, configs_per_module: int) -> tf.data.Dataset:
  """All configs of one module in chunks of K, as `load` gives them with `chunked`."""
  return _chunks(tf.data.Dataset.from_tensors(records.encode_whole(module)), module.kind, configs_per_module,
                 num_extra=module.num_extra)


def _chunks(serialized: tf.data.Dataset, kind: str, size: int, *, num_extra: int = 0) -> tf.data.Dataset:
  spec = schema.graph_spec(kind, num_extra=num_extra)

  def of_record(graph: tfgnn.GraphTensor) -> tf.data.Dataset:
    total = num_configs(graph)

    def chunk(start: tf.Tensor) -> tfgnn.GraphTensor:
      start = tf.cast(start, tf.int32)
      return decode(graph, kind, chosen=tf.range(start, tf.minimum(start + size, total)), pad_to=size)

    return tf.data.Dataset.range(0, tf.cast(total, tf.int64), size).map(_UNCONVERTED(chunk))

  graphs = serialized.map(_UNCONVERTED(lambda data: tfgnn.parse_single_example(spec, data)),
                          num_parallel_calls=tf.data.AUTOTUNE)
  return graphs.flat_map(_UNCONVERTED(of_record))


def num_configs(graph: tfgnn.GraphTensor) -> tf.Tensor:
  """The number of configs C of one record's GraphTensor, int32 scalar."""
  return tf.shape(graph.context['config_id'].values)[0]


def _permuted(values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """The rows of `values` in an order that depends on `seed`, int64 [2], and their number only."""
  return tf.gather(values, tf.random.experimental.stateless_shuffle(tf.range(tf.shape(values)[0]), seed=seed))


def mix(seed: int, epoch: tf.Tensor, index: tf.Tensor | int) -> tf.Tensor:
  """A seed, int64 [2], for what is `index` of an epoch."""
  key = tf.stack([tf.cast(seed, tf.int64), epoch])
  return tf.random.experimental.stateless_fold_in(key, tf.cast(index, tf.int64))


def decode(graph: tfgnn.GraphTensor, kind: str, *, chosen: tf.Tensor | None = None,
           pad_to: int | None = None) -> tfgnn.GraphTensor:
  """Decodes the configs of one record.

  Args:
    graph: scalar GraphTensor of a record, as tfgnn parses it.
    kind: 'tile' or 'layout'.
    chosen: int32 [k], indices of the configs to decode, or None for all.
    pad_to: K >= k, given with `chosen`: padding makes up the rest.

  Returns:
    A scalar GraphTensor as the module's docstring describes it.
  """
  context = {name: value.values if isinstance(value, tf.RaggedTensor) else value
             for name, value in graph.context.features.items()}
  take_all = chosen is None
  if take_all:
    chosen = tf.range(num_configs(graph))

  def finish(values: tf.Tensor, filler: int, axis: int) -> tf.Tensor:
    """Brings `axis`, of size k, to K, or makes it ragged."""
    if take_all:
      lengths = tf.fill([tf.shape(values)[0]], tf.shape(chosen)[0])
      return tf.RaggedTensor.from_row_lengths(tf.reshape(values, [-1, *values.shape[2:]]), lengths)
    padding = [[0, pad_to - tf.shape(chosen)[0] if i == axis else 0] for i in range(values.shape.rank)]
    padded = tf.pad(values, padding, constant_values=tf.constant(filler, values.dtype))
    return tf.ensure_shape(padded, [pad_to if i == axis else size for i, size in enumerate(values.shape)])

  values = {name: context[name] if take_all else tf.gather(context[name], chosen)
            for name in (*CONFIG_FILLERS, 'config_feat') if name in context}
  values['relative_runtime'] = relative_runtimes(values)
  decoded = {name: finish(value[tf.newaxis], CONFIG_FILLERS.get(name, 0), 1) for name, value in values.items()}
  node_sets = {}
  if kind == 'layout':
    num_config_ops = graph.node_sets['config_op'].total_size
    length = tf.cast(num_config_ops, tf.int32) * features.NUM_LAYOUT_FEATURES
    # One slice of the bytes is one config, so what is not sampled is never decoded.
    slices = tf.strings.substr(context['node_config_feat'][0], chosen * length, tf.ones_like(chosen) * length)
    layouts = tf.reshape(tf.io.decode_raw(slices, tf.int8),
                         [tf.shape(chosen)[0], num_config_ops, features.NUM_LAYOUT_FEATURES])
    node_sets['config_op'] = {'config_feat': finish(tf.transpose(layouts, [1, 0, 2]), NO_LAYOUT, 1)}  # [NC, K, 18]
  return graph.replace_features(context={'module_id': context['module_id'], **decoded}, node_sets=node_sets)


def relative_runtimes(context: Mapping[str, tf.Tensor]) -> tf.Tensor:
  """What losses compare, int64: exact integers, since float32 would merge different runtimes.

  Args:
    context: 'config_runtime' and, for tile, 'config_runtime_normalizer', int64 of one shape, which the result has too.
  """
  runtime = context['config_runtime']
  if 'config_runtime_normalizer' not in context:
    return runtime
  normalizer = tf.cast(tf.maximum(context['config_runtime_normalizer'], 1), tf.float64)
  ratio = tf.minimum(tf.cast(runtime, tf.float64) / normalizer, 2.0**30)
  fixed = tf.maximum(tf.cast(tf.round(ratio * _FIXED_POINT), tf.int64), 1)
  return tf.where(runtime == module_lib.UNMEASURED, tf.constant(module_lib.UNMEASURED, tf.int64), fixed)


def smallest_module(kind: str, *, num_extra: int = 0) -> module_lib.Module:
  """A module of one op with one config, all zeros, to make a model or a function with before any data is there.

  Args:
    kind: 'tile' or 'layout'.
    num_extra: number of columns of its extra features.
  """
  arrays: dict[str, dict[str, Any]] = {
      'tile': {'config_feat': np.zeros((1, features.NUM_TILE_FEATURES), np.float32),
               'config_runtime_normalizers': np.array([module_lib.UNMEASURED])},
      'layout': {'node_config_ids': np.array([0]),
                 'node_config_feat': np.zeros((1, 1, features.NUM_LAYOUT_FEATURES), np.int8)}}
  return module_lib.Module(
      module_id='smallest', kind=kind, node_opcode=np.array([0]), edge_index=np.zeros((0, 2), np.int64),
      node_feat=np.zeros((1, features.NUM_NODE_FEATURES), np.float32), node_splits=np.array([0, 1]),
      extra_feat=np.zeros((1, num_extra), np.float32),
      config_runtime=np.array([module_lib.UNMEASURED]), config_id=np.array([0]), **arrays[kind])


def without_strings(graph: tfgnn.GraphTensor) -> tfgnn.GraphTensor:
  """`graph` without its module ids: strings cannot be sent to a TPU."""
  context = {name: value for name, value in graph.context.features.items() if value.dtype != tf.string}
  return graph.replace_features(context=context)


def batch(dataset: tf.data.Dataset, batch_size: int, *, drop_remainder: bool = True) -> tf.data.Dataset:
  """Merges `batch_size` graphs each into one GraphTensor with as many components; `batching` has padded batches.

  Args:
    dataset: of `load` with `configs_per_module`.
    batch_size: B.
    drop_remainder: whether a smaller last batch is left out, so that B is static.

  Returns:
    GraphTensors with B components: context features [B, K, ...].
  """
  return dataset.batch(batch_size, drop_remainder=drop_remainder).map(lambda graph: graph.merge_batch_to_components(),
                                                            num_parallel_calls=tf.data.AUTOTUNE)
