"""Exports dataset directories: npz files as published, or PyTorch Geometric `Data` objects.

```
OUT/npz/layout/xla/random/train/NAME.npz    a file per module, with the module_id as its name
OUT/npz/layout/xla/random/train/index.json  a description of the files
OUT/pyg/layout/xla/random/train/NAME.pt     the same modules as `Data` objects
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import importlib
import io
import json
import os
import pathlib
import tempfile
from typing import Any, BinaryIO, TYPE_CHECKING

import numpy as np

from tpu_graphs import errors
from tpu_graphs.dataset import records
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import streams
from tpu_graphs.sources import npz

if TYPE_CHECKING:
  import torch_geometric

  from tpu_graphs.dataset import directory as directory_lib

INDEX_NAME = 'index.json'
FORMAT_VERSION = 1  # Version of the index's format.
_Place = tuple[str, int]  # Path of a shard, and the byte in it where a record begins.


@dataclasses.dataclass(frozen=True)
class Split:
  """A summary of the files written for one split.

  Attributes:
    name: 'train', 'valid' or 'test'.
    folder: path of the folder with the files.
    modules: number of modules, which is the number of files beside the index.
    configs: number of configs over all modules.
    bytes: size of the modules' files.
  """

  name: str
  folder: str
  modules: int
  configs: int
  bytes: int


@dataclasses.dataclass(frozen=True)
class Exported:
  """A summary of the files written for a dataset directory.

  Attributes:
    collection: collection of the dataset, such as 'layout:xla:random'.
    splits: the splits written, in the order of the manifest.
    left_out: a sentence for each part of the dataset that the files cannot hold.
  """

  collection: str
  splits: tuple[Split, ...]
  left_out: tuple[str, ...]


def to_data(module: module_lib.Module) -> torch_geometric.data.Data:
  """Returns a module as PyTorch Geometric's `Data`.

  `Data` holds the string `module_id` and these tensors (sizes as in `Module`):

  - x: float32 [N, 140], `node_feat`.
  - op_code: int64 [N], `node_opcode`.
  - edge_index: int64 [2, E], rows producer and consumer: messages flow with the program's data.
  - computation: int64 [N].
  - extra_feat: float32 [N, K], only if K > 0.
  - y: int64 [C], `config_runtime` in ns, lower is better; -1 where not measured.
  - config_id: int64 [C].
  - config_feat, config_runtime_normalizers: float32 [C, 24] and int64 [C], tile only.
  - node_config_feat: int8 [C, NC, 18], layout only.
  - node_config_index: int64 [NC], layout only, `node_config_ids`; in a batch, PyG adds offsets to
    tensors with "index" in their names.

  Raises:
    ImportError: torch or torch_geometric is missing.
  """
  import torch
  from torch_geometric import data as pyg_data

  arrays = {
    'x': module.node_feat,
    'op_code': module.node_opcode.astype(np.int64),
    'edge_index': module.edge_index.T[::-1],
    'computation': module.computation,
    'extra_feat': module.extra_feat if module.num_extra else None,
    'y': module.config_runtime,
    'config_id': module.config_id,
    'config_feat': module.config_feat,
    'config_runtime_normalizers': module.config_runtime_normalizers,
    'node_config_feat': module.node_config_feat,
    'node_config_index': module.node_config_ids,
  }
  tensors = {
    name: torch.tensor(np.ascontiguousarray(array))
    for name, array in arrays.items()
    if array is not None
  }
  return pyg_data.Data(module_id=module.module_id, **tensors)


def save_pyg(stream: streams.ConfigStream, path: str | os.PathLike[str]) -> None:
  """Writes `to_data` of the whole module with `torch.save`."""
  import torch

  # Given a file, torch.save reports a full disk as a RuntimeError without a reason.
  content = io.BytesIO()
  torch.save(to_data(stream.load()), content)
  with open(path, 'wb') as file:
    file.write(content.getbuffer())


# Form -> suffix and writer of a module's file.
_FORMS = {
  'npz': ('.npz', npz.save_stream),
  'pyg': ('.pt', save_pyg),
}
FORMS = tuple(_FORMS)


def export(
  data: str | os.PathLike[str],
  output: str | os.PathLike[str],
  *,
  form: str,
  split: str | None = None,
  overwrite: bool = False,
) -> Exported:
  """Writes a dataset directory as a file per module.

  The files lie below OUTPUT/FORM, with a folder per part of the collection's name.

  All records are read twice: once to find the records of each module, then module by module.
  Memory holds the configs of one record or block; for pyg, the configs of one module. The folders
  of the splits appear when all of them are complete.

  Args:
    data: path of a dataset directory, on any file system that TensorFlow reads.
    output: path of a local folder, which may also hold folders of other exports.
    form: one of `FORMS`.
    split: 'train', 'valid' or 'test'; None takes all splits of the dataset.
    overwrite: True replaces the folders that an earlier export wrote for the same splits.

  Raises:
    InputError: the dataset is damaged or has no such split, the output exists or cannot be
      written, a module's name is not a file name, or PyTorch Geometric is not installed.
  """
  # This import loads TensorFlow, which other uses of this module do not need.
  from tpu_graphs.dataset import directory as directory_lib

  if form not in FORMS:
    raise errors.InputError('unknown form', found=repr(form), expected=' or '.join(FORMS))
  if form == 'pyg':
    _check_pyg()
  if not os.fspath(output) or '://' in os.fspath(output):
    raise errors.InputError(
      'output is not a local folder',
      found=repr(os.fspath(output)),
      expected='a path without ://',
      fix='export to a local folder and copy it from there',
    )
  directory = directory_lib.open_directory(data)
  root = pathlib.Path(output)
  collection = directory.manifest.collection
  folders = [_check_file_name(part, 'collection') for part in collection.split(':')]
  parent = root.joinpath(form, *folders)
  names = [split] if split else list(directory.manifest.splits)
  for name in names:
    _check_target(parent / name, overwrite)
  places = {name: _find_records(directory, name) for name in names}
  with _unfinished(root) as temporary:
    new, old = temporary / 'new', temporary / 'old'
    splits = [_write_split(directory, name, places[name], form, new / name) for name in names]
    for folder in (parent, old):
      folder.mkdir(parents=True, exist_ok=True)
    for name in names:
      if (parent / name).exists():
        os.replace(parent / name, old / name)
      os.replace(new / name, parent / name)
  moved = [dataclasses.replace(part, folder=str(parent / part.name)) for part in splits]
  left_out = tuple(_left_out(directory.manifest.choices)) if form == 'npz' else ()
  return Exported(collection, tuple(moved), left_out)


def _check_pyg() -> None:
  """Refuses to start where PyTorch Geometric cannot be loaded."""
  try:
    for name in ('torch', 'torch_geometric.data'):
      importlib.import_module(name)
  # OSError is raised where one of torch's own libraries is missing.
  except (ImportError, OSError) as error:
    raise errors.InputError(
      'PyTorch Geometric cannot be loaded',
      found=error,
      expected='torch and torch_geometric',
      fix='pip install torch torch_geometric',
    ) from error


def _check_file_name(name: str, where: str) -> str:
  """Returns `name` if a file can have it, and refuses it otherwise."""
  if name in ('', '.', '..') or '/' in name or '\0' in name:
    raise errors.InputError(
      'name cannot be a file name',
      where=where,
      found=repr(name),
      expected='a name without /',
      fix='convert the data with another name',
    )
  return name


def _check_target(folder: pathlib.Path, overwrite: bool) -> None:
  """Refuses a folder that holds anything but the files of an export that may be overwritten.

  The index in the folder names the files of the export.
  """
  if not os.path.lexists(folder):
    return
  try:
    found = set(os.listdir(folder))
  except OSError as error:
    raise errors.InputError(
      'output cannot be used', path=str(folder), found=error.strerror
    ) from error
  own = set()
  with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
    index = json.loads((folder / INDEX_NAME).read_text('utf-8'))
    own = {row['file'] for row in index['modules']} | {INDEX_NAME}
  foreign = found - own
  if foreign:
    raise errors.InputError(
      'output exists and is not an export',
      path=str(folder),
      found=min(foreign),
      expected='no folder or an empty one',
      fix='choose another place',
    )
  if found and not overwrite:
    raise errors.InputError(
      'output exists',
      path=str(folder),
      found='an export',
      expected='no folder or an empty one',
      fix='give --overwrite to replace it',
    )


@contextlib.contextmanager
def _unfinished(root: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields a temporary folder in `root`, and makes `root` if it is missing.

  A new `root` is removed again if nothing was moved into it.
  """
  is_new = not root.exists()
  try:
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='.export.', dir=root) as temporary:
      yield pathlib.Path(temporary)
  except OSError as error:
    raise errors.InputError(
      'cannot write',
      path=error.filename or str(root),
      found=error.strerror or error,
      expected='a writable folder with enough room',
    ) from error
  finally:
    if is_new:
      with contextlib.suppress(OSError):
        root.rmdir()


