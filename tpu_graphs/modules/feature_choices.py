"""Choices about a dataset's node features: the padding of layouts, and a user's own columns.

```
@feature_choices.node_features('op_cost', columns=['flops', 'bytes'])
def op_cost(module, hlo):
  return np.stack([flops(module), module.node_feat[:, 28]], axis=1)  # [N, 2]
```
A dataset, and a model trained on it, record their choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import importlib
import operator
import os
import sys
from typing import Any

import numpy as np

from tpu_graphs import errors
from tpu_graphs.modules import features
from tpu_graphs.modules import module as module_lib

# A function takes a module and the serialized HloModuleProto that the module was read from (None
# where the source is an npz file). It returns numbers [N, number of columns].
Function = Callable[[module_lib.Module, bytes | None], np.ndarray]

LAYOUT_PADDINGS = (0, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeFeatures:
  """A user's own node features: a function and the names of its columns.

  Two objects are equal if their names, columns and sources are equal. A pickle holds the source
  in place of the function, so each worker imports the function itself.

  Attributes:
    name: a name that is unique in a dataset.
    columns: names of the columns.
    source: 'package.module:attribute', from which this object can be imported. None if it cannot
      be imported: then it works within this program, but cannot be recorded with a dataset.
    function: a `Function`, which must return the same numbers for the same module. None where
      this object was read from a record: `resolve` imports the function.
  """

  name: str
  columns: tuple[str, ...]
  source: str | None = None
  function: Function | None = dataclasses.field(default=None, compare=False, repr=False)

  def __post_init__(self):
    if isinstance(self.columns, str):
      raise errors.InputError(
        'one name in place of several',
        where='columns',
        found=repr(self.columns),
        expected='a list of names',
      )
    object.__setattr__(self, 'columns', tuple(self.columns))
    for where, names in (('name', (self.name,)), ('columns', self.columns)):
      proper = (isinstance(name, str) and name and module_lib.is_unicode(name) for name in names)
      if not names or not all(proper):
        raise errors.InputError(
          'extra features without a proper name',
          where=where,
          found=ascii(names),
          expected='names of at least one character',
        )
    if len(set(self.columns)) < len(self.columns):
      raise errors.InputError(
        'repeated column', where=self.name, found=', '.join(self.columns), expected='distinct names'
      )
    if self.function is None and self.source is None:
      raise errors.InputError(
        'extra features without a function', where=self.name, expected='a function or a source'
      )

  def __getstate__(self):
    return {**self.__dict__, 'function': None if self.source else self.function}

  def __str__(self) -> str:
    return f'{self.name} ({", ".join(self.columns)}) of {self.source or "this program"}'

  def resolve(self) -> NodeFeatures:
    """Returns these features with their function, which is imported if it is missing.

    Raises:
      InputError: the function cannot be loaded, or its name or columns have changed.
    """
    if self.function is not None:
      return self
    found = load(str(self.source))
    if found != self:
      raise errors.InputError(
        'extra features have changed',
        where=self.source,
        found=found,
        expected=self,
        fix='restore the recorded ones, or convert and train again',
      )
    return found

  def compute(self, module: module_lib.Module, hlo: bytes | None) -> np.ndarray:
    """Returns the features of a module's ops, float32 [N, number of columns].

    Raises:
      InputError: the function cannot be loaded, raises, or returns anything but finite numbers
        of this shape.
    """
    function = self.resolve().function
    where = f'{self.source or self.name} for module {module.module_id!r}'
    try:
      values = np.asarray(function(module, hlo))  # type: ignore[misc]  # Resolved.
    except Exception as error:
      raise errors.InputError(
        'extra features failed', where=where, found=_describe(error), fix='fix the function'
      ) from error
    shape = (module.num_ops, len(self.columns))
    if values.shape != shape:
      raise errors.InputError(
        'extra features of wrong shape',
        where=where,
        found=list(values.shape),
        expected=f'{list(shape)}: ops, columns',
      )
    if values.dtype.kind not in 'fiub':
      raise errors.InputError(
        'extra features of wrong dtype', where=where, found=values.dtype, expected='float32'
      )
    # A value beyond float32 becomes inf, which is refused below.
    with np.errstate(over='ignore'):
      result = values.astype(np.float32)
    if not np.isfinite(result).all():
      op, column = np.argwhere(~np.isfinite(result))[0]
      raise errors.InputError(
        'extra features not finite',
        where=f'{where}, op {op}, {self.columns[column]}',
        found=values[op, column],
        expected='a finite float32',
      )
    return result


def node_features(name: str, *, columns: Iterable[str]) -> Callable[[Function], NodeFeatures]:
  """Returns a decorator that turns a function at the top of a module into `NodeFeatures`.

  The docstring of this file shows an example.
  """

  def decorate(function: Function) -> NodeFeatures:
    path = f'{function.__module__}:{function.__qualname__}'
    # A path with '<locals>' or '<lambda>' in it cannot be imported.
    importable = function.__module__ != '__main__' and '<' not in path
    return NodeFeatures(
      name=name,
      columns=columns,  # type: ignore[arg-type]  # `NodeFeatures` makes it a tuple.
      source=path if importable else None,
      function=function,
    )

  return decorate


def load(source: str) -> NodeFeatures:
  """Imports `NodeFeatures`.

  Args:
    source: 'package.module:attribute'; modules in the current directory are found as well.

  Raises:
    InputError: the module or attribute does not exist, the import fails, or the attribute is not
      `NodeFeatures`.
  """
  module_name, _, attribute = source.partition(':')
  if not (module_name and attribute):
    raise errors.InputError(
      'extra features wrongly named', found=repr(source), expected="'package.module:attribute'"
    )
  # Installed commands and `python folder/file.py` do not have the current directory in `sys.path`.
  if not {'', os.getcwd()} & set(sys.path):
    sys.path.append(os.getcwd())
  try:
    module = importlib.import_module(module_name)
  except Exception as error:
    fix = 'fix that module'
    if isinstance(error, ModuleNotFoundError) and f'{module_name}.'.startswith(f'{error.name}.'):
      fix = 'run where it can be imported, or put its folder on the PYTHONPATH'
    raise errors.InputError(
      'extra features cannot be imported', where=source, found=_describe(error), fix=fix
    ) from error
  try:
    found = operator.attrgetter(attribute)(module)
  except AttributeError as error:
    names = [name for name, value in vars(module).items() if isinstance(value, NodeFeatures)]
    raise errors.InputError(
      'no such extra features',
      where=source,
      found=f'no {attribute} in {module.__file__}',
      expected=' or '.join(names) or None,
    ) from error
  if not isinstance(found, NodeFeatures):
    raise errors.InputError(
      'not extra features',
      where=source,
      found=f'an object of type {type(found).__name__}',
      expected='a function under @feature_choices.node_features',
    )
  return dataclasses.replace(found.resolve(), source=source)


def _describe(error: BaseException) -> str:
  """Returns the type and message of an exception, for an error of one line."""
  return f'{type(error).__name__}: {error}' if str(error) else type(error).__name__


def pad_layouts(node_feat: np.ndarray) -> None:
  """Changes the padding of layouts from 0, the published form, to -1, in place.

  A layout lists each of 0 to rank - 1 once, so its largest value + 1 is the number of places
  used. Where all values are 0, the shape distinguishes a layout of one dimension from no layout: a
  single dimension equals both the sum and the product, and the product of no dimensions is 1. So
  every shape with a layout gets the same values as from its HLO. Two shapes without a layout look
  as if they had a layout of one dimension, and are padded as such: a single dimension, and several
  dimensions that are all 0.

  Args:
    node_feat: float [N, 140], node features in the published form.
  """
  layout = _columns(node_feat, 'layout_minor_to_major_0')
  dimensions = _columns(node_feat, 'shape_dimensions_0')
  total = _columns(node_feat, 'shape_dimensions_sum')[:, 0]
  product = _columns(node_feat, 'shape_dimensions_product')[:, 0]
  largest = layout.max(axis=1, initial=0)
  first = dimensions[:, 0]
  one_dimension = (first == total) & (first == product) & ~dimensions[:, 1:].any(axis=1)
  used = np.where(largest > 0, largest + 1, one_dimension)
  layout[np.arange(features.LAYOUT_DIMENSIONS) >= used[:, np.newaxis]] = -1


def unpad_layouts(node_feat: np.ndarray) -> np.ndarray:
  """Returns `node_feat`, float [N, 140], in the published form: layouts are padded with 0."""
  if (_columns(node_feat, 'layout_minor_to_major_0') < 0).any():
    node_feat = node_feat.copy()
    layout = _columns(node_feat, 'layout_minor_to_major_0')
    np.maximum(layout, 0, out=layout)
  return node_feat


def _columns(node_feat: np.ndarray, first: str) -> np.ndarray:
  """Returns six columns, starting with the column named `first`, as a view [N, 6]."""
  column = features.node_feature_names().index(first)
  return node_feat[:, column : column + features.LAYOUT_DIMENSIONS]


@dataclasses.dataclass(frozen=True)
class FeatureChoices:
  """Choices of how the features of a dataset's ops are made.

  Attributes:
    layout_padding: the value of unused places in the six columns `layout_minor_to_major_*`. 0 is
      the published form; -1 distinguishes "no dimension" from "dimension 0".
    extra: a user's own features. Their functions get `node_feat` with the chosen padding.
  """

  layout_padding: int = 0
  extra: tuple[NodeFeatures, ...] = ()

  def __post_init__(self):
    if type(self.layout_padding) is not int or self.layout_padding not in LAYOUT_PADDINGS:
      raise errors.InputError(
        'unknown padding',
        where='layout_padding',
        found=repr(self.layout_padding),
        expected=' or '.join(map(str, LAYOUT_PADDINGS)),
      )
    object.__setattr__(self, 'extra', tuple(self.extra))
    names = [extra.name for extra in self.extra]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
      raise errors.InputError(
        'extra features of the same name',
        where='extra_features',
        found=repeated[0],
        expected='distinct names',
      )

  def __str__(self) -> str:
    extra = '; '.join(map(str, self.extra)) or 'none'
    return f'layout_padding {self.layout_padding}, extra features {extra}'

  @property
  def extra_columns(self) -> tuple[str, ...]:
    """The names of the columns of `Module.extra_feat`, such as 'op_cost.flops'."""
    return tuple(f'{extra.name}.{column}' for extra in self.extra for column in extra.columns)

  @property
  def num_extra(self) -> int:
    """The number K of columns of `Module.extra_feat`."""
    return len(self.extra_columns)

  def resolve(self) -> FeatureChoices:
    """Returns the same choices with the functions of all extra features.

    Raises:
      InputError: see `NodeFeatures.resolve`.
    """
    return dataclasses.replace(self, extra=tuple(extra.resolve() for extra in self.extra))

  def add_extra(self, module: module_lib.Module, hlo: bytes | None = None) -> module_lib.Module:
    """Returns `module` with its `extra_feat` computed.

    Args:
      module: the module, whose `node_feat` has the chosen padding.
      hlo: the serialized HloModuleProto of `module`; None where there is none.

    Raises:
      InputError: see `NodeFeatures.compute`.
    """
    if not self.extra:
      return module
    blocks = [extra.compute(module, hlo) for extra in self.extra]
    return dataclasses.replace(module, extra_feat=np.concatenate(blocks, axis=1))

  def to_json(self) -> dict[str, Any]:
    """Returns the record of these choices in a dataset or run; `from_json` reads it.

    Raises:
      InputError: extra features have no source, or their source holds something else.
    """
    for extra in self.extra:
      if extra.source is None:
        raise errors.InputError(
          'extra features that cannot be imported',
          where=extra.name,
          found='a function of this program alone',
          expected='a function at the top of a module',
          fix='move it into a file of its own',
        )
      if extra.function is not None:
        dataclasses.replace(extra, function=None).resolve()
    return {
      'layout_padding': self.layout_padding,
      'extra_features': [
        {'name': extra.name, 'columns': list(extra.columns), 'source': extra.source}
        for extra in self.extra
      ],
    }

  @classmethod
  def from_json(cls, content: Mapping[str, Any]) -> FeatureChoices:
    """Reads the choices that `to_json` recorded; functions are not loaded yet.

    Args:
      content: the record; other keys are ignored, and missing keys have their defaults.

    Raises:
      InputError: a value or name is not valid.
      TypeError: the content is of another structure.
    """
    extra = tuple(
      NodeFeatures(name=entry['name'], columns=entry['columns'], source=entry['source'])
      for entry in content.get('extra_features', ())
    )
    return cls(content.get('layout_padding', 0), extra)


PUBLISHED = FeatureChoices()
