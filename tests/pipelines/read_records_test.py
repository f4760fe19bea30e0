"""Tests of the contract with other programs: ten lines with only the schema read a dataset."""

import ast
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from pipelines import convert
from pipelines.conversion import options as options_lib
from tests import testing
from tpu_graphs.dataset import records

_PROGRAM = pathlib.Path(__file__).parents[2] / 'docs' / 'read_records.py'


def test_ten_lines_without_this_package():
  code = _PROGRAM.read_text(encoding='utf-8')
  tree = ast.parse(code)
  docstring_lines = tree.body[0].end_lineno
  assert len([line for line in code.splitlines()[docstring_lines:] if line.strip()]) <= 10
  imported = {
    alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
  }
  assert imported == {'pathlib', 'sys', 'tensorflow', 'tensorflow_gnn'}


@pytest.mark.parametrize(
  ('mk', 'kind'), [(testing.tile_arrays, 'tile'), (testing.layout_arrays, 'layout')]
)
def test_reads_what_convert_writes(mk, kind, tmp_path):
  for stem, split, sizes in (('é', 'train', {'n': 4, 'c': 6}), ('one', 'valid', {'n': 1, 'c': 1})):
    (tmp_path / split).mkdir()
    np.savez_compressed(
      tmp_path / split / f'{stem}.npz', **mk(**sizes, **({'nc': 1} if kind == 'layout' else {}))
    )
  options = options_lib.ConvertOptions(
    collection=f'{kind}:x', records=records.RecordOptions(max_configs=3)
  )
  convert.convert(inputs=[str(tmp_path)], directory=str(tmp_path / 'out'), options=options)
  result = subprocess.run(
    [sys.executable, _PROGRAM, tmp_path / 'out'],
    check=True,
    capture_output=True,
    encoding='utf-8',
    env={**os.environ, 'PYTHONIOENCODING': 'utf-8'},
  )
  own = {'config_op': 1, 'configures': 1} if kind == 'layout' else {}
  rows = []
  for line in result.stdout.splitlines():
    module_id, _, sizes = line.partition(' ')
    rows.append((module_id, ast.literal_eval(sizes)))
  assert sorted(rows, key=lambda row: row[0]) == [
    ('one', {'op': 1, 'operand': 0, **own, 'configs': 1}),
    *[('é', {'op': 4, 'operand': 3, **own, 'configs': 3})] * 2,
  ]
