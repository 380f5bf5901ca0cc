"""The shipped configs: each composes by the command in its first lines, and the quickstart runs every subcommand."""

import json
import re
from pathlib import Path

import open_clip
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from support.data.images import draw_image
from support.methods.clip import add_tiny_clip
from support.methods.reinforcement import write_pairs
from support.runs.command_line import run
from support.runs.recipes import compose as _composed
from support.runs.recipes import says
from vlightning.datamodules import ImageTextDataModule
from vlightning.lightning_modules.core.settings import flat
from vlightning.lightning_modules.networks.clip.files import save_open_clip
from vlightning.lightning_modules.networks.clip.models import build_model
from vlightning.lightning_modules.networks.clip.preprocessing import preprocessing_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_strategy_is_added_to_any_recipe(name):
    overlay = ROOT / f"configs/strategy/{name}.yaml"
    composed = _composed(ROOT / "configs/albef/quickstart.yaml", overlay)
    assert says(composed["trainer"], yaml.safe_load(overlay.read_text())["trainer"])


PARTS = [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if "needs" in yaml.safe_load(path.read_text())]


@pytest.mark.slow
def test_a_part_of_a_recipe_is_refused_alone_with_the_right_command():
    assert len(PARTS) >= 35
    for path in PARTS:
        ran = run("fit", "--config", str(path))
        assert ran.status == 2
        command = re.search(r"give ((?:--config \S+ )+)--config (\S+)\.$", ran.sentence.partition(" (--debug")[0])
        assert command, ran.sentence
        assert Path(command[2]) == path
        assert all(Path(file).is_file() for file in command[1].split()[1::2])


def test_a_part_of_a_recipe_follows_its_base_the_config_of_a_run_or_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base, part = (str(ROOT / f"configs/mobileclip/{name}.yaml") for name in ("base", "paper"))
    found = run("fit", "--config", base, "--config", part, "--print_config")
    assert found.status == 0, found.err
    assert "needs" not in yaml.safe_load(found.out)
    assert "Expected" in run("fit", "--config", part, "--config", base).sentence
    Path("config.yaml").write_text(found.out)  # as in the folder of a run
    assert run("fit", "--config", "config.yaml", "--config", part, "--print_config").status == 0
    refused = run("fit", "--config", part, "--ckpt_path", "last.ckpt").sentence
    assert "before" not in refused
    assert "last.ckpt" in refused


def test_the_commands_of_the_slurm_examples_compose():
    files = [ROOT / "docs/clusters.md", *sorted((ROOT / "configs/slurm").glob("*.sh"))]
    texts = "\n".join(path.read_text().replace("\\\n", "") for path in files)
    commands = re.findall(r"sbatch (?:--\S+ )*configs/slurm/(?!array)(\w+)\.sh (.*)", texts)  # that: test_engines.py
    assert {script for script, _ in commands} == {"one_node", "many_nodes", "preemptible"}
    for _, words in commands:
        configs = [ROOT / word for word in words.split() if word.endswith(".yaml")]
        composed = _composed(*configs)
        assert composed["trainer"]["devices"] == 8  # of a node in the scripts
        assert composed["model"]["init_args"]["text"]["weights"] == "bert-base-uncased"


def test_official_sets_every_option_of_the_authors():
    model = _composed(ROOT / "configs/albef/base.yaml", ROOT / "configs/albef/official.yaml")["model"]["init_args"]
    expected = {
        "momentum": {"teacher_dropout": True},
        "contrast": {"positives": "diagonal", "key_columns": "local", "queue_start": "random"},
        "optim": {"decay_temperature": True, "lr_schedule": "official", "warmup_steps": 2000},
    }
    defaults = _composed(ROOT / "configs/albef/base.yaml")["model"]["init_args"]
    for group, values in expected.items():
        for name, value in values.items():
            assert model[group][name] == value
            assert defaults[group][name] != value


def test_official_retrieval_keeps_the_matches_by_image_id_and_the_warm_up_of_fine_tuning():
    overlay = ROOT / "configs/albef/official_retrieval.yaml"
    model = _composed(*COCO, overlay)["model"]["init_args"]
    assert (model["contrast"]["positives"], model["optim"]["warmup_steps"]) == ("image_id", 100)
    official = yaml.safe_load((ROOT / "configs/albef/official.yaml").read_text())["model"]["init_args"]
    del official["contrast"]["positives"], official["optim"]["warmup_steps"]
    assert yaml.safe_load(overlay.read_text())["model"]["init_args"] == official


