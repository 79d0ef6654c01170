// The same profile and cluster under every strategy.

function strategiesSection() {
  const planned = DATA.strategies.filter((each) => each.predicted);
  const sequential = planned.find((each) => each.strategy === 'sequential');
  const most = Math.max(...planned.map((each) => each.predicted.iteration_s));
  const parts = [['Compute', CATEGORIES[0]], ['Transfers', CATEGORIES[1]], ['Processor', CATEGORIES[4]],
    ['Gradient sums', CATEGORIES[6]], ['Optimizer', CATEGORIES[3]]];
  if (planned.some((each) => each.predicted.held_up_s)) parts.push(['Held up', CATEGORIES[5]]);
  const bars = DATA.strategies.map((each) => {
    const name = el('span', { class: 'strategy-name' }, each.strategy, each.is_this ? el('em', {}, 'this plan') : null);
    if (!each.predicted) return el('div', { class: 'strategy' }, name, el('span', { class: 'bad' }, `no plan: ${each.failure}`));
    const { iteration_s, compute_s, transfer_s, processor_s, gradient_sum_s, optimizer_s, held_up_s } = each.predicted;
    const values = [compute_s, transfer_s, processor_s, gradient_sum_s, optimizer_s, held_up_s].slice(0, parts.length);
    const track = el('div', { class: 'track' }, values.map((value, index) => {
      const part = tell(el('div', { class: 'part' }), `${each.strategy}: ${parts[index][0].toLowerCase()}`,
        [['Time', seconds(value)], ['Of its iteration', percent(value / iteration_s, 1)]]);
      part.style.width = `${value / most * 100}%`;
      part.style.background = parts[index][1];
      return part;
    }));
    return el('div', { class: 'strategy' }, name, track, el('span', { class: 'number' }, seconds(iteration_s)));
  });
  const rows = planned.map((each) => ({
    class: each.is_this ? 'this' : null,
    cells: [each.strategy, seconds(each.predicted.iteration_s), seconds(each.predicted.compute_s), seconds(each.predicted.transfer_s),
      seconds(each.predicted.processor_s), seconds(each.predicted.gradient_sum_s), seconds(each.predicted.optimizer_s), sequential ? `${(sequential.predicted.iteration_s / each.predicted.iteration_s).toFixed(2)} ×` : '–',
      each.predicted.lower_bound_s > 0 ? signedPercent(each.predicted.compute_s / each.predicted.lower_bound_s - 1) : '–',
      bytes(Math.max(...each.predicted.peak_memory_bytes))],
  }));
  return section('strategies', 'Strategies compared',
    el('p', { class: 'caption' }, 'Predicted iteration of each strategy’s plan for the same profile and cluster.'),
    partsLegend(parts), el('div', { class: 'strategies' }, bars),
    table('Iteration and its parts; compute above the lower bound; memory of the fullest device.', [
      ['Strategy'], ['Iteration', true], ['Compute', true], ['Transfers', true], ['Processor', true], ['Gradient sums', true], ['Optimizer', true],
      ['Against sequential', true], ['Above bound', true], ['Peak memory', true]], rows));
}
