"""Downloads of the public TpuGraphs dataset: one tar archive for each collection and split.

```
plan = download.plan('raw', download.choose(['layout:xla:random'], ['valid']))
print(plan.describe())
download.run(plan)
```

After any interruption the same command resumes where it stopped. Each archive is downloaded,
checked and unpacked via these files, in this order:
```
OUT/npz_tile_xla_valid.tar.partial     the bytes received so far; see `transfer`
OUT/npz_tile_xla_valid.tar             the complete archive
OUT/npz/tile/xla/.valid.unpacking/     its files, while they are unpacked
OUT/npz/tile/xla/valid/                all its files, and `MARKER`; now the archive is deleted
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import fcntl
import io
import json
import os
import pathlib
import posixpath
import re
import shutil
import tarfile

from tpu_graphs import errors
from tpu_graphs import terminal
from tpu_graphs.modules import module as module_lib
from tpu_graphs.sources import transfer

BASE_URL = 'http://download.tensorflow.org/data/tpu_graphs/v0'
PUBLIC = transfer.Server(BASE_URL)
COLLECTIONS = (
  'tile:xla',
  'layout:xla:default',
  'layout:xla:random',
  'layout:nlp:default',
  'layout:nlp:random',
)
ALL = 'all'
# The marker is in the folder of a part. It holds the archive's size, and the number and bytes of
# its files.
MARKER = '.complete.json'
_LOCK = '.download.lock'

_BLOCK_BYTES = 1 << 20
_MAX_HEADER_BYTES = 4 << 20
# The largest archive of the dataset has some thousands of files.
_MAX_FILES = 100_000


@dataclasses.dataclass(frozen=True)
class Part:
  """One split of one collection."""

  collection: str
  split: str

  @property
  def archive(self) -> str:
    """The name of the published archive."""
    return f'npz_{self.collection.replace(":", "_")}_{self.split}.tar'

  @property
  def folder(self) -> str:
    """The folder of the part's files, both in the archive and below the output."""
    return posixpath.join('npz', *self.collection.split(':'), self.split)


def choose(collections: Iterable[str], splits: Iterable[str]) -> tuple[Part, ...]:
  """Returns the parts of the given collections and splits, each once.

  Args:
    collections: names of `COLLECTIONS`, or 'all'.
    splits: names of `module_lib.SPLITS`.

  Raises:
    InputError: a name is unknown, or there is none.
  """
  names = {'collection': list(collections), 'split': list(splits)}
  for what, known in (('collection', (*COLLECTIONS, ALL)), ('split', module_lib.SPLITS)):
    unknown = [name for name in names[what] if name not in known]
    if unknown or not names[what]:
      raise errors.InputError(
        f'unknown {what}',
        where=f'--{what}',
        found=repr(unknown[0]) if unknown else 'none',
        expected=', '.join(known),
      )
  chosen = COLLECTIONS if ALL in names['collection'] else names['collection']
  parts = [Part(collection, split) for collection in chosen for split in names['split']]
  return tuple(dict.fromkeys(parts))


@dataclasses.dataclass(frozen=True)
class Step:
  """The work to do for one part.

  Attributes:
    part: the part.
    remote: the part's archive; None if all files of the part are already here.
    present: the number of bytes of the archive that are already here.
  """

  part: Part
  remote: transfer.Remote | None
  present: int = 0

  @property
  def size(self) -> int:
    return self.remote.size if self.remote else 0


@dataclasses.dataclass(frozen=True)
class Plan:
  """The work to do for several parts.

  Attributes:
    output: the folder to write.
    server: the server to download from.
    steps: the work, one step per part.
    keep_archives: whether archives are kept after they are unpacked.
  """

  output: str
  server: transfer.Server
  steps: tuple[Step, ...]
  keep_archives: bool = False

  @property
  def missing_bytes(self) -> int:
    """The number of bytes to download."""
    return sum(step.size - step.present for step in self.steps)

  @property
  def disk_bytes(self) -> int:
    """The most bytes of disk that files and archives need beyond what is already here."""
    sizes = [step.size for step in self.steps]
    files = sum(sizes)  # Files take no more than their archive.
    archives = sum(sizes) if self.keep_archives else max(sizes, default=0)
    present = sum(step.present for step in self.steps)
    return files + archives - present

  @property
  def free_bytes(self) -> int:
    """The number of bytes free on the disk of the output."""
    folder = pathlib.Path(self.output).absolute()
    while not folder.exists():
      folder = folder.parent
    return shutil.disk_usage(folder).free

  def describe(self) -> str:
    """Returns a table of sizes to print."""
    width = max(len(step.part.archive) for step in self.steps)
    lines = []
    for step in self.steps:
      size = terminal.size_text(step.size) if step.remote else 'complete'
      present = f'{terminal.size_text(step.present)} already here' if step.present else ''
      lines.append(f'{step.part.archive.ljust(width)}  {size:>10}  {present}'.rstrip())
    lines.append(f'{"to download".ljust(width)}  {terminal.size_text(self.missing_bytes):>10}')
    if any(step.remote for step in self.steps):
      lines.append(
        f'{"disk needed".ljust(width)}  {terminal.size_text(self.disk_bytes):>10}  '
        f'{terminal.size_text(self.free_bytes)} free'
      )
    return '\n'.join(lines)

  def check_disk(self) -> None:
    """Checks that the disk has room for the plan.

    Raises:
      InputError: the disk is too small.
    """
    if self.disk_bytes > self.free_bytes:
      raise errors.InputError(
        'disk too small',
        path=self.output,
        found=f'{terminal.size_text(self.free_bytes)} free',
        expected=terminal.size_text(self.disk_bytes),
        fix='choose another place, or fewer parts',
      )


