// Scales and their round numbers.

// The next of 1, 2, 5, 10, ... times a power of ten that is at least `least`.
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * (1 - 1e-9));
}

// Round values from first to last, at most about `most` of them.
function ticks(first, last, most) {
  if (!(last > first)) return [first];
  const step = roundStep((last - first) / Math.max(most, 1));
  const values = [];
  for (let index = Math.ceil(first / step - 1e-9); index * step <= last * (1 + 1e-12); index += 1) values.push(index * step);
  return values;
}

// Multiples of a power of two: device numbers, whose nodes mostly hold so many.
function doublingTicks(first, last, most) {
  const step = 2 ** Math.max(0, Math.ceil(Math.log2((last - first + 1) / Math.max(most, 1))));
  const values = [];
  for (let value = Math.ceil(first / step) * step; value <= last; value += step) values.push(value);
  return values;
}

// Powers of two, thinned to at most `most`: for numbers of devices.
function powerTicks(first, last, most) {
  const values = [];
  for (let value = 1; value <= last * 1.0001; value *= 2) if (value >= first * 0.9999) values.push(value);
  const every = Math.ceil(values.length / most) || 1;
  return values.filter((_, index) => index % every === 0);
}

// 1, 2 and 5 times powers of ten inside a range: for times on a logarithmic scale.
function logTicks(first, last) {
  const values = [];
  for (let power = 10 ** Math.floor(Math.log10(first)); power <= last; power *= 10) {
    for (const factor of [1, 2, 5]) {
      const value = factor * power;
      if (value >= first * 0.999 && value <= last * 1.001) values.push(value);
    }
  }
  const tens = values.filter((value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9);
  return values.length <= 6 || tens.length < 2 ? values : tens;
}

function scale(from0, from1, to0, to1) {
  return (value) => to0 + (from1 === from0 ? 0.5 : (value - from0) / (from1 - from0)) * (to1 - to0);
}

function logScale(from0, from1, to0, to1) {
  const linear = scale(Math.log(from0), Math.log(from1), to0, to1);
  return (value) => linear(Math.log(value));
}
