"""Checks dataset directories, and folders of raw files of programs, completely.

  python tpu_graphs/commands/validate.py data/layout
  python tpu_graphs/commands/validate.py raw/npz

Every shard, record, count and file is checked. Exit code 0 means that all are sound; 1 means that
there is a fault. Warnings, such as equal graphs in train and test, are not faults.
"""

from __future__ import annotations

from collections.abc import Sequence
import json
import sys

from tpu_graphs import cli
from tpu_graphs import terminal
from tpu_graphs.dataset import validation


def _define_flags(flag_values) -> None:
  from absl import flags

  flags.DEFINE_bool(
    'json',
    False,
    'Print JSON: path, title, sound, rows, faults and warnings of each DIR.',
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'num_workers',
    None,
    'Number of processes. Default: one per core if the data is large.',
    lower_bound=1,
    flag_values=flag_values,
  )


def _job(flag_values, paths: list[str]) -> int:
  reports = []
  for path in paths:
    report = validation.validate(
      path, num_workers=flag_values.num_workers, progress=terminal.Progress(sys.stderr)
    )
    reports.append(report)
    if not flag_values.json:
      print(report.describe(), flush=True)
  if flag_values.json:
    print(json.dumps([report.to_json() for report in reports], indent=1, ensure_ascii=False))
  return 0 if all(report.is_sound for report in reports) else cli.INPUT_ERROR


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__, positional='DIR')


if __name__ == '__main__':
  sys.exit(main(sys.argv))
