"""Tests of tpu_graphs.sources.transfer with a local server that breaks, lies and changes files."""

import io
import json
import os
import resource
import threading

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from tests import file_server
from tpu_graphs import errors
from tpu_graphs import terminal
from tpu_graphs.sources import transfer

CONTENT = bytes(range(256)) * 40  # 10,240 bytes.


@pytest.fixture
def site(monkeypatch):
  monkeypatch.setenv('no_proxy', '*')
  with file_server.serve() as site:
    site.put('a.tar', CONTENT)
    yield site


@pytest.fixture
def server(site):
  return transfer.Server(site.url, attempts=4, first_wait_s=0, timeout_s=20)


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'a.tar'


def fetch(server, path, progress=None):
  server.fetch(server.look('a.tar'), str(path), progress)


def leftovers(path):
  return sorted(file.name for file in path.parent.iterdir())


def test_look_returns_size_and_version(site, server):
  site.put('empty', b'', etag='')
  assert server.look('a.tar') == transfer.Remote(f'{site.url}/a.tar', len(CONTENT), '"1"')
  assert server.look('empty') == transfer.Remote(f'{site.url}/empty', 0, '')
  assert [method for method, _, _ in site.requests] == ['HEAD', 'HEAD']


def test_base_url_may_end_with_a_slash(site):
  assert transfer.Server(f'{site.url}/').look('a.tar').url == f'{site.url}/a.tar'


@pytest.mark.parametrize('size', [0, 1, len(CONTENT), (1 << 20) + 1])
def test_fetch(site, server, path, size):
  site.put('a.tar', os.urandom(size))
  fetch(server, path)
  assert path.read_bytes() == site.files['a.tar']
  assert leftovers(path) == ['a.tar']
  assert site.gets == ([None] if size else [])


def test_resumes_after_a_broken_connection(site, server, path):
  site.faults = [
    file_server.broken(1000),
    file_server.hang_up,
    file_server.broken(0),
    file_server.broken(24),
  ]
  fetch(server, path)
  assert path.read_bytes() == CONTENT
  assert site.gets == [None, 'bytes=1000-', 'bytes=1000-', 'bytes=1000-', 'bytes=1024-']
  assert leftovers(path) == ['a.tar']


def test_a_later_call_resumes_where_one_failed(site, server, path):
  site.faults = [file_server.broken(5000), *[file_server.status(503)] * 3]
  with pytest.raises(
    errors.InputError, match=r'download failed: found HTTP status 503 .*, 4 times; repeat'
  ):
    fetch(server, path)
  assert leftovers(path) == ['a.tar.partial', 'a.tar.partial.json']
  assert (path.parent / 'a.tar.partial').read_bytes() == CONTENT[:5000]
  fetch(server, path)
  assert path.read_bytes() == CONTENT
  assert site.gets[-1] == 'bytes=5000-'
  assert leftovers(path) == ['a.tar']


def test_what_is_complete_is_not_asked_for_again(site, server, path):
  path.with_name('a.tar.partial').write_bytes(CONTENT)
  remote = server.look('a.tar')
  path.with_name('a.tar.partial.json').write_text(json.dumps(vars(remote)))
  assert transfer.received(remote, f'{path}.partial') == len(CONTENT)
  server.fetch(remote, str(path))
  assert path.read_bytes() == CONTENT
  assert site.gets == []


def test_the_count_of_attempts_restarts_after_progress(site, server, path):
  site.faults = [file_server.broken(10)] * 40
  fetch(server, path)
  assert path.read_bytes() == CONTENT
  assert site.gets[-1] == 'bytes=400-'


@pytest.mark.parametrize('code', [408, 425, 429, 500, 502, 503, 504])
def test_a_status_that_may_pass_is_waited_for(site, server, path, code):
  site.head_faults = [file_server.status(code)]
  site.faults = [file_server.status(code)] * 3
  fetch(server, path)
  assert path.read_bytes() == CONTENT


