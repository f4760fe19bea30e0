"""Helpers for the tests of pipelines.convert: inputs, runs, and the files that they wrote."""

from __future__ import annotations

import collections
import os
import struct

import numpy as np

from pipelines import convert
from pipelines.conversion import options as options_lib
from pipelines.conversion import steps
from tests import testing
from tpu_graphs.dataset import records
from tpu_graphs.dataset import statistics
from tpu_graphs.sources import readers

ROOT = testing.GOLDEN.parents[1]
TWO_PROCESSES = ('--direct_running_mode=multi_processing', '--direct_num_workers=2')


def options(collection='tile:xla', **kwargs):
  names = ('split', 'num_shards', 'on_error', 'max_array_bytes', 'keep_hops', 'rest')
  own = {name: kwargs.pop(name) for name in names if name in kwargs}
  return options_lib.ConvertOptions(
    collection=collection, **own, records=records.RecordOptions(**kwargs)
  )


def save(path, arrays):
  path.parent.mkdir(parents=True, exist_ok=True)
  np.savez(path, **arrays)
  return str(path)


def save_tiles(folder, number, **kwargs):
  """Writes tile files whose graphs, features and numbers of configs all differ."""
  return [
    save(folder / f'm{i}.npz', testing.tile_arrays(n=2 + i % 7, c=1 + i % 5, seed=i, **kwargs))
    for i in range(number)
  ]


def run(inputs, directory, opts, **kwargs):
  inputs = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
  return convert.convert(
    inputs=[str(name) for name in inputs], directory=str(directory), options=opts, **kwargs
  )


def tree(directory):
  """Returns name -> content of all files."""
  return {
    str(path.relative_to(directory)): path.read_bytes()
    for path in directory.rglob('*')
    if path.is_file()
  }


def read_shard(path):
  """Returns the records of a TFRecord file.

  The format is: length, CRC of the length, data, CRC of the data.
  """
  found, data = [], path.read_bytes()
  while data:
    (length,) = struct.unpack('<Q', data[:8])
    found.append(data[12 : 12 + length])
    data = data[16 + length :]
  return found


def read_split(directory, split):
  return [record for path in sorted(directory.glob(f'{split}/*')) for record in read_shard(path)]


def read_all(directory):
  """Returns split -> multiset of records."""
  splits = {
    split: collections.Counter(read_split(directory, split)) for split in ('train', 'valid', 'test')
  }
  return {split: found for split, found in splits.items() if found}


def in_memory(paths, opts):
  """Returns the expected result of `read_all`, and the merged statistics of train."""
  splits, total = collections.defaultdict(collections.Counter), None
  for path in sorted(paths):
    for module in readers.from_file(path, kind=opts.kind).modules:
      split = steps.split_of(module, path, opts)
      splits[split].update(record.data for record in records.encode(module, opts.records))
      if split == 'train':
        own = statistics.Statistics.of(module)
        total = own if total is None else total.merge(own)
  return dict(splits), total


def assert_close(found, expected):
  if isinstance(expected, dict):
    assert found.keys() == expected.keys()
    for name in expected:
      assert_close(found[name], expected[name])
  else:
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def parse(record):
  """Returns feature -> list of values."""
  import tensorflow as tf

  example = tf.train.Example.FromString(record)
  return {
    name: list(getattr(feature, feature.WhichOneof('kind')).value)
    for name, feature in example.features.feature.items()
  }


def subprocess_environment():
  return {
    **os.environ,
    'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]),
  }
