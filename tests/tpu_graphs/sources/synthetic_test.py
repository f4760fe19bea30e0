"""Tests of tpu_graphs.sources.synthetic: hand-worked costs, inferred shapes, uses of a sample."""

import dataclasses
import itertools
import math

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import scipy.stats

from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import synthetic

_COLUMNS = {name: i for i, name in enumerate(features.node_feature_names())}
_MAKERS = {'tile': synthetic.tile_module, 'layout': synthetic.layout_module}
# Blocks of columns that are followed by the sum and the product of all values. Maps each block to
# the number of its values that have a column.
_SUMMED = {
  'shape_dimensions': 6,
  **{
    f'window_{name}': 6
    for name in (
      'size',
      'stride',
      'padding_low',
      'padding_high',
      'window_dilation',
      'base_dilation',
    )
  },
  **{f'slice_dims_{name}': 2 for name in ('start', 'stride', 'limit')},
  'dynamic_slice_sizes': 2,
  **{f'padding_config_edge_padding_{name}': 2 for name in ('low', 'high')},
}
_SAMPLE = {kind: list(synthetic.generate(kind, 50)) for kind in _MAKERS}
_TILE, _LAYOUT = (
  [pytest.param(module, id=module.module_id) for module in modules[:16]]
  for modules in _SAMPLE.values()
)
_MODULES = _TILE + _LAYOUT


@dataclasses.dataclass
class _Op:
  """An op as a test reads it from the features."""

  name: str
  shape: tuple
  operands: list
  feat: dict  # Column name -> value.

  def block(self, name, size):
    return [self.feat[f'{name}_{i}'] for i in range(size)]


def _ops(module):
  names = {number: name for name, number in features.opcodes().items()}
  ops = []
  for opcode, row in zip(module.node_opcode, module.node_feat, strict=True):
    feat = dict(zip(_COLUMNS, (int(value) for value in row), strict=True))
    shape = tuple(feat[f'shape_dimensions_{i}'] for i in range(6) if feat[f'shape_dimensions_{i}'])
    ops.append(_Op(names[opcode], shape, [], feat))
  for consumer, operand in module.edge_index:
    ops[consumer].operands.append(ops[operand])
  return ops


# Numbers.


def _module(ops, *, kind='tile', computation=None, **arrays):
  """Makes a module of ops (opcode, shape, operands) with f32 tensors."""
  feat = np.zeros((len(ops), 140), np.float32)
  for row, (_, shape, _) in zip(feat, ops, strict=True):
    row[_COLUMNS['shape_element_type_is_f32']] = 1
    row[21 : 21 + len(shape)] = shape
    row[_COLUMNS['shape_dimensions_product']] = math.prod(shape)
  c = len(arrays.get('config_feat', arrays.get('node_config_feat')))
  if kind == 'tile':
    arrays['config_runtime_normalizers'] = np.full(c, -1)
  return module_lib.Module(
    module_id='by hand',
    kind=kind,
    node_opcode=np.array([features.opcodes()[op[0]] for op in ops]),
    node_feat=feat,
    edge_index=np.array([(i, operand) for i, op in enumerate(ops) for operand in op[2]]),
    computation=computation,
    node_splits=np.array([0, len(ops)]),
    config_runtime=np.full(c, -1),
    config_id=np.arange(c),
    **arrays,
  )


def _tiling(*, kernel=(), output=(), source=()):
  row = np.zeros(24, np.float32)
  for start, bounds in ((0, kernel), (8, output), (16, source)):
    row[start : start + len(bounds)] = bounds
  return row


