"""Models and their training.

Importing this package before TensorFlow keeps TensorFlow's C++ log off the terminal.
"""

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
from tpu_graphs import _lazy
from tpu_graphs import compat  # noqa: F401  # Before tf.keras is used here.

__all__ = ['losses', 'models', 'serving']
__getattr__, __dir__ = _lazy.attach(__name__, __all__, {})
