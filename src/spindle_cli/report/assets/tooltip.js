// One tooltip for the whole page, beside the pointer. What it says is also reachable without a pointer.

const tooltip = (() => {
  const box = el('div', { class: 'tooltip', id: 'tooltip', role: 'tooltip', 'aria-live': 'polite', hidden: true });
  return {
    box,
    // facts: [[name, value], ...] below a title
    show(x, y, title, facts) {
      box.replaceChildren(el('strong', {}, title), factList(facts));
      box.hidden = false;
      const { width, height } = box.getBoundingClientRect();
      const left = x + 14 + width > innerWidth ? Math.max(4, x - width - 14) : x + 14;
      const top = y + 14 + height > innerHeight ? Math.max(4, y - height - 14) : y + 14;
      box.style.left = `${left}px`;
      box.style.top = `${top}px`;
    },
    hide() {
      box.hidden = true;
    },
  };
})();

const marks = new WeakMap();

// A chart is one stop of the Tab key; the arrows then go through its marks.
function walkable(chart) {
  let index = -1;
  chart.setAttribute('tabindex', 0);
  chart.addEventListener('blur', () => tooltip.hide());
  chart.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const found = [...chart.querySelectorAll('.mark')];
    if (event.key === 'Escape') tooltip.hide();
    if (!step || !found.length) return;
    event.preventDefault();
    index = index < 0 && step < 0 ? found.length - 1 : (index + step + found.length) % found.length;
    const box = found[index].getBoundingClientRect();
    tooltip.show(box.left + box.width / 2, box.top + box.height / 2, ...marks.get(found[index]));
  });
  return chart;
}

function factList(facts) {
  return el('dl', {}, facts.map(([name, value]) => [el('dt', {}, name), el('dd', {}, value)]));
}

// Let a drawn thing say what it is to a pointer and, as one of its chart's marks, to the keyboard.
function tell(node, title, facts) {
  node.classList.add('mark');
  marks.set(node, [title, facts]);
  const at = (event) => tooltip.show(event.clientX, event.clientY, title, facts);
  node.addEventListener('pointerenter', at);
  node.addEventListener('pointermove', at);
  node.addEventListener('pointerdown', at);
  node.addEventListener('pointerleave', () => tooltip.hide());
  return node;
}
