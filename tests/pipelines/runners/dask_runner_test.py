"""Tests of pipelines.runners.dask_runner: all parts of a batch pipeline run as with Beam."""

import logging
import operator
import os
import time

import apache_beam as beam
from apache_beam.options import pipeline_options
from apache_beam.runners import runner as runner_lib
from apache_beam.testing import util
import pytest

from tpu_graphs import errors

distributed = pytest.importorskip('distributed', reason='needs the extra dask')
dask_runner = pytest.importorskip('pipelines.runners.dask_runner')

pytestmark = pytest.mark.slow


def local_cluster(workers):
  return distributed.LocalCluster(
    n_workers=workers,
    threads_per_worker=1,
    processes=False,
    protocol='tcp',
    host='127.0.0.1',
    dashboard_address=':0',
    silence_logs=logging.CRITICAL,
  )


@pytest.fixture(scope='module')
def cluster():
  """A cluster of two threads in this process."""
  with local_cluster(2) as found:
    yield found


@pytest.fixture
def make(cluster):
  """Makes a pipeline for the cluster with more options, if given."""

  def pipeline(*args):
    options = pipeline_options.PipelineOptions(
      [f'--dask_client_address={cluster.scheduler_address}', *args]
    )
    return beam.Pipeline(dask_runner.DaskRunner(), options)

  return pipeline


class OddAndEven(beam.DoFn):
  def process(self, number):
    yield beam.pvalue.TaggedOutput('odd', number) if number % 2 else number


class Sum(beam.DoFn):
  """A step that yields the sum of a bundle at its end."""

  def start_bundle(self):
    self._sum = 0

  def process(self, number):
    self._sum += number

  def finish_bundle(self):
    yield beam.transforms.window.GlobalWindows.windowed_value(self._sum)


def test_create(make):
  for values in ([], [7], [3, 1, 2, 2]):
    with make() as pipeline:
      util.assert_that(pipeline | beam.Create(values), util.equal_to(values))


def test_each_tag_has_its_own(make):
  with make() as pipeline:
    both = (
      pipeline
      | beam.Create(range(10))
      | beam.ParDo(OddAndEven()).with_outputs('odd', 'none', main='even')
    )
    util.assert_that(both.even, util.equal_to([0, 2, 4, 6, 8]), 'even')
    util.assert_that(both.odd, util.equal_to([1, 3, 5, 7, 9]), 'odd')
    util.assert_that(both.none, util.equal_to([]), 'none')


@pytest.mark.parametrize('partitions', [1, 3, 20])
def test_outputs_at_the_end_of_bundles(make, partitions):
  with make(f'--dask_npartitions={partitions}') as pipeline:
    sums = pipeline | beam.Create(range(20)) | beam.Reshuffle() | beam.ParDo(Sum())
    util.assert_that(sums | beam.combiners.Count.Globally(), util.equal_to([partitions]), 'bundles')
    util.assert_that(sums | beam.CombineGlobally(sum), util.equal_to([190]), 'sum')


def test_grouping_by_equal_keys(make):
  pairs = [('a', 1), (('b', 2), 2), (None, 3), ('a', 4), (('b', 2), 5), (7, 6), (b'a', 7)]
  with make() as pipeline:
    groups = (
      pipeline
      | beam.Create(pairs)
      | beam.GroupByKey()
      | beam.MapTuple(lambda key, values: (key, sorted(values)))
    )
    util.assert_that(
      groups, util.equal_to([('a', [1, 4]), (('b', 2), [2, 5]), (None, [3]), (7, [6]), (b'a', [7])])
    )


def test_combining(make):
  with make() as pipeline:
    numbers = pipeline | beam.Create(range(10))
    by_key = numbers | beam.Map(lambda i: (i % 3, i)) | beam.CombinePerKey(sum)
    util.assert_that(by_key, util.equal_to([(0, 18), (1, 12), (2, 15)]), 'per key')
    util.assert_that(
      numbers | beam.Filter(lambda i: i > 99) | beam.CombineGlobally(sum),
      util.equal_to([0]),
      'nothing',
    )
    util.assert_that(numbers | beam.combiners.Top.Smallest(2), util.equal_to([[0, 1]]), 'top')
    util.assert_that(
      (numbers, numbers) | beam.Flatten() | beam.Distinct(), util.equal_to(range(10)), 'distinct'
    )


