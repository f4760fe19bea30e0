"""Measures how well trained models rank the configs of splits, beside simple rankings, and
writes a report to look at.

  python baselines/evaluate.py --run=runs/tile --data=data/tile --split=valid
  python baselines/evaluate.py --run=runs/a,runs/b --data=data/tile --split=valid,test --out=results

Prints a table and writes, for each run and split, metrics.json, per_module.csv and rankings.csv
(the configs of each module, predicted fastest first), and report.html, one file that any browser
shows. Modules without runtimes are only ranked. Several runs are compared module by module.
docs/evaluate.md tells more.
"""

from __future__ import annotations

import baselines  # noqa: F401  # Before TensorFlow, to quiet it.

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
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.metrics import config_indices as config_indices_lib
from tpu_graphs.metrics import intervals
from tpu_graphs.metrics import metrics
from tpu_graphs.metrics import module_table
from tpu_graphs.modules import module as module_lib


def evaluate(*, run: str, data: str, split: str, out: str) -> dict[str, Any]:
  """Evaluates one run on one split; see `evaluate_all`.

  Returns:
    The content of `metrics.json`: names and counts, and what `evaluation.summarize` gives;
    'listed' is None or the same of the configs that a file lists.
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
  """Evaluates runs on splits and writes results and reports; files of an earlier evaluation are
  replaced.

  Args:
    runs: run directories, of the kind of the data.
    data: dataset directory.
    splits: of 'train', 'valid' and 'test'.
    out: directory for the results, in folders by run and split where there are several; None:
      RUN/SPLIT of each.
    report: one report of all to write; None: report.html in `out`, and without `out` a report of
      each run and split beside its results.
    config_indices: JSON file of the configs that are judged beside all, see
      `tpu_graphs.metrics.config_indices`.
    beam_args: options of Apache Beam: with any, a pipeline scores the shards of the splits.
      Results are the same.

  Returns:
    The result of each run and split, the comparisons of each other run with the first one, and
    the reports' paths.

  Raises:
    InputError: a run or the data cannot be used, they do not fit each other, or a result cannot
      be written.
  """
  directory = directory_lib.open_directory(data)
  for flag, names in (('--run', runs), ('--split', splits)):
    if '' in names:
      raise errors.InputError(
        'empty name', where=flag, found=','.join(names), fix='remove the comma that is too many'
      )
    if len(set(map(os.path.abspath, names))) < len(names):
      raise errors.InputError('given twice', where=flag, found=','.join(names))
  loaded = [runs_lib.load_for(run, directory) for run in runs]
  for run in loaded:
    report_lib.history(run)  # What is damaged is told before anything is written.
  num_ops = {split: evaluation.num_ops(directory, split) for split in splits}
  indices = None
  if config_indices is not None:
    indices = config_indices_lib.parse(directory_lib.read_text(config_indices), path=config_indices)
    indices.check_modules({module_id for ops in num_ops.values() for module_id in ops})
  labels = _labels(runs)
  folders = {
    (run, split): os.path.join(run, split)
    if out is None
    else os.path.join(out, *[labels[run]] * (len(runs) > 1), *[split] * (len(splits) > 1))
    for run in runs
    for split in splits
  }
  combined = report
  if report is not None and not report.endswith('.html'):
    raise errors.InputError(
      'no name of an HTML file', where='--report', found=repr(report), expected='FILE.html'
    )
  if out is not None:
    _make_folder(out, data)
    combined = report or os.path.join(out, runs_lib.REPORT_NAME)
  for folder in (
    *folders.values(),
    *([] if combined is None else [os.path.dirname(combined) or '.']),
  ):
    _make_folder(folder, data)

  if beam_args:
    from baselines.evaluation import evaluate_beam  # Here, since Beam takes seconds to import.

    judged = evaluate_beam.judge(
      loaded, directory, splits, indices, folder=folders[runs[0], splits[0]], beam_args=beam_args
    )
  else:
    judged = _judge(loaded, directory, splits, indices)
  results = []
  for run, split, modules in judged:
    folder = folders[run.path, split]
    kept = _write_rankings(folder, modules)
    results.append(
      evaluation.Result(
        run=run,
        label=labels[run.path],
        split=split,
        folder=folder,
        modules=kept,
        num_ops=num_ops[split],
        metrics=evaluation.metrics_json(run, directory, split, kept, indices),
      )
    )
    _write_metrics(results[-1])
  comparisons = _compare(results)
  flags = {
    'run': ','.join(runs),
    'data': data,
    'split': ','.join(splits),
    'config_indices': config_indices,
    'out': out,
    'report': report,
  }
  command = [
    'tpu-graphs',
    'evaluate',
    *(f'--{name}={value}' for name, value in flags.items() if value is not None),
  ]
  reports = (
    {combined: results}
    if combined is not None
    else {os.path.join(result.folder, runs_lib.REPORT_NAME): [result] for result in results}
  )
  for path, group in reports.items():
    content = report_lib.content(group, comparisons if len(group) > 1 else [], directory, command)
    for name, text in (
      (f'{path.removesuffix(".html")}.json', report_lib.dumps(content) + '\n'),
      (path, report_lib.render(content)),
    ):
      with runs_lib.writing(name) as file:
        file.write(text)
  return results, comparisons, list(reports)


def _labels(runs: Sequence[str]) -> dict[str, str]:
  """Run -> a name for it that can be a folder's: the last of its path, or all of it where that
  tells them not apart.
  """
  names = {run: os.path.basename(os.path.normpath(run)) for run in runs}
  return (
    names
    if len(set(names.values())) == len(runs)
    else {run: run.strip('/').replace('/', '_') for run in runs}
  )


def _make_folder(folder: str, data: str) -> None:
  if not folder or os.path.commonpath(
    [os.path.abspath(folder), os.path.abspath(data)]
  ) == os.path.abspath(data):
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
  """For each run and split the modules, sorted by name, each with its `config_id`s, predicted
  fastest first.
  """
  for run in loaded:
    scorer = scoring.make_scorer(run.model, run.kind, num_extra=run.choices.num_extra)
    for split in splits:
      yield (
        run,
        split,
        (
          (evaluation.judge(module, run.kind, indices), module.config_id[module.order])
          for module in evaluation.score_modules(scorer, directory, split)
        ),
      )


def _write_rankings(
  folder: str, modules: Iterable[tuple[evaluation.Judged, np.ndarray]]
) -> list[evaluation.Judged]:
  """Writes the ranking of each module as it comes; returns what is kept of them."""
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
  names = {
    'all': runs_lib.PER_MODULE_NAME,
    **({'listed': runs_lib.LISTED_NAME} if result.metrics['listed'] else {}),
  }
  for view, name in names.items():
    header = ('opa', 'kendall_tau', *(f'top_{k}_error' for k in metrics.TOP_KS[result.run.kind]))
    with runs_lib.writing(os.path.join(result.folder, name)) as file:
      writer = csv.writer(file, lineterminator='\n')
      writer.writerow(('module_id', 'num_configs', *header))
      for verdict in result.verdicts(view):
        writer.writerow(
          (verdict.metrics.module_id, verdict.metrics.num_configs, *verdict.metrics.values.values())
        )


def _compare(results: Sequence[evaluation.Result]) -> list[evaluation.Comparison]:
  """Each run with the first one, where any module is measured."""
  comparisons = []
  for view in evaluation.VIEWS:
    for result in results:
      first = next(other for other in results if other.split == result.split)
      tables = [
        module_table.ModuleTable.of(verdict.metrics for verdict in one.verdicts(view))
        for one in (result, first)
      ]
      if result is not first and tables[0].module_ids:
        comparisons.append(
          evaluation.Comparison(
            split=result.split,
            view=view,
            label=result.label,
            base=first.label,
            paired=intervals.compare(*tables),
          )
        )
  return comparisons


def describe(
  results: Sequence[evaluation.Result], comparisons: Sequence[evaluation.Comparison] = ()
) -> str:
  """Tables of the results, to be printed."""
  blocks = [_describe_result(result, with_label=len(results) > 1) for result in results]
  blocks.extend(_describe_comparison(comparison) for comparison in comparisons)
  return '\n\n'.join(blocks)


def _describe_result(result: evaluation.Result, *, with_label: bool) -> str:
  content = result.metrics
  title = f'{content["model_name"]} on {content["collection"]}, {content["split"]}'
  lines = [f'{result.label}: {title}' if with_label else title]
  if content['model']:
    lines[0] += (
      f': {content["model"]["num_modules"]:,} modules, {content["model"]["num_configs"]:,} configs'
    )
  if content['unmeasured_modules']:
    lines.append(
      f'{content["unmeasured_modules"]:,} modules without runtimes were ranked, not judged'
    )
  if content['model']:
    lines.extend(_describe_numbers(content))
  if listed := content['listed']:
    repeated = (
      f', {listed["repeated_positions"]:,} of them repeated' if listed['repeated_positions'] else ''
    )
    lines.append(
      f'configs of {listed["path"]}: {listed["modules"]:,} modules, {listed["positions"]:,} configs'
      f'{repeated}'
    )
    if listed['model']:
      lines.extend(_describe_numbers(listed))
  return '\n'.join(lines)


def _describe_numbers(content: Mapping[str, Any]) -> list[str]:
  columns = ('random', 'default', 'oracle')
  lines = [
    f'{"":14}{"model":>9}  {"95 % interval":^18}' + ''.join(f'{name:>9}' for name in columns)
  ]
  for name, label in report_lib.metric_labels(content['model']).items():
    interval = content['intervals'].get(name, {'low': None})
    told = '' if interval['low'] is None else f'{interval["low"]:.4f} to {interval["high"]:.4f}'
    line = f'{label:14}{_number(content["model"][name]):>9}  {told:^18}' + ''.join(
      f'{_number(content[column][name]):>9}' for column in columns
    )
    undefined, total = content['model']['undefined'].get(name), content['model']['num_modules']
    lines.append(
      line + (f'  undefined for {undefined:,} of {total:,} modules' if undefined else '')
    )
  return lines


def _describe_comparison(comparison: evaluation.Comparison) -> str:
  paired = comparison.paired
  listed = ', listed configs' if comparison.view == 'listed' else ''
  lines = [
    f'{comparison.label} against {comparison.base}, {comparison.split}{listed}: {paired.num_modules:,} modules',
    f'{"":14}{"change":>9}  {"95 % interval":^18}{"better":>8}{"worse":>7}{"equal":>7}{"p":>9}',
  ]
  for name, label in report_lib.metric_labels(paired.metrics).items():
    found = paired.metrics[name]
    change = found.difference
    told = '' if change.low is None else f'{change.low:+.4f} to {change.high:+.4f}'
    lines.append(
      f'{label:14}{_number(change.mean, "+.4f"):>9}  {told:^18}{found.wins:8,}{found.losses:7,}'
      f'{found.ties:7,}{_number(found.p_value, ".2g"):>9}'
    )
  return '\n'.join(lines)


def _number(value: float | None, form: str = '.4f') -> str:
  return 'n/a' if value is None else format(value, form)


def _define_flags(flag_values) -> None:
  from absl import flags

  flags.DEFINE_multi_string(
    'run',
    None,
    'Run directories that train has written, separated by commas or in several --run.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'data', None, 'Dataset directory that convert has written.', flag_values=flag_values
  )
  flags.DEFINE_list(
    'split',
    'valid',
    'Splits to rank, of train, valid and test, separated by commas.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'out',
    None,
    'Directory for the results and one report of all; with several runs or splits, a '
    'folder for each. Default: RUN/SPLIT, with a report in each.',
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
    'JSON file {"MODULE": [POSITION, ...]}: judge these configs as well as all.',
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
