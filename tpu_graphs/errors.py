"""The one error type for input that a user can mend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
from typing import Any


class InputError(ValueError):
  """Input that cannot be used, described so that its owner can mend it.

  Every part is optional but `reason`. Command lines print `str(error)` as their only output and
  exit with 1;
  `pipelines/convert.py` writes `to_dict()` as a line of `rejected.jsonl`.

  Attributes:
    reason: what is wrong, in a few words without values, so that equal faults can be counted.
    path: the file.
    where: the array, record or instruction in it.
    found: the value found.
    expected: the value expected.
    fix: what to do.
  """

  _FIELDS = ('reason', 'path', 'where', 'found', 'expected', 'fix')

  def __init__(
    self,
    reason: str,
    *,
    path: str | None = None,
    where: str | None = None,
    found: Any = None,
    expected: Any = None,
    fix: str | None = None,
  ):
    super().__init__(reason)
    self.reason = reason
    self.path = path
    self.where = where
    self.found = None if found is None else str(found)
    self.expected = None if expected is None else str(expected)
    self.fix = fix

  def __str__(self) -> str:
    text = ': '.join(part for part in (self.path, self.where, self.reason) if part)
    details = [
      f'{name} {value}'
      for name, value in (('found', self.found), ('expected', self.expected))
      if value is not None
    ]
    if details:
      text = f'{text}: {", ".join(details)}'
    return f'{text}; {self.fix}' if self.fix else text

  def __reduce__(self):
    return _rebuild, (type(self), self.to_dict())

  def to_dict(self) -> dict[str, str | None]:
    """The parts by name; `InputError(**parts)` builds an equal error."""
    return {name: getattr(self, name) for name in self._FIELDS}


def _rebuild(cls, parts):
  return cls(**parts)


@contextlib.contextmanager
def in_file(path: str) -> Iterator[None]:
  """Adds `path` to an `InputError` raised inside the block that names none."""
  try:
    yield
  except InputError as error:
    if error.path is None:
      error.path = path
    raise


def brief(text: str, limit: int = 40) -> str:
  """The first characters of what may be long, for an error."""
  return text if len(text) <= limit else f'{text[:limit]}…'


def some(names: Sequence[str], limit: int = 3) -> str:
  """The first of what may be many names, for an error."""
  shown = ', '.join(names[:limit]) or 'none'
  return shown if len(names) <= limit else f'{shown}, … ({len(names)} in all)'


# How files that are often taken for another begin.
_SIGNATURES = {
  b'HloModule': 'HLO text',
  b'PK\x03\x04': 'a zip or npz archive',
  b'\x93NUMPY': 'an npy array',
  b'\x1f\x8b': 'gzip data',
  b'version https://git-lfs': 'a Git LFS pointer in place of the file',
  b'<': 'HTML or XML',
  b'{': 'JSON',
}


def looks_like(head: bytes) -> str | None:
  """Says in a few words what a file that starts with `head` (some 100 bytes) is, for an error;
  None if unknown.
  """
  for signature, description in _SIGNATURES.items():
    if head.lstrip().startswith(signature):
      return description
  return (
    'text' if head and head.isascii() and b' '.join(head.split()).decode().isprintable() else None
  )
