"""The error type for input that a user can fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
from typing import Any


class InputError(ValueError):
  """Input that cannot be used, described so that its owner can fix it.

  Every part but `reason` is optional. Command lines print `str(error)` as their only output and
  exit with 1; `pipelines/convert.py` writes `to_dict()` as a line of `rejected.jsonl`.

  Attributes:
    reason: the fault in a few words without values, so that equal faults can be counted.
    path: the file's path.
    where: the array, record or instruction in the file.
    found: the value found, as text.
    expected: the value expected, as text.
    fix: the remedy, as an instruction to the user.
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
    details = []
    if self.found is not None:
      details.append(f'found {self.found}')
    if self.expected is not None:
      details.append(f'expected {self.expected}')
    if details:
      text = f'{text}: {", ".join(details)}'
    return f'{text}; {self.fix}' if self.fix else text

  def __reduce__(self):
    return _rebuild, (type(self), self.to_dict())

  def to_dict(self) -> dict[str, str | None]:
    """Returns the parts by name; `InputError(**parts)` builds an equal error."""
    return {name: getattr(self, name) for name in self._FIELDS}


def _rebuild(cls, parts):
  return cls(**parts)


@contextlib.contextmanager
def in_file(path: str) -> Iterator[None]:
  """Adds `path` to an `InputError` raised inside the block that does not name a file."""
  try:
    yield
  except InputError as error:
    if error.path is None:
      error.path = path
    raise


def brief(text: str, limit: int = 40) -> str:
  """Returns at most the first `limit` characters of a text, for an error."""
  return text if len(text) <= limit else f'{text[:limit]}…'


def some(names: Sequence[str], limit: int = 3) -> str:
  """Returns at most the first `limit` names and how many there are, for an error."""
  shown = ', '.join(names[:limit]) or 'none'
  return shown if len(names) <= limit else f'{shown}, … ({len(names)} in all)'


# The first bytes of kinds of files that are often passed in place of another kind.
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
  """Returns what a file seems to be, in a few words for an error; None if unknown.

  Args:
    head: the first bytes of the file, about 100.
  """
  for signature, description in _SIGNATURES.items():
    if head.lstrip().startswith(signature):
      return description
  if not head or not head.isascii():
    return None
  words = b' '.join(head.split()).decode()
  return 'text' if words.isprintable() else None
