"""Tests of tpu_graphs.views.drawing.

Pictures have the right content, large pictures lose nothing, and Graphviz reads them.
"""

import collections
import dataclasses
import graphlib
import re
import shutil
import subprocess
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import npz
from tpu_graphs.views import drawing

COLUMN = {name: column for column, name in enumerate(features.node_feature_names())}
OPCODES = features.opcodes()
ORANGE, BLUE, GREY, WHITE, YELLOW = '#ffcc80', '#bbdefb', '#eeeeee', '#ffffff', '#fffde7'
HAS_DOT = shutil.which('dot') is not None

_STRING = r'"(?:[^"\\]|\\.)*"'
_ATTRIBUTES = rf'(?: \[((?:\w+=(?:{_STRING}|[^\s"\]]+) ?)*)\])?'
_NODE = re.compile(rf'(n\d+){_ATTRIBUTES};')
_EDGE = re.compile(rf'(n\d+) -> (n\d+){_ATTRIBUTES};')


def make(
  opcodes,
  edges=(),
  *,
  computation=None,
  configurable=(),
  kind='layout',
  module_id='m',
  roots=(),
  feats=(),
  **over,
):
  """Makes a module of `opcodes` with edges (producer, consumer) and feats (op, feature, value)."""
  n = len(opcodes)
  feat = np.zeros((n, 140), np.float32)
  for op, name, value in feats:
    feat[op, COLUMN[name]] = value
  feat[list(roots), COLUMN['is_root']] = 1
  arrays = testing.arrays(kind, n=n, c=0, nc=0)
  if kind == 'layout':
    arrays |= {
      'node_config_ids': np.array(configurable, np.int64),
      'node_config_feat': np.zeros((0, len(configurable), 18), np.int8),
    }
  arrays |= {
    'node_opcode': np.array([OPCODES.get(name, 0) for name in opcodes], np.uint8),
    'node_feat': feat,
    'edge_index': np.array(edges, np.int64).reshape(-1, 2)[:, ::-1],
    'node_splits': np.array([0, n]),
    'config_id': np.arange(0),
  }
  return module_lib.Module(
    module_id=module_id,
    kind=kind,
    **arrays,
    computation=None if computation is None else np.array(computation),
    **over,
  )


@dataclasses.dataclass
class Picture:
  """The content of DOT text: nodes and edges with attributes, and the nodes of each cluster."""

  nodes: dict
  edges: dict
  clusters: dict

  def label(self, name):
    return self.nodes[name]['label']

  def find(self, text):
    """Returns the only node whose label has a line `text`."""
    (name,) = [name for name in self.nodes if text in self.label(name).split('\n')]
    return name

  def fills(self):
    return collections.Counter(node['fillcolor'] for node in self.nodes.values())


def parse(text):
  """Reads the output of `drawing.dot` line by line; fails on any other line."""
  picture = Picture({}, {}, {})
  first, *lines, last = text.splitlines()
  assert (first, last, text[-1]) == ('digraph module {', '}', '\n')
  cluster = None
  for line in map(str.strip, lines):
    if match := _EDGE.fullmatch(line):
      assert match[1] in picture.nodes
      assert match[2] in picture.nodes
      assert (match[1], match[2]) not in picture.edges
      picture.edges[match[1], match[2]] = _attributes(match[3])
    elif match := _NODE.fullmatch(line):
      assert match[1] not in picture.nodes
      picture.nodes[match[1]] = _attributes(match[2])
      if cluster:
        cluster[1].append(match[1])
    elif line.startswith('subgraph cluster_'):
      cluster = ['', []]
    elif line.startswith('label=') and cluster:
      cluster[0] = _unquoted(line[len('label=') : -1])
      assert re.fullmatch(_STRING + ';', line[len('label=') :])
    elif line == '}':
      picture.clusters[tuple(cluster[1])] = cluster[0]
      cluster = None
    else:
      assert re.match(r'(graph|node|edge) \[.*\];$', line), line
  return picture


def _attributes(text):
  return {
    name: _unquoted(value)
    for name, value in re.findall(rf'(\w+)=({_STRING}|[^\s"\]]+)', text or '')
  }


def _unquoted(value):
  if not value.startswith('"'):
    return value
  return re.sub(r'\\(.)', lambda match: {'n': '\n'}.get(match[1], match[1]), value[1:-1]).replace(
    '&amp;', '&'
  )