@contextlib.contextmanager
def _open_shard(path: str) -> Iterator[BinaryIO]:
  """Opens a shard for reading; errors inside the block name it."""
  import tensorflow as tf

  with errors.in_file(path):
    try:
      with tf.io.gfile.GFile(path, 'rb') as file:
        yield file
    except tf.errors.OpError as error:
      raise errors.InputError('cannot read file', found=' '.join(str(error).split())) from error


def _find_records(directory: directory_lib.DatasetDirectory, split: str) -> dict[str, list[_Place]]:
  """Returns `module_id` -> places of the module's records; checks the checksum of each record."""
  places: dict[str, list[_Place]] = {}
  for shard in directory.split(split).shards:
    path = os.path.join(directory.path, shard.name)
    with _open_shard(path) as file:
      start = file.tell()
      while (data := records.read_tfrecord(file)) is not None:
        module_id = _check_file_name(records.decode_module_id(data), 'module_id')
        places.setdefault(module_id, []).append((path, start))
        start = file.tell()
  return places


def _write_split(
  directory: directory_lib.DatasetDirectory,
  name: str,
  places: Mapping[str, Sequence[_Place]],
  form: str,
  folder: pathlib.Path,
) -> Split:
  """Writes the modules of a split and their index into a new `folder`."""
  folder.mkdir(parents=True)
  manifest = directory.manifest
  suffix, save = _FORMS[form]
  choices = feature_choices.PUBLISHED if form == 'npz' else manifest.choices
  rows = {}
  for module_id, found in places.items():
    path = folder / f'{module_id}{suffix}'
    rows[module_id] = {
      'file': path.name,
      'module_id': module_id,
      **_write_module(found, manifest.choices.num_extra, path, save),
    }
  size = sum((folder / row['file']).stat().st_size for row in rows.values())
  index = {
    'format_version': FORMAT_VERSION,
    'form': form,
    'collection': manifest.collection,
    'kind': manifest.kind,
    'split': name,
    'layout_padding': choices.layout_padding,
    'extra_columns': choices.extra_columns,
    'modules': [rows[module_id] for module_id in sorted(rows)],
  }
  (folder / INDEX_NAME).write_text(
    json.dumps(index, indent=1, ensure_ascii=False) + '\n', encoding='utf-8'
  )
  num_configs = sum(row['configs'] for row in rows.values())
  return Split(name, str(folder), len(rows), num_configs, size)


