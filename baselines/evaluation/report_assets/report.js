'use strict';

// The data is stored by columns: a module is an index into `split.modules` and into the values of each result.
const data = JSON.parse(document.getElementById('data').textContent);
const state = {split: 0, run: 0, view: 'all', metric: data.headline[0], module: null};
// Number of rows that a table shows before a click on "Show all".
const PAGE = 50;
const SIZE_GROUPS = 6;
const WORST = 10;

// Elements.

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter(child => child !== null));
  return node;
}

const element = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const drawn = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);
const section = (id, title, text, ...children) => element(
    'section', {id, 'aria-labelledby': `${id}-title`}, element('h2', {id: `${id}-title`}, title),
    text ? element('p', {class: 'faint'}, text) : null, ...children);

// Numbers.

const isNumber = value => typeof value === 'number';
const count = value => value.toLocaleString('en-US');
const counted = (value, thing) => `${count(value)} ${thing}${value === 1 ? '' : 's'}`;
const number = (value, digits = 4) => isNumber(value) ? value.toFixed(digits) : '–';
const signed = value => isNumber(value) ? (value > 0 ? '+' : '') + value.toFixed(4) : '–';
const interval = (low, high, form = number) => isNumber(low) ? `${form(low)} to ${form(high)}` : '';

function mean(values) {
  const defined = values.filter(isNumber);
  return defined.length ? defined.reduce((sum, value) => sum + value, 0) / defined.length : null;
}

function axisNumber(value) {
  if (Math.abs(value) >= 1000) return value.toLocaleString('en-US', {notation: 'compact'});
  return String(Number(value.toPrecision(3)));
}

// Selection.

const metricOf = name => data.metrics.find(metric => metric.name === name);
const metric = () => metricOf(state.metric);
const split = () => data.splits[state.split];
const resultOf = run => data.results.find(result => result.split === state.split && result.run === run);
const result = () => resultOf(state.run);
const judged = run => resultOf(run)?.views[state.view];
const series = run => `s${run % 6}`;
const runsShown = () => data.runs.map((_, i) => i).filter(i => judged(i));
// Compares two values of the metric, to sort the worst first.
const worse = (a, b) => metric().higher ? a - b : b - a;

// Tables.

/**
 * Makes a table that is sorted by the column whose head is clicked.
 * columns: {label, title, value: row -> number, string or null, show: row -> node or string, text, bar}.
 * sorted: {column, descending}, kept up to date; without a column, rows keep their order.
 * Rows without a value come last.
 */
function table(caption, columns, rows, sorted) {
  let limit = PAGE;
  const body = element('tbody');
  const more = element('button', {type: 'button', click: () => { limit = Infinity; draw(); }});
  const heads = columns.map((column, i) => element(
      'th', {scope: 'col', class: column.text ? 'text' : null, title: column.title ?? null},
      element('button', {type: 'button', click: () => {
        const again = sorted.column === i;
        sorted.descending = again ? !sorted.descending : !column.text;
        sorted.column = i;
        draw();
      }}, column.label)));

  function draw() {
    const {value} = columns[sorted.column] ?? {value: () => 0};
    const sign = sorted.descending ? -1 : 1;
    const order = rows.slice().sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return sign * (isNumber(x) ? x - y : x < y ? -1 : x > y ? 1 : 0);
    });
    heads.forEach((head, i) => {
      if (i === sorted.column) head.setAttribute('aria-sort', sorted.descending ? 'descending' : 'ascending');
      else head.removeAttribute('aria-sort');
    });
    const most = columns.map(column => column.bar ? Math.max(...rows.map(row => column.value(row) ?? 0)) : 0);
    body.replaceChildren(...order.slice(0, limit).map(row => element('tr', {}, columns.map((column, i) => {
      const value = column.value(row);
      const shown = column.show ? column.show(row) : isNumber(value) ? number(value) : value ?? '–';
      if (i === 0) return element('th', {scope: 'row', class: column.text ? 'text' : null}, shown);
      const share = most[i] > 0 ? `--share: ${(100 * Math.max(value, 0) / most[i]).toFixed(1)}%` : null;
      return element('td', {class: column.text ? 'text' : share ? 'bar' : null, style: share}, shown);
    }))));
    more.hidden = order.length <= limit;
    more.textContent = `Show all ${count(order.length)}`;
  }

  draw();
  const node = element('div', {}, element(
      'div', {class: 'scroll', tabindex: '0', role: 'region', 'aria-label': caption}, element(
          'table', {}, element('caption', {class: 'unseen'}, caption), element('thead', {}, element('tr', {}, heads)),
          body)), more);
  return {node, show: chosen => { rows = chosen; draw(); }};
}

