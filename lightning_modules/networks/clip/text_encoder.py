"""Text encoders of the `transformers` library as the text tower of a pair.

Shapes: B texts, L tokens, W width of the encoder, E embedding dimension.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ....common.errors import UserError
from ....common.hub import hub_or_cache, reason_not_found

Pooling = Literal["mean", "cls", "pooler", "last"]
Projection = Literal["linear", "mlp"]

OPEN_CLIP_POOLERS: dict[str, str] = {
    "mean": "mean_pooler",
    "cls": "cls_last_hidden_state_pooler",
    "pooler": "cls_pooler",
}
"""open_clip's names of the poolings that it has."""
CONFIG = "hf_config"
"""Entry of a text tower's configuration with that of transformers, which open_clip reads from the hub instead."""
PROJECTION = "proj."
"""Begin of the names of the projection's weights."""
_POOLINGS: dict[str, Pooling] = {
    "mean_pooler": "mean",
    "cls_last_hidden_state_pooler": "cls",
    "cls_pooler": "pooler",
    "last": "last",
}
_SENTENCE_TRANSFORMERS = "1_Pooling/config.json"
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NOT_OF_THE_NETWORK = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "auto_map")


class LastPooler(nn.Module):
    """Take the output at the last token of each text, which of a causal decoder depends on the whole text."""

    def forward(self, outputs: Any, attention_mask: Tensor) -> Tensor:
        """Map outputs with a `last_hidden_state` [B, L, W] and a mask [B, L] to [B, W]."""
        positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        last = (attention_mask * positions).argmax(1)
        pooled: Tensor = outputs.last_hidden_state[torch.arange(len(last), device=last.device), last]
        return pooled


