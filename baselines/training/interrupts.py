"""SIGTERM and SIGINT as requests to stop at the next suitable moment."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupted(Exception):
  """Exception of a training that was asked to stop and has saved its state.

  Attributes:
    signal: the signal received; None if only another worker of a cluster received one.
  """

  def __init__(self, number: int | None):
    self.signal = None if number is None else signal.Signals(number)
    if self.signal:
      message = f'stopped by {self.signal.name}'
    else:
      message = 'stopped because another worker was stopped'
    super().__init__(message)


class Interrupts:
  """Context in which SIGTERM and SIGINT are only noted.

  A second SIGINT has its former effect. Nothing is raised in the middle of other work, because
  TensorFlow would treat the exception as an error of its own. Once `Interrupted` ends the context,
  SIGTERM is ignored: the process is about to end, with an exit code that shows why.

  Signals reach the main thread only, so in other threads the context has no effect. Signals that
  were ignored before stay ignored.

  Attributes:
    received: number of the first signal; None before there is one.
  """

  def __init__(self) -> None:
    self.received: int | None = None
    self._before: dict[int, Any] = {}

  def __enter__(self) -> Interrupts:
    if threading.current_thread() is threading.main_thread():
      self._before = {}
      for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
          self._before[number] = signal.signal(number, self._receive)
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
