"""The embedded pair is what its card says: loadable, small, one tokenizer, a draft its target often agrees with."""

import filecmp
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from models.train import history, steps
from models.train.acceptance import measure_acceptance
from models.train.architecture import END_OF_TEXT_ID, MAX_POSITIONS, VOCABULARY, build_model, parameter_count
from models.train.card import RULE_ORDER, alphas
from models.train.checkpoints import checkpoint_path, load_progress, load_trained
from models.train.corpus import is_excluded, is_held_out, load_split
from models.train.export import DEMO_FOLDER
from models.train.loop import Run, train
from models.train.objectives import distillation_from, logits_of, next_token_loss
from models.train.schedule import Schedule
from models.train.stream import token_stream, training_windows
from models.train.tokenizer import END_OF_TEXT, load_tokenizer, save_tokenizer
from workers.training import accepted_by_rule

ROLES = ("target", "draft")
HELD_OUT_TEXT = '''class FileReader:
    """Read lines from a file."""

    def __init__(self, path, encoding=None):
        self.path = path
        self.encoding = encoding
        self._file = None

    def open(self):
        if self._file is not None:
            raise ValueError("file is already open")
        self._file = open(self.path, encoding=self.encoding)
        return self

    def close(self):
        if self._file is not None:
            self._file.close()
'''


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from more, and threads that wait for each other on a busy machine lose much."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pair() -> dict[str, Any]:
    return {
        role: AutoModelForCausalLM.from_pretrained(DEMO_FOLDER / role, dtype=torch.float32).eval() for role in ROLES
    }


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO_FOLDER / "target")


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return json.loads((DEMO_FOLDER / "evaluation.json").read_text(encoding="utf-8"))


def test_pair_is_small_enough_to_live_in_the_repository():
    assert sum(path.stat().st_size for path in DEMO_FOLDER.rglob("*") if path.is_file()) < 20_000_000


