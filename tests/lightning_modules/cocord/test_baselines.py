"""CRD, attention transfer and FitNet's hint against sums written out, and where their state is."""

import copy
import math

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from support.methods.cocord import CLASSES, OFF, PAIRS, random_batch, teacher_file, tiny_cocord
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapeClassesDataModule
from vlightning.lightning_modules import CoCoRDModule
from vlightning.lightning_modules.cocord import baselines
from vlightning.lightning_modules.cocord import crd as crd_code
from vlightning.lightning_modules.cocord.baselines import Hint, attention_loss
from vlightning.lightning_modules.cocord.crd import CRD, draw_negatives, nce_loss
from vlightning.lightning_modules.cocord.export import export
from vlightning.lightning_modules.networks.classifiers import build_classifier, public_network

LABELS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
INDEX, LABEL = torch.tensor([3, 1, 5]), torch.tensor([0, 1, 2])
TEMPERATURE = 0.07


def rows(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tiny_crd(negatives=4):
    torch.manual_seed(0)
    loss = CRD(6, 5, negatives, TEMPERATURE, embed_dim=3)
    loss.start(LABELS)
    return loss.double()


def unit(vector):
    return [float(value) / math.sqrt(sum(float(other) ** 2 for other in vector)) for value in vector]


def plain_scores(embeddings, bank, negatives):
    """exp(e . b / T) of the positive and of each negative, one at a time."""
    return [
        [
            math.exp(sum(a * float(b) for a, b in zip(embedding, bank[entry], strict=True)) / TEMPERATURE)
            for entry in [int(own), *drawn.tolist()]
        ]
        for embedding, own, drawn in zip(embeddings, INDEX, negatives, strict=True)
    ]


def plain_nce(scores, scale, images):
    """The loss by the posterior of each pair, h = p / (p + K / N + 1e-7)."""
    total = 0.0
    for positive, *drawn in scores:
        noise = len(drawn) / images
        total -= math.log(positive / scale / (positive / scale + noise + 1e-7))
        total -= sum(math.log(noise / (score / scale + noise + 1e-7)) for score in drawn)
    return total / len(scores)


def test_crd_is_the_sum_of_both_directions_with_the_normalizers_of_the_first_batch(monkeypatch):
    loss = tiny_crd()
    negatives = torch.tensor([[1, 2, 4, 8], [0, 2, 6, 9], [0, 1, 3, 7]])
    monkeypatch.setattr(crd_code, "draw_negatives", lambda *_: negatives)
    first = None
    for batch in range(2):
        student, teacher = rows(3, 6, seed=batch), rows(3, 5, seed=9 + batch)
        own = [unit(row) for row in loss.student_embedding(student).detach()]
        other = [unit(row) for row in loss.teacher_embedding(teacher).detach()]
        banks = loss.student_bank.clone(), loss.teacher_bank.clone()
        scores = plain_scores(own, banks[1], negatives), plain_scores(other, banks[0], negatives)
        means = [sum(map(sum, part)) / (3 * 5) for part in scores]
        first = first or [10 * mean for mean in means]
        expected = sum(plain_nce(part, scale, 10) for part, scale in zip(scores, first, strict=True))
        found = loss(student, teacher, INDEX, LABEL)
        assert float(found.detach()) == pytest.approx(expected, rel=1e-10)
        assert loss.scales.tolist() == pytest.approx(first, rel=1e-6)  # a buffer of float32 before `double`
        assert torch.equal(loss.student_bank, banks[0])  # the backward pass reads it
        loss.update()
        for bank, before, embeddings in zip((loss.student_bank, loss.teacher_bank), banks, (own, other), strict=True):
            moved = dict(zip(INDEX.tolist(), embeddings, strict=True))
            for entry in range(10):
                start = before[entry].tolist()
                mean = [0.5 * a + 0.5 * b for a, b in zip(start, moved.get(entry, start), strict=True)]
                assert bank[entry].tolist() == pytest.approx(unit(mean) if entry in moved else start, rel=1e-10)


def test_the_gradient_of_crd_is_that_of_the_posterior():
    scores = rows(3, 5).requires_grad_()
    nce_loss((scores / TEMPERATURE).exp(), 10).backward()
    probability = (scores.detach() / TEMPERATURE).exp()
    posterior = probability / (probability + 4 / 10)
    expected = posterior / TEMPERATURE / 3
    expected[:, 0] = -(1 - posterior[:, 0]) / TEMPERATURE / 3
    torch.testing.assert_close(scores.grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("count", "replacement"), [(6, False), (50, True)])
def test_negatives_are_all_images_of_other_classes_with_equal_probability(count, replacement):
    labels = torch.tensor([*LABELS, -1])
    torch.manual_seed(0)
    drawn = draw_negatives(labels, LABEL.repeat(200), count, replacement)
    assert drawn.shape == (600, count)
    for number, label in enumerate(LABEL.tolist()):
        others = [index for index, other in enumerate(LABELS) if other != label]
        counts = drawn[number::3].flatten().bincount(minlength=11)
        assert counts.nonzero().flatten().tolist() == others
        share = counts[others] / counts.sum()
        assert float((share - 1 / len(others)).abs().max()) < 0.02
    if not replacement:
        assert all(len(set(row)) == count for row in drawn.tolist())


def test_crd_draws_with_replacement_only_where_a_class_has_too_few_others():
    assert not tiny_crd(negatives=6).replacement
    assert tiny_crd(negatives=7).replacement


def test_banks_start_uniform_and_have_the_papers_size():
    loss = CRD(64, 64)
    loss.start([0, 1] * 2000)
    bound = math.sqrt(3 / 128)
    for bank in (loss.student_bank, loss.teacher_bank):
        assert bank.shape == (4000, 128)
        assert bound * 0.999 < float(bank.max()) <= bound
        assert -bound <= float(bank.min()) < -bound * 0.999
        assert float(bank.std()) == pytest.approx(math.sqrt(1 / 128), rel=0.01)
    # Table 12 of CoCoRD's paper: 51.20 MB for the 50,000 images of CIFAR-100.
    assert 2 * 50_000 * bank[0].numel() * bank.element_size() == 51_200_000


def test_non_finite_embeddings_are_not_written():
    loss = tiny_crd()
    student = rows(3, 6)
    student[1] = torch.nan
    before = loss.student_bank.clone()
    loss(student, rows(3, 5), INDEX, LABEL)
    loss.update()
    assert float(loss.scales[0]) == -1  # still unknown
    assert float(loss.scales[1]) > 0
    assert torch.equal(loss.student_bank[1], before[1])
    assert not torch.equal(loss.student_bank[3], before[3])
    assert loss.student_bank.isfinite().all()


def test_attention_is_the_difference_of_unit_energy_maps():
    student = [rows(2, 4, 6, 6), rows(2, 3, 2, 2, seed=1)]
    teacher = [rows(2, 5, 3, 3, seed=2), rows(2, 3, 2, 2, seed=3)]

    def energy(maps, image, side):
        step = maps.shape[-1] // side
        squares = []
        for y in range(side):
            for x in range(side):
                window = maps[image, :, step * y : step * (y + 1), step * x : step * (x + 1)]
                means = [float(channel.sum()) / step**2 for channel in window]  # pooled before the square
                squares.append(sum(mean**2 for mean in means) / len(means))
        return unit(squares)

    expected = 0.0
    for own, other, side in zip(student, teacher, (3, 2), strict=True):
        for image in range(2):
            pairs = zip(energy(own, image, side), energy(other, image, side), strict=True)
            expected += sum((a - b) ** 2 for a, b in pairs) / side**2 / 2
    assert float(attention_loss(student, teacher)) == pytest.approx(expected, rel=1e-10)
    assert float(attention_loss(student, [3 * maps for maps in student])) == pytest.approx(0, abs=1e-12)


# Channels and sides of the benchmark's feature maps at 32 pixels, without the stem's.
MAPS = {
    "resnet20": [(16, 32), (32, 16), (64, 8)],
    "resnet8x4": [(64, 32), (128, 16), (256, 8)],
    "wrn_16_2": [(32, 32), (64, 16), (128, 8)],
    "vgg8": [(128, 16), (256, 8), (512, 4), (512, 4)],
    "MobileNetV2": [(12, 16), (16, 8), (48, 4), (160, 2)],
    "ShuffleV1": [(240, 16), (480, 8), (960, 4)],
    "ShuffleV2": [(116, 16), (232, 8), (464, 4)],
    "ResNet50": [(256, 32), (512, 16), (1024, 8), (2048, 4)],
    "torchvision/resnet18": [(64, 8), (128, 4), (256, 2), (512, 1)],
    "timm/vit_tiny_patch16_224": [],
}


@pytest.mark.parametrize("name", MAPS)
def test_stages_have_the_benchmarks_shapes_and_leave_the_features_unchanged(name):
    network = build_classifier(name, CLASSES).eval()
    image = torch.randn(2, 3, network.image_size or 32, network.image_size or 32)
    with torch.no_grad():
        maps, features = network.forward_stages(image)
        assert torch.equal(features, network.forward_features(image))
        assert network.forward_stages(image, maps=False).maps == []
    assert [(part.shape[1], part.shape[2]) for part in maps] == MAPS[name]


@pytest.mark.parametrize(
    ("student", "teacher", "kind", "size"),
    [
        ("resnet8", "resnet14", torch.nn.Conv2d, (1, 1)),
        ("resnet8", "vgg8", torch.nn.Conv2d, (3, 3)),
        ("MobileNetV2", "resnet14", torch.nn.ConvTranspose2d, (4, 4)),
    ],
)
def test_the_hint_is_the_squared_error_of_the_regressed_map(student, teacher, kind, size):
    networks = [build_classifier(name, CLASSES) for name in (student, teacher)]
    loss = Hint(*networks).double()
    networks = [network.double() for network in networks]
    assert all(network.training for network in networks)
    assert isinstance(loss.regressor[0], kind)
    assert loss.regressor[0].kernel_size == size
    image = random_batch(4, dtype=torch.float64)["image"]
    own, other = (network.forward_stages(image).maps[1].detach() for network in networks)
    found = loss(own, other)
    plain = loss.regressor[0](own)
    mean = plain.mean((0, 2, 3), keepdim=True)
    normed = (plain - mean) / (plain.var((0, 2, 3), keepdim=True, unbiased=False) + 1e-5).sqrt()
    assert float(found.detach()) == pytest.approx(float((normed.clamp(min=0) - other).pow(2).mean()), rel=1e-10)


@pytest.mark.parametrize(("teacher", "student"), PAIRS, ids=["->".join(pair) for pair in PAIRS])
def test_every_pair_of_the_paper_fits_the_baselines(teacher, student):
    weights = {"crd_weight": 0.8, "attention_weight": 1000, "hint_weight": 100}
    module = CoCoRDModule(student, CLASSES, teacher={"name": teacher}, kd=weights, **OFF)
    assert {name for name, _ in module.named_children()} == {"student", "teacher", "baselines", "evaluation"}
    assert {name for name, _ in module.baselines.named_children()} == {"crd", "hint"}
    assert module.views == ["image"]


def steps(module, folder, resume=None, **options):
    options = {"max_steps": 3, "logger": False, "enable_checkpointing": False, "default_root_dir": folder} | options
    trainer = Trainer(accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, **options)
    data = ShapeClassesDataModule(length=48, eval_length=10, batch_size=8, image_size=16, num_workers=0, seed=0)
    trainer.fit(module, data, ckpt_path=resume)
    return trainer


def taught(folder, **kd):
    torch.manual_seed(0)
    teacher = {"name": "resnet14", "weights": teacher_file(folder, classes=40)}
    return CoCoRDModule("resnet8", 40, teacher=teacher, kd=kd, **OFF)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_every_baseline_trains_with_its_weight_and_is_left_out_of_the_export(tmp_path, precision):
    module = taught(tmp_path, crd_weight=0.8, crd_negatives=8, attention_weight=1000, hint_weight=100)
    trainer = steps(module, tmp_path, precision=precision)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    total = logged["train/loss_class"] + 0.8 * logged["train/loss_crd"]
    total += 1000 * logged["train/loss_attention"] + 100 * logged["train/loss_hint"]
    assert logged["train/loss"] == pytest.approx(total, rel=1e-5)
    for name, parameter in module.baselines.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any() or name == "hint.regressor.0.bias", name  # that BatchNorm removes
    written = module.baselines.crd.student_bank.norm(dim=1)
    assert int((written - 1).abs().lt(1e-5).sum()) == 24  # three batches
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert len(content["state_dict"]["baselines.crd.student_bank"]) == 48
    export(content, "the checkpoint", str(tmp_path / "student.pth"), "student")
    exported = torch.load(tmp_path / "student.pth", weights_only=True)["model"]
    assert list(exported) == list(public_network(module.student).state_dict())
    # Without data the banks have the checkpoint's size; the labels come from the data.
    loaded = CoCoRDModule.load_from_checkpoint(tmp_path / "last.ckpt")
    assert torch.equal(loaded.baselines.crd.teacher_bank, module.baselines.crd.teacher_bank)
    other = copy.deepcopy(loaded)
    other.baselines.crd = CRD(64, 64, 8)
    other.baselines.crd.start([0, 1, 2])
    with pytest.raises(UserError, match="banks of 3 training images in the checkpoint, got 48: train with the data of"):
        other.load_state_dict(content["state_dict"])
    with pytest.raises(UserError, match="banks of 3 training images in the checkpoint, got 48: train with the data of"):
        loaded.baselines.crd.start([0, 1, 2])


def test_a_run_of_crd_resumes_with_its_banks_and_draws(tmp_path):
    kd = {"crd_weight": 0.8, "crd_negatives": 8, "hint_weight": 1.0}
    kept = ModelCheckpoint(tmp_path / "run", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    whole = taught(tmp_path, **kd)
    steps(whole, tmp_path, max_steps=6, enable_checkpointing=True, callbacks=[kept])
    found = taught(tmp_path, **kd)
    torch.manual_seed(7)
    steps(found, tmp_path, max_steps=6, resume=tmp_path / "run" / "step=2.ckpt")
    expected = whole.state_dict()
    assert {"baselines.crd.student_bank", "baselines.crd.scales"} <= expected.keys()
    for name, value in found.state_dict().items():
        assert torch.equal(value, expected[name]), name


REFUSED = [
    (lambda: CRD(4, 4).start([2, 2, -1]), r"at least two classes for kd\.crd_weight, got one"),
    (
        lambda: tiny_cocord(kd={"hint_weight": 1.0}, class_weight=0.0),
        r"which train earlier layers, got class_weight 0 and kd\.weight 0: raise class_weight",
    ),
    (
        lambda: tiny_cocord(kd={"attention_weight": 1.0}, teacher={"name": "vgg8"}),
        "equally many stages of student and teacher .* got 3 and 4: use CIFAR networks",
    ),
    (
        lambda: Hint(build_classifier("resnet8", 2), build_classifier("torchvision/resnet18", 2)),
        "one of twice the other's, .* got 16 and 4 positions a side: use another student or teacher",
    ),
    (
        lambda: tiny_cocord(teacher={"name": None}, kd={"crd_weight": 1.0}, **OFF),
        "a teacher for the losses that learn from one, got none",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_fit_a_baseline_is_named(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_crd_needs_the_labels_of_all_training_images_and_whole_banks(tmp_path, monkeypatch):
    module = taught(tmp_path, crd_weight=0.8)
    with pytest.raises(UserError, match=r"labels of its training images for kd\.crd_weight, got none: use Image"):
        module.setup("fit")
    monkeypatch.setattr(baselines, "restores_after_setup", lambda module: True)
    with pytest.raises(UserError, match=r"one process or DDP for kd\.crd_weight, .* got a strategy that shards: set"):
        module.setup("fit")
