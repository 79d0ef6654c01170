// The schedule as planned, and as simulated: devices (or tasks, or components) x time.

const TOP_PX = 34; // above the picture: names of the dashed lines, then waves
const BOTTOM_PX = 26; // below it: the time

// The planned slices. rows: 'devices' | 'tasks' | 'components'
function plannedScene(rows, colouring) {
  const bands = { tasks: DATA.task_bands, components: DATA.component_bands }[rows];
  const first = { tasks: 'task_row', components: 'component_row' }[rows];
  const items = DATA.slices.map((piece, index) => {
    const category = colouring.of(piece);
    const ops = `[${piece.ops[0]}:${piece.ops[1]}]`;
    const metaop = DATA.metaops[piece.metaop];
    return {
      x0: piece.start_s, x1: piece.end_s, kind: 'slice', piece, slice: index, metaop: piece.metaop, category,
      rows: first ? [[piece[first], piece[first] + piece.num_devices]] : piece.runs.map(([from, to]) => [from, to + 1]),
      colour: colouring.entries.get(category).colour,
      labels: [`${metaop.name}${ops}`, `${metaop.short}${ops}`, metaop.short, ops],
    };
  });
  const last = bands && bands[bands.length - 1];
  return {
    items, hasTraffic: false, nodeStarts: DATA.cluster.node_starts, bands: bands && bands.map((band) =>
      ({ name: band.name, first: band.first_row, end: band.first_row + band.num_rows })),
    numRows: last ? last.first_row + last.num_rows : DATA.cluster.num_devices,
    end_s: Math.max(...DATA.slices.map((piece) => piece.end_s), DATA.predicted.lower_bound_s),
    waves: waveStarts(),
    marks: DATA.predicted.lower_bound_s > 0 ? [{ at_s: DATA.predicted.lower_bound_s, label: 'lower bound' }] : [],
  };
}

function waveStarts() {
  const starts = new Map();
  for (const piece of DATA.slices) {
    starts.set(piece.wave, Math.min(starts.get(piece.wave) ?? Infinity, piece.start_s));
  }
  return [...starts].sort((a, b) => a[1] - b[1]);
}

// What happens in the simulated iteration. colouring: null colours by what is done.
function simulatedScene(colouring) {
  const items = DATA.timeline.happenings.map((given) => {
    const happening = { slice: null, source_slice: null, cause: null, is_gradient: false, num_bytes: 0, count: 1, ...given };
    const computes = happening.kind === 'forward' || happening.kind === 'backward';
    const piece = computes ? DATA.slices[happening.slice] : null;
    const category = computes && colouring ? colouring.of(piece) : happening.kind;
    const metaop = piece && DATA.metaops[piece.metaop];
    const arrow = happening.kind === 'forward' ? '▸' : '◂';
    const ops = piece && `[${piece.ops[0]}:${piece.ops[1]}]`;
    return {
      x0: happening.start_s, x1: happening.end_s, kind: happening.kind, happening, category,
      slice: happening.slice, metaop: piece ? piece.metaop : null,
      rows: happening.runs.map(([from, to]) => [from, to + 1]),
      colour: computes ? (colouring ? colouring.entries.get(category).colour : ACTIVITIES[happening.kind]) : null,
      labels: piece && [`${arrow} ${metaop.name}${ops}`, `${arrow} ${metaop.short}${ops}`, `${arrow} ${metaop.short}`, arrow],
    };
  });
  return {
    items, hasTraffic: true, shadesBackward: colouring !== null, bands: null, nodeStarts: DATA.cluster.node_starts,
    numRows: DATA.cluster.num_devices, waves: [],
    end_s: Math.max(DATA.timeline.iteration_s, DATA.predicted.iteration_s),
    marks: [{ at_s: DATA.predicted.iteration_s, label: 'iteration as the plan predicts it' }],
  };
}

