"""Tests of tpu_graphs.hlo.text: text and protobuf of a program become the same graph."""

import collections
import json
import sys

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs.hlo import protos
from tpu_graphs.hlo import text
from tpu_graphs.modules import features

jaxlib = pytest.importorskip('jaxlib')

# No version of the parser knows this attribute.
_FOREIGN = ', attribute_of_tomorrow={a="}\\"{", b={1,{2}}}'


def _columns(*names):
  return [features.node_feature_names().index(name) for name in names]


def _graph(data):
  """Returns ops and edges by names: a text keeps names, but may change the order of ops."""
  module = protos.HloModuleProto.FromString(data)
  [read] = hlo.read(data).modules
  names = [
    (computation.name, instruction.name)
    for computation in module.computations
    for instruction in computation.instructions
  ]
  opcodes = [
    instruction.opcode
    for computation in module.computations
    for instruction in computation.instructions
  ]
  ops = {
    name: (opcode, read.node_opcode[i], read.node_feat[i].tobytes())
    for i, (name, opcode) in enumerate(zip(names, opcodes, strict=True))
  }
  assert len(ops) == len(names)
  return ops, collections.Counter(
    (names[consumer], names[operand]) for consumer, operand in read.edge_index.tolist()
  )


def _instructions(source):
  module = protos.HloModuleProto.FromString(text.to_proto(source.encode()))
  return {
    instruction.name: instruction
    for computation in module.computations
    for instruction in computation.instructions
  }


def _op_names(instructions):
  return {instruction.id: name for name, instruction in instructions.items()}


@testing.needs_shared
@pytest.mark.parametrize(
  'stem', sorted(path.stem for path in (testing.SHARED / 'data/hlo').glob('*.hlo'))
)
def test_text_equals_protobuf(stem):
  folder = testing.SHARED / 'data/hlo'
  source = (folder / f'{stem}.hlo').read_bytes()
  assert text.is_text(source)
  assert _graph(text.to_proto(source)) == _graph((folder / f'{stem}.hlo_module.pb').read_bytes())


@pytest.mark.parametrize(
  'stem', sorted(path.stem for path in (testing.GOLDEN / 'modules').glob('*.pb'))
)
def test_golden_modules_as_text(stem):
  xla = pytest.importorskip('jaxlib.xla_extension')
  tuning = protos.ModuleTuningData.FromString(
    (testing.GOLDEN / 'modules' / f'{stem}.pb').read_bytes()
  )
  program = tuning.module.SerializeToString()
  source = xla.HloModule.from_serialized_hlo_module_proto(program).to_string()
  assert _graph(text.to_proto(source.encode())) == _graph(program)


@pytest.mark.parametrize(
  ('data', 'is_text'),
  [
    (b'HloModule m', True),
    (b'HloModule m, is_scheduled=true\n\nENTRY e {', True),
    (b'\n  HloModule\tm', True),
    (b'// RUN: a test\n/* of two\nlines */ HloModule m', True),
    (b'\xef\xbb\xbfHloModule m\r\n', True),
    (b'HloModule \xff', False),
    (b'HloModules m', False),
    (b'HloModule', False),
    (b'', False),
    (b'module @jit_f attributes {}', False),
    (b'\n\x09HloModule m\x12\x01e', False),  # A protobuf of this name.
    (b'BufferAssignment:\nHloModule m', False),
  ],
)
def test_is_text(data, is_text):
  assert text.is_text(data) == is_text


def test_protobufs_are_not_text():
  paths = sorted(testing.GOLDEN.rglob('*.pb'))
  assert paths
  assert not any(text.is_text(path.read_bytes()) for path in paths)


