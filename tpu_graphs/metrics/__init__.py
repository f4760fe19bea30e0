"""Quality of rankings: metrics of one module and of many, with intervals, tables and submissions.

```
import numpy as np
from tpu_graphs import metrics

metrics.opa(np.array([120, 100, 150]), np.array([0.2, 0.1, 0.3]))  # 1.0
```
"""

from tpu_graphs.metrics import config_indices
from tpu_graphs.metrics import intervals
from tpu_graphs.metrics import module_table
from tpu_graphs.metrics import programs
from tpu_graphs.metrics import submission
from tpu_graphs.metrics.metrics import evaluate_module
from tpu_graphs.metrics.metrics import higher_is_better
from tpu_graphs.metrics.metrics import kendall_tau
from tpu_graphs.metrics.metrics import ModuleMetrics
from tpu_graphs.metrics.metrics import opa
from tpu_graphs.metrics.metrics import pair_counts
from tpu_graphs.metrics.metrics import PairCounts
from tpu_graphs.metrics.metrics import summarize
from tpu_graphs.metrics.metrics import Summary
from tpu_graphs.metrics.metrics import top_k_error
from tpu_graphs.metrics.metrics import TOP_KS

__all__ = [
  'TOP_KS',
  'ModuleMetrics',
  'PairCounts',
  'Summary',
  'config_indices',
  'evaluate_module',
  'higher_is_better',
  'intervals',
  'kendall_tau',
  'module_table',
  'opa',
  'pair_counts',
  'programs',
  'submission',
  'summarize',
  'top_k_error',
]
