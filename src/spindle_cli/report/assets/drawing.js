// Drawing items over devices x time on a canvas, and finding the item at a point.
//
// An item: {x0, x1 (seconds), rows: [[first, end), ...], kind, category, colour, label}. Items that devices
// side by side share are one rectangle, so a thousand devices cost no more than what they do differently.

const LANES_PX = 16; // rows at least this high show transfers and sums below the computes
const TRAFFIC = new Set(['transfer', 'sum']);

// Pixel boxes [x, y, width, height] of an item, only those in sight.
function* boxesOf(item, area, view, hasTraffic) {
  const perSecond = area.width / (view.x1 - view.x0);
  const perRow = area.height / (view.y1 - view.y0);
  let x0 = area.left + (item.x0 - view.x0) * perSecond;
  let x1 = area.left + (item.x1 - view.x0) * perSecond;
  if (x1 < area.left || x0 > area.left + area.width) return;
  x0 = Math.max(Math.round(x0), area.left - 2);
  x1 = Math.min(Math.max(Math.round(x1), x0 + 1), area.left + area.width + 2);
  const split = hasTraffic && perRow >= LANES_PX;
  let drawnTo = -Infinity;
  for (const [first, end] of item.rows) {
    if (end <= view.y0 || first >= view.y1) continue;
    if (split) {
      const [from, height] = TRAFFIC.has(item.kind) ? [0.72, 0.24] : [0.02, 0.66];
      for (let row = Math.max(first, Math.floor(view.y0)); row < Math.min(end, view.y1); row += 1) {
        const y = area.top + (row + from - view.y0) * perRow;
        yield [x0, Math.round(y), x1 - x0, Math.max(Math.round(height * perRow), 2)];
      }
      continue;
    }
    const y0 = Math.max(Math.round(area.top + (first - view.y0) * perRow), area.top - 2, drawnTo);
    const y1 = Math.min(Math.round(area.top + (end - view.y0) * perRow), area.top + area.height + 2);
    if (y1 <= drawnTo) continue; // in the same pixels as the one before
    drawnTo = Math.max(y1, y0 + 1);
    yield [x0, y0, x1 - x0, drawnTo - y0];
  }
}

function itemAt(scene, area, view, x, y) {
  if (x < area.left || x > area.left + area.width || y < area.top || y > area.top + area.height) return null;
  let near = null;
  for (let index = scene.items.length - 1; index >= 0; index -= 1) {
    const item = scene.items[index];
    if (scene.hidden.has(item.kind)) continue;
    for (const [left, top, width, height] of boxesOf(item, area, view, scene.hasTraffic)) {
      if (x >= left && x < left + width && y >= top && y < top + height) return item;
      // Very short or flat ones can still be pointed at.
      if (x >= left - 3 && x < left + width + 3 && y >= top - 2 && y < top + height + 2) near ||= item;
    }
  }
  return near;
}

function stripes(context, colour, ground) {
  const tile = new OffscreenCanvas(8, 8);
  const pen = tile.getContext('2d');
  pen.fillStyle = ground;
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = colour;
  pen.lineWidth = 1.5;
  for (const shift of [-8, 0, 8]) {
    pen.beginPath();
    pen.moveTo(shift - 2, 10);
    pen.lineTo(shift + 10, -2);
    pen.stroke();
  }
  return context.createPattern(tile, 'repeat');
}

function paintItems(context, scene, area, view, mark) {
  const ground = cssColour('surface');
  const inks = {
    wait: stripes(context, cssColour('wait'), ground), transfer: cssColour('transfer'), sum: stripes(context, cssColour('sum'), cssColour('sum-ground')),
  };
  context.save();
  context.beginPath();
  context.rect(area.left, area.top, area.width, area.height);
  context.clip();
  context.font = '12px system-ui, sans-serif';
  context.textBaseline = 'middle';
  for (const item of scene.items) {
    if (scene.hidden.has(item.kind)) continue;
    context.globalAlpha = mark.isMuted(item) ? 0.18 : 1;
    for (const [x, y, width, height] of boxesOf(item, area, view, scene.hasTraffic)) {
      context.fillStyle = inks[item.kind] || item.colour;
      context.fillRect(x, y, width, height);
      if (item.kind === 'backward' && scene.shadesBackward && height > 2) {
        context.fillStyle = 'rgb(0 0 0 / 22%)';
        context.fillRect(x, y, width, height);
      }
      if (width > 3 && height > 3 && item.kind !== 'wait') {
        context.strokeStyle = ground;
        context.lineWidth = 1;
        context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
      }
      paintLabel(context, item, area, x, y, width, height);
    }
  }
  context.globalAlpha = 1;
  for (const [item, colour] of mark.outlined) {
    context.strokeStyle = colour;
    context.lineWidth = 2;
    for (const [x, y, width, height] of boxesOf(item, area, view, scene.hasTraffic)) {
      context.strokeRect(x + 1, y + 1, Math.max(width - 2, 1), Math.max(height - 2, 1));
    }
  }
  context.restore();
}

