"""Classification head of SHRe's thesis, listing 1: a linear layer on the mean of the patch tokens."""

from torch import Tensor, nn

from ...common.errors import UserError


class LinearProbe(nn.Module):
    """Average all tokens but the first, normalise, and classify with a linear layer (SHRe's thesis, listing 1).

    Args:
        width: width D of a token.
        num_classes: number of classes C.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.linear = nn.Linear(width, num_classes)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [B, T, D], the class token first, to logits [B, C].

        Raises:
            UserError: If there is no token beside the class token.
        """
        if tokens.dim() != 3 or tokens.shape[1] < 2:
            raise UserError(
                f"Expected tokens [B, T, D] of a class token and at least one patch, got {list(tokens.shape)}: use an "
                "image encoder that does not pool its tokens."
            )
        logits: Tensor = self.linear(self.norm(tokens[:, 1:].mean(1)))
        return logits
