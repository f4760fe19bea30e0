"""Ranks the configs of a program by a trained model, predicted fastest first.

  python baselines/rank.py --run=runs/tile --input=kernel.npz --top=5
  python baselines/rank.py --run=runs/layout --input=model.pb --random_configs=200 --show=1

The input is an npz file, an HLO protobuf or HLO text; runtimes, if it has any, are shown beside the scores. Ranked are
the configs in it, those of a file (--configs), or random layouts (--random_configs); docs/own_model.md tells more.
"""

from __future__ import annotations

import baselines  # noqa: F401  # Before TensorFlow, to quiet it.

from collections.abc import Iterator, Sequence
import csv
import dataclasses
import sys
import textwrap

import numpy as np

from baselines import runs
from baselines import scoring
from tpu_graphs import candidates
from tpu_graphs import cli
from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs import module as module_lib
from tpu_graphs import readers

_MAX_NAMES = 5  # Of modules, in an error.


@dataclasses.dataclass(frozen=True)
class Candidates:
  """Which configs are ranked in place of those of the input; by default none are.

  Attributes:
    path: of a file with configs; see `candidates.read`.
    random: number of random layouts; see `candidates.random_layouts`.
    seed: of the random layouts.
  """
  path: str | None = None
  random: int | None = None
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class Ranking:
  """The configs of a module, predicted fastest first.

  Attributes:
    module: with its configs in this order.
    score: float32 [C], ascending.
    program: the serialized HloModuleProto of a layout module; None for tile, and where the input holds no HLO.
  """
  module: module_lib.Module
  score: np.ndarray
  program: bytes | None


def rank_file(*, run: str, path: str, module: str | None = None, only_one: bool = False,
              instead: Candidates = Candidates()) -> Iterator[Ranking]:
  """Ranks the configs of each module of a file.

  Args:
    run: run directory.
    path: npz, pb or HLO text file.
    module: the `module_id` of the only module that is ranked, or its position in the file.
    only_one: refuse to rank several modules.
    instead: configs to rank in place of those of the file, which must then be of one module.

  Raises:
    InputError: run or file cannot be used, or do not fit each other, or a module has no configs.
  """
  loaded = runs.load(run)
  extraction = readers.from_file(path, kind=loaded.kind, choices=loaded.choices.resolve())
  with errors.in_file(path):
    chosen = _choose(extraction, module)
    given = instead.path is not None or instead.random is not None
    if len(chosen) > 1 and (only_one or given):
      raise errors.InputError('several modules', found=f'{len(chosen)}: {_names(extraction.modules)}', expected='one',
                              fix='choose it by --module')
    scorer = scoring.make_scorer(loaded.model, loaded.kind, num_extra=loaded.choices.num_extra)
    for index in chosen:
      program = extraction.program(index) if loaded.kind == 'layout' else None
      found = _with_candidates(extraction.modules[index], program, instead)
      if not found.num_configs:
        raise errors.InputError(
            'no config to rank', where=found.module_id, found='a program without configs', expected='at least one',
            fix='give --configs=FILE.npz' + (' or --random_configs=N' if found.kind == 'layout' else ''))
      scored = scoring.score_module(scorer, found)
      by_id = np.argsort(found.config_id)  # As they are scored.
      yield Ranking(found.select_configs(by_id[scored.order]), scored.score[scored.order], program)


def _choose(extraction: hlo.Extraction, wanted: str | None) -> Sequence[int]:
  """Positions of the modules to rank."""
  names = [module.module_id for module in extraction.modules]
  if not names:
    raise errors.InputError('no module to rank', found=', '.join(
        f'{count} modules with {reason}' for reason, count in extraction.skipped.items()) or '0 modules')
  if wanted is None:
    return range(len(names))
  if wanted in names:
    return [names.index(wanted)]
  if wanted.isdecimal() and int(wanted) < len(names):
    return [int(wanted)]
  raise errors.InputError('no such module', where='--module', found=repr(wanted),
                          expected=f'0 to {len(names) - 1}, or {_names(extraction.modules)}')


def _names(modules: Sequence[module_lib.Module]) -> str:
  return ', '.join([*(module.module_id for module in modules[:_MAX_NAMES]), *['…'][:len(modules) - _MAX_NAMES]])


def _with_candidates(module: module_lib.Module, program: bytes | None, instead: Candidates) -> module_lib.Module:
  if instead.path is not None:
    return candidates.read(instead.path, module)
  if instead.random is None:
    return module
  if module.kind != 'layout':
    raise errors.InputError('random configs of another kind', where='--random_configs', found=f'a {module.kind} run',
                            expected='a layout run, since they are layouts', fix='give --configs=FILE.npz')
  if program is None:
    raise errors.InputError('no HLO to make random configs of', found='an npz file', expected='an HLO program',
                            fix='give --configs=FILE.npz')
  return candidates.random_layouts(program, module, count=instead.random, seed=instead.seed)


