"""CoCoRD against the equations written out, and which parts train, average or stay fixed."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lightning import Trainer
from torch.utils.flop_counter import FlopCounterMode

from support.methods.cocord import CLASSES, HEADS, OFF, PAIRS, random_batch, teacher_file, tiny_cocord
from support.methods.groups import merged
from vlightning.callbacks import EMACallback, FeatureQueue
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapeClassesDataModule
from vlightning.lightning_modules import CoCoRDModule
from vlightning.lightning_modules.cocord import module as cocord_code
from vlightning.lightning_modules.cocord.network import ProjectionHead
from vlightning.lightning_modules.networks.classifiers import build_classifier

EQUAL_WIDTHS = [PAIRS[n] for n in (0, 2, 3, 4, 5, 6)]


def step(module, batch):
    """A training step without a Trainer; the losses by name."""
    logged = {}
    module.log = lambda name, value, **_: logged.update({name: value})
    module.log_dict = lambda values, **_: logged.update(values)
    outputs = module.training_step(batch, 0)
    return outputs, {n.removeprefix("train/loss_"): v for n, v in logged.items() if n.startswith("train/loss_")}


def plain_losses(module, batch, dictionary):
    """Every loss of the paper, from the module's networks, one view and one loss at a time."""

    def unit(x):
        return x / x.norm(dim=1, keepdim=True)

    networks = {name: copy.deepcopy(part) for name, part in module.named_children()}
    label = batch["label"]

    def slow(view):
        with torch.no_grad():
            return networks["slow_head"](networks["slow_student"].forward_features(batch[view]))

    def taught(view):
        with torch.no_grad():
            return networks["teacher_head"](networks["teacher"].network.eval().forward_features(batch[view]))

    encoders = {"teacher": taught, "slow_student": slow}
    losses = {}
    features = networks["student"].forward_features(batch["image"])
    logits = networks["student"].classify(features)
    losses["class"] = -logits.log_softmax(1)[range(len(label)), label].mean()
    query = networks["student_head"](features)
    key = encoders[module.contrast.encoder]("image_teacher")
    positive = (unit(query) * unit(key)).sum(1) / module.contrast.temperature
    negative = unit(query) @ dictionary.T / module.contrast.temperature
    losses["contrast"] = (torch.cat([positive[:, None], negative], 1).logsumexp(1) - positive).mean()
    cognate = encoders[module.prediction.encoder]
    first = 2 - 2 * (unit(networks["predictor"](query)) * unit(cognate("image_slow"))).sum(1)
    losses["prediction"] = first.mean()
    if module.prediction.symmetric:
        other = networks["student_head"](networks["student"].forward_features(batch["image_slow"]))
        # The target is the key of the student's view. (Eq. 7 has the same view on both sides.)
        second = 2 - 2 * (unit(networks["predictor"](other)) * unit(cognate("image"))).sum(1)
        losses["prediction"] = losses["prediction"] + second.mean()
    if module.kd.weight:
        temperature = module.kd.temperature
        with torch.no_grad():
            target = (networks["teacher"].network.eval()(batch["image"]) / temperature).softmax(1)
        log_ratio = target.log() - (logits / temperature).log_softmax(1)
        losses["kd"] = temperature**2 * (target * log_ratio).sum(1).mean()
    return losses, unit(key)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prediction": {"symmetric": False}, "contrast": {"temperature": 0.07}},
        {"kd": {"weight": 1.0}},
        {"contrast": {"encoder": "slow_student"}},
        {"contrast": {"encoder": "slow_student"}, "prediction": {"encoder": "teacher"}},
        {"prediction": {"encoder": "teacher"}, "kd": {"weight": 0.5}},
        {"teacher": {"name": "wrn_16_2"}},
    ],
    ids=str,
)
def test_the_step_computes_the_papers_loss(tmp_path, options):
    module = tiny_cocord(tmp_path, **options).double()
    generator = torch.Generator().manual_seed(9)
    for part in (module.slow_student, module.slow_head, module.teacher_head):
        for parameter in part.parameters() if part is not None else ():
            parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    keys = F.normalize(torch.randn(20, 16, generator=generator, dtype=torch.float64), dim=1)
    module.dictionary.enqueue(keys, torch.arange(20) % CLASSES)
    batch = random_batch(dtype=torch.float64)
    expected, key = plain_losses(module, batch, keys)
    outputs, found = step(module, batch)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name].detach(), rtol=1e-10, atol=1e-12)
    weights = {"contrast": 1.0, "prediction": 4.0, "class": 1.0, "kd": module.kd.weight}
    total = sum(weights[name] * value for name, value in expected.items())
    torch.testing.assert_close(outputs["loss"], total, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(outputs["keys"]["dictionary"], key)
    assert outputs["key_ids"]["dictionary"].tolist() == batch["label"].tolist()


@pytest.mark.parametrize(("name", "count"), [("head", 4_726_784), ("predictor", 2_100_736)])
def test_heads_have_the_sizes_of_the_authors_code(name, count):
    module = ProjectionHead(256) if name == "head" else ProjectionHead(2048, hidden=512)
    assert sum(parameter.numel() for parameter in module.parameters()) == count


def test_dictionary_takes_the_papers_bytes_and_wraps_around():
    module = CoCoRDModule("resnet8", CLASSES, teacher={"name": "resnet14"})
    features = module.dictionary.features
    assert features.numel() * features.element_size() == 16_777_216
    queue = FeatureQueue(2048, 3, ids=True)
    written = torch.arange(31 * 64 + 16 + 64)
    for rows in written.split([*[64] * 31, 16, 64]):
        queue.enqueue(rows[:, None].expand(-1, 3).float(), rows)
    assert int(queue.pointer) == (31 * 64 + 16 + 64) % 2048 == 16
    assert sorted(queue.ids.tolist()) == written[-2048:].tolist()
    assert queue.ids[:16].tolist() == written[-16:].tolist()


@pytest.mark.parametrize(("teacher", "student"), PAIRS, ids=["->".join(pair) for pair in PAIRS])
def test_the_teachers_head_moves_where_the_widths_are_equal(teacher, student):
    """The recipe of each pair takes its steps in `tests/guarantees/recipes/test_recipes.py`."""
    module = CoCoRDModule(student, CLASSES, teacher={"name": teacher}, **HEADS)
    assert module.averages_teacher_head == ((teacher, student) in EQUAL_WIDTHS)


def test_gradients_reach_what_trains_and_nothing_else(tmp_path):
    module = tiny_cocord(tmp_path, kd={"weight": 1.0})
    module.dictionary.enqueue(F.normalize(torch.randn(8, 16), dim=1), torch.zeros(8, dtype=torch.long))
    step(module, random_batch())[0]["loss"].backward()
    trained = {name.split(".")[0] for name, p in module.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained == {"student", "student_head", "predictor"}
    for name, parameter in module.named_parameters():
        assert (parameter.grad is not None) == (name.split(".")[0] in trained), name


def fit(module, tmp_path, steps=3, **options):
    data = ShapeClassesDataModule(length=64, eval_length=10, batch_size=8, image_size=16, seed=0)
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_steps": steps} | options
    trainer = Trainer(enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, **options)
    trainer.fit(module, data)
    return trainer


def shapes_module(tmp_path, **changes):
    arguments = merged(HEADS, {"contrast": {"queue_size": 32}, "teacher": {"name": "resnet14"}}, changes)
    teacher = arguments["teacher"]
    teacher["weights"] = teacher_file(tmp_path, teacher["name"], classes=40)
    torch.manual_seed(0)
    return CoCoRDModule("resnet8", 40, **arguments)


def test_teacher_stays_bit_for_bit_equal_in_training_and_validation(tmp_path):
    module = shapes_module(tmp_path, kd={"weight": 1.0})
    module.setup("fit")
    before = {name: value.clone() for name, value in module.teacher.network.state_dict().items()}
    fit(module, tmp_path, steps=16, max_epochs=2)
    after = module.teacher.network.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not any(part.training for part in module.teacher.modules())


def test_averages_start_as_copies_and_have_the_papers_momenta(tmp_path):
    module = shapes_module(tmp_path, optim={"weight_decay": 0.0})
    heads = [copy.deepcopy(module.student_head.state_dict())]
    for name in ("slow_head", "teacher_head"):
        for key, value in getattr(module, name).named_parameters():
            assert torch.equal(value, heads[0][key])
    start = copy.deepcopy(dict(module.slow_student.named_parameters()))
    fit(module, tmp_path, steps=1)
    for name, momentum in (("slow_head", 0.9), ("teacher_head", 0.999)):
        for key, value in getattr(module, name).named_parameters():
            trained = module.student_head.get_parameter(key)
            expected = momentum * heads[0][key].double() + (1 - momentum) * trained.double()
            torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-8)
    for key, value in module.slow_student.named_parameters():
        expected = 0.9 * start[key].double() + 0.1 * module.student.get_parameter(key).double()
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-8)
    assert any(not torch.equal(module.student_head.get_parameter(k), v) for k, v in heads[0].items() if "weight" in k)


