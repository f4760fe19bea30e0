"""Modules of one program, grouped by name, as results on the tile collection are often given."""

from __future__ import annotations

import collections
from collections.abc import Iterable
import re
from typing import Any

from tpu_graphs.metrics import metrics

# The names of modules of measured programs end with '_', a fingerprint of 64 bits in hexadecimal
# digits, which may be negative and lack leading zeros, and the number of a program seen before.
# Ten digits are required, so that '_32' or '_bf16' is not taken for a fingerprint.
_FINGERPRINT = re.compile(r'(?<=.)_-?[0-9a-f]{10,16}(\.\d+)?\Z')


def program_of(module_id: str) -> str:
  """Returns the name of the program that a module is part of.

  It is the module's name without the fingerprint at its end: 'resnet50.4x4.fp16_-342c949e14733d96'
  and 'resnet50.4x4.fp16_426e203f19335d17' are kernels of the program 'resnet50.4x4.fp16'. A module
  whose name does not end with a fingerprint is a program of its own, such as 'unet_3d.4x4.bf16'
  of a layout collection, and the modules of the public test splits, whose names are digests.
  """
  return _FINGERPRINT.sub('', module_id)


def group(results: Iterable[metrics.ModuleMetrics]) -> dict[str, list[metrics.ModuleMetrics]]:
  """Groups results by program; programs are sorted by name, results keep their order."""
  groups = collections.defaultdict(list)
  for result in results:
    groups[program_of(result.module_id)].append(result)
  return {program: groups[program] for program in sorted(groups)}


def summarize(results: Iterable[metrics.ModuleMetrics]) -> dict[str, dict[str, Any]]:
  """Returns `metrics.summarize` of the modules of each program; programs are sorted by name.

  Raises:
    InputError: see `metrics.summarize`.
  """
  groups = group(results)
  return {program: metrics.summarize(members) for program, members in groups.items()}
