"""The command `tpu-graphs`, and the frame that every runnable file uses.

A runnable file defines flags and a job, and leaves the rest to `run`:

  def main(argv: Sequence[str]) -> int:
    return cli.run(_define_flags, _job, argv, description=__doc__)

  if __name__ == '__main__':
    sys.exit(main(sys.argv))

Exit codes: 0 for success, 1 for input that cannot be used, 2 for a wrong command line, 130 for an
interrupt, and 141 if the reader of the output has gone. A user's error is one line on stderr; any
other error is a traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import difflib
import importlib
import os
import re
import sys
import textwrap
import typing

import tpu_graphs
from tpu_graphs import errors

if typing.TYPE_CHECKING:
  from absl.flags import Flag
  from absl.flags import FlagValues

PROGRAM = 'tpu-graphs'
# Maps the name of each command to its module, which has `main(argv)`, and its summary.
COMMANDS: Mapping[str, tuple[str, str]] = {
  'download': ('tpu_graphs.commands.download', 'download the public TpuGraphs dataset'),
  'convert': ('pipelines.convert', 'convert measured programs into a dataset directory'),
  'validate': (
    'tpu_graphs.commands.validate',
    'check a dataset directory or a folder of measured programs',
  ),
  'sample': (
    'tpu_graphs.commands.sample',
    'write a small synthetic collection to try the other commands on',
  ),
  'train': ('baselines.train', 'train a model on a dataset directory'),
  'evaluate': (
    'baselines.evaluate',
    'measure how well a trained model ranks the configs of a split',
  ),
  'rank': ('baselines.rank', 'rank the configs of a program, fastest first'),
  'export-model': ('baselines.export_model', 'write a trained model as a SavedModel, to serve it'),
  'submission': (
    'baselines.submission',
    'write a submission to the Kaggle competition, or score one',
  ),
  'inspect': (
    'tpu_graphs.commands.inspect_files',
    'show what files of measured programs hold, or draw a module',
  ),
  'export': (
    'tpu_graphs.commands.export',
    'write a dataset directory as npz or PyTorch Geometric files',
  ),
}

INPUT_ERROR = 1
USAGE_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141

_HELP_FLAGS = frozenset(('-h', '-help', '--help', '--helpfull', '--helpshort'))
# The end of absl's message about a required flag.
_REQUIRED = 'must have a value other than None'
_WIDTH = 100


def main(argv: Sequence[str] | None = None) -> int:
  """Runs `tpu-graphs COMMAND [flags]`; without a command prints the same overview as `--help`.

  Args:
    argv: program name and arguments; `sys.argv` by default.

  Returns:
    The exit code.
  """
  args = (sys.argv if argv is None else argv)[1:]
  if not args or args[0] in _HELP_FLAGS:
    return _guarded(lambda: print(_overview()))
  command, rest = args[0], args[1:]
  if command == '--version':
    print(PROGRAM, tpu_graphs.__version__)
    return 0
  if command not in COMMANDS:
    hint = _did_you_mean(command, COMMANDS)
    message = f'unknown command {command}{hint}; `{PROGRAM} --help` lists the commands'
    return fail(USAGE_ERROR, message)
  _quiet_tensorflow()

  def job() -> int:
    module = importlib.import_module(COMMANDS[command][0])
    return module.main([f'{PROGRAM} {command}', *rest])

  return _guarded(job)


def run(
  define_flags: Callable[[FlagValues], None],
  job: Callable[[FlagValues, list[str]], int | None],
  argv: Sequence[str],
  *,
  description: str,
  passthrough: bool = False,
  positional: str | None = None,
) -> int:
  """Parses a command line, runs a job, and reports a user's error in one line.

  The job should be the first to import TensorFlow: only then is TensorFlow's log quiet, and
  `--help` and usage errors are quick.

  Args:
    define_flags: defines the flags in the `FlagValues` given, which belongs to this run alone.
    job: takes the parsed flags and a list of arguments: the positional arguments, or the arguments
      after a bare `--`. Returns the exit code, None for 0.
    argv: program name and arguments.
    description: the first part of the help text.
    passthrough: whether arguments after a bare `--`, options of Apache Beam, are allowed.
    positional: the name of the positional arguments, at least one of which is then required; None
      allows no positional arguments. Not to be combined with `passthrough`.

  Returns:
    The exit code.
  """
  from absl import flags  # Imported here, so that listing the commands costs nothing.

  _quiet_tensorflow()
  program, *args = argv
  rest: list[str] = []
  if passthrough and '--' in args:
    split = args.index('--')
    args, rest = args[:split], args[split + 1 :]
  flag_values = flags.FlagValues()
  flag_values.set_gnu_getopt(True)
  define_flags(flag_values)
  if not _HELP_FLAGS.isdisjoint(args):
    return _guarded(
      lambda: print(_help(program, description, flag_values, passthrough, positional))
    )
  try:
    stray = flag_values([program, *args])[1:]
  except flags.UnrecognizedFlagError as error:
    hint = _did_you_mean(error.flagname, flag_values, '--')
    beam = 'Beam options go after a bare `--`; ' if passthrough else ''
    message = f'unknown flag --{error.flagname}{hint}; {beam}--help lists the flags'
    return fail(USAGE_ERROR, message)
  except flags.Error as error:
    message = '; '.join(str(error).splitlines())
    missing = rf'flag --(\S+)=None: Flag --\1 {_REQUIRED}\.'
    return fail(USAGE_ERROR, re.sub(missing, r'flag --\1 is required', message))
  if positional:
    if not stray:
      return fail(USAGE_ERROR, f'no {positional} given; --help shows the usage')
    rest = stray
  elif stray:
    message = (
      f'unexpected argument {stray[0]}; flags are written --name=value, and patterns such as '
      "'*.npz' in quotes"
    )
    return fail(USAGE_ERROR, message)
  return _guarded(lambda: job(flag_values, rest))


def _guarded(job: Callable[[], int | None]) -> int:
  """Runs `job`, and turns errors that a user can cause into an exit code and at most one line."""
  try:
    code = job()
    sys.stdout.flush()
  except errors.InputError as error:
    return fail(INPUT_ERROR, str(error))
  except KeyboardInterrupt:
    return fail(INTERRUPTED, 'interrupted')
  except BrokenPipeError:
    # The interpreter flushes stdout at its end, which would fail again.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    return BROKEN_PIPE
  return code or 0


def _quiet_tensorflow() -> None:
  """Hides TensorFlow's C++ log unless the user has set its level.

  The log holds errors even on a sound machine; errors that matter are raised in Python as well.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


