"""Tests of the job for Dataflow, without a network: graph, options, package, pickled steps."""

import base64
import bz2
import pathlib
import pickle
import re
import shlex
import subprocess
import sys
import tarfile

from absl import flags
import apache_beam as beam
from apache_beam.options import pipeline_options
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.transforms import environments
import pytest

from pipelines import convert
from pipelines.conversion import inputs as inputs_lib
from pipelines.conversion import options as options_lib
from pipelines.conversion import transform
from pipelines.runners import beam as beam_lib
from tests import testing
from tpu_graphs import errors

ARGS = (
  '--runner=DataflowRunner',
  '--project=project-1',
  '--region=region',
  '--job_name=convert-x',
  '--temp_location=gs://bucket/temp',
  '--staging_location=gs://bucket/staging',
  '--machine_type=n2-standard-4',
  '--max_num_workers=50',
  '--autoscaling_algorithm=THROUGHPUT_BASED',
  '--disk_size_gb=50',
  '--number_of_worker_harness_threads=4',
  '--no_use_public_ips',
)
IMAGE = 'registry.example/tpu-graphs:1'


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
  """Keeps Beam from asking Google about the buckets.

  With the extra gcp, Beam would ask how the buckets are configured, to warn of the costs.
  """
  monkeypatch.setattr(
    pipeline_options.GoogleCloudOptions, '_warn_if_soft_delete_policy_enabled', lambda *_: None
  )


@pytest.fixture
def add_steps(tmp_path):
  """Adds a conversion of `tmp_path` to a pipeline."""

  def add(pipeline, directory='gs://bucket/data'):
    patterns = inputs_lib.find_inputs([str(tmp_path)], 'tile:x').patterns
    options = options_lib.ConvertOptions(collection='tile:x', num_shards=10)
    _ = (
      pipeline
      | 'Patterns' >> beam.Create(patterns)
      | 'Convert' >> transform.Convert(directory, options)
    )

  return add


@pytest.fixture
def make_proto(add_steps, tmp_path):
  """Makes the pipeline as Dataflow's workers get it, with Beam's own translation."""

  def make(*args):
    (tmp_path / 'm.npz').touch()
    options = pipeline_options.PipelineOptions([*ARGS, f'--sdk_container_image={IMAGE}', *args])
    pipeline = beam.Pipeline(beam.runners.create_runner('DataflowRunner'), options)
    add_steps(pipeline)
    environment = environments.DockerEnvironment.from_container_image(
      IMAGE, artifacts=environments.python_sdk_dependencies(options)
    )
    return pipeline.to_runner_api(default_environment=environment)

  return make


def documented() -> list[list[str]]:
  """Returns the arguments of each `convert` in docs/distributed.md."""
  text = (testing.GOLDEN.parents[1] / 'docs/distributed.md').read_text().replace('\\\n', ' ')
  return [
    shlex.split(line)[1:]
    for line in text.splitlines()
    if line.startswith('python pipelines/convert.py')
  ]


def test_documented_commands():
  commands = documented()
  assert len(commands) > 4
  for args in commands:
    flag_values = flags.FlagValues()
    convert._define_flags(flag_values)
    own = args[: args.index('--')] if '--' in args else args
    assert flag_values(own) == own[:1]
    beam_args = args[len(own) + 1 :]
    if beam_lib._runner_name(beam_args) == 'dask':
      pytest.importorskip('distributed', reason='needs the extra dask')
      beam_lib._dask_runner()  # The import makes the options of the runner known to Beam.
    beam_lib._check(beam_args)


def steps(proto):
  """Returns name -> step."""
  return {step.unique_name: step for step in proto.components.transforms.values()}


def pickled_parts(proto) -> dict[str, bytes]:
  """Returns step -> the bytes that a worker unpickles for the step."""
  found = {}
  for name, step in steps(proto).items():
    if step.spec.urn == common_urns.primitives.PAR_DO.urn:
      payload = beam_runner_api_pb2.ParDoPayload.FromString(step.spec.payload)
      found[name] = payload.do_fn.payload
    elif step.spec.urn == common_urns.composites.COMBINE_PER_KEY.urn:
      payload = beam_runner_api_pb2.CombinePayload.FromString(step.spec.payload)
      found[name] = payload.combine_fn.payload
  # Some combiners of Beam are known by name and have no pickle.
  return {name: pickled for name, pickled in found.items() if pickled}


