"""Checkpoints' tokenizers do what transformers' do: tokenizers of its classes, saved by it and read by us.

`AutoTokenizer` reads them again with the same result, but for `CHANGED_BY_AUTO`: there its class puts other parts
together than the tokenizer.json has, which holds for us (docs/adr/edge).
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from orchestrator.text import IncrementalDetokenizer
from orchestrator.text import Tokenizer as Ours
from tests.vocabularies import CORPUS

TEXTS = (
    "def main(argv):\n    return 0\n",
    " leading and  double   spaces, trailing ",
    "안녕하세요 세계 — naïve café ﬁ Ǆ “quoted”",
    "🙂🙃👩‍💻 \U00010348 \u0000\t\r\n e\u0301",
    "<s>hello</s> <|mark|> hello<|mark|>world [TOOL] </s>",
    "",
    "1234567890 3.14159 ÀÉ İ ß",
)
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
NAMES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if tools %}{{ tools | tojson(ensure_ascii=True, indent=1, separators=(';', '='), sort_keys=True) }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MESSAGES = [{"role": "user", "content": "안녕 <|mark|>", "name": None}, {"role": "assistant", "content": "b"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "안녕"}}]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@functools.cache
def byte_level() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of GPT-2's kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    return _trained_bpe(tokenizer, trainer)


@functools.cache
def pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of SentencePiece's BPE, with a token for each byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    return _trained_bpe(tokenizer, trainer)


def _trained_bpe(tokenizer: Tokenizer, trainer: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


@functools.cache
def unigram(with_bytes: bool = False) -> list[tuple[str, float]]:
    """Pieces and scores of SentencePiece's unigram model."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=list(SPECIAL), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS, *TEXTS], trainer)
    found = [(piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
    return [*found[: len(SPECIAL)], *((byte, -20.0) for byte in BYTES if with_bytes), *found[len(SPECIAL) :]]


def words() -> dict[str, int]:
    """A WordPiece vocabulary: whole words, and letters that begin or continue one."""
    letters = sorted({letter for text in TEXTS for letter in text.lower() if not letter.isspace()})
    tokens = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "hello", *letters, *(f"##{letter}" for letter in letters)]
    return {token: token_id for token_id, token in enumerate(dict.fromkeys(tokens))}


def by_class(name: str, kind: Callable[[], Any], **settings: Any) -> Callable[[], Any]:
    """A tokenizer of a transformers class, whose code puts the parts together."""

    def make() -> Any:
        parts = kind()
        given = {"vocab": parts[0], "merges": parts[1]} if isinstance(parts, tuple) else {"vocab": parts}
        return getattr(transformers, name)(**given, **{**NAMES, **settings})

    return make


def of_parts(model: Callable[[], Any], *, decoder: Any, special: Any = None, **parts: Any) -> Callable[[], Any]:
    """A tokenizer.json that no class knows, as most published ones are."""

    def make() -> Any:
        backend = Tokenizer(model())
        backend.decoder = decoder
        for name, part in parts.items():
            setattr(backend, name, part)
        backend.add_special_tokens([token for token in SPECIAL if backend.token_to_id(token) is not None])
        return PreTrainedTokenizerFast(tokenizer_object=backend, **(NAMES if special is None else special))

    return make


def bpe(kind: Callable[[], Any], **settings: Any) -> Callable[[], Any]:
    return lambda: models.BPE(*kind(), **settings)


SPACES = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
FALLBACK = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+"
WITH_BOS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])


def split_like_gpt4() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT4), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


