"""The programs of the built-in sample: graphs built op by op, and their node features.

See `synthetic` for the sample itself.
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
  """One op.

  Attributes:
    opcode: the name of the opcode.
    element_type: the element type of the op's tensor, such as 'f32'.
    shape: the dimensions of the op's tensor.
    operands: the indices of the op's operands.
    attributes: values by the name of their column or block of columns, such as 'window_size'.
  """

  opcode: str
  element_type: str
  shape: tuple[int, ...]
  operands: tuple[int, ...]
  attributes: dict[str, Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Computation:
  """A finished computation.

  Attributes:
    root: the index of the root op.
    parameters: the indices of the parameter ops.
  """

  root: int
  parameters: list[int]


class Program:
  """A program that is built op by op.

  Methods that add an op return its index; most infer its shape. Computations follow each other,
  called ones before their callers, and the last op of each computation is its root.

  Args:
    element_type: the element type of all tensors for which no other is given.
  """

  def __init__(self, *, element_type: str):
    self.ops: list[_Op] = []
    self.element_type = element_type
    self._ends: list[int] = []  # The ends of computations.
    self._splits = [0]
    self._parameters: list[int] = []  # The parameters of the present computation.

  def arrays(self) -> dict[str, Any]:
    """Returns the arrays of the graph, as `Module` describes them."""
    node_feat = np.zeros((len(self.ops), features.NUM_NODE_FEATURES), np.float32)
    columns = feature_columns()
    products = [column for name, column in columns.items() if name.endswith('_product')]
    node_feat[:, products] = 1  # The product of no values is 1.
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
    """Ends the present computation, and also the segment if the computation is a cluster."""
    self._ends.append(len(self.ops))
    if is_cluster:
      self._splits.append(len(self.ops))
    parameters, self._parameters = self._parameters, []
    return Computation(len(self.ops) - 1, parameters)

  def shape(self, op: int) -> tuple[int, ...]:
    """Returns the dimensions of an op's tensor."""
    return self.ops[op].shape

  def add(
    self,
    opcode: str,
    shape: Sequence[int],
    *operands: int,
    element_type: str | None = None,
    **attributes: Sequence[int],
  ) -> int:
    """Adds an op of a given shape."""
    element_type = element_type or self.element_type
    self.ops.append(_Op(opcode, element_type, tuple(shape), operands, attributes))
    return len(self.ops) - 1

  def parameter(self, *shape: int, element_type: str | None = None) -> int:
    """Adds the next parameter of the present computation."""
    number = len(self._parameters)
    op = self.add('parameter', shape, element_type=element_type, parameter_number=[number])
    self._parameters.append(op)
    return op

  def call(self, opcode: str, computation: Computation, *operands: int) -> int:
    """Adds a call of a computation.

    The computation takes `operands`, and a new parameter for each further operand that it needs.
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
    """Adds an op with the shape of its first operand."""
    return self.add(opcode, self.shape(operands[0]), *operands, element_type=element_type)

  def broadcast(self, op: int, shape: Sequence[int], dimensions: Sequence[int] = ()) -> int:
    """Adds a broadcast to `shape`; the dimensions of `op` become `dimensions` of the result."""
    element_type = self.ops[op].element_type
    return self.add('broadcast', shape, op, element_type=element_type, dimensions=dimensions)

  def scalar(self, shape: Sequence[int]) -> int:
    """Adds a scalar constant, broadcast to `shape`."""
    return self.broadcast(self.add('constant', ()), shape)

  def vector(self, shape: Sequence[int], dimension: int = -1) -> int:
    """Adds a parameter with one value per position in `dimension`, broadcast to `shape`."""
    return self.broadcast(self.parameter(shape[dimension]), shape, [dimension % len(shape)])

  def transpose(self, op: int, permutation: Sequence[int]) -> int:
    """Adds a transpose; dimension i of the result is dimension `permutation[i]` of `op`."""
    shape = [self.shape(op)[i] for i in permutation]
    return self.add('transpose', shape, op, dimensions=permutation)

  def reshape(self, op: int, *shape: int) -> int:
    """Adds a reshape to `shape`."""
    return self.add('reshape', shape, op)

  def reducer(self, opcode: str) -> int:
    """Adds a computation that joins two values, and returns its root.

    It must be added before the computation with the reduce op that uses it.
    """
    left, right = self.parameter(), self.parameter()
    self.add(opcode, (), left, right)
    return self.end_computation().root

  def reduce(self, op: int, dimensions: Sequence[int], reducer: int) -> int:
    """Adds a reduction of `dimensions` with the computation whose root is `reducer`."""
    shape = [size for i, size in enumerate(self.shape(op)) if i not in dimensions]
    return self.add('reduce', shape, op, self.add('constant', ()), reducer, dimensions=dimensions)

  def dot(self, source: int, kernel: int) -> int:
    """Adds a dot [..., m, k] x [..., k, n] -> [..., m, n]."""
    shape = [*self.shape(source)[:-1], self.shape(kernel)[-1]]
    return self.add('dot', shape, source, kernel)

  def convolution(self, source: int, kernel: int, stride: int = 1) -> int:
    """Adds a convolution, padded at the borders.

    [b, h, w, i] x [height, width, i, o] -> [b, h / stride, w / stride, o], where height and width
    of the kernel are odd.
    """
    batch, height, width, _ = self.shape(source)
    *window, _, filters = self.shape(kernel)
    shape = (batch, -(-height // stride), -(-width // stride), filters)
    return self.add(
      'convolution',
      shape,
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
  """Returns the number of each column of the node features by the column's name."""
  return {name: column for column, name in enumerate(features.node_feature_names())}


