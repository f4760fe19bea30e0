"""Tests of pipelines.convert: selected configs, spilled records, too many bad inputs."""

import collections
import io
import json
import os
import pickle
import tracemalloc

import apache_beam as beam
from apache_beam.io import filesystem
from apache_beam.io import localfilesystem
from apache_beam.runners.portability.fn_api_runner import fn_runner
import numpy as np
import pytest

from pipelines import convert
from pipelines.conversion import description
from pipelines.conversion import options as options_lib
from pipelines.conversion import output
from pipelines.conversion import spill
from pipelines.conversion import steps
from pipelines.conversion import transform
from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import records
from tpu_graphs.modules import selection
from tpu_graphs.modules import streams
from tpu_graphs.sources import npz

COLLECTION = {'tile': 'tile:own', 'layout': 'layout:own'}


def save(path, arrays, how=np.savez_compressed):
  path.parent.mkdir(parents=True, exist_ok=True)
  how(path, **arrays)
  return str(path)


def run(inputs, directory, kind='tile', per_record=1000, max_record_bytes=1 << 20, **kwargs):
  own = {name: kwargs.pop(name) for name in ('overwrite', 'beam_args') if name in kwargs}
  options = options_lib.ConvertOptions(
    COLLECTION[kind],
    records=records.RecordOptions(per_record, max_record_bytes),
    **{'split': 'train', 'num_shards': 3, **kwargs},
  )
  return convert.convert(inputs=[str(inputs)], directory=str(directory), options=options, **own)


def tree(directory):
  return {
    str(path.relative_to(directory)): path.read_bytes()
    for path in directory.rglob('*')
    if path.is_file()
  }


def modules(directory):
  """Returns module_id -> module, from the records of train."""
  parts = collections.defaultdict(list)
  for path in sorted(directory.glob('train/*')):
    with open(path, 'rb') as file:
      while data := records.read_tfrecord(file):
        part = records.decode(data)
        parts[part.module_id].append(part)
  return {name: records.merge(found) for name, found in parts.items()}


@pytest.fixture
def layouts(tmp_path):
  """Layout files with up to 41 configs, many of them equal."""
  for i in range(6):
    c = 1 + 8 * i
    level = np.random.default_rng(i).integers(0, 3, c)[:, np.newaxis, np.newaxis]
    values = level * np.ones((1, 2, 18), np.float32)
    runtime = np.random.default_rng(i).permutation(c) + 2
    arrays = testing.layout_arrays(
      n=3 + i, c=c, node_config_feat=values, seed=i, config_runtime=runtime
    )
    save(tmp_path / f'in/m{i}.npz', arrays, np.savez if i % 2 else np.savez_compressed)
  return tmp_path / 'in'


# The configs that are kept.


@pytest.mark.parametrize(
  'configs',
  [
    selection.ConfigSelection(max_configs=5),
    selection.ConfigSelection(max_configs=5, seed=1),
    selection.ConfigSelection(max_configs=3, sampling='spread'),
    selection.ConfigSelection(dedup='min'),
    selection.ConfigSelection(max_configs=2, sampling='fastest_biased', dedup='mean'),
  ],
  ids=str,
)
def test_configs_are_selected(layouts, tmp_path, configs):
  manifest = run(layouts, tmp_path / 'o', 'layout', per_record=4, configs=configs)
  found = modules(tmp_path / 'o')
  total = deduplicated = sampled_out = 0
  for path in layouts.iterdir():
    with open(path, 'rb') as file:
      expected = selection.select(npz.stream(file, path=str(path)), configs)
      module = expected.stream.load()
    total += module.num_configs
    deduplicated += expected.deduplicated
    sampled_out += expected.sampled_out
    for name in ('config_id', 'config_runtime', 'node_config_feat'):
      np.testing.assert_array_equal(getattr(found[path.stem], name), getattr(module, name))
  assert manifest.splits['train'].configs == total
  assert (manifest.deduplicated_configs, manifest.sampled_out_configs) == (
    deduplicated,
    sampled_out,
  )
  text = description.describe(manifest)
  assert (
    f'{deduplicated} configs left out: another of the module has the same features' in text
  ) == bool(deduplicated)
  assert (f'{sampled_out} configs left out: not in the sample of its module' in text) == bool(
    sampled_out
  )
  statistics = json.loads((tmp_path / 'o/statistics.json').read_text())['features']
  assert statistics['node_config_feat']['count'] == 2 * total