def test_side_inputs(make):
  with make() as pipeline:
    numbers = pipeline | 'Numbers' >> beam.Create([1, 2, 3])
    top = numbers | beam.CombineGlobally(max)
    empty = numbers | beam.Filter(lambda i: i > 99)
    found = numbers | 'Sides' >> beam.Map(
      lambda i, top, every, none, negative, plain: (
        i,
        top,
        sorted(every),
        none,
        negative[i],
        plain,
      ),
      beam.pvalue.AsSingleton(top),
      every=beam.pvalue.AsIter(numbers),
      none=beam.pvalue.AsList(empty),
      negative=beam.pvalue.AsDict(numbers | beam.Map(lambda i: (i, -i))),
      plain='x',
    )
    util.assert_that(found, util.equal_to([(i, 3, [1, 2, 3], [], -i, 'x') for i in (1, 2, 3)]))


def test_steps_whose_outputs_nobody_takes_run(make, tmp_path):
  with make() as pipeline:
    _ = pipeline | beam.Create(['a', 'b']) | beam.Map(lambda name: (tmp_path / name).touch())
  assert sorted(os.listdir(tmp_path)) == ['a', 'b']


def test_state(make):
  pipeline = make()
  _ = pipeline | beam.Create([1])
  result = pipeline.run()
  assert result.wait_until_finish() == result.state == runner_lib.PipelineState.DONE


def sleep_and_write(seconds, path):
  time.sleep(seconds)
  with open(path, 'a') as file:
    file.write('x')


def test_nothing_runs_on_after_a_failure(make, tmp_path):
  """Checks that running tasks are waited for, and that other tasks never begin."""
  path = tmp_path / 'written'
  pipeline = make('--dask_npartitions=8')
  starts = pipeline | beam.Create(range(8)) | beam.Reshuffle()
  _ = starts | 'Sleep' >> beam.Map(lambda i: sleep_and_write(1, path))
  _ = pipeline | 'Wrong' >> beam.Create([0]) | beam.Map(lambda i: operator.truediv(1, i))
  result = pipeline.run()
  with pytest.raises(ZeroDivisionError):
    result.wait_until_finish()
  assert result.state == runner_lib.PipelineState.FAILED
  written = path.read_text() if path.exists() else ''
  time.sleep(1.5)
  assert (path.read_text() if path.exists() else '') == written
  assert len(written) < 8


def test_time_is_up(make):
  pipeline = make()
  _ = pipeline | beam.Create([2]) | beam.Map(time.sleep)
  result = pipeline.run()
  with pytest.raises(TimeoutError):
    result.wait_until_finish(duration=100)


def test_what_it_cannot_do_is_refused(make):
  pipeline = make()
  _ = pipeline | beam.io.Read(beam.io.iobase.BoundedSource())
  with pytest.raises(errors.InputError, match=r'Read.*cannot run'):
    pipeline.run()


def test_no_scheduler(monkeypatch):
  monkeypatch.setattr(dask_runner, '_SECONDS_FOR_WORKERS', 1)
  pipeline = beam.Pipeline(
    dask_runner.DaskRunner(),
    pipeline_options.PipelineOptions(
      ['--dask_client_address=tcp://127.0.0.1:1', '--dask_connection_timeout=1']
    ),
  )
  _ = pipeline | beam.Create([1])
  with pytest.raises(errors.InputError, match='Dask cluster cannot be used'):
    pipeline.run()


def test_a_scheduler_without_workers(monkeypatch):
  monkeypatch.setattr(dask_runner, '_SECONDS_FOR_WORKERS', 0.5)
  with local_cluster(0) as cluster:
    pipeline = beam.Pipeline(
      dask_runner.DaskRunner(),
      pipeline_options.PipelineOptions([f'--dask_client_address={cluster.scheduler_address}']),
    )
    _ = pipeline | beam.Create([1])
    with pytest.raises(errors.InputError, match='Dask cluster cannot be used'):
      pipeline.run()
