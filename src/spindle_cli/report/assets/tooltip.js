// One tooltip for the whole page, beside the pointer. What it says is also reachable without a pointer.

const tooltip = (() => {
  const box = el('div', { class: 'tooltip', id: 'tooltip', role: 'tooltip', hidden: true });
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

function factList(facts) {
  return el('dl', {}, facts.map(([name, value]) => [el('dt', {}, name), el('dd', {}, value)]));
}

// Let a drawn thing say what it is to a pointer and, focused, to the keyboard.
function tell(node, title, facts) {
  const at = (event) => tooltip.show(event.clientX, event.clientY, title, facts);
  node.addEventListener('pointerenter', at);
  node.addEventListener('pointermove', at);
  node.addEventListener('pointerdown', at);
  node.addEventListener('pointerleave', () => tooltip.hide());
  return node;
}
