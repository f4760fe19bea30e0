"""Downloads of large files via HTTP.

They survive a broken connection, a restart, and a file that changes on the server meanwhile.

```
server = transfer.Server('https://example.org/data')
server.fetch(server.look('big.tar'), 'big.tar', terminal.Progress(sys.stderr))
```

The bytes of `big.tar` received so far are in `big.tar.partial`. `big.tar.partial.json` names the
version of the file that they belong to; only a download of this version is resumed, with a Range
request.
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
# HTTP status codes of failures that may pass.
_RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504))
_NO_SUCH_RANGE = 416
_LONGEST_WAIT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Remote:
  """A file as the server describes it.

  Attributes:
    url: the file's URL.
    size: the file's size in bytes.
    version: the file's ETag, or its date if there is no ETag; equal versions mean equal content.
      Empty if the server reports neither.
  """

  url: str
  size: int
  version: str


class _TransferError(Exception):
  """A failure that may pass.

  Attributes:
    unreachable: whether no connection was made at all.
    restart: whether the bytes received so far are of no use.
  """

  def __init__(self, message: str, *, unreachable: bool = False, restart: bool = False):
    super().__init__(message)
    self.unreachable = unreachable
    self.restart = restart


@dataclasses.dataclass(frozen=True)
class Server:
  """A server that holds archives, and how patiently to wait for it.

  Attributes:
    base_url: the http or https URL of the folder of the archives.
    attempts: the number of failures in a row that end a transfer. The count restarts when more
      bytes than ever before were received.
    first_wait_s: the seconds before the second attempt; each further wait is twice as long, up to a
      minute.
    timeout_s: the seconds without an answer after which an attempt has failed.
  """

  base_url: str
  attempts: int = 7
  first_wait_s: float = 1.0
  timeout_s: float = 30.0

  def __post_init__(self):
    if not re.match(r'https?://[^/]', self.base_url):
      raise errors.InputError(
        'not a URL', where='--base_url', found=self.base_url, expected='http://… or https://…'
      )

  def look(self, name: str) -> Remote:
    """Asks the server for size and version of the file `name`.

    Raises:
      InputError: the file or the server does not exist.
    """
    url = f'{self.base_url.rstrip("/")}/{name}'
    return self._patiently(lambda: self._head(url), url, lambda: 0, wait_for_network=False)

  def fetch(self, remote: Remote, path: str, progress: terminal.Progress | None = None) -> None:
    """Downloads a file to `path`, and resumes if an earlier call left `path`.partial.

    Raises:
      InputError: too many attempts failed, or the file cannot be written.
    """
    partial = f'{path}.partial'
    current = remote

    def attempt() -> None:
      nonlocal current
      try:
        self._transfer(current, partial, progress)
      except _TransferError as error:
        if error.restart:
          os.remove(f'{partial}.json')
        # The file may have changed on the server, so the next attempt expects the present version.
        with contextlib.suppress(_TransferError):
          current = self._head(remote.url)
        raise

    def length() -> int:
      return os.path.getsize(partial) if os.path.exists(partial) else 0

    report = progress.report if progress else None
    self._patiently(attempt, remote.url, length, wait_for_network=True, report=report)
    os.replace(partial, path)
    os.remove(f'{partial}.json')

  def _patiently(
    self,
    action: Callable[[], Any],
    url: str,
    length: Callable[[], int],
    *,
    wait_for_network: bool,
    report: Callable[[str], None] | None = None,
  ) -> Any:
    """Repeats an action until it succeeds, and returns its result.

    Args:
      action: raises `_TransferError` for a failure that may pass.
      url: the URL, for messages.
      length: returns the number of bytes received so far; the count of failures restarts when it
        has grown.
      wait_for_network: whether to wait for a server that cannot be reached.
      report: is called with a line before each wait.

    Raises:
      InputError: the action failed `attempts` times in a row, or the server cannot be reached.
    """
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
            found=f'{error}, {terminal.plural(failures, "time")}',
            fix='repeat the command to resume',
          ) from error
        wait = min(self.first_wait_s * 2 ** (failures - 1), _LONGEST_WAIT_S)
        if report:
          report(f'{posixpath.basename(url)}: {error}; trying again in {wait:.0f} s')
        time.sleep(wait)

  def _transfer(self, remote: Remote, partial: str, progress: terminal.Progress | None) -> None:
    """Makes one attempt to complete the file `partial`."""
    start = received(remote, partial)
    with writing(partial), contextlib.ExitStack() as stack:
      file = stack.enter_context(open(partial, 'ab'))
      file.truncate(start)
      pathlib.Path(f'{partial}.json').write_text(_note(remote))
      if start == remote.size:
        return
      headers = {'Range': f'bytes={start}-', 'If-Range': remote.version} if start else {}
      response = stack.enter_context(self._open(remote.url, headers))
      if response.status != 206:
        # The server does not support ranges, or no longer has this version.
        start = 0
      elif not (response.headers['Content-Range'] or '').startswith(f'bytes {start}-'):
        raise _TransferError(f'asked for bytes {start}-, got {response.headers["Content-Range"]}')
      found = _remote(remote.url, response.headers)
      if found != remote:
        what = 'another version'
        if found.size != remote.size:
          what = f'{found.size} bytes instead of {remote.size}'
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
    """Opens a URL; the response is closed at the end of the block.

    Raises:
      _TransferError: a failure that may pass.
      InputError: the server refuses the file, or the URL is not valid.
    """
    all_headers = {'User-Agent': 'tpu-graphs', 'Accept-Encoding': 'identity', **(headers or {})}
    try:
      request = urllib.request.Request(url, headers=all_headers, method=method)
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
      raise errors.InputError('not a URL', path=url, found=error, fix='check --base_url') from error
    except (OSError, http.client.HTTPException) as error:
      raise _TransferError(_reason(error)) from error
    with response:
      yield response


def _reason(error: object) -> str:
  """Returns an error's message in one line, without its number."""
  message = str(getattr(error, 'strerror', None) or error)
  return ' '.join(message.split()) or type(error).__name__


