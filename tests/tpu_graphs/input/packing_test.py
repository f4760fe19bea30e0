"""Tests of tpu_graphs.input.packing: naive loops are the oracles."""

import dataclasses
import itertools
import math
import shutil

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.input import packing


def _naive_next_fit(sizes, limits, ends):
  starts, sums = [], None
  for i, size in enumerate(sizes):
    if (
      i == 0
      or ends[i] != ends[i - 1]
      or any(a + b > limit for a, b, limit in zip(sums, size, limits, strict=True))
    ):
      starts.append(i)
      sums = [0] * len(limits)
    sums = [a + b for a, b in zip(sums, size, strict=True)]
  return starts


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_next_fit_equals_a_loop(data):
  dimensions = data.draw(st.integers(1, 3))
  blocks = data.draw(
    st.lists(
      st.lists(st.tuples(*[st.integers(0, 9)] * dimensions), max_size=12), min_size=1, max_size=4
    ).filter(any)
  )
  limits = data.draw(st.tuples(*[st.integers(0, 20)] * dimensions))
  sizes = list(itertools.chain(*blocks))
  ends = np.repeat(np.cumsum([len(block) for block in blocks]), [len(block) for block in blocks])
  found = packing.next_fit(
    tf.constant(sizes, tf.int64), tf.constant(limits, tf.int64), tf.constant(ends)
  )
  assert np.flatnonzero(found).tolist() == _naive_next_fit(sizes, limits, ends)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=8), st.integers(1, 4))
