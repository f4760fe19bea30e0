"""SIGTERM and SIGINT as requests to stop at the next good moment."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupted(Exception):
  """Training was asked to stop, and has saved its state.

  Attributes:
    signal: by which it was asked; None if only another worker of a cluster was.
  """

  def __init__(self, number: int | None):
    self.signal = None if number is None else signal.Signals(number)
    super().__init__(
      f'stopped by {self.signal.name}' if self.signal else 'stopped since another worker was'
    )


class Interrupts:
  """While entered, SIGTERM and SIGINT are only noted, but for a second SIGINT, which does what
  it did before.

  Nothing is raised in the middle of other work, since TensorFlow would take that for an error of
  its own. Where
  `Interrupted` ends it, SIGTERM is ignored from then on: the process is about to end, with an
  exit code that tells why.

  Signals reach the main thread only, so elsewhere this does nothing; nor does it where they were
  ignored before.

  Attributes:
    received: number of the first signal; None before there is one.
  """

  def __init__(self) -> None:
    self.received: int | None = None
    self._before: dict[int, Any] = {}

  def __enter__(self) -> Interrupts:
    if threading.current_thread() is threading.main_thread():
      self._before = {
        number: signal.signal(number, self._receive)
        for number in (signal.SIGTERM, signal.SIGINT)
        if signal.getsignal(number) != signal.SIG_IGN
      }
    return self

  def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
    if isinstance(error, Interrupted) and signal.SIGTERM in self._before:
      self._before[signal.SIGTERM] = signal.SIG_IGN
    for number, handler in self._before.items():
      signal.signal(number, handler)
    self._before = {}

  def _receive(self, number: int, _: Any) -> None:
    if self.received is None:
      self.received = number
    if number == signal.SIGINT:
      signal.signal(number, self._before.pop(number))
