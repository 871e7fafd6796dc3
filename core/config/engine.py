"""Settings of one engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from core.config.checks import check, forbid_unknown
from core.config.link import LINK_PORTS, LinkTls
from core.costs import PASS_LAWS

Dtype = Literal["float32", "bfloat16"]
DECODE_TOKENS = 32
"""More tokens than this to catch up with is prefill: it goes out in a call of its own, waits for others' decoding, and
nobody waits for a guess that has it before it. Orchestrator and engines draw the line at the same length."""
MIN_CHUNK_TOKENS = 8
"""Prefill gets so many rows of a step at least, whatever it costs others; and a prompt's last so many go whole."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model and the memory and arithmetic it may use."""

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

    model: str
    """Directory of a checkpoint: config.json, *.safetensors, tokenizer.json."""
    dtype: Dtype = "float32"
    device: str = "cpu"
    """As torch names it: cpu, cuda, cuda:0."""
    num_threads: int = 1
    """CPU threads of the forward pass."""
    kv_cache_tokens: int | None = 32_768
    """Tokens of KV in all, shared by the sessions; rounded up to whole blocks. None takes what there is memory for."""
    kv_memory_share: float = 0.8
    """Of what is free once the model is loaded, what KV may take if `kv_cache_tokens` is None. Shares of engines that
    have one memory have to add up to 1 or less; what is left is for the numbers of a step."""
    block_tokens: int = 16
    """Tokens to a block of KV. A GPU reads blocks in place if they are a multiple of 256, others are gathered first."""
    max_step_tokens: int = 512
    """Rows of one forward pass, over all sequences."""
    prefill_chunk_tokens: int = 256
    """Rows that prefill may take at most of a step in which others are decoding,"""
    prefill_stretch: float = 1.75
    """and as many as let it take so many times as long as without; what is learned of that may be some way off."""
    max_context_tokens: int | None = None
    """Lower than the model's own limit; None takes the model's."""
    deterministic: bool = False
    """Compute each row in tiles of one fixed shape: its bits do not depend on what shares its step. On a CPU only."""
    compile: bool = False
    """Make native code of the forward pass at start: a minute and a C++ compiler the first time, less of every step
    afterwards; not with tensor_parallel. On a GPU, record small steps as CUDA graphs at each start, on all ranks;
    block_tokens has to suit it."""
    compile_cache: str = "~/.cache/outrider/compiled"
    """Where native code is kept for later starts. What lies there is run."""
    share_prefixes: bool = True
    """Compute what prompts begin with in common once, and keep KV of ended sessions until the room is needed."""
    session_timeout_s: float = 600.0
    """A session that says nothing for this long is dropped and its KV freed."""
    tensor_parallel: int = 1
    """Ranks that share the model, each a process of its own that holds its slices of the weights and of the KV."""
    link_ports: tuple[int, int] | None = LINK_PORTS
    """First and last of the TCP ports at which the engine may listen for orchestrators; it takes the first that is
    free, at the address of its node. [0, 0] takes any free port. None, or no free port, leaves the way through Ray's
    actor calls, which takes milliseconds a call."""
    paced_as: str | None = None
    """A model on other hardware, by its name in `core.costs`: each forward pass then lasts at least as long as that
    model's would over as many rows, by waiting. To see on a small machine, with a small model, what a deployment does
    around its models: never where outputs are wanted soon. None does not wait."""
    link_tls: LinkTls | None = None
    """Encrypts the engine's links, and has both ends show a certificate. Set it where others can read the network
    between nodes, together with Ray's own TLS, since leases and actor calls go over that. None, and no
    OUTRIDER_LINK_TLS_DIR in the environment, leaves links authenticated by the lease's key, and readable."""

    def __post_init__(self) -> None:
        check(bool(self.model), "model", "the directory of a checkpoint", self.model)
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
        first, last = self.link_ports or (0, 0)
        check(0 <= first <= last < 2**16, "link_ports", "two ports in ascending order", self.link_ports)
        is_known = self.paced_as is None or self.paced_as in PASS_LAWS
        check(is_known, "paced_as", f"one of {', '.join(PASS_LAWS)}", self.paced_as)
