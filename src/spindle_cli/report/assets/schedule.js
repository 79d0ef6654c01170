// The schedule's picture: a scene on a canvas, seen through a viewport, with what is hovered and selected.

const TOP_PX = 34; // above the picture: names of the dashed lines, then waves
const BOTTOM_PX = 26; // below it: the time
const ROW_PX = 26; // a row at most
const HINT = 'Point at a slice, or tap it, to see what it is.';

class SchedulePicture {
  #scene = null;
  #area = null;
  #frame = 0;
  #hovered = null;
  #selected = null;

  constructor() {
    this.category = null; // the one that is shown alone
    this.canvas = el('canvas', {
      id: 'schedule-canvas', tabindex: 0, role: 'application', 'aria-describedby': 'schedule-keys',
      'aria-label': 'Schedule: devices from top to bottom, time from left to right',
    });
    this.details = el('div', { class: 'details', id: 'schedule-details', 'aria-live': 'polite' });
    this.viewport = new Viewport(() => this.#moved());
    attachGestures(this.canvas, this.viewport, (event) => this.#place(event), {
      hover: (event) => this.#hover(event),
      leave: () => this.#leave(),
      select: (event) => this.#tap(event),
      open: (event) => this.#open(this.#at(event)),
      next: (step) => this.#next(step),
      clear: () => this.#clear(),
    });
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.redraw());
  }

  // Draw another scene; what is seen of it stays only if `keepView`.
  show(scene, keepView) {
    const before = { ...this.viewport.view };
    this.#scene = scene;
    this.#hovered = null;
    this.#select(null);
    const most = innerWidth < 600 ? 380 : 520;
    const height = Math.max(Math.min(scene.numRows * ROW_PX, most), 130);
    this.canvas.style.height = `${Math.round(height + TOP_PX + BOTTOM_PX)}px`;
    this.viewport.setFull(scene.end_s, scene.numRows);
    if (keepView) Object.assign(this.viewport.view, before);
    this.#moved();
  }

  redraw() {
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  #moved() {
    const { viewport } = this;
    this.canvas.style.touchAction = viewport.isZoomedX || viewport.isZoomedY ? 'none' : 'pan-y';
    this.redraw();
  }

  #draw() {
    this.#frame = 0;
    const scene = this.#scene;
    const { view } = this.viewport;
    const context = this.#fitCanvas();
    if (!context || !scene) return;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const left = scene.bands ? Math.min(130, width * 0.24) : 38;
    const area = { left, top: TOP_PX, width: width - left - 8, height: height - TOP_PX - BOTTOM_PX };
    this.#area = area;
    paintAxes(context, scene, area, view);
    paintItems(context, scene, area, view, {
      isMuted: (item) => this.category !== null && item.category !== this.category,
      outlined: this.#outlined(),
    });
    paintNodes(context, scene, area, view);
    paintMarks(context, scene, area, view);
    this.canvas.dataset.view = [view.x0, view.x1, view.y0, view.y1].join(' ');
    this.canvas.dataset.area = [area.left, area.top, area.width, area.height].join(' ');
  }

  // The canvas at the screen's own density, cleared; null where it has no size yet.
  #fitCanvas() {
    const { canvas } = this;
    const density = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight].map((size) => Math.round(size * density));
    if (!width || !height) return null;
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const context = canvas.getContext('2d');
    context.setTransform(density, 0, 0, density, 0, 0);
    context.clearRect(0, 0, width, height);
    return context;
  }

  // The hovered item's MetaOp thinly, the selected one strongly.
  #outlined() {
    const hovered = this.#hovered;
    const alike = hovered && hovered.metaop !== null
      ? this.#scene.items.filter((item) => item.metaop === hovered.metaop && item !== hovered) : [];
    const shown = alike.map((item) => [item, cssColour('muted')]);
    if (hovered) shown.push([hovered, cssColour('text')]);
    if (this.#selected) shown.push([this.#selected, cssColour('accent')]);
    return shown;
  }

  // Where a pointer is: pixels in the canvas, and shares of the drawn area.
  #place(event) {
    const box = this.canvas.getBoundingClientRect();
    const { left, top, width, height } = this.#area;
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const share = (value) => Math.min(Math.max(value, 0), 1);
    return { x, y, width, height, shareX: share((x - left) / width), shareY: share((y - top) / height) };
  }

  #at(event) {
    const { x, y } = this.#place(event);
    return itemAt(this.#scene, this.#area, this.viewport.view, x, y);
  }

  #hover(event) {
    const found = this.#at(event);
    this.canvas.classList.toggle('pointing', found !== null);
    if (found !== this.#hovered) {
      this.#hovered = found;
      this.redraw();
    }
    if (!found) {
      tooltip.hide();
      return;
    }
    const { title, facts } = itemFacts(found);
    const device = this.#deviceAt(event);
    const isHere = device !== null && found.rows.some(([first, end]) => first <= device && device < end);
    tooltip.show(event.clientX, event.clientY, title, isHere ? [['Here', `device ${device}`], ...facts] : facts);
  }

  #deviceAt(event) {
    if (this.#scene.bands) return null;
    const { y0, y1 } = this.viewport.view;
    return Math.min(Math.floor(y0 + this.#place(event).shareY * (y1 - y0)), this.#scene.numRows - 1);
  }

  #leave() {
    tooltip.hide();
    if (this.#hovered) this.redraw();
    this.#hovered = null;
  }

  #tap(event) {
    this.#select(this.#at(event));
    if (event.pointerType !== 'mouse') this.#leave();
  }

  #select(item) {
    this.#selected = item;
    if (item) {
      const { title, facts } = itemFacts(item);
      this.details.replaceChildren(el('strong', {}, title), factList(facts));
    } else this.details.replaceChildren(el('p', { class: 'muted' }, HINT));
    this.redraw();
  }

  #clear() {
    this.#leave();
    this.#select(null);
  }

  // Selects the next slice or compute in time, and brings it into sight.
  #next(step) {
    const stops = this.#scene.items.filter((item) => item.metaop !== null);
    stops.sort((a, b) => a.x0 - b.x0 || a.rows[0][0] - b.rows[0][0]);
    const index = stops.indexOf(this.#selected);
    const first = step > 0 ? 0 : stops.length - 1;
    const item = stops[index < 0 ? first : (index + step + stops.length) % stops.length];
    this.#select(item);
    const { view } = this.viewport;
    const [top, bottom] = [item.rows[0][0], item.rows[item.rows.length - 1][1]];
    const isInSight = item.x1 > view.x0 && item.x0 < view.x1 && bottom > view.y0 && top < view.y1;
    if (!isInSight) this.#open(item);
  }

  // Fills the picture with an item; with none, shows everything.
  #open(item) {
    if (item) this.viewport.show(item.x0, item.x1, item.rows[0][0], item.rows[item.rows.length - 1][1]);
    else this.viewport.fit();
  }
}