def test_cost_of_an_elementwise_kernel():
  module = _module(
    [
      ('parameter', (16, 128), []),
      ('tanh', (16, 128), [0]),
      ('parameter', (16, 128), []),
      ('fusion', (16, 128), [1, 2]),
    ],
    computation=np.array([0, 0, 1, 1]),
    config_feat=np.stack(
      [
        _tiling(output=(8, 128)),
        _tiling(output=(16, 128)),
        _tiling(output=(1, 1)),
        _tiling(output=(12, 128)),
      ]
    ),
  )
  # A tile of 8 x 128: 1024 tanh at 12 take 12.288 ns; 1024 values are read and written, 8 bytes
  # each: 16.384 ns. A single value also fills a whole register; a tile of 12 rows is padded to 16,
  # and two such tiles are needed.
  expected = [
    1500 + 2 * (400 + 16.384) + 12.288,
    1500 + (400 + 32.768) + 24.576,
    1500 + 2048 * (400 + 16.384) + 12.288,
    1500 + 2 * (400 + 32.768) + 24.576,
  ]
  np.testing.assert_allclose(synthetic.planted_cost(module), expected, rtol=1e-12)


def test_cost_of_a_tile_that_does_not_fit():
  # A tile of this side, read and written, takes 8 MiB. Two tiles take 8 times the fast memory; the
  # time grows with at most 4 times.
  side = 1024
  module = _module(
    [('parameter', (side, side), []), ('negate', (side, side), [0]), ('fusion', (side, side), [1])],
    computation=np.array([0, 0, 1]),
    config_feat=np.stack([_tiling(output=(side, side)), _tiling(output=(256, side))]),
  )
  whole, quarter = side * side * 8 / 500, side * side * 2 / 500
  expected = [
    1500 + 400 + whole * (1 + 4) + side * side / 1000,
    1500 + 4 * (400 + quarter * (1 + 1)) + 256 * side / 1000,
  ]
  np.testing.assert_allclose(synthetic.planted_cost(module), expected, rtol=1e-12)


def test_cost_of_a_dot_kernel():
  module = _module(
    [
      ('parameter', (16, 256), []),
      ('parameter', (256, 128), []),
      ('dot', (16, 128), [0, 1]),
      ('fusion', (16, 128), [2]),
    ],
    computation=np.array([0, 0, 0, 1]),
    config_feat=np.stack(
      [
        _tiling(kernel=(128, 128), output=(16, 128), source=(16, 128)),
        _tiling(kernel=(64, 128), output=(16, 128), source=(16, 64)),
      ]
    ),
  )
  # Two steps of 128: 16 x 128 and 128 x 128 values are read, and half of 16 x 128 written, 4 bytes
  # each.
  half = 16 * 128 * 128 / 50_000
  first = 1500 + 2 * (400 + 4 * (2048 + 16_384 + 1024) / 500) + half
  # Four steps of 64: the input is padded to the same 16 x 128 values and multiplied as such.
  second = 1500 + 4 * (400 + 4 * (2048 + 8192 + 512) / 500) + half
  np.testing.assert_allclose(synthetic.planted_cost(module), [first, second], rtol=1e-12)


def test_cost_of_a_reduce_kernel():
  module = _module(
    [
      ('parameter', (), []),
      ('parameter', (), []),
      ('add', (), [0, 1]),
      ('parameter', (8, 64, 128), []),
      ('constant', (), []),
      ('reduce', (8, 128), [2, 3, 4]),
      ('fusion', (8, 128), [5]),
    ],
    computation=np.array([0, 0, 0, 1, 1, 1, 2]),
    config_feat=_tiling(output=(8, 128), source=(8, 64, 128))[np.newaxis],
  )
  read, written = 8 * 64 * 128 * 4, 8 * 128 * 4
  work = 8 * 128 + 1  # One addition per value of the result, and the reducer's own addition.
  expected = 1500 + 400 + (read + written) / 500 + work / 1000
  np.testing.assert_allclose(synthetic.planted_cost(module), [expected], rtol=1e-12)


