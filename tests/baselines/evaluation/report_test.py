"""Tests of baselines.evaluation.report: the content of the page, and its display in a browser."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil

from absl import flags
import numpy as np
import pytest

from baselines import evaluate
from baselines import models
from baselines import scoring
from baselines import train
from baselines.evaluation import evaluation
from baselines.evaluation import report
from baselines.models import parts
from baselines.training import runs
from baselines.training import trainer as trainer_lib
from pipelines import convert
from pipelines.conversion import options as options_lib
from tpu_graphs import errors
from tpu_graphs.dataset import directory as directory_lib
from tpu_graphs.dataset import manifest
from tpu_graphs.metrics import config_indices
from tpu_graphs.metrics import intervals
from tpu_graphs.metrics import module_table
from tpu_graphs.modules import feature_choices

HOSTILE = '</script><script>document.title = "taken"</script><!-- &amp; \u2028 π "\''
# A table shows this where there is no value.
NOTHING = '\N{EN DASH}'
COMMAND = ['tpu-graphs', 'evaluate', '--run=r', '--data=d']
HISTORY = 'epoch,loss,valid_opa,steps_per_second\n1,2.5,0.6,9\n2,2.0,0.8,9\n3,1.5,,9\n'


def directory(kind='tile', **options):
  sizes = dict.fromkeys(('ops', 'edges', 'config_ops', 'configs'), 4)
  shard = manifest.Shard(
    name='valid/part-00000-of-00001.tfrecord',
    records=1,
    modules=1,
    measured=1,
    configs=4,
    bytes=9,
    crc32c='00000000',
    max_sizes=sizes,
    total_sizes=sizes,
  )
  return directory_lib.DatasetDirectory(
    'data',
    manifest.Manifest(
      collection=f'{kind}:x',
      kind=kind,
      options=options_lib.ConvertOptions(f'{kind}:x', **options).to_json(),
      splits={'valid': manifest.Split.of([shard])},
      rejected_inputs={},
      skipped_modules={},
      dropped_runs={},
      source={'files': 3, 'bytes': 9, 'fingerprint': 'abc'},
    ),
    {},
  )


def scored(name, configs=12, seed=0, runtime=None, skill=0.5, kind='tile'):
  """Makes a module whose scores follow the runtimes more closely with a higher `skill`."""
  rng = np.random.default_rng([seed, *name.encode()])
  runtime = rng.integers(1000, 5000, configs) if runtime is None else np.asarray(runtime)
  score = (skill * runtime / 1000 + rng.random(runtime.size)).astype(np.float32)
  relative = np.where(runtime < 0, -1, runtime / 2000 if kind == 'tile' else runtime)
  return scoring.ScoredModule(
    module_id=name,
    config_id=np.arange(runtime.size),
    runtime=runtime,
    relative_runtime=relative,
    score=score,
  )


def result(modules, path='runs/a', split='valid', kind='tile', indices=None):
  config = {
    'model': {'name': 'MLP', 'parts': {'hidden': 4}},
    'training': {'epochs': 3, 'metric': 'opa', 'ema': 0.0},
    'valid_split': 'valid',
    'data': {'path': 'data'},
    'note': '</dd><b>bold',
  }
  run = runs.Run(
    path,
    config,
    models.ModelOptions('MLP', kind, parts.PartOptions(4, 1, 3)),
    feature_choices.PUBLISHED,
    None,
  )
  judged = [
    evaluation.judge(module, kind, indices)
    for module in sorted(modules, key=lambda module: module.module_id)
  ]
  return evaluation.Result(
    run=run,
    label=path.rpartition('/')[2],
    split=split,
    folder=f'{path}/{split}',
    modules=judged,
    num_ops={module.module_id: 5 + 3 * i for i, module in enumerate(judged)},
    metrics=evaluation.metrics_json(run, directory(kind), split, judged, indices),
  )


def several(skill, number=70):
  """Makes modules of three programs."""
  return [scored(f'net{i % 3}.x_{i:016x}', skill=skill) for i in range(number)]


def page(results, comparisons=(), kind='tile'):
  return report.render(report.content(results, comparisons, directory(kind), COMMAND))


def data_of(text):
  """Parses the data in a page, as a browser reads it."""
  (found,) = re.findall(
    r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL
  )
  return json.loads(found)


def test_page_holds_the_numbers_of_the_result():
  one = result([scored('a'), scored('b', skill=0.0), scored('none', runtime=[-1, -1])])
  found = data_of(page([one]))
  (shown,) = found['results']
  view = shown['views']['all']
  assert view['numbers']['model'] == one.metrics['model']
  assert found['splits'] == [
    {
      'name': 'valid',
      'modules': {'ids': ['a', 'b', 'none'], 'ops': [5, 8, 11], 'configs': [12, 12, 2]},
    }
  ]
  assert shown['unmeasured'] == 1
  assert view['values']['opa'][2] is None
  assert view['values']['opa'][0] == pytest.approx(
    one.modules[0].verdicts['all'].metrics.opa, rel=1e-4
  )
  for name, k in (('curve', 'curve'), ('randomCurve', 'random')):
    expected = [
      np.mean([getattr(module.verdicts['all'], k)[i] for module in one.modules[:2]])
      for i in evaluation.CURVE_KS
    ]
    assert view[name] == pytest.approx(expected, rel=1e-4)
  slowdowns, scores = shown['points']['0']
  assert min(slowdowns) == 1
  assert scores == sorted(scores)
  assert '2' not in shown['points']


@pytest.mark.parametrize('name', [HOSTILE, ']]>', '${title}$data', '\\u003c', 'a\nb', '\U0001f600'])
def test_no_name_leaves_the_data(name):
  text = page([result([scored(name), scored('b')])])
  assert sorted(data_of(text)['splits'][0]['modules']['ids']) == sorted([name, 'b'])
  assert text.count('</script>') == 2
  assert '<!-- &amp; ' not in text


def test_page_names_no_other_place():
  text = page([result([scored('a')])])
  assert set(re.findall(r'\w+://[^\s\'"<)]*', text)) == {'http://www.w3.org/2000/svg'}
  assert not re.search(r'@import|url\(|<link(?! rel="icon" href="data:,")|<img|src=', text)
  assert "default-src 'none'" in text


def test_size_is_bounded():
  modules = [scored(f'm{i:03}', configs=300) for i in range(220)]
  one = result(modules)
  other = dataclasses.replace(one, run=dataclasses.replace(one.run, path='runs/b'), label='b')
  content = report.content([one, other], [], directory(), COMMAND)
  for found in content['results']:
    assert len(found['points']) == report.MAX_SHOWN
    for i, (slowdowns, scores) in found['points'].items():
      # The points are MAX_POINTS over all modules shown, and the fastest config.
      assert 250 <= len(scores) == len(slowdowns) <= 251
      assert min(slowdowns) == 1
      assert scores[0] == pytest.approx(modules[i].score.min(), rel=1e-4)
  assert len(report.render(content)) < 3e6
  by_error = sorted(range(220), key=lambda i: one.modules[i].verdicts['all'].curve[1])
  assert set(by_error[-100:]) <= content['results'][0]['points'].keys()
  assert by_error[0] in content['results'][0]['points']


def test_undefined_is_null():
  one = result(
    [scored('one', configs=1), scored('equal', runtime=[3000] * 4), scored('none', runtime=[-1])]
  )
  text = page([one])
  assert 'NaN' not in text.partition('id="data">')[2].partition('</script>')[0]
  view = data_of(text)['results'][0]['views']['all']
  assert view['numbers']['model']['opa'] is None
  assert view['numbers']['model']['undefined']['opa'] == 2
  assert view['values']['top_1_error'] == [None] * 3
  assert set(view['curve']) == {None}


def test_programs_are_shown_where_names_show_them():
  view = data_of(page([result(several(0.5, 9))]))['results'][0]['views']['all']
  assert [(row['name'], row['modules']) for row in view['programs']] == [
    ('net0.x', 3),
    ('net1.x', 3),
    ('net2.x', 3),
  ]
  assert (
    data_of(page([result([scored('a'), scored('b')])]))['results'][0]['views']['all']['programs']
    is None
  )


def test_history_and_its_best_epoch(tmp_path):
  path = tmp_path / 'run'
  path.mkdir()
  (path / 'history.csv').write_text(HISTORY)
  (found,) = data_of(page([result([scored('a')], path=str(path))]))['runs']
  assert found['history'] == {
    'columns': ['epoch', 'loss', 'valid_opa'],
    'best': 2,
    'rows': [[1, 2.5, 0.6], [2, 2.0, 0.8], [3, 1.5, None]],
  }


@pytest.mark.parametrize('text', ['', 'epoch,loss\n1\n', 'epoch,loss\n1,abc\n'])
def test_damaged_history_is_named(text, tmp_path):
  (tmp_path / 'history.csv').write_text(text)
  with pytest.raises(errors.InputError, match=r'damaged history.*row of numbers') as info:
    page([result([scored('a')], path=str(tmp_path))])
  assert info.value.path == str(tmp_path / 'history.csv')


def parsed(command, define_flags):
  """Parses the flags of a command line as `tpu-graphs` does."""
  words = shlex.split(command.replace('\\\n', ' '))
  values = flags.FlagValues()
  define_flags(values)
  assert values(words[1:])[1:] == []
  return words[1], values


def test_commands_reproduce_the_flags():
  one = result([scored('a')])
  config = dict(one.run.config)
  config['training'] = {
    **dataclasses.asdict(trainer_lib.TrainOptions(learning_rate=0.5)),
    'metric': 'opa',
  }
  config['model'] = {'name': 'MLP', 'parts': dataclasses.asdict(parts.PartOptions(hidden=7))}
  one = dataclasses.replace(one, run=dataclasses.replace(one.run, config=config))
  source = directory(max_array_bytes=12345)
  content = report.content(
    [one], [], source, ['tpu-graphs', 'evaluate', '--run=a b', '--data=data', '--split=valid']
  )
  name, values = parsed(content['runs'][0]['command'], train._define_flags)
  assert name == 'train'
  assert (values.model, values.hidden, values.learning_rate, values.out) == (
    'MLP',
    7,
    0.5,
    'runs/a',
  )
  name, values = parsed(content['commands']['convert'], convert._define_flags)
  assert (name, values.collection, values.max_array_bytes, values.output) == (
    'convert',
    'tile:x',
    12345,
    'data',
  )
  name, values = parsed(content['commands']['evaluate'], evaluate._define_flags)
  assert (name, values.run, values.split) == ('evaluate', ['a b'], ['valid'])


# In a browser.


def _chromium():
  return next(
    filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None
  )


@pytest.fixture(scope='session')
def browser():
  webdriver = pytest.importorskip('selenium.webdriver')
  driver = shutil.which('chromedriver')
  if not (_chromium() and driver):
    pytest.skip('needs Chromium and its driver: apt-get install chromium chromium-driver')
  options = webdriver.ChromeOptions()
  options.binary_location = _chromium()
  for argument in ('--headless=new', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage'):
    options.add_argument(argument)
  options.set_capability('goog:loggingPrefs', {'browser': 'ALL', 'performance': 'ALL'})
  started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
  yield started
  started.quit()


@pytest.fixture
def visit(browser, tmp_path):
  """Opens pages, and checks in the end that nothing was logged or loaded but the pages."""
  urls = []

  def visit(text, width=1400, scheme='light'):
    path = tmp_path / f'report{len(urls)}.html'
    path.write_text(text, encoding='utf-8')
    urls.append(path.as_uri())
    browser.execute_cdp_cmd(
      'Emulation.setEmulatedMedia',
      {'features': [{'name': 'prefers-color-scheme', 'value': scheme}]},
    )
    browser.execute_cdp_cmd(
      'Emulation.setDeviceMetricsOverride',
      {'width': width, 'height': 900, 'deviceScaleFactor': 1, 'mobile': False},
    )
    browser.get(urls[-1])
    wait_for_layout(browser)
    return browser

  for log in ('browser', 'performance'):
    browser.get_log(log)
  yield visit
  assert browser.get_log('browser') == []
  messages = [json.loads(entry['message'])['message'] for entry in browser.get_log('performance')]
  loaded = {
    message['params']['request']['url']
    for message in messages
    if message['method'] == 'Network.requestWillBeSent'
  }
  assert {url for url in loaded if not url.startswith('data:')} == set(urls)


def wait_for_layout(browser):
  """Waits until charts are drawn, since the browser must know their width first."""
  browser.execute_async_script('requestAnimationFrame(() => requestAnimationFrame(arguments[0]))')


def texts(browser, selector):
  return browser.execute_script(
    'return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)', selector
  )


def column(browser, index):
  return texts(browser, f'#modules tbody tr > :nth-child({index + 1})')


def find(browser, selector):
  return browser.find_element('css selector', selector)


def click(browser, selector):
  node = find(browser, selector)
  # In the center, the node is not below the sticky controls.
  browser.execute_script('arguments[0].scrollIntoView({block: "center"})', node)
  node.click()


def two_runs(**kwargs):
  results = [result(several(0.5), **kwargs), result(several(0.1), path='runs/b', **kwargs)]
  first, second = ([verdict.metrics for verdict in one.verdicts('all')] for one in results)
  paired = intervals.compare(
    module_table.ModuleTable.of(second), module_table.ModuleTable.of(first)
  )
  return results, [
    evaluation.Comparison(split='valid', view='all', label='b', base='a', paired=paired)
  ]


def test_one_run_is_shown(visit):
  one = result(several(0.5))
  browser = visit(page([one]))
  assert browser.title == 'MLP on tile:x'
  assert texts(browser, 'h2') == [
    'How well the configs are ranked',
    'Top-k error over k',
    'By module size',
    'Modules',
    'Configs of a module',
    'Worst modules',
    'By program',
    'Training',
    'Run, data and how to reproduce',
  ]
  assert texts(browser, '.card .value') == [
    f'{one.metrics["model"][name]:.4f}' for name in ('opa', 'top_1_error', 'top_5_error')
  ]
  low, high = (one.metrics['intervals']['opa'][end] for end in ('low', 'high'))
  assert texts(browser, '.card .interval')[0] == f'{low:.4f} to {high:.4f}'
  assert f'random {one.metrics["random"]["top_1_error"]:.4f}' in texts(browser, '.card .legend li')
  assert texts(browser, 'nav option') == [
    'OPA',
    'Kendall tau',
    'top-1 error',
    'top-5 error',
    'top-10 error',
  ]
  assert texts(browser, 'nav label') == ['Judge by' + ''.join(texts(browser, 'nav option'))]
  assert len(browser.find_elements('css selector', '#curve polyline')) == 2
  assert len(browser.find_elements('css selector', '#size circle')) == 70
  # There are 12 configs, two marks, and three entries of the legend.
  assert len(browser.find_elements('css selector', '#configs circle')) == 12 + 2 + 3
  assert texts(browser, '#programs tbody th') != []
  assert len(texts(browser, '#worst tbody tr')) == 10


def test_modules_sort_by_mouse_and_keyboard(visit):
  one = result(several(0.5))
  browser = visit(page([one]))
  opa = {module.module_id: module.verdicts['all'].metrics.opa for module in one.modules}
  assert len(column(browser, 0)) == 50
  click(browser, '#modules > div:last-child > button')
  assert [opa[name] for name in column(browser, 0)] == sorted(opa.values())
  head = '#modules thead th:nth-child(4)'
  assert find(browser, head).get_attribute('aria-sort') == 'ascending'
  click(browser, f'{head} button')
  assert [opa[name] for name in column(browser, 0)] == sorted(opa.values(), reverse=True)
  assert find(browser, head).get_attribute('aria-sort') == 'descending'
  enter = '\ue007'
  find(browser, '#modules thead th:first-child button').send_keys(enter)
  assert column(browser, 0) == sorted(opa)
  assert find(browser, head).get_attribute('aria-sort') is None


def test_values_that_are_missing_come_last(visit):
  browser = visit(page([result([scored('a'), scored('b', configs=1), scored('c')])]))
  for _ in range(2):
    assert column(browser, 0)[-1] == 'b'
    assert column(browser, 3)[-1] == NOTHING
    click(browser, '#modules thead th:nth-child(4) button')


def test_modules_are_filtered(visit):
  browser = visit(page([result(several(0.5))]))
  field = find(browser, '#filter')
  field.send_keys('NET1')
  assert len(column(browser, 0)) == 23
  assert all(name.startswith('net1') for name in column(browser, 0))
  assert texts(browser, '#modules [role=status]') == ['23 of 70 modules']
  field.send_keys('?')
  assert column(browser, 0) == []
  field.clear()
  field.send_keys('n')
  assert texts(browser, '#modules [role=status]') == ['70 modules']


def test_a_module_is_chosen(visit):
  browser = visit(page([result([scored('a', configs=5), scored('b', configs=9)])]))

  def circles():
    wait_for_layout(browser)
    # Two of the circles are marks.
    return len(browser.find_elements('css selector', '#configs figure circle')) - 2

  assert circles() in (5, 9)
  click(browser, '#modules tbody tr:nth-child(1) button')
  assert circles() == {'a': 5, 'b': 9}[column(browser, 0)[0]]
  click(browser, '[aria-label="Next module"]')
  assert circles() == {'a': 9, 'b': 5}[column(browser, 0)[0]]
  click(browser, '#module option:nth-child(2)')
  assert circles() == 9


def test_hostile_names_are_text(visit):
  browser = visit(page([result([scored(HOSTILE), scored('b')])]))
  assert browser.title == 'MLP on tile:x'
  assert HOSTILE in column(browser, 0)
  assert browser.execute_script('return document.querySelectorAll("b").length') == 0
  assert HOSTILE in texts(browser, '#module option')


def test_runs_are_compared(visit):
  results, comparisons = two_runs()
  browser = visit(page(results, comparisons))
  assert browser.title == 'a, b on tile:x'
  assert texts(browser, '.card .name')[:2] == ['a ', 'b ']
  assert len(browser.find_elements('css selector', '#curve polyline')) == 3
  opa = comparisons[0].paired.metrics['opa']
  assert opa.wins < opa.losses
  assert texts(browser, '#comparison tbody tr:first-child > *') == [
    'OPA',
    f'{opa.difference.mean:.4f}',
    f'{opa.difference.low:.4f} to {opa.difference.high:.4f}',
    str(opa.wins),
    str(opa.losses),
    str(opa.ties),
    browser.execute_script(f'return ({opa.p_value!r}).toPrecision(2)'),
  ]
  before = column(browser, 3)
  click(browser, '#control-run option:nth-child(2)')
  assert column(browser, 3) != before
  assert (
    column(browser, 3)[0]
    == f'{min(verdict.metrics.opa for verdict in results[1].verdicts("all")):.4f}'
  )


def test_listed_configs_are_a_view(visit):
  indices = config_indices.parse('{"a": [0, 1, 1, 2]}', path='lists.json')
  one = result([scored('a'), scored('b')], indices=indices)
  browser = visit(page([one]))
  assert 'lists.json' not in texts(browser, '#subtitle')[0]
  click(browser, '#control-view option:nth-child(2)')
  assert 'the configs of lists.json, 1 of them repeated' in texts(browser, '#subtitle')[0]
  assert texts(browser, '.card .value')[0] == f'{one.metrics["listed"]["model"]["opa"]:.4f}'
  assert column(browser, 3) == [f'{one.metrics["listed"]["model"]["opa"]:.4f}', NOTHING]


def test_split_without_runtimes(visit):
  hidden = result([scored('x', runtime=[-1, -1]), scored('y', runtime=[-1])], split='test')
  browser = visit(page([hidden]))
  assert 'None of the 2 modules of test has runtimes' in texts(browser, '#numbers p')[0]
  assert column(browser, 0) == ['x', 'y']
  assert browser.find_elements('css selector', '.card, #curve, #configs') == []
  browser = visit(page([result([scored('a')]), hidden]))
  assert browser.find_elements('css selector', '.card') != []
  click(browser, '#control-split option:nth-child(2)')
  assert browser.find_elements('css selector', '.card') == []


@pytest.mark.parametrize(
  'modules',
  [
    [scored('one')],
    [scored('single', configs=1)],
    [scored('equal', runtime=[3000] * 5)],
    [scored('a', configs=1), scored('b')],
  ],
)
def test_few_or_undefined(visit, modules):
  browser = visit(page([result(modules)]))
  assert len(column(browser, 0)) == len(modules)
  assert texts(browser, 'h2')[-1] == 'Run, data and how to reproduce'
  shown = browser.execute_script('return document.getElementById("main").innerHTML')
  assert re.search(r'NaN|Infinity|undefined(?!<)', shown.replace('undefined: one', '')) is None


def test_means_over_some_of_the_modules_say_so(visit):
  browser = visit(page([result([scored('single', configs=1), scored('a'), scored('b')])]))
  assert all(
    'over 2 of 3 modules; not defined for the others' in text for text in texts(browser, '.card')
  )
  assert 'Not listed: 1 module without a value' in texts(browser, '#worst')[0]
  browser = visit(page([result([scored('a'), scored('b')])]))
  assert not any('the others' in text for text in texts(browser, '.card'))
  assert 'Not listed' not in texts(browser, '#worst')[0]


def test_layout_has_its_own_metrics(visit):
  modules = [scored(name, kind='layout') for name in 'abc']
  browser = visit(page([result(modules, kind='layout')], kind='layout'))
  assert texts(browser, '.card h3') == ['Kendall tau', 'top-1 error', 'top-10 error']
  assert 'default' not in ' '.join(texts(browser, '#modules thead th'))


def test_training_curves(visit, tmp_path):
  (tmp_path / 'history.csv').write_text(HISTORY)
  browser = visit(page([result([scored('a')], path=str(tmp_path))]))
  assert texts(browser, '#training h3') == ['loss', 'valid OPA']
  assert texts(browser, '#training title') == ['epoch 2: 2.0000', 'epoch 2: 0.8000']


def test_training_of_one_epoch_is_shown_in_numbers(visit, tmp_path):
  (tmp_path / 'history.csv').write_text(
    'epoch,loss,valid_top_5_error,learning_rate\n1,2.5,0.25,0.001\n'
  )
  browser = visit(page([result([scored('a')], path=str(tmp_path))]))
  assert browser.find_elements('css selector', '#training svg') == []
  assert texts(browser, '#training dt') == ['loss', 'valid top-5 error', 'learning rate']
  assert texts(browser, '#training dd') == ['2.5', '0.25', '0.001']


def test_a_narrow_logarithmic_axis_has_several_ticks(visit):
  browser = visit(
    page([dataclasses.replace(result([scored('a'), scored('b')]), num_ops={'a': 60, 'b': 190})])
  )
  shown = [
    float(text) for text in texts(browser, '#size svg text') if re.fullmatch(r'[\d.]+', text)
  ]
  assert len([tick for tick in shown if 60 <= tick <= 190]) > 1


def luminance(color):
  """Computes the luminance of a CSS color rgb(r, g, b), as WCAG 2 defines it."""
  channels = [int(value) / 255 for value in re.findall(r'\d+', color)[:3]]
  linear = [
    value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels
  ]
  return np.dot(linear, (0.2126, 0.7152, 0.0722))


@pytest.mark.parametrize('width', [1400, 390])
@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_readable_in_both_schemes_and_all_widths(visit, scheme, width):
  results, comparisons = two_runs()
  browser = visit(page(results, comparisons), width=width, scheme=scheme)
  assert browser.execute_script('return document.documentElement.scrollWidth') <= width
  style = 'return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]'
  background = luminance(browser.execute_script(style, 'section', 'backgroundColor'))
  assert (background > 0.5) == (scheme == 'light')
  for selector, part in (
    ('h2', 'color'),
    ('.faint', 'color'),
    ('#modules tbody button', 'color'),
    ('svg text', 'fill'),
    ('.card .s0 .name', 'color'),
    ('.card .s1 .name', 'color'),
  ):
    text = luminance(browser.execute_script(style, selector, part))
    light, dark = max(text, background), min(text, background)
    assert (light + 0.05) / (dark + 0.05) >= 4.5, (selector, scheme)
