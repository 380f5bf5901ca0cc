"""The frozen language model of captioning, and its tokenizer."""

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...common.errors import UserError
from .settings import GenerationSettings, MapperSettings


class LanguageModel(NamedTuple):
    """A causal language model of the transformers library, in eval mode and float32, and its tokenizer."""

    network: Any
    tokenizer: Any


def load_language_model(name: str, mapper: MapperSettings, generation: GenerationSettings) -> LanguageModel:
    """Load a language model and its tokenizer.

    Args:
        name: name on the hub, or a folder.
        mapper: the mapper that makes its prefix.
        generation: the captions that it writes.

    Raises:
        UserError: If the language model is not found, is not causal, or does not fit the mapper.
    """
    network = _from_hub(AutoModelForCausalLM, name, dtype=torch.float32)
    tokenizer = _from_hub(AutoTokenizer, name)
    width = network.get_input_embeddings().weight.shape[1]
    if width != mapper.width:
        raise UserError(
            f"Expected mapper.width {width}, the token dimension of {name!r}, got {mapper.width}: set "
            "model.mapper.width to the former."
        )
    if tokenizer.eos_token_id is None:
        raise UserError(f"Expected an end-of-text token in the tokenizer of {name!r}, got none: give another model.")
    needed = mapper.prefix_length + generation.max_new_tokens
    positions = getattr(network.config, "max_position_embeddings", needed)
    if needed > positions:
        raise UserError(
            f"Expected a prefix and a caption of at most {positions} tokens, the positions of {name!r}, got "
            f"mapper.prefix_length {mapper.prefix_length} and generation.max_new_tokens {generation.max_new_tokens}: "
            "lower one of them."
        )
    return LanguageModel(network.requires_grad_(False).eval(), tokenizer)


def _from_hub(kind: Any, name: str, **options: Any) -> Any:
    try:
        # Without the argument, transformers asks on the terminal whether to run the Python files of a model.
        return kind.from_pretrained(name, trust_remote_code=False, **options)
    except OSError as error:
        raise UserError(
            f"Expected a language model on the hub, or a folder with a network and its tokenizer, found none at "
            f"{name!r}: correct the name, or download it."
        ) from error
    except ValueError as error:
        raise UserError(
            f"Expected a causal language model of the transformers library with its tokenizer, such as gpt2, got "
            f"something else at {name!r}: give another one."
        ) from error
