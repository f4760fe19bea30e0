"""Tests of the job that pipelines.convert hands to a runner, and of its pickled steps."""

import pickle
import subprocess
import sys

import apache_beam as beam
from apache_beam.internal import pickler
from apache_beam.runners.portability.fn_api_runner import fn_runner
import pytest

from pipelines.conversion import inputs as inputs_lib
from pipelines.conversion import output
from pipelines.conversion import steps as steps_lib
from pipelines.conversion import transform
from tests import converting
from tests import testing
from tpu_graphs import errors

OPTIONS = converting.options(num_shards=3, max_configs=2)


@pytest.fixture
def tiles(tmp_path):
  converting.save_tiles(tmp_path / 'in', 2)
  return tmp_path / 'in'


def job(inputs, directory):
  """Returns the pipeline of a conversion as a runner gets it, and label -> step."""
  pipeline = beam.Pipeline(fn_runner.FnApiRunner())
  patterns = inputs_lib.find_inputs([str(name) for name in inputs], 'tile:xla').patterns
  _ = (
    pipeline
    | 'Patterns' >> beam.Create(patterns)
    | 'Convert' >> transform.Convert(str(directory), OPTIONS)
  )
  proto = pipeline.to_runner_api()
  return proto, {step.unique_name: step for step in proto.components.transforms.values()}


def test_size_of_the_job_does_not_depend_on_the_number_of_files(tmp_path):
  sizes = []
  for first, last in ((0, 1), (1, 2000)):
    for i in range(first, last):
      (tmp_path / f'm{i}.npz').write_bytes(b'')
    sizes.append(len(job([tmp_path], '/o')[0].SerializeToString()))
  # Pickled steps differ by some bytes; 2000 names would take 10 kB and more.
  assert sizes[1] < sizes[0] + 1000 < 1 << 20


def test_files_are_spread_before_they_are_read(tiles):
  _, steps = job([tiles], '/o')
  spread, read = steps['Convert/Spread'], steps['Convert/Read']
  assert spread.spec.urn == 'beam:transform:reshuffle:v1'
  assert set(spread.outputs.values()) == set(read.inputs.values())
  assert set(steps['Convert/Match'].outputs.values()) == set(steps['Convert/Path'].inputs.values())


def test_each_step_has_a_name(tiles):
  _, steps = job([tiles], '/o')
  names = {name.split('/')[1] for name in steps if name.startswith('Convert/')}
  assert names >= {'Match', 'Read', 'Assign', 'Write', 'Statistics', 'Publish'}
  assert all(name.isalpha() and name.istitle() for name in names), names


def test_transform_needs_a_number_of_shards():
  with pytest.raises(errors.InputError, match='number of shards missing'):
    transform.Convert('/o', converting.options())


FRESH = """
import pickle, sys
from apache_beam.internal import pickler
standard, beams, path = pickle.load(sys.stdin.buffer)
for loaded in (pickle.loads(standard), pickler.loads(beams)):
  read, assign, write, merge, publish = loaded
  read.start_bundle()
  outputs = list(read.process(path))
  read.finish_bundle()
  (item,) = [output for output in outputs if type(output).__name__ == 'Item']
  import numpy as np
  ((key, same),) = assign.process(item, {item.split: np.array([item.key], np.uint64)})
  (shard,) = write.process((key, [same]))
  source = [output.value for output in outputs if getattr(output, 'tag', None) == 'source'][0]
  parts = [output.value for output in outputs if getattr(output, 'tag', None) == 'statistics']
  (total,) = merge.process((parts[0][0], [parts[0][1]]))
  counts = [output.value for output in outputs if getattr(output, 'tag', None) == 'counts']
  counts.append((('made', 'inputs'), 1))
  (manifest,) = publish.process(None, [shard], [], counts, source, [], [total])
assert 'absl.flags' not in sys.modules or not sys.modules['absl.flags'].FLAGS.is_parsed()
print(manifest.dumps())
"""


def test_steps_run_in_a_fresh_interpreter(tmp_path):
  path = converting.save(tmp_path / 'in/train/m.npz', testing.tile_arrays())
  opts = converting.options(num_shards=1)
  manifest = converting.run(path, tmp_path / 'o', opts)
  directory = str(tmp_path / 'fresh')
  output.begin(directory, request={}, overwrite=False)
  steps = (
    steps_lib.ReadModules(directory, opts),
    steps_lib.AssignShards(1),
    steps_lib.WriteShard(directory),
    steps_lib.MergeStatistics(directory),
    steps_lib.Publish(directory, opts),
  )
  message = pickle.dumps((pickle.dumps(steps), pickler.dumps(steps), path))
  result = subprocess.run(
    [sys.executable, '-c', FRESH],
    input=message,
    capture_output=True,
    cwd=tmp_path,
    env=converting.subprocess_environment(),
    check=False,
  )
  assert result.returncode == 0, result.stderr.decode()
  assert result.stdout.decode() == manifest.dumps() + '\n'
  output.end(directory)
  assert converting.tree(tmp_path / 'fresh') == converting.tree(tmp_path / 'o')
