"""SHReModule against listing 2 written out, and trainings."""

import math
from pathlib import Path

import open_clip
import pyarrow.parquet as pq
import pytest
import timm
import torch
import torch.nn.functional as F
from lightning import Trainer
from torch import nn

from support.methods.shre import CLASSES, WORDS, random_batch, ready, tiny_shre, write_teacher
from vlightning.callbacks import (
    ClassPredictionWriter,
    OwnClassification,
    TextClassPredictionWriter,
    ZeroShotClassification,
)
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapeClassesDataModule, ShapesDataModule
from vlightning.lightning_modules import SHReModule
from vlightning.lightning_modules.shre import module as shre_code
from vlightning.lightning_modules.shre.network import encode_pairs
from vlightning.lightning_modules.shre.teacher import teacher_conversion

NAMES = ("h2", "h1", "h3")


def listing(module, batch):
    """Listing 2, with torch's and open_clip's losses."""
    network = module.student
    target = module.teacher.network(batch["image"]).detach()
    image = network.shared_encoder(network.image_encoder(batch["image"]))
    text = network.shared_encoder(network.text_encoder(batch["input_ids"], batch["attention_mask"]))
    kl = sum(F.kl_div(side[2].log_softmax(-1), target.softmax(-1), reduction="batchmean") / 2 for side in (image, text))
    clip_loss = open_clip.ClipLoss()
    itc = sum(
        clip_loss(F.normalize(image[k], dim=-1), F.normalize(text[k], dim=-1), module.scales[name].exp()) / 3
        for k, name in enumerate(NAMES)
    )
    return kl, itc


def encoded(module, batch):
    """Results of the images and of the captions of a batch."""
    return encode_pairs(module.student, batch["image"], batch["input_ids"], batch["attention_mask"], None)


def gradients(module, loss):
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kl": {"weight": 0.5}, "contrast": {"weight": 2.0}},
        {"memory": {"micro_batch_size": 4}},
        {"memory": {"loss_rows": 1}},
    ],
)
def test_a_step_equals_the_listing_with_and_without_slices(tmp_path, options):
    module = ready(tiny_shre(tmp_path, **options))
    with torch.no_grad():
        for number, scale in enumerate(module.scales.values()):
            scale.add_(0.1 * number)
    batch = random_batch()
    loss = module.training_step(batch, 0)
    kl, itc = listing(module, batch)
    expected = module.kl.weight * kl + module.contrast.weight * itc
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    found, wanted = gradients(module, loss), gradients(module, expected)
    assert sum(gradient is not None for gradient in wanted.values()) > 40
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-13, msg=name)


def test_equal_results_and_the_teachers_logits_leave_the_contrast_of_ties(tmp_path, monkeypatch):
    module = ready(tiny_shre(tmp_path))
    batch = random_batch()
    target = module.teacher.network(batch["image"])
    same = {name: torch.randn(6, 4, dtype=torch.float64) for name in NAMES} | {"h3": target}
    monkeypatch.setattr(shre_code, "encode_pairs", lambda *_: (same, same))
    logged = {}
    module.log_dict = lambda values, **_: logged.update(values)
    loss = module.training_step(batch, 0)
    assert float(logged["train/kl_image"]) == pytest.approx(0, abs=1e-12)
    assert float(logged["train/kl_text"]) == pytest.approx(0, abs=1e-12)
    mean = 0.0
    for name in NAMES:
        side = F.normalize(same[name], dim=-1)
        logits = side @ side.T / 0.07
        mean += float(F.cross_entropy(logits, torch.arange(6))) / 3
    assert float(loss) == pytest.approx(mean, rel=1e-6)  # 0.07 is float32 in the module


def test_the_first_two_results_are_interchangeable(tmp_path):
    module, batch = ready(tiny_shre(tmp_path)), random_batch()
    images, texts = encoded(module, batch)
    expected = module._contrast(images, texts, batch)
    swapped = [{**side, "h1": side["h2"], "h2": side["h1"]} for side in (images, texts)]
    torch.testing.assert_close(module._contrast(*swapped, batch), expected, rtol=1e-12, atol=0)
    with torch.no_grad():
        module.scales["h1"].add_(1.0)  # each has a scale of its own
    assert not torch.allclose(module._contrast(*swapped, batch), expected)


