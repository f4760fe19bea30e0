"""HLO text -> HLO protobuf, via the parser of an installed jaxlib.

XLA's parser reads only text of its own version: it refuses a whole file because of one newer
attribute or opcode, and ends the process for some mistakes in a text. So the parser gets only the
parts that graphs depend on. All else is left out, or written in a form that the parser does not
check. This also makes the result the same with every version of jaxlib.
"""

from __future__ import annotations

from collections.abc import Callable
import importlib
import re
from typing import Any

from google.protobuf import unknown_fields

from tpu_graphs import errors
from tpu_graphs.hlo import protos
from tpu_graphs.modules import features

# Modules of jaxlib that may hold the parser, the newest version of jaxlib first.
_PARSERS = ('jaxlib._hlo', 'jaxlib._jax', 'jaxlib.xla_extension')

_STRING = r'"(?:[^"\\]|\\.)*"'
_COMMENT = r'/\*.*?\*/|//[^\n]*'
_SPACE = rf'(?:\s|{_COMMENT})*'
_NAME = r'%?[\w.\-]+'
_STRING_OR_COMMENT = re.compile(f'{_STRING}|{_COMMENT}', re.DOTALL)
_TOKEN = re.compile(rf'{_STRING}|{_COMMENT}|[()\[\]{{}},\n]', re.DOTALL)
_MAX_SHOWN = 150  # Number of characters of a line that an error shows.
# Largest depth of nested brackets. The parser calls itself for each bracket, and ends the process
# when the stack is full.
_MAX_DEPTH = 100


def _pattern(pattern: str) -> re.Pattern[str]:
  return re.compile(_SPACE + pattern.replace(' ', _SPACE), re.DOTALL)


_BINARY = re.compile(r'[\x00-\x08\x0e-\x1f]')
_NOTHING = _pattern('')
_HEADER = _pattern(rf'HloModule\s+({_NAME})')
_COMPUTATION = _pattern(rf'((?:ENTRY\s+)?{_NAME}) ')
_TABLE_ROW = _pattern(r'\d+\s')
_ARROW = _pattern('-> ')
_INSTRUCTION = _pattern(rf'((?:ROOT\s+)?{_NAME}) = ')
_ARRAY_SHAPE = re.compile(r'\w+\[[^\]]*\](?:\{[^{}]*\})?')
_OPCODE = _pattern(r'([a-zA-Z][\w\-]*) (?=\()')
_ATTRIBUTE = _pattern(r', ([\w\-]+) = ')
_OPEN = _pattern(r'\{')
_CLOSE = _pattern(r'\}')
_END = _pattern(r'\Z')
_NUMBER = re.compile(r'\s*\d{1,100}\s*')
_ASYNCHRONOUS = re.compile(r'(.+)(-start|-update|-done)')

# Attributes that an op keeps beside its name, shape and operands: those that features need, those
# that the parser requires, and the dimensions of a dot. An op that is not listed here, or has none
# of the listed attributes, is written as a custom-call.
_WINDOW = ('window', 'dim_labels')
_GROUPS = ('feature_group_count', 'batch_group_count')
_KEPT = {
  'all-gather': ('dimensions',),
  'all-gather-start': ('dimensions',),
  'all-to-all': ('dimensions',),
  'async-start': ('calls',),
  'async-update': (),
  'async-done': (),
  'broadcast': ('dimensions',),
  'collective-permute': ('source_target_pairs', 'slice_sizes'),
  'collective-permute-start': ('source_target_pairs', 'slice_sizes'),
  'concatenate': ('dimensions',),
  'convolution': (*_WINDOW, *_GROUPS),
  'custom-call': (*_WINDOW, *_GROUPS, 'custom_call_target', 'called_computations', 'to_apply'),
  'dot': ('lhs_batch_dims', 'lhs_contracting_dims', 'rhs_batch_dims', 'rhs_contracting_dims'),
  'dynamic-slice': ('dynamic_slice_sizes',),
  'get-dimension-size': ('dimensions',),
  'set-dimension-size': ('dimensions',),
  'iota': ('iota_dimension',),
  'map': ('dimensions', 'to_apply'),
  'pad': ('padding',),
  'parameter': (),
  'reduce': ('dimensions', 'to_apply'),
  'reduce-scatter': ('dimensions', 'to_apply'),
  'reduce-window': ('window', 'to_apply'),
  'reshape': ('inferred_dimension',),
  'reverse': ('dimensions',),
  'select-and-scatter': ('window', 'select', 'scatter'),
  'slice': ('slice',),
  'sort': ('dimensions', 'is_stable', 'to_apply'),
  'transpose': ('dimensions',),
}
_COMPUTATIONS = (
  'to_apply',
  'calls',
  'called_computations',
  'body',
  'condition',
  'branch_computations',
  'true_computation',
  'false_computation',
)
# Prefix of the true opcode in the target of a custom-call that stands for another op.
_TRAVELLER = 'tpu_graphs.opcode:'
_TARGET_FIELD = 28  # `custom_call_target` of an HloInstructionProto.

