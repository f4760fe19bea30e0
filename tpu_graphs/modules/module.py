"""The one data type: a measured module."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import hashlib
from typing import Any

import numpy as np

from tpu_graphs import errors
from tpu_graphs.modules import features

# Only these fields of `Module` differ between the kinds.
KIND_ARRAYS = {
  'tile': ('config_feat', 'config_runtime_normalizers'),
  'layout': ('node_config_ids', 'node_config_feat'),
}
KINDS = tuple(KIND_ARRAYS)
SPLITS = ('train', 'valid', 'test')
DEFAULT_MAX_ARRAY_BYTES = 16 << 30  # Sources refuse larger arrays before they allocate them.
UNMEASURED = -1  # `config_runtime` of a config that was not measured.
_BLOCK = 1 << 16  # Number of values that are checked at a time.
MIN_RUNTIME_NS = 2  # A measured time below this is a failed measurement, not a fast config.


def kind_of_collection(collection: str) -> str:
  """Returns the kind at the start of a collection's name: 'layout' for 'layout:xla:random'.

  Raises:
    InputError: the name starts with no known kind.
  """
  kind, _, rest = collection.partition(':')
  if kind not in KINDS or not rest:
    raise errors.InputError(
      'collection of unknown kind',
      found=repr(collection),
      expected="'tile:NAME' or 'layout:NAME', such as 'tile:xla' or 'layout:xla:random'",
    )
  return kind


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Module:
  """One XLA program as a graph of ops, with its configs and their measured runtimes.

  Sizes: N ops, E operand edges, C configs, NC configurable ops, S segments of computations.
  Arrays are checked and brought to the given dtype when a `Module` is made, so an existing
  `Module` is always well formed. Arrays must not be written to afterwards.

  Attributes:
    module_id: a name that is unique in a collection: the stem of the npz file, or the name and
      fingerprint of the HLO module.
    kind: 'tile' (one config vector per module) or 'layout' (one config vector per configurable op).
    node_opcode: uint8 [N], ids of `features.opcodes()`.
    node_feat: float32 [N, 140], columns named by `features.node_feature_names()`.
    edge_index: int64 [E, 2], rows (consumer, operand), each an index of an op.
    node_splits: int64 [S + 1], from 0 to N: op i lies in segment s where node_splits[s] <= i <
      node_splits[s + 1]. A missing last entry N is appended.
    computation: int64 [N], index of each op's computation. If None is given, because the
      computations are not known, it becomes the index of each op's segment.
    config_runtime: int64 [C], measured time in ns, lower is better; -1 where not measured.
    config_id: int64 [C], position of each config in its source; distinct.
    config_feat: float32 [C, 24], tile only, columns named by `features.tile_feature_names()`.
    config_runtime_normalizers: int64 [C], tile only, time in ns of the default config in the
      same run; -1 where not measured.
    node_config_ids: int64 [NC], layout only, index of each configurable op.
    node_config_feat: int8 [C, NC, 18], layout only, last axis named by
      `features.layout_feature_names()`; -1 is "no dimension".
    dropped_runs: reason -> number of runs of the source that are left out of the C configs.
    extra_feat: float32 [N, K], custom node features, columns named by
      `FeatureChoices.extra_columns`; None means K = 0.
    unknown_opcodes: name of an unknown opcode -> number of ops that have it, and therefore the
      id 0; empty where the source does not name opcodes.
    default_config: `config_id` of the compiler's own choice; None where the source does not
      name it.

  Raises (on construction):
    InputError: an array has a wrong shape, dtype, value or index; the error names the array, the
      value found and the value expected.
  """

  module_id: str
  kind: str
  node_opcode: np.ndarray
  node_feat: np.ndarray
  edge_index: np.ndarray
  node_splits: np.ndarray
  config_runtime: np.ndarray
  config_id: np.ndarray
  computation: np.ndarray = None  # type: ignore[assignment]  # Filled in on construction.
  config_feat: np.ndarray | None = None
  config_runtime_normalizers: np.ndarray | None = None
  node_config_ids: np.ndarray | None = None
  node_config_feat: np.ndarray | None = None
  dropped_runs: Mapping[str, int] = dataclasses.field(default_factory=dict)
  extra_feat: np.ndarray = None  # type: ignore[assignment]  # Filled in on construction.
  unknown_opcodes: Mapping[str, int] = dataclasses.field(default_factory=dict)
  default_config: int | None = None

  def __post_init__(self):
    if self.kind not in KINDS:
      raise errors.InputError(
        'unknown kind', where='kind', found=repr(self.kind), expected=' or '.join(KINDS)
      )
    if not self.module_id:
      raise errors.InputError(
        'empty name', where='module_id', expected='a name that is unique in the collection'
      )
    if not is_unicode(self.module_id):
      raise errors.InputError(
        'name not in Unicode', where='module_id', found=ascii(self.module_id), fix='rename the file'
      )
    for kind, names in KIND_ARRAYS.items():
      for name in names:
        if (getattr(self, name) is not None) != (kind == self.kind):
          reason = 'array missing' if kind == self.kind else 'array of the other kind'
          raise errors.InputError(
            reason,
            where=name,
            expected=f'the arrays of a {self.kind} module: {", ".join(KIND_ARRAYS[self.kind])}',
          )

    last_opcode = features.NUM_OPCODES - 1
    n = self._set('node_opcode', _integers, (None,), np.uint8, low=0, high=last_opcode).size
    self._set('node_feat', _floats, (n, features.NUM_NODE_FEATURES))
    if self.extra_feat is None:
      object.__setattr__(self, 'extra_feat', np.zeros((n, 0), np.float32))
    self._set('extra_feat', _floats, (n, None))
    self._set('edge_index', _integers, (None, 2), np.int64, low=0, high=n - 1)
    self._set_node_splits(n)
    if self.computation is None:
      object.__setattr__(self, 'computation', segment_of_op(self.node_splits))
    self._set('computation', _integers, (n,), np.int64, low=0)

    c = self._set('config_runtime', _integers, (None,), np.int64, low=UNMEASURED).size
    self._set('config_id', _integers, (c,), np.int64, low=0)
    if np.unique(self.config_id).size != c:
      raise errors.InputError('repeated value', where='config_id', expected='distinct positions')
    if self.default_config is not None and self.default_config not in self.config_id:
      raise errors.InputError(
        'no such config',
        where='default_config',
        found=self.default_config,
        expected='a value of config_id, or None',
      )
    if self.kind == 'tile':
      self._set('config_feat', _floats, (c, features.NUM_TILE_FEATURES))
      self._set('config_runtime_normalizers', _integers, (c,), np.int64, low=UNMEASURED)
      self._check_normalizers(self.config_runtime_normalizers)
    else:
      nc = self._set('node_config_ids', _integers, (None,), np.int64, low=0, high=n - 1).size
      shape = (c, nc, features.NUM_LAYOUT_FEATURES)
      self._set('node_config_feat', _integers, shape, np.int8, low=-128, high=127)
    low = (self.config_runtime != UNMEASURED) & (self.config_runtime < MIN_RUNTIME_NS)
    if low.any():
      raise errors.InputError(
        'time too short to be a measurement',
        where='config_runtime',
        found=f'{self.config_runtime[low][0]} ns',
        expected=f'>= {MIN_RUNTIME_NS} ns, or -1',
      )

  def _set(self, name: str, convert, *args, **kwargs) -> np.ndarray:
    array = convert(np.asarray(getattr(self, name)), name, *args, **kwargs)
    object.__setattr__(self, name, array)
    return array

  def _set_node_splits(self, n: int) -> None:
    splits = self._set('node_splits', _integers, (None,), np.int64, low=0, high=n)
    if splits.size == 0 or splits[0] != 0 or (np.diff(splits) < 0).any():
      raise errors.InputError(
        'not a list of splits',
        where='node_splits',
        found=_abbreviate(splits),
        expected=f'ascending from 0 to {n}, the number of ops',
      )
    if splits[-1] != n:
      object.__setattr__(self, 'node_splits', np.append(splits, n))

  def _check_normalizers(self, normalizers) -> None:
    measured = self.config_runtime != UNMEASURED
    bad = np.where(measured, normalizers < 1, normalizers != UNMEASURED)
    if bad.any():
      i = int(np.argmax(bad))
      raise errors.InputError(
        'normalizer does not fit the runtime',
        where=f'config_runtime_normalizers[{i}]',
        found=f'{normalizers[i]} beside a runtime of {self.config_runtime[i]}',
        expected='>= 1 ns where measured, else -1',
      )

  @property
  def num_ops(self) -> int:
    return self.node_opcode.size

  @property
  def num_edges(self) -> int:
    return self.edge_index.shape[0]

  @property
  def num_configs(self) -> int:
    return self.config_runtime.size

  @property
  def num_config_ops(self) -> int:
    """Number of configurable ops; 0 for a tile module."""
    return 0 if self.node_config_ids is None else self.node_config_ids.size

  @property
  def num_extra(self) -> int:
    """Number of columns of `extra_feat`."""
    return self.extra_feat.shape[1]

  @property
  def is_measured(self) -> bool:
    """True if any config has a runtime."""
    return bool((self.config_runtime != UNMEASURED).any())

  @property
  def relative_runtime(self) -> np.ndarray:
    """`relative_runtime` of this module's configs, [C]."""
    return relative_runtime(self.config_runtime, self.config_runtime_normalizers)

  def topology_fingerprint(self) -> bytes:
    """Returns a 16-byte digest of opcodes and edges, equal for modules with the same graph."""
    order = np.lexsort((self.edge_index[:, 1], self.edge_index[:, 0]))
    ops = self.num_ops.to_bytes(8, 'little') + self.node_opcode.tobytes()
    digest = hashlib.blake2b(ops, digest_size=16)
    digest.update(self.edge_index[order].astype('<i8').tobytes())
    return digest.digest()

  def select_configs(self, indices: Any) -> Module:
    """Returns the same graph with the configs at `indices` (distinct, int [c]) in that order."""
    names = (
      'config_runtime',
      'config_id',
      'config_feat',
      'config_runtime_normalizers',
      'node_config_feat',
    )
    arrays = {name: getattr(self, name) for name in names}
    chosen = {name: array[indices] for name, array in arrays.items() if array is not None}
    default = self.default_config if self.default_config in chosen['config_id'] else None
    return dataclasses.replace(self, **chosen, default_config=default)


