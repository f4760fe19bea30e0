"""Tests of tpu_graphs.dataset.export: export undoes convert, and replaces only its own files."""

import errno
import importlib.util
import json
import os
import pathlib
import shutil
import sys
import weakref

import numpy as np
import pytest

from pipelines import convert
from pipelines.conversion import options as options_lib
from tests import testing
from tests import user_features
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import export
from tpu_graphs.dataset import records
from tpu_graphs.hlo import protos
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import npz

needs_pyg = pytest.mark.skipif(
  not (importlib.util.find_spec('torch') and importlib.util.find_spec('torch_geometric')),
  reason='needs PyTorch Geometric: pip install torch torch_geometric',
)
_OPTIONS = {'num_shards': 2, 'records': records.RecordOptions(max_configs=4)}
_NAMES = ('train/a', 'train/b.c', 'train/größe 数据', 'valid/a', 'test/d')


def sources(kind):
  """Returns name -> arrays of modules of all sorts.

  The modules have one record or several in different shards; some have dropped runs, and some are
  not measured.
  """
  runtimes = {'train/b.c': np.array([0, 5, 7, 1, 9]), 'test/d': np.zeros(11, int)}
  return {
    name: testing.arrays(
      kind,
      n=3 + i,
      c=len(runtimes.get(name, range(3 * i + 2))),
      seed=i,
      **({'config_runtime': runtimes[name]} if name in runtimes else {}),
      **(
        {'config_runtime_normalizers': np.ones(11, int)}
        if kind == 'tile' and name == 'test/d'
        else {}
      ),
      **({'node_splits': np.array([[0, 1, 1, 3 + i]])} if kind == 'layout' else {}),
    )
    for i, name in enumerate(_NAMES)
  }


@pytest.fixture(scope='module')
def dataset(kind, tmp_path_factory):
  """Returns the path of a dataset directory with `sources`."""
  return testing.convert_arrays(
    tmp_path_factory.mktemp(f'dataset-{kind}'), kind, sources(kind), **_OPTIONS
  )


def files(folder):
  return {
    path.relative_to(folder).as_posix(): path.read_bytes()
    for path in pathlib.Path(folder).rglob('*')
    if path.is_file()
  }


def refused(data, output, **options):
  """Exports where that must fail and change nothing; returns the error."""
  before = files(output.parent)
  with pytest.raises(errors.InputError) as caught:
    export.export(data, output, **{'form': 'npz', **options})
  assert files(output.parent) == before
  assert not list(output.parent.rglob('.export.*'))
  return caught.value


def load(path):
  with np.load(path) as arrays:
    return dict(arrays)


# npz files.


def test_arrays_come_back(kind, dataset, tmp_path):
  exported = export.export(dataset, tmp_path, form='npz')
  root = tmp_path / 'npz' / kind / 'x'
  assert set(files(tmp_path)) == {
    f'npz/{kind}/x/{name}'
    for name in (
      *(f'{name}.npz' for name in _NAMES),
      'train/index.json',
      'valid/index.json',
      'test/index.json',
    )
  }
  for name, arrays in sources(kind).items():
    found = load(root / f'{name}.npz')
    measured = arrays['config_runtime'] > 1
    if measured.any() and not measured.all():
      np.testing.assert_array_equal(found.pop('config_id'), np.flatnonzero(measured))
      for part in (
        'config_runtime',
        'config_feat',
        'config_runtime_normalizers',
        'node_config_feat',
      ):
        arrays = {**arrays, **({part: arrays[part][measured]} if part in arrays else {})}
    # `npz.save` always writes node_splits.
    arrays.setdefault('node_splits', np.array([[0, len(arrays['node_opcode'])]]))
    assert set(found) == set(arrays), name
    for part, array in arrays.items():
      np.testing.assert_array_equal(found[part], array, err_msg=f'{name} {part}')
      assert found[part].dtype == array.dtype, part
  assert [
    (split.name, split.folder, split.modules, split.configs) for split in exported.splits
  ] == [
    ('train', str(root / 'train'), 3, 2 + 3 + 8),
    ('valid', str(root / 'valid'), 1, 11),
    ('test', str(root / 'test'), 1, 11),
  ]
  assert [split.bytes for split in exported.splits] == [
    sum(path.stat().st_size for path in (root / split.name).glob('*.npz'))
    for split in exported.splits
  ]
  assert (exported.collection, exported.left_out) == (f'{kind}:x', ())


