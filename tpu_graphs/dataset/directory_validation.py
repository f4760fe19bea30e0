"""Complete checks of a dataset directory: every record, count, checksum and statistic."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from typing import Any, BinaryIO, cast
import zlib

import google_crc32c
import numpy as np

from tpu_graphs import errors
from tpu_graphs.dataset import checks
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.dataset import records
from tpu_graphs.dataset import schema
from tpu_graphs.dataset import statistics as statistics_lib
from tpu_graphs.modules import module as module_lib

_BLOCK_BYTES = 16 << 20
# Features whose statistics count each module once, not each record.
_GRAPH_FEATURES = ('feat', 'extra_feat')
# Tolerances of statistics, relative to the value and to the largest value in the column: floating
# point sums depend on their order.
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9
_SIZES = ('ops', 'edges', 'config_ops', 'configs')
_AGAIN = {'fix': 'copy or convert the dataset again'}


@dataclasses.dataclass(frozen=True)
class _Task:
  """A shard to be read.

  Attributes:
    directory: path of the dataset directory.
    shard: the manifest's description of the shard.
    kind: kind of the dataset, 'tile' or 'layout'.
    num_extra: number of columns of extra features in the dataset.
    with_statistics: True if statistics are needed.
  """

  directory: str
  shard: manifest_lib.Shard
  kind: str
  num_extra: int
  with_statistics: bool

  @property
  def path(self) -> str:
    return os.path.join(self.directory, self.shard.name)

  @property
  def split(self) -> str:
    return self.shard.name.partition('/')[0]


@dataclasses.dataclass(frozen=True)
class _Record(checks.Found):
  """The facts that are kept of a record.

  Attributes:
    graph: digest of everything that the records of a module have in common.
    config_ids: ids of the configs, made with `_pack`.
  """

  graph: bytes
  config_ids: bytes


@dataclasses.dataclass
class _Result:
  """The facts that are kept of one shard.

  Attributes:
    faults: errors in the shard.
    records: facts of the shard's records, in their order.
    graphs: module_id -> statistics over the graph, if the task needs statistics.
    configs: statistics over the configs of all records, if the task needs statistics and there is
      any record.
  """

  faults: list[errors.InputError] = dataclasses.field(default_factory=list)
  records: list[_Record] = dataclasses.field(default_factory=list)
  graphs: dict[str, statistics_lib.Statistics] = dataclasses.field(default_factory=dict)
  configs: statistics_lib.Statistics | None = None


@dataclasses.dataclass
class _Totals:
  """The facts of all shards of a split together.

  Attributes:
    modules: module_id -> facts of all records of the module together.
    records: number of records.
    graphs: statistics over the graphs, each module once, if the tasks need statistics.
    configs: statistics over the configs, if the tasks need statistics.
  """

  modules: dict[str, _Record] = dataclasses.field(default_factory=dict)
  records: int = 0
  graphs: statistics_lib.Statistics | None = None
  configs: statistics_lib.Statistics | None = None

  def add(self, result: _Result, path: str) -> Iterator[errors.InputError]:
    """Adds a shard; yields the errors between its records and the records before."""
    new = [part for module_id, part in result.graphs.items() if module_id not in self.modules]
    self.graphs = _merge(self.graphs, *new)
    self.configs = _merge(self.configs, result.configs)
    for record in result.records:
      self.records += 1
      known = self.modules.setdefault(record.module_id, record)
      if known is record:
        continue
      where = f'{record.where.rpartition(", ")[2]} ({record.module_id})'
      if known.graph != record.graph:
        yield errors.InputError(
          'records of one module with different graphs',
          path=path,
          where=where,
          found=f'another graph than in {known.where}',
          expected='the same graph',
        )
      ids, more = _unpack(known.config_ids), _unpack(record.config_ids)
      common = np.intersect1d(ids, more)
      if common.size:
        yield errors.InputError(
          'config occurs twice',
          path=path,
          where=where,
          found=f'config_id {common[0]} again',
          expected='each config of a module once',
        )
      self.modules[record.module_id] = dataclasses.replace(
        known,
        measured=known.measured or record.measured,
        configs=known.configs + record.configs,
        config_ids=_pack(np.union1d(ids, more)),
      )

  def statistics(self) -> statistics_lib.Statistics:
    """Returns the statistics over the whole split."""
    parts = [part for part in (self.graphs, self.configs) if part]
    return statistics_lib.Statistics(
      {name: moments for part in parts for name, moments in part.plain.items()},
      {name: moments for part in parts for name, moments in part.log.items()},
    )


def validate_directory(path: str, read: Callable[..., Iterator[_Result]]) -> checks.Report:
  """Checks a dataset directory.

  Args:
    path: path of the directory, on any file system that TensorFlow reads.
    read: `checks.in_processes` with its options.

  Raises:
    InputError: a worker process died.
  """
  # Both are imported here, so that worker processes need not load TensorFlow.
  import tensorflow as tf

  from tpu_graphs.dataset import directory as directory_lib

  try:
    manifest = directory_lib.read_manifest(path)
  except errors.InputError as error:
    return checks.Report(path, 'dataset directory', (), (error,))
  num_extra = manifest.choices.num_extra
  faults = list(directory_lib.shard_faults(path, manifest))
  # Shards with a fault: their records may differ from the records that the manifest counts.
  unfit = {fault.path for fault in faults}
  content = None
  try:
    content = directory_lib.read_statistics(
      os.path.join(path, manifest_lib.STATISTICS_NAME), num_extra=num_extra
    )
  except errors.InputError as error:
    faults.append(error)
  for check in (_schema_faults, _rejected_faults):
    faults += check(path, manifest, directory_lib.read_text)
  tasks = []
  for split, counts in manifest.splits.items():
    with_statistics = split == 'train' and content is not None
    for shard in counts.shards:
      task = _Task(path, shard, manifest.kind, num_extra, with_statistics)
      if tf.io.gfile.exists(task.path):
        tasks.append(task)
  totals = {split: _Totals() for split in manifest.splits}
  results = read(_read_shard, tasks, [task.shard.bytes for task in tasks])
  for task, result in zip(tasks, results, strict=True):
    in_shard = [*result.faults, *totals[task.split].add(result, task.path)]
    unfit |= {fault.path for fault in in_shard}
    faults += in_shard
  for split, counts in manifest.splits.items():
    shard_paths = [os.path.join(path, shard.name) for shard in counts.shards]
    if not unfit.isdisjoint(shard_paths):
      continue
    faults += _split_faults(os.path.join(path, split), counts, totals[split])
    if content is not None and split == 'train':
      faults += _statistics_faults(path, content, totals[split].statistics())
  rows: list[Mapping[str, str | int]] = [
    {
      'split': split,
      'modules': len(total.modules),
      'measured': sum(module.measured for module in total.modules.values()),
      'configs': sum(module.configs for module in total.modules.values()),
      'records': total.records,
      'shards': len(manifest.splits[split].shards),
      'bytes': manifest.splits[split].bytes,
    }
    for split, total in totals.items()
  ]
  leaks = checks.leaks(path, {split: total.modules.values() for split, total in totals.items()})
  title = f'dataset directory of {manifest.collection}'
  return checks.Report(path, title, tuple(rows), tuple(faults), tuple(leaks))


def _schema_faults(
  path: str, manifest: manifest_lib.Manifest, read_text: Callable[[str], str]
) -> Iterator[errors.InputError]:
  """Yields an error if the schema of the directory does not match the records."""
  file = os.path.join(path, manifest_lib.SCHEMA_NAME)
  num_extra = manifest.choices.num_extra
  try:
    text = read_text(file)
  except errors.InputError as error:
    yield error
    return
  if text == schema.text(manifest.kind, num_extra=num_extra):
    return
  # The parsed schemas are compared too: a text that differs in comments only is right.
  from google.protobuf import text_format

  from tpu_graphs.compat import tfgnn

  expected = schema.graph_schema(manifest.kind, num_extra=num_extra)
  try:
    found = text_format.Parse(text, tfgnn.GraphSchema())
  except text_format.ParseError as error:
    yield errors.InputError('damaged schema', path=file, found=error, **_AGAIN)
    return
  if found != expected:
    lines = itertools.zip_longest(
      str(found).splitlines(), str(expected).splitlines(), fillvalue='the end'
    )
    have, want = next(pair for pair in lines if pair[0] != pair[1])
    yield errors.InputError(
      'schema does not match the records',
      path=file,
      found=have.strip(),
      expected=want.strip(),
      **_AGAIN,
    )


def _rejected_faults(
  path: str, manifest: manifest_lib.Manifest, read_text: Callable[[str], str]
) -> Iterator[errors.InputError]:
  """Yields an error for each reason that the list of rejected inputs counts wrongly."""
  file = os.path.join(path, manifest_lib.REJECTED_NAME)
  try:
    reasons = collections.Counter(
      json.loads(line)['reason'] for line in read_text(file).split('\n') if line
    )
  except errors.InputError as error:
    yield error
    return
  except (ValueError, TypeError, KeyError) as error:
    yield errors.InputError('damaged list', path=file, found=error, **_AGAIN)
    return
  for reason in sorted(reasons.keys() | manifest.rejected_inputs.keys()):
    expected = manifest.rejected_inputs.get(reason, 0)
    if reasons[reason] != expected:
      yield _wrong_count(file, reason, reasons[reason], expected)


class _Checksummed:
  """A file whose checksum is computed while the file is read."""

  def __init__(self, file: BinaryIO):
    self._file = file
    self.checksum = 0

  def tell(self) -> int:
    return self._file.tell()

  def read(self, size: int) -> bytes:
    data = self._file.read(size)
    self.checksum = google_crc32c.extend(self.checksum, data)
    return data


def _open(path: str) -> BinaryIO:
  """Opens a file for reading, without TensorFlow where the file is local."""
  if '://' not in path:
    return open(path, 'rb')
  import tensorflow as tf

  return tf.io.gfile.GFile(path, 'rb')


def _read_shard(task: _Task) -> _Result:
  """Reads every record of a shard."""
  result = _Result()
  sizes: list[dict[str, int]] = []
  with _open(task.path) as opened:
    file = _Checksummed(opened)
    for number, item in enumerate(_decoded(cast(BinaryIO, file), task)):
      if isinstance(item, errors.InputError):
        result.faults.append(item)
        continue
      numbers = (item.num_ops, item.num_edges, item.num_config_ops, item.num_configs)
      sizes.append(dict(zip(_SIZES, numbers, strict=True)))
      result.records.append(
        _Record(
          module_id=item.module_id,
          kind=item.kind,
          where=f'{task.shard.name}, record {number}',
          topology=item.topology_fingerprint(),
          measured=item.is_measured,
          configs=item.num_configs,
          graph=_graph_digest(item),
          config_ids=_pack(item.config_id),
        )
      )
      if task.with_statistics:
        graph, configs = _statistics(item)
        result.graphs.setdefault(item.module_id, graph)
        result.configs = _merge(result.configs, configs)
    # Data may follow a damaged record; the checksum covers the whole file.
    while file.read(_BLOCK_BYTES):
      pass
    # A file of another size is a fault of its own, which explains wrong counts and checksums.
    if file.tell() == task.shard.bytes:
      if not result.faults:
        result.faults += _count_faults(task, sizes)
      if f'{file.checksum:08x}' != task.shard.crc32c:
        result.faults.append(
          errors.InputError(
            'damaged shard',
            path=task.path,
            found=f'crc32c {file.checksum:08x}',
            expected=task.shard.crc32c,
            **_AGAIN,
          )
        )
  return result


def _decoded(file: BinaryIO, task: _Task) -> Iterator[module_lib.Module | errors.InputError]:
  """Yields for each record its module, or the error in the record.

  An error that hides where the next record begins is the last item.
  """
  for number in itertools.count():
    try:
      data = records.read_tfrecord(file)
    except errors.InputError as error:
      yield _located(error, task.path, f'record {number}')
      return
    if data is None:
      return
    try:
      module = records.decode(data, num_extra=task.num_extra)
      if module.kind != task.kind:
        raise errors.InputError(
          'record of the other kind',
          found=f'a {module.kind} module',
          expected=f'a {task.kind} module',
          **_AGAIN,
        )
      yield module
    except errors.InputError as error:
      name = f'record {number}'
      with contextlib.suppress(errors.InputError):
        name += f' ({records.decode_module_id(data)})'
      yield _located(error, task.path, name)


def _located(error: errors.InputError, path: str, where: str) -> errors.InputError:
  """Returns `error` with the path and with `where` before its own place."""
  error.path = path
  error.where = ': '.join(part for part in (where, error.where) if part)
  return error


def _graph_digest(module: module_lib.Module) -> bytes:
  """Returns a digest of all that the records of a module repeat."""
  digest = hashlib.blake2b(digest_size=16)
  for array in (
    module.node_opcode,
    module.node_feat,
    module.extra_feat,
    module.edge_index,
    module.computation,
    module.node_config_ids,
  ):
    if array is not None:
      digest.update(str(array.shape).encode() + array.tobytes())
  return digest.digest()


def _statistics(
  module: module_lib.Module,
) -> tuple[statistics_lib.Statistics, statistics_lib.Statistics]:
  """Returns the statistics over the graph, which each record repeats, and over the configs."""
  whole = statistics_lib.Statistics.of(module)
  graph_names = [name for name in whole.plain if name in _GRAPH_FEATURES]
  config_names = [name for name in whole.plain if name not in _GRAPH_FEATURES]

  def of(names: Sequence[str]) -> statistics_lib.Statistics:
    return statistics_lib.Statistics(
      {name: whole.plain[name] for name in names}, {name: whole.log[name] for name in names}
    )

  return of(graph_names), of(config_names)


def _merge(*parts: statistics_lib.Statistics | None) -> statistics_lib.Statistics | None:
  return statistics_lib.merge_all(part for part in parts if part)


def _pack(values: np.ndarray) -> bytes:
  """Packs distinct int64 values: the ids of a module in one record are a range, hence small."""
  return zlib.compress(np.diff(np.sort(values), prepend=0).tobytes(), 1)


def _unpack(packed: bytes) -> np.ndarray:
  """Returns the int64 values that `_pack` has packed, ascending."""
  return np.cumsum(np.frombuffer(zlib.decompress(packed), np.int64))


def _count_faults(task: _Task, sizes: Sequence[Mapping[str, int]]) -> Iterator[errors.InputError]:
  """Yields an error for each wrong count of a sound shard in the manifest.

  Args:
    task: the shard.
    sizes: one of `_SIZES` -> number, for each record of the shard.
  """
  shard = task.shard
  counts = [
    ('records', len(sizes), shard.records),
    ('configs', sum(size['configs'] for size in sizes), shard.configs),
  ]
  for name in _SIZES:
    values = [size[name] for size in sizes]
    counts += [
      (f'max_sizes of {name}', max(values, default=0), shard.max_sizes.get(name, -1)),
      (f'total_sizes of {name}', sum(values), shard.total_sizes.get(name, -1)),
    ]
  for name, found, expected in counts:
    if found != expected:
      yield _wrong_count(task.path, name, found, expected)


def _split_faults(
  path: str, counts: manifest_lib.Split, total: _Totals
) -> Iterator[errors.InputError]:
  """Yields an error for each wrong count of a split's modules in the manifest."""
  modules = total.modules.values()
  found = {
    'modules': len(modules),
    'measured': sum(module.measured for module in modules),
    'without_configs': sum(not module.configs for module in modules),
  }
  for name, count in found.items():
    expected = getattr(counts, name)
    if count != expected:
      yield _wrong_count(path, name, count, expected)