FLICKR = [ROOT / "configs/albef/retrieval_flickr30k.yaml"]
COCO = [*FLICKR, ROOT / "configs/albef/retrieval_coco.yaml"]


@pytest.mark.parametrize("configs", [[ROOT / "configs/albef/grounding.yaml"], COCO])
def test_official_retrieval_fits_after_each_of_its_recipes(configs):
    overlay = ROOT / "configs/albef/official_retrieval.yaml"
    composed = _composed(*configs, overlay)
    assert says(composed["model"]["init_args"], yaml.safe_load(overlay.read_text())["model"]["init_args"])


def test_official_fits_after_each_pre_training():
    overlay = ROOT / "configs/albef/official.yaml"
    base = [ROOT / f"configs/albef/{name}.yaml" for name in ("base", "pretrain_4m")]
    for name in ("pretrain_14m", "ablation_mlm_itm", "ablation_no_distillation"):
        model = _composed(*base, ROOT / f"configs/albef/{name}.yaml", overlay)["model"]["init_args"]
        assert says(model, yaml.safe_load(overlay.read_text())["model"]["init_args"])


@pytest.mark.parametrize(("configs", "epochs", "rerank_k"), [(FLICKR, 10, 128), (COCO, 5, 256)])
def test_fine_tuning_for_retrieval_has_the_authors_settings(configs, epochs, rerank_k):
    composed = _composed(*configs)
    model, data = composed["model"]["init_args"], composed["data"]["init_args"]
    table = {
        "mlm": False,
        "optim.learning_rate": 1e-5,
        "optim.min_learning_rate": 1e-6,
        "optim.warmup_learning_rate": 1e-5,
        "optim.weight_decay": 0.02,
        "momentum.alpha": 0.4,
        "momentum.alpha_warmup_epochs": 1,
        "momentum.momentum": 0.995,
        "contrast.queue_size": 65536,
        "contrast.positives": "image_id",
        "rerank.k": rerank_k,
        "rerank.when": "always",
        "rerank.score": "itm",
        "vision.weights": None,
        "text.weights": None,
    }
    assert table.items() <= flat(model).items()
    assert model["weights"] is not None
    rows = {
        "image_size": 384,
        "global_batch_size": 256,
        "eval_batch_size": 64,
        "max_tokens": 30,
        "clean_captions": True,
        "max_words": 30,
        "horizontal_flip": True,
    }
    assert {name: data[name] for name in rows} == rows
    transform = data["train_transform"]["init_args"]
    assert (transform["size"], transform["scale"]) == (384, [0.5, 1.0])
    trainer = composed["trainer"]
    assert trainer["max_epochs"] == epochs
    assert composed["checkpoint"]["monitor"] == "val/rerank_recall_mean"
    assert ("coco" in data["train"]) == (configs == COCO)


WORDS = [f"w{number}" for number in range(50)]


def _retrieval_files(folder):
    """Twelve images with captions longer than any limit, in the authors' two forms, and a vocabulary."""
    (folder / "images").mkdir()
    train, evaluated = [], []
    for number in range(12):
        name = f"images/{number}.png"
        draw_image(number).save(folder / name)
        captions = [" ".join(WORDS[number + shift :] + WORDS) for shift in (0, 1)]
        train += [{"image": name, "caption": caption, "image_id": name} for caption in captions]
        evaluated.append({"image": name, "caption": captions})
    (folder / "train.json").write_text(json.dumps(train))
    (folder / "val.json").write_text(json.dumps(evaluated))
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))


@pytest.mark.parametrize("append_sep", [False, True])
def test_fine_tuning_cuts_long_captions_in_training_and_in_evaluation(append_sep, tmp_path):
    _retrieval_files(tmp_path)
    settings = _composed(*FLICKR)["data"]["init_args"]
    names = ("max_tokens", "clean_captions", "max_words", "vocab_size")
    data = ImageTextDataModule(
        train=str(tmp_path / "train.json"),
        validation=str(tmp_path / "val.json"),
        tokenizer=str(tmp_path / "vocab.txt"),
        image_size=16,
        batch_size=12,
        num_workers=0,
        append_sep=append_sep,
        cache_dir=str(tmp_path / "cache"),
        **{name: settings[name] for name in names},
    )
    data.setup("fit")
    batches = [*data.train_dataloader(), *data.val_dataloader()]
    assert [len(batch["input_ids"]) for batch in batches] == [12, 12, 24]
    for batch in batches:
        assert batch["input_ids"].shape[1] == 30
        assert (batch["attention_mask"] == 1).all()
        assert (batch["input_ids"][:, 0] == data.tokenizer.cls_token_id).all()
        assert (batch["input_ids"][:, -1] == data.tokenizer.sep_token_id).all() == append_sep