# A module with all that newer versions write, and that people write by hand. The expected values
# below are worked out by hand.
_NEWER = r"""// A comment
HloModule m.1, is_scheduled=true, entry_computation_layout={(f32[4,8]{1,0:T(8,128)})->f32[4]{0}},
  new={ {0}: "}" }

FileNames
1 "/a {b}.py"
2 "c.py"

FunctionNames
1 "<module>"

FileLocations
1 {file_name_id=1 function_name_id=1 line=8 column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%add (x: f32[], /*index=1*/y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0), metadata={op_name="a\"}" stack_frame_id=3}
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(f32[] %x, /*index=1*/f32[] %y), result_accuracy={mode=highest}
}, execution_thread="main"

called {
  c = f32[4,8] parameter(0)
  ROOT d = f32[8,4]{0,1} transpose(c), dimensions={1,0}
}

ENTRY main {
  a = f32[4,8]{1,0:T(8,128)(2,1)S(5)} parameter(0), sharding={devices=[2,1]<=[2]}
  b = (f32[4,8]{1,0:T(8,128)},
       f8e8m0fnu[3]{0:T(256)E(8)}) future-op(f32[4,8]{1,0} a, a), dimensions={1}, to_apply=%add,
    replica_groups=[2,64]<=[128]T(1,0), calls=called
  w = f4e2m1fn[2,2]{0,1} constant({ { 1, 0.5 }, { -2, 6 } })
  zero = f32[] constant(0), origin={{"constant.1"}}
  r = f32[4]{0} reduce(a, zero), dimensions={1}, to_apply=add
  p = bf16[<=6,9]{1,0} pad(a, zero), padding=1_1x0_1_2
  s = f32[2,4]{1,0} slice(f32[4,8]{1,0} %a), slice={[0:4:2], [4:8]}
  g = f32[8,8]{1,0} all-gather(a), channel_id=1, replica_groups=[1,2]<=[2], dimensions={0},
    use_global_device_ids=true
  k = f32[4,4]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0},
    algorithm=dot_bf16_bf16_f32_x3
  v = f32[4,8]{1,0} custom-call(a), custom_call_target="t//{", window={size=3x1 pad=1_1x0_0},
    dim_labels=bf_io->bf, feature_group_count=2, output_to_operand_aliasing={{}: (0, {})}
  ROOT t = (f32[4]{0}, (f32[4,8]{1,0}, f8e8m0fnu[3]{0})) tuple(r, b), control-predecessors={%k, s}
}
"""


@pytest.mark.parametrize('newline', ['\n', '\r\n'])
def test_what_newer_versions_write(newline):
  source = _NEWER.replace('\n', newline)
  ops = _instructions(source)
  names = _op_names(ops)
  assert {name: op.opcode for name, op in ops.items()} == {
    'x': 'parameter',
    'y': 'parameter',
    'sum': 'add',
    'c': 'parameter',
    'd': 'transpose',
    'a': 'parameter',
    'b': 'future-op',
    'w': 'constant',
    'zero': 'constant',
    'r': 'reduce',
    'p': 'pad',
    's': 'slice',
    'g': 'all-gather',
    'k': 'dot',
    'v': 'custom-call',
    't': 'tuple',
  }
  assert {
    name: [names[key] for key in op.operand_ids] for name, op in ops.items() if op.operand_ids
  } == {
    'sum': ['x', 'y'],
    'd': ['c'],
    'b': ['a', 'a'],
    'r': ['a', 'zero'],
    'p': ['a', 'zero'],
    's': ['a'],
    'g': ['a'],
    'k': ['a', 'b'],
    'v': ['a'],
    't': ['r', 'b'],
  }
  [module] = hlo.read(source.encode()).modules
  assert module.module_id.startswith('m.1_')
  assert module.unknown_opcodes == {'future-op': 1}
  # Three computations have a root each. There are 15 edges of distinct operands and 3 edges of
  # called computations.
  assert module.node_feat[:, 0].sum() == 3
  assert module.num_edges == 15 + 3

  features_of = dict(
    zip(
      [instruction for computation in _computations(source) for instruction in computation],
      module.node_feat,
      strict=True,
    )
  )

  def values(name, *columns):
    return features_of[name][_columns(*columns)].tolist()

  layout = ('layout_minor_to_major_0', 'layout_minor_to_major_1')
  assert values('a', *layout) == values('s', *layout) == [1, 0]
  assert values('w', *layout) == values('d', *layout) == [0, 1]
  assert values('c', *layout) == [1, 0]  # The default layout is row-major.
  assert not any(
    values('w', *[name for name in features.node_feature_names() if 'element_type' in name])
  )
  assert values('w', 'shape_dimensions_0', 'shape_dimensions_1') == [2, 2]
  assert values('b', 'shape_element_type_is_tuple', 'shape_tuple_shapes_size') == [1, 2]
  assert values(
    'p',
    'shape_dimensions_0',
    'padding_config_edge_padding_low_0',
    'padding_config_edge_padding_high_0',
    'padding_config_edge_padding_high_1',
  ) == [6, 1, 1, 1]
  assert values(
    's',
    'slice_dims_start_0',
    'slice_dims_start_1',
    'slice_dims_stride_0',
    'slice_dims_stride_1',
    'slice_dims_limit_0',
    'slice_dims_limit_1',
  ) == [0, 4, 2, 1, 4, 8]
  assert values('g', 'dimensions_0') == [0]
  assert values('r', 'dimensions_0') == [1]
  groups = ('feature_group_count', 'batch_group_count')
  assert values('v', 'window_size_0', 'window_padding_low_0', *groups) == [3, 1, 2, 1]
  assert values('b', *groups) == values('zero', *groups) == [0, 0]


