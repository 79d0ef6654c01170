// What is said about a slice, or about something that happens in an iteration.

const CAUSES = {
  activation: 'the output of', gradient: 'the gradient from', partner: 'its partner to start', sum: 'gradient sums', leaving: 'what it sends to', gather: 'its new parameters', losses: 'the losses',
  norm: 'the norm of all gradients', islands: 'the other islands, to average with them',
};

function sliceFacts(piece) {
  const metaop = DATA.metaops[piece.metaop];
  const ops = piece.ops[1] - piece.ops[0];
  const isOnCurve = !piece.part && !piece.rows;
  const point = isOnCurve ? metaop.curve.find((each) => each.dp === piece.dp && each.tp === piece.tp) : null;
  const shares = piece.rows ? ` (${piece.rows.slice(1).map((end, index) => end - piece.rows[index]).join(', ')} samples)` : '';
  const [backward_start_s, backward_end_s] = piece.backward_s || [0, 0];
  const length = piece.end_s - piece.start_s + backward_end_s - backward_start_s;
  return {
    title: sliceLabel(piece),
    facts: [
      ['Task', metaop.task],
      metaop.component === metaop.short ? null : ['Component', metaop.component],
      ['Ops', `${ops} of ${metaop.num_ops}, each ${seconds(length / ops)}`],
      ['Devices', `${piece.num_devices}: ${runsText(piece.runs)}`],
      ['Split', `batch ${metaop.batch_size} over dp ${piece.dp}${shares}${piece.tp > 1 ? `, layers over tp ${piece.tp}` : ''}`],
      [piece.backward_s ? 'Forward' : 'Time', `${seconds(piece.start_s)} to ${seconds(piece.end_s)}, ${seconds(piece.end_s - piece.start_s)}`],
      piece.backward_s ? ['Backward', `${seconds(backward_start_s)} to ${seconds(backward_end_s)}, ${seconds(backward_end_s - backward_start_s)}`] : null,
      ['Wave', String(piece.wave)],
      point ? ['Curve', `${point.source}${point.spread === null ? '' : `, spread ${percent(point.spread)}`}`] : null,
      piece.offload.length ? ['Memory', `activations of ops ${piece.offload.map((range) => range.join(':')).join(', ')} in host memory`] : null,
      piece.recompute ? ['Memory', `activations${piece.offload.length ? ' of the others' : ''} recomputed in the backward pass${piece.selective ? ', but for what takes longest' : ''}`] : null,
    ].filter(Boolean),
  };
}

function happeningFacts(what) {
  const label = (index) => (index === null ? 'the optimizer step' : sliceLabel(DATA.slices[index]));
  const facts = [
    ['Time', `${seconds(what.start_s)} to ${seconds(what.end_s)}, ${seconds(what.end_s - what.start_s)}`],
    ['Devices', runsText(what.runs)],
  ];
  if (what.kind === 'forward' || what.kind === 'backward') {
    const piece = DATA.slices[what.slice];
    facts.push(['Task', DATA.metaops[piece.metaop].task], ['Split', `dp ${piece.dp}${piece.tp > 1 ? `, tp ${piece.tp}` : ''}`]);
    return { title: `${what.kind === 'forward' ? 'Forward' : 'Backward'} of ${label(what.slice)}`, facts };
  }
  if (what.kind === 'transfer') {
    facts.push(['Size', `${bytes(what.num_bytes)} in ${plural(what.count, 'message')}`]);
    facts.push(['From', label(what.source_slice)], ['To', label(what.slice)]);
    return { title: `Transfer of ${what.is_gradient ? 'a gradient' : 'an activation'}`, facts };
  }
  if (what.kind === 'sum' || what.kind === 'gather') {
    facts.push(['Size', bytes(what.num_bytes)]);
    return { title: what.kind === 'sum' ? 'Gradient sum' : 'Gather of new parameters', facts };
  }
  if (what.kind === 'optimizer') return { title: 'Optimizer step', facts };
  if (what.kind === 'data') return { title: 'Wait for data', facts };
  const source = what.source_slice === null ? '' : ` ${label(what.source_slice)}`;
  // Measured waits do not say whose output it is that comes last.
  const causes = { ...CAUSES, ...(what.slice !== null && !source ? { activation: 'what it takes', gradient: 'its gradient' } : {}) };
  facts.push(['For', `${causes[what.cause]}${source}`]);
  return { title: `Wait before ${label(what.slice)}`, facts };
}

function itemFacts(item) {
  return item.piece ? sliceFacts(item.piece) : happeningFacts(item.happening);
}