def _note(remote: Remote) -> str:
  """Returns the text kept beside a partial file, which identifies the file and its version."""
  return json.dumps(dataclasses.asdict(remote))


def received(remote: Remote, partial: str) -> int:
  """Returns how many bytes of this version of a file `partial` holds; 0 if that is unknown."""
  try:
    size = os.path.getsize(partial)
    known = pathlib.Path(f'{partial}.json').read_text() == _note(remote)
  except (OSError, UnicodeError):
    return 0
  return size if known and remote.version and size <= remote.size else 0


def _remote(url: str, headers: email.message.Message) -> Remote:
  """Returns the file that the headers of an answer describe."""
  whole = re.fullmatch(r'bytes \d+-\d+/(\d+)', headers.get('Content-Range') or '')
  size = whole[1] if whole else headers.get('Content-Length') or ''
  if not size.isascii() or not size.isdigit():
    raise errors.InputError(
      'server does not report the size of the file',
      path=url,
      found=f'Content-Length {size or "missing"}',
      expected='a number of bytes',
      fix='give the --base_url of another server',
    )
  version = headers.get('ETag') or ''
  if not version.startswith('"'):  # A weak ETag, W/"…", does not promise equal bytes.
    version = headers.get('Last-Modified') or ''
  return Remote(url, int(size), version)


def _receive(
  response: http.client.HTTPResponse,
  file: io.BufferedWriter,
  start: int,
  size: int,
  progress: terminal.Progress | None,
) -> None:
  """Writes the body of an answer to `file`: the bytes from `start` to `size`."""
  file.truncate(start)
  file.seek(start)
  while file.tell() < size:
    # `read1` returns the bytes that have arrived, so that a broken connection loses none of them.
    try:
      block = response.read1(min(_BLOCK_BYTES, size - file.tell()))
    except (OSError, http.client.HTTPException) as error:
      raise _TransferError(_reason(error)) from error
    if not block:
      raise _TransferError(f'connection closed after {file.tell()} of {size} bytes')
    file.write(block)
    if progress:
      progress.advance(file.tell())


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
  """Turns errors of the file system inside the block into an `InputError`."""
  try:
    yield
  except OSError as error:
    raise errors.InputError(
      'cannot write',
      path=path,
      found=error.strerror or error,
      fix='fix this, then repeat the command to resume',
    ) from error
