// Wheel, drag, pinch, double click and keys on a canvas, as changes of its viewport.

const ZOOM_STEP = 1.6;
const MOVED_PX = 5; // a press that moves less is a click

// place(event) -> {shareX, shareY, width, height} of the drawn area.
// does: {hover(event), leave(), select(event), open(event), next(step), clear()}
function attachGestures(canvas, viewport, place, does) {
  const pointers = new Map();
  let travelled = 0;
  let lastPageScroll = -1e9;

  // Scrolling that began on the page goes on over the canvas; a pause, and the wheel zooms.
  addEventListener('wheel', (event) => {
    if (!canvas.contains(event.target)) lastPageScroll = event.timeStamp;
  }, { passive: true });

  canvas.addEventListener('wheel', (event) => {
    if (event.timeStamp - lastPageScroll < 350 && !event.ctrlKey) {
      lastPageScroll = event.timeStamp;
      return;
    }
    const { shareX, shareY } = place(event);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) && !event.shiftKey) {
      if (!viewport.isZoomedX) return;
      viewport.pan(event.deltaX / 600, 0);
    } else {
      const delta = event.deltaY || event.deltaX;
      const outOfRoom = delta > 0 && !(event.shiftKey ? viewport.isZoomedY : viewport.isZoomedX);
      if (outOfRoom && !event.ctrlKey) return; // nothing left to zoom out of: the page scrolls
      const factor = Math.exp(Math.max(-0.6, Math.min(0.6, delta * (event.deltaMode ? 0.05 : 0.002))));
      viewport.zoom(event.shiftKey ? 1 : factor, event.shiftKey ? factor : 1, shareX, shareY);
    }
    event.preventDefault();
    does.hover(event);
  }, { passive: false });

  canvas.addEventListener('pointerdown', (event) => {
    if (event.button !== 0) return;
    pointers.set(event.pointerId, event);
    if (pointers.size === 1) travelled = 0;
    canvas.setPointerCapture(event.pointerId);
  });

  canvas.addEventListener('pointermove', (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) {
      does.hover(event);
      return;
    }
    const others = [...pointers.values()].filter((pointer) => pointer.pointerId !== event.pointerId);
    pointers.set(event.pointerId, event);
    travelled += Math.hypot(event.clientX - before.clientX, event.clientY - before.clientY);
    if (travelled < MOVED_PX) return;
    does.leave();
    canvas.classList.add('dragging');
    if (others.length) pinch(others[0], before, event);
    else {
      const { width, height } = place(event);
      viewport.pan((before.clientX - event.clientX) / width, (before.clientY - event.clientY) / height);
    }
  });

  // Each axis by how far the fingers went apart along it; along one they hardly differ in, not at all.
  function pinch(fixed, before, event) {
    const middle = { clientX: (fixed.clientX + event.clientX) / 2, clientY: (fixed.clientY + event.clientY) / 2 };
    const { shareX, shareY, width, height } = place(middle);
    const ratio = (from, to) => (Math.min(Math.abs(from), Math.abs(to)) < 30 ? 1 : Math.abs(from) / Math.abs(to));
    viewport.zoom(
      ratio(fixed.clientX - before.clientX, fixed.clientX - event.clientX),
      ratio(fixed.clientY - before.clientY, fixed.clientY - event.clientY), shareX, shareY);
    viewport.pan((before.clientX - event.clientX) / 2 / width, (before.clientY - event.clientY) / 2 / height);
  }

  const release = (event) => {
    if (!pointers.delete(event.pointerId)) return;
    canvas.classList.remove('dragging');
    if (event.type === 'pointerup' && travelled < MOVED_PX) does.select(event);
  };
  canvas.addEventListener('pointerup', release);
  canvas.addEventListener('pointercancel', release);
  canvas.addEventListener('pointerleave', (event) => { if (event.pointerType === 'mouse') does.leave(); });
  canvas.addEventListener('dblclick', (event) => does.open(event));

  const keys = {
    '+': () => viewport.zoom(1 / ZOOM_STEP, 1), '=': () => viewport.zoom(1 / ZOOM_STEP, 1),
    '-': () => viewport.zoom(ZOOM_STEP, 1), 0: () => viewport.fit(),
    '*': () => viewport.zoom(1, 1 / ZOOM_STEP), '/': () => viewport.zoom(1, ZOOM_STEP),
    ArrowLeft: () => viewport.pan(-0.15, 0), ArrowRight: () => viewport.pan(0.15, 0),
    ArrowUp: () => viewport.pan(0, -0.15), ArrowDown: () => viewport.pan(0, 0.15),
    n: () => does.next(1), p: () => does.next(-1), Escape: () => does.clear(),
  };
  canvas.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    keys[event.key]();
    event.preventDefault();
  });
}
