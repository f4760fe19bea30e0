"""Pictures of modules: text for Graphviz, and SVG.

```
text = drawing.dot(module)
pathlib.Path('module.svg').write_text(drawing.svg(text), encoding='utf-8')
```
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence
import dataclasses
import functools
import html
import subprocess

import numpy as np

from tpu_graphs import errors
from tpu_graphs import terminal
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.views import summary

MAX_OPS = 300

_CALLS = ('call', 'conditional', 'while')
_COSTLY = ('cholesky', 'convolution', 'custom-call', 'dot', 'fft', 'sort', 'triangular-solve')
_COLLECTIVES = ('all-gather', 'all-reduce', 'all-to-all', 'collective-permute', 'reduce-scatter')
_SOURCES = ('constant', 'iota', 'parameter')

_ORANGE, _BLUE, _GREY, _WHITE, _YELLOW = '#ffcc80', '#bbdefb', '#eeeeee', '#ffffff', '#fffde7'
_LEGEND = {
  _ORANGE: 'configurable',
  _BLUE: 'costly',
  _GREY: 'input or constant',
  _WHITE: 'other op',
  _YELLOW: 'several ops',
}
_NUM_OPCODES = 3  # Number of opcodes that a box of several ops names.
# Computations of at most so many ops are drawn in full, larger ones without landmarks in as many
# bands.
_FEW = 30


@dataclasses.dataclass(frozen=True, eq=False)
class _Graph:
  """A module as it is drawn.

  Attributes:
    opcode: names, object [N].
    computation: int64 [N], from 0 without gaps.
    entry: the largest computation that no op calls; -1 if ops call all computations.
    is_root: bool [N].
    operands: int64 [E1, 2], rows (producer, consumer) within a computation, consumers ascending.
    calls: int64 [E2, 2], rows (caller, root of the called computation).
    configurable: bool [N].
    landmark: bool [N], ops that a large picture keeps: the configurable ops, or the costly ops if
      no op is configurable, and the ops that call computations with landmarks.
  """

  opcode: np.ndarray
  computation: np.ndarray
  entry: int
  is_root: np.ndarray
  operands: np.ndarray
  calls: np.ndarray
  configurable: np.ndarray
  landmark: np.ndarray


def _graph(module: module_lib.Module) -> _Graph:
  """Returns a module as it is drawn."""
  names = np.array(features.opcode_names(), object)
  if len(module.unknown_opcodes) == 1:
    names[features.UNKNOWN_OPCODE] = next(iter(module.unknown_opcodes))
  opcode = names[module.node_opcode]
  computation = np.unique(summary.computation_of_op(module), return_inverse=True)[1]
  edges = module.edge_index[np.argsort(module.edge_index[:, 0], kind='stable')]
  within = computation[edges[:, 0]] == computation[edges[:, 1]]
  configurable = np.zeros(module.num_ops, bool)
  if module.node_config_ids is not None:
    configurable[module.node_config_ids] = True
  calls = edges[~within]
  landmark = configurable.copy() if configurable.any() else np.isin(opcode, _COSTLY)
  while True:
    calls_landmarks = np.isin(computation[calls[:, 1]], computation[landmark])
    callers = calls[calls_landmarks, 0]
    if landmark[callers].all():
      break
    landmark[callers] = True
  uncalled = computation[~np.isin(computation, computation[calls[:, 1]])]
  return _Graph(
    opcode=opcode,
    computation=computation,
    entry=int(np.bincount(uncalled).argmax()) if uncalled.size else -1,
    is_root=module.node_feat[:, _columns()['is_root']] == 1,
    operands=edges[within, ::-1],
    calls=calls,
    configurable=configurable,
    landmark=landmark,
  )


def dot(module: module_lib.Module, *, max_ops: int = MAX_OPS) -> str:
  """Returns the graph of a module as DOT text, with computations as clusters.

  Arrows lead from producer to consumer; dashed arrows lead from an op to the root of the
  computation that it calls. A module with more than `max_ops` ops is drawn with less detail: the
  computation that a fusion or a reduction applies becomes a part of its op. If that is not enough,
  each remaining computation becomes one box. Then computations are opened as long as there are not
  more than `max_ops` boxes: into landmarks, such as configurable ops or convolutions, with one box
  for the ops between them, or into bands of similar depth. In opened computations, an input has one
  arrow, to its first use, and results have none.
  """
  graph = _graph(module)
  boxes = _boxes(graph, max_ops)
  operands, operand_counts, notes = _operand_arrows(graph, boxes)
  # Calls of a computation that is drawn inside an op have no arrows.
  has_own_box = graph.computation[boxes.op[boxes.of_op]] == graph.computation
  shown_calls = graph.calls[has_own_box[graph.calls[:, 1]]]
  calls, call_counts = _arrows(boxes.of_op[shown_calls])

  nodes = collections.defaultdict(list)
  fills = set()
  order = np.argsort(boxes.of_op, kind='stable')
  starts = np.searchsorted(boxes.of_op[order], np.arange(boxes.op.size))
  members = np.split(order, starts)[1:]
  drawn = zip(boxes.op.tolist(), boxes.is_group.tolist(), members, strict=True)
  for i, (op, is_group, ops) in enumerate(drawn):
    lines, fill = _label(module, graph, None if is_group else op, ops)
    root = ' penwidth=2' if graph.is_root[op] and not is_group else ''
    label = _quoted(*lines, *notes[i])
    node = f'n{i} [label={label} fillcolor="{fill}"{root}];'
    nodes[int(graph.computation[op])].append(node)
    fills.add(fill)

  title = _title(module, boxes.op.size, fills)
  node_style = 'height=0.2 margin="0.1,0.05" shape=box style="rounded,filled"'
  text = [
    'digraph module {',
    f'  graph [fontname="Helvetica" fontsize=11 labelloc=t label=<{title}>];',
    '  graph [color="#9e9e9e" nodesep=0.2 nslimit=4 ranksep=0.3 style=rounded];',
    f'  node [fontname="Helvetica" fontsize=10 {node_style}];',
    '  edge [arrowsize=0.6 color="#616161" fontcolor="#616161" fontname="Helvetica" fontsize=9];',
  ]
  text += _clusters(graph, nodes)
  text += _arrow_lines(operands, operand_counts, '')
  text += _arrow_lines(calls, call_counts, 'style=dashed color="#1565c0" ')
  text += ['}', '']
  return '\n'.join(text)


def svg(text: str) -> str:
  """Lays out DOT text and returns the content of an SVG file.

  Raises:
    InputError: Graphviz is not installed, or fails.
  """
  try:
    return subprocess.run(
      ['dot', '-Tsvg'], input=text, capture_output=True, check=True, encoding='utf-8'
    ).stdout
  except FileNotFoundError as error:
    raise errors.InputError(
      'the program dot is not installed',
      expected='the package graphviz',
      fix='install it, as with apt-get install graphviz, or write DOT text with --dot',
    ) from error
  except subprocess.CalledProcessError as error:
    raise errors.InputError('the program dot failed', found=error.stderr.strip()) from error


@dataclasses.dataclass(frozen=True, eq=False)
class _Boxes:
  """The B boxes of a picture.

  Attributes:
    op: int64 [B], ascending: the op that the box shows, or one of its ops if it is a group.
    is_group: bool [B].
    of_op: int64 [N], the box of each op.
  """

  op: np.ndarray
  is_group: np.ndarray
  of_op: np.ndarray


def _boxes(graph: _Graph, max_ops: int) -> _Boxes:
  """Returns the boxes of a picture with at most `max_ops` of them where possible."""
  n = graph.opcode.size
  key = np.arange(n)
  if n > max_ops:
    home = _fold(graph)
    shown = np.flatnonzero(home == key)
    if shown.size > max_ops:
      key = _collapse(graph, shown, max_ops)
    key = key[home]
  op, of_op = np.unique(key % max(n, 1), return_inverse=True)
  is_group = np.zeros(op.size, bool)
  is_group[of_op] = key >= n
  return _Boxes(op, is_group, of_op)


def _fold(graph: _Graph) -> np.ndarray:
  """Returns the op that each op is drawn in, int64 [N].

  An op is drawn in itself, or in the first op that calls its computation. Computations with
  landmarks that are called in their own right, such as the bodies of loops, are not drawn in an op.
  """
  num_computations = graph.computation.max() + 1
  caller, called = graph.calls[:, 0], graph.computation[graph.calls[:, 1]]
  caller_of = np.full(num_computations, -1)
  caller_of[called[::-1]] = caller[::-1]
  in_own_right = graph.landmark[caller] & np.isin(graph.opcode[caller], _CALLS)
  caller_of[called[in_own_right]] = -1
  home = np.arange(graph.computation.size)
  for _ in range(num_computations):
    outer = caller_of[graph.computation[home]]
    if (outer < 0).all():
      return home
    home = np.where(outer < 0, home, outer)
  # In a damaged file, computations may call each other; then nothing is drawn in another op.
  return np.arange(graph.computation.size)


def _collapse(graph: _Graph, shown: np.ndarray, max_ops: int) -> np.ndarray:
  """Returns the keys of the boxes of the ops `shown`, int64 [N].

  The key of a box is the index of the op that it shows, or N + index of one of its ops if it is a
  group. At first each computation is a group. Then computations are drawn in more detail, the
  largest first, as long as there is room.
  """
  n = graph.opcode.size
  key = np.arange(n)
  called = np.isin(graph.computation, np.append(graph.computation[graph.calls[:, 1]], graph.entry))
  # Computations that nothing calls are one group.
  computation = np.where(called, graph.computation, -1)
  shown = shown[np.argsort(computation[shown], kind='stable')]
  computations = np.split(shown, np.flatnonzero(np.diff(computation[shown])) + 1)
  room = max_ops - len(computations)
  for ops in sorted(computations, key=len, reverse=True):
    key[ops] = _groups(ops, np.zeros(ops.size), n)
    if called[ops[0]] and (graph.landmark[ops].any() or ops.size > shown.size / 10):
      detail = _detail(graph, ops, room + 1)
      size = np.unique(detail).size
      if size <= room + 1:
        key[ops] = detail
        room -= size - 1
  return key


def _detail(graph: _Graph, ops: np.ndarray, room: int) -> np.ndarray:
  """Returns keys of `_collapse` for the ops of an opened computation, int64 [ops]."""
  if ops.size <= min(_FEW, room):
    return ops
  is_within = graph.computation[graph.operands[:, 0]] == graph.computation[ops[0]]
  operands = graph.operands[is_within]
  if graph.landmark[ops].any():
    keys = _between(operands, ops, graph.landmark)
    if np.unique(keys).size <= room:
      return keys
  depth = _levels(operands, np.ones(graph.opcode.size, bool))[ops]
  num_depths = depth.max() + 1
  num_bands = max(1, min(num_depths, _FEW, room))
  return _groups(ops, depth * num_bands // num_depths, graph.opcode.size)


def _groups(ops: np.ndarray, label: np.ndarray, n: int) -> np.ndarray:
  """Returns keys of `_collapse` for groups of equal `label`, both int64 [ops]."""
  _, first, group, size = np.unique(
    label, return_index=True, return_inverse=True, return_counts=True
  )
  return ops[first][group] + n * (size[group] > 1)


def _levels(operands: np.ndarray, kept: np.ndarray) -> np.ndarray:
  """Returns the most ops `kept` that lie before each op on a path from the inputs, int64 [N]."""
  level = [0] * kept.size
  step = kept.tolist()
  for producer, consumer in operands.tolist():
    level[consumer] = max(level[consumer], level[producer] + step[producer])
  return np.array(level, np.int64)


def _between(operands: np.ndarray, ops: np.ndarray, kept: np.ndarray) -> np.ndarray:
  """Returns keys of `_collapse`, int64 [ops], with the ops `kept` alone and others in groups.

  The ops between kept ops form connected groups. Ops of a group have the same number of kept ops
  before them, so that no arrow leads back. Inputs, with no kept op before them, go into the box
  that uses them; the inputs that several boxes use are one group, and the unused inputs another.
  """
  n = kept.size
  level = _levels(operands, kept)
  is_input = ~kept & (level == 0)
  group = list(range(n))

  def find(op: int) -> int:
    while group[op] != op:
      group[op] = op = group[group[op]]
    return op

  inside = ~kept & ~is_input
  source, target = operands.T
  joins = inside[source] & inside[target] & (level[source] == level[target])
  for producer, consumer in operands[joins].tolist():
    group[find(producer)] = find(consumer)
  group = [find(op) for op in range(n)]

  shared, unused = n, n + 1
  box = np.where(is_input, unused, group).tolist()
  for producer, consumer in operands[is_input[source]][::-1].tolist():
    has_one_user = box[producer] in (unused, box[consumer])
    box[producer] = box[consumer] if has_one_user else shared
  label = np.array(box)[ops]
  return np.where(np.append(kept, [False, False])[label], label, _groups(ops, label, n))


def _arrows(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the distinct edges that join two boxes, sorted, and how often each occurs.

  Args:
    edges: int64 [E, 2], boxes.
  """
  arrows, counts = np.unique(edges, axis=0, return_counts=True)
  between = arrows[:, 0] != arrows[:, 1]
  return arrows[between], counts[between]


