"""Shows the contents of files of programs, or draws a module.

  python tpu_graphs/commands/inspect_files.py kernels.pb npz/tile/xla/train/*.npz
  python tpu_graphs/commands/inspect_files.py program.hlo --svg --output=program.svg

A file is an npz file, an HLO protobuf, HLO text, or the folder of an XLA dump. best/default is
the runtime of the fastest config divided by the runtime of the default config; for several modules
it is the geometric mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import os
import pathlib
import sys
import textwrap
from typing import Any

from tpu_graphs import cli
from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs import terminal
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import readers
from tpu_graphs.views import drawing
from tpu_graphs.views import summary

_WIDTH = 120
_MAX_ROWS = 30
_MAX_OPCODES = 10
_MAX_NAMES = 5  # An error names at most this many modules.
_MIN_NAME = 20  # A table leaves at least this many characters to names.
_NONE = '-'
_UNITS = ((1, 'ns'), (1e3, 'µs'), (1e6, 'ms'), (1e9, 's'))
_IMPLEMENTATIONS = {'native': 'the native extension', 'python': 'pure Python'}

# Columns of numbers: title in two lines -> function that returns the text.
_COLUMNS: Mapping[str, Callable[[summary.Contents], str]] = {
  '\nops': lambda contents: f'{contents.ops:,}',
  '\nedges': lambda contents: f'{contents.edges:,}',
  'compu-\ntations': lambda contents: f'{contents.computations:,}',
  'config\nops': lambda contents: f'{contents.config_ops:,}' if contents.config_ops else _NONE,
  '\nconfigs': lambda contents: f'{contents.configs:,}' if contents.configs else _NONE,
  '\ndistinct': lambda contents: f'{contents.distinct_configs:,}' if contents.configs else _NONE,
  '\nfastest': lambda contents: _duration(contents.fastest_ns),
  '\nslowest': lambda contents: _duration(contents.slowest_ns),
  'best/\ndefault': lambda contents: _ratio(contents.best_ratio),
}
_FILE_COLUMNS = [title for title in _COLUMNS if title not in ('\nedges', 'compu-\ntations')]


def describe(files: Mapping[str, summary.FileSummary], *, max_rows: int | None = _MAX_ROWS) -> str:
  """Returns a text that describes files.

  One module is described in full. Several modules or files get a row each, and a row of totals.

  Args:
    files: path -> summary of the file, at least one.
    max_rows: number of modules or files to list; None for all.
  """
  parts = list(files.values())
  modules = [module for file in parts for module in file.modules]
  total = summary.total(modules)
  skipped = summary.merge_counts(file.skipped for file in parts)
  if len(files) > 1:
    folder = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in files])
    lines = [f'{terminal.plural(len(files), "file")} in {folder}']
    header = ['\nfile', '\ntype', '\nmodules', *_FILE_COLUMNS]
    rows = []
    for path, file in files.items():
      name = terminal.printable(os.path.relpath(path, folder))
      numbers = [_COLUMNS[title](file.total) for title in _FILE_COLUMNS]
      rows.append([name, _type(file), f'{len(file.modules):,}', *numbers])
    totals = [_COLUMNS[title](total) for title in _FILE_COLUMNS]
    last = ['total', '', f'{len(modules):,}', *totals]
    lines += _table(header, rows, last, num_names=2, max_rows=max_rows)
  else:
    ((path, file),) = files.items()
    module_of_kinds = ' and '.join(_kinds(file)) + ' module'
    count = terminal.plural(len(modules), module_of_kinds.lstrip())
    lines = [f'{terminal.printable(path)}: {file.type_name}, {count}']
    if len(modules) == 1:
      lines += _detail(modules[0])
    elif modules:
      header = ['\nmodule', *_COLUMNS]
      rows = []
      for module in modules:
        numbers = [text(module) for text in _COLUMNS.values()]
        rows.append([terminal.printable(module.module_id), *numbers])
      last = ['total', *(text(total) for text in _COLUMNS.values())]
      lines += _table(header, rows, last, num_names=1, max_rows=max_rows)
  lines += _counts(total, skipped)
  return '\n'.join(lines)


def _detail(module: summary.ModuleSummary) -> list[str]:
  if not module.measured:
    measured = 'none'
  elif module.measured == module.configs:
    measured = 'all'
  else:
    measured = f'{module.measured:,}'
  configs = 'none'
  if module.configs:
    configs = f'{module.configs:,}, {module.distinct_configs:,} distinct, {measured} measured'
  ops = terminal.plural(module.ops, 'op')
  edges = terminal.plural(module.edges, 'edge')
  computations = terminal.plural(module.computations, 'computation')
  lines = _entry('module', terminal.printable(module.module_id))
  lines += _entry('graph', f'{ops}, {edges}, {computations}')
  if module.kind == 'layout':
    lines += _entry('configurable', terminal.plural(module.config_ops, 'op'))
  lines += _entry('configs', configs)
  if module.measured:
    lines += _entry('runtime', f'{_duration(module.fastest_ns)} to {_duration(module.slowest_ns)}')
    ratio = _ratio(module.best_ratio)
    if module.best_ratio is None:
      ratio = 'not known: the file does not name the default config'
    lines += _entry('best/default', ratio)
  return lines


def _counts(total: summary.Contents, skipped: Mapping[str, int]) -> list[str]:
  """Returns all counts by name, in one paragraph for each kind of count."""
  opcodes = [f'{count:,} {name}' for name, count in total.opcodes.items()]
  if len(opcodes) > _MAX_OPCODES:
    opcodes[_MAX_OPCODES:] = [f'and {len(opcodes) - _MAX_OPCODES:,} other opcodes']
  unknown = [
    f'{count:,} {terminal.printable(name) or "(no name)"}'
    for name, count in total.unknown_opcodes.items()
  ]
  dropped_runs = [f'{reason}: {count:,}' for reason, count in total.dropped_runs.items()]
  skipped_programs = [f'{reason}: {count:,}' for reason, count in skipped.items()]
  return [
    *_entry('opcodes', *opcodes),
    *_entry('unknown', *unknown),
    *_entry('dropped runs', *dropped_runs),
    *_entry('skipped', *skipped_programs),
  ]


def _entry(title: str, *parts: str) -> list[str]:
  """Returns lines with `parts`, none of which is broken; no lines if there are no parts."""
  # textwrap does not break lines at no-break spaces.
  text = ', '.join(part.replace(' ', '\u00a0') for part in parts)
  lines = textwrap.wrap(
    text,
    _WIDTH,
    initial_indent=f'  {title:14}',
    subsequent_indent=' ' * 16,
    break_long_words=False,
    break_on_hyphens=False,
  )
  return [line.replace('\u00a0', ' ') for line in lines]


def _table(
  header: Sequence[str],
  rows: Sequence[Sequence[str]],
  last: Sequence[str],
  *,
  num_names: int,
  max_rows: int | None,
) -> list[str]:
  """Returns the lines of a table without the columns that are empty.

  Args:
    header: the titles in two lines.
    rows: the rows; the table has at most `max_rows` of them.
    last: the row of totals, which shows whether a column is empty.
    num_names: number of the first columns that are aligned to the left; the others are aligned to
      the right.
    max_rows: see `rows`; None for all.
  """
  kept = [i for i, text in enumerate(last) if i < num_names or text != _NONE]
  shown = rows if max_rows is None else rows[:max_rows]
  first, second = zip(*(title.split('\n') for title in header), strict=True)
  table = [[row[i] for i in kept] for row in (first, second, *shown, last)]
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  widths[0] = min(widths[0], max(_MIN_NAME, _WIDTH - sum(widths[1:]) - 2 * len(widths)))
  lines = []
  for first_cell, *others in table:
    row = [_shortened(first_cell, widths[0]), *others]
    cells = []
    for i, (text, width) in enumerate(zip(row, widths, strict=True)):
      cells.append(text.ljust(width) if i < num_names else text.rjust(width))
    lines.append(f'  {"  ".join(cells)}'.rstrip())
  if len(shown) < len(rows):
    lines.insert(-1, f'  … and {len(rows) - len(shown):,} more, which --all shows')
  return [line for line in lines if line]


def _shortened(text: str, width: int) -> str:
  """Cuts `text` to `width` characters: a path at its beginning, other text in its middle."""
  if len(text) <= width:
    return text
  head = 0 if os.sep in text else (width - 1) // 2
  return f'{text[:head]}…{text[head + 1 - width :]}'


def _type(file: summary.FileSummary) -> str:
  if file.type_name == 'npz':
    return ' '.join([file.type_name, *_kinds(file)])
  return file.type_name


def _kinds(file: summary.FileSummary) -> list[str]:
  return sorted({module.kind for module in file.modules})


def _duration(nanoseconds: int | None) -> str:
  """Returns a runtime with three digits, in the largest unit that is not larger than it."""
  if nanoseconds is None:
    return _NONE
  rounded = float(f'{nanoseconds:.3g}')
  units = [(size, unit) for size, unit in _UNITS if size == 1 or rounded >= size]
  size, unit = units[-1]
  value = float(f'{nanoseconds / size:.3g}')
  if unit == 'ns' or value >= 100:
    digits = 0
  elif value >= 10:
    digits = 1
  else:
    digits = 2
  return f'{value:,.{digits}f} {unit}'


def _ratio(ratio: float | None) -> str:
  return _NONE if ratio is None else f'{ratio:.3f}'


def select(extraction: hlo.Extraction, wanted: str) -> hlo.Extraction:
  """Returns the extraction with only one of its modules.

  Args:
    extraction: the content of a file.
    wanted: the module's name, or its position from 0.

  Raises:
    InputError: there is no such module.
  """
  modules = extraction.modules
  index = next((i for i, module in enumerate(modules) if module.module_id == wanted), None)
  if index is None and wanted.isdecimal() and int(wanted) < len(modules):
    index = int(wanted)
  if index is None:
    raise errors.InputError(
      'no such module', where='--module', found=repr(wanted), expected=_names(modules)
    )
  only = slice(index, index + 1)
  return dataclasses.replace(
    extraction, modules=modules[only], skipped={}, tunings=extraction.tunings[only]
  )


def draw(extraction: hlo.Extraction, *, max_ops: int = drawing.MAX_OPS) -> str:
  """Returns the only module as text in the DOT language.

  Raises:
    InputError: there are several modules, or none.
  """
  modules = extraction.modules
  if len(modules) != 1:
    raise errors.InputError(
      'not one module to draw',
      found=terminal.plural(len(modules), 'module'),
      expected=f'--module={_names(modules)}' if modules else 'a file with a module',
    )
  return drawing.dot(modules[0], max_ops=max_ops)


def _names(modules: Sequence[module_lib.Module]) -> str:
  names = [f'{i} ({module.module_id})' for i, module in enumerate(modules[:_MAX_NAMES])]
  if len(modules) > _MAX_NAMES:
    names.append(f'up to {len(modules) - 1}')
  return ' or '.join(names)


def _define_flags(flag_values) -> None:
  from absl import flags

  flags.DEFINE_bool(
    'all',
    False,
    f'List all modules or files, not only the first {_MAX_ROWS}.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'module',
    None,
    'Show only the module with this name, or at this position from 0.',
    flag_values=flag_values,
  )
  flags.DEFINE_bool('json', False, 'Print all numbers as JSON instead.', flag_values=flag_values)
  flags.DEFINE_bool(
    'dot', False, 'Print the graph of a module for Graphviz instead.', flag_values=flag_values
  )
  flags.DEFINE_bool(
    'svg',
    False,
    'Print a picture of a module instead; needs the package graphviz.',
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'max_ops',
    drawing.MAX_OPS,
    'Number of ops beyond which a picture shows several ops as one box.',
    lower_bound=1,
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'output',
    None,
    'File to write instead of printing; replaced if it exists.',
    flag_values=flag_values,
  )
  flags.mark_bool_flags_as_mutual_exclusive(['json', 'dot', 'svg'], flag_values=flag_values)


def _job(flag_values, paths: Sequence[str]) -> int:
  drawn = flag_values.dot or flag_values.svg
  if len(paths) > 1 and (drawn or flag_values.module is not None):
    return cli.fail(cli.USAGE_ERROR, f'{len(paths)} files; --dot, --svg and --module take one')
  results: dict[str, Any] = {}
  for path in dict.fromkeys(paths):
    try:
      with errors.in_file(path):
        extraction = readers.from_file(path)
        if flag_values.module is not None:
          extraction = select(extraction, flag_values.module)
        if drawn:
          results[path] = draw(extraction, max_ops=flag_values.max_ops)
        else:
          results[path] = summary.summarize(extraction)
    except errors.InputError as error:
      cli.fail(cli.INPUT_ERROR, str(error))
      results[path] = error
  good = {
    path: result for path, result in results.items() if not isinstance(result, errors.InputError)
  }
  if flag_values.json:
    files = []
    for path, result in results.items():
      content = summary.to_json(result) if path in good else {'error': result.to_dict()}
      files.append({'path': path, **content})
    document = {'implementation': hlo.implementation(), 'files': files}
    text = json.dumps(document, indent=2, allow_nan=False)
    _write(f'{text}\n', flag_values.output)
  elif good:
    if drawn:
      (dot,) = good.values()
      text = drawing.svg(dot) if flag_values.svg else dot
    else:
      text = describe(good, max_rows=None if flag_values.all else _MAX_ROWS)
      text += f'\nHLO is extracted by {_IMPLEMENTATIONS[hlo.implementation()]}.\n'
    _write(text, flag_values.output)
  return cli.INPUT_ERROR if len(good) < len(results) else 0


def _write(text: str, path: str | None) -> None:
  if path is None:
    print(text, end='')
    return
  try:
    pathlib.Path(path).write_text(text, encoding='utf-8')
  except OSError as error:
    raise errors.InputError('cannot write', path=path, found=error.strerror) from error


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__, positional='FILE')


if __name__ == '__main__':
  sys.exit(main(sys.argv))
