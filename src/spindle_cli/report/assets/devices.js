// What each device holds, and what it spends the iteration with: stacked, neighbours that are alike as one.

// A drawing that is made anew when its width changes. draw(width) -> svg element
function responsive(draw) {
  const box = el('div', { class: 'chart' });
  let drawn = 0;
  new ResizeObserver(() => {
    const width = Math.floor(box.clientWidth);
    if (width === drawn || width < 50) return;
    drawn = width;
    box.replaceChildren(walkable(draw(width)));
  }).observe(box);
  return box;
}

// An empty chart: lines and labels of its levels.
function chartFrame(label, { width, height, left, right }, levels, toY, format) {
  return svg('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': label },
    levels.map((value) => [
      svg('line', { class: 'grid', x1: left, x2: width - right, y1: toY(value), y2: toY(value) }),
      svg('text', { class: 'tick', x: left - 6, y: toY(value) + 4, 'text-anchor': 'end' }, format(value)),
    ]));
}

const total = (bar) => bar.values.reduce((a, b) => a + b, 0);

// Limits far above the bars would flatten them: then the bars fill the picture without.
const isInPicture = (limit, bars) => limit.value <= 4 * Math.max(...bars.map(total));

// bars: [{run, values}], parts: [[name, colour], ...], limits: [{run, value}] drawn as a line over the bars
function stackedChart(label, bars, parts, format, limits = []) {
  const drawnLimits = limits.filter((limit) => isInPicture(limit, bars));
  const most = Math.max(...bars.map(total), ...drawnLimits.map((limit) => limit.value), 1e-12);
  const count = bars[bars.length - 1].run[1] + 1;
  return responsive((width) => {
    const [left, right, top, bottom, height] = [62, 8, 14, 28, 210];
    const toX = scale(0, count, left, width - right);
    const toY = scale(0, most * 1.04, height - bottom, top);
    const gap = (width - left - right) / count > 6 ? 1 : 0;
    const picture = chartFrame(label, { width, height, left, right }, valueTicks(most, format), toY, format);
    for (const value of doublingTicks(0, count - 1, width / 60)) {
      picture.append(svg('text', { class: 'tick', x: toX(value + 0.5), y: height - bottom + 16, 'text-anchor': 'middle' }, value));
    }
    for (const bar of bars) {
      const x = toX(bar.run[0]) + gap / 2;
      const wide = Math.max(toX(bar.run[1] + 1) - toX(bar.run[0]) - gap, 0.5);
      let below = 0;
      const group = svg('g', { class: 'bar' });
      bar.values.forEach((value, index) => {
        const [y, end] = [toY(below + value), toY(below)];
        group.append(svg('rect', { x, y, width: wide, height: Math.max(end - y, 0), fill: parts[index][1] }));
        below += value;
      });
      group.append(svg('rect', { x, y: top, width: wide, height: height - bottom - top, fill: 'transparent' }));
      const limit = limits.find((each) => each.run[0] <= bar.run[0] && bar.run[0] <= each.run[1]);
      picture.append(tell(group, capital(devicesText([bar.run])), [
        ...parts.map(([name], index) => [name, format(bar.values[index])]),
        ['Together', format(below)],
        ...(limit ? [['Of', `${format(limit.value)} (${percent(below / limit.value)})`]] : []),
      ]));
    }
    for (const limit of drawnLimits) {
      const y = toY(limit.value);
      picture.append(svg('line', { class: 'limit', x1: toX(limit.run[0]), x2: toX(limit.run[1] + 1), y1: y, y2: y }));
    }
    return picture;
  });
}

