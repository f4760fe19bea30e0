"""The built-in sample: small made-up programs with planted runtimes.

Nothing here was measured, and every module says so in its name. With the sample, everything that
handles real data can be run without a download. The sample can also be learnt: the runtime of a
config is `planted_cost`, a function of the module's features alone, times some noise. The cost
follows a TPU in outline (registers of 8 x 128 values, a small fast memory, copies between layouts
that differ), not in its numbers: a model that ranks the sample well is known to work, but not known
to be good.

Tile modules are fused kernels whose configs are tilings. Layout modules are convolutional nets,
perceptrons and transformers whose configs permute the layouts of convolutions, dots and reshapes.
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
from typing import Any

import numpy as np

from tpu_graphs import errors
from tpu_graphs import terminal
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import npz
from tpu_graphs.sources import synthetic_programs as programs

NOISE = 0.01  # Standard deviation of the logarithm of a runtime.

# The planted machine; rates are per ns.
# The minor-most dimension is padded to a multiple of lanes, the next one to a multiple of sublanes.
_LANES, _SUBLANES = 128, 8
_REGISTER = (_LANES, _SUBLANES)
_BYTE_RATE = 500.0
_MATRIX_RATE = 50_000.0  # Multiplications of a convolution or dot, with their additions.
_VECTOR_RATE = 1_000.0  # Units of `_WORK`.
_FAST_BYTES = 2 << 20
_MAX_SPILL = 4.0
_TILE_NS = 400.0  # Time to start a tile.
_LAUNCH_NS = 1_500.0  # Time to start a module.
_MINOR_PASSES = 2.0  # Passes over a tensor of a copy that moves the minor-most dimension.
_MAJOR_PASSES = 0.5  # Passes over a tensor of a copy that moves other dimensions only.
_ELEMENT_BYTES = {'pred': 1, 'bf16': 2, 's32': 4, 'f32': 4}

# These ops keep the shape of their operands, and therefore also their layout.
_ELEMENTWISE = ('convert', 'select', *programs.UNARY, *programs.BINARY)
_CONFIGURABLE = ('convolution', 'dot', 'reshape')
# Work for each value, in additions; other opcodes do no such work.
_WORK = {
  **dict.fromkeys(('compare', 'reduce', *_ELEMENTWISE), 1.0),
  'divide': 4.0,
  'transpose': 4.0,
  'rsqrt': 6.0,
  'exponential': 8.0,
  'logistic': 10.0,
  'tanh': 12.0,
}

_TILINGS_TRIED = 2000
_MAX_SPREAD = 18.0  # A tiling that is slower than the best by this factor is not kept.


@dataclasses.dataclass(frozen=True)
class Split:
  """A folder written by `write_tree`.

  Attributes:
    kind: 'tile' or 'layout'.
    name: 'train', 'valid' or 'test'.
    num_modules: the number of modules, one file each.
    num_configs: the number of configs of all modules together.
  """

  kind: str
  name: str
  num_modules: int
  num_configs: int


def write_tree(
  directory: str | os.PathLike[str],
  *,
  seed: int = 0,
  tile: Sequence[int] = (160, 32, 32),
  layout: Sequence[int] = (80, 16, 16),
) -> list[Split]:
  """Writes a sample into a folder: README.txt and npz/KIND/synthetic/SPLIT/*.npz.

  Here KIND is tile or layout, and SPLIT is train, valid or test. Unlike the published test split,
  the test split of the sample has runtimes. No two modules of a kind have equal graphs. The folder
  npz appears when it is complete.

  Args:
    directory: the folder, which is created if it is missing.
    seed: the seed of the sample; equal seeds give equal bytes.
    tile: the number of tile modules in each of `module_lib.SPLITS`.
    layout: the number of layout modules in each of `module_lib.SPLITS`.

  Returns:
    The splits written.

  Raises:
    InputError: `directory` is not an empty folder, or cannot be written.
  """
  target = pathlib.Path(directory)
  splits = []
  try:
    target.mkdir(parents=True, exist_ok=True)
    if found := sorted(entry.name for entry in target.iterdir()):
      raise errors.InputError(
        'folder not empty',
        path=str(target),
        found=', '.join(found[:3]),
        expected='a new or an empty folder',
        fix='choose another folder, or remove this one',
      )
    with tempfile.TemporaryDirectory(prefix='.npz.', dir=target) as unfinished:
      for kind, sizes in (('tile', tile), ('layout', layout)):
        modules = generate(kind, sum(sizes), seed)
        for name, size in zip(module_lib.SPLITS, sizes, strict=True):
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
    raise errors.InputError(
      'cannot write folder', path=str(target), found=error.strerror
    ) from error
  return splits


def _readme(seed: int, splits: list[Split]) -> str:
  lines = []
  for split in splits:
    modules = terminal.plural(split.num_modules, 'module')
    configs = terminal.plural(split.num_configs, 'config')
    lines.append(f'  npz/{split.kind}/synthetic/{split.name}: {modules}, {configs}')
  folders = '\n'.join(lines)
  return f"""SYNTHETIC DATA: none of these programs exists and no runtime was measured.

The modules were generated by tpu_graphs/sources/synthetic.py with seed {seed}. A runtime is a
planted cost, computed from the features of module and config, times log-normal noise of
{NOISE:.0%}. A model that ranks these configs well is known to work; it is not known how well it
ranks the configs of real programs.

Collections tile:synthetic and layout:synthetic:
{folders}
"""


def generate(kind: str, count: int, seed: int = 0) -> Iterator[module_lib.Module]:
  """Yields `count` modules of distinct topology.

  A module whose graph has occurred before is left out, and so is its number.

  Raises:
    InputError: the kind is unknown.
  """
  makers = {'tile': tile_module, 'layout': layout_module}
  if kind not in makers:
    raise errors.InputError(
      'unknown kind', where='kind', found=repr(kind), expected=' or '.join(makers)
    )
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
  """Makes a fused kernel with 20 to 80 tilings; the first is the default.

  Args:
    index: the number of the module within the sample.
    seed: the seed of the sample. Equal numbers and seeds give equal modules.
    noise: the standard deviation of the logarithm of a runtime; 0 leaves the planted cost, rounded
      to ns.
  """
  rng = np.random.default_rng([seed, 0, index])
  program = programs.Program(element_type=programs.pick(rng, ('f32', 'f32', 'bf16')))
  make_kernel = programs.pick(rng, programs.KERNELS)
  kernel = make_kernel(program, rng)
  program.call('fusion', program.end_computation())
  program.end_computation()
  config_feat = _tilings(kernel, rng)
  c = len(config_feat)
  pool = _unmeasured(
    program,
    'tile',
    index,
    c,
    config_feat=config_feat,
    config_runtime_normalizers=np.full(c, module_lib.UNMEASURED),
  )
  cost = planted_cost(pool)
  worthwhile = np.flatnonzero(cost <= _MAX_SPREAD * cost.min())
  default = worthwhile[np.argmax(_rule_of_thumb(config_feat[worthwhile]))]
  others = rng.permutation(worthwhile[worthwhile != default])
  num_others = rng.integers(19, 79, endpoint=True)
  chosen = np.append(default, others[:num_others])
  return _measured(pool.select_configs(chosen), rng, noise)


def layout_module(index: int, *, seed: int = 0, noise: float = NOISE) -> module_lib.Module:
  """Makes a program with 40 to 100 layout configs; the first is the default.

  The default layouts have all dimensions in descending order.

  Args:
    index: the number of the module within the sample.
    seed: the seed of the sample. Equal numbers and seeds give equal modules.
    noise: the standard deviation of the logarithm of a runtime; 0 leaves the planted cost, rounded
      to ns.
  """
  rng = np.random.default_rng([seed, 1, index])
  program = programs.Program(element_type=programs.pick(rng, ('f32', 'bf16')))
  programs.pick(rng, programs.NETS)(program, rng)
  chosen = []
  shapes = []
  for i, op in enumerate(program.ops):
    if op.opcode not in _CONFIGURABLE:
      continue
    # As in the published graphs, some reshapes cannot be configured.
    if op.opcode == 'reshape' and rng.random() >= 0.8:
      continue
    chosen.append(i)
    shapes.append([program.shape(tensor) for tensor in (i, *op.operands)])
  c = int(rng.integers(40, 100, endpoint=True))
  node_config_feat = _layouts(shapes, c, rng)
  module = _unmeasured(
    program,
    'layout',
    index,
    c,
    node_config_ids=np.array(chosen, np.int64),
    node_config_feat=node_config_feat,
  )
  return _measured(module, rng, noise)


def _unmeasured(
  program: programs.Program, kind: str, index: int, c: int, **configs: Any
) -> module_lib.Module:
  """Makes a module of `c` configs without runtimes; `configs` are the arrays of the configs."""
  return module_lib.Module(
    module_id=f'synthetic_{kind}_{index:04d}',
    kind=kind,
    config_id=np.arange(c),
    config_runtime=np.full(c, module_lib.UNMEASURED),
    **program.arrays(),
    **configs,
  )


def _measured(
  module: module_lib.Module, rng: np.random.Generator, noise: float
) -> module_lib.Module:
  """Adds runtimes to a module, and numbers its configs again; the first is the default."""
  c = module.num_configs
  factor = np.exp(noise * rng.standard_normal(c))
  runtime = np.rint(planted_cost(module) * factor).astype(np.int64)
  normalizers = np.full(c, runtime[0]) if module.kind == 'tile' else None
  return dataclasses.replace(
    module, config_id=np.arange(c), config_runtime=runtime, config_runtime_normalizers=normalizers
  )


# The planted cost.


def planted_cost(module: module_lib.Module) -> np.ndarray:
  """Returns the time of each config without noise, in ns, float64 [C], from the features alone.

  Tile: the number of tiles times the time of a tile, which is a start and the longer of computing
  the tile and moving it, padded to whole registers. A tile takes longer if two tiles exceed the
  fast memory.

  Layout: each configurable op computes and moves its tensors, padded to whole registers along the
  dimensions that its layouts make minor-most. A tensor is copied on the way if one configurable op
  makes it in another layout than the next configurable op reads.

  Args:
    module: a module of the sample.
  """
  return _tile_cost(module) if module.kind == 'tile' else _layout_cost(module)


class _Graph:
  """The ops of a module as read back from its features.

  Attributes:
    names: the opcode of each op.
    shapes: the dimensions of each op's tensor.
    elements: the number of values in each op's tensor, float64 [N].
    bytes: the size of each op's tensor, float64 [N].
    operands: the indices of each op's operands, ascending. The features do not distinguish input
      and kernel: programs of the sample make the input first.
  """

  def __init__(self, module: module_lib.Module):
    feat, columns = module.node_feat.astype(np.float64), programs.feature_columns()
    first = columns['shape_dimensions_0']
    self.names = [features.opcode_names()[opcode] for opcode in module.node_opcode]
    self.shapes = [tuple(int(size) for size in row if size) for row in feat[:, first : first + 6]]
    self.elements = feat[:, columns['shape_dimensions_product']]
    element_bytes = sum(
      size * feat[:, columns[f'shape_element_type_is_{name}']]
      for name, size in _ELEMENT_BYTES.items()
    )
    self.bytes = self.elements * element_bytes
    self.operands: list[list[int]] = [[] for _ in self.names]
    for consumer, operand in module.edge_index.tolist():
      self.operands[consumer].append(operand)

  def multiplications(self, op: int) -> float:
    """Returns the number of multiplications in a convolution or dot; 0 for other ops."""
    if self.names[op] not in ('convolution', 'dot'):
      return 0.0
    source, kernel = self.operands[op]
    if self.names[op] == 'convolution':
      return self.elements[op] * self.elements[kernel] / self.shapes[kernel][-1]
    # The features do not show which dimension of [b, m, k] x [b, k, n] -> [b, m, n] is k. The
    # numbers of values give b m k n: (b m n) (b m k) (b k n) / b = (b m k n)^2.
    elements = self.elements[op] * self.elements[source] * self.elements[kernel]
    return math.sqrt(elements / math.prod(self.shapes[op][:-2]))

  def makers(self, tensor: int, among: Container[int]) -> list[int]:
    """Returns the ops of `among` that make `tensor`, directly or via elementwise ops."""
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
  assert module.config_feat is not None  # Tile modules have it.
  graph = _Graph(module)
  # The last computation is the entry, which only calls the fusion.
  body = np.flatnonzero(module.computation < module.computation[-1])
  root = body[-1]
  kernel_tile, output_tile, input_tile = (
    module.config_feat[:, first : first + 6].astype(np.float64) for first in (0, 8, 16)
  )
  rank = len(graph.shapes[root])

  def value_bytes(tensor: int) -> float:
    """Returns the bytes moved per value of `tensor`, with the parameters tiled like `tensor`."""
    alike = [
      op
      for op in body
      if graph.names[op] == 'parameter' and graph.elements[op] == graph.elements[tensor]
    ]
    return sum(graph.bytes[op] for op in {tensor, *alike}) / graph.elements[tensor]

  # All arrays from here on are [C].
  tiles = np.prod(np.ceil(graph.shapes[root] / output_tile[:, :rank]), axis=1)
  values = _padded_size(output_tile, rank)
  output_bytes = values * value_bytes(root)
  total_work = sum(_WORK.get(graph.names[op], 0.0) * graph.elements[op] for op in body)
  work = total_work / graph.elements[root]
  vector_ns = values * work / _VECTOR_RATE
  input_bytes = np.zeros_like(tiles)
  matrix_ns = np.zeros_like(tiles)
  steps = np.ones_like(tiles)
  for op in body:
    if graph.names[op] == 'reduce':
      source = max(graph.operands[op], key=lambda operand: graph.elements[operand])
      input_bytes = _padded_size(input_tile, len(graph.shapes[source])) * value_bytes(source)
    elif graph.names[op] in ('convolution', 'dot'):
      source, kernel = graph.operands[op]
      source_rank, kernel_rank = len(graph.shapes[source]), len(graph.shapes[kernel])
      depth = graph.shapes[kernel][-2]
      depth_tile = kernel_tile[:, kernel_rank - 2]
      # The steps over the contracted dimension add up to one tile of the output.
      steps = np.ceil(depth / depth_tile)
      window = np.prod(kernel_tile[:, : kernel_rank - 2], axis=1)
      matrix_ns = values * window * _round_up(depth_tile, _LANES) / _MATRIX_RATE
      source_bytes = _padded_size(input_tile, source_rank) * value_bytes(source)
      kernel_bytes = _padded_size(kernel_tile, kernel_rank) * value_bytes(kernel)
      input_bytes = source_bytes + kernel_bytes
  compute_ns = matrix_ns + vector_ns / steps
  move_ns = (input_bytes + output_bytes / steps) / _BYTE_RATE
  spill = np.clip(2 * (input_bytes + output_bytes) / _FAST_BYTES - 1, 0, _MAX_SPILL)
  step_ns = _TILE_NS + np.maximum(compute_ns, move_ns) * (1 + spill)
  # Computing overlaps with moving, except for the first tile.
  first_ns = np.minimum(compute_ns, move_ns)
  return _LAUNCH_NS + tiles * steps * step_ns + first_ns


def _layout_cost(module: module_lib.Module) -> np.ndarray:
  ids, configs = module.node_config_ids, module.node_config_feat
  assert ids is not None  # Layout modules have both arrays.
  assert configs is not None
  graph = _Graph(module)
  config_of_op = {op: i for i, op in enumerate(ids.tolist())}

  def layout(op: int, tensor: int) -> np.ndarray:
    """Returns the layout of one tensor of an op, int8 [C, rank], minor to major.

    Tensor 0 is the output, 1 the input, 2 the kernel.
    """
    rank = len(graph.shapes[(op, *graph.operands[op])[tensor]])
    return configs[:, config_of_op[op], 6 * tensor : 6 * tensor + rank]

  # Other ops cost nothing, as if they were fused into the configurable ones.
  cost = np.full(module.num_configs, _LAUNCH_NS)
  for op in config_of_op:
    tensors = (op, *graph.operands[op])
    padding = [_padding(graph.shapes[tensor], layout(op, i)) for i, tensor in enumerate(tensors)]
    # All arrays from here on are [C].
    padded_bytes = sum(
      graph.bytes[tensor] * factor for tensor, factor in zip(tensors, padding, strict=True)
    )
    move_ns = padded_bytes / _BYTE_RATE
    compute_ns = graph.multiplications(op) * padding[0] / _MATRIX_RATE
    cost += np.maximum(move_ns, compute_ns)
    for i, operand in enumerate(graph.operands[op], start=1):
      for maker in graph.makers(operand, config_of_op):
        made, read = layout(maker, 0), layout(op, i)
        moves_minor = (made[:, :1] != read[:, :1]).any(axis=1)
        moves_any = (made != read).any(axis=1)
        passes = np.where(moves_minor, _MINOR_PASSES, np.where(moves_any, _MAJOR_PASSES, 0))
        cost += passes * graph.bytes[operand] / _BYTE_RATE
  return cost


def _round_up(sizes: np.ndarray, multiple: int) -> np.ndarray:
  return np.ceil(sizes / multiple) * multiple


def _padded_size(tile: np.ndarray, rank: int) -> np.ndarray:
  """Returns the number of values in tiles, padded to whole registers, [C].

  Args:
    tile: the tiles' sizes, [C, >= rank], in descending layout.
    rank: the number of dimensions.
  """
  sizes = tile[:, :rank][:, ::-1].copy()
  for position, multiple in enumerate(_REGISTER[:rank]):
    sizes[:, position] = _round_up(sizes[:, position], multiple)
  return np.prod(sizes, axis=1)


def _padding(shape: Sequence[int], layout: np.ndarray) -> np.ndarray:
  """Returns the factors by which padding to whole registers enlarges a tensor, [C].

  Args:
    shape: the tensor's dimensions.
    layout: the tensor's layouts, [C, rank], minor to major.
  """
  factor = np.ones(len(layout))
  for position, multiple in enumerate(_REGISTER[: len(shape)]):
    sizes = np.array(shape)[layout[:, position]]
    factor *= _round_up(sizes, multiple) / sizes
  return factor


# Configs.


def _tilings(kernel: programs.Kernel, rng: np.random.Generator) -> np.ndarray:
  """Returns distinct tilings, float32 [T, 24]; see `features.tile_feature_names`."""
  tiles = np.stack([rng.choice(_tile_sizes(size), _TILINGS_TRIED) for size in kernel.sizes], axis=1)
  tiles = np.unique(tiles, axis=0)
  blocks = np.zeros((len(tiles), 3, 8), np.int64)
  for block, bounds in zip(blocks.swapaxes(0, 1), kernel.bounds(tiles), strict=True):
    # Without bounds the product stays 0, unlike in node features.
    if bounds.shape[1]:
      block[:, : bounds.shape[1]] = bounds
      block[:, 6], block[:, 7] = bounds.sum(axis=1), bounds.prod(axis=1)
  return blocks.reshape(len(tiles), -1).astype(np.float32)


def _tile_sizes(size: int) -> list[int]:
  """Returns the powers of two and their triples up to `size`, and the large divisors of `size`."""
  round_sizes = {factor << i for factor in (1, 3) for i in range(size.bit_length())}
  divisors = {size // parts for parts in range(1, 8) if size % parts == 0}
  return sorted(tile for tile in round_sizes | divisors if tile <= size)


def _rule_of_thumb(config_feat: np.ndarray) -> np.ndarray:
  """Returns the made-up compiler's score of each tiling, higher is better, [T].

  The score prefers large and wide tiles that fit well into the fast memory.
  """
  rank = np.count_nonzero(config_feat[0, 8:14])
  size = config_feat[:, 7] + config_feat[:, 15] + config_feat[:, 23]
  return np.where(16 * size <= _FAST_BYTES, size * config_feat[:, 7 + rank], -size)


def _layouts(
  shapes: Sequence[Sequence[Sequence[int]]], count: int, rng: np.random.Generator
) -> np.ndarray:
  """Returns distinct layouts, int8 [count, NC, 18], the default first; see `Module`.

  Args:
    shapes: for each of the NC ops, the shapes of its output, input and kernel.
    count: the number of layouts.
    rng: the source of random numbers.
  """
  default = np.full((len(shapes), 3, features.LAYOUT_DIMENSIONS), -1, np.int8)
  for i, tensors in enumerate(shapes):
    for tensor, shape in enumerate(tensors):
      default[i, tensor, : len(shape)] = _descending(len(shape))
  configs = {default.tobytes(): default}
  while len(configs) < count:
    # Some configs change one or two ops in a row, the others a large share of them.
    if rng.random() < 0.3:
      length = int(rng.integers(1, 3))
    else:
      length = int(len(shapes) * rng.uniform(0.3, 1.1)) + 1
    start = rng.integers(1 - length, len(shapes))
    # Most configs have one idea for all tensors that they change. 60 is a multiple of every rank.
    idea = int(rng.integers(60)) if rng.random() < 0.7 else None
    config = default.copy()
    for i in range(max(start, 0), min(start + length, len(shapes))):
      for tensor, shape in enumerate(shapes[i]):
        config[i, tensor, : len(shape)] = _layout(shape, idea, rng)
    configs.setdefault(config.tobytes(), config)
  layouts = np.stack(list(configs.values()))
  return layouts.reshape(count, len(shapes), features.NUM_LAYOUT_FEATURES)


def _layout(shape: Sequence[int], idea: int | None, rng: np.random.Generator) -> list[int]:
  """Returns a layout, minor to major, usually descending but for the minor-most dimension.

  `idea` picks the minor-most dimension; if it is None, chance does.
  """
  # Smaller dimensions do not fill a register.
  good = [dimension for dimension, size in enumerate(shape) if size >= _SUBLANES]
  if not good:
    return _descending(len(shape))
  minor = good[idea % len(good)] if idea is not None else programs.pick(rng, good)
  others = [dimension for dimension in _descending(len(shape)) if dimension != minor]
  if rng.random() < 0.2:
    rng.shuffle(others)
  return [minor, *others]


def _descending(rank: int) -> list[int]:
  return list(range(rank))[::-1]