// The label in the part of the box that is in sight; in few words where there is little room.
function paintLabel(context, item, area, x, y, width, height) {
  const left = Math.max(x, area.left) + 4;
  const room = Math.min(x + width, area.left + area.width) - left - 3;
  if (!item.labels || height < 13 || room < 12) return;
  const text = item.labels.find((label) => context.measureText(label).width <= room);
  if (!text) return;
  const top = Math.max(y, area.top);
  const bottom = Math.min(y + height, area.top + area.height);
  context.fillStyle = textOn(item.colour);
  if (bottom - top >= 11) context.fillText(text, left, (top + bottom) / 2 + 0.5);
}

// Axes around the area: rows or bands on the left, nodes as lines, waves above, time below.
function paintAxes(context, scene, area, view) {
  const text = cssColour('muted');
  const line = cssColour('line');
  context.font = '11px system-ui, sans-serif';
  context.fillStyle = cssColour('surface');
  context.fillRect(area.left, area.top, area.width, area.height);
  const toX = scale(view.x0, view.x1, area.left, area.left + area.width);
  const toY = scale(view.y0, view.y1, area.top, area.top + area.height);
  context.fillStyle = text;
  context.strokeStyle = line;
  context.lineWidth = 1;
  context.textBaseline = 'top';
  for (const value of ticks(view.x0, view.x1, area.width / 95)) {
    const x = Math.round(toX(value)) + 0.5;
    context.beginPath();
    context.moveTo(x, area.top);
    context.lineTo(x, area.top + area.height + 4);
    context.stroke();
    const label = seconds(value);
    const half = context.measureText(label).width / 2;
    context.fillText(label, Math.min(Math.max(x - half, 0), area.left + area.width - half * 2 + 8), area.top + area.height + 6);
  }
  (scene.bands ? paintBands : paintDevices)(context, scene, area, view, toY);
  paintWaves(context, scene, area, view, toX);
}

function paintDevices(context, scene, area, view, toY) {
  context.textBaseline = 'middle';
  context.textAlign = 'right';
  for (const value of doublingTicks(Math.ceil(view.y0), Math.ceil(view.y1) - 1, area.height / 22)) {
    const y = toY(value + 0.5);
    if (y > area.top && y < area.top + area.height) context.fillText(String(value), area.left - 6, y);
  }
  context.textAlign = 'left';
}

// Between nodes, over the items: where transfers are dear.
function paintNodes(context, scene, area, view) {
  if (scene.bands || scene.nodeStarts.length < 2) return;
  const perRow = area.height / (view.y1 - view.y0);
  context.strokeStyle = cssColour('node');
  context.setLineDash([2, 4]);
  for (const start of scene.nodeStarts) {
    const y = Math.round(area.top + (start - view.y0) * perRow) + 0.5;
    if (y <= area.top + 1 || y >= area.top + area.height || perRow * (scene.numRows / scene.nodeStarts.length) < 12) continue;
    context.beginPath();
    context.moveTo(area.left, y);
    context.lineTo(area.left + area.width, y);
    context.stroke();
  }
  context.setLineDash([]);
}

function paintBands(context, scene, area, view, toY) {
  context.textBaseline = 'middle';
  scene.bands.forEach((band, index) => {
    const top = Math.max(toY(band.first), area.top);
    const bottom = Math.min(toY(band.end), area.top + area.height);
    if (bottom - top < 1) return;
    if (index % 2) {
      context.fillStyle = cssColour('band');
      context.fillRect(area.left, top, area.width, bottom - top);
    }
    if (bottom - top < 11) return;
    context.fillStyle = cssColour('muted');
    context.fillText(fitted(context, band.name, area.left - 10), 4, (top + bottom) / 2);
  });
}

function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let kept = text;
  while (kept.length > 1 && context.measureText(`${kept}…`).width > room) kept = kept.slice(0, -1);
  return `${kept}…`;
}

function paintWaves(context, scene, area, view, toX) {
  context.textBaseline = 'bottom';
  context.fillStyle = cssColour('muted');
  let taken = 0;
  for (const [index, start] of scene.waves) {
    const x = toX(start);
    if (x < area.left - 1 || x > area.left + area.width - 14 || x < taken) continue;
    context.fillRect(Math.round(x), area.top - 5, 1, 5);
    const label = taken ? String(index) : `wave ${index}`;
    context.fillText(label, x + 3, area.top - 2);
    taken = x + context.measureText(label).width + 10;
  }
}

// Times worth comparing the picture with, as dashed lines that are named above it.
function paintMarks(context, scene, area, view) {
  const toX = scale(view.x0, view.x1, area.left, area.left + area.width);
  context.font = '11px system-ui, sans-serif';
  context.textBaseline = 'top';
  scene.marks.forEach(({ at_s, label }) => {
    const x = Math.round(toX(at_s)) + 0.5;
    if (x < area.left || x > area.left + area.width + 1) return;
    context.strokeStyle = cssColour('text');
    context.setLineDash([5, 4]);
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x, 0);
    context.lineTo(x, area.top + area.height);
    context.stroke();
    context.setLineDash([]);
    const width = context.measureText(label).width;
    context.fillStyle = cssColour('text');
    context.fillText(label, x - width - 5 >= 0 ? x - width - 5 : x + 5, 1);
  });
}
