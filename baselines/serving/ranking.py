"""Ranks the configs of programs with a trained model, for `tpu_graphs.rank` and the command `rank`.

```
ranking = tpu_graphs.rank('runs/layout', 'resnet50.pb', 200)   # 200 random layouts
ranking = tpu_graphs.rank('runs/tile', 'kernel.npz', 'configs.csv')
best = ranking.order[0]
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import os
import warnings

import numpy as np
import tensorflow as tf

from baselines.serving import saved_model
from baselines.training import runs
from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs import terminal
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import reduction
from tpu_graphs.sources import candidates
from tpu_graphs.sources import readers

# The best and the worst configs are a tenth of all configs each.
_SHARE = 10
# Number of columns that a note names.
_MAX_COLUMNS = 4
# Number of modules that an error names.
_MAX_NAMES = 5
_LAYOUT_COLUMNS = 'layout_minor_to_major_'
# Number of bounds in each of the three blocks of a tile config; their sum and product follow them.
_BOUNDS = 6
# Feature of the statistics -> words for it in a note.
_PLACES = {
  'feat': 'the features of ops',
  'extra_feat': 'the extra features',
  'config_feat': 'the configs',
  'node_config_feat': 'the configs',
}

Source = str | os.PathLike[str] | bytes | module_lib.Module
# A file, arrays as for `candidates.with_configs`, or a number of random layouts.
Configs = str | os.PathLike[str] | np.ndarray | Mapping[str, np.ndarray] | int


class RankingWarning(UserWarning):
  """A warning with a note of a `Ranking`."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Difference:
  """A difference between the configs predicted fastest and slowest.

  Attributes:
    name: name of a configurable op, or of a column of tile configs.
    opcode: opcode of the op; '' for a column.
    alike: number of other ops that have the same layouts as this op in all configs.
    difference: size of the difference between the best and the worst tenth of the configs, 0 to 1.
      For layouts, the share of configs that would have to change so that both tenths have each
      layout equally often; for a column, the Kolmogorov-Smirnov statistic.
    best: typical value of the best tenth: the most frequent layouts, int8 [18], or the median,
      float32 scalar.
    worst: typical value of the worst tenth, in the same form.
    effect: how much the score of the best config rises when this value alone is replaced with
      `worst` (for a bound, with sum and product); NaN where the value cannot change alone.
  """

  name: str
  opcode: str
  alike: int
  difference: float
  best: np.ndarray
  worst: np.ndarray
  effect: float


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Ranking:
  """A ranking of a module's configs by a model.

  Attributes:
    order: positions of the configs, int64 [C], predicted fastest first; configs with equal scores
      keep their order.
    scores: scores of the configs in the order of `module`, float32 [C]; lower = predicted faster.
    module: the module with its C configs.
    program: the serialized HloModuleProto of a layout module; None for tile, and where it is not
      known.
    notes: warnings to consider before the ranking is used, such as features outside the range of
      the training data.
    differences: differences between the best and the worst configs, largest first; empty unless an
      explanation was asked for.
  """

  order: np.ndarray
  scores: np.ndarray
  module: module_lib.Module
  program: bytes | None
  notes: tuple[str, ...] = ()
  differences: tuple[Difference, ...] = ()

  @property
  def best_first(self) -> module_lib.Module:
    """Returns the module with its configs in the predicted order."""
    return self.module.select_configs(self.order)


def rank(
  run: str | os.PathLike[str] | Ranker,
  module: Source,
  configs: Configs | None = None,
  *,
  name: str | None = None,
  seed: int = 0,
  explain: int = 0,
) -> Ranking:
  """Ranks the configs of a program with a trained model.

  Notes of the result are also issued as Python warnings of the category `RankingWarning`.

  Args:
    run: run directory, or its `Ranker`, which is faster when more than one program is ranked.
    module: path of an npz file, HLO protobuf or HLO text; the bytes of a serialized HLO protobuf;
      or a `Module` with the features that the run was trained with.
    configs: configs to rank in place of the module's own: the path of an npz, JSON or CSV file;
      `config_feat` [C, 24] or `node_config_feat` [C, NC, 18] of the
      `candidates.configurable_ops`; arrays by name; or the number of random layouts to make.
    name: `module_id` or position of the module, in a file with several modules.
    seed: seed of the random layouts.
    explain: number of ops or columns with which to explain the ranking.

  Returns:
    The ranking: `order` and `scores`.

  Raises:
    InputError: the run, the module or the configs cannot be used, or do not fit each other.
  """
  ranker = run if isinstance(run, Ranker) else Ranker(run)
  [(found, program)] = ranker.read(module, name=name, only_one=True)
  ranking = ranker.rank(found, configs, program=program, seed=seed, explain=explain)
  for note in ranking.notes:
    warnings.warn(note, RankingWarning, stacklevel=2)
  return ranking


