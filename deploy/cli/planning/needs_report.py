"""The lines and figures of what a pair needs. Knows `needs`; must not know options."""

from __future__ import annotations

from collections.abc import Iterator

from core.records import STATES_BESIDE_GUESSES
from core.results import Result
from deploy.cli.planning.needs import STEP_TOKENS, Needs, Role, Sizing
from simulation.report import Comparison, advice_of

BLOCK_GUESSES = 8
GRAPH_ROWS = 512
"""Rows of the largest step that is recorded as a CUDA graph."""
ROWS = (1, 8, 32)
CONTEXT = 1000


def lines(needs: Needs) -> Iterator[str]:
    """The report."""
    yield from _role_lines(needs.target)
    if needs.draft is not None:
        yield from ("", *_role_lines(needs.draft))
    if needs.gain is not None:
        yield from ("", *_gain_lines(needs.gain))
    yield from ("", *_load_lines(needs.load))


def _role_lines(role: Role) -> Iterator[str]:
    shape, placed, context = role.outline.shape, role.placed, role.outline.max_context_tokens
    active = f", {shape.num_active / 1e9:,.1f}B a token" if shape.num_active < shape.num_parameters else ""
    size = f"{shape.num_parameters / 1e9:,.2f}B parameters{active}"
    yield f"{role.name}: {role.outline.architecture}, {size}, on {placed.count} x {role.gpu.upper()}"
    if role.outline.limit:
        yield f"  context   {context:,} tokens: {role.outline.limit}"
    quantized = ", dequantized when they are loaded" if role.outline.is_quantized else ""
    each = f", {shape.weight_bytes / placed.count / 1e9:,.1f} a GPU" if placed.count > 1 else ""
    yield f"  weights   {shape.weight_bytes / 1e9:,.1f} GB in bfloat16{each}{quantized}"
    yield f"  a step    {shape.step_bytes(STEP_TOKENS) / 1e9:,.1f} GB for {STEP_TOKENS:,} rows"
    fit = f"{role.kv_tokens:,} tokens fit: {role.kv_tokens / context:,.1f} contexts of {context:,}"
    kept = ", in 8 bits" if shape.kv_value_bytes == 1 else ""
    if placed.model.kv_bytes(placed.count):
        yield f"  KV        {placed.model.kv_bytes(placed.count) / 1e3:,.1f} kB a token on a GPU{kept}; {fit}"
    if shape.state_bytes:
        streams = role.num_states // (STATES_BESIDE_GUESSES + BLOCK_GUESSES)
        each = f"{shape.state_bytes / 1e6:,.1f} MB each, {role.num_states:,} fit"
        yield f"  states    {each}: {streams:,} streams with {BLOCK_GUESSES} guesses each, or more with fewer"
    yield f"  graphs    steps of up to {GRAPH_ROWS} rows, recorded in the memory of one step; not measured"
    times = ", ".join(f"{placed.step_s(rows, CONTEXT) * 1e3:.1f} for {rows}" for rows in ROWS)
    prefill = f"{STEP_TOKENS:,} rows of a prompt {placed.step_s(STEP_TOKENS) * 1e3:,.0f} ms"
    yield f"  step      {times} rows, in ms at {CONTEXT:,} tokens of context, by roofline; {prefill}"


def _gain_lines(gain: Comparison) -> Iterator[str]:
    plain, in_turn, hidden = (run.rate for run in gain.runs)
    yield f"one stream, simulated: {plain:,.0f} tokens/s plain, {in_turn:,.0f} in turn, {hidden:,.0f} pipelined"
    yield f"  {advice_of(gain)}"


def _load_lines(load: Sizing) -> Iterator[str]:
    yield f"a target's replica, plain: {load.streams} streams at once, {load.requests_per_s:,.2f} requests/s at most"
    replicas = f"{load.num_targets} of the target" + (f", {load.num_drafts} of the draft" if load.num_drafts else "")
    price = f"${load.dollars:,.2f} an hour, ${load.dollars_a_million:,.2f} a million tokens of output"
    yield f"replicas: {replicas}; {price}"


def results(needs: Needs) -> list[Result]:
    """The same figures, for --json."""
    found = [each for role in (needs.target, needs.draft) if role is not None for each in _role_results(role)]
    if needs.gain is not None:
        names = ("plain", "in turn", "pipelined")
        found += [
            Result(f"one stream, {name}", run.rate, "tokens/s")
            for name, run in zip(names, needs.gain.runs, strict=True)
        ]
    load = needs.load
    return [
        *found,
        Result("streams of a target's replica", load.streams, ""),
        Result("requests of a target's replica", load.requests_per_s, "1/s"),
        Result("replicas of the target", load.num_targets, ""),
        Result("replicas of the draft", load.num_drafts, ""),
        Result("price of an hour", load.dollars, "$"),
        Result("price of a million tokens of output", load.dollars_a_million, "$"),
    ]


def _role_results(role: Role) -> Iterator[Result]:
    shape = role.outline.shape
    settings = {"gpus": f"{role.gpu}:{role.placed.count}"}
    yield Result(f"parameters of the {role.name}", shape.num_parameters, "", settings=settings)
    yield Result(f"weights of the {role.name}", shape.weight_bytes / 1e9, "GB", settings=settings)
    yield Result(f"KV of the {role.name}", role.kv_tokens, "tokens", settings=settings)
    if shape.state_bytes:
        yield Result(f"states of the {role.name}", role.num_states, "", settings=settings)
    for rows in ROWS:
        step_ms = role.placed.step_s(rows, CONTEXT) * 1e3
        yield Result(f"step of the {role.name}", step_ms, "ms", settings={**settings, "rows": rows, "context": CONTEXT})