function scheduleSection() {
  const state = {
    view: 'planned', rows: 'devices', colour: 'task', hidden: new Set(), hovered: null, selected: null, category: null,
  };
  const canvas = el('canvas', {
    id: 'schedule-canvas', tabindex: 0, role: 'application', 'aria-describedby': 'schedule-keys',
    'aria-label': 'Schedule: devices from top to bottom, time from left to right',
  });
  const legend = el('div', { class: 'legend', role: 'group', 'aria-label': 'Legend: press to show one alone' });
  const details = el('div', { class: 'details', id: 'schedule-details', 'aria-live': 'polite' });
  const hint = 'Point at a slice, or tap it, to see what it is.';
  let scene = null;
  let area = null;
  let frame = 0;

  const viewport = new Viewport(() => {
    canvas.style.touchAction = viewport.isZoomedX || viewport.isZoomedY ? 'none' : 'pan-y';
    redraw();
  });

  function redraw() {
    if (!frame) frame = requestAnimationFrame(draw);
  }

  function draw() {
    frame = 0;
    const density = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (!width || !scene) return;
    if (canvas.width !== Math.round(width * density) || canvas.height !== Math.round(height * density)) {
      canvas.width = Math.round(width * density);
      canvas.height = Math.round(height * density);
    }
    const context = canvas.getContext('2d');
    context.setTransform(density, 0, 0, density, 0, 0);
    context.clearRect(0, 0, width, height);
    const left = scene.bands ? Math.min(130, width * 0.24) : 38;
    area = { left, top: TOP_PX, width: width - left - 8, height: height - TOP_PX - BOTTOM_PX };
    const { view } = viewport;
    paintAxes(context, scene, area, view);
    paintItems(context, scene, area, view, {
      isMuted: (item) => state.category !== null && item.category !== state.category,
      outlined: outlined(),
    });
    paintNodes(context, scene, area, view);
    paintMarks(context, scene, area, view);
    canvas.dataset.view = [view.x0, view.x1, view.y0, view.y1].join(' ');
    canvas.dataset.area = [area.left, area.top, area.width, area.height].join(' ');
  }

  // The hovered item's MetaOp thinly, the selected one strongly.
  function outlined() {
    const shown = [];
    const { hovered, selected } = state;
    if (hovered && hovered.metaop !== null) {
      for (const item of scene.items) if (item.metaop === hovered.metaop && item !== hovered) shown.push([item, cssColour('muted')]);
    }
    if (hovered) shown.push([hovered, cssColour('text')]);
    if (selected) shown.push([selected, cssColour('accent')]);
    return shown;
  }

  function rebuild(keepView) {
    const colouring = colourings[state.colour] || null;
    const before = { ...viewport.view };
    scene = state.view === 'planned' ? plannedScene(state.rows, colouring) : simulatedScene(colouring);
    scene.hidden = state.hidden;
    state.hovered = null;
    select(null);
    const most = innerWidth < 600 ? 380 : 520;
    canvas.style.height = `${Math.round(Math.max(Math.min(scene.numRows * 26, most), 130) + TOP_PX + BOTTOM_PX)}px`;
    viewport.setFull(scene.end_s, scene.numRows);
    if (keepView) Object.assign(viewport.view, before);
    drawLegend(colouring);
    redraw();
  }

  function drawLegend(colouring) {
    const entries = colouring ? [...colouring.entries] : [
      ['forward', { colour: ACTIVITIES.forward, label: 'forward' }], ['backward', { colour: ACTIVITIES.backward, label: 'backward' }]];
    const alone = entries.map(([category, { colour, label }]) => {
      const button = el('button', { type: 'button', 'aria-pressed': String(state.category === category), class: 'legend-entry' },
        swatch(colour), label);
      button.addEventListener('click', () => {
        state.category = state.category === category ? null : category;
        drawLegend(colouring);
        redraw();
      });
      return button;
    });
    const layers = state.view === 'planned' ? [] : [['transfer', 'transfers'], ['sum', 'gradient sums'], ['wait', 'waits']].map(([kind, label]) => {
      const box = el('input', { type: 'checkbox', checked: !state.hidden.has(kind) });
      box.addEventListener('change', () => {
        if (box.checked) state.hidden.delete(kind);
        else state.hidden.add(kind);
        redraw();
      });
      return el('label', { class: 'legend-entry' }, box, swatch(null, kind), label);
    });
    const shade = state.view === 'simulated' && colouring ? el('span', { class: 'legend-note' }, 'backward: darker') : null;
    legend.replaceChildren(...alone, ...(shade ? [shade] : []), ...layers);
  }

  function place(event) {
    const box = canvas.getBoundingClientRect();
    return {
      x: event.clientX - box.left, y: event.clientY - box.top, width: area.width, height: area.height,
      shareX: Math.min(Math.max((event.clientX - box.left - area.left) / area.width, 0), 1),
      shareY: Math.min(Math.max((event.clientY - box.top - area.top) / area.height, 0), 1),
    };
  }

  function at(event) {
    const { x, y } = place(event);
    return itemAt(scene, area, viewport.view, x, y);
  }

  function deviceAt(event) {
    if (scene.bands) return null;
    const { shareY } = place(event);
    const { y0, y1 } = viewport.view;
    return Math.min(Math.floor(y0 + shareY * (y1 - y0)), scene.numRows - 1);
  }

  function hover(event) {
    const found = at(event);
    canvas.classList.toggle('pointing', found !== null);
    if (found !== state.hovered) {
      state.hovered = found;
      redraw();
    }
    if (!found) {
      tooltip.hide();
      return;
    }
    const { title, facts } = itemFacts(found);
    const device = deviceAt(event);
    const isHere = device !== null && found.rows.some(([first, end]) => first <= device && device < end);
    tooltip.show(event.clientX, event.clientY, title, isHere ? [['Here', `device ${device}`], ...facts] : facts);
  }

  function leave() {
    tooltip.hide();
    if (state.hovered) {
      state.hovered = null;
      redraw();
    }
  }

  function select(item) {
    state.selected = item;
    if (item) {
      const { title, facts } = itemFacts(item);
      details.replaceChildren(el('strong', {}, title), factList(facts));
    } else details.replaceChildren(el('p', { class: 'muted' }, hint));
    redraw();
  }

  // Selects the next slice or compute in time and brings it into sight.
  function next(step) {
    const stops = scene.items.filter((item) => item.metaop !== null).sort((a, b) => a.x0 - b.x0 || a.rows[0][0] - b.rows[0][0]);
    const index = stops.indexOf(state.selected);
    const item = stops[index < 0 ? (step > 0 ? 0 : stops.length - 1) : (index + step + stops.length) % stops.length];
    select(item);
    const { view } = viewport;
    if (item.x1 < view.x0 || item.x0 > view.x1 || item.rows[0][0] >= view.y1 || item.rows[item.rows.length - 1][1] <= view.y0) open(item);
  }

  function open(item) {
    viewport.show(item.x0, item.x1, item.rows[0][0], item.rows[item.rows.length - 1][1]);
  }

  attachGestures(canvas, viewport, place, {
    hover, leave, next,
    select: (event) => {
      select(at(event));
      if (event.pointerType !== 'mouse') leave();
    },
    open: (event) => {
      const item = at(event);
      if (item) open(item);
      else viewport.fit();
    },
    clear: () => {
      leave();
      select(null);
    },
  });
  new ResizeObserver(redraw).observe(canvas);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);

  const rows = choice('Rows', [['devices', 'Devices'], ['tasks', 'Tasks'], ['components', 'Components']], 'devices', (value) => {
    state.rows = value;
    rebuild(false);
  });
  const colours = choice('Colour', [['task', 'Task'], ['component', 'Component'], ['width', 'Devices used'], ['activity', 'Activity']], 'task', (value) => {
    state.colour = value;
    state.category = null;
    rebuild(true);
  });
  const activity = colours.querySelector('[data-value=activity]');
  activity.hidden = true;
  const views = choice('View', [['planned', 'Planned'], ['simulated', 'Simulated']], 'planned', (value) => {
    state.view = value;
    state.category = null;
    rows.hidden = value === 'simulated';
    activity.hidden = value === 'planned';
    if (value === 'planned' && state.colour === 'activity') state.colour = 'task';
    if (value === 'simulated') {
      state.rows = 'devices';
      rows.set('devices');
    }
    colours.set(state.colour);
    caption.textContent = CAPTIONS[value];
    rebuild(false);
  });
  const zoomButton = (text, label, x, y) => el('button', { type: 'button', 'aria-label': label, title: label, onclick: () => viewport.zoom(x, y) }, text);
  const zoom = el('div', { class: 'choice', role: 'group', 'aria-label': 'Zoom' },
    el('span', { class: 'choice-label', 'aria-hidden': 'true' }, 'Time'),
    zoomButton('−', 'Zoom out in time', ZOOM_STEP, 1), zoomButton('+', 'Zoom in in time', 1 / ZOOM_STEP, 1),
    el('span', { class: 'choice-label', 'aria-hidden': 'true' }, 'Rows'),
    zoomButton('−', 'Zoom out in rows', 1, ZOOM_STEP), zoomButton('+', 'Zoom in in rows', 1, 1 / ZOOM_STEP),
    el('button', { type: 'button', 'aria-label': 'Show everything', title: 'Show everything', onclick: () => viewport.fit() }, 'Fit'));
  const caption = el('p', { class: 'caption' }, CAPTIONS.planned);
  rebuild(false);
  return section('schedule', 'Schedule', caption,
    el('div', { class: 'toolbar' }, DATA.timeline ? views : null, rows, colours, zoom), legend, canvas, details,
    el('p', { class: 'caption', id: 'schedule-keys' },
      'Wheel or pinch to zoom, Shift and wheel to zoom in rows, drag to move, double-click a slice to fill the picture with it. ',
      el('span', { class: 'for-keys' }, 'Keys: ', [['+', '−', 'time'], ['*', '/', 'rows'], ['arrows', 'move'], ['n', 'p', 'next and previous slice'], ['0', 'everything']].map((keys) =>
        [keys.slice(0, -1).map((key) => [el('kbd', {}, key), ' ']), keys[keys.length - 1], '  ']))));
}

const CAPTIONS = {
  planned: 'Every slice from start to end, forward and backward together. The compute schedule alone: in it transfers and gradient sums take no time.',
  simulated: 'One iteration of every device’s program over the cluster’s links: forward, then backward, with transfers, gradient sums and waits. A second opinion, independent of the planner’s own prediction.',
};

function swatch(colour, kind) {
  const square = el('span', { class: `swatch ${kind || ''}`, 'aria-hidden': 'true' });
  if (colour) square.style.background = colour;
  return square;
}
