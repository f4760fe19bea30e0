"""Models and their training. Importing this before TensorFlow keeps TensorFlow's C++ log off the
terminal.
"""

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
from tpu_graphs import compat  # noqa: F401  # Before tf.keras is used here.
