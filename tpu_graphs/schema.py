"""GraphTensor schemas of the records, the contract with other programs.

TensorFlow is imported only where a schema is parsed.
"""

from __future__ import annotations

import importlib.resources
import os
from typing import TYPE_CHECKING

from tpu_graphs import errors
from tpu_graphs import module as module_lib

if TYPE_CHECKING:
  import tensorflow_gnn as tfgnn


def text(kind: str) -> str:
  """The text proto of the schema; `kind` is 'tile' or 'layout'.

  Raises:
    InputError: unknown kind.
  """
  if kind not in module_lib.KINDS:
    raise errors.InputError('unknown kind', found=repr(kind), expected=' or '.join(module_lib.KINDS))
  return importlib.resources.files('tpu_graphs').joinpath(f'schemas/{kind}.pbtxt').read_text(encoding='utf-8')


def path(kind: str) -> str:
  """Path of the schema file, for `tfgnn.read_schema`."""
  text(kind)  # Refuses an unknown kind.
  return os.path.join(os.path.dirname(__file__), 'schemas', f'{kind}.pbtxt')


def graph_schema(kind: str) -> tfgnn.GraphSchema:
  """The parsed `tfgnn.GraphSchema` of a kind."""
  from google.protobuf import text_format
  import tensorflow_gnn as tfgnn
  return text_format.Parse(text(kind), tfgnn.GraphSchema())


def graph_spec(kind: str) -> tfgnn.GraphTensorSpec:
  """The `tfgnn.GraphTensorSpec` of one record, as `tfgnn.parse_example` takes it."""
  import tensorflow_gnn as tfgnn
  return tfgnn.create_graph_spec_from_schema_pb(graph_schema(kind))
