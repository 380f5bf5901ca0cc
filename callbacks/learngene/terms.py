"""Terms of the weighted sums that an extraction trains, as numbers for logs and figures."""

import dataclasses

Values = dict[str, list[float]]
"""Values of each distinct layer, by `vision`, `vision_multimodal`, `text` and `text_multimodal`."""


@dataclasses.dataclass(frozen=True)
class LearngeneTerms:
    """Coefficients of the sums, and how large the terms are.

    Args:
        coefficients: c of each term c * theta.
        norms: |c * theta|, over all weights and biases of the block theta.
    """

    coefficients: Values
    norms: Values
