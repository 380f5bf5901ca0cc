"""Captioning with a frozen image tower and a frozen language model (ClipCap: Mokady et al., arXiv 2111.09734).

A mapper turns the embedding of an image into a prefix, and the language model continues the prefix with a caption; only
the mapper trains. MM-LG evaluates the image towers of its descendants with it (arXiv 2506.16673, section 4.4).

Differences from ClipCap's code: its loss ignores token 0, which is a real token of GPT-2, and trains no end of text;
here the mask decides which tokens count, and each caption has an end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks import CaptionWriter, StepSeedCallback, all_reduce_sum, missing_callbacks, world_size
from ...common.errors import UserError
from ...common.ranges import COUNT
from ..base.method import Method
from ..core.data_sizes import DataSizes
from ..core.frozen import Frozen
from ..core.precision import at_least_float32
from ..core.trainers import callbacks_of
from ..evaluation.generated_texts import CaptionEvaluation
from ..optim.configure import LRSchedulerCallable, OptimizerCallable
from ..optim.optimizers import adamw
from ..optim.schedules import Schedule, WarmupLinear
from .captioning_networks import CaptionMapper, load_language_model
from .settings import CaptioningOptimSettings, GenerationSettings, MapperSettings

Batch = dict[str, Any]
LANGUAGE_MODEL = "language_model"
"""Folder of the language model in an export."""
TOWER = "tower.json"
"""File with the origin of the embeddings in an export."""


class CaptioningModule(Method):
    """A mapper from image embeddings to prefixes of a language model, over an `EmbeddedCaptionsDataModule`.

    Defaults are MM-LG's, else ClipCap's. Neither the language model nor the image tower is in the checkpoint, which
    names both and holds fingerprints of their weights.

    Shapes: B images or captions, D embedding dimension, L tokens, P tokens of the prefix, W token dimension.

    Args:
        embed_dim: embedding dimension D of the image tower (open_clip's ViT-S-16).
        language_model: name of GPT-2 on the hub, or a folder (ClipCap: gpt2, 124M). The command line sets it from the
            data's.
        mapper: the mapper.
        generation: beam search.
        optim: AdamW and its schedule.
        optimizer: replaces AdamW.
        lr_scheduler: replaces the schedule.

    Raises:
        UserError: If a number is out of its range.
    """

    mapper_settings: MapperSettings
    generation: GenerationSettings
    optim: CaptioningOptimSettings

    def __init__(
        self,
        embed_dim: Annotated[int, COUNT] = 384,
        language_model: str = "gpt2",
        mapper: MapperSettings = MapperSettings(),
        generation: GenerationSettings = GenerationSettings(),
        optim: CaptioningOptimSettings = CaptioningOptimSettings(),
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals(), mapper="mapper_settings")
        self.embed_dim = embed_dim
        self.language_model_name = language_model
        self.mapper = CaptionMapper(embed_dim, self.mapper_settings)
        self.language_model: Frozen[Any] = Frozen(role="language model", argument="model.language_model")
        self.tower: dict[str, str] | None = None  # origin of the embeddings that the mapper was trained on
        self.evaluation = CaptionEvaluation()

    # ---- Training ----------------------------------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the cross entropy of the next token: the mean over the captions' tokens and ends on all ranks."""
        losses = self.token_losses(
            batch["embedding"], batch["input_ids"], batch["attention_mask"], batch.get("token_index")
        )
        count = all_reduce_sum(batch["attention_mask"].sum())
        loss = losses.sum() * world_size() / count  # gradients are averaged over the ranks
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def token_losses(
        self, embedding: Tensor, input_ids: Tensor, attention_mask: Tensor, token_index: Tensor | None = None
    ) -> Tensor:
        """Return the cross entropy of each token of the mask: float32 [tokens].

        Args:
            embedding: [B, D].
            input_ids: long [B, L], padded on the right.
            attention_mask: long [B, L], 1 for the tokens of a caption and its end.
            token_index: long [tokens], indices of these in the flattened mask; None looks them up.
        """
        network = self.language_model.network
        prefix = self._prefix(embedding)
        # The last token is only predicted. Padding comes after all tokens of the mask, so that no token attends to it.
        words = network.get_input_embeddings()(input_ids[:, :-1])
        states = network.base_model(inputs_embeds=torch.cat([prefix, words], 1), use_cache=False).last_hidden_state
        if token_index is None:
            token_index = _token_index(attention_mask)
        # Logits have the size of the vocabulary: compute them for the tokens of the mask only.
        logits = network.get_output_embeddings()(states[:, prefix.shape[1] - 1 :].flatten(0, 1)[token_index])
        return F.cross_entropy(at_least_float32(logits), input_ids.flatten()[token_index], reduction="none")

    def _prefix(self, embedding: Tensor) -> Tensor:
        """Map embeddings [B, D] to prefixes [B, P, W] in the precision of the language model's weights."""
        if embedding.shape[-1] != self.embed_dim:
            raise UserError(
                f"Expected embeddings of dimension {self.embed_dim}, got {embedding.shape[-1]}: set model.embed_dim to "
                "the latter, or data.embeddings to those of another tower."
            )
        prefix: Tensor = self.mapper(embedding.to(self.mapper.prefix.dtype))
        return prefix.to(self.language_model.network.get_input_embeddings().weight.dtype)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Find the tokens in the mask while it is on the host: on a GPU the host would wait for the result."""
        if "attention_mask" not in batch:
            return batch
        return batch | {"token_index": _token_index(batch["attention_mask"])}

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return AdamW."""
        optim = self.optim
        return adamw(groups, optim.learning_rate, optim.weight_decay, optim.betas, optim.eps)

    def paper_schedule(self) -> Schedule:
        """Return linear warm-up, then linear decay to 0."""
        return WarmupLinear(self.optim.learning_rate, self.optim.warmup_steps)

    # ---- Evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, embedding: Tensor) -> list[str]:
        """Write captions of embeddings [B, D] by beam search for the highest mean log-probability of a token."""
        self.load()
        prefix = self._prefix(embedding)
        tokenizer = self.tokenizer
        generation = self.generation
        ends = [tokenizer.eos_token_id]
        if generation.stop_at_period:
            ends += tokenizer(".", add_special_tokens=False)["input_ids"][:1]
        ids = self.language_model.network.generate(
            inputs_embeds=prefix,
            attention_mask=torch.ones(prefix.shape[:2], dtype=torch.long, device=prefix.device),
            do_sample=False,
            num_beams=generation.num_beams,
            max_new_tokens=generation.max_new_tokens,
            early_stopping=generation.num_beams > 1,  # as ClipCap: once as many captions as beams have ended
            eos_token_id=ends,
            pad_token_id=tokenizer.eos_token_id,
        )
        return [" ".join(text.split()) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]

    def write_captions(self, batch: Batch) -> list[str]:
        """Write a caption of each image of a batch, for `CaptionEvaluation`."""
        captions: list[str] = self(batch["embedding"])
        return captions

    # ---- Start of a run ----------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[Callback]:
        """Add the callbacks that the method needs, unless the user gave them."""
        return missing_callbacks(callbacks_of(self), StepSeedCallback(), CaptionWriter())

    def setup(self, stage: str) -> None:
        """Load the language model, and compare the tower of the data's embeddings with the mapper's.

        Raises:
            UserError: If they differ.
        """
        super().setup(stage)
        self.load()
        self.tower = _same_tower(self.tower, getattr(self.datamodule, "tower", None))

    def load(self) -> None:
        """Load the language model, unless it is loaded.

        Raises:
            UserError: If the language model is not found, or does not fit the mapper.
        """
        if self.language_model.loaded:
            return
        name = self.language_model_name
        network, self.tokenizer = load_language_model(name, self.mapper_settings, self.generation)
        self.language_model.network = network.to(self.device)
        self.language_model.record(type(network).__name__, name)

    def find_networks(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the language model that the checkpoint names, and adopt the origin of its embeddings."""
        self.language_model.compare(checkpoint)
        self.load()
        self.tower = checkpoint.get("tower")

    def write_networks(self, folder: Path) -> None:
        """Write the language model with its tokenizer, and the origin of the embeddings."""
        self.load()
        self.language_model.network.save_pretrained(folder / LANGUAGE_MODEL)
        self.tokenizer.save_pretrained(folder / LANGUAGE_MODEL)
        if self.tower is not None:
            origin = self.tower | {"weights": Path(self.tower["weights"]).name}  # without folders of the machine
            (folder / TOWER).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")

    def read_networks(self, folder: Path) -> None:
        """Load what `write_networks` wrote."""
        self.language_model_name = str(folder / LANGUAGE_MODEL)
        self.load()
        if (folder / TOWER).is_file():
            self.tower = json.loads((folder / TOWER).read_text(encoding="utf-8"))

    def data_sizes(self) -> DataSizes:
        """Return the vocabulary size of the language model."""
        return DataSizes(vocab_size=self.language_model.network.get_input_embeddings().weight.shape[0])

    def sharded_networks(self) -> list[nn.Module]:
        """Return the mapper; the language model is one group with the module."""
        return [self.mapper]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the origin of the embeddings."""
        super().on_save_checkpoint(checkpoint)
        if self.tower is not None:
            checkpoint["tower"] = dict(self.tower)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compare the origin of the embeddings with the checkpoint's.

        Raises:
            UserError: If they differ.
        """
        super().on_load_checkpoint(checkpoint)
        self.tower = _same_tower(checkpoint.get("tower"), self.tower)


def _token_index(attention_mask: Tensor) -> Tensor:
    return attention_mask.flatten().nonzero()[:, 0]


def _same_tower(trained_on: dict[str, str] | None, data: dict[str, str] | None) -> dict[str, str] | None:
    """Return the origin of embeddings, after a comparison of that of the training with that of the data."""
    if trained_on is not None and data is not None and trained_on["sha256"] != data["sha256"]:
        raise UserError(
            f"Expected embeddings by {trained_on['model']} of {trained_on['weights']!r} (sha256 "
            f"{trained_on['sha256'][:12]}), which the mapper was trained on, got those by {data['model']} of "
            f"{data['weights']!r} (sha256 {data['sha256'][:12]}): embed the images with the former, and give the store "
            "as data.embeddings."
        )
    return trained_on or data
