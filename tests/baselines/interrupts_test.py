"""Tests of baselines.interrupts."""

import os
import signal
import threading

import pytest

from baselines import interrupts as interrupts_lib


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_signal_is_noted_until_it_is_asked_for(number):
  before = signal.getsignal(number)
  with interrupts_lib.Interrupts() as interrupts:
    interrupts.check()
    os.kill(os.getpid(), number)
    with pytest.raises(interrupts_lib.Interrupted, match=number.name) as info:
      interrupts.check()
    assert info.value.signal == number
    assert signal.getsignal(number) == before  # A second one does what it always did.
  assert signal.getsignal(number) == before


def test_signal_breaks_off_work_that_changes_nothing():
  def work(signals):
    for _ in range(signals):
      os.kill(os.getpid(), signal.SIGTERM)
    reached.append(signals)

  reached = []
  with interrupts_lib.Interrupts() as interrupts:
    for signals in (1, 0):  # Once received, it is raised where the next block begins.
      with pytest.raises(interrupts_lib.Interrupted), interrupts.at_once():
        work(signals)
  assert reached == []


@pytest.mark.parametrize('own', [False, True])
def test_workers_of_a_cluster_stop_where_all_have_come_to(own):
  told, others = [], iter([False, True])

  def any_worker(value):
    told.append(value)
    return next(others) or value

  with interrupts_lib.Interrupts(any_worker) as interrupts:
    with interrupts.at_once():
      if own:
        os.kill(os.getpid(), signal.SIGTERM)  # Not raised: the others have not come here yet.
    with pytest.raises(interrupts_lib.Interrupted) as info:
      interrupts.check()
  assert told == [False, own]
  assert info.value.signal == (signal.SIGTERM if own else None)
  assert str(info.value) == ('stopped by SIGTERM' if own else 'stopped since another worker was')


def test_handlers_are_put_back():
  before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  with interrupts_lib.Interrupts():
    assert signal.getsignal(signal.SIGTERM) != before[0]
  assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_other_threads_train_without_it():
  def work():
    with interrupts_lib.Interrupts() as interrupts:
      interrupts.check()
      done.append(True)

  done = []
  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert done == [True]
