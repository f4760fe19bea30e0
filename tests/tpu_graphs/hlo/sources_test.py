"""Tests of tpu_graphs.hlo.sources: functions of TensorFlow and JAX as modules."""

import collections
import functools
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tpu_graphs import errors
from tpu_graphs import hlo
from tpu_graphs.hlo import protos
from tpu_graphs.hlo import sources
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import features


def _ops(module):
  names = features.opcode_names()
  return collections.Counter(names[opcode] for opcode in module.node_opcode)


def _check(module, kind='layout'):
  """Checks that a program has one root per computation, edges, known opcodes and no configs."""
  assert (module.kind, module.num_configs, module.num_config_ops) == (kind, 0, 0)
  assert (
    module.node_feat[:, features.node_feature_names().index('is_root')].sum()
    == module.computation.max() + 1
  )
  assert module.num_edges > 0
  assert module.unknown_opcodes == {}


@pytest.fixture(scope='module')
def tf():
  return pytest.importorskip('tensorflow')


@pytest.fixture(scope='module')
def jax():
  return pytest.importorskip('jax')


@pytest.fixture(scope='module')
def model(tf):
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      layers.Conv2D(8, 3, input_shape=(16, 16, 3)),
      layers.BatchNormalization(),
      layers.ReLU(),
      layers.Conv2D(4, 3, strides=2),
      layers.MaxPool2D(),
      layers.Flatten(),
      layers.Dense(5),
    ]
  )


@pytest.fixture(scope='module')
def images(tf):
  return tf.TensorSpec([8, 16, 16, 3])


