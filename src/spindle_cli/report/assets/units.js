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
  const whole = Math.round(value);
  const two = (number) => String(number).padStart(2, '0');
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${two(Math.floor((whole % 86400) / 3600))} h`;
}

function flops(value) {
  const [unit, size] = [['P', 1e15], ['T', 1e12], ['G', 1e9], ['M', 1e6]].find(([, each]) => value >= each) || ['', 1];
  return `${digits(value / size)} ${unit}FLOP/s`;
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
  return `${DATA.metaops[piece.metaop].name}[${piece.ops[0]}:${piece.ops[1]}]${piece.part}`;
}
