"""Writes a submission to the Kaggle competition on TpuGraphs from trained models, or scores one.

  tpu-graphs submission --run=tile:xla=runs/tile --run=layout:xla:random=runs/layout \\
    --data=data/tile --data=data/layout --out=submission.csv --partial
  tpu-graphs submission --score=submission.csv --data=data/tile --split=valid --partial

Each data directory holds one collection, the one given to convert. A complete submission has 894
rows, for the test splits of all five collections; --partial allows fewer rows. The score is defined
as in the competition: a module scores 2 - best of the first five configs / best of all (tile), or
Kendall's tau (layout); the score is the mean over modules and then over collections. Scoring needs
runtimes, which the public test files do not hold.
"""

from __future__ import annotations

# This import comes before TensorFlow, to silence the log of TensorFlow.
import baselines  # noqa: F401

# isort: split

import collections
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
import os
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from baselines import scoring
from baselines.training import runs
from tpu_graphs import cli
from tpu_graphs import errors
from tpu_graphs import terminal
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.metrics import submission
from tpu_graphs.modules import module as module_lib


def write(
  *, run_of: Mapping[str, str], data: Sequence[str], split: str, out: str, partial: bool = False
) -> dict[str, int]:
  """Ranks the configs of a split with trained models and writes a submission.

  Args:
    run_of: collection -> run directory.
    data: dataset directories, one for each of these collections.
    split: 'train', 'valid' or 'test'; the competition asks for 'test'.
    out: CSV file to write; an existing file is replaced.
    partial: whether rows of the competition may be missing.

  Returns:
    Collection -> number of rows.

  Raises:
    InputError: a run or data cannot be used, they do not fit each other, or rows are missing.
  """
  for collection in run_of:
    submission.check_collection(collection)
  directories = _open(data)
  _check_given(directories, run_of, '--run')
  _check_given(run_of, directories, '--data')
  counts = {
    collection: directories[collection].split(split).modules
    for collection in submission.ROWS
    if collection in run_of
  }
  missing = _missing(counts, split)
  if missing and not partial:
    raise errors.InputError(
      'submission incomplete',
      found=', '.join(missing),
      expected='all rows',
      fix='give --run and --data for all collections, or --partial',
    )
  loaded = {
    collection: runs.load_for(run_of[collection], directories[collection]) for collection in counts
  }
  # A place that cannot be written is reported before the work.
  with runs.refusal_explained(out):
    tf.io.gfile.makedirs(os.path.dirname(out) or '.')
  if tf.io.gfile.isdir(out):
    raise errors.InputError('cannot write', path=out, found='a directory', expected='a CSV file')
  lines = [submission.HEADER]
  for collection, run in loaded.items():
    scorer = scoring.make_scorer(run.model, run.kind, num_extra=run.choices.num_extra)
    for scored in scoring.score_split(scorer, directories[collection], split):
      lines.append(submission.row(collection, scored.module_id, scored.config_id, scored.order))
  with runs.writing(out) as file:
    file.write('\n'.join([*lines, '']))
  return counts


def _check_given(needed: Iterable[str], given: Container[str], flag: str) -> None:
  lacking = [collection for collection in needed if collection not in given]
  if lacking:
    raise errors.InputError(
      f'collection without {flag}', found=', '.join(lacking), fix=f'give {flag} for it as well'
    )


def score(
  *, path: str, data: Sequence[str], split: str, partial: bool = False
) -> dict[str, submission.CollectionScore]:
  """Scores a submission.

  Args:
    path: path of the CSV file.
    data: dataset directories with runtimes, of different collections; rows of other collections
      are not scored.
    split: 'train', 'valid' or 'test'.
    partial: whether rows of modules may be missing; such modules do not count.

  Returns:
    Collection -> score.

  Raises:
    InputError: the file is not a submission or does not fit the data, the data cannot be used, or
      no module has a score.
  """
  if not tf.io.gfile.exists(path):
    raise errors.InputError('file missing', path=path, expected='a submission')
  directories = _open(data)
  found = submission.parse(directory_lib.read_text(path), path=path)
  scores = {}
  for collection in submission.ROWS:
    if collection in directories:
      measured = _measured(directories[collection], split)
      scores[collection] = submission.score_collection(found, collection, measured, partial=partial)
  if submission.overall(scores.values()) is None:
    counts = []
    for name, result in scores.items():
      unmeasured = terminal.plural(result.unmeasured, 'module')
      counts.append(
        f'{name}: {unmeasured} without runtimes, {result.undefined} with nothing to rank, '
        f'{result.missing} without a row'
      )
    raise errors.InputError(
      'no row to score',
      path=path,
      found=', '.join(counts),
      fix='score on data with runtimes, such as --split=valid; public test files hold none',
    )
  return scores


def _open(data: Sequence[str]) -> dict[str, directory_lib.DatasetDirectory]:
  """Opens the dataset directories; returns them by collection."""
  directories: dict[str, directory_lib.DatasetDirectory] = {}
  for path in data:
    directory = directory_lib.open_directory(path)
    collection = directory.manifest.collection
    with errors.in_file(path):
      submission.check_collection(collection)
      if collection in directories:
        raise errors.InputError(
          'second directory of a collection',
          where='--data',
          found=collection,
          expected=f'only {directories[collection].path}',
        )
    directories[collection] = directory
  return directories


