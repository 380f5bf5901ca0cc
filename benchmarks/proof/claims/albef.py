"""ALBEF from random weights on drawings of emoji: what keeps it from learning, and a plain pair of towers.

Claim: with the small recipe (no queue, soft targets that follow the teacher's accuracy, negatives that become hard as
the student learns, no masked words, re-ranking by matching and contrast) ALBEF's contrast is within two points of a
plain pair of towers at equal steps, and its re-ranking is better than its contrast. With the settings for trained
encoders neither is so. The other variants are the small recipe with one of these settings undone.

Opponents: a plain pair of towers (MM-LG's student without blocks), at equal epochs and at the FLOPs of ALBEF. The
accuracy of the matching head is shown beside its re-ranking, which only improves a search once the head tells a match
from the nearest wrong candidate more often than the contrast does.

Budget: images of 48 pixels; training on one drawing of each emoji, search in the other (1,906 candidates). A share of
the training drawings selects the learning rate. What was made smaller, for three hours of CPU: towers of width 96, 30
epochs, and three learning rates, searched for the small recipe, the settings for trained encoders and the towers; the
other variants have the rate of the recipe that they change.

Data: `emoji/{twitter,google}.parquet` with the columns `image` and `caption`.
"""

import json

from proof.claim import Budget, Claim, Variant

SIZE, PATCH, TOKENS, EPOCHS = 48, 12, 16, 30
WIDTH, HEADS, DEPTH, FUSED, EMBED = 96, 3, 4, 2, 64
BLOCKS = range(0, 1_900, 100)
# The rows are sorted by group, so of each hundred the last ten are for validation.
TRAIN_ROWS = "+".join(f"train[{start}:{start + 90}]" for start in BLOCKS)
VALIDATION_ROWS = "+".join(f"train[{start + 90}:{start + 100}]" for start in BLOCKS)
TRAIN = json.dumps({"path": "${data}/emoji/twitter.parquet", "split": TRAIN_ROWS})
VALIDATION = json.dumps({"path": "${data}/emoji/twitter.parquet", "split": VALIDATION_ROWS})
TESTED = ("--data.test=${data}/emoji/google.parquet",)
PAIRS = (
    *("--data=ImageTextDataModule", f"--data.train={TRAIN}", f"--data.validation={VALIDATION}"),
    *(f"--data.image_size={SIZE}", "--data.augmentation=crop", "--data.horizontal_flip=false"),
    *(f"--data.max_tokens={TOKENS}", "--data.batch_size=64", "--data.num_workers=0"),
)
ALBEF = (
    *("--model=ALBEFModule", f"--model.vision.patch_size={PATCH}", f"--model.vision.width={WIDTH}"),
    *(f"--model.vision.depth={DEPTH}", f"--model.vision.heads={HEADS}", f"--model.text.width={WIDTH}"),
    *(f"--model.text.heads={HEADS}", f"--model.text.ffn_width={4 * WIDTH}", "--model.text.dropout=0"),
    *(f"--model.text.depth={DEPTH - FUSED}", f"--model.text.fusion_depth={FUSED}"),
    *(f"--model.text.max_positions={TOKENS}", f"--model.contrast.embed_dim={EMBED}", "--data.vocab_size=2000"),
    *("--model.momentum.momentum=0.99", "--model.optim.warmup_steps=50"),
    *("--model.rerank.k=32", "--model.match_equal_texts=true"),
)
QUEUE = "--model.contrast.queue_size=256"
NO_QUEUE = "--model.contrast.queue_size=0"
BY_ACCURACY = "--model.momentum.alpha_by_accuracy=true"
RAMPED = "--model.contrast.negatives=ramped"
SMALL = (*ALBEF, NO_QUEUE, BY_ACCURACY, RAMPED, "--model.mlm=false", "--model.rerank.score=itm+itc_logits")
TOWERS = (
    *("--model=MMLGModule", "--model.student=plain", "--model.teacher.distillation_weight=0"),
    *(f"--model.towers.width={WIDTH}", f"--model.towers.heads={HEADS}", f"--model.towers.depth={DEPTH}"),
    *(f"--model.towers.embed_dim={EMBED}", f"--model.vision.patch_size={PATCH}", "--model.optim.warmup_steps=50"),
    *("--data.tokenizer=clip", "--data.vocab_size=49408", "--model.match_equal_texts=true"),
)


def changed(name: str, *words: str, recipe: tuple[str, ...] = SMALL, of: str = "ALBEF, small recipe") -> Variant:
    """Return a variant that differs from another one in one setting, and has its learning rate."""
    return Variant(name, (*recipe, *words), learning_rate_of=of)


CLAIM = Claim(
    name="albef",
    statement="ALBEF from random weights learns with the small recipe: trained on one drawing, searched in another.",
    words=PAIRS,
    variants=(
        Variant("ALBEF, small recipe", SMALL),
        Variant("two towers", TOWERS, prefix="karpathy5/"),
        Variant("ALBEF", (*ALBEF, QUEUE)),
        changed("small recipe, masked words", "--model.mlm=true"),
        changed("small recipe, queue of 256", QUEUE),
        changed("small recipe, alpha of 0.4", "--model.momentum.alpha_by_accuracy=false"),
        changed("small recipe, hard negatives", "--model.contrast.negatives=hard"),
        changed("small recipe, random negatives", "--model.contrast.negatives=random"),
        changed(
            "ALBEF, temperature from 0.04", "--model.contrast.temperature_min=0.04", recipe=(*ALBEF, QUEUE), of="ALBEF"
        ),
    ),
    budgets=(
        Budget("equal epochs", epochs=EPOCHS),
        Budget(
            "equal FLOPs",
            like=("ALBEF, small recipe", "equal epochs"),
            variants=("two towers",),
            learning_rates_of="equal epochs",
        ),
    ),
    metric="val/recall_mean",
    learning_rates=(3e-4, 1e-3, 3e-3),
    shown=("test/recall_mean", "test/text_to_image_r1", "test/rerank_recall_mean", "test/rerank_pair_accuracy"),
    opponent="two towers",
    test=TESTED,
)