def _write_module(
  places: Sequence[_Place],
  num_extra: int,
  path: pathlib.Path,
  save: Callable[[streams.ConfigStream, pathlib.Path], None],
) -> dict[str, Any]:
  """Writes the module whose records are at `places`; returns its row of the index."""
  with contextlib.ExitStack() as stack:
    with errors.in_file(places[-1][0]):
      stream = stack.enter_context(streams.merged(_read_records(places, num_extra)))
    save(stream, path)
    graph = stream.graph
    return {
      'ops': graph.num_ops,
      'edges': graph.num_edges,
      'config_ops': graph.num_config_ops,
      'configs': stream.num_configs,
      'is_measured': stream.is_measured,
    }


def _read_records(places: Sequence[_Place], num_extra: int) -> Iterator[module_lib.Module]:
  """Yields the module in each record at `places`."""
  for shard, start in places:
    with _open_shard(shard) as file:
      file.seek(start)
      yield records.decode(records.read_tfrecord(file) or b'', num_extra=num_extra)


def _left_out(choices: feature_choices.FeatureChoices) -> Iterator[str]:
  """Yields a sentence for each effect of `choices` that npz files do not hold."""
  if choices.layout_padding:
    yield (
      f'layouts are padded with 0 as published, not with {choices.layout_padding}; '
      f'convert --layout_padding={choices.layout_padding} restores this padding'
    )
  for extra in choices.extra:
    yield (
      f'extra features {extra.name} ({", ".join(extra.columns)}); '
      f'convert --extra_features={extra.source} computes them again, unless they need HLO'
    )
