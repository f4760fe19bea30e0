"""Downloads the public TpuGraphs dataset, by collection and split, and unpacks it for convert.

  python tpu_graphs/commands/download.py --collection=layout:xla:random --output=raw
  python pipelines/convert.py --collection=layout:xla:random --input=raw/npz --output=data/layout

The sizes are shown first. The same command resumes an interrupted download and skips files that are
complete.
"""

from __future__ import annotations

from collections.abc import Sequence
import os
import sys

from tpu_graphs import cli
from tpu_graphs import terminal
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import download
from tpu_graphs.sources import transfer


def _define_flags(flag_values) -> None:
  from absl import flags

  flags.DEFINE_multi_string(
    'collection',
    None,
    f'Collections to download: {", ".join(download.COLLECTIONS)}, or {download.ALL}; '
    'separate several by commas or repeat the flag.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'output', None, 'Folder to write; the files go to its folder npz.', flag_values=flag_values
  )
  flags.DEFINE_string(
    'split',
    ','.join(module_lib.SPLITS),
    'Splits to download, separated by commas.',
    flag_values=flag_values,
  )
  flags.DEFINE_bool('dry_run', False, 'Show the sizes and stop.', flag_values=flag_values)
  flags.DEFINE_bool(
    'keep_archives',
    False,
    'Keep the archives beside the files that are unpacked from them.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'base_url',
    download.BASE_URL,
    'URL of the folder of the archives, for instance on a mirror.',
    flag_values=flag_values,
  )
  for name in ('collection', 'output'):
    flags.mark_flag_as_required(name, flag_values=flag_values)


def _job(flag_values, _) -> int:
  collections = [name for names in flag_values.collection for name in names.split(',')]
  parts = download.choose(collections, flag_values.split.split(','))
  plan = download.plan(
    flag_values.output,
    parts,
    server=transfer.Server(flag_values.base_url),
    keep_archives=flag_values.keep_archives,
  )
  print(plan.describe(), flush=True)
  if flag_values.dry_run:
    plan.check_disk()
    return 0
  download.run(
    plan, progress=terminal.Progress(sys.stderr), report=lambda line: print(line, flush=True)
  )
  npz_folder = os.path.join(flag_values.output, 'npz')
  for collection in dict.fromkeys(part.collection for part in parts):
    print(f'next: {cli.PROGRAM} convert --collection={collection} --input={npz_folder} --output=…')
  return 0


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
