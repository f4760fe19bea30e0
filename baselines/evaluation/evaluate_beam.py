"""Evaluation of many runs on large splits with an Apache Beam pipeline.

A worker scores some of the shards of a split with one run at a time.
"""

from __future__ import annotations

# This import comes before TensorFlow, to silence the log of TensorFlow.
import baselines  # noqa: F401

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
# The path of a run, a split and the name of a module.
_Key = tuple[str, str, str]


def judge(
  loaded: Sequence[runs.Run],
  directory: directory_lib.DatasetDirectory,
  splits: Sequence[str],
  indices: config_indices_lib.ConfigIndices | None,
  *,
  folder: str,
  beam_args: Sequence[str],
) -> Iterator[tuple[runs.Run, str, list[tuple[evaluation.Judged, np.ndarray]]]]:
  """Scores and judges modules with a pipeline, which has ended when the first result is yielded.

  Args:
    loaded: the runs; workers read them again from their paths.
    directory: the data, which all workers can read.
    splits: names of splits of the data.
    indices: see `evaluation.judge`.
    folder: a folder that all workers can write to. A folder in it holds their results, and is
      removed in the end.
    beam_args: options of Apache Beam.

  Yields:
    For each run and split, all modules sorted by name, each with its `config_id`s, predicted
    fastest first.

  Raises:
    InputError: an option of Beam is invalid, a score is not finite, or a shard is damaged.
  """
  found = [directory.split(split) for split in splits]
  input_bytes = len(loaded) * sum(split.bytes for split in found)
  pipeline = beam_lib.pipeline(beam_args, input_bytes=input_bytes)
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
    records = tf.data.TFRecordDataset(tf.io.gfile.glob(os.path.join(folder, 'part*')))
    for record in records.as_numpy_iterator():
      run, split, *module = pickle.loads(record)
      modules.setdefault((run, split), []).append(tuple(module))
  except Exception as error:
    # Beam reports a KeyboardInterrupt during a step in these words.
    if 'KeyboardInterrupt [while running' in str(error):
      raise KeyboardInterrupt from error
    if reported := output.abandon(folder):
      raise reported from error
    raise
  finally:
    output.abandon(folder)
  for run in loaded:
    for split in splits:
      judged = modules.get((run.path, split), [])
      yield run, split, sorted(judged, key=lambda module: module[0].module_id)


class _Score(beam.DoFn):
  """A step that scores the modules of some shards with one run.

  (run, split, directory of the shards) -> ((run, split, module), scored configs of the module).
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
        num_extra = run.choices.num_extra
        self._scorers[path] = scoring.make_scorer(run.model, run.kind, num_extra=num_extra)
      for module in scoring.score_split(self._scorers[path], directory, split):
        yield (path, split, module.module_id), module
    except errors.InputError as error:
      output.report_failure(self._folder, error)
      raise


class _Judge(beam.DoFn):
  """A step that merges the parts of a module and judges it.

  ((run, split, module), all parts of the module) -> pickled (run, split, judged module, config ids
  with the predicted fastest first).
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
