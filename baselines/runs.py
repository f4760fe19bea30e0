"""Run directories: all that a trained model needs, without its training data.

  RUN/config.json      what was trained on what, and how
      statistics.json  of the train split, with which the model normalises features
      history.csv      a row per epoch
      checkpoint/      weights of the epoch that was best on the validation split
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import json
import os
import re
from typing import Any

import tensorflow as tf

from baselines import models
from baselines.models import parts
from tpu_graphs import datasets
from tpu_graphs import errors
from tpu_graphs import feature_choices
from tpu_graphs import manifest as manifest_lib
from tpu_graphs import statistics as statistics_lib

FORMAT_VERSION = 1
CONFIG_NAME = 'config.json'
HISTORY_NAME = 'history.csv'
STATISTICS_NAME = 'statistics.json'
_CHECKPOINT = 'checkpoint'
# Results of an evaluation, which may lie in a run's directory by the name of the split.
METRICS_NAME = 'metrics.json'
PER_MODULE_NAME = 'per_module.csv'
RANKINGS_NAME = 'rankings.csv'
_OWN = re.compile(
    rf'({"|".join(map(re.escape, (CONFIG_NAME, HISTORY_NAME, STATISTICS_NAME)))})|\..*\.partial|{_CHECKPOINT}/.*|'
    rf'({"|".join(manifest_lib.SPLITS)})/({"|".join(map(re.escape, (METRICS_NAME, PER_MODULE_NAME, RANKINGS_NAME)))})')


@dataclasses.dataclass(frozen=True)
class Run:
  """A trained model as a run directory holds it.

  Attributes:
    path: of the directory.
    config: the content of `config.json`.
    options: what the model was built from.
    choices: how the features of ops were made that the model knows. Functions are not loaded yet.
    model: see `baselines.models`.
  """
  path: str
  config: Mapping[str, Any]
  options: models.ModelOptions
  choices: feature_choices.FeatureChoices
  model: tf.keras.Model

  @property
  def kind(self) -> str:
    return self.options.kind


class Writer:
  """Writes a run directory."""

  def __init__(self, path: str, *, config: Mapping[str, Any], options: models.ModelOptions, model: tf.keras.Model,
               statistics: Mapping[str, Any], overwrite: bool,
               choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED):
    """Starts a run directory.

    Args:
      path: of the directory.
      config: what else `config.json` shall tell, by name.
      options: what `model` was built from.
      model: whose weights `save` saves.
      statistics: the content of `statistics.json`.
      overwrite: remove a run that is there instead of refusing.
      choices: those of the data.

    Raises:
      InputError: the directory holds a run, or something else.
    """
    if not path:
      raise errors.InputError('empty path', where='--out')
    _clear(path, overwrite)
    try:
      tf.io.gfile.makedirs(path)
    except tf.errors.OpError as error:
      raise errors.InputError('cannot write', path=path, found=' '.join(str(error).split())) from error
    self._path = path
    self._history: list[dict[str, Any]] = []
    self._manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), os.path.join(path, _CHECKPOINT),
                                               max_to_keep=1)
    content = {'format_version': FORMAT_VERSION, 'model': dataclasses.asdict(options),
               'feature_choices': choices.to_json(), **config}
    self._write(CONFIG_NAME, json.dumps(content, indent=1) + '\n')
    self._write(STATISTICS_NAME, json.dumps(statistics, indent=1) + '\n')

  def _write(self, name: str, text: str) -> None:
    temporary = os.path.join(self._path, f'.{name}.partial')
    with tf.io.gfile.GFile(temporary, 'w') as file:
      file.write(text)
    tf.io.gfile.rename(temporary, os.path.join(self._path, name), overwrite=True)

  def add_epoch(self, row: Mapping[str, Any]) -> None:
    """Appends a row to `history.csv`; None becomes an empty cell."""
    self._history.append(dict(row))
    lines = [','.join(self._history[0])]
    lines += [','.join(f'{v:.6g}' if isinstance(v, float) else '' if v is None else str(v) for v in row.values())
              for row in self._history]
    self._write(HISTORY_NAME, '\n'.join(lines) + '\n')

  def save(self, epoch: int) -> None:
    """Saves the weights as those of the best epoch so far."""
    self._manager.save(checkpoint_number=epoch)


def _clear(path: str, overwrite: bool) -> None:
  """Empties a directory that holds a run and nothing else, if that is wanted."""
  files = [os.path.relpath(os.path.join(folder, name), path).replace(os.sep, '/')
           for folder, _, names in tf.io.gfile.walk(path) for name in names]
  if not files:
    return
  foreign = [name for name in files if not _OWN.fullmatch(name)]
  if foreign or CONFIG_NAME not in files:
    raise errors.InputError('output exists and is no run', path=path, found=min(foreign or files),
                            expected='no directory or an empty one', fix='choose another place')
  with errors.in_file(os.path.join(path, CONFIG_NAME)):
    _parse(datasets.read_text(os.path.join(path, CONFIG_NAME)))
  # A run that ended before its first epoch is worth nothing to anybody.
  if not overwrite and HISTORY_NAME in files:
    raise errors.InputError('output exists', path=path, found='a run', expected='no directory or an empty one',
                            fix='give --overwrite to replace it')
  tf.io.gfile.rmtree(path)


def load(path: str) -> Run:
  """Loads a run directory.

  Raises:
    InputError: it is no run, of another format version, without a checkpoint, or damaged.
  """
  config_path = os.path.join(path, CONFIG_NAME)
  if not tf.io.gfile.exists(config_path):
    raise errors.InputError('no run', path=path, found=f'no {CONFIG_NAME}',
                            expected='a directory that train has written')
  with errors.in_file(config_path):
    config, options, choices = _parse(datasets.read_text(config_path))
  checkpoint = tf.train.latest_checkpoint(os.path.join(path, _CHECKPOINT))
  if checkpoint is None:
    raise errors.InputError('run without a checkpoint', path=path, fix='let train finish at least one epoch')
  num_extra = choices.num_extra
  statistics = datasets.read_statistics(os.path.join(path, STATISTICS_NAME), num_extra=num_extra)
  try:
    model = models.build(options, statistics_lib.parse(statistics, num_extra=num_extra))
  except KeyError as error:
    raise errors.InputError('statistics of a feature missing', path=os.path.join(path, STATISTICS_NAME),
                            expected=error, fix='copy or train the run again') from error
  try:
    # The flag of expect_partial only keeps TensorFlow from printing what the assertion finds.
    tf.train.Checkpoint(model=model).restore(checkpoint).expect_partial().assert_consumed()
  # Other weights, other shapes, damaged files; TensorFlow leaves some of the last as IndexError.
  except (AssertionError, IndexError, ValueError, tf.errors.OpError) as error:
    raise errors.InputError('damaged checkpoint', path=checkpoint, found=' '.join(str(error).split())[:200],
                            expected=f'the weights of the model in {CONFIG_NAME}', fix='copy or train the run again'
                            ) from error
  return Run(path, config, options, choices, model)


def _parse(text: str) -> tuple[dict[str, Any], models.ModelOptions, feature_choices.FeatureChoices]:
  """The content of `config.json`, and the options and choices in it."""
  try:
    config = json.loads(text)
    if config['format_version'] != FORMAT_VERSION:
      raise errors.InputError('run of another format', found=config['format_version'], expected=FORMAT_VERSION,
                              fix='train again with this version')
    stored = config['model']
    options = models.ModelOptions(stored['name'], stored['kind'], parts.PartOptions(**stored['parts']))
    # Runs of earlier versions know the published form only.
    return config, options, feature_choices.FeatureChoices.from_json(config.get('feature_choices', {}))
  except errors.InputError:
    raise
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise errors.InputError('damaged config', found=repr(error), fix='copy or train the run again') from error
