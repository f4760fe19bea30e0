"""Batches and models that tests of `baselines.models` share."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from baselines import models
from baselines.models import parts
from tests import testing
from tpu_graphs import datasets
from tpu_graphs import manifest as manifest_lib
from tpu_graphs import module as module_lib
from tpu_graphs import records
from tpu_graphs import statistics

PARTS = parts.PartOptions(hidden=8, layers=2, opcode_embedding=4, attention_heads=2)
K = 6


def module(kind, n=5, c=K, seed=0, **over):
  """A module of `n` ops in a row with `c` configs."""
  if kind == 'layout':
    over = {'nc': min(n, 3), **over}
  arrays = testing.arrays(kind, n=n, c=c, seed=seed, **over)
  if kind == 'layout':
    arrays['node_config_feat'] = arrays['node_config_feat'].astype(np.int8)
  arrays.update(node_splits=np.array([0, n]), config_id=np.arange(c))
  return module_lib.Module(module_id=f'm{seed}', kind=kind, **arrays)


def batch(modules, size=K, pad_to=None):
  """The modules as one GraphTensor with their configs padded to `size`."""
  (found,) = batches(modules, len(modules), size, pad_to)
  return found


def batches(modules, batch_size, size=K, pad_to=None):
  """The modules as GraphTensors of `batch_size` each, with their configs padded to `size`."""
  return _batches(modules[0].kind, tuple(map(records.encode_whole, modules)), batch_size, size, _Hashed(pad_to))


@dataclasses.dataclass(frozen=True)
class _Hashed:
  """Makes a split a key by its content: all models are tried on the same batches, which are slow to make."""
  split: manifest_lib.Split | None

  def __hash__(self):
    return hash(str(self.split))


@functools.lru_cache(maxsize=200)
def _batches(kind, data, batch_size, size, pad_to):
  graphs = datasets._chunks(tf.data.Dataset.from_tensor_slices(list(data)), kind, size).map(datasets.without_strings)
  return list(datasets.batch(graphs, batch_size, pad_to=pad_to.split))


def split(modules):
  """A split with room for each of the modules."""
  sizes = {'ops': max(m.num_ops for m in modules), 'edges': max(m.num_edges for m in modules),
           'config_ops': max(m.num_config_ops for m in modules), 'configs': max(m.num_configs for m in modules)}
  return manifest_lib.Split(0, 0, 0, 0, 0, sizes, sizes, ())


def column_statistics(kind):
  """Statistics over a few modules, as they are stored."""
  return statistics.merge_all(statistics.Statistics.of(module(kind, seed=seed)) for seed in range(4)).to_json()


def fresh_model(name, kind, options=PARTS):
  """A model as it is before training."""
  tf.keras.utils.set_random_seed(0)
  return models.build(models.ModelOptions(name, kind, options), statistics.parse(column_statistics(kind)))


def model(name, kind, options=PARTS):
  """A model whose weights are all random, biases too, which begin with 0 and would hide mistakes."""
  built = fresh_model(name, kind, options)
  rng = np.random.default_rng(0)
  for weight in built.trainable_variables:
    weight.assign_add(rng.normal(scale=0.2, size=weight.shape))
  return built
