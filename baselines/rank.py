"""Ranks the configs of a program by a trained model, predicted fastest first.

  python baselines/rank.py --run=runs/tile --input=kernel.npz --top=5

The input is an npz file or an HLO protobuf with configs; runtimes, if it has any, are shown beside the scores.
"""

from __future__ import annotations

import baselines  # noqa: F401  # Before TensorFlow, to quiet it.

from collections.abc import Iterator, Sequence
import csv
import sys

import numpy as np

from baselines import runs
from baselines import scoring
from tpu_graphs import cli
from tpu_graphs import errors
from tpu_graphs import module as module_lib
from tpu_graphs import readers


def rank_file(*, run: str, path: str) -> Iterator[scoring.ScoredModule]:
  """Scores the configs of each module of a file.

  Args:
    run: run directory.
    path: npz or pb file.

  Raises:
    InputError: run or file cannot be used, or do not fit each other.
  """
  loaded = runs.load(run)
  modules = readers.from_file(path, kind=loaded.kind).modules
  scorer = scoring.make_scorer(loaded.model, loaded.kind)
  with errors.in_file(path):
    for module in modules:
      yield scoring.score_module(scorer, module)


def describe(module: scoring.ScoredModule, *, top: int) -> str:
  """A table of the `top` best configs, to be printed."""
  lines = [f'{module.module_id}: best {min(top, module.score.size)} of {module.score.size} configs',
           f'{"rank":>5}  {"config_id":>9}  {"score":>9}  runtime in ns']
  for rank, i in enumerate(module.order[:top], start=1):
    lines.append(f'{rank:5}  {module.config_id[i]:9}  {module.score[i]:9.4f}  {_runtime(module.runtime[i])}')
  return '\n'.join(lines)


def _runtime(runtime: np.int64) -> str:
  return 'not measured' if runtime == module_lib.UNMEASURED else f'{runtime:,}'


def _define_flags(flag_values) -> None:
  from absl import flags
  flags.DEFINE_string('run', None, 'Run directory that train has written.', flag_values=flag_values)
  flags.DEFINE_string('input', None, 'npz or pb file with the program and its configs.', flag_values=flag_values)
  flags.DEFINE_integer('top', 10, 'How many configs to print of each module.', lower_bound=1, flag_values=flag_values)
  flags.DEFINE_bool('csv', False, 'Print all configs as CSV instead.', flag_values=flag_values)
  for name in ('run', 'input'):
    flags.mark_flag_as_required(name, flag_values=flag_values)


def _job(flag_values, _) -> int:
  modules = list(rank_file(run=flag_values.run, path=flag_values.input))
  writer = csv.writer(sys.stdout, lineterminator='\n')
  if flag_values.csv:
    writer.writerow(('module_id', 'rank', 'config_id', 'score', 'runtime_ns'))
  for module in modules:
    if flag_values.csv:
      writer.writerows((module.module_id, rank, module.config_id[i], module.score[i],
                        '' if module.runtime[i] == module_lib.UNMEASURED else module.runtime[i])
                       for rank, i in enumerate(module.order, start=1))
    else:
      print(describe(module, top=flag_values.top))
  return 0


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
