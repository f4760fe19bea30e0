"""Fixtures that several test files share."""

import pytest

from tpu_graphs import module as module_lib
from tpu_graphs.hlo import implementations


@pytest.fixture(params=[implementations.NATIVE, implementations.PYTHON], scope='module')
def each_implementation(request):
  """Runs a test file once with each implementation of the HLO extractor."""
  if request.param == implementations.NATIVE:
    pytest.importorskip('tpu_graphs.hlo._native', exc_type=ImportError)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv(implementations.VARIABLE, request.param)
    implementations._active.cache_clear()
    assert implementations.implementation() == request.param
    yield request.param
  implementations._active.cache_clear()


@pytest.fixture(scope='session', params=module_lib.KINDS)
def kind(request):
  """Runs a test once with each kind, 'tile' and 'layout'."""
  return request.param
