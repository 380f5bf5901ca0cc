"""The head by which image encoders are measured: a linear layer on the mean of the patches."""

from torch import Tensor, nn


class LinearProbe(nn.Module):
    """Tokens of an image encoder to logits: the mean of all but the first token, a LayerNorm, a linear layer.

    Args:
        width: values of a token, D.
        num_classes: number of classes C.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.linear = nn.Linear(width, num_classes)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T, D], the class token first, to logits [B, C].

        Raises:
            ValueError: if there are no tokens beside the class token.
        """
        if tokens.dim() != 3 or tokens.shape[1] < 2:
            raise ValueError(
                f"The image encoder gave {list(tokens.shape)}, expected tokens [B, T, D], a class token and at least "
                "one patch: use an encoder that does not pool them."
            )
        logits: Tensor = self.linear(self.norm(tokens[:, 1:].mean(1)))
        return logits
