"""Writes a trained model as a SavedModel, which works without tpu_graphs.

  python baselines/export_model.py --run=runs/tile --out=served/tile/1

TensorFlow Serving or a program of your own can load it. The model takes serialized records
(signature serving_default) or the arrays of one module (signature tensors). The SavedModel comes
with files that describe how to make its inputs. See docs/serving.md for details.
"""

from __future__ import annotations

# This import comes before TensorFlow, to silence the log of TensorFlow.
import baselines  # noqa: F401

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
# TensorFlow's name of the folder for files that no graph reads.
EXTRA_FOLDER = 'assets.extra'
CONFIG_NAME = 'model.json'
_MODEL_NAME = 'saved_model.pb'
_TABLES = ('opcodes.csv', 'node_features.csv', 'tile_config_features.csv')
_FIGURE = re.compile(r'opa|kendall_tau|top_\d+_error')


def export_model(*, run: str, out: str, overwrite: bool = False) -> None:
  """Writes the model of a run as a SavedModel; see `saved_model.ServedModel` for its functions.

  Args:
    run: run directory.
    out: directory to write. It appears once it is complete.
    overwrite: whether to replace an existing SavedModel.

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
    raise errors.InputError('not a directory name', where='--out', found=repr(out))
  if not tf.io.gfile.exists(out):
    return
  files = tf.io.gfile.listdir(out) if tf.io.gfile.isdir(out) else None
  if files == []:
    return
  if files is None or _MODEL_NAME not in files:
    raise errors.InputError(
      'output exists and is not a SavedModel',
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
  # At the level of info TensorFlow reports that it writes assets, although there are none.
  logger.setLevel(logging.WARNING)
  try:
    tf.saved_model.save(
      served,
      path,
      signatures=served.signatures(),
      options=tf.saved_model.SaveOptions(experimental_custom_gradients=False),
    )
  finally:
    logger.setLevel(level)
  # Operations still name their custom gradients. When TensorFlow loads the model, it would print
  # dozens of warnings about them.
  path_of_graph = os.path.join(path, _MODEL_NAME)
  with tf.io.gfile.GFile(path_of_graph, 'rb') as file:
    saved = saved_model_pb2.SavedModel.FromString(file.read())
  for meta_graph in saved.meta_graphs:
    for function in meta_graph.graph_def.library.function:
      for node in function.node_def:
        node.attr.pop('_gradient_op_type', None)
  with tf.io.gfile.GFile(path_of_graph, 'wb') as file:
    file.write(saved.SerializeToString(deterministic=True))
  # The fingerprint is a checksum of the graph before this change. A SavedModel may lack it.
  tf.io.gfile.remove(os.path.join(path, 'fingerprint.pb'))


def _extra_files(run: runs.Run) -> dict[str, str]:
  """Returns the content of the files beside the graph, by name."""
  statistics_path = os.path.join(run.path, runs.STATISTICS_NAME)
  extra = {
    runs.STATISTICS_NAME: directory_lib.read_text(statistics_path),
    manifest_lib.SCHEMA_NAME: schema.text(run.kind, num_extra=run.choices.num_extra),
    CONFIG_NAME: json.dumps(_without_path(run.config), indent=1) + '\n',
  }
  tables = importlib.resources.files('tpu_graphs').joinpath('tables')
  for name in _TABLES:
    extra[name] = tables.joinpath(name).read_text(encoding='utf-8')
  files = {CARD_NAME: card(run)}
  for name, text in extra.items():
    files[f'{EXTRA_FOLDER}/{name}'] = text
  return files


def _without_path(config: dict[str, Any]) -> dict[str, Any]:
  """Returns the content of `config.json` without the path of the data on the training machine."""
  data = {name: value for name, value in config.get('data', {}).items() if name != 'path'}
  return {**config, 'data': data}


def card(run: runs.Run) -> str:
  """Writes the model card, in Markdown."""
  data = run.config.get('data', {})
  versions = run.config.get('versions', {})
  num_extra = run.choices.num_extra
  weights = sum(variable.shape.num_elements() for variable in run.model.trainable_variables)
  trained_with = ', '.join(f'{name} {version}' for name, version in versions.items())
  rows = [
    ('model', f'{run.options.name}, {run.kind}, {weights:,} weights'),
    ('trained on', data.get('collection', 'not recorded')),
    (
      'layout padding',
      f'{run.choices.layout_padding}: fills unused columns `layout_minor_to_major_*`',
    ),
    ('extra features', ', '.join(run.choices.extra_columns) or 'none'),
    ('graphs', _graphs(data.get('options', {}))),
    ('trained with', trained_with or 'not recorded'),
    ('exported with', f'tpu_graphs {tpu_graphs.__version__}, tensorflow {tf.__version__}'),
  ]
  extra = f'`extra_feat` float32 [N, {num_extra}], ' if num_extra else ''
  if run.kind == 'tile':
    config = '`config_feat` float32 [C, 24]'
  else:
    config = '`node_config_ids` int64 [NC], `node_config_feat` int8 [C, NC, 18]'
  return '\n'.join(
    [
      f'# {run.options.name} for {data.get("collection", run.kind)}',
      '',
      'Ranks the configs of an XLA program: a score for each, lower = predicted faster. Scores are '
      'not times. They compare the configs of one program only.',
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
      '- `serving_default`: `examples`, string [B], serialized records (`tf.train.Example`) of the '
      f'form in `{EXTRA_FOLDER}/{manifest_lib.SCHEMA_NAME}` -> `scores` float32 [B, C], C of the '
      'record with most configs, filled up with infinity; `config_id` int64 [B, C], filled up with '
      '-1; `num_configs` int64 [B].',
      '- `tensors`, of one module: `opcode` int64 [N], '
      f'`feat` float32 [N, {features.NUM_NODE_FEATURES}], '
      f'`edge_index` int64 [E, 2] (consumer, operand), {extra}{config} -> `scores` float32 [C].',
      '',
      f'In `{EXTRA_FOLDER}/`: opcodes and columns by name (csv), the range of each column in the '
      f'training data (`{runs.STATISTICS_NAME}`), how the model was made (`{CONFIG_NAME}`).',
      '',
      '## Limits',
      '',
      '- The model knows only the machine and the kind of programs that its data was measured on.',
      '- Features outside the range of the training data are extrapolated without a warning.',
      '- The order is predicted: measure the first few configs before you rely on it.',
      '',
      '## Licence',
      '',
      'tpu_graphs is under the Apache License 2.0. The weights come from the data named above, '
      'whose licence applies to what is made of it.',
      '',
    ]
  )


def _graphs(options: dict[str, Any]) -> str:
  if options.get('keep_hops') is None:
    return 'whole'
  return (
    f'reduced: `keep_hops` {options["keep_hops"]}, `rest` {options["rest"]}; modules must be '
    'reduced in the same way before they are given to the model'
  )


def _quality(run: runs.Run) -> list[str]:
  """Makes a table of the metrics that evaluate has written into the run directory."""
  results = {}
  for split in module_lib.SPLITS:
    path = os.path.join(run.path, split, runs.METRICS_NAME)
    if not tf.io.gfile.exists(path):
      continue
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
  found = dict.fromkeys(name for result in results.values() for name in result['model'])
  names = [name for name in found if _FIGURE.fullmatch(name)]
  rows = [['split', 'modules', *names], ['---'] * (2 + len(names))]
  for split, result in results.items():
    model = result['model']
    figures = [_figure(model, name) for name in names]
    rows.append([split, str(model.get('num_modules', '')), *figures])
  return [
    'Means over the modules for which they are defined.',
    '',
    *(f'| {" | ".join(row)} |' for row in rows),
  ]


def _figure(model: dict[str, Any], name: str) -> str:
  value = model.get(name)
  undefined = model.get('undefined', {}).get(name)
  text = '' if value is None else f'{value:.4f}'
  return f'{text} (undefined for {undefined})' if undefined else text


def _define_flags(flag_values) -> None:
  from absl import flags

  flags.DEFINE_string('run', None, 'Run directory written by train.', flag_values=flag_values)
  flags.DEFINE_string(
    'out',
    None,
    'Directory to write. For TensorFlow Serving, its name is a version number, such as '
    'served/tile/1.',
    flag_values=flag_values,
  )
  flags.DEFINE_bool('overwrite', False, 'Replace an existing SavedModel.', flag_values=flag_values)
  for name in ('run', 'out'):
    flags.mark_flag_as_required(name, flag_values=flag_values)


def _job(flag_values, _) -> int:
  export_model(run=flag_values.run, out=flag_values.out, overwrite=flag_values.overwrite)
  print(f'{flag_values.out}: a SavedModel; {CARD_NAME} in it describes its inputs')
  return 0


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
