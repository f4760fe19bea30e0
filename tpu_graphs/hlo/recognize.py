"""Which protobuf message is this? Bytes carry no type, and a file of one type may well parse as another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf import message as protobuf_message

from tpu_graphs import errors
from tpu_graphs import features
from tpu_graphs.hlo import protos

TUNING = 'TuningData'
MODULE_TUNING = 'ModuleTuningData'
HLO = 'HloProto'
HLO_MODULE = 'HloModuleProto'

_CLASSES = {TUNING: protos.TuningData, MODULE_TUNING: protos.ModuleTuningData, HLO: protos.HloProto,
            HLO_MODULE: protos.HloModuleProto}
# What a file of a kind may be, the most likely first; None is any kind.
_TYPES_OF_KIND: dict[str | None, tuple[str, ...]] = {
    'tile': (TUNING,),
    'layout': (MODULE_TUNING, HLO, HLO_MODULE),
    None: (MODULE_TUNING, TUNING, HLO, HLO_MODULE),
}
# How other files start that are given by mistake -> what they are.
_FIX_OF_TEXT = "serialize the module instead, in TensorFlow by experimental_get_compiler_ir with stage 'hlo_serialized'"

# How much of an HLO module shows when bytes are parsed as a type.
_KNOWN_OPCODE, _NAME, _NOTHING = 2, 1, 0

_FIRST_TAG = 0x0A  # Field 1 with a length: each of the messages begins with it.
_VARINT, _WITH_LENGTH = 0, 2  # Wire types.
_FIXED_SIZES = {1: 8, 5: 4}  # Wire type -> bytes of the value.


def parse(data: bytes, kind: str | None) -> tuple[str, Any]:
  """The name of the type of the message in `data`, and the message.

  A type counts by what of an HLO module shows when `data` is parsed as it: instructions with opcodes of the table, or
  else modules and computations with printable names. Where nothing shows in any type, the kind decides.

  Args:
    data: the serialized message.
    kind: 'tile', 'layout', or None for any type.

  Raises:
    InputError: `data` is empty, cut off, of a type that does not fit the kind, or no such message at all.
  """
  if not data:
    raise errors.InputError('empty file', found='0 bytes', expected=_expected(kind))
  wanted = _TYPES_OF_KIND[kind]
  best, message, evidence = '', None, _NOTHING
  for name in wanted + tuple(name for name in _CLASSES if name not in wanted):
    candidate = _try(name, data)
    found = _NOTHING if candidate is None else _evidence(name, candidate)
    if found > evidence or (candidate is not None and kind and name == wanted[0] and _holds_module(name, candidate)):
      best, message, evidence = name, candidate, found
    if evidence == _KNOWN_OPCODE:
      break
  if message is None:
    raise _not_recognized(data, kind)
  if best == MODULE_TUNING and (hlo := _with_buffers(message, data)) is not None:
    best, message = HLO, hlo
  if best not in wanted:
    fitting = next(other for other, types in _TYPES_OF_KIND.items() if best in types)
    raise errors.InputError('file of another kind', found=best, expected=_expected(kind),
                            fix=f'it belongs to a {fitting} collection or run')
  return best, message


def _expected(kind: str | None) -> str:
  return ' or '.join(_TYPES_OF_KIND[kind])


def _try(name: str, data: bytes) -> Any:
  try:
    return _CLASSES[name].FromString(data)
  except (protobuf_message.DecodeError, UnicodeDecodeError, RecursionError):  # The latter two: protobuf in pure Python.
    return None


def _holds_module(name: str, message: Any) -> bool:
  return next(_modules(name, message), None) is not None


def _modules(name: str, message: Any) -> Iterator[Any]:
  if name == TUNING:
    yield from (tuning.module for tuning in message.modules)
  elif name == MODULE_TUNING and message.HasField('module'):
    yield message.module
  elif name == HLO and message.HasField('hlo_module'):
    yield message.hlo_module
  elif name == HLO_MODULE:
    yield message


def _evidence(type_name: str, message: Any) -> int:
  opcodes = features.opcodes()
  evidence = _NOTHING
  for module in _modules(type_name, message):
    for computation in module.computations:
      if any(instruction.opcode in opcodes for instruction in computation.instructions):
        return _KNOWN_OPCODE
    names = [module.name, *(computation.name for computation in module.computations)]
    if any(name and name.isprintable() for name in names):
      evidence = _NAME
  return evidence


def _with_buffers(message: Any, data: bytes) -> Any:
  """The HloProto in `data` if what looks like the only run of a ModuleTuningData is in truth its buffer assignment."""
  if len(message.runs) != 1 or message.fingerprint or message.config_index_to_node:
    return None
  hlo = _try(HLO, data)
  return hlo if hlo is not None and hlo.buffer_assignment.buffer_allocations else None


def _not_recognized(data: bytes, kind: str | None) -> errors.InputError:
  foreign = errors.looks_like(data[:100])
  if foreign:
    fix = _FIX_OF_TEXT if data.lstrip().startswith(b'HloModule') else None
    return errors.InputError('not a protobuf', found=foreign, expected=_expected(kind), fix=fix)
  end = _end_of_last_field(data)
  if end > len(data) and data[0] == _FIRST_TAG:
    return errors.InputError('file is cut off', found=f'{len(data)} bytes', expected=f'at least {end} bytes',
                             fix='copy or download it again')
  return errors.InputError('not a protobuf of a known type', found=f'{len(data)} bytes that begin with {data[:16]!r}',
                           expected=_expected(kind))


def _end_of_last_field(data: bytes) -> int:
  """Where the last field ends, beyond the data where they are cut off; 0 if they are no fields."""
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
  """The number that starts at `at`, and where it ends: beyond the data where they are cut off in it."""
  value = 0
  for shift in range(0, 70, 7):  # At most 10 bytes.
    if at >= len(data):
      return 0, len(data) + 1
    value |= (data[at] & 0x7F) << shift
    at += 1
    if data[at - 1] < 0x80:
      break
  return value, at
