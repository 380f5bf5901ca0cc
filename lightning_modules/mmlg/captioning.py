"""Captioning with a frozen image tower and a frozen language model (ClipCap: Mokady et al., arXiv 2111.09734).

Only a mapper trains: it turns the embedding of an image into a prefix, after which the language model writes the
caption. MM-LG measures with it what the image towers of its descendants have learnt (arXiv 2506.16673, appendix A). In
ClipCap's code the loss leaves out a real token, which stands for padding, and no end is trained; here the mask decides,
and each caption has an end.
"""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...callbacks import CaptionWriter, StepSeedCallback, all_reduce_sum, gather_texts, missing_callbacks, world_size
from ...callbacks.distributed.collectives import gather_uneven
from ...metrics.captions import caption_scores
from ..base.data_sizes import DataSizes, DataSizesModule
from ..base.frozen import FrozenTeacher
from ..base.sharding import shard
from ..networks.precision import at_least_float32
from ..optim.adamw import AdamWModule
from ..optim.schedules import capped_warmup, warmup_linear
from .caption_mapper import CaptionMapper

Batch = dict[str, Any]


class CaptioningModule(AdamWModule, DataSizesModule):
    """A mapper between embeddings of images and a language model, over an :class:`EmbeddedCaptionsDataModule`.

    Defaults are MM-LG's, else ClipCap's. Neither the language model nor the image tower is in the checkpoint, which
    names both and holds fingerprints of their weights.

    Args:
        embed_dim: number D of values of an embedding (open_clip's ViT-S-16).
        language_model: GPT-2's hub name or folder (ClipCap: gpt2, 124M). The command line sets it from the data's.
        width: width W of a word of the language model (GPT-2).
        prefix_length: words that the language model gets (ClipCap's class; its published command has 40).
        clip_length: positions of the mapper that the embedding is spread over (the same).
        mapper_layers: number of layers of the mapper.
        mapper_heads: number of attention heads of the mapper.
        mlp_ratio: hidden width of the mapper's MLPs over their width.
        learning_rate: learning rate at its peak (MM-LG, ClipCap).
        warmup_steps: optimizer steps of warm-up (the same); a tenth of the run where that is not longer.
        weight_decay: weight decay of AdamW (neither gives one, and the AdamW of ClipCap's code has 0); norms and biases
            are spared.
        betas: beta1 and beta2 of AdamW (ClipCap's code).
        eps: epsilon of AdamW (ClipCap's code).
        num_beams: number of beams of the search for a caption (ClipCap).
        max_new_tokens: longest caption that is written, its end included (ClipCap).
        stop_at_period: end a caption at its first full stop too, as ClipCap does, which knows no other end.

    Raises:
        ValueError: if a number is out of its range.
    """

    def __init__(
        self,
        embed_dim: int = 384,
        language_model: str = "gpt2",
        width: int = 768,
        prefix_length: int = 10,
        clip_length: int = 10,
        mapper_layers: int = 8,
        mapper_heads: int = 8,
        mlp_ratio: float = 2.0,
        learning_rate: float = 2e-5,
        warmup_steps: int = 5_000,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        num_beams: int = 5,
        max_new_tokens: int = 67,
        stop_at_period: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        for name, value in (("num_beams", num_beams), ("max_new_tokens", max_new_tokens)):
            if value < 1:
                raise ValueError(f"Found {name}={value}, expected a number from 1 on.")
        self.mapper = CaptionMapper(
            embed_dim, width, prefix_length, clip_length, mapper_layers, mapper_heads, mlp_ratio
        )
        self.language_model: FrozenTeacher[Any] = FrozenTeacher(nn.Identity(), "language model", "model.language_model")
        self.tower: dict[str, str] | None = None  # what made the embeddings that the mapper knows
        self._written: list[str] = []
        self._references: list[list[str]] = []

    def configure_callbacks(self) -> list[Callback]:
        """Supply what the method cannot run without, and what writes captions, unless the user's own is there."""
        return missing_callbacks(self.trainer.callbacks, StepSeedCallback(), CaptionWriter())  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        """Load the language model, and see which tower made the embeddings.

        Raises:
            ValueError: if the mapper knows those of another one.
        """
        self.load()
        given = getattr(getattr(self.trainer, "datamodule", None), "tower", None)
        self.tower = _same_tower(self.tower, given)

    def data_sizes(self) -> DataSizes:
        """The words that the language model has."""
        return DataSizes(vocab_size=self.language_model.network.get_input_embeddings().weight.shape[0])

    def load(self) -> None:
        """Load the language model, unless that is done.

        Raises:
            FileNotFoundError: if it is not there.
            ValueError: if a checkpoint was trained with another one, or it does not fit the mapper.
        """
        if self.language_model.origin is not None:
            return
        name = self.hparams["language_model"]
        network = _from_hub(AutoModelForCausalLM, name, dtype=torch.float32)
        self.tokenizer = _from_hub(AutoTokenizer, name)
        self._check_fit(network)
        self.language_model.network = network.to(self.device).requires_grad_(False).eval()
        self.language_model.record(type(network).__name__, name)

    def _check_fit(self, network: Any) -> None:
        name, width = self.hparams["language_model"], network.get_input_embeddings().weight.shape[1]
        if width != self.hparams["width"]:
            raise ValueError(
                f"Found width={self.hparams['width']}, but the words of {name!r} have {width} values: set model.width."
            )
        if self.tokenizer.eos_token_id is None:
            raise ValueError(f"Found no end of text in the tokenizer of {name!r}, expected one, as GPT-2's has.")
        needed = self.hparams["prefix_length"] + self.hparams["max_new_tokens"]
        longest = getattr(network.config, "max_position_embeddings", needed)
        if needed > longest:
            raise ValueError(
                f"Found prefix_length={self.hparams['prefix_length']} and max_new_tokens="
                f"{self.hparams['max_new_tokens']}, but {name!r} has {longest} positions: lower one of them."
            )

    def configure_model(self) -> None:
        """Shard the mapper block by block, and the language model as a whole, where the strategy shards."""
        shard(self, [self.mapper])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Name the language model and the tower, and what their weights were."""
        self.language_model.save_record(checkpoint)
        if self.tower is not None:
            checkpoint["tower"] = dict(self.tower)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compare the language model and the tower with those of the checkpoint.

        Raises:
            ValueError: if their weights are others.
        """
        super().on_load_checkpoint(checkpoint)
        self.language_model.compare(checkpoint)
        self.tower = _same_tower(checkpoint.get("tower"), self.tower)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Look up where the tokens are, while the mask is still on the host, which would wait for the device later."""
        if "attention_mask" not in batch:
            return batch
        return batch | {"token_places": _token_places(batch["attention_mask"])}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy of the next token, over the tokens and ends of all captions of all processes."""
        losses = self.token_losses(
            batch["embedding"], batch["input_ids"], batch["attention_mask"], batch.get("token_places")
        )
        count = all_reduce_sum(batch["attention_mask"].sum())
        loss = losses.sum() * world_size() / count  # gradients are averaged over the processes
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def token_losses(
        self, embedding: Tensor, input_ids: Tensor, attention_mask: Tensor, token_places: Tensor | None = None
    ) -> Tensor:
        """Cross entropy of each token that the mask has, one after another.

        Args:
            embedding: [B, D].
            input_ids: long [B, L], filled up on the right.
            attention_mask: long [B, L], 1 for the tokens of a caption and its end.
            token_places: long [tokens], where these are in the mask row by row; looked up in it if not given.

        Returns:
            Float32 [tokens].
        """
        network = self.language_model.network
        prefix = self._prefix(embedding)
        # The last token is only predicted. What fills up a row comes after all that the mask has, so nothing sees it.
        words = network.get_input_embeddings()(input_ids[:, :-1])
        states = network.base_model(inputs_embeds=torch.cat([prefix, words], 1), use_cache=False).last_hidden_state
        kept = _token_places(attention_mask) if token_places is None else token_places
        # Of the vocabulary's size, so only where there is a token to predict.
        logits = network.get_output_embeddings()(states[:, prefix.shape[1] - 1 :].flatten(0, 1)[kept])
        return F.cross_entropy(at_least_float32(logits), input_ids.flatten()[kept], reduction="none")

    def _prefix(self, embedding: Tensor) -> Tensor:
        """[B, D] to [B, P, W], in the precision of the language model's weights."""
        width, weight = self.hparams["embed_dim"], self.language_model.network.get_input_embeddings().weight
        if embedding.shape[-1] != width:
            raise ValueError(
                f"Found embeddings of {embedding.shape[-1]} values, expected {width}: set model.embed_dim to "
                f"{embedding.shape[-1]}, or data.embeddings to those of another tower."
            )
        prefix: Tensor = self.mapper(embedding.to(self.mapper.prefix.dtype)).to(weight.dtype)
        return prefix

    @torch.no_grad()
    def forward(self, embedding: Tensor) -> list[str]:
        """Captions of embeddings [B, D], by beam search for the largest mean log-probability of a token."""
        self.load()
        prefix, tokenizer = self._prefix(embedding), self.tokenizer
        ends = [tokenizer.eos_token_id]
        if self.hparams["stop_at_period"]:
            ends += tokenizer(".", add_special_tokens=False)["input_ids"][:1]
        ids = self.language_model.network.generate(
            inputs_embeds=prefix,
            attention_mask=torch.ones(prefix.shape[:2], dtype=torch.long, device=prefix.device),
            do_sample=False,
            num_beams=self.hparams["num_beams"],
            max_new_tokens=self.hparams["max_new_tokens"],
            # Once as many captions as beams have ended, as in ClipCap.
            early_stopping=self.hparams["num_beams"] > 1,
            eos_token_id=ends,
            pad_token_id=tokenizer.eos_token_id,
        )
        return [" ".join(text.split()) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]

    def on_validation_epoch_start(self) -> None:
        """Start a new evaluation."""
        self._written, self._references = [], []

    def on_test_epoch_start(self) -> None:
        """Start a new evaluation."""
        self._written, self._references = [], []

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Write captions to be compared with the references."""
        self._evaluate(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Write captions to be compared with the references."""
        self._evaluate(batch)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Batch:
        """Captions, with the numbers [B] of the images in their data set and their ids."""
        return {name: batch[name] for name in ("sample_index", "image_id")} | {"caption": self(batch["embedding"])}

    def _evaluate(self, batch: Batch) -> None:
        self._written += self(batch["embedding"])
        self._references += batch["references"]

    def on_validation_epoch_end(self) -> None:
        """Log BLEU, ROUGE-L and CIDEr-D, times 100."""
        self._log_scores("val")

    def on_test_epoch_end(self) -> None:
        """Log BLEU, ROUGE-L and CIDEr-D, times 100."""
        self._log_scores("test")

    def _log_scores(self, split: str) -> None:
        counts = gather_uneven(torch.tensor([len(texts) for texts in self._references], dtype=torch.long))
        references = iter(gather_texts([text for texts in self._references for text in texts]))
        grouped = [[next(references) for _ in range(count)] for count in counts.tolist()]
        scores = caption_scores(gather_texts(self._written), grouped)
        self._written, self._references = [], []
        # Every process has computed the same numbers; the mean over them only keeps Lightning from warning.
        self.log(f"{split}/cider_d", scores.pop("cider_d"), prog_bar=True, sync_dist=True)
        self.log_dict({f"{split}/{name}": value for name, value in scores.items()}, sync_dist=True)

    def lr_of_run(self, step: int, total: int) -> float:
        """Learning rate at a step of a run of so many: linear warm-up, then linear decay to 0, as ClipCap's."""
        warmup = capped_warmup(self.hparams["warmup_steps"], total)
        return warmup_linear(step, total, self.hparams["learning_rate"], warmup)


def _token_places(attention_mask: Tensor) -> Tensor:
    return attention_mask.flatten().nonzero()[:, 0]


def _same_tower(known: dict[str, str] | None, given: dict[str, str] | None) -> dict[str, str] | None:
    if known is not None and given is not None and known["sha256"] != given["sha256"]:
        raise ValueError(
            f"The mapper was trained on embeddings by {known['model']} of {known['weights']!r} (sha256 "
            f"{known['sha256'][:12]}), found some by {given['model']} of {given['weights']!r} (sha256 "
            f"{given['sha256'][:12]}): embed the images with that tower, and give the file as data.embeddings."
        )
    return known or given


def _from_hub(kind: Any, name: str, **options: Any) -> Any:
    try:
        # Left open, transformers asks at the terminal whether to run the Python files of a model.
        return kind.from_pretrained(name, trust_remote_code=False, **options)
    except OSError as error:
        raise FileNotFoundError(
            f"Found no language model {name!r}, expected a name on the hub, or a folder with a network and its "
            "tokenizer: correct the name, or download it."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"Found something else than a language model in {name!r}, expected a causal one of the transformers "
            "library with its tokenizer, such as gpt2: give another one."
        ) from error
