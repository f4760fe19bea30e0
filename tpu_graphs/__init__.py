"""Learns from measured XLA programs which compiler configurations are fast.

The names in `__all__` here and in each sub-package are public, and so is everything without a
leading underscore in a Python file that is listed there. All else is private. Importing this
package loads nothing: a name is loaded when it is first used, with NumPy or TensorFlow if it
needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpu_graphs import _lazy

if TYPE_CHECKING:
  from baselines.serving.ranking import rank as rank
  from tpu_graphs.errors import InputError as InputError
  from tpu_graphs.modules.module import Module as Module

__version__ = '0.1.0'
__all__ = [
  'InputError',
  'Module',
  '__version__',
  'cli',
  'compat',
  'dataset',
  'hlo',
  'input',
  'metrics',
  'modules',
  'rank',
  'sources',
  'testing',
  'views',
]
_HOMES = {
  'InputError': 'tpu_graphs.errors',
  'Module': 'tpu_graphs.modules.module',
  'rank': 'baselines.serving.ranking',
}
__getattr__, __dir__ = _lazy.attach(__name__, __all__, _HOMES)
