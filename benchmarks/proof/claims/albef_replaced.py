"""ALBEF's parts on shop photographs of which 40% have the title of another product.

Claim: contrast, hard negatives and momentum distillation each improve ALBEF, distillation the more, the more captions
are wrong (Li et al., Table 1, on captions of the web). Each variant adds one of them to the one before; negatives and
soft targets are those of the small recipe of `albef.py`.

Opponent: matching and masked words alone, the first row of the paper's table, which have no contrast to search by. So
the search of all variants is by the matching head alone, over all pairs of 480 test images with their titles; the
recall of the contrast stands beside it.

Budget: images of 48 pixels, towers of width 96 from random weights without a queue (the towers of `albef.py`), eight
epochs at one learning rate. The paper's models are pre-trained on 4 million images and fine-tuned for retrieval. With
fewer replaced captions only the first, the third and the last variant are trained.

Data: `fashion/{train,validation,test}.parquet` with the columns `image` and `caption`. Of the test, equal titles count
as matches.
"""

from proof.claim import Budget, Claim, Preparation, Variant
from proof.claims.albef import ALBEF, BY_ACCURACY, NO_QUEUE, RAMPED, SIZE, TOKENS

EPOCHS, CANDIDATES = 8, 480
FASHION = "${data}/fashion"
TEST = f'{{"path":"{FASHION}/test.parquet","split":"train[:{CANDIDATES}]"}}'
NO_DISTILLATION = ("--model.momentum.distill_itc=false", "--model.momentum.distill_mlm=false")
RANDOM = "--model.contrast.negatives=random"


def replaced(share: int) -> Claim:
    """Return the claim for a share of replaced captions, in percent."""
    file = f"${{folder}}/{share}.parquet"
    pairs = ("materials.py", "replaced", file, "--pairs", f"{FASHION}/train.parquet", "--share", str(share / 100))
    contrast = "matching, words, contrast"
    variants = (
        Variant("matching and words", (*NO_DISTILLATION, RANDOM, "--model.contrast.itc=false"), needs=("pairs",)),
        Variant(contrast, (*NO_DISTILLATION, RANDOM), needs=("pairs",)),
        Variant(f"{contrast}, hard negatives", (*NO_DISTILLATION, RAMPED), needs=("pairs",)),
        Variant("the same, contrast distilled", (NO_DISTILLATION[1], RAMPED, BY_ACCURACY), needs=("pairs",)),
        Variant("the same, both distilled", (RAMPED, BY_ACCURACY), needs=("pairs",)),
    )
    return Claim(
        name=f"albef_replaced_{share}" if share != 40 else "albef_replaced",
        statement=f"ALBEF's parts on shop photographs, {share}% of them with the title of another product.",
        words=(
            *("--data=ImageTextDataModule", f"--data.train=${{pairs}}/{share}.parquet"),
            *(f"--data.validation={FASHION}/validation.parquet", f"--data.image_size={SIZE}"),
            *("--data.augmentation=crop", "--data.horizontal_flip=false", f"--data.max_tokens={TOKENS}"),
            *("--data.batch_size=64", "--data.num_workers=0", *ALBEF, NO_QUEUE, f"--model.rerank.k={CANDIDATES}"),
        ),
        variants=variants if share == 40 else (variants[0], variants[2], variants[4]),
        budgets=(Budget("equal epochs", epochs=EPOCHS),),
        metric="val/recall_mean",
        learning_rates=(1e-3,),
        shown=("test/rerank_recall_mean", "test/rerank_pair_accuracy", "test/recall_mean"),
        opponent="matching and words",
        preparations=(Preparation("pairs", before=(pairs,)),),
        test=(f"--data.test={TEST}",),
        evaluations=4,
    )


CLAIM = replaced(40)
