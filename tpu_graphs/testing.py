"""A check for tests, here and in other packages, that a function can run on a TPU.

The check itself needs no TPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import re
from typing import Any

EPOCHS = 3


def assert_tpu_ready(
  fn: Callable[..., Any], spec: Any, *, inputs: Iterable[Any] | None = None
) -> None:
  """Asserts that a function compiles to a program that a TPU can run, once for all inputs.

  This means:
  - no argument is a string, and all shapes are static;
  - XLA compiles the function (here for the CPU, which takes the same operations but for a few);
  - no tensor in the compiled program has a size that is known only at run time;
  - no input of several epochs makes the function trace, and so compile, again.

  Args:
    fn: a function, Keras model or tf.function that takes its inputs as positional arguments.
    spec: the spec of the argument: a tf.TypeSpec such as tf.TensorSpec or tfgnn.GraphTensorSpec,
      or a dict or list of them. For several arguments, a tuple of these.
    inputs: the inputs of one epoch, each an argument or a tuple of arguments as in `spec`. They
      are iterated over three times: a tf.data.Dataset works, an iterator does not. By default one
      input of zeros.

  Raises:
    AssertionError: the function fails the check; names the leaf of `spec` or the operation that is
      at fault.
  """
  import tensorflow as tf  # Imported here, so that this module is cheap to import.

  specs = spec if isinstance(spec, tuple) else (spec,)
  for name, leaf in _leaves(spec):
    if leaf.dtype == tf.string:
      raise AssertionError(f'{name}: found a string, which cannot be sent to a TPU')
    is_dense = isinstance(leaf, tf.TensorSpec)
    if not is_dense or not leaf.shape.is_fully_defined():
      ragged = '' if is_dense else ', ragged'
      raise AssertionError(f'{name}: found shape {leaf.shape}{ragged}, expected static sizes')
  traces: list[tuple[Any, ...]] = []

  def traced(*args: Any) -> Any:
    traces.append(args)
    return fn(*args)

  compiled = tf.function(traced, jit_compile=True)
  zeros = tf.nest.map_structure(
    lambda leaf: tf.zeros(leaf.shape, leaf.dtype), specs, expand_composites=True
  )
  try:
    text = compiled.experimental_get_compiler_ir(*zeros)(stage='hlo')
    compiled(*zeros)
  except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, ValueError) as error:
    raise AssertionError(f'not compiled by XLA: {" ".join(str(error).split())}') from error
  # HLO writes a size that is known only at run time as its bound, such as f32[<=10].
  bounded = [
    line for line in text.splitlines() if re.search(r'\[[^\]]*<=', line.split('metadata=')[0])
  ]
  if bounded:
    # The heading of a function does not name the operation at fault, so other lines come first.
    line = min(bounded, key=lambda line: 'op_type=' not in line)
    raise AssertionError(f'shape known only at run time, from {_operation(line)}: {line.strip()}')
  if inputs is None:
    inputs = [zeros]
  for epoch in range(EPOCHS):
    for i, given in enumerate(inputs):
      args = given if isinstance(given, tuple) else (given,)
      compiled(*args)
      if len(traces) > 1:
        found = tf.nest.map_structure(tf.type_spec_from_value, args)
        raise AssertionError(
          f'traced again for input {i} of epoch {epoch}: {_difference(found, specs)}'
        )


def _leaves(spec: Any, name: str = 'spec') -> Iterator[tuple[str, Any]]:
  """Yields the specs of single tensors in `spec`, each with its name."""
  import tensorflow as tf

  from tpu_graphs.compat import tfgnn

  parts: Iterable[tuple[str, Any]]
  if isinstance(spec, tfgnn.GraphTensorSpec):
    parts = [
      ('context', spec.context_spec),
      *spec.node_sets_spec.items(),
      *spec.edge_sets_spec.items(),
    ]
  elif isinstance(spec, (tfgnn.ContextSpec, tfgnn.NodeSetSpec, tfgnn.EdgeSetSpec)):
    parts = [('sizes', spec.sizes_spec), *spec.features_spec.items()]
    if isinstance(spec, tfgnn.EdgeSetSpec):
      indices = spec.adjacency_spec.get_index_specs_dict()
      parts += [(f'index {tag}', index) for tag, (_, index) in indices.items()]
  elif isinstance(spec, dict):
    parts = spec.items()
  elif isinstance(spec, (list, tuple)):
    parts = [(str(i), part) for i, part in enumerate(spec)]
  elif isinstance(spec, tf.TypeSpec):
    yield name, spec
    return
  else:
    raise TypeError(f'{name}: found {spec!r}, expected a tf.TypeSpec')
  for part_name, part in parts:
    yield from _leaves(part, f'{name}/{part_name}')


def _operation(line: str) -> str:
  """Returns the TensorFlow operation that a line of HLO comes from."""
  return ' '.join(re.findall(r'op_(?:type|name)="([^"]*)"', line)) or 'an operation without a name'


def _difference(found: Any, expected: Any) -> str:
  """Describes the first leaf in which two specs differ."""
  leaves = dict(_leaves(expected))
  for name, leaf in _leaves(found):
    if leaf != leaves.get(name):
      return f'{name}: found {leaf}, expected {leaves.get(name)}'
  return f'found {found}, expected {expected}'