def test_options_are_in_the_manifest(layouts, tmp_path):
  manifest = run(
    layouts,
    tmp_path / 'o',
    'layout',
    max_array_bytes=10**6,
    configs=selection.ConfigSelection(max_configs=7, sampling='spread', dedup='min'),
  )
  names = ('max_array_bytes', 'max_configs', 'config_sampling', 'dedup_configs')
  assert [manifest.options[name] for name in names] == [10**6, 7, 'spread', 'min']
  directory_lib.open_directory(str(tmp_path / 'o'))


def test_bytes_do_not_depend_on_blocks_or_temporary_files(layouts, tmp_path, monkeypatch):
  run(layouts, tmp_path / 'o', 'layout', per_record=4)
  monkeypatch.setattr(streams, 'BLOCK_BYTES', 100)
  monkeypatch.setattr(streams, 'IN_MEMORY_BYTES', -1)
  run(layouts, tmp_path / 'p', 'layout', per_record=4)
  assert tree(tmp_path / 'o') == tree(tmp_path / 'p')


def test_array_limit(tmp_path):
  small = save(tmp_path / 'in/small.npz', testing.tile_arrays(c=2))
  large = save(tmp_path / 'in/large.npz', testing.tile_arrays(c=100))
  manifest = run(tmp_path / 'in', tmp_path / 'o', max_array_bytes=9_000, on_error='skip')
  assert manifest.rejected_inputs == {'array too large': 1}
  with pytest.raises(errors.InputError, match='array too large') as caught:
    run(tmp_path / 'in', tmp_path / 'p', max_array_bytes=9_000)
  assert (caught.value.path, caught.value.where) == (large, 'config_feat')
  assert list(modules(tmp_path / 'o')) == ['small']
  assert os.path.exists(small)


def test_array_limit_holds_for_hlo(tmp_path):
  with pytest.raises(errors.InputError) as caught:
    run(testing.GOLDEN / 'corner/tile_sel.pb', tmp_path / 'o', max_array_bytes=100)
  assert '<= 100 bytes' in caught.value.expected


@pytest.mark.parametrize('how', [np.savez, np.savez_compressed])
def test_fingerprint_of_the_source_depends_on_the_content(tmp_path, how):
  def fingerprint(name, *values):
    for i, value in enumerate(values):
      arrays = testing.layout_arrays(n=20, c=200, nc=20)
      arrays['node_config_feat'][100, 10, 5] = value
      save(tmp_path / name / f'm{i}.npz', arrays, how)
    manifest = run(
      tmp_path / name,
      tmp_path / f'{name}_data',
      'layout',
      configs=selection.ConfigSelection(max_configs=1),
    )
    return manifest.source['fingerprint']

  assert fingerprint('one', 3, 4) == fingerprint('other_order', 4, 3)
  # The fingerprints differ although the conversion does not read the value.
  assert len({fingerprint(f'n{value}', 3, value) for value in range(3)}) == 3


# Memory.


def test_elements_are_small_and_memory_is_bounded(tmp_path, monkeypatch):
  """Converts 18 MB of int8 configs, with small elements and a few blocks in memory.

  No element between the steps has more than 2 kB, and no step holds more than some blocks.
  """
  for name in ('BLOCK_BYTES', 'IN_MEMORY_BYTES'):
    monkeypatch.setattr(streams, name, 1 << 18)
  monkeypatch.setattr(npz, '_BLOCK_BYTES', 1 << 18)
  path = save(
    tmp_path / 'm.npz',
    testing.layout_arrays(
      c=8000,
      node_config_ids=np.zeros(128, int),
      node_config_feat=np.ones((8000, 128, 18), np.float32),
    ),
  )
  directory = str(tmp_path / 'o')
  options = options_lib.ConvertOptions(
    'layout:own', split='train', num_shards=1, records=records.RecordOptions(max_configs=100)
  )
  read, write = steps.ReadModules(directory, options), steps.WriteShard(directory)
  tracemalloc.start()
  read.start_bundle()
  found = list(read.process(path))
  read.finish_bundle()
  items = [item for item in found if isinstance(item, steps.Item)]
  (shard,) = write.process((('train', 0, 1), items))
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert (shard.records, shard.configs) == (80, 8000)
  assert shard.bytes > 18_000_000
  assert max(len(pickle.dumps(element)) for element in found) < 2000
  assert peak < 5 << 20


