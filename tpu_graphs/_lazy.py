"""Public names of a package that are loaded when they are first used (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import importlib
from typing import Any


def attach(
  package: str, names: Sequence[str], homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
  """Returns `__getattr__` and `__dir__` for a package whose public names load on first use.

  Args:
    package: `__name__` of the package.
    names: `__all__` of the package.
    homes: name -> the module that defines the name. A name that is missing here is a submodule.
  """

  def load(name: str) -> Any:
    if name in homes:
      return getattr(importlib.import_module(homes[name]), name)
    if name in names:
      return importlib.import_module(f'{package}.{name}')
    raise AttributeError(f'module {package!r} has no attribute {name!r}')

  return load, lambda: sorted(names)