def test_the_head_of_a_teacher_of_another_width_is_fixed(tmp_path):
    module = shapes_module(tmp_path, teacher={"name": "wrn_16_2"})
    assert module.teacher.network.feature_dim == 128
    before = copy.deepcopy(dict(module.teacher_head.named_parameters()))
    fit(module, tmp_path, steps=5)
    for key, value in module.teacher_head.named_parameters():
        assert torch.equal(value, before[key])


def test_averages_are_updated_once_per_optimizer_step(tmp_path):
    module = shapes_module(tmp_path)
    callback = EMACallback()
    fit(module, tmp_path, steps=2, accumulate_grad_batches=2, callbacks=[callback])
    assert callback.updates == {"slow_student": 2, "slow_head": 2, "teacher_head": 2}
    assert int(module.dictionary.filled) == 32  # four batches of eight


def test_keys_are_not_negatives_in_their_own_batch(tmp_path, monkeypatch):
    module = shapes_module(tmp_path)
    seen = []
    original = cocord_code.dictionary_loss

    def noted(query, key, dictionary, temperature):
        loss = original(query, key, dictionary, temperature)
        seen.append((int(dictionary.filled), float(loss)))
        return loss

    monkeypatch.setattr(cocord_code, "dictionary_loss", noted)
    fit(module, tmp_path, steps=2)
    assert seen[0] == (0, 0.0)  # no negatives
    assert seen[1][0] == 8
    assert seen[1][1] > 0


