"""Makes configs to rank for a program that has none: from a file, or random layouts.

```
[module] = hlo.from_file('model.pb', kind='layout')
module = candidates.random_layouts(pathlib.Path('model.pb').read_bytes(), module, count=200, seed=0)
```
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import itertools
import math
import operator
import os
from typing import Any

from google.protobuf import message as protobuf_message
import numpy as np

from tpu_graphs import errors
from tpu_graphs.hlo import protos
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import config_files
from tpu_graphs.sources import npz

CONFIGURABLE_OPCODES = ('convolution', 'dot', 'reshape')

_SUFFIX = '.npz'
_READABLE = (_SUFFIX, '.json', '.csv')
_WIDTH = features.LAYOUT_DIMENSIONS
_MAX_RANK = np.iinfo(np.int8).max
_Sizes = tuple[int, ...]  # Sizes of the dimensions of a tensor.
_Order = tuple[int, ...]  # Dimensions of a tensor, minor to major.


def read(
  path: str | os.PathLike[str], module: module_lib.Module, *, names: Sequence[str] | None = None
) -> module_lib.Module:
  """Returns the module with the configs of a file in place of its own.

  Args:
    path: an npz file with the arrays `node_config_ids` [NC] and `node_config_feat` [C, NC, 18]
      (layout) or `config_feat` [C, 24] (tile), as in published files; other arrays are ignored. Or
      a JSON or CSV file; see `config_files`.
    module: the program.
    names: the names of the program's N ops, if they are known.

  Returns:
    `module` with C unmeasured configs, whose `config_id` is their position in the file.

  Raises:
    InputError: the file cannot be read, has no configs or configs of the other kind, or has a
      wrong array or value.
  """
  path = os.fspath(path)
  check_suffix(path, _READABLE)
  try:
    with open(path, 'rb') as file, errors.in_file(path):
      if path.endswith(_SUFFIX):
        arrays = npz.read_configs(file, path=path, kind=module.kind)
      else:
        arrays = _parse_text(file.read(), module, names, is_json=path.endswith('.json'))
      replaced = with_configs(module, arrays)
      if not replaced.num_configs:
        raise errors.InputError('file without configs', found='0 configs', expected='at least one')
      return replaced
  except OSError as error:
    raise errors.InputError('cannot read file', path=path, found=error.strerror) from error


def _parse_text(
  data: bytes, module: module_lib.Module, names: Sequence[str] | None, *, is_json: bool
) -> dict[str, np.ndarray]:
  try:
    text = data.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    raise errors.InputError('not UTF-8 text', found=error) from error
  if is_json:
    return config_files.parse_json(text, module, configurable_ops(module), names)
  return config_files.parse_csv(text, module, names)


def configurable_ops(module: module_lib.Module) -> np.ndarray:
  """Returns the ops of a layout module that configs describe, int64 [NC].

  If the module names none, they are all its convolutions, dots and reshapes.
  """
  if module.node_config_ids is not None and module.node_config_ids.size:
    return module.node_config_ids
  opcodes = [features.opcodes()[name] for name in CONFIGURABLE_OPCODES]
  return np.flatnonzero(np.isin(module.node_opcode, opcodes))


def with_configs(
  module: module_lib.Module, configs: np.ndarray | Mapping[str, np.ndarray]
) -> module_lib.Module:
  """Returns the module with other configs in place of its own.

  Args:
    module: the program.
    configs: `config_feat` [C, 24], or `node_config_feat` [C, NC, 18] of the `configurable_ops`;
      or a map of these names to the arrays, which may hold `node_config_ids` [NC] as well.

  Returns:
    `module` with C unmeasured configs, whose `config_id` is their position.

  Raises:
    InputError: the configs are of the other kind, or an array has a wrong shape, dtype or value.
  """
  name = 'config_feat' if module.kind == 'tile' else 'node_config_feat'
  arrays = dict(configs) if isinstance(configs, Mapping) else {name: configs}
  names = [name] if module.kind == 'tile' else ['node_config_ids', name]
  if module.kind == 'layout':
    arrays.setdefault('node_config_ids', configurable_ops(module))
  if sorted(arrays) != sorted(names):
    raise errors.InputError(
      'wrong arrays of configs', found=', '.join(sorted(arrays)), expected=', '.join(names)
    )
  arrays = {key: np.asarray(value) for key, value in arrays.items()}
  if module.kind == 'tile' and arrays[name].dtype.kind in 'iu':
    arrays[name] = arrays[name].astype(np.float32)
  elif module.kind == 'layout' and arrays[name].dtype.kind == 'f':
    with np.errstate(invalid='ignore'):
      whole = arrays[name].astype(np.int64)
    # Values with a fraction remain floats, which a layout module refuses.
    if np.array_equal(whole, arrays[name]):
      arrays[name] = whole
  return _replace_configs(module, arrays)


def save(path: str | os.PathLike[str], module: module_lib.Module, score: np.ndarray) -> None:
  """Writes the configs of a module with their `config_id` and `score` in a form that `read` takes.

  Args:
    path: an npz file, which appears, or is replaced, only when it is complete.
    module: the module; its configs are written in their order.
    score: the scores of the configs, float32 [C].

  Raises:
    InputError: the file cannot be written.
  """
  path = os.fspath(path)
  check_suffix(path)
  arrays = {
    'config_feat': module.config_feat,
    'node_config_ids': module.node_config_ids,
    'node_config_feat': module.node_config_feat,
    'config_id': module.config_id,
    'score': score,
  }
  arrays_of_kind = {name: array for name, array in arrays.items() if array is not None}
  try:
    npz.write_arrays(path, arrays_of_kind)
  except OSError as error:
    raise errors.InputError('cannot write file', path=path, found=error.strerror) from error


def check_suffix(path: str, suffixes: tuple[str, ...] = (_SUFFIX,)) -> None:
  """Refuses a file name that does not end in one of `suffixes`.

  Configs are written to files with the default suffix; more suffixes can be read.

  Raises:
    InputError: the name has another suffix.
  """
  if not path.endswith(suffixes):
    raise errors.InputError(
      'configs of an unknown format',
      path=path,
      expected=f'a file name that ends in {" or ".join(suffixes)}',
    )


def _replace_configs(
  module: module_lib.Module, arrays: dict[str, Any], default_config: int | None = None
) -> module_lib.Module:
  name = 'config_feat' if module.kind == 'tile' else 'node_config_feat'
  c = len(arrays[name])
  unmeasured = np.full(c, module_lib.UNMEASURED)
  if module.kind == 'tile':
    arrays = {**arrays, 'config_runtime_normalizers': unmeasured}
  return dataclasses.replace(
    module,
    config_runtime=unmeasured,
    config_id=np.arange(c),
    dropped_runs={},
    default_config=default_config,
    **arrays,
  )


def random_layouts(
  hlo: bytes, module: module_lib.Module, *, count: int, seed: int
) -> module_lib.Module:
  """Returns the module with random layouts of its convolutions, dots and reshapes as its configs.

  The layouts follow the published collections `layout:*:random`:
  - A convolution has the two dimensions that are not spatial in either order, in output, input and
    kernel. The spatial dimensions follow and are not named. (All 53 convolutions of
    unet_3d.4x4.bf16 and of unet3d.)
  - A dot has the dimensions that are not batch dimensions in any order, in output, input and
    kernel. (All 23 dots of cd708819d3f5103afd6460b15e74eaf3; 3 of them have a batch dimension.)
  - A reshape has a pair of layouts of output and input between which no element moves; dimensions
    of size 1 are the most major dimensions. There is no kernel.
  - Ops that are alike get the same layouts. Here ops are alike if opcode, shapes, dimension numbers
    and own layouts are equal. (The 62 configurable ops of unet_3d.4x4.bf16 are 8 such groups.)

  Published configs may also leave a reshape, or the input and kernel of a dot, to the compiler;
  these configs never do. Published programs do not have all their reshapes configured; here all
  reshapes are, in whatever computation they are. A custom call that a compiler has put in place of
  one of these ops, such as the gemm of a GPU, cannot be distinguished from other custom calls.

  Args:
    hlo: the serialized HloModuleProto that `module` was read from.
    module: a layout module.
    count: number of configs; the result has fewer if fewer are possible.
    seed: seed of the random choice.

  Returns:
    `module` with distinct, unmeasured configs. The first config, which is the `default_config`, is
    the layout of the program itself, for the same dimensions; a shape without a layout counts as
    row-major.

  Raises:
    InputError: the program has no such op, or has such an op without the necessary operands.
  """
  instructions, batch_dimensions = _parse(hlo)
  if len(instructions) != module.num_ops:
    raise errors.InputError(
      'HLO of another program',
      where=module.module_id,
      found=f'{len(instructions)} instructions',
      expected=module.num_ops,
    )
  # If several instructions have the same id, the last one counts.
  shape_of_id = {instruction.id: instruction.shape for instruction in instructions}
  nodes_of_group: dict[_Group, list[int]] = {}
  for node, instruction in enumerate(instructions):
    if instruction.opcode in CONFIGURABLE_OPCODES:
      group = _group(instruction, shape_of_id, batch_dimensions[node])
      nodes_of_group.setdefault(group, []).append(node)
  if not nodes_of_group:
    raise errors.InputError(
      'no configurable op',
      where=module.module_id,
      found=f'{module.num_ops} ops',
      expected=f'at least one {" or ".join(CONFIGURABLE_OPCODES)}',
    )

  node_config_ids = np.sort(np.concatenate(list(nodes_of_group.values())))
  choices: list[tuple[np.ndarray, _Choice]] = []  # Rows of the features, and what is chosen there.
  for group, nodes in nodes_of_group.items():
    rows = np.searchsorted(node_config_ids, nodes)
    choices.extend((rows, choice) for choice in group.choices())
  drawn = _draw([len(choice.options) for _, choice in choices], count, seed)
  feat = np.full((len(drawn), node_config_ids.size, features.NUM_LAYOUT_FEATURES), -1, np.int8)
  for column, (rows, choice) in enumerate(choices):
    options_of_tensor = zip(*choice.options, strict=True)
    for tensor, orders in zip(choice.tensors, options_of_tensor, strict=True):
      start = features.LAYOUT_TENSORS.index(tensor) * _WIDTH
      padded = [order + (-1,) * (_WIDTH - len(order)) for order in orders]
      table = np.array(padded, np.int8)
      feat[:, rows, start : start + _WIDTH] = table[drawn[:, column], np.newaxis]
  return _replace_configs(
    module, {'node_config_ids': node_config_ids, 'node_config_feat': feat}, default_config=0
  )


def _parse(hlo: bytes) -> tuple[list[Any], list[Any]]:
  """Returns the instructions in the order of nodes, and the DotDimensionNumbers of each."""
  try:
    program = protos.HloModuleProto.FromString(hlo)
    dots = protos.DotModule.FromString(hlo)
  except protobuf_message.DecodeError as error:
    raise errors.InputError(
      'not an HLO module', found=error, expected='a serialized HloModuleProto'
    ) from error
  instructions: list[Any] = []
  for computation in program.computations:
    instructions.extend(computation.instructions)
  dot_dimension_numbers: list[Any] = []
  for computation in dots.computations:
    dot_dimension_numbers.extend(dot.dot_dimension_numbers for dot in computation.instructions)
  return instructions, dot_dimension_numbers


@dataclasses.dataclass(frozen=True)
class _Choice:
  """Layouts that are chosen together.

  Attributes:
    tensors: some of `features.LAYOUT_TENSORS`.
    options: distinct options with one order per tensor each; the program's own option comes first.
  """

  tensors: tuple[str, ...]
  options: Sequence[tuple[_Order, ...]]


@dataclasses.dataclass(frozen=True)
class _Group:
  """The common properties of ops that get the same layouts.

  Attributes:
    opcode: the ops' opcode.
    shapes: the shapes of output and operands.
    orders: for each tensor, the dimensions that a config names, at most six, in the program's own
      order.
  """

  opcode: str
  shapes: tuple[_Sizes, ...]
  orders: tuple[_Order, ...]

  def choices(self) -> list[_Choice]:
    """Returns the independent choices of layouts."""
    if self.opcode == 'reshape':
      pairs = [self.orders, *_reshapes_in_place(*self.shapes)]
      distinct_pairs = list(dict.fromkeys(pairs))
      return [_Choice(('output', 'input'), distinct_pairs)]
    choices = []
    for tensor, order in zip(features.LAYOUT_TENSORS, self.orders, strict=True):
      options = [(permuted,) for permuted in itertools.permutations(order)]
      choices.append(_Choice((tensor,), options))
    return choices


def _group(instruction: Any, shape_of_id: dict[int, Any], dot: Any) -> _Group:
  operands = list(instruction.operand_ids)
  expected = 1 if instruction.opcode == 'reshape' else 2
  where = f'instruction {instruction.name!r} (id {instruction.id})'
  if len(operands) != expected or not all(operand in shape_of_id for operand in operands):
    raise errors.InputError(
      f'wrong operands of a {instruction.opcode}',
      where=where,
      found=f'operand_ids {operands}',
      expected=f'{expected}, each the id of an instruction of this module',
    )
  shapes = [instruction.shape, *(shape_of_id[operand] for operand in operands)]
  sizes = tuple(tuple(shape.dimensions) for shape in shapes)
  rank = max(map(len, sizes))
  if rank > _MAX_RANK:
    raise errors.InputError(
      'too many dimensions', where=where, found=rank, expected=f'at most {_MAX_RANK}'
    )
  named: list[Collection[int]] = [range(len(size)) for size in sizes]
  if instruction.opcode == 'convolution':
    numbers = instruction.convolution_dimension_numbers
    named = [
      {numbers.output_batch_dimension, numbers.output_feature_dimension},
      {numbers.input_batch_dimension, numbers.input_feature_dimension},
      {numbers.kernel_output_feature_dimension, numbers.kernel_input_feature_dimension},
    ]
  elif instruction.opcode == 'dot':
    # The batch dimensions are the first dimensions of the output.
    batch_dimensions = [
      range(len(dot.lhs_batch_dimensions)),
      dot.lhs_batch_dimensions,
      dot.rhs_batch_dimensions,
    ]
    named = [
      set(dimensions).difference(batch)
      for dimensions, batch in zip(named, batch_dimensions, strict=True)
    ]
  orders = [
    [i for i in _own_order(shape) if i in dimensions]
    for shape, dimensions in zip(shapes, named, strict=True)
  ]
  if instruction.opcode == 'reshape':
    orders = [_ones_last(order, size) for order, size in zip(orders, sizes, strict=True)]
  cut_orders = tuple(tuple(order[:_WIDTH]) for order in orders)
  return _Group(instruction.opcode, sizes, cut_orders)


def _own_order(shape: Any) -> _Order:
  """Returns all dimensions in the order of the shape's layout.

  Without a valid layout, the dimensions descend, which is row-major.
  """
  descending = tuple(range(len(shape.dimensions)))[::-1]
  order = tuple(shape.layout.minor_to_major)
  return order if tuple(sorted(order, reverse=True)) == descending else descending


def _reshapes_in_place(output: _Sizes, input_: _Sizes) -> list[tuple[_Order, ...]]:
  """Returns the pairs of orders of the two shapes between which no element moves.

  An order has up to six dimensions. Both shapes are cut into the shortest runs of dimensions that
  hold equally many elements in both shapes. A run is row-major. The runs follow each other in any
  order, which is the same in both shapes: for [2, 3, 5] and [6, 5] the orders are (2, 1, 0) and
  (1, 0), or (1, 0, 2) and (0, 1).
  """
  minor_first = _equal_runs(output, input_)[::-1]
  free, fixed = minor_first[:_WIDTH], minor_first[_WIDTH:]
  pairs = []
  for permuted in itertools.permutations(free):
    runs = (*permuted, *fixed)
    pair = []
    for side, sizes in enumerate((output, input_)):
      order = [i for run in runs for i in reversed(run[side])]
      pair.append(tuple(_ones_last(order, sizes)[:_WIDTH]))
    pairs.append(tuple(pair))
  return pairs


def _ones_last(order: list[int], sizes: _Sizes) -> list[int]:
  """Returns an order with all dimensions of size 1 at its major end, where they change nothing."""
  longer = [i for i in order if sizes[i] != 1]
  ones = [i for i in reversed(range(len(sizes))) if sizes[i] == 1]
  return longer + ones


def _equal_runs(output: _Sizes, input_: _Sizes) -> list[tuple[list[int], ...]]:
  """Returns the runs, most major first, each as the dimensions of the output and of the input.

  Dimensions of size 1 are in no run.
  """
  ends = []  # For each shape: dimension -> number of elements up to and with it.
  for sizes in (output, input_):
    kept = [i for i, size in enumerate(sizes) if size != 1]
    products = itertools.accumulate((sizes[i] for i in kept), operator.mul)
    ends.append(dict(zip(kept, products, strict=True)))
  if min((*output, *input_), default=1) < 1 or math.prod(output) != math.prod(input_):
    # Shapes that are empty or differ in size cannot be cut.
    return [tuple(map(list, ends))]
  stops = sorted(set(ends[0].values()) & set(ends[1].values()))
  runs = []
  for start, stop in itertools.pairwise([1, *stops]):
    run = tuple([i for i, end in side.items() if start < end <= stop] for side in ends)
    runs.append(run)
  return runs


def _draw(radices: Sequence[int], count: int, seed: int) -> np.ndarray:
  """Draws distinct rows of choices, int16 [R, len(radices)]; the first row is all 0.

  Choice i is less than radices[i]. R is `count`, or the number of possible rows if that is smaller.
  """
  rows = min(count, math.prod(radices))
  rng = np.random.default_rng(seed)
  drawn = np.zeros((1, len(radices)), np.int16)
  while len(drawn) < rows:
    drawn = np.concatenate([drawn, rng.integers(0, radices, (rows, len(radices)), np.int16)])
    _, first = np.unique(drawn, axis=0, return_index=True)
    drawn = drawn[np.sort(first)]
  return drawn[:rows]


def op_names(hlo: bytes) -> list[str]:
  """Returns the names of the instructions of a serialized HloModuleProto, in the order of ops."""
  return [instruction.name for instruction in _parse(hlo)[0]]


def describe(
  module: module_lib.Module, position: int, *, names: Sequence[str] | None = None
) -> str:
  """Describes a config: a line of tile bounds, or a line per configurable op with its layouts.

  Args:
    module: the module that has the config.
    position: the position of the config.
    names: the names of the N ops; without names, ops are numbered.
  """
  if module.config_feat is not None:
    feat = module.config_feat[position]
    columns = features.tile_feature_names()
    blocks = []
    # A block of features has six bounds, then their sum and product, which are left out.
    for start in range(0, features.NUM_TILE_FEATURES, 8):
      name = columns[start].removesuffix('_0')
      bounds = np.trim_zeros(feat[start : start + 6], 'b')
      blocks.append(f'{name} {{{_joined(bounds)}}}')
    return '  '.join(blocks)
  assert module.node_config_ids is not None
  assert module.node_config_feat is not None
  opcodes = features.opcode_names()
  config = module.node_config_feat[position]
  # [1, NC, 18], or [0, NC, 18] if the default config is not known.
  default = module.node_config_feat[module.config_id == module.default_config]
  changed = (config != default).any(axis=(0, 2))
  rows = [('op', 'opcode', *features.LAYOUT_TENSORS, '')]
  for node, layouts, differs in zip(module.node_config_ids, config, changed, strict=True):
    name = names[node] if names else str(node)
    opcode = opcodes[module.node_opcode[node]]
    mark = 'changed' if differs else ''
    rows.append((name, opcode, *_layouts_in_words(layouts), mark))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return '\n'.join('  '.join(map(str.ljust, row, widths)).rstrip() for row in rows)


def describe_layouts(layouts: np.ndarray) -> str:
  """Describes the layouts of an op, int8 [18]: output, input and kernel, each minor to major.

  A tensor whose layout is left to the compiler is shown as "-".
  """
  return ' '.join(_layouts_in_words(layouts))


def _layouts_in_words(layouts: np.ndarray) -> list[str]:
  words = []
  for tensor in layouts.reshape(len(features.LAYOUT_TENSORS), _WIDTH):
    named = tensor[tensor >= 0]
    words.append(f'{{{_joined(named)}}}' if named.size else '-')
  return words


def _joined(values: np.ndarray) -> str:
  return ','.join(f'{value:g}' for value in values)
