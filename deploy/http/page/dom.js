// Helpers for elements and text. Text from a model becomes a text node, never markup.

const SVG = 'http://www.w3.org/2000/svg';
const byId = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** CSS class of each source of guesses. The draft has its own colour; other guessers get the next free one. */
const origins = new Map([['target', 'origin-target'], ['draft', 'origin-draft']]);

function originClass(source) {
  if (!origins.has(source)) origins.set(source, `origin-${1 + (origins.size - 2) % 4}`);
  return origins.get(source);
}

const percent = (share) => `${Math.round(100 * share)}%`;
