"""Configs to rank for a program that comes without: from a file, or random layouts.

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
_Sizes = tuple[int, ...]  # Of the dimensions of a tensor.
_Order = tuple[int, ...]  # Dimensions of a tensor, minor to major.


def read(
  path: str | os.PathLike[str], module: module_lib.Module, *, names: Sequence[str] | None = None
) -> module_lib.Module:
  """The module with the configs of a file in place of its own.

  Args:
    path: an npz file with the arrays `node_config_ids` [NC] and `node_config_feat` [C, NC, 18]
      (layout) or `config_feat` [C, 24] (tile), as in published files; other arrays are left. Or
      a JSON or CSV file, see
      `config_files`.
    module: the program.
    names: of its N ops, where they are known.

  Returns:
    `module` with C unmeasured configs, whose `config_id` is their position in the file.

  Raises:
    InputError: the file cannot be read, holds no configs or those of the other kind, or a wrong
      array or value.
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
    raise errors.InputError('no text in UTF-8', found=error) from error
  if is_json:
    return config_files.parse_json(text, module, configurable_ops(module), names)
  return config_files.parse_csv(text, module, names)


def configurable_ops(module: module_lib.Module) -> np.ndarray:
  """The ops of a layout module that configs are of: those that it says, else all convolutions,
  dots and reshapes.
  """
  if module.node_config_ids is not None and module.node_config_ids.size:
    return module.node_config_ids
  return np.flatnonzero(
    np.isin(module.node_opcode, [features.opcodes()[name] for name in CONFIGURABLE_OPCODES])
  )


def with_configs(
  module: module_lib.Module, configs: np.ndarray | Mapping[str, np.ndarray]
) -> module_lib.Module:
  """The module with other configs in place of its own.

  Args:
    module: the program.
    configs: `config_feat` [C, 24], or `node_config_feat` [C, NC, 18] of the `configurable_ops`;
      or these by name, with `node_config_ids` [NC].

  Returns:
    `module` with C unmeasured configs, whose `config_id` is their position.

  Raises:
    InputError: they are those of the other kind, or an array has a wrong shape, dtype or value.
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
    if np.array_equal(whole, arrays[name]):  # Else there is a fraction, and floats are refused.
      arrays[name] = whole
  return _replace_configs(module, arrays)


def save(path: str | os.PathLike[str], module: module_lib.Module, score: np.ndarray) -> None:
  """Writes the configs of a module in the form that `read` takes, with `config_id` and `score`
  beside them.

  Args:
    path: of an npz file, which appears, or is replaced, only when it is complete.
    module: whose configs are written in their order.
    score: float32 [C].

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
  try:
    npz.write_arrays(path, {name: array for name, array in arrays.items() if array is not None})
  except OSError as error:
    raise errors.InputError('cannot write file', path=path, found=error.strerror) from error