def fail(code: int, message: str) -> int:
  """Prints an error in one line on stderr and returns `code`."""
  print('error:', ' '.join(message.splitlines()), file=sys.stderr)
  return code


def _did_you_mean(name: str, names: Iterable[str], prefix: str = '') -> str:
  near = difflib.get_close_matches(name, list(names), n=1)
  return f' (did you mean {prefix}{near[0]}?)' if near else ''


def _overview() -> str:
  """Returns the help text of `tpu-graphs` itself, which lists the commands."""
  width = max(map(len, COMMANDS))
  commands = [f'  {name.ljust(width)}  {summary}' for name, (_, summary) in COMMANDS.items()]
  lines = [
    f'usage: {PROGRAM} COMMAND [flags]',
    '',
    (tpu_graphs.__doc__ or '').partition('\n')[0],
    '',
    'commands:',
    *commands,
    '',
    f'`{PROGRAM} COMMAND --help` lists the flags of a command, `{PROGRAM} --version` the version.',
  ]
  return '\n'.join(lines)


def _help(
  program: str, description: str, flag_values: FlagValues, passthrough: bool, positional: str | None
) -> str:
  """Returns the help text of a command: usage, description and flags.

  Flags are in the order of their definition, required flags first.
  """
  script = 'python ' if program.endswith('.py') else ''
  arguments = ''
  if positional:
    arguments = f' {positional}...'
  elif passthrough:
    arguments = ' [-- BEAM OPTIONS]'
  lines = [f'usage: {script}{program} [flags]{arguments}', '', description.strip()]

  # A flag with a short name is also listed under that name.
  all_flags = [flag_values[name] for name in flag_values if name == flag_values[name].name]
  required = []
  for flag in all_flags:
    messages = [validator.message for validator in flag.validators]
    if any(_REQUIRED in message for message in messages):
      required.append(flag)
  optional = [flag for flag in all_flags if flag not in required]
  for title, group in (('required flags', required), ('flags', optional)):
    if group:
      lines.extend(['', f'{title}:'])
    for flag in group:
      lines.extend(_flag_help(flag))

  if passthrough:
    beam = (
      'Options of Apache Beam go after a bare --, '
      'as in `-- --runner=DataflowRunner --region=REGION`.'
    )
    lines.extend(['', beam])
  return '\n'.join(lines)


def _flag_help(flag: Flag) -> list[str]:
  """Returns the lines of the help text that describe a flag."""
  kind = flag.flag_type()
  placeholder = {'int': 'N', 'float': 'X'}.get(kind, 'TEXT')
  values = '|'.join(getattr(flag.parser, 'enum_values', ())) or placeholder
  usage = f'--[no]{flag.name}' if kind == 'bool' else f'--{flag.name}={values}'
  # To the help of a flag absl adds the values of an enum, and a note on flags that may be repeated.
  text = (flag.help or '').removeprefix(f'<{values}>: ')
  text = text.partition(';\n    repeat this option')[0]
  if flag.default is not None:
    text += f' (default: {str(flag.default_as_str).strip(chr(39))})'
  indent = ' ' * 6
  wrapped = textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
  return [f'  {usage}', *wrapped]
