"""Tests of baselines.training.interrupts."""

import os
import signal
import threading

import pytest

from baselines.training import interrupts as interrupts_lib

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers():
  """Restores the signal handlers after a test; returns the handlers."""
  before = {number: signal.getsignal(number) for number in _NUMBERS}
  yield before
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.mark.parametrize('number', _NUMBERS)
def test_signal_is_noted(handlers, number):
  with interrupts_lib.Interrupts() as interrupts:
    assert interrupts.received is None
    os.kill(os.getpid(), number)
    assert interrupts.received == number
  assert {number: signal.getsignal(number) for number in _NUMBERS} == handlers


def test_second_sigint_does_what_it_did_before():
  with interrupts_lib.Interrupts() as interrupts:
    os.kill(os.getpid(), signal.SIGINT)
    assert interrupts.received == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)


def test_sigterm_never_ends_what_is_being_saved():
  def save():
    with interrupts_lib.Interrupts() as interrupts:
      for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
      raise interrupts_lib.Interrupted(interrupts.received)

  with pytest.raises(interrupts_lib.Interrupted) as info:
    save()
  assert info.value.signal == signal.SIGTERM
  # Afterwards SIGTERM is ignored, so it does not end the process.
  os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
  ('number', 'message'),
  [
    (signal.SIGTERM, 'stopped by SIGTERM'),
    (signal.SIGINT, 'stopped by SIGINT'),
    (None, 'stopped because another worker was stopped'),
  ],
)
def test_error_names_the_signal(number, message):
  error = interrupts_lib.Interrupted(number)
  assert error.signal == number
  assert str(error) == message


def test_ignored_signals_stay_ignored():
  # Background jobs of a script ignore SIGINT.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  with interrupts_lib.Interrupts() as interrupts:
    os.kill(os.getpid(), signal.SIGINT)
    assert interrupts.received is None
  assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_other_threads_train_without_handlers(handlers):
  def work():
    with interrupts_lib.Interrupts():
      found.append({number: signal.getsignal(number) for number in _NUMBERS})

  found = []
  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert found == [handlers]
