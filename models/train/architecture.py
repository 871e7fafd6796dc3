"""The two Llama shapes: about 5.8M parameters for the target, 0.9M for the draft, embeddings tied in both."""

from typing import Any, Final

from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

VOCABULARY: Final = 4096
MAX_POSITIONS: Final = 2048
END_OF_TEXT_ID: Final = 0

SHAPES: Final[dict[str, dict[str, int]]] = {
    "target": {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 768,
    },
    "draft": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
    },
}


def build_config(role: str) -> Any:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
        tie_word_embeddings=True,
        **SHAPES[role],
    )


def build_model(role: str) -> Any:
    """A new model of `role` in fp32, with weights drawn from torch's current generator."""
    return LlamaForCausalLM(build_config(role))


def generation_config() -> Any:
    """Tokens that begin and end a text; nothing that changes how tokens are chosen."""
    return GenerationConfig(bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID)


def parameter_count(model: Any) -> int:
    """Number of parameters; tied embeddings count once."""
    return sum(parameter.numel() for parameter in model.parameters())
