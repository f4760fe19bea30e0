"""Tests of tpu_graphs.sources.download: plans, the order of files on disk, and bad archives."""

import collections
import fcntl
import io
import itertools
import os
import pathlib
import signal
import tarfile

import pytest

from tests import file_server
from tpu_graphs import errors
from tpu_graphs.sources import download
from tpu_graphs.sources import transfer

PART = download.Part('layout:xla:random', 'valid')
NAME = f'{PART.folder}/a.npz'


def member(name, content=b'', **fields):
  """Returns a member of an archive: its header, and the content after the header."""
  info = tarfile.TarInfo(name)
  info.size = len(content)
  for field, value in fields.items():
    setattr(info, field, value)
  return info, content


def tar(*members, end=b'', **options):
  """Returns the bytes of a tar archive."""
  file = io.BytesIO()
  with tarfile.open(fileobj=file, mode='w', **options) as archive:
    for info, content in members:
      archive.fileobj.write(info.tobuf(archive.format))
      archive.fileobj.write(content + bytes(-len(content) % 512))
      archive.offset = archive.fileobj.tell()
  return file.getvalue() + end


def files(number=3, part=PART, size=1000):
  return [member(f'{part.folder}/m{i}.npz', bytes([i]) * (size + i)) for i in range(number)]


def tree(folder):
  """Returns the content of every file but the lock, by its path below `folder`."""
  return {
    path.relative_to(folder).as_posix(): path.read_bytes()
    for path in sorted(pathlib.Path(folder).rglob('*'))
    if path.is_file() and path.name != '.download.lock'
  }


def unpacked(number=3, part=PART, size=1000):
  return {f'{part.folder}/m{i}.npz': bytes([i]) * (size + i) for i in range(number)}


def without_markers(found):
  return {name: content for name, content in found.items() if not name.endswith(download.MARKER)}


@pytest.fixture
def site(monkeypatch):
  monkeypatch.setenv('no_proxy', '*')
  with file_server.serve() as site:
    site.put(PART.archive, tar(*files()))
    yield site


def make_plan(site, output, parts=(PART,), **options):
  return download.plan(
    output, parts, server=transfer.Server(site.url, attempts=2, first_wait_s=0), **options
  )


def unpack(tmp_path, content):
  archive = tmp_path / PART.archive
  archive.write_bytes(content)
  return download.unpack(str(archive), str(tmp_path / PART.folder), PART)


def test_names_are_those_of_the_published_files():
  parts = download.choose(['all'], ['train', 'valid', 'test'])
  assert len(parts) == len(set(parts)) == 15
  assert [
    part.archive for part in download.choose(['tile:xla', 'layout:nlp:default'], ['test', 'train'])
  ] == [
    'npz_tile_xla_test.tar',
    'npz_tile_xla_train.tar',
    'npz_layout_nlp_default_test.tar',
    'npz_layout_nlp_default_train.tar',
  ]
  assert download.Part('tile:xla', 'train').folder == 'npz/tile/xla/train'
  assert PART.folder == 'npz/layout/xla/random/valid'


def test_choose_takes_each_part_once():
  assert download.choose(['tile:xla', 'all', 'tile:xla'], ['test', 'test']) == download.choose(
    ['all'], ['test']
  )


@pytest.mark.parametrize(
  ('collections', 'splits', 'message'),
  [
    (
      ['tile'],
      ['test'],
      r"--collection: unknown collection: found 'tile', expected tile:xla, .*, all",
    ),
    (['all', 'x'], ['test'], "unknown collection: found 'x'"),
    ([], ['test'], 'unknown collection: found none'),
    (
      ['all'],
      ['validation'],
      "--split: unknown split: found 'validation', expected train, valid, test",
    ),
    (['all'], [], 'unknown split: found none'),
    (['all'], [''], "unknown split: found ''"),
  ],
)
def test_choose_refuses_other_names(collections, splits, message):
  with pytest.raises(errors.InputError, match=message):
    download.choose(collections, splits)


def test_plan_and_run(site, tmp_path):
  reports = []
  plan = make_plan(site, tmp_path / 'out')
  size = len(site.files[PART.archive])
  assert (plan.missing_bytes, plan.disk_bytes) == (size, 2 * size)
  assert not (tmp_path / 'out').exists()
  download.run(plan, report=reports.append)
  assert without_markers(tree(tmp_path / 'out')) == unpacked()
  assert reports == [f'{PART.archive}: 3 files, 2.9 KiB -> {tmp_path / "out" / PART.folder}']


