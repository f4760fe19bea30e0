"""Ranks the configs of a program with a trained model, predicted fastest first.

  python baselines/rank.py --run=runs/tile --input=kernel.npz --top=5
  python baselines/rank.py --run=runs/layout --input=net.pb --random_configs=200 --show=1 --explain

The input is an npz file, an HLO protobuf or HLO text. The configs to rank are the configs in the
input, the configs of a file (--configs), or random layouts (--random_configs). Runtimes, if the
input has any, are shown beside the scores. See docs/own_model.md for details.
"""

from __future__ import annotations

# This import comes before TensorFlow, to silence the log of TensorFlow.
import baselines  # noqa: F401

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
from tpu_graphs import terminal
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import candidates

# Number of ops or columns that `--explain` shows.
_MAX_EXPLAINED = 10
# Number of notes that are printed. One module has fewer.
_MAX_NOTES = 4


def describe(ranking: ranking_lib.Ranking, *, top: int) -> str:
  """Formats the `top` best configs, and the default config, as a table to print."""
  module = ranking.best_first
  scores = ranking.scores[ranking.order]
  configs = terminal.plural(module.num_configs, 'config')
  lines = [
    f'{module.module_id}: best {min(top, module.num_configs)} of {configs}',
    f'{"rank":>5}  {"config_id":>9}  {"score":>9}  runtime in ns',
  ]
  for i in range(module.num_configs):
    config_id = module.config_id[i]
    is_default = config_id == module.default_config
    if i < top or is_default:
      mark = '  default' if is_default else ''
      runtime = _runtime(module.config_runtime[i])
      lines.append(f'{i + 1:5}  {config_id:9}  {scores[i]:9.4f}  {runtime}{mark}')
  return '\n'.join(lines)


def explain(ranking: ranking_lib.Ranking) -> str:
  """Formats `Ranking.differences` as a table to print."""
  if not ranking.differences:
    return 'the best and the worst predicted configs do not differ'
  is_tile = ranking.module.kind == 'tile'
  if is_tile:
    what = 'columns of configs'
    heads = ('column', 'differ', 'best', 'worst', 'effect')
  else:
    what = f'configurable ops (layouts of {", ".join(features.LAYOUT_TENSORS)})'
    heads = ('op', 'opcode', 'differ', 'best', 'worst', 'effect')
  rows = [heads]
  for each in ranking.differences:
    name = f'{each.name} and {each.alike} alike' if each.alike else each.name
    opcode = () if is_tile else (each.opcode,)
    difference = f'{each.difference:.0%}'
    effect = '' if math.isnan(each.effect) else f'{each.effect:+.4f}'
    rows.append((name, *opcode, difference, _value(each.best), _value(each.worst), effect))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = [f'{what} that differ most between the best and the worst predicted tenth:']
  for row in rows:
    lines.append('  ' + '  '.join(map(str.ljust, row, widths)).rstrip())
  lines.append(
    '  effect: how much the score of the best config rises when only this is set as under worst'
  )
  return '\n'.join(lines)


def _value(value: np.ndarray) -> str:
  return f'{value:g}' if value.ndim == 0 else candidates.describe_layouts(value)


def _runtime(runtime: np.int64) -> str:
  return 'not measured' if runtime == module_lib.UNMEASURED else f'{runtime:,}'


def _define_flags(flag_values) -> None:
  from absl import flags

  flags.DEFINE_string('run', None, 'Run directory written by train.', flag_values=flag_values)
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
    'Name or position (from 0) of the module to rank, if the file has several.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'configs',
    None,
    'npz, JSON or CSV file with the configs to rank; docs/own_model.md describes the forms.',
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'random_configs',
    None,
    'Number of random layouts to rank, of the convolutions, dots and reshapes of an HLO program. '
    'Config 0, the default, is the layout of the program as it is.',
    lower_bound=1,
    upper_bound=100_000,
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'seed',
    0,
    'Seed of --random_configs.',
    lower_bound=0,
    upper_bound=2**32 - 1,
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'top', 10, 'Number of configs of each module to print.', lower_bound=1, flag_values=flag_values
  )
  flags.DEFINE_integer(
    'show',
    0,
    'Number of configs of each module to describe in full.',
    lower_bound=0,
    flag_values=flag_values,
  )
  flags.DEFINE_bool(
    'explain',
    False,
    'Print the differences between the best and the worst predicted configs.',
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
    # A wrong suffix is reported before the work.
    candidates.check_suffix(save_path)
  configs = flag_values.configs
  if flag_values.random_configs is not None:
    configs = flag_values.random_configs
  ranker = ranking_lib.Ranker(flag_values.run)
  programs = ranker.read(
    flag_values.input,
    name=flag_values.module,
    only_one=configs is not None or save_path is not None,
  )
  num_explained = _MAX_EXPLAINED if flag_values.explain else 0
  rankings = []
  for module, program in programs:
    with errors.in_file(flag_values.input):
      ranking = ranker.rank(
        module, configs, program=program, seed=flag_values.seed, explain=num_explained
      )
    rankings.append(ranking)
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
  notes = []
  for ranking in rankings:
    place = '' if len(rankings) == 1 else f'{ranking.module.module_id}: '
    notes += [f'{place}{note}' for note in ranking.notes]
  if len(notes) > _MAX_NOTES:
    more = terminal.plural(len(notes) - _MAX_NOTES, 'more note')
    notes[_MAX_NOTES:] = [f'{more} on other modules; --module=NAME shows the notes on one module']
  for note in notes:
    print('note:', note, file=sys.stderr)


def _write_csv(rankings: Sequence[ranking_lib.Ranking]) -> None:
  writer = csv.writer(sys.stdout, lineterminator='\n')
  writer.writerow(('module_id', 'rank', 'config_id', 'score', 'runtime_ns'))
  for ranking in rankings:
    module = ranking.module
    for place, i in enumerate(ranking.order, start=1):
      runtime = module.config_runtime[i]
      shown = '' if runtime == module_lib.UNMEASURED else runtime
      writer.writerow((module.module_id, place, module.config_id[i], ranking.scores[i], shown))


def _show(ranking: ranking_lib.Ranking, count: int) -> None:
  names = None
  if count and ranking.program is not None:
    names = candidates.op_names(ranking.program)
  for place, i in enumerate(ranking.order[:count], start=1):
    print(f'config {ranking.module.config_id[i]}, rank {place}:')
    print(textwrap.indent(candidates.describe(ranking.module, i, names=names), '  '))


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