def test_convert_gives_the_same_dataset_again(kind, dataset, tmp_path):
  export.export(dataset, tmp_path, form='npz')
  again = tmp_path / 'again'
  convert.convert(
    inputs=[str(tmp_path / 'npz')],
    directory=str(again),
    options=options_lib.ConvertOptions(collection=f'{kind}:x', **_OPTIONS),
  )
  shards = {
    name: data
    for name, data in files(again).items()
    if name.endswith(('tfrecord', 'statistics.json'))
  }
  assert len(shards) == 7
  assert shards == {name: data for name, data in files(dataset).items() if name in shards}


@testing.needs_shared
@pytest.mark.parametrize('collection', ['tile:xla', 'layout:xla:default', 'layout:xla:random'])
def test_published_files_come_back(collection, tmp_path):
  source = testing.SHARED / 'data/npz'
  convert.convert(
    inputs=[str(source)],
    directory=str(tmp_path / 'data'),
    options=options_lib.ConvertOptions(
      collection=collection, records=records.RecordOptions(max_configs=300)
    ),
  )
  export.export(tmp_path / 'data', tmp_path, form='npz')
  found = list((tmp_path / 'npz').rglob('*.npz'))
  folder = collection.replace(':', '/')
  assert {path.relative_to(tmp_path / 'npz') for path in found} == {
    path.relative_to(source) for path in (source / folder).rglob('*.npz')
  }
  for path in found:
    arrays, expected = load(path), load(source / path.relative_to(tmp_path / 'npz'))
    assert set(arrays) - set(expected) <= {'node_splits'}
    for name, array in expected.items():
      np.testing.assert_array_equal(arrays[name], array, err_msg=f'{path} {name}')
      assert arrays[name].dtype == array.dtype


@testing.needs_shared
def test_programs_of_hlo_come_back(tmp_path):
  """Only the fields that records do not hold are lost; see `records.decode`."""
  path = testing.SHARED / 'data/op_tuning_data.pb'
  convert.convert(
    inputs=[str(path)],
    directory=str(tmp_path / 'data'),
    options=options_lib.ConvertOptions(collection='tile:own', split='train'),
  )
  export.export(tmp_path / 'data', tmp_path, form='npz')
  convert.convert(
    inputs=[str(tmp_path / 'npz')],
    directory=str(tmp_path / 'again'),
    options=options_lib.ConvertOptions(collection='tile:own', num_shards=1),
  )
  shard = 'train/part-00000-of-00001.tfrecord'
  assert (tmp_path / 'again' / shard).read_bytes() == (tmp_path / 'data' / shard).read_bytes()


def test_unmeasured_modules_are_as_in_public_test_files(dataset, kind, tmp_path):
  export.export(dataset, tmp_path, form='npz', split='test')
  arrays = load(tmp_path / 'npz' / kind / 'x/test/d.npz')
  assert not arrays['config_runtime'].any()
  assert kind == 'layout' or (arrays['config_runtime_normalizers'] == 1).all()


@pytest.mark.parametrize('form', ['npz', pytest.param('pyg', marks=needs_pyg)])
def test_index(kind, dataset, tmp_path, form):
  export.export(dataset, tmp_path, form=form, split='train')
  index = json.loads((tmp_path / form / kind / 'x/train/index.json').read_text('utf-8'))
  modules = index.pop('modules')
  assert index == {
    'format_version': 1,
    'form': form,
    'collection': f'{kind}:x',
    'kind': kind,
    'split': 'train',
    'layout_padding': 0,
    'extra_columns': [],
  }
  suffix = {'npz': 'npz', 'pyg': 'pt'}[form]
  config_ops = 2 if kind == 'layout' else 0
  assert modules == [
    {
      'file': f'{name}.{suffix}',
      'module_id': name,
      'ops': n,
      'edges': n - 1,
      'config_ops': config_ops,
      'configs': c,
      'is_measured': True,
    }
    for name, n, c in (('a', 3, 2), ('b.c', 4, 3), ('größe 数据', 5, 8))
  ]


