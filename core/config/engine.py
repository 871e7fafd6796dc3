"""Settings of one engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from core.config.checks import ABOVE_0, SHARE_ABOVE_0, Settings, at_least, check
from core.config.link import LINK_PORTS, LinkTls
from core.costs import PASS_LAWS
from core.ranges import Range

Quantize = Literal["int8", "int4"]
KVDtype = Literal["fp8"]
FP8_CAPABILITY: Final = (8, 9)
"""Least compute capability of a GPU that computes with e4m3."""
Dtype = Literal["float32", "bfloat16"]
DTYPES_ALLOWED = "bfloat16 or float32, to which weights in float16 are converted"
DECODE_TOKENS = 32
"""Largest number of new tokens that counts as decoding. More are prefill: they are sent in a call of their own,
decoding sessions come before them, and no round waits for guesses that follow them. Orchestrator and engines share this
limit."""
MIN_CHUNK_TOKENS = 8
"""Smallest number of prefill rows in a step, whatever they cost decoding sessions. Shorter remainders are not split."""


@dataclass(frozen=True, slots=True)
class EngineConfig(Settings):
    """One model, and the memory and processors that its engine may use."""

    model: str
    """Directory of the checkpoint, with config.json, *.safetensors and tokenizer.json."""
    layers: tuple[int, ...] | None = None
    """Indices of the checkpoint's layers to load, from 0, in ascending order; None loads all. Set it for a draft that
    consists of some of its target's layers, as found by `outrider layers`. A target must have all its layers, and
    there must be one rank."""
    dtype: Dtype = "float32"
    """Type of weights and arithmetic: float32 or bfloat16, to which weights in float16 are converted. With float32
    outputs do not depend on the other requests in the batch. bfloat16 needs half the memory; set it where the hardware
    has bfloat16 instructions."""
    device: str = "cpu"
    """Device of the model, as torch names it: cpu or cuda. Set cuda on a GPU, and `num_gpus` of target or draft above
    0: Ray chooses the GPU. In one process, without Ray, cuda:1 is the second one."""
    num_threads: int = 1
    """Number of CPU threads of a forward pass, at least 1. Raise it to the number of cores reserved for the engine."""
    kv_cache_tokens: int | None = 32_768
    """Size of the KV cache in tokens, for all sessions together, at least 1; rounded up to whole blocks. None uses
    what `kv_memory_share` allows. Raise it where sessions are preempted; set a number where several engines
    share one memory."""
    kv_dtype: KVDtype | None = None
    """fp8: keep keys and values in 8 bits (e4m3), on a GPU of compute capability 8.9 or more. The KV cache then holds
    twice as many tokens as in bfloat16, and attention reads half as many bytes. Each number is rounded by itself, and
    outputs are those of the rounded numbers. None keeps `dtype`. Set fp8 where contexts are long or the cache is
    full."""
    kv_memory_share: float = 0.8
    """If `kv_cache_tokens` is None, in (0, 1]. On a CPU: share of the memory left after loading the model that the KV
    cache takes; the rest is for activations. On a GPU: share of its whole memory that this engine takes, weights,
    activations and KV together. Lower it if a step runs out of memory, or if engines share one memory: their shares
    must add up to less than 1."""
    block_tokens: int = 16
    """Size of a KV block in tokens, at least 1. Prefixes are shared by whole blocks. On a GPU multiples of 64 are read
    fastest."""
    max_step_tokens: int = 512
    """Largest number of rows (tokens) of one forward pass, over all sequences, at least 1. Set 2048 on a GPU: prompts
    take fewer passes, and the blocks of many sessions fit into one. Memory grows in proportion: for activations, and
    for logits of the rows that are verified, 6 bytes for each token of the vocabulary."""
    prefill_chunk_tokens: int = 256
    """Largest number of prefill tokens in a step in which other sessions decode, at least 1. Lower it where prompts
    stall other streams, raise it where the first token comes late; set 1024 on a GPU."""
    prefill_stretch: float = 1.75
    """Limit of how much longer prefill may make a step in which other sessions decode, as a ratio of durations, at
    least 1. The engine estimates durations, so a single step may exceed it. Raise it where the first token comes late,
    lower it where prompts stall other streams."""
    max_context_tokens: int | None = None
    """Longest context (prompt and output together) in tokens, at least 2. None uses the model's own limit, which also
    bounds larger values. Lower it to limit the KV of one session."""
    quantize: Quantize | None = None
    """int8 or int4: round the weights of linear layers, but the output layer's, to integers at load, and compute with
    these. On a CPU, with one rank. int8 has a scale for each output, int4 one for each 32 inputs. Steps of
    few rows are faster, and outputs are those of the rounded weights. None keeps `dtype`."""
    deterministic: bool = False
    """Whether to compute rows in tiles of one fixed shape, so that their bits do not depend on the other rows of the
    batch; steps take longer. On a GPU it needs `compile` and `tensor_parallel` 1. Set it where outputs in bfloat16 have
    to be reproducible."""
    compile: bool = False
    """Whether to compile the forward pass, for shorter steps. On a CPU: only a model whose operations are not run as a
    program anyway, which takes a minute and a C++ compiler at the first start; `tensor_parallel` must be 1. On a GPU:
    layers are compiled, which takes 10 to 20 s, and steps of up to 512 rows become CUDA graphs at each start, which
    takes 15 to 40 s for an 8B."""
    compile_cache: str = "~/.cache/outrider/compiled"
    """Directory that keeps compiled native code for later starts. Its files are executed, so no other user may be able
    to write there."""
    share_prefixes: bool = True
    """Whether prompts with a common prefix share its KV (prefix caching); the KV of ended sessions is kept until its
    memory is needed. Unset it where response times must not reveal what other callers have sent."""
    session_timeout_s: float = 600.0
    """Seconds without a message, above 0, after which a session's KV is freed. Lower it where orchestrators that died
    leave the KV cache full, raise it where clients pause longer."""
    tensor_parallel: int = 1
    """Number of processes (ranks) that share the model by tensor parallelism, at least 1; each holds a slice of the
    weights and of the KV. Raise it where the model does not fit into one device."""
    pipeline_parallel: int = 1
    """Number of stages, at least 1: each has some of the layers, and `tensor_parallel` ranks for them, all on one node.
    A step passes through the stages one after the other, so this makes room and no step faster. Raise it where a model
    does not fit into the devices of one node. Heads and `feature_layers` need 1."""
    feature_layers: tuple[int, ...] = ()
    """Targets only: layers whose hidden states verdicts carry to a draft that runs a head, in the head's order; -1 is
    the last hidden state, n the input of layer n. Set it to the `feature_layers` of the draft's head."""
    head: str | None = None
    """Directory of a head for the model of `model`: it guesses from that model's hidden states
    (docs/howto/draft-with-a-head.md). The directory of `model` itself stands for the layer in it that predicts one more
    token (MTP). On a target the guesses come with each verdict, without a draft engine. On a
    draft the engine runs the head in place of the model, and the target sends it hidden states. None runs the model
    alone."""
    head_passes: int = 5
    """Targets with a head that guesses token after token (EAGLE, MTP): largest number of its passes for each verdict,
    in [1, 16]. It makes fewer where its guesses become unlikely. Raise it where its guesses are mostly accepted, lower
    it where its passes take long beside the target's."""
    expert_parallel: bool = False
    """Whether each rank holds whole experts of a mixture, instead of a slice of every expert; `tensor_parallel` must be
    above 1. Set it where slices of experts are too narrow to be computed fast, or where the experts' features cannot be
    divided by the ranks. Models that can be split only by experts are, whatever it says."""
    cascade_tokens: int = 0
    """Drafts only: number of tokens that prompt lookup guesses for the draft in each pass, which the draft verifies in
    the same pass (cascade), in [0, 32]; 0 turns it off. It never changes an output. Raise it where texts repeat
    themselves and the draft is slow."""
    adapters: dict[str, str] = field(default_factory=dict, hash=False)
    """Targets only: LoRA adapters to load at start, by name: directories with PEFT's adapter_config.json and
    adapter_model.safetensors. Requests choose one by naming it as their `model`. Set it to serve variants of one model
    from its weights."""
    max_adapters: int = 16
    """Largest number of LoRA adapters that the engine holds at once, at least 1; further ones are refused. Each takes
    the memory of its files, which on a GPU has to be left over by `kv_memory_share`. Raise it where there are more."""
    learning_buffer: str | None = None
    """Targets only: directory that keeps parts of prompts and outputs, with the target's probabilities where guesses
    were wrong, for `outrider learn` (docs/howto/learn-from-traffic.md). Requests with `learning: false`, from keys with
    learning=no, or with an adapter are left out. None keeps nothing. Set it where callers have agreed to that and
    drafts should follow what is asked."""
    learning_buffer_tokens: int = 1_000_000
    """Size of that buffer in tokens, at least 10000, of all targets that write to it; the oldest are deleted. A token
    takes at most 350 bytes. Raise it where traffic has many subjects."""
    max_grammars: int = 32
    """Number of compiled grammars kept for later requests, at least 1; the least recently used one is dropped first. A
    grammar usually takes less than a megabyte, at worst tens of them. Raise it where requests use many different
    schemas."""
    digest_whole_bytes: int = 256 * 2**20
    """Limit in bytes, at least 0, up to which receipts hash all weights at start, which takes one to three seconds a
    gigabyte; of a larger checkpoint they hash three blocks of each tensor. Raise it where a receipt has to detect a
    change of any single weight."""
    link_ports: tuple[int, int] = LINK_PORTS
    """First and last TCP port of the range in which the engine listens for orchestrators, ascending, below 65536; it
    uses the first free port on its node's address, and [0, 0] means any free port. If no port is free, the engine does
    not start. Change it to what a firewall between nodes allows."""
    paced_as: str | None = None
    """Name in `core.costs` of a model on other hardware. Each forward pass then waits until it has taken as long as
    that model would take for the same number of rows. Set it to try out a deployment of large models on a small
    machine, never in production. None adds no wait."""
    link_tls: LinkTls | None = None
    """Certificates for mutual TLS on the engine's links. Set it where others can read the network between nodes, and
    turn on Ray's own TLS as well, which covers leases. With None, and without the environment
    variable OUTRIDER_LINK_TLS_DIR, links are authenticated by the lease's key but not encrypted."""

    def __post_init__(self) -> None:
        check(bool(self.model), "model", "the directory of a checkpoint", self.model)
        self._check_layers()
        check(self.dtype in get_args(Dtype), "dtype", DTYPES_ALLOWED, self.dtype)
        check(self.quantize in (None, *get_args(Quantize)), "quantize", "int8, int4 or absent", self.quantize)
        can_quantize = self.quantize is None or (self.device == "cpu" and self.num_ranks == 1)
        rule = "absent unless device is cpu, and tensor_parallel and pipeline_parallel are 1"
        check(can_quantize, "quantize", rule, self.quantize)
        is_on_gpu = self.kv_dtype is None or (self.kv_dtype == "fp8" and self.device != "cpu")
        check(is_on_gpu, "kv_dtype", "absent, or fp8 on a GPU", self.kv_dtype)
        self._check(at_least(1), "kv_cache_tokens", "num_threads", "block_tokens", "max_step_tokens")
        self._check(at_least(1), "prefill_chunk_tokens", "prefill_stretch", "max_grammars")
        self._check(at_least(1), "tensor_parallel", "pipeline_parallel")
        check(self.tensor_parallel > 1 or not self.expert_parallel, "expert_parallel", "false on one rank", True)
        self._check(at_least(1), "max_adapters")
        self._check(at_least(10_000), "learning_buffer_tokens")
        check(self.learning_buffer != "", "learning_buffer", "the path of a directory", self.learning_buffer)
        self._check(at_least(2), "max_context_tokens")
        self._check(at_least(0), "digest_whole_bytes")
        self._check(ABOVE_0, "session_timeout_s")
        self._check(SHARE_ABOVE_0, "kv_memory_share")
        self._check(Range(0, 32), "cascade_tokens")
        self._check(Range(1, 16), "head_passes")
        self._check_heads()
        has_names = all(name and path for name, path in self.adapters.items())
        check(has_names, "adapters", "directories by name, neither of them empty", self.adapters)
        has_room = len(self.adapters) <= self.max_adapters
        check(has_room, "adapters", f"at most max_adapters ({self.max_adapters})", len(self.adapters))
        first, last = self.link_ports
        check(0 <= first <= last < 2**16, "link_ports", "two ports in ascending order", self.link_ports)
        is_known = self.paced_as is None or self.paced_as in PASS_LAWS
        check(is_known, "paced_as", f"one of {', '.join(PASS_LAWS)}", self.paced_as)

    def _check_heads(self) -> None:
        layers = self.feature_layers
        is_valid = len(set(layers)) == len(layers) and min(layers, default=0) >= -1
        check(is_valid, "feature_layers", "different numbers from -1", layers)
        check(self.head != "", "head", "the directory of a head", self.head)
        is_whole = self.pipeline_parallel == 1  # rank 0 has all layers, or states that heads read would have to be sent
        check(is_whole or not layers, "feature_layers", "empty where pipeline_parallel is above 1", layers)
        check(is_whole or self.head is None, "head", "absent where pipeline_parallel is above 1", self.head)

    def _check_layers(self) -> None:
        layers = self.layers
        if layers is None:
            return
        is_sorted = list(layers) == sorted(set(layers))
        check(bool(layers) and layers[0] >= 0 and is_sorted, "layers", "numbers from 0 in ascending order", layers)
        rule = "absent where tensor_parallel or pipeline_parallel is above 1"
        check(self.num_ranks == 1, "layers", rule, layers)

    @property
    def num_ranks(self) -> int:
        """Number of processes that share the model."""
        return self.tensor_parallel * self.pipeline_parallel
