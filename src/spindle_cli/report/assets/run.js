// A run by the plan: its losses, its iteration times, and predicted against measured.

// lines: [{name, colour, values: [number | null]}] over `steps`
function lineChart(label, steps, lines, format, mark = null) {
  const values = lines.flatMap((line) => line.values).filter((value) => value !== null);
  const isLog = Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > 30;
  const low = isLog ? Math.min(...values) : Math.min(0, ...values);
  const high = Math.max(...values, mark ? mark.value : -Infinity, low + 1e-12);
  return responsive((width) => {
    const [left, right, top, bottom, height] = [58, 10, 10, 28, 220];
    const toX = scale(steps[0], steps[steps.length - 1], left, width - right);
    const toY = (isLog ? logScale : scale)(low, high * (isLog ? 1.1 : 1.05), height - bottom, top);
    const levels = isLog ? logTicks(low, high) : ticks(low, high, 5);
    const picture = chartFrame(label, { width, height, left, right }, levels, toY, format);
    for (const value of ticks(steps[0], steps[steps.length - 1], width / 80).filter(Number.isInteger)) {
      picture.append(svg('text', { class: 'tick', x: toX(value), y: height - bottom + 16, 'text-anchor': 'middle' }, value));
    }
    for (const line of lines) {
      const d = brokenPath(steps, line.values, toX, toY);
      picture.append(svg('path', { class: 'line', d, stroke: line.colour, 'stroke-width': line.wide ? 2.5 : 1.5 }));
    }
    if (mark) {
      picture.append(svg('line', { class: 'limit', x1: left, x2: width - right, y1: toY(mark.value), y2: toY(mark.value) }),
        svg('text', { class: 'tick strong', x: width - right, y: toY(mark.value) - 5, 'text-anchor': 'end' }, mark.label));
    }
    picture.append(...stepStrips(steps, lines, format, toX, top, height - bottom));
    return picture;
  });
}

// An unseen strip around each step, which says its values.
function stepStrips(steps, lines, format, toX, top, bottom) {
  return steps.map((step, index) => {
    const from = index ? (toX(steps[index - 1]) + toX(step)) / 2 : toX(step) - 4;
    const to = index < steps.length - 1 ? (toX(steps[index + 1]) + toX(step)) / 2 : toX(step) + 4;
    const strip = svg('g', { class: 'step' },
      svg('line', { x1: toX(step), x2: toX(step), y1: top, y2: bottom }),
      svg('rect', { x: from, y: top, width: to - from, height: bottom - top, fill: 'transparent' }));
    return tell(strip, `Step ${step}`, lines.map((line) =>
      [line.name, line.values[index] === null ? 'not finite' : format(line.values[index])]));
  });
}

// A line with gaps where a value is missing; a lone value is a dot.
function brokenPath(steps, values, toX, toY) {
  let path = '';
  values.forEach((value, index) => {
    if (value === null) return;
    const starts = index === 0 || values[index - 1] === null;
    path += `${starts ? 'M' : 'L'}${toX(steps[index]).toFixed(1)} ${toY(value).toFixed(1)}`;
    if (starts && (index === values.length - 1 || values[index + 1] === null)) path += 'h0.01';
  });
  return path;
}

function runSection() {
  const { run } = DATA;
  const parts = [];
  if (run.points.length) {
    const steps = run.points.map((point) => point.step);
    const tasks = [...new Set(run.points.flatMap((point) => Object.keys(point.task_losses)))];
    const task = colourings.task.entries;
    const lines = [{ name: 'total', colour: 'currentColor', wide: true, values: run.points.map((point) => point.loss) },
      ...tasks.map((name, index) => ({
        name, colour: (task.get(name) || { colour: CATEGORIES[index % CATEGORIES.length] }).colour,
        values: run.points.map((point) => point.task_losses[name] ?? null),
      }))];
    const broken = run.points.filter((point) => point.loss === null).length;
    const each = run.steps_per_point > 1 ? ` Each point is the mean of ${run.steps_per_point} steps.` : '';
    parts.push(el('h3', {}, 'Losses'), el('p', { class: 'caption' }, `Weighted total, and each task’s before weighting.${each}`,
      broken ? el('strong', { class: 'bad' }, ` The loss is not finite in ${plural(broken, 'point')}.`) : ''),
    partsLegend(lines.map((line) => [line.name, line.colour])), lineChart('Losses by step', steps, lines, digitsSigned),
    el('h3', {}, 'Iteration time'), lineChart('Seconds of each iteration', steps,
      [{ name: 'measured', colour: CATEGORIES[0], values: run.points.map((point) => point.iteration_s) }], seconds,
      { value: DATA.predicted.iteration_s, label: `predicted ${seconds(DATA.predicted.iteration_s)}` }));
  }
  if (run.iteration) parts.push(el('h3', {}, 'Predicted against measured'), comparisonTable(run));
  if (run.devices.length) {
    const kinds = [['Computes', CATEGORIES[0]], ['Optimizer', CATEGORIES[2]], ['Waits', CATEGORIES[1]], ['Waits for data', CATEGORIES[6]]];
    const bars = run.devices.map((use) => ({ run: [use.device, use.device], values: [use.compute_s, use.optimizer_s, use.wait_s, use.data_s] }));
    parts.push(el('h3', {}, 'Where the measured iteration goes'), partsLegend(kinds), stackedChart('Measured seconds of every device', bars, kinds, seconds));
  }
  if (!run.iteration) parts.push(el('p', { class: 'caption' }, 'The run has not ended: predicted against measured comes with its end.'));
  return section('run', 'The run', el('p', { class: 'caption' }, `${run.folder}: ${plural(run.num_steps, 'step')}.`), parts);
}

function digitsSigned(value) {
  return value < 0 ? `−${digits(-value)}` : digits(value);
}

function comparisonTable(run) {
  const error = (pair) => (pair.predicted_s > 0 ? pair.measured_s / pair.predicted_s - 1 : null);
  const every = [run.iteration, ...run.metaops];
  const most = Math.max(...every.map((pair) => Math.abs(error(pair) ?? 0)), 0.1);
  const rows = every.map((pair) => {
    const off = error(pair);
    const bar = el('span', { class: 'off', 'aria-hidden': 'true' });
    if (off !== null) {
      const mark = el('span', { class: off > 0 ? 'slower' : 'faster' });
      mark.style.width = `${Math.abs(off) / most * 50}%`;
      bar.append(mark);
    }
    return {
      class: pair === run.iteration ? 'this' : null,
      cells: [pair.name, seconds(pair.predicted_s), seconds(pair.measured_s), off === null ? '–' : signedPercent(off), bar],
    };
  });
  return table(`Medians over ${plural(run.measured_steps, 'step')}; a MetaOp is the sum over its slices of the slowest device of each`,
    [['Time'], ['Predicted', true], ['Measured', true], ['Off by', true], ['']], rows);
}
