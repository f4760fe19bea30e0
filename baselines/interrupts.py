"""SIGTERM and SIGINT as requests to stop at the next good moment."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import signal
import threading
from typing import Any


class Interrupted(Exception):
  """Training was asked to stop, and has saved its state.

  Attributes:
    signal: by which it was asked.
  """

  def __init__(self, number: int):
    super().__init__(f'stopped by {signal.Signals(number).name}')
    self.signal = signal.Signals(number)


class Interrupts:
  """While entered, the first SIGTERM or SIGINT is only noted; a second one does what it did before.

  Signals reach the main thread only, so elsewhere this does nothing.
  """

  def __init__(self) -> None:
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
    """Raises `Interrupted` if a signal has been received."""
    if self._received is not None:
      raise Interrupted(self._received)

  @contextlib.contextmanager
  def at_once(self) -> Iterator[None]:
    """Inside the block a signal is raised when it comes: for work that changes nothing."""
    self.check()
    self._raise_now = True
    try:
      yield
    finally:
      self._raise_now = False
