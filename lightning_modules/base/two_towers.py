"""Base of the methods that train a pair of towers of open_clip's: CLIP and MobileCLIP.

Shapes: B images or texts, S side of an image in pixels, L tokens of a text, E embedding dimension.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from timm.layers import to_2tuple
from torch import Tensor

from ..core.data_sizes import DataSizes
from ..core.precision import unit
from ..core.towers import SPACE, check_stored, projected, tower_digest, towers_of
from ..losses.contrast import check_length
from ..networks.clip.export import LAYOUTS, export_network
from ..networks.clip.models import model_config
from ..networks.clip.pair import RANDOM, TowerPair, load_towers
from ..networks.clip.preprocessing import ImageSettings
from ..networks.clip.shapes import Model, text_prefix_of, text_tower_of
from ..networks.clip.text_encoder import EncoderTower
from ..optim.optimizers import channels_last
from .example_batch import pair_batch
from .method import Method
from .vocabulary import check_tokenizer


class TwoTowers(Method):
    """A method whose `student` has an image and a text tower, whose features are compared by their cosine.

    The constructor of a subclass sets the attributes below.
    """

    model: Model
    vision: ImageSettings
    max_tokens: int
    student: Any

    @property
    def evaluated(self) -> Any:
        """The network that is evaluated and exported."""
        return self.student

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return unit-length features [B, E] of images and texts."""
        return self.encode_images(batch["image"])[0], self.encode_texts(batch["input_ids"], batch["attention_mask"])

    def encode_images(self, image: Tensor) -> tuple[Tensor, None]:
        """Return unit-length features [B, E] of images [B, 3, S, S], or of features [B, D] from a store."""
        return unit(self.image_features(image)), None

    def image_features(self, image: Tensor) -> Tensor:
        """Return unnormalized features [B, E] of images [B, 3, S, S], or of features [B, D] from a store."""
        network = self.evaluated
        features: Tensor = projected(network.visual, image) if image.ndim == 2 else network.encode_image(image)
        return features

    def encode_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return unit-length features [B, E] of texts [B, L], or of features [B, D] from a store."""
        return unit(self.text_features(input_ids, attention_mask))

    def text_features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return unnormalized features [B, E] of texts [B, L], or of features [B, D] from a store.

        open_clip's text towers use all positions and no mask; an encoder of transformers leaves out the padding.
        """
        network = self.evaluated
        if input_ids.is_floating_point():
            return projected(network.text, input_ids)
        self.check_texts(input_ids)
        features: Tensor = network.encode_text(input_ids)
        return features

    def check_texts(self, input_ids: Tensor) -> None:
        """Check the number of tokens of texts [B, L].

        Raises:
            UserError: If the text tower does not take it.
        """
        check_length(input_ids, self.max_tokens, fixed=self.text_encoder is None)

    @property
    def text_encoder(self) -> EncoderTower | None:
        """The text tower, if it is an encoder of transformers."""
        return self.student.text if isinstance(self.student.text, EncoderTower) else None

    def load_tower_weights(self) -> None:
        """Load the weights of the towers of a pair that was not trained together."""
        if isinstance(self.model, TowerPair):
            rank_zero_info(load_towers(self.student, self.model))

    # Texts, which data reads

    def expected_tokenizer(self) -> str | None:
        """Return the folder or hub name of the tokenizer of an encoder of transformers; None for other text towers."""
        if self.text_encoder is None:
            return None
        name: str | None = model_config(self.model)["text_cfg"].get("hf_tokenizer_name")
        return name

    @property
    def text_prefix(self) -> str:
        """Text before each text."""
        return text_prefix_of(self.model)

    def tower_record(self) -> dict[str, Any]:
        """Return the fingerprints of both towers, and their space if another pair's; empty if they are sharded."""
        if self.device_mesh is not None:  # every process would have to gather them
            return {}
        towers = {side: tower_digest(tower, whole=True) for side, tower in towers_of(self.evaluated).items()}
        return towers | ({} if self.space is None else {SPACE: self.space.as_dict()})

    # Features from stores

    @property
    def locked_towers(self) -> list[str]:
        """Towers whose features stay the same in training, among `image` and `text`; by default none."""
        return []

    def on_fit_start(self) -> None:
        """Load initial weights, unless a checkpoint was restored, and compare the towers with those of stores."""
        super().on_fit_start()
        check_stored(self, self.student)

    def on_validation_start(self) -> None:
        """Load initial weights, if these are evaluated, and compare the towers with those of stores."""
        super().on_validation_start()
        if self.trainer.state.fn != TrainerFn.FITTING:
            check_stored(self, self.evaluated)

    on_test_start = on_predict_start = on_validation_start

    def on_train_start(self) -> None:
        """Compare the data's tokenizer, restored from a checkpoint by now, with that of an encoder of transformers.

        Raises:
            UserError: If it has other ids.
        """
        super().on_train_start()
        tower = self.text_encoder
        name = self.expected_tokenizer()
        if tower is not None and name is not None:
            text = text_tower_of(self.model)
            trained = text is not None and text.weights != RANDOM
            check_tokenizer(self, name, tower.vocab_size, tower.pad_token_id, trained)

    def expected_image_size(self) -> int:
        """Return the argument `vision.image_size`, else the size in the model's configuration, in pixels."""
        return self.vision.image_size or int(model_config(self.model)["vision_cfg"]["image_size"])

    def data_sizes(self) -> DataSizes:
        """Return the sizes that the towers were built for."""
        size = self.vision.image_size or to_2tuple(self.student.visual.image_size)[0]
        return DataSizes(size, self.student.vocab_size)

    def configure_model(self) -> None:
        """Shard the networks, or lay out convolutions with channels last, which FSDP2 does not support."""
        super().configure_model()
        if self.device_mesh is None:
            channels_last(self)

    def network_methods(self) -> Sequence[str]:
        """Return the methods of a pair of towers that use its parameters."""
        return "encode_image", "encode_text"

    def module_methods(self) -> Sequence[str]:
        """Return the methods that encode images and texts."""
        return "encode_images", "encode_texts"

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return pairs of images and texts with the shapes of a training, for `vlightning plan`."""
        batch = pair_batch(self, rows, data)
        if data.get("short_texts") is not None:
            batch |= {f"short_{name}": batch[name] for name in ("input_ids", "attention_mask")}
        return batch

    @classmethod
    def layouts(cls) -> dict[str, str]:
        """Return the description of each layout of an export; the first is the default of `vlightning export`."""
        return LAYOUTS | super().layouts()

    @classmethod
    def write_layout(
        cls, content: Mapping[str, Any], source: str, target: str, layout: str, dtype: torch.dtype = torch.float32
    ) -> str:
        """Write the model of a checkpoint in a layout other than `FOLDER`."""
        return export_network(content, source, target, layout, dtype)
