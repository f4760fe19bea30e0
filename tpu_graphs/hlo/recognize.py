"""Recognition of the type of a protobuf message.

The bytes do not name their type, and a file of one type may well parse as another.
"""

from __future__ import annotations

from tpu_graphs import errors
from tpu_graphs.hlo import graph
from tpu_graphs.hlo import implementations

TUNING = 'TuningData'
MODULE_TUNING = 'ModuleTuningData'
HLO = 'HloProto'
HLO_MODULE = 'HloModuleProto'

# Message types that a file of a kind may have, the most likely first; None is any kind. A program
# without runs can serve both kinds.
_TYPES_OF_KIND: dict[str | None, tuple[str, ...]] = {
  'tile': (TUNING, HLO, HLO_MODULE),
  'layout': (MODULE_TUNING, HLO, HLO_MODULE),
  None: (MODULE_TUNING, TUNING, HLO, HLO_MODULE),
}
_TUNING_TYPES = {TUNING: 'tile', MODULE_TUNING: 'layout'}
# Degrees of evidence of an HLO module that bytes show when they are parsed as a type.
_KNOWN_OPCODE, _NAME, _NOTHING = 2, 1, 0

_FIRST_TAG = 0x0A  # Field 1 with a length: every message begins with it.
_VARINT, _WITH_LENGTH = 0, 2  # Wire types.
_FIXED_SIZES = {1: 8, 5: 4}  # Wire type -> bytes of the value.


def parse(data: bytes, kind: str | None) -> tuple[str, graph.Document]:
  """Returns the name of the type of the message in `data`, and the message.

  Each type is judged by the HLO modules that appear when `data` is parsed as that type: the best
  evidence is an instruction with an opcode of the table, the next a module or computation with a
  printable name. Where no type shows evidence, the kind decides.

  Args:
    data: the serialized message.
    kind: 'tile', 'layout', or None for any type.

  Raises:
    InputError: `data` is empty, cut off, of a type that does not fit the kind, or not such a
      message at all.
  """
  if not data:
    raise errors.InputError('empty file', found='0 bytes', expected=_expected(kind))
  wanted = _TYPES_OF_KIND[kind]
  best, document, evidence = '', None, _NOTHING
  # An HloProto looks like tuning data without runs, and tuning data looks much like an HloProto.
  # Tuning data is tried first; `_without_runs` then finds the HloProto.
  for name in dict.fromkeys((wanted[0], MODULE_TUNING, TUNING, HLO, HLO_MODULE)):
    candidate = implementations.parse(name, data)
    if candidate is None:
      continue
    found = _evidence(candidate)
    is_better = found > evidence
    if not is_better and kind and name == wanted[0]:
      is_better = _holds_module(name, candidate)
    if is_better:
      best, document, evidence = name, candidate, found
    if evidence == _KNOWN_OPCODE:
      break
  if document is None:
    raise _not_recognized(data, kind)
  if best == MODULE_TUNING and (hlo := _without_runs(document, data)) is not None:
    best, document = HLO, hlo
  if best not in wanted:
    raise errors.InputError(
      'file of another kind',
      found=best,
      expected=_expected(kind),
      fix=f'it belongs to a {_TUNING_TYPES[best]} collection or run',
    )
  return best, document


def _expected(kind: str | None) -> str:
  return ' or '.join(_TYPES_OF_KIND[kind])


def _holds_module(name: str, document: graph.Document) -> bool:
  return document.num_tunings > 0 and (name == TUNING or document.tuning(0).has_module)


def _evidence(document: graph.Document) -> int:
  if document.knows_opcode:
    return _KNOWN_OPCODE
  if any(name.isprintable() for name in document.names()):
    return _NAME
  return _NOTHING


def _without_runs(document: graph.Document, data: bytes) -> graph.Document | None:
  """Returns the HloProto that was parsed as a ModuleTuningData, or None if it is tuning data.

  It is an HloProto if it has no runs, fingerprint or configurable ops, or if its only run is a
  buffer assignment, which has the same field number.

  Args:
    document: the message, parsed as a ModuleTuningData.
    data: the serialized message.
  """
  tuning = document.tuning(0)
  if tuning.run_flags.size > 1 or tuning.fingerprint or tuning.config_nodes.size:
    return None
  if not tuning.run_flags.size:
    return document  # Both types have the module in the same field.
  hlo = implementations.parse(HLO, data)
  return hlo if hlo is not None and hlo.num_buffer_allocations else None


def _not_recognized(data: bytes, kind: str | None) -> errors.InputError:
  foreign = errors.looks_like(data[:100])
  if foreign:
    return errors.InputError('not a protobuf', found=foreign, expected=_expected(kind))
  end = _end_of_last_field(data)
  if end > len(data) and data[0] == _FIRST_TAG:
    return errors.InputError(
      'file is cut off',
      found=f'{len(data)} bytes',
      expected=f'at least {end} bytes',
      fix='copy or download it again',
    )
  return errors.InputError(
    'not a protobuf of a known type',
    found=f'{len(data)} bytes that begin with {data[:16]!r}',
    expected=_expected(kind),
  )


def _end_of_last_field(data: bytes) -> int:
  """Returns the end of the last field, beyond `data` if it is cut off; 0 if there are no fields."""
  at = 0
  while at < len(data):
    tag, at = _varint(data, at)
    wire_type = tag & 7
    if wire_type in _FIXED_SIZES:
      at += _FIXED_SIZES[wire_type]
    elif wire_type in (_VARINT, _WITH_LENGTH):
      value, at = _varint(data, at)
      at += value if wire_type == _WITH_LENGTH else 0
    else:
      return 0
  return at


def _varint(data: bytes, at: int) -> tuple[int, int]:
  """Returns the number at `at` and the offset of its end, beyond `data` if it is cut off."""
  value = 0
  for shift in range(0, 70, 7):  # At most 10 bytes.
    if at >= len(data):
      return 0, len(data) + 1
    value |= (data[at] & 0x7F) << shift
    at += 1
    if data[at - 1] < 0x80:
      break
  return value, at
