"""Tests of tpu_graphs.sources.readers: which reader takes which file."""

import io

import numpy as np
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs.sources import npz
from tpu_graphs.sources import readers


def _npz_bytes(**over):
  file = io.BytesIO()
  np.savez_compressed(file, **testing.tile_arrays(**over))
  return file.getvalue()


@pytest.mark.parametrize('name', ['é.npz', 'é', 'é.download'])
def test_npz_by_suffix_or_content(name, tmp_path):
  (tmp_path / name).write_bytes(_npz_bytes())
  extraction = readers.from_file(tmp_path / name)
  [module] = extraction.modules
  assert (module.module_id, module.kind, module.num_configs, extraction.skipped) == (
    name.removesuffix('.npz'),
    'tile',
    6,
    {},
  )


def test_protobuf():
  path = testing.GOLDEN / 'corner' / 'tile_sel.pb'
  found, expected = readers.from_file(path, kind='tile').modules, hlo.from_file(path, kind='tile')
  assert len(found) == 3
  assert [module.module_id for module in found] == [module.module_id for module in expected]
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_array_equal(one.config_feat, other.config_feat)


def test_bytes_equal_file(tmp_path):
  npz.save(npz.read(io.BytesIO(_npz_bytes()), path='m.npz'), tmp_path / 'm.npz')
  [module] = readers.from_bytes(
    (tmp_path / 'm.npz').read_bytes(), path='gs://bucket/dir/m.npz'
  ).modules
  assert module.module_id == 'm'


@pytest.mark.parametrize('name', ['zero.npz', 'zero.pb', 'zero.binpb', 'zero'])
def test_empty_file(name, tmp_path):
  (tmp_path / name).touch()
  with pytest.raises(errors.InputError, match='empty') as caught:
    readers.from_file(tmp_path / name)
  assert caught.value.path == str(tmp_path / name)


@pytest.mark.parametrize('name', ['html.npz', 'html.pb', 'html'])
def test_html(name):
  with pytest.raises(errors.InputError, match='HTML') as caught:
    readers.from_bytes(b'<html>404</html>', path=f'bad/{name}')
  assert caught.value.path == f'bad/{name}'


@pytest.mark.parametrize('name', ['m.pb', 'm.binpb'])
def test_npz_under_the_name_of_a_protobuf(name):
  with pytest.raises(errors.InputError, match='zip') as caught:
    readers.from_bytes(_npz_bytes(), path=name)
  assert caught.value.path == name


def test_other_kind():
  with pytest.raises(errors.InputError, match='file of the other kind') as caught:
    readers.from_bytes(_npz_bytes(), path='m.npz', kind='layout')
  assert (caught.value.path, caught.value.found, caught.value.expected) == (
    'm.npz',
    'a tile file',
    'a layout file',
  )


def test_missing_file(tmp_path):
  for path in (tmp_path / 'none.npz', tmp_path / 'none.pb', tmp_path / 'none' / 'none'):
    with pytest.raises(errors.InputError, match='cannot read file') as caught:
      readers.from_file(path)
    assert caught.value.path == str(path)


_TEXT = """HloModule m

ENTRY e {
  a = f32[2] parameter(0)
  ROOT b = f32[2] negate(a)
}
"""


@pytest.mark.parametrize(
  'name', ['m.txt', 'm.hlo', 'm', 'm.pb', 'module_0007.m.after_optimizations.hlo.pb']
)
def test_text(name, tmp_path):
  pytest.importorskip('jaxlib')
  (tmp_path / name).write_text(_TEXT)
  extraction = readers.from_file(tmp_path / name)
  [module] = extraction.modules
  assert (module.kind, module.num_ops, extraction.type_name) == ('layout', 2, 'HLO text')
  [of_dump] = readers.from_bytes(
    _TEXT.encode(), path='d/module_0007.m.after_optimizations.txt', kind='tile'
  ).modules
  assert (of_dump.module_id, of_dump.kind) == (f'{module.module_id}.0007', 'tile')


def test_folder_of_a_dump(tmp_path):
  pytest.importorskip('jaxlib')
  program = (testing.GOLDEN / 'corner' / 'graph.pb').read_bytes()
  (tmp_path / 'module_0001.g.before_optimizations.hlo.pb').write_bytes(program)
  for number in (2, 3):
    (tmp_path / f'module_000{number}.m.cpu_after_optimizations.txt').write_text(_TEXT)
  (tmp_path / 'module_0001.g.cpu_after_optimizations-buffer-assignment.txt').write_text(
    'BufferAssignment:'
  )
  (tmp_path / 'm.npz').write_bytes(_npz_bytes())
  [graph] = hlo.from_bytes(program)
  expected = {'before': [graph.num_ops], 'after': [2, 2], 'all': [graph.num_ops, 2, 2]}
  for stage, sizes in expected.items():
    extraction = readers.from_file(tmp_path, stage=stage)
    assert [module.num_ops for module in extraction.modules] == sizes
    assert len({module.module_id for module in extraction.modules}) == len(sizes)
    assert extraction.program(0)
    assert (extraction.type_name, extraction.skipped) == ('XLA dump', {})
  assert [module.num_ops for module in readers.from_file(str(tmp_path)).modules] == [2, 2]


def test_skipped_modules_of_a_dump_are_counted(tmp_path):
  data = (testing.GOLDEN / 'corner' / 'tile_sel.pb').read_bytes()
  for number in (1, 2):
    (tmp_path / f'module_000{number}.m.after_optimizations.hlo.pb').write_bytes(data)
  [one, both] = (
    readers.from_file(path, kind='tile') for path in (next(tmp_path.iterdir()), tmp_path)
  )
  assert one.skipped
  assert both.skipped == {reason: 2 * count for reason, count in one.skipped.items()}
  assert len(both.modules) == 2 * len(one.modules)


@pytest.mark.parametrize('stage', ['after', 'all'])
def test_folder_that_cannot_be_read(tmp_path, stage):
  (tmp_path / 'm.npz').write_bytes(_npz_bytes())
  with pytest.raises(errors.InputError, match='folder without programs') as caught:
    readers.from_file(tmp_path, stage=stage)
  assert caught.value.path == str(tmp_path)
  bad = tmp_path / 'module_0001.m.before_optimizations.hlo.pb'
  bad.touch()
  with pytest.raises(
    errors.InputError, match=r'without programs of the stage|empty file'
  ) as caught:
    readers.from_file(tmp_path, stage=stage)
  assert caught.value.path == str(tmp_path if stage == 'after' else bad)
