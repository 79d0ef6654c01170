// A run by the plan: its losses, its iteration times, and predicted against measured.

// lines: [{name, colour, values: [number | null | undefined], ranges?: [[least, most] | undefined]}] over `steps`;
// null is not finite and breaks the line, undefined was not there. mark: {value, label, atMost?}, drawn as a
// dashed line; one with atMost only if that many times the most is not below it.
function lineChart(label, steps, lines, format, mark = null) {
  const values = lines.flatMap((line) => [...line.values, ...(line.ranges || []).flatMap((range) => range || [])])
    .filter((value) => value !== null && value !== undefined);
  if (!values.length) values.push(0);
  const [least, most] = extent(values);
  const drawn = mark && !(mark.atMost && mark.value > mark.atMost * most) ? mark : null;
  const isLog = least > 0 && most / least > 30;
  const low = isLog ? least : Math.min(0, least);
  const high = Math.max(most, drawn ? drawn.value : -Infinity, low + 1e-12);
  return responsive((width) => {
    const [left, right, top, bottom, height] = [58, 10, 10, 28, 220];
    const toX = scale(steps[0], steps[steps.length - 1], left, width - right);
    const toY = (isLog ? logScale : scale)(low, high * (isLog ? 1.1 : 1.05), height - bottom, top);
    const levels = isLog ? logTicks(low, high) : ticks(low, high, 5);
    const picture = chartFrame(label, { width, height, left, right }, levels, toY, format);
    picture.dataset.scale = isLog ? 'log' : 'linear';
    for (const value of ticks(steps[0], steps[steps.length - 1], width / 80).filter(Number.isInteger)) {
      picture.append(svg('text', { class: 'tick', x: toX(value), y: height - bottom + 16, 'text-anchor': 'middle' }, value));
    }
    for (const line of lines) {
      if (line.ranges) picture.append(svg('path', { class: 'range', d: rangePath(steps, line.ranges, toX, toY), stroke: line.colour }));
    }
    for (const line of lines) {
      const d = brokenPath(steps, line.values, toX, toY);
      picture.append(svg('path', { class: 'line', d, stroke: line.colour, 'stroke-width': line.wide ? 2.5 : 1.5 }));
    }
    if (drawn) {
      picture.append(svg('line', { class: 'limit', x1: left, x2: width - right, y1: toY(drawn.value), y2: toY(drawn.value) }),
        svg('text', { class: 'tick strong', x: width - right, y: toY(drawn.value) - 5, 'text-anchor': 'end' }, drawn.label));
    }
    picture.append(...stepStrips(steps, lines, format, toX, top, height - bottom));
    return picture;
  });
}

// The least and the most; of more values than a function takes arguments.
function extent(values) {
  return values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
}

// An unseen strip around each step, which says its values.
function stepStrips(steps, lines, format, toX, top, bottom) {
  return steps.map((step, index) => {
    const from = index ? (toX(steps[index - 1]) + toX(step)) / 2 : toX(step) - 4;
    const to = index < steps.length - 1 ? (toX(steps[index + 1]) + toX(step)) / 2 : toX(step) + 4;
    const strip = svg('g', { class: 'step' },
      svg('line', { x1: toX(step), x2: toX(step), y1: top, y2: bottom }),
      svg('rect', { x: from, y: top, width: to - from, height: bottom - top, fill: 'transparent' }));
    const there = lines.filter((line) => line.values[index] !== undefined);
    return tell(strip, `Step ${step}`, there.map((line) => [line.name, stepText(line, index, format)]));
  });
}

function stepText(line, index, format) {
  const value = line.values[index] === null ? 'not finite' : format(line.values[index]);
  const range = line.ranges && line.ranges[index];
  return range ? `${value} (${format(range[0])} to ${format(range[1])})` : value;
}

// From the least to the most of each point, upright: a spike of one step is as high as it was.
function rangePath(steps, ranges, toX, toY) {
  return ranges.map((range, index) => (range
    ? `M${toX(steps[index]).toFixed(1)} ${toY(range[0]).toFixed(1)}V${toY(range[1]).toFixed(1)}` : '')).join('');
}

// A line with gaps where a value is not finite; a lone value is a dot.
function brokenPath(steps, values, toX, toY) {
  let path = '';
  const there = values.map((value, index) => [value, index]).filter(([value]) => value !== undefined);
  there.forEach(([value, index], place) => {
    if (value === null) return;
    const starts = place === 0 || there[place - 1][0] === null;
    path += `${starts ? 'M' : 'L'}${toX(steps[index]).toFixed(1)} ${toY(value).toFixed(1)}`;
    if (starts && (place === there.length - 1 || there[place + 1][0] === null)) path += 'h0.01';
  });
  return path;
}

function taskColours(tasks) {
  const known = colourings.task.entries;
  return (name) => (known.get(name) || { colour: CATEGORIES[Math.max(tasks.indexOf(name), 0) % CATEGORIES.length] }).colour;
}

function lossesPart(run, colourOf) {
  const { points } = run;
  const lines = [{
    name: 'total', colour: 'currentColor', wide: true, values: points.map((point) => point.loss), ranges: points.map((point) => point.loss_range),
  }, ...run.tasks.map((name) => ({
    name, colour: colourOf(name), values: points.map((point) => point.task_losses[name]),
    ranges: points.map((point) => (point.task_loss_ranges || {})[name]),
  }))];
  const broken = points.filter((point) => point.loss === null).length;
  const each = run.steps_per_point > 1
    ? ` Each point is the mean of ${run.steps_per_point} steps, the stroke through it goes from their least to their most.` : '';
  return [el('h3', {}, 'Losses'), el('p', { class: 'caption' }, `Weighted total, and each task’s before weighting.${each}`,
    broken ? el('strong', { class: 'bad' }, ` The loss is not finite in ${plural(broken, 'point')}.`) : ''),
  partsLegend(lines.map((line) => [line.name, line.colour])), lineChart('Losses by step', points.map((point) => point.step), lines, digitsSigned)];
}