def _computations(source):
  module = protos.HloModuleProto.FromString(text.to_proto(source.encode()))
  return [
    [instruction.name for instruction in computation.instructions]
    for computation in module.computations
  ]


def test_dot_dimensions_are_kept():
  module = protos.DotModule.FromString(text.to_proto(_NEWER.encode()))
  [dot] = [
    instruction.dot_dimension_numbers
    for computation in module.computations
    for instruction in computation.instructions
    if instruction.HasField('dot_dimension_numbers')
  ]
  assert (list(dot.lhs_contracting_dimensions), list(dot.rhs_contracting_dimensions)) == ([1], [0])


@pytest.mark.parametrize('opcode', ['slice', 'rsqrt', 'ragged-op'])
def test_asynchronous_ops(opcode):
  attribute = ', slice={[0:1]}' if opcode == 'slice' else ''
  ops = _instructions(f"""HloModule m
    ENTRY e {{
      a = f32[2]{{0}} parameter(0)
      b = ((f32[2]{{0}}), f32[1]{{0}}, u32[]{{:S(2)}}) {opcode}-start(a){attribute},
        async_execution_thread="t"
      c = ((f32[2]{{0}}), f32[1]{{0}}, u32[]{{:S(2)}}) {opcode}-update(b)
      ROOT d = f32[1]{{0}} {opcode}-done(c){_FOREIGN}
    }}""")
  assert [ops[name].opcode for name in 'abcd'] == [
    'parameter',
    'async-start',
    'async-update',
    'async-done',
  ]
  [parameter, wrapped] = sorted(
    (op for name, op in ops.items() if name not in 'abcd'), key=lambda op: op.id
  )
  assert (parameter.opcode, wrapped.opcode) == ('parameter', opcode)
  assert list(wrapped.operand_ids) == [parameter.id]
  assert len(wrapped.slice_dimensions) == (opcode == 'slice')
  assert wrapped.feature_group_count == 0


def test_opcodes_that_end_like_asynchronous_ones():
  ops = _instructions("""HloModule m
    ENTRY e {
      a = f32[2]{0} parameter(0)
      b = (f32[2]{0}, f32[2]{0:S(5)}, u32[]) copy-start(a), cross_program_prefetch_index=0
      c = f32[2]{0:S(5)} copy-done(b)
      d = (f32[2]{0}, f32[4]{0}) all-gather-start(a), dimensions={0}, replica_groups=[1,2]<=[2]
      ROOT f = f32[4]{0} all-gather-done(d)
    }""")
  assert [ops[name].opcode for name in 'bcdf'] == [
    'copy-start',
    'copy-done',
    'all-gather-start',
    'all-gather-done',
  ]
  assert list(ops['d'].dimensions) == [0]