def _operand_arrows(graph: _Graph, boxes: _Boxes) -> tuple[np.ndarray, np.ndarray, list[list[str]]]:
  """Returns arrows from producers to consumers as `_arrows` does, and notes for each box.

  The notes are lines about the arrows that are left out: in computations with groups, arrows to
  the tuple of results, and all arrows of an input but the first.
  """
  num_boxes = boxes.op.size
  notes: list[list[str]] = [[] for _ in range(num_boxes)]
  has_groups = np.isin(graph.computation, graph.computation[boxes.op[boxes.is_group]])
  producer, consumer = graph.operands.T
  to_results = has_groups[consumer] & graph.is_root[consumer] & (graph.opcode[consumer] == 'tuple')
  results = np.bincount(boxes.of_op[producer[to_results]], minlength=num_boxes)
  for box in np.flatnonzero(results):
    notes[box].append(terminal.plural(results[box], 'result'))

  arrows, counts = _arrows(boxes.of_op[graph.operands[~to_results]])
  last_op = np.zeros(num_boxes, np.int64)
  last_op[boxes.of_op] = np.arange(boxes.of_op.size)
  in_order = np.lexsort((last_op[arrows[:, 1]], arrows[:, 0]))
  arrows, counts = arrows[in_order], counts[in_order]
  source, target = arrows.T
  is_input = has_groups[boxes.op] & (boxes.is_group | np.isin(graph.opcode[boxes.op], _SOURCES))
  is_input[target] = False
  uses = np.bincount(source, minlength=num_boxes)
  for box in np.flatnonzero(is_input & (uses > 1)):
    notes[box].append(f'used by {uses[box]:,} boxes')
  drawn = ~is_input[source] | (np.diff(source, prepend=-1) > 0)
  return arrows[drawn], counts[drawn], notes


