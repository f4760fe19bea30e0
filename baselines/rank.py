"""Ranks the configs of a program by a trained model, predicted fastest first.

  python baselines/rank.py --run=runs/tile --input=kernel.npz --top=5
  python baselines/rank.py --run=runs/layout --input=model.pb --random_configs=200 --show=1
  --explain

The input is an npz file, an HLO protobuf or HLO text; runtimes, if it has any, are shown beside
the scores. Ranked are the configs in it, those of a file (--configs), or random layouts
(--random_configs); docs/own_model.md tells more.
"""

from __future__ import annotations

import baselines  # noqa: F401  # Before TensorFlow, to quiet it.

# isort: split

from collections.abc import Sequence
import csv
import math
import sys
import textwrap

import numpy as np

from baselines.serving import ranking as ranking_lib
from tpu_graphs import cli
from tpu_graphs import errors
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import candidates

_MAX_EXPLAINED = 10  # Ops or columns.
_MAX_NOTES = 4  # More than there are on one module.


def describe(ranking: ranking_lib.Ranking, *, top: int) -> str:
  """A table of the `top` best configs, and of the default one, to be printed."""
  module, scores, c = ranking.best_first, ranking.scores[ranking.order], ranking.order.size
  lines = [
    f'{module.module_id}: best {min(top, c)} of {c} configs',
    f'{"rank":>5}  {"config_id":>9}  {"score":>9}  runtime in ns',
  ]
  for i in range(c):
    is_default = module.config_id[i] == module.default_config
    if i < top or is_default:
      lines.append(
        f'{i + 1:5}  {module.config_id[i]:9}  {scores[i]:9.4f}  {_runtime(module.config_runtime[i])}'
        f'{"  default" if is_default else ""}'
      )
  return '\n'.join(lines)


def explain(ranking: ranking_lib.Ranking) -> str:
  """A table of `Ranking.differences`, to be printed."""
  if not ranking.differences:
    return 'the best and the worst predicted configs do not differ'
  rows = [
    (
      'column' if ranking.module.kind == 'tile' else 'op',
      'opcode',
      'differ',
      'best',
      'worst',
      'effect',
    )
  ]
  for each in ranking.differences:
    best, worst = (
      f'{value:g}' if value.ndim == 0 else candidates.describe_layouts(value)
      for value in (each.best, each.worst)
    )
    rows.append(
      (
        each.name + (f' and {each.alike} alike' if each.alike else ''),
        each.opcode,
        f'{each.difference:.0%}',
        best,
        worst,
        '' if math.isnan(each.effect) else f'{each.effect:+.4f}',
      )
    )
  if ranking.module.kind == 'tile':
    rows = [(row[0], *row[2:]) for row in rows]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  what = (
    'columns of configs'
    if ranking.module.kind == 'tile'
    else f'configurable ops (layouts of {", ".join(features.LAYOUT_TENSORS)})'
  )
  return '\n'.join(
    [
      f'{what} that differ most between the best and the worst predicted tenth:',
      *('  ' + '  '.join(map(str.ljust, row, widths)).rstrip() for row in rows),
      '  effect: how much the score of the best config rises when only this is as in the worst',
    ]
  )


def _runtime(runtime: np.int64) -> str:
  return 'not measured' if runtime == module_lib.UNMEASURED else f'{runtime:,}'