# Spilled records.


def test_places(tmp_path):
  # These are more files than a reader holds open.
  writers = [spill.Writer(str(tmp_path)) for _ in range(40)]
  places = [(writer.write(data), data) for data in (b'', b'abc', bytes(5000)) for writer in writers]
  for writer in writers:
    writer.close()
  np.random.default_rng(0).shuffle(places)
  with spill.Reader(str(tmp_path)) as reader:
    assert [reader.read(place) for place, _ in places] == [data for _, data in places]
    assert len(reader._files) == spill._MAX_OPEN
    opened = list(reader._files.values())
  assert all(file.closed for file in opened)


def test_nothing_written_leaves_no_file(tmp_path):
  spill.Writer(str(tmp_path)).close()
  assert not list(tmp_path.iterdir())


def test_place_that_is_cut_off(tmp_path):
  writer = spill.Writer(str(tmp_path))
  place = writer.write(b'abcdef')
  writer.close()
  os.truncate(os.path.join(output.spill_folder(str(tmp_path)), place.name), 5)
  with spill.Reader(str(tmp_path)) as reader, pytest.raises(OSError, match='cut off'):
    reader.read(place)


def test_a_step_that_fails_and_runs_again(layouts, tmp_path, monkeypatch):
  """Checks that nothing is used of what the failed attempt has written."""
  run(layouts, tmp_path / 'o', 'layout', per_record=4)
  process, calls = steps.ReadModules.process, []

  def twice(self, path):
    if not calls:
      calls.append(list(process(self, path)))
      # This bundle is given up, and another begins.
      self.finish_bundle()
      self.start_bundle()
    return process(self, path)

  monkeypatch.setattr(steps.ReadModules, 'process', twice)
  run(layouts, tmp_path / 'p', 'layout', per_record=4)
  assert calls
  assert tree(tmp_path / 'p') == tree(tmp_path / 'o')


def test_nothing_spilled_is_left(layouts, tmp_path):
  run(layouts, tmp_path / 'o', 'layout')
  assert not os.path.exists(output.spill_folder(str(tmp_path / 'o')))


def test_spilled_files_of_an_interrupted_run_are_removed(layouts, tmp_path):
  directory = str(tmp_path / 'o')
  run(layouts, tmp_path / 'expected', 'layout')
  output.begin(directory, request={}, overwrite=False)
  for _ in range(2):
    writer = spill.Writer(directory)
    writer.write(b'half')
    writer.close()
  run(layouts, directory, 'layout', overwrite=True)
  assert tree(tmp_path / 'o') == tree(tmp_path / 'expected')
  assert sorted(path.name for path in (tmp_path / 'o').iterdir()) == [
    'manifest.json',
    'rejected.jsonl',
    'schema.pbtxt',
    'statistics.json',
    'train',
  ]


def test_foreign_file_among_spilled_ones_is_not_removed(tmp_path):
  output.begin(str(tmp_path), request={}, overwrite=False)
  (tmp_path / '.spill').mkdir()
  (tmp_path / '.spill/notes.txt').write_text('x')
  with pytest.raises(errors.InputError, match='not a dataset'):
    output.begin(str(tmp_path), request={}, overwrite=True)
  assert (tmp_path / '.spill/notes.txt').exists()


# Too many bad inputs.


def bad_and_good(folder, bad, good):
  for i in range(bad):
    folder.mkdir(exist_ok=True)
    (folder / f'bad{i}.npz').write_bytes(b'')
  for i in range(good):
    save(folder / f'good{i}.npz', testing.tile_arrays(seed=i))


