// The allocation of every MetaOp as a table: the schedule in words.

function allocationTable() {
  const rows = DATA.metaops.map((metaop, index) => {
    const pieces = DATA.slices.filter((piece) => piece.metaop === index);
    const ops = new Map();
    for (const piece of pieces) {
      const key = piece.tp > 1 ? `${piece.num_devices} (dp ${piece.dp} × tp ${piece.tp})` : String(piece.num_devices);
      ops.set(key, (ops.get(key) || 0) + piece.ops[1] - piece.ops[0]);
    }
    const total = DATA.predicted.compute_s * DATA.cluster.num_devices;
    return [
      metaop.name, metaop.component, metaop.batch_size, metaop.num_ops,
      [...ops].map(([devices, count]) => `${count} on ${devices}`).join(', '),
      seconds(Math.min(...pieces.map((piece) => piece.start_s))), seconds(Math.max(...pieces.map((piece) => (piece.backward_s ? piece.backward_s[1] : piece.end_s)))),
      total > 0 ? percent(metaop.device_s / total, 1) : '–',
    ];
  });
  return el('details', { id: 'allocation' }, el('summary', {}, `Allocation of the ${plural(DATA.metaops.length, 'MetaOp')}`),
    table('Ops on how many devices, from when to when, and share of all device time', [
      ['MetaOp'], ['Component'], ['Batch', true], ['Ops', true], ['Ops on devices'], ['From', true], ['To', true], ['Device time', true]], rows));
}
