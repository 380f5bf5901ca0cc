"""All methods that embed images and texts, beside plain and trained towers, at equal FLOPs: drawings of emoji.

Claim: none of its own. What does each method reach with the same pairs, image size, shape of towers, size of batches
and counted FLOPs, with the better of two learning rates? Training is on one drawing of each emoji, search in the other
(1,906 candidates).

Opponents: a plain pair of towers; and two towers of trained networks (an EfficientNet-lite0 of ImageNet, and MiniLM)
at 96 pixels, which is what a user would take. Such towers, trained on the same pairs, are MobileCLIP's teacher; MM-LG's
has the same image network and CLIP's tokens, and SHRe's is the network of ImageNet itself.

Budget: the FLOPs of 30 epochs of ALBEF's small recipe, with the teachers that run in a step. What a method needs before
(a teacher, its embeddings of ten crops of each image, a learngene of twice the layers) is spent once, and stands apart.
The crops are those of the others, of 90 to 100%: with ten strong augmentations (40 to 100%, two operations of
RandAugment) MobileCLIP had 19.7 on the validation split, with four crops 22.7, with these ten 20.2 (seed 0, the better
of two learning rates); its recall in the other drawing was 7.8, 11.1 and 11.2.

Data: `emoji/{twitter,google}.parquet` with the columns `image` and `caption`.
"""

import json
from dataclasses import dataclass

from proof.claim import Budget, Claim, Preparation, Variant
from proof.claims.albef import DEPTH, EMBED, HEADS, PATCH, SIZE, SMALL, TOKENS, TRAIN, VALIDATION, WIDTH

TEACHER_SIZE, BATCH = 96, 64
TEACHER_EPOCHS, EXTRACTION_EPOCHS, AUXILIARY_DEPTH, VIEWS = 6, 60, 2 * DEPTH, 10
IMAGENET_MEAN, IMAGENET_STD = "[0.485,0.456,0.406]", "[0.229,0.224,0.225]"
LITE0 = "tf_efficientnet_lite0"
CLIP_NORMALIZATION = (
    "--data.image_mean=[0.48145466,0.4578275,0.40821073]",
    "--data.image_std=[0.26862954,0.26130258,0.27577711]",
)
CLIP_TOKENS = ("--data.tokenizer=clip", "--data.vocab_size=49408")
OWN_TOKENS = ("--data.vocab_size=2000",)
EQUAL_TEXTS = "--model.match_equal_texts=true"
QUIET = (
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=${accelerator}",
    "--trainer.devices=1",
)

# Towers of one shape

PLAIN_TOWERS = (
    *("--model=MMLGModule", f"--model.towers.width={WIDTH}", f"--model.towers.heads={HEADS}"),
    *(f"--model.towers.embed_dim={EMBED}", f"--model.vision.patch_size={PATCH}", "--model.optim.warmup_steps=50"),
    EQUAL_TEXTS,
)
PLAIN = (*PLAIN_TOWERS, "--model.student=plain", f"--model.towers.depth={DEPTH}")
NO_TEACHER = "--model.teacher.distillation_weight=0"
SHRE = (
    *("--model=SHReModule", f"--model.vision.patch_size={PATCH}", f"--model.vision.width={WIDTH}"),
    *(f"--model.vision.heads={HEADS}", f"--model.vision.depth={DEPTH}", "--model.vision.post_norm=false"),
    *(f"--model.text.depth={DEPTH}", "--model.text.dropout=0", "--model.shared=transformer", EQUAL_TEXTS),
    *("--model.num_classes=1000", f"--model.teacher.name=timm/{LITE0}"),
    *(f"--model.teacher.weights=${{networks}}/{LITE0}.safetensors", f"--model.teacher.mean={IMAGENET_MEAN}"),
    f"--model.teacher.std={IMAGENET_STD}",
)
TRAINED_TOWERS = (
    *("--model=CLIPModule", f"--model.model.image.name={LITE0}", "--model.model.text.name=${networks}/minilm"),
    *(f"--model.model.image.weights=${{networks}}/{LITE0}.safetensors", "--model.model.text.weights=pretrained"),
    *(f"--model.vision.image_mean={IMAGENET_MEAN}", f"--model.vision.image_std={IMAGENET_STD}", EQUAL_TEXTS),
    "--trainer.gradient_clip_val=1.0",
)


