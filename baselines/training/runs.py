"""Run directories: all that a trained model needs, without its training data.

RUN/config.json      the model, its data, and the options of the training
    statistics.json  statistics of the train split, with which the model normalises features
    history.csv      a row per epoch
    checkpoint/      weights of the epoch that was best on the validation split
    tensorboard/     the curves of the history for TensorBoard
    state/           states to resume from, while training is not finished; see `checkpoints`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import fcntl
import json
import os
import re
from typing import Any
import weakref

import tensorflow as tf

from baselines import models
from baselines.models import parts
from baselines.training import checkpoints
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import statistics as statistics_lib
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import module as module_lib

FORMAT_VERSION = 1
CONFIG_NAME = 'config.json'
HISTORY_NAME = 'history.csv'
STATISTICS_NAME = 'statistics.json'
STATE_NAME = 'state'
TENSORBOARD_NAME = 'tensorboard'
_CHECKPOINT = 'checkpoint'
# These values of `config.json` may differ between an interrupted command and the one that resumes.
_FREE = re.compile(r'format_version|versions\..*|data\.path')
# Results of an evaluation, which may lie in a run directory in a folder named after the split.
METRICS_NAME = 'metrics.json'
PER_MODULE_NAME = 'per_module.csv'
RANKINGS_NAME = 'rankings.csv'
# The same columns as in PER_MODULE_NAME, for the configs that --config_indices lists.
LISTED_NAME = 'per_module_listed.csv'
REPORT_NAME = 'report.html'
_REPORT_DATA_NAME = 'report.json'
_RESULTS = (
  METRICS_NAME,
  PER_MODULE_NAME,
  RANKINGS_NAME,
  LISTED_NAME,
  REPORT_NAME,
  _REPORT_DATA_NAME,
)
# The options of convert that reduce the graphs of a run's data.
_REDUCTION = ('keep_hops', 'rest')
# The paths, relative to a run directory, of the files that belong to a run.
_OWN_FILES = '|'.join(map(re.escape, (CONFIG_NAME, HISTORY_NAME, STATISTICS_NAME)))
_OWN_RESULTS = '|'.join(map(re.escape, _RESULTS))
_OWN = re.compile(
  rf'({_OWN_FILES})|\..*\.partial|'
  rf'({_CHECKPOINT}|{STATE_NAME}|{TENSORBOARD_NAME})/.*|'
  rf'({"|".join(module_lib.SPLITS)})/({_OWN_RESULTS}|\..*\.partial)'
)


@dataclasses.dataclass(frozen=True)
class Run:
  """A trained model, loaded from a run directory.

  Attributes:
    path: path of the directory.
    config: content of `config.json`.
    options: options that the model was built from.
    choices: choices with which the op features of the model's data were made. Functions are not
      loaded yet.
    model: the model with its weights, see `baselines.models`.
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
  """Writer of a run directory, which it locks until its context is left or it is deleted."""

  def __init__(
    self,
    path: str,
    *,
    config: Mapping[str, Any],
    options: models.ModelOptions,
    model: tf.keras.Model,
    statistics: Mapping[str, Any],
    overwrite: bool,
    choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED,
    resumes: bool = False,
    is_chief: bool = True,
  ):
    """Starts a run directory, or resumes one.

    Args:
      path: path of the directory.
      config: further content of `config.json`, by name.
      options: options that `model` was built from.
      model: the model whose weights `save` saves.
      statistics: content of `statistics.json`.
      overwrite: whether to remove an existing run instead of refusing.
      choices: feature choices of the data.
      resumes: whether to resume the interrupted run in the directory.
      is_chief: whether to write; the other workers of a cluster only check.

    Raises:
      InputError: the directory holds a run or something else, another process writes it, or the
        interrupted run had other options.
    """
    if not path:
      raise errors.InputError('empty path', where='--out')
    self._path = path
    self._is_chief = is_chief
    self._unlock: Callable[[], Any] = lambda: None
    content = {
      'format_version': FORMAT_VERSION,
      'model': dataclasses.asdict(options),
      'feature_choices': choices.to_json(),
      **config,
    }
    with contextlib.ExitStack() as stack:
      stack.push(self)
      self._take_lock()
      if resumes:
        _check_same(path, content)
      elif is_chief:
        _clear(path, overwrite)
      with refusal_explained(path):
        tf.io.gfile.makedirs(path)
      # The directory may be new or have been replaced, so the first lock may not hold.
      self._take_lock()
      self._manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(model=model), os.path.join(path, _CHECKPOINT), max_to_keep=1
      )
      self._write(CONFIG_NAME, json.dumps(content, indent=1) + '\n')
      self._write(STATISTICS_NAME, json.dumps(statistics, indent=1) + '\n')
      stack.pop_all()

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *_: Any) -> None:
    self._unlock()

  def _take_lock(self) -> None:
    """Locks the directory if it exists.

    A remote directory is not locked, nor is a directory on a file system without locks.
    """
    self._unlock()
    if not self._is_chief or not os.path.isdir(self._path):
      return
    try:
      file = os.open(self._path, os.O_RDONLY)
    except OSError:
      # A later attempt to write there fails and reports the reason.
      return
    self._unlock = weakref.finalize(self, os.close, file)
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise errors.InputError(
        'run in use',
        path=self._path,
        found='another process that trains it',
        fix='stop that process, or choose another place',
      ) from error
    except OSError:
      pass

  def _write(self, name: str, text: str) -> None:
    if not self._is_chief:
      return
    with writing(os.path.join(self._path, name)) as file:
      file.write(text)

  def write_history(self, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes `history.csv` with these rows, which have the same columns."""
    lines = [','.join(rows[0])]
    for row in rows:
      lines.append(','.join(_cell(value) for value in row.values()))
    self._write(HISTORY_NAME, '\n'.join(lines) + '\n')

  def save(self, epoch: int) -> None:
    """Saves the present weights as the weights of the best epoch so far."""
    if self._is_chief:
      with refusal_explained(self._path):
        self._manager.save(checkpoint_number=epoch)

  def check_best(self) -> None:
    """Checks that the weights of a best epoch exist.

    Raises:
      InputError: they do not exist.
    """
    _best(self._path, fix='give --overwrite to train from the start')

  def summary(self) -> tf.summary.SummaryWriter:
    """Makes a writer of curves for TensorBoard."""
    if not self._is_chief:
      return tf.summary.create_noop_writer()
    return tf.summary.create_file_writer(os.path.join(self._path, TENSORBOARD_NAME))


def _cell(value: Any) -> str:
  """Formats a value as a cell of a CSV file; None becomes an empty cell."""
  if isinstance(value, float):
    return f'{value:.6g}'
  return '' if value is None else str(value)


@contextlib.contextmanager
def refusal_explained(path: str) -> Iterator[None]:
  """Turns the error that TensorFlow raises where `path` cannot be written into an `InputError`."""
  try:
    yield
  except tf.errors.OpError as error:
    raise errors.InputError(
      'cannot write', path=path, found=' '.join(str(error).split())
    ) from error


@contextlib.contextmanager
def writing(path: str) -> Iterator[tf.io.gfile.GFile]:
  """Opens a text file for writing; the file appears under its name once it is complete.

  Raises:
    InputError: the file cannot be written.
  """
  temporary = os.path.join(os.path.dirname(path), f'.{os.path.basename(path)}.partial')
  try:
    with refusal_explained(path):
      with tf.io.gfile.GFile(temporary, 'w') as file:
        yield file
      tf.io.gfile.rename(temporary, path, overwrite=True)
  except BaseException:
    with contextlib.suppress(tf.errors.OpError):
      tf.io.gfile.remove(temporary)
    raise


def is_interrupted(path: str) -> bool:
  """Returns whether a directory holds a run whose training can be resumed."""
  states = checkpoints.stored(os.path.join(path, STATE_NAME))
  return bool(states) and tf.io.gfile.exists(os.path.join(path, CONFIG_NAME))


def _check_same(path: str, content: Mapping[str, Any]) -> None:
  """Refuses to resume a run with options other than the options it was started with."""
  config_path = os.path.join(path, CONFIG_NAME)
  with errors.in_file(config_path):
    stored, _, _ = _parse(directory_lib.read_text(config_path))
  before = dict(_flat(stored))
  now = dict(_flat(json.loads(json.dumps(content))))
  different = [
    name
    for name in sorted(before.keys() | now.keys())
    if not _FREE.fullmatch(name) and before.get(name) != now.get(name)
  ]
  if different:
    raise errors.InputError(
      'interrupted run had other options',
      path=path,
      found=', '.join(f'{name}={now.get(name)}' for name in different),
      expected=', '.join(f'{name}={before.get(name)}' for name in different),
      fix='repeat the command as it was, or give --overwrite to train from the start',
    )


def _flat(content: Any, prefix: str = '') -> Iterator[tuple[str, Any]]:
  """Yields the values of nested mappings with their names, joined by dots."""
  if not isinstance(content, dict):
    yield prefix, content
    return
  for name, value in content.items():
    yield from _flat(value, f'{prefix}.{name}' if prefix else name)


def _clear(path: str, overwrite: bool) -> None:
  """Removes a directory that holds a run and nothing else, if `overwrite` is given.

  A run without epochs and states is removed without `overwrite` too.
  """
  files = [
    os.path.relpath(os.path.join(folder, name), path).replace(os.sep, '/')
    for folder, _, names in tf.io.gfile.walk(path)
    for name in names
  ]
  if not files:
    return
  foreign = [name for name in files if not _OWN.fullmatch(name)]
  if foreign or CONFIG_NAME not in files:
    raise errors.InputError(
      'output exists and is not a run',
      path=path,
      found=min(foreign or files),
      expected='no directory or an empty one',
      fix='choose another place',
    )
  try:
    _parse(directory_lib.read_text(os.path.join(path, CONFIG_NAME)))
  except errors.InputError as error:
    raise errors.InputError(
      'output exists and is not a run',
      path=os.path.join(path, CONFIG_NAME),
      found=f'{error.reason} ({error.found})',
      expected='no directory or an empty one',
      fix='remove it, or choose another place',
    ) from error
  # A run that ended before its first epoch and left no state is of no use to anybody.
  if not overwrite and (HISTORY_NAME in files or is_interrupted(path)):
    raise errors.InputError(
      'output exists',
      path=path,
      found='a run',
      expected='no directory or an empty one',
      fix='give --overwrite to replace it',
    )
  tf.io.gfile.rmtree(path)


def _best(path: str, *, fix: str) -> str:
  """Returns the path of a run's checkpoint."""
  checkpoint = tf.train.latest_checkpoint(os.path.join(path, _CHECKPOINT))
  if checkpoint is None:
    raise errors.InputError('run without a checkpoint', path=path, fix=fix)
  return checkpoint


def load(path: str) -> Run:
  """Loads a run directory.

  Raises:
    InputError: the directory is not a run, has another format version or no checkpoint, or is
      damaged.
  """
  config_path = os.path.join(path, CONFIG_NAME)
  if not tf.io.gfile.exists(config_path):
    raise errors.InputError(
      'not a run directory',
      path=path,
      found=f'no {CONFIG_NAME}',
      expected='a directory that train has written',
    )
  with errors.in_file(config_path):
    config, options, choices = _parse(directory_lib.read_text(config_path))
  checkpoint = _best(path, fix='let train finish at least one epoch')
  num_extra = choices.num_extra
  statistics = directory_lib.read_statistics(
    os.path.join(path, STATISTICS_NAME), num_extra=num_extra
  )
  try:
    model = models.build(options, statistics_lib.parse(statistics, num_extra=num_extra))
  except KeyError as error:
    raise errors.InputError(
      'statistics of a feature missing',
      path=os.path.join(path, STATISTICS_NAME),
      expected=error,
      fix='copy or train the run again',
    ) from error
  try:
    # expect_partial only keeps TensorFlow from printing what the assertion reports.
    tf.train.Checkpoint(model=model).restore(checkpoint).expect_partial().assert_consumed()
  except checkpoints.DAMAGE as error:
    raise errors.InputError(
      'damaged checkpoint',
      path=checkpoint,
      found=checkpoints.one_line(error),
      expected=f'the weights of the model in {CONFIG_NAME}',
      fix='copy or train the run again',
    ) from error
  return Run(path, config, options, choices, model)


def load_for(path: str, directory: directory_lib.DatasetDirectory) -> Run:
  """Loads a run, to score the modules of a dataset directory.

  Raises:
    InputError: see `load`; or the data differ in kind or form from the data of the run.
  """
  run = load(path)
  if directory.kind != run.kind:
    raise errors.InputError(
      'run of the other kind',
      path=path,
      found=run.kind,
      expected=f'{directory.kind}, the kind of {directory.path}',
    )
  if directory.manifest.choices != run.choices:
    raise errors.InputError(
      'feature choices differ',
      path=directory.path,
      found=directory.manifest.choices,
      expected=f'{run.choices}, the choices of {path}',
      fix='convert the data with the --layout_padding and --extra_features of the run',
    )
  run_options = run.config.get('data', {}).get('options', {})
  found = ', '.join(f'{name}={directory.manifest.options.get(name)}' for name in _REDUCTION)
  expected = ', '.join(f'{name}={run_options.get(name)}' for name in _REDUCTION)
  if found != expected:
    raise errors.InputError(
      'graphs reduced in another way',
      path=directory.path,
      found=found,
      expected=f'{expected}, as for the data of {path}',
      fix='convert the data with the --keep_hops and --rest of the run',
    )
  return run


def _parse(text: str) -> tuple[dict[str, Any], models.ModelOptions, feature_choices.FeatureChoices]:
  """Reads the content of `config.json`, and the options and choices in it."""
  try:
    config = json.loads(text)
    if config['format_version'] != FORMAT_VERSION:
      raise errors.InputError(
        'run of another format',
        found=config['format_version'],
        expected=FORMAT_VERSION,
        fix='train again with this version',
      )
    stored = config['model']
    name, kind = stored['name'], stored['kind']
    options = models.ModelOptions(name, kind, parts.PartOptions(**stored['parts']))
    # Runs of earlier versions have no choices: they know the published form only.
    choices = feature_choices.FeatureChoices.from_json(config.get('feature_choices', {}))
    return config, options, choices
  except errors.InputError:
    raise
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise errors.InputError(
      'damaged config', found=repr(error), fix='copy or train the run again'
    ) from error
