"""Tests of tpu_graphs.terminal: progress on a terminal and elsewhere, counts, sizes and times."""

import io

import pytest

from tpu_graphs import terminal


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_progress_on_a_terminal_renews_one_line():
  now = [0.0]
  stream = Terminal()
  progress = terminal.Progress(stream, clock=lambda: now[0])
  progress.start('a.tar', 10 << 20, 2 << 20)
  for seconds, done in ((0.1, 2.1), (2, 4), (2.1, 4.5), (4, 5), (4, 10)):
    now[0] = seconds
    progress.advance(int(done * (1 << 20)))
  progress.end(10 << 20)
  assert stream.getvalue().split('\r') == [
    '',
    'a.tar   40 %  4.0 MiB of 10.0 MiB  1.0 MiB/s  6 s left',
    'a.tar   50 %  5.0 MiB of 10.0 MiB  768.0 KiB/s  7 s left',
    'a.tar  100 %  10.0 MiB of 10.0 MiB  2.0 MiB/s           \n',
  ]


def test_progress_elsewhere_is_a_line_now_and_then():
  now = [0.0]
  stream = io.StringIO()
  progress = terminal.Progress(stream, clock=lambda: now[0])
  progress.start('a.tar', 1000, 0)
  for seconds in range(0, 100, 10):
    now[0] = float(seconds)
    progress.advance(seconds)
  progress.end(90)
  assert stream.getvalue().splitlines() == [
    'a.tar    3 %  30 bytes of 1000 bytes  1 bytes/s  16 min left',
    'a.tar    6 %  60 bytes of 1000 bytes  1 bytes/s  16 min left',
    'a.tar    9 %  90 bytes of 1000 bytes  1 bytes/s  15 min left',
  ]


@pytest.mark.parametrize(
  ('size', 'text'),
  [
    (0, '0 bytes'),
    (1023, '1023 bytes'),
    (1024, '1.0 KiB'),
    (1536, '1.5 KiB'),
    (5 << 30, '5.0 GiB'),
    (3 << 40, '3.0 TiB'),
    (1 << 52, '4096.0 TiB'),
  ],
)
def test_size_text(size, text):
  assert terminal.size_text(size) == text


@pytest.mark.parametrize(
  ('seconds', 'text'),
  [(0, '0 s'), (89, '89 s'), (90, '2 min'), (3600, '60 min'), (5400, '1.5 h'), (86400, '24.0 h')],
)
def test_time_text(seconds, text):
  assert terminal.time_text(seconds) == text


@pytest.mark.parametrize(
  ('count', 'text'), [(0, '0 ops'), (1, '1 op'), (2, '2 ops'), (1024, '1,024 ops')]
)
def test_plural(count, text):
  assert terminal.plural(count, 'op') == text


def test_printable():
  assert terminal.printable('a\nπ 模\x1b') == 'a\ufffdπ 模\ufffd'
