"""What is said of an engine's death."""

from __future__ import annotations

import pytest
from ray.exceptions import RayError, RayTaskError

from core.config import EngineConfig
from core.errors import WorkerLost
from deploy.engines import actors, incarnations
from deploy.engines.actors import FollowerActor, TargetActor
from deploy.engines.incarnations import Incarnation, cause_of_death

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: TargetActor
\tactor_id: 7d1e2e9f12daf13cce465a4701000000
The actor is dead because """
ADVICE = (
    "its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
    "connection error code 2. End of file. Some common causes include: (1) the process was killed by the OOM killer"
)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RayError(DIED + ADVICE), "its process was killed or crashed"),
        (RayError(DIED + "it was killed by `ray.kill`."), "it was killed by `ray.kill`"),
        (RayError(DIED + "its node has died. Node Id: 0123"), "its node has died"),
        (RayError("The actor is unavailable.\nTry again."), "The actor is unavailable."),
        (RayTaskError("verify", "Traceback\nover\nmany lines", WorkerLost("out of memory\nat 0x7f")), "out of memory"),
        (WorkerLost("told to fail"), "told to fail"),
    ],
)
def test_the_cause_is_a_few_words_without_traces_and_advice(error, cause):
    assert cause_of_death(error) == cause


async def test_all_ranks_of_a_model_live_and_die_together(monkeypatch):
    started, killed = [], []

    def start(actor, config, number, *arguments, **placement):
        started.append((actor, placement["rank"]))
        return len(started) - 1

    monkeypatch.setattr(actors, "start", start)
    monkeypatch.setattr(incarnations.ray, "kill", killed.append)
    config = EngineConfig("m", tensor_parallel=3)
    incarnation = Incarnation("target", TargetActor, config, lambda rank: {"rank": rank})
    assert started == [(TargetActor, 0), (FollowerActor, 1), (FollowerActor, 2)]
    incarnation.kill()
    assert sorted(killed) == [0, 1, 2]