// Charts.

function ticksOf(low, high, log, wanted) {
  if (log) {
    const powers = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
      powers.push(...[1, 2, 5].map(digit => digit * 10 ** e));
    }
    const inside = powers.filter(tick => tick >= low * 0.999 && tick <= high * 1.001);
    const tens = inside.filter(tick => Number.isInteger(Math.log10(tick)) || Math.abs(Math.log10(tick) % 1) < 1e-9);
    if (inside.length > 1) return inside.length > 2 * wanted && tens.length > 1 ? tens : inside;
  }
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(factor => factor * power >= rough) * power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) ticks.push(i * step);
  return ticks;
}

/** Maps values to positions on an axis. The axis ends at `most` at the latest: larger values are cut off. */
function scale(values, {log = false, from, to, include = [], most = Infinity, pad = 0}, wanted) {
  const all = [...values, ...include];
  let low = all.reduce((a, b) => Math.min(a, b), Infinity);
  let high = Math.min(most, all.reduce((a, b) => Math.max(a, b), -Infinity));
  const room = Math.abs(low || 1) / 10;
  if (low === high) [low, high] = [low - room, high + room];
  const turn = log ? Math.log : value => value;
  const span = turn(high) - turn(low);
  const share = value => (turn(value) - turn(low) + pad * span) / ((1 + 2 * pad) * span);
  return {at: value => from + share(value) * (to - from), ticks: ticksOf(low, high, log, wanted)};
}

/**
 * Makes a chart that is drawn again when its width changes.
 * lines: {points: [[x, y]], style}; dots: {x, y, style, radius, title, click}; levels: {y, style}.
 */
function chart(label, x, y, {lines = [], dots = [], levels = [], height = 280}) {
  const figure = element('figure');

  function draw() {
    const width = Math.max(figure.clientWidth, 240);
    const [left, right, top, bottom] = [58, 12, 10, 42];
    const points = [...lines.flatMap(line => line.points), ...dots.map(dot => [dot.x, dot.y])];
    const pad = dots.length ? 0.03 : 0;
    const across = scale(points.map(point => point[0]), {...x, pad, from: left, to: width - right}, width / 90);
    const upward = scale([...points.map(point => point[1]), ...levels.map(level => level.y)],
                         {...y, pad, from: height - bottom, to: top}, height / 45);
    const [w, h] = [width - left - right, height - top - bottom];
    // The inner drawing cuts off lines at its borders.
    const inside = {x: left, y: top, width: w, height: h, viewBox: `${left} ${top} ${w} ${h}`};
    const frame = [
      ...upward.ticks.map(tick => [
        drawn('line', {class: 'grid', x1: left, x2: width - right, y1: upward.at(tick), y2: upward.at(tick)}),
        drawn('text', {x: left - 6, y: upward.at(tick) + 4, 'text-anchor': 'end'}, axisNumber(tick))]),
      ...across.ticks.map(tick => [
        drawn('line', {class: 'axis', x1: across.at(tick), x2: across.at(tick), y1: top + h, y2: top + h + 4}),
        drawn('text', {x: across.at(tick), y: height - bottom + 17, 'text-anchor': 'middle'}, axisNumber(tick))]),
      drawn('line', {class: 'axis', x1: left, x2: width - right, y1: height - bottom, y2: height - bottom}),
      drawn('text', {x: (left + width - right) / 2, y: height - 6, 'text-anchor': 'middle'}, x.label),
      drawn('text', {x: 13, y: (top + height - bottom) / 2, 'text-anchor': 'middle',
                     transform: `rotate(-90 13 ${(top + height - bottom) / 2})`}, y.label),
    ];
    figure.replaceChildren(drawn(
        'svg', {viewBox: `0 0 ${width} ${height}`, height, role: 'img', 'aria-label': label}, frame,
        drawn('svg', inside, levels.map(level => drawn('line', {
          class: `line ${level.style}`, x1: left, x2: width - right, y1: upward.at(level.y), y2: upward.at(level.y)})),
              lines.map(line => drawn('polyline', {class: `line ${line.style}`, points: line.points.map(
                  point => `${across.at(point[0]).toFixed(1)},${upward.at(point[1]).toFixed(1)}`).join(' ')}))),
        dots.map(dot => drawn('circle', {
          class: dot.style, cx: across.at(dot.x).toFixed(1), cy: upward.at(dot.y).toFixed(1), r: dot.radius ?? 3,
          click: dot.click ?? null}, dot.title ? drawn('title', {}, dot.title) : null))));
  }

  new ResizeObserver(draw).observe(figure);
  return figure;
}

