"""Writes a trained model as a SavedModel, which needs no tpu_graphs, for TensorFlow Serving or a
program of your own.

  python baselines/export_model.py --run=runs/tile --out=served/tile/1

It takes serialized records (signature serving_default) or the arrays of one module (signature
tensors), and holds what tells how to make them. docs/serving.md tells more.
"""

from __future__ import annotations

import baselines  # noqa: F401  # Before TensorFlow, to quiet it.

# isort: split

from collections.abc import Sequence
import importlib.resources
import json
import logging
import os
import re
import sys
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from baselines.serving import saved_model
from baselines.training import runs
import tpu_graphs
from tpu_graphs import cli
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.dataset import schema
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib

CARD_NAME = 'README.md'
EXTRA_FOLDER = 'assets.extra'  # What TensorFlow calls the place for files that no graph reads.
CONFIG_NAME = 'model.json'
_MODEL_NAME = 'saved_model.pb'
_TABLES = ('opcodes.csv', 'node_features.csv', 'tile_config_features.csv')
_FIGURE = re.compile(r'opa|kendall_tau|top_\d+_error')


def export_model(*, run: str, out: str, overwrite: bool = False) -> None:
  """Writes the model of a run as a SavedModel; see `saved_model.ServedModel` for its functions.

  Args:
    run: run directory.
    out: directory to write. It appears when it is complete.
    overwrite: replace a SavedModel that is there.

  Raises:
    InputError: the run cannot be used, or the output exists or cannot be written.
  """
  _check_output(out, overwrite)
  loaded = runs.load(run)
  served = saved_model.ServedModel(loaded.model, loaded.kind, num_extra=loaded.choices.num_extra)
  partial = f'{out.rstrip("/")}.partial'
  try:
    if tf.io.gfile.exists(partial):
      tf.io.gfile.rmtree(partial)
    _save(served, partial)
    for name, text in _extra_files(loaded).items():
      path = os.path.join(partial, name)
      tf.io.gfile.makedirs(os.path.dirname(path))
      with tf.io.gfile.GFile(path, 'w') as file:
        file.write(text)
    if tf.io.gfile.exists(out):
      tf.io.gfile.rmtree(out)
    tf.io.gfile.rename(partial, out)
  except tf.errors.OpError as error:
    raise errors.InputError('cannot write', path=out, found=' '.join(str(error).split())) from error


def _check_output(out: str, overwrite: bool) -> None:
  if not out.strip('/'):
    raise errors.InputError('no directory', where='--out', found=repr(out))
  if not tf.io.gfile.exists(out):
    return
  files = tf.io.gfile.listdir(out) if tf.io.gfile.isdir(out) else None
  if files == []:
    return
  if files is None or _MODEL_NAME not in files:
    raise errors.InputError(
      'output exists and is no SavedModel',
      path=out,
      found=min(files) if files else 'a file',
      expected='no directory or an empty one',
      fix='choose another place',
    )
  if not overwrite:
    raise errors.InputError(
      'output exists',
      path=out,
      found='a SavedModel',
      expected='no directory or an empty one',
      fix='give --overwrite to replace it',
    )


def _save(served: saved_model.ServedModel, path: str) -> None:
  logger = tf.get_logger()
  level = logger.level
  logger.setLevel(logging.WARNING)  # Else it tells that it writes assets, of which there are none.
  try:
    tf.saved_model.save(
      served,
      path,
      signatures=served.signatures(),
      options=tf.saved_model.SaveOptions(experimental_custom_gradients=False),
    )
  finally:
    logger.setLevel(level)
  # Operations still name their custom gradients, for which TensorFlow would warn dozens of times
  # when it loads them.
  path_of_graph = os.path.join(path, _MODEL_NAME)
  with tf.io.gfile.GFile(path_of_graph, 'rb') as file:
    saved = saved_model_pb2.SavedModel.FromString(file.read())
  for meta_graph in saved.meta_graphs:
    for function in meta_graph.graph_def.library.function:
      for node in function.node_def:
        node.attr.pop('_gradient_op_type', None)
  with tf.io.gfile.GFile(path_of_graph, 'wb') as file:
    file.write(saved.SerializeToString(deterministic=True))
  tf.io.gfile.remove(
    os.path.join(path, 'fingerprint.pb')
  )  # A checksum of what was there before; it may be missing.


def _extra_files(run: runs.Run) -> dict[str, str]:
  """Name -> content of the files beside the graph."""
  tables = importlib.resources.files('tpu_graphs').joinpath('tables')
  extra = {
    runs.STATISTICS_NAME: directory_lib.read_text(os.path.join(run.path, runs.STATISTICS_NAME)),
    manifest_lib.SCHEMA_NAME: schema.text(run.kind, num_extra=run.choices.num_extra),
    CONFIG_NAME: json.dumps(_without_path(run.config), indent=1) + '\n',
    **{name: tables.joinpath(name).read_text(encoding='utf-8') for name in _TABLES},
  }
  return {CARD_NAME: card(run), **{f'{EXTRA_FOLDER}/{name}': text for name, text in extra.items()}}


def _without_path(config: dict[str, Any]) -> dict[str, Any]:
  """The content of `config.json` without what only means something where the model was trained."""
  data = {name: value for name, value in config.get('data', {}).items() if name != 'path'}
  return {**config, 'data': data}


