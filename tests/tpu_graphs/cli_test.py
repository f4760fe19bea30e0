"""Tests of the command `tpu-graphs` and of the frame of the runnable files."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
import types

from absl import flags
import pytest

import tpu_graphs
from tpu_graphs import cli
from tpu_graphs import errors

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _restore_environment(monkeypatch):
  # Otherwise `run` and `main` would set it for later tests.
  monkeypatch.setenv('TF_CPP_MIN_LOG_LEVEL', '2')


def define(flag_values):
  flags.DEFINE_string('output', None, 'Where to write.', short_name='o', flag_values=flag_values)
  flags.DEFINE_integer('num_shards', 16, 'Files per split.', lower_bound=1, flag_values=flag_values)
  flags.DEFINE_enum(
    'on_error', 'fail', ['fail', 'skip'], 'What to do with bad input.', flag_values=flag_values
  )
  flags.DEFINE_bool('overwrite', False, 'Replace what is there.', flag_values=flag_values)
  flags.DEFINE_float('rate', None, 'Step size.', flag_values=flag_values)
  flags.mark_flag_as_required('output', flag_values=flag_values)


def run(*args, job=lambda flag_values, rest: None, define_flags=define, **options):
  return cli.run(define_flags, job, ['prog', *args], description='Does a thing.', **options)


def never(flag_values, rest):
  raise AssertionError('the job must not run')


def python(*args, **kwargs):
  return subprocess.run(
    [sys.executable, *args], cwd=ROOT, text=True, capture_output=True, check=False, **kwargs
  )


def test_job_gets_parsed_flags():
  seen = []
  assert (
    run(
      '--output=x',
      '--num_shards',
      '3',
      '--overwrite',
      job=lambda f, rest: seen.append(
        (f.output, f.num_shards, f.on_error, f.overwrite, f.rate, rest)
      ),
    )
    == 0
  )
  assert seen == [('x', 3, 'fail', True, None, [])]


@pytest.mark.parametrize(('result', 'code'), [(None, 0), (0, 0), (1, 1), (7, 7)])
def test_exit_code_is_the_jobs(result, code):
  assert run('--output=x', job=lambda f, rest: result) == code


@pytest.mark.parametrize(
  ('args', 'rest'),
  [
    (['--output=x'], []),
    (['--output=x', '--'], []),
    (['--output=x', '--', '--runner=A', '--output=y', 'z'], ['--runner=A', '--output=y', 'z']),
    (['--output=x', '--', 'a', '--', '--help'], ['a', '--', '--help']),
  ],
)
def test_passthrough_splits_at_the_first_bare_dashes(args, rest):
  seen = []
  assert run(*args, passthrough=True, job=lambda f, rest: seen.append((f.output, rest))) == 0
  assert seen == [('x', rest)]


@pytest.mark.parametrize(
  ('args', 'positional'),
  [
    (['a.npz', '--output=x'], ['a.npz']),
    (['b', '--output=x', 'a', '--overwrite', 'b'], ['b', 'a', 'b']),
    (['--output', 'x', '--', '--a.npz', '-h.npz'], ['--a.npz', '-h.npz']),
    (['--output=x', 'ü "b".npz', ''], ['ü "b".npz', '']),
  ],
)
def test_positional_arguments_may_stand_anywhere(args, positional):
  seen = []
  assert run(*args, positional='FILE', job=lambda f, rest: seen.append((f.output, rest))) == 0
  assert seen == [('x', positional)]


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['--output=x'], 'no FILE given; --help shows the usage'),
    (['--output=x', '--'], 'no FILE given; --help shows the usage'),
    (
      ['a.npz', '--output=x', '--num_shard=3'],
      'unknown flag --num_shard (did you mean --num_shards?); --help lists the flags',
    ),
  ],
)
def test_usage_errors_with_positional_arguments(args, message, capsys):
  assert run(*args, positional='FILE', job=never) == 2
  assert capsys.readouterr() == ('', f'error: {message}\n')


def test_help_names_positional_arguments(capsys):
  assert run('-h', positional='FILE', job=never) == 0
  assert capsys.readouterr().out.splitlines()[0] == 'usage: prog [flags] FILE...'


def test_fail_prints_one_line(capsys):
  assert cli.fail(7, 'ü\n  x') == 7
  assert capsys.readouterr() == ('', 'error: ü   x\n')


STRAY = "; flags are written --name=value, and patterns such as '*.npz' in quotes"


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (
      ['--output=x', '--num_shard=3'],
      'unknown flag --num_shard (did you mean --num_shards?); --help lists the flags',
    ),
    (['--output=x', '--zzz'], 'unknown flag --zzz; --help lists the flags'),
    (
      ['--num_shard=3'],
      'unknown flag --num_shard (did you mean --num_shards?); --help lists the flags',
    ),
    ([], 'flag --output is required'),
    (['--output'], 'Missing value for flag --output'),
    (
      ['--output=x', '--num_shards=a'],
      "flag --num_shards=a: invalid literal for int() with base 10: 'a'",
    ),
    (['--output=x', '--num_shards=0'], 'flag --num_shards=0: 0 is not a positive integer'),
    (['--output=x', '--on_error=skp'], 'flag --on_error=skp: value should be one of <fail|skip>'),
    (['a.npz', '--output=x', 'b.npz'], 'unexpected argument a.npz' + STRAY),
    (['--output=x', '--overwrite', 'true'], 'unexpected argument true' + STRAY),
    (['--output=x', '--', '--runner=A'], 'unexpected argument --runner=A' + STRAY),
  ],
)
def test_usage_error_is_one_line_and_exit_2(args, message, capsys):
  assert run(*args, job=never) == 2
  assert capsys.readouterr() == ('', f'error: {message}\n')


@pytest.mark.parametrize(
  ('args', 'hint'),
  [(['--runner=DirectRunner'], ''), (['--num_shard=3'], ' (did you mean --num_shards?)')],
)
def test_unknown_flag_with_passthrough_points_behind_the_dashes(args, hint, capsys):
  assert run('--output=x', *args, passthrough=True, job=never) == 2
  name = args[0].partition('=')[0]
  assert capsys.readouterr().err == (
    f'error: unknown flag {name}{hint}; Beam options go after a bare `--`; --help lists the flags\n'
  )


def test_all_missing_flags_are_named_at_once(capsys):
  def two(flag_values):
    for name in ('input', 'my-output'):
      flags.DEFINE_string(name, None, '', flag_values=flag_values)
      flags.mark_flag_as_required(name, flag_values=flag_values)

  assert run(define_flags=two, job=never) == 2
  assert (
    capsys.readouterr().err == 'error: flag --input is required; flag --my-output is required\n'
  )


def test_own_validator_keeps_its_message(capsys):
  def even(flag_values):
    flags.DEFINE_integer('n', 2, '', flag_values=flag_values)
    flags.register_validator('n', lambda n: n % 2 == 0, 'must be even', flag_values=flag_values)

  assert run('--n=3', define_flags=even, job=never) == 2
  assert capsys.readouterr().err == 'error: flag --n=3: must be even\n'


@pytest.mark.parametrize('flag', ['-h', '--help', '--helpfull'])
def test_help(flag, capsys):
  assert run('--num_shards=a', flag, job=never) == 0
  assert capsys.readouterr() == (
    textwrap.dedent("""\
      usage: prog [flags]

      Does a thing.

      required flags:
        --output=TEXT
            Where to write.

      flags:
        --num_shards=N
            Files per split. (default: 16)
        --on_error=fail|skip
            What to do with bad input. (default: fail)
        --[no]overwrite
            Replace what is there. (default: false)
        --rate=X
            Step size.
      """),
    '',
  )


def test_help_of_a_script_with_passthrough(capsys):
  assert (
    cli.run(lambda flag_values: None, never, ['a/b.py', '-h'], description='D.\n', passthrough=True)
    == 0
  )
  assert capsys.readouterr().out == (
    'usage: python a/b.py [flags] [-- BEAM OPTIONS]\n\nD.\n\n'
    'Options of Apache Beam go after a bare --, '
    'as in `-- --runner=DataflowRunner --region=REGION`.\n'
  )


def test_long_help_is_wrapped(capsys):
  run('-h', define_flags=lambda f: flags.DEFINE_string('a', None, 'word ' * 60, flag_values=f))
  assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_input_error_is_one_line_and_exit_1(capsys):
  def job(flag_values, rest):
    raise errors.InputError('not an npz file', path='ü\n.npz', found='<html>\n</html>')

  assert run('--output=x', job=job) == 1
  assert capsys.readouterr() == ('', 'error: ü .npz: not an npz file: found <html> </html>\n')


def test_interrupt(capsys):
  def job(flag_values, rest):
    raise KeyboardInterrupt

  assert run('--output=x', job=job) == 130
  assert capsys.readouterr().err == 'error: interrupted\n'


def test_other_exceptions_keep_their_traceback():
  def job(flag_values, rest):
    raise KeyError('a bug')

  with pytest.raises(KeyError, match='a bug'):
    run('--output=x', job=job)


def test_flags_belong_to_one_run():
  seen = []
  for value in ('1', '2'):
    assert run('--output', value, job=lambda f, rest: seen.append((f.output, f.num_shards))) == 0
  assert seen == [('1', 16), ('2', 16)]
  assert 'num_shards' not in flags.FLAGS


# The output is shorter or longer than its buffer.
@pytest.mark.parametrize('lines', [1, 100_000])
def test_closed_output_prints_no_traceback(lines):
  code = f"""