function legend(entries) {
  const marks = {
    line: style => drawn('line', {class: `line ${style}`, x1: 1, x2: 25, y1: 6, y2: 6}),
    dot: style => drawn('circle', {class: style, cx: 13, cy: 6, r: 4.5}),
  };
  return element('ul', {class: 'legend'}, entries.map(([mark, style, text]) => element(
      'li', {}, drawn('svg', {viewBox: '0 0 26 12', 'aria-hidden': 'true'}, marks[mark](style)), text)));
}

// Sections.

function ruler(name) {
  const views = runsShown().map(run => [run, judged(run).numbers]);
  const known = ['random', 'default', 'oracle'].map(kind => [kind, views[0][1][kind][name]])
      .filter(pair => isNumber(pair[1]));
  const ends = views.flatMap(([_, numbers]) => [numbers.model[name], numbers.intervals[name]?.low,
                                                numbers.intervals[name]?.high]);
  const height = 16 * views.length + 14;
  const at = scale([...ends, ...known.map(pair => pair[1])].filter(isNumber), {from: 6, to: 254}, 1).at;
  const marks = {random: 'plain dashed', default: 'plain dotted', oracle: 'plain'};
  return element('figure', {},
      drawn('svg', {viewBox: `0 0 260 ${height}`, role: 'img',
                    'aria-label': `${metricOf(name).label} beside simple rankings`},
            known.map(([kind, value]) => drawn(
                'line', {class: `line ${marks[kind]}`, x1: at(value), x2: at(value), y1: 2, y2: height - 2})),
            views.map(([run, numbers], i) => {
              const [value, ends, y] = [numbers.model[name], numbers.intervals[name], 15 + 16 * i];
              return isNumber(value) ? drawn('g', {class: series(run)}, isNumber(ends?.low) ? drawn(
                  'line', {class: 'line', x1: at(ends.low), x2: at(ends.high), y1: y, y2: y}) : null,
                  drawn('circle', {class: 'solid', cx: at(value), cy: y, r: 5})) : drawn('g');
            })),
      legend(known.map(([kind, value]) => ['line', marks[kind], `${kind} ${number(value)}`])));
}

/** Shows the number of modules in a mean, where the metric is undefined for some. */
function leftOut(model, name) {
  const undefinedFor = model.undefined[name];
  return undefinedFor ? element('p', {}, `over ${count(model.num_modules - undefinedFor)} of ` +
      `${counted(model.num_modules, 'module')}; not defined for the others`) : null;
}

