"""Dataset directories, as `convert` writes them: records, schema, statistics, manifest, checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpu_graphs import _lazy

if TYPE_CHECKING:
  from tpu_graphs.dataset.directory import DatasetDirectory as DatasetDirectory
  from tpu_graphs.dataset.directory import open_directory as open_directory
  from tpu_graphs.dataset.validation import validate as validate

__all__ = [
  'DatasetDirectory',
  'export',
  'manifest',
  'open_directory',
  'records',
  'schema',
  'statistics',
  'validate',
]
_HOMES = {
  'DatasetDirectory': 'tpu_graphs.dataset.directory',  # This module loads TensorFlow.
  'open_directory': 'tpu_graphs.dataset.directory',
  'validate': 'tpu_graphs.dataset.validation',
}
__getattr__, __dir__ = _lazy.attach(__name__, __all__, _HOMES)
