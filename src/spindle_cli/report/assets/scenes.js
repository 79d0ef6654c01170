// What is drawn in the schedule: items, rows, waves and marks. See drawing.js for what an item is.

// The planned slices. rows: 'devices' | 'tasks' | 'components'
function plannedScene(rows, colouring) {
  const bands = { tasks: DATA.task_bands, components: DATA.component_bands }[rows];
  const first = { tasks: 'task_row', components: 'component_row' }[rows];
  const items = DATA.slices.flatMap((piece, index) => {
    const category = colouring.of(piece);
    const ops = `[${piece.ops[0]}:${piece.ops[1]}]`;
    const metaop = DATA.metaops[piece.metaop];
    const item = {
      x0: piece.start_s, x1: piece.end_s, kind: 'slice', piece, slice: index, metaop: piece.metaop, category,
      rows: first ? [[piece[first], piece[first] + piece.num_devices]] : piece.runs.map(([from, to]) => [from, to + 1]),
      colour: colouring.entries.get(category).colour,
      labels: [`${metaop.name}${ops}`, `${metaop.short}${ops}`, metaop.short, ops],
    };
    if (!piece.backward_s) return [item];
    const [x0, x1] = piece.backward_s;
    return [item, { ...item, x0, x1, labels: item.labels.map((label) => `‹${label}`) }];
  });
  const last = bands && bands[bands.length - 1];
  const bound = DATA.predicted.lower_bound_s;
  return {
    items, hasTraffic: false, nodeStarts: DATA.cluster.node_starts,
    bands: bands && bands.map((band) => ({ name: band.name, first: band.first_row, end: band.first_row + band.num_rows })),
    numRows: last ? last.first_row + last.num_rows : DATA.cluster.num_devices,
    end_s: Math.max(...items.map((item) => item.x1), bound),
    waves: waveStarts(),
    marks: bound > 0 ? [{ at_s: bound, label: `lower bound ${seconds(bound)}` }] : [],
  };
}

function waveStarts() {
  const starts = new Map();
  for (const piece of DATA.slices) {
    starts.set(piece.wave, Math.min(starts.get(piece.wave) ?? Infinity, piece.start_s));
  }
  return [...starts].sort((a, b) => a[1] - b[1]);
}

// What is left out of the data where it is this.
const DEFAULTS = { slice: null, source_slice: null, cause: null, is_gradient: false, num_bytes: 0, count: 1 };

// How what happens is drawn, where that is not by its own kind.
const DRAWN_AS = { gather: 'sum', data: 'wait' };

// What happens in an iteration, simulated or measured. colouring: null colours by what is done.
function happeningScene(timeline, colouring) {
  const items = timeline.happenings.map((given) => {
    const happening = { ...DEFAULTS, ...given };
    const computes = happening.kind === 'forward' || happening.kind === 'backward';
    const piece = computes ? DATA.slices[happening.slice] : null;
    const category = computes && colouring ? colouring.of(piece) : happening.kind;
    const metaop = piece && DATA.metaops[piece.metaop];
    const arrow = happening.kind === 'forward' ? '▸' : '◂';
    const ops = piece && `[${piece.ops[0]}:${piece.ops[1]}]`;
    return {
      x0: happening.start_s, x1: happening.end_s, kind: DRAWN_AS[happening.kind] || happening.kind, happening, category,
      slice: happening.slice, metaop: piece ? piece.metaop : null,
      rows: happening.runs.map(([from, to]) => [from, to + 1]),
      colour: piece && colouring ? colouring.entries.get(category).colour : ACTIVITIES[happening.kind] || null,
      labels: happening.kind === 'optimizer' ? ['optimizer', 'opt'] : piece && [`${arrow} ${metaop.name}${ops}`, `${arrow} ${metaop.short}${ops}`, `${arrow} ${metaop.short}`, arrow],
    };
  });
  const predicted_s = DATA.predicted.iteration_s * (timeline.batches || 1);
  return {
    items, hasTraffic: true, shadesBackward: colouring !== null, bands: null, nodeStarts: DATA.cluster.node_starts,
    numRows: DATA.cluster.num_devices, waves: [],
    end_s: Math.max(timeline.iteration_s, predicted_s),
    marks: [{ at_s: predicted_s, label: `${timeline.batches > 1 ? 'step' : 'iteration'} as the plan predicts it, ${seconds(predicted_s)}` }],
  };
}
