"""Tests of tpu_graphs.errors: the text that a user reads, and that no part of an error is lost."""

import copy
import json
import pickle

import pytest

from tpu_graphs import errors

_PARTS = {
  'reason': 'wrong shape',
  'path': 'd/é.npz',
  'where': 'node_feat',
  'found': '[4, 139]',
  'expected': '[4, 140]',
  'fix': 'download it again',
}


@pytest.mark.parametrize(
  ('parts', 'text'),
  [
    ({'reason': 'empty file'}, 'empty file'),
    ({'reason': 'empty file', 'path': 'a.npz'}, 'a.npz: empty file'),
    ({'reason': 'r', 'found': 0}, 'r: found 0'),
    ({'reason': 'r', 'expected': 1}, 'r: expected 1'),
    ({'reason': 'r', 'where': 'w', 'fix': 'do this'}, 'w: r; do this'),
    (
      _PARTS,
      'd/é.npz: node_feat: wrong shape: found [4, 139], expected [4, 140]; download it again',
    ),
  ],
)
def test_text(parts, text):
  assert str(errors.InputError(**parts)) == text


def test_is_a_value_error():
  assert issubclass(errors.InputError, ValueError)


def test_values_become_text():
  error = errors.InputError('r', found=[1, 2], expected=0)
  assert (error.found, error.expected) == ('[1, 2]', '0')


@pytest.mark.parametrize(
  'travel',
  [
    lambda error: pickle.loads(pickle.dumps(error)),
    copy.copy,
    lambda error: errors.InputError(**json.loads(json.dumps(error.to_dict()))),
  ],
)
@pytest.mark.parametrize('parts', [_PARTS, {'reason': 'r'}])
def test_survives_travel(travel, parts):
  error = errors.InputError(**parts)
  arrived = travel(error)
  assert type(arrived) is errors.InputError
  assert arrived.to_dict() == error.to_dict()
  assert str(arrived) == str(error)


def test_dict_names_every_part():
  assert errors.InputError(**_PARTS).to_dict() == _PARTS
  assert errors.InputError('r').to_dict() == {**dict.fromkeys(_PARTS), 'reason': 'r'}


def test_in_file_names_the_file_once():
  with pytest.raises(errors.InputError) as caught, errors.in_file('outer'), errors.in_file('inner'):
    raise errors.InputError('r')
  assert caught.value.path == 'inner'


def test_in_file_leaves_other_errors_alone():
  with pytest.raises(ZeroDivisionError), errors.in_file('a'):
    raise ZeroDivisionError


@pytest.mark.parametrize(
  ('head', 'expected'),
  [
    (b'', None),
    (b'PK\x03\x04', 'a zip or npz archive'),
    (b'\x93NUMPY\x01\x00', 'an npy array'),
    (b'\x1f\x8b\x08', 'gzip data'),
    (b'HloModule jit_f', 'HLO text'),
    (b' \n<html>', 'HTML or XML'),
    (b'version https://git-lfs.github.com/spec/v1', 'a Git LFS pointer in place of the file'),
    (b'{"a": 1}', 'JSON'),
    (b'hello', 'text'),
    (b'\x0a\x05hello\x00', None),
    (b'  ', 'text'),
  ],
)
def test_looks_like(head, expected):
  assert errors.looks_like(head) == expected


def test_long_values_and_many_names_are_cut():
  assert errors.brief('x' * 40) == 'x' * 40
  assert errors.brief('x' * 41) == 'x' * 40 + '…'
  assert [errors.some(names, limit=2) for names in ([], ['a'], ['a', 'b'], ['a', 'b', 'c'])] == [
    'none',
    'a',
    'a, b',
    'a, b, … (3 in all)',
  ]