_LAYOUT = re.compile(r'\{([^:{}]*)[^{}]*\}')
_ELEMENT_TYPE = re.compile(r'\w+(?=\[)')
_TYPES = frozenset(name.removesuffix('_TYPE').lower() for name in protos.ELEMENT_TYPES.values())
_OTHER_TYPE = 'f8e5m2'  # Stands for every type that is not listed: none of them has a feature.


def is_text(data: bytes) -> bool:
  """Returns True if `data` is HLO text, which may begin with comments."""
  head = data[:10_000].decode('utf-8-sig', errors='replace')
  return bool(_HEADER.match(head)) and not _BINARY.search(head)


def to_proto(data: bytes, *, name: str = '<bytes>') -> bytes:
  """Parses HLO text.

  The result holds the fields that features need, and the dimension numbers of dots. Names are
  kept; ids are assigned again.

  Args:
    data: the text of a whole module.
    name: the name of the file, for messages.

  Returns:
    A serialized HloModuleProto.

  Raises:
    InputError: jaxlib is not installed, or `data` is not HLO text that can be parsed.
  """
  with errors.in_file(name):
    parse = _parser()
    source = data.decode('utf-8-sig', errors='replace')
    simplified = _simplify(source)
    try:
      module = parse(simplified)
    except Exception as error:  # Its class depends on the version of jaxlib.
      raise _refused(str(error), source) from error
    return _restore_opcodes(module.as_serialized_hlo_module_proto())


def _parser() -> Callable[[str], Any]:
  for name in _PARSERS:
    try:
      return importlib.import_module(name).hlo_module_from_text
    except (ImportError, AttributeError):
      continue
  raise errors.InputError(
    'HLO text cannot be read without jaxlib',
    expected='an HLO protobuf',
    fix="pip install 'tpu_graphs[jax]', or write the program as a protobuf: XLA does so with "
    '--xla_dump_hlo_as_proto, TensorFlow with experimental_get_compiler_ir and stage '
    "'hlo_serialized'",
  )


def _refused(message: str, source: str) -> errors.InputError:
  """Returns the error for the first fault in the parser's message.

  Args:
    message: the parser's message, with line numbers of `source`.
    source: the text.
  """
  for line, fault in re.findall(r'was parsing (\d+):\d+: error: (.*)', message):
    if not fault.endswith(':'):  # A fault with a colon at its end only introduces the next one.
      return _error(source, int(line), found=fault)
  return _error(source, None, found=' '.join(message.split()))


def _error(
  source: str, line: int | None, *, found: str | None = None, expected: str | None = None
) -> errors.InputError:
  text = ''
  if line:
    [text] = source.split('\n')[line - 1 : line]
  shown = repr(text.strip()[:_MAX_SHOWN])
  return errors.InputError(
    'HLO text cannot be parsed',
    where=f'line {line}' if line else None,
    found=f'{found[:_MAX_SHOWN]} in {shown}' if found else shown,
    expected=expected,
  )