def test_called_computations_of_all_names():
  branches = ''.join(f'f{i} {{\n  ROOT p{i} = f32[] parameter(0)\n}}\n' for i in range(4))
  ops = _instructions(f"""HloModule m
    {branches}
    ENTRY e {{
      a = f32[] parameter(0){_FOREIGN}
      b = f32[] while(a), body=f0, condition=%f1
      c = f32[] conditional(a, b, b), branch_computations={{f2, %f3}}
      d = f32[] conditional(a, b, c), true_computation=f0, false_computation=f1
      e = f32[] fusion(d), kind=kLoop, calls=f2
      ROOT g = f32[] call(e), to_apply=f3
    }}""")
  called = {name: len(ops[name].called_computation_ids) for name in 'bcdeg'}
  assert called == {'b': 2, 'c': 2, 'd': 2, 'e': 1, 'g': 1}
  ids = {name: set(ops[name].called_computation_ids) for name in 'bcdeg'}
  assert ids['b'] == ids['d'] != ids['c'] == ids['e'] | ids['g']
  assert {op.opcode for op in ops.values()} == {
    'parameter',
    'while',
    'conditional',
    'fusion',
    'call',
  }


def test_values_that_are_left_out_take_no_memory():
  """Checks a constant for which the parser would allocate 4 TB."""
  ops = _instructions("""HloModule m
    ENTRY e {
      a = f32[1000000,1000000]{1,0} parameter(0), metadata={op_name="constant({...})"}
      b = f32[1000000,1000000]{1,0} constant({...}), metadata={op_name="b"}
      ROOT c = f32[1000000,1000000]{1,0} add(a, b)
    }""")
  assert [ops[name].opcode for name in 'abc'] == ['parameter', 'constant', 'add']
  assert ops['b'].feature_group_count == ops['b'].batch_group_count == 0
  assert list(ops['b'].shape.dimensions) == [1000000, 1000000]


@hypothesis.given(strategies.text(), strategies.text('{}()[]",\\/* =%\n', max_size=12))
@hypothesis.settings(deadline=None, max_examples=50)
def test_content_of_strings_is_ignored(any_text, brackets):
  string = json.dumps(any_text + brackets)
  source = f"""HloModule m, new={string}
    ENTRY e {{
      a = f32[2] parameter(0), new={{x={string}, y={{{string}}}}}
      ROOT b = f32[2] negate(a), new={string}, dimensions={{0}}
    }}"""
  assert {name: op.opcode for name, op in _instructions(source).items()} == {
    'a': 'parameter',
    'b': 'negate',
  }


def test_shapes_are_inferred_and_instructions_nested():
  source = """HloModule m
    ENTRY e {
      a = f32[2,3] parameter(0)
      b = add(a, a), metadata={op_name="//" source_file="/*"}
      ROOT c = f32[2,3] multiply(b, f32[2,3] negate(a))
    }"""
  ops = _instructions(source)
  assert sorted(op.opcode for op in ops.values()) == ['add', 'multiply', 'negate', 'parameter']
  assert list(ops['b'].shape.dimensions) == [2, 3]


def test_mistakes_that_would_end_the_process():
  """Checks a reshape to another size and a tile of -1, which the parser does not get."""
  ops = _instructions("""HloModule m
    ENTRY e {
      a = f32[2,3]{1,0:T(-1,128)} parameter(0)
      ROOT b = f32[7] reshape(a)
    }""")
  assert (ops['b'].opcode, list(ops['b'].shape.dimensions)) == ('reshape', [7])


def test_inferred_dimension_is_kept():
  ops = _instructions("""HloModule m
    ENTRY e {
      a = f32[2,<=3] parameter(0)
      ROOT b = f32[<=6] reshape(a), inferred_dimension=0
    }""")
  assert list(ops['b'].dimensions) == [0]


def test_equal_text_has_an_equal_name():
  [one], [other] = (hlo.read(_NEWER.encode()).modules for _ in range(2))
  assert one.module_id == other.module_id
  [changed] = hlo.read(_NEWER.replace('2 "c.py"', '2 "d.py"').encode()).modules
  assert changed.module_id != one.module_id
  np.testing.assert_array_equal(changed.node_feat, one.node_feat)


