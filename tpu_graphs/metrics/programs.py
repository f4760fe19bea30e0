"""Modules of one program, grouped by name, as results on the tile collection are often given."""

from __future__ import annotations

import collections
from collections.abc import Iterable
import re
from typing import Any

from tpu_graphs.metrics import metrics

# What ends the names of modules of measured programs: '_', a fingerprint of 64 bits in hexadecimal
# digits, which may be negative and lack zeros in front, and the number of a program seen before.
# Not so short that '_32' or '_bf16' is one.
_FINGERPRINT = re.compile(r'(?<=.)_-?[0-9a-f]{10,16}(\.\d+)?\Z')


def program_of(module_id: str) -> str:
  """The program that a module is part of, by its name.

  That is the name without the fingerprint at its end: 'resnet50.4x4.fp16_-342c949e14733d96' and
  'resnet50.4x4.fp16_426e203f19335d17' are kernels of the program 'resnet50.4x4.fp16'. A module
  whose name does not end with a fingerprint is a program of its own, such as 'unet_3d.4x4.bf16'
  of a layout collection, and the modules of the public test splits, whose names are digests.
  """
  return _FINGERPRINT.sub('', module_id)


def group(results: Iterable[metrics.ModuleMetrics]) -> dict[str, list[metrics.ModuleMetrics]]:
  """Program -> the results of its modules in their order; programs sorted by name."""
  groups = collections.defaultdict(list)
  for result in results:
    groups[program_of(result.module_id)].append(result)
  return {program: groups[program] for program in sorted(groups)}


def summarize(results: Iterable[metrics.ModuleMetrics]) -> dict[str, dict[str, Any]]:
  """Program -> `metrics.summarize` of its modules; programs sorted by name.

  Raises:
    InputError: see `metrics.summarize`.
  """
  return {program: metrics.summarize(members) for program, members in group(results).items()}