@pytest.mark.parametrize(
  ('bad', 'good', 'most', 'fails'),
  [
    (1, 3, 0.25, False),
    (1, 3, 0.24, True),
    (0, 2, 0.0, False),
    (1, 9, 0.0, True),
    (3, 1, 0.75, False),
  ],
)
def test_share_of_rejected_inputs(tmp_path, bad, good, most, fails):
  bad_and_good(tmp_path / 'in', bad, good)
  listing = tmp_path / 'o.rejected.jsonl'
  if not fails:
    manifest = run(tmp_path / 'in', tmp_path / 'o', on_error='skip', max_rejected_fraction=most)
    assert sum(manifest.rejected_inputs.values()) == bad
    assert not listing.exists()
    return
  with pytest.raises(errors.InputError, match='too many inputs rejected') as caught:
    run(tmp_path / 'in', tmp_path / 'o', on_error='skip', max_rejected_fraction=most)
  assert not (tmp_path / 'o').exists()
  assert f'found {bad} of {bad + good}, ' in str(caught.value)
  assert str(caught.value).endswith(f'; {listing} lists them')
  rows = [json.loads(line) for line in listing.read_text().splitlines()]
  assert [row['path'] for row in rows] == [str(tmp_path / f'in/bad{i}.npz') for i in range(bad)]


def test_bad_modules_of_one_file_count_as_one_input(tmp_path):
  (tmp_path / 'in').mkdir()
  # The file has three modules, all of them too large.
  os.symlink(testing.GOLDEN / 'corner/tile_sel.pb', tmp_path / 'in/a.pb')
  save(tmp_path / 'in/good.npz', testing.tile_arrays(n=1, c=1))
  manifest = run(
    tmp_path / 'in',
    tmp_path / 'o',
    on_error='skip',
    max_rejected_fraction=0.5,
    max_record_bytes=2500,
  )
  assert manifest.rejected_inputs == {'module too large for a record': 3}


def test_file_that_cannot_be_read_counts_as_an_input(tmp_path, monkeypatch):
  bad_and_good(tmp_path / 'in', 1, 1)
  opened = beam.io.filesystems.FileSystems.open

  def fail(path, *args, **kwargs):
    if 'bad' in path:
      raise OSError('denied')
    return opened(path, *args, **kwargs)

  monkeypatch.setattr(beam.io.filesystems.FileSystems, 'open', fail)
  manifest = run(tmp_path / 'in', tmp_path / 'o', on_error='skip', max_rejected_fraction=0.5)
  assert manifest.rejected_inputs == {'cannot read file': 1}
  assert (manifest.source['files'], manifest.source['bytes']) == (
    2,
    (tmp_path / 'in/good0.npz').stat().st_size,
  )


def test_listing_of_wholly_bad_input(tmp_path):
  bad_and_good(tmp_path / 'in', 2, 0)
  for _ in range(2):  # The second run replaces the list of the first run.
    with pytest.raises(errors.InputError, match='no usable module') as caught:
      run(tmp_path / 'in', f'{tmp_path}/o/', on_error='skip')
    assert caught.value.fix == f'{tmp_path}/o.rejected.jsonl lists them'
    assert len((tmp_path / 'o.rejected.jsonl').read_text().splitlines()) == 2
  assert sorted(path.name for path in tmp_path.iterdir()) == ['in', 'o.rejected.jsonl']


@pytest.mark.parametrize('share', [-0.1, 1.1, float('nan')])
def test_not_a_share(share):
  with pytest.raises(errors.InputError, match='not a share'):
    options_lib.ConvertOptions('tile:own', max_rejected_fraction=share)


# Other file systems.


