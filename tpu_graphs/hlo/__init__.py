"""Conversion of HLO from any source to modules.

TensorFlow and JAX are imported only to compile their functions.

```
for module in hlo.from_file('op_tuning_data.pb', kind='tile'):
  print(module.module_id, module.num_ops, module.num_configs)
```
"""

from tpu_graphs.hlo.implementations import implementation
from tpu_graphs.hlo.sources import from_jax
from tpu_graphs.hlo.sources import from_tf
from tpu_graphs.hlo.sources import jax_to_proto
from tpu_graphs.hlo.sources import tf_to_proto
from tpu_graphs.hlo.tuning import Extraction
from tpu_graphs.hlo.tuning import from_bytes
from tpu_graphs.hlo.tuning import from_file
from tpu_graphs.hlo.tuning import read
from tpu_graphs.hlo.tuning import RUN_FAILED
from tpu_graphs.hlo.tuning import RUN_TOO_SHORT
from tpu_graphs.hlo.tuning import RUN_WITHOUT_CONFIG
from tpu_graphs.hlo.tuning import RUN_WITHOUT_DEFAULT
from tpu_graphs.hlo.tuning import RUN_WITHOUT_PROFILE
from tpu_graphs.hlo.tuning import SKIPPED_FEW_RUNS
from tpu_graphs.hlo.tuning import SKIPPED_WITHOUT_HLO
from tpu_graphs.hlo.tuning import SKIPPED_WITHOUT_TILES

__all__ = [
  'RUN_FAILED',
  'RUN_TOO_SHORT',
  'RUN_WITHOUT_CONFIG',
  'RUN_WITHOUT_DEFAULT',
  'RUN_WITHOUT_PROFILE',
  'SKIPPED_FEW_RUNS',
  'SKIPPED_WITHOUT_HLO',
  'SKIPPED_WITHOUT_TILES',
  'Extraction',
  'from_bytes',
  'from_file',
  'from_jax',
  'from_tf',
  'implementation',
  'jax_to_proto',
  'read',
  'tf_to_proto',
]