def describe(ranking: Ranking, *, top: int) -> str:
  """A table of the `top` best configs, and of the default one, to be printed."""
  module, c = ranking.module, ranking.score.size
  lines = [f'{module.module_id}: best {min(top, c)} of {c} configs',
           f'{"rank":>5}  {"config_id":>9}  {"score":>9}  runtime in ns']
  for i in range(c):
    is_default = module.config_id[i] == module.default_config
    if i < top or is_default:
      lines.append(f'{i + 1:5}  {module.config_id[i]:9}  {ranking.score[i]:9.4f}  {_runtime(module.config_runtime[i])}'
                   f'{"  default" if is_default else ""}')
  return '\n'.join(lines)


def _runtime(runtime: np.int64) -> str:
  return 'not measured' if runtime == module_lib.UNMEASURED else f'{runtime:,}'


def _define_flags(flag_values) -> None:
  from absl import flags
  flags.DEFINE_string('run', None, 'Run directory that train has written.', flag_values=flag_values)
  flags.DEFINE_string('input', None, 'npz, pb or HLO text file with the program, and with its configs unless --configs '
                      'or --random_configs is given.', flag_values=flag_values)
  flags.DEFINE_string('module', None, 'Name or position (from 0) of the only module of the file to rank.',
                      flag_values=flag_values)
  flags.DEFINE_string('configs', None, 'npz file with the configs to rank: node_config_ids and node_config_feat, or '
                      'config_feat.', flag_values=flag_values)
  flags.DEFINE_integer('random_configs', None, 'Rank so many random layouts of the convolutions, dots and reshapes of '
                       'an HLO program. Config 0, the default, is the layout that it has.', lower_bound=1,
                       upper_bound=100_000, flag_values=flag_values)
  flags.DEFINE_integer('seed', Candidates.seed, 'Of --random_configs.', lower_bound=0, upper_bound=2**32 - 1,
                       flag_values=flag_values)
  flags.DEFINE_integer('top', 10, 'How many configs to print of each module.', lower_bound=1, flag_values=flag_values)
  flags.DEFINE_integer('show', 0, 'Of how many configs of each module to print what they say.', lower_bound=0,
                       flag_values=flag_values)
  flags.DEFINE_bool('csv', False, 'Print all configs as CSV instead.', flag_values=flag_values)
  flags.DEFINE_string('save_configs', None, 'npz file to write all configs to, fastest first, with their scores; '
                      '--configs can read it.', flag_values=flag_values)
  for name in ('run', 'input'):
    flags.mark_flag_as_required(name, flag_values=flag_values)
  for names in (('configs', 'random_configs'), ('csv', 'show')):
    flags.register_multi_flags_validator(names, lambda values: not all(values.values()),
                                         'only one of them can be given', flag_values=flag_values)


def _job(flag_values, _) -> int:
  random_configs, save_path = flag_values.random_configs, flag_values.save_configs
  if save_path is not None:
    candidates.check_suffix(save_path)  # Before the work.
  rankings = list(rank_file(
      run=flag_values.run, path=flag_values.input, module=flag_values.module, only_one=save_path is not None,
      instead=Candidates(flag_values.configs, random_configs, flag_values.seed)))
  for ranking in rankings:
    if random_configs is not None and ranking.score.size < random_configs:
      print(f'note: the program has only {ranking.score.size} different layouts', file=sys.stderr)
    if save_path is not None:
      candidates.save(save_path, ranking.module, ranking.score)
  if flag_values.csv:
    _write_csv(rankings)
  else:
    for ranking in rankings:
      print(describe(ranking, top=flag_values.top))
      _show(ranking, flag_values.show)
  return 0


def _write_csv(rankings: Sequence[Ranking]) -> None:
  writer = csv.writer(sys.stdout, lineterminator='\n')
  writer.writerow(('module_id', 'rank', 'config_id', 'score', 'runtime_ns'))
  for ranking in rankings:
    module = ranking.module
    for i in range(ranking.score.size):
      runtime = module.config_runtime[i]
      writer.writerow((module.module_id, i + 1, module.config_id[i], ranking.score[i],
                       '' if runtime == module_lib.UNMEASURED else runtime))


def _show(ranking: Ranking, count: int) -> None:
  names = candidates.op_names(ranking.program) if count and ranking.program is not None else None
  for i, config_id in enumerate(ranking.module.config_id[:count]):
    print(f'config {config_id}, rank {i + 1}:')
    print(textwrap.indent(candidates.describe(ranking.module, i, names=names), '  '))


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