def test_the_losses_of_npz_files_are_reported(tmp_path):
  choices = feature_choices.FeatureChoices(
    layout_padding=-1, extra=(user_features.degree, user_features.rank)
  )
  node_feat = np.zeros((4, 140), np.float32)
  # These are shapes of one dimension, which have a layout.
  node_feat[:, 21] = node_feat[:, 27] = node_feat[:, 28] = 5
  data = testing.convert_arrays(
    tmp_path, 'layout', {'train/a': testing.layout_arrays(node_feat=node_feat)}, choices=choices
  )
  exported = export.export(data, tmp_path, form='npz')
  assert exported.left_out == (
    'layouts are padded with 0 as published, not with -1; '
    'convert --layout_padding=-1 restores this padding',
    'extra features degree (operands, consumers é); '
    'convert --extra_features=tests.user_features:degree computes them again, unless they need HLO',
    'extra features shape (rank); '
    'convert --extra_features=tests.user_features:rank computes them again, unless they need HLO',
  )
  np.testing.assert_array_equal(load(tmp_path / 'npz/layout/x/train/a.npz')['node_feat'], node_feat)
  convert.convert(
    inputs=[str(tmp_path / 'npz')],
    directory=str(tmp_path / 'again'),
    options=options_lib.ConvertOptions(collection='layout:x', choices=choices),
  )
  shard = 'train/part-00000-of-00001.tfrecord'
  assert (tmp_path / 'again' / shard).read_bytes() == (pathlib.Path(data) / shard).read_bytes()


def test_no_more_than_one_record_is_held(dataset, tmp_path, monkeypatch):
  seen, saved = [], []
  decode = records.decode

  def decode_alone(*args, **kwargs):
    assert not any(reference() for reference in seen)
    module = decode(*args, **kwargs)
    seen.append(weakref.ref(module))
    return module

  def save(stream, path):
    assert not any(reference() for reference in [*seen, *saved])
    saved.append(weakref.ref(stream))
    npz.save_stream(stream, path)

  monkeypatch.setattr(records, 'decode', decode_alone)
  monkeypatch.setitem(export._FORMS, 'npz', ('.npz', save))
  export.export(dataset, tmp_path, form='npz')
  assert len(seen) == sum(
    split.records for split in directory_lib.open_directory(dataset).manifest.splits.values()
  )
  assert len(seen) > len(saved) == 5


# PyTorch Geometric.


@needs_pyg
def test_data_objects(kind, dataset, tmp_path):
  import torch
  from torch_geometric import data as pyg_data

  export.export(dataset, tmp_path, form='pyg')
  export.export(dataset, tmp_path, form='npz')
  for name in _NAMES:
    data = torch.load(tmp_path / f'pyg/{kind}/x/{name}.pt', weights_only=False)
    module = npz.load(tmp_path / f'npz/{kind}/x/{name}.npz')
    assert isinstance(data, pyg_data.Data)
    assert data.validate()
    assert data.num_nodes == module.num_ops
    expected = {
      'x': module.node_feat,
      'op_code': module.node_opcode.astype(np.int64),
      'computation': module.computation,
      'edge_index': np.array([[operand, consumer] for consumer, operand in module.edge_index]).T,
      'y': module.config_runtime,
      'config_id': module.config_id,
      'config_feat': module.config_feat,
      'config_runtime_normalizers': module.config_runtime_normalizers,
      'node_config_index': module.node_config_ids,
      'node_config_feat': module.node_config_feat,
    }
    expected = {name: array for name, array in expected.items() if array is not None}
    assert set(data.keys()) == {'module_id', *expected}
    assert data.module_id == name.partition('/')[2]
    for key, array in expected.items():
      np.testing.assert_array_equal(data[key].numpy(), array, err_msg=key)
      assert data[key].numpy().dtype == array.dtype, key


@needs_pyg
def test_batches_add_offsets_to_op_indices(tmp_path):
  from torch_geometric import data as pyg_data

  modules = []
  for name, ids, n in (('a', [0, 2], 3), ('b', [1, 3], 5)):
    npz_path = tmp_path / f'{name}.npz'
    np.savez(npz_path, **testing.layout_arrays(n=n, node_config_ids=np.array(ids)))
    modules.append(npz.load(npz_path))
  batch = pyg_data.Batch.from_data_list([export.to_data(module) for module in modules])
  assert batch.node_config_index.tolist() == [0, 2, 4, 6]
  assert batch.edge_index.tolist() == [[0, 1, 3, 4, 5, 6], [1, 2, 4, 5, 6, 7]]
  assert batch.module_id == ['a', 'b']