def test_what_is_complete_is_skipped_without_a_server(site, tmp_path):
  download.run(make_plan(site, tmp_path))
  before = tree(tmp_path)
  site.requests.clear()
  plan = make_plan(site, tmp_path)
  assert (plan.missing_bytes, plan.disk_bytes) == (0, 0)
  assert (
    plan.describe() == f'{PART.archive}    complete\nto download                         0 bytes'
  )
  download.run(plan)
  assert site.requests == []
  assert tree(tmp_path) == before


def test_keep_archives(site, tmp_path):
  plan = make_plan(site, tmp_path, keep_archives=True)
  download.run(plan)
  found = without_markers(tree(tmp_path))
  assert found.pop(PART.archive) == site.files[PART.archive]
  assert found == unpacked()


def test_an_archive_that_is_here_is_not_downloaded_again(site, tmp_path):
  (tmp_path / PART.archive).write_bytes(site.files[PART.archive])
  plan = make_plan(site, tmp_path)
  assert plan.missing_bytes == 0
  download.run(plan)
  assert site.gets == []
  assert without_markers(tree(tmp_path)) == unpacked()


def test_an_archive_of_another_size_is_downloaded_again(site, tmp_path):
  (tmp_path / PART.archive).write_bytes(b'old')
  download.run(make_plan(site, tmp_path))
  assert without_markers(tree(tmp_path)) == unpacked()


def test_resumes_what_was_interrupted(site, tmp_path):
  site.faults = [file_server.broken(1500), file_server.status(500), file_server.status(500)]
  with pytest.raises(errors.InputError, match='download failed'):
    download.run(make_plan(site, tmp_path))
  size = len(site.files[PART.archive])
  plan = make_plan(site, tmp_path)
  assert (plan.missing_bytes, plan.disk_bytes) == (size - 1500, 2 * size - 1500)
  download.run(plan)
  assert site.gets[-1] == 'bytes=1500-'
  assert without_markers(tree(tmp_path)) == unpacked()


def test_what_is_of_another_version_is_not_counted_as_here(site, tmp_path):
  site.faults = [file_server.broken(1500), file_server.status(500), file_server.status(500)]
  with pytest.raises(errors.InputError, match='download failed'):
    download.run(make_plan(site, tmp_path))
  site.etags[PART.archive] = '"2"'
  assert make_plan(site, tmp_path).missing_bytes == len(site.files[PART.archive])


def test_several_parts(site, tmp_path):
  parts = download.choose(['tile:xla', 'layout:xla:random'], ['train', 'valid'])
  for i, part in enumerate(parts):
    site.put(part.archive, tar(*files(i + 1, part)))
  sizes = [len(site.files[part.archive]) for part in parts]
  plan = make_plan(site, tmp_path, parts)
  assert (plan.missing_bytes, plan.disk_bytes) == (sum(sizes), sum(sizes) + max(sizes))
  assert make_plan(site, tmp_path, parts, keep_archives=True).disk_bytes == 2 * sum(sizes)
  download.run(plan)
  expected = collections.ChainMap(*(unpacked(i + 1, part) for i, part in enumerate(parts)))
  assert without_markers(tree(tmp_path)) == dict(expected)


def test_describe(site, tmp_path, monkeypatch):
  usage = collections.namedtuple('usage', 'free')
  monkeypatch.setattr(download.shutil, 'disk_usage', lambda path: usage(5 << 30))
  (tmp_path / f'{PART.archive}.partial').write_bytes(bytes(1 << 20))
  other = download.Part('tile:xla', 'test')
  site.put(other.archive, bytes(3 << 20))
  site.put(PART.archive, bytes(2 << 20))
  (tmp_path / f'{PART.archive}.partial.json').write_text(
    f'{{"url": "{site.url}/{PART.archive}", "size": {2 << 20}, "version": "\\"1\\""}}'
  )
  assert make_plan(site, tmp_path, (PART, other)).describe().splitlines() == [
    'npz_layout_xla_random_valid.tar     2.0 MiB  1.0 MiB already here',
    'npz_tile_xla_test.tar               3.0 MiB',
    'to download                         4.0 MiB',
    'disk needed                         7.0 MiB  5.0 GiB free',
  ]