def test_untrained_contrast_is_near_the_logarithm_of_the_dictionary(tmp_path):
    module = tiny_cocord(tmp_path, contrast={"queue_size": 2048}, heads={"embed_dim": 2048, "hidden": 2048})
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _ in range(16):
            images = torch.randn(128, 3, 16, 16, generator=generator)
            keys = module.teacher_head(module.teacher.network.forward_features(images))
            module.dictionary.enqueue(F.normalize(keys, dim=1), torch.zeros(128, dtype=torch.long))
    _, losses = step(module, random_batch(64, image_size=16))
    assert float(losses["contrast"]) == pytest.approx(math.log(2049), abs=0.3)
    assert 0 < float(losses["prediction"]) < 8


def test_plain_training_builds_and_computes_the_student_only(tmp_path):
    module = tiny_cocord(**OFF)
    assert {name for name, _ in module.named_children()} == {"student", "evaluation"}
    assert module.views == ["image"]
    assert module.momentum_pairs() == {}
    assert module.queues() == {}
    batch = random_batch()
    network = copy.deepcopy(module.student)
    counts = []
    for run in (
        lambda: step(module, batch)[0]["loss"],
        lambda: F.cross_entropy(network(batch["image"]), batch["label"]),
    ):
        with FlopCounterMode(display=False) as counter:
            run().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


def test_plain_distillation_is_one_pass_of_teacher_and_student(tmp_path):
    module = tiny_cocord(tmp_path, **OFF, class_weight=0.1, kd={"weight": 0.9})
    assert {name for name, _ in module.named_children()} == {"student", "teacher", "evaluation"}
    assert module.views == ["image"]
    batch = random_batch()
    outputs, losses = step(module, batch)
    assert float(outputs["loss"].detach()) == pytest.approx(0.1 * float(losses["class"]) + 0.9 * float(losses["kd"]))
    teacher, student = module.teacher.network, copy.deepcopy(module.student)
    counts = []
    for run in (
        lambda: step(module, batch)[0]["loss"],
        lambda: student(batch["image"]).sum() + teacher(batch["image"]).detach().sum(),
    ):
        with FlopCounterMode(display=False) as counter:
            run().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, {"student": 2, "slow_student": 2, "teacher": 1}),
        ({"prediction": {"symmetric": False}}, {"student": 1, "slow_student": 1, "teacher": 1}),
        ({"prediction": {"weight": 0}}, {"student": 1, "teacher": 1}),
    ],
    ids=str,
)
def test_networks_run_as_often_as_the_losses_need(tmp_path, options, passes):
    module = tiny_cocord(tmp_path, **options)
    networks = {"student": module.student, "slow_student": module.slow_student, "teacher": module.teacher.network}
    found = {}
    for name, network in networks.items():
        if network is None:
            continue

        def count(image, name=name, run=network.forward_features):
            found[name] = found.get(name, 0) + len(image) // 8
            return run(image)

        network.forward_features = count
    step(module, random_batch(8))
    assert found == passes


def test_views_that_are_missing_are_named(tmp_path):
    module = tiny_cocord(tmp_path)
    batch = random_batch()
    del batch["image_teacher"]
    with pytest.raises(UserError, match=r"got no image_teacher: set data\.views to \['image', 'image_slow'"):
        step(module, batch)


