"""An HTTP server on this machine for tests of downloads.

It can have every fault that a server or a connection may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import http.server
import re
import threading


@dataclasses.dataclass
class Site:
  """The files of the server, its behaviour, and the requests it received.

  Attributes:
    url: the server's URL.
    files: the content of each file by its name.
    etags: the ETag of each file by its name; a file without an ETag has no version at all.
    ranges: whether the server understands Range.
    faults: the faults of the next GET requests, one after the other; None is no fault.
    head_faults: the faults of the next HEAD requests.
    requests: the method, name and Range header of each request.
  """

  url: str = ''
  files: dict[str, bytes] = dataclasses.field(default_factory=dict)
  etags: dict[str, str] = dataclasses.field(default_factory=dict)
  ranges: bool = True
  faults: list[Callable[[Handler], None] | None] = dataclasses.field(default_factory=list)
  head_faults: list[Callable[[Handler], None] | None] = dataclasses.field(default_factory=list)
  requests: list[tuple[str, str, str | None]] = dataclasses.field(default_factory=list)

  def put(self, name: str, content: bytes, etag: str = '"1"') -> None:
    """Adds or replaces a file."""
    self.files[name], self.etags[name] = content, etag

  @property
  def gets(self) -> list[str | None]:
    """The Range headers of the GET requests."""
    return [range_header for method, _, range_header in self.requests if method == 'GET']


class Handler(http.server.BaseHTTPRequestHandler):
  """Answers one request of a `Site`."""

  site: Site

  def log_message(self, *args) -> None:
    pass

  def do_HEAD(self) -> None:
    self._handle(self.site.head_faults)

  def do_GET(self) -> None:
    self._handle(self.site.faults)

  def _handle(self, faults) -> None:
    self.site.requests.append((self.command, self.path.lstrip('/'), self.headers['Range']))
    fault = faults.pop(0) if faults else None
    if fault:
      fault(self)
    else:
      self.answer()

  def answer(
    self, *, send: int | None = None, lie: int = 0, part: bool | None = None, headers=()
  ) -> None:
    """Sends the file.

    Args:
      send: the number of bytes after which the connection breaks.
      lie: the error of Content-Length in bytes.
      part: whether to send the range that is asked for; None does so if the site understands
        ranges and versions agree.
      headers: further headers.
    """
    name = self.path.lstrip('/')
    if name not in self.site.files:
      self.send_error(404)
      return
    content, etag, start = self.site.files[name], self.site.etags[name], 0
    asked = re.fullmatch(r'bytes=(\d+)-', self.headers['Range'] or '')
    if part is None:
      part = self.site.ranges and self.headers['If-Range'] == etag
    if asked and part:
      start = int(asked[1])
      self.send_response(206)
      self.send_header('Content-Range', f'bytes {start}-{len(content) - 1}/{len(content)}')
    else:
      self.send_response(200)
    self.send_header('Content-Length', str(len(content) - start + lie))
    if etag:
      self.send_header('ETag', etag)
    for header in headers:
      self.send_header(*header)
    self.end_headers()
    if self.command == 'GET':
      self.wfile.write(content[start:] if send is None else content[start : start + send])


def status(code: int) -> Callable[[Handler], None]:
  """Returns the fault that the request is answered with an HTTP status."""
  return lambda handler: handler.send_error(code)


def broken(send: int) -> Callable[[Handler], None]:
  """Returns the fault that the connection breaks after `send` bytes of the content."""
  return lambda handler: handler.answer(send=send)


def hang_up(handler: Handler) -> None:
  """Closes the connection without an answer: a fault."""
  handler.connection.close()


@contextlib.contextmanager
def serve() -> Iterator[Site]:
  """Yields a site that is up inside the block."""
  site = Site()
  handler = type('SiteHandler', (Handler,), {'site': site})
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01})
    thread.start()
    site.url = f'http://127.0.0.1:{server.server_port}'
    try:
      yield site
    finally:
      server.shutdown()
      thread.join()