@pytest.mark.slow
def test_fine_tuning_runs_on_the_authors_lists_and_keeps_the_best_by_reranked_recall(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _retrieval_files(tmp_path)
    text = {"width": 16, "heads": 2, "ffn_width": 32, "depth": 1, "fusion_depth": 1}
    special = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "mask_token_id": 4}
    sizes = {"vision": {"width": 16, "depth": 1, "heads": 2}, "text": text | special}
    sizes["contrast"] = {"embed_dim": 8, "queue_size": 16}
    lists = {"train": "train.json", "validation": "val.json", "test": "val.json", "image_root": ".", "num_workers": 0}
    small = {
        "model": {"init_args": {"weights": None, **sizes}},
        "data": {
            "init_args": {
                "tokenizer": "vocab.txt",
                "image_size": 32,
                "global_batch_size": 6,
                "cache_dir": "cache",
                **lists,
            }
            | {"train_transform": {"init_args": {"size": 32}}}
        },
        "trainer": {"accelerator": "cpu", "devices": 1, "strategy": "auto", "precision": "32-true", "max_epochs": 2},
    }
    Path("small.yaml").write_text(yaml.safe_dump(small))
    configs = [word for config in [*COCO, "small.yaml"] for word in ("--config", str(config))]
    ran = run("fit", *configs)
    assert ran.status == 0, ran.err
    folder = Path("runs/albef/retrieval_coco_small/version_0/checkpoints")
    (best,) = folder.glob("best-step*.ckpt")
    saved = torch.load(best, weights_only=True)["callbacks"]
    assert any("val/rerank_recall_mean" in str(state.get("monitor")) for state in saved.values())
    ran = run("test", "--ckpt_path", str(best))
    assert ran.status == 0, ran.err
    assert "test/rerank_recall_mean" in ran.out


