"""Serialized records -> one padded GraphTensor, the content of a batch.

One `tf.io.parse_example` reads all records of a pack as flat values, which are the merged
components already except for the offsets of the edges. Configs are chosen by their runtimes alone,
so that only the chosen configs are decoded. The module consists of TensorFlow ops alone: pipelines
of them also run where there is no Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses

import tensorflow as tf

from tpu_graphs.compat import tfgnn
from tpu_graphs.input import loading
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib

CONFIG_SAMPLINGS = ('uniform', 'fastest_biased')
Parsed = Mapping[str, tf.RaggedTensor | tf.Tensor]
# The number of ops, padding included, is a multiple of this, since kernels are made and kept for
# each number of rows.
OPS_MULTIPLE = 16
# Name of a mask among parsed records: bool, which of the configurable ops a segment holds.
_KEPT = 'kept'
_UNMEASURED_TIME = 1e30  # Later than any other time that is drawn.


@dataclasses.dataclass(frozen=True)
class Decoder:
  """A decoder of serialized records to GraphTensors of B components, the last of them padding.

  Attributes:
    kind: 'tile' or 'layout'.
    components: number of components, B.
    num_extra: number of columns of `extra_feat`.
    with_ids: whether `module_id` is kept.
    segment_ops: the most ops that are kept of a record; None for no limit.
  """

  kind: str
  components: int
  num_extra: int = 0
  with_ids: bool = False
  segment_ops: int | None = None

  def parse(self, records: tf.Tensor) -> Parsed:
    """Returns the features of records by name.

    Args:
      records: string [m].

    Returns:
      Strings [m], and numbers ragged [m, flat length].
    """
    ints = tf.io.RaggedFeature(tf.int64)
    floats = tf.io.RaggedFeature(tf.float32)
    string = tf.io.FixedLenFeature([], tf.string)
    wanted = {
      'nodes/op.opcode': ints,
      'nodes/op.computation': ints,
      'nodes/op.feat': floats,
      'edges/operand.#source': ints,
      'edges/operand.#target': ints,
      'context/config_id': ints,
      'context/config_runtime': ints,
    }
    if self.num_extra:
      wanted['nodes/op.extra_feat'] = floats
    if self.with_ids:
      wanted['context/module_id'] = string
    if self.kind == 'tile':
      wanted |= {'context/config_feat': floats, 'context/config_runtime_normalizer': ints}
    else:
      wanted |= {'context/node_config_feat': string, 'edges/configures.#target': ints}
    return tf.io.parse_example(records, wanted)

  def graph(
    self,
    parsed: Parsed,
    chosen: tf.Tensor,
    real: tf.Tensor,
    *,
    totals: Mapping[str, tf.Tensor | int] | None = None,
    draws: tf.Tensor | None = None,
  ) -> tfgnn.GraphTensor:
    """Returns the GraphTensor of parsed records.

    Args:
      parsed: result of `parse`, m < B records.
      chosen: int32 [B, K], positions of configs in their records.
      real: bool [B, K], whether there is such a config.
      totals: 'ops', 'edges', 'config_ops' -> their number, padding included; None for padding of
        ops alone, up to the next multiple of `OPS_MULTIPLE`.
      draws: float32 [m, 2] in [0, 1), given with `segment_ops`: random numbers that decide the
        ranges of ops.
    """
    graph = parsed
    if draws is not None and self.segment_ops:
      graph = _segments(parsed, draws, self.segment_ops)
    names = {'ops': 'nodes/op.opcode', 'edges': 'edges/operand.#source'}
    if self.kind == 'layout':
      names['config_ops'] = 'edges/configures.#target'
    numbers = {name: tf.shape(graph[feature].flat_values)[0] for name, feature in names.items()}
    if totals is None:
      totals = numbers | {'ops': (numbers['ops'] // OPS_MULTIPLE + 1) * OPS_MULTIPLE}
    missing = {name: totals[name] - number for name, number in numbers.items()}
    splits = {name: graph[feature].row_splits for name, feature in names.items()}
    sizes = self._sizes(splits, totals)

    def pad(
      values: tf.Tensor, name: str, filler: tf.Tensor | int = 0, *, axis: int = 0
    ) -> tf.Tensor:
      """Pads `axis` of `values` to `totals[name]`."""
      rank = values.shape.rank
      padding = [[0, missing[name]]]
      if rank > 1:
        padding = tf.pad(padding, [[axis, rank - axis - 1], [0, 0]])
      shape = values.shape.as_list()
      shape[axis] = totals[name] if isinstance(totals[name], int) else None
      padded = tf.pad(values, padding, constant_values=tf.cast(filler, values.dtype))
      return tf.ensure_shape(padded, shape)

    def ends(features_: Sequence[str], name: str) -> list[tf.Tensor]:
      """Returns the ops at the ends of edges, counted in the batch instead of in records.

      Edges of padding end at the first op of padding.
      """
      splits = graph[features_[0]].row_splits
      record = tf.searchsorted(splits[1:], tf.range(numbers[name]), side='right')
      offset = tf.gather(graph['nodes/op.opcode'].row_splits, record)
      in_record = tf.stack([graph[feature].flat_values for feature in features_])
      in_batch = tf.cast(in_record, tf.int32) + offset
      return tf.unstack(pad(in_batch, name, numbers['ops'], axis=1), num=len(features_))

    opcode = graph['nodes/op.opcode'].flat_values
    computation = graph['nodes/op.computation'].flat_values
    opcode, computation = tf.unstack(pad(tf.stack([opcode, computation]), 'ops', axis=1), num=2)
    feat = tf.reshape(graph['nodes/op.feat'].flat_values, [-1, features.NUM_NODE_FEATURES])
    op_features = {'opcode': opcode, 'feat': pad(feat, 'ops'), 'computation': computation}
    if self.num_extra:
      extra = tf.reshape(graph['nodes/op.extra_feat'].flat_values, [-1, self.num_extra])
      op_features['extra_feat'] = pad(extra, 'ops')
    source, target = ends(['edges/operand.#source', 'edges/operand.#target'], 'edges')
    adjacency = tfgnn.Adjacency.from_indices(('op', source), ('op', target))
    operand = tfgnn.EdgeSet.from_fields(sizes=sizes['edges'], features={}, adjacency=adjacency)
    node_sets = {'op': tfgnn.NodeSet.from_fields(sizes=sizes['ops'], features=op_features)}
    edge_sets = {'operand': operand}
    if self.kind == 'layout':
      layouts = _layouts(parsed, chosen, real)
      if _KEPT in graph:
        layouts = tf.boolean_mask(layouts, graph[_KEPT])
      [target] = ends(['edges/configures.#target'], 'config_ops')
      source = tf.ensure_shape(tf.range(totals['config_ops']), target.shape)
      node_sets['config_op'] = tfgnn.NodeSet.from_fields(
        sizes=sizes['config_ops'],
        features={'config_feat': pad(layouts, 'config_ops', loading.NO_LAYOUT)},
      )
      adjacency = tfgnn.Adjacency.from_indices(('config_op', source), ('op', target))
      edge_sets['configures'] = tfgnn.EdgeSet.from_fields(
        sizes=sizes['config_ops'], features={}, adjacency=adjacency
      )
    context = self._configs(parsed, chosen, real)
    if self.with_ids:
      ids = parsed['context/module_id']
      missing_ids = self.components - tf.shape(ids)[0]
      ids = tf.pad(ids, [[0, missing_ids]], constant_values='')
      context['module_id'] = tf.ensure_shape(ids, [self.components])
    return tfgnn.GraphTensor.from_pieces(
      context=tfgnn.Context.from_fields(
        features=context, sizes=tf.ones([self.components], tf.int32)
      ),
      node_sets=node_sets,
      edge_sets=edge_sets,
    )

  def _sizes(
    self, splits: Mapping[str, tf.Tensor], totals: Mapping[str, tf.Tensor | int]
  ) -> dict[str, tf.Tensor]:
    """Returns the sizes of components, int32 [B]; the last component takes all padding.

    Args:
      splits: name -> row splits of records, int32 [m + 1].
      totals: name -> sum of the sizes, padding included.
    """
    starts = row_starts(tf.stack(list(splits.values())), self.components)
    ends = tf.stack([totals[name] for name in splits])
    bounds = tf.concat([starts, ends[:, tf.newaxis]], 1)
    sizes = tf.unstack(bounds[:, 1:] - bounds[:, :-1], num=len(splits))
    return dict(zip(splits, sizes, strict=True))

  def _configs(self, parsed: Parsed, chosen: tf.Tensor, real: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns context features of the chosen configs, [B, K, ...]."""
    starts = row_starts(parsed['context/config_id'].row_splits, self.components)
    rows = tf.where(real, chosen + starts[:, tf.newaxis], 0)
    names = [name for name in loading.CONFIG_FILLERS if f'context/{name}' in parsed]
    numbers = tf.stack([parsed[f'context/{name}'].flat_values for name in names])
    numbers = _never_empty(numbers, axis=1)
    values = tf.where(real, tf.gather(numbers, rows, axis=1), loading.PADDING)
    context = dict(zip(names, tf.unstack(values, num=len(names)), strict=True))
    context['relative_runtime'] = loading.relative_runtimes(context)
    if self.kind == 'tile':
      flat = parsed['context/config_feat'].flat_values
      feats = tf.reshape(flat, [-1, features.NUM_TILE_FEATURES])
      taken = tf.gather(_never_empty(feats, axis=0), rows)
      context['config_feat'] = tf.where(real[..., tf.newaxis], taken, 0.0)
    return context


