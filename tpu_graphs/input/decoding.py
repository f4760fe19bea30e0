"""Serialized records -> one padded GraphTensor: what batches consist of.

One `tf.io.parse_example` reads all records of a pack as flat values, which are the merged
components already but for the offsets of the edges. Which configs are taken is decided by their
runtimes alone, so that only those are decoded.
All of it is TensorFlow ops: a pipeline of them also runs where there is no Python.
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
OPS_MULTIPLE = (
  16  # Of ops, padding included: kernels are made anew for each number of rows, and kept.
)
_KEPT = 'kept'  # Of the configurable ops of parsed records those that a segment holds, bool.
_UNMEASURED_TIME = 1e30  # Later than any other time that is drawn.


@dataclasses.dataclass(frozen=True)
class Decoder:
  """Makes GraphTensors of B components, the last of them padding, from serialized records.

  Attributes:
    kind: 'tile' or 'layout'.
    components: B.
    num_extra: number of columns of `extra_feat`.
    with_ids: whether `module_id` is kept.
    segment_ops: the most ops that are kept of a record.
  """

  kind: str
  components: int
  num_extra: int = 0
  with_ids: bool = False
  segment_ops: int | None = None

  def parse(self, records: tf.Tensor) -> Parsed:
    """The features of records, string [m], under their names: strings [m], and numbers ragged
    [m, flat length].
    """
    ints, floats = (tf.io.RaggedFeature(dtype) for dtype in (tf.int64, tf.float32))
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
    """The GraphTensor of parsed records.

    Args:
      parsed: of `parse`, m < B records.
      chosen: int32 [B, K], positions of configs in their records.
      real: bool [B, K], whether there is such a config.
      totals: 'ops', 'edges', 'config_ops' -> their number, padding included; None for no more
        than up to the next multiple of `OPS_MULTIPLE` ops.
      draws: float32 [m, 2] in [0, 1), given with `segment_ops`: what ranges of ops are taken.
    """
    graph = (
      _segments(parsed, draws, self.segment_ops)
      if draws is not None and self.segment_ops
      else parsed
    )
    names = {'ops': 'nodes/op.opcode', 'edges': 'edges/operand.#source'}
    if self.kind == 'layout':
      names['config_ops'] = 'edges/configures.#target'
    numbers = {name: tf.shape(graph[feature].flat_values)[0] for name, feature in names.items()}
    if totals is None:
      totals = numbers | {'ops': (numbers['ops'] // OPS_MULTIPLE + 1) * OPS_MULTIPLE}
    missing = {name: totals[name] - number for name, number in numbers.items()}
    sizes = self._sizes(
      {name: graph[feature].row_splits for name, feature in names.items()}, totals
    )

    def pad(
      values: tf.Tensor, name: str, filler: tf.Tensor | int = 0, *, axis: int = 0
    ) -> tf.Tensor:
      rank = values.shape.rank
      padding = (
        tf.pad([[0, missing[name]]], [[axis, rank - axis - 1], [0, 0]])
        if rank > 1
        else [[0, missing[name]]]
      )
      shape = values.shape.as_list()
      shape[axis] = totals[name] if isinstance(totals[name], int) else None
      return tf.ensure_shape(
        tf.pad(values, padding, constant_values=tf.cast(filler, values.dtype)), shape
      )

    def ends(features_: Sequence[str], name: str) -> list[tf.Tensor]:
      """Ops at the ends of edges, counted in records -> counted in the batch; padding ends at
      the first of padding.
      """
      splits = graph[features_[0]].row_splits
      record = tf.searchsorted(splits[1:], tf.range(numbers[name]), side='right')
      offset = tf.gather(graph['nodes/op.opcode'].row_splits, record)
      values = (
        tf.cast(tf.stack([graph[feature].flat_values for feature in features_]), tf.int32) + offset
      )
      return tf.unstack(pad(values, name, numbers['ops'], axis=1), num=len(features_))

    opcode, computation = tf.unstack(
      pad(
        tf.stack([graph['nodes/op.opcode'].flat_values, graph['nodes/op.computation'].flat_values]),
        'ops',
        axis=1,
      ),
      num=2,
    )
    feat = tf.reshape(graph['nodes/op.feat'].flat_values, [-1, features.NUM_NODE_FEATURES])
    op_features = {'opcode': opcode, 'feat': pad(feat, 'ops'), 'computation': computation}
    if self.num_extra:
      extra = tf.reshape(graph['nodes/op.extra_feat'].flat_values, [-1, self.num_extra])
      op_features['extra_feat'] = pad(extra, 'ops')
    source, target = ends(['edges/operand.#source', 'edges/operand.#target'], 'edges')
    node_sets = {'op': tfgnn.NodeSet.from_fields(sizes=sizes['ops'], features=op_features)}
    edge_sets = {
      'operand': tfgnn.EdgeSet.from_fields(
        sizes=sizes['edges'],
        features={},
        adjacency=tfgnn.Adjacency.from_indices(('op', source), ('op', target)),
      )
    }
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
      edge_sets['configures'] = tfgnn.EdgeSet.from_fields(
        sizes=sizes['config_ops'],
        features={},
        adjacency=tfgnn.Adjacency.from_indices(('config_op', source), ('op', target)),
      )
    context = self._configs(parsed, chosen, real)
    if self.with_ids:
      ids = parsed['context/module_id']
      context['module_id'] = tf.ensure_shape(
        tf.pad(ids, [[0, self.components - tf.shape(ids)[0]]], constant_values=''),
        [self.components],
      )
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
    """Row splits of records, int32 [m + 1] -> sizes of components, int32 [B]; the last one takes
    all padding.
    """
    starts = row_starts(tf.stack(list(splits.values())), self.components)
    ends = tf.stack([totals[name] for name in splits])
    bounds = tf.concat([starts, ends[:, tf.newaxis]], 1)
    sizes = tf.unstack(bounds[:, 1:] - bounds[:, :-1], num=len(splits))
    return dict(zip(splits, sizes, strict=True))

  def _configs(self, parsed: Parsed, chosen: tf.Tensor, real: tf.Tensor) -> dict[str, tf.Tensor]:
    """Context features of the chosen configs, [B, K, ...]."""
    starts = row_starts(parsed['context/config_id'].row_splits, self.components)
    rows = tf.where(real, chosen + starts[:, tf.newaxis], 0)
    names = [name for name in loading.CONFIG_FILLERS if f'context/{name}' in parsed]
    numbers = _never_empty(
      tf.stack([parsed[f'context/{name}'].flat_values for name in names]), axis=1
    )
    values = tf.where(real, tf.gather(numbers, rows, axis=1), loading.PADDING)
    context = dict(zip(names, tf.unstack(values, num=len(names)), strict=True))
    context['relative_runtime'] = loading.relative_runtimes(context)
    if self.kind == 'tile':
      feats = tf.reshape(
        parsed['context/config_feat'].flat_values, [-1, features.NUM_TILE_FEATURES]
      )
      context['config_feat'] = tf.where(
        real[..., tf.newaxis], tf.gather(_never_empty(feats, axis=0), rows), 0.0
      )
    return context


def _never_empty(values: tf.Tensor, *, axis: int) -> tf.Tensor:
  """`values`, or a zero where there are none along `axis`: so 0 is an index always. Others are
  not copied.
  """
  missing = tf.cast(tf.shape(values)[axis] == 0, tf.int32)
  return tf.pad(values, [[0, missing if i == axis else 0] for i in range(values.shape.rank)])


def row_starts(splits: tf.Tensor, number: int) -> tf.Tensor:
  """Of row splits, [..., m + 1], the starts of `number` > m rows, [..., number]; those that are
  not there are empty.
  """
  last = tf.shape(splits)[-1] - 1
  return tf.gather(splits, tf.minimum(tf.range(number), last), axis=-1)


def sample_configs(
  parsed: Parsed, draws: tf.Tensor, *, components: int, configs: int, sampling: str
) -> tuple[tf.Tensor, tf.Tensor]:
  """Draws K configs of each record, one after the other among those that are left, those without
  a runtime last.

  Args:
    parsed: of `Decoder.parse`, m < B records.
    draws: float32 [sum of C] in (0, 1], one for each config of the records.
    components: B.
    configs: K.
    sampling: 'uniform', or 'fastest_biased': in proportion to 1 / (rank + 1), as
      `selection.sample` has it.

  Returns:
    int32 [B, K], positions of configs in their records, and bool [B, K], whether there is one: a
    record may have fewer.
  """
  runtime = parsed['context/config_runtime']
  # Efraimidis, Spirakis: Weighted random sampling with a reservoir, 2006: exponential times, each
  # over its weight.
  times = -tf.math.log(draws)
  if sampling == 'fastest_biased':
    times *= tf.cast(_ranks(parsed) + 1, tf.float32)
  times = tf.where(
    runtime.flat_values == module_lib.UNMEASURED, _UNMEASURED_TIME * (1 + draws), times
  )
  earliest = runtime.with_flat_values(-times).to_tensor(-tf.float32.max, shape=[components, None])
  # K fillers follow, so that there are K to be taken.
  earliest = tf.pad(earliest, [[0, 0], [0, configs]], constant_values=-tf.float32.max)
  times, chosen = tf.math.top_k(earliest, configs)
  return chosen, times > -tf.float32.max


def _ranks(parsed: Parsed) -> tf.Tensor:
  """The rank of each config in its record, int32 [sum of C]: 0 for the fastest, and the earlier
  one of equals first.
  """
  runtime = parsed['context/config_runtime']
  relative = loading.relative_runtimes(
    {
      name: parsed[f'context/{name}'].flat_values
      for name in ('config_runtime', 'config_runtime_normalizer')
      if f'context/{name}' in parsed
    }
  )
  rows = runtime.value_rowids()
  order = tf.argsort(
    tf.where(relative == module_lib.UNMEASURED, tf.int64.max, relative), stable=True
  )
  order = tf.gather(
    order, tf.argsort(tf.gather(rows, order), stable=True)
  )  # By record, then by speed.
  return tf.math.invert_permutation(order) - tf.gather(runtime.row_splits, rows)


def consecutive_configs(
  parsed: Parsed, first: tf.Tensor, *, components: int, configs: int
) -> tuple[tf.Tensor, tf.Tensor]:
  """K configs of each record from number `first`, int32 [m], on; see `sample_configs` for what
  is returned.
  """
  lengths = parsed['context/config_id'].row_lengths()
  first, lengths = (
    tf.pad(value, [[0, components - tf.shape(first)[0]]]) for value in (first, lengths)
  )
  chosen = tf.ensure_shape(first[:, tf.newaxis] + tf.range(configs), [components, configs])
  return chosen, chosen < lengths[:, tf.newaxis]


def _segments(
  parsed: Parsed, draws: tf.Tensor, length: int
) -> dict[str, tf.RaggedTensor | tf.Tensor]:
  """Parsed records of which a range of `length` ops is kept where there are more; with a mask of
  configurable ops.
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
    if (value := parsed.get(f'nodes/op.{name}')) is not None:
      rows_of_ops = tf.reshape(value.flat_values, [tf.shape(kept)[0], -1])
      flat = tf.reshape(tf.boolean_mask(rows_of_ops, kept), [-1])
      width = tf.shape(rows_of_ops)[1]
      segments[f'nodes/op.{name}'] = tf.RaggedTensor.from_row_lengths(
        flat, kept_lengths * width, validate=False
      )
  for names in (['edges/operand.#source', 'edges/operand.#target'], ['edges/configures.#target']):
    if names[0] in parsed:
      rows = parsed[names[0]].value_rowids()
      ends = [
        tf.cast(parsed[name].flat_values, tf.int32) - tf.gather(starts, rows) for name in names
      ]
      kept = tf.reduce_all([(end >= 0) & (end < tf.gather(kept_lengths, rows)) for end in ends], 0)
      for name, end in zip(names, ends, strict=True):
        segments[name] = tf.RaggedTensor.from_value_rowids(
          tf.boolean_mask(end, kept),
          tf.boolean_mask(rows, kept),
          nrows=parsed[name].nrows(),
          validate=False,
        )
      segments[_KEPT] = kept  # That of configurable ops comes last.
  return segments