def segment_of_op(node_splits: np.ndarray) -> np.ndarray:
  """Returns the index of each op's segment, int64 [N], from splits int64 [S + 1]."""
  return np.repeat(np.arange(node_splits.size - 1), np.diff(node_splits))


def relative_runtime(runtime: np.ndarray, normalizer: np.ndarray | None) -> np.ndarray:
  """Returns the runtimes that rankings are judged by.

  Args:
    runtime: int64 [C], ns, -1 where not measured.
    normalizer: int64 [C], ns, -1 where not measured; None for layout.

  Returns:
    [C]: `runtime` itself without a normalizer; else runtime / normalizer as float64, -1 where not
    measured.
  """
  if normalizer is None:
    return runtime
  ratio = runtime / np.where(normalizer > 0, normalizer, 1)
  return np.where(runtime == UNMEASURED, float(UNMEASURED), ratio)


def is_unicode(name: str) -> bool:
  """Returns True if `name` can be written as UTF-8.

  A file name with bytes that are not UTF-8 cannot: Python reads them as lone surrogates.
  """
  return not any('\ud800' <= character <= '\udfff' for character in name)


def _check_shape(array: np.ndarray, where: str, shape: tuple[int | None, ...]) -> None:
  if array.ndim == len(shape):
    pairs = zip(shape, array.shape, strict=True)
    if all(size is None or size == found for size, found in pairs):
      return
  expected = ', '.join('any' if size is None else str(size) for size in shape)
  raise errors.InputError(
    'wrong shape', where=where, found=f'{list(array.shape)}', expected=f'[{expected}]'
  )