@pytest.mark.parametrize("layers", [["h2"], ["h1"], ["h3"], ["h3", "h2"]])
def test_single_results_are_contrasted(layers):
    module = ready(tiny_shre(contrast={"layers": layers}))
    assert list(module.scales) == layers
    loss = module.training_step(random_batch(), 0)
    images, texts = encoded(module, random_batch())
    expected = sum(
        open_clip.ClipLoss()(F.normalize(images[name]), F.normalize(texts[name]), module.scales[name].exp())
        for name in layers
    ) / len(layers)
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)


def test_other_captions_of_an_image_are_not_negatives_if_masked():
    batch = random_batch() | {"image_id": torch.tensor([3, 3, 4, 5, 3, 6])}
    masked, plain = (
        ready(tiny_shre(contrast={"mask_same_image": switch, "layers": ["h2"]})) for switch in (True, False)
    )
    losses = [module.training_step(batch, 0) for module in (masked, plain)]
    assert losses[0] < losses[1]
    images, texts = encoded(masked, batch)
    logits = F.normalize(images["h2"]) @ F.normalize(texts["h2"]).T * masked.scales["h2"].exp()
    expected = 0.0
    for scores in (logits, logits.T):
        for row in range(6):
            same = [c for c in range(6) if c != row and batch["image_id"][c] == batch["image_id"][row]]
            kept = [c for c in range(6) if c not in same]
            expected = expected + (scores[row, kept].logsumexp(0) - scores[row, row]) / 12
    torch.testing.assert_close(losses[0], expected, rtol=1e-11, atol=0)


def test_the_share_and_the_temperature_of_the_divergence(tmp_path):
    module = ready(tiny_shre(tmp_path, contrast={"weight": 0.0}, kl={"image_share": 0.8, "temperature": 2.0}))
    assert not module.scales
    batch = random_batch()
    target = module.teacher.network(batch["image"]) / 2
    images, texts = encoded(module, batch)
    expected = sum(
        share * 4 * F.kl_div((side["h3"] / 2).log_softmax(-1), target.softmax(-1), reduction="batchmean")
        for share, side in ((0.8, images), (0.2, texts))
    )
    torch.testing.assert_close(module.training_step(batch, 0), expected, rtol=1e-11, atol=0)


def test_the_teacher_is_frozen_in_eval_mode_and_in_no_checkpoint(tmp_path):
    module = ready(tiny_shre(tmp_path)).train()
    before = {name: tensor.clone() for name, tensor in module.teacher.network.state_dict().items()}
    assert module.student.training
    assert not any(part.training for part in module.teacher.modules())
    module.training_step(random_batch(), 0).backward()
    after = module.teacher.network.state_dict()
    assert any("running_mean" in name for name in before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in module.teacher.parameters())
    assert not any(name.startswith("teacher.") for name in module.state_dict())
    module._trainer = None
    trained = {id(p) for group in module.configure_optimizers()["optimizer"].param_groups for p in group["params"]}
    assert not trained & {id(parameter) for parameter in module.teacher.parameters()}