@pytest.mark.parametrize('code', [401, 403, 404, 410, 501])
@pytest.mark.parametrize('at', ['head_faults', 'faults'])
def test_any_other_status_ends_at_once(site, server, path, code, at):
  setattr(site, at, [file_server.status(code)])
  with pytest.raises(
    errors.InputError, match=f'a.tar: server refuses the file: found HTTP status {code}'
  ) as error:
    fetch(server, path)
  assert error.value.path == f'{site.url}/a.tar'
  assert len(site.requests) == (1 if at == 'head_faults' else 2)


def test_waits_double_up_to_a_minute(site, path, monkeypatch):
  waits = []
  monkeypatch.setattr(transfer.time, 'sleep', waits.append)
  site.head_faults = [file_server.status(500)] * 10
  with pytest.raises(errors.InputError, match='10 times'):
    transfer.Server(site.url, attempts=10).look('a.tar')
  assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize('send', [0, 1, 5000, len(CONTENT) - 1])
def test_a_server_without_ranges_starts_again(site, server, path, send):
  site.ranges = False
  site.faults = [file_server.broken(send)]
  fetch(server, path)
  assert path.read_bytes() == CONTENT
  assert site.gets == [None, f'bytes={send}-' if send else None]


def test_a_server_without_ranges_that_breaks_forever_is_given_up(site, server, path):
  site.ranges = False
  site.faults = [file_server.broken(700)] * 100
  with pytest.raises(
    errors.InputError, match='connection closed after 700 of 10240 bytes, 4 times'
  ):
    fetch(server, path)


def test_without_a_version_nothing_is_resumed(site, server, path):
  site.put('a.tar', CONTENT, etag='')
  site.faults = [file_server.broken(5000)]
  fetch(server, path)
  assert path.read_bytes() == CONTENT
  assert site.gets == [None, None]


@pytest.mark.parametrize(
  ('headers', 'version'),
  [
    ([('ETag', '"x"'), ('Last-Modified', 'yesterday')], '"x"'),
    ([('ETag', 'W/"x"'), ('Last-Modified', 'yesterday')], 'yesterday'),
    ([('ETag', 'W/"x"')], ''),
  ],
)
def test_version_is_a_strong_etag_or_the_date(site, server, headers, version):
  site.put('a.tar', CONTENT, etag='')
  site.head_faults = [lambda handler: handler.answer(headers=headers)]
  assert server.look('a.tar').version == version


# The new file is as long as before, shorter than the bytes received, or longer than before.
@pytest.mark.parametrize('size', [len(CONTENT), 100, 20_000])
def test_a_file_that_changes_meanwhile_starts_again(site, server, path, size):
  def change(handler):
    handler.answer(send=5000)
    site.put('a.tar', bytes(size), etag='"2"')

  site.faults = [change]
  fetch(server, path)
  assert path.read_bytes() == bytes(size)
  assert site.gets == [None, None]


def test_a_file_that_changed_since_an_earlier_call_starts_again(site, server, path):
  site.faults = [file_server.broken(5000), *[file_server.status(500)] * 3]
  with pytest.raises(errors.InputError):
    fetch(server, path)
  site.put('a.tar', CONTENT[::-1], etag='"2"')
  fetch(server, path)
  assert path.read_bytes() == CONTENT[::-1]


def test_a_file_that_changes_between_the_look_and_the_download(site, server, path):
  remote = server.look('a.tar')
  site.put('a.tar', CONTENT[::-1], etag='"2"')
  server.fetch(remote, str(path))
  assert path.read_bytes() == CONTENT[::-1]


def test_a_server_that_ignores_if_range_mixes_no_versions(site, server, path):
  def change(handler):
    handler.answer(send=5000)
    site.put('a.tar', CONTENT[::-1], etag='"2"')

  # The HEAD after the break still reports the old version.
  site.head_faults = [None, lambda handler: handler.answer(headers=[('ETag', '"1"')])]
  site.faults = [change, lambda handler: handler.answer(part=True)]
  fetch(server, path)
  assert path.read_bytes() == CONTENT[::-1]