def _put(row: np.ndarray, name: str, values: Sequence[int]) -> None:
  """Writes `values` into the column or the block of columns `name`.

  Also writes the block's sum and product if it has these columns.
  """
  columns = feature_columns()
  if name in columns:
    (row[columns[name]],) = values
    return
  width = sum(f'{name}_{i}' in columns for i in range(6))
  assert width, name
  # Values beyond the block's width count in sum and product only.
  for i, value in enumerate(values[:width]):
    row[columns[f'{name}_{i}']] = value
  if f'{name}_sum' in columns:
    row[columns[f'{name}_sum']] = sum(values)
    row[columns[f'{name}_product']] = math.prod(values)


def pick(rng: np.random.Generator, options: Sequence[_T]) -> _T:
  """Returns one of the options at random, each with equal probability."""
  return options[rng.integers(len(options))]


# Kernels: each tile module has one. A kernel leaves its computation open after the root.


@dataclasses.dataclass(frozen=True)
class Kernel:
  """The possible tilings of a kernel.

  Attributes:
    sizes: the sizes of the dimensions that are cut.
    bounds: maps tiles of these dimensions, int64 [T, len(sizes)], to the tiles of kernel, output
      and input, each int64 [T, rank]. A tensor that the op does not have is of rank 0.
  """

  sizes: Sequence[int]
  bounds: Callable[[np.ndarray], Sequence[np.ndarray]]


def _elementwise_kernel(program: Program, rng: np.random.Generator) -> Kernel:
  make_shape = pick(rng, (_matrix_shape, _sequence_shape, _image_shape))
  shape = make_shape(rng)
  op = _leaf(program, rng, shape)
  op = _chain(program, rng, op, int(rng.integers(2, 6, endpoint=True)))
  if rng.random() < 0.3:
    op = program.transpose(op, rng.permutation(len(shape)).tolist())
  return Kernel(program.shape(op), lambda tile: (tile[:, :0], tile, tile[:, :0]))


def _reduce_kernel(program: Program, rng: np.random.Generator) -> Kernel:
  reducer = program.reducer(pick(rng, ('add', 'maximum', 'minimum', 'multiply')))
  make_shape = pick(rng, (_sequence_shape, _image_shape))
  shape = make_shape(rng)
  dimension = int(rng.integers(len(shape)))
  op = _leaf(program, rng, shape)
  op = _chain(program, rng, op, int(rng.integers(1, 5, endpoint=True)))
  op = program.reduce(op, [dimension], reducer)
  op = _chain(program, rng, op, int(rng.integers(0, 2, endpoint=True)))

  def bounds(tile: np.ndarray) -> Sequence[np.ndarray]:
    """Returns the tiles for tiles of the output; the reduced dimension is read as a whole."""
    source = np.insert(tile, dimension, shape[dimension], axis=1)
    return tile[:, :0], tile, source

  return Kernel(program.shape(op), bounds)


