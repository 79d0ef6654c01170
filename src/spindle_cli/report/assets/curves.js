// Scaling curves: seconds of one op against the number of devices, both logarithmic.

const MARKERS = {
  measured: (x, y) => svg('circle', { cx: x, cy: y, r: 3.6 }),
  composed: (x, y) => svg('rect', { x: x - 3.1, y: y - 3.1, width: 6.2, height: 6.2 }),
  fitted: (x, y) => svg('path', { d: `M${x} ${y - 4.2}l4 7h-8z` }),
  estimated: (x, y) => svg('path', { d: `M${x} ${y - 4.4}l4.4 4.4l-4.4 4.4l-4.4-4.4z` }),
};

const opSeconds = (point) => point.forward_s + point.backward_s;

// The fastest mix of dp and tp for each number of devices.
function bestPoints(curve) {
  const best = new Map();
  for (const point of curve) {
    const held = best.get(point.num_devices);
    if (opSeconds(point) > 0 && (!held || opSeconds(point) < opSeconds(held))) best.set(point.num_devices, point);
  }
  return [...best.values()];
}

// The fit as [[n, seconds], ...], its segments sampled evenly over log(n).
function fitLine(fit, first, last) {
  const line = [];
  for (const segment of fit.segments) {
    const from = Math.max(segment.from_n, first);
    const to = Math.min(segment.to_n, last);
    if (to < from) continue;
    for (let step = 0; step <= 12; step += 1) {
      const n = from * (to / from) ** (step / 12);
      line.push([n, segment.alpha_s + segment.beta_s + segment.gamma_s / n]);
    }
  }
  return line.filter(([, value]) => value > 0);
}

function curveChart(metaop, used) {
  const best = bestPoints(metaop.curve);
  const points = metaop.curve.filter((point) => opSeconds(point) > 0);
  const [first, last] = [best[0].num_devices, best[best.length - 1].num_devices];
  const line = metaop.fit ? fitLine(metaop.fit, first, last) : best.map((point) => [point.num_devices, opSeconds(point)]);
  const perfect = [[first, opSeconds(best[0])], [last, opSeconds(best[0]) * first / last]];
  const times = [...points.map(opSeconds), ...line.map(([, value]) => value)];
  const low = Math.min(...times, Math.max(perfect[1][1], Math.min(...times) / 3)) * 0.85;
  const high = Math.max(...times) * 1.2;
  return responsive((width) => {
    const [left, right, top, bottom, height] = [54, 10, 8, 24, 170];
    const toX = logScale(first * 0.9, last * 1.12, left, width - right);
    const toY = logScale(low, high, height - bottom, top);
    const place = ([n, value], index) => `${index ? 'L' : 'M'}${toX(n).toFixed(1)} ${toY(value).toFixed(1)}`;
    const path = (pairs) => pairs.filter(([, value]) => value >= low).map(place).join('');
    const picture = chartFrame(`Scaling curve of ${metaop.name}`, { width, height, left, right }, logTicks(low, high), toY, seconds);
    for (const value of powerTicks(first, last, (width - left) / 34)) {
      picture.append(svg('text', { class: 'tick', x: toX(value), y: height - bottom + 16, 'text-anchor': 'middle' }, value));
    }
    picture.append(svg('path', { class: 'ideal', d: clippedIdeal(perfect, low, path) }), svg('path', { class: 'fit', d: path(line) }));
    for (const point of points) {
      const [cx, cy] = [toX(point.num_devices), toY(opSeconds(point))];
      const mark = MARKERS[point.source](cx, cy);
      mark.setAttribute('class', `point ${point.source}${best.includes(point) ? '' : ' slower'}`);
      const ops = used.get(`${point.dp}x${point.tp}`);
      const group = svg('g', {}, ops ? svg('circle', { class: 'used', cx, cy, r: 7.5 }) : null,
        svg('circle', { cx, cy, r: 9, fill: 'transparent' }), mark);
      picture.append(tell(group, `${metaop.name} on ${plural(point.num_devices, 'device')}`, pointFacts(point, best[0], ops)));
    }
    return picture;
  });
}

