"""SHRe on shop photographs and images of textbooks: what an ImageNet classifier adds, and a plain pair of towers.

Claim: the KL divergence from the posterior of a classifier of ImageNet, the case of the thesis' listing 2, improves
retrieval, with shared layers that are an MLP as in the thesis, or a Transformer layer. Every image with an equal title
counts as a match. A linear probe of the image encoder and the similarity to the classes' names classify the test images
by labels that no training reads.

Opponents: the same networks without the KL divergence; a plain pair of towers (MM-LG's student without blocks) with the
same contrast, at equal epochs and, as the MLP without the KL divergence, at the FLOPs of SHRe with it.

Budget: images of 64 pixels, which is little for a classifier of 224: how much its features still say about these images
stands below the tables, as its own linear probe. What was made smaller, for two hours of CPU: networks of width 96, 6
epochs, and two learning rates, searched at equal epochs; the Transformer layer has those of the MLP, and equal FLOPs
those of equal epochs.

Data: `fashion/{train,validation,test}.parquet` with the columns `image`, `image_id`, `caption` and `label`;
`openstax/train.parquet` with the columns `image` and `caption`, for training only.
"""

import json

from proof.claim import Budget, Claim, Preparation, Variant

SIZE, CLASSES, WIDTH, EPOCHS, PROBE_EPOCHS = 64, 66, 96, 6, 5
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CROP = {"class_path": "ALBEFTrainTransform", "init_args": {"size": SIZE, "scale": [0.9, 1.0], "rand_augment": False}}
EVALUATION = {"class_path": "ALBEFEvalTransform", "init_args": {"size": SIZE}}
FASHION = "${data}/fashion"
PAIRS = (
    *("--data=ImageTextDataModule", f'--data.train=["{FASHION}/train.parquet","${{data}}/openstax/train.parquet"]'),
    *(f"--data.validation={FASHION}/validation.parquet", f"--data.image_size={SIZE}", "--data.max_tokens=24"),
    *(f"--data.train_transform={json.dumps(CROP)}", f"--data.eval_transform={json.dumps(EVALUATION)}"),
    *("--data.batch_size=128", "--data.num_workers=0"),
)
LABELED = {"train": f"{FASHION}/train.parquet", "test": f"{FASHION}/test.parquet", "label_column": "label"}
LABELS = {"class_path": "ImageClassificationDataModule", "init_args": LABELED | {"num_workers": 0}}
MEASURED = (
    {"class_path": "proof.recording.LinearProbe", "init_args": {"data": LABELS, "name": "linear"}},
    {
        "class_path": "ZeroShotClassification",
        "init_args": {"data": LABELS, "name": "from_texts", "templates": ["{}"]},
    },
)
TESTED = (f"--data.test={FASHION}/test.parquet", f"--trainer.callbacks={json.dumps(MEASURED)}")
WORDPIECE = ("--data.vocab_size=4000",)
CLIP_TOKENS = ("--data.tokenizer=clip", "--data.vocab_size=49408")
SHRE = (
    *("--model=SHReModule", "--model.num_classes=1000", "--model.vision.patch_size=16"),
    *(f"--model.vision.width={WIDTH}", "--model.vision.heads=4", "--model.vision.depth=4"),
    "--model.vision.post_norm=false",
    *("--model.text.depth=3", "--model.text.dropout=0.1", "--model.match_equal_texts=true", *WORDPIECE),
)
NETWORK = "timm/tf_efficientnet_lite0"
WEIGHTS = "${networks}/tf_efficientnet_lite0.safetensors"
TAUGHT = (
    *(*SHRE, f"--model.teacher.name={NETWORK}", f"--model.teacher.weights={WEIGHTS}"),
    *(f"--model.teacher.mean={IMAGENET_MEAN}", f"--model.teacher.std={IMAGENET_STD}"),
)
NO_KL = (*SHRE, "--model.kl.weight=0")
TRANSFORMER = ("--model.shared=transformer",)
TOWERS = (
    *("--model=MMLGModule", "--model.student=plain", "--model.teacher.distillation_weight=0"),
    *(f"--model.towers.width={WIDTH}", "--model.towers.heads=4", "--model.towers.depth=4"),
    f"--model.towers.embed_dim={WIDTH}",
    *("--model.vision.patch_size=16", "--model.optim.warmup_steps=50", *CLIP_TOKENS),
    "--model.match_equal_texts=true",
)
AS_TEACHER = {
    "class_path": "CLIPEvalTransform",
    "init_args": {"size": SIZE, "mean": IMAGENET_MEAN, "std": IMAGENET_STD, "interpolation": "bicubic"},
}
PROBED = (
    *("--model=CoCoRDLinearProbeModule", f"--model.network={NETWORK}", "--model.network_classes=1000"),
    *(f"--model.weights={WEIGHTS}", f"--model.num_classes={CLASSES}", "--data=ImageClassificationDataModule"),
    *(f"--data.train={FASHION}/train.parquet", f"--data.validation={FASHION}/validation.parquet"),
    *("--data.label_column=label", f"--data.num_classes={CLASSES}", f"--data.image_size={SIZE}"),
    *(f"--data.train_transform={json.dumps(AS_TEACHER)}", f"--data.eval_transform={json.dumps(AS_TEACHER)}"),
    *("--data.batch_size=64", "--data.num_workers=0", "--model.optim.lr_milestones=[${epoch:0.5},${epoch:0.75}]"),
)
NEEDS = ("teacher",)

CLAIM = Claim(
    name="shre",
    statement="SHRe with and without the posterior of an ImageNet classifier, beside a plain pair of towers.",
    words=PAIRS,
    variants=(
        Variant("SHRe, MLP", TAUGHT, needs=NEEDS, prefix="h2/"),
        Variant("SHRe, MLP, without KL", NO_KL, prefix="h2/"),
        Variant("two towers", TOWERS, prefix="karpathy5/"),
        Variant(
            "SHRe, Transformer",
            (*TAUGHT, *TRANSFORMER),
            needs=NEEDS,
            prefix="h2/",
            learning_rate_of="SHRe, MLP",
        ),
        Variant(
            "SHRe, Transformer, without KL",
            (*NO_KL, *TRANSFORMER),
            prefix="h2/",
            learning_rate_of="SHRe, MLP, without KL",
        ),
    ),
    budgets=(
        Budget("equal epochs", epochs=EPOCHS),
        Budget(
            "equal FLOPs",
            like=("SHRe, MLP", "equal epochs"),
            variants=("two towers", "SHRe, MLP, without KL"),
            learning_rates_of="equal epochs",
        ),
    ),
    metric="val/recall_mean",
    learning_rates=(3e-4, 1e-3),
    shown=(
        *("test/recall_mean", "test/text_to_image_r1", "test/image_to_text_r1"),
        *("test/linear_top1", "test/from_texts_top1"),
    ),
    opponent="two towers",
    preparations=(
        Preparation("networks", before=(("materials.py", "image_network", "efficientnet-lite0", "${folder}"),)),
        Preparation(
            "teacher", PROBED, epochs=PROBE_EPOCHS, needs=("networks",), test=(f"--data.test={FASHION}/test.parquet",)
        ),
    ),
    test=TESTED,
    evaluations=5,
)