function headline() {
  const several = runsShown().length > 1;
  const cards = data.headline.map(name => element('div', {class: 'card'},
      element('h3', {}, metricOf(name).label), element('p', {}, metricOf(name).help),
      element('div', {}, runsShown().map(run => {
        const {model, intervals} = judged(run).numbers;
        return element('div', {class: series(run)},
                       several ? element('span', {class: 'name'}, `${data.runs[run].label} `) : null,
                       element('span', {class: several ? 'value several' : 'value'}, number(model[name])), ' ',
                       element('span', {class: 'interval'}, interval(intervals[name]?.low, intervals[name]?.high)),
                       leftOut(model, name));
      })), ruler(name)));
  const {numbers} = judged(state.run);
  const rows = [...data.metrics, {name: 'opa_pooled', label: 'OPA, pooled', help: 'the pairs of all modules together'}];
  const all = table(
      `All means of ${data.runs[state.run].label} over ${counted(numbers.model.num_modules, 'module')}`, [
        {label: 'metric', text: true, value: row => row.label,
         show: row => element('span', {title: row.help}, row.label)},
        {label: 'model', value: row => numbers.model[row.name]},
        {label: '95 % interval', value: row => numbers.intervals[row.name]?.low ?? null,
         show: row => interval(numbers.intervals[row.name]?.low, numbers.intervals[row.name]?.high) || '–'},
        ...['random', 'default', 'oracle'].map(kind => ({label: kind, value: row => numbers[kind][row.name]})),
        {label: 'undefined', title: 'modules that the mean leaves out: one config, no two different runtimes, or for ' +
          'Kendall\'s tau no two different scores',
         value: row => numbers.model.undefined[row.name] ?? null,
         show: row => row.name in numbers.model.undefined ? count(numbers.model.undefined[row.name]) : number(null)},
      ], rows, {column: null, descending: false});
  return section('numbers', 'How well the configs are ranked',
      'Means over modules, each counting the same, with 95 % confidence intervals from resampled modules. Random: a ' +
      'random ranking on average. Default: the compiler\'s own choice, where the data records it. Oracle: the best ' +
      'possible ranking.', element('div', {class: 'cards'}, cards), element(
          'details', {}, element('summary', {}, `All metrics of ${data.runs[state.run].label}`), all.node));
}

function comparison() {
  const found = data.comparisons.filter(one => one.split === split().name && one.view === state.view);
  if (!found.length) return null;
  return section('comparison', 'Run against run', `Module by module, against ${found[0].base}. Change: the mean of ` +
      'the differences. p: how likely wins and losses are at least as unequal if both were equally good (sign test). ' +
      'Intervals hold for other modules, not for another training.', found.map(one => [
        element('h3', {}, `${one.label} against ${one.base}: ${counted(one.modules, 'module')}`),
        table(`${one.label} against ${one.base}`, [
            {label: 'metric', text: true, value: row => metricOf(row.metric).label},
            {label: 'change', value: row => row.mean, show: row => signed(row.mean)},
            {label: '95 % interval', value: row => row.low, show: row => interval(row.low, row.high, signed) || '–'},
            ...['better', 'worse', 'equal'].map(
                name => ({label: name, value: row => row[name], show: row => count(row[name])})),
            {label: 'p', value: row => row.p, show: row => isNumber(row.p) ? row.p.toPrecision(2) : '–'},
        ], one.rows, {column: null, descending: false}).node]));
}

function curve() {
  const largest = Math.max(...split().modules.configs);
  const end = data.ks.findIndex(k => k >= largest);
  const line = values => values.slice(0, end < 0 ? undefined : end + 1).map((value, i) => [data.ks[i], value])
      .filter(point => isNumber(point[1]));
  const shown = runsShown();
  const lines = [...shown.map(run => ({points: line(judged(run).curve), style: series(run)})),
                 {points: line(judged(shown[0]).randomCurve), style: 'plain dashed'}].filter(one => one.points.length);
  if (!lines.length) return null;
  const fallback = judged(shown[0]).numbers.default[data.metrics.at(-1).name];
  // A random ranking may be so bad that all other curves would lie at the bottom of the chart.
  const most = Math.max(1.25 * (fallback ?? 0), 3 * Math.max(...shown.map(run => judged(run).curve[0]))) || Infinity;
  return section('curve', 'Top-k error over k', 'How much slower the best of the k configs predicted fastest is than ' +
      'the best of all: what trying k configs is worth. Mean over modules.',
      chart('Top-k error over k', {label: 'k, configs tried', log: true}, {label: 'top-k error', include: [0], most},
            {lines, levels: isNumber(fallback) ? [{y: fallback, style: 'plain dotted'}] : []}),
      legend([...shown.map(run => ['line', series(run), data.runs[run].label]), ['line', 'plain dashed', 'random'],
              ...isNumber(fallback) ? [['line', 'plain dotted', 'default config alone']] : []]));
}

const rowsOfModules = () => split().modules.ids.map((id, i) => ({
  i, id, ops: split().modules.ops[i], configs: split().modules.configs[i],
  values: Object.fromEntries(data.metrics.map(({name}) => [name, judged(state.run)?.values[name][i] ?? null])),
  fallback: judged(state.run)?.default[i] ?? null}));

function moduleName(row) {
  if (!result().points[row.i]) return row.id;
  return element('button', {type: 'button', class: 'link', title: 'Show its configs', click: () => showModule(row.i)},
                 row.id);
}

