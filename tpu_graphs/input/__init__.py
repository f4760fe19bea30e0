"""Batches of GraphTensors from records, with tf.data. TensorFlow is loaded at the first use.

`load` yields one GraphTensor per record; `batches` yields padded packs of records for training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpu_graphs import _lazy

if TYPE_CHECKING:
  from tpu_graphs.input.batching import batches as batches
  from tpu_graphs.input.batching import batches_per_epoch as batches_per_epoch
  from tpu_graphs.input.batching import plan_of as plan_of
  from tpu_graphs.input.loading import batch as batch
  from tpu_graphs.input.loading import load as load
  from tpu_graphs.input.loading import NO_LAYOUT as NO_LAYOUT
  from tpu_graphs.input.loading import PADDING as PADDING
  from tpu_graphs.input.loading import without_strings as without_strings
  from tpu_graphs.input.packing import BatchOptions as BatchOptions

__all__ = [
  'NO_LAYOUT',
  'PADDING',
  'BatchOptions',
  'batch',
  'batches',
  'batches_per_epoch',
  'load',
  'plan_of',
  'without_strings',
]
_HOMES = {
  'NO_LAYOUT': 'tpu_graphs.input.loading',
  'PADDING': 'tpu_graphs.input.loading',
  'BatchOptions': 'tpu_graphs.input.packing',
  'batch': 'tpu_graphs.input.loading',
  'batches': 'tpu_graphs.input.batching',
  'batches_per_epoch': 'tpu_graphs.input.batching',
  'load': 'tpu_graphs.input.loading',
  'plan_of': 'tpu_graphs.input.batching',
  'without_strings': 'tpu_graphs.input.loading',
}
__getattr__, __dir__ = _lazy.attach(__name__, __all__, _HOMES)
