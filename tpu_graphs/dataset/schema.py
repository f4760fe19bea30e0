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
_EXTRA_FEAT = (
  "    # Features of a user's own; `extra_features` in manifest.json names the columns.\n"
  '    features {{ key: "extra_feat" '
  'value {{ dtype: DT_FLOAT shape {{ dim {{ size: {num_extra} }} }} }} }}\n'
)


def text(kind: str, *, num_extra: int = 0) -> str:
  """Returns the text proto of the schema.

  Args:
    kind: 'tile' or 'layout'.
    num_extra: number of columns of `extra_feat`; the schema has this feature only if it is > 0.

  Raises:
    InputError: the kind is unknown.
  """
  if kind not in module_lib.KINDS:
    raise errors.InputError(
      'unknown kind', found=repr(kind), expected=' or '.join(module_lib.KINDS)
    )
  file = importlib.resources.files('tpu_graphs').joinpath(f'schemas/{kind}.pbtxt')
  base = file.read_text(encoding='utf-8')
  if not num_extra:
    return base
  extra_feat = _EXTRA_FEAT.format(num_extra=num_extra)
  return base.replace(_FEAT, _FEAT + extra_feat)


def path(kind: str) -> str:
  """Returns the path of the schema without extra features, for `tfgnn.read_schema`."""
  text(kind)  # Refuses an unknown kind.
  return str(importlib.resources.files('tpu_graphs').joinpath(f'schemas/{kind}.pbtxt'))


def graph_schema(kind: str, *, num_extra: int = 0) -> tfgnn.GraphSchema:
  """Returns the schema as a proto, parsed from `text`."""
  from google.protobuf import text_format

  from tpu_graphs.compat import tfgnn

  return text_format.Parse(text(kind, num_extra=num_extra), tfgnn.GraphSchema())


def graph_spec(kind: str, *, num_extra: int = 0) -> tfgnn.GraphTensorSpec:
  """Returns the spec of one record, as `tfgnn.parse_example` takes it; see `text`."""
  from tpu_graphs.compat import tfgnn

  return tfgnn.create_graph_spec_from_schema_pb(graph_schema(kind, num_extra=num_extra))