OWN, THEIRS = ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7)), ((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
TAUGHT = {"mean": THEIRS[0], "std": THEIRS[1]}


def columns(normalization):
    return [torch.tensor(part)[:, None, None] for part in normalization]


def shown_to(module, image):
    """Images as the teacher of a module receives them."""
    return teacher_conversion(module.teacher.network, module.teacher_settings, module.datamodule)(image)


def test_the_teacher_receives_images_with_its_own_normalization(tmp_path):
    own = {"image_mean": OWN[0], "image_std": OWN[1]}
    module = ready(tiny_shre(tmp_path, teacher={**own, **TAUGHT}))
    pixels = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    (mean, std), (their_mean, their_std) = columns(OWN), columns(THEIRS)
    image = (pixels - mean) / std
    torch.testing.assert_close(shown_to(module, image), (pixels - their_mean) / their_std)
    plain = ready(tiny_shre(tmp_path, teacher=own))
    assert shown_to(plain, image) is image  # of a network with unknown normalization
    unknown = ready(tiny_shre(tmp_path, teacher=TAUGHT))
    with pytest.raises(UserError, match=r"got none from the run, .*set model\.teacher\.image_mean"):
        unknown.training_step(random_batch(), 0)


def test_the_normalization_of_the_data_is_that_of_its_preprocessing(tmp_path):
    seen = []
    module = tiny_shre(tmp_path, **WORDS, teacher=TAUGHT)
    module.on_train_batch_end = lambda outputs, batch, batch_idx: seen.append(
        (batch["image"], module._teacher_images(batch["image"]))
    )
    fit(module, tmp_path, limit_train_batches=1, limit_val_batches=0)
    shown, taught = seen[0]
    mean, std = columns((data().preprocessing["mean"], data().preprocessing["std"]))
    pixels = shown * std + mean
    assert 0 <= pixels.min() < pixels.max() <= 1.001
    their_mean, their_std = columns(THEIRS)
    torch.testing.assert_close(taught, (pixels - their_mean) / their_std, rtol=1e-5, atol=1e-5)


def test_timms_teacher_receives_images_of_its_own_normalization_and_size(tmp_path):
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES)
    torch.save(network.state_dict(), tmp_path / "vit.pth")
    teacher = {"name": "timm/vit_tiny_patch16_224", "weights": str(tmp_path / "vit.pth")}
    teacher |= {"image_mean": OWN[0], "image_std": OWN[1]}
    module = ready(tiny_shre(teacher=teacher, kl={"weight": 1.0}))
    batch = random_batch(2)
    mean, std = columns(OWN)
    pixels = batch["image"] * std + mean
    expected = F.interpolate((pixels - 0.5) / 0.5, (224, 224), mode="bilinear", antialias=True)
    torch.testing.assert_close(shown_to(module, batch["image"]), expected, rtol=1e-6, atol=1e-6)
    found = module._teacher_output(batch["image"])
    torch.testing.assert_close(found, network.double().eval()(expected), rtol=1e-6, atol=1e-6)


def test_weight_decay_spares_vectors_tokens_positions_and_embeddings():
    module = tiny_shre(vision={"post_norm": False})
    module._trainer = None
    groups = module.configure_optimizers()["optimizer"].param_groups
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    decayed, spared = ({names[id(parameter)] for parameter in group["params"]} for group in groups)
    assert decayed | spared == set(names.values())
    assert all(module.get_parameter(name).ndim > 1 and "embeddings" not in name for name in decayed)
    expected = {"student.image_encoder.cls_token", "student.image_encoder.pos_embed", "scales.h2"}
    expected |= {f"student.text_encoder.embeddings.{part}_embeddings.weight" for part in ("word", "position")}
    assert expected < spared
    assert "student.shared_encoder.fc1.weight" in decayed
    assert groups[0]["weight_decay"] == 0.01
    fixed = tiny_shre()
    assert all("pos_embed" not in name for name in fixed.no_weight_decay())


def test_the_schedule_warms_up_from_zero_over_a_tenth_and_ends_at_zero():
    schedule = tiny_shre(optim={"learning_rate": 2.0}).paper_schedule()
    rates = [schedule.rate(step, 100) for step in range(101)]
    assert rates[:11] == pytest.approx([0.2 * step for step in range(11)])
    assert rates[55] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0, abs=1e-12)
    sudden = tiny_shre(optim={"learning_rate": 2.0, "warmup_share": 0.0}).paper_schedule()
    assert sudden.rate(0, 100) == 2.0


def data(length=32, eval_length=12, **options):
    defaults = {"image_size": 16, "max_tokens": 8, "vocab_size": 320, "batch_size": 8, "num_workers": 0, "seed": 0}
    return ShapesDataModule(length=length, eval_length=eval_length, **{**defaults, **options})