def card(run: runs.Run) -> str:
  """The model card, in Markdown."""
  data, versions = run.config.get('data', {}), run.config.get('versions', {})
  extra = f'`extra_feat` float32 [N, {run.choices.num_extra}], ' if run.choices.num_extra else ''
  weights = sum(variable.shape.num_elements() for variable in run.model.trainable_variables)
  rows = [
    ('model', f'{run.options.name}, {run.kind}, {weights:,} weights'),
    ('trained on', data.get('collection', 'not recorded')),
    (
      'layout padding',
      f'{run.choices.layout_padding}: what fills unused columns `layout_minor_to_major_*`',
    ),
    ('extra features', ', '.join(run.choices.extra_columns) or 'none'),
    ('graphs', _graphs(data.get('options', {}))),
    (
      'trained with',
      ', '.join(f'{name} {version}' for name, version in versions.items()) or 'not recorded',
    ),
    ('exported with', f'tpu_graphs {tpu_graphs.__version__}, tensorflow {tf.__version__}'),
  ]
  config = (
    '`config_feat` float32 [C, 24]'
    if run.kind == 'tile'
    else '`node_config_ids` int64 [NC], `node_config_feat` int8 [C, NC, 18]'
  )
  return '\n'.join(
    [
      f'# {run.options.name} for {data.get("collection", run.kind)}',
      '',
      'Ranks the configs of an XLA program: a score for each, lower = predicted faster. Scores are no times, and '
      'compare the configs of one program only.',
      '',
      '| | |',
      '|---|---|',
      *(f'| {name} | {value} |' for name, value in rows),
      '',
      '## Quality',
      '',
      *_quality(run),
      '',
      '## Signatures',
      '',
      '- `serving_default`: `examples`, string [B], serialized records (`tf.train.Example`) of the form in '
      f'`{EXTRA_FOLDER}/{manifest_lib.SCHEMA_NAME}` -> `scores` float32 [B, C], C that of the record with most '
      'configs, filled up with infinity; `config_id` int64 [B, C], filled up with -1; `num_configs` int64 [B].',
      f'- `tensors`, of one module: `opcode` int64 [N], `feat` float32 [N, {features.NUM_NODE_FEATURES}], `edge_index` '
      f'int64 [E, 2] (consumer, operand), {extra}{config} -> `scores` float32 [C].',
      '',
      f'In `{EXTRA_FOLDER}/`: opcodes and columns by name (csv), the range of each column in the training data '
      f'(`{runs.STATISTICS_NAME}`), how the model was made (`{CONFIG_NAME}`).',
      '',
      '## Limits',
      '',
      '- It knows the machine and the kind of programs that its data was measured on, and nothing else.',
      '- Features outside the range of the training data are extrapolated without a word.',
      '- The order is predicted: measure the first few before you rely on it.',
      '',
      '## Licence',
      '',
      'tpu_graphs is under the Apache License 2.0. The weights come from the data named above, whose licence applies '
      'to what is made of it.',
      '',
    ]
  )


def _graphs(options: dict[str, Any]) -> str:
  if options.get('keep_hops') is None:
    return 'whole'
  return (
    f'reduced: `keep_hops` {options["keep_hops"]}, `rest` {options["rest"]}; modules must be reduced in the same '
    'way before they are given to the model'
  )


def _quality(run: runs.Run) -> list[str]:
  """A table of what evaluate has written into the run directory."""
  results = {}
  for split in module_lib.SPLITS:
    path = os.path.join(run.path, split, runs.METRICS_NAME)
    if tf.io.gfile.exists(path):
      with errors.in_file(path):
        try:
          results[split] = json.loads(directory_lib.read_text(path))
          results[split]['model'] = results[split]['model'] or {}
        except (KeyError, TypeError, ValueError) as error:
          raise errors.InputError(
            'damaged metrics', found=repr(error), fix='evaluate the run again'
          ) from error
  if not results:
    return ['Not evaluated when it was exported.']
  names = [
    name
    for name in dict.fromkeys(name for result in results.values() for name in result['model'])
    if _FIGURE.fullmatch(name)
  ]

  def figure(result: dict[str, Any], name: str) -> str:
    value, undefined = result.get(name), result.get('undefined', {}).get(name)
    told = '' if value is None else f'{value:.4f}'
    return f'{told} (undefined for {undefined})' if undefined else told

  rows = [
    [
      split,
      str(result['model'].get('num_modules', '')),
      *(figure(result['model'], name) for name in names),
    ]
    for split, result in results.items()
  ]
  head = [['split', 'modules', *names], ['---'] * (2 + len(names))]
  return [
    'Means over the modules for which they are defined.',
    '',
    *(f'| {" | ".join(row)} |' for row in head + rows),
  ]


def _define_flags(flag_values) -> None:
  from absl import flags

  flags.DEFINE_string('run', None, 'Run directory that train has written.', flag_values=flag_values)
  flags.DEFINE_string(
    'out',
    None,
    'Directory to write; for TensorFlow Serving it ends in a number, the version, such '
    'as served/tile/1.',
    flag_values=flag_values,
  )
  flags.DEFINE_bool(
    'overwrite', False, 'Replace a SavedModel that is there.', flag_values=flag_values
  )
  for name in ('run', 'out'):
    flags.mark_flag_as_required(name, flag_values=flag_values)


def _job(flag_values, _) -> int:
  export_model(run=flag_values.run, out=flag_values.out, overwrite=flag_values.overwrite)
  print(f'{flag_values.out}: a SavedModel; {CARD_NAME} in it tells what it takes')
  return 0


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
