"""CoCoRD on CIFAR-10: from a resnet110 to a resnet8.

Claim: a student of CoCoRD is better than one of KD, CRD, or both, and these than one of the labels (Fu et al., Tables 1
and 2, on CIFAR-100).

Opponents: labels alone; KD and CRD with the weights of the CRD benchmark; CRD + KD; CoCoRD + KD. All with the same
milestones, batches and augmentations, each with the best of three learning rates.

Budget: images of 16 pixels, 25,000 for training, 5,000 others of the training split for validation, the test split
for the tables. The teacher is trained to the end of its schedule. First equally many epochs, then the counted FLOPs of
CoCoRD with its teacher. CRD draws 8,192 negatives, the same share of the images as in its benchmark.

Data: `cifar10/{train,test}.parquet` with the columns `img` and `label`.
"""

import json

from proof.claim import Budget, Claim, Preparation, Variant

TEACHER_EPOCHS, EPOCHS = 60, 6
BLOCKS = range(0, 50_000, 5_000)
# The rows may be sorted by label: each class has equally many rows in both splits then, too.
TRAIN_ROWS = "+".join(f"train[{start}:{start + 2_500}]" for start in BLOCKS)
VALIDATION_ROWS = "+".join(f"train[{start + 4_500}:{start + 5_000}]" for start in BLOCKS)
TRAIN = json.dumps({"path": "${data}/cifar10/train.parquet", "split": TRAIN_ROWS})
VALIDATION = json.dumps({"path": "${data}/cifar10/train.parquet", "split": VALIDATION_ROWS})
TEST = "${data}/cifar10/test.parquet"
DATA = (
    *("--data=ImageClassificationDataModule", f"--data.train={TRAIN}", f"--data.validation={VALIDATION}"),
    *("--data.image_column=img", "--data.label_column=label", "--data.num_classes=10", "--data.preset=cifar"),
    *("--data.image_size=16", "--data.batch_size=64", "--data.eval_batch_size=250", "--data.num_workers=0"),
)
TESTED = (f"--data.test={TEST}",)
MODEL = ("--model=CoCoRDModule", "--model.num_classes=10")
MILESTONES = ("--model.optim.lr_milestones=[${epoch:0.625},${epoch:0.75},${epoch:0.875}]",)
NO_COCORD = ("--model.contrast.weight=0", "--model.prediction.weight=0")
TEACHER = ("--model.teacher.weights=${teacher}",)


def distillation(name: str, student: str, teacher: str = "resnet110", epochs: float = EPOCHS) -> Claim:
    """Return the claim for a pair of networks.

    Args:
        name: name of the claim.
        student: the student's network.
        teacher: the teacher's network.
        epochs: epochs of the first table.
    """
    taught = (f"--model.teacher.name={teacher}", *TEACHER)
    crd = ("--model.kd.crd_weight=0.8", "--model.kd.crd_negatives=8192")
    variants = (
        Variant("CoCoRD", taught, needs=("teacher",)),
        Variant("labels", NO_COCORD),
        Variant("KD", (*taught, *NO_COCORD, "--model.kd.weight=0.9", "--model.class_weight=0.1"), needs=("teacher",)),
        Variant("CRD", (*taught, *NO_COCORD, *crd), needs=("teacher",)),
        Variant("CRD + KD", (*taught, *NO_COCORD, *crd, "--model.kd.weight=1"), needs=("teacher",)),
        Variant("CoCoRD + KD", (*taught, "--model.kd.weight=1"), needs=("teacher",)),
    )
    return Claim(
        name=name,
        statement=f"CoCoRD from {teacher} to {student} against KD, CRD, CRD + KD and labels, on CIFAR-10 of 16 pixels.",
        words=(*MODEL, f"--model.student={student}", *MILESTONES, *DATA),
        variants=variants,
        budgets=(
            Budget("equal epochs", epochs=epochs),
            Budget("equal FLOPs", like=("CoCoRD", "equal epochs")),
        ),
        metric="val/top1",
        learning_rates=(0.02, 0.05, 0.1),
        shown=("test/top1", "test/top5"),
        opponent="KD",
        preparations=(
            Preparation(
                "teacher",
                (*MODEL, f"--model.student={teacher}", *NO_COCORD, *MILESTONES, *DATA),
                epochs=TEACHER_EPOCHS,
                test=TESTED,
            ),
        ),
        test=TESTED,
    )


CLAIM = distillation("cocord", "resnet8")
