"""Tests of baselines.strategies; no TPU or GPU is needed."""

import pytest
import tensorflow as tf

from baselines import strategies
from tpu_graphs import errors

_LOCAL = {'--data': '/tmp/data', '--out': 'runs/a'}
_REMOTE = {'--data': 'gs://b/data', '--out': 'gs://b/run'}


@pytest.fixture
def connected(monkeypatch):
  """The names that were connected to; a connection fails afterwards as TensorFlow's does without a TPU."""
  names = []

  def connect(tpu):
    names.append(tpu)
    raise ValueError('Please provide a TPU Name\nto connect to.')

  monkeypatch.setattr(tf.distribute.cluster_resolver.TPUClusterResolver, 'connect', connect)
  return names


@pytest.mark.parametrize(('paths', 'flag'), [
    (_LOCAL, '--data'), ({**_REMOTE, '--out': '/tmp/m'}, '--out'), ({**_REMOTE, '--data': 'gcs://b/data'}, '--data')])
@pytest.mark.parametrize('name', ['tpu', 'auto'])
def test_local_path_with_remote_tpu_is_refused_before_connecting(connected, name, paths, flag):
  with pytest.raises(errors.InputError, match='local path given to a remote TPU') as info:
    strategies.make(name, tpu='my-tpu', paths=paths)
  assert (info.value.where, info.value.found) == (flag, paths[flag])
  assert '--tpu=local' in info.value.fix
  assert connected == []


@pytest.mark.parametrize(('tpu', 'paths', 'name'), [
    ('local', _LOCAL, 'local'), ('', _LOCAL, ''), (None, _LOCAL, ''), ('my-tpu', _REMOTE, 'my-tpu')])
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


def test_tpu_strategy_is_made_from_what_was_connected(monkeypatch):
  monkeypatch.setattr(tf.distribute.cluster_resolver.TPUClusterResolver, 'connect', lambda tpu: f'resolver of {tpu}')
  monkeypatch.setattr(tf.distribute, 'TPUStrategy', lambda resolver: f'strategy by {resolver}')
  assert strategies.make('auto', tpu='local', paths=_LOCAL) == 'strategy by resolver of local'
