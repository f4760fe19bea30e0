"""Learns from measured XLA programs which compiler configurations are fast."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = '0.1.0'


def __getattr__(name: str) -> Any:
  """`tpu_graphs.rank` is `baselines.serving.ranking.rank`, loaded with TensorFlow when it is
  first asked for.
  """
  if name == 'rank':
    return importlib.import_module('baselines.serving.ranking').rank
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
