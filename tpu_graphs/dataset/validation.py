"""Complete checks of what is on disk: a dataset directory, or a tree of raw files of programs.

```
report = validation.validate('data/layout')
print(report.describe(), report.is_sound)
```

The checks read everything, one record or block of configs at a time, and keep only a digest of each
module and config. An error that makes the data wrong is a fault; a fact that a user should know,
such as equal graphs in train and test, is a warning.

The work is in `directory_validation` and `tree_validation`; `checks` holds the parts they share.
"""

from __future__ import annotations

import functools
import os

from tpu_graphs import terminal
from tpu_graphs.dataset import checks
from tpu_graphs.dataset import directory_validation
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.dataset import tree_validation


def validate(
  path: str | os.PathLike[str],
  *,
  num_workers: int | None = 1,
  progress: terminal.Progress | None = None,
) -> checks.Report:
  """Checks a dataset directory, or every file of programs in a folder and the folders in it.

  Args:
    path: path of the directory or folder, or of one file of programs. A dataset directory may be
      on any file system that TensorFlow reads.
    num_workers: number of processes; None takes one per core where the data is large. With more
      than one, `multiprocessing` starts them, so a program must call this function under
      `if __name__ == '__main__'`.
    progress: shows how many bytes are done.

  Raises:
    InputError: there is nothing to check, or a worker process died.
  """
  path = os.fspath(path)
  own_names = (manifest_lib.FILE_NAME, manifest_lib.SCHEMA_NAME, manifest_lib.STATISTICS_NAME)
  read = functools.partial(
    checks.in_processes, num_workers=num_workers, name=path, progress=progress
  )
  if '://' in path or any(os.path.exists(os.path.join(path, name)) for name in own_names):
    return directory_validation.validate_directory(path, read)
  return tree_validation.validate_tree(path, read)