def mobileclip(tokens: int) -> tuple[str, ...]:
    """Return the arguments of a student with towers of the same shape."""
    towers = {"width": WIDTH, "layers": DEPTH}
    config = {
        "embed_dim": EMBED,
        "vision_cfg": towers | {"image_size": SIZE, "patch_size": PATCH, "head_width": WIDTH // HEADS},
        "text_cfg": towers | {"context_length": tokens, "vocab_size": 49408, "heads": HEADS},
    }
    return (
        *("--model=MobileCLIPModule", f"--model.model={json.dumps({'name': 'plain towers', 'config': config})}"),
        *("--model.captions=real", "--model.teacher.distillation_weight=0.75", "--model.momentum.momentum=null"),
        *("--model.optim.warmup_steps=50", EQUAL_TEXTS),
    )


@dataclass(frozen=True)
class Pairs:
    """A data set.

    Attributes:
        name: in the statement.
        train: its training split.
        validation: its validation split.
        test: its test split.
        tokens: length of the texts.
    """

    name: str
    train: str
    validation: str
    test: str
    tokens: int

    def words(self, size: int, train: str = "") -> tuple[str, ...]:
        """Return the arguments of the data, with images of a size in pixels; `train` names reinforced pairs instead."""
        drawn = () if train else ("--data.augmentation=crop", "--data.horizontal_flip=false")
        return (
            f"--data={'Reinforced' if train else ''}ImageTextDataModule",
            *(f"--data.train={train or self.train}", f"--data.validation={self.validation}"),
            *(f"--data.image_size={size}", f"--data.max_tokens={self.tokens}", f"--data.batch_size={BATCH}", *drawn),
            *("--data.eval_batch_size=250", "--data.num_workers=0"),
        )


def comparison(name: str, pairs: Pairs, flops: float) -> Claim:
    """Return the comparison on a data set.

    Args:
        name: name of the claim.
        pairs: the data set.
        flops: of each training.
    """
    data = pairs.words(SIZE)
    tested = (f"--data.test={pairs.test}",)
    learngene = {"file": "${auxiliary}", "target": "student"}
    expansion = ({"class_path": "LearngeneExpansionCallback", "init_args": learngene},)
    networks = Preparation(
        "networks",
        before=(
            ("materials.py", "image_network", "efficientnet-lite0", "${folder}"),
            ("materials.py", "text_encoder", "${folder}/minilm"),
            (
                *("materials.py", "clip", "${folder}/clip", "--image-size", f"{SIZE}", "--width", "128"),
                *("--layers", "3", "--tokens", f"{pairs.tokens}"),
            ),
        ),
    )
    teacher = Preparation(
        "teacher",
        (*TRAINED_TOWERS, *pairs.words(TEACHER_SIZE), "--model.optim.learning_rate=3e-4"),
        TEACHER_EPOCHS,
        needs=("networks",),
        test=tested,
    )
    reinforced = Preparation(
        "reinforced",
        needs=(teacher.name,),
        after=(
            (
                *("predict", "--model=ReinforcementModule"),
                f'--model.teachers=[{{"weights": "${{{teacher.name}_checkpoint}}"}}]',
                *("--data=ReinforcementDataModule", f"--data.pairs={pairs.train}", "--data.folder=${folder}/shards"),
                *(f"--data.image_size={TEACHER_SIZE}", f"--data.augmentations={VIEWS}", "--data.crop_scale=[0.9,1.0]"),
                *("--data.num_ops=0", "--data.batch_size=16", "--data.num_workers=0", *QUIET),
                "--data.synthetic_column=caption",  # which the student does not read
            ),
        ),
    )
    teacher_of_extraction = Preparation(
        "clip_teacher",
        (
            *("--model=CLIPModule", "--model.weights=${networks}/clip", "--model.tuning.batch_norm=trained"),
            *("--model.optim.learning_rate=5e-4", EQUAL_TEXTS, *data, *CLIP_TOKENS),
        ),
        2 * TEACHER_EPOCHS,
        needs=("networks",),
        after=(("export", "${folder_checkpoint}", "${folder}/clip", "--layout=open_clip"),),
        test=tested,
    )
    auxiliary = Preparation(
        "auxiliary",
        (
            *(*PLAIN_TOWERS, *data, *CLIP_TOKENS, "--model.student=MM-LG", f"--model.towers.depth={AUXILIARY_DEPTH}"),
            *(f"--model.teacher.weights=${{{teacher_of_extraction.name}}}/clip", "--model.optim.learning_rate=1e-3"),
        ),
        EXTRACTION_EPOCHS,
        ({"class_path": "LearngeneWriter"},),
        (teacher_of_extraction.name,),
        test=tested,
    )
    return Claim(
        name=name,
        statement=f"All methods beside plain and trained towers, on {pairs.name}, at equal FLOPs.",
        words=(),
        variants=(
            Variant("plain towers", (*PLAIN, NO_TEACHER, *data, *CLIP_TOKENS), prefix="karpathy5/"),
            Variant("trained towers", (*TRAINED_TOWERS, *pairs.words(TEACHER_SIZE)), needs=("networks",)),
            Variant("ALBEF, small recipe", (*data, *SMALL, f"--model.text.max_positions={pairs.tokens}")),
            Variant("SHRe", (*SHRE, *data, *OWN_TOKENS), needs=("networks",), prefix="h2/"),
            Variant(
                "MobileCLIP",
                (*mobileclip(pairs.tokens), *pairs.words(SIZE, "${reinforced}/shards"), *CLIP_NORMALIZATION),
                needs=("reinforced",),
            ),
            Variant(
                "MM-LG, descendant", (*PLAIN, NO_TEACHER, *data, *CLIP_TOKENS), expansion, ("auxiliary",), "karpathy5/"
            ),
        ),
        budgets=(Budget("equal FLOPs", flops=flops),),
        metric="val/recall_mean",
        learning_rates=(3e-4, 1e-3),
        shown=(
            *("test/recall_mean", "test/text_to_image_r1", "test/image_to_text_r1"),
            *("test/rerank_recall_mean", "test/rerank_text_to_image_r1"),
        ),
        opponent="plain towers",
        preparations=(networks, teacher, reinforced, teacher_of_extraction, auxiliary),
        test=tested,
        evaluations=6,
    )


EMOJI = Pairs("drawings of emoji", TRAIN, VALIDATION, "${data}/emoji/google.parquet", TOKENS)

CLAIM = comparison("comparison", EMOJI, flops=8.8e12)
