"""Downloads of large files by HTTP that survive a broken connection, a restart, and a file that
changes meanwhile.

```
server = transfer.Server('https://example.org/data')
server.fetch(server.look('big.tar'), 'big.tar', terminal.Progress(sys.stderr))
```

What has been received of `big.tar` is in `big.tar.partial`. Of which version of the file it is a
part is told by
`big.tar.partial.json`; only this one is gone on with, by a Range request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import email.message
import http.client
import io
import json
import os
import pathlib
import posixpath
import re
import time
from typing import Any
import urllib.error
import urllib.request

from tpu_graphs import errors
from tpu_graphs import terminal

_BLOCK_BYTES = 1 << 20
_RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504))  # HTTP status codes that may pass.
_NO_SUCH_RANGE = 416
_LONGEST_WAIT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Remote:
  """A file as the server tells of it.

  Attributes:
    url: of the file.
    size: in bytes.
    version: its ETag or else its date; equal ones mean equal content. Empty where the server
      tells neither.
  """

  url: str
  size: int
  version: str


class _TransferError(Exception):
  """A failure that may pass.

  Attributes:
    unreachable: whether no connection was made at all.
    restart: whether what has been received is of no use.
  """

  def __init__(self, message: str, *, unreachable: bool = False, restart: bool = False):
    super().__init__(message)
    self.unreachable = unreachable
    self.restart = restart


@dataclasses.dataclass(frozen=True)
class Server:
  """Where the archives are, and how patient to be.

  Attributes:
    base_url: http or https URL of the folder of the archives.
    attempts: how often in a row a transfer may fail without having received more than ever before.
    first_wait_s: seconds before the second attempt; they double up to a minute.
    timeout_s: seconds without an answer after which an attempt has failed.
  """

  base_url: str
  attempts: int = 7
  first_wait_s: float = 1.0
  timeout_s: float = 30.0

  def __post_init__(self):
    if not re.match(r'https?://[^/]', self.base_url):
      raise errors.InputError(
        'no URL', where='--base_url', found=self.base_url, expected='http://… or https://…'
      )

  def look(self, name: str) -> Remote:
    """Asks for size and version of the file `name`.

    Raises:
      InputError: there is no such file, or no such server.
    """
    url = f'{self.base_url.rstrip("/")}/{name}'
    return self._patiently(lambda: self._head(url), url, lambda: 0, wait_for_network=False)

  def fetch(self, remote: Remote, path: str, progress: terminal.Progress | None = None) -> None:
    """Downloads a file to `path`, going on with what an earlier call left in `path`.partial.

    Raises:
      InputError: it failed time and again, or the file cannot be written.
    """
    partial = f'{path}.partial'
    version = [remote]  # Of the next attempt.

    def attempt() -> None:
      try:
        self._transfer(version[0], partial, progress)
      except _TransferError as error:
        if error.restart:
          os.remove(f'{partial}.json')
        with contextlib.suppress(_TransferError):  # It may have changed.
          version[0] = self._head(remote.url)
        raise

    def length() -> int:
      return os.path.getsize(partial) if os.path.exists(partial) else 0

    self._patiently(
      attempt, remote.url, length, wait_for_network=True, tell=progress.tell if progress else None
    )
    os.replace(partial, path)
    os.remove(f'{partial}.json')

  def _patiently(
    self,
    action: Callable[[], Any],
    url: str,
    length: Callable[[], int],
    *,
    wait_for_network: bool,
    tell: Callable[[str], None] | None = None,
  ) -> Any:
    failures, most = 0, length()
    while True:
      try:
        return action()
      except _TransferError as error:
        failures = 1 if length() > most else failures + 1
        most = max(most, length())
        if error.unreachable and not wait_for_network:
          raise errors.InputError(
            'cannot reach the server', path=url, found=error, fix='check the network and --base_url'
          ) from error
        if failures >= self.attempts:
          raise errors.InputError(
            'download failed',
            path=url,
            found=f'{error}, {failures} times',
            fix='repeat the command to go on',
          ) from error
        wait = min(self.first_wait_s * 2 ** (failures - 1), _LONGEST_WAIT_S)
        if tell:
          tell(f'{posixpath.basename(url)}: {error}; again in {wait:.0f} s')
        time.sleep(wait)

  def _transfer(self, remote: Remote, partial: str, progress: terminal.Progress | None) -> None:
    """One attempt to make `partial` complete."""
    start = received(remote, partial)
    with writing(partial), contextlib.ExitStack() as stack:
      file = stack.enter_context(open(partial, 'ab'))
      file.truncate(start)
      pathlib.Path(f'{partial}.json').write_text(_note(remote))
      if start == remote.size:
        return
      headers = {'Range': f'bytes={start}-', 'If-Range': remote.version} if start else {}
      response = stack.enter_context(self._open(remote.url, headers))
      if response.status != 206:  # The server knows no ranges, or not this version.
        start = 0
      elif not (response.headers['Content-Range'] or '').startswith(f'bytes {start}-'):
        raise _TransferError(f'asked for bytes {start}-, got {response.headers["Content-Range"]}')
      found = _remote(remote.url, response.headers)
      if found != remote:
        what = (
          f'{found.size} bytes instead of {remote.size}'
          if found.size != remote.size
          else 'another version'
        )
        raise _TransferError(f'the file has changed on the server: {what}')
      if progress:
        progress.start(posixpath.basename(remote.url), remote.size, start)
        stack.callback(lambda: progress.end(file.tell()))
      _receive(response, file, start, remote.size, progress)

  def _head(self, url: str) -> Remote:
    with self._open(url, method='HEAD') as response:
      return _remote(url, response.headers)

  @contextlib.contextmanager
  def _open(
    self, url: str, headers: Mapping[str, str] | None = None, method: str = 'GET'
  ) -> Iterator[http.client.HTTPResponse]:
    try:
      request = urllib.request.Request(
        url,
        headers={'User-Agent': 'tpu-graphs', 'Accept-Encoding': 'identity', **(headers or {})},
        method=method,
      )
      response = urllib.request.urlopen(request, timeout=self.timeout_s)
    except urllib.error.HTTPError as error:
      error.close()
      found = f'HTTP status {error.code} {error.reason}'
      if error.code in _RETRIED or error.code == _NO_SUCH_RANGE:
        raise _TransferError(found, restart=error.code == _NO_SUCH_RANGE) from error
      raise errors.InputError(
        'server refuses the file', path=url, found=found, fix='check the network and --base_url'
      ) from error
    except urllib.error.URLError as error:
      raise _TransferError(_reason(error.reason), unreachable=True) from error
    except (http.client.InvalidURL, ValueError) as error:
      raise errors.InputError('no URL', path=url, found=error, fix='check --base_url') from error
    except (OSError, http.client.HTTPException) as error:
      raise _TransferError(_reason(error)) from error
    with response:
      yield response


def _reason(error: object) -> str:
  """What an error says, without its number."""
  return ' '.join(str(getattr(error, 'strerror', None) or error).split()) or type(error).__name__


def _note(remote: Remote) -> str:
  """What is kept beside a partial file, to know later of which file it is a part."""
  return json.dumps(dataclasses.asdict(remote))


def received(remote: Remote, partial: str) -> int:
  """How many bytes of just this version of a file `partial` holds; 0 where that cannot be known."""
  try:
    size = os.path.getsize(partial)
    known = pathlib.Path(f'{partial}.json').read_text() == _note(remote)
  except (OSError, UnicodeError):
    return 0
  return size if known and remote.version and size <= remote.size else 0


def _remote(url: str, headers: email.message.Message) -> Remote:
  """What the headers of an answer tell."""
  whole = re.fullmatch(r'bytes \d+-\d+/(\d+)', headers.get('Content-Range') or '')
  size = whole[1] if whole else headers.get('Content-Length') or ''
  if not size.isascii() or not size.isdigit():
    raise errors.InputError(
      'server tells no size',
      path=url,
      found=f'Content-Length {size or "missing"}',
      expected='a number of bytes',
      fix='give the --base_url of another server',
    )
  etag = headers.get('ETag') or ''  # A weak one, W/"…", does not promise equal bytes.
  return Remote(
    url, int(size), etag if etag.startswith('"') else headers.get('Last-Modified') or ''
  )


def _receive(
  response: http.client.HTTPResponse,
  file: io.BufferedWriter,
  start: int,
  size: int,
  progress: terminal.Progress | None,
) -> None:
  """Writes the body of an answer, the bytes `start` to `size` of a file."""
  file.truncate(start)
  file.seek(start)
  while file.tell() < size:
    try:
      block = response.read1(
        min(_BLOCK_BYTES, size - file.tell())
      )  # What has come, so that a break loses nothing.
    except (OSError, http.client.HTTPException) as error:
      raise _TransferError(_reason(error)) from error
    if not block:
      raise _TransferError(f'connection closed after {file.tell()} of {size} bytes')
    file.write(block)
    if progress:
      progress.advance(file.tell())


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
  """Turns what the file system refuses into an `InputError`."""
  try:
    yield
  except OSError as error:
    raise errors.InputError(
      'cannot write',
      path=path,
      found=error.strerror or error,
      fix='mend this, then repeat the command to go on',
    ) from error