def test_a_range_that_was_not_asked_for_is_refused(site, server, path):
  def other_range(handler):
    handler.send_response(206)
    handler.send_header('Content-Range', f'bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}')
    handler.send_header('Content-Length', str(len(CONTENT)))
    handler.send_header('ETag', '"1"')
    handler.end_headers()
    handler.wfile.write(CONTENT)

  site.faults = [file_server.broken(5000), other_range]
  fetch(server, path)
  assert path.read_bytes() == CONTENT
  assert site.gets == [None, 'bytes=5000-', 'bytes=5000-']


def test_no_such_range_starts_again(site, server, path):
  site.faults = [file_server.broken(5000), file_server.status(416)]
  fetch(server, path)
  assert path.read_bytes() == CONTENT
  assert site.gets == [None, 'bytes=5000-', None]


@pytest.mark.parametrize('lie', [-1, -5000, 1, 5000])
def test_a_length_that_differs_from_the_one_shown_is_not_believed(site, server, path, lie):
  site.faults = [lambda handler: handler.answer(lie=lie)]
  fetch(server, path)
  assert path.read_bytes() == CONTENT
  assert len(site.gets) == 2


def test_a_length_that_always_differs_is_reported(site, server, path):
  site.faults = [lambda handler: handler.answer(lie=-7)] * 10
  with pytest.raises(
    errors.InputError, match='changed on the server: 10233 bytes instead of 10240, 4 times'
  ):
    fetch(server, path)
  assert not path.exists()


def test_a_length_beyond_the_content_is_never_complete(site, server, path):
  site.head_faults = [lambda handler: handler.answer(lie=1)] * 10
  site.faults = [lambda handler: handler.answer(lie=1)] * 10
  with pytest.raises(errors.InputError, match=r'download failed: .*10241.*, 4 times'):
    fetch(server, path)
  assert not path.exists()


def test_more_bytes_than_the_length_says_are_left(site, server, path):
  def more(handler):
    handler.answer()
    handler.wfile.write(b'surplus')

  site.faults = [more]
  fetch(server, path)
  assert path.read_bytes() == CONTENT


@pytest.mark.parametrize('value', [None, 'many', '-5', '1e3', '²'])
def test_a_server_that_does_not_report_a_size_is_refused(site, server, value):
  def answer(handler):
    handler.send_response(200)
    if value is not None:
      handler.send_header('Content-Length', value)
    handler.end_headers()

  site.head_faults = [answer]
  reason = 'server does not report the size of the file'
  with pytest.raises(errors.InputError, match=f'{reason}: found Content-Length'):
    server.look('a.tar')


def test_a_redirect_is_followed_and_keeps_the_range(site, server, path):
  site.put('real.tar', CONTENT)
  site.put('a.tar', b'moved')

  def moved(handler):
    handler.send_response(302)
    handler.send_header('Location', f'{site.url}/real.tar')
    handler.send_header('Content-Length', '0')
    handler.end_headers()

  site.head_faults = [moved] * 2
  # The client follows a redirect of a HEAD with a GET.
  site.faults = [None, moved, file_server.broken(5000), None, moved]
  fetch(server, path)
  assert path.read_bytes() == CONTENT
  assert ('GET', 'real.tar', 'bytes=5000-') in site.requests


@pytest.mark.parametrize('url', ['http://127.0.0.1:1', 'http://host.invalid'])
def test_no_network_is_reported_at_once(url, monkeypatch):
  monkeypatch.setenv('no_proxy', '*')
  monkeypatch.setattr(transfer.time, 'sleep', None)  # Waiting would raise an error.
  with pytest.raises(errors.InputError, match='cannot reach the server: found ') as error:
    transfer.Server(url).look('a.tar')
  assert '[Errno' not in str(error.value)


def test_a_network_that_fails_later_is_waited_for(site, path):
  server = transfer.Server(site.url, attempts=2, first_wait_s=0)
  remote = server.look('a.tar')
  gone = transfer.Remote('http://127.0.0.1:1/a.tar', remote.size, remote.version)
  with pytest.raises(errors.InputError, match='download failed: found Connection refused, 2 times'):
    server.fetch(gone, str(path))