def draw(module, **options):
  """Draws a module; where Graphviz is installed, it must read the picture without a message."""
  text = drawing.dot(module, **options)
  if HAS_DOT:
    result = subprocess.run(
      ['dot', '-Tcanon'], input=text, capture_output=True, encoding='utf-8', check=False
    )
    assert (result.returncode, result.stderr) == (0, '')
  return parse(text)


def test_every_op_and_edge():
  picture = draw(make(['parameter', 'constant', 'add', 'tanh'], [(0, 2), (1, 2), (2, 3)]))
  names = [picture.label(name).split('\n')[0] for name in picture.nodes]
  assert names == ['parameter 0', 'constant', 'add', 'tanh']
  assert picture.edges == {('n0', 'n2'): {}, ('n1', 'n2'): {}, ('n2', 'n3'): {}}
  assert picture.clusters == {}


@pytest.mark.parametrize('max_ops', [1, 300])
@pytest.mark.parametrize('kind', module_lib.KINDS)
def test_smallest_modules(kind, max_ops):
  assert draw(make([], kind=kind), max_ops=max_ops) == Picture({}, {}, {})
  picture = draw(make(['add'], kind=kind), max_ops=max_ops)
  assert list(picture.nodes) == ['n0']
  assert picture.edges == {}
  picture = draw(make(['add', 'add'], kind=kind), max_ops=max_ops)
  assert picture.edges == {}


def test_calls_are_dashed_from_caller_to_root():
  picture = draw(
    make(
      ['parameter', 'parameter', 'add', 'parameter', 'constant', 'reduce'],
      [(0, 2), (1, 2), (3, 5), (4, 5), (2, 5)],
      computation=[0, 0, 0, 1, 1, 1],
      roots=[2, 5],
    )
  )
  dashed = {
    edge for edge, attributes in picture.edges.items() if attributes.get('style') == 'dashed'
  }
  assert dashed == {('n5', 'n2')}
  assert picture.edges.keys() == {
    ('n0', 'n2'),
    ('n1', 'n2'),
    ('n3', 'n5'),
    ('n4', 'n5'),
    ('n5', 'n2'),
  }
  assert picture.clusters == {
    ('n0', 'n1', 'n2'): '3 ops, called by 1 reduce',
    ('n3', 'n4', 'n5'): '3 ops, entry',
  }
  assert [name for name, node in picture.nodes.items() if node.get('penwidth') == '2'] == [
    'n2',
    'n5',
  ]


def test_computations_of_a_public_file_are_distinguished():
  separated = make(
    ['parameter', 'negate', 'parameter', 'fusion'],
    [(0, 1), (2, 3), (1, 3)],
    computation=[0, 0, 1, 1],
    roots=[1, 3],
  )
  assert draw(dataclasses.replace(separated, computation=None)) == draw(separated)


def test_colours_and_legend():
  module = make(
    ['parameter', 'constant', 'convolution', 'dot', 'add'],
    [(0, 2), (2, 3), (3, 4)],
    configurable=[2],
  )
  picture = draw(module)
  assert [node['fillcolor'] for node in picture.nodes.values()] == [GREY, GREY, ORANGE, BLUE, WHITE]
  (legend,) = re.findall(r'label=<(.*)>\];', drawing.dot(module))
  assert re.findall(r'bgcolor="(#\w+)" border="1">([^<]+)<', legend) == [
    (ORANGE, 'configurable'),
    (BLUE, 'costly'),
    (GREY, 'input or constant'),
    (WHITE, 'other op'),
  ]
  assert 'layout module, 5 ops, 3 edges, 1 configurable op<' in legend
  assert 'configurable' not in drawing.dot(make(['add']))


BF16, TUPLE = 'shape_element_type_is_bf16', 'shape_element_type_is_tuple'


def shape(dims, layout=(), element=BF16):
  """Returns features of op 0 as the extractor makes them."""
  values = {
    element: 1,
    'shape_dimensions_sum': sum(dims),
    'shape_dimensions_product': int(np.prod(dims, dtype=int)),
  }
  values |= {f'shape_dimensions_{i}': dim for i, dim in enumerate(dims[:6])}
  values |= {f'layout_minor_to_major_{i}': dim for i, dim in enumerate(layout[:6])}
  return [(0, name, value) for name, value in values.items()]


