// Making elements. Text only ever becomes a text node, so that no name in the data can become markup.

const DATA = JSON.parse(document.getElementById('data').textContent);
const SVG = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// A section of the page with its heading; also listed in the navigation.
function section(id, title, ...children) {
  return el('section', { id, 'aria-labelledby': `${id}-title` }, el('h2', { id: `${id}-title` }, title), children);
}

// A group of buttons of which one is pressed. options: [[value, label], ...]
function choice(label, options, chosen, onchoose) {
  const buttons = options.map(([value, text]) =>
    el('button', { type: 'button', 'data-value': value, 'aria-pressed': String(value === chosen) }, text));
  const group = el('div', { class: 'choice', role: 'group', 'aria-label': label },
    el('span', { class: 'choice-label', 'aria-hidden': 'true' }, label), buttons);
  group.set = (value) => {
    for (const button of buttons) button.setAttribute('aria-pressed', String(button.dataset.value === value));
  };
  for (const button of buttons) {
    button.addEventListener('click', () => {
      group.set(button.dataset.value);
      onchoose(button.dataset.value);
    });
  }
  return group;
}

// A number with its name above it.
function figure(name, value, note) {
  return el('div', { class: 'figure' }, el('dt', {}, name), el('dd', {}, el('strong', {}, value), note ? el('span', {}, note) : null));
}

// A table. columns: [[heading, isNumber], ...]; it scrolls by itself where it is too wide.
function table(caption, columns, rows) {
  const cell = (tag, value, index) => el(tag, {
    class: columns[index][1] ? 'number' : null, scope: tag === 'th' ? 'col' : null,
  }, value);
  return el('div', {}, el('p', { class: 'caption' }, caption), el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption },
    el('table', {},
      el('thead', {}, el('tr', {}, columns.map(([heading], index) => cell('th', heading, index)))),
      el('tbody', {}, rows.map((row) => el('tr', { class: row.class || null },
        (row.cells || row).map((value, index) => cell('td', value, index))))))));
}

function cssColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
