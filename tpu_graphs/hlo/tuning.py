"""Tuning data -> modules: which runs are measurements, and what configs they had.

The rules of selection are those of google-research-datasets/tpu_graphs, `process_data/xla/tuning_data_iterator.cc`, but
for one: a layout run of 1 ns is dropped as no measurement, as it is in tile data.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
import dataclasses
import hashlib
import itertools
import logging
import os
from typing import Any

import numpy as np

from tpu_graphs import errors
from tpu_graphs import features
from tpu_graphs import module as module_lib
from tpu_graphs.hlo import extract
from tpu_graphs.hlo import ragged
from tpu_graphs.hlo import recognize

# Why a run is not among the configs of its module.
RUN_FAILED = 'run failed (error set)'
RUN_WITHOUT_CONFIG = 'no module config'
RUN_WITHOUT_PROFILE = 'no profile'
RUN_TOO_SHORT = f'time <= {module_lib.MIN_RUNTIME_NS - 1} ns'
RUN_WITHOUT_DEFAULT = 'no default run'
# Why a module of a tile file is not among those that are read.
SKIPPED_FEW_RUNS = 'at most one run'
SKIPPED_WITHOUT_HLO = 'no HLO module'
SKIPPED_WITHOUT_TILES = 'a run without tile config'

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Extraction:
  """What a file of measured HLO modules holds.

  Attributes:
    modules: those that are read, in the order of the file.
    skipped: reason, one of the `SKIPPED_…` of this package -> number of modules of the file that are not read.
  """

  modules: tuple[module_lib.Module, ...]
  skipped: Mapping[str, int]


def from_file(path: str | os.PathLike[str], *, kind: str | None = None) -> list[module_lib.Module]:
  """The measured modules in a protobuf file; as `read`, but skipped modules are logged.

  Raises:
    InputError: the file cannot be opened, or it is refused by `read`.
  """
  try:
    with open(path, 'rb') as file:
      data = file.read()
  except OSError as error:
    raise errors.InputError('file cannot be read', path=os.fspath(path), found=error.strerror) from error
  return from_bytes(data, kind=kind, name=os.fspath(path))


def from_bytes(data: bytes, *, kind: str | None = None, name: str = '<bytes>') -> list[module_lib.Module]:
  """The measured modules in the bytes of a protobuf file; as `read`, but skipped modules are logged."""
  extraction = read(data, kind=kind, name=name)
  if extraction.skipped:
    _LOG.warning('%s: modules skipped: %s', name,
                 ', '.join(f'{count} ({reason})' for reason, count in extraction.skipped.items()))
  return list(extraction.modules)


def read(data: bytes, *, kind: str | None = None, name: str = '<bytes>') -> Extraction:
  """The measured modules in the bytes of a protobuf file.

  A `TuningData` holds tile modules, a `ModuleTuningData` one layout module. A program without runs, an `HloModuleProto`
  or `HloProto`, is read as a layout module without configs and configurable ops.

  `module_id` is the name of the HLO module, '_' and the fingerprint as 16 hexadecimal digits; in a layout file without
  fingerprint, a digest of the file takes its place; where a tile file has the same id again, '.1', '.2' and so on is
  appended. `config_id` is the position of the run in its module, counting those that are dropped.

  Args:
    data: the serialized message.
    kind: 'tile', 'layout', or None for what `data` looks like.
    name: the name of the file, for messages.

  Raises:
    InputError: `data` is not of the kind, or an HLO module or a run breaks a rule; the error names the instruction or
      the run.
  """
  if kind is not None and kind not in module_lib.KINDS:
    raise errors.InputError('unknown kind', where='kind', found=repr(kind), expected=' or '.join(module_lib.KINDS))
  with errors.in_file(name):
    type_name, message = recognize.parse(data, kind)
    if type_name == recognize.TUNING:
      return _tile(message)
    fingerprint = hashlib.blake2b(data, digest_size=8).hexdigest()
    if type_name == recognize.MODULE_TUNING:
      if message.fingerprint:
        fingerprint = f'{message.fingerprint:016x}'
      module = _layout(message.module, message.runs, message.config_index_to_node, fingerprint)
    else:
      module = _layout(message.hlo_module if type_name == recognize.HLO else message, [], [], fingerprint)
    return Extraction((module,), {})


def _tile(tuning: Any) -> Extraction:
  skipped: collections.Counter[str] = collections.Counter()
  selected = []
  for module in tuning.modules:
    if len(module.runs) <= 1:
      skipped[SKIPPED_FEW_RUNS] += 1
    elif not module.HasField('module'):
      skipped[SKIPPED_WITHOUT_HLO] += 1
    elif not all(run.op_config.HasField('tile_size_config') for run in module.runs):
      skipped[SKIPPED_WITHOUT_TILES] += 1
    else:
      selected.append((module, *_select_tile_runs(module)))

  # The default's time is kept by name: of modules with the same name all get that of the last.
  normalizers = {}
  for module, kept, _ in selected:
    default = next((run for _, run in kept if run.is_default), None)
    if default is None:
      raise errors.InputError('no default run', where=f'module {module.module.name!r}',
                              found=f'{len(module.runs)} runs, {len(kept)} of them measured, none of these is_default',
                              expected='at least one measured run with is_default')
    normalizers[module.module.name] = default.profile.compute_time_ns

  modules = []
  times_seen: collections.Counter[str] = collections.Counter()
  for module, kept, dropped in selected:
    module_id = f'{module.module.name}_{module.fingerprint:016x}'
    times_seen[module_id] += 1
    if times_seen[module_id] > 1:
      module_id = f'{module_id}.{times_seen[module_id] - 1}'
    modules.append(_tile_module(module, kept, dropped, module_id, normalizers[module.module.name]))
  return Extraction(tuple(modules), dict(skipped))


def _select_tile_runs(module: Any) -> tuple[list[tuple[int, Any]], dict[str, int]]:
  """The measured runs with their positions, and the number of the others by reason."""
  kept = []
  dropped: collections.Counter[str] = collections.Counter()
  for position, run in enumerate(module.runs):
    if run.error:
      dropped[RUN_FAILED] += 1
    elif not run.HasField('profile'):
      dropped[RUN_WITHOUT_PROFILE] += 1
    elif run.profile.compute_time_ns < module_lib.MIN_RUNTIME_NS:
      dropped[RUN_TOO_SHORT] += 1
    else:
      kept.append((position, run))
  return kept, dict(dropped)


def _tile_module(module: Any, kept: list[tuple[int, Any]], dropped: dict[str, int], module_id: str,
                 normalizer: int) -> module_lib.Module:
  graph = extract.graph(module.module)
  configs = [run.op_config.tile_size_config for _, run in kept]
  config_feat = np.concatenate(
      [ragged.Ragged.of(bounds).summary(6, empty_product=0)
       for bounds in ([config.kernel_bounds for config in configs], [config.output_bounds for config in configs],
                      [config.input_bounds for config in configs])], axis=1).astype(np.float32)
  return module_lib.Module(
      module_id=module_id, kind='tile', **vars(graph), **_runs(kept), config_feat=config_feat,
      config_runtime_normalizers=np.full(len(kept), normalizer, np.int64), dropped_runs=dropped)


def _runs(kept: list[tuple[int, Any]]) -> dict[str, np.ndarray]:
  return {'config_runtime': np.array([run.profile.compute_time_ns for _, run in kept], np.int64),
          'config_id': np.array([position for position, _ in kept], np.int64)}


def _layout(hlo: Any, runs: Any, config_nodes: Any, fingerprint: str) -> module_lib.Module:
  kept, dropped = _select_layout_runs(runs)
  return module_lib.Module(
      module_id=f'{hlo.name}_{fingerprint}', kind='layout', **vars(extract.graph(hlo)), **_runs(kept),
      node_config_ids=np.array(config_nodes, np.uint64),  # As in the message; `Module` checks the range.
      node_config_feat=_node_config_feat(kept, len(config_nodes)), dropped_runs=dropped)


def _select_layout_runs(runs: Any) -> tuple[list[tuple[int, Any]], dict[str, int]]:
  """The measured runs with their positions, and the number of the others by reason."""
  usable = []
  dropped: collections.Counter[str] = collections.Counter()
  for position, run in enumerate(runs):
    if run.error:
      dropped[RUN_FAILED] += 1
    elif not run.HasField('module_config'):
      dropped[RUN_WITHOUT_CONFIG] += 1
    elif not run.HasField('profile'):
      dropped[RUN_WITHOUT_PROFILE] += 1
    elif run.profile.compute_time_ns <= 0:
      raise errors.InputError('run without a time that did not fail', where=f'runs[{position}]',
                              found=f'compute_time_ns {run.profile.compute_time_ns}',
                              expected='more than 0, or error set')
    else:
      usable.append((position, run))
  if not any(run.is_default for _, run in usable):
    dropped[RUN_WITHOUT_DEFAULT] += len(usable)
    return [], dict(+dropped)
  kept = [(position, run) for position, run in usable if run.profile.compute_time_ns >= module_lib.MIN_RUNTIME_NS]
  dropped[RUN_TOO_SHORT] += len(usable) - len(kept)
  return kept, dict(+dropped)


def _node_config_feat(kept: list[tuple[int, Any]], num_nodes: int) -> np.ndarray:
  """int8 [C, NC, 18]."""
  limits = np.iinfo(np.int8)
  result = np.full((len(kept), num_nodes, len(features.LAYOUT_TENSORS), features.LAYOUT_DIMENSIONS), -1, np.int8)
  for config, (position, run) in zip(result, kept, strict=True):
    nodes = run.module_config.layout_config.nodes
    if len(nodes) != num_nodes:
      raise errors.InputError('config of a different number of ops', where=f'runs[{position}]',
                              found=f'{len(nodes)} nodes', expected=f'{num_nodes}, one per config_index_to_node')
    per_node = ragged.Ragged.of([range(len(node.tensors)) for node in nodes])
    if (per_node.lengths > len(features.LAYOUT_TENSORS)).any():
      node = int(np.argmax(per_node.lengths))
      raise errors.InputError('too many tensors in a config', where=f'runs[{position}], node {node}',
                              found=f'{per_node.lengths[node]} tensors',
                              expected=f'at most {len(features.LAYOUT_TENSORS)}: {", ".join(features.LAYOUT_TENSORS)}')
    tensors = itertools.chain.from_iterable(node.tensors for node in nodes)
    dims = ragged.Ragged.of([tensor.dims for tensor in tensors]).first(features.LAYOUT_DIMENSIONS, fill=-1)
    bad = (dims < limits.min) | (dims > limits.max)
    if bad.any():
      tensor = int(np.argmax(bad.any(axis=1)))
      raise errors.InputError('layout dimension out of range', where=f'runs[{position}], node {per_node.row[tensor]}',
                              found=dims[bad][0], expected=f'{limits.min} to {limits.max}')
    config[per_node.row, per_node.values] = dims
  return result.reshape(len(kept), num_nodes, features.NUM_LAYOUT_FEATURES)