def _define_flags(flag_values) -> None:
  from absl import flags

  flags.DEFINE_string('run', None, 'Run directory that train has written.', flag_values=flag_values)
  flags.DEFINE_string(
    'input',
    None,
    'npz, pb or HLO text file with the program, and with its configs unless --configs '
    'or --random_configs is given.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'module',
    None,
    'Name or position (from 0) of the only module of the file to rank.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'configs',
    None,
    'npz, JSON or CSV file with the configs to rank; docs/own_model.md tells the forms.',
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'random_configs',
    None,
    'Rank so many random layouts of the convolutions, dots and reshapes of '
    'an HLO program. Config 0, the default, is the layout that it has.',
    lower_bound=1,
    upper_bound=100_000,
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'seed', 0, 'Of --random_configs.', lower_bound=0, upper_bound=2**32 - 1, flag_values=flag_values
  )
  flags.DEFINE_integer(
    'top', 10, 'How many configs to print of each module.', lower_bound=1, flag_values=flag_values
  )
  flags.DEFINE_integer(
    'show',
    0,
    'Of how many configs of each module to print what they say.',
    lower_bound=0,
    flag_values=flag_values,
  )
  flags.DEFINE_bool(
    'explain',
    False,
    'Print what sets the best predicted configs apart from the worst.',
    flag_values=flag_values,
  )
  flags.DEFINE_bool('csv', False, 'Print all configs as CSV instead.', flag_values=flag_values)
  flags.DEFINE_string(
    'save_configs',
    None,
    'npz file to write all configs to, fastest first, with their scores; --configs can read it.',
    flag_values=flag_values,
  )
  for name in ('run', 'input'):
    flags.mark_flag_as_required(name, flag_values=flag_values)
  for names in (('configs', 'random_configs'), ('csv', 'show'), ('csv', 'explain')):
    flags.register_multi_flags_validator(
      names,
      lambda values: not all(values.values()),
      'only one of them can be given',
      flag_values=flag_values,
    )


def _job(flag_values, _) -> int:
  save_path = flag_values.save_configs
  if save_path is not None:
    candidates.check_suffix(save_path)  # Before the work.
  configs = (
    flag_values.configs if flag_values.random_configs is None else flag_values.random_configs
  )
  ranker = ranking_lib.Ranker(flag_values.run)
  programs = ranker.read(
    flag_values.input,
    name=flag_values.module,
    only_one=configs is not None or save_path is not None,
  )
  rankings = []
  for module, program in programs:
    with errors.in_file(flag_values.input):
      rankings.append(
        ranker.rank(
          module,
          configs,
          program=program,
          seed=flag_values.seed,
          explain=_MAX_EXPLAINED if flag_values.explain else 0,
        )
      )
  for ranking in rankings:
    if save_path is not None:
      candidates.save(save_path, ranking.best_first, ranking.scores[ranking.order])
  _print_notes(rankings)
  if flag_values.csv:
    _write_csv(rankings)
  else:
    for ranking in rankings:
      print(describe(ranking, top=flag_values.top))
      if flag_values.explain:
        print(explain(ranking))
      _show(ranking, flag_values.show)
  return 0


def _print_notes(rankings: Sequence[ranking_lib.Ranking]) -> None:
  notes = [
    note if len(rankings) == 1 else f'{ranking.module.module_id}: {note}'
    for ranking in rankings
    for note in ranking.notes
  ]
  if len(notes) > _MAX_NOTES:
    notes[_MAX_NOTES:] = [
      f'{len(notes) - _MAX_NOTES} more such notes on other modules; --module=NAME shows them'
    ]
  for note in notes:
    print('note:', note, file=sys.stderr)


def _write_csv(rankings: Sequence[ranking_lib.Ranking]) -> None:
  writer = csv.writer(sys.stdout, lineterminator='\n')
  writer.writerow(('module_id', 'rank', 'config_id', 'score', 'runtime_ns'))
  for ranking in rankings:
    module = ranking.module
    for place, i in enumerate(ranking.order, start=1):
      runtime = module.config_runtime[i]
      writer.writerow(
        (
          module.module_id,
          place,
          module.config_id[i],
          ranking.scores[i],
          '' if runtime == module_lib.UNMEASURED else runtime,
        )
      )


def _show(ranking: ranking_lib.Ranking, count: int) -> None:
  names = candidates.op_names(ranking.program) if count and ranking.program is not None else None
  for place, i in enumerate(ranking.order[:count], start=1):
    print(f'config {ranking.module.config_id[i]}, rank {place}:')
    print(textwrap.indent(candidates.describe(ranking.module, i, names=names), '  '))


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