const moduleColumns = () => [
  {label: 'module', text: true, value: row => row.id, show: moduleName},
  {label: 'ops', value: row => row.ops, show: row => count(row.ops)},
  {label: 'configs', value: row => row.configs, show: row => count(row.configs)},
  ...data.metrics.map(one => ({label: one.label, title: one.help, value: row => row.values[one.name]})),
  ...data.kind === 'tile' ? [{label: 'default', title: 'how much slower the default config is than the best',
                              value: row => row.fallback}] : []];

function modules() {
  const rows = rowsOfModules();
  const sorted = {column: 3 + data.metrics.indexOf(metric()), descending: !metric().higher};
  if (!judged(state.run)) Object.assign(sorted, {column: 0, descending: false});
  const found = table(`Modules of ${split().name}`, moduleColumns(), rows, sorted);
  const status = element('span', {class: 'faint', role: 'status'}, counted(rows.length, 'module'));
  const filter = element('input', {type: 'search', id: 'filter', placeholder: 'part of a name', input: () => {
    const wanted = filter.value.toLowerCase();
    const chosen = rows.filter(row => row.id.toLowerCase().includes(wanted));
    found.show(chosen);
    status.textContent = chosen.length === rows.length ? counted(rows.length, 'module') :
        `${count(chosen.length)} of ${counted(rows.length, 'module')}`;
  }});
  return section('modules', 'Modules', 'Click a column head to sort, or a name to show that module\'s configs below.',
                 element('div', {class: 'tools'}, element('label', {for: 'filter'}, 'Filter', filter), status),
                 found.node);
}

function worst() {
  const all = rowsOfModules();
  const rows = all.filter(row => isNumber(row.values[state.metric]))
      .sort((a, b) => worse(a.values[state.metric], b.values[state.metric]));
  const without = all.length - rows.length;
  const note = without ? ` Not listed: ${counted(without, 'module')} without a value.` : '';
  const columns = [moduleColumns()[0], moduleColumns()[1], moduleColumns()[2],
                   {label: metric().label, value: row => row.values[state.metric], bar: !metric().higher}];
  return section('worst', 'Worst modules', `By ${metric().label}.${note}`, table(
      'Worst modules', columns, rows.slice(0, WORST), {column: 3, descending: !metric().higher}).node);
}

function bySize() {
  const rows = rowsOfModules().filter(row => isNumber(row.values[state.metric])).sort((a, b) => a.ops - b.ops);
  const groups = Math.min(SIZE_GROUPS, Math.floor(rows.length / 3));
  const means = Array.from({length: groups}, (_, g) => {
    const group = rows.slice(Math.round(g * rows.length / groups), Math.round((g + 1) * rows.length / groups));
    return [Math.exp(mean(group.map(row => Math.log(row.ops)))), mean(group.map(row => row.values[state.metric]))];
  });
  return section('size', 'By module size', `${metric().label} of each module over its number of ops` +
      (groups > 1 ? `, and the mean of each of ${groups} groups of equal count.` : '.'),
      chart(`${metric().label} over the number of ops`, {label: 'ops', log: true}, {label: metric().label}, {
        dots: rows.map(row => ({x: row.ops, y: row.values[state.metric], style: `dot ${series(state.run)} clickable`,
                                title: `${row.id}: ${counted(row.ops, 'op')}, ${number(row.values[state.metric])}`,
                                click: () => showModule(row.i)})),
        lines: groups > 1 ? [{points: means, style: series(state.run)}] : []}));
}

function byProgram() {
  const programs = judged(state.run).programs;
  // The list is missing where each module is a program of its own.
  if (!programs) return null;
  const columns = [
    {label: 'program', text: true, value: row => row.name},
    {label: 'modules', value: row => row.modules, show: row => count(row.modules)},
    {label: 'configs', value: row => row.configs, show: row => count(row.configs)},
    ...data.metrics.map(one => ({label: one.label, title: one.help, value: row => row.values[one.name],
                                 bar: !one.higher}))];
  const sorted = {column: 3 + data.metrics.indexOf(metric()), descending: !metric().higher};
  return section('programs', 'By program', 'Means over modules whose names show that they belong to one program.',
                 table('Programs', columns, programs, sorted).node);
}