BYTE_CLASSES = ("GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer", "WhisperTokenizer")
UNIGRAMS = ("T5Tokenizer", "XGLMTokenizer", "CamembertTokenizer", "XLMRobertaTokenizer")
KINDS: dict[str, Callable[[], Any]] = {
    **{name: by_class(name, byte_level) for name in BYTE_CLASSES},
    **{f"{name} bos": by_class(name, byte_level, add_bos_token=True) for name in BYTE_CLASSES[:2]},
    **{f"{name} prefix": by_class(name, byte_level, add_prefix_space=True) for name in BYTE_CLASSES[:3]},
    "RobertaTokenizer": by_class("RobertaTokenizer", byte_level),
    "Qwen3_5Tokenizer": by_class("Qwen3_5Tokenizer", byte_level),
    "CodeGenTokenizer": by_class("CodeGenTokenizer", byte_level),
    "BlenderbotTokenizer": by_class("BlenderbotTokenizer", byte_level),
    "LlamaTokenizer": by_class("LlamaTokenizer", pieces),
    "LlamaTokenizer bos": by_class("LlamaTokenizer", pieces, add_bos_token=True),
    "LlamaTokenizer bos eos": by_class("LlamaTokenizer", pieces, add_bos_token=True, add_eos_token=True),
    "LlamaTokenizer no prefix": by_class("LlamaTokenizer", pieces, add_prefix_space=False),
    "LlamaTokenizer not legacy": by_class("LlamaTokenizer", pieces, legacy=False),
    "LlamaTokenizer legacy": by_class("LlamaTokenizer", pieces, legacy=True),
    "CodeLlamaTokenizer": by_class("CodeLlamaTokenizer", pieces),
    "GemmaTokenizer": by_class("GemmaTokenizer", pieces),
    "GemmaTokenizer bos": by_class("GemmaTokenizer", pieces, add_bos_token=True),
    **{name: by_class(name, unigram) for name in UNIGRAMS},
    "BigBirdTokenizer": by_class("BigBirdTokenizer", unigram),
    "RemBertTokenizer": by_class("RemBertTokenizer", unigram),
    "MBartTokenizer": by_class("MBartTokenizer", unigram),
    "XLNetTokenizer": by_class("XLNetTokenizer", unigram),
    "BertTokenizer": by_class("BertTokenizer", words, unk_token="[UNK]", pad_token="[PAD]"),
    "llama 2": of_parts(
        bpe(pieces, unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        decoder=FALLBACK,
        normalizer=normalizers.Sequence(SPACES),
        post_processor=WITH_BOS,
    ),
    "mistral": of_parts(
        bpe(pieces, unk_token="<unk>", byte_fallback=True),
        decoder=FALLBACK,
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        post_processor=WITH_BOS,
    ),
    "gemma": of_parts(
        bpe(pieces, unk_token="<unk>", byte_fallback=True),
        decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        normalizer=normalizers.Replace(" ", "▁"),
        pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
    ),
    "no byte fallback": of_parts(
        bpe(pieces, unk_token="<unk>"),
        decoder=decoders.Metaspace(),
        pre_tokenizer=pre_tokenizers.Metaspace(),
    ),
    "llama 3": of_parts(
        bpe(byte_level, ignore_merges=True), decoder=decoders.ByteLevel(), pre_tokenizer=split_like_gpt4()
    ),
    "llama 3 bos": of_parts(
        bpe(byte_level),
        decoder=decoders.ByteLevel(),
        pre_tokenizer=split_like_gpt4(),
        post_processor=processors.Sequence([processors.ByteLevel(trim_offsets=False), WITH_BOS]),
    ),
    "qwen": of_parts(
        bpe(byte_level),
        decoder=decoders.ByteLevel(),
        normalizer=normalizers.NFC(),
        pre_tokenizer=split_like_gpt4(),
    ),
    "deepseek": of_parts(
        bpe(byte_level),
        decoder=decoders.ByteLevel(),
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        special={**NAMES, "add_bos_token": True},
    ),
    "lower case": of_parts(
        bpe(byte_level),
        decoder=decoders.ByteLevel(),
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
        pre_tokenizer=pre_tokenizers.ByteLevel(),
    ),
    "unigram": of_parts(
        lambda: models.Unigram(unigram(), 0),
        decoder=decoders.Metaspace(),
        pre_tokenizer=pre_tokenizers.Metaspace(),
    ),
    "unigram bytes": of_parts(
        lambda: models.Unigram(unigram(with_bytes=True), 0, byte_fallback=True),
        decoder=FALLBACK,
        pre_tokenizer=pre_tokenizers.Metaspace(),
    ),
    "unigram bytes, first": of_parts(
        lambda: models.Unigram(unigram(with_bytes=True), 0, byte_fallback=True),
        decoder=FALLBACK,
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first"),
        post_processor=WITH_BOS,
    ),
    "word level": of_parts(
        lambda: models.WordLevel(
            {token: i for i, token in enumerate([*SPECIAL, "hello", "world", ",", "and"])}, "<unk>"
        ),
        decoder=decoders.Fuse(),
        pre_tokenizer=pre_tokenizers.Whitespace(),
    ),
    "word piece": of_parts(
        lambda: models.WordPiece(words(), unk_token="[UNK]"),
        decoder=decoders.WordPiece(cleanup=False),
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        special={"unk_token": "[UNK]", "pad_token": "[PAD]", "bos_token": "[CLS]", "eos_token": "[SEP]"},
    ),
}
CHANGED_BY_AUTO = {"LlamaTokenizer legacy", "RemBertTokenizer"}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[Callable[[], Any]], tuple[Ours, Any]]:
    """Ours and transformers', of the same files: with a token that was added later, and a template."""

    def save(make: Callable[[], Any]) -> tuple[Ours, Any]:
        made = make()
        made.add_tokens([AddedToken("<|mark|>", special=False, normalized=False), AddedToken("[TOOL]", special=True)])
        made.chat_template = TEMPLATE
        made.save_pretrained(tmp_path)
        return Ours.from_directory(tmp_path), made

    return save


