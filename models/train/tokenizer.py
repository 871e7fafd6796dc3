"""Byte-level BPE trained on the training files: lossless for any UTF-8 text, and efficient on Python's indentation."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from models.train.architecture import MAX_POSITIONS, VOCABULARY

END_OF_TEXT: Final = "<|endoftext|>"
LOADING_TRACES: Final = frozenset({"is_local", "local_files_only", "backend"})

# A line break and the indentation after it may become one token. Words take one leading space and may include the
# underscores around them. snake_case is split at its underscores, so that names share their parts.
PIECES: Final = "|".join(
    [
        r"[\r\n]+[ \t]*",
        r" ?_*\p{L}+_*(?!\p{L})",
        r" ?_*\p{L}+",
        r" ?\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}_]+",
        r" ?_+",
        r"[ \t]+(?=[ \t]\S)",
        r"\s+",
    ]
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly `VOCABULARY` entries, including the 256 bytes and the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, _trainer())
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,  # detokenization must return the original bytes
    )


def _trainer() -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the files, with a class name that older transformers know and without traces of where they were loaded."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in settings.items() if key not in LOADING_TRACES}
    kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer saved in `folder`, loaded as users of the pair load it."""
    return AutoTokenizer.from_pretrained(folder)