def _floats(array: np.ndarray, where: str, shape: tuple[int | None, ...]) -> np.ndarray:
  _check_shape(array, where, shape)
  if array.dtype.kind != 'f':
    raise errors.InputError('wrong dtype', where=where, found=array.dtype, expected='float32')
  with np.errstate(over='ignore'):  # A float64 beyond float32 becomes inf, which is refused below.
    result = array.astype(np.float32, copy=False)
  # Values are checked in blocks, so that no temporary array is as large as `result`.
  rows = max(1, _BLOCK // max(result[:1].size, 1))
  blocks = (result[start : start + rows] for start in range(0, result.shape[0], rows))
  if not all(np.isfinite(block).all() for block in blocks):
    index = np.unravel_index(int(np.argmin(np.isfinite(result))), result.shape)
    raise errors.InputError(
      'value not finite',
      where=f'{where}{[int(i) for i in index]}',
      found=array[index],
      expected='a finite float32',
    )
  return result


def _integers(
  array: np.ndarray,
  where: str,
  shape: tuple[int | None, ...],
  dtype: Any,
  *,
  low: int,
  high: int | None = None,
) -> np.ndarray:
  _check_shape(array, where, shape)
  if array.dtype.kind not in 'iu':
    raise errors.InputError(
      'wrong dtype', where=where, found=array.dtype, expected='an integer dtype'
    )
  limit = np.iinfo(np.int64).max if high is None else high
  if array.size and (array.min() < low or array.max() > limit):
    index = np.unravel_index(int(np.argmax((array < low) | (array > limit))), array.shape)
    if high is None:
      expected = f'>= {low}'
    elif high >= low:
      expected = f'{low} to {high}'
    else:
      expected = 'no value, there is no op'
    raise errors.InputError(
      'value out of range',
      where=f'{where}{[int(i) for i in index]}',
      found=array[index],
      expected=expected,
    )
  return array.astype(dtype, copy=False)


def _abbreviate(array: np.ndarray) -> str:
  return np.array2string(array, threshold=8, edgeitems=3, separator=', ')


def smallest_module(kind: str, *, num_extra: int = 0) -> Module:
  """Returns a module of one op and one config, all zeros, for models built before data is read.

  Args:
    kind: 'tile' or 'layout'.
    num_extra: number of columns of `extra_feat`.
  """
  arrays: dict[str, dict[str, Any]] = {
    'tile': {
      'config_feat': np.zeros((1, features.NUM_TILE_FEATURES), np.float32),
      'config_runtime_normalizers': np.array([UNMEASURED]),
    },
    'layout': {
      'node_config_ids': np.array([0]),
      'node_config_feat': np.zeros((1, 1, features.NUM_LAYOUT_FEATURES), np.int8),
    },
  }
  return Module(
    module_id='smallest',
    kind=kind,
    node_opcode=np.array([0]),
    edge_index=np.zeros((0, 2), np.int64),
    node_feat=np.zeros((1, features.NUM_NODE_FEATURES), np.float32),
    node_splits=np.array([0, 1]),
    extra_feat=np.zeros((1, num_extra), np.float32),
    config_runtime=np.array([UNMEASURED]),
    config_id=np.array([0]),
    **arrays[kind],
  )