@pytest.mark.parametrize(
  ('body', 'where', 'expected', 'found'),
  [
    ('ENTRY e {\n', 'line 3', 'an instruction', "''"),
    (
      'ENTRY e {\n  a = f32[2] parameter(0',
      'line 3',
      'the end of the (',
      "'a = f32[2] parameter(0'",
    ),
    (
      'ENTRY e {\n  a = (f32[2] parameter 0',
      'line 3',
      'the end of the (',
      "'a = (f32[2] parameter 0'",
    ),
    ('ENTRY e {\n  a = f32[2]\n}', 'line 4', 'an opcode', "'}'"),
    ('ENTRY e {\n  f32[2] parameter(0)\n}', 'line 3', 'an instruction', "'f32[2] parameter(0)'"),
    ('ENTRY e (a: f32[]) {\n', 'line 2', '->', "'ENTRY e (a: f32[]) {'"),
    ('ENTRY e\n', 'line 3', '{', "''"),
    ('!!', 'line 2', 'a computation', "'!!'"),
    (
      f'ENTRY e {{\n  a = {"(" * 200}f32[]{")" * 200} parameter(0)\n}}',
      'line 3',
      'at most 100 brackets in each other',
      repr(f'a = {"(" * 146}'),
    ),
    ('ENTRY e {\n  a = f32[2] parameter(1)\n}', 'computation ENTRY e', '0 to 0', '[1]'),
    (
      'ENTRY e {\n  a = f32[2] parameter(0)\n  b = f32[2] parameter(2)\n}',
      'computation ENTRY e',
      '0 to 1',
      '[0, 2]',
    ),
    (
      f'ENTRY e {{\n  a = f32[2] parameter({10**20})\n}}',
      'computation ENTRY e',
      '0 to 0',
      f'[{10**20}]',
    ),
    ('ENTRY e {\n  a = f32[2] parameter(-1)\n}', 'line 3', None, None),
    ('ENTRY e {\n  a = f32[2] parameter(²)\n}', 'line 3', None, None),
    (
      'ENTRY e {\n  a = f32[2] parameter(0)\n  b = f32[2] parameter(0)\n}',
      'computation ENTRY e',
      '0 to 1',
      '[0, 0]',
    ),
    ('', 'line 2', 'a computation', "''"),
    ('FileNames\n1 "a"\n', 'line 4', 'a computation', "''"),
    (
      'ENTRY e {\n  a = f32[2] parameter(0)\n  ROOT b = f32[2] negate(c)\n}',
      'line 4',
      None,
      "instruction does not exist: c in 'ROOT b = f32[2] negate(c)'",
    ),
    (
      'ENTRY e {\n  a = f32[2] parameter(0)\n  a = f32[2] negate(a)\n}',
      'line 4',
      None,
      "instruction already exists: a in 'a = f32[2] negate(a)'",
    ),
    (
      'ENTRY e {\n  a = f32[2] parameter(0)\n  b = f32[2] call(a), to_apply=f\n}',
      'line 4',
      None,
      None,
    ),
  ],
)
def test_text_that_cannot_be_parsed(body, where, expected, found):
  with pytest.raises(errors.InputError) as caught:
    text.to_proto(f'HloModule m\n{body}'.encode(), name='m.txt')
  error = caught.value
  assert (error.path, error.where, error.expected) == ('m.txt', where, expected)
  assert found is None or error.found == found
  assert '\n' not in str(error)
  assert len(str(error)) < 450


def test_a_long_line_is_shortened():
  source = (
    'HloModule m\nENTRY e {\n  ROOT a = f32[2] negate(b), metadata={op_name="'
    + 'x' * 10_000
    + '"}\n}'
  )
  with pytest.raises(errors.InputError, match='instruction does not exist: b') as caught:
    text.to_proto(source.encode())
  assert len(str(caught.value)) < 450


def test_without_jaxlib(monkeypatch):
  for name in ('jaxlib', 'jaxlib.xla_extension', 'jaxlib._jax', 'jaxlib._hlo'):
    monkeypatch.setitem(sys.modules, name, None)
  with pytest.raises(errors.InputError, match='without jaxlib') as caught:
    text.to_proto(b'HloModule m\nENTRY e { ROOT a = f32[] parameter(0) }', name='m.hlo')
  assert caught.value.path == 'm.hlo'
  assert "pip install 'tpu_graphs[jax]'" in caught.value.fix
  assert '--xla_dump_hlo_as_proto' in caught.value.fix