// Round in the unit that is shown: binary for bytes, decimal for seconds.
function valueTicks(most, format) {
  if (format !== bytes) return ticks(0, most, 5);
  const unit = [2 ** 30, 2 ** 20, 2 ** 10, 1].find((size) => most >= size) || 1;
  return ticks(0, most / unit, 4).map((value) => value * unit);
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function partsLegend(parts, more = []) {
  return el('div', { class: 'legend' }, parts.map(([name, colour]) => el('span', { class: 'legend-entry' }, swatch(colour), name)), more);
}

function memorySection() {
  const parts = [
    ['Parameters', CATEGORIES[0]], ['Gradients', CATEGORIES[1]], ['Optimizer state', CATEGORIES[5]],
    ['Activations', CATEGORIES[2]], ['Transfer buffers', CATEGORIES[6]],
    ['Allocator', CATEGORIES[3]], ['Reserve and communicators', CATEGORIES[4]],
  ];
  const bars = DATA.memory.map((use) => ({
    run: use.run,
    values: [
      use.parameter_bytes, use.gradient_bytes, use.optimizer_bytes, use.activation_bytes, use.buffer_bytes,
      use.allocator_bytes, use.outside_bytes,
    ],
  }));
  const limits = [];
  for (const use of DATA.memory) {
    const last = limits[limits.length - 1];
    if (last && last.value === use.capacity_bytes) last.run = [last.run[0], use.run[1]];
    else limits.push({ run: [...use.run], value: use.capacity_bytes });
  }
  const share = (index) => total(bars[index]) / DATA.memory[index].capacity_bytes;
  const fullest = bars.reduce((best, _, index) => (share(index) > share(best) ? index : best), 0);
  const caption = `Predicted peak of every device. Fullest: ${devicesText([bars[fullest].run])} with `
    + `${bytes(total(bars[fullest]))} of ${bytes(DATA.memory[fullest].capacity_bytes)} (${percent(share(fullest))}).`;
  const dashes = el('span', { class: 'swatch line limit', 'aria-hidden': 'true' });
  const above = limits.every((limit) => !isInPicture(limit, bars));
  const columns = [['Devices'], ...parts.map(([name]) => [name, true]), ['Together', true], ['Capacity', true]];
  const rows = bars.map((bar, index) => ({
    cells: [runsText([bar.run]), ...bar.values.map(bytes), bytes(total(bar)), bytes(DATA.memory[index].capacity_bytes)],
    class: share(index) > 1 ? 'bad' : null,
  }));
  return section('memory', 'Memory per device', el('p', { class: 'caption' }, caption),
    partsLegend(parts, el('span', { class: 'legend-entry' }, above ? 'capacity: far above' : [dashes, 'capacity'])),
    stackedChart('Memory per device', bars, parts, bytes, limits),
    el('details', {}, el('summary', {}, 'As a table'), table('Predicted peak bytes by device', columns, rows)));
}

function useSection() {
  const { timeline } = DATA;
  const parts = [['Computes', CATEGORIES[0]], ['Waits', CATEGORIES[1]], ['Done early', cssColour('wait')]];
  const bars = timeline.use.map((use) => ({ run: use.run, values: [use.compute_s, use.waiting_s, use.done_early_s] }));
  const all = timeline.iteration_s * DATA.cluster.num_devices;
  const waits = timeline.waits.map((wait) => [
    wait.waiter || 'optimizer step', `${CAUSES[wait.cause]} ${wait.source || ''}`,
    seconds(wait.device_s), percent(wait.device_s / all, 1), percent(wait.moving_share)]);
  return section('use', 'Use of the devices',
    el('p', { class: 'caption' }, `Of the simulated ${timeline.batches > 1 ? 'step' : 'iteration'} of ${seconds(timeline.iteration_s)} a device computes `
      + `${percent(timeline.mean_use)} in the mean. ${bytes(timeline.transferred_bytes)} are transferred.`),
    partsLegend(parts), stackedChart('Seconds of every device', bars, parts, seconds),
    waits.length ? table('Where devices wait, most first. Moving: the part in which what they wait for was on its way; '
      + 'a faster link would shorten it.', [
      ['Waits'], ['For'], ['Device time', true], ['Of all', true], ['Moving', true]], waits) : null);
}
