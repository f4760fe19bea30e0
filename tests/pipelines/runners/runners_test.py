"""Tests that every runner makes the same dataset, to the byte.

The runners are one process, several processes, Dask, and a job server.
"""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from pipelines import convert
from pipelines import runners
from pipelines.runners import beam as beam_lib
from tests import testing
from tpu_graphs.modules import module as module_lib

pytest.importorskip('distributed', reason='needs the extra dask')

ROOT = testing.GOLDEN.parents[1]
SECONDS_TO_START = 60

pytestmark = pytest.mark.slow

# The first computation of this feature kills its process.
DEADLY = """
import os, signal
import numpy as np
from tpu_graphs.modules import feature_choices

@feature_choices.node_features('zero', columns=['x'])
def zero(module, hlo):
  try:
    open({marker!r}, 'x').close()
  except FileExistsError:
    return np.zeros((module.num_ops, 1))
  os.kill(os.getpid(), signal.SIGKILL)
"""


@contextlib.contextmanager
def service(folder, *command, path=ROOT):
  """Runs a program until the end of the block, with its log in `folder`.

  The program may import modules from `path`.
  """
  environment = {
    **os.environ,
    'PATH': os.pathsep.join([os.path.dirname(sys.executable), os.environ['PATH']]),
    'PYTHONPATH': os.pathsep.join([str(ROOT), str(path), os.environ.get('PYTHONPATH', '')]),
  }
  with open(folder / 'log', 'wb') as log:
    process = subprocess.Popen(
      [sys.executable, *command],
      cwd=folder,
      env=environment,
      stdout=log,
      stderr=log,
      start_new_session=True,
    )
  try:
    yield process
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGTERM)
    try:
      process.wait(20)
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, signal.SIGKILL)
      process.wait()


def wait_for(is_there, folder):
  end = time.monotonic() + SECONDS_TO_START
  while not is_there():
    assert time.monotonic() < end, (folder / 'log').read_text()
    time.sleep(0.05)


def free_port() -> int:
  with socket.socket() as found:
    found.bind(('127.0.0.1', 0))
    return found.getsockname()[1]


def listens(port: int) -> bool:
  with socket.socket() as tried:
    return tried.connect_ex(('127.0.0.1', port)) == 0


@pytest.fixture(scope='module')
def plugins(tmp_path_factory) -> pathlib.Path:
  """A folder from which the workers of `dask_cluster` import."""
  return tmp_path_factory.mktemp('plugins')


@pytest.fixture(scope='module')
def dask_cluster(tmp_path_factory, plugins):
  """Options for a scheduler with two worker processes."""
  folders = [tmp_path_factory.mktemp(name) for name in ('scheduler', 'workers')]
  file = folders[0] / 'scheduler.json'
  with (
    service(
      folders[0],
      '-m',
      'dask',
      'scheduler',
      '--host=127.0.0.1',
      '--port=0',
      '--no-dashboard',
      f'--scheduler-file={file}',
    ),
    service(
      folders[1],
      '-m',
      'dask',
      'worker',
      f'--scheduler-file={file}',
      '--nworkers=2',
      '--nthreads=1',
      '--host=127.0.0.1',
      '--no-dashboard',
      f'--local-directory={folders[1]}',
      path=plugins,
    ),
  ):
    wait_for(file.exists, folders[0])
    yield '--runner=DaskRunner', f'--dask_scheduler_file={file}'


@pytest.fixture(scope='module')
def job_server(tmp_path_factory):
  """Options for a job server, without the options that say where the steps run."""
  folder = tmp_path_factory.mktemp('job_server')
  file = folder / 'port'
  with service(
    folder, '-m', 'apache_beam.runners.portability.local_job_service_main', f'--port_file={file}'
  ):
    wait_for(file.exists, folder)
    yield '--runner=PortableRunner', f'--job_endpoint=localhost:{file.read_text()}'


@pytest.fixture(scope='module')
def worker_pool(tmp_path_factory):
  """Options that let the steps run in processes of an external pool."""
  folder, port = tmp_path_factory.mktemp('pool'), free_port()
  with service(
    folder, '-m', 'apache_beam.runners.worker.worker_pool_main', f'--service_port={port}'
  ) as process:
    wait_for(lambda: listens(port) or process.poll() is not None, folder)
    yield '--environment_type=EXTERNAL', f'--environment_config=localhost:{port}'


@pytest.fixture(
  params=[
    'two processes',
    'dask',
    'job server, pool',
    'job server, two of the pool',
    'job server, loopback',
  ]
)
def beam_args(request):
  if request.param == 'two processes':
    return '--direct_num_workers=2', '--direct_running_mode=multi_processing'
  if request.param == 'dask':
    return request.getfixturevalue('dask_cluster')
  server = request.getfixturevalue('job_server')
  if request.param == 'job server, loopback':
    return *server, '--environment_type=LOOPBACK'
  workers = ('--direct_num_workers=2',) if 'two' in request.param else ()
  return *server, *request.getfixturevalue('worker_pool'), *workers


