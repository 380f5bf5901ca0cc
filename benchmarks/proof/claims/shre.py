"""SHRe on shop photographs: what its classifier's class distributions add, and a plain pair of towers.

Claim: the KL divergence from the teacher's classes improves retrieval, with shared layers that are an MLP as in the
thesis, or a Transformer layer. Every image with an equal title counts as a match.

Opponents: the same networks without the KL divergence; a plain pair of towers (MM-LG's student without blocks) with the
same contrast, at equal epochs and at the FLOPs of SHRe.

Budget: images of 64 pixels. The teacher is a resnet20 that learns the labels of the training pairs: labels that the
towers do not see. An ImageNet classifier is a later variant.

Data: `fashion/{train,validation,test}.parquet` with the columns `image`, `image_id`, `caption` and `label`.
"""

import json

from proof.claim import Budget, Claim, Preparation, Variant

SIZE, CLASSES, EPOCHS, TEACHER_EPOCHS = 64, 66, 10, 15
CROP = {"class_path": "ALBEFTrainTransform", "init_args": {"size": SIZE, "scale": [0.9, 1.0], "rand_augment": False}}
EVALUATION = {"class_path": "ALBEFEvalTransform", "init_args": {"size": SIZE}}
IMAGES = (
    *(f"--data.image_size={SIZE}", f"--data.train_transform={json.dumps(CROP)}", "--data.num_workers=0"),
    *(f"--data.eval_transform={json.dumps(EVALUATION)}", "--data.batch_size=128"),
    *("--data.train=${data}/fashion/train.parquet", "--data.validation=${data}/fashion/validation.parquet"),
)
TESTED = ("--data.test=${data}/fashion/test.parquet",)
PAIRS = ("--data=ImageTextDataModule", "--data.max_tokens=24", *IMAGES)
WORDPIECE = ("--data.vocab_size=4000",)
CLIP_TOKENS = ("--data.tokenizer=clip", "--data.vocab_size=49408")
SHRE = (
    *("--model=SHReModule", f"--model.num_classes={CLASSES}", "--model.vision.patch_size=16"),
    *("--model.vision.width=128", "--model.vision.heads=4", "--model.vision.depth=4", "--model.vision.post_norm=false"),
    *("--model.text.depth=3", "--model.text.dropout=0.1", "--model.match_equal_texts=true", *WORDPIECE),
)
TAUGHT = (*SHRE, "--model.teacher.name=resnet20", "--model.teacher.weights=${teacher}")
NO_KL = (*SHRE, "--model.kl.weight=0")
TOWERS = (
    *("--model=MMLGModule", "--model.student=plain", "--model.teacher.distillation_weight=0"),
    *("--model.towers.width=128", "--model.towers.heads=4", "--model.towers.depth=4", "--model.towers.embed_dim=128"),
    *("--model.vision.patch_size=16", "--model.optim.warmup_steps=50", *CLIP_TOKENS),
    "--model.match_equal_texts=true",
)
LEARNS_LABELS = (
    *("--model=CoCoRDModule", "--model.student=resnet20", f"--model.num_classes={CLASSES}"),
    *("--model.contrast.weight=0", "--model.prediction.weight=0"),
    *("--model.optim.lr_milestones=[${epoch:0.6},${epoch:0.8}]", "--data=ImageClassificationDataModule"),
    *("--data.label_column=label", f"--data.num_classes={CLASSES}", *IMAGES),
)
RECALLS = ("test/recall_mean", "test/text_to_image_r1", "test/image_to_text_r1")

CLAIM = Claim(
    name="shre",
    statement="SHRe with and without its teacher's classes, beside a plain pair of towers, on shop photographs.",
    words=PAIRS,
    variants=(
        Variant("SHRe, MLP", TAUGHT, needs=("teacher",), prefix="h2/"),
        Variant("SHRe, MLP, without KL", NO_KL, prefix="h2/"),
        Variant("two towers", TOWERS, prefix="karpathy5/"),
        Variant("SHRe, Transformer", (*TAUGHT, "--model.shared=transformer"), needs=("teacher",), prefix="h2/"),
        Variant("SHRe, Transformer, without KL", (*NO_KL, "--model.shared=transformer"), prefix="h2/"),
    ),
    budgets=(
        Budget("equal epochs", epochs=EPOCHS),
        Budget("equal FLOPs", like=("SHRe, MLP", "equal epochs")),
    ),
    metric="val/recall_mean",
    learning_rates=(3e-4, 1e-3, 3e-3),
    shown=RECALLS,
    opponent="two towers",
    preparations=(Preparation("teacher", LEARNS_LABELS, epochs=TEACHER_EPOCHS, test=TESTED),),
    test=TESTED,
)
