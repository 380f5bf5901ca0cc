"""CoCoRD on CIFAR-10: from an EfficientNet-lite0 of ImageNet to a resnet8.

Claim: a student of CoCoRD is better than one of KD, CRD, or both, and these than one of the labels (Fu et al., Tables 1
and 2, on CIFAR-100), in its own classes and in the features that a linear probe of other data reads (Table 4).

Opponents: labels alone; KD and CRD with the weights of the CRD benchmark; CRD + KD; CoCoRD + KD. All with the same
milestones, batches and augmentations.

Budget: 5,000 images of 32 pixels for training, 2,500 others of the training split for validation, the test split for
the tables. The teacher starts from ImageNet and is fine-tuned on the same 5,000 images, which it resizes to 64 pixels:
its accuracy has to be clearly above that of the labels' student. First equally many epochs, then the counted FLOPs of
CoCoRD with its teacher. Heads have a quarter of the paper's width, so that their share of a step is that of the paper's
larger networks and images. CRD draws 1,638 negatives, the same share of the images as in its benchmark.

What was made smaller, for three hours of CPU: a tenth of the training images, 12 epochs in place of 240, one pair of
networks, only labels and KD at equal FLOPs, and two learning rates, searched at equal epochs for CoCoRD, labels and KD:
CoCoRD + KD has the rate of CoCoRD, and CRD with and without KD that of KD.

Data: `cifar10/{train,test}.parquet` with the columns `img` and `label`; `clothing/{train,test}.parquet` with the
columns `image` and `label`.
"""

import json

from proof.claim import Budget, Claim, Preparation, Probe, Variant

SIZE, TEACHER_SIZE, TEACHER_EPOCHS, EPOCHS = 32, 64, 8, 12
BLOCKS = range(0, 50_000, 5_000)
# The rows may be sorted by label: each class has equally many rows in both splits then, too.
TRAIN_ROWS = "+".join(f"train[{start}:{start + 500}]" for start in BLOCKS)
VALIDATION_ROWS = "+".join(f"train[{start + 4_750}:{start + 5_000}]" for start in BLOCKS)
TRAIN = json.dumps({"path": "${data}/cifar10/train.parquet", "split": TRAIN_ROWS})
VALIDATION = json.dumps({"path": "${data}/cifar10/train.parquet", "split": VALIDATION_ROWS})
TEST = "${data}/cifar10/test.parquet"
IMAGES = (f"--data.image_size={SIZE}", "--data.preset=cifar", "--data.eval_batch_size=250", "--data.num_workers=0")
DATA = (
    *("--data=ImageClassificationDataModule", f"--data.train={TRAIN}", f"--data.validation={VALIDATION}"),
    *("--data.image_column=img", "--data.label_column=label", "--data.num_classes=10", "--data.batch_size=64"),
    *IMAGES,
)
TESTED = (f"--data.test={TEST}",)
MODEL = ("--model=CoCoRDModule", "--model.num_classes=10")
MILESTONES = ("--model.optim.lr_milestones=[${epoch:0.625},${epoch:0.75},${epoch:0.875}]",)
NO_COCORD = ("--model.contrast.weight=0", "--model.prediction.weight=0")
HEADS = ("--model.heads.embed_dim=512", "--model.heads.hidden=512", "--model.heads.predictor_hidden=128")
LITE0 = "timm/tf_efficientnet_lite0"


def clothing(student: str) -> Probe:
    """Return the linear probe of a student's features on snapshots of clothes; its recipe is that of the module."""
    return Probe(
        "clothing",
        (
            *("--model=CoCoRDLinearProbeModule", f"--model.network={student}", "--model.network_classes=10"),
            *("--model.weights=${checkpoint}", "--model.num_classes=10", "--data=ImageClassificationDataModule"),
            *("--data.train=${data}/clothing/train.parquet", "--data.validation=${data}/clothing/test.parquet"),
            *("--data.num_classes=10", "--data.batch_size=64", *IMAGES),
            "--model.optim.lr_milestones=[${epoch:0.25},${epoch:0.5},${epoch:0.75}]",
        ),
        epochs=40,
    )


def distillation(name: str, student: str, teacher: Preparation, taught: tuple[str, ...], of: str) -> Claim:
    """Return the claim for a pair of networks.

    Args:
        name: name of the claim.
        student: the student's network.
        teacher: the teacher's training.
        taught: arguments of the variants with the teacher.
        of: the teacher in the statement.
    """
    taught = (*taught, "--model.teacher.weights=${teacher}")
    crd = ("--model.kd.crd_weight=0.8", "--model.kd.crd_negatives=1638")

    def variant(name: str, *words: str, needs: tuple[str, ...] = ("teacher",), rate_of: str = "") -> Variant:
        return Variant(name, words, needs=needs, learning_rate_of=rate_of, probes=(clothing(student),))

    variants = (
        variant("CoCoRD", *taught, *HEADS),
        variant("labels", *NO_COCORD, needs=()),
        variant("KD", *taught, *NO_COCORD, "--model.kd.weight=0.9", "--model.class_weight=0.1"),
        variant("CoCoRD + KD", *taught, *HEADS, "--model.kd.weight=1", rate_of="CoCoRD"),
        variant("CRD", *taught, *NO_COCORD, *crd, rate_of="KD"),
        variant("CRD + KD", *taught, *NO_COCORD, *crd, "--model.kd.weight=1", rate_of="KD"),
    )
    return Claim(
        name=name,
        statement=f"CoCoRD from {of} to {student} against KD, CRD, CRD + KD and labels, on CIFAR-10 of {SIZE} pixels.",
        words=(*MODEL, f"--model.student={student}", *MILESTONES, *DATA),
        variants=variants,
        budgets=(
            Budget("equal epochs", epochs=EPOCHS),
            Budget(
                "equal FLOPs",
                like=("CoCoRD", "equal epochs"),
                variants=("labels", "KD"),
                learning_rates_of="equal epochs",
            ),
        ),
        metric="val/top1",
        learning_rates=(0.05, 0.1),
        shown=("test/top1", "clothing/top1"),
        opponent="KD",
        preparations=(NETWORKS, teacher),
        test=TESTED,
        evaluations=6,
    )


NETWORKS = Preparation(
    "networks", before=(("materials.py", "image_network", "efficientnet-lite0", "${folder}", "--classes", "10"),)
)
FINE_TUNED = Preparation(
    "teacher",
    (
        *(*MODEL, f"--model.student={LITE0}", f"--model.student_resize_to={TEACHER_SIZE}", *NO_COCORD, *MILESTONES),
        *("--model.weights=${networks}/tf_efficientnet_lite0.safetensors", *DATA),
        "--model.optim.learning_rate=0.01",
    ),
    epochs=TEACHER_EPOCHS,
    needs=("networks",),
    test=TESTED,
)

CLAIM = distillation(
    "cocord",
    "resnet8",
    FINE_TUNED,
    (f"--model.teacher.name={LITE0}", f"--model.teacher.resize_to={TEACHER_SIZE}"),
    f"an EfficientNet-lite0 of ImageNet, fine-tuned at {TEACHER_SIZE} pixels,",
)
