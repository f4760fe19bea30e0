"""Tests of the files and metadata that setup.py packs."""

from __future__ import annotations

import configparser
import email
import pathlib
import subprocess
import sys
import tarfile
import zipfile

from packaging import requirements
from packaging import specifiers
import pytest

from tests import testing
import tpu_graphs

ROOT = testing.GOLDEN.parents[1]
NATIVE = 'tpu_graphs/hlo/cc/'

pytestmark = pytest.mark.slow


def packed_files() -> set[str]:
  """Returns the files of the checkout that must be in the wheel."""
  patterns = (
    *(f'{package}/**/*.py' for package in testing.PACKAGES),
    'tpu_graphs/**/*.pyi',
    'tpu_graphs/schemas/*.pbtxt',
    'tpu_graphs/tables/*.csv',
    'baselines/evaluation/report_assets/*',
  )
  return {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)}


def test_packed_files_are_found_in_the_checkout():
  files = packed_files()
  assert {
    'tpu_graphs/cli.py',
    'tpu_graphs/hlo/__init__.py',
    'pipelines/__init__.py',
    'baselines/models/__init__.py',
    'tpu_graphs/tables/opcodes.csv',
    'tpu_graphs/schemas/tile.pbtxt',
  } <= files


def test_wheel_holds_the_three_packages_and_their_data(built):
  with zipfile.ZipFile(built[1]) as wheel:
    names = {name for name in wheel.namelist() if '.dist-info/' not in name}
  extension = {
    name
    for name in names
    if name.startswith('tpu_graphs/hlo/_native.') and not name.endswith('.pyi')
  }
  assert len(extension) == 1
  assert names - extension == packed_files()


def test_sdist_holds_the_same_and_the_sources_of_a_build(built):
  with tarfile.open(built[0]) as sdist:
    names = {name.partition('/')[2] for name in sdist.getnames()}
  sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / NATIVE).iterdir()}
  assert {f'{NATIVE}binding.cc', f'{NATIVE}wire.h'} <= sources
  assert packed_files() | set(testing.METADATA_FILES) | sources <= names
  assert not any(name.startswith('tests') for name in names)


def test_metadata(built):
  with zipfile.ZipFile(built[1]) as wheel:
    read = {
      name.partition('.dist-info/')[2]: wheel.read(name).decode()
      for name in wheel.namelist()
      if '.dist-info/' in name
    }
  metadata = email.message_from_string(read['METADATA'])
  assert metadata['Name'].replace('-', '_') == 'tpu_graphs'
  assert metadata['Version'] == tpu_graphs.__version__
  python = specifiers.SpecifierSet(metadata['Requires-Python'])
  assert [version for version in ('3.9.19', '3.10.0', '3.11.9', '3.12.0') if version in python] == [
    '3.10.0',
    '3.11.9',
  ]
  needed = map(requirements.Requirement, metadata.get_all('Requires-Dist'))
  tensorflow = {requirement.name: requirement.specifier for requirement in needed}['tensorflow']
  assert [version for version in ('2.14.1', '2.15.1', '2.16.1') if version in tensorflow] == [
    '2.15.1'
  ]
  assert set(metadata.get_all('Provides-Extra')) == {'dev', 'gcp', 'dask', 'collect', 'jax'}
  commands = configparser.ConfigParser()
  commands.read_string(read['entry_points.txt'])
  assert dict(commands['console_scripts']) == {'tpu-graphs': 'tpu_graphs.cli:main'}


def test_installed_wheel_works_away_from_the_checkout(built, tmp_path):
  site = tmp_path / 'site'
  with zipfile.ZipFile(built[1]) as wheel:
    wheel.extractall(site)
  code = (
    'import sys; sys.path.insert(0, sys.argv[1])\n'
    'import tpu_graphs.cli, tpu_graphs.hlo, pipelines, baselines.models\n'
    'from tpu_graphs.dataset import schema\n'
    'from tpu_graphs.modules import features\n'
    'print(tpu_graphs.__file__, features.opcodes()["add"], schema.path("tile"),\n'
    '      tpu_graphs.hlo.implementation())'
  )
  result = subprocess.run(
    [sys.executable, '-I', '-c', code, str(site)],
    cwd=tmp_path,
    text=True,
    capture_output=True,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  file, opcode, schema, implementation = result.stdout.split()
  assert file == str(site / 'tpu_graphs' / '__init__.py')
  assert opcode == '2'
  assert implementation == 'native'
  assert pathlib.Path(schema).is_relative_to(site)
