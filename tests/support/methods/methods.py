"""Every method and other trainable module in minimal size, with data for it.

method = METHODS["shre"]
module, data = method.build(method.prepare(tmp_path), seed=0, batch_size=4, num_workers=0)
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from support.methods.albef import IMAGE_SIZE, MAX_TOKENS, SIZES, tiny_albef, write_albef
from support.methods.captioning import caption_data, caption_module, write_data
from support.methods.classifier import shape_classes, tiny_classifier
from support.methods.clip import LENGTH, SIZE, WORDS, add_clip, randomized
from support.methods.cocord import HEADS, teacher_file
from support.methods.encoders import write_encoder, write_tokenizer
from support.methods.groups import merged
from support.methods.mmlg import tiny_extraction
from support.methods.mmlg import write_teacher as write_clip
from support.methods.published import LENGTH as TOKENS
from support.methods.published import SIZE as SIDE
from support.methods.published import tiny_clip, write_published
from support.methods.shre import CLASSES, tiny_shre
from support.methods.tasks import task_and_data
from vlightning.datamodules import (
    ReinforcedShapesDataModule,
    ShapeClassesDataModule,
    ShapesDataModule,
    ShapesVQADataModule,
)
from vlightning.lightning_modules import (
    CLIPModule,
    CoCoRDModule,
    MobileCLIPModule,
    NewTextModule,
    NewTowerModule,
    VQAModule,
)

ROWS = {"length": 32, "eval_length": 10}
"""Of one epoch, and of the validation."""


def albef(outside, seed, changes=None, **data):
    words = {"vocab_size": 200, "max_tokens": MAX_TOKENS, "image_size": IMAGE_SIZE}
    return tiny_albef(seed, changes, text={"vocab_size": 200}), ShapesDataModule(**ROWS | words | data)


def albef_fine_tuning(outside, seed, **data):
    """For retrieval: without masked words, in slices, re-ranking in validation."""
    return albef(
        outside, seed, {"mlm": False, "memory": {"micro_batch_size": 3}, "rerank": {"when": "always", "k": 10}}, **data
    )


def entailment(outside, seed, **data):
    return task_and_data("entailment", seed, **data)


def nlvr(outside, seed, **data):
    return task_and_data("nlvr", seed, **data)


def assignment(outside, seed, **data):
    return task_and_data("assignment", seed, **data)


def albef_vqa(outside, seed, changes=None, **data):
    """Answers to questions, in slices."""
    groups = {"vision": SIZES["vision"], "text": SIZES["text"] | {"vocab_size": 200, "max_positions": 48}}
    settings = {"memory": {"micro_batch_size": 3}, "momentum": {"momentum": 0.9}, "optim": {"warmup_steps": 3}}
    torch.manual_seed(seed)
    module = VQAModule(**merged(groups, settings, changes or {}))
    words = {"vocab_size": 200, "max_tokens": MAX_TOKENS, "image_size": IMAGE_SIZE}
    return module, ShapesVQADataModule(**ROWS | words | data)


def cocord(teacher, seed, **data):
    shapes = ShapeClassesDataModule(**ROWS | {"image_size": 16} | data)
    torch.manual_seed(seed)
    taught = {"teacher": {"name": "resnet20", "weights": teacher}, "kd": {"weight": 1.0}}
    module = CoCoRDModule("resnet14", shapes.num_classes, **taught, contrast={"queue_size": 24}, **HEADS)
    return module, shapes


def mmlg(teacher, seed, **data):
    words = {"tokenizer": "clip", "vocab_size": WORDS, "max_tokens": LENGTH, "image_size": SIZE}
    return tiny_extraction(teacher, seed, warmup_steps=3, micro_batch_size=4), ShapesDataModule(**ROWS | words | data)


def mobileclip(shards, seed, model=None, image_size=32, **data):
    """MobileCLIP-tiny's image tower with few blocks; the text tower is narrower, or a checkpoint would have 100 MB."""
    torch.manual_seed(seed)
    module = MobileCLIPModule(
        model or add_clip("narrow-text-of-the-tests", {"timm_model_name": "fastvit_mci_shallow", "timm_pool": "avg"}),
        max_tokens=16,
        vision={"image_size": image_size},
        teacher={"dims": [64, 96], "scales": [30.0, 30.0]},
        momentum={"momentum": 0.9},
        optim={"warmup_steps": 3},
        memory={"micro_batch_size": 4},
    )
    return module, ReinforcedShapesDataModule(shards, **ROWS | {"augmentations": 2, "image_size": image_size} | data)


