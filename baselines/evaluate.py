"""Measures how well trained models rank the configs of splits, and writes a report.

  python baselines/evaluate.py --run=runs/tile --data=data/tile --split=valid
  python baselines/evaluate.py --run=runs/a,runs/b --data=data/tile --split=valid,test --out=results

Prints a table that compares the models with simple rankings. Writes, for each run and split,
metrics.json, per_module.csv and rankings.csv (the configs of each module, predicted fastest first),
and report.html, one file that any browser shows. Modules without runtimes are only ranked. Several
runs are compared module by module. See docs/evaluate.md for details.
"""

from __future__ import annotations

# This import comes before TensorFlow, to silence the log of TensorFlow.
import baselines  # noqa: F401

# isort: split

from collections.abc import Iterable, Iterator, Mapping, Sequence
import csv
import json
import os
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from baselines import scoring
from baselines.evaluation import evaluation
from baselines.evaluation import report as report_lib
from baselines.training import runs as runs_lib
from tpu_graphs import cli
from tpu_graphs import errors
from tpu_graphs import terminal
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.metrics import config_indices as config_indices_lib
from tpu_graphs.metrics import intervals
from tpu_graphs.metrics import metrics
from tpu_graphs.metrics import module_table
from tpu_graphs.modules import module as module_lib


def evaluate(*, run: str, data: str, split: str, out: str) -> dict[str, Any]:
  """Evaluates one run on one split; see `evaluate_all`.

  Returns:
    The content of `metrics.json`, see `evaluation.metrics_json`.
  """
  (result,), _, _ = evaluate_all(runs=[run], data=data, splits=[split], out=out)
  return dict(result.metrics)


def evaluate_all(
  *,
  runs: Sequence[str],
  data: str,
  splits: Sequence[str],
  out: str | None = None,
  report: str | None = None,
  config_indices: str | None = None,
  beam_args: Sequence[str] = (),
) -> tuple[list[evaluation.Result], list[evaluation.Comparison], list[str]]:
  """Evaluates runs on splits and writes results and reports.

  Files of an earlier evaluation are replaced.

  Args:
    runs: run directories, of the kind of the data.
    data: dataset directory.
    splits: names of splits, of 'train', 'valid' and 'test'.
    out: directory for the results, with a folder for each run where there are several, and for each
      split where there are several; None: RUN/SPLIT for each run and split.
    report: HTML file for one report of all runs and splits; None: report.html in `out`, or, without
      `out`, a report of each run and split beside its results.
    config_indices: JSON file that lists configs, which are judged in addition to all configs; see
      `tpu_graphs.metrics.config_indices`.
    beam_args: options of Apache Beam; if there are any, a Beam pipeline scores the shards of the
      splits. The results are the same.

  Returns:
    The result of each run and split, the comparisons of each other run with the first one, and
    the paths of the reports.

  Raises:
    InputError: a run or the data cannot be used, they do not fit each other, or a result cannot
      be written.
  """
  directory = directory_lib.open_directory(data)
  _check_names('--run', runs)
  _check_names('--split', splits)
  loaded = [runs_lib.load_for(run, directory) for run in runs]
  for run in loaded:
    # A damaged history is reported before anything is written.
    report_lib.history(run)
  num_ops = {split: evaluation.num_ops(directory, split) for split in splits}
  indices = None
  if config_indices is not None:
    text = directory_lib.read_text(config_indices)
    indices = config_indices_lib.parse(text, path=config_indices)
    indices.check_modules({module_id for ops in num_ops.values() for module_id in ops})
  labels = _labels(runs)
  folders = _result_folders(labels, splits, out)
  combined = report
  if report is not None and not report.endswith('.html'):
    raise errors.InputError(
      'not the name of an HTML file', where='--report', found=repr(report), expected='FILE.html'
    )
  if out is not None:
    _make_folder(out, data)
    combined = report or os.path.join(out, runs_lib.REPORT_NAME)
  for folder in folders.values():
    _make_folder(folder, data)
  if combined is not None:
    _make_folder(os.path.dirname(combined) or '.', data)

  if beam_args:
    # Beam is imported only here, since its import takes seconds.
    from baselines.evaluation import evaluate_beam

    judged = evaluate_beam.judge(
      loaded, directory, splits, indices, folder=folders[runs[0], splits[0]], beam_args=beam_args
    )
  else:
    judged = _judge(loaded, directory, splits, indices)
  results = []
  for run, split, modules in judged:
    folder = folders[run.path, split]
    kept = _write_rankings(folder, modules)
    result = evaluation.Result(
      run=run,
      label=labels[run.path],
      split=split,
      folder=folder,
      modules=kept,
      num_ops=num_ops[split],
      metrics=evaluation.metrics_json(run, directory, split, kept, indices),
    )
    _write_metrics(result)
    results.append(result)
  comparisons = _compare(results)

  flags = {
    'run': ','.join(runs),
    'data': data,
    'split': ','.join(splits),
    'config_indices': config_indices,
    'out': out,
    'report': report,
  }
  command = ['tpu-graphs', 'evaluate']
  command += [f'--{name}={value}' for name, value in flags.items() if value is not None]
  if combined is not None:
    reports = {combined: results}
  else:
    reports = {os.path.join(result.folder, runs_lib.REPORT_NAME): [result] for result in results}
  for path, group in reports.items():
    compared = comparisons if len(group) > 1 else []
    content = report_lib.content(group, compared, directory, command)
    texts = {
      f'{path.removesuffix(".html")}.json': report_lib.dumps(content) + '\n',
      path: report_lib.render(content),
    }
    for name, text in texts.items():
      with runs_lib.writing(name) as file:
        file.write(text)
  return results, comparisons, list(reports)