@pytest.mark.parametrize(
  ('feats', 'text'),
  [
    (shape([]), 'bf16[]'),
    (shape([8]), 'bf16[8]'),
    (shape([8, 128], [1, 0]), 'bf16[8,128]'),
    (shape([8, 128], [0, 1]), 'bf16[8,128]{0,1}'),
    (shape([8, 128]), 'bf16[8,128]'),
    (shape([2, 3, 4], [0, 2, 1]), 'bf16[2,3,4]{0,2,1}'),
    (shape([0]), 'bf16[0]'),
    (shape([5, 0]), 'bf16[5,0]'),
    (shape([0, 5]), 'bf16[0,5]'),
    (shape([1, 2, 3, 4, 5, 6, 7]), 'bf16[1,2,3,4,5,6,…]'),
    (shape([3], element='shape_element_type_is_pred'), 'pred[3]'),
    (
      [
        (0, 'shape_dimensions_0', 4),
        (0, 'shape_dimensions_sum', 4),
        (0, 'shape_dimensions_product', 4),
      ],
      '?[4]',
    ),
    (
      [(0, TUPLE, 1), (0, 'shape_tuple_shapes_size', 3), (0, 'shape_dimensions_product', 1)],
      'tuple of 3',
    ),
    ([(0, 'shape_element_type_is_token', 1)], 'token'),
    ([(0, 'shape_element_type_is_opaque_type', 1)], 'opaque'),
    ([(0, 'shape_element_type_is_invalid_type', 1)], 'invalid'),
  ],
)
def test_shapes(feats, text):
  assert draw(make(['add'], feats=feats)).label('n0') == f'add\n{text}'


def test_window_and_parameter():
  window = [
    (0, f'window_{name}_{i}', value)
    for name, values in (('size', (3, 1)), ('stride', (2, 1)))
    for i, value in enumerate(values)
  ]
  ones = [(0, name, 1) for _, name, _ in window]
  assert (
    draw(make(['convolution'], feats=shape([4]) + window)).label('n0').split('\n')[2]
    == 'window 3x1 stride 2x1'
  )
  assert (
    draw(make(['convolution'], feats=shape([4]) + ones)).label('n0').split('\n')[2] == 'window 1x1'
  )
  assert (
    draw(make(['parameter'], feats=[(0, 'parameter_number', 7)])).label('n0').split('\n')[0]
    == 'parameter 7'
  )


def test_unknown_opcodes_have_their_name_if_there_is_one():
  assert (
    draw(make(['x'], unknown_opcodes={'ragged-all-to-all': 1}))
    .label('n0')
    .startswith('ragged-all-to-all\n')
  )
  assert (
    draw(make(['x', 'y'], unknown_opcodes={'x': 1, 'y': 1})).label('n0').startswith('<unknown>\n')
  )


NASTY = [
  '"',
  '\\',
  'a\\',
  '\\N\\G\\n',
  '<b>&amp;</b>',
  '&',
  '];',
  '日本 µ 🙂',
  "'",
  '{|}',
  '%s',
  'a"];x->y',
]


@pytest.mark.parametrize('name', NASTY)
def test_any_name_is_shown_as_it_is(name):
  module = make(['x', 'add'], [(0, 1)], module_id=name, unknown_opcodes={name: 1})
  picture = draw(module)
  assert len(picture.nodes) == 2
  assert picture.label('n0').split('\n')[0] == name
  if HAS_DOT:
    texts = [
      element.text
      for element in ElementTree.fromstring(drawing.svg(drawing.dot(module))).iter()
      if element.tag.endswith('}text')
    ]
    assert texts.count(name) == 2


def test_characters_that_cannot_be_drawn_are_replaced():
  text = drawing.dot(make(['x'], module_id='a\nb\x00c\x1b', unknown_opcodes={'d\te': 1}))
  assert 'a\ufffdb\ufffdc\ufffd' in text
  assert parse(text).label('n0').split('\n')[0] == 'd\ufffde'


def chain(*opcodes, **options):
  return make(opcodes, [(i, i + 1) for i in range(len(opcodes) - 1)], **options)


def test_what_lies_between_landmarks_is_one_box():
  module = chain('parameter', 'dot', 'add', 'tanh', 'dot', 'negate', 'convert', *['copy'] * 30)
  picture = draw(module, max_ops=6)
  labels = [picture.label(name) for name in picture.nodes]
  assert [label.split('\n')[0] for label in labels] == [
    'dot',
    '2 ops: 1 add, 1 tanh',
    'dot',
    '32 ops: 30 copy, 1 convert, 1 negate',
  ]
  assert picture.edges.keys() == {('n0', 'n1'), ('n1', 'n2'), ('n2', 'n3')}
  assert picture.fills() == {BLUE: 2, YELLOW: 2}


def test_configurable_ops_are_the_landmarks_if_there_are_any():
  module = chain('reshape', *['add'] * 20, 'dot', *['tanh'] * 20, 'reshape', configurable=[0])
  picture = draw(module, max_ops=5)
  assert picture.fills() == {ORANGE: 1, YELLOW: 1}
  assert [picture.label(name).split('\n')[0] for name in picture.nodes] == [
    'reshape',
    '42 ops: 1 dot, 20 add, 20 tanh, …',
  ]


