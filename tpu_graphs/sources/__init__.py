"""Raw files as modules: npz, XLA dumps, configs beside a program, downloads and samples.

```
from tpu_graphs import sources

module = sources.npz.load('kernel.npz')
extraction = sources.from_file('kernels.pb')  # A file of any type; its modules are in `.modules`.
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpu_graphs import _lazy

if TYPE_CHECKING:
  from tpu_graphs.sources.readers import from_bytes as from_bytes
  from tpu_graphs.sources.readers import from_file as from_file
  from tpu_graphs.sources.readers import stream as stream

__all__ = [
  'candidates',
  'download',
  'dumps',
  'from_bytes',
  'from_file',
  'npz',
  'stream',
  'synthetic',
]
_HOMES = {
  'from_bytes': 'tpu_graphs.sources.readers',
  'from_file': 'tpu_graphs.sources.readers',
  'stream': 'tpu_graphs.sources.readers',
}
__getattr__, __dir__ = _lazy.attach(__name__, __all__, _HOMES)
