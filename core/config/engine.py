"""Settings of one engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from core.config.checks import check, forbid_unknown
from core.config.link import LINK_PORTS, LinkTls
from core.costs import PASS_LAWS

Dtype = Literal["float32", "bfloat16"]
DECODE_TOKENS = 32
"""Most new tokens that count as decoding. More are prefill: they go out in a call of their own, decoding sessions come
first, and no round waits for guesses behind them. Orchestrator and engines use the same limit."""
MIN_CHUNK_TOKENS = 8
"""Fewest rows of prefill in a step, whatever they cost others. The last tokens of a prompt are not split into less."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model, and the memory and processors that it may use."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

    model: str
    """Directory of a checkpoint: config.json, *.safetensors, tokenizer.json."""
    layers: tuple[int, ...] | None = None
    """Numbers of the checkpoint's layers that are loaded, from 0, in ascending order; not with `tensor_parallel`. None
    loads all. For a draft that is a part of its own target, as `outrider layers` finds it; a target has to be whole."""
    dtype: Dtype = "float32"
    """Type of the weights and of the arithmetic. float32 gives outputs that do not depend on the batch; bfloat16 halves
    the memory and is faster where the hardware has instructions for it."""
    device: str = "cpu"
    """As torch names it: cpu, cuda, cuda:0."""
    num_threads: int = 1
    """CPU threads of the forward pass, at least 1. Raise it to the number of cores that the engine has to itself."""
    kv_cache_tokens: int | None = 32_768
    """Tokens of KV in all, shared by the sessions, at least 1; rounded up to whole blocks. None takes as many as fit
    into `kv_memory_share` of the free memory. Set it where several engines share one memory."""
    kv_memory_share: float = 0.8
    """Share of the memory that is free once the model is loaded, in (0, 1], that KV takes if `kv_cache_tokens` is None.
    The rest is for the activations of a step. Shares of engines that share one memory have to add up to at most 1."""
    block_tokens: int = 16
    """Tokens of a block of KV, at least 1. Set a multiple of 256 on a GPU, which then reads blocks in place; blocks of
    other sizes are gathered first."""
    max_step_tokens: int = 512
    """Rows of one forward pass, over all sequences, at least 1. Raise it for more prefill a step on a large GPU;
    activations take memory in proportion."""
    prefill_chunk_tokens: int = 256
    """Rows of prefill in a step in which other sessions decode, at least 1 and at most this. Lower it where prompts
    stall the streams of others, raise it where the first token comes late."""
    prefill_stretch: float = 1.75
    """Ratio of the duration of a step with prefill to one without, at least 1, up to which prefill gets rows beside
    sessions that decode. The engine learns durations, so single steps may take longer. Raise it where the first token
    comes late."""
    max_context_tokens: int | None = None
    """Longest context, prompt and output together, in tokens, at least 2. None takes the model's own limit, which is
    never exceeded. Lower it to bound the KV of one session."""
    deterministic: bool = False
    """Compute each row in tiles of one fixed shape, so that its bits do not depend on the other rows of its step. On a
    CPU only. Set it where outputs in bfloat16 have to be reproducible."""
    compile: bool = False
    """On a CPU, compile the forward pass to native code at start: a minute and a C++ compiler the first time, shorter
    steps afterwards; not with `tensor_parallel`. On a GPU, record small steps as CUDA graphs at each start, on all
    ranks; `block_tokens` has to be a multiple of 256."""
    compile_cache: str = "~/.cache/outrider/compiled"
    """Directory in which native code is kept for later starts. Its files are executed: nobody else may write there."""
    share_prefixes: bool = True
    """Compute a common prefix of several prompts once, and keep the KV of ended sessions until the room is needed.
    Unset it where the timing of a request must not tell what others have sent."""
    session_timeout_s: float = 600.0
    """Seconds without a message after which a session is dropped and its KV freed; above 0."""
    tensor_parallel: int = 1
    """Number of ranks that share the model, at least 1. Each is a process with its slices of the weights and of the KV.
    Raise it where the model does not fit into one device."""
    cascade_tokens: int = 0
    """Of a draft: tokens that a lookup in the text guesses ahead of it and that the same pass checks, in [0, 32]; 0
    guesses none. They change no output. Raise it where texts repeat themselves, the draft is slow, and a few more rows
    cost its passes little."""
    max_grammars: int = 32
    """Number of compiled grammars that are kept for later requests, at least 1; the least recently used one is dropped.
    Each may take tens of megabytes at worst, and mostly takes less than one. Raise it where requests share many
    schemas."""
    digest_whole_bytes: int = 256 * 2**20
    """Weights of at most this number of bytes, at least 0, are digested whole at start for receipts; of larger ones
    three blocks of each tensor are. A gigabyte takes one to three seconds. Raise it where a receipt has to notice a
    change of single weights."""
    link_ports: tuple[int, int] | None = LINK_PORTS
    """First and last of the TCP ports at which the engine may listen for orchestrators, in ascending order below 65536;
    it takes the first free one, at the address of its node. [0, 0] takes any free port. With None, or without a free
    port, messages go by Ray's actor calls, which take milliseconds each."""
    paced_as: str | None = None
    """A model on other hardware, by its name in `core.costs`: each forward pass is prolonged by waiting to the duration
    that this model needs for the same number of rows. For trying a deployment of large models on a small machine; never
    for production. None does not wait."""
    link_tls: LinkTls | None = None
    """Certificates that encrypt the engine's links and authenticate both ends. Set it where others can read the network
    between nodes, together with Ray's own TLS, since leases and actor calls go over Ray. With None, and without
    OUTRIDER_LINK_TLS_DIR in the environment, links are authenticated by the lease's key and not encrypted."""

    def __post_init__(self) -> None:
        check(bool(self.model), "model", "the directory of a checkpoint", self.model)
        self._check_layers()
        has_kv = self.kv_cache_tokens is None or self.kv_cache_tokens >= 1
        check(has_kv, "kv_cache_tokens", "at least 1", self.kv_cache_tokens)
        check(0 < self.kv_memory_share <= 1, "kv_memory_share", "above 0 and at most 1", self.kv_memory_share)
        for name in ("num_threads", "block_tokens", "max_step_tokens", "prefill_chunk_tokens"):
            check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        has_room = self.max_context_tokens is None or self.max_context_tokens >= 2
        check(has_room, "max_context_tokens", "at least 2", self.max_context_tokens)
        check(self.prefill_stretch >= 1, "prefill_stretch", "at least 1", self.prefill_stretch)
        check(self.session_timeout_s > 0, "session_timeout_s", "positive", self.session_timeout_s)
        check(self.tensor_parallel >= 1, "tensor_parallel", "at least 1", self.tensor_parallel)
        check(self.digest_whole_bytes >= 0, "digest_whole_bytes", "at least 0", self.digest_whole_bytes)
        check(0 <= self.cascade_tokens <= 32, "cascade_tokens", "in [0, 32]", self.cascade_tokens)
        check(self.max_grammars >= 1, "max_grammars", "at least 1", self.max_grammars)
        first, last = self.link_ports or (0, 0)
        check(0 <= first <= last < 2**16, "link_ports", "two ports in ascending order", self.link_ports)
        is_known = self.paced_as is None or self.paced_as in PASS_LAWS
        check(is_known, "paced_as", f"one of {', '.join(PASS_LAWS)}", self.paced_as)

    def _check_layers(self) -> None:
        layers = self.layers
        if layers is None:
            return
        is_sorted = list(layers) == sorted(set(layers))
        check(bool(layers) and layers[0] >= 0 and is_sorted, "layers", "numbers from 0 in ascending order", layers)
        check(self.tensor_parallel == 1, "layers", "absent where tensor_parallel is above 1", layers)
