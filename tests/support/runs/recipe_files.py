"""Small files in the layouts and with the names of the shipped configs."""

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import timm
import torch
from open_clip import CoCa
from safetensors.torch import save_file
from timm.models import VisionTransformer
from transformers import BertConfig, BertForMaskedLM

from support.data.images import draw_image, encoded, write_food101, write_pets
from support.data.refcoco import write_refcoco
from support.methods import reinforced
from support.methods.albef import write_albef
from support.methods.captioning import EMBED_DIM, write_embeddings, write_language_model
from support.methods.clip import SIZE
from support.methods.encoders import write_encoder, write_tokenizer
from support.methods.mmlg import write_teacher as write_clip
from support.methods.published import write_published
from support.methods.reinforcement import write_pairs
from support.runs.recipes import CLASSES, MODELS
from vlightning.common.tokenizers import tokenizer_from_json
from vlightning.datamodules.text.tokenizers import train_wordpiece
from vlightning.lightning_modules import ALBEFModule, CLIPModule, SHReModule
from vlightning.lightning_modules.networks.classifiers import build_classifier, public_network

TRAINED, EVALUATED = 20, 6  # images of a split
COCA = {
    "embed_dim": 32,
    "vision_cfg": {
        "image_size": SIZE,
        "patch_size": 8,
        "layers": 1,
        "width": 32,
        "head_width": 16,
        "output_tokens": True,
        "attentional_pool": True,
        "attn_pooler_heads": 2,
    },
    "text_cfg": {
        "context_length": 32,
        "vocab_size": 49408,
        "width": 32,
        "heads": 2,
        "layers": 1,
        "output_tokens": True,
        "embed_cls": True,
    },
    "multimodal_cfg": {"context_length": 32, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
WORDS = [f"w{number}" for number in range(30)]  # the tiny GPT-2 has 32 positions


def caption(number, which=0):
    return " ".join(WORDS[(number + which) % 20 :][:5])


def write_files(folder: Path) -> None:
    """Write all files that no other recipe writes into a folder."""
    (folder / "data").mkdir(parents=True)
    _write_pairs(folder)
    _write_statements(folder)

    _write_questions(folder)
    _write_tars(folder)
    _write_classes(folder)
    _write_reinforced(folder)
    _write_networks(folder)


def _images(folder, count):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        draw_image(number).save(folder / f"{number}.jpg")


def _write_pairs(folder):
    _images(folder / "data/images", TRAINED + 2 * EVALUATED)
    for name in ("coco", "vg", "cc3m_train", "cc3m_val", "sbu", "cc12m", "coco_val"):
        rows = [{"image": f"{number}.jpg", "caption": caption(number)} for number in range(4, 4 + EVALUATED)]
        (folder / f"data/{name}.json").write_text(json.dumps(rows))
    lines = [json.dumps({"image": f"images/{number}.jpg", "caption": caption(number)}) for number in range(TRAINED)]
    (folder / "data/pairs.jsonl").write_text("\n".join(lines))
    table = [f"data/images/{number}.jpg,{caption(number)}" for number in range(TRAINED)]
    for name in ("pairs", "held_out"):
        (folder / f"{name}.csv").write_text("\n".join(["image,caption", *table]))
    (folder / "my_data.yaml").write_text(
        "data:\n  class_path: ImageTextDataModule\n"
        "  init_args: {train: data/pairs.jsonl, validation: data/pairs.jsonl, image_root: data}\n"
    )
    for data in ("coco", "flickr30k"):
        _images(folder / "data" / data, TRAINED + 2 * EVALUATED)
        first = ["train"] * (TRAINED - 2) + (["restval"] * 2 if data == "coco" else ["train"] * 2)
        splits = first + ["val"] * EVALUATED + ["test"] * EVALUATED
        images, lists = [], {"train": [], "val": [], "test": []}
        for number, split in enumerate(splits):
            captions = [caption(number, which) for which in range(5)]
            sentences = [{"raw": text} for text in captions]
            images.append({"filename": f"{number}.jpg", "split": split, "imgid": number, "sentences": sentences})
            row = {"image": f"{number}.jpg", "image_id": number}
            listed = split if split in lists else "train"
            lists[listed] += [row | {"caption": captions[0] if listed == "train" else captions}]
        (folder / f"data/dataset_{data}.json").write_text(json.dumps({"images": images}))
        for split, rows in lists.items():
            (folder / f"data/{data}_{split}.json").write_text(json.dumps(rows))
    write_refcoco(folder / "data", folder / "data/coco", caption)
    (folder / "flickr30k").mkdir()
    (folder / "flickr30k/images").symlink_to(folder / "data/flickr30k")
    (folder / "flickr30k/dataset_flickr30k.json").symlink_to(folder / "data/dataset_flickr30k.json")


def write_coco_embeddings(folder):
    """The store of COCO's images in a folder, whose rows have absolute paths."""
    names = [str(folder / f"data/coco/{number}.jpg") for number in range(TRAINED + 2 * EVALUATED)]
    values = torch.randn(len(names), EMBED_DIM, generator=torch.Generator().manual_seed(0))
    write_embeddings(folder / "data/coco_embeddings", names, values=values)


def _write_statements(folder):
    """The authors' lists for visual entailment and for NLVR2."""
    (folder / "data/nlvr2").symlink_to(folder / "data/images")
    for split, count in (("train", TRAINED), ("dev", EVALUATED), ("test", EVALUATED)):
        rows = [
            {"image": str(number), "sentence": caption(number), "label": ("entailment", "neutral")[number % 2]}
            for number in range(count)
        ]
        (folder / f"data/ve_{split}.json").write_text(json.dumps(rows))
        rows = [
            {
                "images": [f"{number}.jpg", f"{number + 1}.jpg"],
                "sentence": caption(number),
                "label": str(number % 2 > 0),
            }
            for number in range(count)
        ]
        (folder / f"data/nlvr_{split}.json").write_text(json.dumps(rows))


def _write_questions(folder):
    """The authors' lists for VQA, whose images are in the folders of COCO and of Visual Genome."""
    (folder / "data/visual_genome").symlink_to(folder / "data/images")
    words = [f"w{number}" for number in range(6)]
    lists = {
        "vqa_train": ("vqa", lambda number: words[number % 3 : number % 3 + 2] * 5),
        "vqa_val": ("vqa", lambda number: words[:1] * 10),
        "vg_qa": ("vg", lambda number: words[number % 6]),
    }
    for name, (data, answer) in lists.items():
        rows = [
            {
                "dataset": data,
                "image": f"{number}.jpg",
                "question": f"what is {caption(number)}?",
                "answer": answer(number),
            }
            for number in range(TRAINED)
        ]
        (folder / f"data/{name}.json").write_text(json.dumps(rows))
    asked = [
        {"dataset": "vqa", "image": f"{number}.jpg", "question": "what is it?", "question_id": number}
        for number in range(EVALUATED)
    ]
    (folder / "data/vqa_test.json").write_text(json.dumps(asked))
    (folder / "data/answer_list.json").write_text(json.dumps(words))


def _write_tars(folder):
    for data in ("cc3m", "cc3m_val", "cc12m"):
        samples = {
            f"{number:09d}": {"jpg": encoded(draw_image(number), "JPEG"), "txt": caption(number).encode()}
            for number in range(TRAINED)
        }
        reinforced.write_tar(folder / f"data/{data}/00000.tar", samples)


def _write_classes(folder):
    for path, image, label, splits in (
        ("uoft-cs/cifar100", "img", "fine_label", ("train", "test")),
        ("uoft-cs/cifar10", "img", "label", ("train", "test")),
        ("tanganke/stl10", "image", "label", ("train", "test")),
        ("zh-plus/tiny-imagenet", "image", "label", ("train", "valid")),
        ("ILSVRC/imagenet-1k", "image", "label", ("train", "validation")),
    ):
        features = datasets.Features({image: datasets.Image(), label: datasets.Value("int64")})
        rows = {
            split: datasets.Dataset.from_list(
                [
                    {image: {"bytes": encoded(draw_image(number)), "path": None}, label: number % 10}
                    for number in range(count)
                ],
                features=features,
            )
            for split, count in zip(splits, (TRAINED, EVALUATED), strict=True)
        }
        datasets.DatasetDict(rows).save_to_disk(folder / path)
    write_pets(folder / "data/oxford-iiit-pet", [f"Breed_{number}" for number in range(37)], trainval=1, test=1)
    write_food101(folder / "data/food-101", [f"dish_{number}" for number in range(101)], train=1, test=1)


def _write_reinforced(folder):
    for shards, images in (
        ("datacompdr_12m/0.tar", "datacomp_12m"),
        ("datacompdr_1b/00/0.tar", "datacomp_1b"),
        ("dfndr_2b/00/0.tar", "dfn_2b"),
    ):
        samples = {f"{number:08d}": reinforced.sample(number) for number in range(TRAINED)}
        beside = {key: {"jpg": members.pop("jpg")} for key, members in samples.items()}
        reinforced.write_tar(folder / shards, samples)
        reinforced.write_tar(folder / images / "0.tar", beside)
    write_pairs(folder / "pairs.parquet", EVALUATED)
    table = pq.read_table(folder / "pairs.parquet")
    pq.write_table(pa.table({name: table[name] for name in ("image", "caption")}), folder / "pairs.parquet")


def _write_networks(folder):
    torch.manual_seed(0)
    write_clip(folder / "clip.safetensors")
    write_tokenizer(write_encoder(folder / "text_encoder", max_position_embeddings=64))
    pair = {"image": {"name": "test_efficientnet", "weights": "random"}, "projection_dim": 8}
    pair["text"] = {"name": str(folder / "text_encoder"), "weights": "random"}
    CLIPModule(pair, max_tokens=64, vision={"image_size": SIZE}).save_pretrained(folder / "exported/old")
    write_published(folder / "exported/small")
    write_albef(folder / "exported/albef", folder / "text_encoder")
    rows = "".join(f"{caption(number)},{caption(number, 1)}\n" for number in range(20))
    (folder / "parallel.csv").write_text(f"old,new\n{rows}")
    (folder / "coca").mkdir()
    look = {"size": SIZE, "mean": [0.5, 0.5, 0.5], "interpolation": "bicubic"}
    (folder / "coca/open_clip_config.json").write_text(
        json.dumps({"model_cfg": COCA | {"custom_text": True}, "preprocess_cfg": look})
    )
    coca = CoCa(**COCA)
    # open_clip leaves the output projection uninitialized, so that it may hold NaN.
    torch.nn.init.normal_(coca.text_decoder.text_projection, std=0.1)
    save_file(coca.state_dict(), folder / "coca/open_clip_model.safetensors")
    for file, module in (("deit.pth", ALBEFModule), ("data2vec.pth", SHReModule)):
        sizes = {"vision.image_size": SIZE} | MODELS[module.__name__]
        groups: dict[str, dict[str, object]] = {}
        for name, size in sizes.items():
            group, _, setting = name.partition(".")
            groups.setdefault(group, {})[setting] = size
        (tower,) = (part for part in module(**groups).student.modules() if isinstance(part, VisionTransformer))
        torch.save(tower.state_dict(), folder / file)
    texts = [caption(number) for number in range(20)]
    tokenizer_from_json(train_wordpiece(texts, 300)).save_pretrained(folder / "bert-base-uncased")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(folder / "bert-base-uncased")
    write_language_model(folder / "gpt2")
    for file, network in (
        ("resnet8.pth", "resnet8"),
        *((f"imagenet_resnet{depth}.pth", f"torchvision/resnet{depth}") for depth in (34, 101)),
    ):
        state = public_network(build_classifier(network, CLASSES)).state_dict()
        torch.save({"model": state} if file == "resnet8.pth" else state, folder / file)
    torch.save({"model": timm.create_model("test_vit", num_classes=0).state_dict()}, folder / "test_vit.pth")
    save_file(build_classifier("wrn_16_2", 100).state_dict(), folder / "student.safetensors")
