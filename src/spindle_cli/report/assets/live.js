// The live page: what the run says now, asked for again and again.

const POLL_MS = 2000;
const READING_MS = 50; // while a long run is still being read
const RESTING_MS = 10000; // once it has ended
const STATES = {
  'not begun': 'has not begun', starting: 'is starting', running: 'is running', ended: 'has ended', failed: 'has failed',
  stopped: 'was stopped', lost: 'is gone: its launcher has ended without a word', gone: 'has no folder any more: it was deleted',
};
const OVER = ['ended', 'failed', 'stopped', 'lost', 'gone'];

function liveHead(watch, run) {
  const newest = run.points[run.points.length - 1];
  const known = (value, text) => (value === null || value === undefined ? null : text(value));
  const against = watch.step_s && run.predicted_s ? `${signedPercent(watch.step_s / run.predicted_s - 1)} against predicted ${seconds(run.predicted_s)}` : null;
  const step = run.last_step || 0;
  const share = watch.total_steps ? step / watch.total_steps : null;
  const bar = share === null ? null
    : el('progress', { max: 1, value: share, 'aria-label': 'Steps done' });
  const wait = newest && newest.data_wait_s !== undefined ? newest.data_wait_s : null;
  return [
    el('h1', {}, watch.workload || run.folder),
    el('p', { class: 'lead' }, 'The run in ', el('strong', {}, run.folder), ' ', el('strong', { id: 'state', 'data-state': watch.state }, STATES[watch.state]),
      watch.strategy ? `, by the plan of ${watch.strategy} for ${plural(watch.num_devices, 'device')}` : '', '.'),
    watch.read_share < 1 ? el('p', { class: 'caption', id: 'reading' }, `Reading its metrics: ${percent(watch.read_share)}.`) : null,
    bar,
    el('dl', { class: 'figures' },
      figure('Step', step.toLocaleString('en-GB'), known(watch.total_steps, (total) => `of ${total.toLocaleString('en-GB')}`)),
      watch.left_s === null ? null : figure('Time left', seconds(watch.left_s), 'with the evaluations to come'),
      newest ? figure('Loss', newest.loss === null ? 'not finite' : digitsSigned(newest.loss), run.steps_per_point > 1 ? `mean of the newest point` : 'of the newest step') : null,
      watch.step_s ? figure('Iteration', seconds(watch.step_s), against) : null,
      newest && newest.flops_per_s !== undefined ? figure('Each device', flops(newest.flops_per_s),
        newest.peak_share === undefined ? null : `${percent(newest.peak_share, 1)} of its peak`) : null,
      newest && newest.most_memory_bytes !== undefined ? figure('Memory', bytes(newest.most_memory_bytes), `least ${bytes(newest.least_memory_bytes)}`) : null,
      wait === null ? null : figure('Waits for data', percent(newest.iteration_s > 0 ? wait / newest.iteration_s : 0, 1), 'of an iteration'),
      run.attempts.length > 1 ? figure('Starts', String(run.attempts.length), `newest after step ${run.attempts[run.attempts.length - 1].step}`) : null,
      watch.last_s === null ? null : figure('Newest step', `${seconds(Math.max(Math.round(watch.now_s - watch.last_s), 0))} ago`, null)),
  ].filter(Boolean);
}

// What is wrong: put into the page only when it is another, so that it is read out once.
function notices(watch) {
  return [
    watch.message ? el('div', { class: 'banner', role: 'alert' }, el('pre', {}, watch.message)) : null,
    watch.problems.length ? el('div', { class: 'banner' }, el('ul', {}, watch.problems.map((text) => el('li', {}, text)))) : null,
  ].filter(Boolean);
}

// The same place in the page stays where it is, and the chart that has the focus keeps it.
function showRun(place, run) {
  const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute('aria-label') : null;
  place.style.minHeight = `${place.offsetHeight}px`;
  place.replaceChildren(place.querySelector('h2'), ...runParts(run).flat(Infinity).filter(Boolean));
  requestAnimationFrame(() => requestAnimationFrame(() => {
    place.style.minHeight = '';
    if (focused) [...place.querySelectorAll('[tabindex]')].find((each) => each.getAttribute('aria-label') === focused)?.focus({ preventScroll: true });
  }));
}

function buildLive() {
  const header = document.getElementById('header');
  const trouble = el('div', { class: 'banner', id: 'trouble', role: 'alert', hidden: true });
  const loaded = DATA.watch.page;
  const run = runSection();
  const sections = [run, DATA.predicted ? scheduleSection() : null, DATA.predicted ? memorySection() : null].filter(Boolean);
  const noted = el('div', { id: 'notices' });
  let shown = null;
  let notedNow = null;

  function note(watch) {
    const text = JSON.stringify([watch.message, watch.problems]);
    if (text !== notedNow) noted.replaceChildren(...notices(watch));
    notedNow = text;
  }

  function show(watch) {
    header.replaceChildren(...liveHead(watch, watch.run));
    note(watch);
    document.title = `${watch.total_steps && watch.run.last_step ? `${percent(watch.run.last_step / watch.total_steps)} ` : ''}${watch.workload || watch.run.folder}`;
    const text = JSON.stringify([watch.run, watch.memory_bytes]);
    if (text === shown) return;
    shown = text;
    DATA.watch = watch;
    showRun(run, watch.run);
  }

  async function poll() {
    let wait = POLL_MS;
    if (!document.hidden) {
      try {
        const answer = await fetch('data.json', { cache: 'no-store' });
        if (!answer.ok) throw new Error(`answer ${answer.status}`);
        const watch = await answer.json();
        trouble.hidden = true;
        if (watch.page !== loaded) {
          location.reload();
          return;
        }
        show(watch);
        if (watch.read_share < 1) wait = READING_MS;
        else if (OVER.includes(watch.state)) wait = RESTING_MS;
      } catch (error) {
        trouble.textContent = `This page is not up to date: spindle watch does not answer (${error.message}).`;
        trouble.hidden = false;
      }
    }
    setTimeout(poll, wait);
  }

  header.append(...liveHead(DATA.watch, DATA.run));
  header.before(trouble);
  header.after(noted);
  note(DATA.watch);
  document.getElementById('main').append(...sections);
  document.getElementById('nav').append(...sections.map((each) => el('a', { href: `#${each.id}` }, each.querySelector('h2').textContent)));
  document.body.append(el('footer', {}, DATA.plan_sha256 ? `Plan ${DATA.plan_sha256}` : 'The plan of this run is not known.'), tooltip.box);
  document.querySelector('.skip').setAttribute('href', '#run');
  addEventListener('scroll', () => tooltip.hide(), { passive: true });
  document.addEventListener('visibilitychange', () => tooltip.hide());
  setTimeout(poll, POLL_MS);
}

buildLive();