def test_there_are_about_fifty() -> None:
    assert len(KINDS) >= 45


@kinds
def test_ids_and_texts_are_those_of_transformers(make: Callable[[], Any], saved: Any) -> None:
    ours, theirs = saved(make)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for adds in (True, False):
            assert list(ours.encode(text, add_special_tokens=adds)) == theirs.encode(text, add_special_tokens=adds)
        ids = ours.encode(text)
        for skips in (True, False):
            plain = {"skip_special_tokens": skips, "clean_up_tokenization_spaces": False}
            assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, **plain)


@pytest.mark.parametrize("name", KINDS)
def test_auto_reads_the_same_but_where_its_class_changes_what_was_saved(name: str, saved: Any, tmp_path: Path) -> None:
    ours, _ = saved(KINDS[name])
    auto = AutoTokenizer.from_pretrained(tmp_path)
    is_same = all(list(ours.encode(text)) == auto.encode(text) for text in TEXTS)
    assert is_same == (name not in CHANGED_BY_AUTO)


@kinds
def test_a_chat_is_that_of_transformers(make: Callable[[], Any], saved: Any) -> None:
    ours, theirs = saved(make)
    for tools in ((), TOOLS):
        asked = {"tools": list(tools) or None, "add_generation_prompt": True}
        text = theirs.apply_chat_template(MESSAGES, tokenize=False, **asked)
        assert ours.chat_text(MESSAGES, tools) == text
        ids = theirs.apply_chat_template(MESSAGES, return_dict=False, **asked)
        assert list(ours.encode(text, add_special_tokens=False)) == ids


@kinds
def test_a_stream_is_the_text_at_once(make: Callable[[], Any], saved: Any) -> None:
    """Token by token: characters are spread over several, and nothing half is ever shown."""
    ours, theirs = saved(make)
    for text in TEXTS:
        ids = theirs.encode(text)
        stream = IncrementalDetokenizer(ours)
        shown = [*(stream.push([token_id]).text for token_id in ids), stream.finish().text]
        assert "".join(shown) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ("�" in "".join(shown)) == any("�" in piece for piece in shown)


@kinds
def test_a_stream_that_ends_anywhere_has_what_is_complete(make: Callable[[], Any], saved: Any) -> None:
    """A model's output may be cut within a character. All before it is there."""
    ours, theirs = saved(make)
    ids = theirs.encode("🙂안녕 👩‍💻 hello")
    for end in random.Random(0).sample(range(1, len(ids) + 1), min(8, len(ids))):
        stream = IncrementalDetokenizer(ours)
        text = "".join([stream.push(ids[:end]).text, stream.finish().text])
        assert text == theirs.decode(ids[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
