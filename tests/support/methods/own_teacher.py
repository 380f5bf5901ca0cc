"""Networks as a user would write them for a teacher."""

import torch
from torch import Tensor, nn


class OwnClassifier(nn.Module):
    """A small classifier of images of any size.

    Args:
        classes: number of classes.
        image_size: the only size of its images, in pixels; None for any.
        mean: mean of its images; None states none.
        std: standard deviation of its images.
    """

    def __init__(
        self,
        classes: int = 40,
        image_size: int | None = None,
        mean: tuple[float, float, float] | None = (0.4, 0.5, 0.6),
        std: tuple[float, float, float] = (0.2, 0.3, 0.4),
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU())
        self.top = nn.Linear(6, classes)
        self.image_size, self.mean, self.std = image_size, mean, std

    def forward(self, image: Tensor) -> Tensor:
        """Map images to logits."""
        if self.image_size not in (None, image.shape[-1]):
            raise ValueError(f"images of {self.image_size} pixels only.\nHere a second line.")
        logits: Tensor = self.top(self.body(image).mean((2, 3)))
        return logits


class Loading(OwnClassifier):
    """A classifier that loads its weights when it is built."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.load_state_dict(OwnClassifier().state_dict())


class Scaled(OwnClassifier):
    """A classifier whose logits are not those of its last layer."""

    def forward(self, image: Tensor) -> Tensor:
        """Map images to logits."""
        return 2 * super().forward(image)


class Deep(OwnClassifier):
    """A classifier whose logits have a dimension too many."""

    def forward(self, image: Tensor) -> Tensor:
        """Map images to logits [B, C, 1]."""
        return super().forward(image)[..., None]


class Twice(OwnClassifier):
    """A classifier with two rows of logits for an image."""

    def forward(self, image: Tensor) -> Tensor:
        """Map images to logits [2 B, C]."""
        return super().forward(image).repeat(2, 1)


class OwnPair(nn.Module):
    """Towers of images of 24 pixels and of CLIP's token ids.

    Args:
        width: width of the images' embeddings.
        text_width: width of the texts' embeddings.
        image_size: size that it states; None states none.
        scale: exponential of its parameter `logit_scale`; None for a network without.
    """

    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)

    def __init__(
        self, width: int = 7, text_width: int = 7, image_size: int | None = 24, scale: float | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.image_size = image_size
        if scale is not None:
            self.logit_scale = nn.Parameter(torch.tensor(scale).log())
        self.image, self.text = nn.Linear(3 * 24 * 24, width), nn.Embedding(49408, text_width)

    def encode_image(self, image: Tensor) -> Tensor:
        """Map images to embeddings."""
        embeddings: Tensor = self.image(image.flatten(1))
        return embeddings

    def encode_text(self, input_ids: Tensor) -> Tensor:
        """Map token ids to embeddings."""
        embeddings: Tensor = self.text(input_ids).mean(1)
        return embeddings