@pytest.fixture(scope='module')
def raw(tmp_path_factory) -> pathlib.Path:
  """Inputs of each kind: npz and protobuf, with few and many configs, one damaged.

  Some lie in the folders of splits, others do not.
  """
  folder = tmp_path_factory.mktemp('raw')
  for kind in module_lib.KINDS:
    for split in ('', 'train', 'valid', 'test'):
      (folder / kind / split).mkdir(parents=True, exist_ok=True)
      for i in range(6):
        arrays = testing.arrays(kind, n=2 + 3 * i, c=1 + 4 * i, seed=i)
        if split == 'test':
          arrays['config_runtime'][:] = 0
        np.savez(folder / kind / split / f'{split}m{i}.npz', **arrays)
    (folder / kind / 'train/damaged.npz').write_bytes(b'PK\x03\x04 and no more')
  (folder / 'tile/train/sel.pb').write_bytes((testing.GOLDEN / 'corner/tile_sel.pb').read_bytes())
  (folder / 'layout/train/misc.pb').write_bytes(
    (testing.GOLDEN / 'modules/misc_ops_unopt.pb').read_bytes()
  )
  return folder


def command(raw, kind, directory, *args):
  inputs = ','.join(f'{raw / kind / pattern}' for pattern in ('*.npz', 't*/*', 'valid/*'))
  return [
    'convert.py',
    f'--collection={kind}:x',
    f'--input={inputs}',
    f'--output={directory}',
    '--num_shards=3',
    '--max_configs_per_record=4',
    *args,
  ]


def tree(directory) -> dict[str, bytes]:
  return {
    str(path.relative_to(directory)): path.read_bytes()
    for path in sorted(pathlib.Path(directory).rglob('*'))
    if path.is_file()
  }


@pytest.fixture(scope='module')
def expected(raw, tmp_path_factory) -> dict[str, dict[str, bytes]]:
  """Kind -> the files that one process in memory writes."""
  trees = {}
  for kind in module_lib.KINDS:
    directory = tmp_path_factory.mktemp('expected') / kind
    args = ('--on_error=skip', '--', '--direct_running_mode=in_memory')
    assert convert.main(command(raw, kind, directory, *args)) == 0
    trees[kind] = tree(directory)
    assert len(trees[kind]) == 3 * 3 + 4
    assert trees[kind]['rejected.jsonl'].count(b'\n') == 1
  return trees


def test_same_bytes(raw, expected, kind, beam_args, tmp_path, capfd):
  assert convert.main(command(raw, kind, tmp_path / 'o', '--on_error=skip', '--', *beam_args)) == 0
  assert ' records ' in capfd.readouterr().out
  assert tree(tmp_path / 'o') == expected[kind]


def test_damaged_input_stops_all(raw, beam_args, tmp_path, capfd):
  assert convert.main(command(raw, 'tile', tmp_path / 'o', '--', *beam_args)) == 1
  last = capfd.readouterr().err.splitlines()[-1]  # A job server logs before.
  assert last.startswith(f'error: {raw}/tile/train/damaged.npz: ')
  assert os.listdir(tmp_path) == []


def test_a_dask_worker_that_dies_changes_nothing(raw, dask_cluster, plugins, tmp_path, monkeypatch):
  marker = tmp_path / 'marker'
  (plugins / 'deadly.py').write_text(DEADLY.format(marker=str(marker)))
  monkeypatch.syspath_prepend(str(plugins))
  args = ('--on_error=skip', '--extra_features=deadly:zero', '--')
  marker.touch()
  assert (
    convert.main(command(raw, 'tile', tmp_path / 'alive', *args, '--direct_running_mode=in_memory'))
    == 0
  )
  marker.unlink()
  assert convert.main(command(raw, 'tile', tmp_path / 'dead', *args, *dask_cluster)) == 0
  assert marker.exists()
  assert tree(tmp_path / 'dead') == tree(tmp_path / 'alive')


def test_no_job_server(raw, tmp_path, monkeypatch, capfd):
  monkeypatch.setattr(beam_lib, '_SECONDS_FOR_JOB_SERVER', 0.5)
  args = (
    '--',
    '--runner=PortableRunner',
    '--job_endpoint=localhost:1',
    '--environment_type=LOOPBACK',
  )
  assert convert.main(command(raw, 'tile', tmp_path / 'o', *args)) == 1
  assert capfd.readouterr().err == (
    'error: --job_endpoint: no job server: found localhost:1, '
    'expected HOST:PORT of a running job server\n'
  )
  assert os.listdir(tmp_path) == []


def test_dask_without_its_extra(raw, tmp_path, monkeypatch, capfd):
  monkeypatch.delattr(runners, 'dask_runner', raising=False)
  monkeypatch.setitem(sys.modules, 'pipelines.runners.dask_runner', None)
  assert convert.main(command(raw, 'tile', tmp_path / 'o', '--', '--runner=DaskRunner')) == 1
  line = capfd.readouterr().err
  assert line.startswith('error: --runner: runner cannot be used: ')
  assert line.endswith("; pip install 'tpu_graphs[dask]'\n")
  assert os.listdir(tmp_path) == []
