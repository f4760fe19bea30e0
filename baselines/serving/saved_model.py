"""A trained model as TensorFlow functions of plain tensors, which an exported model offers.

The functions consist of TensorFlow's own operations alone, so a program that serves them needs
neither tpu_graphs nor TF-GNN.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tpu_graphs.compat import tfgnn
from tpu_graphs.input import loading
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib

# Score that fills up modules with fewer configs than others of a batch, so that it sorts last.
NO_SCORE = float('inf')
# Number of configs that are scored at a time times number of ops, about. This bounds memory.
_ROWS = 1 << 18
_LEAST_CONFIGS, _MOST_CONFIGS = 16, 4096


class ServedModel(tf.Module):
  """A model that scores all configs of modules, lower = predicted faster.

  The score of a config does not depend on other configs. There are two functions, each with a
  signature: `examples` takes serialized records of a dataset directory (docs/formats.md), any
  number of any sizes; `tensors` takes the arrays of one module.
  """

  def __init__(self, model: tf.keras.Model, kind: str, *, num_extra: int = 0):
    """Makes the functions of a model.

    Args:
      model: the model, see `baselines.models`.
      kind: 'tile' or 'layout'.
      num_extra: number of columns of extra features that the model takes.
    """
    super().__init__()
    # Only the weights are an attribute: with the model itself, a SavedModel would need Keras and
    # TF-GNN where it is loaded.
    self.weights = list(model.variables)
    # A function as an attribute is not saved.
    self._score = lambda graph: model(graph)
    self._kind = kind
    self._num_extra = num_extra
    self.examples = tf.function(
      self._examples,
      autograph=False,
      input_signature=[tf.TensorSpec([None], tf.string, name='examples')],
    )
    self.tensors = tf.function(self._tensors, autograph=False, input_signature=[self._specs()])

  def signatures(self) -> dict[str, tf.types.experimental.ConcreteFunction]:
    """Returns the signatures to save; by convention one of them is called 'serving_default'."""
    return {
      'serving_default': self.examples.get_concrete_function(),
      'tensors': self.tensors.get_concrete_function(),
    }

  def _specs(self) -> dict[str, tf.TensorSpec]:
    """Returns the specs of a module's arrays, with sizes open.

    The arrays have N ops, E edges, C configs and, for layout, NC configurable ops.
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
    """Scores a module, given by the arrays of `_specs`.

    Returns:
      'scores': float32 [C].

    Raises (when run):
      InvalidArgumentError: sizes do not fit each other, or an index is out of range.
    """
    with tf.control_dependencies(self._checks(arrays)):
      checked = {name: tf.identity(array) for name, array in arrays.items()}
      return {'scores': self._scores(checked)}

  def _examples(self, examples: tf.Tensor) -> dict[str, tf.Tensor]:
    """Scores the configs of serialized records, string [B].

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
    if self._kind == 'tile':
      names['context/config_feat'] = tf.float32
    else:
      names['edges/configures.#target'] = tf.int64
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
    """Turns the parsed features of a record, which are flat, into the arrays of `_specs`."""
    consumer, operand = record['edges/operand.#target'], record['edges/operand.#source']
    arrays = {
      'opcode': record['nodes/op.opcode'],
      'feat': tf.reshape(record['nodes/op.feat'], [-1, features.NUM_NODE_FEATURES]),
      'edge_index': tf.stack([consumer, operand], axis=1),
    }
    if self._num_extra:
      arrays['extra_feat'] = tf.reshape(record['nodes/op.extra_feat'], [-1, self._num_extra])
    number = tf.shape(record['context/config_id'])[0]
    if self._kind == 'tile':
      shape = [number, features.NUM_TILE_FEATURES]
      arrays['config_feat'] = tf.reshape(record['context/config_feat'], shape)
    else:
      config_ops = record['edges/configures.#target']
      layouts = tf.io.decode_raw(record['context/node_config_feat'], tf.int8)
      shape = [number, tf.shape(config_ops)[0], features.NUM_LAYOUT_FEATURES]
      arrays['node_config_ids'] = config_ops
      arrays['node_config_feat'] = tf.reshape(layouts, shape)
    return arrays

  def _checks(self, arrays: Mapping[str, tf.Tensor]) -> list[tf.Operation]:
    """Checks sizes and indices, since some devices would accept wrong ones without an error."""
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
      limit = tf.cast(limit, tf.int64)
      checks.append(tf.debugging.assert_less(arrays[name], limit, message=f'{name} out of range'))
    return [check for check in checks if check is not None]

  def _scores(self, arrays: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Scores the configs, some at a time; returns float32 [C]."""
    configs = arrays['config_feat' if self._kind == 'tile' else 'node_config_feat']
    number = tf.shape(configs)[0]
    size = tf.clip_by_value(
      _ROWS // tf.maximum(tf.shape(arrays['opcode'])[0], 1), _LEAST_CONFIGS, _MOST_CONFIGS
    )
    chunks = (number + size - 1) // size

    def score(i: tf.Tensor, scores: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
      graph = self._graph(arrays, configs[i * size : (i + 1) * size])
      return i + 1, scores.write(i, self._score(graph)[0])

    scores = tf.TensorArray(tf.float32, chunks, infer_shape=False, element_shape=[None])
    _, scores = tf.while_loop(lambda i, _: i < chunks, score, (0, scores), parallel_iterations=1)
    return tf.cond(chunks > 0, scores.concat, lambda: tf.zeros([0]))

  def _graph(self, arrays: Mapping[str, tf.Tensor], configs: tf.Tensor) -> tfgnn.GraphTensor:
    """Makes a module with some of its configs, [k, ...], into a graph of one component, B = 1."""
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
    # Models take the number of modules from `config_id`.
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
  """Returns a module as the arrays that the signature `tensors` takes."""
  arrays = {
    'opcode': module.node_opcode.astype(np.int64),
    'feat': module.node_feat,
    'edge_index': module.edge_index,
  }
  if module.num_extra:
    arrays['extra_feat'] = module.extra_feat
  if module.kind == 'tile':
    arrays['config_feat'] = module.config_feat
  else:
    arrays['node_config_ids'] = module.node_config_ids
    arrays['node_config_feat'] = module.node_config_feat
  return arrays


def _size(values: tf.Tensor) -> tf.Tensor:
  """Returns the size of a node or edge set with one component, int64 [1]."""
  return tf.shape(values, tf.int64)[:1]
