"""Places the ranks of an engine on nodes, by the placement group of its replica."""

from __future__ import annotations

from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.config import WorkerConfig

REPLICA_CPUS = 0.1
"""Ray's logical CPUs for the replica itself, which mostly waits."""
ENGINE_BUNDLE = 1


def bundles(config: WorkerConfig) -> list[dict[str, float]]:
    """The resources of a replica: its own, then those of each stage of its engine, whose ranks are on one node."""
    rank = {"CPU": config.num_cpus, "GPU": config.num_gpus, **config.resources}
    stage = {name: amount * config.engine.tensor_parallel for name, amount in rank.items() if amount > 0}
    return [{"CPU": REPLICA_CPUS}, *[dict(stage) for _ in range(config.engine.pipeline_parallel)]]


def placement(config: WorkerConfig, group: PlacementGroup, rank: int) -> dict[str, Any]:
    """Ray options that put a rank into the bundle of its stage, in a replica's own placement group."""
    return {
        "num_cpus": config.num_cpus,
        "num_gpus": config.num_gpus,
        "resources": config.resources,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=ENGINE_BUNDLE + rank // config.engine.tensor_parallel
        ),
    }
