"""Helpers that several test files share."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest

# What setup.py packs, and what it needs beside.
PACKAGES = ('tpu_graphs', 'pipelines', 'baselines')
METADATA_FILES = ('CHANGELOG.md', 'LICENSE', 'MANIFEST.in', 'README.md', 'pyproject.toml', 'setup.py')
GOLDEN = pathlib.Path(__file__).parent / 'golden'
SHARED = pathlib.Path(os.environ.get('TPU_GRAPHS_SHARED', pathlib.Path(__file__).parents[2] / 'shared'))

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason='needs the folder shared/ beside the checkout (real measured files)')


def tile_arrays(n=4, c=6, seed=0, **over) -> dict[str, np.ndarray]:
  """Arrays of a tiny valid tile npz; `name=None` leaves an array out, any other value replaces it."""
  rng = np.random.default_rng(seed)
  own = {'config_feat': rng.random((c, 24), dtype=np.float32), 'config_runtime_normalizers': np.full(c, 2000)}
  return _merge(_graph_arrays(rng, n, c), own, over)


def layout_arrays(n=4, c=6, nc=2, seed=0, **over) -> dict[str, np.ndarray]:
  """Arrays of a tiny valid layout npz; `name=None` leaves an array out, any other value replaces it."""
  rng = np.random.default_rng(seed)
  own = {'node_config_ids': np.arange(nc), 'node_splits': np.array([[0, n]]),
         'node_config_feat': rng.integers(-1, 5, (c, nc, 18)).astype(np.float32)}
  return _merge(_graph_arrays(rng, n, c), own, over)


def arrays(kind, n=4, c=6, seed=0, nc=2, **over) -> dict[str, np.ndarray]:
  """`tile_arrays`, or `layout_arrays` with `nc` configurable ops."""
  if kind == 'tile':
    return tile_arrays(n=n, c=c, seed=seed, **over)
  return layout_arrays(n=n, c=c, nc=nc, seed=seed, **over)


def convert_arrays(folder: pathlib.Path, kind: str, sources, **options) -> str:
  """Converts the collection KIND:x and returns its directory.

  Args:
    folder: where the npz files and the dataset directory go.
    kind: 'tile' or 'layout'.
    sources: name of an npz file without suffix, such as 'train/a' -> its arrays.
    **options: of `ConvertOptions`.
  """
  from pipelines import convert  # Here, since only some tests need Beam.
  for name, arrays in sources.items():
    path = folder / 'raw' / f'{name}.npz'
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
  directory = str(folder / 'data')
  convert.convert(inputs=[str(folder / 'raw')], directory=directory,
                  options=convert.ConvertOptions(collection=f'{kind}:x', **options))
  return directory


def write_run(path: str, data: str) -> str:
  """Writes the run directory of a tiny model as it is before training on a dataset directory; returns `path`."""
  import tensorflow as tf  # Here, since only some tests need it.

  from baselines import models
  from baselines import runs
  from baselines.models import parts
  from tpu_graphs import datasets
  from tpu_graphs import statistics
  directory = datasets.open_directory(data)
  choices = directory.manifest.choices
  options = models.ModelOptions(models.DEFAULT_MODEL[directory.kind], directory.kind, parts.PartOptions(4, 1, 3))
  tf.keras.utils.set_random_seed(0)
  model = models.build(options, statistics.parse(directory.statistics, num_extra=choices.num_extra))
  runs.Writer(path, config={}, options=options, model=model, statistics=directory.statistics, choices=choices,
              overwrite=False).save(1)
  return path


def _graph_arrays(rng, n, c):
  return {'node_feat': rng.random((n, 140), dtype=np.float32),
          'node_opcode': rng.integers(1, 120, n).astype(np.uint8),
          'edge_index': np.array([[i, i - 1] for i in range(1, n)], np.int64).reshape(-1, 2),
          'config_runtime': np.arange(1, c + 1) * 1000}


def _merge(*parts):
  merged = {name: array for part in parts for name, array in part.items()}
  return {name: array for name, array in merged.items() if array is not None}
