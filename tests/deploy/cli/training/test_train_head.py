"""`outrider train-head`: texts of each form, a head of each kind, a training that goes on, and clear refusals."""

from __future__ import annotations

import json
import shutil

import pytest

from core.errors import ConfigError
from deploy.cli import main
from deploy.cli.training.training_texts import read_texts
from orchestrator.text import Tokenizer
from tests import checkpoints
from workers.heads import read_head

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
VOCABULARY = checkpoints.SIZES["vocab_size"]
FAST = ("--steps", "4", "--batch", "1", "--unrolled", "2", "--vocabulary", "100")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = checkpoints.write("llama", tmp_path_factory.mktemp("llama"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def tokenizer(target):
    return Tokenizer.from_directory(target)


def lines_at(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def guessed_of(text, tokenizer):
    return [tokenizer.decode(text.token_ids[first:end], skip_special_tokens=False) for first, end in text.spans]


def test_the_answers_of_a_conversation_are_guessed_with_the_token_that_ends_them(tokenizer, tmp_path):
    turns = [("system", "Be short."), ("user", "A?"), ("assistant", "Yes."), ("user", "B?"), ("assistant", "No.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (text,) = read_texts(
        [lines_at(tmp_path / "a.jsonl", {"messages": messages, "temperature": 0.8})], tokenizer, VOCABULARY
    )
    assert guessed_of(text, tokenizer) == ["Yes.<|end|>", "No.<|end|>"]
    whole = "".join(f"{role}: {content}<|end|>\n" for role, content in turns)
    assert text.token_ids == list(tokenizer.encode(whole.rstrip("\n"), add_special_tokens=False))
    assert (text.kind, text.temperature) == ("chat", 0.8)


@pytest.mark.parametrize("trims", [False, True])
def test_an_answer_that_ends_in_white_space_is_ended_by_the_templates_own_token(target, tmp_path, trims):
    """Llama 3's template strips messages."""
    template = TEMPLATE.replace("message['content']", "message['content'] | trim") if trims else TEMPLATE
    shutil.copytree(target, tmp_path / "target")
    (tmp_path / "target/chat_template.jinja").write_text(template)
    turns = [("user", "A?"), ("assistant", "Yes. \n"), ("user", "B?"), ("assistant", "No.\n")]
    messages = [{"role": role, "content": content} for role, content in turns]
    tokenizer = Tokenizer.from_directory(tmp_path / "target")
    (text,) = read_texts([lines_at(tmp_path / "a.jsonl", {"messages": messages})], tokenizer, VOCABULARY)
    space = ("", "") if trims else (" \n", "\n")
    assert guessed_of(text, tokenizer) == [f"Yes.{space[0]}<|end|>", f"No.{space[1]}<|end|>"]


def test_other_forms(tokenizer, tmp_path):
    file = lines_at(
        tmp_path / "a.jsonl",
        "plain text",
        {"text": "said", "kind": "code"},
        {"prompt": "one "},
        {"prompt": "1 + 1 = ", "answer": "two"},
        {"token_ids": [5, 6, 7, 8], "spans": [[1, 3]]},
    )
    (tmp_path / "b.txt").write_text("abcdefgh" * 400)
    found = read_texts([file, tmp_path / "b.txt"], tokenizer, VOCABULARY)
    assert [guessed_of(text, tokenizer) for text in found[:4]] == [["plain text"], ["said"], ["one "], ["two"]]
    assert found[1].kind == "code"
    assert (found[4].token_ids, found[4].spans) == ([5, 6, 7, 8], [(1, 3)])
    assert "".join(guessed_of(text, tokenizer)[0] for text in found[5:]) == "abcdefgh" * 400
    assert all(len(text.token_ids) <= 512 for text in found)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: "),
        ("[1]", "line 2: must be a JSON string or an object"),
        ("{}", "line 2: lacks 'prompt'"),
        ('{"messages": [{"role": "user", "content": "A"}]}', "line 2: messages: none is the assistant's"),
        ('{"messages": [{"content": "A"}]}', "line 2: lacks 'role'"),
        ('{"token_ids": [1, 2], "spans": [[0, 3]]}', "line 2: spans must lie in its 2 tokens"),
        ('{"text": 5}', "line 2: text must be a string, got 5"),
        ('{"prompt": "A", "answer": ["B"]}', "line 2: answer must be a string, got ['B']"),
        ('{"prompt": null, "answer": "B"}', "line 2: prompt must be a string, got None"),
        ('{"messages": [{"role": "assistant", "content": 5}]}', "line 2: content must be a string, got 5"),
        ('{"messages": ["A"]}', "line 2: messages must be a list of objects"),
        ('{"messages": "A"}', "line 2: messages must be a list, got 'A'"),
        ('{"token_ids": ["A"], "spans": []}', "line 2: token_ids must be a list of integers"),
        ('{"token_ids": [1], "spans": [1]}', "line 2: spans must be a list of [first, one after the last], got [1]"),
        ('{"text": "A", "temperature": "hot"}', "line 2: temperature must be a number, got 'hot'"),
        ('{"token_ids": [1, 304], "spans": []}', "line 2: token id 304 is not in the target's"),
        ('{"token_ids": [-1, 3], "spans": []}', "line 2: token id -1 is not in"),
    ],
)
def test_a_wrong_line_is_named(tokenizer, tmp_path, line, problem):
    path = tmp_path / "a.jsonl"
    path.write_text(f'"good"\n{line}\n')
    with pytest.raises(ConfigError) as found:
        read_texts([path], tokenizer, VOCABULARY)
    assert str(found.value).startswith(f"--data: {path}, {problem}")


def test_a_conversation_for_a_target_without_a_template_is_refused(tmp_path):
    path = lines_at(tmp_path / "a.jsonl", {"messages": [{"role": "assistant", "content": "A"}]})
    bare = Tokenizer.from_directory(checkpoints.write("llama", tmp_path / "target"))
    with pytest.raises(ConfigError, match="line 1: messages: the target has no chat template; give prompt and answer"):
        read_texts([path], bare, VOCABULARY)


@pytest.fixture
def data(tmp_path):
    return lines_at(tmp_path / "data.jsonl", *[f"text number {number}, and so on and so on" for number in range(30)])


def test_an_eagle_head_is_trained_and_goes_on(target, data, tmp_path, capsys):
    argv = ["train-head", "--kind", "eagle3", "--target", str(target), "--data", str(data), *FAST]
    work = str(tmp_path / "work")
    assert main.main([*argv, "--work", work, str(tmp_path / "a")]) == 0
    out, err = capsys.readouterr()
    assert "text, temperature 0: " in out
    assert "--target.engine.head" in out
    assert "step 4 of 4: loss " in err
    assert read_head(str(tmp_path / "a"), str(target)).draft_vocab_size == 100
    assert main.main([*argv, "--steps", "6", "--work", work, str(tmp_path / "b")]) == 0
    assert "step 6 of 6: loss " in capsys.readouterr().err
    card = (tmp_path / "b/README.md").read_text()
    assert f"outrider train-head --kind eagle3 --target {target.name} --data data.jsonl" in card
    assert str(tmp_path) not in card
    assert main.main([*argv, "--work", work, str(tmp_path / "c")]) == main.EXIT_NO_START
    assert "--steps 4: the training in " in capsys.readouterr().err, "which has made 6"


def test_medusa_heads_are_trained(target, data, tmp_path, capsys):
    argv = ["train-head", "--kind", "medusa", "--target", str(target), "--data", str(data), *FAST, "--heads", "2"]
    (tmp_path / "b.work").mkdir()
    (tmp_path / "b.work/notes").touch()
    assert main.main([*argv, str(tmp_path / "b")]) == 0
    assert [each.name for each in (tmp_path / "b.work").iterdir()] == ["notes"], "another's files stay"
    assert main.main([*argv, str(tmp_path / "a")]) == 0
    assert "text, temperature 0: " in capsys.readouterr().out
    head = read_head(str(tmp_path / "a"), str(target))
    assert (head.is_medusa, head.num_heads, head.vocab_size) == (True, 2, VOCABULARY)
    assert not (tmp_path / "a.work").exists()
    assert main.main([*argv, str(tmp_path / "a")]) == main.EXIT_NO_START
    assert "a exists; give a directory that does not. A training that --work has kept" in capsys.readouterr().err
    card = (tmp_path / "a/README.md").read_text()
    assert card.startswith("---\nlicense: unknown\n"), "the target says nothing"
    assert f"outrider train-head --kind medusa --target {target.name} --data data.jsonl --heads 2" in card


def test_blockwise_heads_are_fitted(target, data, tmp_path, capsys):
    out = tmp_path / "heads"
    assert main.main(["train-head", "--target", str(target), "--data", str(data), "--heads", "2", str(out)]) == 0
    assert "2 heads fitted" in capsys.readouterr().out
    assert read_head(str(out)).num_heads == 2


@pytest.mark.parametrize("kind", ["blockwise", "eagle3", "medusa"])
def test_too_little_text_is_refused(target, tmp_path, capsys, kind):
    data = lines_at(tmp_path / "data.jsonl", "only one text")
    argv = ["train-head", "--kind", kind, "--target", str(target), "--data", str(data), str(tmp_path / "head")]
    assert main.main(argv) == main.EXIT_NO_START
    assert "outrider: --data: the texts have too few tokens; at least 2 texts" in capsys.readouterr().err
    assert not (tmp_path / "head").exists()