class RemoteFileSystem(filesystem.FileSystem):
  """A file system where remote://PATH is the local /PATH; files can only be written in sequence."""

  @classmethod
  def scheme(cls):
    return 'remote'

  def _local(self):
    return localfilesystem.LocalFileSystem(None)

  def join(self, basepath, *paths):
    return '/'.join([basepath.rstrip('/'), *paths])

  def split(self, path):
    return tuple(path.rsplit('/', 1))

  def has_dirs(self):
    return False

  def mkdirs(self, path):
    pass

  def _list(self, dir_or_prefix):
    root = path_of(dir_or_prefix).rstrip('/')
    for folder, _, names in os.walk(root if os.path.isdir(root) else os.path.dirname(root)):
      for name in names:
        path = os.path.join(folder, name)
        if path.startswith(root):
          yield filesystem.FileMetadata(f'remote:/{path}', os.path.getsize(path))

  def create(self, path, mime_type=None, compression_type=None):
    os.makedirs(os.path.dirname(path_of(path)), exist_ok=True)
    return io.BufferedWriter(Sequential(path_of(path), 'w'))

  def open(self, path, mime_type=None, compression_type=None):
    return open(path_of(path), 'rb')

  def exists(self, path):
    return os.path.isfile(path_of(path))

  def rename(self, source_file_names, destination_file_names):
    for source, target in zip(source_file_names, destination_file_names, strict=True):
      os.replace(path_of(source), path_of(target))

  def delete(self, paths):
    for path in paths:
      os.remove(path_of(path))

  def copy(self, source_file_names, destination_file_names):
    raise NotImplementedError

  def size(self, path):
    return os.path.getsize(path_of(path))

  def last_updated(self, path):
    return os.path.getmtime(path_of(path))

  def checksum(self, path):
    raise NotImplementedError

  def metadata(self, path):
    return filesystem.FileMetadata(path, self.size(path))


class Sequential(io.FileIO):
  def seekable(self):
    return False

  def seek(self, *args):
    raise OSError('cannot seek')


def path_of(path):
  return path.removeprefix('remote:/')


def test_another_file_system(layouts, tmp_path):
  local = run(layouts, tmp_path / 'o', 'layout', per_record=4)
  remote = run(f'remote:/{layouts}', f'remote:/{tmp_path}/p', 'layout', per_record=4)
  assert remote.splits == local.splits
  assert remote.source == local.source
  assert tree(tmp_path / 'p') == tree(tmp_path / 'o')


# Counters.


def test_counters(layouts, tmp_path):
  save(layouts / 'short.npz', testing.layout_arrays(config_runtime=np.array([0, 0, 5, 6, 7, 8])))
  (layouts / 'zero.npz').write_bytes(b'')
  directory = str(tmp_path / 'o')
  output.begin(directory, request={}, overwrite=False)
  options = options_lib.ConvertOptions('layout:own', split='train', num_shards=1, on_error='skip')
  pipeline = beam.Pipeline(fn_runner.FnApiRunner())
  _ = pipeline | beam.Create([f'{layouts}/*.npz']) | transform.Convert(directory, options)
  result = pipeline.run()
  result.wait_until_finish()
  metrics = result.metrics().query(beam.metrics.MetricsFilter().with_namespace('convert'))
  found = {counter.key.metric.name: counter.committed for counter in metrics['counters']}
  assert found == {
    'files': 8,
    'bytes': sum(path.stat().st_size for path in layouts.iterdir()),
    'modules': 7,
    'configs': sum(1 + 8 * i for i in range(6)) + 4,
    'dropped_runs': 2,
    'rejected': 1,
  }
  (duration,) = metrics['distributions']
  assert (duration.key.metric.name, duration.committed.count) == ('milliseconds_per_file', 8)


@pytest.mark.parametrize('lost', [1, None])
def test_records_that_a_runner_loses_are_not_published(layouts, tmp_path, monkeypatch, lost):
  """Loses one record, or all records."""
  process, seen = steps.AssignShards.process, []

  def lossy(self, item, keys):
    seen.append(item)
    if lost is not None and len(seen) > lost:
      yield from process(self, item, keys)

  monkeypatch.setattr(steps.AssignShards, 'process', lossy)
  with pytest.raises(errors.InputError, match='records lost between the steps') as caught:
    run(layouts, tmp_path / 'out', 'layout')
  assert len(seen) > 1
  assert str(len(seen)) in caught.value.expected
  assert not (tmp_path / 'out').exists()