def _dot_kernel(program: Program, rng: np.random.Generator) -> Kernel:
  rows, depth = _matrix_shape(rng)
  columns = _matrix_shape(rng)[1]
  source = _leaf(program, rng, (rows, depth))
  if rng.random() < 0.5:
    source = _chain(program, rng, source, 1)
  op = program.dot(source, _weight(program, rng, depth, columns))
  _chain(program, rng, op, int(rng.integers(0, 4, endpoint=True)))
  return Kernel(
    sizes=(rows, columns, depth),
    bounds=lambda tile: (tile[:, [2, 1]], tile[:, :2], tile[:, [0, 2]]),
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
    """Returns the tiles for tiles of batch, height, filters and depth, with rows of full width."""
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
  batch = pick(rng, (4, 8, 16, 32))
  channels = pick(rng, (16, 32, 48, 64, 96, 128, 192, 256))
  return (batch, size, size, channels)


def _leaf(program: Program, rng: np.random.Generator, shape: Sequence[int]) -> int:
  """Adds a tensor of the given shape that is made from a parameter, a constant or an iota."""
  forms = (
    'parameter',
    'parameter',
    'parameter',
    'scalar',
    'vector',
    'vector',
    'convert',
    'transpose',
    'reshape',
    'slice',
    'pad',
    'iota',
  )
  form = pick(rng, forms)
  if form == 'scalar':
    return program.scalar(shape)
  if form == 'vector':
    return program.vector(shape, int(rng.integers(len(shape))))
  if form == 'convert':
    return program.elementwise('convert', program.parameter(*shape, element_type='s32'))
  if form == 'transpose':
    permutation = rng.permutation(len(shape)).tolist()
    source_shape = [shape[permutation.index(i)] for i in range(len(shape))]
    return program.transpose(program.parameter(*source_shape), permutation)
  if form == 'reshape':
    source = program.parameter(shape[0] * shape[1], *shape[2:])
    return program.reshape(source, *shape)
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
    value = program.add('constant', ())
    return program.add(
      'pad',
      shape,
      source,
      value,
      padding_config_edge_padding_low=[0] * len(shape),
      padding_config_edge_padding_high=[*[0] * (len(shape) - 1), 1],
    )
  if form == 'iota':
    numbers = program.add('iota', shape, element_type='s32', dimensions=[len(shape) - 1])
    return program.elementwise('convert', numbers)
  return program.parameter(*shape)


def _chain(program: Program, rng: np.random.Generator, op: int, length: int) -> int:
  """Adds elementwise ops in a row; each takes the op before it, and most take further tensors."""
  for _ in range(length):
    form = pick(rng, ('unary', 'binary', 'binary', 'binary', 'select'))
    if form == 'unary':
      op = program.elementwise(pick(rng, UNARY), op)
    elif form == 'binary':
      opcode = pick(rng, BINARY)
      other = _leaf(program, rng, program.shape(op))
      op = program.elementwise(opcode, op, other)
    else:
      bound = program.scalar(program.shape(op))
      holds = program.elementwise('compare', op, bound, element_type='pred')
      other = _leaf(program, rng, program.shape(op))
      op = program.elementwise('select', holds, op, other)
  return op


def _weight(program: Program, rng: np.random.Generator, *shape: int) -> int:
  """Adds a parameter, sometimes one of another element type that is then converted."""
  if rng.random() < 0.7:
    return program.parameter(*shape)
  stored = 'bf16' if program.element_type == 'f32' else 'f32'
  return program.elementwise('convert', program.parameter(*shape, element_type=stored))


# Whole programs: each layout module has one. A program has some clusters, and an entry computation
# that calls them one after the other.


def _convolutional_net(program: Program, rng: np.random.Generator) -> None:
  reducer = program.reducer('add') if rng.random() < 0.5 else None
  # A net has many images with few channels, or few images with many channels. The best minor-most
  # dimension depends on that.
  many_images = ((128, 256), (8, 12, 16, 24))
  many_channels = ((8, 12, 16, 24), (64, 96, 128, 192))
  batches, channel_counts = pick(rng, (many_images, many_channels))
  size = pick(rng, (24, 28, 32, 40))
  channels = pick(rng, channel_counts)
  shape: tuple[int, ...] = (pick(rng, batches), size, size, channels)
  clusters = []
  for _ in range(rng.integers(2, 3, endpoint=True)):
    op = program.parameter(*shape)
    if rng.random() < 0.5:
      channels *= 2
      weight = _weight(program, rng, 1, 1, shape[-1], channels)
      op = program.convolution(op, weight, stride=2)
    for _ in range(rng.integers(2, 3, endpoint=True)):
      skipped = op
      for _ in range(2):
        window = pick(rng, (3, 3, 1))
        weight = _weight(program, rng, window, window, channels, channels)
        op = program.convolution(op, weight)
        op = _activation(program, rng, op)
      op = program.elementwise('add', op, skipped)
    shape = program.shape(op)
    clusters.append(program.end_computation(is_cluster=True))
  op = _call_in_turn(program, clusters)
  if reducer is None:
    op = program.reshape(op, shape[0], math.prod(shape[1:]))
  else:
    op = program.reduce(op, [1, 2], reducer)
  num_classes = pick(rng, (10, 100, 1000))
  program.dot(op, _weight(program, rng, program.shape(op)[1], num_classes))
  program.end_computation()


def _perceptron(program: Program, rng: np.random.Generator) -> None:
  widths = (16, 24, 32, 40, 48, 64, 96, 160)
  shape = (pick(rng, (8, 16)), pick(rng, (16, 32, 48, 64)), pick(rng, widths))
  clusters = []
  for _ in range(rng.integers(2, 4, endpoint=True)):
    op = program.reshape(program.parameter(*shape), shape[0] * shape[1], shape[2])
    for _ in range(rng.integers(3, 5, endpoint=True)):
      source = op
      source_width = program.shape(op)[1]
      width = pick(rng, (source_width, *widths))
      op = program.dot(op, _weight(program, rng, source_width, width))
      op = _activation(program, rng, op)
      if program.shape(op) == program.shape(source):
        op = program.elementwise('add', op, source)
    shape = (*shape[:2], program.shape(op)[1])
    program.reshape(op, *shape)
    clusters.append(program.end_computation(is_cluster=True))
  _call_in_turn(program, clusters)
  program.end_computation()


def _transformer(program: Program, rng: np.random.Generator) -> None:
  total, largest = program.reducer('add'), program.reducer('maximum')
  batch = pick(rng, (2, 4, 8))
  length = pick(rng, (32, 64, 100, 128, 256))
  heads = pick(rng, (2, 4, 8))
  width = heads * pick(rng, (8, 16, 24, 32, 64))
  clusters = []
  for _ in range(rng.integers(1, 2, endpoint=True)):
    tokens = program.reshape(program.parameter(batch, length, width), batch * length, width)

    def project(op: int, columns: int) -> int:
      return program.dot(op, _weight(program, rng, program.shape(op)[1], columns))

    def split_heads(op: int, permutation: Sequence[int]) -> int:
      by_head = program.reshape(op, batch, length, heads, width // heads)
      return program.transpose(by_head, permutation)

    scale = program.vector((batch * length, width))
    normal = program.elementwise('multiply', tokens, scale)
    query = split_heads(project(normal, width), (0, 2, 1, 3))
    key = split_heads(project(normal, width), (0, 2, 3, 1))
    logits = _activation(program, rng, program.dot(query, key))  # [batch, heads, length, length]
    shape = program.shape(logits)
    maximum = program.broadcast(program.reduce(logits, [3], largest), shape, (0, 1, 2))
    logits = program.elementwise('subtract', logits, maximum)
    share = program.elementwise('exponential', logits)
    share_sum = program.broadcast(program.reduce(share, [3], total), shape, (0, 1, 2))
    share = program.elementwise('divide', share, share_sum)
    value = split_heads(project(normal, width), (0, 2, 1, 3))
    op = program.transpose(program.dot(share, value), (0, 2, 1, 3))
    op = project(program.reshape(op, batch * length, width), width)
    tokens = program.elementwise('add', op, tokens)
    op = project(tokens, pick(rng, (2, 4)) * width)
    op = project(_activation(program, rng, op), width)
    op = program.elementwise('add', op, tokens)
    program.reshape(op, batch, length, width)
    clusters.append(program.end_computation(is_cluster=True))
  _call_in_turn(program, clusters)
  program.end_computation()


def _activation(program: Program, rng: np.random.Generator, op: int) -> int:
  """Adds a bias, a scale or neither, and a function of each value or none."""
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
  """Adds a call of each cluster on the result of the cluster before."""
  op = program.parameter(*program.shape(clusters[0].parameters[0]))
  for cluster in clusters:
    op = program.call('call', cluster, op)
  return op


KERNELS = (_elementwise_kernel, _reduce_kernel, _dot_kernel, _convolution_kernel)
NETS = (_convolutional_net, _perceptron, _transformer)
