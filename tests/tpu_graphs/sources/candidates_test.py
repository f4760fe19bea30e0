"""Tests of tpu_graphs.sources.candidates: random layouts against naive rules, files of configs."""

import collections
import io
import itertools
import math

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs.hlo import protos
from tpu_graphs.sources import candidates
from tpu_graphs.sources import npz

_MANY = 5000  # No single op here has so many different configs, except ops of high rank.


class _Program:
  """A builder of an HloModuleProto; each method adds an instruction and returns its id."""

  def __init__(self, name='main'):
    self.message = protos.HloModuleProto(name=name)
    self._computation = self.message.computations.add(name='entry', id=1, root_id=1)

  def add(self, opcode, sizes, operands=(), layout=(), **fields):
    """Adds an instruction; `id` may be one of `fields`."""
    fields = {'id': len(self._computation.instructions) + 1, 'name': f'{opcode}-π', **fields}
    instruction = self._computation.instructions.add(opcode=opcode, operand_ids=operands, **fields)
    instruction.shape.element_type = 11
    instruction.shape.dimensions.extend(sizes)
    instruction.shape.layout.minor_to_major.extend(layout)
    return instruction.id

  def parameter(self, *sizes, layout=(), **fields):
    return self.add('parameter', sizes, layout=layout, **fields)

  def dot(self, sizes, operands, batch=((), ()), layout=()):
    added = self.add('dot', sizes, operands, layout)
    dots = protos.DotModule()
    dots.computations.add().instructions.add().dot_dimension_numbers.MergeFrom(
      type(dots.computations[0].instructions[0].dot_dimension_numbers)(
        lhs_batch_dimensions=batch[0], rhs_batch_dimensions=batch[1]
      )
    )
    self._computation.instructions[-1].MergeFromString(
      dots.computations[0].instructions[0].SerializeToString()
    )
    return added

  def configs(self, count=_MANY, seed=0):
    """Returns the module with random layouts."""
    data = self.message.SerializeToString()
    [module] = hlo.from_bytes(data, kind='layout')
    return candidates.random_layouts(data, module, count=count, seed=seed)


def _orders(module, op=0):
  """Returns the configs of an op as (output, input, kernel), each a tuple without padding."""
  result = []
  for row in module.node_config_feat[:, op].reshape(-1, 3, 6).tolist():
    for tensor in row:
      assert tensor == sorted(tensor, key=lambda i: i == -1)  # Padding comes last.
    result.append(tuple(tuple(i for i in tensor if i != -1) for tensor in row))
  return result


def _in_place(output, input_, output_order, input_order):
  """Returns whether a reshape moves no element: compares the memory of both, naively."""
  array = np.arange(math.prod(input_)).reshape(input_)
  before = array.transpose(input_order[::-1]).reshape(-1)
  return np.array_equal(before, array.reshape(output).transpose(output_order[::-1]).reshape(-1))


def _ones_are_major(order, sizes):
  ones = [i for i in range(len(sizes)) if sizes[i] == 1]
  return list(order[len(order) - len(ones) :]) == ones[::-1]


def _assert_well_formed(module, count):
  c = module.num_configs
  assert 1 <= c <= count
  assert len(np.unique(module.node_config_feat.reshape(c, -1), axis=0)) == c
  assert (module.config_id.tolist(), module.default_config) == (list(range(c)), 0)
  assert not module.is_measured
  assert module.dropped_runs == {}


