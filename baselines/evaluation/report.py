"""The report of an evaluation: one HTML file that needs no other file.

The script in the page draws the report from data in the page. `report_assets/` holds the page, its
style and its script. The page loads nothing, and a content security policy forbids it. The size of
a report is bounded by the number of modules (some 100 bytes for each module, run and split) and by
`MAX_POINTS` configs (some 15 bytes each).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import csv
import dataclasses
import html
import importlib.resources
import json
import math
import os
import shlex
import string
from typing import Any

import numpy as np
import tensorflow as tf

from baselines.evaluation import evaluation
from baselines.training import runs
from baselines.training import trainer as trainer_lib
import tpu_graphs
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.metrics import metrics
from tpu_graphs.metrics import programs

# Number of configs that a report holds at most; only `_MIN_POINTS` can make it more.
MAX_POINTS = 100_000
# Number of modules of a split whose configs are in a report: the `_WORST` worst modules, and others
# that are spread evenly over the rest.
MAX_SHOWN = 200
_WORST = 100
# A module that is shown has at least this number of configs in a report, if it has as many.
_MIN_POINTS = 20
_DIGITS = 5


def metric_labels(names: Iterable[str]) -> dict[str, str]:
  """Maps the name of each metric among `names` to its label for people."""
  names = list(names)
  labels = {'opa': 'OPA', 'opa_pooled': 'OPA, pooled', 'kendall_tau': 'Kendall tau'}
  found = {name: label for name, label in labels.items() if name in names}
  for name in names:
    if name.startswith('top_'):
      found[name] = f'top-{name.split("_")[1]} error'
  return found


def content(
  results: Sequence[evaluation.Result],
  comparisons: Sequence[evaluation.Comparison],
  directory: directory_lib.DatasetDirectory,
  command: Sequence[str],
) -> dict[str, Any]:
  """Makes the content of a report, fit for JSON.

  Its lists of modules are parallel to `splits[...].modules.ids`.

  Args:
    results: results of runs on splits of the same data.
    comparisons: comparisons of these results.
    directory: the data.
    command: the command that makes the report, to be shown.
  """
  kind, manifest = directory.kind, directory.manifest
  loaded = list({result.run.path: result.run for result in results}.values())
  labels = {result.run.path: result.label for result in results}
  results_of: dict[str, list[evaluation.Result]] = {}
  for result in results:
    results_of.setdefault(result.split, []).append(result)
  splits = list(results_of)
  top_names = [f'top_{k}_error' for k in metrics.TOP_KS[kind]]
  names = ('opa', 'kendall_tau', *top_names)
  listed = results[0].metrics['listed']

  shown = {split: _shown(of_split) for split, of_split in results_of.items()}
  num_shown = sum(len(shown[result.split]) for result in results)
  fitting = min(evaluation.MAX_POINTS, MAX_POINTS // max(1, num_shown))
  most = max(_MIN_POINTS, fitting)

  subject = ', '.join(labels.values()) if len(loaded) > 1 else loaded[0].options.name
  convert = [
    'tpu-graphs',
    'convert',
    f'--collection={manifest.collection}',
    '--input=RAW',
    f'--output={directory.path}',
    *_flags(manifest.options),
  ]
  return {
    'title': f'{subject} on {manifest.collection}',
    'version': tpu_graphs.__version__,
    'kind': kind,
    'collection': manifest.collection,
    'data': directory.path,
    'metrics': [
      {'name': name, 'label': label, 'higher': metrics.higher_is_better(name), 'help': _help(name)}
      for name, label in metric_labels(names).items()
    ],
    'headline': [trainer_lib.SELECTION_METRIC[kind], *top_names[:2]],
    'ks': evaluation.CURVE_KS,
    'views': evaluation.VIEWS if listed else evaluation.VIEWS[:1],
    'listed': {'path': listed['path']} if listed else None,
    'runs': [_run(run, labels[run.path]) for run in loaded],
    'splits': [_split(of_split[0]) for of_split in results_of.values()],
    'results': [
      {
        'run': loaded.index(result.run),
        'split': splits.index(result.split),
        **_result(result, names, shown[result.split], most),
      }
      for result in results
    ],
    'comparisons': [_comparison(comparison) for comparison in comparisons],
    'manifest': _manifest(directory),
    'commands': {'convert': _command(convert), 'evaluate': _command(command)},
  }


def dumps(content: Mapping[str, Any]) -> str:
  """Formats the content of a report as compact JSON in ASCII."""
  return json.dumps(content, separators=(',', ':'), allow_nan=False)


def render(content: Mapping[str, Any]) -> str:
  """Renders the page that shows the content of a report."""
  assets = importlib.resources.files('baselines.evaluation') / 'report_assets'
  # The name of a module can be any text, and must not end the script element that holds the data.
  data = dumps(content).replace('<', r'\u003c').replace('>', r'\u003e').replace('&', r'\u0026')
  return string.Template((assets / 'report.html').read_text(encoding='utf-8')).substitute(
    title=html.escape(content['title']),
    data=data,
    style=(assets / 'report.css').read_text(encoding='utf-8'),
    script=(assets / 'report.js').read_text(encoding='utf-8'),
  )


def _help(name: str) -> str:
  if name == 'opa':
    return 'how often the faster of two configs is predicted faster; 1 is perfect, 0.5 is random'
  if name == 'kendall_tau':
    return 'rank correlation of scores and runtimes; 1 is perfect, 0 is random'
  k = int(name.split('_')[1])
  picked = 'the config' if k == 1 else f'the best of the {k}'
  return f'how much slower {picked} predicted fastest is than the best; 0 is perfect'


def _rounded(value: float | None) -> float | None:
  return None if value is None or math.isnan(value) else float(f'{value:.{_DIGITS}g}')


def _shown(results: Sequence[evaluation.Result]) -> list[int]:
  """Returns the positions of the modules whose configs are shown.

  These are the worst modules in the first of the results, and some of the others.
  """
  modules = results[0].modules
  k = metrics.TOP_KS[results[0].run.kind][0]
  error = {
    i: module.verdicts['all'].curve[k]
    for i, module in enumerate(modules)
    if 'all' in module.verdicts
  }
  by_error = sorted(error, key=lambda i: -1.0 if math.isnan(error[i]) else error[i], reverse=True)
  worst, rest = by_error[:_WORST], by_error[_WORST:]
  spread = np.linspace(0, len(rest) - 1, min(len(rest), MAX_SHOWN - _WORST)).round().astype(int)
  others = [rest[i] for i in np.unique(spread)]
  return sorted(worst + others)


def _run(run: runs.Run, label: str) -> dict[str, Any]:
  config = run.config
  model = config.get('model', {})
  flags = {
    'model': model.get('name'),
    **model.get('parts', {}),
    **config.get('training', {}),
    'valid_split': config.get('valid_split'),
  }
  data = config.get('data', {}).get('path', 'DATA')
  command = ['tpu-graphs', 'train', f'--data={data}', f'--out={run.path}', *_flags(flags)]
  return {
    'label': label,
    'path': run.path,
    'model': run.options.name,
    'config': config,
    'history': history(run),
    'command': _command(command),
  }


def history(run: runs.Run) -> dict[str, Any] | None:
  """Reads the training curves; None if the run has none.

  Speeds are left out, since they depend on the machine.

  Raises:
    InputError: the curves are damaged.
  """
  path = os.path.join(run.path, runs.HISTORY_NAME)
  if not tf.io.gfile.exists(path):
    return None
  try:
    header, *rows = csv.reader(directory_lib.read_text(path).splitlines())
    kept = [i for i, name in enumerate(header) if not name.endswith('_per_second')]
    columns = [header[i] for i in kept]
    values = [[_rounded(float(row[i])) if row[i] else None for i in kept] for row in rows]
  except (csv.Error, IndexError, ValueError) as error:
    raise errors.InputError(
      'damaged history',
      path=path,
      found=error,
      expected='a row of numbers for each epoch',
      fix='copy or train the run again, or remove the file',
    ) from error
  metric = f'{run.config.get("valid_split")}_{run.config.get("training", {}).get("metric")}'
  best = None
  if metric in columns:
    column = columns.index(metric)
    judged = [row for row in values if row[column] is not None]
    sign = 1 if metrics.higher_is_better(metric) else -1
    if judged:
      best = max(judged, key=lambda row: sign * row[column])[0]
  return {'columns': columns, 'rows': values, 'best': best}


def _split(result: evaluation.Result) -> dict[str, Any]:
  ids = [module.module_id for module in result.modules]
  return {
    'name': result.split,
    'modules': {
      'ids': ids,
      'ops': [result.num_ops[name] for name in ids],
      'configs': [module.num_configs for module in result.modules],
    },
  }


def _result(
  result: evaluation.Result, names: Sequence[str], shown: Sequence[int], most: int
) -> dict[str, Any]:
  numbers = {'all': result.metrics, 'listed': result.metrics['listed'] or {}}
  return {
    'modules': len(result.modules),
    'unmeasured': result.metrics['unmeasured_modules'],
    'repeated': numbers['listed'].get('repeated_positions', 0),
    'views': {
      view: _view(result, view, numbers[view], names)
      for view in evaluation.VIEWS
      if numbers[view].get('model')
    },
    'points': {i: _points(result.modules[i], most) for i in shown},
  }


def _view(
  result: evaluation.Result, view: str, numbers: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
  found = [module.verdicts.get(view) for module in result.modules]
  verdicts = [verdict for verdict in found if verdict is not None]
  values = {}
  for name in names:
    values[name] = [
      None if verdict is None else _rounded(verdict.metrics.values[name]) for verdict in found
    ]
  grouped = programs.summarize(verdict.metrics for verdict in verdicts)
  # Where each module is a program of its own, programs show nothing that modules do not.
  shown_programs = None
  if len(grouped) < len(verdicts):
    shown_programs = [
      {
        'name': program,
        'modules': summary['num_modules'],
        'configs': summary['num_configs'],
        'values': {name: _rounded(summary[name]) for name in names},
      }
      for program, summary in grouped.items()
    ]
  return {
    'numbers': {
      name: numbers[name] for name in ('model', 'intervals', 'random', 'default', 'oracle')
    },
    'curve': _mean_curve([verdict.curve for verdict in verdicts]),
    'randomCurve': _mean_curve([verdict.random for verdict in verdicts]),
    'values': values,
    'default': [None if verdict is None else _rounded(verdict.default) for verdict in found],
    'programs': shown_programs,
  }


def _mean_curve(curves: Sequence[Mapping[int, float]]) -> list[float | None]:
  return [_rounded(evaluation.mean(curve[k] for curve in curves)) for k in evaluation.CURVE_KS]


def _points(module: evaluation.Judged, most: int) -> list[list[float | None]]:
  """Returns slowdowns and scores of at most `most` configs and of the fastest config."""
  chosen = np.linspace(0, module.score.size - 1, min(module.score.size, most)).round().astype(int)
  chosen = np.union1d(chosen, np.argmin(module.slowdown))
  return [
    [_rounded(float(value)) for value in values[chosen]]
    for values in (module.slowdown, module.score)
  ]


def _comparison(comparison: evaluation.Comparison) -> dict[str, Any]:
  paired = comparison.paired
  return {
    'split': comparison.split,
    'view': comparison.view,
    'label': comparison.label,
    'base': comparison.base,
    'modules': paired.num_modules,
    'rows': [
      {
        'metric': name,
        'better': found.wins,
        'worse': found.losses,
        'equal': found.ties,
        'p': found.p_value,
        **{part: getattr(found.difference, part) for part in ('mean', 'low', 'high')},
      }
      for name, found in paired.metrics.items()
    ],
  }


def _manifest(directory: directory_lib.DatasetDirectory) -> dict[str, Any]:
  """Returns the manifest with the number of shards of each split in place of the shards."""
  found = dataclasses.asdict(directory.manifest)
  for split in found['splits'].values():
    split['shards'] = len(split['shards'])
  return found


def _flags(options: Mapping[str, Any]) -> list[str]:
  """Formats options as flags; options without a value are left out."""
  flags = []
  for name, value in options.items():
    if name == 'extra_features':
      flags.extend(f'--{name}={extra["source"]}' for extra in value)
    elif isinstance(value, bool):
      flags.append(f'--{"" if value else "no"}{name}')
    elif value is not None:
      flags.append(f'--{name}={value}')
  return flags


def _command(words: Sequence[str]) -> str:
  """Formats a command, broken into lines of at most about 90 characters."""
  lines = [' '.join(map(shlex.quote, words[:2]))]
  for word in map(shlex.quote, words[2:]):
    if len(lines[-1]) + len(word) > 90:
      lines.append(f'  {word}')
    else:
      lines[-1] += f' {word}'
  return ' \\\n'.join(lines)
