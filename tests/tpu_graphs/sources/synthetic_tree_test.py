"""Tests of tpu_graphs.sources.synthetic: the modules of a whole sample, and its files."""

import dataclasses

import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import npz
from tpu_graphs.sources import synthetic

_MAKERS = {'tile': synthetic.tile_module, 'layout': synthetic.layout_module}
_SAMPLE = {kind: list(synthetic.generate(kind, 50)) for kind in _MAKERS}


def _assert_equal(one, other):
  assert one.module_id == other.module_id
  testing.assert_equal_modules(one, other)


@pytest.mark.parametrize('kind', _MAKERS)
def test_equal_seeds_give_equal_modules(kind):
  for one, other in zip(synthetic.generate(kind, 5), _SAMPLE[kind], strict=False):
    _assert_equal(one, other)
  _assert_equal(_MAKERS[kind](3), _MAKERS[kind](3))


@pytest.mark.parametrize('kind', _MAKERS)
def test_seeds_and_numbers_make_a_difference(kind):
  fingerprints = {
    _MAKERS[kind](index, seed=seed).topology_fingerprint()
    for index in range(2)
    for seed in range(2)
  }
  assert len(fingerprints) == 4


@pytest.mark.parametrize('kind', _MAKERS)
def test_generated_graphs_are_distinct(kind):
  assert len({module.topology_fingerprint() for module in _SAMPLE[kind]}) == 50


def test_a_graph_that_has_occurred_is_left_out(monkeypatch):
  make = synthetic.tile_module
  monkeypatch.setattr(
    synthetic,
    'tile_module',
    lambda index, *, seed: dataclasses.replace(
      make(index // 3, seed=seed), module_id=f'synthetic_tile_{index:04d}'
    ),
  )
  assert [module.module_id[-4:] for module in synthetic.generate('tile', 3)] == [
    '0000',
    '0003',
    '0006',
  ]


@pytest.mark.parametrize('kind', _MAKERS)
def test_no_modules(kind):
  assert list(synthetic.generate(kind, 0)) == []


def test_unknown_kind():
  with pytest.raises(
    errors.InputError, match=r"kind: unknown kind: found 'fusion', expected tile or layout"
  ):
    synthetic.generate('fusion', 1)


def _write(folder, **options):
  return synthetic.write_tree(folder, **{'tile': (4, 2, 1), 'layout': (2, 1, 1), **options})


def _content(folder):
  return {
    str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()
  }


def test_tree(tmp_path):
  splits = _write(tmp_path / 'new/sample')
  assert sorted(path.name for path in (tmp_path / 'new/sample').iterdir()) == ['README.txt', 'npz']
  assert [(split.kind, split.name, split.num_modules) for split in splits] == [
    ('tile', 'train', 4),
    ('tile', 'valid', 2),
    ('tile', 'test', 1),
    ('layout', 'train', 2),
    ('layout', 'valid', 1),
    ('layout', 'test', 1),
  ]
  seen = set()
  for split in splits:
    folder = tmp_path / 'new/sample/npz' / split.kind / 'synthetic' / split.name
    paths = sorted(folder.iterdir())
    modules = [npz.load(path, kind=split.kind) for path in paths]
    assert [path.name for path in paths] == [f'{module.module_id}.npz' for module in modules]
    assert len(modules) == split.num_modules
    assert sum(module.num_configs for module in modules) == split.num_configs
    for module in modules:
      assert (module.config_runtime >= module_lib.MIN_RUNTIME_NS).all()
      _assert_equal(module, _MAKERS[split.kind](int(module.module_id[-4:])))
      seen.add((split.kind, module.topology_fingerprint()))
  assert len(seen) == 11


def test_readme_says_synthetic(tmp_path):
  _write(tmp_path, seed=17)
  text = (tmp_path / 'README.txt').read_text()
  assert text.startswith('SYNTHETIC DATA')
  for part in (
    'seed 17',
    'tile:synthetic',
    'layout:synthetic',
    'npz/tile/synthetic/train: 4 modules',
  ):
    assert part in text


def test_equal_seeds_give_equal_bytes(tmp_path):
  for name, seed in (('a', 0), ('b', 0), ('c', 1)):
    _write(tmp_path / name, seed=seed)
  a, b, c = (_content(tmp_path / name) for name in 'abc')
  assert a == b
  assert not set(a.values()) & set(c.values())


@pytest.mark.parametrize('sizes', [(0, 0, 0), (0, 1, 0)])
def test_empty_splits(tmp_path, sizes):
  splits = _write(tmp_path, tile=sizes, layout=(0, 0, 0))
  assert [split.num_modules for split in splits] == [*sizes, 0, 0, 0]
  assert (tmp_path / 'npz/layout/synthetic/test').is_dir()


def test_folder_that_is_not_empty(tmp_path):
  (tmp_path / 'thesis.tex').write_text('precious')
  with pytest.raises(errors.InputError, match=r'folder not empty: found thesis\.tex') as caught:
    _write(tmp_path)
  assert caught.value.path == str(tmp_path)
  assert _content(tmp_path) == {'thesis.tex': b'precious'}


def test_file_in_place_of_the_folder(tmp_path):
  (tmp_path / 'file').touch()
  for folder in (tmp_path / 'file', tmp_path / 'file/below'):
    with pytest.raises(errors.InputError, match='cannot write folder'):
      _write(folder)


def test_interruption_leaves_nothing_that_looks_finished(tmp_path, monkeypatch):
  save = npz.save

  def interrupted(module, path):
    if module.kind == 'layout':
      raise KeyboardInterrupt
    save(module, path)

  monkeypatch.setattr(npz, 'save', interrupted)
  with pytest.raises(KeyboardInterrupt):
    _write(tmp_path)
  assert _content(tmp_path) == {}
  monkeypatch.undo()
  _write(tmp_path)
