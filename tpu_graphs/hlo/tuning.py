"""Tuning data -> modules: selection of the runs that are measurements, with their configs.

The selection follows `process_data/xla/tuning_data_iterator.cc` of
google-research-datasets/tpu_graphs, with one exception: a layout run of 1 ns is dropped because it
is not a measurement, as in tile data.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
import dataclasses
import hashlib
import logging
import os
from typing import Any

import numpy as np

from tpu_graphs import errors
from tpu_graphs.hlo import graph
from tpu_graphs.hlo import recognize
from tpu_graphs.hlo import text
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib

# Reasons why a run is not among the configs of its module.
RUN_FAILED = 'run failed (error set)'
RUN_WITHOUT_CONFIG = 'no module config'
RUN_WITHOUT_PROFILE = 'no profile'
RUN_TOO_SHORT = f'time <= {module_lib.MIN_RUNTIME_NS - 1} ns'
RUN_WITHOUT_DEFAULT = 'no default run'
# Reasons why a module of a tile file is not read.
SKIPPED_FEW_RUNS = 'at most one run'
SKIPPED_WITHOUT_HLO = 'no HLO module'
SKIPPED_WITHOUT_TILES = 'a run without tile config'

_TEXT = 'HLO text'
_BYTES_PER_OP = 4 * features.NUM_NODE_FEATURES + 1

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Extraction:
  """The content of a file of measured HLO modules.

  Attributes:
    modules: the modules that are read, in the order of the file.
    skipped: reason, one of the `SKIPPED_…` of this package -> number of modules of the file that
      are not read.
    type_name: the name of the protobuf message that was read, 'HLO text' or 'npz'.
    tunings: the source of each module; empty for npz.
  """

  modules: tuple[module_lib.Module, ...]
  skipped: Mapping[str, int]
  type_name: str
  tunings: tuple[graph.Tuning, ...] = dataclasses.field(default=(), repr=False)

  def program(self, index: int) -> bytes | None:
    """Returns the serialized HloModuleProto of the module at `index`; None for npz."""
    return self.tunings[index].hlo() if self.tunings else None


def from_file(
  path: str | os.PathLike[str],
  *,
  kind: str | None = None,
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED,
) -> list[module_lib.Module]:
  """Reads the modules in a file of HLO; see `read`. Skipped modules and unknown opcodes are logged.

  Raises:
    InputError: the file cannot be opened, or `read` refuses it.
  """
  try:
    with open(path, 'rb') as file:
      data = file.read()
  except OSError as error:
    raise errors.InputError(
      'file cannot be read', path=os.fspath(path), found=error.strerror
    ) from error
  return from_bytes(data, kind=kind, name=os.fspath(path), choices=choices)


def from_bytes(
  data: bytes,
  *,
  kind: str | None = None,
  name: str = '<bytes>',
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED,
) -> list[module_lib.Module]:
  """Reads the modules in the bytes of a file of HLO, and logs skipped modules and unknown opcodes.

  Raises:
    InputError: `read` refuses the bytes.
  """
  extraction = read(data, kind=kind, name=name, choices=choices)
  unknown: collections.Counter[str] = collections.Counter()
  for module in extraction.modules:
    unknown.update(module.unknown_opcodes)
  for what, counts in (
    ('modules skipped', extraction.skipped),
    ('ops of unknown opcodes, read as opcode 0', unknown),
  ):
    if counts:
      listed = ', '.join(f'{count} ({key})' for key, count in counts.items())
      _LOG.warning('%s: %s: %s', name, what, listed)
  return list(extraction.modules)


def read(
  data: bytes,
  *,
  kind: str | None = None,
  name: str = '<bytes>',
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED,
  max_array_bytes: int = module_lib.DEFAULT_MAX_ARRAY_BYTES,
) -> Extraction:
  """Reads the modules in the bytes of a file of HLO.

  A `TuningData` holds tile modules, a `ModuleTuningData` one layout module. A program without runs
  (an `HloModuleProto`, `HloProto` or HLO text) is read as a module without configs and
  configurable ops; its kind is `kind`, or layout if `kind` is None.

  `module_id` is the name of the HLO module, '_' and the fingerprint as 16 hexadecimal digits. In a
  layout file without a fingerprint, a digest of the file takes its place. Where a tile file has
  the same id again, '.1', '.2' and so on is appended. `config_id` is the position of the run in
  its module; dropped runs count too.

  Args:
    data: the content of the file.
    kind: 'tile', 'layout', or None for the kind that `data` looks like.
    name: the name of the file, for messages.
    choices: choices of how the features of ops are made.
    max_array_bytes: limit on the bytes of a module's features; a larger module is refused before
      anything is allocated.

  Returns:
    The modules, and the reasons why others were skipped.

  Raises:
    InputError: `data` is not of the kind, or an HLO module or a run breaks a rule; the error
      names the instruction or the run.
  """
  if kind is not None and kind not in module_lib.KINDS:
    raise errors.InputError(
      'unknown kind', where='kind', found=repr(kind), expected=' or '.join(module_lib.KINDS)
    )
  with errors.in_file(name):
    is_text = text.is_text(data)
    message = text.to_proto(data, name=name) if is_text else data
    type_name, document = recognize.parse(message, kind)
    skipped: Mapping[str, int] = {}
    if type_name == recognize.TUNING:
      selected, skipped = _select_tile_modules(document)
    else:
      selected = [_select_program(document.tuning(0), kind or 'layout', data)]
    # Default times are keyed by module name: modules of the same name all get the default time of
    # the last one.
    normalizers = {one.tuning.name: one.default_time for one in selected}
    modules = tuple(
      _module(one, choices, max_array_bytes, normalizer=normalizers[one.tuning.name])
      for one in selected
    )
    tunings = tuple(one.tuning for one in selected)
    return Extraction(modules, skipped, _TEXT if is_text else type_name, tunings)


@dataclasses.dataclass(frozen=True, eq=False)
class _Selected:
  """A module that is read.

  Attributes:
    tuning: the source of the module.
    kind: 'tile' or 'layout'.
    module_id: the name of the module.
    kept: positions of the runs that are measurements.
    dropped: reason -> number of the other runs.
    default: position of the first kept run of the default config; None if there is none.
  """

  tuning: graph.Tuning
  kind: str
  module_id: str
  kept: np.ndarray
  dropped: Mapping[str, int]
  default: int | None

  @property
  def default_time(self) -> int | None:
    """The time of the default run in ns; None if there is none."""
    return None if self.default is None else int(self.tuning.run_time[self.default])


def _select_tile_modules(document: graph.Document) -> tuple[list[_Selected], dict[str, int]]:
  """Returns the modules that are read, and reason -> number of the skipped modules."""
  skipped: collections.Counter[str] = collections.Counter()
  times_seen: collections.Counter[str] = collections.Counter()
  selected = []
  for tuning in map(document.tuning, range(document.num_tunings)):
    if tuning.run_flags.size <= 1:
      skipped[SKIPPED_FEW_RUNS] += 1
    elif not tuning.has_module:
      skipped[SKIPPED_WITHOUT_HLO] += 1
    elif not (tuning.run_flags & int(graph.RunFlag.TILE_CONFIG)).all():
      skipped[SKIPPED_WITHOUT_TILES] += 1
    else:
      module_id = f'{tuning.name}_{tuning.fingerprint:016x}'
      times_seen[module_id] += 1
      if times_seen[module_id] > 1:
        module_id = f'{module_id}.{times_seen[module_id] - 1}'
      selected.append(_select_tile_runs(tuning, module_id))
  return selected, dict(skipped)


def _select_tile_runs(tuning: graph.Tuning, module_id: str) -> _Selected:
  kept, dropped = _sort_out(tuning, [(RUN_WITHOUT_PROFILE, graph.RunFlag.PROFILE)])
  kept = _drop_short(tuning, kept, dropped)
  default = _first_default(tuning, kept)
  if default is None:
    raise errors.InputError(
      'no default run',
      where=f'module {tuning.name!r}',
      found=f'{tuning.run_flags.size} runs, {kept.size} of them measured, none of these is_default',
      expected='at least one measured run with is_default',
    )
  return _Selected(tuning, 'tile', module_id, kept, dict(dropped), default)


def _select_program(tuning: graph.Tuning, kind: str, data: bytes) -> _Selected:
  """Selects a program with its layout runs, if it has any."""
  required = [
    (RUN_WITHOUT_CONFIG, graph.RunFlag.MODULE_CONFIG),
    (RUN_WITHOUT_PROFILE, graph.RunFlag.PROFILE),
  ]
  kept, dropped = _sort_out(tuning, required)
  without_time = kept[tuning.run_time[kept] <= 0]
  if without_time.size:
    position = int(without_time[0])
    raise errors.InputError(
      'run without a time that did not fail',
      where=f'runs[{position}]',
      found=f'compute_time_ns {tuning.run_time[position]}',
      expected='more than 0, or error set',
    )
  if _first_default(tuning, kept) is None:
    dropped[RUN_WITHOUT_DEFAULT] += kept.size
    kept = kept[:0]
  kept = _drop_short(tuning, kept, dropped)
  if tuning.fingerprint:
    fingerprint = f'{tuning.fingerprint:016x}'
  else:  # A digest distinguishes programs of the same name.
    fingerprint = hashlib.sha256(data).hexdigest()[:16]
  module_id = f'{tuning.name}_{fingerprint}'
  default = _first_default(tuning, kept)
  return _Selected(tuning, kind, module_id, kept, dict(+dropped), default)


def _sort_out(
  tuning: graph.Tuning, required: list[tuple[str, graph.RunFlag]]
) -> tuple[np.ndarray, collections.Counter[str]]:
  """Drops the runs that failed or lack a required part.

  Args:
    tuning: the module with its runs.
    required: pairs (reason to drop a run without the flag, flag), in the order of the checks.

  Returns:
    The positions of the other runs, and reason -> number of dropped runs. A run counts for the
    first reason only.
  """
  kept = np.ones(tuning.run_flags.size, bool)
  dropped: collections.Counter[str] = collections.Counter()
  checks = [(RUN_FAILED, graph.RunFlag.ERROR, False)]
  checks += [(reason, flag, True) for reason, flag in required]
  for reason, flag, wanted in checks:
    bad = kept & ((tuning.run_flags & int(flag) != 0) != wanted)
    if bad.any():
      dropped[reason] += int(bad.sum())
    kept &= ~bad
  return np.flatnonzero(kept), dropped


def _drop_short(
  tuning: graph.Tuning, kept: np.ndarray, dropped: collections.Counter[str]
) -> np.ndarray:
  long_enough = tuning.run_time[kept] >= module_lib.MIN_RUNTIME_NS
  if not long_enough.all():
    dropped[RUN_TOO_SHORT] += int((~long_enough).sum())
  return kept[long_enough]


def _first_default(tuning: graph.Tuning, kept: np.ndarray) -> int | None:
  is_default = tuning.run_flags[kept] & int(graph.RunFlag.DEFAULT) != 0
  return next(iter(kept[is_default].tolist()), None)


def _module(
  selected: _Selected,
  choices: feature_choices.FeatureChoices,
  max_array_bytes: int,
  *,
  normalizer: int | None,
) -> module_lib.Module:
  tuning, positions = selected.tuning, selected.kept.tolist()
  config_bytes = tuning.config_nodes.size * features.NUM_LAYOUT_FEATURES
  size = tuning.num_ops * _BYTES_PER_OP + len(positions) * config_bytes
  if size > max_array_bytes:
    raise errors.InputError(
      'module too large',
      where=f'module {tuning.name!r}',
      found=f'{tuning.num_ops} ops and {len(positions)} configs, arrays of {size} bytes',
      expected=f'<= {max_array_bytes} bytes',
    )
  graph_arrays = tuning.graph(choices.layout_padding)
  configs: dict[str, Any]
  if selected.kind == 'tile':
    configs = {
      'config_feat': tuning.tile_configs(positions),
      'config_runtime_normalizers': np.full(len(positions), normalizer or 0, np.int64),
    }
  else:
    configs = {
      'node_config_ids': tuning.config_nodes,  # `Module` checks the range.
      'node_config_feat': tuning.layout_configs(positions),
    }
  module = module_lib.Module(
    module_id=selected.module_id,
    kind=selected.kind,
    **vars(graph_arrays),
    **configs,
    config_runtime=tuning.run_time[selected.kept],
    config_id=selected.kept,
    dropped_runs=selected.dropped,
    default_config=selected.default,
  )
  return choices.add_extra(module, tuning.hlo()) if choices.extra else module
