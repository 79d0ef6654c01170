// The page, from top to bottom.

function headerParts() {
  const { predicted, cluster } = DATA;
  const ofIteration = (value, word) =>
    (predicted.iteration_s > 0 ? `${percent(value / predicted.iteration_s, 1)} ${word}` : null);
  const peak = Math.max(...predicted.peak_memory_bytes);
  const nodes = cluster.node_starts.length;
  return [
    el('h1', {}, DATA.workload),
    el('p', { class: 'lead' }, 'Strategy ', el('strong', {}, DATA.strategy),
      ` on ${cluster.name}: ${plural(cluster.num_devices, 'device')} (${cluster.device}) in ${plural(nodes, 'node')}. `,
      `${plural(DATA.metaops.length, 'MetaOp')} in ${plural(DATA.slices.length, 'slice')} and ${plural(DATA.num_waves, 'wave')}.`),
    el('dl', { class: 'figures' },
      figure('Iteration', seconds(predicted.iteration_s), DATA.timeline ? `simulated ${seconds(DATA.timeline.iteration_s / DATA.timeline.batches)}` : 'predicted'),
      figure('Compute', seconds(predicted.compute_s), ofIteration(predicted.compute_s, 'of it')),
      figure('Lower bound', seconds(predicted.lower_bound_s), 'no schedule is shorter'),
      DATA.gap === null ? null : figure('Gap', percent(DATA.gap, 1), 'compute above the bound'),
      figure('Transfers', seconds(predicted.transfer_s), ofIteration(predicted.transfer_s, 'added')),
      predicted.processor_s ? figure('Processor', seconds(predicted.processor_s), ofIteration(predicted.processor_s, 'added')) : null,
      figure('Gradient sums', seconds(predicted.gradient_sum_s), ofIteration(predicted.gradient_sum_s, 'added')),
      figure('Optimizer', seconds(predicted.optimizer_s), ofIteration(predicted.optimizer_s, 'added')),
      predicted.held_up_s ? figure('Held up', seconds(predicted.held_up_s), ofIteration(predicted.held_up_s, 'added, as runs have shown')) : null,
      figure('Peak memory', bytes(peak), `of ${bytes(cluster.memory_bytes)}`),
      DATA.timeline ? figure('Devices in use', percent(DATA.timeline.mean_use), 'mean, simulated') : null),
    DATA.violations.length ? el('div', { class: 'banner', role: 'alert' },
      el('strong', {}, `This plan breaks ${plural(DATA.violations.length, 'rule')}; it is not simulated, and launch refuses it.`),
      el('ul', {}, DATA.violations.slice(0, 10).map((text) => el('li', {}, text)))) : null,
    DATA.notes.length ? el('ul', { class: 'notes' }, DATA.notes.map((note) => el('li', {}, note))) : null,
  ].filter(Boolean);
}

function build() {
  document.getElementById('header').append(...headerParts());
  const schedule = scheduleSection();
  schedule.append(allocationTable());
  const sections = [
    schedule, DATA.timeline ? useSection() : null, DATA.work.length ? workSection() : null, memorySection(), DATA.strategies ? strategiesSection() : null,
    curvesSection(), DATA.run ? runSection() : null,
  ].filter(Boolean);
  document.getElementById('main').append(...sections);
  document.getElementById('nav').append(...sections.map((each) => el('a', { href: `#${each.id}` }, each.querySelector('h2').textContent)));
  document.body.append(el('footer', {}, `Plan ${DATA.plan_sha256}`), tooltip.box);
  addEventListener('scroll', () => tooltip.hide(), { passive: true });
}

build();