def _check_names(flag: str, names: Sequence[str]) -> None:
  """Checks the names that a flag lists.

  Raises:
    InputError: a name is empty or given twice.
  """
  if '' in names:
    raise errors.InputError(
      'empty name', where=flag, found=','.join(names), fix='remove the superfluous comma'
    )
  if len(set(map(os.path.abspath, names))) < len(names):
    raise errors.InputError('given twice', where=flag, found=','.join(names))


def _labels(runs: Sequence[str]) -> dict[str, str]:
  """Maps each run to a label that can be the name of a folder.

  The label is the last part of the run's path, or the whole path where last parts are equal.
  """
  names = {run: os.path.basename(os.path.normpath(run)) for run in runs}
  if len(set(names.values())) == len(runs):
    return names
  return {run: run.strip('/').replace('/', '_') for run in runs}


def _result_folders(
  labels: Mapping[str, str], splits: Sequence[str], out: str | None
) -> dict[tuple[str, str], str]:
  """Maps (run, split) to the folder for its results; `labels` has the label of each run."""
  folders = {}
  for run, label in labels.items():
    for split in splits:
      if out is None:
        folders[run, split] = os.path.join(run, split)
        continue
      parts = []
      if len(labels) > 1:
        parts.append(label)
      if len(splits) > 1:
        parts.append(split)
      folders[run, split] = os.path.join(out, *parts)
  return folders


def _make_folder(folder: str, data: str) -> None:
  data_path = os.path.abspath(data)
  if not folder or os.path.commonpath([os.path.abspath(folder), data_path]) == data_path:
    raise errors.InputError(
      'result cannot lie in the data',
      where='--out',
      found=repr(folder),
      expected=f'a directory outside {data}',
    )
  with runs_lib.refusal_explained(folder):
    tf.io.gfile.makedirs(folder)