def _two_dots(size, configs):
  """Makes dot -> negate -> dot.

  Args:
    size: m, k, n and o of the tensors [m, k], [k, n] and [n, o].
    configs: for each config, the set of tensors (dot, tensor) with a changed layout.
  """
  m, k, n, o = size
  layouts = np.full((len(configs), 2, 18), -1)
  for config, changed in zip(layouts, configs, strict=True):
    for dot, tensor in itertools.product(range(2), range(3)):
      config[dot, 6 * tensor : 6 * tensor + 2] = (0, 1) if (dot, tensor) in changed else (1, 0)
  return _module(
    [
      ('parameter', (m, k), []),
      ('parameter', (k, n), []),
      ('dot', (m, n), [0, 1]),
      ('negate', (m, n), [2]),
      ('parameter', (n, o), []),
      ('dot', (m, o), [3, 4]),
    ],
    kind='layout',
    node_config_ids=np.array([2, 5]),
    node_config_feat=layouts,
  )


def test_cost_of_layouts():
  module = _two_dots((16, 256, 128, 64), [{}, {(0, 0)}, {(0, 0), (1, 1)}])
  padded = 16 * 128 * 8  # The result of the first dot, if its 16 rows are padded to 128.
  first = [4 * (16 * 256 + 256 * 128 + size) / 500 for size in (16 * 128, padded, padded)]
  # The 64 columns of the second dot are padded to 128.
  second = [4 * (size + 128 * 128 + 16 * 128) / 500 for size in (16 * 128, 16 * 128, padded)]
  copy = 2 * 4 * 16 * 128 / 500
  expected = [
    1500 + first[0] + second[0],
    1500 + first[1] + second[1] + copy,
    1500 + first[2] + second[2],
  ]
  np.testing.assert_allclose(synthetic.planted_cost(module), expected, rtol=1e-12)


def test_layouts_that_disagree_cost_a_copy():
  """Only agreement counts if no size needs padding."""
  agree = [{}, {(0, 0), (1, 1)}, {(0, 1), (0, 2), (1, 0), (1, 2)}]
  disagree = [{(0, 0)}, {(1, 1)}, {(0, 0), (0, 1), (1, 0)}]
  cost = synthetic.planted_cost(_two_dots((128, 256, 384, 512), agree + disagree))
  np.testing.assert_allclose(cost[:3], cost[0], rtol=1e-12)
  np.testing.assert_allclose(cost[3:], cost[0] + 2 * 4 * 128 * 384 / 500, rtol=1e-12)


def test_a_copy_that_keeps_the_minor_dimension_is_cheaper():
  shape = (8, 128, 128)
  layouts = np.full((3, 2, 18), -1)
  layouts[:, 0, 0:3] = layouts[:, 1, 6:9] = (2, 1, 0)  # The tensor between the reshapes.
  layouts[:, 0, 6:8] = layouts[:, 1, 0:2] = (1, 0)
  layouts[1, 0, :3] = (2, 0, 1)
  layouts[2, 0, :3] = (1, 2, 0)
  module = _module(
    [('parameter', (8 * 128, 128), []), ('reshape', shape, [0]), ('reshape', (8, 128 * 128), [1])],
    kind='layout',
    node_config_ids=np.array([1, 2]),
    node_config_feat=layouts,
  )
  cost = synthetic.planted_cost(module)
  np.testing.assert_allclose(
    cost - cost[0], np.array([0, 0.5, 2]) * 4 * 8 * 128 * 128 / 500, rtol=1e-9
  )


def test_a_tensor_that_is_not_made_value_by_value_needs_no_copy():
  module = _module(
    [
      ('parameter', (128, 128), []),
      ('reshape', (128, 128), [0]),
      ('reduce', (128,), [1]),
      ('reshape', (128,), [2]),
    ],
    kind='layout',
    node_config_ids=np.array([1, 3]),
    node_config_feat=np.array(
      [
        [[1, 0, *[-1] * 4, 1, 0, *[-1] * 10], [0, *[-1] * 5, 0, *[-1] * 11]],
        [[0, 1, *[-1] * 4, 1, 0, *[-1] * 10], [0, *[-1] * 5, 0, *[-1] * 11]],
      ]
    ),
  )
  cost = synthetic.planted_cost(module)
  assert cost[0] == cost[1]