def test_dictionary_smaller_than_a_batch_is_refused(tmp_path):
    module = tiny_cocord(tmp_path, contrast={"queue_size": 7})
    with pytest.raises(UserError, match="a queue of at least 8 keys, the global batch, got queue_size 7"):
        step(module, random_batch(8))


@pytest.mark.parametrize(
    ("student", "rate"),
    [("resnet8x4", 0.05), ("MobileNetV2", 0.01), ("ShuffleV1", 0.01), ("ShuffleV2", 0.01), ("vgg8", 0.05)],
)
def test_learning_rate_follows_the_benchmark(student, rate):
    module = tiny_cocord(student=student, **OFF)
    optimizer = module.configure_optimizers()["optimizer"]
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"], group["nesterov"]) == (rate, 0.9, 5e-4, False)
    schedule = module.paper_schedule()
    factors = [schedule.rate(epoch, 0) / rate for epoch in (0, 149, 150, 179, 180, 209, 210, 239)]
    assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_learning_rate_decays_after_the_milestones(tmp_path):
    module = shapes_module(tmp_path, optim={"lr_milestones": [1, 2]})
    rates = []
    step_of = module.training_step
    module.training_step = lambda *args: rates.append(module.optimizers().param_groups[0]["lr"]) or step_of(*args)
    fit(module, tmp_path, steps=-1, max_epochs=3, limit_train_batches=2)
    assert rates == pytest.approx([0.05, 0.05, 0.005, 0.005, 0.0005, 0.0005])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"teacher": {"name": None}}, "Expected a teacher for the losses that learn from one, got none"),
        ({"kd": {"weight": -1}}, "Expected kd.weight of at least 0, got -1"),
        ({"class_weight": 0, **OFF}, "Expected a loss, got 0 for class_weight, kd.weight"),
        ({"student": "resnet21"}, "Expected a CIFAR network or .*got 'resnet21': did you mean 'resnet"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        tiny_cocord(**changes)


def test_the_error_for_a_missing_teacher_names_the_command(tmp_path):
    weights = "runs/cocord_quickstart_teacher"
    module = tiny_cocord(teacher={"name": "resnet20", "weights": weights})
    with pytest.raises(UserError, match=r"vlightning fit --config configs/cocord/quickstart_teacher\.yaml"):
        module.setup("fit")
    module.setup("test")  # needs no teacher
    module = tiny_cocord(teacher={"name": "vgg13", "weights": str(tmp_path / "vgg13.pth")})
    with pytest.raises(UserError, match=r"--config configs/cocord/teacher_vgg13\.yaml"):
        module.setup("fit")


def test_teacher_of_another_network_or_class_count_is_refused(tmp_path):
    for weights, sentence in (
        (teacher_file(tmp_path, "resnet20"), "those of resnet20"),
        (teacher_file(tmp_path, "resnet14", classes=7), "got weights for 7"),
    ):
        with pytest.raises(UserError, match=sentence):
            tiny_cocord(teacher={"weights": weights}).setup("fit")


def test_folder_of_a_run_gives_its_newest_last_checkpoint(tmp_path):
    plain = tiny_cocord(student="resnet14", **OFF)
    for version, bias in ((0, 1.0), (1, 2.0)):
        plain.student.fc.bias.data.fill_(bias)
        folder = tmp_path / "run" / f"version_{version}" / "checkpoints"
        folder.mkdir(parents=True)
        torch.save({"state_dict": plain.state_dict(), "hyper_parameters": {}}, folder / "last.ckpt")
    module = tiny_cocord(teacher={"weights": str(tmp_path / "run")})
    module.setup("fit")
    assert module.teacher.network.fc.bias.unique().tolist() == [2.0]


def test_class_counts_that_differ_are_refused(tmp_path):
    with pytest.raises(UserError, match="as many classes in the data as in the model, 5, got 40"):
        fit(tiny_cocord(tmp_path), tmp_path)


def test_checkpoint_names_its_teacher_and_refuses_another(tmp_path):
    module = shapes_module(tmp_path)
    trainer = fit(module, tmp_path, steps=2, enable_checkpointing=True)
    path = tmp_path / "run.ckpt"
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    assert content["teacher"]["name"] == "resnet14"
    assert len(content["teacher"]["sha256"]) == 64
    assert not any(name.startswith("teacher.") for name in content["state_dict"])
    assert any(name.startswith("teacher_head.") for name in content["state_dict"])

    again = CoCoRDModule.load_from_checkpoint(path)  # strict, without the teacher's file
    assert torch.equal(again.student.fc.weight, module.student.fc.weight)

    other = shapes_module(tmp_path)
    other.teacher_settings = replace(other.teacher_settings, weights=teacher_file(tmp_path, "resnet14", 40, seed=2))
    data = ShapeClassesDataModule(length=64, eval_length=10, batch_size=8, image_size=16, seed=0)
    resumed = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=4, enable_progress_bar=False
    )
    with pytest.raises(UserError, match=r"teacher that the checkpoint .*, resnet14 of .*give that one"):
        resumed.fit(other, data, ckpt_path=path)