def _segment_starts(
  ops: tf.Tensor, length: int, draws: tf.Tensor, configured: tf.RaggedTensor | None
) -> tf.Tensor:
  """First op of the range that is kept of each record, int32 [m]; where any op is configurable,
  it holds one.
  """
  last = ops - tf.minimum(ops, length)

  def draw(column: int, number: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.cast(draws[:, column], tf.float64) * tf.cast(number, tf.float64), tf.int32)

  if configured is None:
    return draw(0, last + 1)
  numbers = configured.row_lengths()
  targets = tf.pad(
    tf.cast(configured.flat_values, tf.int32), [[0, 1]]
  )  # The last record may have none.
  some = tf.gather(targets, configured.row_starts() + draw(0, numbers))
  lower = tf.where(numbers > 0, tf.maximum(some - length + 1, 0), 0)
  upper = tf.where(numbers > 0, tf.minimum(some, last), last)
  return lower + draw(1, upper - lower + 1)


def _layouts(parsed: Parsed, chosen: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
  """The layouts of the chosen configs, int8 [NC, K, 18], of the configurable ops of all records."""
  config_ops, records = parsed['edges/configures.#target'], parsed['context/node_config_feat']
  configs = chosen.shape[1]
  num_bytes = config_ops.row_lengths() * features.NUM_LAYOUT_FEATURES
  starts = tf.where(real, chosen, 0)[: tf.shape(records)[0]] * num_bytes[:, tf.newaxis]
  # One slice of the bytes is one config, so what is not chosen is never decoded. Record by record,
  # since one substr over all would copy their bytes for each config.
  slices = tf.map_fn(
    lambda record: tf.strings.substr(record[0], record[1], tf.fill([configs], record[2])),
    (records, starts, num_bytes),
    fn_output_signature=tf.TensorSpec([configs], tf.string),
  )
  decoded = tf.io.decode_raw(tf.strings.reduce_join(slices, 0), tf.int8)
  layouts = tf.reshape(
    decoded, [configs, tf.shape(config_ops.flat_values)[0], features.NUM_LAYOUT_FEATURES]
  )
  mask = tf.gather(real, config_ops.value_rowids())[..., tf.newaxis]
  return tf.where(mask, tf.transpose(layouts, [1, 0, 2]), tf.constant(loading.NO_LAYOUT, tf.int8))
