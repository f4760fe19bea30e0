"""Evaluation of many runs on large splits by an Apache Beam pipeline: a step scores some shards
by one run.
"""

from __future__ import annotations

import baselines  # noqa: F401  # Before TensorFlow, to quiet it.

# isort: split

from collections.abc import Iterable, Iterator, Sequence
import os
import pickle

import apache_beam as beam
import numpy as np
import tensorflow as tf

from baselines import scoring
from baselines.evaluation import evaluation
from baselines.training import runs
from pipelines.conversion import output
from pipelines.runners import beam as beam_lib
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.metrics import config_indices as config_indices_lib

_FOLDER = '.judged'
_Key = tuple[str, str, str]  # Run, split, module.


def judge(
  loaded: Sequence[runs.Run],
  directory: directory_lib.DatasetDirectory,
  splits: Sequence[str],
  indices: config_indices_lib.ConfigIndices | None,
  *,
  folder: str,
  beam_args: Sequence[str],
) -> Iterator[tuple[runs.Run, str, list[tuple[evaluation.Judged, np.ndarray]]]]:
  """Scores and judges modules by a pipeline, which has ended when the first result comes.

  Args:
    loaded: runs; workers read them again from their paths.
    directory: that all workers can read.
    splits: of the directory.
    indices: see `evaluation.judge`.
    folder: that all workers can write to, for a folder of their results that is removed in the end.
    beam_args: options of Apache Beam.

  Yields:
    For each run and split, all modules sorted by name, each with its `config_id`s, predicted
    fastest first.

  Raises:
    InputError: an option of Beam or a score is wrong, or a shard is damaged.
  """
  found = [directory.split(split) for split in splits]
  pipeline = beam_lib.pipeline(
    beam_args, input_bytes=len(loaded) * sum(split.bytes for split in found)
  )
  folder = output.join(folder, _FOLDER)
  tf.io.gfile.makedirs(folder)
  tasks = [
    (run.path, split, task)
    for split in splits
    for task in evaluation.tasks(directory, split)
    for run in loaded
  ]
  try:
    _ = (
      pipeline
      | 'Tasks' >> beam.Create(tasks)
      | 'Spread' >> beam.Reshuffle()
      | 'Score' >> beam.ParDo(_Score(folder))
      | 'Bring modules together' >> beam.GroupByKey()
      | 'Judge' >> beam.ParDo(_Judge(directory.kind, indices, folder))
      | 'Write' >> beam.io.WriteToTFRecord(output.join(folder, 'part'))
    )
    pipeline.run().wait_until_finish()
    modules: dict[tuple[str, str], list[tuple[evaluation.Judged, np.ndarray]]] = {}
    for record in tf.data.TFRecordDataset(
      tf.io.gfile.glob(os.path.join(folder, 'part*'))
    ).as_numpy_iterator():
      run, split, *module = pickle.loads(record)
      modules.setdefault((run, split), []).append(tuple(module))
  except Exception as error:
    if 'KeyboardInterrupt [while running' in str(
      error
    ):  # Beam's words for one that comes during a step.
      raise KeyboardInterrupt from error
    if reported := output.abandon(folder):
      raise reported from error
    raise
  finally:
    output.abandon(folder)
  for run in loaded:
    for split in splits:
      yield (
        run,
        split,
        sorted(modules.get((run.path, split), []), key=lambda module: module[0].module_id),
      )


class _Score(beam.DoFn):
  """(run, split, directory of some shards) -> (run, split, module), some of the module's configs
  with scores.
  """

  def __init__(self, folder: str):
    self._folder = folder

  def setup(self):
    self._scorers: dict[str, scoring.Scorer] = {}

  def process(
    self, task: tuple[str, str, directory_lib.DatasetDirectory]
  ) -> Iterator[tuple[_Key, scoring.ScoredModule]]:
    path, split, directory = task
    try:
      if path not in self._scorers:
        run = runs.load(path)
        self._scorers[path] = scoring.make_scorer(
          run.model, run.kind, num_extra=run.choices.num_extra
        )
      for module in scoring.score_split(self._scorers[path], directory, split):
        yield (path, split, module.module_id), module
    except errors.InputError as error:
      output.report_failure(self._folder, error)
      raise


class _Judge(beam.DoFn):
  """(run, split, module), all parts of it -> pickled run, split, what is kept of it, its
  ranking.
  """

  def __init__(self, kind: str, indices: config_indices_lib.ConfigIndices | None, folder: str):
    self._kind = kind
    self._indices = indices
    self._folder = folder

  def process(self, item: tuple[_Key, Iterable[scoring.ScoredModule]]) -> Iterator[bytes]:
    (run, split, _), parts = item
    try:
      module = evaluation.merge(list(parts))
      judged = evaluation.judge(module, self._kind, self._indices)
    except errors.InputError as error:
      output.report_failure(self._folder, error)
      raise
    yield pickle.dumps((run, split, judged, module.config_id[module.order]))
