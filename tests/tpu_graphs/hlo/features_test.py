"""Tests of node features, edges and segments of random instructions, against a naive oracle."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs.hlo import protos
from tpu_graphs.modules import features

pytestmark = pytest.mark.usefixtures('each_implementation')

_ONE_HOT = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 15, 18, 13, 14, 17)


def _wrap(value):
  """Returns `value` wrapped to int64 in two's complement."""
  return (value + 2**63) % 2**64 - 2**63


def _float32(value):
  """Returns the float32 nearest to an int, ties to even, via exact comparison of integers."""
  guess = np.float32(value)
  near = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
  return min(
    near, key=lambda f: (abs(int(f) - value) if f == int(f) else np.inf, int(f.view(np.uint32)) & 1)
  )


def _several(values, width):
  total, product = 0, 1
  for value in values:
    total, product = _wrap(total + value), _wrap(product * value)
  return _padded(values, width) + [total, product]


def _padded(values, width):
  return (list(values) + [0] * width)[:width]


def _naive_node_feat(instruction, root_id):
  shape, numbers = instruction.shape, instruction.convolution_dimension_numbers
  row = [int(instruction.id == root_id), 0]
  row += [int(shape.element_type == number) for number in _ONE_HOT]
  row += _several(shape.dimensions, 6) + [len(shape.tuple_shapes), instruction.parameter_number]
  row += _padded(instruction.dimensions, 6)
  window = instruction.window.dimensions
  for name in ('size', 'stride', 'padding_low', 'padding_high', 'window_dilation', 'base_dilation'):
    row += _several([getattr(dimension, name) for dimension in window], 6)
  reversal = [int(dimension.window_reversal) for dimension in window]
  row += _padded(reversal, 6) + [reversal.count(1), reversal.count(0)]
  row += [numbers.input_batch_dimension, numbers.input_feature_dimension]
  row += _padded(numbers.input_spatial_dimensions, 4)
  row += [numbers.kernel_input_feature_dimension, numbers.kernel_output_feature_dimension]
  row += _padded(numbers.kernel_spatial_dimensions, 4)
  row += [numbers.output_batch_dimension, numbers.output_feature_dimension]
  row += [instruction.feature_group_count, instruction.batch_group_count]
  for name in ('start', 'stride', 'limit'):
    row += _several([getattr(dimension, name) for dimension in instruction.slice_dimensions], 2)
  row += _several(instruction.dynamic_slice_sizes, 2)
  for name in ('edge_padding_low', 'edge_padding_high'):
    row += _several(
      [getattr(dimension, name) for dimension in instruction.padding_config.dimensions], 2
    )
  row += [int(instruction.is_stable)] + _padded(shape.layout.minor_to_major, 6)
  return [_float32(value) for value in row]


_INT = st.one_of(
  st.integers(-3, 9),
  st.sampled_from([2**24 + 1, 2**31, 9007199791611905, -(2**63), 2**63 - 1]),
  st.integers(-(2**63), 2**63 - 1),
)
_INTS = st.lists(_INT, max_size=8)


def _optional(**fields):
  """Returns a strategy of dicts with any of the fields left out."""
  return st.fixed_dictionaries({}, optional=fields)


def _messages(**fields):
  return st.lists(_optional(**fields), max_size=8)


def _ints(*names):
  return dict.fromkeys(names, _INT)