class EncoderTower(nn.Module):
    """A text encoder of transformers with pooling and projection.

    Its weights have the names of open_clip's `HFTextEncoder`, which builds fewer architectures, needs the hub, and does
    not pool the last token.

    Args:
        config: the encoder's configuration, as `read_config` returns it.
        pooling: how the tokens' outputs become one: their mean, that of the first token ("cls"), that of the first
            token through the encoder's own pooling layer, if it has one ("pooler"), or that of the last token.
        projection: a linear layer, or an MLP with one hidden layer, as in open_clip.
        embed_dim: E.
        context_length: largest number of tokens L; None means the encoder's own, or 77 where any is possible.

    Raises:
        UserError: If the encoder has fewer positions, or no padding token.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        pooling: Pooling,
        projection: Projection,
        embed_dim: int,
        context_length: int | None,
    ) -> None:
        super().__init__()
        self.transformer = _build(config, pooling == "pooler")
        own: Any = self.transformer.config
        name = own.model_type
        self.pad_token_id = _padding(own)
        self.vocab_size = int(own.vocab_size)
        positions = _positions(self.transformer)
        if context_length is not None and positions is not None and context_length > positions:
            raise UserError(
                f"Expected texts of at most {positions} tokens, the positions of the text tower ({name}), got "
                f"{context_length}: set data.max_tokens to {positions} or less."
            )
        self.context_length = context_length or positions or 77
        # Methods whose encoders have no name use settings of this file, and do without open_clip.
        from open_clip.hf_model import ClsLastHiddenStatePooler, ClsPooler, MeanPooler

        self.pooler = {
            "mean": MeanPooler,
            "cls": ClsLastHiddenStatePooler,
            "pooler": ClsPooler,
            "last": LastPooler,
        }[pooling]()
        width = int(own.hidden_size)
        if projection == "mlp":
            hidden = (width + embed_dim) // 2
            self.proj: nn.Module = nn.Sequential(
                nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, embed_dim, bias=False)
            )
        else:
            self.proj = nn.Linear(width, embed_dim, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map token ids [B, L] to features [B, E]; padding is not attended to."""
        features: Tensor = self.proj(self.states(input_ids, (input_ids != self.pad_token_id).long())[1])
        return features

    def states(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Map ids and mask [B, L] to the encoder's outputs [B, L, W], and to what is pooled of them [B, W]."""
        if input_ids.shape[0] == 0:
            # The layers of transformers cannot reshape an empty batch. They run on a dummy row, because sharded
            # processes have to run the same layers.
            dummy = input_ids.new_zeros(1, input_ids.shape[1])
            states, pooled = self.states(dummy, torch.ones_like(dummy))
            return states[:0], pooled[:0]
        outputs = self.transformer(input_ids=input_ids, attention_mask=attention_mask)
        return outputs.last_hidden_state, self.pooler(outputs, attention_mask)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute activations again in the backward pass."""
        if enable:
            self.transformer.gradient_checkpointing_enable()
        else:
            self.transformer.gradient_checkpointing_disable()


def tower_of_config(text: Mapping[str, Any], embed_dim: int) -> EncoderTower:
    """Build a tower with random weights.

    Args:
        text: the entry `text_cfg` of open_clip's configuration, with `CONFIG`.
        embed_dim: E.

    Raises:
        UserError: As `EncoderTower` does.
    """
    pooling = _POOLINGS[text.get("hf_pooler_type", "mean_pooler")]
    projection = text.get("hf_proj_type", "mlp")
    return EncoderTower(text[CONFIG], pooling, projection, embed_dim, text.get("context_length"))


def read_config(name: str) -> dict[str, Any]:
    """Return the configuration of an encoder, as plain data.

    Args:
        name: a local folder, or a name on the Hugging Face hub.

    Raises:
        UserError: If there is none, or the encoder needs Python code of its folder.
    """
    from transformers import AutoConfig

    with reading_encoder(name) as source:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    values = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if key not in _NOT_OF_THE_NETWORK}


def read_pooling(name: str, config: Mapping[str, Any]) -> Pooling:
    """Return the pooling that an encoder was trained with: that of its sentence-transformers file, else the mean.

    Args:
        name: as in `read_config`.
        config: its configuration.

    Raises:
        UserError: If it is a causal decoder without such a file.
    """
    from transformers.utils import cached_file

    path = Path(name).expanduser()
    with contextlib.nullcontext() if path.is_dir() else hub_or_cache():
        file = cached_file(
            str(path) if path.is_dir() else name,
            _SENTENCE_TRANSFORMERS,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    if file is not None:
        modes = json.loads(Path(file).read_text(encoding="utf-8"))
        for mode, pooling in _MODES.items():
            if modes.get(mode):
                return pooling
    if is_causal(config):
        raise UserError(
            f"Expected the pooling of the causal decoder {name!r}, whose first token sees no other, got none: set "
            "model.text.pooling to last, or choose a text encoder."
        )
    return "mean"


def is_causal(config: Mapping[str, Any]) -> bool:
    """Return whether each token of a network attends only to those before it."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    if config.get("is_encoder_decoder"):
        return False
    kind = config["model_type"]
    only_causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return bool(config.get("is_decoder")) or only_causal


def read_weights(name: str, tower: EncoderTower) -> dict[str, Tensor]:
    """Return the weights of a trained encoder for a tower, under the names of its `transformer`.

    Args:
        name: a local folder, or a name on the Hugging Face hub.
        tower: the tower.

    Raises:
        UserError: If there are none, or they are of another network.
    """
    from transformers import AutoModel

    with reading_encoder(name) as source, quiet():
        network, report = AutoModel.from_pretrained(
            source,
            dtype=torch.float32,
            trust_remote_code=False,
            output_loading_info=True,
            low_cpu_mem_usage=True,
        )
    state = _encoder_of(network).state_dict()
    expected = tower.transformer.state_dict()
    unread = {key.removeprefix("encoder.") for key in report["missing_keys"]} | set(report["missing_keys"])
    missing = [key for key in expected if key not in state or key in unread]
    missing += [key for key in expected if key in state and state[key].shape != expected[key].shape]
    if missing:
        raise UserError(
            f"Expected the weights of the text tower in {name!r}, found none that fit for {len(missing)} of them "
            f"({missing[0]}, ...): give model.text.weights of the same network as model.text.name."
        )
    return {key: state[key] for key in expected}


def with_config(config: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Return open_clip's configuration of a model with that of its encoder, if it has one of transformers.

    Args:
        config: open_clip's configuration.
        folder: the model's folder, which may hold the encoder's configuration.

    Raises:
        UserError: If it is neither there nor on the hub.
    """
    completed = copy.deepcopy(dict(config))
    text = completed["text_cfg"]
    if "hf_model_name" in text and CONFIG not in text:
        beside = folder is not None and (folder / "config.json").is_file()
        text[CONFIG] = read_config(str(folder) if beside else text["hf_model_name"])
    return completed


def _build(config: Mapping[str, Any], pools: bool) -> Any:
    from transformers import AutoConfig, AutoModel

    values = {key: value for key, value in config.items() if key != "model_type"}
    own = AutoConfig.for_model(config["model_type"], **values)
    encoder = _encoder_of(AutoModel.from_config(own, dtype=torch.float32, trust_remote_code=False))
    if not pools and getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # unused, it would have no gradient
    return encoder


def _encoder_of(network: Any) -> Any:
    return network.get_encoder() if network.config.is_encoder_decoder else network


def _padding(config: Any) -> int:
    """Return the id of the padding token: without one texts are padded with the token that ends them."""
    for token in (config.pad_token_id, config.eos_token_id):
        token = token[0] if isinstance(token, list) and token else token
        if isinstance(token, int):
            return token
    raise UserError(
        f"Expected a padding or an end token in the configuration of the text tower ({config.model_type}), got "
        "neither: choose another encoder."
    )


def _positions(transformer: nn.Module) -> int | None:
    """Return the largest number of tokens by the table of positions; None for sinusoidal, relative and rotary ones."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in ("position_embeddings", "wpe"):
            before = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from there
            return module.num_embeddings - before
    return None


@contextlib.contextmanager
def reading_encoder(name: str) -> Iterator[str]:
    """Yield the folder or the name that `from_pretrained` takes, and turn what it raises into one sentence.

    Args:
        name: a local folder, or a name on the Hugging Face hub.

    Raises:
        UserError: If there is none, or it cannot be read.
    """
    path = Path(name).expanduser()
    is_folder = path.is_dir()
    if not is_folder and name.startswith((".", "/", "~")):
        raise UserError(f"Expected the folder of a text encoder, found none at {name!r}: correct the path.")
    try:
        with contextlib.nullcontext() if is_folder else hub_or_cache():
            yield str(path) if is_folder else name
    except UserError:
        raise
    except Exception as error:  # of transformers and its libraries, whose types depend on the version
        reason = (str(error).strip() or type(error).__name__).splitlines()[0] if is_folder else reason_not_found(error)
        raise UserError(
            f"Expected a text encoder of transformers as a local folder or a hub name, got {name!r} "
            f"({reason.rstrip('.')}): correct the name, or download it and give the folder."
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the library's report of weights that are not used, such as those of a decoder."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