// One chart of something that some points have: {title, label, lines: [[name, key, rangeKey?]], format, mark, caption}
function measuredPart(run, { title, label, lines, format, mark = null, caption = null }) {
  const points = run.points.filter((point) => lines.some(([, key]) => point[key] !== undefined));
  if (!points.length) return null;
  const drawn = lines.map(([name, key, rangeKey], index) => ({
    name, colour: CATEGORIES[index], values: points.map((point) => point[key]), ranges: rangeKey && points.map((point) => point[rangeKey]),
  }));
  return [el('h3', {}, title), caption ? el('p', { class: 'caption' }, caption) : null,
    lines.length > 1 ? partsLegend(drawn.map((line) => [line.name, line.colour])) : null,
    lineChart(label, points.map((point) => point.step), drawn, format, mark)];
}

function measuredParts(run) {
  const predicted = run.predicted_s;
  const memory = DATA.watch ? DATA.watch.memory_bytes : DATA.cluster && DATA.cluster.memory_bytes;
  return [
    measuredPart(run, {
      title: 'Iteration time', label: 'Seconds of each iteration', format: seconds, lines: [['measured', 'iteration_s', 'iteration_range_s']],
      mark: predicted ? { value: predicted, label: `predicted ${seconds(predicted)}` } : null,
    }),
    measuredPart(run, {
      title: 'Floating-point operations', label: 'Operations per second of a device', format: flops, lines: [['each device', 'flops_per_s']],
      caption: 'Of a device in the mean: three times the forward operations that the profile has counted, over the iteration’s time.',
    }),
    measuredPart(run, {
      title: 'Share of the peak', label: 'Share of the devices’ peak', format: (value) => percent(value, 1), lines: [['share of the peak', 'peak_share']],
      caption: 'The same over the devices’ published peak (MFU).',
    }),
    measuredPart(run, {
      title: 'Memory', label: 'Highest memory of a device', format: bytes,
      lines: [['the device with least', 'least_memory_bytes'], ['the device with most', 'most_memory_bytes']],
      mark: memory ? { value: memory, label: `a device has ${bytes(memory)}`, atMost: 4 } : null,
      caption: 'The highest that any device has taken so far, and of all devices the one that has taken least; on a CPU of the whole process.',
    }),
    measuredPart(run, {
      title: 'Waiting for data', label: 'Seconds waited for data in each iteration', format: seconds,
      lines: [['waited', 'data_wait_s'], ...(run.steps_per_point > 1 ? [['longest', 'data_wait_most_s']] : [])],
      caption: 'Of the device that waited longest for its data.',
    }),
  ];
}

function attemptsPart(run) {
  if (run.attempts.length < 2) return null;
  const rows = run.attempts.slice(-50).map((attempt) => [
    new Date(attempt.time_s * 1000).toLocaleString('en-GB'), attempt.step, attempt.cause || (attempt === run.attempts[0] ? '' : 'launched again')]);
  return el('div', { id: 'attempts' }, el('h3', {}, 'Starts'),
    table(`The workers were started ${run.attempts.length} times`, [['At'], ['After step', true], ['Because']], rows));
}

function runSection() {
  return section('run', 'The run', runParts(DATA.run));
}

// What is in the section of a run, anew.
function runParts(run) {
  const parts = [];
  const colourOf = taskColours(run.tasks);
  if (run.points.length) parts.push(lossesPart(run, colourOf), measuredParts(run));
  parts.push(evaluationsPart(run, colourOf), attemptsPart(run));
  if (run.iteration) parts.push(el('h3', {}, 'Predicted against measured'), comparisonTable(run));
  if (run.devices.length) {
    const kinds = [['Computes', CATEGORIES[0]], ['Optimizer', CATEGORIES[2]], ['Waits', CATEGORIES[1]], ['Waits for data', CATEGORIES[6]]];
    const bars = run.devices.map((use) => ({ run: [use.device, use.device], values: [use.compute_s, use.optimizer_s, use.wait_s, use.data_s] }));
    parts.push(el('h3', {}, 'Where the measured iteration goes'), partsLegend(kinds), stackedChart('Measured seconds of every device', bars, kinds, seconds));
  }
  if (!run.iteration) parts.push(el('p', { class: 'caption' }, 'The run has not ended: predicted against measured comes with its end.'));
  return [el('p', { class: 'caption' }, `${run.folder}: ${plural(run.num_steps, 'step')}.`), parts];
}

function digitsSigned(value) {
  return value < 0 ? `−${digits(-value)}` : digits(value);
}

function comparisonTable(run) {
  const error = (pair) => (pair.predicted_s > 0 ? pair.measured_s / pair.predicted_s - 1 : null);
  const every = [run.iteration, ...run.task_sets, ...run.metaops];
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
      cells: [pair.steps ? `${pair.name} (${plural(pair.steps, 'step')})` : pair.name, seconds(pair.predicted_s), seconds(pair.measured_s), off === null ? '–' : signedPercent(off), bar],
    };
  });
  const caption = run.task_sets.length
    ? `Means over ${plural(run.measured_steps, 'step')}; of each set of tasks the median of its steps, without its first`
    : `Medians over ${plural(run.measured_steps, 'step')}; a MetaOp is the sum over its slices of the slowest device of each`;
  return table(caption,
    [['Time'], ['Predicted', true], ['Measured', true], ['Off by', true], ['']], rows);
}
