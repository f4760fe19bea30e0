"""Converts programs (TpuGraphs npz files, HLO protobufs or text) into a dataset directory.

  python pipelines/convert.py --collection=tile:xla --input='raw/*.npz' --output=data/tile

The directory holds GraphTensor records; docs/formats.md describes it. Options of Apache Beam go
behind a bare `--`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import signal
import sys
import threading
import time

import apache_beam as beam

from pipelines.conversion import description
from pipelines.conversion import inputs as inputs_lib
from pipelines.conversion import options as options_lib
from pipelines.conversion import output
from pipelines.conversion import transform
from pipelines.runners import beam as beam_lib
from tpu_graphs import cli
from tpu_graphs.dataset import manifest as manifest_lib
from tpu_graphs.dataset import records
from tpu_graphs.modules import feature_choices
from tpu_graphs.modules import module as module_lib
from tpu_graphs.modules import reduction
from tpu_graphs.modules import selection
from tpu_graphs.sources import dumps

# The default number of shards gives each shard so many bytes of compressed input.
_BYTES_PER_SHARD = 8 << 20


@contextlib.contextmanager
def _interrupt_kept() -> Iterator[None]:
  """Makes Ctrl-C inside the block end it with KeyboardInterrupt.

  Beam may otherwise hide the KeyboardInterrupt, or replace it with another error.
  """
  is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
  is_main_thread = threading.current_thread() is threading.main_thread()
  # A handler of somebody else is left alone, and only the main thread receives signals.
  if not is_default or not is_main_thread:
    yield
    return
  seen = []

  def interrupt(number, frame):
    seen.append(number)
    signal.default_int_handler(number, frame)

  signal.signal(signal.SIGINT, interrupt)
  try:
    yield
  except Exception as error:
    if seen:
      raise KeyboardInterrupt from error
    raise
  finally:
    signal.signal(signal.SIGINT, signal.default_int_handler)
  if seen:
    raise KeyboardInterrupt


def convert(
  *,
  inputs: Sequence[str],
  directory: str,
  options: options_lib.ConvertOptions,
  overwrite: bool = False,
  beam_args: Sequence[str] = (),
) -> manifest_lib.Manifest:
  """Runs a conversion to its end.

  Args:
    inputs: Files, globs or directories; see `inputs.find_inputs`.
    directory: Path of the dataset directory to write.
    options: Options that decide the content of the directory.
    overwrite: Whether to replace an existing dataset. It is removed at the start.
    beam_args: Options of Apache Beam.

  Returns:
    The manifest.

  Raises:
    InputError: input, output or options cannot be used. Everything in `directory` that can be
      removed is removed then.
  """
  beam_lib.check_file_system('--output', directory)
  found = inputs_lib.find_inputs(inputs, options.collection, options.hlo_stage)
  if options.num_shards is None:
    num_shards = -(-max(found.bytes, 1) // _BYTES_PER_SHARD)
    options = dataclasses.replace(options, num_shards=num_shards)
  pipeline = beam_lib.pipeline(beam_args, input_bytes=found.bytes)
  request = {'collection': options.collection, 'inputs': sorted(inputs), **options.to_json()}
  output.begin(directory, request=request, overwrite=overwrite)
  try:
    _ = (
      pipeline
      | 'Patterns' >> beam.Create(found.patterns)
      | 'Convert' >> transform.Convert(directory, options)
    )
    with _interrupt_kept():
      pipeline.run().wait_until_finish()
  except Exception as error:
    reported = output.abandon(directory) or output.write_error_in(error)
    if reported:
      raise reported from error
    raise
  output.end(directory)
  path = output.join(directory, manifest_lib.FILE_NAME)
  return manifest_lib.loads(beam_lib.read_bytes(path).decode(), path=path)


def _define_flags(flag_values) -> None:
  from absl import flags

  flags.DEFINE_multi_string(
    'input',
    None,
    'Files, globs or folders of npz or pb files, separated by commas or in several --input; a '
    'folder may be the root of a TpuGraphs tree, or a dump that XLA wrote with --xla_dump_to. HLO '
    'text is read as well if it is named or matches a glob.',
    flag_values=flag_values,
  )
  flags.DEFINE_string('output', None, 'Dataset directory to write.', flag_values=flag_values)
  flags.DEFINE_string(
    'collection',
    None,
    "Name of the collection, 'tile:NAME' or 'layout:NAME', such as 'layout:xla:random'.",
    flag_values=flag_values,
  )
  flags.DEFINE_enum(
    'split',
    None,
    module_lib.SPLITS,
    'Split for all modules. Default: the folder (train, valid or test) that a file lies in, or '
    'otherwise a hash of its graph.',
    flag_values=flag_values,
  )
  flags.DEFINE_enum(
    'hlo_stage',
    'after',
    dumps.STAGES,
    'Programs of an XLA dump to read: after or before the passes of the compiler, or all.',
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'num_shards',
    None,
    'Files per split. Default: depends on the size of the input.',
    lower_bound=1,
    flag_values=flag_values,
  )
  defaults = records.RecordOptions()
  flags.DEFINE_integer(
    'max_configs_per_record',
    defaults.max_configs,
    'Modules with more configs become several records.',
    lower_bound=1,
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'max_record_bytes',
    defaults.max_bytes,
    'Modules with more bytes become several records.',
    lower_bound=1,
    flag_values=flag_values,
  )
  flags.DEFINE_enum(
    'on_error',
    'fail',
    ['fail', 'skip'],
    'Stop at an input that cannot be used, or list it in rejected.jsonl and continue.',
    flag_values=flag_values,
  )
  flags.DEFINE_float(
    'max_rejected_fraction',
    1.0,
    'With --on_error=skip: fail if more than this share of the input files cannot be used, and '
    'write nothing but the list of these files.',
    lower_bound=0.0,
    upper_bound=1.0,
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'max_array_bytes',
    module_lib.DEFAULT_MAX_ARRAY_BYTES,
    'An input with a larger array cannot be used.',
    lower_bound=1,
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'max_configs',
    None,
    'Keep only a sample of the configs of modules with more configs.',
    lower_bound=1,
    flag_values=flag_values,
  )
  flags.DEFINE_enum(
    'config_sampling',
    'uniform',
    selection.SAMPLINGS,
    'Choose the sample at random, evenly over the ranks of the runtimes, or at random with a '
    'preference for the fastest.',
    flag_values=flag_values,
  )
  flags.DEFINE_enum(
    'dedup_configs',
    'off',
    selection.DEDUPS,
    'Keep one of several configs with the same features: the first, the one with the least '
    'runtime, or the first with the mean runtime.',
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'keep_hops',
    None,
    'Layout only: keep the ops of each graph that are at most so many edges, in either direction, '
    'from a configurable op.',
    lower_bound=0,
    flag_values=flag_values,
  )
  flags.DEFINE_enum(
    'rest',
    None,
    reduction.RESTS,
    'With --keep_hops: drop (the default) leaves the other ops out, summary merges the other ops '
    'of each computation into one op.',
    flag_values=flag_values,
  )
  flags.DEFINE_enum(
    'layout_padding',
    '0',
    list(map(str, feature_choices.LAYOUT_PADDINGS)),
    'Value of the unused node features layout_minor_to_major: 0 as published, -1 to distinguish '
    '"no dimension" from "dimension 0".',
    flag_values=flag_values,
  )
  flags.DEFINE_multi_string(
    'extra_features',
    None,
    'Your own node features as package.module:attribute, a function under '
    '@feature_choices.node_features. May be given several times.',
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'seed',
    0,
    'Decides hashed splits, samples, and the order of configs and records.',
    lower_bound=0,
    upper_bound=2**32 - 1,
    flag_values=flag_values,
  )
  flags.DEFINE_bool(
    'overwrite',
    False,
    'Replace an existing dataset; it is removed at the start.',
    flag_values=flag_values,
  )
  for name in ('input', 'output', 'collection'):
    flags.mark_flag_as_required(name, flag_values=flag_values)


def _job(flag_values, beam_args: list[str]) -> int:
  configs = selection.ConfigSelection(
    max_configs=flag_values.max_configs,
    sampling=flag_values.config_sampling,
    dedup=flag_values.dedup_configs,
    seed=flag_values.seed,
  )
  record_options = records.RecordOptions(
    max_configs=flag_values.max_configs_per_record,
    max_bytes=flag_values.max_record_bytes,
    seed=flag_values.seed,
  )
  choices = feature_choices.FeatureChoices(
    layout_padding=int(flag_values.layout_padding),
    extra=tuple(feature_choices.load(source) for source in flag_values.extra_features or ()),
  )
  options = options_lib.ConvertOptions(
    collection=flag_values.collection,
    split=flag_values.split,
    num_shards=flag_values.num_shards,
    on_error=flag_values.on_error,
    hlo_stage=flag_values.hlo_stage,
    keep_hops=flag_values.keep_hops,
    rest=flag_values.rest,
    max_rejected_fraction=flag_values.max_rejected_fraction,
    max_array_bytes=flag_values.max_array_bytes,
    configs=configs,
    records=record_options,
    choices=choices,
  )
  start = time.monotonic()
  inputs = [name for names in flag_values.input for name in names.split(',')]
  manifest = convert(
    inputs=inputs,
    directory=flag_values.output,
    options=options,
    overwrite=flag_values.overwrite,
    beam_args=beam_args,
  )
  seconds = time.monotonic() - start
  print(f'{manifest.collection} -> {flag_values.output} in {seconds:.1f} s')
  print(description.describe(manifest))
  return 0


def main(argv: Sequence[str]) -> int:
  return cli.run(_define_flags, _job, argv, description=__doc__, passthrough=True)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
