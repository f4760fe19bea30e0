"""Tests of baselines.training.checkpoints: states are restored exactly, and damage is skipped."""

import numpy as np
import pytest
import tensorflow as tf

from baselines.training import checkpoints
from tpu_graphs import errors

_HISTORY = [{'epoch': 1, 'loss': 0.1 + 0.2, 'valid_opa': None}]


def _states(folder, value=0.0, **progress):
  progress = checkpoints.Progress(**progress)
  weight = tf.Variable([value, 2.0])
  return checkpoints.States(str(folder), progress, weight=weight), progress, weight


def _save(folder, values):
  """Saves states of epoch 1, one per step, with weights of these values."""
  states, progress, weight = _states(folder)
  for progress.step, value in enumerate(values, 1):
    weight.assign([value, 2.0])
    states.save()


def _restored(folder):
  """Restores a state; returns its progress, its first weight and the warnings."""
  states, progress, weight = _states(folder)
  lines = []
  assert states.restore(lines.append)
  return progress, float(weight[0]), lines


def test_state_is_restored_exactly(tmp_path):
  states, progress, _ = _states(
    tmp_path, 1 / 3, epoch=2, step=7, loss=0.1 + 0.2, best=1 / 3, history=_HISTORY
  )
  states.save()
  restored, value, lines = _restored(tmp_path)
  assert restored == progress
  assert restored.history[0]['loss'] == 0.1 + 0.2
  assert value == np.float32(1 / 3)
  assert lines == []


def test_no_state_is_no_error(tmp_path):
  states, progress, weight = _states(tmp_path / 'state', 5.0)
  assert not states.restore(pytest.fail)
  assert (progress, float(weight[0])) == (checkpoints.Progress(), 5.0)
  states.remove()


def test_last_two_are_kept(tmp_path):
  _save(tmp_path, [1.0, 2.0, 3.0])
  assert checkpoints.stored(str(tmp_path)) == ['000001-00000002', '000001-00000003']
  assert len(list(tmp_path.iterdir())) == 4
  assert _restored(tmp_path)[1] == 3.0


def test_end_of_an_epoch_comes_before_the_next(tmp_path):
  states, progress, _ = _states(tmp_path, epoch=9, step=30)
  states.save()
  progress.epoch, progress.step = 10, 0
  states.save()
  assert _restored(tmp_path)[0].epoch == 10


@pytest.mark.parametrize('pattern', ['*.index', '*.data-*'])
@pytest.mark.parametrize('damage', ['missing', 'cut', 'empty', 'flipped'])
def test_damaged_newest_falls_back(tmp_path, pattern, damage):
  _save(tmp_path, [1.0, 2.0])
  path = max(tmp_path.glob(pattern))
  content = bytearray(path.read_bytes())
  content[2] ^= 0xFF
  if damage == 'missing':
    path.unlink()
  else:
    path.write_bytes({'cut': content[:20], 'empty': b'', 'flipped': content}[damage])
  progress, value, lines = _restored(tmp_path)
  assert (progress.step, value) == (1, 1.0)
  if (pattern, damage) == ('*.index', 'missing'):
    # Without its index, a state counts as never written.
    assert lines == []
  else:
    (line,) = lines
    assert line.startswith(f'warning: {tmp_path}/000001-00000002: damaged state')
    assert '\n' not in line


def test_damaged_state_is_gone_after_the_next(tmp_path):
  _save(tmp_path, [1.0, 2.0])
  max(tmp_path.glob('*.data-*')).unlink()
  states, progress, _ = _states(tmp_path)
  states.restore(lambda line: None)
  progress.epoch, progress.step = 1, 1
  # This saves the restored state again.
  states.save()
  progress.step = 3
  states.save()
  assert checkpoints.stored(str(tmp_path)) == ['000001-00000001', '000001-00000003']


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
  _save(tmp_path, [1.0])
  (tmp_path / '000001-00000009_temp').mkdir()
  (tmp_path / '000001-00000009_temp' / 'part').write_text('x')
  states, progress, _ = _states(tmp_path)
  states.restore(pytest.fail)
  progress.step = 2
  states.save()
  assert sorted({path.name.split('.')[0] for path in tmp_path.iterdir()}) == [
    '000001-00000001',
    '000001-00000002',
  ]


def test_all_damaged_is_an_error(tmp_path):
  _save(tmp_path, [1.0, 2.0])
  for path in tmp_path.glob('*.data-*'):
    path.unlink()
  with pytest.raises(errors.InputError, match='--overwrite') as info:
    _restored(tmp_path)
  assert (info.value.path, info.value.found) == (str(tmp_path), '2 damaged')


def test_state_of_another_model_is_damaged(tmp_path):
  _save(tmp_path, [1.0])
  other = checkpoints.States(
    str(tmp_path), checkpoints.Progress(), weight=tf.Variable([1.0, 2.0, 3.0])
  )
  with pytest.raises(errors.InputError, match='no state of the interrupted run'):
    other.restore(lambda line: None)


def test_worker_that_is_not_the_chief_writes_nothing(tmp_path):
  states = checkpoints.States(
    str(tmp_path / 'state'), checkpoints.Progress(), is_chief=False, weight=tf.Variable(1.0)
  )
  states.save()
  assert not (tmp_path / 'state').exists()
  _save(tmp_path, [1.0])
  checkpoints.States(
    str(tmp_path), checkpoints.Progress(), is_chief=False, weight=tf.Variable(1.0)
  ).remove()
  assert checkpoints.stored(str(tmp_path))


def test_finished_training_leaves_no_state(tmp_path):
  states, _, _ = _states(tmp_path / 'state', step=1)
  states.save()
  states.remove()
  assert not (tmp_path / 'state').exists()
