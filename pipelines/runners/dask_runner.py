"""A runner for Dask clusters: `-- --runner=DaskRunner --dask_client_address=tcp://HOST:8786`.

Beam's own DaskRunner (2.77) gives each consumer of a step the outputs of all its tags, drops
outputs that a step yields at the end of a bundle, fails on side inputs, and reads all files in one
task. So this module uses Beam's options and DoFn machinery, and makes the graph of tasks itself. It
supports only what batch pipelines in the global window need: no windows, timestamps, state,
splittable DoFns or metrics.

A PCollection is a list of partitions, each a delayed list of elements. Grouping gathers a whole
PCollection in one task, so elements must be small; large data lies in files
(`pipelines/conversion/spill.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
import time
from typing import Any
import uuid
import zlib

import apache_beam as beam
from apache_beam import coders
from apache_beam import pipeline as pipeline_lib
from apache_beam import pvalue
from apache_beam.internal import pickler
from apache_beam.options import pipeline_options
from apache_beam.runners import common
from apache_beam.runners import runner
from apache_beam.runners.dask import dask_runner
from apache_beam.transforms import core
from apache_beam.transforms import sideinputs
from apache_beam.transforms import window
import dask

# The function dask.delayed hides the module of the same name, so the class is imported by name.
from dask.delayed import Delayed
import distributed

from tpu_graphs import errors

_SECONDS_FOR_WORKERS = 30  # The first worker must be there by then.
_PARTITIONS_PER_THREAD = 4  # Files differ in size, so several smaller parts balance the load.

Partitions = list[Delayed]


class DaskRunner(runner.PipelineRunner):
  """A runner of batch pipelines on the scheduler that `--dask_client_address` names.

  Without the flag it starts a cluster on this machine.
  """

  def run_pipeline(
    self, pipeline: beam.Pipeline, options: pipeline_options.PipelineOptions
  ) -> _Result:
    dask_options = options.view_as(dask_runner.DaskOptions)
    given = dask_options.get_all_options(drop_default=True, current_only=True)
    given.pop('partition_size', None)
    num_partitions = given.pop('npartitions', None)
    try:
      client = distributed.Client(**given)
    except OSError as error:
      raise _unusable(error) from error
    try:
      client.wait_for_workers(1, timeout=_SECONDS_FOR_WORKERS)
      if not num_partitions:
        num_partitions = _PARTITIONS_PER_THREAD * sum(client.nthreads().values())
      tasks = _Tasks(num_partitions)
      pipeline.visit(tasks)
      futures = client.compute(tasks.ends, optimize_graph=False)
      return _Result(client, futures, tasks.prefix)
    except BaseException as error:
      client.close()
      if isinstance(error, TimeoutError):
        raise _unusable(error) from error
      raise


def _unusable(error: Exception) -> errors.InputError:
  return errors.InputError(
    'Dask cluster cannot be used',
    where='--dask_client_address',
    found=error,
    fix='start dask scheduler and dask worker, and name the address of the scheduler',
  )


class _Result(runner.PipelineResult):
  """A pipeline that runs on a cluster."""

  def __init__(
    self, client: distributed.Client, futures: Sequence[distributed.Future], prefix: str
  ):
    super().__init__(runner.PipelineState.RUNNING)
    self._client = client
    self._futures = futures
    self._prefix = prefix

  def wait_until_finish(self, duration: int | None = None) -> str:
    """Waits until no task of the pipeline is left on the cluster.

    Args:
      duration: Number of milliseconds after which the pipeline is cancelled.

    Raises:
      TimeoutError: the pipeline was cancelled after `duration`.
      Exception: a step raised this exception.
    """
    timeout = None if duration is None else duration / 1000
    try:
      for _ in distributed.as_completed(self._futures, with_results=True, timeout=timeout):
        pass
      self._state = runner.PipelineState.DONE
    except BaseException:
      self.cancel()
      self._state = runner.PipelineState.FAILED
      raise
    finally:
      self._client.close()
    return self._state

  def cancel(self) -> str:
    self._client.cancel(self._futures)
    # A task that has begun cannot be stopped, and must not write into a directory that is already
    # cleared.
    while any(self._client.run(_is_busy, self._prefix, on_error='ignore').values()):
      time.sleep(0.1)
    self._state = runner.PipelineState.CANCELLED
    return self._state


def _is_busy(prefix: str, dask_worker: distributed.Worker) -> bool:
  return any(str(task.key).startswith(prefix) for task in dask_worker.state.executing)


class _Tasks(pipeline_lib.PipelineVisitor):
  """A visitor that makes the tasks of a pipeline.

  Attributes:
    prefix: Prefix of the name of each task.
    ends: The last tasks. Computing them runs the pipeline.
  """

  def __init__(self, num_partitions: int):
    # The prefix is unique, since Dask takes equal names for equal work.
    self.prefix = f'beam-{uuid.uuid4().hex[:8]}-'
    self.ends: list[Delayed] = []
    self._num_partitions = num_partitions
    self._partitions: dict[pvalue.PCollection, Partitions] = {}

  def leave_composite_transform(self, node: pipeline_lib.AppliedPTransform) -> None:
    # The parts of Reshuffle would distribute elements at random, differently in each attempt.
    if isinstance(node.transform, beam.Reshuffle):
      self._set(node, None, self._gathered(node, _deal))

  def visit_transform(self, node: pipeline_lib.AppliedPTransform) -> None:
    transform = node.transform
    is_par_do = isinstance(transform, core.ParDo)
    is_splittable = is_par_do and common.DoFnSignature(transform.fn).is_splittable_dofn()
    if isinstance(transform, core.Impulse):
      self._set(node, None, [self._task(node, list)([b''])])
    elif isinstance(transform, core.GroupByKey):
      self._set(node, None, self._gathered(node, _group))
    elif isinstance(transform, core.Flatten):
      joined = [partition for source in node.inputs for partition in self._partitions[source]]
      self._set(node, None, joined)
    elif is_par_do and not is_splittable:
      self._add_par_do(node)
    else:
      raise errors.InputError(
        'step that this runner cannot run',
        where=node.full_label,
        found=transform,
        expected='Impulse, GroupByKey, Flatten, Reshuffle and ParDo',
        fix='choose another --runner',
      )

  def _add_par_do(self, node: pipeline_lib.AppliedPTransform) -> None:
    transform = node.transform
    sides = [
      self._task(node, _concatenate)(self._partitions[side.pvalue]) for side in node.side_inputs
    ]
    views = [(type(side), side._view_options()) for side in node.side_inputs]
    step = pickler.dumps((node.full_label, transform.fn, transform.args, transform.kwargs, views))
    results = [
      self._task(node, _run)(step, partition, sides)
      for partition in self._partitions[node.inputs[0]]
    ]
    for tag in node.outputs:
      self._set(node, tag, [self._task(node, dict.get)(result, tag, ()) for result in results])
    self.ends.extend(self._task(node, _ignore)(result) for result in results)

  def _gathered(self, node: pipeline_lib.AppliedPTransform, function) -> Partitions:
    """Returns the partitions that `function` makes from all elements of the input of `node`."""
    elements = self._task(node, _concatenate)(self._partitions[node.inputs[0]])
    dealt = self._task(node, function)(elements, self._num_partitions)
    return [self._task(node, list.__getitem__)(dealt, i) for i in range(self._num_partitions)]

  def _set(
    self, node: pipeline_lib.AppliedPTransform, tag: str | None, partitions: Partitions
  ) -> None:
    self._partitions[node.outputs[tag]] = partitions

  def _task(self, node: pipeline_lib.AppliedPTransform, function):
    """Returns a function that makes the task of calling `function` with its arguments."""
    name = f'{self.prefix}{node.full_label}-{uuid.uuid4().hex}'

    def make(*args):
      return dask.delayed(function, pure=False, traverse=True)(*args, dask_key_name=name)

    return make


# The functions below run on the workers.


def _run(
  step: bytes, elements: Sequence[Any], sides: Sequence[list[Any]]
) -> dict[str | None, list[Any]]:
  """Runs a DoFn over `elements` as one bundle, and returns tag -> outputs."""
  label, fn, args, kwargs, views = pickler.loads(step)
  receivers = _Receivers()
  output_handler = common._OutputHandler(
    window.GlobalWindows(), receivers[None], receivers, None, None, False, False
  )
  side_inputs = []
  for (view, view_options), side in zip(views, sides, strict=True):
    windowed = [window.GlobalWindows.windowed_value(element) for element in side]
    side_inputs.append(sideinputs.SideInputMap(view, view_options, windowed))
  invoker = common.DoFnInvoker.create_invoker(
    common.DoFnSignature(fn),
    output_handler,
    context=common.DoFnContext(label),
    input_args=args,
    input_kwargs=kwargs,
    side_inputs=side_inputs,
    bundle_finalizer_param=core._BundleFinalizerParam(),
  )
  invoker.invoke_setup()
  try:
    invoker.invoke_start_bundle()
    for element in elements:
      invoker.invoke_process(window.GlobalWindows.windowed_value(element))
    invoker.invoke_finish_bundle()
  finally:
    invoker.invoke_teardown()
  return {tag: receiver.values for tag, receiver in receivers.items()}


class _Receivers(dict):
  """Tag -> receiver of the outputs with this tag."""

  def __missing__(self, tag: str | None) -> _Receiver:
    return self.setdefault(tag, _Receiver())


class _Receiver(common.Receiver):
  def __init__(self):
    self.values: list[Any] = []

  def receive(self, windowed_value):
    self.values.append(windowed_value.value)


def _concatenate(partitions: Sequence[Sequence[Any]]) -> list[Any]:
  return [element for partition in partitions for element in partition]


def _deal(elements: list[Any], num_partitions: int) -> list[list[Any]]:
  return [elements[i::num_partitions] for i in range(num_partitions)]


def _group(pairs: list[tuple[Any, Any]], num_partitions: int) -> list[list[tuple[Any, list[Any]]]]:
  """Groups pairs (key, value) as (key, values), and distributes the groups by their keys.

  Keys are equal if their encodings are equal.
  """
  coder = coders.FastPrimitivesCoder().as_deterministic_coder('GroupByKey')
  groups: dict[bytes, tuple[Any, list[Any]]] = {}
  for key, value in pairs:
    _, values = groups.setdefault(coder.encode(key), (key, []))
    values.append(value)
  partitions: list[list[tuple[Any, list[Any]]]] = [[] for _ in range(num_partitions)]
  for encoded, group in groups.items():
    partitions[zlib.crc32(encoded) % num_partitions].append(group)
  return partitions


def _ignore(_) -> None:
  """Ends a step without passing its outputs on: they need not travel to the main process."""
