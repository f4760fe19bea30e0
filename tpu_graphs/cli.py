"""The command line: the command `tpu-graphs`, and the frame that every runnable file uses.

A runnable file defines flags and a job, and leaves the rest to `run`:

  def main(argv: Sequence[str]) -> int:
    return cli.run(_define_flags, _job, argv, description=__doc__)

  if __name__ == '__main__':
    sys.exit(main(sys.argv))

Exit codes: 0 done, 1 input that cannot be used, 2 wrong command line, 130 interrupted, 141 the
reader of the output has gone. An error of the user is one line on stderr, any other error a
traceback.
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
COMMANDS: Mapping[str, tuple[str, str]] = {  # Command -> module with `main(argv)`, summary.
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
_REQUIRED = 'must have a value other than None'  # How absl words it.
_WIDTH = 100


def main(argv: Sequence[str] | None = None) -> int:
  """Runs `tpu-graphs COMMAND [flags]`.

  Args:
    argv: program name and arguments; `sys.argv` by default.

  Returns:
    The exit code.
  """
  args = (sys.argv if argv is None else argv)[1:]
  if not args:
    return fail(USAGE_ERROR, f'no command; expected one of {", ".join(COMMANDS)}')
  command, rest = args[0], args[1:]
  if command in _HELP_FLAGS:
    print(_overview())
    return 0
  if command == '--version':
    print(PROGRAM, tpu_graphs.__version__)
    return 0
  if command not in COMMANDS:
    return fail(
      USAGE_ERROR,
      f'unknown command {command}{_did_you_mean(command, COMMANDS)}; '
      f'`{PROGRAM} --help` lists the commands',
    )
  _quiet_tensorflow()
  return _guarded(
    lambda: importlib.import_module(COMMANDS[command][0]).main([f'{PROGRAM} {command}', *rest])
  )


def run(
  define_flags: Callable[[FlagValues], None],
  job: Callable[[FlagValues, list[str]], int | None],
  argv: Sequence[str],
  *,
  description: str,
  passthrough: bool = False,
  positional: str | None = None,
) -> int:
  """Parses a command line, runs a job, and tells a user's error in one line.

  TensorFlow's log is quiet only if it is first imported by the job, which also makes `--help`
  and usage errors quick.

  Args:
    define_flags: defines the flags in the `FlagValues` given, which holds those of this run only.
    job: is called with the flags parsed and the positional arguments, or those after a bare
      `--`; returns the exit code, None for 0.
    argv: program name and arguments.
    description: the first part of the help text.
    passthrough: whether arguments after a bare `--` are allowed: options of Apache Beam.
    positional: what the positional arguments are, of which there must be at least one; None
      allows none. Not together with `passthrough`.

  Returns:
    The exit code.
  """
  from absl import flags  # Here, so that commands which are only listed cost nothing.

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
    message = f'unknown flag --{error.flagname}{_did_you_mean(error.flagname, flag_values, "--")}; '
    beam = 'Beam options go after a bare `--`; ' if passthrough else ''
    return fail(USAGE_ERROR, f'{message}{beam}--help lists the flags')
  except flags.Error as error:
    return fail(
      USAGE_ERROR,
      re.sub(
        rf'flag --(\S+)=None: Flag --\1 {_REQUIRED}\.',
        r'flag --\1 is required',
        '; '.join(str(error).splitlines()),
      ),
    )
  if positional:
    if not stray:
      return fail(USAGE_ERROR, f'no {positional} given; --help tells the usage')
    rest = stray
  elif stray:
    return fail(
      USAGE_ERROR,
      f'unexpected argument {stray[0]}; flags are written --name=value, and patterns such as '
      "'*.npz' in quotes",
    )
  return _guarded(lambda: job(flag_values, rest))


def _guarded(job: Callable[[], int | None]) -> int:
  """Runs `job` and turns what a user can cause into an exit code and at most one line."""
  try:
    code = job()
    sys.stdout.flush()
  except errors.InputError as error:
    return fail(INPUT_ERROR, str(error))
  except KeyboardInterrupt:
    return fail(INTERRUPTED, 'interrupted')
  except BrokenPipeError:
    os.dup2(
      os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
    )  # Else the interpreter's own flush fails again.
    return BROKEN_PIPE
  return code or 0


def _quiet_tensorflow() -> None:
  """Hides the C++ log, which even on a sound machine holds errors; what matters is raised in
  Python as well.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


def fail(code: int, message: str) -> int:
  """Tells an error in one line on stderr and returns `code`."""
  print('error:', ' '.join(message.splitlines()), file=sys.stderr)
  return code


def _did_you_mean(name: str, names: Iterable[str], prefix: str = '') -> str:
  near = difflib.get_close_matches(name, list(names), n=1)
  return f' (did you mean {prefix}{near[0]}?)' if near else ''


def _overview() -> str:
  width = max(map(len, COMMANDS))
  return '\n'.join(
    [
      f'usage: {PROGRAM} COMMAND [flags]',
      '',
      tpu_graphs.__doc__ or '',
      '',
      'commands:',
      *(f'  {command.ljust(width)}  {summary}' for command, (_, summary) in COMMANDS.items()),
      '',
      f'`{PROGRAM} COMMAND --help` lists the flags of a command, `{PROGRAM} --version` the version.',
    ]
  )


def _help(
  program: str, description: str, flag_values: FlagValues, passthrough: bool, positional: str | None
) -> str:
  """The help text: usage, description, and the flags in the order of their definition, required
  ones first.
  """
  script = 'python ' if program.endswith('.py') else ''
  arguments = f' {positional}...' if positional else ' [-- BEAM OPTIONS]' if passthrough else ''
  lines = [f'usage: {script}{program} [flags]{arguments}', '', description.strip()]
  all_flags = [
    flag_values[name] for name in flag_values if name == flag_values[name].name
  ]  # Without short names.
  required = [
    flag
    for flag in all_flags
    if any(_REQUIRED in validator.message for validator in flag.validators)
  ]
  for title, group in (
    ('required flags', required),
    ('flags', [flag for flag in all_flags if flag not in required]),
  ):
    if group:
      lines.extend(['', f'{title}:', *(line for flag in group for line in _flag_help(flag))])
  if passthrough:
    lines.extend(
      [
        '',
        'Options of Apache Beam go after a bare --, as in `-- --runner=DataflowRunner --region=REGION`.',
      ]
    )
  return '\n'.join(lines)


def _flag_help(flag: Flag) -> list[str]:
  kind = flag.flag_type()
  values = '|'.join(getattr(flag.parser, 'enum_values', ())) or {'int': 'N', 'float': 'X'}.get(
    kind, 'TEXT'
  )
  usage = f'--[no]{flag.name}' if kind == 'bool' else f'--{flag.name}={values}'
  text = (flag.help or '').removeprefix(f'<{values}>: ')  # absl repeats the values of an enum here.
  text = text.partition(';\n    repeat this option')[
    0
  ]  # absl's word on flags that may be repeated.
  if flag.default is not None:
    text += f' (default: {str(flag.default_as_str).strip(chr(39))})'
  return [
    f'  {usage}',
    *textwrap.wrap(text, _WIDTH, initial_indent=' ' * 6, subsequent_indent=' ' * 6),
  ]
