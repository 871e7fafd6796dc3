// Figures of the orchestrator that answers, refreshed while the page is visible.

const PERIOD_MS = 2000;
const STATUS = '/v1/outrider/status';

const figures = {
  models: [],
  tokensARound: null,

  /** Refreshes the figures periodically. An error is shown in place of the names of the models. */
  async watch(keyOf, modelOf) {
    for (;;) {
      if (!document.hidden) await this.ask(keyOf(), modelOf());
      await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
    }
  },

  async ask(key, name) {
    try {
      this.models = (await getJson(STATUS, key)).models;
      showModels(this.models);
      this.show(this.models.find((each) => each.model === name) ?? this.models[0]);
    } catch (error) {
      byId('pair').textContent = error.message;
    }
  },

  show(status) {
    const {control, queue, replicas, target, draft} = status;
    byId('pair').textContent = [target, draft].filter(Boolean).map(describe).join(' + ') + (draft ? '' : ', no draft');
    const shown = {
      'Acceptance': control.acceptance.length ? percent(control.acceptance[0]) : '\u2013',
      'Next block ready': percent(control.hit_rate),
      'Block': control.draft_tokens ? `${control.block_tokens}, ${control.draft_tokens} deep` : 'resting',
      'Tokens a round': this.tokensARound?.toFixed(2) ?? '\u2013',
      'Running': `${queue.running} of ${queue.max_sessions}`,
      'Waiting': queue.waiting,
      'Targets': replicas.target ?? '\u2013',
      'Drafts': draftsOf(replicas) ?? '\u2013',
    };
    byId('figures').replaceChildren(...Object.entries(shown).map(
      ([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, String(value)))));
    const isEven = new Set(control.acceptance.map(percent)).size < 2; // one figure is enough
    byId('acceptance').replaceChildren(...(isEven ? [] : control.acceptance.slice(0, 8).map(acceptanceBar)));
    byId('reason').textContent = control.reason && `Policy ${control.policy}. Last change: ${control.reason}`;
  },
};

/** Number of replicas of all drafts; undefined for a model without a draft. */
function draftsOf(replicas) {
  const numbers = Object.entries(replicas).filter(([role]) => role !== 'target').map(([, number]) => number);
  return numbers.length ? numbers.reduce((sum, number) => sum + number) : undefined;
}

const describe = ({name, num_parameters: number, dtype, device}) => `${name} (${short(number)}, ${dtype}, ${device})`;
const short = (number) => new Intl.NumberFormat('en', {notation: 'compact', maximumSignificantDigits: 3}).format(number);

function acceptanceBar(chance, index) {
  const filled = el('b', {});
  filled.style.width = percent(chance);
  return el('div', {class: 'bar'}, el('span', {}, `Guess ${index + 1}`), el('i', {}, filled), el('span', {}, percent(chance)));
}

function showModels(models) {
  const select = byId('model');
  const names = models.map((each) => each.model);
  if (names.join('\n') === [...select.options].map((each) => each.value).join('\n')) return;
  select.replaceChildren(...names.map((name) => el('option', {value: name}, name)));
}
