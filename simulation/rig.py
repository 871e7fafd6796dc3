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
from simulation.engines import EOS, Hardware, HopLaw, SimDraft, SimTarget, Text
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
        self.cluster = Cluster(
            Fleet("target", blueprint.num_targets, _target_builder(blueprint), self.target_wire, limits),
            Fleet("draft", blueprint.num_drafts, _draft_builder(blueprint), self.draft_wire, limits),
            [
                Fleet(f"draft {number}", 1, _draft_builder(replace(blueprint, text=text)), self.draft_wire, limits)
                for number, text in enumerate(blueprint.other_drafts, 2)
            ],
        )
        engine = EngineConfig("simulated")
        extra = (DraftConfig(engine),) * (len(blueprint.other_drafts) + blueprint.num_extra_drafts)
        config = ServiceConfig(
            TargetConfig(engine), DraftConfig(engine), extra, speculation=blueprint.speculation, limits=blueprint.limits
        )
        info = model_info(blueprint.text)
        draft = info if blueprint.num_drafts else None
        tokenizer = cast("Tokenizer", SimTokenizer())
        self.services = [
            Service(config, info, draft, tokenizer, self.cluster, self.clock, grammars=grammars)
            for _ in range(blueprint.num_orchestrators)
        ]
        self.service = self.services[0]
        for service in self.services:
            for number in range(1, 1 + len(extra)):
                service.use_draft(info, number)


def model_info(text: Text) -> ModelInfo:
    return ModelInfo(
        "simulated", "Simulated", "float32", "none", 0, text.vocab_size, CONTEXT_TOKENS, 2**20, eos_token_ids=(EOS,)
    )


def _target_builder(blueprint: Blueprint) -> Callable[[str, int], SimTarget]:
    return lambda engine_id, epoch: SimTarget(engine_id, epoch, blueprint.text, blueprint.hardware.target)


def _draft_builder(blueprint: Blueprint) -> Callable[[str, int], SimDraft]:
    return lambda engine_id, epoch: SimDraft(
        engine_id, epoch, blueprint.text, blueprint.hardware.draft, has_noise=blueprint.has_noise
    )