@pytest.mark.parametrize('kind', _MAKERS)
@pytest.mark.parametrize('index', range(4))
def test_runtimes_are_the_cost_with_noise(kind, index):
  clean, noisy = (_MAKERS[kind](index, noise=noise) for noise in (0, 0.05))
  np.testing.assert_array_equal(clean.config_runtime, np.rint(synthetic.planted_cost(clean)))
  np.testing.assert_array_equal(synthetic.planted_cost(noisy), synthetic.planted_cost(clean))
  deviation = np.log(noisy.config_runtime / synthetic.planted_cost(noisy))
  assert 0.03 < np.std(deviation) < 0.07
  assert abs(np.mean(deviation)) < 0.03


@pytest.mark.parametrize('module', _MODULES)
def test_noise_is_small(module):
  deviation = np.log(module.config_runtime / synthetic.planted_cost(module))
  assert 0.006 < np.std(deviation) < 0.015


@hypothesis.given(
  kind=st.sampled_from(sorted(_MAKERS)),
  index=st.integers(0, 10**6),
  seed=st.integers(0, 2**40),
  data=st.data(),
)
@hypothesis.settings(max_examples=15, deadline=None)
def test_cost_is_a_function_of_module_and_config(kind, index, seed, data):
  module = _MAKERS[kind](index, seed=seed)
  chosen = np.array(data.draw(st.permutations(range(module.num_configs)))[:7])
  np.testing.assert_array_equal(
    synthetic.planted_cost(module.select_configs(chosen)), synthetic.planted_cost(module)[chosen]
  )


# Graphs.


@pytest.mark.parametrize('module', _MODULES)
def test_names_and_sizes(module):
  assert module.module_id.startswith(f'synthetic_{module.kind}_')
  limits = {'tile': ((6, 50), (20, 80), (0, 0)), 'layout': ((50, 250), (40, 100), (6, 30))}[
    module.kind
  ]
  sizes = module.num_ops, module.num_configs, module.num_config_ops
  assert all(low <= size <= high for size, (low, high) in zip(sizes, limits, strict=True)), sizes
  assert not module.dropped_runs


@pytest.mark.parametrize('module', _MODULES)
def test_edges(module):
  edges = [tuple(edge) for edge in module.edge_index.tolist()]
  assert edges == sorted(set(edges))
  assert all(operand < consumer for consumer, operand in edges)
  used = {operand for _, operand in edges}
  assert used == set(range(module.num_ops - 1)), 'an op without use'