@pytest.fixture(scope='module')
def train_step(tf, model):
  optimizer = tf.keras.optimizers.Adam()
  loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

  @tf.function(jit_compile=True)
  def step(images, labels):
    with tf.GradientTape() as tape:
      loss = loss_of(labels, model(images, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss

  return step


@pytest.mark.parametrize('optimized', [False, True])
def test_keras_model(model, images, optimized):
  module = sources.from_tf(model, images, optimized=optimized)
  _check(module)
  ops = _ops(module)
  assert ops['convolution'] + ops['dot'] == 3
  assert ('fusion' in ops) == optimized
  if not optimized:
    assert (ops['convolution'], ops['dot'], ops['reduce-window']) == (2, 1, 1)


def test_python_values_of_a_keras_model(model, images):
  training = sources.from_tf(model, images, training=True)
  assert training.num_ops > sources.from_tf(model, images, training=False).num_ops
  other = sources.from_tf(functools.partial(model, training=True), images)
  assert training.topology_fingerprint() == other.topology_fingerprint()


@pytest.mark.parametrize('optimized', [False, True])
def test_tf_train_step(tf, train_step, images, optimized):
  module = sources.from_tf(train_step, images, tf.TensorSpec([8], tf.int64), optimized=optimized)
  _check(module)
  ops = _ops(module)
  # There are 2 forward convolutions, 2 gradients of kernels and 1 gradient of an input. Only XLA's
  # passes remove the gradient of the images.
  assert ops['convolution'] == (5 if optimized else 6)
  assert ops['dot'] == 3


def _assert_same_program(one, other):
  assert one.topology_fingerprint() == other.topology_fingerprint()
  np.testing.assert_array_equal(one.node_feat, other.node_feat)


def test_program_is_the_one_that_tensorflow_runs(tf, train_step, images):
  labels = tf.TensorSpec([8], tf.int64)
  by_spec = sources.from_tf(train_step, images, labels)
  [own] = hlo.read(
    train_step.experimental_get_compiler_ir(images, labels)(stage='hlo_serialized')
  ).modules
  _assert_same_program(by_spec, own)
  by_value = sources.from_tf(
    train_step, np.zeros([8, 16, 16, 3], np.float32), labels=tf.zeros([8], tf.int64)
  )
  _assert_same_program(by_spec, by_value)


def test_every_kind_of_tensorflow_callable(tf):
  class Softmax(tf.Module):
    def __init__(self):
      self.weights = tf.Variable(tf.ones([4, 5]))

    def plain(self, x, scale=1.0):
      return tf.nn.softmax(x @ self.weights * scale)

    @tf.function
    def function(self, x, scale=1.0):
      return self.plain(x, scale)

    @tf.function(jit_compile=True, autograph=False)
    def compiled(self, x, scale=1.0):
      return self.plain(x, scale)

  x = tf.TensorSpec([3, 4])
  softmax = Softmax()
  modules = [
    sources.from_tf(each, x)
    for each in (
      softmax.plain,
      softmax.function,
      softmax.compiled,
      softmax.function.get_concrete_function(x),
      functools.partial(softmax.plain, scale=1.0),
    )
  ]
  for module in modules:
    _check(module)
    _assert_same_program(module, modules[0])
  assert _ops(modules[0])['dot'] == 1
  with_input = sources.from_tf(softmax.plain, x, scale=tf.TensorSpec([]))
  assert _ops(with_input)['parameter'] == _ops(modules[0])['parameter'] + 1


def test_nests_and_python_values(tf):
  def function(pair, sizes, *, flag):
    x = tf.reshape(pair['x'] @ pair['y'][0], sizes)  # A size must be a constant.
    for _ in range(3 if flag else 1):
      x = tf.sin(x)
    if tf.reduce_sum(x) > 0:
      x = -x
    return x

  x, y = tf.TensorSpec([2, 3]), np.zeros([3, 4], np.float32)
  modules = {
    flag: sources.from_tf(function, {'x': x, 'y': [y]}, [4, 2], flag=flag) for flag in (True, False)
  }
  assert {flag: _ops(module)['sine'] for flag, module in modules.items()} == {True: 3, False: 1}
  assert _ops(modules[True])['conditional'] == 1


@pytest.mark.slow
@pytest.mark.parametrize('optimized', [False, True])
@pytest.mark.parametrize(('name', 'convolutions'), [('MobileNetV2', 52), ('ResNet50', 53)])
def test_published_models(tf, name, convolutions, optimized):
  network = getattr(tf.keras.applications, name)(weights=None)
  assert convolutions == sum(
    isinstance(layer, tf.keras.layers.Conv2D | tf.keras.layers.DepthwiseConv2D)
    for layer in network.layers
  )
  module = sources.from_tf(network, tf.TensorSpec([1, 224, 224, 3]), optimized=optimized, name=name)
  _check(module)
  assert module.module_id == name
  ops = _ops(module)
  # XLA for CPU turns convolutions of size 1 into dots.
  assert ops['convolution'] + ops['dot'] == convolutions + 1
  if not optimized:
    assert ops['dot'] == 1
    # Weights and the images are parameters of the program.
    weights = sum(1 for _ in network.weights)
    assert ops['parameter'] > weights


@pytest.mark.parametrize(
  ('make', 'found'),
  [
    (lambda tf: (lambda x: x + 1, [None]), 'static input shape'),
    (lambda tf: (lambda x: x + 1, None), 'static input shape'),
    (lambda tf: (tf.as_string, [3]), "'AsString'"),
    (lambda tf: (lambda x: x @ x, [3, 4]), 'Dimensions must be equal'),
    (lambda tf: (lambda x, y: x, [3]), "missing 1 required positional argument: 'y'"),
    (lambda tf: (lambda x: tf.ones(tf.cast(x, tf.int32)), [3]), 'must be a compile-time constant'),
    (lambda tf: (5, [3]), 'not callable'),
  ],
)
def test_function_that_tensorflow_cannot_compile(tf, make, found):
  function, shape = make(tf)
  with pytest.raises(errors.InputError, match=found) as caught:
    sources.tf_to_proto(function, tf.TensorSpec(shape))
  assert caught.value.reason == 'function that TensorFlow cannot compile'
  assert '\n' not in str(caught.value)
  assert len(str(caught.value)) < 500


def test_faults_of_the_function_itself_are_not_hidden(tf):
  def function(x):
    return x.no_such_attribute

  with pytest.raises(AttributeError, match='no_such_attribute'):
    sources.tf_to_proto(function, tf.TensorSpec([3]))


def _network(jax):
  jnp = jax.numpy

  def loss(params, images):
    x = jax.lax.conv_general_dilated(
      images, params['kernel'], (2, 2), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )
    x = jnp.tanh(x).reshape(x.shape[0], -1) @ params['dense']

    def body(carry, _):
      return jnp.sin(carry), carry.sum()

    x, sums = jax.lax.scan(body, x, length=5)
    return (x.sum() + sums.sum()) / 2

  params = {
    'kernel': jax.ShapeDtypeStruct((3, 3, 4, 8), jnp.float32),
    'dense': jax.ShapeDtypeStruct((4 * 4 * 8, 10), jnp.float32),
  }
  return loss, params, jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.float32)


def test_jax_function(jax):
  loss, params, images = _network(jax)
  module = sources.from_jax(loss, params, images)
  _check(module)
  ops = _ops(module)
  assert (ops['convolution'], ops['dot'], ops['while']) == (1, 1, 1)
  assert module.module_id.startswith('jit_loss')
  shape = module.node_feat[module.node_opcode == features.opcodes()['convolution']][0]
  columns = [features.node_feature_names().index(f'shape_dimensions_{i}') for i in range(4)]
  assert shape[columns].tolist() == [2, 4, 4, 8]


@pytest.mark.parametrize('optimized', [False, True])
def test_jax_gradient(jax, optimized):
  loss, params, images = _network(jax)
  module = sources.from_jax(
    jax.value_and_grad(loss, argnums=(0, 1)), params, images, optimized=optimized
  )
  _check(module)
  ops = _ops(module)
  # Convolution and dot occur once forward and once for each of their two operands; the loop occurs
  # once forward and once backward.
  assert (ops['convolution'], ops['dot'], ops['while']) == (3, 3, 2)


def test_stages_of_jax_are_the_same_program(jax):
  loss, params, images = _network(jax)
  lowered = jax.jit(loss).lower(params, images)
  compiled = lowered.compile()
  for optimized in (False, True):
    by_function = sources.from_jax(loss, params, images=images, optimized=optimized)
    for stage in (lowered, compiled) if optimized else (lowered,):
      _assert_same_program(sources.from_jax(stage, optimized=optimized), by_function)
  _assert_same_program(sources.from_jax(compiled), by_function)


@pytest.mark.parametrize('optimized', [False, True])
def test_text_of_jax_equals_its_protobuf(jax, optimized):
  loss, params, images = _network(jax)
  lowered = jax.jit(jax.grad(loss)).lower(params, images)
  text = lowered.compile().as_text() if optimized else lowered.as_text('hlo')
  [by_text] = hlo.read(text.encode()).modules
  by_proto = sources.from_jax(lowered, optimized=optimized)
  assert by_text.num_ops == by_proto.num_ops
  assert _ops(by_text) == _ops(by_proto)
  # The order of ops may differ, so each row is compared together with the rows of its operands.
  assert _neighbourhoods(by_text) == _neighbourhoods(by_proto)


def _neighbourhoods(module):
  rows = [
    (int(opcode), row.tobytes())
    for opcode, row in zip(module.node_opcode, module.node_feat, strict=True)
  ]
  for _ in range(3):
    operands = collections.defaultdict(list)
    for consumer, operand in module.edge_index.tolist():
      operands[consumer].append(rows[operand])
    rows = [hash((row, tuple(sorted(map(hash, operands[i]))))) for i, row in enumerate(rows)]
  return collections.Counter(rows)


@pytest.mark.parametrize(
  ('make', 'found'),
  [
    (lambda np_: (lambda x: x[x > 0], [3]), 'Array boolean indices must be concrete'),
    (lambda np_: (lambda x: 1 if x.sum() > 0 else 2, [3]), 'boolean conversion of traced array'),
    (lambda np_: (lambda x: np_.dot(x, x), [3, 4]), 'contracting dimensions'),
    (lambda np_: (lambda x, y: x, [3]), "missing 1 required positional argument: 'y'"),
    (lambda np_: (5, [3]), 'callable'),
  ],
)
def test_function_that_jax_cannot_compile(jax, make, found):
  function, shape = make(jax.numpy)
  with pytest.raises(errors.InputError, match=found) as caught:
    sources.jax_to_proto(function, jax.ShapeDtypeStruct(shape, jax.numpy.float32))
  assert caught.value.reason == 'function that JAX cannot compile'
  assert '\n' not in str(caught.value)


def test_arguments_for_a_stage(jax):
  lowered = jax.jit(lambda x: x + 1).lower(1.0)
  with pytest.raises(errors.InputError, match='has been lowered: found 2 arguments, expected none'):
    sources.jax_to_proto(lowered, 1.0, y=2.0)


def test_options(jax):
  def function(x):
    return x.T @ x

  x = jax.ShapeDtypeStruct((4, 4), jax.numpy.float32)
  module = sources.from_jax(
    function, x, name='mine', kind='tile', choices=feature_choices.FeatureChoices(layout_padding=-1)
  )
  _check(module, kind='tile')
  assert module.module_id == 'mine'
  layout = features.node_feature_names().index('layout_minor_to_major_0')
  assert module.node_feat[:, layout + 2].tolist() == [-1] * module.num_ops
  with pytest.raises(errors.InputError, match='unknown kind'):
    sources.from_jax(function, x, kind='op')


def test_bytes_are_a_module(jax, tf):
  for data in (
    sources.jax_to_proto(lambda x: x + 1, 1.0),
    sources.tf_to_proto(lambda x: x + 1, tf.TensorSpec([])),
  ):
    module = protos.HloModuleProto.FromString(data)
    assert module.name
    assert 'add' in {
      op.opcode for computation in module.computations for op in computation.instructions
    }


@pytest.mark.parametrize(
  ('package', 'call', 'fix'),
  [
    ('tensorflow', sources.tf_to_proto, "pip install 'tpu_graphs'"),
    ('jax', sources.jax_to_proto, "pip install 'tpu_graphs[jax]'"),
  ],
)
def test_package_missing(monkeypatch, package, call, fix):
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(errors.InputError, match=f'{package}: package cannot be imported') as caught:
    call(lambda: None)
  assert caught.value.fix == fix


def test_import_is_cheap():
  code = (
    'import sys; from tpu_graphs.hlo import sources; '
    'print({"tensorflow", "jax", "jaxlib"} & {name.partition(".")[0] for name in sys.modules})'
  )
  result = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    check=True,
    cwd=pathlib.Path(__file__).parents[3],
  )
  assert result.stdout.strip() == 'set()'
