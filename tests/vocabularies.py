"""Small tokenizers of the kinds that models have, made in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from orchestrator.text import Tokenizer as ProductTokenizer

CORPUS = (
    "def main(argv):\n    return 0\n",
    "안녕하세요 세계, 반갑습니다. 오늘 날씨가 좋네요.",
    "naïve café — “quoted” 🙂🙃👩‍💻 ça và",
)
BEGIN, END = "<|begin|>", "<|end|>"


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """A vocabulary like that of Llama 3 and Qwen; token ids 0 and 1 are special, and one more is added that is not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<한>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A vocabulary like that of Llama 2: pieces of text with a mark for spaces, and a token for each byte that no piece
    has."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghij", "안"]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def as_product(backend: Tokenizer, template: str | None = None) -> ProductTokenizer:
    """The product's tokenizer over `backend`."""
    special = {
        name: token
        for name, token in (("bos_token", BEGIN), ("eos_token", END))
        if backend.token_to_id(token) is not None
    }
    return ProductTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special))


def write(directory: Path, backend: Tokenizer, **settings: Any) -> Path:
    """The files that stand beside a checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": BEGIN, "eos_token": END, **settings}))
    return directory