def _wrong_count(path: str, name: str, found: int, expected: int) -> errors.InputError:
  return errors.InputError(
    f'count differs from {manifest_lib.FILE_NAME}',
    path=path,
    where=name,
    found=found,
    expected=expected,
    **_AGAIN,
  )


def _statistics_faults(
  path: str, content: Mapping[str, Any], computed: statistics_lib.Statistics
) -> Iterator[errors.InputError]:
  """Yields the first difference of each feature between `statistics.json` and the records.

  Args:
    path: path of the dataset directory.
    content: the content of `statistics.json`.
    computed: the statistics of the records.
  """
  file = os.path.join(path, manifest_lib.STATISTICS_NAME)
  found, expected = content['features'], computed.to_json()['features']
  for name in sorted(found.keys() | expected.keys()):
    if name not in found or name not in expected:
      yield errors.InputError(
        'feature missing' if name in expected else 'feature that the records lack',
        path=file,
        where=name,
        **_AGAIN,
      )
      continue
    for where, have, want in itertools.islice(_differences(found[name], expected[name]), 1):
      yield errors.InputError(
        'statistics differ from the records',
        path=file,
        where=f'{name}: {where}',
        found=have,
        expected=want,
        **_AGAIN,
      )


def _differences(
  found: Mapping[str, Any], expected: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
  """Yields each place where the statistics of one feature differ, the value found and expected."""
  for key in ('count', 'constant'):
    if found.get(key) != expected[key]:
      yield key, found.get(key), expected[key]
  for prefix, have, want in (('', found, expected), ('log ', found['log'], expected['log'])):
    largest = np.maximum(np.abs(want['min']), np.abs(want['max']))
    for key in ('min', 'max', 'mean', 'std'):
      try:
        values = np.asarray(have.get(key), np.float64)
      except (TypeError, ValueError):
        values = np.empty(0)
      if values.shape != largest.shape:
        yield f'{prefix}{key}', 'another number of columns', largest.size
        continue
      wanted = np.asarray(want[key])
      close = np.abs(values - wanted) <= _RELATIVE * np.abs(wanted) + _ABSOLUTE * largest
      for column in np.flatnonzero(~close):
        yield f'{prefix}{key}[{column}]', values[column], wanted[column]