// ops: how many of them the plan runs so.
function pointFacts(point, fewest, ops) {
  const total = opSeconds(point);
  const spread = point.spread === null ? '' : `, spread ${percent(point.spread, 1)}`;
  const repeats = point.repeats ? `, ${point.repeats} repeats` : '';
  return [
    ['Split', `dp ${point.dp}, tp ${point.tp}`],
    ['One op', `${seconds(total)}, forward ${seconds(point.forward_s)}`],
    ['Efficiency', percent(opSeconds(fewest) * fewest.num_devices / (total * point.num_devices))],
    ['Source', `${point.source}${spread}${repeats}`],
    ...(point.communication_s > 0 ? [['Of it', `${seconds(point.communication_s)} communication`]] : []),
    ...(ops ? [['Planned', plural(ops, 'op')]] : []),
  ];
}

// Perfect scaling as far down as the picture goes.
function clippedIdeal([[n0, t0], [n1, t1]], low, path) {
  return path([[n0, t0], t1 >= low ? [n1, t1] : [t0 * n0 / low, low]]);
}

function curvesSection() {
  const used = DATA.metaops.map(() => new Map());
  for (const piece of DATA.slices) {
    if (piece.part || piece.rows) continue; // their shares are no point's
    const key = `${piece.dp}x${piece.tp}`;
    used[piece.metaop].set(key, (used[piece.metaop].get(key) || 0) + piece.ops[1] - piece.ops[0]);
  }
  const drawn = [];
  const single = [];
  DATA.metaops.forEach((metaop, index) => {
    const best = bestPoints(metaop.curve);
    if (best.length > 1) drawn.push(curveCard(metaop, used[index]));
    else if (best.length) single.push(`${metaop.name} (${plural(best[0].num_devices, 'device')}, ${seconds(opSeconds(best[0]))} an op)`);
  });
  const sources = [...new Set(DATA.metaops.flatMap((metaop) => metaop.curve.map((point) => point.source)))];
  const sign = (name) => svg('svg', { width: 14, height: 14, 'aria-hidden': 'true' }, fill(MARKERS[name](7, 7), { class: `point ${name}` }, []));
  const stroke = (name) => svg('svg', { width: 20, height: 14, 'aria-hidden': 'true' }, svg('path', { class: name, d: 'M1 7H19' }));
  const hasFit = DATA.metaops.some((metaop) => metaop.fit);
  const entry = (picture, text) => el('span', { class: 'legend-entry' }, picture, text);
  return section('curves', 'Scaling curves',
    el('p', { class: 'caption' }, 'Seconds of one op, forward and backward over its whole batch, against the number of devices. ',
      DATA.has_profile ? '' : 'Only the points that the plan uses: give --profile for whole curves.'),
    el('div', { class: 'legend' }, sources.map((name) => entry(sign(name), name)),
      entry(stroke('fit'), hasFit ? 'fit, or through the points' : 'through the points'), entry(stroke('ideal'), 'perfect scaling'),
      entry(svg('svg', { width: 18, height: 18, 'aria-hidden': 'true' }, svg('circle', { class: 'used', cx: 9, cy: 9, r: 7 })), 'in the plan')),
    el('div', { class: 'cards' }, drawn),
    single.length ? el('p', { class: 'caption' }, `With one point only: ${single.join('; ')}.`) : null);
}

function curveCard(metaop, used) {
  const error = metaop.fit && metaop.fit.leave_one_out_error;
  const parts = [plural(metaop.num_ops, 'op'), `batch ${metaop.batch_size}`,
    error === null || error === undefined ? null : `fit within ${percent(error, 1)} of a point left out`];
  return el('figure', { class: 'card' },
    el('figcaption', {}, el('strong', {}, metaop.name), el('span', { class: 'muted' }, parts.filter(Boolean).join(' · '))),
    curveChart(metaop, used));
}