@pytest.mark.parametrize('layout', [(), (3, 2, 1, 0), (0, 1, 2, 3), (2, 0, 3, 1)])
def test_convolution_orders_batch_and_feature(layout):
  program = _Program()
  operands = [program.parameter(8, 16, 16, 4, layout=layout), program.parameter(3, 3, 4, 32)]
  program.add('convolution', (8, 32, 16, 16), operands)
  numbers = program.message.computations[0].instructions[-1].convolution_dimension_numbers
  numbers.input_batch_dimension, numbers.input_feature_dimension = 0, 3
  numbers.kernel_input_feature_dimension, numbers.kernel_output_feature_dimension = 2, 3
  numbers.output_batch_dimension, numbers.output_feature_dimension = 0, 1
  module = program.configs()
  assert module.node_config_ids.tolist() == [2]
  orders = _orders(module)
  own = (0, 3) if layout and layout.index(0) < layout.index(3) else (3, 0)
  assert orders[0] == ((1, 0), own, (3, 2))
  assert sorted(orders) == sorted(
    itertools.product([(0, 1), (1, 0)], [(0, 3), (3, 0)], [(2, 3), (3, 2)])
  )
  _assert_well_formed(module, 8)


def test_dot_of_matrices():
  program = _Program()
  program.dot((8, 32), [program.parameter(8, 16, layout=(0, 1)), program.parameter(16, 32)])
  orders = _orders(program.configs())
  assert orders[0] == ((1, 0), (0, 1), (1, 0))
  assert sorted(orders) == sorted(itertools.product([(0, 1), (1, 0)], repeat=3))


def test_dot_leaves_batch_dimensions_out():
  program = _Program()
  program.dot(
    (7, 8, 32), [program.parameter(8, 7, 16), program.parameter(16, 32, 7)], batch=([1], [2])
  )
  orders = _orders(program.configs())
  assert orders[0] == ((2, 1), (2, 0), (1, 0))
  assert sorted(orders) == sorted(
    itertools.product([(1, 2), (2, 1)], [(0, 2), (2, 0)], [(0, 1), (1, 0)])
  )


def test_dot_of_vectors():
  program = _Program()
  program.dot((), [program.parameter(4), program.parameter(4)])
  assert _orders(program.configs()) == [((), (0,), (0,))]


# Each case is from a published file, without the layouts that a config leaves to the compiler.
@pytest.mark.parametrize(
  ('output', 'input_', 'expected'),
  [
    ((512, 1664), (6656, 128), {((1, 0), (1, 0))}),
    ((512, 14, 128), (512, 1792), {((2, 1, 0), (1, 0)), ((0, 2, 1), (0, 1))}),
    ((6656,), (512, 13), {((0,), (1, 0))}),
    ((512, 13, 128), (6656, 128), {((2, 1, 0), (1, 0)), ((1, 0, 2), (0, 1))}),
    ((512, 27, 27), (512, 729), {((2, 1, 0), (1, 0)), ((0, 2, 1), (0, 1))}),
    ((256,), (256, 1), {((0,), (0, 1))}),
    ((), (1,), {((), (0,))}),
    ((1,), (), {((0,), ())}),
    ((512, 1), (512,), {((0, 1), (0,))}),
    (
      (96, 96, 96),
      (1, 96, 96, 96),
      {
        ((0, 1, 2), (1, 2, 3, 0)),
        ((0, 2, 1), (1, 3, 2, 0)),
        ((1, 0, 2), (2, 1, 3, 0)),
        ((1, 2, 0), (2, 3, 1, 0)),
        ((2, 0, 1), (3, 1, 2, 0)),
        ((2, 1, 0), (3, 2, 1, 0)),
      },
    ),
  ],
)
def test_reshape_as_published(output, input_, expected):
  program = _Program()
  program.add('reshape', output, [program.parameter(*input_)])
  module = program.configs()
  orders = _orders(module)
  assert orders[0] == max(expected) + ((),)  # The first config is row-major.
  assert set(orders) == {pair + ((),) for pair in expected}
  _assert_well_formed(module, len(expected))


# These shapes do not make a valid reshape, but a program may hold them.
@pytest.mark.parametrize(
  ('output', 'input_'), [((2, 3), (2, 4)), ((0, 5), (5, 0)), ((2, -1), (2, 2)), ((2, 1), ())]
)
def test_invalid_reshape(output, input_):
  program = _Program()
  program.add('reshape', output, [program.parameter(*input_)])
  [(output_order, input_order, kernel_order)] = _orders(program.configs())
  assert sorted(output_order) == list(range(len(output)))
  assert sorted(input_order) == list(range(len(input_)))
  assert kernel_order == ()