class _Scanner:
  """A position in a text that moves forward as parts are read."""

  def __init__(self, text: str):
    self.text = text
    self.at = 0

  def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
    found = pattern.match(self.text, self.at)
    if found:
      self.at = found.end()
    return found

  def expect(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
    return self.match(pattern) or self._fail(what)

  def until(self, stops: str) -> str:
    """Reads up to a character of `stops` outside of brackets, or an unmatched closing bracket."""
    depth, start = 0, self.at
    for token in _TOKEN.finditer(self.text, start):
      self.at = token.start()
      if token[0] in ('(', '[', '{'):
        depth += 1
        if depth > _MAX_DEPTH:
          self._fail(f'at most {_MAX_DEPTH} brackets in each other')
      elif token[0] in (')', ']', '}'):
        depth -= 1
        if depth < 0:
          break
      elif depth == 0 and token[0] in stops:
        break
    else:
      self.at = len(self.text)
    return self.text[start : self.at]

  def group(self) -> str:
    """Reads a pair of brackets with its content."""
    start = self.at
    self.at += 1
    self.until('')
    if self.at == len(self.text):
      self._fail(f'the end of the {self.text[start]}')
    self.at += 1
    return self.text[start : self.at]

  def shape(self) -> str | None:
    if self.text.startswith('(', self.at):
      return self.group()
    found = self.match(_ARRAY_SHAPE)
    return found and found[0]

  def attributes(self) -> dict[str, str]:
    found = {}
    while name := self.match(_ATTRIBUTE):
      found[name[1]] = _without_comments(self.until(',\n')).strip()
    return found

  def _fail(self, expected: str) -> Any:
    self.match(_NOTHING)
    raise _error(self.text, self.text.count('\n', 0, self.at) + 1, expected=expected)


def _simplify(source: str) -> str:
  """Reduces the module in `source` to the parts that graphs depend on; each part keeps its line."""
  scanner = _Scanner(source)
  pieces: list[str] = []
  done = 0

  def write(piece: str) -> None:
    nonlocal done
    missing_lines = source.count('\n', done, scanner.at) - piece.count('\n')
    pieces.append('\n' * missing_lines + piece + ' ')
    done = scanner.at

  name = scanner.expect(_HEADER, 'HloModule and a name')[1]
  scanner.attributes()
  write(f'HloModule {name}')
  while len(pieces) == 1 or not scanner.match(_END):  # A module has at least one computation.
    head = scanner.expect(_COMPUTATION, 'a computation')[1]
    if source[scanner.at : scanner.at + 1].isdigit():
      # This is a table of source files that metadata refers to, not a computation.
      while scanner.match(_TABLE_ROW):
        scanner.until('\n')
      continue
    if scanner.shape():  # The shapes of the parameters may be left out.
      scanner.expect(_ARROW, '->')
      scanner.shape()
    scanner.expect(_OPEN, '{')
    write(f'{head} {{')
    parameters: list[int] = []
    while not scanner.match(_CLOSE):
      write(_simplify_instruction(scanner, parameters))
    # The parser would end the process because of other numbers.
    if sorted(parameters) != list(range(len(parameters))):
      raise errors.InputError(
        'parameters not numbered one by one',
        where=f'computation {head}',
        found=sorted(parameters),
        expected=f'0 to {len(parameters) - 1}',
      )
    scanner.attributes()  # A computation may name the thread that runs it.
    write('}')
  return ''.join(pieces)


def _simplify_instruction(scanner: _Scanner, parameters: list[int]) -> str:
  """Reads and reduces the next instruction; adds the number of a parameter to `parameters`."""
  start = scanner.at
  head = scanner.expect(_INSTRUCTION, 'an instruction')[1]
  shape = scanner.shape()
  opcode = scanner.expect(_OPCODE, 'an opcode')[1]
  operands = _without_comments(scanner.group()[1:-1])
  attributes = scanner.attributes()
  if opcode == 'parameter' and _NUMBER.fullmatch(operands):
    parameters.append(int(operands))
  if shape is None:  # The parser infers the shape, for which it may need everything.
    return scanner.text[start : scanner.at]

  # The opcode of an asynchronous op is the opcode that it runs, and a step such as '-start'.
  step = ''
  if opcode not in features.opcodes() and (found := _ASYNCHRONOUS.fullmatch(opcode)):
    opcode, step = found.groups()
  names = _KEPT.get(opcode)
  kept = {name: attributes[name] for name in names or () if name in attributes}
  if names is None or (names and not kept and not step):
    operands = '' if opcode == 'constant' else operands
    kept = {name: attributes[name] for name in _WINDOW if name in attributes}
    called = [attributes[name].strip('{}') for name in _COMPUTATIONS if name in attributes]
    if called:
      kept['called_computations'] = f'{{{", ".join(called)}}}'
    if step in ('', '-start'):
      kept['custom_call_target'] = f'"{_TRAVELLER}{opcode}"'
    opcode = 'custom-call'
  parts = [f'{head} = {_simplify_shape(shape)} {opcode}{step}({_names(operands)})']
  parts += [f'{name}={value}' for name, value in kept.items()]
  return ', '.join(parts)


def _without_comments(text: str) -> str:
  return _STRING_OR_COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else '', text)


def _simplify_shape(shape: str) -> str:
  """Reduces a shape to dimensions, their order in memory, and element types that are known."""

  def order_only(layout: re.Match[str]) -> str:
    return f'{{{layout[1]}}}' if layout[1] else ''

  def known_type(name: re.Match[str]) -> str:
    return name[0] if name[0] in _TYPES else _OTHER_TYPE

  shape = _LAYOUT.sub(order_only, _without_comments(shape))
  return _ELEMENT_TYPE.sub(known_type, shape)


def _names(operands: str) -> str:
  """Returns the operands without their shapes."""
  scanner = _Scanner(operands)
  names = []
  while scanner.at < len(operands):
    operand = scanner.until(',').strip()
    scanner.at += 1
    if operand and not operand.endswith(')'):  # A nested instruction ends with a bracket: it stays.
      operand = operand.split()[-1]
    names.append(operand)
  return ', '.join(names)


def _restore_opcodes(serialized: bytes) -> bytes:
  """Restores the opcodes of ops that were written as custom-calls."""
  module = protos.HloModuleProto.FromString(serialized)
  for computation in module.computations:
    for instruction in computation.instructions:
      if instruction.opcode == 'custom-call' and (opcode := _opcode_of_traveller(instruction)):
        instruction.opcode = opcode
        for name in _GROUPS:  # The parser sets these on every custom-call.
          instruction.ClearField(name)
  return module.SerializeToString()


def _opcode_of_traveller(instruction: Any) -> str | None:
  # The stub of protobuf lacks this class.
  for field in unknown_fields.UnknownFieldSet(instruction):  # type: ignore[attr-defined]
    if field.field_number == _TARGET_FIELD and field.data.startswith(_TRAVELLER.encode()):
      return field.data[len(_TRAVELLER) :].decode()
  return None