def _values(op, name):
  """Returns all values of a block, also the values that have no column.

  Ops of the sample cut the first dimension and pad the last one.
  """
  source = max((operand.shape for operand in op.operands), key=len, default=())
  if name == 'shape_dimensions':
    return op.shape
  if name.startswith('window') and op.name == 'convolution':
    return op.block(name, 2)
  if name.startswith('slice_dims') and op.name == 'slice':
    rest = [0] * (len(source) - 1)
    return {'start': [source[0] // 2, *rest], 'stride': [1] * len(source), 'limit': source}[
      name.rsplit('_', 1)[1]
    ]
  if name.startswith('padding_config') and op.name == 'pad':
    rest = [0] * (len(source) - 1)
    return {'low': [0, *rest], 'high': [*rest, 1]}[name.rsplit('_', 1)[1]]
  return []


@pytest.mark.parametrize('module', _MODULES)
def test_sums_and_products(module):
  for op in _ops(module):
    for name, width in _SUMMED.items():
      values = list(_values(op, name))
      assert op.block(name, width) == [*values, *[0] * width][:width]
      assert op.feat[f'{name}_sum'] == sum(values)
      assert op.feat[f'{name}_product'] == math.prod(values)


@pytest.mark.parametrize('module', _MODULES)
def test_columns_of_each_op(module):
  types = [column for name, column in _COLUMNS.items() if name.startswith('shape_element_type')]
  np.testing.assert_array_equal(module.node_feat[:, types].sum(axis=1), 1)
  for op in _ops(module):
    order = op.block('layout_minor_to_major', 6)
    assert order == [*range(len(op.shape))[::-1], *[0] * (6 - len(op.shape))]
    assert (
      op.feat['feature_group_count'] == op.feat['batch_group_count'] == (op.name == 'convolution')
    )
    assert op.feat['window_window_reversal_false_count'] == 2 * (op.name == 'convolution')
    assert (
      op.feat['element_size_in_bits']
      == op.feat['is_stable']
      == op.feat['shape_tuple_shapes_size']
      == 0
    )


@pytest.mark.parametrize('module', _MODULES)
def test_computations(module):
  ops = _ops(module)
  assert (np.diff(module.computation) >= 0).all()
  for computation in range(module.computation[-1] + 1):
    members = np.flatnonzero(module.computation == computation)
    assert [i for i in members if ops[i].feat['is_root']] == [members[-1]]
    assert [ops[i].feat['parameter_number'] for i in members if ops[i].name == 'parameter'] == list(
      range(sum(ops[i].name == 'parameter' for i in members))
    )
    # Other computations are reached by their root alone.
    for consumer, operand in module.edge_index[np.isin(module.edge_index[:, 0], members)]:
      assert operand in members or (
        ops[operand].feat['is_root'] and ops[consumer].name in ('call', 'fusion', 'reduce')
      )
  if module.kind == 'tile':
    assert ops[-1].name == 'fusion'
    assert module.node_splits.tolist() == [0, module.num_ops]
  else:
    assert 2 <= module.node_splits.size - 1 <= 5
    ends = np.flatnonzero(np.diff(module.computation)) + 1
    assert set(module.node_splits[1:-1]) <= set(ends)


def _without(shape, dimensions):
  return tuple(size for i, size in enumerate(shape) if i not in dimensions)


def _check_shape(op):
  """Checks the shape of an op against its operands, whose order is not known."""
  shapes = [operand.shape for operand in op.operands]
  dimensions = op.block('dimensions', 6)
  if op.name in ('parameter', 'constant', 'iota'):
    assert not op.operands
  elif op.name == 'broadcast':
    (shape,) = shapes
    assert len(set(dimensions[: len(shape)])) == len(shape)
    assert tuple(op.shape[i] for i in dimensions[: len(shape)]) == shape
  elif op.name == 'transpose':
    (shape,) = shapes
    assert sorted(dimensions[: len(shape)]) == list(range(len(shape)))
    assert op.shape == tuple(shape[i] for i in dimensions[: len(shape)])
  elif op.name == 'reshape':
    (shape,) = shapes
    assert math.prod(op.shape) == math.prod(shape)
    assert len(op.shape) != len(shape)
  elif op.name == 'reduce':
    source = max(shapes, key=len)
    reduced = dimensions[: len(source) - len(op.shape)]
    assert op.shape == _without(source, reduced)
    assert sorted(shapes, key=len) == [(), (), source]
  elif op.name == 'slice':
    (shape,) = shapes
    start, limit, stride = (
      op.block(f'slice_dims_{name}', 2) for name in ('start', 'limit', 'stride')
    )
    assert list(op.shape[:2]) == [
      (b - a) // step for a, b, step in zip(start, limit, stride, strict=True)
    ]
    assert all(b <= size for b, size in zip(limit, shape, strict=False))
    assert op.feat['slice_dims_limit_sum'] == sum(shape)
  elif op.name == 'pad':
    source = max(shapes, key=len)
    assert sum(op.shape) == (
      sum(source)
      + op.feat['padding_config_edge_padding_low_sum']
      + op.feat['padding_config_edge_padding_high_sum']
    )
  elif op.name == 'dot':
    left, right = shapes
    assert left[:-2] == right[:-2] == op.shape[:-2]
    assert left[-1] == right[-2]
    assert op.shape[-2:] == (left[-2], right[-1])
  elif op.name == 'convolution':
    source, kernel = shapes
    assert (op.shape[0], op.shape[3], source[3]) == (source[0], kernel[3], kernel[2])
    for i, (size, stride, low, high) in enumerate(
      zip(
        *(
          op.block(f'window_{name}', 2)
          for name in ('size', 'stride', 'padding_low', 'padding_high')
        ),
        strict=True,
      )
    ):
      assert kernel[i] == size
      assert op.shape[1 + i] == (source[1 + i] + low + high - size) // stride + 1
    assert op.block('convolution_dim_numbers_input_spatial_dims', 4) == [1, 2, 0, 0]
    assert op.block('convolution_dim_numbers_kernel_spatial_dims', 4) == [0, 1, 0, 0]
  elif op.name in ('call', 'fusion'):
    assert op.shape in [operand.shape for operand in op.operands if operand.feat['is_root']]
  else:
    assert op.operands
    assert set(shapes) == {op.shape}, op.name


@pytest.mark.parametrize('module', _MODULES)
def test_shapes_follow_from_those_of_the_operands(module):
  for op in _ops(module):
    _check_shape(op)


def test_a_wrong_shape_is_noticed():
  bad = _Op(
    'dot',
    (4, 6),
    [_Op('parameter', (4, 5), [], {}), _Op('parameter', (4, 6), [], {})],
    {f'dimensions_{i}': 0 for i in range(6)},
  )
  with pytest.raises(AssertionError):
    _check_shape(bad)


@pytest.mark.parametrize('kind', _MAKERS)
def test_variety(kind):
  names = {op.name for module in _SAMPLE[kind] for op in _ops(module)}
  both = {
    'parameter',
    'constant',
    'broadcast',
    'reduce',
    'reshape',
    'transpose',
    'convert',
    'dot',
    'convolution',
  }
  assert names >= both | {'tile': {'fusion', 'select', 'slice', 'pad'}, 'layout': {'call'}}[kind]
  assert len({module.num_ops for module in _SAMPLE[kind]}) > 10


# Configs.


@pytest.mark.parametrize('module', _MODULES)
def test_configs_are_distinct(module):
  configs = module.config_feat if module.kind == 'tile' else module.node_config_feat
  assert len(np.unique(configs.reshape(module.num_configs, -1), axis=0)) == module.num_configs
  assert module.config_id.tolist() == list(range(module.num_configs))


@pytest.mark.parametrize('module', _TILE)
def test_tile_bounds(module):
  ops = _ops(module)
  body = [
    op
    for op, computation in zip(ops, module.computation, strict=True)
    if computation < module.computation[-1]
  ]
  contraction = next((op for op in body if op.name in ('dot', 'convolution')), None)
  reduction = next((op for op in body if op.name == 'reduce'), None)
  for row in module.config_feat.astype(int).tolist():
    kernel, output, source = (
      [value for value in row[start : start + 6] if value] for start in (0, 8, 16)
    )
    for bounds, start in ((kernel, 0), (output, 8), (source, 16)):
      assert row[start : start + len(bounds)] == bounds
      assert row[start + 6 : start + 8] == [sum(bounds), math.prod(bounds) if bounds else 0]
    assert len(output) == len(body[-1].shape)
    assert all(1 <= bound <= size for bound, size in zip(output, body[-1].shape, strict=True))
    if contraction is not None:
      shape = contraction.operands[1].shape
      assert all(1 <= bound <= size for bound, size in zip(kernel, shape, strict=True))
      assert kernel[-1] == output[-1]
      assert source[-1] == kernel[-2]
      assert len(source) == len(contraction.operands[0].shape)
    else:
      assert not kernel
      assert len(source) == (len(output) + 1 if reduction else 0)


@pytest.mark.parametrize('module', _TILE)
def test_tile_normalizers_are_the_time_of_the_default(module):
  assert set(module.config_runtime_normalizers) == {module.config_runtime[0]}


def test_the_default_tiling_is_good_but_seldom_the_best():
  better = [(module.config_runtime < module.config_runtime[0]).mean() for module in _SAMPLE['tile']]
  assert 0.05 < np.mean(better) < 0.25
  assert np.mean(np.array(better) > 0) > 0.5


@pytest.mark.parametrize('module', _LAYOUT)
def test_layouts(module):
  ops = _ops(module)
  chosen = module.node_config_ids.tolist()
  assert chosen == sorted(set(chosen))
  assert {ops[i].name for i in chosen} <= {'convolution', 'dot', 'reshape'}
  assert all(i in chosen for i, op in enumerate(ops) if op.name in ('convolution', 'dot'))
  for number, i in enumerate(chosen):
    tensors = [ops[i], *ops[i].operands]
    for tensor, block in enumerate(np.split(module.node_config_feat[:, number], 3, axis=1)):
      rank = len(tensors[tensor].shape) if tensor < len(tensors) else 0
      assert (block[:, rank:] == -1).all()
      np.testing.assert_array_equal(
        np.sort(block[:, :rank], axis=1), np.tile(np.arange(rank), (len(block), 1))
      )
      assert block[0, :rank].tolist() == list(range(rank))[::-1]


@pytest.mark.parametrize('module', _LAYOUT)
def test_configs_near_to_and_far_from_the_default(module):
  share = (module.node_config_feat != module.node_config_feat[0]).any(axis=2).mean(axis=1)
  assert share[1:].min() <= 0.3
  assert share.max() >= 0.4
  assert (share[1:] > 0).all()


# Uses of a sample.


@pytest.mark.parametrize('kind', _MAKERS)
def test_spread_of_runtimes(kind):
  spread = [module.config_runtime.max() / module.config_runtime.min() for module in _SAMPLE[kind]]
  assert min(spread) > 1.15
  assert max(spread) < 20
  assert np.median(spread) > 2


def _opa(score, runtime):
  faster = runtime[:, np.newaxis] < runtime
  wins = np.sign(score - score[:, np.newaxis])[faster]
  return np.mean(wins > 0) + np.mean(wins == 0) / 2


def test_no_single_column_of_a_tiling_ranks_well():
  for column in range(24):
    opa = np.mean(
      [_opa(module.config_feat[:, column], module.config_runtime) for module in _SAMPLE['tile']]
    )
    assert 0.3 < opa < 0.7, features.tile_feature_names()[column]


def test_distance_from_the_default_does_not_rank_layouts():
  tau = [
    scipy.stats.kendalltau(
      (module.node_config_feat != module.node_config_feat[0]).any(axis=2).sum(axis=1),
      module.config_runtime,
    ).statistic
    for module in _SAMPLE['layout']
  ]
  assert abs(np.mean(tau)) < 0.3


def test_both_padding_and_copies_are_needed_to_rank_layouts(monkeypatch):
  full = [synthetic.planted_cost(module) for module in _SAMPLE['layout']]
  monkeypatch.setattr(synthetic, '_MINOR_PASSES', 0)
  monkeypatch.setattr(synthetic, '_MAJOR_PASSES', 0)
  local = [synthetic.planted_cost(module) for module in _SAMPLE['layout']]
  tau = {
    name: np.mean(
      [
        scipy.stats.kendalltau(score, module.config_runtime).statistic
        for score, module in zip(scores, _SAMPLE['layout'], strict=True)
      ]
    )
    for name, scores in (('full', full), ('local', local))
  }
  assert 0.6 < tau['local'] < tau['full'] - 0.1
  assert tau['full'] > 0.9


def test_a_random_ranking_is_clearly_bad():
  rng = np.random.default_rng(0)
  for kind, modules in _SAMPLE.items():
    found = [
      rng.permutation(module.config_runtime)[:5].min() / module.config_runtime.min() - 1
      for module in modules
      for _ in range(20)
    ]
    assert np.mean(found) > 0.3, kind
