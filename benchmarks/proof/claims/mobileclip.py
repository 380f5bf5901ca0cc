"""MobileCLIP on shop photographs: how many fewer samples a student takes, reinforcement by reinforcement.

Claim: captions of a captioner, the embeddings of one teacher, strong augmentations and a second teacher each spare a
student samples (Vasu et al., section 4: 10 to 1,000 times fewer at its scale). The measure is the number of steps to
the recall at which plain training ends, with the interval of the factor over the seeds.

Teachers are pairs of trained towers, EfficientNet-lite0 and -lite2 of ImageNet with MiniLM, which learn from one half
of the training pairs; their recall stands below the tables. The captioner is of the project: a small language model
trained on the titles of that half, and a mapper from the first teacher's images to its prefixes. The student, from
random weights, learns from the other half, whose pairs neither teachers nor captioner have seen.

Opponents: plain training on weak crops, and on the strong augmentations that the teachers are given. All have the same
pairs, batches and steps; the second text of an image makes a step with captions dearer, which the FLOPs show.

Budget: student images of 48 pixels, teacher images of 96. Four weak crops, or ten strong augmentations, of each image
are stored with the teachers' embeddings; what that costs once stands apart. What was made smaller, for three hours of
CPU: one caption of an image in place of five, 16 epochs, and two learning rates, searched with plain training and with
one teacher: the others have the rate of the nearer of the two.

Data: `fashion/{train,validation,test}.parquet` with the columns `image`, `image_id` and `caption`. Titles repeat in the
data, so that some of the student's are those of a teacher's pair with another image.
"""

import json

from proof.claim import Budget, Claim, Preparation, Variant

SIZE, TEACHER_SIZE, TOKENS, EPOCHS = 48, 96, 24, 16
TEACHER_EPOCHS, CAPTIONER_EPOCHS, LANGUAGE_EPOCHS = 4, 12, 25
WEAK_VIEWS, STRONG_VIEWS, PREFIX = 4, 10, 8
BLOCKS = range(0, 7_840, 160)
FASHION = "${data}/fashion"


def rows(first: int, last: int) -> str:
    """Return a source of the rows from `first` to `last` of each block of 160, which are similar products."""
    split = "+".join(f"train[{start + first}:{start + last}]" for start in BLOCKS)
    return json.dumps({"path": f"{FASHION}/train.parquet", "split": split})


TEACHERS_HALF, STUDENTS_HALF = rows(0, 80), rows(80, 160)
CAPTIONER_VALIDATION = rows(150, 160)  # of the student's half, which the captioner has not seen
TESTED = (f"--data.test={FASHION}/test.parquet",)
QUIET = (
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=${accelerator}",
    "--trainer.devices=1",
)

# Teachers

IMAGE_NETWORKS = {"lite0": "tf_efficientnet_lite0", "lite2": "tf_efficientnet_lite2"}
NETWORKS = Preparation(
    "networks",
    before=(
        *(("materials.py", "image_network", f"efficientnet-{name}", "${folder}") for name in IMAGE_NETWORKS),
        ("materials.py", "text_encoder", "${folder}/minilm"),
    ),
)
MINILM = ("--model.model.text.name=${networks}/minilm", "--model.model.text.weights=pretrained")


def teacher(name: str) -> Preparation:
    """Return the training of a teacher with an image network."""
    network = IMAGE_NETWORKS[name]
    words = (
        *("--model=CLIPModule", f"--model.model.image.name={network}", *MINILM),
        *(f"--model.model.image.weights=${{networks}}/{network}.safetensors", "--model.match_equal_texts=true"),
        *("--model.vision.image_mean=[0.485,0.456,0.406]", "--model.vision.image_std=[0.229,0.224,0.225]"),
        *("--model.optim.learning_rate=3e-4", "--trainer.gradient_clip_val=1.0", "--data=ImageTextDataModule"),
        *(f"--data.train={TEACHERS_HALF}", f"--data.validation={FASHION}/validation.parquet"),
        *(f"--data.image_size={TEACHER_SIZE}", "--data.augmentation=crop", "--data.horizontal_flip=false"),
        *(f"--data.max_tokens={TOKENS}", "--data.batch_size=64", "--data.eval_batch_size=128", "--data.num_workers=0"),
    )
    return Preparation(f"teacher_{name}", words, TEACHER_EPOCHS, needs=("networks",), test=TESTED)


# Captioner