def unpacked(pickled: bytes) -> bytes:
  """Returns a pickle as it was before Beam's pickler packed it."""
  return bz2.decompress(base64.b64decode(pickled))


def test_size_does_not_depend_on_the_number_of_files(make_proto, tmp_path):
  sizes = []
  for first, last in ((0, 10), (10, 10_000)):
    for i in range(first, last):
      (tmp_path / f'm{i}.npz').touch()
    proto = make_proto()
    assert proto.ByteSize() < 1 << 20
    # Pickles hold random ids, so the packed sizes vary by some bytes.
    sizes.append({name: len(unpacked(pickled)) for name, pickled in pickled_parts(proto).items()})
  assert sizes[0] == sizes[1]


def test_files_are_spread_between_match_and_read(make_proto):
  by_name = steps(make_proto())
  spread = by_name['Convert/Spread']
  assert spread.spec.urn == common_urns.composites.RESHUFFLE.urn
  assert set(spread.outputs.values()) == set(by_name['Convert/Read'].inputs.values())
  match = by_name['Convert/Match']
  assert set(match.outputs.values()) == set(by_name['Convert/Path'].inputs.values())
  assert set(by_name['Convert/Distinct'].outputs.values()) == set(spread.inputs.values())


def test_names_of_steps(make_proto):
  proto = make_proto()
  names = [step.unique_name for step in proto.components.transforms.values()]
  assert len(set(names)) == len(names)
  own = {
    name.split('/')[1] for name in names if name.count('/') == 1 and name.startswith('Convert/')
  }
  assert all(re.fullmatch('[A-Z][a-z]+', name) for name in own), own
  assert {name.split('/')[0] for name in names if '/' in name} == {'Patterns', 'Convert'}


def test_options_reach_the_runner():
  pipeline = beam_lib.pipeline(
    [*ARGS, f'--sdk_container_image={IMAGE}', '--setup_file=./setup.py'], input_bytes=1 << 40
  )
  assert type(pipeline.runner).__name__ == 'DataflowRunner'
  worker = pipeline.options.view_as(pipeline_options.WorkerOptions)
  assert (
    worker.machine_type,
    worker.max_num_workers,
    worker.autoscaling_algorithm,
    worker.disk_size_gb,
    worker.sdk_container_image,
    worker.use_public_ips,
  ) == ('n2-standard-4', 50, 'THROUGHPUT_BASED', 50, IMAGE, False)
  cloud = pipeline.options.view_as(pipeline_options.GoogleCloudOptions)
  assert (cloud.project, cloud.region, cloud.temp_location, cloud.staging_location) == (
    'project-1',
    'region',
    'gs://bucket/temp',
    'gs://bucket/staging',
  )
  assert pipeline.options.view_as(pipeline_options.SetupOptions).setup_file == './setup.py'


@pytest.mark.parametrize(
  ('arg', 'near'),
  [
    ('--max_num_worker=3', '--max_num_workers'),
    ('--sdk_container_images=x', '--sdk_container_image'),
    ('--worker_machinetype=x', '--worker_machine_type'),
  ],
)
def test_misspelt_options(arg, near):
  with pytest.raises(errors.InputError, match=re.escape(f'did you mean {near}?')):
    beam_lib.pipeline([*ARGS, arg], input_bytes=1)


def test_wrong_project():
  with pytest.raises(errors.InputError, match='wrong Beam option') as caught:
    beam_lib.pipeline([arg.replace('project-1', 'My Project') for arg in ARGS], input_bytes=1)
  assert 'My Project' in caught.value.found


def test_steps_hold_plain_values(make_proto):
  for name, pickled in pickled_parts(make_proto()).items():
    assert not re.search(rb'tensorflow|absl', unpacked(pickled)), name


WORKER = """
import pickle, sys
sys.path.insert(0, sys.argv[1])
from apache_beam.internal import pickler
for name, pickled in pickle.load(sys.stdin.buffer).items():
  print(name, type(pickler.loads(pickled)).__name__)
import pipelines.conversion.steps
import tpu_graphs
print(pipelines.conversion.steps.__file__)
print(tpu_graphs.__file__)
from tpu_graphs import hlo
from tpu_graphs.dataset import schema
print(hlo.implementation(), schema.path('tile'))
"""