def plan(
  output: str | os.PathLike[str],
  parts: Sequence[Part],
  *,
  server: transfer.Server = PUBLIC,
  keep_archives: bool = False,
) -> Plan:
  """Plans the download of parts into a folder.

  Looks for parts that are already in the folder, and asks the server for the sizes of the others.

  Raises:
    InputError: `output` is a URL, the server or the archive of a part does not exist, or the folder
      of a part holds other files.
  """
  output = os.fspath(output)
  if '://' in output:
    raise errors.InputError(
      'not a local folder',
      where='--output',
      found=output,
      fix='download to this machine, then copy',
    )
  steps = tuple(_step(output, part, server) for part in parts)
  return Plan(output, server, steps, keep_archives)


def _step(output: str, part: Part, server: transfer.Server) -> Step:
  folder = pathlib.Path(output, part.folder)
  is_empty_folder = folder.is_dir() and not any(folder.iterdir())
  if folder.exists() and not is_empty_folder:
    _check_complete(folder)
    return Step(part, None)
  remote = server.look(part.archive)
  archive = os.path.join(output, part.archive)
  if _has_size(archive, remote.size):
    return Step(part, remote, remote.size)
  return Step(part, remote, transfer.received(remote, f'{archive}.partial'))


def _has_size(path: str, size: int) -> bool:
  return os.path.exists(path) and os.path.getsize(path) == size


def run(
  plan: Plan,
  *,
  progress: terminal.Progress | None = None,
  report: Callable[[str], None] = lambda message: None,
) -> None:
  """Downloads and unpacks the parts of a plan that are not yet complete.

  Args:
    plan: the plan; see the function `plan`.
    progress: shows how far each download is.
    report: is called with a line for each part that becomes complete.

  Raises:
    InputError: a download failed, an archive is damaged or unsafe, or the disk is too small or
      full.
  """
  todo = [step for step in plan.steps if step.remote]
  if not todo:
    return
  plan.check_disk()
  with transfer.writing(plan.output):
    os.makedirs(plan.output, exist_ok=True)
  with _locked(plan.output):
    for step in todo:
      assert step.remote is not None
      archive = os.path.join(plan.output, step.part.archive)
      if not _has_size(archive, step.remote.size):
        plan.server.fetch(step.remote, archive, progress)
      folder = os.path.join(plan.output, step.part.folder)
      unpacked = unpack(archive, folder, step.part)
      if not plan.keep_archives:
        os.remove(archive)
      report(f'{step.part.archive}: {unpacked.describe()} -> {folder}')


@contextlib.contextmanager
def _locked(output: str) -> Iterator[None]:
  with contextlib.ExitStack() as stack:
    with transfer.writing(output):
      lock = stack.enter_context(open(os.path.join(output, _LOCK), 'w'))
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise errors.InputError(
        'another download is running here', path=output, fix='wait for it, or stop it'
      ) from error
    except OSError:
      pass  # Some file systems have no locks.
    yield


@dataclasses.dataclass(frozen=True)
class Unpacked:
  """The content of an archive that was unpacked.

  Attributes:
    archive_bytes: the archive's size.
    files: the number of npz files.
    bytes: the size of the npz files together.
    left_out: the number of other files, which are not unpacked.
  """

  archive_bytes: int
  files: int
  bytes: int
  left_out: int

  def describe(self) -> str:
    rest = ''
    if self.left_out:
      rest = f' ({terminal.plural(self.left_out, "other file")} left out)'
    return f'{terminal.plural(self.files, "file")}, {terminal.size_text(self.bytes)}{rest}'


def _check_complete(folder: pathlib.Path) -> None:
  """Checks that a folder holds exactly the files that were once unpacked there.

  Raises:
    InputError: the folder has no marker, or its npz files have changed.
  """
  try:
    marker = Unpacked(**json.loads((folder / MARKER).read_text()))
  except (OSError, ValueError, TypeError) as error:
    raise errors.InputError(
      'folder exists and was not downloaded by this command',
      path=str(folder),
      expected='no folder or an empty one',
      fix='move it away, or choose another place',
    ) from error
  sizes = [path.stat().st_size for path in folder.glob('*.npz')]
  if (len(sizes), sum(sizes)) != (marker.files, marker.bytes):
    raise errors.InputError(
      'folder has changed since it was downloaded',
      path=str(folder),
      found=f'{terminal.plural(len(sizes), "npz file")} of {sum(sizes)} bytes',
      expected=f'{terminal.plural(marker.files, "npz file")} of {marker.bytes} bytes',
      fix='remove it to download it again',
    )