def _judge(
  loaded: Sequence[runs_lib.Run],
  directory: directory_lib.DatasetDirectory,
  splits: Sequence[str],
  indices: config_indices_lib.ConfigIndices | None,
) -> Iterator[tuple[runs_lib.Run, str, Iterable[tuple[evaluation.Judged, np.ndarray]]]]:
  """Yields the modules of each run and split, scored and judged when they are iterated over.

  The modules are sorted by name, each with its `config_id`s, predicted fastest first.
  """
  for run in loaded:
    scorer = scoring.make_scorer(run.model, run.kind, num_extra=run.choices.num_extra)
    for split in splits:
      scored = evaluation.score_modules(scorer, directory, split)
      modules = (
        (evaluation.judge(module, run.kind, indices), module.config_id[module.order])
        for module in scored
      )
      yield run, split, modules


def _write_rankings(
  folder: str, modules: Iterable[tuple[evaluation.Judged, np.ndarray]]
) -> list[evaluation.Judged]:
  """Writes the ranking of each module as it comes; returns the judged modules."""
  kept = []
  with runs_lib.writing(os.path.join(folder, runs_lib.RANKINGS_NAME)) as file:
    writer = csv.writer(file, lineterminator='\n')
    writer.writerow(('module_id', 'config_ids'))
    for module, config_ids in modules:
      writer.writerow((module.module_id, ';'.join(map(str, config_ids.tolist()))))
      kept.append(module)
  return kept


def _write_metrics(result: evaluation.Result) -> None:
  with runs_lib.writing(os.path.join(result.folder, runs_lib.METRICS_NAME)) as file:
    file.write(json.dumps(result.metrics, indent=1) + '\n')
  names = {'all': runs_lib.PER_MODULE_NAME}
  if result.metrics['listed']:
    names['listed'] = runs_lib.LISTED_NAME
  top_names = [f'top_{k}_error' for k in metrics.TOP_KS[result.run.kind]]
  header = ('module_id', 'num_configs', 'opa', 'kendall_tau', *top_names)
  for view, name in names.items():
    with runs_lib.writing(os.path.join(result.folder, name)) as file:
      writer = csv.writer(file, lineterminator='\n')
      writer.writerow(header)
      for verdict in result.verdicts(view):
        found = verdict.metrics
        writer.writerow((found.module_id, found.num_configs, *found.values.values()))


def _compare(results: Sequence[evaluation.Result]) -> list[evaluation.Comparison]:
  """Compares each run with the first one on each split and view with a measured module."""
  comparisons = []
  for view in evaluation.VIEWS:
    for result in results:
      first = next(other for other in results if other.split == result.split)
      if result is first:
        continue
      table = _module_table(result, view)
      if table.module_ids:
        comparisons.append(
          evaluation.Comparison(
            split=result.split,
            view=view,
            label=result.label,
            base=first.label,
            paired=intervals.compare(table, _module_table(first, view)),
          )
        )
  return comparisons


def _module_table(result: evaluation.Result, view: str) -> module_table.ModuleTable:
  return module_table.ModuleTable.of(verdict.metrics for verdict in result.verdicts(view))


def describe(
  results: Sequence[evaluation.Result], comparisons: Sequence[evaluation.Comparison] = ()
) -> str:
  """Formats the results and comparisons as tables to print."""
  blocks = [_describe_result(result, with_label=len(results) > 1) for result in results]
  blocks.extend(_describe_comparison(comparison) for comparison in comparisons)
  return '\n\n'.join(blocks)


def _describe_result(result: evaluation.Result, *, with_label: bool) -> str:
  content = result.metrics
  title = f'{content["model_name"]} on {content["collection"]}, {content["split"]}'
  if with_label:
    title = f'{result.label}: {title}'
  model = content['model']
  if model:
    modules = terminal.plural(model['num_modules'], 'module')
    configs = terminal.plural(model['num_configs'], 'config')
    title += f': {modules}, {configs}'
  lines = [title]
  if content['unmeasured_modules']:
    unmeasured = terminal.plural(content['unmeasured_modules'], 'module')
    lines.append(f'ranked, not judged: {unmeasured} without runtimes')
  if model:
    lines.extend(_describe_numbers(content))
  if listed := content['listed']:
    modules = terminal.plural(listed['modules'], 'module')
    configs = terminal.plural(listed['positions'], 'config')
    line = f'configs of {listed["path"]}: {modules}, {configs}'
    if listed['repeated_positions']:
      line += f', {listed["repeated_positions"]:,} of them repeated'
    lines.append(line)
    if listed['model']:
      lines.extend(_describe_numbers(listed))
  return '\n'.join(lines)


