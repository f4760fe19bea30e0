"""Tests of tpu_graphs.sources.dumps: which files of an XLA dump are read."""

import os
import subprocess
import sys

import hypothesis
from hypothesis import strategies
import pytest

from tpu_graphs import errors
from tpu_graphs.sources import dumps
from tpu_graphs.sources import readers

# XLA writes such names: with and without a timestamp, from several compilers, with dots and with
# words of other names.
_PROGRAMS = {
  'module_0000.jit_f': ('before_optimizations', 'cpu_after_optimizations'),
  '1795987685868910.module_0001.jit_f': ('before_optimizations', 'cpu_after_optimizations'),
  'module_0002.a_inference_step_11__XlaMustCompile_true_.32': (
    'before_optimizations',
    'cpu_after_optimizations',
  ),
  'module_0003.jit_f': ('before_optimizations', 'sm_8.0_gpu_after_optimizations'),
  'module_0004.jit_f': ('before_optimizations', 'sm_9.0a_gpu_after_optimizations'),
  'module_0005.jit_f.1.2': ('before_optimizations', 'gfx90a_gpu_after_optimizations'),
  'module_0006.main_before_optimizations': ('before_optimizations', 'after_optimizations'),
  'module_12345': ('before_optimizations', 'tpu_after_optimizations'),
}
_OTHERS = [
  'module_0000.jit_f',
  'module_0000.jit_f.cpu_after_optimizations-buffer-assignment.txt',
  'module_0000.jit_f.cpu_after_optimizations-memory-usage-report.pb',
  'module_0000.jit_f.cpu_after_optimizations.dot',
  'module_0000.jit_f.cpu_after_optimizations.html',
  'module_0000.jit_f.cpu_after_optimizations.top_level.html',
  'module_0000.jit_f.cpu_after_optimizations_after_buffer_assignment.txt',
  'module_0000.jit_f.0002.HLO_passes.after_pipeline-start.before_simplification.hlo.pb',
  'module_0000.jit_f.0003.HLO_passes.after_simplification.before_pipeline-end.txt',
  'module_0000.jit_f.ir-no-opt.ll',
  'module_0000.jit_f.o',
  'module_0000.jit_f.debug_options',
  'module_0000.jit_f.execution_0000.hlo_unoptimized_snapshot.txt',
  'jit_f.before_optimizations.hlo.pb',
  'my_module_0000.jit_f.before_optimizations.txt',
  'notes.txt',
  'm.npz',
  '',
  '.',
]


def _names(suffix):
  return sorted(
    f'{program}.{stage}.{suffix}' for program, stages in _PROGRAMS.items() for stage in stages
  )


@pytest.mark.parametrize('suffix', ['hlo.pb', 'txt'])
@pytest.mark.parametrize('folder', ['', 'd/', '/a.b/module_9/', 'gs://bucket/dump/', 'C:\\d\\'])
def test_stages(suffix, folder):
  paths = [folder + name for name in (*_names(suffix), *_OTHERS)]
  before = sorted(
    f'{folder}{program}.{stages[0]}.{suffix}' for program, stages in _PROGRAMS.items()
  )
  after = sorted(f'{folder}{program}.{stages[1]}.{suffix}' for program, stages in _PROGRAMS.items())
  assert dumps.find(paths, stage='before') == before
  assert dumps.find(paths, stage='after') == dumps.find(iter(paths)) == after
  assert dumps.find(paths, stage='all') == sorted(before + after)


@hypothesis.given(
  strategies.lists(strategies.sampled_from(_names('hlo.pb') + _names('txt') + _OTHERS), unique=True)
)
def test_text_only_where_there_is_no_protobuf(names):
  expected = [
    name
    for name in names
    if name not in _OTHERS
    and (name.endswith('.pb') or f'{name.removesuffix("txt")}hlo.pb' not in names)
  ]
  assert dumps.find(names, stage='all') == sorted(expected)