@pytest.fixture(scope='module')
def checkout(built, tmp_path_factory) -> pathlib.Path:
  """A folder with setup.py and all that it packs."""
  folder = tmp_path_factory.mktemp('checkout')
  with tarfile.open(built[0]) as sdist:
    sdist.extractall(folder, filter='data')
  (checkout,) = folder.iterdir()
  return checkout


@pytest.mark.slow
def test_what_a_worker_installs_and_unpickles(checkout, make_proto, tmp_path):
  """Installs the package that --setup_file stages away from the checkout, and loads every step."""
  proto = make_proto(f'--setup_file={checkout}/setup.py')
  (environment,) = (
    found
    for found in proto.components.environments.values()
    if found.urn == common_urns.environments.DOCKER.urn
  )
  packages = {}
  for dependency in environment.dependencies:
    role = beam_runner_api_pb2.ArtifactStagingToRolePayload.FromString(dependency.role_payload)
    file = beam_runner_api_pb2.ArtifactFilePayload.FromString(dependency.type_payload)
    packages[role.staged_name] = file.path
  site = tmp_path / 'site'
  subprocess.run(
    [
      sys.executable,
      '-m',
      'pip',
      'install',
      '--quiet',
      '--no-deps',
      '--no-index',
      '--no-build-isolation',
      f'--target={site}',
      packages['workflow.tar.gz'],
    ],
    check=True,
  )
  parts = pickled_parts(proto)
  result = subprocess.run(
    [sys.executable, '-I', '-c', WORKER, str(site)],
    input=pickle.dumps(parts),
    cwd=tmp_path,
    capture_output=True,
    check=False,
  )
  assert result.returncode == 0, result.stderr.decode()
  *loaded, steps_file, library_file, last = result.stdout.decode().splitlines()
  assert len(loaded) == len(parts) > 10
  assert steps_file == str(site / 'pipelines/conversion/steps.py')
  assert library_file == str(site / 'tpu_graphs/__init__.py')
  assert last == f'native {site}/tpu_graphs/schemas/tile.pbtxt'


# The translation by Dataflow's runner, up to the request that would start the job.


@pytest.fixture
def dry_run(add_steps, tmp_path):
  pytest.importorskip('google.cloud.dataflow_v1beta3', reason='needs the extra gcp')
  from apache_beam.runners.dataflow.internal import apiclient

  (tmp_path / 'm.npz').touch()

  def run(*args):
    """Returns the job and the environment of its workers."""
    pipeline = beam_lib.pipeline([*ARGS, '--dry_run=True', *args], input_bytes=1)
    add_steps(pipeline)
    job = pipeline.run().job
    return job, apiclient.Environment(
      packages=[],
      options=job.options,
      environment_version='1',
      proto_pipeline_staged_url='gs://bucket/staging/pipeline.pb',
      proto_pipeline=job.proto_pipeline,
    ).proto

  return run


def test_job(dry_run):
  job, environment = dry_run(f'--sdk_container_image={IMAGE}')
  assert job.proto.name == 'convert-x'
  assert job.proto.type_.name == 'JOB_TYPE_BATCH'
  (pool,) = environment.worker_pools
  assert pool.machine_type == 'n2-standard-4'
  assert pool.autoscaling_settings.max_num_workers == 50
  assert pool.autoscaling_settings.algorithm.name == 'AUTOSCALING_ALGORITHM_BASIC'
  assert pool.disk_size_gb == 50
  assert pool.num_threads_per_worker == 4
  assert pool.ip_configuration.name == 'WORKER_IP_PRIVATE'
  assert [image.container_image for image in pool.sdk_harness_container_images] == [IMAGE]
  names = set(steps(job.proto_pipeline))
  assert {
    'Convert/Match',
    'Convert/Spread',
    'Convert/Read',
    'Convert/Write',
    'Convert/Publish',
  } <= names
  assert (
    steps(job.proto_pipeline)['Convert/Spread'].spec.urn == common_urns.composites.RESHUFFLE.urn
  )


def test_job_without_an_image_takes_the_image_of_beam(dry_run):
  _, environment = dry_run()
  (image,) = environment.worker_pools[0].sdk_harness_container_images
  version = f'{sys.version_info.major}.{sys.version_info.minor}'
  assert image.container_image.endswith(f'/beam_python{version}_sdk:{beam.__version__}')
