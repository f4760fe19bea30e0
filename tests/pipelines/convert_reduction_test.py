"""Tests of pipelines.convert with --keep_hops: the dataset describes the reduced graphs."""

import dataclasses
import json
import shutil

import apache_beam as beam
from apache_beam.runners.portability.fn_api_runner import fn_runner
import numpy as np
import pytest

from pipelines.conversion import description
from pipelines.conversion import options as options_lib
from pipelines.conversion import output
from pipelines.conversion import steps
from pipelines.conversion import transform
from tests import converting
from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import records
from tpu_graphs.dataset import statistics
from tpu_graphs.modules import reduction
from tpu_graphs.modules import selection
from tpu_graphs.modules import streams
from tpu_graphs.sources import npz
from tpu_graphs.sources import readers

both = pytest.mark.parametrize('rest', reduction.RESTS)


def options(hops, rest=None, **kwargs):
  return converting.options(
    'layout:own', **{'split': 'train', 'num_shards': 2, **kwargs}, keep_hops=hops, rest=rest
  )


def arrays(i):
  """Returns a chain of 5 to 10 ops in three computations, with 9 configs.

  Two ops in its middle are configurable.
  """
  n = 5 + i
  splits = np.array([[0, 2, 4, n]])
  return testing.layout_arrays(
    n=n, c=9, seed=i, node_config_ids=np.array([3, 2]), node_splits=splits
  )


@pytest.fixture(scope='module')
def layouts(tmp_path_factory):
  folder = tmp_path_factory.mktemp('layouts')
  for i in range(6):
    converting.save(folder / f'm{i}.npz', arrays(i))
  return folder


def reduced(folder, hops, rest):
  """Returns module_id -> the module in its file, and the reduced module."""
  wholes = [npz.load(path) for path in folder.glob('*.npz')]
  return {whole.module_id: (whole, reduction.keep_hops(whole, hops, rest=rest)) for whole in wholes}


def modules(directory):
  """Returns module_id -> module, from all records."""
  found = {}
  for split in ('train', 'valid', 'test'):
    for data in converting.read_split(directory, split):
      part = records.decode(data)
      found.setdefault(part.module_id, []).append(part)
  return {name: records.merge(parts) for name, parts in found.items()}


def check_equal(found, expected):
  for field in dataclasses.fields(expected):
    # Records do not hold these fields; `computation` replaces `node_splits`.
    if field.name not in ('node_splits', 'dropped_runs', 'unknown_opcodes', 'default_config'):
      np.testing.assert_array_equal(
        getattr(found, field.name), getattr(expected, field.name), err_msg=field.name
      )


@both
@pytest.mark.parametrize('hops', [0, 1, 2])
def test_records_statistics_and_counts(layouts, tmp_path, hops, rest):
  manifest = converting.run(layouts, tmp_path / 'o', options(hops, rest, max_configs=4))
  pairs = reduced(layouts, hops, rest)
  found = modules(tmp_path / 'o')
  assert found.keys() == pairs.keys()
  for name, (_, expected) in pairs.items():
    check_equal(found[name], expected)
  assert (manifest.options['keep_hops'], manifest.options['rest']) == (hops, rest)
  removed = [
    sum(getattr(whole, what) - getattr(small, what) for whole, small in pairs.values())
    for what in ('num_ops', 'num_edges')
  ]
  assert [manifest.removed_ops, manifest.removed_edges] == removed
  assert min(removed) > 0
  sizes = manifest.splits['train'].total_sizes
  # A module with 9 configs becomes three records.
  assert sizes['ops'] == 3 * sum(small.num_ops for _, small in pairs.values())
  assert sizes['config_ops'] == 3 * 2 * len(pairs)
  total = statistics.merge_all(statistics.Statistics.of(pairs[name][1]) for name in sorted(pairs))
  converting.assert_close(json.loads((tmp_path / 'o/statistics.json').read_text()), total.to_json())


@both
def test_nothing_is_far_enough_to_be_removed(layouts, tmp_path, rest):
  manifest = converting.run(layouts, tmp_path / 'o', options(99, rest))
  converting.run(layouts, tmp_path / 'whole', options(None))
  assert converting.read_all(tmp_path / 'o') == converting.read_all(tmp_path / 'whole')
  assert (manifest.removed_ops, manifest.removed_edges) == (0, 0)
  assert 'removed' not in description.describe(manifest)


def test_drop_is_the_default():
  assert options(1) == options(1, 'drop')
  assert options(None).rest is None


@pytest.mark.parametrize(
  ('kwargs', 'where'),
  [
    ({'hops': -1}, 'hops'),
    ({'hops': 1, 'rest': 'merge'}, 'rest'),
    ({'hops': None, 'rest': 'drop'}, '--rest'),
  ],
)
def test_wrong_options(kwargs, where):
  with pytest.raises(errors.InputError) as caught:
    options(**kwargs)
  assert caught.value.where == where


def test_tile_modules_have_nothing_to_keep():
  with pytest.raises(errors.InputError, match='tile modules have no configurable ops') as caught:
    options_lib.ConvertOptions('tile:own', keep_hops=1)
  assert caught.value.where == '--keep_hops'


