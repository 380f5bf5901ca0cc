"""ALBEF from random weights on drawings of emoji: its contrast, its re-ranking, and a plain pair of towers.

Claim: ALBEF's re-ranking is better than its own contrast, and its contrast is within two points of a plain pair of
towers at equal steps. Variants change one thing at a time: hard negatives from the first step, soft targets of the
untrained teacher, the length of the queue, and the lower bound of the temperature.

Opponents: a plain pair of towers (MM-LG's student without blocks), at equal epochs and at the FLOPs of ALBEF.

Budget: images of 48 pixels; training on one drawing of each emoji, search in the other (1,906 candidates). A share of
the training drawings selects the learning rate.

Data: `emoji/{twitter,google}.parquet` with the columns `image` and `caption`.
"""

import json

from proof.claim import Budget, Claim, Variant

SIZE, PATCH, TOKENS, EPOCHS = 48, 8, 32, 40
WIDTH, HEADS, DEPTH, FUSED, EMBED = 128, 4, 4, 2, 64
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
    *(f"--model.text.max_positions={TOKENS}", f"--model.contrast.embed_dim={EMBED}", "--data.vocab_size=4000"),
    *("--model.contrast.queue_size=256", "--model.momentum.momentum=0.99", "--model.optim.warmup_steps=50"),
    *("--model.rerank.k=32", "--model.match_equal_texts=true"),
)
TOWERS = (
    *("--model=MMLGModule", "--model.student=plain", "--model.teacher.distillation_weight=0"),
    *(f"--model.towers.width={WIDTH}", f"--model.towers.heads={HEADS}", f"--model.towers.depth={DEPTH}"),
    *(f"--model.towers.embed_dim={EMBED}", f"--model.vision.patch_size={PATCH}", "--model.optim.warmup_steps=50"),
    *("--data.tokenizer=clip", "--data.vocab_size=49408", "--model.match_equal_texts=true"),
)

CLAIM = Claim(
    name="albef",
    statement="ALBEF from random weights beside a plain pair of towers: trained on one drawing, searched in another.",
    words=PAIRS,
    variants=(
        Variant("ALBEF", ALBEF),
        Variant("two towers", TOWERS, prefix="karpathy5/"),
        Variant("ALBEF, random negatives", (*ALBEF, "--model.contrast.negatives=random")),
        Variant("ALBEF, hard targets in the contrast", (*ALBEF, "--model.momentum.distill_itc=false")),
        Variant("ALBEF, queue of 1,024", (*ALBEF, "--model.contrast.queue_size=1024")),
        Variant("ALBEF, temperature from 0.04", (*ALBEF, "--model.contrast.temperature_min=0.04")),
    ),
    budgets=(
        Budget("equal epochs", epochs=EPOCHS),
        Budget("equal FLOPs", like=("ALBEF", "equal epochs"), variants=("two towers",)),
    ),
    metric="val/recall_mean",
    learning_rates=(3e-4, 1e-3, 3e-3),
    shown=("test/recall_mean", "test/text_to_image_r1", "test/image_to_text_r1", "test/rerank_recall_mean"),
    opponent="two towers",
    test=TESTED,
)
