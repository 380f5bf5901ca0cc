"""Two towers that never met, on photographs, works of art and diagrams of textbooks with one to five sentences.

The claim, the opponents and the weights of `towers.py`, with descriptions of people in place of titles.

Budget: images of 96 pixels, sentences of up to 48 tokens (99% are shorter), four epochs of 22 steps, each with one of
the sentences of an image. Of each hundred rows of the training split, 15 are for validation; the validation split is
the test.

Data: `openstax/{train,validation}.parquet` with the columns `image` and `caption`.
"""

import json

from proof.claims.towers import towers

BLOCKS = range(0, 1_700, 100)
# The rows are sorted by book: each has equally many rows in both splits.
TRAIN_ROWS = "+".join(f"train[{start}:{start + 85}]" for start in BLOCKS)
VALIDATION_ROWS = "+".join(f"train[{start + 85}:{start + 100}]" for start in BLOCKS)
TRAIN = json.dumps({"path": "${data}/openstax/train.parquet", "split": TRAIN_ROWS})
VALIDATION = json.dumps({"path": "${data}/openstax/train.parquet", "split": VALIDATION_ROWS})

CLAIM = towers(
    "towers_openstax",
    "images of textbooks",
    (f"--data.train={TRAIN}", f"--data.validation={VALIDATION}", "--data.max_tokens=48"),
    epochs=4,
    test="${data}/openstax/validation.parquet",
)
