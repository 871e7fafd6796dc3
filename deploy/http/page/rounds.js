// The rounds of the last output: calls to target and draft on a time line, and the draft tree of one round.

const MOST_ROUNDS = 400;
const SHOWN_ROUNDS = 10;
const LANE_PX = 30;
const LANES = {verify: 0, block: 1, growth: 1, prefill: 1};
const CHAR_PX = 7.3;
const COLUMN_GAP_PX = 30;
const LINE_PX = 28;
const NODE_PX = 21;

const rounds = {
  all: [],
  drafting: [],
  last: '',
  chosen: -1,
  isFollowing: true,
  isDue: false,

  begin(prompt) {
    Object.assign(this, {all: [], drafting: [], last: prompt.slice(-12), chosen: -1, isFollowing: true});
  },

  /** Adds the calls and tokens of a piece. A verification ends a round. */
  add(trace, tokens) {
    for (const call of trace) {
      if (!call.verified) {
        this.drafting.push(call);
        continue;
      }
      this.all.push({verify: call, drafting: this.drafting, root: this.last});
      this.drafting = [];
    }
    this.last = tokens.at(-1)?.text ?? this.last;
    this.all.splice(0, this.all.length - MOST_ROUNDS);
    if (this.isFollowing) this.chosen = this.all.length - 1;
    this.drawSoon();
  },

  choose(index) {
    this.chosen = Math.max(0, Math.min(index, this.all.length - 1));
    this.isFollowing = this.chosen === this.all.length - 1;
    this.draw();
  },

  /** Draws at most once per frame. */
  drawSoon() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.draw();
    });
  },

  draw() {
    const round = this.all[this.chosen];
    byId('rounds').hidden = !round;
    byId('no-rounds').hidden = Boolean(round);
    if (!round) return;
    byId('previous').disabled = this.chosen === 0;
    byId('next').disabled = this.chosen === this.all.length - 1;
    byId('round-title').textContent = titleOf(this.chosen, this.all.length, round.verify);
    const first = Math.max(0, Math.min(this.chosen - SHOWN_ROUNDS + 3, this.all.length - SHOWN_ROUNDS));
    byId('timeline').replaceChildren(timeline(this.all.slice(first, first + SHOWN_ROUNDS), first, this.chosen));
    byId('tree').replaceChildren(tree(round));
  },
};

function titleOf(index, number, verify) {
  const took = `${(1000 * (verify.received_s - verify.sent_s)).toFixed(1)} ms`;
  const what = verify.guesses ? `${verify.used} of ${verify.guesses} guesses accepted` : 'no guesses';
  return `Round ${index + 1} of ${number}: ${what}, ${took}`;
}

// The time line

function timeline(shown, first, chosen) {
  const left = 50;
  const width = Math.max(280, byId('timeline').clientWidth);
  const calls = shown.flatMap((round) => [round.verify, ...round.drafting]);
  const startS = Math.min(...shown.map((round) => round.verify.sent_s));
  const endS = Math.max(...calls.map((call) => call.received_s));
  const x = (timeS) => left + (width - left - 8) * Math.max(0, timeS - startS) / Math.max(1e-6, endS - startS);
  const picture = svg('svg', {width, height: 2 * LANE_PX + 26, role: 'img', 'aria-label': 'Calls to target and draft over time'});
  picture.append(...axis(startS, endS, x), laneName('Target', 0), laneName('Draft', 1));
  shown.forEach((round, index) => {
    const bars = [round.verify, ...round.drafting].filter((call) => call.received_s > startS).flatMap((call) => bar(call, x));
    const group = svg('g', {class: 'round'}, svg('title', {}, titleOf(first + index, rounds.all.length, round.verify)), ...bars);
    if (first + index === chosen) bars[0].classList.add('chosen');
    group.addEventListener('click', () => rounds.choose(first + index));
    picture.append(group);
  });
  return picture;
}

const laneName = (name, lane) => svg('text', {x: 0, y: lane * LANE_PX + 19, class: 'quiet'}, name);

/** Bars of a call, from its request to its reply; the time spent computing is filled. */
function bar(call, x) {
  const y = LANES[call.call] * LANE_PX + 6;
  const left = x(call.sent_s);
  const right = Math.max(left + 1, x(call.received_s));
  const bars = [svg('rect', {class: 'call', x: left, y, width: right - left, height: 18, rx: 2})];
  if (!call.timing) return bars;
  const wayS = Math.max(0, call.received_s - call.sent_s - call.timing.waited_s - call.timing.computed_s) / 2;
  const from = x(call.received_s - wayS - call.timing.computed_s);
  const to = Math.max(from, x(call.received_s - wayS));
  return [...bars, svg('rect', {class: 'call computed', x: from, y: y + 5, width: to - from, height: 8, rx: 1})];
}

