"""Tests of baselines.training.strategies; no TPU or GPU is needed."""

import pytest
import tensorflow as tf

from baselines.training import strategies
from tpu_graphs import errors

_LOCAL = {'--data': '/tmp/data', '--out': 'runs/a'}
_REMOTE = {'--data': 'gs://b/data', '--out': 'gs://b/run'}


@pytest.fixture
def calls(monkeypatch):
  """Collects the calls of TensorFlow that reach a TPU, in order; nothing is connected."""
  made = []

  class Resolver:
    def __init__(self, tpu):
      made.append(f'resolver of {tpu!r}')

  monkeypatch.setattr(tf.distribute.cluster_resolver, 'TPUClusterResolver', Resolver)
  for module, name in (
    (tf.config, 'experimental_connect_to_cluster'),
    (tf.tpu.experimental, 'initialize_tpu_system'),
    (tf.distribute, 'TPUStrategy'),
  ):

    def call(resolver, name=name):
      assert isinstance(resolver, Resolver)
      made.append(name)
      return name

    monkeypatch.setattr(module, name, call)
  return made


@pytest.fixture
def connected(monkeypatch):
  """Collects the names of TPUs that are connected; connecting fails, as without a TPU."""
  names = []

  def connect(tpu):
    names.append(tpu)
    raise ValueError('Please provide a TPU Name\nto connect to.')

  monkeypatch.setattr(tf.distribute.cluster_resolver, 'TPUClusterResolver', connect)
  return names


@pytest.mark.parametrize(
  ('paths', 'flag'),
  [
    (_LOCAL, '--data and --out'),
    ({**_REMOTE, '--out': '/tmp/m'}, '--out'),
    ({**_REMOTE, '--data': 'gcs://b/data'}, '--data'),
  ],
)
@pytest.mark.parametrize('name', ['tpu', 'auto'])
def test_local_path_with_remote_tpu_is_refused_before_connecting(connected, name, paths, flag):
  with pytest.raises(errors.InputError, match='local path given to a remote TPU') as info:
    strategies.make(name, tpu='my-tpu', paths=paths)
  assert (info.value.where, info.value.found) == (
    flag,
    ' and '.join(paths[name] for name in flag.split(' and ')),
  )
  assert '--tpu=local' in info.value.fix
  assert connected == []


@pytest.mark.parametrize(
  ('tpu', 'paths', 'name'),
  [('local', _LOCAL, 'local'), ('', _LOCAL, ''), (None, _LOCAL, ''), ('my-tpu', _REMOTE, 'my-tpu')],
)
def test_no_tpu_to_be_found_is_one_line(connected, tpu, paths, name):
  with pytest.raises(errors.InputError, match='TPU not found') as info:
    strategies.make('tpu', tpu=tpu, paths=paths)
  assert connected == [name]
  assert '\n' not in str(info.value)


@pytest.mark.parametrize('name', ['mirrored', 'one_device'])
def test_tpu_for_another_strategy_is_refused(connected, name):
  with pytest.raises(errors.InputError, match='TPU given for another strategy'):
    strategies.make(name, tpu='local', paths=_LOCAL)
  assert connected == []


@pytest.mark.parametrize('name', ['auto', 'one_device', 'mirrored'])
def test_one_replica_on_a_machine_with_one_device(name):
  if len(tf.config.list_logical_devices()) > 1:
    pytest.skip('this machine has several devices')
  assert strategies.make(name, tpu=None, paths=_LOCAL).num_replicas_in_sync == 1


@pytest.mark.parametrize(
  ('name', 'tpu', 'paths'),
  [('auto', 'local', _LOCAL), ('tpu', None, _LOCAL), ('auto', 'my-tpu', _REMOTE)],
)
def test_tpu_is_initialized_before_its_strategy_is_made(calls, name, tpu, paths):
  assert strategies.make(name, tpu=tpu, paths=paths) == 'TPUStrategy'
  assert calls == [
    f'resolver of {tpu or ""!r}',
    'experimental_connect_to_cluster',
    'initialize_tpu_system',
    'TPUStrategy',
  ]


@pytest.mark.parametrize(
  'text',
  [
    None,
    '',
    '{',
    '[]',
    '{"cluster": {"worker": ["localhost:1"]}}',
    '{"cluster": {"worker": ["localhost:1"]}, "task": {"type": "worker", "index": 1}}',
  ],
)
def test_damaged_cluster_is_refused(monkeypatch, text):
  monkeypatch.delenv('TF_CONFIG', raising=False)
  if text is not None:
    monkeypatch.setenv('TF_CONFIG', text)
  with pytest.raises(errors.InputError, match='no cluster to train on') as info:
    strategies.make('multi_worker', tpu=None, paths=_LOCAL)
  assert info.value.found == repr(text or '')


def test_one_process_is_the_chief_and_waits_for_nobody():
  strategy = strategies.make('one_device', tpu=None, paths=_LOCAL)
  assert strategies.is_chief(strategy)
  assert strategies.num_inputs(strategy) == 1
  assert not strategies.is_cluster(strategy)
  assert [strategies.any_worker(strategy, value) for value in (False, True)] == [False, True]
