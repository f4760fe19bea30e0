"""Writes a dataset directory as published npz files or as `Data` objects of PyTorch Geometric.

  python tpu_graphs/commands/export.py --data=data/tile --output=out --format=npz

Each module becomes one file in a folder of its collection and split, such as
out/npz/tile/xla/train; convert can read out/npz again. docs/export.md describes the files.
"""

from __future__ import annotations

from collections.abc import Sequence
import sys
import time

from tpu_graphs import cli
from tpu_graphs.dataset import export
from tpu_graphs.modules import module as module_lib


def _define_flags(flag_values) -> None:
  from absl import flags

  flags.DEFINE_string(
    'data', None, 'Dataset directory that convert has written.', flag_values=flag_values
  )
  flags.DEFINE_string('output', None, 'Local folder to write into.', flag_values=flag_values)
  flags.DEFINE_enum(
    'format',
    None,
    export.FORMS,
    'npz: npz files as published; pyg: files of torch.save with one '
    'torch_geometric.data.Data each.',
    flag_values=flag_values,
  )
  flags.DEFINE_enum(
    'split', None, module_lib.SPLITS, 'Split to write. Default: all.', flag_values=flag_values
  )
  flags.DEFINE_bool(
    'overwrite',
    False,
    'Replace the files that an earlier export has written for these splits.',
    flag_values=flag_values,
  )
  for name in ('data', 'output', 'format'):
    flags.mark_flag_as_required(name, flag_values=flag_values)


def _job(flag_values, _) -> int:
  start = time.monotonic()
  exported = export.export(
    flag_values.data,
    flag_values.output,
    form=flag_values.format,
    split=flag_values.split,
    overwrite=flag_values.overwrite,
  )
  print(f'{exported.collection} as {flag_values.format} in {time.monotonic() - start:.1f} s')
  for split in exported.splits:
    print(
      f'{split.name:5}  {split.modules:6,} modules  {split.configs:9,} configs  '
      f'{split.bytes / 2**20:8,.1f} MiB  {split.folder}'
    )
  for what in exported.left_out:
    print(f'not in npz files: {what}')
  return 0


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
