"""Packs the library, the pipelines and the baselines as one distribution.

Dataflow workers install it through `--setup_file=./setup.py`, so it needs nothing but setuptools
and this folder.
"""

import pathlib
import re

import setuptools
from setuptools.command import build_ext

ROOT = pathlib.Path(__file__).parent


def _version() -> str:
  """Reads `tpu_graphs.__version__` without an import, which would need the dependencies."""
  text = (ROOT / 'tpu_graphs' / '__init__.py').read_text(encoding='utf-8')
  return re.search(r"^__version__ = '(.+)'$", text, re.MULTILINE).group(1)


class _BuildNative(build_ext.build_ext):
  """The build of the extension, the only command of setup.py that needs more than setuptools."""

  def build_extension(self, ext):
    import pybind11

    ext.include_dirs.append(pybind11.get_include())
    super().build_extension(ext)


NATIVE = ROOT / 'tpu_graphs' / 'hlo' / 'cc'
# The newest JAX that shares an environment with TensorFlow 2.15.
JAX = ['jax==0.4.30', 'jaxlib==0.4.30']
BEAM = '>=2.77,<2.78'

setuptools.setup(
  name='tpu_graphs',
  version=_version(),
  description='Learns from measured XLA programs which compiler configurations are fast',
  long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  license_files=['LICENSE'],
  classifiers=[
    'Intended Audience :: Developers',
    'Intended Audience :: Science/Research',
    'Programming Language :: Python :: 3.10',
    'Programming Language :: Python :: 3.11',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
    'Topic :: Software Development :: Compilers',
  ],
  python_requires='>=3.10,<3.12',
  packages=setuptools.find_packages(
    include=['tpu_graphs', 'tpu_graphs.*', 'pipelines', 'pipelines.*', 'baselines', 'baselines.*']
  ),
  package_data={
    'tpu_graphs': ['schemas/*.pbtxt', 'tables/*.csv'],
    'baselines.evaluation': ['report_assets/*'],
  },
  # The extension is optional: without a compiler, HLO is read in Python.
  ext_modules=[
    setuptools.Extension(
      'tpu_graphs.hlo._native',
      sources=[str(path.relative_to(ROOT)) for path in sorted(NATIVE.glob('*.cc'))],
      depends=[str(path.relative_to(ROOT)) for path in sorted(NATIVE.glob('*.h'))],
      extra_compile_args=['-std=c++17', '-O3', '-fvisibility=hidden', '-Wall', '-Wextra'],
      language='c++',
      optional=True,
    )
  ],
  cmdclass={'build_ext': _BuildNative},
  entry_points={'console_scripts': ['tpu-graphs = tpu_graphs.cli:main']},
  install_requires=[
    'absl-py>=1.0',
    f'apache-beam[tfrecord]{BEAM}',
    # Without apitools, Beam prints a warning whenever it is imported.
    'google-apitools>=0.5.31,<0.5.32',
    # Without crc32c, Beam computes TFRecord checksums in Python instead of C.
    'google-crc32c>=1.5,<2',
    # isal inflates and compresses npz files several times as fast as zlib.
    'isal>=1.7,<2',
    'numpy>=1.23.5,<2',
    # TensorFlow 2.15 needs protobuf < 5, and Beam 2.77 refuses most versions from 4.21 to 4.24.
    'protobuf>=4.25,<5',
    # TF-Ranking allows no newer TensorFlow; docs/newer_tensorflow.md shows how to use one.
    'tensorflow>=2.15,<2.16',
    'tensorflow-gnn>=1.0.3,<1.1',
    'tensorflow-ranking>=0.5.5,<0.6',
  ],
  extras_require={
    # ruff and mypy change with each minor release. TensorBoard 2.15 imports pkg_resources, which
    # setuptools 82 removed.
    'dev': [
      *JAX,
      f'apache-beam[dask]{BEAM}',
      'build',
      'hypothesis',
      'mypy>=2.4,<2.5',
      'pybind11>=2.13,<4',
      'pytest>=8',
      'pytest-xdist>=3',
      'ruff>=0.17,<0.18',
      'scipy',
      'selenium>=4.11,<5',
      'setuptools>=68,<82',
      'types-protobuf',
      'wheel',
    ],
    # Beam needs these for gs:// paths and Dataflow. Beam's own extra adds clients of databases,
    # which need protobuf 6.
    'gcp': [
      'google-api-core>=2.20,<2.31',
      'google-auth>=2,<3',
      'google-auth-httplib2>=0.1,<0.3',
      'google-cloud-dataflow-client>=0.13,<0.14',
      'google-cloud-resource-manager>=1.12,<2',
      'google-cloud-storage>=2.18.2,<4',
    ],
    'dask': [f'apache-beam[dask]{BEAM}'],
    # JAX programs need these, and HLO text does, since jaxlib parses it.
    'jax': JAX,
    'collect': JAX,
  },
)
