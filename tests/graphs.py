"""Batches and models that tests of `baselines.models` share."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from baselines import models
from baselines.models import parts
from tests import testing
from tpu_graphs.compat import tfgnn
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.dataset import records
from tpu_graphs.dataset import schema
from tpu_graphs.dataset import statistics
from tpu_graphs.input import loading
from tpu_graphs.modules import module as module_lib

PARTS = parts.PartOptions(hidden=8, layers=2, opcode_embedding=4, attention_heads=2)
K = 6


def module(kind, n=5, c=K, seed=0, **over):
  """Returns a module of `n` ops in a row with `c` configs."""
  if kind == 'layout':
    over = {'nc': min(n, 3), **over}
  arrays = testing.arrays(kind, n=n, c=c, seed=seed, **over)
  if kind == 'layout':
    arrays['node_config_feat'] = arrays['node_config_feat'].astype(np.int8)
  arrays.update(node_splits=np.array([0, n]), config_id=np.arange(c))
  return module_lib.Module(module_id=f'm{seed}', kind=kind, **arrays)


def batch(modules, size=K, pad_to=None):
  """Returns the modules as one GraphTensor with their configs padded to `size`."""
  (found,) = batches(modules, len(modules), size, pad_to)
  return found


def batches(modules, batch_size, size=K, pad_to=None):
  """Returns the modules as GraphTensors of `batch_size` each, with configs padded to `size`."""
  return _batches(
    modules[0].kind, tuple(map(records.encode_whole, modules)), batch_size, size, _Hashed(pad_to)
  )


@dataclasses.dataclass(frozen=True)
class _Hashed:
  """A split that is hashed by its content, as a key of a cache.

  All models are tried on the same batches, which are slow to make.
  """

  split: manifest_lib.Split | None

  def __hash__(self):
    return hash(str(self.split))


@functools.lru_cache(maxsize=200)
def _batches(kind, data, batch_size, size, pad_to):
  spec = schema.graph_spec(kind)
  graphs = []  # Graphs are made one by one: tf.data would take seconds to prepare for each batch.
  for record in data:
    graph = tfgnn.parse_single_example(spec, record)
    chosen = tf.range(loading.num_configs(graph))
    graphs.append(loading.without_strings(loading.decode(graph, kind, chosen=chosen, pad_to=size)))
  starts = range(0, len(graphs), batch_size)
  merged = [_merged(graphs[start : start + batch_size]) for start in starts]
  if pad_to.split is None:
    return merged
  return [_padded(graph, batch_size, pad_to.split) for graph in merged]


def _padded(graph, batch_size, largest):
  """Pads a graph by one component, to the shapes of any batch of modules of the split `largest`."""
  sizes = {name: size * batch_size for name, size in largest.max_sizes.items()}
  # tfgnn wants a spare component, and spare nodes for the edges that are padding.
  constraints = tfgnn.SizeConstraints(
    total_num_components=batch_size + 1,
    total_num_nodes={
      name: sizes['ops' if name == 'op' else 'config_ops'] + 1 for name in graph.node_sets
    },
    total_num_edges={
      name: sizes['edges' if name == 'operand' else 'config_ops'] for name in graph.edge_sets
    },
  )
  fillers = tfgnn.FeatureDefaultValues(
    context={
      name: tf.constant(filler, tf.int64)
      for name, filler in loading.CONFIG_FILLERS.items()
      if name in graph.context.features
    }
  )
  return tfgnn.pad_to_total_sizes(graph, constraints, padding_values=fillers)[0]


def _merged(graphs):
  """Merges scalar GraphTensors of one component each into one GraphTensor."""
  first = graphs[0]
  starts = {
    name: np.cumsum([0, *(int(graph.node_sets[name].total_size) for graph in graphs)])
    for name in first.node_sets
  }

  def joined(pieces):
    return {name: tf.concat([piece[name] for piece in pieces], 0) for name in pieces[0].features}

  def ends(name, tag):
    set_name = first.edge_sets[name].adjacency.node_set_name(tag)
    return set_name, tf.concat(
      [
        graph.edge_sets[name].adjacency[tag] + start
        for graph, start in zip(graphs, starts[set_name].tolist(), strict=False)
      ],
      0,
    )

  return tfgnn.GraphTensor.from_pieces(
    context=tfgnn.Context.from_fields(
      features=joined([graph.context for graph in graphs]), sizes=tf.ones([len(graphs)], tf.int32)
    ),
    node_sets={
      name: tfgnn.NodeSet.from_fields(
        features=joined([graph.node_sets[name] for graph in graphs]),
        sizes=tf.concat([graph.node_sets[name].sizes for graph in graphs], 0),
      )
      for name in first.node_sets
    },
    edge_sets={
      name: tfgnn.EdgeSet.from_fields(
        sizes=tf.concat([graph.edge_sets[name].sizes for graph in graphs], 0),
        adjacency=tfgnn.Adjacency.from_indices(ends(name, tfgnn.SOURCE), ends(name, tfgnn.TARGET)),
      )
      for name in first.edge_sets
    },
  )


def split(modules):
  """Returns a split with room for each of the modules."""
  sizes = {
    'ops': max(m.num_ops for m in modules),
    'edges': max(m.num_edges for m in modules),
    'config_ops': max(m.num_config_ops for m in modules),
    'configs': max(m.num_configs for m in modules),
  }
  return manifest_lib.Split(0, 0, 0, 0, 0, sizes, sizes, ())


def column_statistics(kind):
  """Returns statistics over a few modules, as they are stored."""
  return statistics.merge_all(
    statistics.Statistics.of(module(kind, seed=seed)) for seed in range(4)
  ).to_json()


def fresh_model(name, kind, options=PARTS):
  """Returns a model as it is before training."""
  tf.keras.utils.set_random_seed(0)
  return models.build(
    models.ModelOptions(name, kind, options), statistics.parse(column_statistics(kind))
  )


def model(name, kind, options=PARTS):
  """Returns a model whose weights are all random.

  Biases begin with 0, which would hide mistakes.
  """
  built = fresh_model(name, kind, options)
  rng = np.random.default_rng(1)
  for weight in built.trainable_variables:
    weight.assign_add(rng.normal(scale=0.2, size=weight.shape))
  return built
