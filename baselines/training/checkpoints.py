"""States of a training that is not finished: with the newest, the same command goes on as if it
had never stopped.

RUN/state/EPOCH-STEP.*  model, averaged weights, optimizer and `Progress`, as
`tf.train.Checkpoint` writes them
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import json
import os
from typing import Any

import tensorflow as tf

from tpu_graphs import errors

# What TensorFlow raises for a checkpoint of other objects, of other shapes, or damaged.
DAMAGE = (AssertionError, IndexError, ValueError, tf.errors.OpError)
_INDEX = '.index'


@dataclasses.dataclass
class Progress:
  """How far a training has come.

  Attributes:
    epoch: that is being trained, from 1.
    step: steps done of it; all of them until it has been judged on the validation split.
    loss: sum of the mean losses of these steps.
    configs: number of configs in them.
    comparable: number of modules with two different runtimes in them.
    seconds: that they took.
    norm: global norm of the gradient of the last step.
    best: value of the metric in the best epoch.
    best_epoch: its number; 0 before there is one.
    history: the rows of `history.csv`, one per judged epoch.
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
    """Sets what is of one epoch as it is before its first step."""
    self.epoch, self.step, self.loss, self.configs, self.comparable, self.seconds = (
      epoch,
      0,
      0.0,
      0,
      0,
      0.0,
    )


class _Stored(tf.train.experimental.PythonState):
  """A `Progress` as part of a checkpoint."""

  def __init__(self, progress: Progress):
    self._progress = progress

  def serialize(self) -> str:
    return json.dumps(dataclasses.asdict(self._progress))  # Floats come back exactly.

  def deserialize(self, string_value: str) -> None:
    vars(self._progress).update(json.loads(string_value))


class States:
  """The states in a folder, of which the last two are kept.

  Attributes:
    folder: where they lie.
  """

  def __init__(self, folder: str, progress: Progress, *, is_chief: bool = True, **objects: Any):
    """Makes the store; nothing is read or written yet.

    Args:
      folder: where they lie.
      progress: is saved, and brought to the restored state in place.
      is_chief: whether to write; the other workers of a cluster read only.
      **objects: what else is saved and restored, such as models and optimizers, with all their
      variables made.
    """
    self.folder = folder
    self._progress = progress
    self._is_chief = is_chief
    self._checkpoint = tf.train.Checkpoint(progress=_Stored(progress), **objects)
    self._last: str | None = None  # Name of the last one known to be good.

  def save(self) -> None:
    """Saves the present state, and removes all but this and the one before."""
    name = f'{self._progress.epoch:06}-{self._progress.step:08}'
    if name == self._last or not self._is_chief:
      return
    tf.io.gfile.makedirs(self.folder)
    self._checkpoint.write(os.path.join(self.folder, name))
    kept = tuple(f'{kept}.' for kept in (name, self._last) if kept)
    for file in tf.io.gfile.listdir(self.folder):
      if not file.startswith(kept):
        path = os.path.join(self.folder, file.rstrip('/'))
        (tf.io.gfile.rmtree if tf.io.gfile.isdir(path) else tf.io.gfile.remove)(path)
    self._last = name

  def restore(self, warn: Callable[[str], None]) -> bool:
    """Restores the newest state that is whole.

    Args:
      warn: is told of each damaged one that is passed over.

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
        warn(f'warning: {path}: damaged state, going back to the one before ({one_line(error)})')
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
    """Removes all states: the training is finished."""
    if self._is_chief and tf.io.gfile.exists(self.folder):
      tf.io.gfile.rmtree(self.folder)


def stored(folder: str) -> list[str]:
  """The names of the states in a folder, oldest first."""
  if not tf.io.gfile.isdir(folder):
    return []
  return sorted(
    file.removesuffix(_INDEX) for file in tf.io.gfile.listdir(folder) if file.endswith(_INDEX)
  )


def one_line(error: BaseException) -> str:
  """An error of TensorFlow, shortened for a line that tells of it."""
  return ' '.join(str(error).split())[:200]
