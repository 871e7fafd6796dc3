"""The running service while the link of its draft is switched: a stream in progress has the same tokens."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from local import DEMO, noisy_copy
from served import deployed_for

from bench.harness.probe import engine_of
from bench.models.prompts import held_out_prompts
from core.config import SpeculationConfig
from deploy.settings import demo_config
from outrider_client import Client
from workers.live import files_after, read_kept

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = "def parse_args(self, args):\n    "
FIELDS = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.8, "seed": 5}
MAX_WAIT_S = 60.0
MAX_LEARNING_S = 240.0
NUM_PROMPTS, NUM_AT_ONCE = 64, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("learning")
    (path / "noisy").mkdir()
    noisy_copy(DEMO / "draft", path / "noisy")
    (path / "current").symlink_to(DEMO / "draft")
    return path


def switch(folder, to):
    (folder / "new").symlink_to(to)
    (folder / "new").rename(folder / "current")


def test_a_draft_is_swapped_under_a_stream(folder, cluster):
    demo = demo_config([f"target.engine.learning_buffer={folder / 'buffer'}"])
    draft = replace(demo.draft, engine=replace(demo.draft.engine, model=str(folder / "current")), follows_link=True)
    speculation = SpeculationConfig(policy="static", guessers=("draft",))
    config = replace(demo, draft=draft, speculation=speculation)
    with deployed_for(config, cluster) as server, Client(server.address) as client:
        plain = client.generate(PROMPT, **FIELDS, max_draft_tokens=0, learning=False)
        first, tokens = epoch(), []
        chunks = client.stream(PROMPT, **FIELDS)
        tokens += next(chunks).token_ids
        switch(folder, folder / "noisy")
        tokens += [token for chunk in chunks for token in chunk.token_ids]
        assert tuple(tokens) == plain.token_ids
        end_s = time.monotonic() + MAX_WAIT_S
        while epoch() in (first, None):
            assert time.monotonic() < end_s
            assert client.generate(PROMPT, **FIELDS).token_ids == plain.token_ids
        assert client.generate(PROMPT, **FIELDS).token_ids == plain.token_ids
        while not (files := files_after(folder / "buffer")):
            assert time.monotonic() < end_s
            time.sleep(0.5)
    assert all(text.num_chosen for text in read_kept(files))


def test_a_learner_beside_the_service_trains_a_draft_that_its_replicas_take_over(tmp_path, cluster):
    """From the buffer over the link to the verdict on the new draft. All the while no token changes."""
    (tmp_path / "current").symlink_to(spoilt_draft(tmp_path))
    demo = demo_config([f"target.engine.learning_buffer={tmp_path / 'buffer'}"])
    draft = replace(demo.draft, engine=replace(demo.draft.engine, model=str(tmp_path / "current")), follows_link=True)
    speculation = SpeculationConfig(policy="static", guessers=("draft",))
    config = replace(demo, draft=draft, speculation=speculation)
    prompts = held_out_prompts(NUM_PROMPTS, seed=3)
    with deployed_for(config, cluster) as server, Client(server.address) as client, learner(tmp_path) as learning:
        first = epoch()
        plain = outputs(client, prompts, max_draft_tokens=0, learning=False)
        until(lambda: (tmp_path / "current").resolve().name == "0001", client, prompts, plain, tmp_path)
        until(lambda: epoch() not in (first, None), client, prompts, plain, tmp_path)
        until(lambda: learning.poll() is not None, client, prompts, plain, tmp_path)
        assert learning.returncode == 0, said(tmp_path)
    assert "0001 is handed over; held out, " in said(tmp_path)
    assert re.search(r"0001 (stays|is taken back, .* is served again): acceptance 0\.\d+ -> 0\.\d+", said(tmp_path))


def spoilt_draft(folder):
    """So spoilt that a few steps make it better: its first guess is right at 0.26 of the places, and then at 0.40."""
    draft = DEMO / "draft"
    for number in range(3):
        (folder / f"noisy {number}").mkdir()
        draft = noisy_copy(draft, folder / f"noisy {number}")
    return draft


def outputs(client, prompts, **changes):
    fields = {"max_tokens": 96, "ignore_eos": True, "temperature": 0.8, "seed": 5, **changes}
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        return list(pool.map(lambda prompt: client.generate(prompt, **fields).token_ids, prompts))


def until(is_reached, client, prompts, plain, folder):
    """Keep up the traffic until then."""
    end_s = time.monotonic() + MAX_LEARNING_S
    while not is_reached():
        assert time.monotonic() < end_s, said(folder)
        assert outputs(client, prompts) == plain


@contextmanager
def learner(folder):
    """`outrider learn` in a process of its own, for one round."""
    places = ("--buffer", folder / "buffer", "--draft", folder / "current", "--versions", folder / "versions")
    plan = ("--every-tokens", 4000, "--steps", 40, "--learning-rate", 3e-4)
    judging = ("--judge-guesses", 1000, "--settle-s", 15, "--rounds", 1)
    command = [Path(sys.executable).parent / "outrider", "learn", *map(str, (*places, *plan, *judging))]
    with (folder / "said").open("w") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        try:
            yield process
        finally:
            process.terminate()


def said(folder):
    return (folder / "said").read_text()


def epoch():
    """Epoch of the draft's engine; None while it loads."""
    try:
        return asyncio.run(engine_of("draft"))._actor_id
    except RuntimeError:
        return None