def shre(teacher, seed, **data):
    taught = {"teacher": {"name": "resnet8", "weights": teacher}, "kl": {"weight": 1.0}}
    words = {"vocab_size": 320, "dropout": 0.1}
    module = tiny_shre(None, seed, text=words, memory={"micro_batch_size": 3}, **taught)
    return module, ShapesDataModule(**ROWS | {"image_size": 16, "max_tokens": 8} | data)


def clip(weights, seed, tuning=None, **data):
    """A fine-tuning of a published model."""
    tuning = tuning or {"layer_decay": 0.7}
    module = tiny_clip(seed, weights=weights, tuning=tuning, memory={"micro_batch_size": 3})
    vars(module).pop("log"), vars(module).pop("log_dict")
    words = {"tokenizer": "clip", "vocab_size": WORDS, "max_tokens": TOKENS, "image_size": SIDE}
    return module, ShapesDataModule(**ROWS | words | data)


def adapters(weights, seed, **data):
    """A fine-tuning of a published model by low-rank adapters."""
    return clip(weights, seed, tuning={"lora": {"rank": 2}}, **data)


def towers(folder, seed, **data):
    """An image network of timm, locked, and a trained BERT: both have a new projection."""
    torch.manual_seed(seed)
    module = CLIPModule(
        {
            "image": {"name": "test_efficientnet", "weights": "random"},
            "text": {"name": folder, "prefix": "a photo of "},
            "projection_dim": 8,
        },
        max_tokens=16,
        vision={"image_size": 32},
        tuning={"lock_image": "all"},
        memory={"micro_batch_size": 3},
    )
    return module, ShapesDataModule(**ROWS | {"max_tokens": 16, "image_size": 32} | data)


def new_tower(folder, seed, model, **data):
    torch.manual_seed(seed)
    module = NewTowerModule(
        model,
        {"weights": f"{folder}/pair"},
        max_tokens=16,
        vision={"image_size": 32},
        loss={"contrast": 0.5, "prefixes": [4], "int8": True},
        memory={"micro_batch_size": 3},
    )
    return module, ShapesDataModule(**ROWS | {"max_tokens": 16, "image_size": 32} | data)


def new_text(folder, seed, **data):
    """A BERT in the space of a pair of towers."""
    return new_tower(folder, seed, {"text": {"name": f"{folder}/encoder", "prefix": "a photo of "}}, **data)


def new_image(folder, seed, **data):
    """An image network in the space of a pair of towers, of another size than the pair's images."""
    # Without BatchNorm, which makes signs of two rows of one pixel: these flip by rounding.
    return new_tower(folder, seed, {"image": {"name": "test_convnext", "weights": "random"}}, **data)


def new_from_pair(folder, seed, **data):
    """The text tower of a model of open_clip's in the space of a pair of towers."""
    torch.manual_seed(seed)
    module = NewTowerModule(
        predecessor={"weights": f"{folder}/pair"},
        pair={"side": "text", "weights": f"{folder}/published"},
        max_tokens=TOKENS,
        vision={"image_size": 48},
        loss={"contrast": 0.5},
        memory={"micro_batch_size": 3},
    )
    words = {"tokenizer": "clip", "vocab_size": WORDS, "max_tokens": TOKENS, "image_size": 48}
    return module, ShapesDataModule(**ROWS | words | data)


def new_text_any(folder, seed, **data):
    """A BERT in the space of an ALBEF."""
    torch.manual_seed(seed)
    module = NewTextModule(
        {"text": {"name": f"{folder}/encoder", "prefix": "a photo of "}},
        {"weights": f"{folder}/albef"},
        max_tokens=16,
        loss={"contrast": 0.5, "prefixes": [4], "int8": True},
        memory={"micro_batch_size": 3},
    )
    return module, ShapesDataModule(**ROWS | {"max_tokens": 16, "image_size": IMAGE_SIZE} | data)


def classifier(outside, seed, **data):
    """A vision classifier on a descendant's tower."""
    return tiny_classifier(seed), shape_classes(**ROWS | {"length": 32, "seed": None} | data)


def captioning(folder, seed, **data):
    """Words after an image's embedding; validation writes captions."""
    arguments = json.loads((Path(folder) / "captions.json").read_text())
    rows = caption_data(arguments, train=[arguments["train"]] * 2, **{"seed": None} | data)
    return caption_module(arguments, seed, warmup_steps=3), rows


