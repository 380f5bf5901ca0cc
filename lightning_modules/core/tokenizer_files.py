"""The files of a tokenizer."""

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ...common.clip_vocabulary import END, START


def save_tokenizer(text: str, folder: Path, special: Mapping[str, int], length: int | None) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which `AutoTokenizer` reads.

    Args:
        text: the tokenizer as JSON text of the `tokenizers` library.
        folder: an existing folder.
        special: numbers of special tokens, such as "cls"; not used for CLIP's tokenizer, whose tokens are known.
        length: number of tokens at which texts are cut.
    """
    tokenizer, named = Tokenizer.from_str(text), dict[str, str | None]()
    if tokenizer.token_to_id(START) is not None:
        # In transformers CLIP's texts are padded with the end token; its causal towers do not see the padding.
        named |= {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
    else:
        named |= {f"{name}_token": tokenizer.id_to_token(number) for name, number in special.items()}
        named["unk_token"] = getattr(tokenizer.model, "unk_token", None)
    options = {} if length is None else {"model_max_length": length}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, **options).save_pretrained(folder)