_SHAPE = _optional(
  element_type=st.one_of(st.integers(0, 30), st.just(-1)),
  dimensions=_INTS,
  tuple_shapes=st.lists(_optional(dimensions=_INTS), max_size=3),
  layout=_optional(minor_to_major=_INTS),
)
_WINDOW = _optional(
  dimensions=_messages(
    **_ints('size', 'stride', 'padding_low', 'padding_high', 'window_dilation', 'base_dilation'),
    window_reversal=st.booleans(),
  )
)
_CONVOLUTION = _optional(
  **_ints(
    'input_batch_dimension',
    'input_feature_dimension',
    'kernel_input_feature_dimension',
    'kernel_output_feature_dimension',
    'output_batch_dimension',
    'output_feature_dimension',
  ),
  input_spatial_dimensions=_INTS,
  kernel_spatial_dimensions=_INTS,
)
_INSTRUCTION = _optional(
  opcode=st.one_of(
    st.sampled_from(['add', 'fusion', 'trace', 'erf', 'Abs', 'custom-call']), st.text(max_size=3)
  ),
  shape=_SHAPE,
  window=_WINDOW,
  convolution_dimension_numbers=_CONVOLUTION,
  dimensions=_INTS,
  slice_dimensions=_messages(**_ints('start', 'stride', 'limit')),
  dynamic_slice_sizes=_INTS,
  padding_config=_optional(dimensions=_messages(**_ints('edge_padding_low', 'edge_padding_high'))),
  is_stable=st.booleans(),
  **_ints('parameter_number', 'feature_group_count', 'batch_group_count', 'id'),
)
_COMPUTATION = _optional(
  name=st.text(max_size=3), id=_INT, root_id=_INT, instructions=st.lists(_INSTRUCTION, max_size=4)
)


def _module(computations):
  return protos.HloModuleProto(name='m', computations=computations)


def _read(module):
  [result] = hlo.from_bytes(
    protos.ModuleTuningData(module=module).SerializeToString(), kind='layout'
  )
  return result


@settings(deadline=None, max_examples=200)
@given(st.lists(_COMPUTATION, max_size=3))
def test_features_of_random_instructions(computations):
  module = _module(computations)
  result = _read(module)
  pairs = [
    (instruction, computation.root_id)
    for computation in module.computations
    for instruction in computation.instructions
  ]
  expected = np.array([_naive_node_feat(*pair) for pair in pairs], np.float32).reshape(-1, 140)
  np.testing.assert_array_equal(result.node_feat, expected)
  assert result.node_opcode.tolist() == [
    features.opcodes().get(instruction.opcode, 0) for instruction, _ in pairs
  ]


def _naive_edges(module):
  """Returns the sorted edges, or a part of the reason of the error."""
  index, roots, edges = {}, {}, []
  instructions = [
    instruction for computation in module.computations for instruction in computation.instructions
  ]
  for i, instruction in enumerate(instructions):
    index[instruction.id] = i
  for computation in module.computations:
    roots[computation.id] = computation.root_id
  for instruction in instructions:
    for key in sorted(set(instruction.operand_ids)):
      edges.append((instruction.id, key))
    for key in instruction.called_computation_ids:
      if key not in roots:
        return 'unknown computation id'
      edges.append((instruction.id, roots[key]))
  for own, key in edges:
    if key not in index:
      return 'unknown'
    if own == key:
      return 'itself'
  return sorted((index[own], index[key]) for own, key in edges)


_KEYS = st.integers(-2, 6)
_LINKED = st.fixed_dictionaries(
  {'id': _KEYS},
  optional={
    'operand_ids': st.lists(_KEYS, max_size=3),
    'called_computation_ids': st.lists(st.integers(0, 3), max_size=2),
  },
)
_LINKED_COMPUTATION = st.fixed_dictionaries(
  {
    'id': st.integers(0, 3),
    'root_id': _KEYS,
    'instructions': st.lists(_LINKED, min_size=1, max_size=5),
  }
)


@settings(deadline=None, max_examples=400)
@given(st.lists(_LINKED_COMPUTATION, min_size=1, max_size=3))
def test_edges_of_random_ids(computations):
  module = _module(computations)
  expected = _naive_edges(module)
  if isinstance(expected, str):  # The error may name any of several faults.
    with pytest.raises(errors.InputError, match=r'unknown|without root|itself'):
      _read(module)
  else:
    edges = _read(module).edge_index
    assert edges.shape == (len(expected), 2)
    assert list(map(tuple, edges.tolist())) == expected


