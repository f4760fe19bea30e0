"""Measures how well a trained model ranks the configs of a split, beside a random ranking.

  python baselines/evaluate.py --run=runs/tile --data=data/tile --split=valid --out=runs/tile/valid

Prints a table and writes metrics.json, per_module.csv and rankings.csv (the configs of each module, predicted fastest
first). Modules without runtimes are only ranked.
"""

from __future__ import annotations

import baselines  # noqa: F401  # Before TensorFlow, to quiet it.

from collections.abc import Iterable, Mapping, Sequence
import csv
import dataclasses
import io
import json
import os
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from baselines import runs
from baselines import scoring
from tpu_graphs import cli
from tpu_graphs import datasets
from tpu_graphs import errors
from tpu_graphs import manifest as manifest_lib
from tpu_graphs import metrics

_RANDOM_RANKINGS = 20


def evaluate(*, run: str, data: str, split: str, out: str, seed: int = 0) -> dict[str, Any]:
  """Evaluates a run on a split and writes the result.

  Args:
    run: run directory.
    data: dataset directory.
    split: 'train', 'valid' or 'test'.
    out: directory for the result; files of an earlier result are replaced.
    seed: of the random rankings.

  Returns:
    The content of `metrics.json`: 'model' and 'random' hold what `metrics.summarize` gives, None if nothing in the
    split is measured.

  Raises:
    InputError: run or data cannot be used, or do not fit each other.
  """
  loaded = runs.load(run)
  directory = datasets.open_directory(data)
  if directory.kind != loaded.kind:
    raise errors.InputError('run of the other kind', path=run, found=loaded.kind,
                            expected=f'{directory.kind}, as {data}')
  if directory.manifest.choices != loaded.choices:
    raise errors.InputError('feature choices differ', path=data, found=directory.manifest.choices,
                            expected=f'{loaded.choices}, as {run}',
                            fix='convert the data with the --layout_padding and --extra_features of the run')
  if not out or os.path.commonpath([os.path.abspath(out), os.path.abspath(data)]) == os.path.abspath(data):
    raise errors.InputError('result cannot lie in the data', where='--out', found=repr(out),
                            expected=f'a directory outside {data}')
  try:
    tf.io.gfile.makedirs(out)
  except tf.errors.OpError as error:
    raise errors.InputError('cannot write', path=out, found=' '.join(str(error).split())) from error
  scorer = scoring.make_scorer(loaded.model, loaded.kind, num_extra=loaded.choices.num_extra)
  scored = list(scoring.score_split(scorer, directory, split))
  ks = metrics.TOP_KS[directory.kind]
  measured = [module for module in scored if module.is_measured]
  per_module = [scoring.judge(module, ks) for module in measured]
  result = {
      'run': run, 'data': data, 'split': split, 'collection': directory.manifest.collection,
      'model_name': loaded.options.name, 'unmeasured_modules': len(scored) - len(measured),
      'model': metrics.summarize(per_module) if measured else None,
      'random': _random(measured, ks, seed) if measured else None}
  _write(out, runs.METRICS_NAME, json.dumps(result, indent=1) + '\n')
  _write(out, runs.PER_MODULE_NAME, _per_module_csv(per_module, ks))
  _write(out, runs.RANKINGS_NAME, _csv(('module_id', 'config_ids'), (
      (module.module_id, ';'.join(map(str, module.config_id[module.order]))) for module in scored)))
  return result


def _random(modules: Sequence[scoring.ScoredModule], ks: Sequence[int], seed: int) -> dict[str, Any]:
  """The metrics of rankings drawn at random, the mean over several draws."""
  rng = np.random.default_rng(seed)
  draws = [metrics.summarize(scoring.judge(dataclasses.replace(module, score=rng.random(module.score.size)), ks)
                             for module in modules)
           for _ in range(_RANDOM_RANKINGS)]
  return {name: draws[0][name] if not isinstance(value, float) else float(np.mean([draw[name] for draw in draws]))
          for name, value in draws[0].items()}


def _per_module_csv(per_module: Sequence[metrics.ModuleMetrics], ks: Sequence[int]) -> str:
  header = ('module_id', 'num_configs', 'opa', 'kendall_tau', *(f'top_{k}_error' for k in ks))
  return _csv(header, ((module.module_id, module.num_configs, module.opa, module.kendall_tau,
                        *(module.top_k_error[k] for k in ks)) for module in per_module))


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
  text = io.StringIO()
  writer = csv.writer(text, lineterminator='\n')
  writer.writerow(header)
  writer.writerows(rows)
  return text.getvalue()


def _write(directory: str, name: str, text: str) -> None:
  with tf.io.gfile.GFile(os.path.join(directory, name), 'w') as file:
    file.write(text)


def describe(result: Mapping[str, Any]) -> str:
  """A table of the result, to be printed."""
  lines = [f'{result["model_name"]} on {result["collection"]}, {result["split"]}']
  if result['unmeasured_modules']:
    lines.append(f'{result["unmeasured_modules"]} modules without runtimes were ranked, not judged')
  model, random = result['model'], result['random']
  if model is None:
    return '\n'.join(lines)
  lines[0] += f': {model["num_modules"]:,} modules, {model["num_configs"]:,} configs'
  lines.append(f'{"":14}{"model":>10}{"random":>10}')
  labels = {'opa': 'OPA', 'opa_pooled': 'OPA, pooled', 'kendall_tau': 'Kendall tau',
            **{name: f'top-{name.split("_")[1]} error' for name in model if name.startswith('top_')}}
  for name, label in labels.items():
    cells = ''.join(f'{"n/a" if value[name] is None else format(value[name], ".4f"):>10}' for value in (model, random))
    undefined = model['undefined'].get(name)
    lines.append(f'{label:14}{cells}' + (f'  undefined for {undefined} modules' if undefined else ''))
  return '\n'.join(lines)


def _define_flags(flag_values) -> None:
  from absl import flags
  flags.DEFINE_string('run', None, 'Run directory that train has written.', flag_values=flag_values)
  flags.DEFINE_string('data', None, 'Dataset directory that convert has written.', flag_values=flag_values)
  flags.DEFINE_enum('split', 'valid', manifest_lib.SPLITS, 'Split to rank.', flag_values=flag_values)
  flags.DEFINE_string('out', None, 'Directory for the result. Default: RUN/SPLIT.', flag_values=flag_values)
  flags.DEFINE_integer('seed', 0, 'Of the random rankings that the model is compared with.', lower_bound=0,
                       flag_values=flag_values)
  for name in ('run', 'data'):
    flags.mark_flag_as_required(name, flag_values=flag_values)


def _job(flag_values, _) -> int:
  out = flag_values.out or os.path.join(flag_values.run, flag_values.split)
  result = evaluate(run=flag_values.run, data=flag_values.data, split=flag_values.split, out=out, seed=flag_values.seed)
  print(describe(result))
  print(f'wrote {out}')
  return 0


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
