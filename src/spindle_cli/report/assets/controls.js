// The schedule's section: the picture with its buttons and its legend.

const CAPTIONS = {
  planned: 'Every slice from start to end, forward and backward together. The compute schedule alone: in it '
    + 'transfers and gradient sums take no time.',
  simulated: 'One iteration of every device’s program over the cluster’s links: forward, then backward, with '
    + 'transfers, gradient sums and waits. A second opinion, independent of the planner’s own prediction.',
  measured: DATA.run && DATA.run.timeline && `Step ${DATA.run.timeline.step} of the run, as measured: of the steps that it has kept, the `
    + `one of median length, ${seconds(DATA.run.timeline.iteration_s)}. A transfer lasts from when it is sent to when it is used. The `
    + `devices’ clocks agree to ${seconds(DATA.run.timeline.clock_error_s)}.`,
};

function scheduleSection() {
  const picture = new SchedulePicture();
  const state = { view: 'planned', rows: 'devices', colour: 'task', hidden: new Set() };
  const legend = el('div', { class: 'legend', role: 'group', 'aria-label': 'Legend: press to show one alone' });
  const caption = el('p', { class: 'caption' });
  const controls = scheduleControls(state, change);

  function change(keepView) {
    const isPlanned = state.view === 'planned';
    if (isPlanned && state.colour === 'activity') state.colour = 'task';
    if (!isPlanned) state.rows = 'devices';
    controls.set(state);
    const colouring = colourings[state.colour] || null;
    const timeline = state.view === 'measured' ? DATA.run.timeline : DATA.timeline;
    const scene = isPlanned ? plannedScene(state.rows, colouring) : happeningScene(timeline, colouring);
    scene.hidden = state.hidden;
    picture.category = null;
    caption.textContent = CAPTIONS[state.view];
    picture.show(scene, keepView);
    fillLegend(legend, picture, state, colouring);
  }

  change(false);
  return section('schedule', 'Schedule', caption,
    el('div', { class: 'toolbar' }, controls.groups, zoomButtons(picture.viewport)),
    legend, picture.canvas, picture.details, scheduleHelp());
}

// The choices of view, rows and colour. change(keepView) is called when one is made.
function scheduleControls(state, change) {
  const chooser = (label, key, options, keepView) => choice(label, options, state[key], (value) => {
    state[key] = value;
    change(keepView);
  });
  const views = [['planned', 'Planned'], DATA.timeline ? ['simulated', 'Simulated'] : null,
    DATA.run && DATA.run.timeline ? ['measured', 'Measured'] : null].filter(Boolean);
  const view = chooser('View', 'view', views, false);
  const rows = chooser('Rows', 'rows', [['devices', 'Devices'], ['tasks', 'Tasks'], ['components', 'Components']], false);
  const colour = chooser('Colour', 'colour', [
    ['task', 'Task'], ['component', 'Component'], ['width', 'Devices used'], ['activity', 'Activity']], true);
  return {
    groups: [views.length > 1 ? view : null, rows, colour],
    set(now) {
      rows.hidden = now.view !== 'planned';
      colour.querySelector('[data-value=activity]').hidden = now.view === 'planned';
      rows.set(now.rows);
      colour.set(now.colour);
    },
  };
}

function zoomButtons(viewport) {
  const button = (text, label, press) => el('button', { type: 'button', 'aria-label': label, title: label, onclick: press }, text);
  const name = (text) => el('span', { class: 'choice-label', 'aria-hidden': 'true' }, text);
  return el('div', { class: 'choice', role: 'group', 'aria-label': 'Zoom' },
    name('Time'),
    button('−', 'Zoom out in time', () => viewport.zoom(ZOOM_STEP, 1)),
    button('+', 'Zoom in in time', () => viewport.zoom(1 / ZOOM_STEP, 1)),
    name('Rows'),
    button('−', 'Zoom out in rows', () => viewport.zoom(1, ZOOM_STEP)),
    button('+', 'Zoom in in rows', () => viewport.zoom(1, 1 / ZOOM_STEP)),
    button('Fit', 'Show everything', () => viewport.fit()));
}

// A button for each category, to show it alone; where not only slices are drawn, also switches for what is not compute.
function fillLegend(legend, picture, state, colouring) {
  const activities = Object.entries(ACTIVITIES).map(([kind, colour]) => [kind, { colour, label: kind }]);
  const alone = (colouring ? [...colouring.entries] : activities).map(([category, { colour, label }]) =>
    el('button', {
      type: 'button', class: 'legend-entry', 'aria-pressed': String(picture.category === category),
      onclick: () => {
        picture.category = picture.category === category ? null : category;
        fillLegend(legend, picture, state, colouring);
        picture.redraw();
      },
    }, swatch(colour), label));
  if (state.view === 'planned') {
    legend.replaceChildren(...alone);
    return;
  }
  const switches = [['transfer', 'transfers'], ['sum', 'gradient sums'], ['wait', 'waits']].map(([kind, label]) => {
    const box = el('input', { type: 'checkbox', checked: !state.hidden.has(kind) });
    box.addEventListener('change', () => {
      if (box.checked) state.hidden.delete(kind);
      else state.hidden.add(kind);
      picture.redraw();
    });
    return el('label', { class: 'legend-entry' }, box, swatch(null, kind), label);
  });
  const optimizer = colouring
    ? [el('span', { class: 'legend-note' }, swatch(ACTIVITIES.optimizer), 'optimizer')] : [];
  const note = colouring ? [el('span', { class: 'legend-note' }, 'backward: darker')] : [];
  legend.replaceChildren(...alone, ...note, ...optimizer, ...switches);
}

function swatch(colour, kind) {
  const square = el('span', { class: `swatch ${kind || ''}`, 'aria-hidden': 'true' });
  if (colour) square.style.background = colour;
  return square;
}

function scheduleHelp() {
  const keys = [
    ['+', '−', 'time'], ['*', '/', 'rows'], ['arrows', 'move'], ['n', 'p', 'next and previous slice'], ['0', 'everything'],
  ];
  return el('p', { class: 'caption', id: 'schedule-keys' },
    'Wheel or pinch to zoom, Shift and wheel to zoom in rows, drag to move, double-click a slice to fill the picture with it. ',
    el('span', { class: 'for-keys' }, 'Keys: ', keys.map((group) =>
      [group.slice(0, -1).map((key) => [el('kbd', {}, key), ' ']), group[group.length - 1], '  '])));
}
