"""SIGTERM and SIGINT as requests to stop at the next good moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
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
    super().__init__(f'stopped by {self.signal.name}' if self.signal else 'stopped since another worker was')


class Interrupts:
  """While entered, the first SIGTERM or SIGINT is only noted; a second one does what it did before.

  Signals reach the main thread only, so elsewhere this does nothing.
  """

  def __init__(self, any_worker: Callable[[bool], bool] | None = None):
    """Makes it; nothing is noted yet.

    Args:
      any_worker: in a cluster, tells whether the argument is true for any worker, once all of them have called it. So
        all stop at the same place: where all call `check` or `at_once` next.
    """
    self._any_worker = any_worker
    self._received: int | None = None
    self._raise_now = False
    self._before: dict[int, Any] = {}

  def __enter__(self) -> Interrupts:
    if threading.current_thread() is threading.main_thread():
      self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
    return self

  def __exit__(self, *_: Any) -> None:
    self._restore()

  def _restore(self) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)
    self._before = {}

  def _receive(self, number: int, _: Any) -> None:
    self._restore()
    self._received = number
    if self._raise_now:
      raise Interrupted(number)

  def check(self) -> None:
    """Raises `Interrupted` if a signal has been received, in a cluster by any worker."""
    stop = self._received is not None
    if self._any_worker(stop) if self._any_worker else stop:
      raise Interrupted(self._received)

  @contextlib.contextmanager
  def at_once(self) -> Iterator[None]:
    """Inside the block a signal is raised when it comes, but not in a cluster: for work that changes nothing."""
    self.check()
    self._raise_now = self._any_worker is None
    try:
      yield
    finally:
      self._raise_now = False
