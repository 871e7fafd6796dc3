"""`outrider index`: files become an index that a service with the same tokenizer takes, and no other."""

from __future__ import annotations

import pytest

from core.errors import ConfigError
from deploy.cli.main import EXIT_NO_START, main
from deploy.launch import application
from deploy.settings import DEMO_DIRECTORY, demo_config
from orchestrator.guessers import CorpusIndex, Guessers, encode_index, write_index
from orchestrator.guessers.corpus import index as corpus_index
from orchestrator.text import Tokenizer
from tests.vocabularies import as_product, byte_level


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.py").write_text("def read_lines(path):\n    return path.read_text().splitlines()\n")
    (folder / "b.py").write_text("import os\n")
    (folder / "c.bin").write_bytes(b"\xff\xfe\x00")
    return folder


def indexed(corpus, out, *more):
    return main(["index", str(corpus), "--tokenizer", str(DEMO_DIRECTORY / "target"), "--out", str(out), *more])


def test_a_corpus_becomes_an_index_for_its_tokenizer(corpus, tmp_path, capsys):
    out = tmp_path / "corpus.index"
    assert indexed(corpus, out) == 0
    said = capsys.readouterr()
    assert "c.bin: " in said.err
    assert all(said.err.splitlines()), "no line is empty where there is no terminal for a bar"
    tokenizer = Tokenizer.from_directory(DEMO_DIRECTORY / "target")
    index = CorpusIndex.open(out, tokenizer.vocabulary_hash)
    texts = [(corpus / name).read_text() for name in ("a.py", "b.py")]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert index.num_tokens == sum(map(len, ids)) + 2
    match, places = index.find(ids[0][2:6], 2)
    assert match == 4
    assert index.tokens_after(places[0], match, 5) == list(ids[0][6:11])
    assert f"{index.num_tokens:,} tokens" in said.out


def test_a_service_takes_the_index_of_its_tokenizer_alone(corpus, tmp_path):
    out = tmp_path / "corpus.index"
    indexed(corpus, out, "--glob", "*.py")
    settings = [f"speculation.retrieval_index={out}", "speculation.guessers=[draft, retrieval]"]
    config = demo_config(settings).speculation
    tokenizer = Tokenizer.from_directory(DEMO_DIRECTORY / "target")
    Guessers.open(config, tokenizer)
    with pytest.raises(ConfigError, match="another tokenizer"):
        Guessers.open(config, as_product(byte_level()))
    with pytest.raises(ConfigError, match=r"needs speculation\.retrieval_index"):
        demo_config(settings[1:])


def test_an_index_that_does_not_fit_is_refused_before_anything_starts(corpus, tmp_path):
    out = tmp_path / "corpus.index"
    indexed(corpus, out, "--glob", "*.py")
    application.check_pair(demo_config([f"speculation.retrieval_index={out}"]))
    ids = [[1, 2, 3]]
    write_index(*encode_index(ids, vocab_size=9, vocabulary="another"), tmp_path / "other.index")
    for name, problem in (("other.index", "another tokenizer"), ("none.index", "No such file")):
        with pytest.raises(ConfigError, match=rf"speculation\.retrieval_index: .*{name} .*{problem}"):
            application.check_pair(demo_config([f"speculation.retrieval_index={tmp_path / name}"]))


def test_a_corpus_that_is_too_large_is_refused_with_its_size(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(corpus_index, "MAX_TOKENS", 20)
    assert indexed(corpus, tmp_path / "out", "--glob", "*.py") == EXIT_NO_START
    said = capsys.readouterr().err
    assert f"{tmp_path / 'out'} cannot be made of {corpus}" in said
    assert "tokens, where 1 to 19 can be indexed" in said
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_indexed_is_said(tmp_path, capsys):
    assert indexed(tmp_path / "none", tmp_path / "out") == EXIT_NO_START
    assert "no file of text" in capsys.readouterr().err
    (tmp_path / "empty.txt").write_text("")
    assert indexed(tmp_path / "empty.txt", tmp_path / "out") == EXIT_NO_START
    assert "0 tokens" in capsys.readouterr().err