def _never_empty(values: tf.Tensor, *, axis: int) -> tf.Tensor:
  """Returns `values`, or zeros of size 1 along `axis` where they are empty there.

  So 0 is always a valid index. Values that are not empty are not copied.
  """
  missing = tf.cast(tf.shape(values)[axis] == 0, tf.int32)
  return tf.pad(values, [[0, missing if i == axis else 0] for i in range(values.shape.rank)])


def row_starts(splits: tf.Tensor, number: int) -> tf.Tensor:
  """Returns the starts of `number` > m rows, [..., number]; rows beyond m are empty.

  Args:
    splits: row splits, [..., m + 1].
    number: number of rows.
  """
  last = tf.shape(splits)[-1] - 1
  return tf.gather(splits, tf.minimum(tf.range(number), last), axis=-1)


def sample_configs(
  parsed: Parsed, draws: tf.Tensor, *, components: int, configs: int, sampling: str
) -> tuple[tf.Tensor, tf.Tensor]:
  """Draws K configs of each record without replacement, configs without a runtime last.

  Args:
    parsed: result of `Decoder.parse`, m < B records.
    draws: float32 [sum of C] in (0, 1], a random number for each config of the records.
    components: number of components, B.
    configs: number of configs that are drawn, K.
    sampling: 'uniform', or 'fastest_biased': in proportion to 1 / (rank + 1), as in
      `selection.sample`.

  Returns:
    int32 [B, K], positions of configs in their records, and bool [B, K], whether there is such a
    config: a record may have fewer than K.
  """
  runtime = parsed['context/config_runtime']
  # Sampling without replacement takes the earliest exponential times, each divided by its weight
  # (Efraimidis, Spirakis: Weighted random sampling with a reservoir, 2006).
  times = -tf.math.log(draws)
  if sampling == 'fastest_biased':
    times *= tf.cast(_ranks(parsed) + 1, tf.float32)
  is_unmeasured = runtime.flat_values == module_lib.UNMEASURED
  times = tf.where(is_unmeasured, _UNMEASURED_TIME * (1 + draws), times)
  earliest = runtime.with_flat_values(-times).to_tensor(-tf.float32.max, shape=[components, None])
  # K fillers follow, so that K can be taken from each record.
  earliest = tf.pad(earliest, [[0, 0], [0, configs]], constant_values=-tf.float32.max)
  times, chosen = tf.math.top_k(earliest, configs)
  return chosen, times > -tf.float32.max


