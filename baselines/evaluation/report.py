"""The report of an evaluation: one HTML file that needs nothing beside itself, drawn by its
script from data inside.

`report_assets/` holds the page. It loads nothing, and a content security policy keeps it from
doing so. Its size is bounded by the number of modules (some 100 bytes for each, run and split)
and `MAX_POINTS` configs (some 15 bytes each).
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

MAX_POINTS = 100_000  # Configs in a report.
MAX_SHOWN = 200  # Modules of a split whose configs are in it.
_WORST = 100  # Of these, how many are the worst; the others are spread evenly over the rest.
_DIGITS = 5


def metric_labels(names: Iterable[str]) -> dict[str, str]:
  """Name of each metric among `names` -> what people call it."""
  labels = {'opa': 'OPA', 'opa_pooled': 'OPA, pooled', 'kendall_tau': 'Kendall tau'}
  names = list(names)
  return {
    **{name: label for name, label in labels.items() if name in names},
    **{name: f'top-{name.split("_")[1]} error' for name in names if name.startswith('top_')},
  }


def content(
  results: Sequence[evaluation.Result],
  comparisons: Sequence[evaluation.Comparison],
  directory: directory_lib.DatasetDirectory,
  command: Sequence[str],
) -> dict[str, Any]:
  """What a report tells, fit for JSON; its lists of modules are parallel to
  `splits[...].modules.ids`.

  Args:
    results: of runs on splits, all of one data.
    comparisons: of these.
    directory: the data.
    command: that makes the report, to be shown.
  """
  kind, manifest = directory.kind, directory.manifest
  loaded = list({result.run.path: result.run for result in results}.values())
  labels = {result.run.path: result.label for result in results}
  splits = list(dict.fromkeys(result.split for result in results))
  names = ('opa', 'kendall_tau', *(f'top_{k}_error' for k in metrics.TOP_KS[kind]))
  listed = results[0].metrics['listed']
  shown = {
    split: _shown([result for result in results if result.split == split]) for split in splits
  }
  most = max(
    20,
    min(
      evaluation.MAX_POINTS,
      MAX_POINTS // max(1, sum(len(shown[result.split]) for result in results)),
    ),
  )
  return {
    'title': f'{", ".join(labels.values()) if len(loaded) > 1 else loaded[0].options.name} on {manifest.collection}',
    'version': tpu_graphs.__version__,
    'kind': kind,
    'collection': manifest.collection,
    'data': directory.path,
    'metrics': [
      {'name': name, 'label': label, 'higher': metrics.higher_is_better(name), 'help': _help(name)}
      for name, label in metric_labels(names).items()
    ],
    'headline': [
      trainer_lib.SELECTION_METRIC[kind],
      *(f'top_{k}_error' for k in metrics.TOP_KS[kind][:2]),
    ],
    'ks': evaluation.CURVE_KS,
    'views': evaluation.VIEWS if listed else evaluation.VIEWS[:1],
    'listed': {'path': listed['path']} if listed else None,
    'runs': [_run(run, labels[run.path]) for run in loaded],
    'splits': [
      _split(next(result for result in results if result.split == split)) for split in splits
    ],
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
    'commands': {
      'convert': _command(
        [
          'tpu-graphs',
          'convert',
          f'--collection={manifest.collection}',
          '--input=RAW',
          f'--output={directory.path}',
          *_flags(manifest.options),
        ]
      ),
      'evaluate': _command(command),
    },
  }


def dumps(content: Mapping[str, Any]) -> str:
  """`content` as compact JSON in ASCII."""
  return json.dumps(content, separators=(',', ':'), allow_nan=False)


def render(content: Mapping[str, Any]) -> str:
  """The page that shows `content`."""
  assets = importlib.resources.files('baselines.evaluation') / 'report_assets'
  # Names of modules are whatever a file says: nothing in the data may end the script element that
  # holds it.
  data = dumps(content).replace('<', r'\u003c').replace('>', r'\u003e').replace('&', r'\u0026')
  return string.Template((assets / 'report.html').read_text(encoding='utf-8')).substitute(
    title=html.escape(content['title']),
    data=data,
    style=(assets / 'report.css').read_text(encoding='utf-8'),
    script=(assets / 'report.js').read_text(encoding='utf-8'),
  )


def _help(name: str) -> str:
  if name == 'opa':
    return 'how often the faster of two configs is told; 1 is perfect, 0.5 is random'
  if name == 'kendall_tau':
    return 'rank correlation of scores and runtimes; 1 is perfect, 0 is random'
  k = int(name.split('_')[1])
  picked = 'the config' if k == 1 else f'the best of the {k}'
  return f'how much slower {picked} predicted fastest is than the best; 0 is perfect'


def _rounded(value: float | None) -> float | None:
  return None if value is None or math.isnan(value) else float(f'{value:.{_DIGITS}g}')


def _shown(results: Sequence[evaluation.Result]) -> list[int]:
  """Positions of the modules whose configs are shown: the worst by the first run, and some of
  the others.
  """
  modules = results[0].modules
  k = metrics.TOP_KS[results[0].run.kind][0]
  error = {
    i: module.verdicts['all'].curve[k]
    for i, module in enumerate(modules)
    if 'all' in module.verdicts
  }
  by_error = sorted(error, key=lambda i: -1.0 if math.isnan(error[i]) else error[i], reverse=True)
  rest = by_error[_WORST:]
  spread = np.linspace(0, len(rest) - 1, min(len(rest), MAX_SHOWN - _WORST)).round().astype(int)
  return sorted([*by_error[:_WORST], *(rest[i] for i in np.unique(spread))])


def _run(run: runs.Run, label: str) -> dict[str, Any]:
  config = run.config
  model, learnt = config.get('model', {}), config.get('training', {})
  flags = {
    'model': model.get('name'),
    **model.get('parts', {}),
    **learnt,
    'valid_split': config.get('valid_split'),
  }
  data = config.get('data', {}).get('path', 'DATA')
  return {
    'label': label,
    'path': run.path,
    'model': run.options.name,
    'config': config,
    'history': history(run),
    'command': _command(
      ['tpu-graphs', 'train', f'--data={data}', f'--out={run.path}', *_flags(flags)]
    ),
  }


def history(run: runs.Run) -> dict[str, Any] | None:
  """The training curves; speeds, which tell of the machine, are left out.

  Raises:
    InputError: they are damaged.
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
    judged = [
      (row[columns.index(metric)], row[0])
      for row in values
      if row[columns.index(metric)] is not None
    ]
    sign = 1 if metrics.higher_is_better(metric) else -1
    best = max(judged, key=lambda pair: sign * pair[0])[1] if judged else None
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
  grouped = programs.summarize(verdict.metrics for verdict in verdicts)
  return {
    'numbers': {
      name: numbers[name] for name in ('model', 'intervals', 'random', 'default', 'oracle')
    },
    'curve': [
      _rounded(evaluation.mean(verdict.curve[k] for verdict in verdicts))
      for k in evaluation.CURVE_KS
    ],
    'randomCurve': [
      _rounded(evaluation.mean(verdict.random[k] for verdict in verdicts))
      for k in evaluation.CURVE_KS
    ],
    'values': {
      name: [verdict and _rounded(verdict.metrics.values[name]) for verdict in found]
      for name in names
    },
    'default': [verdict and _rounded(verdict.default) for verdict in found],
    'programs': [
      {
        'name': program,
        'modules': summary['num_modules'],
        'configs': summary['num_configs'],
        'values': {name: _rounded(summary[name]) for name in names},
      }
      for program, summary in grouped.items()
    ]
    if len(grouped) < len(verdicts)
    else None,
  }


def _points(module: evaluation.Judged, most: int) -> list[list[float | None]]:
  """Slowdowns and scores of at most `most` configs and the fastest one."""
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
  """The manifest with the number of shards of each split in place of them."""
  found = dataclasses.asdict(directory.manifest)
  for split in found['splits'].values():
    split['shards'] = len(split['shards'])
  return found


def _flags(options: Mapping[str, Any]) -> list[str]:
  """Options as their flags; those without a value are left out."""
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
  """A command line in lines of its own for each few flags."""
  lines = [' '.join(map(shlex.quote, words[:2]))]
  for word in map(shlex.quote, words[2:]):
    if len(lines[-1]) + len(word) > 90:
      lines.append(f'  {word}')
    else:
      lines[-1] += f' {word}'
  return ' \\\n'.join(lines)