def fit(module, folder, epochs=1, **options):
    trainer = Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, data())
    return trainer


def test_a_training_logs_both_spaces_and_names_its_teacher(tmp_path, caplog):
    module = tiny_shre(tmp_path, **WORDS, evaluation={"features": "h3"}, optim={"learning_rate": 1e-2})
    start = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    trainer = fit(module, tmp_path)
    found = trainer.callback_metrics
    expected = {f"val/{space}/{name}" for space in ("h2", "h3") for name in ("recall_mean", "text_to_image_r1")}
    expected |= {f"val/{space}/median_rank_text_to_image" for space in ("h2", "h3")}
    expected |= {f"train/{name}" for name in ("loss", "kl_image", "kl_text", "contrast_h1", "logit_scale_h3")}
    assert expected <= found.keys()
    entropies = [line for line in caplog.messages if "mean entropy" in line]
    assert len(entropies) == 1
    assert f"Near {math.log(CLASSES):.2f}" in entropies[0]
    end = dict(module.named_parameters())
    moved = [name for name, parameter in start.items() if not torch.equal(end[name], parameter)]
    assert "student.text_encoder.encoder.layer.0.attention.self.query.weight" in moved
    assert "student.image_encoder.pos_embed" not in moved
    untouched = ready(tiny_shre(tmp_path)).teacher.network.float().state_dict()  # read from the file anew
    for name, tensor in module.teacher.network.state_dict().items():  # means and variances of BatchNorm, too
        assert torch.equal(tensor, untouched[name]), name
    trainer.save_checkpoint(tmp_path / "end.ckpt", weights_only=True)
    content = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert content["teacher"]["name"] == "resnet8"
    assert not any(name.startswith("teacher.") for name in content["state_dict"])
    assert module.evaluation.result.image_features.shape == (12, CLASSES)
    other = tiny_shre(**WORDS, **write_teacher(tmp_path, seed=2))
    again = Trainer(default_root_dir=tmp_path, max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False)
    with pytest.raises(UserError, match="teacher that the checkpoint was trained with, resnet8"):
        again.fit(other, data(), ckpt_path=tmp_path / "end.ckpt", weights_only=True)


def test_features_of_both_spaces_are_concatenated():
    module = tiny_shre().eval()
    batch = random_batch(dtype=torch.float32)
    both, _ = module.ranked_images(batch["image"])
    results = module.student.encode_image(batch["image"])
    torch.testing.assert_close(both, torch.cat([F.normalize(results[0]), F.normalize(results[2])], 1))
    torch.testing.assert_close(module.encode_images(batch["image"])[0], F.normalize(results[0]))
    texts = batch["input_ids"], batch["attention_mask"]
    results = module.student.encode_text(*texts)
    expected = torch.cat([F.normalize(results[0]), F.normalize(results[2])], 1)
    torch.testing.assert_close(module.ranked_texts(*texts), expected)
    torch.testing.assert_close(
        tiny_shre(evaluation={"features": "h3"}).eval().encode_texts(*texts), F.normalize(results[2])
    )
    torch.testing.assert_close(module.classify_texts(*texts), results[2])
    torch.testing.assert_close(module.classify_images(batch["image"]), module.student.encode_image(batch["image"])[2])


@pytest.mark.parametrize("features", ["h2", "h3"])
def test_images_are_classified_by_texts_in_the_chosen_space_and_by_logits(features):
    """Cosines with the names of the classes, and the model's own classes, one image at a time."""
    module = tiny_shre(**WORDS, num_classes=40, evaluation={"features": features})
    labeled = ShapeClassesDataModule(eval_length=60, image_size=16, batch_size=8, seed=0)
    callbacks = [ZeroShotClassification(labeled, templates=["a {}"]), OwnClassification(labeled)]
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=callbacks)
    pairs = data()
    trainer.validate(module, pairs, verbose=False)
    rows = [row for batch in labeled.val_dataloader() for row in zip(batch["image"], batch["label"], strict=True)]
    place = {"h2": 0, "h3": 2}[features]
    with torch.no_grad():
        texts = pairs.encoder()([f"a {name}" for name in labeled.class_names])
        names = F.normalize(module.student.encode_text(**texts)[place])
        results = [(module.student.encode_image(image[None]), int(label)) for image, label in rows]
    by_text = [int((names @ found[place][0]).argmax()) == label for found, label in results]
    own = [int(found[2][0].argmax()) == label for found, label in results]
    assert len(rows) == 60
    assert float(trainer.callback_metrics["val/zero_shot_top1"]) == pytest.approx(100 * sum(by_text) / 60)
    assert float(trainer.callback_metrics["val/supervised_teacher_top1"]) == pytest.approx(100 * sum(own) / 60)