def test_shapes_have_the_least_padding(sizes, number):
  found = packing.least_padding(np.array(sizes), number)
  assert found == sorted(set(found))
  assert len(found) <= number

  def padded(rungs):
    return sum(min((rung for rung in rungs if rung >= size), default=math.inf) for size in sizes)

  possible = sorted({-(-size // 8) * 8 for size in sizes})
  assert padded(found) == min(
    padded(rungs) for rungs in itertools.combinations(possible, min(number, len(possible)))
  )


def test_shapes_of_very_many_sizes():
  sizes = np.arange(1, 100_000, 7)
  found = packing.least_padding(sizes, 4)
  assert len(found) == 4
  assert found[-1] == 100_000
  # The best ratio that is possible is 1.25.
  assert sum(np.array(found)[np.searchsorted(found, sizes)]) / sizes.sum() < 1.26


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_most_edges_of_any_segment(data):
  number = data.draw(st.integers(1, 12))
  length = data.draw(st.integers(1, number))
  op = st.integers(0, number - 1)
  edges = np.array(data.draw(st.lists(st.tuples(op, op).map(sorted), max_size=15)), int).reshape(
    -1, 2
  )
  most = max(
    sum(low >= start and high < start + length for low, high in edges)
    for start in range(number - length + 1)
  )
  assert packing._most_inside(edges[:, 0], edges[:, 1], number, length) == most


@pytest.fixture(scope='session')
def directory(kind, tmp_path_factory):
  rng = np.random.default_rng(0)
  sources = {
    f'train/m{i:02}': testing.arrays(kind, n=int(n), c=int(c), seed=i, nc=min(int(n), 3))
    for i, (n, c) in enumerate(rng.integers(1, 40, [50, 2]))
  }
  folder = tmp_path_factory.mktemp(f'packing_{kind}')
  return directory_lib.open_directory(testing.convert_arrays(folder, kind, sources, num_shards=5))


def test_sizes_are_those_of_the_records(directory):
  found = packing.read_sizes(directory, 'train')
  split = directory.split('train')
  assert dict(zip(('ops', 'edges', 'config_ops'), found.sizes.sum(axis=0), strict=True)) == {
    name: split.total_sizes[name] for name in ('ops', 'edges', 'config_ops')
  }
  assert found.configs.sum() == split.configs
  assert found.measured.all()
  for i, shard in enumerate(split.shards):
    np.testing.assert_array_equal(found.position[found.shard == i], np.arange(shard.records))
    assert found.sizes[found.shard == i, 0].max() == shard.max_sizes['ops']
  assert packing.read_sizes(directory, 'train') is found


def test_a_shard_of_another_length_is_named(directory):
  manifest = directory.manifest
  split = manifest.splits['train']
  shards = (
    *split.shards[:2],
    dataclasses.replace(split.shards[2], records=split.shards[2].records + 1),
    *split.shards[3:],
  )
  other = dataclasses.replace(
    directory,
    manifest=dataclasses.replace(
      manifest, splits={'train': dataclasses.replace(split, shards=shards)}
    ),
  )
  with pytest.raises(errors.InputError) as info:
    packing.read_sizes(other, 'train')
  assert info.value.reason == 'shard of wrong length'
  assert info.value.path.endswith(split.shards[2].name)


def test_a_damaged_shard_is_named(directory, tmp_path):
  split = directory.split('train')
  for shard in split.shards:
    path = tmp_path / shard.name
    path.parent.mkdir(exist_ok=True)
    shutil.copy(f'{directory.path}/{shard.name}', path)
  path = tmp_path / split.shards[1].name
  data = bytearray(path.read_bytes())
  data[40] ^= 1
  path.write_bytes(data)
  with pytest.raises(errors.InputError) as info:
    packing.read_sizes(dataclasses.replace(directory, path=str(tmp_path)), 'train')
  assert (info.value.reason, info.value.path) == ('damaged shard', str(path))


@pytest.mark.parametrize('shapes', [None, 1, 4])
@pytest.mark.parametrize('over', [{}, {'packs': 2, 'replicas': 2}, {'num_inputs': 3}])
def test_packs_of_any_epoch_fit_the_budgets(directory, shapes, over):
  options = packing.BatchOptions(batch_size=4, shapes=shapes)
  plan = packing.Plan(directory, 'train', options, **over)
  largest = dataclasses.astuple(plan.budgets[-1])
  for epoch in range(10):
    packed = plan._pack(tf.constant(epoch, tf.int64))
    assert (packed.totals.numpy() + [1, 1, 0, 0] <= largest).all()
    np.testing.assert_array_equal(np.sort(packed.items), np.arange(50))
    group = plan.packs * plan.replicas
    numbers = np.bincount(packed.inputs, minlength=plan.num_inputs)
    assert plan.batches_per_epoch(epoch) == max(-(-numbers // group))


def test_more_shapes_leave_less_padding(directory):
  filled = []
  for shapes in (1, 2, 4, 8):
    text = packing.Plan(
      directory, 'train', packing.BatchOptions(batch_size=2, shapes=shapes)
    ).describe()
    filled.append(int(text.split()[-2].rstrip('%')))
  assert filled == sorted(filled)
  assert filled[-1] > filled[0]


@pytest.mark.parametrize(('pool', 'rounds'), [(1, 1), (2, 2), (5, 5), (12, 6), (49, 7), (50, 1)])
@pytest.mark.parametrize('num_inputs', [1, 2])
def test_records_are_read_round_robin_and_leave_a_pool_at_random(
  directory, monkeypatch, pool, rounds, num_inputs
):
  split = directory.split('train')
  monkeypatch.setattr(packing, '_POOL_BYTES', pool * -(-split.bytes // split.records))
  plan = packing.Plan(directory, 'train', packing.BatchOptions(), num_inputs=num_inputs)
  assert plan.max_rounds == rounds
  sizes = packing.read_sizes(directory, 'train')
  orders = set()
  for epoch in range(3):
    for i in range(num_inputs):
      epoch_plan = plan.epoch(tf.constant(epoch, tf.int64), i)
      files = [
        [shard.name in path for shard in split.shards].index(True)
        for path in epoch_plan.files.numpy().astype(str)
      ]
      records = [np.flatnonzero(sizes.shard == file) for file in files]
      read = [
        record for turn in itertools.zip_longest(*records) for record in turn if record is not None
      ]
      held, left, ends = {}, [], []
      for number, start in enumerate(range(0, len(read), plan.block)):
        held |= dict(enumerate(read[start : start + plan.block], start=start))
        assert len(held) <= rounds * plan.block
        leaving = [place for place in held if epoch_plan.rounds[place] == number]
        places = epoch_plan.places[len(left) : len(left) + len(leaving)].numpy()
        assert sorted(places) == list(range(len(leaving)))
        left += [held.pop(leaving[place]) for place in places]
        ends.append(len(left))
      assert not held
      # All records are measured, so items are records.
      assert left == epoch_plan.items.numpy().tolist()
      assert [*ends, len(left)] == epoch_plan.round_ends.numpy().tolist()
      orders.add(tuple(left))
      assert pool == 1 or left != read
  assert pool == 1 or len(orders) == 3 * num_inputs


def test_chunks_are_in_the_order_of_reading_and_not_held(directory, monkeypatch):
  split = directory.split('train')
  monkeypatch.setattr(packing, '_POOL_BYTES', 16 * -(-split.bytes // split.records))
  plan = packing.Plan(
    directory, 'train', packing.BatchOptions(configs_per_module=100), chunked=True
  )
  assert (plan.block, plan.max_rounds) == (2, 1)
  packed = plan.epoch(tf.constant(5, tf.int64), 0)
  np.testing.assert_array_equal(packed.rounds, np.arange(50) // 2)
  np.testing.assert_array_equal(packed.places, np.arange(50) % 2)


def test_all_times_in_the_pool_are_as_likely(directory, monkeypatch):
  split = directory.split('train')
  monkeypatch.setattr(packing, '_POOL_BYTES', 4 * -(-split.bytes // split.records))
  plan = packing.Plan(directory, 'train', packing.BatchOptions())
  assert (plan.block, plan.max_rounds) == (1, 4)
  waits = np.array(
    [
      plan.epoch(tf.constant(epoch, tf.int64), 0).rounds.numpy()[:46] - np.arange(46)
      for epoch in range(40)
    ]
  )
  numbers = np.bincount(waits.ravel(), minlength=4)
  assert numbers.shape == (4,)
  assert (abs(numbers - waits.size / 4) < 5 * np.sqrt(waits.size / 4)).all()
