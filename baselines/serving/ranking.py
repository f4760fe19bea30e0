"""Ranks the configs of programs by a trained model: what `tpu_graphs.rank` and the command
`rank` share.

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
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import reduction
from tpu_graphs.sources import candidates
from tpu_graphs.sources import readers

_SHARE = 10  # The best and the worst are a tenth of the configs each.
_MAX_COLUMNS = 4  # That are named in a note.
_MAX_NAMES = 5  # Of modules, in an error.
_LAYOUT_COLUMNS = 'layout_minor_to_major_'
_BOUNDS = (
  6  # Of each of the three blocks of a tile config, which are followed by their sum and product.
)
# Feature of the statistics -> what its columns are columns of.
_PLACES = {
  'feat': 'the features of ops',
  'extra_feat': 'the extra features',
  'config_feat': 'the configs',
  'node_config_feat': 'the configs',
}

Source = str | os.PathLike[str] | bytes | module_lib.Module
# A file, arrays as for `candidates.with_configs`, or how many random layouts.
Configs = str | os.PathLike[str] | np.ndarray | Mapping[str, np.ndarray] | int


class RankingWarning(UserWarning):
  """A note of a `Ranking`."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Difference:
  """What sets the configs that are predicted to be fast apart from the slow ones.

  Attributes:
    name: of a configurable op, or of a column of tile configs.
    opcode: of the op; '' for a column.
    alike: number of other ops that have the same layouts as this one in all configs.
    difference: between the best and the worst tenth of the configs, 0 to 1: for layouts the
      share of configs that would have to change for both to have each layout equally often, for
      a column the Kolmogorov-Smirnov statistic.
    best: what is typical of the best: the most frequent layouts, int8 [18], or the median,
      float32 scalar.
    worst: of the worst.
    effect: by how much the score of the best config rises when this alone becomes that of the
      worst (for a bound, with sum and product); NaN where it cannot change alone.
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
  """How a model ranks the configs of a module.

  Attributes:
    order: int64 [C], positions of the configs, predicted fastest first; equal scores keep their
      order.
    scores: float32 [C], of the configs as they are in `module`; lower = predicted faster.
    module: with its C configs.
    program: the serialized HloModuleProto of a layout module; None for tile, and where it is not
      known.
    notes: what to know before relying on it, such as features outside the range of the training
      data.
    differences: what sets the best configs apart from the worst, most first; where it was asked
      for.
  """

  order: np.ndarray
  scores: np.ndarray
  module: module_lib.Module
  program: bytes | None
  notes: tuple[str, ...] = ()
  differences: tuple[Difference, ...] = ()

  @property
  def best_first(self) -> module_lib.Module:
    """The module with its configs in the order predicted."""
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
  """Ranks the configs of a program by a trained model.

  Notes of the result are also given as Python warnings, of the category `RankingWarning`.

  Args:
    run: run directory, or a `Ranker` of one, which is quicker when more than one program is ranked.
    module: an npz file, HLO protobuf or HLO text, by its path; the bytes of a serialized HLO
      protobuf; or a `Module`, with the features that the run was trained with.
    configs: to rank in place of those of the module: the path of an npz, JSON or CSV file;
      `config_feat` [C, 24] or `node_config_feat` [C, NC, 18] of the
      `candidates.configurable_ops`; arrays by name; or how many random layouts.
    name: the `module_id`, or position, of the module in a file with several.
    seed: of the random layouts.
    explain: how many ops, or columns, to explain the ranking by.

  Returns:
    The ranking: `order` and `scores`.

  Raises:
    InputError: run, module or configs cannot be used, or do not fit each other.
  """
  ranker = run if isinstance(run, Ranker) else Ranker(run)
  [(found, program)] = ranker.read(module, name=name, only_one=True)
  ranking = ranker.rank(found, configs, program=program, seed=seed, explain=explain)
  for note in ranking.notes:
    warnings.warn(note, RankingWarning, stacklevel=2)
  return ranking


class Ranker:
  """A trained model, ready to rank."""

  def __init__(self, run: str | os.PathLike[str]):
    """Loads a run directory.

    Raises:
      InputError: see `runs.load`, and the functions of its extra features.
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
    """The modules of a source, see `rank`, with their programs where these are known.

    Args:
      source: see `rank`.
      name: of the only one that is wanted.
      only_one: refuse several.

    Raises:
      InputError: the source cannot be read, or not as modules for this run.
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
          fix='choose it by --module',
        )
    return [
      (extraction.modules[i], extraction.program(i) if self.run.kind == 'layout' else None)
      for i in chosen
    ]

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
      InputError: module or configs do not fit the run, or there are none.
    """
    self._check(module)
    notes = []
    if configs is not None:
      module = _with_configs(module, configs, program, seed)
      if isinstance(configs, int) and module.num_configs < configs:
        notes.append(f'the program has only {module.num_configs} different layouts')
    if not module.num_configs:
      raise errors.InputError(
        'no config to rank',
        where=module.module_id,
        found='a program without configs',
        expected='at least one',
        fix='give --configs=FILE.npz'
        + (' or --random_configs=N' if module.kind == 'layout' else ''),
      )
    reduced = self._reduced(module)
    scores = self._scores(reduced)
    order = np.argsort(scores, kind='stable')
    if module.num_configs > 1 and scores.min() == scores.max():
      notes.append(
        f'all {module.num_configs:,} configs have the same score: their order says nothing; the model may '
        'need more training'
      )
    notes += self._out_of_range(reduced)
    differences = self._differences(module, order, scores, program, explain) if explain else ()
    return Ranking(
      order=order,
      scores=scores,
      module=module,
      program=program,
      notes=tuple(notes),
      differences=tuple(differences),
    )

  def _check(self, module: module_lib.Module) -> None:
    """Refuses a module whose features are not those that the model knows."""
    where = module.module_id
    if module.kind != self.run.kind:
      raise errors.InputError(
        'module of the other kind', where=where, found=module.kind, expected=self.run.kind
      )
    if module.num_extra != self.choices.num_extra:
      raise errors.InputError(
        'other extra features than those of the run',
        where=where,
        found=f'{module.num_extra} columns',
        expected=', '.join(self.choices.extra_columns) or 'none',
        fix='read the program with the choices of the run',
      )
    columns = [
      i for i, name in enumerate(features.node_feature_names()) if name.startswith(_LAYOUT_COLUMNS)
    ]
    padding = (
      -1 if (module.node_feat[:, columns] < 0).any() else 0
    )  # No program has shapes of six dimensions only.
    if padding != self.choices.layout_padding:
      raise errors.InputError(
        'other padding of layouts than that of the run',
        where=where,
        found=padding,
        expected=self.choices.layout_padding,
        fix='read the program with the choices of the run',
      )

  def _reduced(self, module: module_lib.Module) -> module_lib.Module:
    """The module as modules of the training data were reduced; for most runs, as it is."""
    options = self.run.config.get('data', {}).get('options', {})
    if options.get('keep_hops') is None or not module.num_config_ops:
      return module
    return reduction.keep_hops(module, options['keep_hops'], rest=options['rest'])

  def _scores(self, module: module_lib.Module) -> np.ndarray:
    """float32 [C], of configs in their order."""
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
    """A note for each feature some of whose columns have values that training has not seen."""
    layouts = module.node_config_feat
    arrays = {
      'feat': (module.node_feat, features.node_feature_names()),
      'extra_feat': (module.extra_feat, self.choices.extra_columns),
      'config_feat': (module.config_feat, features.tile_feature_names()),
      'node_config_feat': (
        None if layouts is None else layouts.reshape(-1, features.NUM_LAYOUT_FEATURES),
        features.layout_feature_names(),
      ),
    }
    for feature, (values, names) in arrays.items():
      seen = self._statistics.get(feature)
      if values is None or not values.size or seen is None or not seen['count']:
        continue
      extremes = np.stack([values.min(axis=0), values.max(axis=0)]).astype(np.float64)
      bounds = np.array([seen['min'], seen['max']])
      # How far outside: on the scale on which models look at features.
      beyond = (features.signed_log(extremes) - features.signed_log(bounds)) * [[-1], [1]]
      columns = [
        column
        for column in np.argsort(-beyond.max(axis=0), kind='stable')
        if beyond[:, column].max() > 0
      ]
      if columns:
        told = [
          f'{names[i]} {extremes[int(beyond[:, i].argmax()), i]:g} ({bounds[0, i]:g} to {bounds[1, i]:g})'
          for i in columns[:_MAX_COLUMNS]
        ]
        yield (
          f'values outside the range of the training data in {len(columns)} of {len(names)} columns of '
          f'{_PLACES[feature]}: {", ".join([*told, *["…"][: len(columns) - _MAX_COLUMNS]])}'
        )

  def _differences(
    self,
    module: module_lib.Module,
    order: np.ndarray,
    scores: np.ndarray,
    program: bytes | None,
    number: int,
  ) -> list[Difference]:
    share = max(order.size // _SHARE, 1)
    best, worst = order[:share], order[-share:]
    if module.kind == 'tile':
      name, given = 'config_feat', {}
      found = _columns(module, best, worst)
    else:
      name, given = 'node_config_feat', {'node_config_ids': module.node_config_ids}
      found = _layouts(
        module, best, worst, None if program is None else candidates.op_names(program)
      )
    found = sorted(
      (each for each in found if each[0].difference > 0), key=lambda each: -each[0].difference
    )[:number]
    if not found:
      return []
    tried = np.repeat(getattr(module, name)[order[:1]], len(found), axis=0)
    for row, (_, change) in zip(tried, found, strict=True):
      change(row)
    effects = (
      self._scores(self._reduced(candidates.with_configs(module, {name: tried, **given})))
      - scores[order[0]]
    )
    return [
      dataclasses.replace(difference, effect=float(effect) + difference.effect)
      for (difference, _), effect in zip(found, effects, strict=True)
    ]


# A difference, its effect 0 or NaN, and what changes a config, [24] or [NC, 18], so that its effect
# can be seen.
_Change = tuple[Difference, Callable[[np.ndarray], None]]


def _layouts(
  module: module_lib.Module, best: np.ndarray, worst: np.ndarray, names: Sequence[str] | None
) -> Iterator[_Change]:
  """Of each group of configurable ops that have the same layouts in all configs."""
  groups: dict[bytes, list[int]] = {}
  for j in range(module.num_config_ops):
    groups.setdefault(module.node_config_feat[:, j].tobytes(), []).append(j)
  for ops in groups.values():
    layouts, which = np.unique(module.node_config_feat[:, ops[0]], axis=0, return_inverse=True)
    of_best, of_worst = (
      np.bincount(which.reshape(-1)[chosen], minlength=len(layouts)) for chosen in (best, worst)
    )
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
  """Of each column of tile configs."""
  for column, name in enumerate(features.tile_feature_names()):
    of_best, of_worst = (np.sort(module.config_feat[chosen, column]) for chosen in (best, worst))
    values = np.union1d(of_best, of_worst)
    shares = [
      np.searchsorted(each, values, side='right') / each.size for each in (of_best, of_worst)
    ]
    block, place = divmod(column, _BOUNDS + 2)
    typical = of_worst[of_worst.size // 2]

    def change(
      config: np.ndarray, column: int = column, block: int = block, typical: np.ndarray = typical
    ) -> None:
      config[column] = typical
      bounds, totals = np.split(config[block * (_BOUNDS + 2) :][: _BOUNDS + 2], [_BOUNDS])  # Views.
      totals[:] = bounds.sum(), bounds[bounds != 0].prod() if bounds.any() else 0

    yield (
      Difference(
        name=name,
        opcode='',
        alike=0,
        best=of_best[of_best.size // 2],
        worst=typical,
        difference=float(np.abs(shares[0] - shares[1]).max()),
        effect=0.0 if place < _BOUNDS else np.nan,
      ),
      change,
    )


def _with_configs(
  module: module_lib.Module, configs: Configs, program: bytes | None, seed: int
) -> module_lib.Module:
  if isinstance(configs, str | os.PathLike):
    return candidates.read(
      configs, module, names=None if program is None else candidates.op_names(program)
    )
  if not isinstance(configs, int):
    return candidates.with_configs(module, configs)
  if module.kind != 'layout':
    raise errors.InputError(
      'random configs of another kind',
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
  """Positions of the modules to rank."""
  names = [module.module_id for module in extraction.modules]
  if not names:
    raise errors.InputError(
      'no module to rank',
      found=', '.join(
        f'{count} modules with {reason}' for reason, count in extraction.skipped.items()
      )
      or '0 modules',
    )
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
  return ', '.join([*names[:_MAX_NAMES], *['…'][: len(names) - _MAX_NAMES]])