@pytest.mark.parametrize("role", ROLES)
def test_weights_are_finite_bf16_and_tied_embeddings_stored_once(role: str):
    with safe_open(DEMO_FOLDER / role / "model.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    assert not any("lm_head" in name for name in weights)
    assert all(weight.dtype == torch.bfloat16 and weight.isfinite().all() for weight in weights.values())


def test_models_agree_on_vocabulary_positions_and_end_of_text(pair: dict[str, Any]):
    for model in pair.values():
        assert model.config.vocab_size == VOCABULARY
        assert model.config.max_position_embeddings == MAX_POSITIONS
        assert model.generation_config.eos_token_id == model.config.eos_token_id == END_OF_TEXT_ID
        assert model.generation_config.temperature is None


def test_draft_is_several_times_smaller(pair: dict[str, Any], figures: dict[str, Any]):
    counts = {role: parameter_count(model) for role, model in pair.items()}
    assert counts == figures["parameters"]
    assert counts["target"] > 5 * counts["draft"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_both_models_carry_the_same_tokenizer(name: str):
    assert filecmp.cmp(DEMO_FOLDER / "target" / name, DEMO_FOLDER / "draft" / name, shallow=False)


def test_tokenizer_fills_the_vocabulary_and_ends_texts(tokenizer: Any):
    assert len(tokenizer) == VOCABULARY
    assert tokenizer.eos_token == tokenizer.bos_token == END_OF_TEXT
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == END_OF_TEXT_ID


@given(text=st.text())
def test_tokenizer_gives_back_any_text(tokenizer: Any, text: str):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("text", ["\r\n\t x  \n", "a _b__init__ c_d", "\N{SNOWMAN}\N{GRINNING FACE}\x00\u2028", ""])
def test_tokenizer_gives_back_awkward_text(tokenizer: Any, text: str):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("indentation", ["\n    ", "\n        ", "\n\n    ", "\n            "])
def test_a_line_break_and_its_indentation_are_one_token(tokenizer: Any, indentation: str):
    assert len(tokenizer(f"a:{indentation}b")["input_ids"]) == 4


def test_draft_agrees_with_target_far_above_chance(pair: dict[str, Any], tokenizer: Any):
    prompts = torch.tensor([tokenizer(HELD_OUT_TEXT)["input_ids"]])
    by_rule = {
        each.rule: each.alpha
        for temperature in (0.0, 1.0)
        for each in measure_acceptance(pair["target"], pair["draft"], prompts.repeat(2, 1), 24, temperature, seed=1)
    }
    assert by_rule.keys() == {"greedy", "rejection", "coupled"}
    assert min(by_rule.values()) > 0.4


def test_acceptance_of_a_model_with_itself_is_one():
    log_p = torch.randn(2, 3, 5).log_softmax(-1)
    for temperature in (0.0, 1.0):
        for accepted in accepted_by_rule(log_p, log_p, temperature).values():
            torch.testing.assert_close(accepted, torch.ones(2, 3))


def test_rejection_acceptance_by_hand():
    p, q = torch.tensor([[[0.5, 0.5, 0.0]]]), torch.tensor([[[0.25, 0.25, 0.5]]])
    accepted = accepted_by_rule(p.log(), q.log(), 1.0)
    assert accepted["rejection"].item() == pytest.approx(0.5)


def test_held_out_files_are_in_no_training():
    split = load_split()
    training, held_out = ({document.name for document in part} for part in (split.training, split.held_out))
    assert held_out
    assert not training & held_out
    assert {document.text for document in split.training}.isdisjoint(document.text for document in split.held_out)
    assert all(is_held_out(name) for name in held_out)
    assert not any(is_held_out(name) or is_excluded(Path(name)) for name in training)


def test_the_split_does_not_move():
    assert [name for name in ("ast.py", "typing.py", "os.py", "json/decoder.py") if is_held_out(name)] == [
        "ast.py",
        "typing.py",
    ]


@pytest.mark.parametrize(
    "name", ["test/test_os.py", "unittest/test/x.py", "site-packages/a/b.py", "encodings/cp437.py"]
)
def test_tests_packages_and_tables_are_left_out(name: str):
    assert is_excluded(Path(name))


def test_every_epoch_reads_every_window_once():
    stream = torch.arange(1000, dtype=torch.int32)
    steps = [training_windows(stream, length=10, rows=3, step=step, seed=7) for step in range(33)]
    read = torch.cat(steps).flatten()
    assert len(read) == len(read.unique()) == 990
    assert torch.equal(steps[5], training_windows(stream, length=10, rows=3, step=5, seed=7))


def test_documents_are_opened_by_end_of_text(tokenizer: Any):
    stream = token_stream(tokenizer, ["a = 1", "b = 2"])
    assert (stream == END_OF_TEXT_ID).nonzero().flatten().tolist() == [0, len(stream) // 2]


def test_training_lowers_the_loss_and_goes_on_from_its_checkpoint(tmp_path: Path):
    schedule = Schedule(minutes=10 / 60, peak_rate=4e-3, step_tokens=256, short_tokens=64, long_tokens=64)
    stream = (torch.arange(2000) % 16).int()

    def run() -> Run:
        return Run(
            build_model("draft"),
            next_token_loss,
            stream,
            schedule,
            tmp_path / "draft.pt",
            seed=1,
            device=torch.device("cpu"),
            is_bf16=False,
            clock=itertools.count().__next__,  # a step takes a second, however slow the machine
        )

    progress = train(run())
    assert progress.step == 10
    assert progress.loss < torch.tensor(VOCABULARY).log()
    assert train(run()) == progress


def test_a_model_is_at_no_distance_from_itself(pair: dict[str, Any]):
    loss = distillation_from(pair["draft"], "kl")(pair["draft"], torch.arange(20).view(2, 10))
    assert abs(loss.item()) < 1e-6


def test_acceptance_is_asked_for_as_speculative_sampling_defines_it(pair: dict[str, Any]):
    """-log of the sum of min(p, q), and none is lost between a model and itself."""
    windows = torch.arange(20).view(2, 10)
    assert abs(distillation_from(pair["draft"], "accepted")(pair["draft"], windows).item()) < 1e-5
    p, q = (logits_of(pair[role], windows).flatten(0, 1).softmax(-1).double() for role in ("target", "draft"))
    overlap = 1 - (p - q).abs().sum(-1) / 2
    loss = distillation_from(pair["target"], "accepted")(pair["draft"], windows)
    assert loss.item() == pytest.approx(-overlap.log().mean().item(), rel=1e-4)


def test_learning_rate_rises_stays_and_ends_at_zero():
    schedule = Schedule(minutes=10, peak_rate=1.0)
    assert schedule.learning_rate(0) < 0.01
    assert schedule.learning_rate(60) == schedule.learning_rate(200) == 1.0
    assert schedule.learning_rate(600) == schedule.learning_rate(700) == 0


def test_the_last_windows_are_as_long_as_the_positions():
    schedule = Schedule(minutes=10, peak_rate=1.0, step_tokens=4096)
    assert schedule.window(0) == (512, 8)
    assert schedule.window(599) == (MAX_POSITIONS, 2)
    assert Schedule(10, 1.0, step_tokens=4096, long_from_share=0.0).window(0) == (MAX_POSITIONS, 2)


def test_the_card_shows_the_figures(figures: dict[str, Any]):
    card = (DEMO_FOLDER.parent / "README.md").read_text(encoding="utf-8")
    assert len(alphas(figures)) == len(RULE_ORDER)
    for alpha in alphas(figures):
        assert f"{alpha} ±" in card
    for loss in figures["losses"]:
        assert f"{loss['nats_per_token']:.3f}" in card
    for run in figures["runs"].values():
        assert f"{run['step']:,}" in card


def test_training_goes_on_from_the_shipped_pair(
    pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the corpus, which takes a while to encode: the shipped tokenizer stands for one that was just trained."""

    def fake_make_tokenizer(setting: steps.Setting) -> None:
        save_tokenizer(load_tokenizer(DEMO_FOLDER / "target"), setting.work / "tokenizer")

    monkeypatch.setattr(steps, "make_tokenizer", fake_make_tokenizer)
    steps.adopt(steps.Setting(tmp_path, 1, torch.device("cpu"), is_bf16=False))
    figures = json.loads((DEMO_FOLDER / "evaluation.json").read_text(encoding="utf-8"))
    assert history.read_history(tmp_path) == figures["history"]
    assert set(figures["compared"]) >= {"on_files", "on_both"}
    for name, kept in (figures["compared"] | {"shipped": figures}).items():
        assert steps.read_json(tmp_path / f"{name}.json") == kept
    for role, run in zip(ROLES, figures["runs"], strict=True):
        path = checkpoint_path(tmp_path, run)
        assert load_progress(path).tokens == figures["runs"][run]["tokens"]
        adopted = load_trained(path, role).state_dict()
        for name, weight in pair[role].state_dict().items():
            assert torch.equal(adopted[name], weight.float()), name
        with pytest.raises(SystemExit, match="--name of its own"):
            steps.start_of(steps.Setting(tmp_path, 1, torch.device("cpu"), is_bf16=False), run, run, role)
    with pytest.raises(SystemExit, match="runs of its own"):
        steps.adopt(steps.Setting(tmp_path, 1, torch.device("cpu"), is_bf16=False))
