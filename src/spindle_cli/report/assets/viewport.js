// Which part of devices x time is seen: x in seconds, y in rows.

class Viewport {
  constructor(onchange) {
    this.onchange = onchange;
    this.full = { x0: 0, x1: 1, y0: 0, y1: 1 };
    this.view = { ...this.full };
  }

  // A new picture; what is seen is kept only if `keep` and the time goes on to mean the same.
  setFull(x1, y1) {
    this.full = { x0: 0, x1, y0: 0, y1 };
    this.fit();
  }

  get leastX() { return (this.full.x1 - this.full.x0) / 1e5; }
  get leastY() { return Math.min(this.full.y1 - this.full.y0, 2); }
  get isZoomedX() { return this.view.x1 - this.view.x0 < (this.full.x1 - this.full.x0) * 0.9999; }
  get isZoomedY() { return this.view.y1 - this.view.y0 < (this.full.y1 - this.full.y0) * 0.9999; }

  fit() {
    this.view = { ...this.full };
    this.onchange();
  }

  // Shrink (factor < 1) or widen what is seen around a point given as a share of the view.
  zoom(factorX, factorY, shareX = 0.5, shareY = 0.5) {
    const { view } = this;
    [view.x0, view.x1] = this.#around(view.x0, view.x1, factorX, shareX, this.full.x0, this.full.x1, this.leastX);
    [view.y0, view.y1] = this.#around(view.y0, view.y1, factorY, shareY, this.full.y0, this.full.y1, this.leastY);
    this.onchange();
  }

  // Move by shares of the view.
  pan(shareX, shareY) {
    const { view, full } = this;
    [view.x0, view.x1] = this.#moved(view.x0, view.x1, shareX, full.x0, full.x1);
    [view.y0, view.y1] = this.#moved(view.y0, view.y1, shareY, full.y0, full.y1);
    this.onchange();
  }

  // Show a rectangle with some room around it.
  show(x0, x1, y0, y1) {
    const roomX = (x1 - x0) * 0.15;
    const roomY = (y1 - y0) * 0.15 + 0.25;
    this.view = {
      x0: Math.max(this.full.x0, x0 - roomX), x1: Math.min(this.full.x1, x1 + roomX),
      y0: Math.max(this.full.y0, y0 - roomY), y1: Math.min(this.full.y1, y1 + roomY),
    };
    this.onchange();
  }

  #around(low, high, factor, share, least, most, smallest) {
    const size = Math.min(Math.max((high - low) * factor, smallest), most - least);
    const start = low + (high - low - size) * share;
    return this.#moved(start, start + size, 0, least, most);
  }

  #moved(low, high, share, least, most) {
    const size = high - low;
    const start = Math.min(Math.max(low + share * size, least), most - size);
    return [start, start + size];
  }
}
