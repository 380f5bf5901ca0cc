"""MM-LG on shop photographs: descendants of three depths, their opponents, and what they cost together.

Claim: a descendant of MM-LG is better than one of TLEG, He-LG or from random weights, with both kinds of its blocks
better than with one, and as good as a CLIP that was pre-trained at its own depth (PT-FT) (Chen et al., Tables 1 and 4).
One extraction serves all depths, so together they cost less than a pre-training of each (Table 3).

Opponents: "scratch" trains on the downstream pairs alone, as in the paper. PT-FT is pre-trained with the teacher on all
pairs, as the auxiliaries are; one of 6 layers also for more epochs, which take the FLOPs of an extraction, and those of
all three depths for fewer, which take the FLOPs of an extraction together ("PT-FT for less"). All of them are then
fine-tuned on the same downstream pairs, each with the better of two learning rates.

Budget: images of 48 pixels, width 96. Extraction on 5,880 pairs, activation on a tenth of them, both with a teacher
whose image network has learned ImageNet; fine-tuning on 1,960 other pairs. Extraction, pre-training and activation are
repeated with each seed; MM-LG and TLEG of 6 layers have five seeds, all others three.

What was made smaller, for three hours of CPU: each method's learning rate is searched with 8 layers only, and is that
of its other depths and, for MM-LG, of its parts; five seeds in place of eight for the margin over TLEG; six epochs of
extraction and pre-training in place of twelve, and eight of fine-tuning in place of ten; classification and captioning
are not measured.

Data: `fashion/{train,validation,test}.parquet` with the columns `image`, `image_id` and `caption`.
"""

import json

from proof.claim import Budget, Claim, Preparation, Variant

SIZE, PATCH, TOKENS, WIDTH, HEADS, LAYERS = 48, 12, 16, 96, 3, 12
TEACHER_EPOCHS, EXTRACTION_EPOCHS, EPOCHS = 8, 6, 8
LONGER_EPOCHS = 10  # a step of 6 layers has three fifths of the FLOPs of one of 12, with the teacher
LESS_EPOCHS = 2.7  # 6, 8 and 12 layers have together 2.24 times the FLOPs of an extraction and three activations
SEARCHED = 8  # layers of the search for learning rates
DEPTHS = (6, 12, SEARCHED)
BLOCKS = range(0, 7_840, 160)


def rows(first: int, last: int) -> str:
    """Return a source of the rows from `first` to `last` of each block of 160, which are similar products."""
    split = "+".join(f"train[{start + first}:{start + last}]" for start in BLOCKS)
    return json.dumps({"path": "${data}/fashion/train.parquet", "split": split})


EXTRACTION, ACTIVATION, DOWNSTREAM = rows(0, 120), rows(0, 12), rows(120, 160)
TESTED = ("--data.test=${data}/fashion/test.parquet",)
PAIRS = (
    *("--data=ImageTextDataModule", "--data.validation=${data}/fashion/validation.parquet", "--data.num_workers=0"),
    *(f"--data.image_size={SIZE}", "--data.augmentation=crop", "--data.horizontal_flip=false"),
    *("--data.tokenizer=clip", "--data.vocab_size=49408", f"--data.max_tokens={TOKENS}", "--data.eval_batch_size=250"),
)
MODEL = (
    *("--model=MMLGModule", f"--model.towers.width={WIDTH}", f"--model.towers.heads={HEADS}"),
    *(f"--model.towers.embed_dim={WIDTH}", f"--model.vision.patch_size={PATCH}", "--model.match_equal_texts=true"),
)
WITH_TEACHER = (*MODEL, "--model.teacher.weights=${teacher}/clip", *PAIRS)
PRETRAINED = (
    *(*WITH_TEACHER, f"--data.train={EXTRACTION}", "--data.batch_size=64"),
    *("--model.optim.learning_rate=1e-3", "--model.optim.warmup_steps=100"),
)
ACTIVATED = (
    *(*WITH_TEACHER, f"--data.train={ACTIVATION}", "--data.batch_size=64", "--model.student=plain"),
    *("--model.optim.learning_rate=5e-4", "--model.optim.warmup_steps=1"),
)
WRITER = ({"class_path": "LearngeneWriter"},)
TERMS = {"MM-LG without the shared blocks": "unimodal", "MM-LG, the shared blocks alone": "multimodal"}
"""The paper's "w/o MM" and "only MM"."""


def pretrained(name: str, student: str, depth: int, epochs: float = EXTRACTION_EPOCHS) -> Preparation:
    """Return a training on all pairs with the teacher, which writes a learngene if it has twelve layers."""
    words = (*PRETRAINED, f"--model.student={student}", f"--model.towers.depth={depth}")
    callbacks = WRITER if depth == LAYERS else ()
    return Preparation(name, words, epochs, callbacks, ("teacher",), each_seed=True)


