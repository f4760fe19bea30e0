"""Tuning data -> modules: which runs are measurements, and what configs they had.

The rules of selection are those of google-research-datasets/tpu_graphs,
`process_data/xla/tuning_data_iterator.cc`, but
for one: a layout run of 1 ns is dropped as no measurement, as it is in tile data.
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

_TEXT = 'HLO text'
_BYTES_PER_OP = 4 * features.NUM_NODE_FEATURES + 1

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Extraction:
  """What a file of measured HLO modules holds.

  Attributes:
    modules: those that are read, in the order of the file.
    skipped: reason, one of the `SKIPPED_…` of this package -> number of modules of the file that
      are not read.
    type_name: what was read: the name of the protobuf message, 'HLO text' or 'npz'.
    tunings: what each module was made of; nothing for npz.
  """

  modules: tuple[module_lib.Module, ...]
  skipped: Mapping[str, int]
  type_name: str
  tunings: tuple[graph.Tuning, ...] = dataclasses.field(default=(), repr=False)

  def program(self, index: int) -> bytes | None:
    """The serialized HloModuleProto of the module at `index`; None for npz."""
    return self.tunings[index].hlo() if self.tunings else None


def from_file(
  path: str | os.PathLike[str],
  *,
  kind: str | None = None,
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED,
) -> list[module_lib.Module]:
  """The modules in a file of HLO; as `read`, but what is left out is logged.

  Raises:
    InputError: the file cannot be opened, or it is refused by `read`.
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
  """The modules in the bytes of a file of HLO; as `read`, but what is left out is logged."""
  extraction = read(data, kind=kind, name=name, choices=choices)
  unknown: collections.Counter[str] = collections.Counter()
  for module in extraction.modules:
    unknown.update(module.unknown_opcodes)
  for what, counts in (
    ('modules skipped', extraction.skipped),
    ('ops of unknown opcodes, read as opcode 0', unknown),
  ):
    if counts:
      _LOG.warning(
        '%s: %s: %s', name, what, ', '.join(f'{count} ({key})' for key, count in counts.items())
      )
  return list(extraction.modules)


def read(
  data: bytes,
  *,
  kind: str | None = None,
  name: str = '<bytes>',
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED,
  max_array_bytes: int = module_lib.DEFAULT_MAX_ARRAY_BYTES,
) -> Extraction:
  """The modules in the bytes of a file of HLO.

  A `TuningData` holds tile modules, a `ModuleTuningData` one layout module. A program without
  runs, that is an
  `HloModuleProto`, `HloProto` or HLO text, is read as a module without configs and configurable
  ops, of the layout kind if none is wanted.

  `module_id` is the name of the HLO module, '_' and the fingerprint as 16 hexadecimal digits; in
  a layout file without fingerprint, a digest of the file takes its place; where a tile file has
  the same id again, '.1', '.2' and so on is appended. `config_id` is the position of the run in
  its module, counting those that are dropped.

  Args:
    data: the content of the file.
    kind: 'tile', 'layout', or None for what `data` looks like.
    name: the name of the file, for messages.
    choices: how the features of ops are made.
    max_array_bytes: a module whose features would take more is refused before anything is
      allocated.

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
    type_name, document = recognize.parse(text.to_proto(data, name=name) if is_text else data, kind)
    skipped: Mapping[str, int] = {}
    if type_name == recognize.TUNING:
      selected, skipped = _select_tile_modules(document)
    else:
      selected = [_select_program(document.tuning(0), kind or 'layout', data)]
    # The default's time is kept by name: of modules with the same name all get that of the last.
    normalizers = {one.tuning.name: one.default_time for one in selected}
    modules = tuple(
      _module(one, choices, max_array_bytes, normalizer=normalizers[one.tuning.name])
      for one in selected
    )
    return Extraction(
      modules, skipped, _TEXT if is_text else type_name, tuple(one.tuning for one in selected)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Selected:
  """A module that is read.

  Attributes:
    tuning: what it is made of.
    kind: 'tile' or 'layout'.
    module_id: its name.
    kept: positions of the runs that are measurements.
    dropped: reason -> number of the others.
    default: position of the first kept run of the default config; None without any.
  """

  tuning: graph.Tuning
  kind: str
  module_id: str
  kept: np.ndarray
  dropped: Mapping[str, int]
  default: int | None

  @property
  def default_time(self) -> int | None:
    """ns."""
    return None if self.default is None else int(self.tuning.run_time[self.default])


def _select_tile_modules(document: graph.Document) -> tuple[list[_Selected], dict[str, int]]:
  """The modules that are read, and the number of the others by reason."""
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
  """A program with its layout runs, if it has any."""
  kept, dropped = _sort_out(
    tuning,
    [
      (RUN_WITHOUT_CONFIG, graph.RunFlag.MODULE_CONFIG),
      (RUN_WITHOUT_PROFILE, graph.RunFlag.PROFILE),
    ],
  )
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
  # Without a fingerprint, programs of one name are told apart by a digest.
  fingerprint = (
    f'{tuning.fingerprint:016x}' if tuning.fingerprint else hashlib.sha256(data).hexdigest()[:16]
  )
  return _Selected(
    tuning, kind, f'{tuning.name}_{fingerprint}', kept, dict(+dropped), _first_default(tuning, kept)
  )


def _sort_out(
  tuning: graph.Tuning, required: list[tuple[str, graph.RunFlag]]
) -> tuple[np.ndarray, collections.Counter[str]]:
  """Positions of the runs that did not fail and have what is required, and the number of the
  others by reason.
  """
  kept = np.ones(tuning.run_flags.size, bool)
  dropped: collections.Counter[str] = collections.Counter()
  for reason, flag, wanted in [
    (RUN_FAILED, graph.RunFlag.ERROR, False),
    *((*pair, True) for pair in required),
  ]:
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
  return next(iter(kept[tuning.run_flags[kept] & int(graph.RunFlag.DEFAULT) != 0].tolist()), None)


def _module(
  selected: _Selected,
  choices: feature_choices.FeatureChoices,
  max_array_bytes: int,
  *,
  normalizer: int | None,
) -> module_lib.Module:
  tuning, positions = selected.tuning, selected.kept.tolist()
  size = (
    tuning.num_ops * _BYTES_PER_OP
    + len(positions) * tuning.config_nodes.size * features.NUM_LAYOUT_FEATURES
  )
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
      'node_config_ids': tuning.config_nodes,  # As in the message; `Module` checks the range.
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