def check_suffix(path: str, suffixes: tuple[str, ...] = (_SUFFIX,)) -> None:
  """Raises an `InputError` if configs are not written to files of this name, or not read with
  other `suffixes`.
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
  c = len(arrays['config_feat' if module.kind == 'tile' else 'node_config_feat'])
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
  """The module with random layouts of its convolutions, dots and reshapes as its configs.

  They are like those of the published collections `layout:*:random`:
  - convolution: of output, input and kernel, the two dimensions that are not spatial, in either
    order. The spatial ones follow and are not told. (All 53 convolutions of unet_3d.4x4.bf16 and
    of unet3d.)
  - dot: of output, input and kernel, the dimensions that are no batch dimensions, in any order.
    (All 23 dots of cd708819d3f5103afd6460b15e74eaf3, of which 3 have a batch dimension.)
  - reshape: a pair of layouts of output and input between which no element moves; dimensions of
    size 1 are the most major ones. There is no kernel.
  - Ops that are alike, here those of equal opcode, shapes, dimension numbers and own layouts,
    get the same layouts. (The 62 configurable ops of unet_3d.4x4.bf16 are 8 such groups.)
  Published configs may also leave a reshape, or the input and kernel of a dot, to the compiler;
  these never do. Published programs do not have all their reshapes configured; these have, in
  whatever computation they are. A custom call that a compiler has put in place of one of these
  ops, as the gemm of a GPU, cannot be told from others.

  Args:
    hlo: the serialized HloModuleProto that `module` was read from.
    module: a layout module.
    count: how many configs are wanted; there are fewer where not so many are possible.
    seed: of the choice.

  Returns:
    `module` with distinct, unmeasured configs. The first, which is the `default_config`, is the
    layout that the program has itself, of the same dimensions; a shape without layout counts as
    row-major.

  Raises:
    InputError: the program has no such op, or one without the operands that it must have.
  """
  instructions, batch_dimensions = _parse(hlo)
  if len(instructions) != module.num_ops:
    raise errors.InputError(
      'HLO of another program',
      where=module.module_id,
      found=f'{len(instructions)} instructions',
      expected=module.num_ops,
    )
  shape_of_id = {
    instruction.id: instruction.shape for instruction in instructions
  }  # Of equal ids, the last counts.
  nodes_of_group: dict[_Group, list[int]] = {}
  for node, instruction in enumerate(instructions):
    if instruction.opcode in CONFIGURABLE_OPCODES:
      nodes_of_group.setdefault(
        _group(instruction, shape_of_id, batch_dimensions[node]), []
      ).append(node)
  if not nodes_of_group:
    raise errors.InputError(
      'no configurable op',
      where=module.module_id,
      found=f'{module.num_ops} ops',
      expected=f'at least one {" or ".join(CONFIGURABLE_OPCODES)}',
    )

  node_config_ids = np.sort(np.concatenate(list(nodes_of_group.values())))
  choices = [
    (np.searchsorted(node_config_ids, nodes), choice)
    for group, nodes in nodes_of_group.items()
    for choice in group.choices()
  ]
  drawn = _draw([len(choice.options) for _, choice in choices], count, seed)
  feat = np.full((len(drawn), node_config_ids.size, features.NUM_LAYOUT_FEATURES), -1, np.int8)
  for column, (rows, choice) in enumerate(choices):
    for tensor, orders in zip(choice.tensors, zip(*choice.options, strict=True), strict=True):
      start = features.LAYOUT_TENSORS.index(tensor) * _WIDTH
      table = np.array([order + (-1,) * (_WIDTH - len(order)) for order in orders], np.int8)
      feat[:, rows, start : start + _WIDTH] = table[drawn[:, column], np.newaxis]
  return _replace_configs(
    module, {'node_config_ids': node_config_ids, 'node_config_feat': feat}, default_config=0
  )


def _parse(hlo: bytes) -> tuple[list[Any], list[Any]]:
  """The instructions in the order of nodes, and the DotDimensionNumbers of each."""
  try:
    program, dots = protos.HloModuleProto.FromString(hlo), protos.DotModule.FromString(hlo)
  except protobuf_message.DecodeError as error:
    raise errors.InputError(
      'no HLO module', found=error, expected='a serialized HloModuleProto'
    ) from error
  return (
    [
      instruction
      for computation in program.computations
      for instruction in computation.instructions
    ],
    [
      instruction.dot_dimension_numbers
      for computation in dots.computations
      for instruction in computation.instructions
    ],
  )


@dataclasses.dataclass(frozen=True)
class _Choice:
  """Layouts that are chosen together.

  Attributes:
    tensors: some of `features.LAYOUT_TENSORS`.
    options: each has one order per tensor; distinct, that of the program itself first.
  """

  tensors: tuple[str, ...]
  options: Sequence[tuple[_Order, ...]]


@dataclasses.dataclass(frozen=True)
class _Group:
  """What ops that have the same layouts have in common.

  Attributes:
    opcode: of them.
    shapes: of output and operands.
    orders: of each tensor, the dimensions that a config tells, at most six, in the order of the
      program.
  """

  opcode: str
  shapes: tuple[_Sizes, ...]
  orders: tuple[_Order, ...]

  def choices(self) -> list[_Choice]:
    if self.opcode == 'reshape':
      return [
        _Choice(
          ('output', 'input'), list(dict.fromkeys([self.orders, *_reshapes_in_place(*self.shapes)]))
        )
      ]
    return [
      _Choice((tensor,), [(permuted,) for permuted in itertools.permutations(order)])
      for tensor, order in zip(features.LAYOUT_TENSORS, self.orders, strict=True)
    ]


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
  if (rank := max(map(len, sizes))) > _MAX_RANK:
    raise errors.InputError(
      'too many dimensions', where=where, found=rank, expected=f'at most {_MAX_RANK}'
    )
  told: list[Collection[int]] = [range(len(size)) for size in sizes]
  if instruction.opcode == 'convolution':
    numbers = instruction.convolution_dimension_numbers
    told = [
      {numbers.output_batch_dimension, numbers.output_feature_dimension},
      {numbers.input_batch_dimension, numbers.input_feature_dimension},
      {numbers.kernel_output_feature_dimension, numbers.kernel_input_feature_dimension},
    ]
  elif instruction.opcode == 'dot':  # Of its output, the batch dimensions are the first.
    batch = [
      range(len(dot.lhs_batch_dimensions)),
      dot.lhs_batch_dimensions,
      dot.rhs_batch_dimensions,
    ]
    told = [set(dimensions).difference(left) for dimensions, left in zip(told, batch, strict=True)]
  orders = [
    [i for i in _own_order(shape) if i in dimensions]
    for shape, dimensions in zip(shapes, told, strict=True)
  ]
  if instruction.opcode == 'reshape':
    orders = [_ones_last(order, size) for order, size in zip(orders, sizes, strict=True)]
  return _Group(instruction.opcode, sizes, tuple(tuple(order[:_WIDTH]) for order in orders))


def _own_order(shape: Any) -> _Order:
  """All dimensions as the layout of the shape orders them; descending, which is row-major, where
  it has none.
  """
  descending = tuple(range(len(shape.dimensions)))[::-1]
  order = tuple(shape.layout.minor_to_major)
  return order if tuple(sorted(order, reverse=True)) == descending else descending


def _reshapes_in_place(output: _Sizes, input_: _Sizes) -> list[tuple[_Order, ...]]:
  """The pairs of orders of the two shapes, up to six dimensions of each, between which no
  element moves.

  Both shapes are cut into the shortest runs of dimensions that hold as many elements in one as
  in the other. A run is row-major, and the runs follow each other in any way, the same in both:
  of [2, 3, 5] and [6, 5] the orders are (2, 1, 0) and (1, 0), or (1, 0, 2) and (0, 1).
  """
  minor_first = _equal_runs(output, input_)[::-1]
  free, fixed = minor_first[:_WIDTH], minor_first[_WIDTH:]
  pairs = []
  for permuted in itertools.permutations(free):
    orders = ([i for run in (*permuted, *fixed) for i in reversed(run[side])] for side in range(2))
    pairs.append(
      tuple(
        tuple(_ones_last(order, sizes)[:_WIDTH])
        for order, sizes in zip(orders, (output, input_), strict=True)
      )
    )
  return pairs


def _ones_last(order: list[int], sizes: _Sizes) -> list[int]:
  """An order with all dimensions of size 1 at its major end, where they change nothing."""
  return [
    *(i for i in order if sizes[i] != 1),
    *(i for i in reversed(range(len(sizes))) if sizes[i] == 1),
  ]


def _equal_runs(output: _Sizes, input_: _Sizes) -> list[tuple[list[int], ...]]:
  """The runs, most major first: dimensions of the output, and of the input. Dimensions of size 1
  are in none.
  """
  ends = []  # Of each shape: dimension -> number of elements up to it.
  for sizes in (output, input_):
    kept = [i for i, size in enumerate(sizes) if size != 1]
    ends.append(
      dict(zip(kept, itertools.accumulate((sizes[i] for i in kept), operator.mul), strict=True))
    )
  if min((*output, *input_), default=1) < 1 or math.prod(output) != math.prod(input_):
    return [tuple(map(list, ends))]  # No shapes that could be cut.
  stops = sorted(set(ends[0].values()) & set(ends[1].values()))
  return [
    tuple([i for i, end in side.items() if start < end <= stop] for side in ends)
    for start, stop in itertools.pairwise([1, *stops])
  ]


def _draw(radices: Sequence[int], count: int, seed: int) -> np.ndarray:
  """Distinct rows of choices, int16 [min(count, all there are), choices], the first all 0;
  choice i is < radices[i].
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
  """The names of the instructions of a serialized HloModuleProto, in the order of the ops of its
  `Module`.
  """
  return [instruction.name for instruction in _parse(hlo)[0]]


