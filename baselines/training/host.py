"""Settings for the cores and the memory of the host that TensorFlow uses."""

from __future__ import annotations

import contextlib
import ctypes
import os

import tensorflow as tf

# M_ARENA_MAX of glibc's malloc.h.
_ARENA_MAX = -8
_ARENAS = 2
# Number of matrix products of a layer that do not wait for each other: one for ops themselves, one
# for their operands and one for their consumers.
_PRODUCTS = 3


def tune(kind: str) -> None:
  """Sets up the process for training on data of this kind, before TensorFlow makes its threads.

  Once TensorFlow has threads, their number stays as it is.

  The batches of tile modules are so small that splitting an operation among threads costs more than
  it gains. Whole operations run in parallel instead, as far as there are enough of them. The
  environment variable TF_NUM_INTRAOP_THREADS overrides this number of threads.

  Memory comes from few arenas instead of eight per core. Each arena keeps freed memory, so this
  saves about 100 MB on two cores.
  """
  # Only glibc has mallopt.
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
  if mallopt is not None and 'MALLOC_ARENA_MAX' not in os.environ:
    mallopt(_ARENA_MAX, _ARENAS)
  if kind == 'tile' and 'TF_NUM_INTRAOP_THREADS' not in os.environ:
    num_threads = max(1, (os.cpu_count() or 1) // _PRODUCTS)
    # TensorFlow raises a RuntimeError if it has threads already.
    with contextlib.suppress(RuntimeError):
      tf.config.threading.set_intra_op_parallelism_threads(num_threads)
