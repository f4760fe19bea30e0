"""Tests of tpu_graphs.modules.features: the tables are equal to the published dataset's."""

import numpy as np

from tests import testing
from tpu_graphs.modules import features
from tpu_graphs.sources import npz


def test_sizes():
  for names, size in (
    (features.node_feature_names(), 140),
    (features.tile_feature_names(), 24),
    (features.layout_feature_names(), 18),
  ):
    assert len(names) == len(set(names)) == size
  assert (features.NUM_NODE_FEATURES, features.NUM_TILE_FEATURES, features.NUM_LAYOUT_FEATURES) == (
    140,
    24,
    18,
  )


def test_columns():
  # The README of the published dataset lists these positions.
  assert features.node_feature_names()[:3] == (
    'is_root',
    'element_size_in_bits',
    'shape_element_type_is_invalid_type',
  )
  assert features.tile_feature_names()[::8] == (
    'kernel_bounds_0',
    'output_bounds_0',
    'input_bounds_0',
  )
  assert [features.layout_feature_names()[i] for i in (0, 5, 6, 17)] == [
    'output_layout_0',
    'output_layout_5',
    'input_layout_0',
    'kernel_layout_5',
  ]


def test_opcodes():
  opcodes = features.opcodes()
  assert [opcodes[name] for name in ('abs', 'convolution', 'dot', 'parameter', 'reshape')] == [
    1,
    26,
    34,
    63,
    75,
  ]
  assert sorted(opcodes.values()) == list(range(1, features.NUM_OPCODES))
  # This opcode is newer than the table: such ops get UNKNOWN_OPCODE.
  assert 'ragged-all-to-all' not in opcodes


def test_opcode_names_are_the_inverse():
  names = features.opcode_names()
  assert len(names) == features.NUM_OPCODES
  assert names[features.UNKNOWN_OPCODE] == '<unknown>'
  assert all(names[opcode] == name for name, opcode in features.opcodes().items())


@testing.needs_shared
def test_configurable_ops_of_a_published_file():
  module = npz.load(testing.SHARED / 'data/npz/layout/xla/default/train/unet3d.npz')
  kinds = {
    features.opcode_names()[opcode]
    for opcode in np.unique(module.node_opcode[module.node_config_ids])
  }
  assert kinds <= {'convolution', 'dot', 'reshape'}
