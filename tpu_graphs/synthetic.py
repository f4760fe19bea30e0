"""The built-in sample: small made-up programs with planted runtimes.

Nothing here was measured, and every module says so in its name. The sample lets everything that handles real data run
without a download, and it can be learnt: the runtime of a config is `planted_cost`, a function of the module's
features alone, times some noise. The cost follows a TPU in outline (registers of 8 x 128 values, a small fast memory,
copies between layouts that differ), not in its numbers: a model that ranks the sample well is known to work, not to be
good.

Tile modules are fused kernels whose configs are tilings. Layout modules are convolutional nets, perceptrons and
transformers whose configs permute the layouts of convolutions, dots and reshapes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import tempfile
from typing import Any, TypeVar

import numpy as np

from tpu_graphs import errors
from tpu_graphs import features
from tpu_graphs import manifest
from tpu_graphs import module as module_lib
from tpu_graphs import npz

NOISE = 0.01  # Standard deviation of the logarithm of a runtime.

# The planted machine; rates are per ns.
_LANES, _SUBLANES = _REGISTER = (128, 8)  # The minor-most and the next dimension are padded to multiples of these.
_BYTE_RATE = 500.0
_MATRIX_RATE = 50_000.0  # Multiplications of a convolution or dot, with their additions.
_VECTOR_RATE = 1_000.0  # Units of `_WORK`.
_FAST_BYTES = 2 << 20
_MAX_SPILL = 4.0
_TILE_NS = 400.0  # To start a tile.
_LAUNCH_NS = 1_500.0  # To start a module.
_MINOR_PASSES, _MAJOR_PASSES = 2.0, 0.5  # Over a tensor, to move its minor-most dimension or only others.
_ELEMENT_BYTES = {'pred': 1, 'bf16': 2, 's32': 4, 'f32': 4}

_UNARY = ('abs', 'exponential', 'logistic', 'negate', 'rsqrt', 'tanh')
_BINARY = ('add', 'divide', 'maximum', 'minimum', 'multiply', 'subtract')
# These leave shapes as they are, and so pass the layout of their operands on.
_ELEMENTWISE = ('convert', 'select', *_UNARY, *_BINARY)
_CONFIGURABLE = ('convolution', 'dot', 'reshape')
# For each value, in additions; other opcodes do no such work.
_WORK = {**dict.fromkeys(('compare', 'reduce', *_ELEMENTWISE), 1.0),
         'divide': 4.0, 'transpose': 4.0, 'rsqrt': 6.0, 'exponential': 8.0, 'logistic': 10.0, 'tanh': 12.0}

_TILINGS_TRIED = 2000
_MAX_SPREAD = 18.0  # A tiling this much slower than the best is not worth a measurement.
_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True)
class Split:
  """What `write_tree` wrote into one folder.

  Attributes:
    kind: 'tile' or 'layout'.
    name: 'train', 'valid' or 'test'.
    num_modules: modules, one file each.
    num_configs: their configs together.
  """
  kind: str
  name: str
  num_modules: int
  num_configs: int


def write_tree(directory: str | os.PathLike[str], *, seed: int = 0, tile: Sequence[int] = (160, 32, 32),
               layout: Sequence[int] = (80, 16, 16)) -> list[Split]:
  """Writes DIRECTORY/npz/{tile,layout}/synthetic/{train,valid,test}/*.npz and DIRECTORY/README.txt.

  Unlike the published test split, that of the sample is measured as well. No two modules of a kind have equal graphs.
  The folder npz appears when it is complete.

  Args:
    directory: made where it is missing.
    seed: equal seeds give equal bytes.
    tile: number of tile modules in each of `manifest.SPLITS`.
    layout: the same for layout modules.

  Raises:
    InputError: `directory` is not an empty folder, or cannot be written.
  """
  target = pathlib.Path(directory)
  splits = []
  try:
    target.mkdir(parents=True, exist_ok=True)
    if found := sorted(entry.name for entry in target.iterdir()):
      raise errors.InputError('folder not empty', path=str(target), found=', '.join(found[:3]),
                              expected='a new or an empty folder', fix='name another one, or remove it')
    with tempfile.TemporaryDirectory(prefix='.npz.', dir=target) as unfinished:
      for kind, sizes in (('tile', tile), ('layout', layout)):
        modules = generate(kind, sum(sizes), seed)
        for name, size in zip(manifest.SPLITS, sizes, strict=True):
          folder = pathlib.Path(unfinished, 'npz', kind, 'synthetic', name)
          folder.mkdir(parents=True)
          num_configs = 0
          for module in itertools.islice(modules, size):
            npz.save(module, folder / f'{module.module_id}.npz')
            num_configs += module.num_configs
          splits.append(Split(kind, name, size, num_configs))
      (target / 'README.txt').write_text(_readme(seed, splits), encoding='utf-8')
      os.replace(pathlib.Path(unfinished, 'npz'), target / 'npz')
  except OSError as error:
    raise errors.InputError('cannot write folder', path=str(target), found=error.strerror) from error
  return splits


def _readme(seed: int, splits: list[Split]) -> str:
  folders = '\n'.join(f'  npz/{split.kind}/synthetic/{split.name}: {split.num_modules} modules, '
                      f'{split.num_configs} configs' for split in splits)
  return f"""SYNTHETIC DATA: none of these programs exists and no runtime was measured.

The modules were generated by tpu_graphs/synthetic.py with seed {seed}. A runtime is a planted cost, computed from the
features of module and config, times log-normal noise of {NOISE:.0%}. A model that ranks these configs well is known to
work; nothing is known of how well it ranks real ones.

Collections tile:synthetic and layout:synthetic:
{folders}
"""


def generate(kind: str, count: int, seed: int = 0) -> Iterator[module_lib.Module]:
  """`count` modules of distinct topology. Where a graph has occurred before, the module and its number are left out.

  Raises:
    InputError: unknown kind.
  """
  makers = {'tile': tile_module, 'layout': layout_module}
  if kind not in makers:
    raise errors.InputError('unknown kind', where='kind', found=repr(kind), expected=' or '.join(makers))
  return _distinct(functools.partial(makers[kind], seed=seed), count)


def _distinct(make: Callable[[int], module_lib.Module], count: int) -> Iterator[module_lib.Module]:
  seen: set[bytes] = set()
  for index in itertools.count():
    if len(seen) >= count:
      return
    module = make(index)
    fingerprint = module.topology_fingerprint()
    if fingerprint not in seen:
      seen.add(fingerprint)
      yield module


def tile_module(index: int, *, seed: int = 0, noise: float = NOISE) -> module_lib.Module:
  """A fused kernel with 20 to 80 tilings, of which the first is the default.

  Args:
    index: number of the module within the sample.
    seed: of the sample. Equal numbers and seeds give equal modules.
    noise: standard deviation of the logarithm of a runtime; 0 leaves the planted cost, rounded to ns.
  """
  rng = np.random.default_rng([seed, 0, index])
  program = _Program(element_type=_pick(rng, ('f32', 'f32', 'bf16')))
  make_kernel = _pick(rng, (_elementwise_kernel, _reduce_kernel, _dot_kernel, _convolution_kernel))
  kernel = make_kernel(program, rng)
  program.call('fusion', program.end_computation())
  program.end_computation()
  config_feat = _tilings(kernel, rng)
  pool = _unmeasured(program, 'tile', index, len(config_feat), config_feat=config_feat,
                     config_runtime_normalizers=np.full(len(config_feat), module_lib.UNMEASURED))
  cost = planted_cost(pool)
  worthwhile = np.flatnonzero(cost <= _MAX_SPREAD * cost.min())
  default = worthwhile[np.argmax(_rule_of_thumb(config_feat[worthwhile]))]
  others = rng.permutation(worthwhile[worthwhile != default])[:rng.integers(19, 79, endpoint=True)]
  return _measured(pool.select_configs(np.append(default, others)), rng, noise)


def layout_module(index: int, *, seed: int = 0, noise: float = NOISE) -> module_lib.Module:
  """A program with 40 to 100 layout configs, of which the first is the default: dimensions in descending order.

  Args:
    index: number of the module within the sample.
    seed: of the sample. Equal numbers and seeds give equal modules.
    noise: standard deviation of the logarithm of a runtime; 0 leaves the planted cost, rounded to ns.
  """
  rng = np.random.default_rng([seed, 1, index])
  program = _Program(element_type=_pick(rng, ('f32', 'bf16')))
  _pick(rng, (_convolutional_net, _perceptron, _transformer))(program, rng)
  # As in the published graphs, some reshapes cannot be configured.
  chosen = [i for i, op in enumerate(program.ops)
            if op.opcode in _CONFIGURABLE and (op.opcode != 'reshape' or rng.random() < 0.8)]
  shapes = [[program.shape(tensor) for tensor in (i, *program.ops[i].operands)] for i in chosen]
  node_config_feat = _layouts(shapes, int(rng.integers(40, 100, endpoint=True)), rng)
  module = _unmeasured(program, 'layout', index, len(node_config_feat), node_config_ids=np.array(chosen, np.int64),
                       node_config_feat=node_config_feat)
  return _measured(module, rng, noise)


def _unmeasured(program: _Program, kind: str, index: int, c: int, **configs: Any) -> module_lib.Module:
  return module_lib.Module(module_id=f'synthetic_{kind}_{index:04d}', kind=kind, config_id=np.arange(c),
                           config_runtime=np.full(c, module_lib.UNMEASURED), **program.arrays(), **configs)


def _measured(module: module_lib.Module, rng: np.random.Generator, noise: float) -> module_lib.Module:
  """`module` with runtimes and its configs numbered anew; the first is the default."""
  c = module.num_configs
  runtime = np.rint(planted_cost(module) * np.exp(noise * rng.standard_normal(c))).astype(np.int64)
  normalizers = np.full(c, runtime[0]) if module.kind == 'tile' else None
  return dataclasses.replace(module, config_id=np.arange(c), config_runtime=runtime,
                             config_runtime_normalizers=normalizers)


# The planted cost.


def planted_cost(module: module_lib.Module) -> np.ndarray:
  """Time of each config of a module of the sample without noise, ns, float64 [C], from its features alone.

  Tile: number of tiles times (a start, and the longer of computing a tile and moving it, padded to whole registers);
  a tile takes longer where two of them exceed the fast memory.

  Layout: each configurable op computes and moves its tensors, padded to whole registers along the dimensions that its
  layouts make minor-most; a tensor that one configurable op makes in another layout than the next one reads it in is
  copied on the way.
  """
  return _tile_cost(module) if module.kind == 'tile' else _layout_cost(module)


class _Graph:
  """The ops of a module as read back from its features.

  Attributes:
    names: opcode of each op.
    shapes: dimensions of each op's tensor.
    elements: number of values in it, float64 [N].
    bytes: its size, float64 [N].
    operands: indices of each op's operands, ascending. The features do not tell input and kernel apart: programs of the
      sample make the input first.
  """

  def __init__(self, module: module_lib.Module):
    feat, columns = module.node_feat.astype(np.float64), _columns()
    first = columns['shape_dimensions_0']
    self.names = [features.opcode_names()[opcode] for opcode in module.node_opcode]
    self.shapes = [tuple(int(size) for size in row if size) for row in feat[:, first:first + 6]]
    self.elements = feat[:, columns['shape_dimensions_product']]
    self.bytes = self.elements * sum(size * feat[:, columns[f'shape_element_type_is_{name}']]
                                     for name, size in _ELEMENT_BYTES.items())
    self.operands: list[list[int]] = [[] for _ in self.names]
    for consumer, operand in module.edge_index.tolist():
      self.operands[consumer].append(operand)

  def multiplications(self, op: int) -> float:
    """Multiplications in a convolution or dot; none in other ops."""
    if self.names[op] not in ('convolution', 'dot'):
      return 0.0
    source, kernel = self.operands[op]
    if self.names[op] == 'convolution':
      return self.elements[op] * self.elements[kernel] / self.shapes[kernel][-1]
    # b m k n from the sizes of [b, m, k] x [b, k, n] -> [b, m, n], since features do not tell which dimension is k.
    return math.sqrt(self.elements[op] * self.elements[source] * self.elements[kernel]
                     / math.prod(self.shapes[op][:-2]))

  def makers(self, tensor: int, among: Container[int]) -> list[int]:
    """The ops of `among` that make `tensor`, or tensors from which it is made value by value."""
    found, pending, seen = [], [tensor], {tensor}
    while pending:
      op = pending.pop()
      if op in among:
        found.append(op)
      elif self.names[op] in _ELEMENTWISE:
        pending.extend(operand for operand in self.operands[op] if operand not in seen)
        seen.update(self.operands[op])
    return found


def _tile_cost(module: module_lib.Module) -> np.ndarray:
  assert module.config_feat is not None  # Of this kind.
  graph = _Graph(module)
  body = np.flatnonzero(module.computation < module.computation[-1])  # The entry behind it only calls the fusion.
  root = body[-1]
  kernel_tile, output_tile, input_tile = (module.config_feat[:, first:first + 6].astype(np.float64)
                                          for first in (0, 8, 16))
  rank = len(graph.shapes[root])

  def value_bytes(tensor: int) -> float:
    """Bytes that are moved for each value of `tensor`, together with the parameters that come in tiles like it."""
    alike = [op for op in body if graph.names[op] == 'parameter' and graph.elements[op] == graph.elements[tensor]]
    return sum(graph.bytes[op] for op in {tensor, *alike}) / graph.elements[tensor]

  # All that follows is [C].
  tiles = np.prod(np.ceil(graph.shapes[root] / output_tile[:, :rank]), axis=1)
  values = _padded_size(output_tile, rank)
  output_bytes = values * value_bytes(root)
  work = sum(_WORK.get(graph.names[op], 0.0) * graph.elements[op] for op in body) / graph.elements[root]
  vector_ns = values * work / _VECTOR_RATE
  input_bytes, matrix_ns, steps = np.zeros_like(tiles), np.zeros_like(tiles), np.ones_like(tiles)
  for op in body:
    if graph.names[op] == 'reduce':
      source = max(graph.operands[op], key=lambda operand: graph.elements[operand])
      input_bytes = _padded_size(input_tile, len(graph.shapes[source])) * value_bytes(source)
    elif graph.names[op] in ('convolution', 'dot'):
      source, kernel = graph.operands[op]
      depth, kernel_rank = graph.shapes[kernel][-2], len(graph.shapes[kernel])
      depth_tile = kernel_tile[:, kernel_rank - 2]
      steps = np.ceil(depth / depth_tile)  # Over the contracted dimension, which add up to one tile of the output.
      window = np.prod(kernel_tile[:, :kernel_rank - 2], axis=1)
      matrix_ns = values * window * _round_up(depth_tile, _LANES) / _MATRIX_RATE
      input_bytes = (_padded_size(input_tile, len(graph.shapes[source])) * value_bytes(source)
                     + _padded_size(kernel_tile, kernel_rank) * value_bytes(kernel))
  compute_ns = matrix_ns + vector_ns / steps
  move_ns = (input_bytes + output_bytes / steps) / _BYTE_RATE
  spill = np.clip(2 * (input_bytes + output_bytes) / _FAST_BYTES - 1, 0, _MAX_SPILL)
  step_ns = _TILE_NS + np.maximum(compute_ns, move_ns) * (1 + spill)
  return _LAUNCH_NS + tiles * steps * step_ns + np.minimum(compute_ns, move_ns)  # The first tile cannot overlap.


def _layout_cost(module: module_lib.Module) -> np.ndarray:
  ids, configs = module.node_config_ids, module.node_config_feat
  assert ids is not None  # Both: of this kind.
  assert configs is not None
  graph = _Graph(module)
  config_of_op = {op: i for i, op in enumerate(ids.tolist())}

  def layout(op: int, tensor: int) -> np.ndarray:
    """int8 [C, rank], minor to major; tensor 0 is the output, 1 the input, 2 the kernel."""
    rank = len(graph.shapes[(op, *graph.operands[op])[tensor]])
    return configs[:, config_of_op[op], 6 * tensor:6 * tensor + rank]

  cost = np.full(module.num_configs, _LAUNCH_NS)  # Other ops are thought of as fused into these, at no cost.
  for op in config_of_op:
    tensors = (op, *graph.operands[op])
    padding = [_padding(graph.shapes[tensor], layout(op, i)) for i, tensor in enumerate(tensors)]  # Each [C].
    move_ns = sum(graph.bytes[tensor] * factor for tensor, factor in zip(tensors, padding, strict=True)) / _BYTE_RATE
    cost += np.maximum(move_ns, graph.multiplications(op) * padding[0] / _MATRIX_RATE)
    for i, operand in enumerate(graph.operands[op], start=1):
      for maker in graph.makers(operand, config_of_op):
        made, read = layout(maker, 0), layout(op, i)
        passes = np.where((made[:, :1] != read[:, :1]).any(axis=1), _MINOR_PASSES,
                          np.where((made != read).any(axis=1), _MAJOR_PASSES, 0))
        cost += passes * graph.bytes[operand] / _BYTE_RATE
  return cost


def _round_up(sizes: np.ndarray, multiple: int) -> np.ndarray:
  return np.ceil(sizes / multiple) * multiple


def _padded_size(tile: np.ndarray, rank: int) -> np.ndarray:
  """Values in tiles [C, >= rank] in descending layout, padded to whole registers: [C]."""
  sizes = tile[:, :rank][:, ::-1].copy()
  for position, multiple in enumerate(_REGISTER[:rank]):
    sizes[:, position] = _round_up(sizes[:, position], multiple)
  return np.prod(sizes, axis=1)


def _padding(shape: Sequence[int], layout: np.ndarray) -> np.ndarray:
  """By how much padding to whole registers enlarges a tensor in layouts [C, rank], minor to major: [C]."""
  factor = np.ones(len(layout))
  for position, multiple in enumerate(_REGISTER[:len(shape)]):
    sizes = np.array(shape)[layout[:, position]]
    factor *= _round_up(sizes, multiple) / sizes
  return factor


# Configs.


@dataclasses.dataclass(frozen=True)
class _Kernel:
  """How a kernel can be tiled.

  Attributes:
    sizes: the dimensions that are cut.
    bounds: tiles of these, int64 [T, len(sizes)] -> the tiles of kernel, output and input, each int64 [T, rank], where
      rank 0 says that there are none.
  """
  sizes: Sequence[int]
  bounds: Callable[[np.ndarray], Sequence[np.ndarray]]


def _tilings(kernel: _Kernel, rng: np.random.Generator) -> np.ndarray:
  """Distinct tilings, float32 [T, 24]; see `features.tile_feature_names`."""
  tiles = np.stack([rng.choice(_tile_sizes(size), _TILINGS_TRIED) for size in kernel.sizes], axis=1)
  tiles = np.unique(tiles, axis=0)
  blocks = np.zeros((len(tiles), 3, 8), np.int64)
  for block, bounds in zip(blocks.swapaxes(0, 1), kernel.bounds(tiles), strict=True):
    if bounds.shape[1]:  # The product of no bounds is 0 here, unlike in node features.
      block[:, :bounds.shape[1]] = bounds
      block[:, 6], block[:, 7] = bounds.sum(axis=1), bounds.prod(axis=1)
  return blocks.reshape(len(tiles), -1).astype(np.float32)


def _tile_sizes(size: int) -> list[int]:
  """Powers of two and three times these, up to `size`, and its large divisors."""
  round_sizes = {factor << i for factor in (1, 3) for i in range(size.bit_length())}
  divisors = {size // parts for parts in range(1, 8) if size % parts == 0}
  return sorted(tile for tile in round_sizes | divisors if tile <= size)


def _rule_of_thumb(config_feat: np.ndarray) -> np.ndarray:
  """What the made-up compiler goes by, higher first: large and wide tiles that fit well into the fast memory."""
  rank = np.count_nonzero(config_feat[0, 8:14])
  size = config_feat[:, 7] + config_feat[:, 15] + config_feat[:, 23]
  return np.where(16 * size <= _FAST_BYTES, size * config_feat[:, 7 + rank], -size)


def _layouts(shapes: Sequence[Sequence[Sequence[int]]], count: int, rng: np.random.Generator) -> np.ndarray:
  """Distinct layouts of ops with outputs, inputs and kernels of these shapes, int8 [count, NC, 18]; see `Module`."""
  default = np.full((len(shapes), 3, features.LAYOUT_DIMENSIONS), -1, np.int8)
  for i, tensors in enumerate(shapes):
    for tensor, shape in enumerate(tensors):
      default[i, tensor, :len(shape)] = _descending(len(shape))
  configs = {default.tobytes(): default}
  while len(configs) < count:
    # Some configs change few ops, others most, all in a row; most have one idea for all tensors that they change.
    length = int(rng.integers(1, 3)) if rng.random() < 0.3 else int(len(shapes) * rng.uniform(0.3, 1.1)) + 1
    start = rng.integers(1 - length, len(shapes))
    idea = int(rng.integers(60)) if rng.random() < 0.7 else None  # 60: of all ranks a multiple.
    config = default.copy()
    for i in range(max(start, 0), min(start + length, len(shapes))):
      for tensor, shape in enumerate(shapes[i]):
        config[i, tensor, :len(shape)] = _layout(shape, idea, rng)
    configs.setdefault(config.tobytes(), config)
  return np.stack(list(configs.values())).reshape(count, len(shapes), features.NUM_LAYOUT_FEATURES)


def _layout(shape: Sequence[int], idea: int | None, rng: np.random.Generator) -> list[int]:
  """A layout, minor to major: usually descending but for the minor-most dimension, which `idea` or chance picks."""
  good = [dimension for dimension, size in enumerate(shape) if size >= _SUBLANES]  # Smaller ones fill no register.
  if not good:
    return _descending(len(shape))
  minor = good[idea % len(good)] if idea is not None else _pick(rng, good)
  others = [dimension for dimension in _descending(len(shape)) if dimension != minor]
  if rng.random() < 0.2:
    rng.shuffle(others)
  return [minor, *others]


def _descending(rank: int) -> list[int]:
  return list(range(rank))[::-1]


# Programs.


@dataclasses.dataclass(frozen=True)
class _Op:
  """One op: `attributes` are values by the name of their block of columns, such as 'window_size'."""
  opcode: str
  element_type: str
  shape: tuple[int, ...]
  operands: tuple[int, ...]
  attributes: dict[str, Sequence[int]]


@dataclasses.dataclass(frozen=True)
class _Computation:
  """A finished computation: its root and its parameters, as indices of ops."""
  root: int
  parameters: list[int]


class _Program:
  """A program that is built op by op; methods that add one return its index and find out its shape.

  Computations follow each other, called ones before their callers, and the last op of each is its root.
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
    node_feat[:, [column for name, column in _columns().items() if name.endswith('_product')]] = 1  # Of no values.
    for row, op in zip(node_feat, self.ops, strict=True):
      row[_columns()[f'shape_element_type_is_{op.element_type}']] = 1
      _put(row, 'shape_dimensions', op.shape)
      _put(row, 'layout_minor_to_major', range(len(op.shape))[::-1])
      for name, values in op.attributes.items():
        _put(row, name, values)
    node_feat[np.array(self._ends) - 1, _columns()['is_root']] = 1
    edges = sorted({(i, operand) for i, op in enumerate(self.ops) for operand in op.operands})
    return {'node_opcode': np.array([features.opcodes()[op.opcode] for op in self.ops], np.uint8),
            'node_feat': node_feat,
            'edge_index': np.array(edges, np.int64).reshape(-1, 2),
            'node_splits': np.array(self._splits, np.int64),  # `Module` appends the end.
            'computation': np.repeat(np.arange(len(self._ends)), np.diff([0, *self._ends]))}

  def end_computation(self, *, is_cluster: bool = False) -> _Computation:
    """Ends the present computation, and the segment too if it is a cluster."""
    self._ends.append(len(self.ops))
    if is_cluster:
      self._splits.append(len(self.ops))
    parameters, self._parameters = self._parameters, []
    return _Computation(len(self.ops) - 1, parameters)

  def shape(self, op: int) -> tuple[int, ...]:
    return self.ops[op].shape

  def add(self, opcode: str, shape: Sequence[int], *operands: int, element_type: str | None = None,
          **attributes: Sequence[int]) -> int:
    self.ops.append(_Op(opcode, element_type or self.element_type, tuple(shape), operands, attributes))
    return len(self.ops) - 1

  def parameter(self, *shape: int, element_type: str | None = None) -> int:
    number = len(self._parameters)
    self._parameters.append(self.add('parameter', shape, element_type=element_type, parameter_number=[number]))
    return self._parameters[-1]

  def call(self, opcode: str, computation: _Computation, *operands: int) -> int:
    """Calls a computation with `operands` and a new parameter for each further one that it takes."""
    further = [self.parameter(*self.shape(op), element_type=self.ops[op].element_type)
               for op in computation.parameters[len(operands):]]
    return self.add(opcode, self.shape(computation.root), *operands, *further, computation.root,
                    element_type=self.ops[computation.root].element_type)

  def elementwise(self, opcode: str, *operands: int, element_type: str | None = None) -> int:
    return self.add(opcode, self.shape(operands[0]), *operands, element_type=element_type)

  def broadcast(self, op: int, shape: Sequence[int], dimensions: Sequence[int] = ()) -> int:
    return self.add('broadcast', shape, op, element_type=self.ops[op].element_type, dimensions=dimensions)

  def scalar(self, shape: Sequence[int]) -> int:
    """A constant for each value of a tensor of that shape."""
    return self.broadcast(self.add('constant', ()), shape)

  def vector(self, shape: Sequence[int], dimension: int = -1) -> int:
    """A parameter for each position in one dimension of a tensor of that shape."""
    return self.broadcast(self.parameter(shape[dimension]), shape, [dimension % len(shape)])

  def transpose(self, op: int, permutation: Sequence[int]) -> int:
    return self.add('transpose', [self.shape(op)[i] for i in permutation], op, dimensions=permutation)

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
    """[b, h, w, i] x [height, width, i, o] -> [b, h / stride, w / stride, o], padded at the borders; windows odd."""
    batch, height, width, _ = self.shape(source)
    *window, _, filters = self.shape(kernel)
    return self.add(
        'convolution', (batch, -(-height // stride), -(-width // stride), filters), source, kernel,
        window_size=window, window_stride=[stride, stride], window_padding_low=[size // 2 for size in window],
        window_padding_high=[size // 2 for size in window], window_window_dilation=[1, 1],
        window_base_dilation=[1, 1], window_window_reversal_false_count=[2],
        convolution_dim_numbers_input_feature_dim=[3], convolution_dim_numbers_input_spatial_dims=[1, 2],
        convolution_dim_numbers_kernel_input_feature_dim=[2], convolution_dim_numbers_kernel_output_feature_dim=[3],
        convolution_dim_numbers_kernel_spatial_dims=[0, 1], convolution_dim_numbers_output_feature_dim=[3],
        feature_group_count=[1], batch_group_count=[1])


@functools.cache
def _columns() -> dict[str, int]:
  return {name: column for column, name in enumerate(features.node_feature_names())}


def _put(row: np.ndarray, name: str, values: Sequence[int]) -> None:
  """Writes `values` into the column or the block of columns of that name, with sum and product where it has these."""
  columns = _columns()
  if name in columns:
    (row[columns[name]],) = values
    return
  width = sum(f'{name}_{i}' in columns for i in range(6))
  assert width, name
  for i, value in enumerate(values[:width]):  # Further values count in sum and product only.
    row[columns[f'{name}_{i}']] = value
  if f'{name}_sum' in columns:
    row[columns[f'{name}_sum']], row[columns[f'{name}_product']] = sum(values), math.prod(values)


def _pick(rng: np.random.Generator, options: Sequence[_T]) -> _T:
  return options[rng.integers(len(options))]


# Kernels, of which `tile_module` makes one; each leaves its computation open behind its root.


def _elementwise_kernel(program: _Program, rng: np.random.Generator) -> _Kernel:
  shape = _pick(rng, (_matrix_shape, _sequence_shape, _image_shape))(rng)
  op = _chain(program, rng, _leaf(program, rng, shape), int(rng.integers(2, 6, endpoint=True)))
  if rng.random() < 0.3:
    op = program.transpose(op, rng.permutation(len(shape)).tolist())
  return _Kernel(program.shape(op), lambda tile: (tile[:, :0], tile, tile[:, :0]))


def _reduce_kernel(program: _Program, rng: np.random.Generator) -> _Kernel:
  reducer = program.reducer(_pick(rng, ('add', 'maximum', 'minimum', 'multiply')))
  shape = _pick(rng, (_sequence_shape, _image_shape))(rng)
  dimension = int(rng.integers(len(shape)))
  op = _chain(program, rng, _leaf(program, rng, shape), int(rng.integers(1, 5, endpoint=True)))
  op = program.reduce(op, [dimension], reducer)
  op = _chain(program, rng, op, int(rng.integers(0, 2, endpoint=True)))
  return _Kernel(program.shape(op),
                 lambda tile: (tile[:, :0], tile, np.insert(tile, dimension, shape[dimension], axis=1)))


def _dot_kernel(program: _Program, rng: np.random.Generator) -> _Kernel:
  rows, depth = _matrix_shape(rng)
  columns = _matrix_shape(rng)[1]
  source = _leaf(program, rng, (rows, depth))
  if rng.random() < 0.5:
    source = _chain(program, rng, source, 1)
  op = program.dot(source, _weight(program, rng, depth, columns))
  _chain(program, rng, op, int(rng.integers(0, 4, endpoint=True)))
  return _Kernel((rows, columns, depth), lambda tile: (tile[:, [2, 1]], tile[:, :2], tile[:, [0, 2]]))


def _convolution_kernel(program: _Program, rng: np.random.Generator) -> _Kernel:
  batch, height, width, depth = _image_shape(rng)
  window, stride = _pick(rng, ((1, 1), (3, 1), (3, 2), (5, 1), (7, 2)))
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
    return (np.column_stack([windows, tile[:, [3, 2]]]), np.column_stack([images, rows, columns, tile[:, 2]]),
            np.column_stack(source))
  return _Kernel((batch, height, filters, depth), bounds)


def _matrix_shape(rng: np.random.Generator) -> tuple[int, ...]:
  return (_pick(rng, (64, 100, 128, 200, 256, 384, 512, 1024)),
          _pick(rng, (64, 96, 128, 192, 256, 320, 512, 768, 1000)))


def _sequence_shape(rng: np.random.Generator) -> tuple[int, ...]:
  return (_pick(rng, (4, 8, 16, 32)), *_matrix_shape(rng))


def _image_shape(rng: np.random.Generator) -> tuple[int, ...]:
  size = _pick(rng, (7, 14, 28, 56))
  return (_pick(rng, (4, 8, 16, 32)), size, size, _pick(rng, (16, 32, 48, 64, 96, 128, 192, 256)))


def _leaf(program: _Program, rng: np.random.Generator, shape: Sequence[int]) -> int:
  """A tensor of that shape that is made of one parameter or constant."""
  form = _pick(rng, (*['parameter'] * 3, 'scalar', *['vector'] * 2, 'convert', 'transpose', 'reshape', 'slice', 'pad',
                     'iota'))
  if form == 'scalar':
    return program.scalar(shape)
  if form == 'vector':
    return program.vector(shape, int(rng.integers(len(shape))))
  if form == 'convert':
    return program.elementwise('convert', program.parameter(*shape, element_type='s32'))
  if form == 'transpose':
    permutation = rng.permutation(len(shape)).tolist()
    return program.transpose(program.parameter(*(shape[permutation.index(i)] for i in range(len(shape)))), permutation)
  if form == 'reshape':
    return program.reshape(program.parameter(shape[0] * shape[1], *shape[2:]), *shape)
  if form == 'slice':
    source = program.parameter(2 * shape[0], *shape[1:])
    return program.add('slice', shape, source, slice_dims_start=[shape[0], *[0] * (len(shape) - 1)],
                       slice_dims_limit=[2 * shape[0], *shape[1:]], slice_dims_stride=[1] * len(shape))
  if form == 'pad':
    source = program.parameter(*shape[:-1], shape[-1] - 1)
    return program.add('pad', shape, source, program.add('constant', ()),
                       padding_config_edge_padding_low=[0] * len(shape),
                       padding_config_edge_padding_high=[*[0] * (len(shape) - 1), 1])
  if form == 'iota':
    return program.elementwise('convert', program.add('iota', shape, element_type='s32', dimensions=[len(shape) - 1]))
  return program.parameter(*shape)


def _chain(program: _Program, rng: np.random.Generator, op: int, length: int) -> int:
  """Elementwise ops one after the other, each of the one before and further tensors."""
  for _ in range(length):
    form = _pick(rng, ('unary', 'binary', 'binary', 'binary', 'select'))
    if form == 'unary':
      op = program.elementwise(_pick(rng, _UNARY), op)
    elif form == 'binary':
      op = program.elementwise(_pick(rng, _BINARY), op, _leaf(program, rng, program.shape(op)))
    else:
      holds = program.elementwise('compare', op, program.scalar(program.shape(op)), element_type='pred')
      op = program.elementwise('select', holds, op, _leaf(program, rng, program.shape(op)))
  return op


def _weight(program: _Program, rng: np.random.Generator, *shape: int) -> int:
  """A parameter, perhaps of another element type and converted."""
  if rng.random() < 0.7:
    return program.parameter(*shape)
  stored = 'bf16' if program.element_type == 'f32' else 'f32'
  return program.elementwise('convert', program.parameter(*shape, element_type=stored))


# Whole programs, of which `layout_module` makes one: some clusters, and an entry that calls one after the other.


def _convolutional_net(program: _Program, rng: np.random.Generator) -> None:
  reducer = program.reducer('add') if rng.random() < 0.5 else None
  # Many images of few channels, or the other way round: which dimension is best as the minor-most depends on that.
  batches, channel_counts = _pick(rng, (((128, 256), (8, 12, 16, 24)), ((8, 12, 16, 24), (64, 96, 128, 192))))
  size, channels = _pick(rng, (24, 28, 32, 40)), _pick(rng, channel_counts)
  shape: tuple[int, ...] = (_pick(rng, batches), size, size, channels)
  clusters = []
  for _ in range(rng.integers(2, 3, endpoint=True)):
    op = program.parameter(*shape)
    if rng.random() < 0.5:
      channels *= 2
      op = program.convolution(op, _weight(program, rng, 1, 1, shape[-1], channels), stride=2)
    for _ in range(rng.integers(2, 3, endpoint=True)):
      skipped = op
      for _ in range(2):
        window = _pick(rng, (3, 3, 1))
        op = program.convolution(op, _weight(program, rng, window, window, channels, channels))
        op = _activation(program, rng, op)
      op = program.elementwise('add', op, skipped)
    shape = program.shape(op)
    clusters.append(program.end_computation(is_cluster=True))
  op = _call_in_turn(program, clusters)
  op = program.reshape(op, shape[0], math.prod(shape[1:])) if reducer is None else program.reduce(op, [1, 2], reducer)
  program.dot(op, _weight(program, rng, program.shape(op)[1], _pick(rng, (10, 100, 1000))))
  program.end_computation()


def _perceptron(program: _Program, rng: np.random.Generator) -> None:
  widths = (16, 24, 32, 40, 48, 64, 96, 160)
  shape = (_pick(rng, (8, 16)), _pick(rng, (16, 32, 48, 64)), _pick(rng, widths))
  clusters = []
  for _ in range(rng.integers(2, 4, endpoint=True)):
    op = program.reshape(program.parameter(*shape), shape[0] * shape[1], shape[2])
    for _ in range(rng.integers(3, 5, endpoint=True)):
      source, width = op, _pick(rng, (program.shape(op)[1], *widths))
      op = _activation(program, rng, program.dot(op, _weight(program, rng, program.shape(op)[1], width)))
      if program.shape(op) == program.shape(source):
        op = program.elementwise('add', op, source)
    shape = (*shape[:2], program.shape(op)[1])
    program.reshape(op, *shape)
    clusters.append(program.end_computation(is_cluster=True))
  _call_in_turn(program, clusters)
  program.end_computation()


def _transformer(program: _Program, rng: np.random.Generator) -> None:
  total, largest = program.reducer('add'), program.reducer('maximum')
  batch, length, heads = _pick(rng, (2, 4, 8)), _pick(rng, (32, 64, 100, 128, 256)), _pick(rng, (2, 4, 8))
  width = heads * _pick(rng, (8, 16, 24, 32, 64))
  clusters = []
  for _ in range(rng.integers(1, 2, endpoint=True)):
    tokens = program.reshape(program.parameter(batch, length, width), batch * length, width)

    def project(op: int, columns: int) -> int:
      return program.dot(op, _weight(program, rng, program.shape(op)[1], columns))

    def split_heads(op: int, permutation: Sequence[int]) -> int:
      return program.transpose(program.reshape(op, batch, length, heads, width // heads), permutation)

    normal = program.elementwise('multiply', tokens, program.vector((batch * length, width)))
    query = split_heads(project(normal, width), (0, 2, 1, 3))
    key = split_heads(project(normal, width), (0, 2, 3, 1))
    logits = _activation(program, rng, program.dot(query, key))  # [batch, heads, length, length]
    shape = program.shape(logits)
    logits = program.elementwise('subtract', logits,
                                 program.broadcast(program.reduce(logits, [3], largest), shape, (0, 1, 2)))
    share = program.elementwise('exponential', logits)
    share = program.elementwise('divide', share, program.broadcast(program.reduce(share, [3], total), shape, (0, 1, 2)))
    value = split_heads(project(normal, width), (0, 2, 1, 3))
    op = program.transpose(program.dot(share, value), (0, 2, 1, 3))
    op = project(program.reshape(op, batch * length, width), width)
    tokens = program.elementwise('add', op, tokens)
    op = project(_activation(program, rng, project(tokens, _pick(rng, (2, 4)) * width)), width)
    program.reshape(program.elementwise('add', op, tokens), batch, length, width)
    clusters.append(program.end_computation(is_cluster=True))
  _call_in_turn(program, clusters)
  program.end_computation()


def _activation(program: _Program, rng: np.random.Generator, op: int) -> int:
  """A bias or scale or neither, and a function of each value."""
  shape = program.shape(op)
  form = _pick(rng, ('add', 'add', 'multiply', ''))
  if form:
    op = program.elementwise(form, op, program.vector(shape))
  form = _pick(rng, ('relu', 'relu', 'tanh', 'swish', ''))
  if form == 'relu':
    return program.elementwise('maximum', op, program.scalar(shape))
  if form == 'tanh':
    return program.elementwise('tanh', op)
  if form == 'swish':
    return program.elementwise('multiply', op, program.elementwise('logistic', op))
  return op


def _call_in_turn(program: _Program, clusters: Sequence[_Computation]) -> int:
  """Calls each cluster with the result of the one before."""
  op = program.parameter(*program.shape(clusters[0].parameters[0]))
  for cluster in clusters:
    op = program.call('call', cluster, op)
  return op