def _describe_numbers(content: Mapping[str, Any]) -> list[str]:
  model = content['model']
  simple = ('random', 'default', 'oracle')
  heads = ''.join(f'{name:>9}' for name in simple)
  lines = [f'{"":14}{"model":>9}  {"95 % interval":^18}{heads}']
  for name, label in report_lib.metric_labels(model).items():
    interval = content['intervals'].get(name)
    bounds = ''
    if interval is not None and interval['low'] is not None:
      bounds = f'{interval["low"]:.4f} to {interval["high"]:.4f}'
    line = f'{label:14}{_number(model[name]):>9}  {bounds:^18}'
    for column in simple:
      line += f'{_number(content[column][name]):>9}'
    if undefined := model['undefined'].get(name):
      line += f'  undefined for {undefined:,} of {terminal.plural(model["num_modules"], "module")}'
    lines.append(line)
  return lines


def _describe_comparison(comparison: evaluation.Comparison) -> str:
  paired = comparison.paired
  listed = ', listed configs' if comparison.view == 'listed' else ''
  modules = terminal.plural(paired.num_modules, 'module')
  lines = [
    f'{comparison.label} against {comparison.base}, {comparison.split}{listed}: {modules}',
    f'{"":14}{"change":>9}  {"95 % interval":^18}{"better":>8}{"worse":>7}{"equal":>7}{"p":>9}',
  ]
  for name, label in report_lib.metric_labels(paired.metrics).items():
    found = paired.metrics[name]
    change = found.difference
    bounds = '' if change.low is None else f'{change.low:+.4f} to {change.high:+.4f}'
    mean = _number(change.mean, '+.4f')
    p_value = _number(found.p_value, '.2g')
    lines.append(
      f'{label:14}{mean:>9}  {bounds:^18}'
      f'{found.wins:8,}{found.losses:7,}{found.ties:7,}{p_value:>9}'
    )
  return '\n'.join(lines)


def _number(value: float | None, form: str = '.4f') -> str:
  return 'n/a' if value is None else format(value, form)


def _define_flags(flag_values) -> None:
  from absl import flags

  flags.DEFINE_multi_string(
    'run',
    None,
    'Run directories written by train, separated by commas or in several --run.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'data', None, 'Dataset directory written by convert.', flag_values=flag_values
  )
  flags.DEFINE_list(
    'split',
    'valid',
    'Splits to rank: train, valid or test, or several of them separated by commas.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'out',
    None,
    'Directory for the results and one report of all, with a folder for each run and split '
    'where there are several. Default: RUN/SPLIT, with a report in each.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'report',
    None,
    'HTML file for one report of all runs and splits. Default: report.html in --out.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'config_indices',
    None,
    'JSON file {"MODULE": [POSITION, ...]}: judge these configs in addition to all configs.',
    flag_values=flag_values,
  )
  for name in ('run', 'data'):
    flags.mark_flag_as_required(name, flag_values=flag_values)
  flags.register_validator(
    'split',
    lambda splits: splits and set(splits) <= set(module_lib.SPLITS),
    f'must be of {", ".join(module_lib.SPLITS)}',
    flag_values=flag_values,
  )


def _job(flag_values, beam_args: list[str]) -> int:
  results, comparisons, reports = evaluate_all(
    runs=[run for names in flag_values.run for run in names.split(',')],
    data=flag_values.data,
    splits=flag_values.split,
    out=flag_values.out,
    report=flag_values.report,
    config_indices=flag_values.config_indices,
    beam_args=beam_args,
  )
  print(describe(results, comparisons))
  for path in reports:
    print(f'wrote {path}')
  return 0


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__, passthrough=True)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