def activated(name: str, source: str, depth: int, components: str = "both") -> Preparation:
    """Return the activation of a descendant of a learngene."""
    arguments = {"file": f"${{{source}}}", "target": "student", "components": components}
    callbacks = ({"class_path": "LearngeneExpansionCallback", "init_args": arguments},)
    words = (*ACTIVATED, f"--model.towers.depth={depth}")
    return Preparation(name, words, 1, callbacks, ("teacher", source), each_seed=True)


def tuned(name: str, depth: int, start: str = "", seeds: int | None = 3, like: str = "") -> Variant:
    """Return the fine-tuning of a network that a preparation has trained, or of one with random weights.

    Its learning rate is searched with eight layers: its own, or those of the method `like`.
    """
    weights = (f"--model.weights=${{{start}_checkpoint}}",) if start else ()
    words = (f"--model.towers.depth={depth}", *weights)
    rate = f"{like or name}, {SEARCHED} layers" if like or depth != SEARCHED else ""
    needs = (start,) if start else ()
    return Variant(f"{name}, {depth} layers", words, (), needs, "karpathy5/", seeds, rate)


TUNED = (
    *(*MODEL, "--model.student=plain", "--model.teacher.distillation_weight=0", "--model.optim.warmup_steps=30"),
    *(*PAIRS, f"--data.train={DOWNSTREAM}", "--data.batch_size=64"),
)
TEACHER = (
    *("--model=CLIPModule", "--model.weights=${networks}/clip", "--model.tuning.batch_norm=trained", *PAIRS),
    *(f"--data.train={EXTRACTION}", "--data.batch_size=64", "--model.optim.learning_rate=5e-4"),
    "--model.match_equal_texts=true",
)
NETWORKS = ("materials.py", "clip", "${folder}/clip", "--image-size", f"{SIZE}", "--width", "128", "--layers", "3")
EXPORT = ("export", "${folder_checkpoint}", "${folder}/clip", "--layout=open_clip")

CLAIM = Claim(
    name="mmlg",
    statement="Descendants of MM-LG against TLEG, He-LG, scratch and PT-FT, fine-tuned on shop photographs.",
    words=TUNED,
    variants=(
        tuned("MM-LG", 6, "mmlg_6", seeds=None),
        tuned("TLEG", 6, "tleg_6", seeds=None),
        tuned("PT-FT", 6, "plain_6"),
        tuned("scratch", 6),
        tuned("He-LG", 6, "helg_6"),
        *(tuned(name, 6, f"{terms}_6", like="MM-LG") for name, terms in TERMS.items()),
        tuned("PT-FT for longer", 6, "plain_6_long", like="PT-FT"),
        *(tuned("PT-FT for less", depth, f"plain_{depth}_less", like="PT-FT") for depth in DEPTHS),
        *(
            variant
            for depth in (12, 8)
            for variant in (
                tuned("MM-LG", depth, f"mmlg_{depth}"),
                tuned("TLEG", depth, f"tleg_{depth}"),
                tuned("PT-FT", depth, f"plain_{depth}"),
                tuned("scratch", depth),
                tuned("He-LG", depth, f"helg_{depth}"),
            )
        ),
    ),
    budgets=(Budget("equal epochs of fine-tuning", epochs=EPOCHS),),
    metric="val/recall_mean",
    learning_rates=(5e-4, 2e-3),
    shown=("test/recall_mean", "test/text_to_image_r1", "test/image_to_text_r1"),
    opponent="TLEG, 6 layers",
    seeds=tuple(range(5)),
    preparations=(
        Preparation("networks", before=((*NETWORKS, "--tokens", f"{TOKENS}"),)),
        Preparation("teacher", TEACHER, TEACHER_EPOCHS, needs=("networks",), after=(EXPORT,), test=TESTED),
        pretrained("mmlg", "MM-LG", LAYERS),
        pretrained("tleg", "TLEG", LAYERS),
        *(pretrained(f"plain_{depth}", "plain", depth) for depth in DEPTHS),
        pretrained("plain_6_long", "plain", 6, LONGER_EPOCHS),
        *(pretrained(f"plain_{depth}_less", "plain", depth, LESS_EPOCHS) for depth in DEPTHS),
        *(
            activated(f"{name}_{depth}", source, depth)
            for name, source in (("mmlg", "mmlg"), ("tleg", "tleg"), ("helg", "plain_12"))
            for depth in DEPTHS
        ),
        *(activated(f"{terms}_6", "mmlg", 6, terms) for terms in TERMS.values()),
    ),
    test=TESTED,
    evaluations=5,
    sums={
        name: tuple(f"{name}, {depth} layers" for depth in sorted(DEPTHS))
        for name in ("PT-FT", "MM-LG", "PT-FT for less", "TLEG", "He-LG", "scratch")
    },
)
