"""Files that the `transformers` library reads: weights with their configuration, and the tokenizer.

Tensors have the names of published checkpoints, which every version of the library reads.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from ...common.clip_vocabulary import END, START
from ...common.preprocessing import Preprocessing
from ...common.tokenizers import special_tokens


def write_model(state: Mapping[str, Tensor], config: Any, architecture: str, folder: Path) -> None:
    """Write `model.safetensors` and `config.json`.

    Args:
        state: tensors by name.
        config: configuration of the library.
        architecture: name of the library's class.
        folder: an existing folder.
    """
    config.architectures = [architecture]
    config.save_pretrained(folder)
    save_file({name: tensor.detach().contiguous() for name, tensor in state.items()}, folder / "model.safetensors")


def write_preprocessing(preprocessing: Preprocessing, folder: Path) -> None:
    """Write `preprocessor_config.json`, which `AutoImageProcessor` reads."""
    text = json.dumps(preprocessing.as_transformers(), indent=2) + "\n"
    (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")


def save_tokenizer(text: str, folder: Path, special: Mapping[str, int], length: int | None) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which `AutoTokenizer` reads.

    Args:
        text: the tokenizer as JSON text of the `tokenizers` library.
        folder: an existing folder.
        special: ids of special tokens, such as "cls"; not used for CLIP's tokenizer, whose special tokens are fixed.
        length: number of tokens at which texts are cut; None does not cut them.
    """
    tokenizer = Tokenizer.from_str(text)
    tokens: dict[str, str | None]
    if tokenizer.token_to_id(START) is not None:
        # In transformers CLIP's texts are padded with the end token; its causal towers do not see the padding.
        tokens = {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
    else:
        tokens = {f"{name}_token": tokenizer.id_to_token(number) for name, number in special.items()}
        tokens.setdefault("unk_token", getattr(tokenizer.model, "unk_token", None))
    options = {} if length is None else {"model_max_length": length}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens, **options).save_pretrained(folder)


def special_token_ids(text: str) -> dict[str, int]:
    """Return the ids of the special tokens of a tokenizer with usual names, by role, such as "cls".

    Args:
        text: the tokenizer as JSON text of the `tokenizers` library.
    """
    tokenizer = Tokenizer.from_str(text)
    ids = {
        role.removesuffix("_token"): tokenizer.token_to_id(token) for role, token in special_tokens(tokenizer).items()
    }
    return {role: number for role, number in ids.items() if number is not None}


@contextlib.contextmanager
def without_progress() -> Iterator[None]:
    """Load models within the context without the library's progress bars."""
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