function configs() {
  const {ids} = split().modules;
  const {points} = result();
  const chosen = Object.keys(points).map(Number);
  if (!chosen.length) return null;
  if (!points[state.module]) {
    state.module = chosen.slice().sort((a, b) => {
      const [x, y] = [a, b].map(i => judged(state.run).values[state.metric][i]);
      return isNumber(x) && isNumber(y) ? worse(x, y) : isNumber(y) - isNumber(x);
    })[0];
  }
  const select = element('select', {id: 'module', change: () => showModule(Number(select.value), false)}, chosen.map(
      i => element('option', {value: i, selected: i === state.module ? '' : null}, ids[i])));
  const place = chosen.indexOf(state.module);
  const step = by => () => showModule(chosen[(place + by + chosen.length) % chosen.length], false);
  const [slowdowns, scores] = points[state.module];
  const [fastest, first] = [slowdowns.indexOf(Math.min(...slowdowns)), scores.indexOf(Math.min(...scores))];
  const fallback = judged(state.run).default[state.module];
  const dot = (i, style, radius, name) => ({
    x: scores[i], y: slowdowns[i], style, radius,
    title: `${name}score ${scores[i]}, ${number(slowdowns[i], 3)} times the fastest`});
  const total = split().modules.configs[state.module];
  const facts = [counted(split().modules.ops[state.module], 'op'), slowdowns.length < total ?
      `${count(slowdowns.length)} of ${counted(total, 'config')} shown` : counted(total, 'config'),
      ...data.metrics.map(one => `${one.label} ${number(judged(state.run).values[one.name][state.module])}`)];
  const kept = chosen.length === ids.length ? '' :
      ` Configs are kept for ${count(chosen.length)} of ${counted(ids.length, 'module')}: the worst, and some others.`;
  return section('configs', 'Configs of a module', 'Predicted score against measured runtime, both lower for faster. ' +
      `A good model's dots rise from the left to the right; what counts most is that the leftmost are low.${kept}`,
      element('div', {class: 'tools'}, element('label', {for: 'module'}, 'Module', select),
              element('button', {type: 'button', click: step(-1), 'aria-label': 'Previous module'}, '‹'),
              element('button', {type: 'button', click: step(1), 'aria-label': 'Next module'}, '›')),
      element('p', {class: 'faint wide', role: 'status'}, facts.join(' · ')),
      chart('Runtime over predicted score', {label: 'predicted score'}, {
        label: 'runtime / fastest', log: Math.max(...slowdowns) > 3}, {
        height: 360,
        dots: [...scores.map((_, i) => dot(i, `dot ${series(state.run)}`, 3, '')),
               dot(fastest, 'ring s2', 7, 'fastest: '), dot(first, 'ring s3', 10, 'predicted fastest: ')],
        levels: isNumber(fallback) ? [{y: 1 + fallback, style: 'plain dotted'}] : []}),
      legend([['dot', `dot ${series(state.run)}`, 'config'], ['dot', 'ring s2', 'fastest'],
              ['dot', 'ring s3', 'predicted fastest'],
              ...isNumber(fallback) ? [['line', 'plain dotted', 'default config']] : []]));
}

function showModule(i, scroll = true) {
  state.module = i;
  const next = configs();
  document.getElementById('configs').replaceWith(next);
  if (scroll) next.scrollIntoView({block: 'start'});
  next.querySelector('#module').focus({preventScroll: true});
}

/** Turns the name of a column of the history into its heading: valid_top_1_error -> valid top-1 error. */
function headingOf(name) {
  const [, split, judged] = name.match(/^(train|valid|test)_(.*)$/) ?? [];
  return metricOf(judged) ? `${split} ${metricOf(judged).label}` : name.replaceAll('_', ' ');
}

