"""Tests of baselines.training.runs: written runs are read, in another process too, and errors name
the damage.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from baselines import models
from baselines import scoring
from baselines.models import parts
from baselines.training import checkpoints
from baselines.training import runs
from tests import testing
from tpu_graphs import errors
from tpu_graphs.dataset import statistics
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import npz

_PARTS = parts.PartOptions(hidden=4, layers=1, opcode_embedding=3)


@dataclasses.dataclass(frozen=True)
class _Case:
  """A run, the model that it was written from, and a file that it can rank."""

  run: str
  model: tf.keras.Model
  options: models.ModelOptions
  input: str


@pytest.fixture(scope='session')
def cases(tmp_path_factory):
  """Makes a case of each kind."""
  return [_make_case(kind, tmp_path_factory.mktemp(f'runs_{kind}')) for kind in module_lib.KINDS]


@pytest.fixture(scope='session', params=range(len(module_lib.KINDS)), ids=module_lib.KINDS)
def case(request, cases):
  return cases[request.param]


def _make_case(kind, folder):
  arrays = testing.tile_arrays(c=9) if kind == 'tile' else testing.layout_arrays(c=9)
  np.savez(folder / 'a.npz', **arrays)
  module = npz.load(folder / 'a.npz')
  content = statistics.Statistics.of(module).to_json()
  options = models.ModelOptions(models.DEFAULT_MODEL[kind], kind, _PARTS)
  tf.keras.utils.set_random_seed(0)
  model = models.build(options, statistics.parse(content))
  writer = runs.Writer(
    str(folder / 'run'),
    config={'note': 'π'},
    options=options,
    model=model,
    statistics=content,
    overwrite=False,
  )
  writer.write_history([{'epoch': 1, 'loss': 0.123456789, 'valid_opa': None}])
  writer.save(1)
  return _Case(str(folder / 'run'), model, options, str(folder / 'a.npz'))


@pytest.fixture
def damaged(case, tmp_path):
  """Makes a copy of the run to be damaged."""
  return shutil.copytree(case.run, tmp_path / 'copy')


def _refusal(path):
  with pytest.raises(errors.InputError) as info:
    runs.load(str(path))
  return info.value


def _write(path, case, overwrite=False):
  with open(f'{case.run}/{runs.STATISTICS_NAME}', encoding='utf-8') as file:
    content = json.load(file)
  return runs.Writer(
    str(path),
    config={},
    options=case.options,
    model=case.model,
    statistics=content,
    overwrite=overwrite,
  )


def test_run_is_read_as_it_was_written(case):
  run = runs.load(case.run)
  assert run.options == case.options
  assert run.kind == case.options.kind
  assert run.config['note'] == 'π'
  assert len(run.model.weights) == len(case.model.weights)
  for weight, expected in zip(run.model.weights, case.model.weights, strict=True):
    np.testing.assert_array_equal(weight, expected)


def test_history_has_a_row_per_epoch(case):
  with open(f'{case.run}/{runs.HISTORY_NAME}', encoding='utf-8') as file:
    assert file.read() == 'epoch,loss,valid_opa\n1,0.123457,\n'


@pytest.mark.slow
def test_another_process_gives_the_same_scores(cases):
  code = (
    'import sys\n'
    'import tpu_graphs\n'
    'for run, path in zip(sys.argv[1::2], sys.argv[2::2]):\n'
    '  print(tpu_graphs.rank(run, path).scores.tobytes().hex())'
  )
  paths = [path for case in cases for path in (case.run, case.input)]
  process = subprocess.run(
    [sys.executable, '-c', code, *paths], capture_output=True, text=True, check=False
  )
  assert process.returncode == 0, process.stderr
  for case, line in zip(cases, process.stdout.splitlines(), strict=True):
    expected = scoring.score_module(
      scoring.make_scorer(case.model, case.options.kind), npz.load(case.input)
    ).score
    np.testing.assert_allclose(
      np.frombuffer(bytes.fromhex(line), np.float32), expected, rtol=1e-5, atol=1e-5
    )


def test_only_the_last_saved_weights_are_kept(case, tmp_path):
  writer = _write(tmp_path / 'run', case)
  for epoch in (1, 4):
    writer.save(epoch)
  indexes = sorted(path.name for path in (tmp_path / 'run' / 'checkpoint').glob('*.index'))
  assert indexes == ['ckpt-4.index']


def test_no_run(tmp_path):
  error = _refusal(tmp_path)
  assert (error.reason, error.path) == ('not a run directory', str(tmp_path))


@pytest.mark.parametrize(
  'text', ['', '{', '[]', '{}', '{"format_version": 1}', '{"format_version": 1, "model": 3}']
)
def test_damaged_config_is_named(damaged, text):
  (damaged / runs.CONFIG_NAME).write_text(text)
  error = _refusal(damaged)
  assert (error.reason, error.path) == ('damaged config', str(damaged / runs.CONFIG_NAME))


def test_another_format_is_refused(damaged):
  path = damaged / runs.CONFIG_NAME
  path.write_text(json.dumps({**json.loads(path.read_text()), 'format_version': 99}))
  error = _refusal(damaged)
  assert (error.reason, error.found, error.path) == ('run of another format', '99', str(path))


@pytest.mark.parametrize('change', [{'name': 'GPT'}, {'kind': 'other'}])
def test_unknown_model_in_config_is_refused(damaged, change):
  path = damaged / runs.CONFIG_NAME
  content = json.loads(path.read_text())
  content['model'].update(change)
  path.write_text(json.dumps(content))
  assert _refusal(damaged).path == str(path)


def test_config_of_other_sizes_is_refused(damaged):
  path = damaged / runs.CONFIG_NAME
  content = json.loads(path.read_text())
  content['model']['parts']['hidden'] = 5
  path.write_text(json.dumps(content))
  assert _refusal(damaged).reason == 'damaged checkpoint'


def test_missing_statistics_are_named(damaged):
  (damaged / runs.STATISTICS_NAME).unlink()
  assert _refusal(damaged).path == str(damaged / runs.STATISTICS_NAME)


@pytest.mark.parametrize(
  'text', ['', '{"format_version": 1, "features": {}}', '{"format_version": 9}']
)
def test_damaged_statistics_are_named(damaged, text):
  (damaged / runs.STATISTICS_NAME).write_text(text)
  assert _refusal(damaged).path == str(damaged / runs.STATISTICS_NAME)


def test_missing_checkpoint_is_refused(damaged):
  shutil.rmtree(damaged / 'checkpoint')
  assert _refusal(damaged).reason == 'run without a checkpoint'


@pytest.mark.parametrize('pattern', ['*.index', '*.data-*'])
@pytest.mark.parametrize('damage', ['missing', 'cut'])
def test_damaged_checkpoint_is_refused(damaged, pattern, damage):
  (path,) = (damaged / 'checkpoint').glob(pattern)
  if damage == 'missing':
    path.unlink()
  else:
    path.write_bytes(path.read_bytes()[:100])
  assert _refusal(damaged).reason in ('damaged checkpoint', 'run without a checkpoint')


def test_existing_run_is_replaced_only_if_asked(case, damaged):
  before = sorted(path.name for path in damaged.iterdir())
  with pytest.raises(errors.InputError, match='--overwrite'):
    _write(damaged, case)
  assert sorted(path.name for path in damaged.iterdir()) == before
  _write(damaged, case, overwrite=True)
  assert not (damaged / runs.HISTORY_NAME).exists()
  assert not (damaged / 'checkpoint').exists()


def test_run_that_died_before_its_first_epoch_can_be_repeated(case, tmp_path):
  _write(tmp_path / 'run', case)
  _write(tmp_path / 'run', case).save(1)
  assert runs.load(str(tmp_path / 'run')).options == case.options


def _save_state(path):
  checkpoints.States(
    str(path / runs.STATE_NAME), checkpoints.Progress(), weight=tf.Variable(1.0)
  ).save()


def test_run_with_a_state_is_interrupted(case, tmp_path):
  path = tmp_path / 'run'
  assert not runs.is_interrupted(str(path))
  _write(path, case)
  assert not runs.is_interrupted(str(path))
  _save_state(path)
  assert runs.is_interrupted(str(path))
  with pytest.raises(errors.InputError, match='--overwrite'):
    _write(path, case)
  _write(path, case, overwrite=True)
  assert not (path / runs.STATE_NAME).exists()


def test_interrupted_run_is_resumed_with_the_same_options_only(case, damaged):
  _save_state(damaged)
  (damaged / runs.TENSORBOARD_NAME).mkdir()
  config = json.loads((damaged / runs.CONFIG_NAME).read_text())

  def resume(**over):
    runs.Writer(
      str(damaged),
      **{
        'config': {'note': 'π'},
        'options': case.options,
        'model': case.model,
        'resumes': True,
        'statistics': {},
        'overwrite': False,
        **over,
      },
    )

  with pytest.raises(
    errors.InputError, match='interrupted run had other options: found note=None, expected note=π'
  ):
    resume(config={})
  parts_ = dataclasses.replace(case.options.parts, hidden=5)
  with pytest.raises(
    errors.InputError, match=r'found model.parts.hidden=5, expected model.parts.hidden=4;'
  ):
    resume(options=dataclasses.replace(case.options, parts=parts_))
  assert json.loads((damaged / runs.CONFIG_NAME).read_text()) == config
  # Versions may differ.
  resume(config={'note': 'π', 'versions': {'tensorflow': 'another'}})
  assert runs.is_interrupted(str(damaged))
  assert (damaged / runs.HISTORY_NAME).exists()


def test_worker_that_is_not_the_chief_writes_nothing(case, tmp_path):
  writer = runs.Writer(
    str(tmp_path / 'run'),
    config={},
    options=case.options,
    model=case.model,
    statistics={},
    overwrite=True,
    is_chief=False,
  )
  writer.write_history([{'epoch': 1}])
  writer.save(1)
  writer.summary().close()
  assert list((tmp_path / 'run').iterdir()) == []


@pytest.mark.parametrize(
  'name',
  [
    runs.METRICS_NAME,
    runs.PER_MODULE_NAME,
    runs.RANKINGS_NAME,
    runs.LISTED_NAME,
    runs.REPORT_NAME,
    'report.json',
    '.report.html.partial',
  ],
)
def test_results_of_an_evaluation_are_replaced_with_the_run(damaged, case, name):
  (damaged / 'valid').mkdir()
  (damaged / 'valid' / name).write_text('?')
  _write(damaged, case, overwrite=True)
  assert not (damaged / 'valid').exists()


@pytest.mark.parametrize(
  ('data', 'trained'),
  [
    ({'keep_hops': 2, 'rest': 'drop'}, {}),
    ({'keep_hops': 2, 'rest': 'drop'}, {'keep_hops': 2, 'rest': 'summary'}),
    ({'keep_hops': None, 'rest': None}, {'keep_hops': 0, 'rest': 'drop'}),
  ],
)
def test_data_reduced_in_another_way_than_the_data_of_the_run_are_refused(
  damaged, case, data, trained
):
  def directory(options):
    manifest = types.SimpleNamespace(choices=feature_choices.PUBLISHED, options=options)
    return types.SimpleNamespace(path='DATA', kind=case.options.kind, manifest=manifest)

  config = json.loads((damaged / runs.CONFIG_NAME).read_text())
  (damaged / runs.CONFIG_NAME).write_text(json.dumps({**config, 'data': {'options': trained}}))
  with pytest.raises(
    errors.InputError, match='DATA: graphs reduced in another way: found keep_hops='
  ):
    runs.load_for(str(damaged), directory(data))
  assert runs.load_for(str(damaged), directory(trained)).options == case.options


@pytest.mark.parametrize('overwrite', [False, True])
def test_folder_of_something_else_is_never_removed(case, tmp_path, overwrite):
  (tmp_path / 'thesis.txt').write_text('years of work')
  with pytest.raises(errors.InputError, match='output exists and is not a run'):
    _write(tmp_path, case, overwrite=overwrite)
  assert (tmp_path / 'thesis.txt').read_text() == 'years of work'


@pytest.mark.parametrize('overwrite', [False, True])
@pytest.mark.parametrize(
  'foreign', ['model.bin', 'src/x.py', 'data/train/part-00000-of-00001.tfrecord']
)
def test_files_of_others_are_never_removed(damaged, case, foreign, overwrite):
  # Without foreign files, a run that died before its first epoch would be replaced.
  (damaged / runs.HISTORY_NAME).unlink()
  (damaged / foreign).parent.mkdir(parents=True, exist_ok=True)
  (damaged / foreign).write_text('precious')
  with pytest.raises(errors.InputError, match='output exists and is not a run') as info:
    _write(damaged, case, overwrite)
  assert info.value.found == foreign
  assert (damaged / foreign).read_text() == 'precious'
  assert (damaged / runs.STATISTICS_NAME).exists()


@pytest.mark.parametrize('overwrite', [False, True])
def test_config_of_another_program_is_not_removed(tmp_path, case, overwrite):
  (tmp_path / runs.CONFIG_NAME).write_text('{"model_type": "bert"}')
  with pytest.raises(
    errors.InputError, match=r'output exists and is not a run.*damaged config'
  ) as info:
    _write(tmp_path, case, overwrite)
  assert (info.value.path, info.value.fix) == (
    str(tmp_path / runs.CONFIG_NAME),
    'remove it, or choose another place',
  )
  assert (tmp_path / runs.CONFIG_NAME).read_text() == '{"model_type": "bert"}'


def test_overwrite_removes_old_results(damaged, case):
  (damaged / 'valid').mkdir()
  (damaged / 'valid' / runs.METRICS_NAME).write_text('{}')
  _write(damaged, case, overwrite=True)
  assert not (damaged / 'valid').exists()
  assert not (damaged / runs.HISTORY_NAME).exists()


@pytest.mark.parametrize('name', ['', 'file', 'file/below'])
def test_place_that_cannot_be_written_is_refused(tmp_path, case, name):
  (tmp_path / 'file').write_text('x')
  with pytest.raises(errors.InputError, match='cannot write' if name else 'empty path'):
    _write(tmp_path / name if name else '', case)
  assert (tmp_path / 'file').read_text() == 'x'


def test_config_of_fewer_layers_is_refused(damaged):
  path = damaged / runs.CONFIG_NAME
  content = json.loads(path.read_text())
  content['model']['parts']['layers'] = 0
  path.write_text(json.dumps(content))
  assert _refusal(damaged).reason == 'damaged checkpoint'


def test_run_of_an_earlier_version_knows_the_published_form(damaged):
  path = damaged / runs.CONFIG_NAME
  content = json.loads(path.read_text())
  assert content.pop('feature_choices') == {'layout_padding': 0, 'extra_features': []}
  path.write_text(json.dumps(content))
  assert runs.load(str(damaged)).choices == feature_choices.PUBLISHED


@pytest.mark.parametrize(
  'change',
  [
    5,
    [],
    {'layout_padding': 3},
    {'extra_features': [{'name': 'a'}]},
    {'extra_features': 'a'},
    {'extra_features': [{'name': 'a', 'columns': 'b', 'source': 'c:d'}]},
  ],
)
def test_damaged_choices_are_named(damaged, change):
  path = damaged / runs.CONFIG_NAME
  path.write_text(json.dumps({**json.loads(path.read_text()), 'feature_choices': change}))
  assert _refusal(damaged).path == str(path)


def test_choices_that_the_model_does_not_have_are_refused(damaged):
  path = damaged / runs.CONFIG_NAME
  choices = {'extra_features': [{'name': 'a', 'columns': ['b'], 'source': 'c:d'}]}
  path.write_text(json.dumps({**json.loads(path.read_text()), 'feature_choices': choices}))
  error = _refusal(damaged)
  assert (error.reason, error.path) == ('damaged statistics', str(damaged / runs.STATISTICS_NAME))


@pytest.mark.parametrize('name', [runs.CONFIG_NAME, runs.STATISTICS_NAME])
def test_text_of_another_encoding_is_named(damaged, name):
  (damaged / name).write_bytes(b'\xff\xfe{\x00}\x00')
  error = _refusal(damaged)
  assert (error.reason, error.path) == ('cannot read file', str(damaged / name))
