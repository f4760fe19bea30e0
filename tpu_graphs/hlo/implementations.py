"""Choice of the extractor's implementation: the native extension if it was built, else Python."""

from __future__ import annotations

import functools
import logging
import os
from types import ModuleType

from tpu_graphs import errors
from tpu_graphs.hlo import graph
from tpu_graphs.hlo import twin

NATIVE, PYTHON = 'native', 'python'
VARIABLE = 'TPU_GRAPHS_HLO'  # Environment variable that names the implementation to use.

_LOG = logging.getLogger(__name__)


def implementation() -> str:
  """Returns 'native' or 'python', the implementation that extracts graphs in this process.

  Raises:
    InputError: the environment variable names an implementation that is not available.
  """
  return PYTHON if _active() is twin else NATIVE


def parse(type_name: str, data: bytes) -> graph.Document | None:
  """Parses `data` as a message of the type; returns None if `data` is not such a message."""
  return _active().parse(type_name, data)


@functools.cache
def _active() -> ModuleType:
  wanted = os.environ.get(VARIABLE, '')
  if wanted not in ('', NATIVE, PYTHON):
    raise errors.InputError(
      'unknown implementation',
      where=f'environment variable {VARIABLE}',
      found=wanted,
      expected=f'{NATIVE} or {PYTHON}',
    )
  if wanted == PYTHON:
    return twin
  try:
    from tpu_graphs.hlo import native
  except ImportError as error:
    if wanted == NATIVE:
      raise errors.InputError(
        'native extension missing',
        found=error,
        fix='install the package where a C++ compiler is found',
      ) from error
    _LOG.warning(
      'HLO is read in Python, many times slower than with the native extension, which was not '
      'built (%s); reinstall the package where a C++ compiler is found',
      error,
    )
    return twin
  return native