function axis(startS, endS, x) {
  const spanMs = 1000 * (endS - startS);
  const stepMs = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((step) => spanMs / step <= 5) ?? 10000;
  const marks = [];
  for (let ms = 0; ms <= spanMs; ms += stepMs) {
    const at = x(startS + ms / 1000);
    marks.push(svg('path', {class: 'tick', d: `M${at} 0V${2 * LANE_PX + 4}`}));
    marks.push(svg('text', {class: 'quiet', x: at, y: 2 * LANE_PX + 20}, ms ? `${ms} ms` : '0'));
  }
  if (marks.length > 2 && x(endS) - x(startS + Math.floor(spanMs / stepMs) * stepMs / 1000) < 40) marks.pop();
  return marks;
}

// The draft tree

const shownLabel = (text) => {
  const visible = text.replaceAll(' ', '\u00b7').replaceAll('\n', '\u21b5').replaceAll('\t', '\u21e5') || '\u2205';
  return visible.length > 14 ? `${visible.slice(0, 13)}\u2026` : visible;
};
const widthOf = (label) => label.length * CHAR_PX + 14;

/** The nodes of a round: the root, the guesses, and the target's own token after the accepted path. */
function nodesOf(round) {
  const {texts, parents, sources, path, next_text: nextText} = round.verify.verified;
  const accepted = new Set(path);
  const node = (text, parent, kind, source) => ({label: shownLabel(text), parent, kind, source, children: [], depth: 0});
  const nodes = [node(round.root, -1, 'root', '')];
  texts.forEach((text, index) => {
    nodes.push(node(text, parents[index] + 1, accepted.has(index) ? 'accepted' : 'rejected', sources[index]));
  });
  nodes.push(node(nextText, path.length ? path.at(-1) + 1 : 0, 'own', 'target'));
  nodes.forEach((each, index) => {
    if (!index) return;
    each.depth = nodes[each.parent].depth + 1;
    nodes[each.parent].children.push(each);
  });
  return nodes;
}

/** Positions the nodes: depth from left to right, one line for each leaf, the accepted path on a straight line. */
function place(nodes) {
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, widthOf(node.label));
  const lefts = widths.map((_, depth) => widths.slice(0, depth).reduce((sum, width) => sum + width + COLUMN_GAP_PX, 1));
  let numLines = 0;
  const rank = {accepted: 0, own: 1, rejected: 2};
  const visit = (node) => {
    node.x = lefts[node.depth];
    node.children.sort((one, other) => rank[one.kind] - rank[other.kind]);
    node.y = numLines * LINE_PX + 4;
    node.children.forEach(visit);
    if (!node.children.length) numLines += 1;
  };
  visit(nodes[0]);
  return {width: lefts.at(-1) + widths.at(-1) + 4, height: numLines * LINE_PX + 4};
}

function tree(round) {
  const nodes = nodesOf(round);
  const {width, height} = place(nodes);
  const edges = nodes.slice(1).map((node) => edge(nodes[node.parent], node));
  return svg('svg', {width, height, role: 'img', 'aria-label': 'Draft tree'}, ...edges, ...nodes.flatMap(box));
}

function edge(above, below) {
  const fromX = above.x + widthOf(above.label);
  const fromY = above.y + NODE_PX / 2;
  const toY = below.y + NODE_PX / 2;
  const bend = below.x - COLUMN_GAP_PX / 2;
  return svg('path', {class: `edge ${below.kind}`, d: `M${fromX} ${fromY}H${bend - 8}C${bend + 4} ${fromY} ${bend - 4} ${toY} ${bend + 8} ${toY}H${below.x}`});
}

function box(node) {
  const width = widthOf(node.label);
  const look = `node ${node.kind} ${node.source ? originClass(node.source) : ''}`;
  const shape = svg('rect', {class: look, x: node.x, y: node.y, width, height: NODE_PX, rx: 4}, svg('title', {}, node.source ? nameOf(node.source) : 'committed last'));
  return [shape, svg('text', {class: `label ${node.kind}`, x: node.x + width / 2, y: node.y + 15, 'text-anchor': 'middle'}, node.label)];
}