def describe(
  module: module_lib.Module, position: int, *, names: Sequence[str] | None = None
) -> str:
  """A config in words: a line of tile bounds, or a line per configurable op with its layouts.

  Args:
    module: which has the config.
    position: of the config.
    names: of the N ops; else they are numbered.
  """
  if module.config_feat is not None:
    feat, names_of_feat = module.config_feat[position], features.tile_feature_names()
    return '  '.join(  # Of each block, without sum and product.
      f'{names_of_feat[start].removesuffix("_0")} {{{_joined(np.trim_zeros(feat[start : start + 6], "b"))}}}'
      for start in range(0, features.NUM_TILE_FEATURES, 8)
    )
  assert module.node_config_ids is not None
  assert module.node_config_feat is not None
  opcodes = features.opcode_names()
  default = module.node_config_feat[
    module.config_id == module.default_config
  ]  # [1, NC, 18]; [0, NC, 18] if unknown.
  changed = (module.node_config_feat[position] != default).any(axis=(0, 2))
  rows = [('op', 'opcode', *features.LAYOUT_TENSORS, '')]
  for node, layouts, differs in zip(
    module.node_config_ids, module.node_config_feat[position], changed, strict=True
  ):
    rows.append(
      (
        names[node] if names else str(node),
        opcodes[module.node_opcode[node]],
        *_layouts_in_words(layouts),
        'changed' if differs else '',
      )
    )
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return '\n'.join('  '.join(map(str.ljust, row, widths)).rstrip() for row in rows)


def describe_layouts(layouts: np.ndarray) -> str:
  """The layouts of an op, int8 [18], in words: those of output, input and kernel, minor to
  major; - where not told.
  """
  return ' '.join(_layouts_in_words(layouts))


def _layouts_in_words(layouts: np.ndarray) -> list[str]:
  return [
    f'{{{_joined(tensor[tensor >= 0])}}}' if (tensor >= 0).any() else '-'
    for tensor in layouts.reshape(len(features.LAYOUT_TENSORS), _WIDTH)
  ]


def _joined(values: np.ndarray) -> str:
  return ','.join(f'{value:g}' for value in values)
