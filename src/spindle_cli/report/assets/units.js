// Numbers for people; stored are seconds and bytes.

function digits(value) {
  if (value >= 1000) return String(Math.round(value));
  return String(Number(value.toPrecision(3)));
}

function seconds(value) {
  if (value === 0) return '0 s';
  if (value < 0) return `−${seconds(-value)}`;
  if (value < 1e-3) return `${digits(value * 1e6)} µs`;
  if (value < 1) return `${digits(value * 1e3)} ms`;
  if (value < 100) return `${digits(value)} s`;
  return `${Math.floor(value / 60)} min ${String(Math.round(value % 60)).padStart(2, '0')} s`;
}

function bytes(value) {
  for (const [unit, size] of [['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10]]) {
    if (value >= size) return `${digits(value / size)} ${unit}`;
  }
  return `${digits(value)} B`;
}

function percent(share, decimals = 0) {
  return `${(share * 100).toFixed(decimals)} %`;
}

function signedPercent(share) {
  return `${share < 0 ? '−' : '+'}${(Math.abs(share) * 100).toFixed(1)} %`;
}

function plural(count, word) {
  return `${count.toLocaleString('en-GB')} ${word}${count === 1 ? '' : 's'}`;
}

// [[0, 3], [7, 7]] -> '0–3, 7'
function runsText(runs, most = 6) {
  const shown = runs.slice(0, most).map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`));
  return shown.join(', ') + (runs.length > most ? `, … (${plural(runs.length, 'range')})` : '');
}

function devicesText(runs) {
  const count = runs.reduce((sum, [first, last]) => sum + last - first + 1, 0);
  return count === 1 ? `device ${runsText(runs)}` : `devices ${runsText(runs)}`;
}

function sliceLabel(piece) {
  return `${DATA.metaops[piece.metaop].name}[${piece.ops[0]}:${piece.ops[1]}]`;
}