@settings(deadline=None)
@given(
  st.lists(
    st.tuples(
      st.sampled_from(['main', 'while', 'a_cond.1', 'secondary', 'cluster_0', 'While', 'c o n d']),
      st.integers(0, 3),
    ),
    max_size=6,
  )
)
def test_segments(computations):
  module = _module(
    [
      {'name': name, 'instructions': [{'id': i * 10 + k} for k in range(size)]}
      for i, (name, size) in enumerate(computations)
    ]
  )
  splits, count = [0], 0
  for name, size in computations:
    count += size
    if 'cluster' in name or 'while' in name or 'cond' in name:
      splits.append(count)
  if splits[-1] < count:
    splits.append(count)
  result = _read(module)
  assert result.node_splits.tolist() == splits
  assert result.computation.tolist() == [
    i for i, (_, size) in enumerate(computations) for _ in range(size)
  ]


@pytest.mark.parametrize(
  ('dimensions', 'product', 'total'),
  [
    ([], 1, 0),
    ([0], 0, 0),
    # 5 * 2^65 wraps to 0; 2^32 + 13 is not a float32.
    ([2**31, 2**31, 2**3, 5], 0, 2**32),
    ([2**62, 2], np.float32(-(2.0**63)), np.float32(2.0**62)),
    # Via float64, the result would be 9007199254740992.
    ([9007199791611905], 9007200328482816, 9007200328482816),
    ([16777217], 16777216, 16777216),
    # Only six dimensions have a column, but all of them count.
    ([1, 2, 3, 4, 5, 6, 7, 8], 40320, 36),
  ],
)
def test_worked_sums_and_products(dimensions, product, total):
  result = _read(
    _module([{'instructions': [{'opcode': 'add', 'shape': {'dimensions': dimensions}}]}])
  )
  names = features.node_feature_names()
  row = dict(zip(names, result.node_feat[0].tolist(), strict=True))
  assert row['shape_dimensions_product'] == product
  assert row['shape_dimensions_sum'] == total


def test_an_op_without_any_field():
  row = dict(
    zip(
      features.node_feature_names(),
      _read(_module([{'instructions': [{'id': 1}]}])).node_feat[0].tolist(),
      strict=True,
    )
  )
  ones = {name for name, value in row.items() if value == 1}
  assert ones == {'shape_element_type_is_invalid_type'} | {
    name for name in row if name.endswith('_product')
  }
  assert len(ones) == 14
  assert set(row.values()) == {0, 1}


def _refused(computations):
  with pytest.raises(errors.InputError) as caught:
    _read(_module(computations))
  return caught.value


def test_errors_name_the_instruction():
  unnamed = {
    'instructions': [{'id': 4, 'opcode': 'add'}, {'id': 5, 'opcode': 'add', 'operand_ids': [4, 99]}]
  }
  error = _refused([unnamed])
  assert (error.reason, error.found) == ('unknown operand id', 'id 99')
  assert "computation '', instruction '' (index 1, id 5)" in error.where
  caller = {'id': 7, 'opcode': 'call', 'name': 'é', 'called_computation_ids': [3]}
  error = _refused(
    [unnamed | {'id': 1, 'instructions': []}, {'name': 'main', 'id': 2, 'instructions': [caller]}]
  )
  assert (error.reason, error.found) == ('unknown computation id', 'id 3')
  assert "computation 'main', instruction 'é' (index 0, id 7)" in error.where
  error = _refused([{'id': 3, 'root_id': 50}, {'name': 'main', 'id': 2, 'instructions': [caller]}])
  assert error.reason == 'called computation without root'
  error = _refused([{'id': 3, 'root_id': 7, 'instructions': [caller]}])
  assert error.reason == 'instruction that refers to itself'


def test_a_root_that_nobody_calls_may_be_missing():
  assert (
    _read(_module([{'root_id': 50, 'instructions': [{'id': 1, 'opcode': 'add'}]}])).num_ops == 1
  )