def test_without_landmarks_bands_of_similar_depth():
  picture = draw(chain(*['add'] * 100), max_ops=50)
  assert len(picture.nodes) == 30
  assert all(re.fullmatch(r'[34] ops: [34] add', picture.label(name)) for name in picture.nodes)
  assert len(picture.edges) == 29
  assert len(draw(chain(*['add'] * 100), max_ops=7).nodes) == 7
  for n in range(2, 9):
    assert len(draw(chain(*['add'] * n), max_ops=n - 1).nodes) == n - 1
    assert len(draw(chain(*['add'] * n), max_ops=n).nodes) == n


def test_repeated_edges_are_counted():
  module = make(
    ['parameter'] * 40 + ['dot'] * 2, [(i, 40 + j) for i in range(40) for j in range(2)]
  )
  picture = draw(module, max_ops=5)
  name = picture.find('40 ops: 40 parameter')
  assert 'used by 2 boxes' in picture.label(name)
  (((source, _), attributes),) = picture.edges.items()
  assert (source, attributes) == (name, {'xlabel': '40x'})


def test_results_have_no_arrows():
  ops = ['dot', *['add'] * 40, 'dot', 'tanh', 'tuple']
  module = make(ops, [*((i, i + 1) for i in range(42)), (20, 43), (42, 43)], roots=[43])
  picture = draw(module, max_ops=10)
  assert '1 result' in picture.label(picture.find('40 ops: 40 add'))
  assert len(picture.edges) == 3  # dot -> adds -> dot -> tanh and tuple.


def called(opcode, body, **options):
  """Makes a module whose `body`, 40 adds and one op, is called by `opcode` among 40 copies."""
  ops = [body, *['add'] * 40, *['copy'] * 40, opcode]
  edges = [*((i, i + 1) for i in range(40)), *((i, i + 1) for i in range(41, 81)), (40, 81)]
  return make(ops, edges, computation=[0] * 41 + [1] * 41, roots=[40, 81], **options)


def test_what_an_op_applies_is_a_part_of_it():
  picture = draw(called('fusion', 'negate'), max_ops=60)
  assert len(picture.nodes) == 41
  assert picture.label(picture.find('with 40 add, 1 negate')).startswith('fusion\n')
  assert picture.clusters == {}
  assert {attributes.get('style') for attributes in picture.edges.values()} == {None}


@pytest.mark.parametrize(
  ('opcode', 'body', 'own'),
  [
    ('while', 'dot', True),
    ('while', 'negate', False),
    ('call', 'convolution', True),
    ('fusion', 'dot', False),
  ],
)
def test_bodies_with_landmarks_are_computations_of_their_own(opcode, body, own):
  module = called(opcode, body)
  picture = draw(module, max_ops=60)
  dashed = [
    edge for edge, attributes in picture.edges.items() if attributes.get('style') == 'dashed'
  ]
  assert len(dashed) == own
  (caller,) = [name for name in picture.nodes if picture.label(name).startswith(opcode)]
  assert picture.nodes[caller]['fillcolor'] == (WHITE if body == 'negate' else BLUE)
  if own:
    assert dashed[0][0] == caller
    assert list(picture.clusters.values()) == [f'41 ops, called by 1 {opcode}']
    assert 'with 40 copy' in picture.label(caller).split('\n')


def test_helper_of_many_is_drawn_in_the_first():
  ops = ['parameter', 'add', *['reduce'] * 50]
  module = make(
    ops,
    [(0, 1), *((1, i) for i in range(2, 52)), *((i, i + 1) for i in range(2, 51))],
    computation=[0, 0] + [1] * 50,
    roots=[1, 51],
  )
  picture = draw(module, max_ops=51)
  assert len(picture.nodes) == 50
  assert picture.label('n0').split('\n')[2:] == ['with 1 add']
  assert len(picture.edges) == 49


def test_computations_that_call_each_other_end():
  # No compiler writes this, but the reader does not refuse it.
  ops = ['add'] * 20
  module = make(ops, [(9, 10), (19, 0)], computation=[0] * 10 + [1] * 10, roots=[9, 19])
  assert len(draw(module, max_ops=5).nodes) == 2
  assert len(draw(module).nodes) == 20