class Ranker:
  """A trained model that ranks programs."""

  def __init__(self, run: str | os.PathLike[str]):
    """Loads a run directory.

    Raises:
      InputError: see `runs.load`; or a function of the run's extra features cannot be loaded.
    """
    self.run = runs.load(os.fspath(run))
    self.choices = self.run.choices.resolve()
    self._served = saved_model.ServedModel(
      self.run.model, self.run.kind, num_extra=self.choices.num_extra
    )
    self._statistics = directory_lib.read_statistics(
      os.path.join(self.run.path, runs.STATISTICS_NAME), num_extra=self.choices.num_extra
    )['features']

  def read(
    self, source: Source, *, name: str | None = None, only_one: bool = False
  ) -> list[tuple[module_lib.Module, bytes | None]]:
    """Reads the modules of a source, with their programs where these are known.

    Args:
      source: a source as for the function `rank`.
      name: name or position of the only module to read; None: all modules.
      only_one: whether to refuse several modules.

    Raises:
      InputError: the source cannot be read, or its modules do not fit the run.
    """
    if isinstance(source, module_lib.Module):
      self._check(source)
      return [(source, None)]
    path = 'the program given' if isinstance(source, bytes) else os.fspath(source)
    with errors.in_file(path):
      if isinstance(source, bytes):
        extraction = readers.from_bytes(source, path=path, kind=self.run.kind, choices=self.choices)
      else:
        extraction = readers.from_file(source, kind=self.run.kind, choices=self.choices)
      chosen = _choose(extraction, name)
      if only_one and len(chosen) > 1:
        raise errors.InputError(
          'several modules',
          found=f'{len(chosen)}: {_names(extraction)}',
          expected='one',
          fix='choose one with --module',
        )
    if self.run.kind != 'layout':
      return [(extraction.modules[i], None) for i in chosen]
    return [(extraction.modules[i], extraction.program(i)) for i in chosen]

  def rank(
    self,
    module: module_lib.Module,
    configs: Configs | None = None,
    *,
    program: bytes | None = None,
    seed: int = 0,
    explain: int = 0,
  ) -> Ranking:
    """Ranks the configs of a module; see the function `rank`.

    Raises:
      InputError: the module or the configs do not fit the run, or there are no configs.
    """
    self._check(module)
    notes = []
    if configs is not None:
      module = _with_configs(module, configs, program, seed)
      if isinstance(configs, int) and module.num_configs < configs:
        layouts = terminal.plural(module.num_configs, 'different layout')
        notes.append(f'the program has only {layouts}')
    if not module.num_configs:
      choices = '--configs=FILE.npz'
      if module.kind == 'layout':
        choices += ' or --random_configs=N'
      raise errors.InputError(
        'no config to rank',
        where=module.module_id,
        found='a program without configs',
        expected='at least one',
        fix=f'give {choices}',
      )
    reduced = self._reduced(module)
    scores = self._scores(reduced)
    order = np.argsort(scores, kind='stable')
    if module.num_configs > 1 and scores.min() == scores.max():
      notes.append(
        f'all {module.num_configs:,} configs have the same score, so their order means nothing; '
        'the model may need more training'
      )
    notes += self._out_of_range(reduced)
    differences = []
    if explain:
      differences = self._differences(module, order, scores, program, explain)
    return Ranking(
      order=order,
      scores=scores,
      module=module,
      program=program,
      notes=tuple(notes),
      differences=tuple(differences),
    )

  def _check(self, module: module_lib.Module) -> None:
    """Refuses a module whose features differ from the features that the model knows."""
    where = module.module_id
    if module.kind != self.run.kind:
      raise errors.InputError(
        'module of the other kind', where=where, found=module.kind, expected=self.run.kind
      )
    if module.num_extra != self.choices.num_extra:
      raise errors.InputError(
        'extra features differ from the extra features of the run',
        where=where,
        found=f'{module.num_extra} columns',
        expected=', '.join(self.choices.extra_columns) or 'none',
        fix='read the program with the choices of the run',
      )
    names = features.node_feature_names()
    columns = [i for i, name in enumerate(names) if name.startswith(_LAYOUT_COLUMNS)]
    # Every program has padding, since no program has only shapes of six dimensions.
    padding = -1 if (module.node_feat[:, columns] < 0).any() else 0
    if padding != self.choices.layout_padding:
      raise errors.InputError(
        'padding of layouts differs from the padding of the run',
        where=where,
        found=padding,
        expected=self.choices.layout_padding,
        fix='read the program with the choices of the run',
      )

  def _reduced(self, module: module_lib.Module) -> module_lib.Module:
    """Reduces the module as the modules of the training data were reduced, if they were."""
    options = self.run.config.get('data', {}).get('options', {})
    if options.get('keep_hops') is None or not module.num_config_ops:
      return module
    return reduction.keep_hops(module, options['keep_hops'], rest=options['rest'])

  def _scores(self, module: module_lib.Module) -> np.ndarray:
    """Scores the configs; returns float32 [C], in the order of the configs."""
    arrays = {name: tf.constant(array) for name, array in saved_model.arrays_of(module).items()}
    scores = self._served.tensors(arrays)['scores'].numpy()
    if not np.isfinite(scores).all():
      raise errors.InputError(
        'score not finite',
        where=f'module {module.module_id}',
        found=scores[~np.isfinite(scores)][0],
        fix='train again, with a lower learning rate',
      )
    return scores

  def _out_of_range(self, module: module_lib.Module) -> Iterator[str]:
    """Yields a note for each feature with values outside the range of the training data."""
    layouts = module.node_config_feat
    if layouts is not None:
      layouts = layouts.reshape(-1, features.NUM_LAYOUT_FEATURES)
    arrays = {
      'feat': (module.node_feat, features.node_feature_names()),
      'extra_feat': (module.extra_feat, self.choices.extra_columns),
      'config_feat': (module.config_feat, features.tile_feature_names()),
      'node_config_feat': (layouts, features.layout_feature_names()),
    }
    for feature, (values, names) in arrays.items():
      seen = self._statistics.get(feature)
      if values is None or not values.size or seen is None or not seen['count']:
        continue
      extremes = np.stack([values.min(axis=0), values.max(axis=0)]).astype(np.float64)
      bounds = np.array([seen['min'], seen['max']])
      # Distances outside the range are measured on the scale that models use for features.
      beyond = (features.signed_log(extremes) - features.signed_log(bounds)) * [[-1], [1]]
      farthest = beyond.max(axis=0)
      by_distance = np.argsort(-farthest, kind='stable')
      columns = [column for column in by_distance if farthest[column] > 0]
      if not columns:
        continue
      named = []
      for i in columns[:_MAX_COLUMNS]:
        value = extremes[int(beyond[:, i].argmax()), i]
        named.append(f'{names[i]} {value:g} ({bounds[0, i]:g} to {bounds[1, i]:g})')
      if len(columns) > _MAX_COLUMNS:
        named.append('…')
      yield (
        f'values outside the range of the training data in {len(columns)} of '
        f'{terminal.plural(len(names), "column")} of {_PLACES[feature]}: {", ".join(named)}'
      )

  def _differences(
    self,
    module: module_lib.Module,
    order: np.ndarray,
    scores: np.ndarray,
    program: bytes | None,
    number: int,
  ) -> list[Difference]:
    """Finds the `number` largest differences between the best and the worst configs."""
    share = max(order.size // _SHARE, 1)
    best, worst = order[:share], order[-share:]
    if module.kind == 'tile':
      name, given = 'config_feat', {}
      found = _columns(module, best, worst)
    else:
      name, given = 'node_config_feat', {'node_config_ids': module.node_config_ids}
      names = None if program is None else candidates.op_names(program)
      found = _layouts(module, best, worst, names)
    changes = [each for each in found if each[0].difference > 0]
    changes.sort(key=lambda each: -each[0].difference)
    changes = changes[:number]
    if not changes:
      return []
    # Each difference is applied to its own copy of the best config.
    tried = np.repeat(getattr(module, name)[order[:1]], len(changes), axis=0)
    for row, (_, change) in zip(tried, changes, strict=True):
      change(row)
    changed = candidates.with_configs(module, {name: tried, **given})
    effects = self._scores(self._reduced(changed)) - scores[order[0]]
    return [
      dataclasses.replace(difference, effect=float(effect) + difference.effect)
      for (difference, _), effect in zip(changes, effects, strict=True)
    ]


# A difference, whose effect is still 0 or NaN, and a function that changes a config, [24] or
# [NC, 18], in place, so that the effect can be measured.
_Change = tuple[Difference, Callable[[np.ndarray], None]]


def _layouts(
  module: module_lib.Module, best: np.ndarray, worst: np.ndarray, names: Sequence[str] | None
) -> Iterator[_Change]:
  """Yields a change for each group of configurable ops with the same layouts in all configs."""
  groups: dict[bytes, list[int]] = {}
  for j in range(module.num_config_ops):
    groups.setdefault(module.node_config_feat[:, j].tobytes(), []).append(j)
  for ops in groups.values():
    layouts, which = np.unique(module.node_config_feat[:, ops[0]], axis=0, return_inverse=True)
    which = which.reshape(-1)
    of_best = np.bincount(which[best], minlength=len(layouts))
    of_worst = np.bincount(which[worst], minlength=len(layouts))
    node = module.node_config_ids[ops[0]]
    typical = layouts[of_worst.argmax()]

    def change(config: np.ndarray, ops: Sequence[int] = ops, typical: np.ndarray = typical) -> None:
      config[ops] = typical

    yield (
      Difference(
        name=names[node] if names else str(node),
        alike=len(ops) - 1,
        opcode=features.opcode_names()[module.node_opcode[node]],
        best=layouts[of_best.argmax()],
        worst=typical,
        difference=np.abs(of_best - of_worst).sum() / 2 / best.size,
        effect=0.0,
      ),
      change,
    )


def _columns(module: module_lib.Module, best: np.ndarray, worst: np.ndarray) -> Iterator[_Change]:
  """Yields a change for each column of tile configs."""
  for column, name in enumerate(features.tile_feature_names()):
    of_best = np.sort(module.config_feat[best, column])
    of_worst = np.sort(module.config_feat[worst, column])
    values = np.union1d(of_best, of_worst)
    share_of_best = np.searchsorted(of_best, values, side='right') / of_best.size
    share_of_worst = np.searchsorted(of_worst, values, side='right') / of_worst.size
    block, place = divmod(column, _BOUNDS + 2)
    typical = of_worst[of_worst.size // 2]

    def change(
      config: np.ndarray, column: int = column, block: int = block, typical: np.ndarray = typical
    ) -> None:
      config[column] = typical
      start = block * (_BOUNDS + 2)
      bounds = config[start : start + _BOUNDS]
      product = bounds[bounds != 0].prod() if bounds.any() else 0
      config[start + _BOUNDS : start + _BOUNDS + 2] = bounds.sum(), product

    yield (
      Difference(
        name=name,
        opcode='',
        alike=0,
        best=of_best[of_best.size // 2],
        worst=typical,
        difference=float(np.abs(share_of_best - share_of_worst).max()),
        effect=0.0 if place < _BOUNDS else np.nan,
      ),
      change,
    )


def _with_configs(
  module: module_lib.Module, configs: Configs, program: bytes | None, seed: int
) -> module_lib.Module:
  if isinstance(configs, str | os.PathLike):
    names = None if program is None else candidates.op_names(program)
    return candidates.read(configs, module, names=names)
  if not isinstance(configs, int):
    return candidates.with_configs(module, configs)
  if module.kind != 'layout':
    raise errors.InputError(
      'random configs for tile',
      where='--random_configs',
      found=f'a {module.kind} run',
      expected='a layout run, since they are layouts',
      fix='give --configs=FILE.npz',
    )
  if program is None:
    raise errors.InputError(
      'no HLO to make random configs of',
      found='an npz file',
      expected='an HLO program',
      fix='give --configs=FILE.npz',
    )
  return candidates.random_layouts(program, module, count=configs, seed=seed)


def _choose(extraction: hlo.Extraction, wanted: str | None) -> Sequence[int]:
  """Returns the positions of the modules to rank.

  Raises:
    InputError: there is no module, or not the wanted one.
  """
  names = [module.module_id for module in extraction.modules]
  if not names:
    skipped = [
      f'{terminal.plural(count, "module")} with {reason}'
      for reason, count in extraction.skipped.items()
    ]
    raise errors.InputError('no module to rank', found=', '.join(skipped) or '0 modules')
  if wanted is None:
    return range(len(names))
  if wanted in names:
    return [names.index(wanted)]
  if wanted.isdecimal() and int(wanted) < len(names):
    return [int(wanted)]
  raise errors.InputError(
    'no such module',
    where='--module',
    found=repr(wanted),
    expected=f'0 to {len(names) - 1}, or {_names(extraction)}',
  )


def _names(extraction: hlo.Extraction) -> str:
  names = [module.module_id for module in extraction.modules]
  shown = names[:_MAX_NAMES]
  if len(names) > _MAX_NAMES:
    shown.append('…')
  return ', '.join(shown)