@pytest.mark.slow
@pytest.mark.parametrize("method", ["albef", "mmlg", "mobileclip"])
def test_quickstart_runs_every_subcommand(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quickstart = ("--config", str(ROOT / f"configs/{method}/quickstart.yaml"))
    small = ("--data.eval_length=8", "--data.length=32", "--data.batch_size=16", "--data.num_workers=0")
    small += ("--trainer.logger=false",)
    short = ("--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.default_root_dir", ".")
    for subcommand in ("fit", "validate", "test", "predict"):
        ran = run(subcommand, *quickstart, *small, *(short if subcommand == "fit" else ()))
        assert ran.status == 0, ran.err


def test_shres_distillation_has_the_thesis_settings():
    composed = _composed(ROOT / "configs/shre/distill.yaml")
    model, data, trainer = composed["model"]["init_args"], composed["data"]["init_args"], composed["trainer"]
    assert (model["num_classes"], model["shared"]) == (1000, "mlp")
    assert (model["teacher"]["name"], model["teacher"]["weights"]) == ("timm/resnet50", "a1_in1k")
    vision = {"image_size": 224, "patch_size": 16, "width": 768, "depth": 6, "heads": 12, "post_norm": True}
    assert model["vision"] == vision | {"weights": "base_imagenet.pt", "name": None}
    text = {"vocab_size": 30522, "max_tokens": 64, "depth": 6, "dropout": 0.1, "weights": "bert-base-uncased"}
    assert {name: model["text"][name] for name in text} == text
    assert model["text"]["name"] is None
    assert model["kl"] == {"weight": 1.0, "image_share": 0.5, "temperature": 1.0}
    contrast = {"weight": 1.0, "layers": None, "temperature": 0.07, "max_logit_scale": 100.0}
    contrast |= {"mask_same_image": False, "mask_same_text": False}
    assert model["contrast"] == contrast
    optim = {"learning_rate": 1e-4, "warmup_share": 0.1, "weight_decay": 0.01, "betas": [0.9, 0.98], "eps": 1e-6}
    assert model["optim"] == optim
    crop = {"size": 224, "scale": [0.9, 1.0], "horizontal_flip": 0.5, "rand_augment": False}
    assert {name: data["train_transform"]["init_args"][name] for name in crop} == crop
    statistics = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    for transform in ("train_transform", "eval_transform"):
        assert {name: data[transform]["init_args"][name] for name in statistics} == statistics
    assert data["eval_transform"]["class_path"].endswith(".ALBEFEvalTransform")  # to the square, without a crop
    assert (data["global_batch_size"], data["tokenizer"], data["max_tokens"]) == (256, "bert-base-uncased", 64)
    assert len(data["train"]) == 3
    assert (trainer["max_steps"], trainer["precision"], trainer["devices"]) == (89_273, "16-mixed", 1)
    assert composed["seed_everything"] == 42


def test_s_smke_has_the_thesis_settings():
    parts = [ROOT / f"configs/shre/{name}.yaml" for name in ("distill", "self_supervised_teacher", "memory_bank")]
    base, taught, banked = (_composed(*parts[:count]) for count in (1, 2, 3))
    model, data, trainer = taught["model"]["init_args"], taught["data"]["init_args"], taught["trainer"]
    assert (model["num_classes"], model["shared"]) == (768, "s_smke")
    expected = {"target": "embedding", "name": "timm/beitv2_base_patch16_224", "temperature": 0.07, "queue_size": 0}
    assert says(model["teacher"], expected | {"weights": "beitv2_base_patch16_224_pt1k.pth"})
    assert (data["global_batch_size"], model["optim"]["learning_rate"]) == (512, 2e-4)
    assert trainer["max_steps"] == 7 * (3_264_868 // 512)
    own = base["model"]["init_args"]
    assert all(model[group] == own[group] for group in ("vision", "text", "kl", "contrast"))
    differing = {name for name, value in flat(banked["model"]).items() if value != flat(taught["model"])[name]}
    assert differing == {"init_args.teacher.queue_size"}
    assert banked["model"]["init_args"]["teacher"]["queue_size"] == 65_536


def test_fine_tuning_of_s_smke_for_retrieval_has_the_thesis_settings():
    parts = [ROOT / f"configs/shre/{name}.yaml" for name in ("distill", "retrieval_finetune")]
    composed = _composed(*parts)
    model, data, trainer = composed["model"]["init_args"], composed["data"]["init_args"], composed["trainer"]
    assert (model["kl"]["weight"], model["contrast"]["layers"]) == (0.0, ["h2"])
    assert (data["global_batch_size"], model["optim"]["learning_rate"], model["optim"]["warmup_share"]) == (
        1024,
        3e-5,
        0.1,
    )
    assert model["weights"] == "runs/shre_memory_bank/version_0/checkpoints/last.ckpt"
    assert says(data["train"], {"path": "data/dataset_coco.json", "image_root": "data/coco"})
    assert trainer["max_steps"] == 5 * (566_747 // 1024)
    trained = _composed(parts[0], ROOT / "configs/shre/self_supervised_teacher.yaml")["model"]["init_args"]
    assert all(model[name] == trained[name] for name in ("num_classes", "shared", "vision", "text"))
    header = parts[1].read_text()
    (steps, interval) = re.search(r"--trainer.max_steps (\d+) --trainer.val_check_interval (\d+)", header).groups()
    assert (int(steps), int(interval)) == (5 * (29_000 * 5 // 1024), 29_000 * 5 // 1024)


@pytest.mark.slow
def test_shre_quickstart_distils_the_teacher_that_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    student = ("--config", str(ROOT / "configs/shre/quickstart.yaml"))
    short = ("--data.length=32", "--data.batch_size=16", "--data.eval_length=40", "--data.num_workers=0")
    short += ("--trainer.max_epochs=1",)
    ran = run("fit", *student, *short)
    assert ran.status == 1
    assert "configs/shre/quickstart_teacher.yaml" in ran.err
    assert run("fit", "--config", str(ROOT / "configs/shre/quickstart_teacher.yaml"), *short).status == 0
    ran = run("fit", *student, *short)
    assert ran.status == 0, ran.err
    checkpoints = sorted(Path("runs/shre_quickstart").glob("*/checkpoints/*.ckpt"))
    last = next(path for path in checkpoints if path.name == "last.ckpt")
    assert any(path.name.startswith("best-step") for path in checkpoints)
    shapes = ("--trainer.callbacks.data=ShapeClassesDataModule", "--trainer.callbacks.data.eval_length=40")
    own = ("--trainer.callbacks+=OwnClassification", *shapes)
    by_text = ("--trainer.callbacks+=ZeroShotClassification", *shapes, "--trainer.callbacks.name=by_text")
    for command in ("validate", "test"):
        ran = run(command, "--ckpt_path", str(last), *own, *by_text)
        assert ran.status == 0, ran.err
        assert "nan" not in ran.out
        prefix = {"validate": "val", "test": "test"}[command]
        for metric in ("h2/recall_mean", "h3/recall_mean", "supervised_teacher_top1", "by_text_top1"):
            assert f"{prefix}/{metric}" in ran.out
    Path("texts.txt").write_text("a red circle\na blue ring\n")
    writers = ("--trainer.callbacks+=ClassPredictionWriter", "--trainer.callbacks+=TextClassPredictionWriter")
    texts = ("--data", "ShapesDataModule", "--data.predict_texts", "texts.txt")
    ran = run("predict", "--ckpt_path", str(last), *texts, *writers)
    assert ran.status == 0, ran.err
    (table,) = Path("runs").rglob("text_predictions.parquet")
    assert pq.read_table(table).column("text").to_pylist() == ["a red circle", "a blue ring"]


def test_reinforcement_presets_are_the_released_data_sets_and_the_reduced_ones():
    base = ROOT / "configs/mobileclip/reinforce.yaml"
    found = {"": _composed(base)} | {
        name: _composed(base, ROOT / f"configs/mobileclip/reinforce_{name}.yaml") for name in ("10_5", "5_5", "2_2")
    }
    counts = {
        name: (config["data"]["init_args"]["augmentations"], config["model"]["init_args"]["captioner"]["init_args"])
        for name, config in found.items()
    }
    assert {name: (count, captioner["captions"]) for name, (count, captioner) in counts.items()} == {
        "": (30, 5),
        "10_5": (10, 5),
        "5_5": (5, 5),
        "2_2": (2, 2),
    }
    for _, captioner in counts.values():
        assert captioner["model"] == "coca_ViT-L-14"
        assert captioner["weights"] == "mscoco_finetuned_laion2b_s13b_b90k"
        assert (captioner["top_p"], captioner["length"], captioner["min_length"]) == (0.9, 30, 5)
        assert captioner["temperature"] == 1.0
    dfndr = _composed(base, ROOT / "configs/mobileclip/reinforce_dfndr.yaml")["model"]["init_args"]["teachers"]
    assert [(one["weights"], one["scale"]) for one in dfndr] == [("dfn2b", 70.0), ("dfn2b_s39b", 60.0)]
    assert all(open_clip.get_pretrained_cfg(one["model"], one["weights"]) for one in dfndr)
    teachers = found["5_5"]["model"]["init_args"]["teachers"]
    assert [(one["model"], one["weights"]) for one in teachers] == [
        ("ViT-L-14", "openai"),
        ("ViT-L-14", "datacomp_xl_s13b_b90k"),
    ]


@pytest.mark.slow
def test_a_data_set_is_reinforced_and_a_student_trains_on_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs = write_pairs(tmp_path / "pairs.parquet", 20)
    for number in (0, 1):
        torch.manual_seed(number)
        teacher = build_model(add_tiny_clip(), context_length=None)
        save_open_clip(teacher, add_tiny_clip(), preprocessing_of(add_tiny_clip()), f"teacher{number}")
    teachers = json.dumps([{"weights": "teacher0"}, {"weights": "teacher1", "scale": 50.0}])
    own = ("--model.teachers", teachers, "--model.captioner", "null", "--data.synthetic_column", "made")
    where = ("--data.pairs", pairs, "--data.num_workers", "1", "--data.cache_dir", "cache")
    config = ("--config", str(ROOT / "configs/mobileclip/reinforce.yaml"))
    ran = run("predict", *config, *where, *own, "--data.folder", "reinforced", "--data.augmentations", "2")
    assert ran.status == 0, ran.err
    manifest = json.loads(Path("reinforced/manifest.json").read_text())
    assert (manifest["complete"], manifest["samples"]) == (True, 20)
    assert manifest["self_check"]["least_cosine"] >= 0.999
    assert [teacher["scale"] for teacher in manifest["teachers"]] == [pytest.approx(1 / 0.07, rel=1e-5), 50.0]
    assert [teacher["model"] for teacher in manifest["teachers"]] == ["teacher0", "teacher1"]
    student = ("--model", "MobileCLIPModule", "--model.model", "MobileCLIP-tiny", "--model.optim.warmup_steps", "1")
    dims = ("--trainer.max_epochs", "1")  # its teachers' widths and scales are in the manifest
    data = ("--data", "ReinforcedImageTextDataModule", "--data.train", "reinforced", "--data.batch_size", "10")
    more = (
        "--data.num_workers",
        "0",
        "--data.image_size",
        "32",
        "--data.cache_dir",
        "cache",
        "--data.max_tokens",
        "16",
    )
    forgotten = ("--model.teacher.dims", "[8,8]", "--model.teacher.scales", "[100,100]")
    ran = run("fit", *student, *dims, *forgotten, *data, *more, "--trainer.accelerator", "cpu")
    assert "Expected a teacher.scales of [14.28" in ran.sentence
    assert "got [100.0, 100.0]: leave model.teacher.scales out" in ran.sentence
    ran = run("fit", *student, *dims, *data, *more, "--trainer.accelerator", "cpu")
    assert ran.status == 0, ran.err
    ran = run("predict", *config, *where, *own, "--data.folder", "reinforced", "--data.augmentations", "3")
    assert ran.status == 1
    assert "Expected augmentation.per_image 2, with which the shards" in ran.sentence


def test_mobileclips_recipes_are_the_papers_and_the_released_scripts():
    base = ROOT / "configs/mobileclip/base.yaml"
    composed = {
        name: _composed(base, *(ROOT / f"configs/mobileclip/{part}.yaml" for part in parts))
        for name, parts in {
            "paper": ["paper"],
            "released_script": ["released_script"],
            "paper_b_lt": ["paper", "paper_b", "paper_b_lt"],
            "mobileclip2": ["paper", "mobileclip2"],
            "mobileclip2_s4": ["paper", "mobileclip2", "mobileclip2_s4"],
        }.items()
    }
    expected = {  # model, minimum rate, warm-up, average, decayed scales, eps; pairs a step, steps, precision, clipping
        "paper": ("MobileCLIP-S0", 1e-6, 2000, 0.9995, False, 1e-8, 65536, 200_000, "bf16-mixed", None),
        "released_script": ("ViT-B-16", 0.0, 1000, None, True, 1e-6, 8192, 30_000, "16-mixed", 1.0),
        "paper_b_lt": ("MobileCLIP-B", 1e-6, 2000, 0.9995, False, 1e-8, 65536, 600_000, "bf16-mixed", None),
        "mobileclip2": ("MobileCLIP2-S0", 1e-6, 10_000, 0.9995, False, 1e-8, 65536, 200_000, "bf16-mixed", 1.0),
        "mobileclip2_s4": ("MobileCLIP2-S4", 0.0, 2000, 0.9995, False, 1e-8, 114_688, 114_286, "bf16-mixed", 1.0),
    }
    for recipe, config in composed.items():
        model, data, trainer = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
        pairs = data["global_batch_size"]
        optim, momentum = model["optim"], model["momentum"]["momentum"]
        found = (model["model"], optim["min_learning_rate"], optim["warmup_steps"], momentum)
        found += (optim["decay_layer_scales"], optim["eps"], pairs, trainer["max_steps"], trainer["precision"])
        assert (*found, trainer["gradient_clip_val"]) == expected[recipe]
        common = {"learning_rate": 1e-3, "weight_decay": 0.2, "betas": [0.9, 0.95]}
        assert {name: optim[name] for name in common} == common
        assert model["teacher"] == {  # by default DataCompDR's
            "distillation_weight": 0.75 if recipe == "paper_b_lt" else 1.0,
            "dims": None,
            "scales": [70.0, 60.0] if recipe.startswith("mobileclip2") else None,
            "distilled": None,
            "models": None,
            "mask_same_text": True,
        }
        paper = recipe.startswith("paper")  # the first paper's
        assert model["vision"]["range_augment"] == ([40.0, 20.0] if paper else None)
        assert optim["constant_steps"] == (300_000 if recipe == "paper_b_lt" else 0)
        assert data["image_size"] == (224 if model["model"] in ("ViT-B-16", "MobileCLIP-B") else 256)
    for recipe in ("released_script", "mobileclip2_s4"):
        clip = composed[recipe]["data"]["init_args"]
        assert clip["image_mean"] == pytest.approx([0.4815, 0.4578, 0.4082], abs=1e-4)
    assert composed["paper"]["data"]["init_args"]["image_std"] is None  # MobileCLIP's own, 1