def test_edges_that_lead_back_end():
  module = make(
    ['dot', 'add', 'add', 'dot'] * 10, [(i, (i * 7) % 40) for i in range(40) if i != (i * 7) % 40]
  )
  assert 1 <= len(draw(module, max_ops=20).nodes) <= 20


@st.composite
def programs(draw):
  """Draws modules of one to four computations, where operands and callees come first.

  Compilers write modules so.
  """
  rng = np.random.default_rng(draw(st.integers(0, 2**32)))
  opcodes, edges, computation, roots = [], [], [], []
  for index in range(draw(st.integers(1, 4))):
    start = len(opcodes)
    for op in range(start, start + draw(st.integers(1, 40))):
      name = str(
        rng.choice(
          ['parameter', 'constant', 'add', 'tanh', 'dot', 'tuple', 'fusion', 'while', 'reduce']
        )
      )
      opcodes.append(name)
      computation.append(index)
      if op > start and name not in ('parameter', 'constant'):
        edges += [(int(operand), op) for operand in set(rng.integers(start, op, 2).tolist())]
      if roots and name in ('fusion', 'while', 'reduce'):
        edges.append((int(rng.choice(roots)), op))
    roots.append(len(opcodes) - 1)
  configurable = np.flatnonzero(rng.random(len(opcodes)) < draw(st.sampled_from([0, 0.1])))
  return make(opcodes, edges, computation=computation, roots=roots, configurable=configurable)


@given(programs(), st.integers(1, 100))
@settings(deadline=None)
def test_large_pictures_lose_nothing_and_have_no_cycles(module, max_ops):
  boxes = drawing._boxes(drawing._graph(module), max_ops)
  assert boxes.of_op.size == module.num_ops
  assert np.unique(boxes.of_op).size == boxes.op.size
  assert (boxes.of_op[boxes.op] == np.arange(boxes.op.size)).all()
  assert (np.bincount(boxes.of_op) > 1)[boxes.is_group].all()
  picture = parse(drawing.dot(module, max_ops=max_ops))
  assert len(picture.nodes) == boxes.op.size
  assert len(picture.nodes) <= max(max_ops, np.unique(module.computation).size)
  order = graphlib.TopologicalSorter()
  for (source, target), attributes in picture.edges.items():
    if 'style' not in attributes:
      order.add(target, source)
  order.prepare()  # Raises on a cycle.
  if module.num_ops <= max_ops:
    assert len(picture.nodes) == module.num_ops
    assert len(picture.edges) == len({tuple(edge) for edge in module.edge_index.tolist()})


def golden(name):
  (module,) = hlo.from_file(testing.GOLDEN / f'modules/{name}.pb')
  return module


@pytest.mark.parametrize(
  ('name', 'max_boxes', 'landmarks'),
  [
    ('resnet50_infer_optcpu', 120, ('convolution', 'dot')),
    ('convnet_train_unopt', 238, ('convolution', 'dot')),
  ],
)
def test_real_programs(name, max_boxes, landmarks):
  module = golden(name)
  picture = draw(module)
  names = features.opcode_names()
  wanted = sum(names[opcode] in landmarks for opcode in module.node_opcode)
  assert picture.fills()[BLUE] == wanted > 0
  assert len(picture.nodes) <= max_boxes


@testing.needs_shared
def test_public_layout_file_shows_its_configurable_ops():
  module = npz.load(testing.SHARED / 'data/npz/layout/xla/random/valid/unet_3d.4x4.bf16.npz')
  picture = draw(module)
  assert picture.fills()[ORANGE] == module.num_config_ops == 62
  assert len(picture.nodes) <= 300


@pytest.mark.skipif(not HAS_DOT, reason='needs Graphviz')
def test_svg():
  root = ElementTree.fromstring(drawing.svg(drawing.dot(make(['parameter', 'add'], [(0, 1)]))))
  assert root.tag.endswith('}svg')
  groups = collections.Counter(
    element.get('class') for element in root.iter() if element.get('class')
  )
  assert (groups['node'], groups['edge']) == (2, 1)


@pytest.mark.skipif(not HAS_DOT, reason='needs Graphviz')
def test_graphviz_that_fails_is_reported():
  with pytest.raises(errors.InputError, match='the program dot failed') as caught:
    drawing.svg('digraph {')
  assert 'syntax error' in caught.value.found


def test_graphviz_that_is_missing_is_reported(monkeypatch, tmp_path):
  monkeypatch.setenv('PATH', str(tmp_path))
  with pytest.raises(
    errors.InputError, match='apt-get install graphviz, or write DOT text'
  ) as caught:
    drawing.svg('digraph {}')
  assert caught.value.expected == 'the package graphviz'
