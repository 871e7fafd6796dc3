// The playground: a form sends a request, and its stream is shown as it arrives.

let running = null; // AbortController of the request in progress
let messages = []; // the chat so far

const modeNow = () => document.querySelector('input[name="mode"]:checked').value;

/** Path and body of the request in the form. Throws CallError if the extra fields are not JSON. */
function requestNow(mode, text) {
  const extra = byId('more').value.trim();
  let more = {};
  try {
    more = extra ? JSON.parse(extra) : {};
  } catch (error) {
    throw new CallError(`"More fields" is not JSON: ${error.message}`);
  }
  const speculation = {trace: true, ...(byId('speculation').checked ? {} : {max_draft_tokens: 0}), ...more.speculation};
  const [path, input] = mode === 'chat' ? ['/v1/chat/completions', {messages}] : ['/v1/completions', {prompt: text}];
  const numbers = {temperature: byId('temperature').valueAsNumber, max_tokens: byId('max-tokens').valueAsNumber};
  const given = Object.fromEntries(Object.entries(numbers).filter(([, value]) => !Number.isNaN(value)));
  const body = {model: byId('model').value || undefined, ...input, ...given, ...more, speculation, stream: true, n: 1};
  return {path, body};
}

async function run() {
  const mode = modeNow();
  const text = byId('prompt').value;
  if (running || !text) return;
  showProblem('');
  byId('summary').textContent = '';
  const before = messages;
  if (mode === 'chat') messages = [...messages, {role: 'user', content: text}];
  running = new AbortController();
  setRunning(true);
  try {
    const answer = await show(requestNow(mode, text), mode === 'chat' ? `${text}\n` : text);
    if (mode === 'chat') {
      messages = [...messages, {role: 'assistant', content: answer}];
      byId('prompt').value = '';
    }
  } catch (error) {
    messages = before;
    showProblem(error.name === 'AbortError' ? '' : error.message);
    if (error.name === 'AbortError') byId('summary').textContent = 'Stopped.';
  } finally {
    running = null;
    setRunning(false);
  }
}

/** Shows the answer as it arrives; returns its text. */
async function show({path, body}, said) {
  const startMs = performance.now();
  const pieces = streamed(path, body, byId('key').value, running.signal);
  let answer = '';
  let numTokens = 0;
  output.begin(said);
  rounds.begin(said);
  for await (const {choices: [choice]} of pieces) {
    if (!choice) continue;
    const {tokens = [], trace = [], speculation} = choice.outrider ?? {};
    answer += choice.delta?.content ?? choice.text ?? '';
    numTokens += tokens.length;
    output.add((choice.delta?.reasoning_content ?? '') + (choice.delta?.content ?? choice.text ?? ''), tokens);
    rounds.add(trace, tokens);
    if (choice.finish_reason) showEnd(speculation, numTokens, (performance.now() - startMs) / 1000);
  }
  return answer;
}

function showEnd(stats, numTokens, elapsedS) {
  byId('summary').textContent = summaryOf(stats, numTokens, elapsedS);
  if (stats?.target_passes) figures.tokensARound = numTokens / stats.target_passes;
}

function showProblem(message) {
  byId('problem').textContent = message;
  byId('problem').hidden = !message;
}

function setRunning(isRunning) {
  byId('run').disabled = isRunning;
  byId('stop').disabled = !isRunning;
}

const stop = () => running?.abort();

function clear() {
  stop();
  messages = [];
  output.clear();
  rounds.begin('');
  rounds.draw();
  showProblem('');
  byId('summary').textContent = '';
}

byId('playground').addEventListener('submit', (event) => {
  event.preventDefault();
  run();
});
byId('playground').addEventListener('change', (event) => {
  if (event.target.name === 'mode') byId('prompt-label').textContent = modeNow() === 'chat' ? 'Message' : 'Prompt';
});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') stop();
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) run();
});
byId('stop').addEventListener('click', stop);
byId('clear').addEventListener('click', clear);
byId('previous').addEventListener('click', () => rounds.choose(rounds.chosen - 1));
byId('next').addEventListener('click', () => rounds.choose(rounds.chosen + 1));
addEventListener('resize', () => rounds.drawSoon());
showLegend();
figures.watch(() => byId('key').value, () => byId('model').value);