def _captions(folder):
    arguments = write_data(folder / "captions", steps=20)
    (folder / "captions" / "captions.json").write_text(json.dumps(arguments))
    return str(folder / "captions")


def _encoder(folder):
    texts = ["a photo of a red circle above a blue square", "a green ring", "a yellow triangle left of it"]
    return write_tokenizer(write_encoder(folder / "encoder"), texts)


def _pair(folder):
    """A pair of towers as an export, and the folder of another text encoder with the same words."""
    name = _encoder(folder)
    torch.manual_seed(3)
    image = {"name": "test_efficientnet", "weights": "random"}
    pair = {"image": image, "text": {"name": name, "weights": "random"}, "projection_dim": 8}
    module = CLIPModule(pair, max_tokens=16, vision={"image_size": 48})
    randomized(module.student, scale=2.0)
    module.save_pretrained(folder / "pair")
    return str(folder)


def _pairs(folder):
    """The pair of `_pair`, and a model of open_clip's."""
    write_published(folder / "published")
    return _pair(folder)


def _albef(folder):
    """An ALBEF as an export with its tokenizer, and the folder of a text encoder with the same words."""
    write_albef(folder / "albef", _encoder(folder))
    return str(folder)


class Method(NamedTuple):
    """Functions that build a method and its data."""

    prepare: Callable[[Path], str | None]
    """Writes a teacher or chooses a place for data in a folder; returns the argument of `build`."""
    build: Callable[..., tuple[Any, Any]]
    """(what `prepare` returned, the module's seed, arguments of the datamodule) -> module and datamodule."""
    state: tuple[str, ...]
    """Prefixes of names in the state, for each part that changes during training."""
    outside: tuple[str, ...] = ()
    """Prefixes of names that are not in checkpoints."""


METHODS = {
    "albef": Method(lambda folder: None, albef, ("teacher.", "image_queue.features")),
    "cocord": Method(
        lambda folder: teacher_file(folder, "resnet20", classes=40),
        cocord,
        ("slow_student.", "slow_head.", "teacher_head.", "dictionary.features", "dictionary.pointer"),
        ("teacher.",),
    ),
    "mmlg": Method(
        lambda folder: write_clip(folder / "teacher.safetensors"),
        mmlg,
        (
            "student.coefficients.text_multimodal",
            "student.blocks.multimodal.2.fc1.weight",
            "student.logit_scale",
        ),
        ("teacher.",),
    ),
    "mobileclip": Method(
        lambda folder: str(folder / "shards"),
        mobileclip,
        ("student.logit_scale", "average.visual."),
    ),
    "shre": Method(
        lambda folder: teacher_file(folder, "resnet8", CLASSES),
        shre,
        ("scales.h1", "student.shared_encoder.fc1.weight", "student.image_encoder.cls_token"),
        ("teacher.",),
    ),
}
OTHERS = {
    "albef_fine_tuning": Method(lambda folder: None, albef_fine_tuning, ("teacher.", "image_queue.features")),
    "entailment": Method(lambda folder: None, entailment, ("teacher.cls_head", "student.visual_encoder")),
    "nlvr": Method(lambda folder: None, nlvr, ("teacher.cls_head", "student.text_encoder")),
    "assignment": Method(lambda folder: None, assignment, ("student.ta_head", "student.text_encoder")),
    "albef_vqa": Method(lambda folder: None, albef_vqa, ("teacher.", "student.text_decoder.cls.predictions.bias")),
    "clip": Method(
        lambda folder: write_published(folder / "published"), clip, ("student.logit_scale", "student.text.")
    ),
    "adapters": Method(
        lambda folder: write_published(folder / "published"), adapters, ("student.visual.", "student.text.")
    ),
    "towers": Method(_encoder, towers, ("student.visual.head.proj", "student.text.transformer.embeddings")),
    "new_text": Method(
        _pair, new_text, ("student.text.proj", "student.text.transformer.embeddings"), ("predecessor.",)
    ),
    "new_image": Method(_pair, new_image, ("student.visual.head.proj", "student.visual.trunk."), ("predecessor.",)),
    "new_from_pair": Method(
        _pairs, new_from_pair, ("student.text.text_projection", "student.text.transformer."), ("predecessor.",)
    ),
    "new_text_any": Method(_albef, new_text_any, ("student.proj", "student.transformer.embeddings"), ("predecessor.",)),
    "classifier": Method(lambda folder: None, classifier, ("head.weight", "tower.conv1.weight")),
    "captioning": Method(_captions, captioning, ("mapper.prefix",), ("language_model.",)),
}
