"""What a conversion wrote and left out, as a table to be printed."""

from __future__ import annotations

from collections.abc import Mapping
import itertools

from tpu_graphs import terminal
from tpu_graphs.dataset import manifest as manifest_lib

_OPCODES_SHOWN = 10


def describe(manifest: manifest_lib.Manifest) -> str:
  """A table of what a conversion wrote and left out, to be printed."""
  rows = [('split', 'modules', 'configs', 'records', 'shards', 'MiB', '')]
  for name, split in manifest.splits.items():
    unmeasured = split.modules - split.measured
    rows.append(
      (
        name,
        f'{split.modules:,}',
        f'{split.configs:,}',
        f'{split.records:,}',
        str(len(split.shards)),
        f'{split.bytes / 2**20:.1f}',
        f'{unmeasured} unmeasured' if unmeasured else '',
      )
    )
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  lines = [
    '  '.join(
      [
        row[0].ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
      ]
    ).rstrip()
    for row in rows
  ]
  left_out = (
    ('run', 'dropped', manifest.dropped_runs),
    ('module', 'skipped', manifest.skipped_modules),
    ('input', f'rejected (see {manifest_lib.REJECTED_NAME})', manifest.rejected_inputs),
  )
  for thing, what, reasons in left_out:
    lines.extend(
      f'{terminal.plural(count, thing)} {what}: {reason}' for reason, count in reasons.items()
    )
  for count, why in (
    (manifest.deduplicated_configs, 'another of the module has the same features'),
    (manifest.sampled_out_configs, 'not in the sample of its module'),
  ):
    if count:
      lines.append(f'{terminal.plural(count, "config")} left out: {why}')
  if manifest.removed_ops or manifest.removed_edges:
    instead = (
      '; the rest of each computation is one op' if manifest.options['rest'] == 'summary' else ''
    )
    lines.append(
      f'{terminal.plural(manifest.removed_ops, "op")} and {terminal.plural(manifest.removed_edges, "edge")} removed: more '
      f'than {terminal.plural(manifest.options["keep_hops"], "hop")} from the configurable ops{instead}'
    )
  if without := sum(split.without_configs for split in manifest.splits.values()):
    lines.append(
      f'{terminal.plural(without, "module")} without configs: nothing to train on; to rank such a program, give '
      'rank its --configs'
    )
  if manifest.unknown_opcodes:
    lines.append(_describe_opcodes(manifest.unknown_opcodes))
  return '\n'.join(lines)


def _describe_opcodes(opcodes: Mapping[str, int]) -> str:
  # A name is whatever the file says.
  shown = [
    f'{name if name.isprintable() and name else ascii(name)} {count:,}'
    for name, count in itertools.islice(opcodes.items(), _OPCODES_SHOWN)
  ]
  if len(opcodes) > len(shown):
    shown.append(f'and {len(opcodes) - len(shown)} more in {manifest_lib.FILE_NAME}')
  return (
    f'{terminal.plural(sum(opcodes.values()), "op")} of unknown opcodes (id 0): {", ".join(shown)}'
  )