def _label(
  module: module_lib.Module, graph: _Graph, op: int | None, ops: np.ndarray
) -> tuple[list[str], str]:
  """Returns the lines and the colour of the box of `ops` that shows `op`, or a group if None."""
  configurable = np.count_nonzero(graph.configurable[ops])
  if op is None:
    lines = [f'{terminal.plural(ops.size, "op")}: {_most(graph.opcode[ops])}']
    if configurable:
      lines.append(f'{configurable:,} configurable')
    return lines, _ORANGE if configurable else _YELLOW
  lines = _op_lines(module, graph, op)
  inside = graph.opcode[ops[ops != op]]
  inside = inside[~np.isin(inside, _SOURCES)]
  if inside.size:
    lines.append(f'with {_most(inside)}')
  if configurable:
    return lines, _ORANGE
  if graph.landmark[op] or graph.opcode[op] in _COSTLY:
    return lines, _BLUE
  return lines, _GREY if graph.opcode[op] in _SOURCES else _WHITE


def _most(opcodes: np.ndarray) -> str:
  """Names opcodes with their counts.

  Costly opcodes and collectives come first, inputs and constants last, and the most frequent first
  among each.
  """
  counts = summary.merge_counts([collections.Counter(opcodes.tolist())])
  names = sorted(counts, key=lambda name: (name in _SOURCES, name not in _COSTLY + _COLLECTIVES))
  texts = [f'{counts[name]:,} {name}' for name in names[:_NUM_OPCODES]]
  if len(names) > _NUM_OPCODES:
    texts.append('…')
  return ', '.join(texts)


