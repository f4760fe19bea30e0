"""The training loop.

It trains epochs of steps, judges each epoch on the validation split, and saves states on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import time
from typing import Any

import numpy as np
import tensorflow as tf

from baselines import scoring
from baselines.training import checkpoints
from baselines.training import interrupts as interrupts_lib
from baselines.training import runs
from baselines.training import strategies
from baselines.training import trainer as trainer_lib
from tpu_graphs import errors
from tpu_graphs.metrics import metrics

_PROGRESS_SECONDS = 10.0
# An error names at most this number of modules.
_MAX_NAMES = 5


class Loop:
  """Training from the position in `progress` to the end."""

  def __init__(
    self,
    trainer: trainer_lib.Trainer,
    *,
    writer: runs.Writer,
    states: checkpoints.States,
    progress: checkpoints.Progress,
    interrupts: interrupts_lib.Interrupts,
    valid_split: str,
    steps_per_call: int,
    checkpoint_minutes: float,
    show: Callable[[str], None],
  ):
    """Makes a loop.

    Args:
      trainer: the trainer, with the weights that `progress` belongs to.
      writer: the writer of the run directory; its model is `trainer.judged`.
      states: the states of `progress` and of the trainer's objects.
      progress: the position of the training; updated in place.
      interrupts: the signals received; must be entered if signals are to stop the training.
      valid_split: the split that epochs are judged on.
      steps_per_call: number of steps that are taken without returning to Python.
      checkpoint_minutes: maximum age of the last state. A state is saved at the end of each epoch,
        and during an epoch when the last state is older than this.
      show: called with lines for the user.
    """
    self._trainer = trainer
    self._options = trainer.options
    self._writer = writer
    self._states = states
    self._progress = progress
    self._valid_split = valid_split
    self._steps_per_call = steps_per_call
    self._checkpoint_seconds = 60 * checkpoint_minutes
    self._show = show
    self._interrupts = interrupts
    scorer = scoring.make_scorer(
      trainer.judged,
      trainer.directory.kind,
      num_extra=trainer.directory.manifest.choices.num_extra,
      strategy=trainer.strategy,
      static_shapes=bool(self._options.shapes),
    )
    # In a cluster, a check waits for all workers, but each worker judges at its own speed.
    if not strategies.is_cluster(trainer.strategy):
      scorer = dataclasses.replace(scorer, function=self._checked(scorer.function))
    self._scorer = scorer
    # Lines and the history show the metric that chooses the best epoch, the default metric, and a
    # top-k error with a medium k. Equal names are shown once.
    default_metric = trainer_lib.SELECTION_METRIC[trainer.directory.kind]
    medium_k = metrics.TOP_KS[trainer.directory.kind][1]
    names = (self._options.metric, default_metric, f'top_{medium_k}_error')
    self._shown_metrics = tuple(dict.fromkeys(names))
    self._summary = tf.summary.create_noop_writer()
    # The time at which the first call of steps had ended, which includes tracing, and the share of
    # all training that was done then.
    self._pace: tuple[float, float] | None = None

  def run(self) -> None:
    """Trains to the last epoch, or until `patience` epochs have brought no better one.

    Raises:
      Interrupted: SIGTERM or SIGINT was received; the state has been saved.
      InputError: the loss or a gradient is not finite, or nothing can be learned from the data.
    """
    progress = self._progress
    if progress.history:
      self._writer.write_history(progress.history)
    self._saved = self._shown = time.monotonic()
    self._summary = self._writer.summary()
    self._batches = iter(self._trainer.batches(progress.epoch, progress.step))
    with self._summary.as_default():
      try:
        while progress.epoch <= self._options.epochs and not self._is_stale():
          self._train_epoch()
          self._finish_epoch(self._judge())
      except interrupts_lib.Interrupted:
        self._save()
        # This call returns once all workers have made it, so the state is saved by then.
        strategies.any_worker(self._trainer.strategy, False)
        raise
    self._summary.close()
    self._states.remove()

  def _is_stale(self) -> bool:
    """Returns whether `patience` epochs have passed since the best epoch."""
    epochs_since_best = self._progress.epoch - 1 - self._progress.best_epoch
    return 0 < self._options.patience <= epochs_since_best

  def _check(self) -> None:
    """Raises `Interrupted` if this process or any worker of its cluster has received a signal."""
    received = self._interrupts.received
    if strategies.any_worker(self._trainer.strategy, received is not None):
      raise interrupts_lib.Interrupted(received)

  def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `function`, or raises `Interrupted` after a signal."""

    def call(*args: Any) -> Any:
      self._check()
      return function(*args)

    return call

  def _train_epoch(self) -> None:
    progress = self._progress
    steps = self._trainer.steps_in_epoch(progress.epoch)
    while progress.step < steps:
      self._check()
      before = time.monotonic()
      count = min(self._steps_per_call, steps - progress.step)
      taken = self._trainer.take(self._batches, count)
      if not taken.is_finite:
        raise self._not_finite(taken)
      now = time.monotonic()
      progress.step += taken.count
      progress.loss += taken.loss
      progress.configs += taken.configs
      progress.comparable += taken.comparable
      progress.seconds += now - before
      progress.norm = taken.norm
      self._pace = self._pace or (now, self._share_done(steps))
      if now - self._shown > _PROGRESS_SECONDS:
        self._shown = now
        self._show(
          f'epoch {progress.epoch}/{self._options.epochs}  step {progress.step}/{steps}  '
          f'loss {progress.loss / progress.step:.4f}  {self._speed(steps)}'
        )
        self._summarize({'steps/loss': taken.loss / taken.count})
      if now - self._saved > self._checkpoint_seconds:
        self._save()

  def _not_finite(self, taken: trainer_lib.Steps) -> errors.InputError:
    """Returns the error for the last of the steps taken."""
    progress = self._progress
    index = progress.step + taken.count - 1
    # The array is [replicas, B], with '' for padding.
    all_names = np.array(self._trainer.module_ids(progress.epoch, index))
    wrong = ~np.isfinite(taken.losses)
    if wrong.any():
      reason = 'loss not finite'
      found = taken.losses[wrong][0]
      names = all_names[wrong]
    else:
      reason = 'gradient not finite'
      found = taken.norm
      names = all_names[all_names != '']
    names = sorted(set(names.ravel().tolist()))
    noun = 'module' if len(names) == 1 else 'modules'
    listed = ', '.join(names[:_MAX_NAMES])
    if len(names) > _MAX_NAMES:
      listed += f' and {len(names) - _MAX_NAMES} more'
    fix = (
      'train into another --out, or with --overwrite, with a lower --learning_rate or --clip_norm'
    )
    if progress.best_epoch:
      fix += f'; this run keeps epoch {progress.best_epoch}, its best'
    return errors.InputError(
      reason,
      where=f'epoch {progress.epoch}, step {index + 1}, {noun} {listed}',
      found=found,
      fix=fix,
    )

  def _judge(self) -> Mapping[str, Any]:
    """Computes the metrics of the validation split."""
    self._check()
    self._trainer.update_judged()
    directory = self._trainer.directory
    ks = metrics.TOP_KS[directory.kind]
    scored = scoring.score_split(self._scorer, directory, self._valid_split)
    judged = (scoring.judge(module, ks) for module in scored if module.is_measured)
    return metrics.summarize(judged)

  def _finish_epoch(self, valid: Mapping[str, Any]) -> None:
    progress, options = self._progress, self._options
    epoch = progress.epoch
    loss = progress.loss / progress.step
    value = valid[options.metric]
    if not progress.comparable:
      raise errors.InputError(
        'nothing to learn',
        path=self._trainer.directory.path,
        where='train',
        found='no module with two different runtimes',
        fix='measure more configs',
      )
    if value is None and not progress.history:
      self._show(
        f'warning: {options.metric} of {self._valid_split} is undefined: no module there has two '
        'different runtimes, or all scores are equal; until it is defined, the last epoch counts '
        'as the best'
      )
    is_best = trainer_lib.is_better(options.metric, value, progress.best)
    if is_best:
      progress.best = value
      progress.best_epoch = epoch
      self._writer.save(epoch)
    shown = {name: valid[name] for name in self._shown_metrics}
    row: dict[str, Any] = {'epoch': epoch, 'loss': loss}
    for name, number in shown.items():
      row[f'{self._valid_split}_{name}'] = number
    row['learning_rate'] = self._trainer.learning_rate
    row['steps_per_second'] = progress.step / progress.seconds
    row['configs_per_second'] = progress.configs / progress.seconds
    progress.history.append(row)
    scalars = {'loss': loss}
    for name, number in valid.items():
      if isinstance(number, float):
        scalars[f'{self._valid_split}/{name}'] = number
    self._summarize(scalars)
    speed = self._speed(progress.step)
    progress.start_epoch(epoch + 1)
    self._save()
    self._writer.write_history(progress.history)
    self._shown = time.monotonic()
    parts = [f'epoch {epoch}/{options.epochs}', f'loss {loss:.4f}']
    for name, number in shown.items():
      formatted = 'n/a' if number is None else f'{number:.4f}'
      parts.append(f'{self._valid_split} {name} {formatted}')
    parts.append(speed)
    if is_best:
      parts.append('best')
    self._show('  '.join(parts))
    if self._is_stale():
      self._show(f'no better epoch than {progress.best_epoch} in {options.patience}: stopped early')

  def _save(self) -> None:
    self._saved = time.monotonic()
    with runs.refusal_explained(self._states.folder):
      self._states.save()

  def _speed(self, steps: int) -> str:
    """Returns the speed in the present epoch of `steps` steps and the time left, as text.

    The time left is omitted after the first call of steps, because that call includes tracing.
    """
    progress = self._progress
    steps_per_second = progress.step / progress.seconds
    configs_per_second = progress.configs / progress.seconds
    speed = f'{steps_per_second:,.1f} steps/s  {configs_per_second:,.0f} configs/s'
    done = self._share_done(steps)
    since, before = self._pace or (0.0, done)
    if done == before:
      return speed
    seconds_left = (time.monotonic() - since) / (done - before) * (1 - done)
    return f'{speed}  {_duration(seconds_left)} left'

  def _share_done(self, steps: int) -> float:
    """Returns the share of all training that is done; the present epoch has `steps` steps."""
    epochs_done = self._progress.epoch - 1 + self._progress.step / steps
    return epochs_done / self._options.epochs

  def _summarize(self, scalars: Mapping[str, float]) -> None:
    all_scalars = {
      **scalars,
      'learning_rate': self._trainer.learning_rate,
      'gradient_norm': self._progress.norm,
    }
    for name, value in all_scalars.items():
      tf.summary.scalar(name, value, step=self._trainer.optimizer.iterations)


def _duration(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours} h {minutes:02} min'
  if minutes:
    return f'{minutes} min {seconds:02} s'
  return f'{seconds} s'