def _measured(
  directory: directory_lib.DatasetDirectory, split: str
) -> Iterator[submission.Measured]:
  """Yields the modules of a split with their runtimes; features are not decoded."""
  names = ['config_id', 'config_runtime']
  if directory.kind == 'tile':
    names.append('config_runtime_normalizer')
  spec = {'context/module_id': tf.io.FixedLenFeature([], tf.string)}
  for name in names:
    spec[f'context/{name}'] = tf.io.RaggedFeature(tf.int64)
  paths = [os.path.join(directory.path, shard.name) for shard in directory.split(split).shards]
  records = tf.data.TFRecordDataset(paths).map(lambda data: tf.io.parse_single_example(data, spec))
  # The configs of a module may be in several records.
  parts: dict[str, list[list[np.ndarray]]] = collections.defaultdict(list)
  with directory_lib.damage_explained(directory):
    for record in records.as_numpy_iterator():
      arrays = [record[f'context/{name}'] for name in names]
      parts[record['context/module_id'].decode()].append(arrays)
  for module_id in sorted(parts):
    config_id, runtime, *rest = map(np.concatenate, zip(*parts[module_id], strict=True))
    normalizer = rest[0] if rest else None
    relative_runtime = module_lib.relative_runtime(runtime, normalizer)
    yield submission.Measured(module_id, config_id, relative_runtime)


def _missing(counts: Mapping[str, int], split: str) -> list[str]:
  """Describes the missing rows of a submission; the competition asks only for 'test' splits."""
  return submission.missing_rows(counts) if split == 'test' else []


def describe(scores: Mapping[str, submission.CollectionScore]) -> str:
  """Formats the scores as a table to print."""
  lines = [f'{"collection":22}{"rows":>6}{"score":>9}']
  for collection, result in scores.items():
    counts = {
      'undefined': result.undefined,
      'without runtimes': result.unmeasured,
      'without a row': result.missing,
    }
    notes = ', '.join(f'{count} {what}' for what, count in counts.items() if count)
    value = 'n/a' if result.score is None else f'{result.score:.4f}'
    lines.append(f'{collection:22}{result.rows:6,}{value:>9}  {notes}'.rstrip())
  total = submission.overall(scores.values())
  lines.append(
    f'{"mean":22}{"":6}{total:9.4f}  of {len(scores)} of {len(submission.ROWS)} collections'
  )
  return '\n'.join(lines)


def _define_flags(flag_values) -> None:
  from absl import flags

  flags.DEFINE_multi_string(
    'run',
    None,
    'COLLECTION=RUN: the run directory whose model ranks a collection, such as '
    'tile:xla=runs/tile. May be given several times.',
    flag_values=flag_values,
  )
  flags.DEFINE_multi_string(
    'data',
    None,
    'Dataset directory of a collection, written by convert. May be given several times.',
    flag_values=flag_values,
  )
  flags.DEFINE_enum(
    'split', 'test', module_lib.SPLITS, 'Split to rank or to score.', flag_values=flag_values
  )
  flags.DEFINE_string('out', None, 'CSV file to write.', flag_values=flag_values)
  flags.DEFINE_string(
    'score', None, 'CSV file to score instead of writing one.', flag_values=flag_values
  )
  flags.DEFINE_bool('partial', False, 'Allow missing rows.', flag_values=flag_values)
  flags.mark_flag_as_required('data', flag_values=flag_values)
  flags.register_multi_flags_validator(
    ('run', 'out', 'score'),
    _writes_or_scores,
    'either --run and --out, or --score must be given',
    flag_values=flag_values,
  )


def _writes_or_scores(values: Mapping[str, Any]) -> bool:
  if values['score']:
    return not (values['run'] or values['out'])
  return bool(values['run'] and values['out'])


def _job(flag_values, _) -> int:
  data, split, partial = flag_values.data, flag_values.split, flag_values.partial
  if flag_values.score:
    print(describe(score(path=flag_values.score, data=data, split=split, partial=partial)))
    return 0
  counts = write(
    run_of=_parse_runs(flag_values.run),
    data=data,
    split=split,
    out=flag_values.out,
    partial=partial,
  )
  print(f'wrote {flag_values.out}: {terminal.plural(sum(counts.values()), "row")}')
  if missing := _missing(counts, split):
    print(f'not complete: {", ".join(missing)}')
  return 0


def _parse_runs(values: Sequence[str]) -> dict[str, str]:
  run_of: dict[str, str] = {}
  for value in values:
    collection, _, run = value.partition('=')
    if not run:
      raise errors.InputError(
        'not a run of a collection', where='--run', found=repr(value), expected='COLLECTION=RUN'
      )
    if collection in run_of:
      raise errors.InputError(
        'second run of a collection',
        where='--run',
        found=repr(value),
        expected=f'only {run_of[collection]}',
      )
    run_of[collection] = run
  return run_of


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
