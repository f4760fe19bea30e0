"""Tests of tpu_graphs.modules.selection: the configs that are kept, against naive oracles."""

import dataclasses

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tests import testing
from tpu_graphs import errors
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import selection
from tpu_graphs.modules import streams

_SETTINGS = hypothesis.settings(max_examples=60, deadline=None)


def make(kind, runtimes, vectors=None, normalizers=None, module_id='m'):
  """Returns a stream; config i has runtimes[i], and features that depend only on vectors[i]."""
  c = len(runtimes)
  runtimes = np.array(runtimes, np.int64)
  vectors = np.arange(c) if vectors is None else np.array(vectors)
  arrays = testing.arrays(kind, n=3, c=c)
  if kind == 'tile':
    arrays['config_feat'] = np.repeat(vectors[:, np.newaxis], 24, axis=1).astype(np.float32)
    normal = np.full(c, 1000) if normalizers is None else np.array(normalizers, np.int64)
    arrays['config_runtime_normalizers'] = np.where(runtimes < 0, -1, normal)
  else:
    arrays['node_config_feat'] = np.zeros((c, 2, 18), np.int8)
    arrays['node_config_feat'][:, 1, 17] = vectors
  arrays['config_runtime'] = runtimes
  arrays['node_splits'] = np.array([0, 3])
  module = module_lib.Module(module_id=module_id, kind=kind, config_id=np.arange(c), **arrays)
  return streams.ConfigStream.of(module)


def sample(stream, number, sampling='uniform', seed=0):
  chosen = selection.ConfigSelection(max_configs=number, sampling=sampling, seed=seed)
  return selection.sample(stream, chosen).config_id.tolist()


# Samples.


@pytest.mark.parametrize('sampling', selection.SAMPLINGS)
@pytest.mark.parametrize('kind', module_lib.KINDS)
@hypothesis.given(
  total=st.integers(0, 20),
  number=st.integers(1, 22),
  measured=st.booleans(),
  seed=st.integers(0, 9),
)
@_SETTINGS
def test_any_sample(kind, sampling, total, number, measured, seed):
  runtimes = np.random.default_rng(seed).integers(2, 9, total) if measured else np.full(total, -1)
  stream = make(kind, runtimes)
  found = sample(stream, number, sampling, seed)
  assert len(found) == min(total, number)
  assert found == sorted(set(found))
  assert found == sample(stream, number, sampling, seed)
  kept = selection.sample(
    stream, selection.ConfigSelection(max_configs=number, sampling=sampling, seed=seed)
  ).load()
  whole = stream.load()
  for name in (
    'config_runtime',
    'config_id',
    'config_feat',
    'node_config_feat',
    'config_runtime_normalizers',
  ):
    if getattr(whole, name) is not None:
      np.testing.assert_array_equal(getattr(kept, name), getattr(whole, name)[found])


def test_spread_takes_even_ranks():
  runtimes = np.random.default_rng(1).permutation(11) + 2  # The rank is the runtime - 2.
  stream = make('layout', runtimes)
  for number, ranks in (
    (1, [0]),
    (2, [0, 10]),
    (3, [0, 5, 10]),
    (4, [0, 3, 6, 10]),
    (10, [0, *range(1, 9), 10]),
  ):
    found = sample(stream, number, 'spread')
    assert sorted(runtimes[found] - 2) == ranks


def test_equal_runtimes_rank_by_position():
  assert sample(make('layout', [5, 5, 5, 5, 5]), 3, 'spread') == [0, 2, 4]


def test_tile_ranks_by_relative_runtime():
  # The relative runtimes are 0.1, 0.5, 0.3 and 0.01.
  stream = make('tile', [100, 50, 90, 10], normalizers=[1000, 100, 300, 1000])
  assert sample(stream, 2, 'spread') == [1, 3]
  assert sample(stream, 3, 'spread') == [0, 1, 3]


@pytest.mark.parametrize('sampling', ['uniform', 'fastest_biased'])
def test_shares_of_a_sample(sampling):
  """Compares the share of seeds that sample each rank with draws of one config at a time."""
  total, number, repeats = 6, 3, 3000
  runtimes = np.array([7, 3, 9, 2, 8, 5])
  rank = np.argsort(np.argsort(runtimes))
  stream = make('layout', runtimes)
  found, expected, rng = np.zeros(total), np.zeros(total), np.random.default_rng(0)
  for seed in range(repeats):
    found[rank[sample(stream, number, sampling, seed)]] += 1
    weights = np.ones(total) if sampling == 'uniform' else 1 / np.arange(1, total + 1)
    for _ in range(number):
      drawn = rng.choice(total, p=weights / weights.sum())
      expected[drawn] += 1
      weights[drawn] = 0
  np.testing.assert_allclose(found / repeats, expected / repeats, atol=0.05)
  assert (np.diff(found) < -0.03 * repeats).all() == (sampling == 'fastest_biased')


