"""GraphTensor schemas of the records, the contract with other programs.

TensorFlow is imported only where a schema is parsed.
"""

from __future__ import annotations

import importlib.resources
from typing import TYPE_CHECKING

from tpu_graphs import errors
from tpu_graphs.modules import module as module_lib

if TYPE_CHECKING:
  from tpu_graphs.compat import tfgnn

_FEAT = '    features { key: "feat" value { dtype: DT_FLOAT shape { dim { size: 140 } } } }\n'
_EXTRA_FEAT = """\
    # Features of a user's own; `extra_features` in manifest.json names the columns.
    features {{ key: "extra_feat" value {{ dtype: DT_FLOAT shape {{ dim {{ size: {num_extra} }} }} }} }}
"""


def text(kind: str, *, num_extra: int = 0) -> str:
  """The text proto of the schema.

  Args:
    kind: 'tile' or 'layout'.
    num_extra: number of columns of `extra_feat`, without which there is no such feature.

  Raises:
    InputError: unknown kind.
  """
  if kind not in module_lib.KINDS:
    raise errors.InputError(
      'unknown kind', found=repr(kind), expected=' or '.join(module_lib.KINDS)
    )
  base = (
    importlib.resources.files('tpu_graphs')
    .joinpath(f'schemas/{kind}.pbtxt')
    .read_text(encoding='utf-8')
  )
  return base.replace(_FEAT, _FEAT + _EXTRA_FEAT.format(num_extra=num_extra)) if num_extra else base


def path(kind: str) -> str:
  """Path of the schema file of datasets without extra features, for `tfgnn.read_schema`."""
  text(kind)  # Refuses an unknown kind.
  return str(importlib.resources.files('tpu_graphs').joinpath(f'schemas/{kind}.pbtxt'))


def graph_schema(kind: str, *, num_extra: int = 0) -> tfgnn.GraphSchema:
  """The parsed `text`."""
  from google.protobuf import text_format

  from tpu_graphs.compat import tfgnn

  return text_format.Parse(text(kind, num_extra=num_extra), tfgnn.GraphSchema())


def graph_spec(kind: str, *, num_extra: int = 0) -> tfgnn.GraphTensorSpec:
  """The `tfgnn.GraphTensorSpec` of one record, as `tfgnn.parse_example` takes it; see `text`."""
  from tpu_graphs.compat import tfgnn

  return tfgnn.create_graph_spec_from_schema_pb(graph_schema(kind, num_extra=num_extra))
