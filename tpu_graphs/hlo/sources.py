"""Functions of TensorFlow and JAX -> modules, to rank a program before it was ever measured.

```
module = hlo.from_tf(model, tf.TensorSpec([8, 224, 224, 3]), name='resnet50')
pathlib.Path('step.pb').write_bytes(hlo.jax_to_proto(train_step, params, batch, optimized=True))
```
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import importlib
from typing import Any

from tpu_graphs import errors
from tpu_graphs.hlo import tuning
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import module as module_lib


def from_tf(
  function: Callable[..., Any],
  *args: Any,
  optimized: bool = False,
  name: str | None = None,
  kind: str = 'layout',
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED,
  **kwargs: Any,
) -> module_lib.Module:
  """Returns a TensorFlow function as a module without configs.

  Args:
    function: the function; see `tf_to_proto`.
    *args: see `tf_to_proto`.
    optimized: see `tf_to_proto`.
    name: the `module_id`; None takes the name of the HLO module and a digest.
    kind: 'layout' or 'tile'.
    choices: choices of how node features are made.
    **kwargs: see `tf_to_proto`.

  Raises:
    InputError: TensorFlow or XLA refuses the function.
  """
  return _module(tf_to_proto(function, *args, optimized=optimized, **kwargs), name, kind, choices)


def from_jax(
  function: Any,
  *args: Any,
  optimized: bool = False,
  name: str | None = None,
  kind: str = 'layout',
  choices: feature_choices.FeatureChoices = feature_choices.PUBLISHED,
  **kwargs: Any,
) -> module_lib.Module:
  """Returns a JAX function as a module without configs.

  Args:
    function: the function; see `jax_to_proto`.
    *args: see `jax_to_proto`.
    optimized: see `jax_to_proto`.
    name: the `module_id`; None takes the name of the HLO module and a digest.
    kind: 'layout' or 'tile'.
    choices: choices of how node features are made.
    **kwargs: see `jax_to_proto`.

  Raises:
    InputError: JAX is not installed, or it or XLA refuses the function.
  """
  return _module(jax_to_proto(function, *args, optimized=optimized, **kwargs), name, kind, choices)


def _module(
  data: bytes, name: str | None, kind: str, choices: feature_choices.FeatureChoices
) -> module_lib.Module:
  [module] = tuning.read(data, kind=kind, choices=choices).modules
  return module if name is None else dataclasses.replace(module, module_id=name)


def tf_to_proto(
  function: Callable[..., Any], *args: Any, optimized: bool = False, **kwargs: Any
) -> bytes:
  """Returns the HLO of a TensorFlow function under tf.function(jit_compile=True).

  The variables of the function become parameters.

  Args:
    function: a function, under tf.function or not, a Keras model, or any other callable.
    *args: arguments of the function: tf.TensorSpec of static shape, tensors, arrays, Python
      values, and nests of them. Python values are fixed; the others are inputs of the program.
    optimized: True for the program after XLA's passes for the device, False for the program as
      TensorFlow hands it to XLA.
    **kwargs: keyword arguments of the function, likewise.

  Returns:
    A serialized HloModuleProto.

  Raises:
    InputError: TensorFlow or XLA refuses the function.
  """
  tf = _import('tensorflow', 'tpu_graphs')
  leaves = tf.nest.flatten((args, kwargs))
  inputs = {}
  for i, leaf in enumerate(leaves):
    is_array = hasattr(leaf, 'shape') and hasattr(leaf, 'dtype')
    if is_array and not isinstance(leaf, tf.Variable):
      inputs[i] = tf.TensorSpec(leaf.shape, leaf.dtype)
  python_function = getattr(function, 'python_function', function)

  def call(*tensors):
    filled = {**dict(enumerate(leaves)), **dict(zip(inputs, tensors, strict=True))}
    all_args, all_kwargs = tf.nest.pack_sequence_as((args, kwargs), list(filled.values()))
    return python_function(*all_args, **all_kwargs)

  call.__name__ = _name_of(function)
  stage = 'optimized_hlo_serialized' if optimized else 'hlo_serialized'
  try:
    compiled = tf.function(call, jit_compile=True)
    return compiled.experimental_get_compiler_ir(*inputs.values())(stage=stage)
  except (TypeError, ValueError, NotImplementedError, tf.errors.OpError) as error:
    raise _refused('TensorFlow', function, error) from error


def jax_to_proto(function: Any, *args: Any, optimized: bool = False, **kwargs: Any) -> bytes:
  """Returns the HLO of a JAX function.

  Args:
    function: a function, under jax.jit or not; or a jax.stages.Lowered or Compiled, which takes no
      further arguments.
    *args: arguments of the function: arrays, jax.ShapeDtypeStruct, and trees of them.
    optimized: True for the program after XLA's passes for the device; a jax.stages.Compiled always
      has these passes behind it.
    **kwargs: keyword arguments of the function.

  Returns:
    A serialized HloModuleProto.

  Raises:
    InputError: JAX is not installed, or it or XLA refuses the function.
  """
  jax = _import('jax', 'tpu_graphs[jax]')
  is_stage = isinstance(function, jax.stages.Lowered | jax.stages.Compiled)
  if is_stage and (args or kwargs):
    raise errors.InputError(
      'arguments for a program that has been lowered',
      where=type(function).__name__,
      found=f'{len(args) + len(kwargs)} arguments',
      expected='none',
    )
  stage = function
  try:
    if not is_stage:
      stage = (function if hasattr(function, 'lower') else jax.jit(function)).lower(*args, **kwargs)
    if optimized and isinstance(stage, jax.stages.Lowered):
      stage = stage.compile()
    if isinstance(stage, jax.stages.Compiled):
      [program] = stage.runtime_executable().hlo_modules()
    else:
      program = stage.compiler_ir('hlo')
  except (TypeError, ValueError, IndexError, NotImplementedError, RuntimeError) as error:
    raise _refused('JAX', function, error) from error
  return program.as_serialized_hlo_module_proto()


def _import(name: str, distribution: str) -> Any:
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise errors.InputError(
      'package cannot be imported', where=name, found=error, fix=f"pip install '{distribution}'"
    ) from error


def _refused(framework: str, function: Any, error: Exception) -> errors.InputError:
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  lines = lines or [type(error).__name__]
  # TensorFlow may quote a traceback, whose last line names the fault. Other messages name it first.
  line = lines[-1] if lines[0].startswith('in user code') else lines[0]
  return errors.InputError(
    f'function that {framework} cannot compile', where=_name_of(function), found=line[:400]
  )


def _name_of(function: Any) -> str:
  name = getattr(function, '__name__', None) or getattr(function, 'name', None)
  return str(name or type(function).__name__)
