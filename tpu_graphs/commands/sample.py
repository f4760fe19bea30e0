"""Writes the built-in sample as npz files: small synthetic programs with planted runtimes.

  python tpu_graphs/commands/sample.py --output=sample
  python pipelines/convert.py --collection=tile:synthetic --input=sample/npz --output=data/tile

The sample has programs of both kinds, tile and layout. None of its runtimes was measured; it serves
to try the other commands without a download.
"""

from __future__ import annotations

from collections.abc import Sequence
import sys

from tpu_graphs import cli
from tpu_graphs.sources import synthetic


def _define_flags(flag_values) -> None:
  from absl import flags

  flags.DEFINE_string('output', None, 'Folder to write; new or empty.', flag_values=flag_values)
  flags.DEFINE_integer(
    'seed', 0, 'Random seed; equal seeds give equal files.', lower_bound=0, flag_values=flag_values
  )
  flags.mark_flag_as_required('output', flag_values=flag_values)


def _job(flag_values, _) -> int:
  splits = synthetic.write_tree(flag_values.output, seed=flag_values.seed)
  print(f'synthetic sample -> {flag_values.output}')
  for split in splits:
    print(
      f'{split.kind}:synthetic  {split.name:5}  {split.num_modules:4} modules  '
      f'{split.num_configs:6,} configs'
    )
  return 0


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