def test_own_layout_that_moves_elements_is_the_default_only():
  program = _Program()
  program.add('reshape', (2, 3), [program.parameter(2, 3, layout=(0, 1))], layout=(1, 0))
  assert _orders(program.configs())[0] == ((1, 0), (0, 1), ())
  assert set(_orders(program.configs())[1:]) == {((1, 0), (1, 0), ()), ((0, 1), (0, 1), ())}


def _sizes(max_rank):
  return st.lists(st.integers(1, 3), max_size=max_rank).filter(lambda sizes: math.prod(sizes) <= 64)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.data())
def test_reshape_has_every_pair_of_layouts_that_moves_nothing(data):
  input_ = data.draw(_sizes(4))
  # The output cuts the same elements differently, from runs of the same prime factors.
  factors = [size for size in input_ if size > 1]
  output = []
  for factor in factors:
    if output and data.draw(st.booleans()):
      output[-1] *= factor
    else:
      output.append(factor)
  for _ in range(data.draw(st.integers(0, 1))):
    output.insert(data.draw(st.integers(0, len(output))), 1)
  program = _Program()
  if data.draw(st.booleans()):
    input_, output = output, input_
  program.add('reshape', output, [program.parameter(*input_)])
  expected = {
    (*pair, ())
    for pair in itertools.product(
      itertools.permutations(range(len(output))), itertools.permutations(range(len(input_)))
    )
    if _ones_are_major(pair[0], output)
    and _ones_are_major(pair[1], input_)
    and _in_place(output, input_, *pair)
  }
  assert set(_orders(program.configs())) == expected