def test_a_scale_stays_in_its_bounds(tmp_path):
    module = tiny_shre(**WORDS, optim={"learning_rate": 10.0, "warmup_share": 0.0}, contrast={"max_logit_scale": 20.0})
    fit(module, tmp_path, limit_val_batches=0)
    for scale in module.scales.values():
        assert -1e-6 <= float(scale) <= math.log(20.0) + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("shared", "width", "steps", "rate"), [("mlp", 64, 300, 2e-3), ("transformer", 32, 200, 3e-3)])
def test_36_pairs_are_overfitted(tmp_path, shared, width, steps, rate):
    """Every contrast picks the pair, and both posteriors come near to the teacher's."""
    module = tiny_shre(vision={"width": width, "heads": 4}, shared=shared, **write_teacher(tmp_path, 40))
    module.setup("fit")
    with torch.no_grad():  # the posteriors of a random network are flat
        module.teacher.network.fc.weight.mul_(20)
    module.log = lambda *_, **__: None
    logged = {}
    module.log_dict = lambda values, **_: logged.update(values)
    batch = random_batch(36, dtype=torch.float32)
    batch["input_ids"][:, 1:3] = torch.cartesian_prod(torch.arange(104, 110), torch.arange(104, 110))
    batch["attention_mask"][:, :3] = 1
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    warmup = steps / 8
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / warmup) * max(0.1, 1 - step / steps)
    )
    starts = None
    for _ in range(steps):
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        starts = starts or {name: float(logged[f"train/kl_{name}"]) for name in ("image", "text")}
        optimizer.step()
        schedule.step()
    images, texts = encoded(module, batch)
    for name in module.scales:
        scores = F.normalize(images[name]) @ F.normalize(texts[name]).T
        assert (scores.argmax(0) == torch.arange(36)).all(), name
        assert (scores.argmax(1) == torch.arange(36)).all(), name
    # It stays above 0: the contrast of the logits separates all pairs, the teacher only those of different classes.
    for name, start in starts.items():
        assert start > 1
        assert float(logged[f"train/kl_{name}"]) < 0.1 * start


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl": {"weight": -1.0}}, "Expected kl.weight of at least 0, got -1.0"),
        ({"contrast": {"weight": 0.0}}, "Expected a loss, got 0 for kl.weight and contrast.weight"),
        ({"kl": {"image_share": 1.5}}, "Expected kl.image_share from 0 to 1, got 1.5"),
        ({"kl": {"temperature": 0.0}}, "Expected kl.temperature of more than 0, got 0.0"),
        ({"contrast": {"temperature": -0.1}}, "Expected contrast.temperature of more than 0, got -0.1"),
        ({"optim": {"warmup_share": 1.0}}, "Expected optim.warmup_share of at least 0 and less than 1, got 1.0"),
        ({"memory": {"micro_batch_size": 0}}, "Expected memory.micro_batch_size of at least 1, got 0"),
        ({"contrast": {"layers": ["h4"]}}, "results h2, h1, h3 in contrast.layers, got .*h4"),
        ({"contrast": {"layers": ["h1"]}, "shared": "transformer"}, "results h2, h3 in contrast.layers, got .*h1"),
        ({"contrast": {"layers": []}}, r"in contrast.layers, got \[\]"),
        ({"evaluation": {"features": "h1"}}, "Expected 'h2' or 'h3' as evaluation.features, got 'h1'"),
    ],
)
def test_invalid_settings_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        tiny_shre(**options)


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"weights": None}, r"Expected weights of the teacher resnet8, got none.*vlightning fit"),
        ({"weights": "runs/none"}, r"Expected a trained teacher in 'runs/none', got no file.*vlightning fit"),
        ({"weights": str(Path(__file__).with_suffix(".pyy"))}, r"got no file \(there is '.*test_module.py'\): correct"),
        (
            {"name": "resnet20", "weights": "runs/shre_quickstart_teacher"},
            r"`vlightning fit --config configs/shre/quickstart_teacher\.yaml`",
        ),
        (
            {"name": "timm/resnet50", "weights": "a1_in1k"},
            r"Expected weights of timm/resnet50 for 5 classes, got a1_in1k for 1000: set num_classes",
        ),
    ],
)
def test_missing_or_unsuitable_teacher_weights_are_refused(teacher, message, tmp_path):
    with pytest.raises(UserError, match=message):
        tiny_shre(tmp_path, teacher=teacher).setup("fit")