@needs_pyg
def test_extra_features_are_a_tensor_of_their_own(tmp_path):
  data = testing.convert_arrays(
    tmp_path,
    'tile',
    {'train/a': testing.tile_arrays()},
    choices=(feature_choices.FeatureChoices(extra=(user_features.degree,))),
  )
  import torch

  exported = export.export(data, tmp_path, form='pyg')
  assert exported.left_out == ()
  folder = tmp_path / 'pyg/tile/x/train'
  assert torch.load(folder / 'a.pt', weights_only=False).extra_feat.tolist() == [
    [0, 1],
    [1, 1],
    [1, 1],
    [1, 0],
  ]
  assert json.loads((folder / 'index.json').read_text('utf-8'))['extra_columns'] == [
    'degree.operands',
    'degree.consumers é',
  ]


def test_without_pytorch_geometric(dataset, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'torch', None)
  error = refused(dataset, tmp_path / 'out', form='pyg')
  assert 'pip install torch torch_geometric' in str(error)
  assert not (tmp_path / 'out').exists()


# Data that cannot be exported.


def test_damaged_shard(dataset, tmp_path):
  shutil.copytree(dataset, tmp_path / 'data')
  path = next((tmp_path / 'data/train').iterdir())
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)
  error = refused(tmp_path / 'data', tmp_path / 'out')
  assert (error.path, error.reason) == (str(path), 'damaged record')
  assert not (tmp_path / 'out').exists()


def test_records_of_another_schema(dataset, tmp_path):
  """The checksums are right, so the fault shows only when the records are decoded."""
  shutil.copytree(dataset, tmp_path / 'data')
  path = next((tmp_path / 'data/train').iterdir())
  with open(path, 'rb') as file:
    content = [
      data.replace(b'nodes/op.opcode', b'nodes/op.opcodf')
      for data in iter(lambda: records.read_tfrecord(file), None)
    ]
  with open(path, 'wb') as file:
    records.write_tfrecords(file, content)
  error = refused(tmp_path / 'data', tmp_path / 'out')
  assert (error.path, error.reason, error.where) == (
    str(path),
    'feature missing in a record',
    'nodes/op.opcode',
  )
  assert not (tmp_path / 'out').exists()


def test_no_dataset(tmp_path):
  assert refused(tmp_path / 'nope', tmp_path / 'out').reason == 'no dataset'


def test_no_such_split(tmp_path):
  data = testing.convert_arrays(tmp_path, 'tile', {'valid/a': testing.tile_arrays()})
  assert refused(data, tmp_path / 'out', split='train').reason == 'split missing'


@pytest.mark.parametrize('name', ['a/b', '..'])
def test_names_that_are_not_file_names(name, tmp_path):
  module = protos.HloModuleProto(name=name)
  module.computations.add(id=1, root_id=2, name='main').instructions.add(id=2, opcode='parameter')
  (tmp_path / 'm.pb').write_bytes(module.SerializeToString())
  convert.convert(
    inputs=[str(tmp_path / 'm.pb')],
    directory=str(tmp_path / 'data'),
    options=options_lib.ConvertOptions(collection='layout:own', split='train'),
  )
  if name == 'a/b':
    error = refused(tmp_path / 'data', tmp_path / 'out')
    assert (error.where, error.reason) == ('module_id', 'name cannot be a file name')
    assert 'a/b' in error.found
  else:
    # The name is no problem here: convert has added a fingerprint to it.
    export.export(tmp_path / 'data', tmp_path / 'out', form='npz')
    assert len(list((tmp_path / 'out/npz/layout/own/train').glob('..*.npz'))) == 1


@pytest.mark.parametrize('collection', ['tile:..', 'tile:a:..:..:..:b', 'tile:a/b', 'tile:a::b'])
def test_collections_that_cannot_be_folders(collection, tmp_path):
  np.savez(tmp_path / 'a.npz', **testing.tile_arrays())
  convert.convert(
    inputs=[str(tmp_path / 'a.npz')],
    directory=str(tmp_path / 'data'),
    options=options_lib.ConvertOptions(collection=collection, split='train'),
  )
  error = refused(tmp_path / 'data', tmp_path / 'out')
  assert (error.where, error.reason) == ('collection', 'name cannot be a file name')


