"""Two towers that never met: a trained image network and a trained text encoder, on shop photographs.

Claim: with a few thousand pairs, trained towers are worth more than all else, and heads on locked towers, or a locked
image tower (LiT), come near the training of all weights at a fraction of its cost.

Opponents: the same networks from random weights, on both sides or on one; all weights, locked weights, and low-rank
adapters in the linear layers of the text encoder and the 1x1 convolutions of the image network.

Budget: images of 96 pixels, titles of up to 24 tokens, one epoch of 122 steps. Locked towers run in every step, as in
all other variants; from stored features (`vlightning embed`) they would run once. Image networks from random weights
normalize by the statistics of the batch, trained ones by those of their pre-training.

Data: `fashion/{train,validation,test}.parquet` with the columns `image`, `image_id` and `caption`; every image with an
equal title counts as a match. Weights, as `docs/two_towers.md` makes them: `towers/efficientnet_lite0.safetensors`
(ImageNet) and the folder `towers/minilm` (all-MiniLM-L6-v2).
"""

from collections.abc import Sequence

from proof.claim import Budget, Claim, Variant

SIZE = 96
PAIRS = (
    *("--data=ImageTextDataModule", f"--data.image_size={SIZE}", "--data.augmentation=crop"),
    *("--data.horizontal_flip=false", "--data.batch_size=64", "--data.eval_batch_size=128", "--data.num_workers=0"),
)
MODEL = (
    *(
        "--model=CLIPModule",
        "--model.model.image.name=tf_efficientnet_lite0",
        "--model.model.text.name=${data}/towers/minilm",
    ),
    *("--model.vision.image_mean=[0.485,0.456,0.406]", "--model.vision.image_std=[0.229,0.224,0.225]"),
    *("--model.match_equal_texts=true", "--trainer.gradient_clip_val=1.0"),
)
IMAGE = ("--model.model.image.weights=${data}/towers/efficientnet_lite0.safetensors",)
RANDOM_IMAGE = ("--model.model.image.weights=random", "--model.tuning.batch_norm=trained")
TEXT = ("--model.model.text.weights=pretrained",)
RANDOM_TEXT = ("--model.model.text.weights=random",)
LOCKED_IMAGE = ("--model.tuning.lock_image=all",)
LOCKED_TEXT = ("--model.tuning.lock_text=all",)
ADAPTED = "[query,key,value,attention.output.dense,intermediate.dense,output.dense,conv_pw,conv_pwl]"
LORA = ("--model.tuning.lora.rank=16", "--model.tuning.lora.alpha=32", f"--model.tuning.lora.targets={ADAPTED}")
RECALLS = ("test/recall_mean", "test/text_to_image_r1", "test/image_to_text_r1")


def towers(name: str, pairs: str, words: Sequence[str], epochs: float, test: str) -> Claim:
    """Return the claim on a data set.

    Args:
        name: name of the claim.
        pairs: what the pairs are, in the statement.
        words: arguments of the data, beside those that both data sets have.
        epochs: epochs of each training.
        test: file of the test split.
    """
    return Claim(
        name=name,
        statement=f"EfficientNet-lite0 and MiniLM from random and from trained weights, on {pairs}.",
        words=(*PAIRS, *MODEL, *words),
        variants=(
            Variant("both from random weights", (*RANDOM_IMAGE, *RANDOM_TEXT)),
            Variant("text pretrained", (*RANDOM_IMAGE, *TEXT)),
            Variant("image pretrained and locked", (*IMAGE, *RANDOM_TEXT, *LOCKED_IMAGE)),
            Variant("both pretrained, both locked (heads)", (*IMAGE, *TEXT, *LOCKED_IMAGE, *LOCKED_TEXT)),
            Variant("both pretrained, image locked", (*IMAGE, *TEXT, *LOCKED_IMAGE)),
            Variant("both pretrained, full", (*IMAGE, *TEXT)),
            Variant("both pretrained, LoRA", (*IMAGE, *TEXT, *LORA)),
        ),
        budgets=(Budget("equal epochs", epochs=epochs),),
        metric="val/recall_mean",
        learning_rates=(3e-4, 1e-3),
        shown=RECALLS,
        opponent="both pretrained, full",
        test=(f"--data.test={test}",),
        evaluations=4,
    )


CLAIM = towers(
    "towers",
    "shop photographs",
    (
        *("--data.train=${data}/fashion/train.parquet", "--data.validation=${data}/fashion/validation.parquet"),
        "--data.max_tokens=24",
    ),
    epochs=1,
    test="${data}/fashion/test.parquet",
)