@both
def test_corner_cases(tmp_path, rest):
  """Checks one op, no edges, all ops configurable, nothing configurable, and no measurement."""
  no_edges = np.zeros((0, 2), int)
  raw = {
    'one': testing.layout_arrays(n=1, nc=1),
    'unconnected': testing.layout_arrays(edge_index=no_edges),
    'all': testing.layout_arrays(nc=4),
    'none': testing.layout_arrays(nc=0),
    'unmeasured': testing.layout_arrays(config_runtime=np.zeros(6, int)),
  }
  for name, content in raw.items():
    converting.save(tmp_path / f'in/{name}.npz', content)
  manifest = converting.run(tmp_path / 'in', tmp_path / 'o', options(0, rest))
  found = modules(tmp_path / 'o')
  ops = {name: module.num_ops for name, module in found.items()}
  left = 2 if rest == 'drop' else 3
  assert ops == {'one': 1, 'unconnected': left, 'all': 4, 'none': 4, 'unmeasured': left}
  assert manifest.removed_ops == 2 * (4 - left)
  assert not found['unmeasured'].is_measured
  assert found['unconnected'].num_edges == 0


@both
def test_split_and_unknown_opcodes_are_those_of_the_whole_graph(layouts, tmp_path, rest):
  shutil.copytree(layouts, tmp_path / 'in')
  shutil.copy(testing.GOLDEN / 'modules/misc_ops_unopt.pb', tmp_path / 'in')
  found = []
  for hops in (None, 0):
    opts = options(hops, rest if hops == 0 else None, split=None)
    manifest = converting.run(tmp_path / 'in', tmp_path / f'o{hops}', opts)
    found.append(
      (
        {name: part.modules for name, part in manifest.splits.items()},
        manifest.unknown_opcodes,
        {
          split: sorted(
            map(records.decode_module_id, converting.read_split(tmp_path / f'o{hops}', split))
          )
          for split in manifest.splits
        },
      )
    )
  assert found[0] == found[1]


def test_unknown_opcodes_of_removed_ops_are_counted(tmp_path, monkeypatch):
  whole = dataclasses.replace(
    npz.load(converting.save(tmp_path / 'm.npz', testing.layout_arrays())),
    unknown_opcodes={'erf': 1},
    node_opcode=np.array([1, 2, 3, 0]),
  )
  monkeypatch.setattr(
    steps.readers, 'stream', lambda *args, **kwargs: ([streams.ConfigStream.of(whole)], {})
  )
  manifest = converting.run(tmp_path / 'm.npz', tmp_path / 'o', options(0))
  assert manifest.removed_ops == 2
  assert manifest.unknown_opcodes == {'erf': 1}


@both
def test_configs_are_selected_as_without(layouts, tmp_path, rest):
  opts = dataclasses.replace(
    options(0, rest), configs=selection.ConfigSelection(max_configs=3, seed=1)
  )
  converting.run(layouts, tmp_path / 'o', opts)
  converting.run(layouts, tmp_path / 'whole', dataclasses.replace(opts, keep_hops=None, rest=None))
  whole = modules(tmp_path / 'whole')
  for name, module in modules(tmp_path / 'o').items():
    assert module.num_ops < whole[name].num_ops
    for field in ('config_id', 'config_runtime', 'node_config_feat'):
      np.testing.assert_array_equal(getattr(module, field), getattr(whole[name], field))


def test_configs_are_still_streamed(layouts, tmp_path, monkeypatch):
  """Checks that the graph is reduced without a config in memory, and blocks are read as before."""
  seen, keep_hops = [], reduction.keep_hops
  monkeypatch.setattr(
    reduction,
    'keep_hops',
    lambda module, *args, **kwargs: (
      seen.append(module.num_configs) or keep_hops(module, *args, **kwargs)
    ),
  )
  converting.run(layouts, tmp_path / 'o', options(1))
  monkeypatch.setattr(streams, 'BLOCK_BYTES', 50)
  monkeypatch.setattr(streams, 'IN_MEMORY_BYTES', -1)
  converting.run(layouts, tmp_path / 'p', options(1))
  assert seen == [0] * 12
  assert converting.tree(tmp_path / 'o') == converting.tree(tmp_path / 'p')


@testing.needs_shared
@both
def test_protobuf(tmp_path, rest):
  path = testing.SHARED / 'data/module_tuning_data_layout.pb'
  [whole] = readers.from_file(path, kind='layout').modules
  converting.run(path, tmp_path / 'o', options(2, rest))
  [found] = modules(tmp_path / 'o').values()
  assert found.num_ops < whole.num_ops
  check_equal(found, reduction.keep_hops(whole, 2, rest=rest))


def test_counters(layouts, tmp_path):
  directory = str(tmp_path / 'o')
  output.begin(directory, request={}, overwrite=False)
  pipeline = beam.Pipeline(fn_runner.FnApiRunner())
  _ = pipeline | beam.Create([f'{layouts}/*.npz']) | transform.Convert(directory, options(0))
  result = pipeline.run()
  result.wait_until_finish()
  metrics = result.metrics().query(beam.metrics.MetricsFilter().with_namespace('convert'))
  found = {counter.key.metric.name: counter.committed for counter in metrics['counters']}
  pairs = reduced(layouts, 0, 'drop').values()
  assert found['removed_ops'] == sum(whole.num_ops - small.num_ops for whole, small in pairs) > 0
  assert (
    found['removed_edges'] == sum(whole.num_edges - small.num_edges for whole, small in pairs) > 0
  )


@pytest.mark.slow
@both
def test_two_processes_give_the_same_bytes(layouts, tmp_path, rest):
  converting.run(layouts, tmp_path / 'o', options(1, rest))
  converting.run(layouts, tmp_path / 'p', options(1, rest), beam_args=converting.TWO_PROCESSES)
  assert converting.tree(tmp_path / 'o') == converting.tree(tmp_path / 'p')
