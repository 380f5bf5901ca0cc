"""A claim of a few steps about small classifiers of drawn shapes."""

from proof.claim import Budget, Claim, Preparation, Variant

WORDS = (
    *("--model=CoCoRDModule", "--model.student=resnet8", "--model.num_classes=40", "--model.contrast.weight=0"),
    *("--model.prediction.weight=0", "--model.optim.lr_milestones=[${epoch:0.5},${epoch:0.75}]"),
    *("--data=ShapeClassesDataModule", "--data.length=40", "--data.eval_length=40", "--data.batch_size=8"),
    *("--data.image_size=8", "--data.num_workers=0"),
)
TEACHER = ("--model.teacher.name=resnet8", "--model.teacher.weights=${teacher}")
FLOPS = 400e6

CLAIM = Claim(
    name="drawn",
    statement="A student of a teacher is better than one of labels.",
    words=WORDS,
    variants=(
        Variant("labels"),
        Variant("KD", (*TEACHER, "--model.kd.weight=0.9", "--model.class_weight=0.1"), needs=("teacher",)),
    ),
    budgets=(Budget("equal FLOPs", flops=FLOPS),),
    metric="val/top1",
    learning_rates=(0.05,),
    shown=("val/top1",),
    opponent="labels",
    seeds=(0, 1),
    preparations=(Preparation("teacher", WORDS, epochs=1),),
    evaluations=2,
)
