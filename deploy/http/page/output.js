// The output: turns of text, each token in the colour of its source, and the legend of the colours.

/**
 * The text of a piece in parts, each with its source. A token's own text may lack the space before it, and a piece may
 * hold back an incomplete character. Text that matches no token is attributed to the last one.
 */
function partsOf(text, tokens) {
  const parts = [];
  let rest = text;
  for (const token of tokens) {
    const numSpaces = rest.length - rest.trimStart().length;
    const found = rest.startsWith(token.text) ? 0 : rest.startsWith(token.text, numSpaces) ? numSpaces : -1;
    if (found < 0) break;
    const end = found + token.text.length;
    if (end) parts.push({text: rest.slice(0, end), source: token.source});
    rest = rest.slice(end);
  }
  if (rest) parts.push({text: rest, source: tokens.at(-1)?.source ?? 'target'});
  return parts;
}

const output = {
  pane: byId('output'),
  turn: null,

  begin(said) {
    this.turn = el('div', {class: 'turn'}, el('span', {class: 'said'}, said));
    this.pane.append(this.turn);
    showLegend();
  },

  add(text, tokens) {
    const isAtEnd = this.pane.scrollHeight - this.pane.scrollTop - this.pane.clientHeight < 40;
    for (const part of partsOf(text, tokens)) {
      const look = {class: `token ${originClass(part.source)}`, 'data-source': part.source, title: nameOf(part.source)};
      this.turn.append(el('span', look, part.text));
    }
    showLegend();
    if (isAtEnd) this.pane.scrollTop = this.pane.scrollHeight;
  },

  clear() {
    this.pane.replaceChildren();
  },
};

const nameOf = (source) => (source === 'target' ? "the target's own" : source === 'draft' ? 'the draft' : `guesser ${source}`);

function showLegend() {
  const legend = byId('legend');
  if (legend.childElementCount === origins.size) return;
  const entries = [...origins].map(([source, look]) => el('li', {}, el('i', {class: `swatch ${look}`}), nameOf(source)));
  legend.replaceChildren(...entries);
}

/** Speed and target passes of an output, in one line. */
function summaryOf(stats, numTokens, elapsedS) {
  const speed = `${numTokens} tokens in ${elapsedS.toFixed(2)} s`;
  if (!stats?.target_passes) return speed;
  const rounds = `${stats.target_passes} target passes, ${(numTokens / stats.target_passes).toFixed(2)} tokens each`;
  const {drafted_tokens: drafted, accepted_tokens: accepted} = stats;
  return [speed, rounds, drafted ? `${percent(accepted / drafted)} of ${drafted} guesses accepted` : 'no guesses'].join('; ');
}
