"""Tests of tpu_graphs.metrics.programs with names from the public splits and measured files."""

import numpy as np
import pytest

from tests import testing
from tpu_graphs.metrics import metrics
from tpu_graphs.metrics import programs


@pytest.mark.parametrize(
  ('module_id', 'program'),
  [
    pytest.param(
      'inception_v3_batch_128_train_426e203f19335d17', 'inception_v3_batch_128_train', id='tile'
    ),
    pytest.param(
      'retinanet.2x2.fp32_-342c949e14733d96', 'retinanet.2x2.fp32', id='negative fingerprint'
    ),
    pytest.param(
      'retinanet.2x2.fp32_-42c949e14733d9', 'retinanet.2x2.fp32', id='zeros in front left out'
    ),
    pytest.param('fusion.232_579e7b2c540f0929.1', 'fusion.232', id='number of a repeated program'),
    pytest.param('unet_3d.4x4.bf16', 'unet_3d.4x4.bf16', id='layout'),
    pytest.param('alexnet_train_batch_32', 'alexnet_train_batch_32', id='number at the end'),
    pytest.param(
      'resnet_v1_50_official_batch_128_bf16',
      'resnet_v1_50_official_batch_128_bf16',
      id='hexadecimal word',
    ),
    pytest.param(
      'cd708819d3f5103afd6460b15e74eaf3',
      'cd708819d3f5103afd6460b15e74eaf3',
      id='digest of a test file',
    ),
    pytest.param(
      'a_cd708819d3f5103afd6460b15e74eaf3', 'a_cd708819d3f5103afd6460b15e74eaf3', id='too long'
    ),
    pytest.param('a_426E203F19335D17', 'a_426E203F19335D17', id='capitals'),
    pytest.param('_426e203f19335d17', '_426e203f19335d17', id='nothing before'),
    pytest.param('a_426e203f19335d17\n', 'a_426e203f19335d17\n', id='line end behind'),
    pytest.param('größe_π_426e203f19335d17', 'größe_π', id='unicode'),
    pytest.param('synthetic_tile_0003', 'synthetic_tile_0003', id='sample data'),
  ],
)
def test_program_of(module_id, program):
  assert programs.program_of(module_id) == program


def _result(module_id, scores):
  return metrics.evaluate_module(module_id, np.array([10, 20, 30]), np.array(scores), ks=(1,))


def test_modules_are_summarized_by_program():
  a1, a2 = _result('a_426e203f19335d17', [1, 2, 3]), _result('a_-42c949e14733d9', [3, 2, 1])
  b = _result('b', [1, 3, 2])
  assert programs.group([b, a1, a2]) == {'a': [a1, a2], 'b': [b]}
  assert list(programs.group([b, a1])) == ['a', 'b']
  summaries = programs.summarize([b, a1, a2])
  assert {
    name: (summary['num_modules'], summary['opa']) for name, summary in summaries.items()
  } == {'a': (2, 0.5), 'b': (1, pytest.approx(2 / 3))}
  assert summaries['a'] == metrics.summarize([a1, a2])
  assert programs.summarize([]) == {}


@testing.needs_shared
def test_real_tile_files():
  stems = [path.stem for path in (testing.SHARED / 'data/npz/tile/xla').glob('*/*_*.npz')]
  assert {programs.program_of(stem) for stem in stems} == {
    'inception_v3_batch_128_train',
    'retinanet.2x2.fp32',
  }
