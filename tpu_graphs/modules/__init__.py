"""Measured programs: the data type, its features, and its configs as a stream."""

from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import features
from tpu_graphs.modules import reduction
from tpu_graphs.modules import selection
from tpu_graphs.modules import streams
from tpu_graphs.modules.module import kind_of_collection
from tpu_graphs.modules.module import KINDS
from tpu_graphs.modules.module import Module
from tpu_graphs.modules.module import SPLITS
from tpu_graphs.modules.module import UNMEASURED

__all__ = [
  'KINDS',
  'SPLITS',
  'UNMEASURED',
  'Module',
  'feature_choices',
  'features',
  'kind_of_collection',
  'reduction',
  'selection',
  'streams',
]