def unpack(archive: str, folder: str, part: Part) -> Unpacked:
  """Unpacks the npz files of `part` into `folder`, which appears when all files are written.

  Writes only regular files with the expected names, inside the folder, and no more bytes together
  than the archive has.

  Raises:
    InputError: the archive is damaged or has an unsafe member, a file cannot be written, or
      `folder` is not empty.
  """
  target = pathlib.Path(folder)
  temporary = target.with_name(f'.{target.name}.unpacking')
  with transfer.writing(str(temporary)):
    if temporary.exists():
      shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
  try:
    with errors.in_file(archive):
      unpacked = _unpack_files(archive, temporary, part)
    with transfer.writing(folder):
      (temporary / MARKER).write_text(json.dumps(dataclasses.asdict(unpacked)))
      os.rename(temporary, target)
  except BaseException:
    shutil.rmtree(temporary, ignore_errors=True)
    raise
  return unpacked


class _BoundedFile(io.FileIO):
  """A file that refuses to be read in large pieces.

  tarfile would read a header of any length that the archive claims.
  """

  def read(self, size: int | None = -1) -> bytes:
    if size is None or not 0 <= size <= _MAX_HEADER_BYTES:
      raise tarfile.ReadError(f'a header of {size} bytes')
    return super().read(size) or b''


def _unpack_files(archive: str, folder: pathlib.Path, part: Part) -> Unpacked:
  archive_bytes = os.path.getsize(archive)
  sizes: dict[str, int] = {}
  members = left_out = 0
  with open(archive, 'rb') as start:
    head = start.read(100)
  try:
    with _BoundedFile(archive) as file, tarfile.open(fileobj=file, mode='r:') as tar:
      for member in tar:
        members += 1
        if members > _MAX_FILES:
          raise _unsafe('too many members', member, f'more than {_MAX_FILES}')
        name = _file_name(member, part, archive_bytes)
        if name:
          if name in sizes:
            raise _unsafe('name occurs twice', member, name)
          _copy(tar, member, folder / name)
          sizes[name] = member.size
        elif not member.isdir():
          left_out += 1
      # tarfile stops without an error at a header that it does not understand. An archive ends with
      # two blocks of zeros.
      file.seek(tar.offset)
      if file.read(2 * tarfile.BLOCKSIZE) != bytes(2 * tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f'no header at byte {tar.offset}')
  except (tarfile.TarError, EOFError, UnicodeError) as error:
    raise errors.InputError(
      'damaged archive',
      found=errors.looks_like(head) or error,
      expected='a tar archive',
      fix='remove it to download it again',
    ) from error
  if not sizes:
    raise errors.InputError(
      'archive without files of the dataset',
      found=terminal.plural(left_out, 'other file'),
      expected=f'{part.folder}/NAME.npz',
    )
  return Unpacked(archive_bytes, len(sizes), sum(sizes.values()), left_out)


def _file_name(member: tarfile.TarInfo, part: Part, archive_bytes: int) -> str | None:
  """Returns the name of a member that is an npz file of `part`; None for another harmless member.

  Raises:
    InputError: the member is unsafe: no archive of the dataset should hold it.
  """
  if member.name.startswith('/') or '..' in re.split(r'[/\\]', member.name):
    raise _unsafe('path leaves the folder', member, member.name)
  is_regular = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
  if member.issparse() or not (is_regular or member.isdir()):
    is_link = member.issym() or member.islnk()
    found = 'a link' if is_link else f'type {member.type!r}'
    raise _unsafe('neither file nor folder', member, found)
  if not 0 <= member.size <= archive_bytes - member.offset_data:
    raise _unsafe('file larger than the archive', member, f'{member.size} bytes')
  pattern = rf'{re.escape(part.folder)}/([^./][^/]*\.npz)'
  match = re.fullmatch(pattern, posixpath.normpath(member.name))
  return match[1] if match and not member.isdir() else None


def _unsafe(reason: str, member: tarfile.TarInfo, found: str) -> errors.InputError:
  return errors.InputError(
    reason,
    where=ascii(member.name),
    found=found,
    expected='folders and npz files only',
    fix='do not trust this archive; remove it',
  )


def _copy(tar: tarfile.TarFile, member: tarfile.TarInfo, path: pathlib.Path) -> None:
  source = tar.extractfile(member)
  assert source is not None  # The member is a regular file.
  with source, transfer.writing(str(path)), open(path, 'xb') as target:
    shutil.copyfileobj(source, target, _BLOCK_BYTES)
