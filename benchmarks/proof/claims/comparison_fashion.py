"""All methods that embed images and texts, beside plain and trained towers, at equal FLOPs: shop photographs.

The methods, the opponents and the shape of the towers of `comparison.py`, with titles in place of names; every image
with an equal title counts as a match.

Budget: the FLOPs of about eight epochs of ALBEF's small recipe.

Data: `fashion/{train,validation,test}.parquet` with the columns `image`, `image_id` and `caption`.
"""

from proof.claims.comparison import Pairs, comparison

FASHION = "${data}/fashion"
PAIRS = Pairs(
    "shop photographs",
    *(f"{FASHION}/{split}.parquet" for split in ("train", "validation", "test")),
    tokens=24,
)

CLAIM = comparison("comparison_fashion", PAIRS, flops=1.2e13)
