"""Runs a pipeline on a Dask cluster: `-- --runner=DaskRunner
--dask_client_address=tcp://HOST:8786`.

Beam's own DaskRunner (2.77) gives each consumer of a step the outputs of all its tags, drops
what a step puts out at the end of a bundle, fails on side inputs, and reads all files in one
task. So Beam's options and DoFn machinery are
used, and the graph of tasks is made here. It does what batch pipelines in the global window
need, no more: no windows, timestamps, state, splittable DoFns or metrics.

A PCollection is a list of partitions, each a delayed list of elements. Grouping gathers a whole
PCollection in one task, so elements must be small; what is large lies in files
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
from dask.delayed import (
  Delayed,
)  # As a module, dask.delayed is hidden by the function of that name.
import distributed

from tpu_graphs import errors

_SECONDS_FOR_WORKERS = 30  # Until the first is there.
_PARTITIONS_PER_THREAD = 4  # Files differ in size: smaller parts even that out.

Partitions = list[Delayed]


class DaskRunner(runner.PipelineRunner):
  """Runs batch pipelines on the scheduler that `--dask_client_address` names, or else on a
  cluster on this machine.
  """

  def run_pipeline(
    self, pipeline: beam.Pipeline, options: pipeline_options.PipelineOptions
  ) -> _Result:
    given = options.view_as(dask_runner.DaskOptions).get_all_options(
      drop_default=True, current_only=True
    )
    given.pop('partition_size', None)
    num_partitions = given.pop('npartitions', None)
    try:
      client = distributed.Client(**given)
    except OSError as error:
      raise _unusable(error) from error
    try:
      client.wait_for_workers(1, timeout=_SECONDS_FOR_WORKERS)
      tasks = _Tasks(num_partitions or _PARTITIONS_PER_THREAD * sum(client.nthreads().values()))
      pipeline.visit(tasks)
      return _Result(client, client.compute(tasks.ends, optimize_graph=False), tasks.prefix)
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
    """Waits until no task of the pipeline is left on the cluster; raises what a step has raised.

    Args:
      duration: after so many milliseconds the pipeline is cancelled.

    Raises:
      TimeoutError: it was.
    """
    try:
      for _ in distributed.as_completed(
        self._futures, with_results=True, timeout=None if duration is None else duration / 1000
      ):
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
    # What has begun cannot be stopped, and must not write into a directory that is already cleared.
    while any(self._client.run(_is_busy, self._prefix, on_error='ignore').values()):
      time.sleep(0.1)
    self._state = runner.PipelineState.CANCELLED
    return self._state


def _is_busy(prefix: str, dask_worker: distributed.Worker) -> bool:
  return any(str(task.key).startswith(prefix) for task in dask_worker.state.executing)


class _Tasks(pipeline_lib.PipelineVisitor):
  """Makes the tasks of a pipeline.

  Attributes:
    prefix: of the name of each task.
    ends: to compute these is to run the pipeline.
  """

  def __init__(self, num_partitions: int):
    self.prefix = f'beam-{uuid.uuid4().hex[:8]}-'  # Unique: Dask takes equal names for equal work.
    self.ends: list[Delayed] = []
    self._num_partitions = num_partitions
    self._partitions: dict[pvalue.PCollection, Partitions] = {}

  def leave_composite_transform(self, node: pipeline_lib.AppliedPTransform) -> None:
    if isinstance(
      node.transform, beam.Reshuffle
    ):  # Its parts would deal at random: another deal for each attempt.
      self._set(node, None, self._gathered(node, _deal))

  def visit_transform(self, node: pipeline_lib.AppliedPTransform) -> None:
    transform = node.transform
    if isinstance(transform, core.Impulse):
      self._set(node, None, [self._task(node, list)([b''])])
    elif isinstance(transform, core.GroupByKey):
      self._set(node, None, self._gathered(node, _group))
    elif isinstance(transform, core.Flatten):
      self._set(
        node,
        None,
        [partition for collection in node.inputs for partition in self._partitions[collection]],
      )
    elif (
      isinstance(transform, core.ParDo)
      and not common.DoFnSignature(transform.fn).is_splittable_dofn()
    ):
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
    """Partitions of what `function` makes of all elements of the input of `node`."""
    elements = self._task(node, _concatenate)(self._partitions[node.inputs[0]])
    dealt = self._task(node, function)(elements, self._num_partitions)
    return [self._task(node, list.__getitem__)(dealt, i) for i in range(self._num_partitions)]

  def _set(
    self, node: pipeline_lib.AppliedPTransform, tag: str | None, partitions: Partitions
  ) -> None:
    self._partitions[node.outputs[tag]] = partitions

  def _task(self, node: pipeline_lib.AppliedPTransform, function):
    name = f'{self.prefix}{node.full_label}-{uuid.uuid4().hex}'
    return lambda *args: dask.delayed(function, pure=False, traverse=True)(
      *args, dask_key_name=name
    )


# What runs on the workers.


def _run(
  step: bytes, elements: Sequence[Any], sides: Sequence[list[Any]]
) -> dict[str | None, list[Any]]:
  """Runs a DoFn over `elements`, as one bundle: tag -> outputs."""
  label, fn, args, kwargs, views = pickler.loads(step)
  receivers = _Receivers()
  invoker = common.DoFnInvoker.create_invoker(
    common.DoFnSignature(fn),
    common._OutputHandler(
      window.GlobalWindows(), receivers[None], receivers, None, None, False, False
    ),
    context=common.DoFnContext(label),
    input_args=args,
    input_kwargs=kwargs,
    side_inputs=[
      sideinputs.SideInputMap(
        view, view_options, list(map(window.GlobalWindows.windowed_value, side))
      )
      for (view, view_options), side in zip(views, sides, strict=True)
    ],
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
  """Tag -> what has come out."""

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
  """(key, value) -> (key, values), the groups dealt out by their keys; keys are equal if their
  encodings are.
  """
  coder = coders.FastPrimitivesCoder().as_deterministic_coder('GroupByKey')
  groups: dict[bytes, tuple[Any, list[Any]]] = {}
  for key, value in pairs:
    groups.setdefault(coder.encode(key), (key, []))[1].append(value)
  partitions: list[list[tuple[Any, list[Any]]]] = [[] for _ in range(num_partitions)]
  for encoded, group in groups.items():
    partitions[zlib.crc32(encoded) % num_partitions].append(group)
  return partitions


def _ignore(_) -> None:
  """The end of a step: its outputs need not travel to the main process."""
