"""Text for people at a terminal: progress of long work, counts, sizes and times."""

from __future__ import annotations

from collections.abc import Callable
import time
from typing import TextIO


class Progress:
  """A display of how far a download is.

  On a terminal one line is renewed; elsewhere a new line is written every 30 seconds.

  Args:
    stream: the text stream to write to.
    clock: returns the time in seconds.
  """

  def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic):
    self._stream = stream
    self._clock = clock
    self._renew = stream.isatty()
    self._pause_s = 0.2 if self._renew else 30.0
    self._width = 0

  def start(self, name: str, size: int, done: int) -> None:
    """Begins a transfer of `size` bytes, `done` of which are already here."""
    self._name, self._size, self._first = name, size, done
    self._began = self._shown = self._clock()

  def advance(self, done: int) -> None:
    """Records that `done` bytes are here, and shows it from time to time."""
    now = self._clock()
    if now - self._shown >= self._pause_s:
      self._shown = now
      self._show(self._text(done, now - self._began))

  def end(self, done: int) -> None:
    """Finishes the line of a transfer that is complete or has failed."""
    if self._renew:
      self._show(self._text(done, self._clock() - self._began))
      self._stream.write('\n')
      self._width = 0

  def report(self, message: str) -> None:
    """Shows a message in a line of its own."""
    print(message, file=self._stream, flush=True)

  def _text(self, done: int, seconds: float) -> str:
    rate = (done - self._first) / max(seconds, 1e-3)
    percent = 100 * done // max(self._size, 1)
    text = f'{self._name}  {percent:3d} %  {size_text(done)} of {size_text(self._size)}'
    if rate > 0:
      text += f'  {size_text(rate)}/s'
      if done < self._size:
        text += f'  {time_text((self._size - done) / rate)} left'
    return text

  def _show(self, text: str) -> None:
    line = f'\r{text.ljust(self._width)}' if self._renew else f'{text}\n'
    self._width = len(text)
    self._stream.write(line)
    self._stream.flush()


def plural(count: int, noun: str) -> str:
  """Returns a count with its noun, such as '1,024 ops' or '1 op'."""
  return f'{count:,} {noun}{"" if count == 1 else "s"}'


def printable(text: str) -> str:
  """Replaces each character that cannot be shown, such as a line break, with U+FFFD."""
  return ''.join(character if character.isprintable() else '\ufffd' for character in text)


def size_text(size: float) -> str:
  """Returns a number of bytes for people, such as '1.5 GiB'."""
  units = ('bytes', 'KiB', 'MiB', 'GiB', 'TiB')
  power = 0
  while size >= 1024 and power < len(units) - 1:
    size, power = size / 1024, power + 1
  return f'{size:.1f} {units[power]}' if power else f'{size:.0f} {units[0]}'


def time_text(seconds: float) -> str:
  """Returns a duration for people, such as '2 min' or '1.5 h'."""
  if seconds < 90:
    return f'{seconds:.0f} s'
  return f'{seconds / 60:.0f} min' if seconds < 5400 else f'{seconds / 3600:.1f} h'
