"""Shows what files of programs hold, or draws a module.

  python tpu_graphs/commands/inspect_files.py kernels.pb npz/tile/xla/train/*.npz
  python tpu_graphs/commands/inspect_files.py program.hlo --svg --output=program.svg

A file is an npz file, an HLO protobuf, HLO text, or the folder of an XLA dump. best/default is
the runtime of the fastest config over that of the default config, for several modules the
geometric mean.
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
_MAX_NAMES = 5  # Of modules, in an error.
_MIN_NAME = 20  # Characters that a table leaves to names.
_NONE = '-'
_UNITS = ((1, 'ns'), (1e3, 'µs'), (1e6, 'ms'), (1e9, 's'))
_IMPLEMENTATIONS = {'native': 'the native extension', 'python': 'pure Python'}

# Columns of numbers: title in two lines -> text.
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
  """What files hold, to be printed: of one module all, of several modules or files a row each
  and the total.

  Args:
    files: path -> what the file holds, at least one.
    max_rows: how many modules or files to list; None for all.
  """
  parts = list(files.values())
  modules = [module for file in parts for module in file.modules]
  total = summary.total(modules)
  skipped = summary.merge_counts(file.skipped for file in parts)
  if len(files) > 1:
    folder = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in files])
    lines = [f'{terminal.plural(len(files), "file")} in {folder}']
    header = ['\nfile', '\ntype', '\nmodules']
    rows = [
      [
        terminal.printable(os.path.relpath(path, folder)),
        _type(file),
        f'{len(file.modules):,}',
        *(_COLUMNS[title](file.total) for title in _FILE_COLUMNS),
      ]
      for path, file in files.items()
    ]
    last = ['total', '', f'{len(modules):,}', *(_COLUMNS[title](total) for title in _FILE_COLUMNS)]
    lines += _table([*header, *_FILE_COLUMNS], rows, last, num_names=2, max_rows=max_rows)
  else:
    ((path, file),) = files.items()
    kinds = ' and '.join(_kinds(file))
    lines = [
      f'{terminal.printable(path)}: {file.type_name}, {terminal.plural(len(modules), f"{kinds} module".lstrip())}'
    ]
    if len(modules) == 1:
      lines += _detail(modules[0])
    elif modules:
      rows = [
        [terminal.printable(module.module_id), *(text(module) for text in _COLUMNS.values())]
        for module in modules
      ]
      last = ['total', *(text(total) for text in _COLUMNS.values())]
      lines += _table(['\nmodule', *_COLUMNS], rows, last, num_names=1, max_rows=max_rows)
  lines += _counts(total, skipped)
  return '\n'.join(lines)


def _detail(module: summary.ModuleSummary) -> list[str]:
  configs = 'none'
  if module.configs:
    measured = {0: 'none', module.configs: 'all'}.get(module.measured, f'{module.measured:,}')
    configs = f'{module.configs:,}, {module.distinct_configs:,} distinct, {measured} measured'
  lines = _entry('module', terminal.printable(module.module_id))
  lines += _entry(
    'graph',
    f'{terminal.plural(module.ops, "op")}, {terminal.plural(module.edges, "edge")}, '
    f'{terminal.plural(module.computations, "computation")}',
  )
  if module.kind == 'layout':
    lines += _entry('configurable', terminal.plural(module.config_ops, 'op'))
  lines += _entry('configs', configs)
  if module.measured:
    lines += _entry('runtime', f'{_duration(module.fastest_ns)} to {_duration(module.slowest_ns)}')
    lines += _entry(
      'best/default',
      'not known: the file does not tell the default config'
      if module.best_ratio is None
      else _ratio(module.best_ratio),
    )
  return lines


def _counts(total: summary.Contents, skipped: Mapping[str, int]) -> list[str]:
  """What is counted by name, each in a paragraph."""
  opcodes = [f'{count:,} {name}' for name, count in total.opcodes.items()]
  if len(opcodes) > _MAX_OPCODES:
    opcodes[_MAX_OPCODES:] = [f'and {len(opcodes) - _MAX_OPCODES:,} other opcodes']
  lines = _entry('opcodes', *opcodes)
  lines += _entry(
    'unknown',
    *(
      f'{count:,} {terminal.printable(name) or "(no name)"}'
      for name, count in total.unknown_opcodes.items()
    ),
  )
  lines += _entry(
    'dropped runs', *(f'{reason}: {count:,}' for reason, count in total.dropped_runs.items())
  )
  return lines + _entry('skipped', *(f'{reason}: {count:,}' for reason, count in skipped.items()))


def _entry(title: str, *parts: str) -> list[str]:
  """The lines of `parts`, which are not broken; none if there are no parts."""
  text = ', '.join(part.replace(' ', '\u00a0') for part in parts)  # Where textwrap does not break.
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
  """Lines of a table with `max_rows` of the rows: the first `num_names` columns to the left, the
  others to the right.

  Columns that tell nothing are left out.
  """
  kept = [i for i, text in enumerate(last) if i < num_names or text != _NONE]
  shown = rows if max_rows is None else rows[:max_rows]
  first, second = zip(*(title.split('\n') for title in header), strict=True)
  table = [[row[i] for i in kept] for row in (first, second, *shown, last)]
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  widths[0] = min(widths[0], max(_MIN_NAME, _WIDTH - sum(widths[1:]) - 2 * len(widths)))
  lines = []
  for row in table:
    cells = [
      _shortened(row[0], widths[0]).ljust(widths[0]),
      *(
        text.ljust(width) for text, width in zip(row[1:num_names], widths[1:num_names], strict=True)
      ),
      *(text.rjust(width) for text, width in zip(row[num_names:], widths[num_names:], strict=True)),
    ]
    lines.append(f'  {"  ".join(cells)}'.rstrip())
  if len(shown) < len(rows):
    lines.insert(-1, f'  … and {len(rows) - len(shown):,} more, which --all shows')
  return [line for line in lines if line]


def _shortened(text: str, width: int) -> str:
  """`text` with the middle left out if it is longer than `width`, or of a path the beginning."""
  head = 0 if os.sep in text else (width - 1) // 2
  return text if len(text) <= width else f'{text[:head]}…{text[head + 1 - width :]}'


def _type(file: summary.FileSummary) -> str:
  return ' '.join([file.type_name, *_kinds(file)]) if file.type_name == 'npz' else file.type_name


def _kinds(file: summary.FileSummary) -> list[str]:
  return sorted({module.kind for module in file.modules})


def _duration(nanoseconds: int | None) -> str:
  """A runtime with three digits, in the largest unit of which it is at least one."""
  if nanoseconds is None:
    return _NONE
  size, unit = next(
    pair for pair in reversed(_UNITS) if pair[0] == 1 or float(f'{nanoseconds:.3g}') >= pair[0]
  )
  value = float(f'{nanoseconds / size:.3g}')
  digits = 0 if unit == 'ns' or value >= 100 else 1 if value >= 10 else 2
  return f'{value:,.{digits}f} {unit}'


def _ratio(ratio: float | None) -> str:
  return _NONE if ratio is None else f'{ratio:.3f}'


def select(extraction: hlo.Extraction, wanted: str) -> hlo.Extraction:
  """The extraction with nothing but the module that is called `wanted`, or that is at this
  position from 0.

  Raises:
    InputError: there is none.
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
  """DOT text of the only module.

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
  return ' or '.join(names + ([f'up to {len(modules) - 1}'] if len(modules) > _MAX_NAMES else []))


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
    'Look only at the module of this name, or at this position from 0.',
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
    'Number of ops beyond which a picture shows several as one box.',
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
        results[path] = (
          draw(extraction, max_ops=flag_values.max_ops) if drawn else summary.summarize(extraction)
        )
    except errors.InputError as error:
      cli.fail(cli.INPUT_ERROR, str(error))
      results[path] = error
  good = {
    path: result for path, result in results.items() if not isinstance(result, errors.InputError)
  }
  if flag_values.json:
    _write(
      json.dumps(
        {
          'implementation': hlo.implementation(),
          'files': [
            {
              'path': path,
              **({'error': result.to_dict()} if path not in good else summary.to_json(result)),
            }
            for path, result in results.items()
          ],
        },
        indent=2,
        allow_nan=False,
      )
      + '\n',
      flag_values.output,
    )
  elif good:
    if drawn:
      (text,) = good.values()
      text = drawing.svg(text) if flag_values.svg else text
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
