// What the whole cluster computes over time, and what each device holds at least and at most: this plan's and sequential's.

// Operations done between two times, by a plan's [seconds, FLOP/s from then on].
function doneBetween(steps, from, to) {
  return steps.reduce((sum, [start, rate], index) => {
    const end = index + 1 < steps.length ? steps[index + 1][0] : Infinity;
    const both = Math.min(end, to) - Math.max(start, from);
    return both > 0 ? sum + rate * both : sum;
  }, 0);
}

// The outline of what changes in steps, down to nothing in the end.
function stairs(steps, end, toX, toY) {
  const drawn = steps.map(([start, rate]) => `H${toX(start).toFixed(1)}V${toY(rate).toFixed(1)}`);
  return `M${toX(0).toFixed(1)} ${toY(0).toFixed(1)}${drawn.join('')}H${toX(end).toFixed(1)}V${toY(0).toFixed(1)}`;
}

function workChart(works, colourOf) {
  const end = Math.max(...works.map((work) => work.step_s), 1e-12);
  const most = Math.max(...works.flatMap((work) => extent(work.flops_per_s.map(([, rate]) => rate))), 1e-12);
  return responsive((width) => {
    const [left, right, top, bottom, height] = [84, 10, 10, 28, 220];
    const toX = scale(0, end, left, width - right);
    const toY = scale(0, most * 1.05, height - bottom, top);
    const picture = chartFrame('FLOP/s of the whole cluster over time', { width, height, left, right }, ticks(0, most, 5), toY, flops);
    for (const value of ticks(0, end, width / 110)) {
      picture.append(svg('text', { class: 'tick', x: toX(value), y: height - bottom + 16, 'text-anchor': 'middle' }, seconds(value)));
    }
    for (const work of works) {
      picture.append(svg('path', { class: 'line', d: stairs(work.flops_per_s, work.step_s, toX, toY), stroke: colourOf(work) }));
    }
    const count = 40;
    for (let index = 0; index < count; index += 1) {
      const [from, to] = [end * index / count, end * (index + 1) / count];
      const strip = svg('g', { class: 'step' }, svg('rect', {
        x: toX(from), y: top, width: toX(to) - toX(from), height: height - bottom - top, fill: 'transparent' }));
      picture.append(tell(strip, `${seconds(from)} to ${seconds(to)}, in the mean`,
        works.map((work) => [work.strategy, flops(doneBetween(work.flops_per_s, from, to) / (to - from))])));
    }
    return picture;
  });
}

function heldChart(works, colourOf) {
  const count = DATA.cluster.num_devices;
  const most = Math.max(...works.flatMap((work) => work.memory.map((held) => held.most_bytes)), 1);
  return responsive((width) => {
    const [left, right, top, bottom, height] = [62, 8, 14, 28, 180];
    const toX = scale(0, count, left, width - right);
    const toY = scale(0, most * 1.04, height - bottom, top);
    const picture = chartFrame('Least and most memory of each device', { width, height, left, right }, valueTicks(most, bytes), toY, bytes);
    for (const value of doublingTicks(0, count - 1, width / 60)) {
      picture.append(svg('text', { class: 'tick', x: toX(value + 0.5), y: height - bottom + 16, 'text-anchor': 'middle' }, value));
    }
    for (const work of works) {
      for (const held of work.memory) {
        const [x, end] = [toX(held.run[0]), toX(held.run[1] + 1)];
        const [y, low] = [toY(held.most_bytes), toY(held.least_bytes)];
        picture.append(svg('rect', {
          class: 'held', x, y, width: Math.max(end - x, 0.5), height: Math.max(low - y, 1), fill: colourOf(work), stroke: colourOf(work) }));
      }
    }
    const starts = [...new Set(works.flatMap((work) => work.memory.map((held) => held.run[0])))].sort((a, b) => a - b);
    starts.forEach((first, index) => {
      const last = (index + 1 < starts.length ? starts[index + 1] : count) - 1;
      const strip = svg('g', { class: 'bar' }, svg('rect', {
        x: toX(first), y: top, width: toX(last + 1) - toX(first), height: height - bottom - top, fill: 'transparent' }));
      picture.append(tell(strip, capital(devicesText([[first, last]])), works.map((work) => {
        const held = work.memory.find((each) => each.run[0] <= first && first <= each.run[1]);
        return [work.strategy, `${bytes(held.least_bytes)} to ${bytes(held.most_bytes)}`];
      })));
    });
    return picture;
  });
}

// What is missing, and why.
function workMissing() {
  const [own, beside] = DATA.work;
  const lines = [];
  if (own.flops_per_s === null) {
    lines.push('FLOP/s are not shown: the profile has not counted the operations of every MetaOp (flops_per_op).');
  }
  if (!beside && own.strategy !== 'sequential') {
    const failed = (DATA.strategies || []).find((each) => each.strategy === 'sequential' && !each.predicted);
    lines.push(failed ? `sequential is not shown beside it: it has no plan: ${failed.failure}`
      : 'sequential is not shown beside it: give the profile (--profile) to plan it.');
  }
  return lines.map((line) => el('p', { class: 'caption missing' }, line));
}

function workSection() {
  const works = DATA.work;
  const colourOf = (work) => CATEGORIES[works.indexOf(work)];
  const counted = works.filter((work) => work.flops_per_s !== null);
  const least = (work) => Math.min(...work.memory.map((held) => held.least_bytes));
  const most = (work, pick) => pick(...work.memory.map((held) => held.most_bytes));
  const rows = works.map((work) => ({
    class: work.is_this ? 'this' : null,
    cells: [work.strategy, seconds(work.step_s), work.mean_flops_per_s === null ? '–' : flops(work.mean_flops_per_s),
      work.peak_share === null ? '–' : percent(work.peak_share, 1), bytes(least(work)), bytes(most(work, Math.min)), bytes(most(work, Math.max))],
  }));
  return section('work', 'FLOP/s and memory of the cluster',
    el('p', { class: 'caption' }, 'Of the simulated step: floating-point operations of all devices together, forward and backward, without what is '
      + 'computed again; and what each device holds at least and at most.'),
    workMissing(), partsLegend(works.map((work) => [work.strategy, colourOf(work)])),
    counted.length ? workChart(counted, colourOf) : null, heldChart(works, colourOf),
    table('Mean over the step, and its share of the devices’ published peak; the least that any device holds, and the most of the device '
      + 'that holds least and of that which holds most.', [
      ['Strategy'], ['Step', true], ['FLOP/s', true], ['Of the peak', true], ['Least memory', true], ['Most, least device', true], ['Most, fullest device', true]], rows));
}