@pytest.mark.parametrize('output', ['', 'gs://bucket/out'])
def test_output_elsewhere(dataset, output, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(errors.InputError, match='output is not a local folder'):
    export.export(dataset, output, form='npz')
  assert not os.listdir(tmp_path)


def test_unknown_form(dataset, tmp_path):
  assert refused(dataset, tmp_path / 'out', form='csv').expected == 'npz or pyg'


# Outputs that exist already.


def test_an_export_is_replaced_only_with_overwrite(kind, dataset, tmp_path):
  out = tmp_path / 'out'
  export.export(dataset, out, form='npz')
  error = refused(dataset, out)
  assert (error.path, error.reason) == (str(out / 'npz' / kind / 'x/train'), 'output exists')
  assert '--overwrite' in error.fix
  expected = files(out)
  for split in module_lib.SPLITS:
    (out / 'npz' / kind / 'x' / split / 'index.json').write_text(
      (out / 'npz' / kind / 'x' / split / 'index.json').read_text('utf-8') + ' ', 'utf-8'
    )
  next((out / 'npz' / kind / 'x/train').glob('*.npz')).unlink()
  export.export(dataset, out, form='npz', overwrite=True)
  assert files(out) == expected
  assert os.listdir(out) == ['npz']


def test_splits_and_collections_lie_side_by_side(kind, dataset, tmp_path):
  out = tmp_path / 'out'
  (out / 'npz' / kind / 'y/train').mkdir(parents=True)
  (out / 'npz' / kind / 'y/train/foreign.npz').write_text('x')
  (out / 'npz' / kind / 'x/valid').mkdir(parents=True)  # An empty folder may be replaced.
  for split in module_lib.SPLITS:
    export.export(dataset, out, form='npz', split=split)
  assert refused(dataset, out, split='test').reason == 'output exists'
  together = files(out)
  assert together.pop(f'npz/{kind}/y/train/foreign.npz') == b'x'
  export.export(dataset, tmp_path / 'at once', form='npz')
  assert together == files(tmp_path / 'at once')


@pytest.mark.parametrize(
  'index', [None, '', '{}', '[]', '{"modules": [1]}', '{"modules": [{"file": "other.npz"}]}']
)
@pytest.mark.parametrize('overwrite', [False, True])
def test_files_of_others_are_left_alone(index, overwrite, tmp_path):
  data = testing.convert_arrays(tmp_path, 'tile', {'train/a': testing.tile_arrays()})
  folder = tmp_path / 'out/npz/tile/x/train'
  folder.mkdir(parents=True)
  (folder / 'measured.npz').write_text('for days')
  if index is not None:
    (folder / 'index.json').write_text(index)
  error = refused(data, tmp_path / 'out', overwrite=overwrite)
  assert (error.path, error.reason) == (str(folder), 'output exists and is not an export')


@pytest.mark.parametrize('overwrite', [False, True])
def test_a_file_in_place_of_a_folder(dataset, kind, overwrite, tmp_path):
  (tmp_path / 'out/npz' / kind / 'x').mkdir(parents=True)
  (tmp_path / 'out/npz' / kind / 'x/train').write_text('x')
  assert refused(dataset, tmp_path / 'out', overwrite=overwrite).found == 'Not a directory'
  (tmp_path / 'file').write_text('x')
  assert 'cannot write' in str(refused(dataset, tmp_path / 'file', overwrite=overwrite))


@pytest.mark.parametrize(
  'error', [OSError(errno.ENOSPC, 'No space left on device'), KeyboardInterrupt()]
)
@pytest.mark.parametrize('existing', [False, True])
def test_a_failed_export_changes_nothing(dataset, tmp_path, monkeypatch, error, existing):
  out = tmp_path / 'out'
  if existing:
    export.export(dataset, out, form='npz')
  before = files(tmp_path)
  written = []

  def save(stream, path):
    written.append(path)
    if len(written) == 4:
      raise error
    npz.save_stream(stream, path)

  monkeypatch.setitem(export._FORMS, 'npz', ('.npz', save))
  with pytest.raises(
    errors.InputError if isinstance(error, OSError) else KeyboardInterrupt
  ) as caught:
    export.export(dataset, out, form='npz', overwrite=True)
  assert isinstance(error, KeyboardInterrupt) or caught.value.found == 'No space left on device'
  assert len(written) == 4
  assert files(tmp_path) == before
  assert out.exists() == existing
  assert not list(tmp_path.rglob('.export.*'))
