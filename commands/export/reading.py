"""Reading of an exported model, from a folder or from the Hugging Face hub."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ...common.clip_vocabulary import CLIP, CLIP_TOKENS, CLIP_VOCABULARY
from ...common.errors import UserError
from ...common.hub import hub_or_cache, reason_refused
from ...common.names import did_you_mean
from ...common.preprocessing import Preprocessing, has_pixels
from ...common.tokenizers import set_ending
from ...datamodules.pairs.datamodule import PairDataModule
from ...datamodules.text.clip import CLIPTextEncoder
from ...datamodules.text.tokenizers import Encoder, TextEncoder
from ...lightning_modules.core.checkpoints import read_config
from .layouts import exported_classes
from .publishing import PRETRAINED


class Pretrained(NamedTuple):
    """A trained model with its preprocessing and its tokenizer.

    Attributes:
        model: the module, in eval mode and without gradients.
        transform: RGB image to float [3, S, S]; None if the export does not record the preprocessing.
        tokenizer: texts to `input_ids` and `attention_mask`, long [T, L]; None for a model without texts, or an export
            without its tokenizer.
    """

    model: Any
    transform: Callable[[Image.Image], Tensor] | None
    tokenizer: Callable[[Sequence[str]], dict[str, Tensor]] | None


def from_pretrained(name: str | Path) -> Pretrained:
    """Read a model, its preprocessing and its tokenizer, without a Trainer.

    Args:
        name: a folder that `vlightning export` or `save_pretrained` wrote, or its name on the Hugging Face hub.

    Raises:
        UserError: If there is no such folder and no such name on the hub, or it is not an export.
    """
    folder = _folder(name)
    config = read_config(folder)
    classes = exported_classes()
    if (kind := config["class"]) not in classes:
        raise UserError(
            f"Expected an export of a module of vlightning in {str(name)!r}, got one of {kind!r}: "
            f"{did_you_mean(str(kind), list(classes))}"
        )
    model = classes[kind].from_pretrained(folder).requires_grad_(False)
    record = config.get("preprocessing")
    transform = Preprocessing.from_dict(record, repr(str(name))).transform() if has_pixels(record) else None
    tokenizer = tokenizer_of_folder(folder, config)
    data = config.get("data") or {}
    embeds_clip_texts = hasattr(model, "encode_texts") and has_clip_texts(model)
    has_texts = tokenizer is not None or data.get("tokenizer") == CLIP or embeds_clip_texts
    return Pretrained(model, transform, text_encoder(model, tokenizer, data) if has_texts else None)


def _folder(name: str | Path) -> Path:
    """Return the folder of an export, which is downloaded if it is a name on the hub."""
    path = Path(name).expanduser()
    text = str(name)
    if path.exists():
        return path
    if isinstance(name, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise UserError(f"Expected the folder of an export, got {text!r}, which does not exist: correct the path.")
    from huggingface_hub import snapshot_download

    try:
        with hub_or_cache():
            return Path(snapshot_download(text, allow_patterns=list(PRETRAINED)))
    except Exception as error:  # of the HTTP library, whose types depend on the version
        reason = reason_refused(error, "model")
        raise UserError(
            f"Expected a folder of an export, or the name of one on the Hugging Face hub, got {text!r} ({reason}): "
            "correct it."
        ) from error


def text_encoder(module: Any, tokenizer: Any, data: Mapping[str, Any]) -> Encoder:
    """Return the encoder of texts as the datamodule of the training would build it; without a tokenizer, CLIP's."""
    defaults = {name: option.default for name, option in inspect.signature(PairDataModule).parameters.items()}
    options = {name: data.get(name, defaults[name]) for name in ("clean_captions", "max_words", "append_sep")}
    longest = data.get("max_tokens") or module.data_sizes().max_tokens or getattr(module, "max_tokens", None)
    cleaning = (options["clean_captions"], options["max_words"])
    if tokenizer is None:
        return CLIPTextEncoder(longest or CLIP_TOKENS, *cleaning)
    set_ending(tokenizer, options["append_sep"])
    prefix = getattr(module, "text_prefix", "")
    return TextEncoder(tokenizer, longest or defaults["max_tokens"], *cleaning, prefix=prefix)


def has_clip_texts(module: Any) -> bool:
    """Return whether a module's texts have CLIP's vocabulary, whose tokenizer is part of open_clip."""
    vocabulary = module.data_sizes().vocab_size or getattr(getattr(module, "student", None), "vocab_size", None)
    return vocabulary in (None, CLIP_VOCABULARY)


def tokenizer_of_folder(folder: Path, config: Mapping[str, Any]) -> Any | None:
    """Return the tokenizer of an exported folder; None for CLIP's, whose padding differs from that of transformers."""
    of_clip = (config.get("data") or {}).get("tokenizer") == CLIP
    if of_clip or not (folder / "tokenizer.json").is_file():
        return None
    return PreTrainedTokenizerFast.from_pretrained(str(folder))
