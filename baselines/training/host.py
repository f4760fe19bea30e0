"""How TensorFlow uses the cores and the memory of the host."""

from __future__ import annotations

import contextlib
import ctypes
import os

import tensorflow as tf

_ARENA_MAX = -8  # M_ARENA_MAX of glibc's malloc.h.
_ARENAS = 2
_PRODUCTS = 3  # Matrix products of a layer that do not wait for each other: an op's own, its operands', its consumers'.


def tune(kind: str) -> None:
  """Sets up the process for training on data of this kind, before TensorFlow makes its threads;
  after that, in part.

  The batches of tile modules are so small that sharing an operation out to threads costs more
  than it gains: as far as there are enough of them, whole operations run side by side instead.
  TF_NUM_INTRAOP_THREADS overrules that. Memory
  comes from few arenas instead of eight per core, each of which keeps what was freed: some 100
  MB less on two cores.
  """
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)  # It is glibc's.
  if mallopt is not None and 'MALLOC_ARENA_MAX' not in os.environ:
    mallopt(_ARENA_MAX, _ARENAS)
  if kind == 'tile' and 'TF_NUM_INTRAOP_THREADS' not in os.environ:
    with contextlib.suppress(RuntimeError):  # There are threads already.
      tf.config.threading.set_intra_op_parallelism_threads(
        max(1, (os.cpu_count() or 1) // _PRODUCTS)
      )
