"""Builds a real orchestrator between simulated fleets on a virtual clock, for measurements and chaos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import cast

from core.config import DraftConfig, EngineConfig, Limits, ServiceConfig, SpeculationConfig, TargetConfig
from core.ports import Grammars
from core.records import ModelInfo
from orchestrator.service import Service
from orchestrator.text import Tokenizer
from simulation.clock import VirtualClock, VirtualLoop
from simulation.cluster import Cluster, Fleet
from simulation.engines import (
    EOS,
    FEATURE_LAYERS,
    FEATURE_WIDTH,
    Hardware,
    HopLaw,
    SimDraft,
    SimHead,
    SimTarget,
    Text,
)
from simulation.wire import Wire

CONTEXT_TOKENS = 8192


class SimTokenizer:
    """Tokenizer with one letter per token; the end-of-text token has no text."""

    is_byte_level = True
    vocabulary_hash = "simulated"

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == EOS else bytes([ord("a") + token_id % 26])

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode()


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A pair of models, its hardware and its settings."""

    hardware: Hardware
    text: Text
    num_targets: int = 1
    num_drafts: int = 1
    num_orchestrators: int = 1
    """Number of orchestrators; all use the same engines."""
    num_extra_drafts: int = 0
    """Number of further drafts that sessions lease, all served by the first draft's engines."""
    other_drafts: tuple[Text, ...] = ()
    """Texts of further drafts, each with an engine of its own on the first draft's hardware."""
    has_noise: bool = True
    """Whether the draft ranks candidates with the noise that it shares with the target."""
    heads: frozenset[int] = frozenset()
    """Numbers of the drafts that are heads. Extra drafts are what the first one is."""
    reads_prefix: bool = False
    """Whether these heads have KV of their own."""
    has_target_head: bool = False
    """Whether the target's engine has a head, too."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    limits: Limits = field(default_factory=Limits)


class Rig:
    """Orchestrators and their cluster."""

    def __init__(
        self,
        blueprint: Blueprint,
        loop: VirtualLoop,
        random: Random,
        new_wire: Callable[[HopLaw, Random], Wire] = Wire,
        grammars: Grammars | None = None,
    ) -> None:
        """`new_wire` builds the wire to a fleet."""
        self.blueprint = blueprint
        self.clock = VirtualClock(loop)
        self.target_wire, self.draft_wire = (
            new_wire(hop, random) for hop in (blueprint.hardware.target_hop, blueprint.hardware.draft_hop)
        )
        limits = blueprint.limits
        self.breaches: list[AssertionError] = []
        """Features that heads must not be sent."""
        self.cluster = Cluster(
            Fleet("target", blueprint.num_targets, _target_builder(blueprint), self.target_wire, limits),
            Fleet("draft", blueprint.num_drafts, self._draft_builder(blueprint.text, 0), self.draft_wire, limits),
            [
                Fleet(f"draft {number + 1}", 1, self._draft_builder(text, number), self.draft_wire, limits)
                for number, text in enumerate(blueprint.other_drafts, 1)
            ],
        )
        engine = EngineConfig("simulated")
        extra = (DraftConfig(engine),) * (len(blueprint.other_drafts) + blueprint.num_extra_drafts)
        config = ServiceConfig(
            TargetConfig(engine), DraftConfig(engine), extra, speculation=blueprint.speculation, limits=blueprint.limits
        )
        info = self._target_info()
        draft = self._draft_info(0) if blueprint.num_drafts else None
        tokenizer = cast("Tokenizer", SimTokenizer())
        self.services = [
            Service(config, info, draft, tokenizer, self.cluster, self.clock, grammars=grammars)
            for _ in range(blueprint.num_orchestrators)
        ]
        self.service = self.services[0]
        for service in self.services:
            for number in range(1, 1 + len(extra)):
                service.use_draft(self._draft_info(number), number)

    def _target_info(self) -> ModelInfo:
        info, blueprint = model_info(self.blueprint.text), self.blueprint
        if blueprint.heads:
            info = replace(info, feature_layers=FEATURE_LAYERS, feature_width=FEATURE_WIDTH)
        return replace(info, head="a head" if blueprint.has_target_head else "")

    def _draft_info(self, number: int) -> ModelInfo:
        info = model_info(self.blueprint.text)
        if not self._is_head(number):
            return info
        prefix = self.blueprint.reads_prefix
        return replace(info, feature_layers=FEATURE_LAYERS, feature_width=FEATURE_WIDTH, reads_prefix=prefix)

    def _is_head(self, number: int) -> bool:
        return (number if number <= len(self.blueprint.other_drafts) else 0) in self.blueprint.heads

    def _draft_builder(self, text: Text, number: int) -> Callable[[str, int], SimDraft]:
        law, has_noise = self.blueprint.hardware.draft, self.blueprint.has_noise
        if self._is_head(number):
            return lambda engine_id, epoch: SimHead(engine_id, epoch, text, law, self.breaches)
        return lambda engine_id, epoch: SimDraft(engine_id, epoch, text, law, has_noise=has_noise)


def model_info(text: Text) -> ModelInfo:
    return ModelInfo(
        "simulated", "Simulated", "float32", "none", 0, text.vocab_size, CONTEXT_TOKENS, 2**20, eos_token_ids=(EOS,)
    )


def _target_builder(blueprint: Blueprint) -> Callable[[str, int], SimTarget]:
    return lambda engine_id, epoch: SimTarget(engine_id, epoch, blueprint.text, blueprint.hardware.target)
