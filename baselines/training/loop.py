"""The training loop: epochs of steps, each judged on the validation split, with states saved on
the way.
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
_MAX_NAMES = 5  # Of modules, in an error.


class Loop:
  """Brings a trainer from where `progress` says to the end."""

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
      trainer: with the weights that `progress` belongs to.
      writer: of the run directory; its model is `trainer.judged`.
      states: of `progress` and of what the trainer has.
      progress: is brought forward.
      interrupts: entered, if signals are to stop it.
      valid_split: by which epochs are judged.
      steps_per_call: steps that are taken without looking up from the device.
      checkpoint_minutes: a state is saved at the end of each epoch, and in between when the last
        is older than this.
      show: is given lines.
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
    if not strategies.is_cluster(
      trainer.strategy
    ):  # There, each worker judges at a speed of its own.
      scorer = dataclasses.replace(scorer, function=self._checked(scorer.function))
    self._scorer = scorer
    ks = metrics.TOP_KS[trainer.directory.kind]
    # In lines and in the history: what the best is chosen by, and a middle top-k error beside it.
    self._shown_metrics = tuple(
      dict.fromkeys(
        (
          self._options.metric,
          trainer_lib.SELECTION_METRIC[trainer.directory.kind],
          f'top_{ks[1]}_error',
        )
      )
    )
    self._summary = tf.summary.create_noop_writer()
    # When the first call of steps, which traces, had ended, and what share of all was done then.
    self._pace: tuple[float, float] | None = None

  def run(self) -> None:
    """Trains to the last epoch, or until `patience` is at its end.

    Raises:
      Interrupted: by SIGTERM or SIGINT, once the state has been saved.
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
        strategies.any_worker(self._trainer.strategy, False)  # Waits until the state is saved.
        raise
    self._summary.close()
    self._states.remove()

  def _is_stale(self) -> bool:
    """Whether the best epoch is so long ago that it is likely to stay the best."""
    return 0 < self._options.patience <= self._progress.epoch - 1 - self._progress.best_epoch

  def _check(self) -> None:
    """Raises `Interrupted` if this process has received a signal, or any worker of its cluster."""
    received = self._interrupts.received
    if strategies.any_worker(self._trainer.strategy, received is not None):
      raise interrupts_lib.Interrupted(received)

  def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which a signal that has been received keeps from being called."""

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
      taken = self._trainer.take(self._batches, min(self._steps_per_call, steps - progress.step))
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
    """What to tell of the last of the steps taken."""
    progress = self._progress
    index = progress.step + taken.count - 1
    names = np.array(
      self._trainer.module_ids(progress.epoch, index)
    )  # [replicas, B], '' for padding.
    wrong = ~np.isfinite(taken.losses)
    if wrong.any():
      reason, found, names = 'loss not finite', taken.losses[wrong][0], names[wrong]
    else:
      reason, found, names = 'gradient not finite', taken.norm, names[names != '']
    names = sorted(set(names.ravel().tolist()))
    listed = ', '.join(names[:_MAX_NAMES]) + (
      f' and {len(names) - _MAX_NAMES} more' if names[_MAX_NAMES:] else ''
    )
    kept = f'; this run keeps epoch {progress.best_epoch}, its best' if progress.best_epoch else ''
    return errors.InputError(
      reason,
      where=f'epoch {progress.epoch}, step {index + 1}, modules {listed}',
      found=found,
      fix=f'train into another --out, or with --overwrite, with a lower --learning_rate or --clip_norm{kept}',
    )

  def _judge(self) -> Mapping[str, Any]:
    """The metrics of the validation split."""
    self._check()
    self._trainer.update_judged()
    directory = self._trainer.directory
    return metrics.summarize(
      scoring.judge(module, metrics.TOP_KS[directory.kind])
      for module in scoring.score_split(self._scorer, directory, self._valid_split)
      if module.is_measured
    )

  def _finish_epoch(self, valid: Mapping[str, Any]) -> None:
    progress, options = self._progress, self._options
    epoch, loss, value = progress.epoch, progress.loss / progress.step, valid[options.metric]
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
        f'warning: {options.metric} of {self._valid_split} is undefined: no module there has two different '
        'runtimes, or all scores are equal; until it is defined, the last epoch counts as the best'
      )
    is_best = trainer_lib.is_better(options.metric, value, progress.best)
    if is_best:
      progress.best, progress.best_epoch = value, epoch
      self._writer.save(epoch)
    progress.history.append(
      {
        'epoch': epoch,
        'loss': loss,
        **{f'{self._valid_split}_{name}': valid[name] for name in self._shown_metrics},
        'learning_rate': self._trainer.learning_rate,
        'steps_per_second': progress.step / progress.seconds,
        'configs_per_second': progress.configs / progress.seconds,
      }
    )
    self._summarize(
      {
        'loss': loss,
        **{
          f'{self._valid_split}/{name}': number
          for name, number in valid.items()
          if isinstance(number, float)
        },
      }
    )
    speed = self._speed(progress.step)
    progress.start_epoch(epoch + 1)
    self._save()
    self._writer.write_history(progress.history)
    self._shown = time.monotonic()
    told = '  '.join(
      f'{self._valid_split} {name} {"n/a" if valid[name] is None else format(valid[name], ".4f")}'
      for name in self._shown_metrics
    )
    self._show(
      f'epoch {epoch}/{options.epochs}  loss {loss:.4f}  {told}  {speed}{"  best" if is_best else ""}'
    )
    if self._is_stale():
      self._show(f'no better epoch than {progress.best_epoch} in {options.patience}: stopped early')

  def _save(self) -> None:
    self._saved = time.monotonic()
    with runs.refusal_explained(self._states.folder):
      self._states.save()

  def _speed(self, steps: int) -> str:
    """How fast the present epoch of so many steps goes, and how long the rest will take."""
    progress = self._progress
    speed = f'{progress.step / progress.seconds:,.1f} steps/s  {progress.configs / progress.seconds:,.0f} configs/s'
    done = self._share_done(steps)
    since, before = self._pace or (0.0, done)
    if done == before:
      return speed
    return f'{speed}  {_duration((time.monotonic() - since) / (done - before) * (1 - done))} left'

  def _share_done(self, steps: int) -> float:
    """The share of all training that is done, in an epoch of so many steps."""
    return (self._progress.epoch - 1 + self._progress.step / steps) / self._options.epochs

  def _summarize(self, scalars: Mapping[str, float]) -> None:
    every = {
      **scalars,
      'learning_rate': self._trainer.learning_rate,
      'gradient_norm': self._progress.norm,
    }
    for name, value in every.items():
      tf.summary.scalar(name, value, step=self._trainer.optimizer.iterations)


def _duration(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return (
    f'{hours} h {minutes:02} min'
    if hours
    else f'{minutes} min {seconds:02} s'
    if minutes
    else f'{seconds} s'
  )
