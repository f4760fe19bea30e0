"""The report on a conversion that is printed at its end."""

from __future__ import annotations

from collections.abc import Mapping
import itertools

from tpu_graphs import terminal
from tpu_graphs.dataset import manifest as manifest_lib

_OPCODES_SHOWN = 10


def describe(manifest: manifest_lib.Manifest) -> str:
  """Returns a printable table of the splits, followed by lines about all that was left out."""
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
  lines = []
  for name, *cells in rows:
    aligned = [name.ljust(widths[0])]
    aligned += [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
    lines.append('  '.join(aligned).rstrip())

  left_out = (
    ('run', 'dropped', manifest.dropped_runs),
    ('module', 'skipped', manifest.skipped_modules),
    ('input', f'rejected (see {manifest_lib.REJECTED_NAME})', manifest.rejected_inputs),
  )
  for thing, what, reasons in left_out:
    for reason, count in reasons.items():
      lines.append(f'{terminal.plural(count, thing)} {what}: {reason}')

  left_out_configs = (
    (manifest.deduplicated_configs, 'another of the module has the same features'),
    (manifest.sampled_out_configs, 'not in the sample of its module'),
  )
  for count, why in left_out_configs:
    if count:
      lines.append(f'{terminal.plural(count, "config")} left out: {why}')

  if manifest.removed_ops or manifest.removed_edges:
    ops = terminal.plural(manifest.removed_ops, 'op')
    edges = terminal.plural(manifest.removed_edges, 'edge')
    hops = terminal.plural(manifest.options['keep_hops'], 'hop')
    line = f'{ops} and {edges} removed: more than {hops} from the configurable ops'
    if manifest.options['rest'] == 'summary':
      line += '; the rest of each computation is one op'
    lines.append(line)

  without_configs = sum(split.without_configs for split in manifest.splits.values())
  if without_configs:
    modules = terminal.plural(without_configs, 'module')
    lines.append(
      f'{modules} without configs: nothing to train on; '
      'to rank such a program, give rank its --configs'
    )

  if manifest.unknown_opcodes:
    lines.append(_describe_opcodes(manifest.unknown_opcodes))
  return '\n'.join(lines)


def _describe_opcodes(opcodes: Mapping[str, int]) -> str:
  shown = []
  for name, count in itertools.islice(opcodes.items(), _OPCODES_SHOWN):
    # The name comes from the input file and may hold control characters.
    printable = name if name and name.isprintable() else ascii(name)
    shown.append(f'{printable} {count:,}')
  if len(opcodes) > len(shown):
    shown.append(f'and {len(opcodes) - len(shown)} more in {manifest_lib.FILE_NAME}')
  ops = terminal.plural(sum(opcodes.values()), 'op')
  return f'{ops} of unknown opcodes (id 0): {", ".join(shown)}'
