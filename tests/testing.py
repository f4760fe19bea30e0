"""Helpers that several test files share."""

from __future__ import annotations

import io
import os
import pathlib

import numpy as np
import pytest

from tpu_graphs import errors
from tpu_graphs.sources import npz

# The packages that setup.py packs, and the other files that it needs.
PACKAGES = ('tpu_graphs', 'pipelines', 'baselines')
METADATA_FILES = (
  'CHANGELOG.md',
  'LICENSE',
  'MANIFEST.in',
  'README.md',
  'pyproject.toml',
  'setup.py',
)
GOLDEN = pathlib.Path(__file__).parent / 'golden'
SHARED = pathlib.Path(
  os.environ.get('TPU_GRAPHS_SHARED', pathlib.Path(__file__).parents[2] / 'shared')
)

MODULE_ARRAYS = (
  'node_opcode',
  'node_feat',
  'edge_index',
  'node_splits',
  'computation',
  'config_runtime',
  'config_id',
  'config_feat',
  'config_runtime_normalizers',
  'node_config_ids',
  'node_config_feat',
)

needs_shared = pytest.mark.skipif(
  not SHARED.is_dir(), reason='needs the folder shared/ beside the checkout (real measured files)'
)


def tile_arrays(n=4, c=6, seed=0, **over) -> dict[str, np.ndarray]:
  """Returns the arrays of a tiny valid tile npz.

  `name=None` leaves an array out, any other value replaces it.
  """
  rng = np.random.default_rng(seed)
  own = {
    'config_feat': rng.random((c, 24), dtype=np.float32),
    'config_runtime_normalizers': np.full(c, 2000),
  }
  return _merge(_graph_arrays(rng, n, c), own, over)


def layout_arrays(n=4, c=6, nc=2, seed=0, **over) -> dict[str, np.ndarray]:
  """Returns the arrays of a tiny valid layout npz.

  `name=None` leaves an array out, any other value replaces it.
  """
  rng = np.random.default_rng(seed)
  own = {
    'node_config_ids': np.arange(nc),
    'node_splits': np.array([[0, n]]),
    'node_config_feat': rng.integers(-1, 5, (c, nc, 18)).astype(np.float32),
  }
  return _merge(_graph_arrays(rng, n, c), own, over)


def arrays(kind, n=4, c=6, seed=0, nc=2, **over) -> dict[str, np.ndarray]:
  """Returns `tile_arrays`, or `layout_arrays` with `nc` configurable ops."""
  if kind == 'tile':
    return tile_arrays(n=n, c=c, seed=seed, **over)
  return layout_arrays(n=n, c=c, nc=nc, seed=seed, **over)


def npz_bytes(arrays, save=np.savez_compressed) -> bytes:
  """Returns the content of an npz file."""
  file = io.BytesIO()
  save(file, **arrays)
  return file.getvalue()


def refused_npz(data: bytes, **options) -> errors.InputError:
  """Returns the error of `npz.read` on a file with this content; it always names the path."""
  with pytest.raises(errors.InputError) as caught:
    npz.read(io.BytesIO(data), path='d/m.npz', **options)
  assert caught.value.path == 'd/m.npz'
  assert str(caught.value).startswith('d/m.npz: ')
  return caught.value


def assert_equal_modules(found, expected, names=MODULE_ARRAYS) -> None:
  """Checks that two modules have the same kind and equal arrays of equal dtypes."""
  assert found.kind == expected.kind
  for name in names:
    one, other = getattr(found, name), getattr(expected, name)
    if other is None:
      assert one is None, name
    else:
      assert one.dtype == other.dtype, name
      np.testing.assert_array_equal(one, other, err_msg=name)


def planted_arrays(kind, n, c, seed) -> dict[str, np.ndarray]:
  """Returns `arrays` with runtimes that can be learnt: they grow with one column of the configs."""
  planted = arrays(kind, n=n, c=c, seed=seed)
  order = (
    planted['config_feat'][:, 3] if kind == 'tile' else planted['node_config_feat'][:, :, 0].sum(1)
  )
  return {**planted, 'config_runtime': (10_000 + 1000 * order).astype(np.int64)}


def convert_arrays(folder: pathlib.Path, kind: str, sources, **options) -> str:
  """Converts the collection KIND:x and returns its directory.

  Args:
    folder: the folder for the npz files and the dataset directory.
    kind: 'tile' or 'layout'.
    sources: the arrays of each npz file by its name without suffix, such as 'train/a'.
    **options: options of `ConvertOptions`.
  """
  from pipelines import convert  # Imported here, since only some tests need Beam.
  from pipelines.conversion import options as options_lib

  for name, arrays in sources.items():
    path = folder / 'raw' / f'{name}.npz'
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
  directory = str(folder / 'data')
  convert.convert(
    inputs=[str(folder / 'raw')],
    directory=directory,
    options=options_lib.ConvertOptions(collection=f'{kind}:x', **options),
  )
  return directory


def write_run(path: str, data: str, *, seed: int = 0) -> str:
  """Writes the run directory of a tiny model before its training, and returns `path`.

  Args:
    path: the run directory.
    data: the dataset directory to train on.
    seed: the seed of the weights.
  """
  import tensorflow as tf  # Imported here, since only some tests need it.

  from baselines import models
  from baselines.models import parts
  from baselines.training import runs
  from tpu_graphs.dataset import directory as directory_lib
  from tpu_graphs.dataset import statistics

  directory = directory_lib.open_directory(data)
  choices = directory.manifest.choices
  options = models.ModelOptions(
    models.DEFAULT_MODEL[directory.kind], directory.kind, parts.PartOptions(4, 1, 3)
  )
  tf.keras.utils.set_random_seed(seed)
  model = models.build(options, statistics.parse(directory.statistics, num_extra=choices.num_extra))
  runs.Writer(
    path,
    config={},
    options=options,
    model=model,
    statistics=directory.statistics,
    choices=choices,
    overwrite=False,
  ).save(1)
  return path


def _graph_arrays(rng, n, c):
  return {
    'node_feat': rng.random((n, 140), dtype=np.float32),
    'node_opcode': rng.integers(1, 120, n).astype(np.uint8),
    'edge_index': np.array([[i, i - 1] for i in range(1, n)], np.int64).reshape(-1, 2),
    'config_runtime': np.arange(1, c + 1) * 1000,
  }


def _merge(*parts):
  merged = {name: array for part in parts for name, array in part.items()}
  return {name: array for name, array in merged.items() if array is not None}