def test_unmeasured_modules_are_sampled_uniformly():
  stream = make('layout', np.full(30, -1))
  assert (
    sample(stream, 10, 'spread')
    == sample(stream, 10, 'fastest_biased')
    == sample(stream, 10, 'uniform')
  )


def test_unmeasured_configs_count_as_slowest():
  assert sample(make('layout', [-1, 9, -1, 4, 7]), 3, 'spread') == [1, 2, 3]


def test_sample_depends_on_seed_and_module():
  runtimes = np.arange(2, 102)
  samples = {
    tuple(sample(make('layout', runtimes, module_id=name), 10, seed=seed))
    for name in ('a', 'b', 'c')
    for seed in range(3)
  }
  assert len(samples) == 9


def test_sample_reads_nothing():
  def read(rows):
    raise AssertionError('read')

  stream = dataclasses.replace(make('layout', range(2, 30)), read=read)
  for sampling in selection.SAMPLINGS:
    sample(stream, 5, sampling)


# Duplicates.


def naive(kind, runtimes, normalizers, vectors, dedup):
  """Returns (config_id, runtime) of the configs that are kept."""
  groups = {}
  for i, vector in enumerate(vectors):
    groups.setdefault(vector, []).append(i)
  result = []
  for members in groups.values():
    measured = [i for i in members if runtimes[i] >= 0]
    members = measured or members
    scale = [runtimes[i] / normalizers[i] if kind == 'tile' else runtimes[i] for i in members]
    kept = members[scale.index(min(scale))] if dedup == 'min' and measured else members[0]
    runtime = runtimes[kept]
    if dedup == 'mean' and len(measured) > 1:
      mean = sum(
        runtimes[i] * (normalizers[kept] / normalizers[i] if kind == 'tile' else 1) for i in members
      )
      runtime = max(2, round(mean / len(members)))
    result.append((kept, runtime))
  return sorted(result)


@pytest.mark.parametrize('dedup', selection.DEDUPS)
@pytest.mark.parametrize('kind', module_lib.KINDS)
@hypothesis.given(
  configs=st.lists(
    st.tuples(
      st.sampled_from([-1, 2, 3, 10, 11, 2**40]), st.sampled_from([1, 7, 100]), st.integers(0, 4)
    ),
    max_size=14,
  )
)
@_SETTINGS
def test_duplicates(kind, dedup, configs):
  runtimes, normalizers, vectors = zip(*configs, strict=True) if configs else ((), (), ())
  stream = make(kind, runtimes, vectors, normalizers)
  found = selection.deduplicate(stream, dedup)
  whole, kept = stream.load(), found.load()
  expected = (
    list(enumerate(runtimes))
    if dedup == 'off'
    else naive(kind, runtimes, normalizers, vectors, dedup)
  )
  assert list(zip(kept.config_id.tolist(), kept.config_runtime.tolist(), strict=True)) == expected
  rows = [row for row, _ in expected]
  for name in ('config_feat', 'node_config_feat', 'config_runtime_normalizers'):
    if getattr(whole, name) is not None:
      np.testing.assert_array_equal(getattr(kept, name), getattr(whole, name)[rows])


def test_mean_with_equal_normalizers_is_the_mean_of_the_runtimes():
  stream = make('tile', [100, 103, 7], [1, 1, 2], [7, 7, 7])
  # 101.5 is rounded to even.
  assert selection.deduplicate(stream, 'mean').config_runtime.tolist() == [102, 7]


def test_duplicates_over_several_blocks(monkeypatch):
  monkeypatch.setattr(streams, 'BLOCK_BYTES', 100)
  vectors = np.random.default_rng(0).integers(0, 20, 100)
  stream = make('layout', range(2, 102), vectors)
  _, first = np.unique(vectors, return_index=True)
  assert selection.deduplicate(stream, 'first').config_id.tolist() == sorted(first)


def test_minus_zero_is_zero():
  stream = make('tile', [3, 4], [0, 1])
  feat = np.zeros((2, 24), np.float32)
  feat[1] = -0.0
  stream = streams.ConfigStream.of(dataclasses.replace(stream.load(), config_feat=feat))
  assert selection.deduplicate(stream, 'first').num_configs == 1


def test_sample_holds_distinct_configs():
  stream = make('layout', range(2, 102), [0] * 95 + [1, 2, 3, 4, 5])
  chosen = selection.select(
    stream, selection.ConfigSelection(max_configs=4, sampling='spread', dedup='first')
  )
  assert chosen.stream.config_id.tolist() == [0, 95, 97, 99]
  assert (chosen.deduplicated, chosen.sampled_out) == (94, 2)
  nothing = selection.select(stream, selection.ConfigSelection())
  assert nothing.stream is stream
  assert (nothing.deduplicated, nothing.sampled_out) == (0, 0)


@pytest.mark.parametrize(
  'kwargs', [{'max_configs': 0}, {'max_configs': -1}, {'sampling': 'best'}, {'dedup': 'on'}]
)
def test_wrong_options(kwargs):
  with pytest.raises(errors.InputError):
    selection.ConfigSelection(**kwargs)