def _clusters(graph: _Graph, nodes: Mapping[int, Sequence[str]]) -> Iterator[str]:
  """Yields the lines of the nodes of each computation, framed where there are several of both."""
  for computation, own in nodes.items():
    if len(nodes) == 1 or len(own) == 1:
      yield from (f'  {node}' for node in own)
      continue
    callers = graph.calls[graph.computation[graph.calls[:, 1]] == computation, 0]
    role = 'entry' if computation == graph.entry else 'not called'
    if callers.size:
      role = f'called by {_most(graph.opcode[callers])}'
    num_ops = np.count_nonzero(graph.computation == computation)
    caption = f'{terminal.plural(num_ops, "op")}, {role}'
    yield f'  subgraph cluster_{computation} {{'
    yield f'    label={_quoted(caption)};'
    yield from (f'    {node}' for node in own)
    yield '  }'


def _arrow_lines(arrows: np.ndarray, counts: np.ndarray, style: str) -> Iterator[str]:
  """Yields the lines of arrows."""
  for (source, target), count in zip(arrows.tolist(), counts.tolist(), strict=True):
    attributes = style
    if count > 1:
      # A label would take room of its own, with which large pictures take minutes.
      attributes += f'xlabel="{count}x"'
    bracketed = f' [{attributes.rstrip()}]' if attributes else ''
    yield f'  n{source} -> n{target}{bracketed};'