def test_a_disk_that_is_too_small(site, tmp_path, monkeypatch):
  usage = collections.namedtuple('usage', 'free')
  monkeypatch.setattr(
    download.shutil, 'disk_usage', lambda path: usage(2 * len(site.files[PART.archive]) - 1)
  )
  with pytest.raises(
    errors.InputError, match=r'disk too small: found .* free, expected .*; choose another place'
  ):
    download.run(make_plan(site, tmp_path / 'out'))
  assert not (tmp_path / 'out').exists()
  assert site.gets == []


@pytest.mark.parametrize('left', ['file', 'npz', 'marker of no use'])
def test_files_of_somebody_else_are_left_alone(site, tmp_path, left):
  folder = tmp_path / PART.folder
  if left == 'file':
    folder.parent.mkdir(parents=True)
    folder.write_text('mine')
  else:
    folder.mkdir(parents=True)
    (folder / ('a.npz' if left == 'npz' else download.MARKER)).write_text('mine')
  before = tree(tmp_path)
  with pytest.raises(
    errors.InputError, match=f'{PART.folder}: folder exists and was not downloaded by this command'
  ):
    make_plan(site, tmp_path)
  assert tree(tmp_path) == before
  assert site.requests == []


def test_an_empty_folder_is_filled(site, tmp_path):
  (tmp_path / PART.folder).mkdir(parents=True)
  download.run(make_plan(site, tmp_path))
  assert without_markers(tree(tmp_path)) == unpacked()


@pytest.mark.parametrize('change', ['removed', 'added', 'cut'])
def test_a_folder_that_has_changed_is_reported(site, tmp_path, change):
  download.run(make_plan(site, tmp_path))
  first = tmp_path / PART.folder / 'm0.npz'
  if change == 'removed':
    first.unlink()
  else:
    (first if change == 'cut' else first.with_name('mine.npz')).write_bytes(b'x')
  before = tree(tmp_path)
  with pytest.raises(
    errors.InputError,
    match=r'folder has changed .*: found \d npz files of \d+ bytes, expected 3 npz files of',
  ):
    make_plan(site, tmp_path)
  assert tree(tmp_path) == before


def test_a_url_is_not_an_output(site):
  with pytest.raises(errors.InputError, match='--output: not a local folder: found gs://a/b'):
    make_plan(site, 'gs://a/b')


@pytest.mark.parametrize('output', ['file', 'file/sub'])
def test_an_output_that_cannot_be_a_folder(site, tmp_path, output):
  (tmp_path / 'file').write_text('mine')
  with pytest.raises(errors.InputError, match=f'{output}: cannot write'):
    download.run(make_plan(site, tmp_path / output))
  assert (tmp_path / 'file').read_text() == 'mine'


