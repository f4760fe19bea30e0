"""Tests of tpu_graphs.readers: which reader takes which file."""

import io

import numpy as np
import pytest

from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs import npz
from tpu_graphs import readers
from tests import testing


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
      name.removesuffix('.npz'), 'tile', 6, {})


def test_protobuf():
  path = testing.GOLDEN / 'corner' / 'tile_sel.pb'
  found, expected = readers.from_file(path, kind='tile').modules, hlo.from_file(path, kind='tile')
  assert len(found) == 3
  assert [module.module_id for module in found] == [module.module_id for module in expected]
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_array_equal(one.config_feat, other.config_feat)


def test_bytes_equal_file(tmp_path):
  npz.save(npz.read(io.BytesIO(_npz_bytes()), path='m.npz'), tmp_path / 'm.npz')
  [module] = readers.from_bytes((tmp_path / 'm.npz').read_bytes(), path='gs://bucket/dir/m.npz').modules
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
  assert (caught.value.path, caught.value.found, caught.value.expected) == ('m.npz', 'a tile file', 'a layout file')


def test_missing_file_and_directory(tmp_path):
  for path in (tmp_path, tmp_path / 'none.npz', tmp_path / 'none.pb'):
    with pytest.raises(errors.InputError, match='cannot read file') as caught:
      readers.from_file(path)
    assert caught.value.path == str(path)
