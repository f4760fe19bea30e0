"""The programs of the built-in sample, see `synthetic`: graphs that are built op by op, and
their node features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any, TypeVar

import numpy as np

from tpu_graphs.modules import features

UNARY = ('abs', 'exponential', 'logistic', 'negate', 'rsqrt', 'tanh')
BINARY = ('add', 'divide', 'maximum', 'minimum', 'multiply', 'subtract')
_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True)
class _Op:
  """One op: `attributes` are values by the name of their block of columns, such as
  'window_size'.
  """

  opcode: str
  element_type: str
  shape: tuple[int, ...]
  operands: tuple[int, ...]
  attributes: dict[str, Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Computation:
  """A finished computation: its root and its parameters, as indices of ops."""

  root: int
  parameters: list[int]


class Program:
  """A program that is built op by op; methods that add one return its index and find out its shape.

  Computations follow each other, called ones before their callers, and the last op of each is
  its root.
  """

  def __init__(self, *, element_type: str):
    self.ops: list[_Op] = []
    self.element_type = element_type  # Of all tensors for which no other is given.
    self._ends: list[int] = []  # Of computations.
    self._splits = [0]
    self._parameters: list[int] = []  # Of the present computation.

  def arrays(self) -> dict[str, Any]:
    """The arrays of the graph, as `Module` describes them."""
    node_feat = np.zeros((len(self.ops), features.NUM_NODE_FEATURES), np.float32)
    columns = feature_columns()
    node_feat[:, [column for name, column in columns.items() if name.endswith('_product')]] = (
      1  # Of no values.
    )
    for row, op in zip(node_feat, self.ops, strict=True):
      row[columns[f'shape_element_type_is_{op.element_type}']] = 1
      _put(row, 'shape_dimensions', op.shape)
      _put(row, 'layout_minor_to_major', range(len(op.shape))[::-1])
      for name, values in op.attributes.items():
        _put(row, name, values)
    node_feat[np.array(self._ends) - 1, columns['is_root']] = 1
    edges = sorted({(i, operand) for i, op in enumerate(self.ops) for operand in op.operands})
    return {
      'node_opcode': np.array([features.opcodes()[op.opcode] for op in self.ops], np.uint8),
      'node_feat': node_feat,
      'edge_index': np.array(edges, np.int64).reshape(-1, 2),
      'node_splits': np.array(self._splits, np.int64),  # `Module` appends the end.
      'computation': np.repeat(np.arange(len(self._ends)), np.diff([0, *self._ends])),
    }

  def end_computation(self, *, is_cluster: bool = False) -> Computation:
    """Ends the present computation, and the segment too if it is a cluster."""
    self._ends.append(len(self.ops))
    if is_cluster:
      self._splits.append(len(self.ops))
    parameters, self._parameters = self._parameters, []
    return Computation(len(self.ops) - 1, parameters)

  def shape(self, op: int) -> tuple[int, ...]:
    return self.ops[op].shape

  def add(
    self,
    opcode: str,
    shape: Sequence[int],
    *operands: int,
    element_type: str | None = None,
    **attributes: Sequence[int],
  ) -> int:
    self.ops.append(
      _Op(opcode, element_type or self.element_type, tuple(shape), operands, attributes)
    )
    return len(self.ops) - 1

  def parameter(self, *shape: int, element_type: str | None = None) -> int:
    number = len(self._parameters)
    self._parameters.append(
      self.add('parameter', shape, element_type=element_type, parameter_number=[number])
    )
    return self._parameters[-1]

  def call(self, opcode: str, computation: Computation, *operands: int) -> int:
    """Calls a computation with `operands` and a new parameter for each further one that it
    takes.
    """
    further = [
      self.parameter(*self.shape(op), element_type=self.ops[op].element_type)
      for op in computation.parameters[len(operands) :]
    ]
    return self.add(
      opcode,
      self.shape(computation.root),
      *operands,
      *further,
      computation.root,
      element_type=self.ops[computation.root].element_type,
    )

  def elementwise(self, opcode: str, *operands: int, element_type: str | None = None) -> int:
    return self.add(opcode, self.shape(operands[0]), *operands, element_type=element_type)

  def broadcast(self, op: int, shape: Sequence[int], dimensions: Sequence[int] = ()) -> int:
    return self.add(
      'broadcast', shape, op, element_type=self.ops[op].element_type, dimensions=dimensions
    )

  def scalar(self, shape: Sequence[int]) -> int:
    """A constant for each value of a tensor of that shape."""
    return self.broadcast(self.add('constant', ()), shape)

  def vector(self, shape: Sequence[int], dimension: int = -1) -> int:
    """A parameter for each position in one dimension of a tensor of that shape."""
    return self.broadcast(self.parameter(shape[dimension]), shape, [dimension % len(shape)])

  def transpose(self, op: int, permutation: Sequence[int]) -> int:
    return self.add(
      'transpose', [self.shape(op)[i] for i in permutation], op, dimensions=permutation
    )

  def reshape(self, op: int, *shape: int) -> int:
    return self.add('reshape', shape, op)

  def reducer(self, opcode: str) -> int:
    """A computation that joins two values; to be made before the one that reduces by it."""
    left, right = self.parameter(), self.parameter()
    self.add(opcode, (), left, right)
    return self.end_computation().root

  def reduce(self, op: int, dimensions: Sequence[int], reducer: int) -> int:
    shape = [size for i, size in enumerate(self.shape(op)) if i not in dimensions]
    return self.add('reduce', shape, op, self.add('constant', ()), reducer, dimensions=dimensions)

  def dot(self, source: int, kernel: int) -> int:
    """[..., m, k] x [..., k, n] -> [..., m, n]."""
    return self.add('dot', [*self.shape(source)[:-1], self.shape(kernel)[-1]], source, kernel)

  def convolution(self, source: int, kernel: int, stride: int = 1) -> int:
    """[b, h, w, i] x [height, width, i, o] -> [b, h / stride, w / stride, o], padded at the
    borders; windows odd.
    """
    batch, height, width, _ = self.shape(source)
    *window, _, filters = self.shape(kernel)
    return self.add(
      'convolution',
      (batch, -(-height // stride), -(-width // stride), filters),
      source,
      kernel,
      window_size=window,
      window_stride=[stride, stride],
      window_padding_low=[size // 2 for size in window],
      window_padding_high=[size // 2 for size in window],
      window_window_dilation=[1, 1],
      window_base_dilation=[1, 1],
      window_window_reversal_false_count=[2],
      convolution_dim_numbers_input_feature_dim=[3],
      convolution_dim_numbers_input_spatial_dims=[1, 2],
      convolution_dim_numbers_kernel_input_feature_dim=[2],
      convolution_dim_numbers_kernel_output_feature_dim=[3],
      convolution_dim_numbers_kernel_spatial_dims=[0, 1],
      convolution_dim_numbers_output_feature_dim=[3],
      feature_group_count=[1],
      batch_group_count=[1],
    )


@functools.cache
def feature_columns() -> dict[str, int]:
  """Name -> number of each column of the node features."""
  return {name: column for column, name in enumerate(features.node_feature_names())}


def _put(row: np.ndarray, name: str, values: Sequence[int]) -> None:
  """Writes `values` into the column or the block of columns of that name, with sum and product
  where it has these.
  """
  columns = feature_columns()
  if name in columns:
    (row[columns[name]],) = values
    return
  width = sum(f'{name}_{i}' in columns for i in range(6))
  assert width, name
  for i, value in enumerate(values[:width]):  # Further values count in sum and product only.
    row[columns[f'{name}_{i}']] = value
  if f'{name}_sum' in columns:
    row[columns[f'{name}_sum']], row[columns[f'{name}_product']] = sum(values), math.prod(values)


def pick(rng: np.random.Generator, options: Sequence[_T]) -> _T:
  return options[rng.integers(len(options))]


# Kernels, one to a tile module; each leaves its computation open behind its root.


@dataclasses.dataclass(frozen=True)
class Kernel:
  """How a kernel can be tiled.

  Attributes:
    sizes: the dimensions that are cut.
    bounds: tiles of these, int64 [T, len(sizes)] -> the tiles of kernel, output and input, each
      int64 [T, rank], where rank 0 says that there are none.
  """

  sizes: Sequence[int]
  bounds: Callable[[np.ndarray], Sequence[np.ndarray]]


def _elementwise_kernel(program: Program, rng: np.random.Generator) -> Kernel:
  shape = pick(rng, (_matrix_shape, _sequence_shape, _image_shape))(rng)
  op = _chain(program, rng, _leaf(program, rng, shape), int(rng.integers(2, 6, endpoint=True)))
  if rng.random() < 0.3:
    op = program.transpose(op, rng.permutation(len(shape)).tolist())
  return Kernel(program.shape(op), lambda tile: (tile[:, :0], tile, tile[:, :0]))


def _reduce_kernel(program: Program, rng: np.random.Generator) -> Kernel:
  reducer = program.reducer(pick(rng, ('add', 'maximum', 'minimum', 'multiply')))
  shape = pick(rng, (_sequence_shape, _image_shape))(rng)
  dimension = int(rng.integers(len(shape)))
  op = _chain(program, rng, _leaf(program, rng, shape), int(rng.integers(1, 5, endpoint=True)))
  op = program.reduce(op, [dimension], reducer)
  op = _chain(program, rng, op, int(rng.integers(0, 2, endpoint=True)))
  return Kernel(
    program.shape(op),
    lambda tile: (tile[:, :0], tile, np.insert(tile, dimension, shape[dimension], axis=1)),
  )


def _dot_kernel(program: Program, rng: np.random.Generator) -> Kernel:
  rows, depth = _matrix_shape(rng)
  columns = _matrix_shape(rng)[1]
  source = _leaf(program, rng, (rows, depth))
  if rng.random() < 0.5:
    source = _chain(program, rng, source, 1)
  op = program.dot(source, _weight(program, rng, depth, columns))
  _chain(program, rng, op, int(rng.integers(0, 4, endpoint=True)))
  return Kernel(
    (rows, columns, depth), lambda tile: (tile[:, [2, 1]], tile[:, :2], tile[:, [0, 2]])
  )


def _convolution_kernel(program: Program, rng: np.random.Generator) -> Kernel:
  batch, height, width, depth = _image_shape(rng)
  window, stride = pick(rng, ((1, 1), (3, 1), (3, 2), (5, 1), (7, 2)))
  filters = _image_shape(rng)[3]
  source = _leaf(program, rng, (batch, height, width, depth))
  op = program.convolution(source, _weight(program, rng, window, window, depth, filters), stride)
  batch, height, width, filters = program.shape(op)
  _chain(program, rng, op, int(rng.integers(0, 4, endpoint=True)))

  def bounds(tile: np.ndarray) -> Sequence[np.ndarray]:
    """Of tiles of batch, height, filters and depth; whole rows are taken."""
    images, rows, columns = tile[:, 0], tile[:, 1], np.full(len(tile), width)
    windows = np.full((len(tile), 2), window)
    source = [images, (rows - 1) * stride + window, (columns - 1) * stride + window, tile[:, 3]]
    return (
      np.column_stack([windows, tile[:, [3, 2]]]),
      np.column_stack([images, rows, columns, tile[:, 2]]),
      np.column_stack(source),
    )

  return Kernel((batch, height, filters, depth), bounds)


def _matrix_shape(rng: np.random.Generator) -> tuple[int, ...]:
  return (
    pick(rng, (64, 100, 128, 200, 256, 384, 512, 1024)),
    pick(rng, (64, 96, 128, 192, 256, 320, 512, 768, 1000)),
  )


def _sequence_shape(rng: np.random.Generator) -> tuple[int, ...]:
  return (pick(rng, (4, 8, 16, 32)), *_matrix_shape(rng))


def _image_shape(rng: np.random.Generator) -> tuple[int, ...]:
  size = pick(rng, (7, 14, 28, 56))
  return (pick(rng, (4, 8, 16, 32)), size, size, pick(rng, (16, 32, 48, 64, 96, 128, 192, 256)))


def _leaf(program: Program, rng: np.random.Generator, shape: Sequence[int]) -> int:
  """A tensor of that shape that is made of one parameter or constant."""
  form = pick(
    rng,
    (
      *['parameter'] * 3,
      'scalar',
      *['vector'] * 2,
      'convert',
      'transpose',
      'reshape',
      'slice',
      'pad',
      'iota',
    ),
  )
  if form == 'scalar':
    return program.scalar(shape)
  if form == 'vector':
    return program.vector(shape, int(rng.integers(len(shape))))
  if form == 'convert':
    return program.elementwise('convert', program.parameter(*shape, element_type='s32'))
  if form == 'transpose':
    permutation = rng.permutation(len(shape)).tolist()
    return program.transpose(
      program.parameter(*(shape[permutation.index(i)] for i in range(len(shape)))), permutation
    )
  if form == 'reshape':
    return program.reshape(program.parameter(shape[0] * shape[1], *shape[2:]), *shape)
  if form == 'slice':
    source = program.parameter(2 * shape[0], *shape[1:])
    return program.add(
      'slice',
      shape,
      source,
      slice_dims_start=[shape[0], *[0] * (len(shape) - 1)],
      slice_dims_limit=[2 * shape[0], *shape[1:]],
      slice_dims_stride=[1] * len(shape),
    )
  if form == 'pad':
    source = program.parameter(*shape[:-1], shape[-1] - 1)
    return program.add(
      'pad',
      shape,
      source,
      program.add('constant', ()),
      padding_config_edge_padding_low=[0] * len(shape),
      padding_config_edge_padding_high=[*[0] * (len(shape) - 1), 1],
    )
  if form == 'iota':
    return program.elementwise(
      'convert', program.add('iota', shape, element_type='s32', dimensions=[len(shape) - 1])
    )
  return program.parameter(*shape)


def _chain(program: Program, rng: np.random.Generator, op: int, length: int) -> int:
  """Elementwise ops one after the other, each of the one before and further tensors."""
  for _ in range(length):
    form = pick(rng, ('unary', 'binary', 'binary', 'binary', 'select'))
    if form == 'unary':
      op = program.elementwise(pick(rng, UNARY), op)
    elif form == 'binary':
      op = program.elementwise(pick(rng, BINARY), op, _leaf(program, rng, program.shape(op)))
    else:
      holds = program.elementwise(
        'compare', op, program.scalar(program.shape(op)), element_type='pred'
      )
      op = program.elementwise('select', holds, op, _leaf(program, rng, program.shape(op)))
  return op


def _weight(program: Program, rng: np.random.Generator, *shape: int) -> int:
  """A parameter, perhaps of another element type and converted."""
  if rng.random() < 0.7:
    return program.parameter(*shape)
  stored = 'bf16' if program.element_type == 'f32' else 'f32'
  return program.elementwise('convert', program.parameter(*shape, element_type=stored))


# Whole programs, one to a layout module: some clusters, and an entry that calls one after the
# other.


def _convolutional_net(program: Program, rng: np.random.Generator) -> None:
  reducer = program.reducer('add') if rng.random() < 0.5 else None
  # Many images of few channels, or the other way round: which dimension is best as the minor-most
  # depends on that.
  batches, channel_counts = pick(
    rng, (((128, 256), (8, 12, 16, 24)), ((8, 12, 16, 24), (64, 96, 128, 192)))
  )
  size, channels = pick(rng, (24, 28, 32, 40)), pick(rng, channel_counts)
  shape: tuple[int, ...] = (pick(rng, batches), size, size, channels)
  clusters = []
  for _ in range(rng.integers(2, 3, endpoint=True)):
    op = program.parameter(*shape)
    if rng.random() < 0.5:
      channels *= 2
      op = program.convolution(op, _weight(program, rng, 1, 1, shape[-1], channels), stride=2)
    for _ in range(rng.integers(2, 3, endpoint=True)):
      skipped = op
      for _ in range(2):
        window = pick(rng, (3, 3, 1))
        op = program.convolution(op, _weight(program, rng, window, window, channels, channels))
        op = _activation(program, rng, op)
      op = program.elementwise('add', op, skipped)
    shape = program.shape(op)
    clusters.append(program.end_computation(is_cluster=True))
  op = _call_in_turn(program, clusters)
  op = (
    program.reshape(op, shape[0], math.prod(shape[1:]))
    if reducer is None
    else program.reduce(op, [1, 2], reducer)
  )
  program.dot(op, _weight(program, rng, program.shape(op)[1], pick(rng, (10, 100, 1000))))
  program.end_computation()


def _perceptron(program: Program, rng: np.random.Generator) -> None:
  widths = (16, 24, 32, 40, 48, 64, 96, 160)
  shape = (pick(rng, (8, 16)), pick(rng, (16, 32, 48, 64)), pick(rng, widths))
  clusters = []
  for _ in range(rng.integers(2, 4, endpoint=True)):
    op = program.reshape(program.parameter(*shape), shape[0] * shape[1], shape[2])
    for _ in range(rng.integers(3, 5, endpoint=True)):
      source, width = op, pick(rng, (program.shape(op)[1], *widths))
      op = _activation(
        program, rng, program.dot(op, _weight(program, rng, program.shape(op)[1], width))
      )
      if program.shape(op) == program.shape(source):
        op = program.elementwise('add', op, source)
    shape = (*shape[:2], program.shape(op)[1])
    program.reshape(op, *shape)
    clusters.append(program.end_computation(is_cluster=True))
  _call_in_turn(program, clusters)
  program.end_computation()


def _transformer(program: Program, rng: np.random.Generator) -> None:
  total, largest = program.reducer('add'), program.reducer('maximum')
  batch, length, heads = (
    pick(rng, (2, 4, 8)),
    pick(rng, (32, 64, 100, 128, 256)),
    pick(rng, (2, 4, 8)),
  )
  width = heads * pick(rng, (8, 16, 24, 32, 64))
  clusters = []
  for _ in range(rng.integers(1, 2, endpoint=True)):
    tokens = program.reshape(program.parameter(batch, length, width), batch * length, width)

    def project(op: int, columns: int) -> int:
      return program.dot(op, _weight(program, rng, program.shape(op)[1], columns))

    def split_heads(op: int, permutation: Sequence[int]) -> int:
      return program.transpose(
        program.reshape(op, batch, length, heads, width // heads), permutation
      )

    normal = program.elementwise('multiply', tokens, program.vector((batch * length, width)))
    query = split_heads(project(normal, width), (0, 2, 1, 3))
    key = split_heads(project(normal, width), (0, 2, 3, 1))
    logits = _activation(program, rng, program.dot(query, key))  # [batch, heads, length, length]
    shape = program.shape(logits)
    logits = program.elementwise(
      'subtract', logits, program.broadcast(program.reduce(logits, [3], largest), shape, (0, 1, 2))
    )
    share = program.elementwise('exponential', logits)
    share = program.elementwise(
      'divide', share, program.broadcast(program.reduce(share, [3], total), shape, (0, 1, 2))
    )
    value = split_heads(project(normal, width), (0, 2, 1, 3))
    op = program.transpose(program.dot(share, value), (0, 2, 1, 3))
    op = project(program.reshape(op, batch * length, width), width)
    tokens = program.elementwise('add', op, tokens)
    op = project(_activation(program, rng, project(tokens, pick(rng, (2, 4)) * width)), width)
    program.reshape(program.elementwise('add', op, tokens), batch, length, width)
    clusters.append(program.end_computation(is_cluster=True))
  _call_in_turn(program, clusters)
  program.end_computation()


def _activation(program: Program, rng: np.random.Generator, op: int) -> int:
  """A bias or scale or neither, and a function of each value."""
  shape = program.shape(op)
  form = pick(rng, ('add', 'add', 'multiply', ''))
  if form:
    op = program.elementwise(form, op, program.vector(shape))
  form = pick(rng, ('relu', 'relu', 'tanh', 'swish', ''))
  if form == 'relu':
    return program.elementwise('maximum', op, program.scalar(shape))
  if form == 'tanh':
    return program.elementwise('tanh', op)
  if form == 'swish':
    return program.elementwise('multiply', op, program.elementwise('logistic', op))
  return op


def _call_in_turn(program: Program, clusters: Sequence[Computation]) -> int:
  """Calls each cluster with the result of the one before."""
  op = program.parameter(*program.shape(clusters[0].parameters[0]))
  for cluster in clusters:
    op = program.call('call', cluster, op)
  return op


KERNELS = (_elementwise_kernel, _reduce_kernel, _dot_kernel, _convolution_kernel)
NETS = (_convolutional_net, _perceptron, _transformer)
