"""`python -m tpu_graphs COMMAND` is the command `tpu-graphs COMMAND`."""

import sys

from tpu_graphs import cli

if __name__ == '__main__':
  sys.exit(cli.main())
