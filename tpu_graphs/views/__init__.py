"""Summaries of files in numbers, and pictures of modules."""

from tpu_graphs.views.drawing import dot
from tpu_graphs.views.drawing import MAX_OPS
from tpu_graphs.views.drawing import svg
from tpu_graphs.views.summary import FileSummary
from tpu_graphs.views.summary import ModuleSummary
from tpu_graphs.views.summary import summarize
from tpu_graphs.views.summary import summarize_module
from tpu_graphs.views.summary import to_json

__all__ = [
  'MAX_OPS',
  'FileSummary',
  'ModuleSummary',
  'dot',
  'summarize',
  'summarize_module',
  'svg',
  'to_json',
]