@st.composite
def _programs(draw):
  """Draws a program, and the dimensions that configs name for each tensor of each op."""
  program, expected = _Program(draw(st.text(max_size=3))), []

  def tensor():
    sizes = draw(_sizes(8))
    return sizes, draw(st.sampled_from([(), draw(st.permutations(range(len(sizes))))]))

  for opcode in draw(
    st.lists(st.sampled_from(['dot', 'reshape', 'convolution', 'negate']), max_size=6)
  ):
    num_operands = 1 if opcode in ('reshape', 'negate') else 2
    operands = [tensor() for _ in range(num_operands)]
    ids = [program.parameter(*sizes, layout=layout) for sizes, layout in operands]
    output, layout = tensor()
    if opcode == 'reshape':
      output, layout = draw(st.permutations(operands[0][0])), ()
    named = [set(range(len(sizes))) for sizes in (output, operands[0][0], operands[-1][0])]
    if opcode == 'dot':
      batch = [
        draw(st.sets(st.sampled_from(range(len(sizes))))) if sizes else set()
        for sizes, _ in operands
      ]
      batch[1] = set(sorted(batch[1])[: len(batch[0])])
      batch[0] = set(sorted(batch[0])[: len(batch[1])])
      program.dot(output, ids, batch=batch, layout=layout)
      named = [named[0] - set(range(len(batch[0]))), named[1] - batch[0], named[2] - batch[1]]
    else:
      program.add(opcode, output, ids, layout)
    if opcode == 'reshape':
      named[2] = set()
    elif opcode == 'convolution':
      # The dimension numbers are not set, so all are 0.
      named = [{0} & every for every in named]
    if opcode != 'negate':
      expected.append((len(program.message.computations[0].instructions) - 1, named))
  return program, expected


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(_programs(), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_any_program(drawn, count, seed):
  program, expected = drawn
  if not expected:
    with pytest.raises(errors.InputError, match='no configurable op'):
      program.configs(count, seed)
    return
  module = program.configs(count, seed)
  _assert_well_formed(module, count)
  assert module.node_config_ids.tolist() == [node for node, _ in expected]
  for op, (_, named) in enumerate(expected):
    for tensors in _orders(module, op):
      for order, dimensions in zip(tensors, named, strict=True):
        assert len(set(order)) == len(order) == min(len(dimensions), 6)
        assert set(order) <= dimensions
  again = program.configs(count, seed)
  np.testing.assert_array_equal(again.node_config_feat, module.node_config_feat)


def test_default_is_the_own_layout():
  program = _Program()
  left = program.parameter(2, 3, 5, layout=(1, 2, 0))
  program.add('reshape', (5, 6), [left], layout=(1, 0))
  program.dot(
    (2, 3),
    [program.parameter(2, 5, layout=(1, 0)), program.parameter(5, 3, layout=(0, 1))],
    layout=(0, 1),
  )
  # These layouts belong to other shapes.
  program.add('reshape', (3, 1, 2), [program.parameter(3, 2, layout=(5, 7))], layout=(0, 1))
  module = program.configs(count=1)
  assert [_orders(module, op)[0] for op in range(3)] == [
    ((1, 0), (1, 2, 0), ()),
    ((0, 1), (1, 0), (0, 1)),
    ((2, 0, 1), (1, 0), ()),
  ]


def test_all_configs_there_are_and_no_repeats():
  program = _Program()
  program.dot((8, 32), [program.parameter(8, 16), program.parameter(16, 32)])
  program.add('reshape', (8, 4, 4), [program.parameter(8, 16)])
  for count in (1, 2, 15, 16, 17, 1000):
    module = program.configs(count=count)
    _assert_well_formed(module, count)
    assert module.num_configs == min(count, 16)
  every = {config.tobytes() for config in program.configs().node_config_feat}
  assert every == {config.tobytes() for config in program.configs(seed=1).node_config_feat}
  assert not np.array_equal(
    program.configs(seed=1).node_config_feat, program.configs(seed=2).node_config_feat
  )


def test_each_layout_is_as_likely_as_any_other():
  program = _Program()
  for size in range(2, 14):
    program.dot((8, 32), [program.parameter(8, size), program.parameter(size, 32)])
  module = program.configs(count=2000)
  assert module.num_configs == 2000
  for op in range(12):
    counts = collections.Counter(_orders(module, op))
    assert len(counts) == 8
    # The limit is five standard deviations.
    assert max(abs(count - 250) for count in counts.values()) < 75


def test_ops_that_are_alike_share_their_layouts():
  program = _Program()
  for sizes in ((8, 16), (8, 16), (8, 17)):
    program.dot((8, 32), [program.parameter(*sizes), program.parameter(sizes[1], 32)])
  module = program.configs()
  first, same, other = (_orders(module, op) for op in range(3))
  assert first == same
  assert module.num_configs == 64
  assert first != other


def test_rank_beyond_six_names_the_six_most_minor():
  program = _Program()
  program.dot(
    (2,) * 7, [program.parameter(*(2,) * 7), program.parameter(*(2,) * 8, layout=tuple(range(8)))]
  )
  program.add('reshape', (2,) * 7, [program.parameter(*(2,) * 7)])
  program.add('reshape', (8,), [program.parameter(*(1,) * 7, 8)])
  module = program.configs(count=100)
  assert module.num_configs == 100
  assert _orders(module, 0)[0] == ((6, 5, 4, 3, 2, 1), (6, 5, 4, 3, 2, 1), (0, 1, 2, 3, 4, 5))
  assert _orders(module, 1)[0] == ((6, 5, 4, 3, 2, 1), (6, 5, 4, 3, 2, 1), ())
  assert set(_orders(module, 2)) == {((0,), (7, 6, 5, 4, 3, 2), ())}
  for output, input_, _ in _orders(module, 1):
    assert output == input_
    assert sorted(output) == [1, 2, 3, 4, 5, 6]


def test_duplicate_ids_mean_the_last():
  program = _Program()
  program.parameter(2, 3, id=9)
  program.add('reshape', (6,), [9], id=3)
  program.parameter(6, id=9)
  assert set(_orders(program.configs())) == {((0,), (0,), ())}


def _reshape_of_nothing(program):
  program.add('reshape', (2,), [])


def _dot_of_one(program):
  program.dot((2,), [program.parameter(2)])


def _high_rank(program):
  program.add('reshape', (1,) * 128, [program.parameter(1)])


@pytest.mark.parametrize(
  ('build', 'reason'),
  [
    (_reshape_of_nothing, 'wrong operands of a reshape'),
    (_dot_of_one, 'wrong operands of a dot'),
    (_high_rank, 'too many dimensions'),
  ],
)
def test_malformed_op_is_named(build, reason):
  program = _Program()
  build(program)
  with pytest.raises(errors.InputError, match=reason) as caught:
    program.configs()
  assert '-π' in caught.value.where
  assert caught.value.found
  assert caught.value.expected


def test_operand_that_does_not_exist():
  program = _Program()
  program.add('reshape', (2,), [program.parameter(2)])
  [module] = hlo.from_bytes(program.message.SerializeToString(), kind='layout')
  program.message.computations[0].instructions[1].operand_ids[0] = 77
  with pytest.raises(errors.InputError, match=r'wrong operands .*\[77\]'):
    candidates.random_layouts(program.message.SerializeToString(), module, count=1, seed=0)


def test_hlo_of_another_program_or_of_none():
  program = _Program()
  program.add('reshape', (2,), [program.parameter(2)])
  [module] = hlo.from_bytes(program.message.SerializeToString(), kind='layout')
  program.parameter(3)
  with pytest.raises(errors.InputError, match='HLO of another program'):
    candidates.random_layouts(program.message.SerializeToString(), module, count=1, seed=0)
  with pytest.raises(errors.InputError, match='not an HLO module'):
    candidates.random_layouts(b'no protobuf', module, count=1, seed=0)


def _golden(stem):
  """Returns a program of tests/golden: HLO, module, and the message as TensorFlow reads it."""
  hlo_pb2 = pytest.importorskip('tensorflow.compiler.xla.service.hlo_pb2')
  extraction = hlo.read((testing.GOLDEN / 'modules' / f'{stem}.pb').read_bytes(), kind='layout')
  program = extraction.program(0)
  return program, extraction.modules[0], hlo_pb2.HloModuleProto.FromString(program)


@pytest.mark.parametrize(
  'stem', sorted(path.stem for path in (testing.GOLDEN / 'modules').glob('*.npz'))
)
def test_real_programs(stem):
  program, module, message = _golden(stem)
  module = candidates.random_layouts(program, module, count=20, seed=3)
  _assert_well_formed(module, 20)
  assert module.num_configs == 20
  instructions = [
    instruction for computation in message.computations for instruction in computation.instructions
  ]
  shapes = {instruction.id: list(instruction.shape.dimensions) for instruction in instructions}
  assert module.node_config_ids.tolist() == [
    i
    for i, instruction in enumerate(instructions)
    if instruction.opcode in candidates.CONFIGURABLE_OPCODES
  ]
  assert candidates.op_names(program) == [instruction.name for instruction in instructions]
  for op, node in enumerate(module.node_config_ids):
    instruction = instructions[node]
    ranks = [
      len(sizes)
      for sizes in (instruction.shape.dimensions, *(shapes[i] for i in instruction.operand_ids))
    ]
    convolution, dot = instruction.convolution_dimension_numbers, instruction.dot_dimension_numbers
    if instruction.opcode == 'convolution':
      named = [
        {convolution.output_batch_dimension, convolution.output_feature_dimension},
        {convolution.input_batch_dimension, convolution.input_feature_dimension},
        {convolution.kernel_input_feature_dimension, convolution.kernel_output_feature_dimension},
      ]
    elif instruction.opcode == 'dot':
      named = [
        set(range(ranks[0])[len(dot.lhs_batch_dimensions) :]),
        set(range(ranks[1])) - set(dot.lhs_batch_dimensions),
        set(range(ranks[2])) - set(dot.rhs_batch_dimensions),
      ]
      assert all(len(named_of_tensor) == 2 for named_of_tensor in named) or stem == 'misc_ops_unopt'
    else:
      named = [*(set(range(rank)) for rank in ranks), set()]
      sizes = tuple(instruction.shape.dimensions), tuple(shapes[instruction.operand_ids[0]])
      if math.prod(sizes[0]) < 1 << 14 and max(ranks) <= 6:
        own, *others = _orders(module, op)
        assert all(orders == own or _in_place(*sizes, *orders[:2]) for orders in others)
    for tensors in _orders(module, op):
      for order, dimensions in zip(tensors, named, strict=True):
        assert len(order) == min(len(dimensions), 6)
        assert set(order) <= dimensions


@testing.needs_shared
def test_configs_of_a_published_program_are_among_those_proposed():
  extraction = hlo.read(
    (testing.SHARED / 'data' / 'module_tuning_data_layout.pb').read_bytes(), kind='layout'
  )
  published = extraction.modules[0]
  module = candidates.random_layouts(extraction.program(0), published, count=500, seed=0)
  assert module.node_config_ids.tolist() == sorted(published.node_config_ids.tolist())
  for op, node in enumerate(published.node_config_ids):
    # Configs without any order leave the op to the compiler.
    found = set(_orders(published, op)) - {((), (), ())}
    assert found
    assert found <= set(_orders(module, module.node_config_ids.tolist().index(node)))


def _layout_module(**over):
  return _read_npz(testing.layout_arrays(n=5, c=3, nc=2, **over))


def _tile_module():
  return _read_npz(testing.tile_arrays(n=3, c=4))


def _read_npz(arrays):
  file = io.BytesIO()
  np.savez(file, **arrays)
  file.seek(0)
  return npz.read(file, path='m.npz')


@pytest.fixture
def write(tmp_path):
  """Returns a function that writes an npz file of arrays and returns its path."""

  def write(**arrays):
    path = tmp_path / 'cönfigs π.npz'
    np.savez(path, **arrays)
    return path

  return write


@pytest.mark.parametrize('dtype', [np.int8, np.int64, np.float32, np.float64])
def test_layout_configs_of_a_file(write, dtype):
  feat = np.random.default_rng(0).integers(-1, 5, (7, 3, 18))
  path = write(
    node_config_ids=np.array([4, 0, 2], np.int32),
    node_config_feat=feat.astype(dtype),
    score=np.zeros(7),
  )
  original = _layout_module()
  module = candidates.read(path, original)
  np.testing.assert_array_equal(module.node_config_feat, feat)
  assert module.node_config_feat.dtype == np.int8
  assert module.node_config_ids.tolist() == [4, 0, 2]
  assert module.config_id.tolist() == list(range(7))
  assert module.config_runtime.tolist() == [-1] * 7
  assert module.default_config is None
  assert (module.module_id, module.num_ops, module.num_edges) == ('m', 5, 4)
  np.testing.assert_array_equal(module.node_feat, original.node_feat)
  assert original.num_configs == 3  # The original is untouched.


@pytest.mark.parametrize('dtype', [np.float32, np.float64])
def test_tile_configs_of_a_file(write, dtype):
  feat = np.arange(48).reshape(2, 24).astype(dtype)
  module = candidates.read(str(write(config_feat=feat)), _tile_module())
  np.testing.assert_array_equal(module.config_feat, feat)
  assert module.config_runtime_normalizers.tolist() == module.config_runtime.tolist() == [-1, -1]


def test_published_file_gives_its_configs(write):
  arrays = testing.tile_arrays(n=9, c=5, seed=3)
  module = candidates.read(write(**arrays), _tile_module())
  np.testing.assert_array_equal(module.config_feat, arrays['config_feat'])
  assert (module.num_ops, module.is_measured) == (3, False)


_IDS, _FEAT = np.array([0, 4]), np.zeros((3, 2, 18), np.float32)


@pytest.mark.parametrize(
  ('arrays', 'where', 'reason'),
  [
    ({'node_config_ids': _IDS}, 'node_config_feat', 'array missing'),
    ({'node_config_feat': _FEAT}, 'node_config_ids', 'array missing'),
    (
      {'config_feat': np.zeros((2, 24), np.float32)},
      None,
      'found a tile file, expected a layout file',
    ),
    ({'score': np.zeros(3)}, None, 'neither a tile nor a layout file'),
    ({}, None, 'neither a tile nor a layout file'),
    (
      {'node_config_ids': _IDS, 'node_config_feat': _FEAT, 'config_feat': np.zeros((2, 24))},
      None,
      'both',
    ),
    (
      {'node_config_ids': _IDS, 'node_config_feat': _FEAT[:, :1]},
      'node_config_feat',
      'wrong shape',
    ),
    (
      {'node_config_ids': _IDS, 'node_config_feat': _FEAT[..., :17]},
      'node_config_feat',
      'wrong shape',
    ),
    ({'node_config_ids': _IDS, 'node_config_feat': _FEAT[0]}, 'node_config_feat', 'wrong shape'),
    ({'node_config_ids': _IDS * 1.0, 'node_config_feat': _FEAT}, 'node_config_ids', 'wrong dtype'),
    ({'node_config_ids': _IDS, 'node_config_feat': _FEAT > 0}, 'node_config_feat', 'wrong dtype'),
    (
      {'node_config_ids': _IDS, 'node_config_feat': _FEAT.astype(object)},
      'node_config_feat',
      'pickled objects',
    ),
    (
      {'node_config_ids': _IDS + 1, 'node_config_feat': _FEAT},
      'node_config_ids[1]',
      'found 5, expected 0 to 4',
    ),
    (
      {'node_config_ids': _IDS - 1, 'node_config_feat': _FEAT},
      'node_config_ids[0]',
      'found -1, expected 0 to 4',
    ),
    (
      {'node_config_ids': _IDS, 'node_config_feat': _FEAT + 0.5},
      'node_config_feat[0, 0, 0]',
      'not a small integer',
    ),
    (
      {'node_config_ids': _IDS, 'node_config_feat': _FEAT + np.nan},
      'node_config_feat[0, 0, 0]',
      'found nan',
    ),
    (
      {'node_config_ids': _IDS, 'node_config_feat': _FEAT + 128},
      'node_config_feat[0, 0, 0]',
      'found 128',
    ),
    ({'node_config_ids': _IDS, 'node_config_feat': _FEAT[:0]}, None, 'file without configs'),
  ],
)
def test_fault_in_layout_configs(write, arrays, where, reason):
  path = write(**arrays)
  with pytest.raises(errors.InputError, match=reason) as caught:
    candidates.read(path, _layout_module())
  assert (caught.value.path, caught.value.where) == (str(path), where)


@pytest.mark.parametrize(
  ('arrays', 'where', 'reason'),
  [
    (
      {'node_config_ids': _IDS, 'node_config_feat': _FEAT},
      None,
      'found a layout file, expected a tile file',
    ),
    ({'config_feat': np.zeros((3, 18), np.float32)}, 'config_feat', 'wrong shape'),
    ({'config_feat': np.zeros((3, 24), np.int32)}, 'config_feat', 'wrong dtype'),
    ({'config_feat': np.full((3, 24), np.inf)}, 'config_feat[0, 0]', 'not finite'),
    ({'config_feat': np.full((3, 24), 1e300)}, 'config_feat[0, 0]', 'not finite'),
    ({'config_feat': np.zeros((0, 24), np.float32)}, None, 'file without configs'),
  ],
)
def test_fault_in_tile_configs(write, arrays, where, reason):
  path = write(**arrays)
  with pytest.raises(errors.InputError, match=reason) as caught:
    candidates.read(path, _tile_module())
  assert (caught.value.path, caught.value.where) == (str(path), where)


@pytest.mark.parametrize('content', [b'', b'no zip', b'PK\x03\x04'])
def test_file_that_is_not_npz(tmp_path, content):
  path = tmp_path / 'c.npz'
  path.write_bytes(content)
  with pytest.raises(errors.InputError, match=r'empty file|not an npz file|damaged') as caught:
    candidates.read(path, _layout_module())
  assert caught.value.path == str(path)


@pytest.mark.parametrize(
  ('name', 'reason'),
  [
    ('none.npz', 'cannot read file'),
    ('', 'unknown format'),
    ('c.txt', 'unknown format'),
    ('c', 'unknown format'),
  ],
)
def test_file_that_cannot_be_read(tmp_path, name, reason):
  with pytest.raises(errors.InputError, match=reason):
    candidates.read(tmp_path / name, _layout_module())


@pytest.mark.parametrize('make', [_layout_module, _tile_module])
def test_saved_configs_are_read_again(tmp_path, make):
  module = make()
  path = tmp_path / 'π.npz'
  path.write_bytes(b'earlier')
  ranked = module.select_configs([2, 0, 1])
  candidates.save(path, ranked, np.array([-1, 0.5, 2], np.float32))
  again = candidates.read(path, module)
  for name in ('config_feat', 'node_config_ids', 'node_config_feat'):
    if getattr(module, name) is not None:
      np.testing.assert_array_equal(getattr(again, name), getattr(ranked, name))
  with np.load(path) as saved:
    assert saved['config_id'].tolist() == [2, 0, 1]
    assert saved['score'].tolist() == [-1, 0.5, 2]
  assert [other.name for other in tmp_path.iterdir()] == ['π.npz']


@pytest.mark.parametrize(
  ('name', 'reason'), [('none/c.npz', 'cannot write'), ('c.csv', 'unknown format')]
)
def test_place_that_cannot_be_written(tmp_path, name, reason):
  with pytest.raises(errors.InputError, match=reason) as caught:
    candidates.save(tmp_path / name, _tile_module(), np.zeros(4))
  assert caught.value.path == str(tmp_path / name)


def test_layout_config_in_words():
  program = _Program()
  program.dot((8, 32), [program.parameter(8, 16), program.parameter(16, 32)])
  program.add('reshape', (), [program.parameter(1)], name='flat')
  module = program.configs()
  names = candidates.op_names(program.message.SerializeToString())
  assert candidates.describe(module, 0, names=names).splitlines() == [
    'op     opcode   output  input  kernel',
    'dot-π  dot      {1,0}   {1,0}  {1,0}',
    'flat   reshape  -       {0}    -',
  ]
  other = _orders(module).index(((0, 1), (1, 0), (0, 1)))
  assert candidates.describe(module, other, names=names).splitlines()[1] == (
    'dot-π  dot      {0,1}   {1,0}  {0,1}   changed'
  )
  unknown = candidates.describe(module.select_configs([other]), 0).splitlines()
  assert unknown[1] == '2   dot      {0,1}   {1,0}  {0,1}'
  assert unknown[2].startswith('4   reshape')


def test_tile_config_in_words():
  feat = np.zeros((1, 24), np.float32)
  feat[0, :8] = [3, 3, 0, 16, 0, 0, 22, 0]
  feat[0, 8:10] = [1e6, 128]
  [line] = candidates.describe(
    _read_npz(testing.tile_arrays(c=1, config_feat=feat)), 0
  ).splitlines()
  assert line == 'kernel_bounds {3,3,0,16}  output_bounds {1e+06,128}  input_bounds {}'