def test_a_server_that_is_silent_times_out(site, path):
  done = threading.Event()
  server = transfer.Server(site.url, attempts=3, first_wait_s=0, timeout_s=0.2)
  remote = server.look('a.tar')

  def silent(handler):
    handler.answer(send=5000)
    handler.wfile.flush()
    done.wait(20)

  def mute(handler):
    done.wait(20)

  site.faults = [silent, mute]
  site.head_faults = [mute]
  try:
    server.fetch(remote, str(path))
  finally:
    done.set()
  assert path.read_bytes() == CONTENT
  assert site.gets == [None, 'bytes=5000-', 'bytes=5000-']


@pytest.mark.parametrize(
  'url', ['', 'a', 'ftp://a', 'file:///a', 'http://', 'http:///a', 'gs://a/b']
)
def test_an_invalid_url_is_refused(url):
  with pytest.raises(errors.InputError, match='--base_url: not a URL'):
    transfer.Server(url)


@pytest.mark.parametrize('url', ['http://a b', 'http://a:b', 'http://[a', 'http://..a'])
def test_a_url_that_is_valid_only_at_first_sight_is_refused(url):
  with pytest.raises(errors.InputError, match=r'not a URL: found|cannot reach'):
    transfer.Server(url).look('a.tar')


def test_a_place_that_cannot_be_written(site, server, tmp_path):
  with pytest.raises(
    errors.InputError, match=r'missing/a.tar.partial: cannot write: found No such file'
  ):
    fetch(server, tmp_path / 'missing' / 'a.tar')


def test_a_full_disk(site, server, path):
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  # A limit on the size of files stands for a full disk: writing more fails in the same way.
  resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
  try:
    with pytest.raises(
      errors.InputError, match=r'a.tar.partial: cannot write: found File too large; fix this'
    ):
      fetch(server, path)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  fetch(server, path)
  assert path.read_bytes() == CONTENT


@given(
  st.lists(
    st.tuples(
      st.sampled_from(['break', 'status', 'change', 'no range', 'hang up']),
      st.integers(0, len(CONTENT)),
    ),
    max_size=8,
  )
)
@settings(max_examples=25, deadline=None)
def test_whatever_happens_the_file_is_right(tmp_path_factory, faults):
  """Checks only that the file holds one version as a whole.

  An oracle for more would be a second client.
  """
  folder = tmp_path_factory.mktemp('any')
  versions = [bytes([i]) * (5000 + 1000 * i) for i in range(10)]
  with pytest.MonkeyPatch.context() as patch, file_server.serve() as site:
    patch.setenv('no_proxy', '*')
    site.put('a.tar', versions[0], etag='"0"')

    def change(handler, number):
      handler.answer(send=number)
      version = int(site.etags['a.tar'].strip('"')) + 1
      site.put('a.tar', versions[version], etag=f'"{version}"')

    kinds = {
      'break': lambda number: lambda handler: handler.answer(send=number),
      'status': lambda number: file_server.status(503),
      'change': lambda number: lambda handler: change(handler, number),
      'no range': lambda number: lambda handler: handler.answer(send=number, part=False),
      'hang up': lambda number: file_server.hang_up,
    }
    site.faults = [kinds[kind](number) for kind, number in faults]
    fetch(transfer.Server(site.url, attempts=20, first_wait_s=0), folder / 'a.tar')
  assert (folder / 'a.tar').read_bytes() in versions
  assert sorted(file.name for file in folder.iterdir()) == ['a.tar']


def test_progress_shows_failures(site, server, path):
  stream = io.StringIO()
  site.faults = [file_server.broken(10), file_server.status(503)]
  fetch(server, path, terminal.Progress(stream))
  assert stream.getvalue().splitlines() == [
    'a.tar: connection closed after 10 of 10240 bytes; trying again in 0 s',
    'a.tar: HTTP status 503 Service Unavailable; trying again in 0 s',
  ]
