// Colours that are told apart by hue and lightness, and carry near-black text in light and dark mode alike.

const CATEGORIES = [
  '#5894e0', '#e28d4f', '#4fa866', '#e181b0', '#10a6ad', '#bea333', '#9f7ed6', '#eb827b', '#05ab86', '#8d9df5', '#889d37', '#cd87d1',
  '#4a76ae', '#a16336', '#458554', '#a05b7d', '#01858a', '#877323', '#7e66a6', '#a75c56', '#22876b', '#646faf', '#6d7d34', '#925f95',
];
const RAMP = ['#8ad9d3', '#42acd2', '#4081d2', '#5a58c2', '#6f35a2'];
const ACTIVITIES = { forward: '#5894e0', backward: '#e28d4f', optimizer: '#9f7ed6' };

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// A colour of the ramp; share 0 to 1.
function ramp(share) {
  const place = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1);
  const low = channels(RAMP[Math.floor(place)]);
  const high = channels(RAMP[Math.ceil(place)]);
  const mixed = low.map((value, index) => Math.round(value + (high[index] - value) * (place % 1)));
  return `#${mixed.map((value) => value.toString(16).padStart(2, '0')).join('')}`;
}

// Black or white, whichever is read better on a colour (relative luminance of WCAG 2).
function textOn(hex) {
  const linear = channels(hex).map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.18 ? '#0b0e13' : '#ffffff';
}

// What a slice is coloured by. Each: {of(slice) -> category, entries: Map(category -> {colour, label})}
const colourings = (() => {
  const named = (name) => {
    const found = [...new Set(DATA.metaops.map((metaop) => metaop[name]))];
    return {
      of: (piece) => DATA.metaops[piece.metaop][name],
      entries: new Map(found.map((category, index) =>
        [category, { colour: CATEGORIES[index % CATEGORIES.length], label: category }])),
    };
  };
  const widths = [...new Set(DATA.slices.map((piece) => piece.num_devices))].sort((a, b) => a - b);
  return {
    task: named('task'),
    component: named('component'),
    width: {
      of: (piece) => piece.num_devices,
      entries: new Map(widths.map((count, index) =>
        [count, { colour: ramp(index / Math.max(widths.length - 1, 1)), label: plural(count, 'device') }])),
    },
  };
})();