def _ranks(parsed: Parsed) -> tf.Tensor:
  """Returns the rank of each config in its record, int32 [sum of C].

  The fastest config has rank 0; of equal configs the earlier one comes first.
  """
  runtime = parsed['context/config_runtime']
  runtimes = {'config_runtime': runtime.flat_values}
  if 'context/config_runtime_normalizer' in parsed:
    normalizer = parsed['context/config_runtime_normalizer']
    runtimes['config_runtime_normalizer'] = normalizer.flat_values
  relative = loading.relative_runtimes(runtimes)
  rows = runtime.value_rowids()
  measured_first = tf.where(relative == module_lib.UNMEASURED, tf.int64.max, relative)
  by_speed = tf.argsort(measured_first, stable=True)
  by_record = tf.argsort(tf.gather(rows, by_speed), stable=True)
  order = tf.gather(by_speed, by_record)  # Sorted by record, then by speed.
  return tf.math.invert_permutation(order) - tf.gather(runtime.row_splits, rows)


def consecutive_configs(
  parsed: Parsed, first: tf.Tensor, *, components: int, configs: int
) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns K configs of each record from number `first`, int32 [m], on, as `sample_configs`."""
  lengths = parsed['context/config_id'].row_lengths()
  padding = [[0, components - tf.shape(first)[0]]]
  first = tf.pad(first, padding)
  lengths = tf.pad(lengths, padding)
  chosen = tf.ensure_shape(first[:, tf.newaxis] + tf.range(configs), [components, configs])
  return chosen, chosen < lengths[:, tf.newaxis]


def _segments(
  parsed: Parsed, draws: tf.Tensor, length: int
) -> dict[str, tf.RaggedTensor | tf.Tensor]:
  """Returns parsed records with a range of `length` ops of each larger record.

  The result includes the mask `_KEPT` of the configurable ops.
  """
  opcode = parsed['nodes/op.opcode']
  lengths = opcode.row_lengths()
  configured = parsed.get('edges/configures.#target')
  starts = _segment_starts(lengths, length, draws, configured)
  kept_lengths = tf.minimum(lengths, length)
  rows = opcode.value_rowids()
  in_record = tf.range(tf.shape(rows)[0]) - tf.gather(opcode.row_splits, rows)
  first = tf.gather(starts, rows)
  kept = (first <= in_record) & (in_record < first + length)
  segments = dict(parsed)
  for name in ('opcode', 'computation', 'feat', 'extra_feat'):
    value = parsed.get(f'nodes/op.{name}')
    if value is None:
      continue
    rows_of_ops = tf.reshape(value.flat_values, [tf.shape(kept)[0], -1])
    flat = tf.reshape(tf.boolean_mask(rows_of_ops, kept), [-1])
    width = tf.shape(rows_of_ops)[1]
    segments[f'nodes/op.{name}'] = tf.RaggedTensor.from_row_lengths(
      flat, kept_lengths * width, validate=False
    )
  for names in (['edges/operand.#source', 'edges/operand.#target'], ['edges/configures.#target']):
    if names[0] not in parsed:
      continue
    rows = parsed[names[0]].value_rowids()
    offsets = tf.gather(starts, rows)
    limits = tf.gather(kept_lengths, rows)
    ends = [tf.cast(parsed[name].flat_values, tf.int32) - offsets for name in names]
    kept = tf.reduce_all([(end >= 0) & (end < limits) for end in ends], 0)
    for name, end in zip(names, ends, strict=True):
      segments[name] = tf.RaggedTensor.from_value_rowids(
        tf.boolean_mask(end, kept),
        tf.boolean_mask(rows, kept),
        nrows=parsed[name].nrows(),
        validate=False,
      )
    # The mask of configurable ops comes last and replaces the mask of edges.
    segments[_KEPT] = kept
  return segments


def _segment_starts(
  ops: tf.Tensor, length: int, draws: tf.Tensor, configured: tf.RaggedTensor | None
) -> tf.Tensor:
  """Returns the first op of the range that is kept of each record, int32 [m].

  The range holds a configurable op if the record has any.
  """
  last = ops - tf.minimum(ops, length)

  def draw(column: int, number: tf.Tensor) -> tf.Tensor:
    """Returns a random integer below `number`, int32 [m], for each record."""
    share = tf.cast(draws[:, column], tf.float64)
    return tf.cast(share * tf.cast(number, tf.float64), tf.int32)

  if configured is None:
    return draw(0, last + 1)
  numbers = configured.row_lengths()
  # One more target is needed for a last record without any.
  targets = tf.pad(tf.cast(configured.flat_values, tf.int32), [[0, 1]])
  some = tf.gather(targets, configured.row_starts() + draw(0, numbers))
  lower = tf.where(numbers > 0, tf.maximum(some - length + 1, 0), 0)
  upper = tf.where(numbers > 0, tf.minimum(some, last), last)
  return lower + draw(1, upper - lower + 1)


def _layouts(parsed: Parsed, chosen: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
  """Returns the layouts of the configurable ops of all records in the chosen configs.

  The result is int8 [NC, K, 18].
  """
  config_ops, records = parsed['edges/configures.#target'], parsed['context/node_config_feat']
  configs = chosen.shape[1]
  num_bytes = config_ops.row_lengths() * features.NUM_LAYOUT_FEATURES
  starts = tf.where(real, chosen, 0)[: tf.shape(records)[0]] * num_bytes[:, tf.newaxis]

  def slices_of_record(record: tuple[tf.Tensor, tf.Tensor, tf.Tensor]) -> tf.Tensor:
    data, first_bytes, length = record
    return tf.strings.substr(data, first_bytes, tf.fill([configs], length))

  # One slice of the bytes is one config, so that configs that are not chosen are never decoded.
  # Records are sliced one by one, since one substr over all records would copy their bytes for each
  # config.
  slices = tf.map_fn(
    slices_of_record,
    (records, starts, num_bytes),
    fn_output_signature=tf.TensorSpec([configs], tf.string),
  )
  decoded = tf.io.decode_raw(tf.strings.reduce_join(slices, 0), tf.int8)
  num_config_ops = tf.shape(config_ops.flat_values)[0]
  layouts = tf.reshape(decoded, [configs, num_config_ops, features.NUM_LAYOUT_FEATURES])
  mask = tf.gather(real, config_ops.value_rowids())[..., tf.newaxis]
  return tf.where(mask, tf.transpose(layouts, [1, 0, 2]), tf.constant(loading.NO_LAYOUT, tf.int8))