def test_a_teacher_of_other_classes_is_refused(tmp_path):
    with pytest.raises(UserError, match="got weights for 7"):
        tiny_shre(**write_teacher(tmp_path, 7) | {"num_classes": CLASSES}).setup("fit")


def test_captions_over_the_limit_are_refused():
    module = ready(tiny_shre())
    with pytest.raises(UserError, match="Expected captions of at most 8 tokens, got 9"):
        module.training_step(random_batch(length=9), 0)


def test_a_student_is_initialized_from_an_earlier_training(tmp_path):
    first = tiny_shre(**WORDS, seed=1)
    fit(first, tmp_path).save_checkpoint(tmp_path / "first.ckpt", weights_only=True)
    second = tiny_shre(**WORDS, seed=2, weights=str(tmp_path / "first.ckpt"))
    Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path).validate(
        second, data(), verbose=False
    )
    for name, tensor in first.student.state_dict().items():
        assert torch.equal(second.student.state_dict()[name], tensor), name
    missing = tiny_shre(**WORDS, weights=str(tmp_path / "none.ckpt"))
    with pytest.raises(UserError, match="Expected a checkpoint to start from"):
        fit(missing, tmp_path)


def test_classes_of_images_and_of_texts_are_predicted(tmp_path):
    module, names = tiny_shre(**WORDS), [f"class {number}" for number in range(CLASSES)]
    texts = ["a large red circle", "a small blue ring above a large cyan cross", "a black cross"]
    options = {"top_k": 2, "folder": str(tmp_path), "class_names": names}
    writers = [ClassPredictionWriter(**options), TextClassPredictionWriter(**options)]
    pairs = data(eval_length=5, predict_texts=texts)
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=writers)
    trainer.predict(module, pairs, return_predictions=False)
    encoded = pairs.encoder()(texts)
    with torch.no_grad():
        expected = {
            "text_predictions": module.classify_texts(**encoded).softmax(-1),
            "predictions": module.classify_images(
                torch.cat([batch["image"] for batch in pairs.predict_dataloader()[0]])
            ).softmax(-1),
        }
    for file, probabilities in expected.items():
        rows = pq.read_table(tmp_path / f"{file}.parquet").to_pylist()
        assert len(rows) == len(probabilities)
        for row, own in zip(rows, probabilities, strict=True):
            assert row["label"] == int(own.argmax())
            assert row["name"] == names[row["label"]]
            assert row["top_probabilities"] == pytest.approx(own.topk(2).values.tolist(), rel=1e-5)
    assert [row["text"] for row in pq.read_table(tmp_path / "text_predictions.parquet").to_pylist()] == texts


def test_defaults_are_those_of_the_thesis():
    with torch.device("meta"):
        module = SHReModule()
    assert sum(p.numel() for p in module.student.parameters() if p.requires_grad) == 114_983_656
    assert list(module.scales) == ["h2", "h1", "h3"]
    assert isinstance(module.teacher.network, nn.Identity)