def _title(module: module_lib.Module, num_boxes: int, fills: Collection[str]) -> str:
  """Returns the name, the numbers and the legend of a picture as a table in Graphviz' HTML."""
  numbers = [
    f'{module.kind} module',
    terminal.plural(module.num_ops, 'op'),
    terminal.plural(module.num_edges, 'edge'),
  ]
  if module.num_config_ops:
    numbers.append(terminal.plural(module.num_config_ops, 'configurable op'))
  if num_boxes < module.num_ops:
    numbers.append(f'drawn as {num_boxes:,} boxes')
  legend = ''.join(
    f'<td bgcolor="{fill}" border="1">{text}</td>'
    for fill, text in _LEGEND.items()
    if fill in fills
  )
  name = html.escape(terminal.printable(module.module_id))
  name = name.replace('\\', '\\\\')  # Graphviz reads escapes in HTML too.
  rows = [f'<td><b>{name}</b></td>', f'<td>{", ".join(numbers)}</td>']
  if legend:
    table = f'<table border="0" cellspacing="4" cellpadding="3"><tr>{legend}</tr></table>'
    rows.append(f'<td>{table}</td>')
  body = ''.join(f'<tr>{row}</tr>' for row in rows)
  return f'<table border="0">{body}</table>'


def _op_lines(module: module_lib.Module, graph: _Graph, op: int) -> list[str]:
  """Returns the lines of one op: name, shape and window."""
  feat = module.node_feat[op]
  name = str(graph.opcode[op])
  if name == 'parameter':
    name += f' {_value(feat, "parameter_number")}'
  lines = [name, _shape(feat)]
  size = _values(feat, 'window_size')
  if size:
    window = f'window {_times(size)}'
    stride = _values(feat, 'window_stride')
    if any(step != 1 for step in stride):
      window += f' stride {_times(stride)}'
    lines.append(window)
  return lines


def _times(values: Sequence[int]) -> str:
  return 'x'.join(map(str, values))


@functools.cache
def _columns() -> dict[str, int]:
  return {name: column for column, name in enumerate(features.node_feature_names())}


def _value(feat: np.ndarray, name: str) -> int:
  return int(feat[_columns()[name]])


def _values(feat: np.ndarray, name: str) -> list[int]:
  """Returns up to six values from the column NAME_0 on, without trailing zeros."""
  first = _columns()[f'{name}_0']
  values = feat[first : first + 6].astype(np.int64)
  return values[: np.flatnonzero(values).max(initial=-1) + 1].tolist()


def _shape(feat: np.ndarray) -> str:
  """Returns the output shape as in HLO text, such as `bf16[8,128]{0,1}`.

  The layout is given only where it is not row-major.
  """
  prefix = 'shape_element_type_is_'
  element = '?'
  for name, column in _columns().items():
    if name.startswith(prefix) and feat[column] == 1:
      element = name.removeprefix(prefix)
      break
  if element == 'tuple':
    return f'tuple of {_value(feat, "shape_tuple_shapes_size")}'
  if element in ('invalid_type', 'opaque_type', 'token'):
    return element.removesuffix('_type')
  dims = _values(feat, 'shape_dimensions')
  rank = len(dims)
  texts = [str(dim) for dim in dims]
  if feat[_columns()['shape_dimensions_product']] == 0 and 0 not in dims:
    texts.append('0')
  if feat[_columns()['shape_dimensions_sum']] != np.float32(sum(dims)):
    texts.append('…')
  first = _columns()['layout_minor_to_major_0']
  layout = feat[first : first + rank].astype(np.int64).tolist()
  dimensions = list(range(rank))
  text = f'{element}[{",".join(texts)}]'
  if sorted(layout) == dimensions and layout != dimensions[::-1]:
    order = ','.join(map(str, layout))
    text += f'{{{order}}}'
  return text


def _quoted(*lines: str) -> str:
  """Returns a label as a quoted string, in which Graphviz reads escapes and HTML's entities."""
  escaped = (
    terminal.printable(line).replace('&', '&amp;').replace('\\', '\\\\').replace('"', '\\"')
    for line in lines
  )
  return '"' + '\\n'.join(escaped) + '"'
