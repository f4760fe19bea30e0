"""A trained model as TensorFlow functions of plain tensors: what an exported model answers
requests with.

They are made of TensorFlow's own operations alone, so a program that serves them has neither
tpu_graphs nor TF-GNN.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tpu_graphs.compat import tfgnn
from tpu_graphs.input import loading
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib

NO_SCORE = float(
  'inf'
)  # Of configs that a module in a batch does not have: they come last in any order.
# Configs are scored so many at a time that ops x configs is about this, which bounds memory.
_ROWS = 1 << 18
_LEAST_CONFIGS, _MOST_CONFIGS = 16, 4096


class ServedModel(tf.Module):
  """Scores of all configs of modules, lower = predicted faster; none depends on the others.

  Two functions with a signature each: `examples` takes serialized records of a dataset directory
  (docs/formats.md), any number of any sizes; `tensors` takes the arrays of one module.
  """

  def __init__(self, model: tf.keras.Model, kind: str, *, num_extra: int = 0):
    """Serves a model.

    Args:
      model: see `baselines.models`.
      kind: 'tile' or 'layout'.
      num_extra: number of columns of extra features that it takes.
    """
    super().__init__()
    self.weights = list(
      model.variables
    )  # Not the model itself: to save it would need Keras and TF-GNN where it loads.
    self._score = lambda graph: model(graph)  # A function is not saved.
    self._kind = kind
    self._num_extra = num_extra
    self.examples = tf.function(
      self._examples,
      autograph=False,
      input_signature=[tf.TensorSpec([None], tf.string, name='examples')],
    )
    self.tensors = tf.function(self._tensors, autograph=False, input_signature=[self._specs()])

  def signatures(self) -> dict[str, tf.types.experimental.ConcreteFunction]:
    """Signatures to save: by convention one of them is called 'serving_default'."""
    return {
      'serving_default': self.examples.get_concrete_function(),
      'tensors': self.tensors.get_concrete_function(),
    }

  def _specs(self) -> dict[str, tf.TensorSpec]:
    """Of the arrays of a module with N ops, E edges, C configs and, for layout, NC configurable
    ops.
    """
    shapes = {
      'opcode': ([None], tf.int64),
      'feat': ([None, features.NUM_NODE_FEATURES], tf.float32),
      'edge_index': ([None, 2], tf.int64),
    }
    if self._num_extra:
      shapes['extra_feat'] = [None, self._num_extra], tf.float32
    if self._kind == 'tile':
      shapes['config_feat'] = [None, features.NUM_TILE_FEATURES], tf.float32
    else:
      shapes |= {
        'node_config_ids': ([None], tf.int64),
        'node_config_feat': ([None, None, features.NUM_LAYOUT_FEATURES], tf.int8),
      }
    return {name: tf.TensorSpec(shape, dtype, name=name) for name, (shape, dtype) in shapes.items()}

  def _tensors(self, arrays: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """The arrays of `_specs` -> 'scores', float32 [C].

    Raises (when run):
      InvalidArgumentError: sizes do not fit each other, or an index is out of range.
    """
    with tf.control_dependencies(self._checks(arrays)):
      return {'scores': self._scores({name: tf.identity(array) for name, array in arrays.items()})}

  def _examples(self, examples: tf.Tensor) -> dict[str, tf.Tensor]:
    """Serialized records, string [B] -> scores of the configs of each, as dense tensors.

    Returns:
      'scores': float32 [B, largest C], filled up with `NO_SCORE`.
      'config_id': int64 [B, largest C], as in the record, filled up with -1.
      'num_configs': int64 [B], C of each record.
    """
    names = {
      'context/config_id': tf.int64,
      'nodes/op.opcode': tf.int64,
      'nodes/op.feat': tf.float32,
      'edges/operand.#source': tf.int64,
      'edges/operand.#target': tf.int64,
    }
    if self._num_extra:
      names['nodes/op.extra_feat'] = tf.float32
    names |= (
      {'context/config_feat': tf.float32}
      if self._kind == 'tile'
      else {'edges/configures.#target': tf.int64}
    )
    wanted = {name: tf.io.RaggedFeature(dtype) for name, dtype in names.items()}
    if self._kind == 'layout':
      wanted['context/node_config_feat'] = tf.io.FixedLenFeature([], tf.string)
    parsed = tf.io.parse_example(examples, wanted)

    def score(i: tf.Tensor, scores: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
      arrays = self._arrays({name: value[i] for name, value in parsed.items()})
      return i + 1, scores.write(i, self.tensors(arrays)['scores'])

    number = tf.shape(examples)[0]
    scores = tf.TensorArray(tf.float32, number, infer_shape=False, element_shape=[None])
    _, scores = tf.while_loop(lambda i, _: i < number, score, (0, scores), parallel_iterations=1)
    config_id = parsed['context/config_id']
    # TensorArray.concat refuses an empty list.
    flat = tf.cond(number > 0, scores.concat, lambda: tf.zeros([0]))
    return {
      'scores': config_id.with_values(flat).to_tensor(NO_SCORE),
      'config_id': config_id.to_tensor(loading.PADDING),
      'num_configs': tf.cast(config_id.row_lengths(), tf.int64),
    }

  def _arrays(self, record: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """The parsed features of a record, flat -> the arrays of `_specs`."""
    arrays = {
      'opcode': record['nodes/op.opcode'],
      'feat': tf.reshape(record['nodes/op.feat'], [-1, features.NUM_NODE_FEATURES]),
      'edge_index': tf.stack(
        [record['edges/operand.#target'], record['edges/operand.#source']], axis=1
      ),
    }
    if self._num_extra:
      arrays['extra_feat'] = tf.reshape(record['nodes/op.extra_feat'], [-1, self._num_extra])
    number = tf.shape(record['context/config_id'])[0]
    if self._kind == 'tile':
      return {
        **arrays,
        'config_feat': tf.reshape(
          record['context/config_feat'], [number, features.NUM_TILE_FEATURES]
        ),
      }
    config_ops = record['edges/configures.#target']
    layouts = tf.io.decode_raw(record['context/node_config_feat'], tf.int8)
    return {
      **arrays,
      'node_config_ids': config_ops,
      'node_config_feat': tf.reshape(
        layouts, [number, tf.shape(config_ops)[0], features.NUM_LAYOUT_FEATURES]
      ),
    }

  def _checks(self, arrays: Mapping[str, tf.Tensor]) -> list[tf.Operation]:
    """Refuses what some devices would take without a word."""
    ops = tf.shape(arrays['opcode'], tf.int64)[0]
    sizes = [(arrays['opcode'], 'N'), (arrays['feat'], 'NF')]
    if self._num_extra:
      sizes.append((arrays['extra_feat'], 'NX'))
    indices = {'edge_index': ops, 'opcode': features.NUM_OPCODES}
    if self._kind == 'layout':
      sizes += [(arrays['node_config_ids'], 'K'), (arrays['node_config_feat'], 'CKL')]
      indices['node_config_ids'] = ops
    checks = [tf.debugging.assert_shapes(sizes, message='arrays of different numbers of ops')]
    checks.append(tf.debugging.assert_positive(ops, message='a module without ops'))
    for name, limit in indices.items():
      checks.append(tf.debugging.assert_non_negative(arrays[name], message=f'{name} below 0'))
      checks.append(
        tf.debugging.assert_less(
          arrays[name], tf.cast(limit, tf.int64), message=f'{name} out of range'
        )
      )
    return [check for check in checks if check is not None]

  def _scores(self, arrays: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """float32 [C], some configs at a time."""
    configs = arrays['config_feat' if self._kind == 'tile' else 'node_config_feat']
    number = tf.shape(configs)[0]
    size = tf.clip_by_value(
      _ROWS // tf.maximum(tf.shape(arrays['opcode'])[0], 1), _LEAST_CONFIGS, _MOST_CONFIGS
    )
    chunks = (number + size - 1) // size

    def score(i: tf.Tensor, scores: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
      return i + 1, scores.write(
        i, self._score(self._graph(arrays, configs[i * size : (i + 1) * size]))[0]
      )

    scores = tf.TensorArray(tf.float32, chunks, infer_shape=False, element_shape=[None])
    _, scores = tf.while_loop(lambda i, _: i < chunks, score, (0, scores), parallel_iterations=1)
    return tf.cond(chunks > 0, scores.concat, lambda: tf.zeros([0]))

  def _graph(self, arrays: Mapping[str, tf.Tensor], configs: tf.Tensor) -> tfgnn.GraphTensor:
    """A module with some of its configs, [k, ...], as models take it: one component, B = 1."""
    op_features = {
      name: arrays[name] for name in ('opcode', 'feat', 'extra_feat') if name in arrays
    }
    consumer, operand = tf.unstack(arrays['edge_index'], axis=1)
    node_sets = {
      'op': tfgnn.NodeSet.from_fields(sizes=_size(arrays['opcode']), features=op_features)
    }
    edge_sets = {
      'operand': tfgnn.EdgeSet.from_fields(
        sizes=_size(operand),
        features={},
        adjacency=tfgnn.Adjacency.from_indices(('op', operand), ('op', consumer)),
      )
    }
    # Models take from it how many modules there are.
    context = {'config_id': tf.range(tf.shape(configs, tf.int64)[0])[tf.newaxis]}
    if self._kind == 'tile':
      context['config_feat'] = configs[tf.newaxis]
    else:
      target = arrays['node_config_ids']
      source = tf.range(tf.shape(target, tf.int64)[0])
      node_sets['config_op'] = tfgnn.NodeSet.from_fields(
        sizes=_size(target), features={'config_feat': tf.transpose(configs, [1, 0, 2])}
      )
      edge_sets['configures'] = tfgnn.EdgeSet.from_fields(
        sizes=_size(target),
        features={},
        adjacency=tfgnn.Adjacency.from_indices(('config_op', source), ('op', target)),
      )
    return tfgnn.GraphTensor.from_pieces(
      context=tfgnn.Context.from_fields(features=context, sizes=tf.constant([1], tf.int64)),
      node_sets=node_sets,
      edge_sets=edge_sets,
    )


def arrays_of(module: module_lib.Module) -> dict[str, np.ndarray]:
  """A module as the signature `tensors` takes it."""
  arrays = {
    'opcode': module.node_opcode.astype(np.int64),
    'feat': module.node_feat,
    'edge_index': module.edge_index,
  }
  if module.num_extra:
    arrays['extra_feat'] = module.extra_feat
  names = ('config_feat',) if module.kind == 'tile' else ('node_config_ids', 'node_config_feat')
  return {**arrays, **{name: getattr(module, name) for name in names}}


def _size(values: tf.Tensor) -> tf.Tensor:
  """Of a node or edge set with one component, int64 [1]."""
  return tf.shape(values, tf.int64)[:1]