function training() {
  const {label, history} = data.runs[state.run];
  if (!history) return section('training', 'Training', `${label} has no history.csv.`);
  const [epochs, ...columns] = history.columns.map((name, i) => ({name, values: history.rows.map(row => row[i])}));
  if (history.rows.length === 1) {
    return section('training', 'Training', `${label}, 1 epoch.`, element('dl', {class: 'pairs'}, columns.flatMap(
        column => pairs(String(column.values[0] ?? '–'), headingOf(column.name)))));
  }
  const charts = columns.filter(column => column.values.some(isNumber)).map(column => {
    const points = column.values.map((value, i) => [epochs.values[i], value]).filter(point => isNumber(point[1]));
    const best = points.filter(point => point[0] === history.best);
    return element('div', {}, element('h3', {}, headingOf(column.name)), chart(
        `${column.name} by epoch`, {label: 'epoch'}, {label: ''}, {
          height: 190, lines: [{points, style: series(state.run)}],
          dots: (points.length === 1 ? points : best).map(([x, y]) => ({
            x, y, style: `solid ${series(state.run)}`, radius: 4.5, title: `epoch ${x}: ${number(y)}`}))}));
  });
  const best = history.best === null ? '' : ` The dot marks epoch ${history.best}, whose weights were kept.`;
  return section('training', 'Training', `${label}, ${counted(history.rows.length, 'epoch')}.${best}`,
                 element('div', {class: 'small-charts'}, charts));
}

function pairs(value, prefix = '') {
  if (value === null || typeof value !== 'object' || Array.isArray(value)) {
    const shown = typeof value === 'string' ? value : JSON.stringify(value);
    return [element('div', {}, element('dt', {}, prefix), element('dd', {}, shown))];
  }
  return Object.entries(value).flatMap(([name, inner]) => pairs(inner, prefix ? `${prefix}.${name}` : name));
}

function sources() {
  const run = data.runs[state.run];
  const {files, fingerprint} = data.manifest.source;
  return section('sources', 'Run, data and how to reproduce', null,
      [[`Config of the run ${run.label}`, run.config], [`Manifest of the data ${data.data}`, data.manifest]].map(
          ([title, content]) => element('details', {}, element('summary', {}, title),
                                        element('dl', {class: 'pairs'}, pairs(content)))),
      element('h3', {}, 'Commands'),
      element('p', {class: 'faint'}, `With tpu_graphs ${data.version}. RAW stands for the files that were converted: ` +
              `${counted(files, 'file')}, fingerprint ${fingerprint}.`),
      [data.commands.convert, run.command, data.commands.evaluate].map(text => element('pre', {tabindex: '0'}, text)));
}

function unmeasured() {
  const listed = state.view === 'listed' ? ' has listed configs with' : ' has';
  return section('numbers', 'Ranked, not judged', `None of the ${counted(result().modules, 'module')} of ` +
      `${split().name}${listed} runtimes. The rankings are in rankings.csv.`);
}

function render() {
  document.getElementById('subtitle').textContent = [
    data.runs.length === 1 ? `run ${data.runs[0].path}` : `${data.runs.length} runs`,
    `${split().name}: ${counted(split().modules.ids.length, 'module')}`,
    counted(split().modules.configs.reduce((sum, value) => sum + value, 0), 'config'),
    ...result().unmeasured ? [`ranked, not judged: ${counted(result().unmeasured, 'module')} without runtimes`] : [],
    ...state.view === 'listed' ? [`judged by the configs of ${data.listed.path}` + (result().repeated ?
        `, ${count(result().repeated)} of them repeated` : '')] : [],
  ].join(' · ');
  const side = (...nodes) => element('div', {class: 'pair'}, nodes.filter(node => node));
  const found = judged(state.run) ?
      [headline(), comparison(), side(curve(), bySize()), modules(), configs(), side(worst(), byProgram())] :
      [unmeasured(), modules()];
  document.getElementById('main').replaceChildren(...[...found, training(), sources()].filter(node => node));
}

function controls() {
  const choices = [
    ['split', 'Split', data.splits.map((one, i) => [i, one.name])],
    ['run', 'Details of', data.runs.map((one, i) => [i, one.label])],
    ['view', 'Configs', data.views.map(view => [view, view === 'all' ? 'all' : `listed in ${data.listed.path}`])],
    ['metric', 'Judge by', data.metrics.map(one => [one.name, one.label])],
  ];
  const real = choices.filter(choice => choice[2].length > 1);
  document.getElementById('controls').append(...real.map(([name, label, options]) => {
    const select = element('select', {id: `control-${name}`, change: () => {
      state[name] = options[select.selectedIndex][0];
      if (name !== 'metric') state.module = null;
      render();
    }}, options.map(([value, text]) => element('option', {value, selected: value === state[name] ? '' : null}, text)));
    return element('label', {for: `control-${name}`}, label, select);
  }));
}

controls();
render();
