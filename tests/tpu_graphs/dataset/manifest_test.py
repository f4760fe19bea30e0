"""Tests of tpu_graphs.dataset.manifest: sums of shards, other versions, and damaged manifests."""

import dataclasses
import json

import pytest

from tpu_graphs import errors
from tpu_graphs.dataset import manifest
from tpu_graphs.modules import feature_choices

_SHARDS = (
  manifest.Shard(
    name='train/part-00001-of-00002.tfrecord',
    records=3,
    modules=1,
    measured=0,
    configs=40,
    bytes=1000,
    crc32c='0000abcd',
    max_sizes={'ops': 9, 'configs': 30},
    total_sizes={'ops': 20, 'configs': 40},
  ),
  manifest.Shard(
    name='train/part-00000-of-00002.tfrecord',
    records=2,
    modules=2,
    measured=2,
    configs=50,
    bytes=500,
    crc32c='12345678',
    max_sizes={'ops': 12, 'configs': 25},
    total_sizes={'ops': 24, 'configs': 50},
    without_configs=1,
  ),
)


def _manifest():
  return manifest.Manifest(
    collection='tile:xla',
    kind='tile',
    options={'seed': 0, 'split': None},
    splits={'train': manifest.Split.of(_SHARDS)},
    rejected_inputs={'empty file': 1},
    skipped_modules={},
    dropped_runs={'time < 2 ns': 7},
    source={'files': 3, 'bytes': 9, 'fingerprint': 'é'},
    unknown_opcodes={'topk': 12, '': 3},
    deduplicated_configs=1,
    sampled_out_configs=2,
    removed_ops=3,
    removed_edges=4,
  )


def test_split_sums_its_shards():
  split = manifest.Split.of(iter(_SHARDS))
  assert split == manifest.Split(
    records=5,
    modules=3,
    measured=2,
    configs=90,
    bytes=1500,
    max_sizes={'ops': 12, 'configs': 30},
    total_sizes={'ops': 44, 'configs': 90},
    shards=(_SHARDS[1], _SHARDS[0]),
    without_configs=1,
  )


def test_round_trip():
  original = _manifest()
  assert manifest.loads(original.dumps(), path='p') == original


def test_text_is_stable_json():
  content = json.loads(_manifest().dumps())
  assert content['format_version'] == 1
  assert [shard['name'] for shard in content['splits']['train']['shards']] == sorted(
    shard.name for shard in _SHARDS
  )
  assert _manifest().dumps() == manifest.loads(_manifest().dumps(), path='p').dumps()


def test_other_version():
  text = _manifest().dumps().replace('"format_version": 1', '"format_version": 2')
  with pytest.raises(errors.InputError, match='dataset of another format') as caught:
    manifest.loads(text, path='d/manifest.json')
  assert (caught.value.path, caught.value.where, caught.value.found, caught.value.expected) == (
    'd/manifest.json',
    'format_version',
    '2',
    '1',
  )


# Fields that manifests of the first version lack.
_EARLIER = {
  'unknown_opcodes',
  'without_configs',
  'layout_padding',
  'extra_features',
  'deduplicated_configs',
  'sampled_out_configs',
  'removed_ops',
  'removed_edges',
}


def _strip(content):
  if isinstance(content, dict):
    return {name: _strip(value) for name, value in content.items() if name not in _EARLIER}
  return [_strip(value) for value in content] if isinstance(content, list) else content


def test_manifest_of_the_first_version():
  text = json.dumps(_strip(json.loads(_manifest().dumps())))
  assert not any(name in text for name in _EARLIER)
  read = manifest.loads(text, path='p')
  assert read.choices == feature_choices.PUBLISHED
  assert read.unknown_opcodes == {}
  assert (
    read.deduplicated_configs,
    read.sampled_out_configs,
    read.removed_ops,
    read.removed_edges,
  ) == (0, 0, 0, 0)
  assert read.splits['train'].without_configs == 0
  assert read.splits['train'].records == 5


def test_choices():
  choices = feature_choices.FeatureChoices(
    -1, (feature_choices.NodeFeatures(name='é', columns=('a', 'b'), source='no_such_package.x:f'),)
  )
  text = dataclasses.replace(_manifest(), options={'seed': 0, **choices.to_json()}).dumps()
  assert manifest.loads(text, path='p').choices == choices


@pytest.mark.parametrize(
  'options',
  [
    {'layout_padding': 3},
    {'layout_padding': None},
    {'extra_features': 5},
    {'extra_features': [{}]},
    None,
    [],
    {'extra_features': [{'name': '', 'columns': ['a'], 'source': 'a:b'}]},
    {'extra_features': [{'name': 'a', 'columns': 'a', 'source': 'a:b'}]},
    {'extra_features': [{'name': 'a', 'columns': ['a'], 'source': None}]},
  ],
)
def test_damaged_choices(options):
  content = {**json.loads(_manifest().dumps()), 'options': options}
  with pytest.raises(errors.InputError) as caught:
    manifest.loads(json.dumps(content), path='d/manifest.json')
  assert caught.value.path == 'd/manifest.json'


def _without(name):
  content = json.loads(_manifest().dumps())
  del content[name]
  return json.dumps(content)


def _with(shard):
  content = json.loads(_manifest().dumps())
  content['splits']['train']['shards'] = [shard]
  return json.dumps(content)


@pytest.mark.parametrize(
  'text',
  [
    '',
    '{',
    '[]',
    'null',
    '<html>',
    _manifest().dumps()[:200],
    _without('splits'),
    _without('kind'),
    _manifest().dumps().replace('"dropped_runs"', '"dropped"'),
    _with(5),
    _with({'name': 'x'}),
    _with(None),
  ],
)
def test_damaged(text):
  with pytest.raises(errors.InputError) as caught:
    manifest.loads(text, path='d/manifest.json')
  assert (caught.value.reason, caught.value.path) == ('damaged manifest', 'd/manifest.json')
  assert caught.value.found is not None


@pytest.mark.parametrize(
  'change', [{'records': 0}, {'records': 99}, {'records': 'x'}, {'total_sizes': {}}]
)
def test_split_that_is_not_the_sum_of_its_shards(change):
  content = json.loads(_manifest().dumps())
  content['splits']['train'].update(change)
  with pytest.raises(errors.InputError, match='damaged manifest') as caught:
    manifest.loads(json.dumps(content), path='d/manifest.json')
  assert 'not the sum of its shards' in caught.value.found


@pytest.mark.parametrize(('kind', 'collection'), [('layout', 'tile:xla'), ('foo', 'foo:xla')])
def test_kind_that_does_not_fit_the_collection(kind, collection):
  content = {**json.loads(_manifest().dumps()), 'kind': kind, 'collection': collection}
  with pytest.raises(errors.InputError) as caught:
    manifest.loads(json.dumps(content), path='d/manifest.json')
  assert caught.value.path == 'd/manifest.json'
