"""Summaries of files of measured programs in numbers.

```
file = summary.summarize(readers.from_file('kernels.pb'))
print(file.total.configs, file.total.opcodes, [module.best_ratio for module in file.modules])
```
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from tpu_graphs import hlo
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib

# Stands for opcodes whose names the source does not give.
UNKNOWN = features.opcode_names()[features.UNKNOWN_OPCODE]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
  """The numbers of one module, or of several together.

  Attributes:
    ops: number of ops.
    edges: number of operand edges.
    computations: number of computations that hold an op, see `computation_of_op`.
    config_ops: number of configurable ops; 0 for tile.
    configs: number of configs.
    measured: number of configs with a runtime.
    distinct_configs: number of configs that differ from each other, by module.
    fastest_ns: the lowest runtime in ns; None where nothing is measured.
    slowest_ns: the highest runtime in ns; None where nothing is measured.
    best_ratio: the best runtime over the runtime of the default config, for tile the lowest
      runtime / normalizer, for several modules the geometric mean; None where not known.
    opcodes: opcode -> number of ops, the most frequent first; without unknown opcodes.
    unknown_opcodes: opcode that the table lacks -> number of ops, the most frequent first;
      `UNKNOWN` where the source gives no names.
    dropped_runs: reason -> number of runs that are not among the configs.
  """

  ops: int
  edges: int
  computations: int
  config_ops: int
  configs: int
  measured: int
  distinct_configs: int
  fastest_ns: int | None
  slowest_ns: int | None
  best_ratio: float | None
  opcodes: Mapping[str, int]
  unknown_opcodes: Mapping[str, int]
  dropped_runs: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleSummary(Contents):
  """The numbers of one module.

  Attributes:
    module_id: the module's name.
    kind: 'tile' or 'layout'.
  """

  module_id: str
  kind: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileSummary:
  """The numbers of one file.

  Attributes:
    type_name: type of the file, as in `hlo.Extraction`.
    modules: the file's modules.
    skipped: reason -> number of modules of the file that are not read.
  """

  type_name: str
  modules: tuple[ModuleSummary, ...]
  skipped: Mapping[str, int]

  @property
  def total(self) -> Contents:
    """Returns the numbers of all modules together."""
    return total(self.modules)


def summarize(extraction: hlo.Extraction) -> FileSummary:
  """Summarizes a file, as `readers.from_file` returns it."""
  return FileSummary(
    type_name=extraction.type_name,
    skipped=dict(extraction.skipped),
    modules=tuple(summarize_module(module) for module in extraction.modules),
  )


def summarize_module(module: module_lib.Module) -> ModuleSummary:
  """Summarizes a module; 100,000 configs take about a second."""
  measured = module.config_runtime != module_lib.UNMEASURED
  runtime = module.config_runtime[measured]
  counts = np.bincount(module.node_opcode, minlength=features.NUM_OPCODES).tolist()
  unknown = dict(module.unknown_opcodes)
  unnamed = counts[features.UNKNOWN_OPCODE] - sum(unknown.values())
  if unnamed:
    unknown[UNKNOWN] = unnamed
  known = {name: counts[opcode] for name, opcode in features.opcodes().items() if counts[opcode]}
  return ModuleSummary(
    module_id=module.module_id,
    kind=module.kind,
    ops=module.num_ops,
    edges=module.num_edges,
    computations=np.unique(computation_of_op(module)).size,
    config_ops=module.num_config_ops,
    configs=module.num_configs,
    measured=runtime.size,
    distinct_configs=_count_distinct(_config_vectors(module)),
    fastest_ns=int(runtime.min()) if runtime.size else None,
    slowest_ns=int(runtime.max()) if runtime.size else None,
    best_ratio=_best_ratio(module, measured),
    opcodes=_by_count(known),
    unknown_opcodes=_by_count(unknown),
    dropped_runs=_by_count(module.dropped_runs),
  )


def total(parts: Sequence[Contents]) -> Contents:
  """Returns the numbers of several modules, or of several files, together."""

  def sums(name: str) -> int:
    return sum(getattr(part, name) for part in parts)

  def known(name: str) -> list[Any]:
    return [getattr(part, name) for part in parts if getattr(part, name) is not None]

  def counts(name: str) -> dict[str, int]:
    return merge_counts(getattr(part, name) for part in parts)

  ratios = known('best_ratio')
  best_ratio = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
  return Contents(
    ops=sums('ops'),
    edges=sums('edges'),
    computations=sums('computations'),
    config_ops=sums('config_ops'),
    configs=sums('configs'),
    measured=sums('measured'),
    distinct_configs=sums('distinct_configs'),
    fastest_ns=min(known('fastest_ns'), default=None),
    slowest_ns=max(known('slowest_ns'), default=None),
    best_ratio=best_ratio,
    opcodes=counts('opcodes'),
    unknown_opcodes=counts('unknown_opcodes'),
    dropped_runs=counts('dropped_runs'),
  )


def merge_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
  """Returns the sum of the counts of each name, the highest first."""
  merged: collections.Counter[str] = collections.Counter()
  for part in counts:
    merged.update(part)
  return _by_count(merged)


def to_json(file: FileSummary) -> dict[str, Any]:
  """Returns the summary as values that JSON can hold: `type`, `modules`, `skipped`.

  The modules have the names and units of the fields.
  """
  # These two keys of a module come first.
  first = {'module_id': '', 'kind': ''}
  modules = [{**first, **dataclasses.asdict(module)} for module in file.modules]
  return {'type': file.type_name, 'modules': modules, 'skipped': dict(file.skipped)}


def computation_of_op(module: module_lib.Module) -> np.ndarray:
  """Returns the index of each op's computation, int64 [N].

  The computations are found from the graph where the source gives only segments: the files of the
  public dataset lump computations into segments. But each computation is a range of ops with one
  root, mostly its last op, and nothing but the root is used from outside. So the next computation
  starts at the first op behind a root that no other edge spans. Where that contradicts the
  segments, the segments are returned.
  """
  segment = module_lib.segment_of_op(module.node_splits)
  if not np.array_equal(module.computation, segment):
    return module.computation
  n = module.num_ops
  is_root = module.node_feat[:, features.node_feature_names().index('is_root')] == 1
  roots = np.flatnonzero(is_root)
  within = module.edge_index[~is_root[module.edge_index[:, 1]]]
  spans = np.cumsum(
    np.bincount(within.min(axis=1) + 1, minlength=n + 1)
    - np.bincount(within.max(axis=1) + 1, minlength=n + 1)
  )
  possible = np.flatnonzero(spans == 0)
  starts = possible[np.searchsorted(possible, roots[:-1] + 1)]
  found = np.searchsorted(starts, np.arange(n), side='right')
  one_root_each = np.array_equal(found[roots], np.arange(roots.size))
  one_segment_each = np.unique(np.stack([found, segment]), axis=1).shape[1] == np.unique(found).size
  return found if one_root_each and one_segment_each else module.computation


def _config_vectors(module: module_lib.Module) -> np.ndarray:
  """Returns one row for each config, [C, values]; equal rows are equal configs."""
  if module.config_feat is not None:
    # Rows are compared as bytes, so -0 is turned into 0.
    return module.config_feat + np.float32(0)
  assert module.node_config_feat is not None
  return module.node_config_feat.reshape(
    module.num_configs, module.num_config_ops * features.NUM_LAYOUT_FEATURES
  )


def _count_distinct(rows: np.ndarray) -> int:
  if rows.size == 0:
    return min(rows.shape[0], 1)
  row_bytes = rows.shape[1] * rows.itemsize
  return np.unique(np.ascontiguousarray(rows).view(f'V{row_bytes}')).size


def _best_ratio(module: module_lib.Module, measured: np.ndarray) -> float | None:
  if not measured.any():
    return None
  best = module.relative_runtime[measured].min()
  if module.kind == 'tile':
    return float(best)
  default = module.config_runtime[measured & (module.config_id == module.default_config)]
  return float(best / default[0]) if default.size else None


def _by_count(counts: Mapping[str, int]) -> dict[str, int]:
  return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