def test_no_dump():
  assert dumps.find([]) == dumps.find(_OTHERS) == []


@pytest.mark.parametrize(('stage', 'other'), [('after', 'before'), ('before', 'after')])
def test_stage_that_was_not_dumped(stage, other):
  names = dumps.find(_names('txt'), stage=other)
  assert dumps.find(names, stage='all') == names
  with pytest.raises(
    errors.InputError, match=f"found 8 of stage '{other}', expected stage '{stage}'"
  ):
    dumps.find(names, stage=stage)


@pytest.mark.parametrize('stage', ['', 'After', 'both', None])
def test_unknown_stage(stage):
  with pytest.raises(
    errors.InputError, match=r'unknown stage: found .*, expected after, before, all'
  ):
    dumps.find([], stage=stage)


def test_number_of_text():
  assert [dumps.number_of_text(name) for name in _names('txt')] == [
    '0001',
    '0001',
    '0000',
    '0000',
    '0002',
    '0002',
    '0003',
    '0003',
    '0004',
    '0004',
    '0005',
    '0005',
    '0006',
    '0006',
    '12345',
    '12345',
  ]
  assert not any(map(dumps.number_of_text, _names('hlo.pb') + _OTHERS))


def test_endings_belong_to_programs():
  for ending in dumps.ENDINGS:
    assert dumps.find([f'module_0000.jit_f.{ending}'], stage='all')


_TENSORFLOW = """
import tensorflow as tf

@tf.function(jit_compile=True)
def step(x):
  return tf.nn.softmax(x @ tf.transpose(x))

step(tf.ones([3, 4]))
step(tf.ones([5, 4]))
"""
_JAX = """
import jax
import jax.numpy as jnp

x = jnp.ones([3, 4])
for size in (1, 2):
  jax.jit(lambda x: jnp.tanh(x) @ x[:size].T).lower(x).compile()
"""


@pytest.mark.parametrize('package', ['jax', pytest.param('tensorflow', marks=pytest.mark.slow)])
def test_dump_of_a_real_program(package, tmp_path):
  pytest.importorskip(package)
  pytest.importorskip('jaxlib')  # jaxlib reads the text.
  if package == 'jax':
    code, name = _JAX, 'jit__lambda_'
  else:
    code, name = _TENSORFLOW, 'a_inference_step_'
  flags = (
    f'--xla_dump_to={tmp_path} --xla_dump_hlo_as_proto --xla_dump_hlo_as_text '
    '--xla_dump_hlo_pass_re=.*'
  )
  subprocess.run(
    [sys.executable, '-c', code],
    env={**os.environ, 'XLA_FLAGS': flags},
    check=True,
    capture_output=True,
  )
  by_proto = {stage: _modules(tmp_path, stage, name) for stage in dumps.STAGES}
  assert {stage: len(found) for stage, found in by_proto.items()} == {
    'after': 2,
    'before': 2,
    'all': 4,
  }
  assert by_proto['all'] == {**by_proto['after'], **by_proto['before']}
  for path in tmp_path.glob('*.pb'):
    path.unlink()
  by_text = {stage: _modules(tmp_path, stage, name) for stage in dumps.STAGES}
  for stage, found in by_text.items():
    assert sorted(found.values()) == sorted(by_proto[stage].values())
  assert {module_id[-5:] for module_id in by_text['all']} == {
    f'.{dumps.number_of_text(path)}' for path in dumps.find(os.listdir(tmp_path)) if name in path
  }


def _modules(folder, stage, name):
  """Returns `module_id` -> opcodes and element counts, regardless of their order."""
  extraction = readers.from_file(folder, stage=stage)
  assert extraction.type_name == 'XLA dump'
  assert len(extraction.tunings) == len(extraction.modules)
  return {
    module.module_id: sorted(
      zip(module.node_opcode.tolist(), module.node_feat.sum(axis=1).tolist(), strict=True)
    )
    for module in extraction.modules
    if module.module_id.startswith(name)
  }