def test_two_downloads_do_not_meet(site, tmp_path):
  plan = make_plan(site, tmp_path)
  with open(tmp_path / '.download.lock', 'w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(errors.InputError, match='another download is running here'):
      download.run(plan)
  assert site.gets == []
  download.run(plan)
  assert without_markers(tree(tmp_path)) == unpacked()


def test_an_interrupt_while_unpacking_leaves_the_archive_only(site, tmp_path, monkeypatch):
  plan = make_plan(site, tmp_path)
  copy, calls = download._copy, itertools.count()

  def interrupted(*args):
    if next(calls) == 1:
      signal.raise_signal(signal.SIGINT)
    copy(*args)

  monkeypatch.setattr(download, '_copy', interrupted)
  with pytest.raises(KeyboardInterrupt):
    download.run(plan)
  assert list(tree(tmp_path)) == [PART.archive]
  download.run(make_plan(site, tmp_path))
  assert len(site.gets) == 1
  assert without_markers(tree(tmp_path)) == unpacked()


def test_what_a_killed_run_left_unpacked_is_replaced(tmp_path):
  left = tmp_path / PART.folder / '..' / f'.{PART.split}.unpacking'
  left.mkdir(parents=True)
  (left / 'old.npz').write_text('old')
  unpack(tmp_path, tar(*files()))
  assert sorted(os.listdir(tmp_path / PART.folder)) == [
    download.MARKER,
    'm0.npz',
    'm1.npz',
    'm2.npz',
  ]
  assert not left.exists()


@pytest.mark.parametrize(
  'tar_format', [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_every_tar_format(tmp_path, tar_format):
  # With the folder, a name of this length is stored differently in each format.
  long = 'x' * 90
  names = [f'{PART.folder}/{name}.npz' for name in ('a', 'b.c', long, 'π模')]
  found = unpack(tmp_path, tar(*(member(name, b'1234') for name in names), format=tar_format))
  assert (found.files, found.bytes, found.left_out) == (4, 16, 0)
  assert sorted(without_markers(tree(tmp_path / 'npz'))) == sorted(
    name.removeprefix('npz/') for name in names
  )


def test_folders_and_a_leading_dot_do_no_harm(tmp_path):
  folders = [
    member('./', type=tarfile.DIRTYPE),
    member('./npz', type=tarfile.DIRTYPE, mode=0),
    member(f'./{PART.folder}/', type=tarfile.DIRTYPE),
  ]
  found = unpack(tmp_path, tar(*folders, member(f'./{NAME}', b'1', mode=0o7777, uid=5, mtime=1)))
  assert (found.files, found.left_out) == (1, 0)
  mode = (tmp_path / NAME).stat().st_mode
  assert mode & 0o7111 == 0  # Neither executable nor set-uid.


@pytest.mark.parametrize(
  'name',
  [
    'README.txt',
    'a.npz',
    'npz/layout/xla/random/train/a.npz',
    f'{PART.folder}/deep/b.npz',
    f'{PART.folder}/._a.npz',
    f'{PART.folder}/.npz',
    f'{PART.folder}/a.npy',
    f'{PART.folder}/a.npz.exe',
    f'other/{NAME}',
    'npz/layout/xlaXrandom/valid/a.npz',
    f'{PART.folder}/{download.MARKER}',
    'npz/layout/xla/random/.valid.unpacking/a.npz',
  ],
)
def test_other_files_are_left_out(tmp_path, name):
  found = unpack(tmp_path, tar(member(name, b'other'), member(NAME, b'mine')))
  assert found.describe() == '1 file, 4 bytes (1 other file left out)'
  assert without_markers(tree(tmp_path / 'npz')) == {NAME.removeprefix('npz/'): b'mine'}


SAFE = r'; do not trust this archive; remove it'


@pytest.mark.parametrize(
  ('evil', 'message'),
  [
    (member('../a.npz', b'x'), 'path leaves the folder'),
    (member(f'{PART.folder}/../../../../../../a.npz', b'x'), 'path leaves the folder'),
    (member(f'{PART.folder}/..', type=tarfile.DIRTYPE), 'path leaves the folder'),
    (member('/tmp/a.npz', b'x'), 'path leaves the folder'),
    (member(f'/{NAME}', b'x'), 'path leaves the folder'),
    (member('..\\a.npz', b'x'), 'path leaves the folder'),
    (
      member(NAME, type=tarfile.SYMTYPE, linkname='/etc/passwd'),
      'neither file nor folder: found a link',
    ),
    (
      member(PART.folder, type=tarfile.SYMTYPE, linkname='/tmp'),
      'neither file nor folder: found a link',
    ),
    (
      member(NAME, type=tarfile.LNKTYPE, linkname='m0.npz'),
      'neither file nor folder: found a link',
    ),
    (
      member(NAME, type=tarfile.CHRTYPE, devmajor=1, devminor=5),
      "neither file nor folder: found type b'3'",
    ),
    (member(NAME, type=tarfile.BLKTYPE), "neither file nor folder: found type b'4'"),
    (member(NAME, type=tarfile.FIFOTYPE), "neither file nor folder: found type b'6'"),
    (member(NAME, type=tarfile.CONTTYPE), "neither file nor folder: found type b'7'"),
    (member(NAME, type=tarfile.GNUTYPE_SPARSE), "neither file nor folder: found type b'S'"),
    (member(NAME, type=b'Q'), "neither file nor folder: found type b'Q'"),
    (member(NAME, b'x', size=1 << 40), 'file larger than the archive: found 1099511627776 bytes'),
    (member(NAME, b'x', size=11_000), 'file larger than the archive: found 11000 bytes'),
    (member(NAME, b'x', size=-512), 'file larger than the archive: found -512 bytes'),
    (member('README', b'x', size=1 << 40), 'file larger than the archive'),
    (member(f'{PART.folder}/m1.npz', b'x'), 'name occurs twice'),
    (member(f'./{PART.folder}//m1.npz', b'x'), 'name occurs twice'),
  ],
)
@pytest.mark.parametrize('first', [True, False])
def test_unsafe_archives(tmp_path, evil, message, first):
  members = [evil, *files()] if first else [*files(), evil]
  with pytest.raises(errors.InputError, match=f'{PART.archive}: .*: {message}.*{SAFE}'):
    unpack(tmp_path, tar(*members))
  assert list(tree(tmp_path)) == [PART.archive]
  assert not any((tmp_path / PART.folder).parent.iterdir())


def test_a_sparse_file_by_pax_headers_is_refused(tmp_path):
  info, content = member(
    NAME, bytes(512), pax_headers={'GNU.sparse.size': str(1 << 40), 'GNU.sparse.map': '0,512'}
  )
  with pytest.raises(
    errors.InputError, match=r'neither file nor folder|file larger than the archive'
  ):
    unpack(tmp_path, tar((info, content), format=tarfile.PAX_FORMAT))
  assert list(tree(tmp_path)) == [PART.archive]


def test_too_many_members(tmp_path, monkeypatch):
  monkeypatch.setattr(download, '_MAX_FILES', 3)
  with pytest.raises(errors.InputError, match='too many members: found more than 3'):
    unpack(tmp_path, tar(*files(4)))
  unpack(tmp_path, tar(*files(3)))


@pytest.mark.parametrize('kind', [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize('size', [5 << 20, -512])
def test_a_huge_header_is_not_read(tmp_path, kind, size):
  with pytest.raises(errors.InputError, match='damaged archive: found a header of'):
    unpack(
      tmp_path,
      tar(
        member('x', type=kind, size=size), *files(), end=bytes(6 << 20), format=tarfile.GNU_FORMAT
      ),
    )


GOOD = tar(*files())


@pytest.mark.parametrize(
  ('content', 'found'),
  [
    pytest.param(b'', 'empty file', id='empty'),
    pytest.param(b'<html>404</html>' * 100, 'HTML or XML', id='html'),
    pytest.param(b'\x1f\x8b\x08' + bytes(2000), 'gzip data', id='gzip'),
    pytest.param(bytes(10240), 'archive without files', id='no members'),
    pytest.param(os.urandom(10240), 'damaged archive', id='noise'),
    pytest.param(
      GOOD[:1520], 'damaged archive: found unexpected end of data', id='ends in padding'
    ),
    pytest.param(GOOD[:1200], 'larger than the archive', id='ends in a file'),
    pytest.param(
      GOOD[:1536], 'damaged archive: found no header at byte 1536', id='ends between files'
    ),
    pytest.param(
      GOOD[:1700], 'damaged archive: found no header at byte 1536', id='ends in a header'
    ),
    pytest.param(
      GOOD[:1536] + b'\xff' * 512 + GOOD[2048:],
      'damaged archive: found no header at byte 1536',
      id='flip',
    ),
    pytest.param(
      GOOD[: 4608 + 512], 'damaged archive: found no header at byte 4608', id='half an end'
    ),
  ],
)
def test_damaged_archives(tmp_path, content, found):
  with pytest.raises(errors.InputError, match=found):
    unpack(tmp_path, content)
  assert not any((tmp_path / PART.folder).parent.iterdir())


def test_a_damaged_archive_stays_and_the_error_says_what_to_do(site, tmp_path):
  site.put(PART.archive, GOOD[:1536])
  for _ in range(2):
    with pytest.raises(
      errors.InputError, match=f'{PART.archive}: damaged archive.*; remove it to download it again'
    ):
      download.run(make_plan(site, tmp_path))
  assert len(site.gets) == 1
  (tmp_path / PART.archive).unlink()
  site.put(PART.archive, GOOD, etag='"2"')
  download.run(make_plan(site, tmp_path))
  assert without_markers(tree(tmp_path)) == unpacked()
