"""Runs pytest on the files and options given: the main program of the targets in tests/BUILD."""

import os
import sys

import pytest


def main(args: list[str]) -> int:
  report = os.environ.get('XML_OUTPUT_FILE')  # Where Bazel wants the results.
  code = pytest.main(
    ['-p', 'no:cacheprovider', *([f'--junitxml={report}'] if report else []), *args]
  )
  # A file may hold only tests that `-m` leaves out.
  return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED and '-m' in args else int(code)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
