"""States of a training that is not finished.

With the newest state, the same command resumes the training as if it had never stopped. The files
RUN/state/EPOCH-STEP.* hold the model, the averaged weights, the optimizer and `Progress`, as
`tf.train.Checkpoint` writes them.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import json
import os
from typing import Any

import tensorflow as tf

from tpu_graphs import errors

# TensorFlow raises these for a damaged checkpoint, and for one of other objects or shapes.
DAMAGE = (AssertionError, IndexError, ValueError, tf.errors.OpError)
_INDEX = '.index'


@dataclasses.dataclass
class Progress:
  """The position of a training, with its sums over the present epoch and its history.

  Attributes:
    epoch: number of the present epoch, from 1.
    step: number of steps done in the present epoch. After the last step, it keeps its value until
      the epoch has been judged on the validation split.
    loss: sum of the mean losses of these steps.
    configs: number of configs in these steps.
    comparable: number of modules with two different runtimes in these steps.
    seconds: time that these steps took.
    norm: global norm of the gradient of the last step.
    best: value of the metric in the best epoch.
    best_epoch: number of the best epoch; 0 before there is one.
    history: rows of `history.csv`, one per judged epoch.
  """

  epoch: int = 1
  step: int = 0
  loss: float = 0.0
  configs: int = 0
  comparable: int = 0
  seconds: float = 0.0
  norm: float = 0.0
  best: float | None = None
  best_epoch: int = 0
  history: list[dict[str, Any]] = dataclasses.field(default_factory=list)

  def start_epoch(self, epoch: int) -> None:
    """Sets the fields of an epoch to their values before its first step."""
    self.epoch = epoch
    self.step = 0
    self.loss = 0.0
    self.configs = 0
    self.comparable = 0
    self.seconds = 0.0


class _Stored(tf.train.experimental.PythonState):
  """A `Progress` as part of a checkpoint."""

  def __init__(self, progress: Progress):
    self._progress = progress

  def serialize(self) -> str:
    # JSON restores floats exactly.
    return json.dumps(dataclasses.asdict(self._progress))

  def deserialize(self, string_value: str) -> None:
    vars(self._progress).update(json.loads(string_value))


class States:
  """The states in a folder; the last two are kept.

  Attributes:
    folder: path of the folder.
  """

  def __init__(self, folder: str, progress: Progress, *, is_chief: bool = True, **objects: Any):
    """Makes the store; nothing is read or written yet.

    Args:
      folder: path of the folder.
      progress: the progress to save; `restore` changes it in place.
      is_chief: whether to write; the other workers of a cluster only read.
      **objects: the other objects to save and restore, such as models and optimizers. All their
        variables must exist.
    """
    self.folder = folder
    self._progress = progress
    self._is_chief = is_chief
    self._checkpoint = tf.train.Checkpoint(progress=_Stored(progress), **objects)
    # Name of the last state that is known to be good.
    self._last: str | None = None

  def save(self) -> None:
    """Saves the present state, and removes all states but this one and the previous one."""
    name = f'{self._progress.epoch:06}-{self._progress.step:08}'
    if name == self._last or not self._is_chief:
      return
    tf.io.gfile.makedirs(self.folder)
    self._checkpoint.write(os.path.join(self.folder, name))
    prefixes = tuple(f'{kept}.' for kept in (name, self._last) if kept)
    for file in tf.io.gfile.listdir(self.folder):
      if file.startswith(prefixes):
        continue
      path = os.path.join(self.folder, file.rstrip('/'))
      if tf.io.gfile.isdir(path):
        tf.io.gfile.rmtree(path)
      else:
        tf.io.gfile.remove(path)
    self._last = name

  def restore(self, warn: Callable[[str], None]) -> bool:
    """Restores the newest state that is not damaged.

    Args:
      warn: called with a line for each damaged state that is skipped.

    Returns:
      Whether there was any state.

    Raises:
      InputError: all states are damaged.
    """
    names = stored(self.folder)
    for name in reversed(names):
      path = os.path.join(self.folder, name)
      try:
        self._checkpoint.read(path).assert_consumed()
      except DAMAGE as error:
        warn(f'warning: {path}: damaged state, trying the one before ({one_line(error)})')
      else:
        self._last = name
        return True
    if names:
      raise errors.InputError(
        'no state of the interrupted run can be read',
        path=self.folder,
        found=f'{len(names)} damaged',
        fix='give --overwrite to train from the start',
      )
    return False

  def remove(self) -> None:
    """Removes all states, once the training is finished."""
    if self._is_chief and tf.io.gfile.exists(self.folder):
      tf.io.gfile.rmtree(self.folder)


def stored(folder: str) -> list[str]:
  """Returns the names of the states in a folder, oldest first."""
  if not tf.io.gfile.isdir(folder):
    return []
  files = tf.io.gfile.listdir(folder)
  return sorted(file.removesuffix(_INDEX) for file in files if file.endswith(_INDEX))


def one_line(error: BaseException) -> str:
  """Returns an error of TensorFlow as one line, cut to 200 characters."""
  return ' '.join(str(error).split())[:200]
