"""Export to model folders that transformers, vLLM and our loader read: bf16 safetensors, tied weights stored once."""

import shutil
from pathlib import Path
from typing import Any, Final

import torch
from transformers import LlamaForCausalLM

from models.train.architecture import generation_config
from models.train.tokenizer import save_tokenizer

DEMO_FOLDER: Final = Path(__file__).parents[1] / "demo"


def export_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write `model` and `tokenizer` to `folder`. An existing folder is replaced by a rename when everything is
    written."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model = model.to(torch.bfloat16)
    model.generation_config = generation_config()
    model.save_pretrained(unfinished)
    save_tokenizer(tokenizer, unfinished)
    (unfinished / "model.safetensors").chmod(0o644)  # save_pretrained makes it readable by its owner only
    replace_folder(unfinished, folder)


def replace_folder(new: Path, old: Path) -> None:
    """Put `new` in the place of `old`, which readers may have open."""
    aside = old.with_name(f".{old.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if old.exists():
        old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside, ignore_errors=True)


def as_exported(model: Any) -> Any:
    """A copy in fp32 with weights rounded to bf16, so that evaluation measures the exported weights."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict({name: weight.bfloat16().float() for name, weight in model.state_dict().items()})
    return copy.eval().requires_grad_(False)
