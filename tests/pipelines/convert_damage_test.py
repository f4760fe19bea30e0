"""Tests of pipelines.convert: inputs that cannot be used."""

import json
import os
import shutil

import numpy as np
import pytest

from pipelines.conversion import description
from tests import converting
from tests import testing
from tpu_graphs import errors


def damage(folder):
  """Writes a good file and damaged files to `folder`; returns damaged name -> reason."""
  good = converting.save(folder / 'good.npz', testing.tile_arrays())
  with open(good, 'rb') as file:
    (folder / 'truncated.npz').write_bytes(file.read()[:500])
  (folder / 'html.npz').write_text('<html>404</html>')
  (folder / 'zero.npz').write_bytes(b'')
  return {
    'truncated.npz': 'damaged or truncated npz file',
    'html.npz': 'not an npz file',
    'zero.npz': 'empty file',
  }


@pytest.mark.parametrize('name', ['truncated.npz', 'html.npz', 'zero.npz'])
def test_damaged_file_stops_all(tmp_path, name):
  reason = damage(tmp_path / 'in')[name]
  with pytest.raises(errors.InputError) as caught:
    converting.run(
      [tmp_path / 'in/good.npz', tmp_path / 'in' / name], tmp_path / 'o', converting.options()
    )
  assert (caught.value.reason, caught.value.path) == (reason, str(tmp_path / 'in' / name))
  assert not (tmp_path / 'o').exists()


@pytest.mark.parametrize(
  ('name', 'collection'),
  [
    ('tile.npz', 'layout:own'),
    ('layout.npz', 'tile:own'),
    ('zero.pb', 'tile:own'),
    ('zero.pb', 'layout:own'),
    ('tile.pb', 'layout:own'),
    ('text.pb', 'tile:own'),
  ],
)
def test_wrong_file_leaves_nothing(tmp_path, name, collection):
  converting.save(tmp_path / 'tile.npz', testing.tile_arrays())
  converting.save(tmp_path / 'layout.npz', testing.layout_arrays())
  (tmp_path / 'zero.pb').write_bytes(b'')
  (tmp_path / 'text.pb').write_text('HloModule x\n')
  shutil.copy(testing.GOLDEN / 'corner/tile_sel.pb', tmp_path / 'tile.pb')
  with pytest.raises(errors.InputError) as caught:
    converting.run(tmp_path / name, tmp_path / 'o', converting.options(collection))
  assert caught.value.path == str(tmp_path / name)
  assert caught.value.expected
  assert '\n' not in str(caught.value)
  assert not (tmp_path / 'o').exists()


def test_bad_files_are_skipped(tmp_path):
  reasons = damage(tmp_path / 'in')
  os.remove(tmp_path / 'in/good.npz')
  paths = converting.save_tiles(tmp_path / 'in', 9)
  opts = converting.options(on_error='skip', split='train')
  manifest = converting.run(tmp_path / 'in', tmp_path / 'o', opts)
  assert converting.read_all(tmp_path / 'o') == converting.in_memory(paths, opts)[0]
  assert manifest.splits['train'].modules == 9
  assert manifest.rejected_inputs == {
    'damaged or truncated npz file': 1,
    'empty file': 1,
    'not an npz file': 1,
  }
  rows = [
    json.loads(line)
    for line in (tmp_path / 'o/rejected.jsonl').read_text(encoding='utf-8').splitlines()
  ]
  assert {row['path']: row['reason'] for row in rows} == {
    str(tmp_path / 'in' / name): reason for name, reason in reasons.items()
  }
  assert len(rows) == 3
  text = description.describe(manifest)
  assert all(
    f'1 input rejected (see rejected.jsonl): {reason}' in text for reason in reasons.values()
  )


def test_array_at_fault_is_listed(tmp_path):
  converting.save_tiles(tmp_path / 'in', 2)
  converting.save(tmp_path / 'in/oob.npz', testing.tile_arrays(edge_index=np.array([[9, 0]])))
  converting.run(tmp_path / 'in', tmp_path / 'o', converting.options(on_error='skip'))
  (row,) = map(json.loads, (tmp_path / 'o/rejected.jsonl').read_text().splitlines())
  assert row['path'].endswith('oob.npz')
  assert (row['where'], row['found'], row['expected']) == ('edge_index[0, 0]', '9', '0 to 3')


def test_module_too_large_for_a_record(tmp_path):
  converting.save_tiles(tmp_path / 'in', 2)
  path = converting.save(tmp_path / 'in/large.npz', testing.tile_arrays(n=100))
  manifest = converting.run(
    tmp_path / 'in', tmp_path / 'o', converting.options(on_error='skip', max_bytes=30_000)
  )
  assert manifest.rejected_inputs == {'module too large for a record': 1}
  with pytest.raises(errors.InputError, match='module too large for a record') as caught:
    converting.run(tmp_path / 'in', tmp_path / 'p', converting.options(max_bytes=30_000))
  assert caught.value.path == path


def test_all_bad(tmp_path):
  damage(tmp_path / 'in')
  os.remove(tmp_path / 'in/good.npz')
  (tmp_path / 'in/zero2.npz').write_bytes(b'')
  with pytest.raises(errors.InputError, match='no usable module') as caught:
    converting.run(tmp_path / 'in', tmp_path / 'o', converting.options(on_error='skip'))
  assert json.loads(caught.value.found) == {
    'damaged or truncated npz file': 1,
    'empty file': 2,
    'not an npz file': 1,
  }
  assert not (tmp_path / 'o').exists()


@pytest.mark.parametrize('on_error', ['fail', 'skip'])
def test_name_twice_in_a_split(tmp_path, on_error):
  paths = [
    converting.save(tmp_path / f'in/{folder}/m.npz', testing.tile_arrays(seed=i))
    for i, folder in enumerate('ab')
  ]
  opts = converting.options(split='train', num_shards=5, on_error=on_error)
  with pytest.raises(errors.InputError, match='module_id occurs twice') as caught:
    converting.run(tmp_path / 'in/*/*.npz', tmp_path / 'o', opts)
  assert all(path in str(caught.value) for path in paths)
  assert not (tmp_path / 'o').exists()


def test_name_in_two_splits(tmp_path):
  for split in ('train', 'valid'):
    converting.save(tmp_path / f'in/{split}/m.npz', testing.tile_arrays())
  manifest = converting.run(tmp_path / 'in', tmp_path / 'o', converting.options())
  assert {name: split.modules for name, split in manifest.splits.items()} == {
    'train': 1,
    'valid': 1,
  }