def test_accuracies_are_those_counted_by_hand(tmp_path):
    module = shapes_module(tmp_path)
    data = ShapeClassesDataModule(length=64, eval_length=30, eval_batch_size=8, image_size=16, seed=0)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    (found,) = trainer.test(module, data, verbose=False)
    module.eval()
    batches = list(data.test_dataloader())
    logits = module(torch.cat([batch["image"] for batch in batches]))
    label = torch.cat([batch["label"] for batch in batches])
    ranked = logits.argsort(1, descending=True) == label[:, None]
    assert found["test/top1"] == pytest.approx(100 * ranked[:, 0].float().mean().item(), abs=1e-4)
    assert found["test/top5"] == pytest.approx(100 * ranked[:, :5].any(1).float().mean().item(), abs=1e-4)
    assert found["test/loss"] == pytest.approx(F.cross_entropy(logits, label).item(), rel=1e-5)


def test_student_weights_are_evaluated_and_trained_from(tmp_path):
    weights = teacher_file(tmp_path, "resnet8", classes=40)
    module = shapes_module(tmp_path, weights=weights)
    expected = torch.load(weights, weights_only=True)["model"]
    module.load_initial_weights()
    assert all(torch.equal(module.student.state_dict()[name], value) for name, value in expected.items())
    assert all(torch.equal(module.slow_student.state_dict()[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("torchvision/resnet18", 512),
        ("resnet34", 512),
        ("timm/resnet10t", 512),
        ("mobilenet_v2", 1280),
        ("torchvision/regnet_x_400mf", 400),
        ("timm/resnetv2_18", 512),  # its last layer is a convolution
        ("timm/vit_tiny_patch16_224", 192),
        ("googlenet", 1024),  # without its auxiliary heads
    ],
)
def test_library_networks_return_their_features(name, width):
    network = build_classifier(name, 7).eval()
    image = torch.randn(2, 3, *(2 * [224 if "vit" in name else 64]))
    features = network.forward_features(image)
    assert features.shape == (2, width) == (2, network.feature_dim)
    torch.testing.assert_close(network.classify(features), network(image))
    torch.testing.assert_close(network.network(image), network(image))
    assert network(image).shape == (2, 7)


def test_a_network_of_a_library_resizes_its_images():
    plain = build_classifier("timm/resnet10t", 7).eval()
    resizing = build_classifier("timm/resnet10t", 7, resize_to=48).eval()
    resizing.load_state_dict(plain.state_dict())
    image = torch.randn(2, 3, 16, 16)
    larger = torch.nn.functional.interpolate(image, (48, 48), mode="bilinear", antialias=True)
    torch.testing.assert_close(resizing(image), plain(larger))
    assert not torch.allclose(resizing(image), plain(image))
    vit = build_classifier("timm/vit_tiny_patch16_224", 7, resize_to=224)
    assert vit.image_size is None
    assert vit(image).shape == (2, 7)
    with pytest.raises(UserError, match="set it to 224"):
        build_classifier("timm/vit_tiny_patch16_224", 7, resize_to=48)
    with pytest.raises(UserError, match="leave the setting out"):
        build_classifier("resnet8", 7, resize_to=48)


TWO_HEADS_OR_NONE = [("timm/levit_128", "head_dist.linear"), ("squeezenet1_1", "SqueezeNet, got 0")]


@pytest.mark.parametrize(("name", "found"), TWO_HEADS_OR_NONE)
def test_library_networks_without_one_last_layer_are_refused(name, found):
    with pytest.raises(UserError, match=f"{found}.*use another network"):
        build_classifier(name, 7)


def test_a_student_of_a_library_starts_from_a_checkpoint_of_this_package(tmp_path):
    plain = {"student": "torchvision/resnet18", **OFF}
    trained = tiny_cocord(**plain)
    trained.student.network.fc.bias.data.fill_(3.0)
    torch.save({"state_dict": trained.state_dict(), "hyper_parameters": {}}, tmp_path / "last.ckpt")
    module = tiny_cocord(weights=str(tmp_path / "last.ckpt"), **plain)
    module.load_initial_weights()
    assert module.student.network.fc.bias.unique().tolist() == [3.0]