EMBEDDED = (
    *("embed", "${teacher_lite0_checkpoint}", "--of=images", f"--data.predict={FASHION}/train.parquet"),
    *("--output=${folder}/store", "--batch_size=128", "--num_workers=0", "--accelerator=${accelerator}"),
)
CAPTIONER = (
    *("--model=CaptioningModule", "--model.embed_dim=512", "--data=EmbeddedCaptionsDataModule"),
    *("--data.language_model=${language_model}/network", "--model.mapper.width=128"),
    *(f"--model.mapper.prefix_length={PREFIX}", f"--model.mapper.clip_length={PREFIX}"),
    *("--model.mapper.depth=2", "--model.mapper.heads=4", "--model.generation.max_new_tokens=24"),
    *("--model.optim.learning_rate=1e-3", "--model.optim.warmup_steps=30"),
    *("--data.embeddings=${embeddings}/store", "--data.join_on=image_id", f"--data.train={TEACHERS_HALF}"),
    *(f"--data.validation={CAPTIONER_VALIDATION}", "--data.max_tokens=40", "--data.batch_size=64"),
)
CAPTIONED = (
    *("predict", "--ckpt_path=${folder_checkpoint}", f"--data.predict={STUDENTS_HALF}", *QUIET),
    '--trainer.callbacks=[{"class_path":"CaptionWriter","init_args":{"folder":"${folder}/captions"}}]',
)
LANGUAGE_MODEL = ("materials.py", "language_model", "${folder}/network", "--pairs", TEACHERS_HALF)
JOINED = ("materials.py", "captioned", "${folder}/pairs.parquet", "--pairs", STUDENTS_HALF)

# Reinforcements

WEAK = (f"--data.augmentations={WEAK_VIEWS}", "--data.crop_scale=[0.9,1.0]", "--data.num_ops=0")
STRONG = (f"--data.augmentations={STRONG_VIEWS}", "--data.crop_scale=[0.4,1.0]")


def reinforced(name: str, augmentations: tuple[str, ...], teachers: tuple[str, ...]) -> Preparation:
    """Return a reinforcement of the student's half."""
    weights = [{"weights": f"${{{teacher}_checkpoint}}"} for teacher in teachers]
    words = (
        *("predict", "--model=ReinforcementModule", f"--model.teachers={json.dumps(weights)}"),
        *("--data=ReinforcementDataModule", "--data.pairs=${captions}/pairs.parquet", "--data.folder=${folder}/shards"),
        *("--data.synthetic_column=synthetic", f"--data.image_size={TEACHER_SIZE}", "--data.batch_size=16"),
        *("--data.num_workers=0", *augmentations, *QUIET),
    )
    return Preparation(name, needs=("captions", *teachers), after=(words,))


# Students

STUDENT = (
    *("--model=MobileCLIPModule", "--model.model=MobileCLIP-tiny", "--model.momentum.momentum=null"),
    *("--model.optim.warmup_steps=40", "--model.match_equal_texts=true", "--data=ReinforcedImageTextDataModule"),
    *(f"--data.validation={FASHION}/validation.parquet", f"--data.image_size={SIZE}", f"--data.max_tokens={TOKENS}"),
    *("--data.batch_size=128", "--data.eval_batch_size=250", "--data.num_workers=0"),
)
NO_TEACHER = ("--model.teacher.distillation_weight=0",)
REAL = (*NO_TEACHER, "--model.captions=real")


def student(name: str, source: str, *words: str, learning_rate_of: str = "") -> Variant:
    """Return the training of a student on a reinforcement."""
    return Variant(name, (f"--data.train=${{{source}}}/shards", *words), (), (source,), "", None, learning_rate_of)


CLAIM = Claim(
    name="mobileclip",
    statement="MobileCLIP's student on reinforced shop photographs against plain training, in samples to its recall.",
    words=STUDENT,
    variants=(
        student("plain", "weak", *REAL),
        student("+ captions", "weak", *NO_TEACHER, learning_rate_of="plain"),
        student("+ one teacher", "weak"),
        student("+ augmentations", "strong", learning_rate_of="+ one teacher"),
        student("+ second teacher", "two_teachers", learning_rate_of="+ one teacher"),
        student("plain, strong augmentations", "strong", *REAL, learning_rate_of="plain"),
    ),
    budgets=(Budget("equal epochs", epochs=EPOCHS),),
    metric="val/recall_mean",
    learning_rates=(1e-3, 3e-3),
    shown=("test/recall_mean", "test/text_to_image_r1", "test/image_to_text_r1"),
    opponent="plain",
    preparations=(
        NETWORKS,
        *(teacher(name) for name in IMAGE_NETWORKS),
        Preparation("language_model", before=((*LANGUAGE_MODEL, "--epochs", f"{LANGUAGE_EPOCHS}"),)),
        Preparation("embeddings", needs=("teacher_lite0",), after=(EMBEDDED,)),
        Preparation(
            "captioner", CAPTIONER, CAPTIONER_EPOCHS, needs=("embeddings", "language_model"), after=(CAPTIONED,)
        ),
        Preparation(
            "captions",
            needs=("captioner",),
            before=((*JOINED, "--captions", "${captioner}/captions/captions.parquet"),),
        ),
        reinforced("weak", WEAK, ("teacher_lite0",)),
        reinforced("strong", STRONG, ("teacher_lite0",)),
        reinforced("two_teachers", STRONG, ("teacher_lite0", "teacher_lite2")),
    ),
    test=TESTED,
    evaluations=8,
    level_of="plain",
)