import sys
from tpu_graphs import cli
def job(flag_values, rest):
  sys.stdin.read()
  print('line\\n' * {lines})
sys.exit(cli.run(lambda flag_values: None, job, ['prog'], description=''))
"""
  with subprocess.Popen(
    [sys.executable, '-c', code],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  ) as process:
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == b''
  assert process.returncode == 141


def test_main_hands_arguments_over(monkeypatch):
  fake = types.ModuleType('fake_command')
  fake.main = lambda argv: argv
  monkeypatch.setitem(sys.modules, 'fake_command', fake)
  monkeypatch.setattr(cli, 'COMMANDS', {'fake': ('fake_command', 'does nothing')})
  assert cli.main(['/usr/bin/tpu-graphs', 'fake', '--a=1', '--', '--help']) == (
    ['tpu-graphs fake', '--a=1', '--', '--help']
  )
  monkeypatch.setattr(sys, 'argv', ['tpu-graphs', 'fake', 'b'])
  assert cli.main() == ['tpu-graphs fake', 'b']


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (
      ['trian', '--data=x'],
      'unknown command trian (did you mean train?); `tpu-graphs --help` lists the commands',
    ),
    (['--data=x'], 'unknown command --data=x; `tpu-graphs --help` lists the commands'),
    ([''], 'unknown command ; `tpu-graphs --help` lists the commands'),
  ],
)
def test_main_refuses_an_unknown_command(args, message, capsys):
  assert cli.main(['tpu-graphs', *args]) == 2
  assert capsys.readouterr() == ('', f'error: {message}\n')


def test_main_version(capsys):
  assert cli.main(['tpu-graphs', '--version']) == 0
  assert capsys.readouterr().out == f'tpu-graphs {tpu_graphs.__version__}\n'


@pytest.mark.parametrize('flag', ['-h', '--help'])
def test_main_help_lists_the_commands(flag, capsys):
  assert cli.main(['tpu-graphs', flag, 'convert']) == 0
  out, err = capsys.readouterr()
  assert err == ''
  lines = out.splitlines()
  assert lines[0] == 'usage: tpu-graphs COMMAND [flags]'
  for command, (_, summary) in cli.COMMANDS.items():
    assert any(line.split() == [command, *summary.split()] for line in lines)


def test_main_without_a_command_prints_the_help(capsys):
  assert cli.main(['tpu-graphs', '--help']) == 0
  expected = capsys.readouterr()
  assert cli.main(['tpu-graphs']) == 0
  assert capsys.readouterr() == expected


def test_module_runs_the_command():
  result = python('-m', 'tpu_graphs', 'trian')
  assert (result.returncode, result.stdout) == (2, '')
  assert result.stderr.startswith('error: unknown command trian (did you mean train?)')


@pytest.mark.slow
@pytest.mark.parametrize('command', cli.COMMANDS)
def test_every_command_has_help(command):
  env = {name: value for name, value in os.environ.items() if name != 'TF_CPP_MIN_LOG_LEVEL'}
  result = python('-m', 'tpu_graphs', command, '--help', env=env)
  assert (result.returncode, result.stderr) == (0, '')
  assert result.stdout.startswith(f'usage: tpu-graphs {command} [flags]')


@pytest.mark.parametrize(
  'statement',
  [
    'import tpu_graphs',
    'from tpu_graphs import cli',
    "from tpu_graphs import cli; cli.main(['tpu-graphs', '--help'])",
  ],
)
def test_import_is_cheap(statement):
  heavy = ('absl', 'apache_beam', 'numpy', 'tensorflow', 'tensorflow_gnn', 'tensorflow_ranking')
  result = python('-c', f'{statement}\nimport sys\nprint(sorted(set({heavy}) & set(sys.modules)))')
  assert result.stdout.splitlines()[-1] == '[]', result.stderr


def test_tensorflow_log_is_quiet_unless_asked_for():
  code = """
import os
from tpu_graphs import cli
def job(flag_values, rest):
  print(os.environ['TF_CPP_MIN_LOG_LEVEL'])
cli.run(lambda flag_values: None, job, ['p'], description='')
"""
  assert python('-c', code, env={}).stdout == '3\n'
  assert python('-c', code, env={'TF_CPP_MIN_LOG_LEVEL': '0'}).stdout == '0\n'
