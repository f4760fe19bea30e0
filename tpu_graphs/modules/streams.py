"""Modules whose config features are read only when they are needed.

The features of configs are by far the largest part of a layout module: 100,000 configs of 3,000
ops take 5 GB as int8. A `ConfigStream` holds all else in memory and reads the features in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import contextlib
import dataclasses
import io
import math
import tempfile
from typing import IO

import numpy as np

from tpu_graphs import errors
from tpu_graphs.modules import module as module_lib

BLOCK_BYTES = 8 << 20  # Config features are read in blocks of about this size.
IN_MEMORY_BYTES = 64 << 20  # More config features than this go to disk.


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ConfigStream:
  """A module whose config features are read on demand.

  Attributes:
    graph: the module without any config.
    config_runtime: int64 [C]; see `Module`.
    config_id: int64 [C]; see `Module`.
    config_runtime_normalizers: int64 [C] for tile, else None; see `Module`.
    read: a function that takes ascending indices of configs, int64 [c], and yields their features
      in the same order, float32 [b, 24] or int8 [b, NC, 18], in blocks of about `BLOCK_BYTES`. It
      may be called several times.
  """

  graph: module_lib.Module
  config_runtime: np.ndarray
  config_id: np.ndarray
  config_runtime_normalizers: np.ndarray | None
  read: Callable[[np.ndarray], Iterator[np.ndarray]]

  @classmethod
  def of(cls, module: module_lib.Module) -> ConfigStream:
    """Returns a stream of the configs of a module that is in memory."""
    graph = module.select_configs(np.arange(0))
    features = _features(module)
    step = rows_per_block(_row_bytes(graph))

    def read(rows: np.ndarray) -> Iterator[np.ndarray]:
      for start in range(0, rows.size, step):
        yield features[rows[start : start + step]]

    return cls(
      graph=graph,
      config_runtime=module.config_runtime,
      config_id=module.config_id,
      config_runtime_normalizers=module.config_runtime_normalizers,
      read=read,
    )

  @property
  def num_configs(self) -> int:
    return self.config_runtime.size

  @property
  def row_bytes(self) -> int:
    """Size of the features of one config in bytes."""
    return _row_bytes(self.graph)

  @property
  def row_shape(self) -> tuple[int, ...]:
    """Shape of the features of one config: (24,) for tile, (NC, 18) for layout."""
    return _features(self.graph).shape[1:]

  @property
  def is_measured(self) -> bool:
    """True if any config has a runtime."""
    return bool((self.config_runtime != module_lib.UNMEASURED).any())

  @property
  def relative_runtime(self) -> np.ndarray:
    """`module.relative_runtime` of the configs, [C]."""
    return module_lib.relative_runtime(self.config_runtime, self.config_runtime_normalizers)

  def blocks(self) -> Iterator[np.ndarray]:
    """Yields the features of all configs; see `read`."""
    return self.read(np.arange(self.num_configs))

  def select(self, rows: np.ndarray) -> ConfigStream:
    """Returns the same graph with the configs at `rows`, ascending int64 [c], without reading."""
    normalizers = self.config_runtime_normalizers
    return dataclasses.replace(
      self,
      config_runtime=self.config_runtime[rows],
      config_id=self.config_id[rows],
      config_runtime_normalizers=None if normalizers is None else normalizers[rows],
      read=lambda chosen: self.read(rows[chosen]),
    )

  def module(self, rows: np.ndarray, features: np.ndarray) -> module_lib.Module:
    """Returns the module with the configs at `rows`, whose features the caller has read.

    Args:
      rows: int64 [c].
      features: the features of these configs, [c, 24] for tile or [c, NC, 18] for layout.
    """
    chosen = {'config_runtime': self.config_runtime[rows], 'config_id': self.config_id[rows]}
    if self.config_runtime_normalizers is not None:
      chosen['config_runtime_normalizers'] = self.config_runtime_normalizers[rows]
    name = 'config_feat' if self.graph.kind == 'tile' else 'node_config_feat'
    chosen[name] = features
    return dataclasses.replace(self.graph, **chosen)

  def load(self) -> module_lib.Module:
    """Reads the whole module into memory."""
    empty = _features(self.graph)
    features = np.empty((self.num_configs, *empty.shape[1:]), empty.dtype)
    fill(features, self.blocks())
    return self.module(np.arange(self.num_configs), features)


@contextlib.contextmanager
def merged(parts: Iterable[module_lib.Module]) -> Iterator[ConfigStream]:
  """Yields one stream of a module whose configs are split over `parts`.

  The configs of one part keep their order; the configs of several parts are sorted by
  `config_id`. One part at a time is in memory. Features beyond `IN_MEMORY_BYTES` are in a
  temporary file, which exists until the context ends.

  Args:
    parts: at least one module; the modules differ only in their configs.

  Raises:
    InputError: a config occurs twice.
  """
  graph: module_lib.Module | None = None
  columns: dict[str, list[np.ndarray]] = {}
  with tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES) as file:
    for part in parts:
      graph = graph or part.select_configs(np.arange(0))
      for name in ('config_runtime', 'config_id', 'config_runtime_normalizers'):
        columns.setdefault(name, []).append(getattr(part, name))
      file.write(np.ascontiguousarray(_features(part)).data)
      del part  # Its memory is free before the next part is made.
    assert graph is not None
    ids = np.concatenate(columns['config_id'])
    if np.unique(ids).size != ids.size:
      raise errors.InputError('repeated value', where='config_id', expected='distinct positions')
    # `order` holds the place in the file of each config.
    has_several_parts = len(columns['config_id']) > 1
    order = np.argsort(ids) if has_several_parts else np.arange(ids.size)
    row_bytes, empty = _row_bytes(graph), _features(graph)

    def row(place: int) -> bytes:
      file.seek(place * row_bytes)
      return file.read(row_bytes)

    def read(rows: np.ndarray) -> Iterator[np.ndarray]:
      step = rows_per_block(row_bytes)
      for start in range(0, rows.size, step):
        places = order[rows[start : start + step]].tolist()
        values = np.frombuffer(b''.join(map(row, places)), empty.dtype)
        yield values.reshape(len(places), *empty.shape[1:])

    normalizers = None
    if graph.kind == 'tile':
      normalizers = np.concatenate(columns['config_runtime_normalizers'])[order]
    yield ConfigStream(
      graph=graph,
      config_runtime=np.concatenate(columns['config_runtime'])[order],
      config_id=ids[order],
      read=read,
      config_runtime_normalizers=normalizers,
    )


def fill(array: np.ndarray, blocks: Iterator[np.ndarray]) -> None:
  """Writes `blocks` into `array` one after the other."""
  start = 0
  for block in blocks:
    array[start : start + len(block)] = block
    start += len(block)


def temporary_file(size: int) -> IO[bytes]:
  """Returns an empty file for `size` bytes, in memory or on disk, which is deleted when closed."""
  return io.BytesIO() if size <= IN_MEMORY_BYTES else tempfile.TemporaryFile()


def rows_per_block(row_bytes: int, block_bytes: int | None = None) -> int:
  """Returns the number of configs, at least one, in a block of `block_bytes` bytes.

  Args:
    row_bytes: size of the features of one config in bytes.
    block_bytes: size of a block in bytes; None is `BLOCK_BYTES`.
  """
  size = BLOCK_BYTES if block_bytes is None else block_bytes
  return max(1, size // max(row_bytes, 1))


def _features(module: module_lib.Module) -> np.ndarray:
  features = module.config_feat if module.kind == 'tile' else module.node_config_feat
  assert features is not None  # `Module` has checked it.
  return features


def _row_bytes(module: module_lib.Module) -> int:
  features = _features(module)
  return math.prod(features.shape[1:]) * features.itemsize
