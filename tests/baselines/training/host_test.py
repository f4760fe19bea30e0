"""Tests of baselines.training.host."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf

from baselines.training import host
from tests import testing


@pytest.fixture
def chosen(monkeypatch):
  """Collects the requested numbers of threads per operation."""
  found = []
  for name in ('TF_NUM_INTRAOP_THREADS', 'MALLOC_ARENA_MAX'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr(tf.config.threading, 'set_intra_op_parallelism_threads', found.append)
  return found


@pytest.mark.parametrize(
  ('cores', 'threads'), [(1, 1), (2, 1), (3, 1), (5, 1), (6, 2), (16, 5), (None, 1)]
)
def test_operations_of_tile_batches_use_few_threads(cores, threads, chosen, monkeypatch):
  monkeypatch.setattr(os, 'cpu_count', lambda: cores)
  host.tune('tile')
  assert chosen == [threads]


def test_layout_is_left_to_tensorflow(chosen):
  host.tune('layout')
  assert not chosen


def test_environment_overrides_the_number_of_threads(chosen, monkeypatch):
  monkeypatch.setenv('TF_NUM_INTRAOP_THREADS', '2')
  host.tune('tile')
  assert not chosen


def test_existing_threads_are_kept(monkeypatch):
  tf.constant(0.0).numpy()
  before = tf.config.threading.get_intra_op_parallelism_threads()
  monkeypatch.setattr(os, 'cpu_count', lambda: 30)
  host.tune('tile')
  assert tf.config.threading.get_intra_op_parallelism_threads() == before


def test_a_fresh_process_has_the_threads_and_few_arenas():
  # Without `tune`, each of 16 threads would have its own arena, a mapping of 64 MiB.
  code = """
import re, threading
import baselines
import tensorflow as tf
from baselines.training import host
host.tune('tile')
barrier = threading.Barrier(16)
def allocate():
  data = [bytes(100_000) for _ in range(20)]
  barrier.wait(60)
threads = [threading.Thread(target=allocate) for _ in range(16)]
before = open('/proc/self/maps').read()
for thread in threads: thread.start()
for thread in threads: thread.join()
def arenas(maps):
  return len(re.findall('^[0-9a-f]+[048c]000000-', maps, re.M))
print(arenas(open('/proc/self/maps').read()) - arenas(before))
tf.constant(0.0).numpy()
print(tf.config.threading.get_intra_op_parallelism_threads())
"""
  env = {
    name: value
    for name, value in os.environ.items()
    if name not in ('TF_NUM_INTRAOP_THREADS', 'MALLOC_ARENA_MAX')
  }
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=testing.GOLDEN.parents[1],
    env=env,
    text=True,
    capture_output=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  new_arenas, threads = map(int, done.stdout.split())
  assert new_arenas <= 2
  assert threads == max(1, os.cpu_count() // 3)
