"""The classifier's tower, its initial weights, its recipe, and its runs."""

import logging
import math
from pathlib import Path
from types import SimpleNamespace

import datasets
import open_clip
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from lightning.pytorch import Callback
from open_clip.model import resize_pos_embed

from support.data.images import draw_image, encoded
from support.methods.classifier import CLASSES, TOWER, descendant, random_batch, shape_classes, tiny_classifier
from support.methods.groups import command_line, in_groups
from support.methods.learngene import SIZE, auxiliary, learngene, random_images
from support.methods.mmlg import tiny_extraction
from support.methods.tiny_modules import trainer
from support.runs.command_line import run
from support.runs.distributed import run_ddp_fit, run_distributed, run_sharded_fit, whole_state
from vlightning.callbacks import LearngeneExpansionCallback, rank
from vlightning.callbacks.learngene.file import save_learngene
from vlightning.common.errors import UserError
from vlightning.lightning_modules import MMLGImageClassifierModule

ROOT = Path(__file__).resolve().parents[3]


class Start(Callback):
    """The state that training starts from."""

    def on_train_start(self, trainer, module):
        self.state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def fit(module, *callbacks, ckpt_path=None, data=None, **options):
    fitted = trainer(*callbacks, **{"limit_val_batches": 0, **options})
    fitted.fit(module, data or shape_classes(), ckpt_path=ckpt_path)
    return fitted


def started(module, *callbacks, **options):
    """A module with the tower that its training starts from."""
    start = Start()
    fit(module, *callbacks, start, max_steps=1, **options)
    module.load_state_dict(start.state)
    return module.eval()


def class_token(visual, image):
    """Return a CLIP's features of an image before the projection."""
    found = []
    handle = visual.ln_post.register_forward_hook(lambda _, __, output: found.append(output[:, 0]))
    visual(image)
    handle.remove()
    return found[0]


@pytest.mark.parametrize("layers", [6, 8])
@torch.no_grad()
def test_features_are_those_of_the_clip_before_its_projection(tmp_path, layers):
    network = descendant(tmp_path / "a.ckpt", layers).double()
    module = tiny_classifier(depth=layers, weights=str(tmp_path / "a.ckpt"))
    module.load_initial_weights()
    module.double().eval()
    features = module.tower(random_images())
    torch.testing.assert_close(features, class_token(network.visual, random_images()), rtol=0, atol=1e-6)
    torch.testing.assert_close(features @ network.visual.proj, network.encode_image(random_images()), rtol=0, atol=1e-6)
    torch.testing.assert_close(module(random_images()), features @ module.head.weight.T + module.head.bias)


@pytest.mark.parametrize("layers", [12, 7])
def test_the_tower_is_initialized_from_a_learngene(tmp_path, layers):
    save_learngene(learngene(), tmp_path / "l.safetensors")
    callback = LearngeneExpansionCallback(str(tmp_path / "l.safetensors"), "tower")
    module = started(tiny_classifier(depth=layers), callback)
    trained = auxiliary()
    with torch.no_grad():
        found = module.double().tower(random_images()) @ trained.double().vision.proj
        expected = trained.encode_image(random_images())
    assert torch.allclose(found, expected, rtol=0, atol=1e-5) == (layers == 12)  # which is the auxiliary itself
    assert torch.equal(module.tower.conv1.weight, trained.vision.conv1.weight)


def test_the_papers_tower_has_the_papers_number_of_parameters():
    with torch.device("meta"):
        for layers, vision in ((6, 11_166_720), (8, 14_715_648), (12, 21_813_504)):
            module = MMLGImageClassifierModule(vision={"depth": layers})
            projection, head = 384 * 384, 384 * 100 + 100
            assert sum(parameter.numel() for parameter in module.parameters()) == vision - projection + head
        config = open_clip.get_model_config("ViT-S-16")["vision_cfg"]
        visual = open_clip.CLIP(384, config, open_clip.get_model_config("ViT-S-16")["text_cfg"]).visual
    visual.proj = None
    assert str(module.tower).replace("SelfAttention(", "MultiheadAttention(") == str(
        visual
    )  # sizes, kinds of layers, epsilons
    assert {name: t.shape for name, t in module.tower.state_dict().items()} == {
        name: t.shape for name, t in visual.state_dict().items()
    }
    assert module.tower.transformer.resblocks[0].attn.num_heads == visual.transformer.resblocks[0].attn.num_heads


def test_an_earlier_run_initializes_the_tower_and_the_head_is_new(tmp_path):
    first = tiny_classifier()
    fit(first, max_steps=2).save_checkpoint(tmp_path / "a.ckpt")
    module = started(tiny_classifier(seed=1, num_classes=7, weights=str(tmp_path / "a.ckpt")), data=rows())
    for name, tensor in first.tower.state_dict().items():
        assert torch.equal(module.tower.state_dict()[name], tensor), name
    assert module.head.weight.shape == (7, 16)


def rows():
    """A loader of seven classes, without a datamodule."""
    batch = random_batch(16, torch.float32)
    listed = [{name: column[row] for name, column in batch.items()} for row in range(16)]
    return torch.utils.data.DataLoader([row | {"label": row["label"] % 7} for row in listed], batch_size=8)


def test_positions_of_another_image_size_are_resampled_as_in_open_clip_and_logged(tmp_path, caplog):
    network = descendant(tmp_path / "a.ckpt")
    module = tiny_classifier(image_size=2 * SIZE, weights=str(tmp_path / "a.ckpt"))
    expected = {"visual.positional_embedding": network.visual.positional_embedding.detach().clone()}
    resize_pos_embed(expected, SimpleNamespace(visual=module.tower))
    with caplog.at_level(logging.INFO):
        module.load_initial_weights()
    assert "with positions resampled from 2x2 to 4x4 patches" in caplog.text
    torch.testing.assert_close(module.tower.positional_embedding, expected["visual.positional_embedding"])
    assert len(module.tower.positional_embedding) == 17
    assert torch.equal(module.tower.conv1.weight, network.visual.conv1.weight)


def write(path, **content):
    torch.save(content, path)


def test_misfitting_weights_are_refused(tmp_path):
    def load(name="a.ckpt", **options):
        tiny_classifier(weights=str(tmp_path / name), **options).load_initial_weights()

    with pytest.raises(UserError, match=r"found none at '.*gone': correct model.weights"):
        load("gone")
    descendant(tmp_path / "a.ckpt", 8)
    with pytest.raises(
        UserError, match=r"Expected the tensors of the vision tower from '.*', got missing nothing, unknown"
    ):
        load()
    with pytest.raises(UserError, match=r"missing transformer.resblocks.8.attn.in_proj_bias, .* and 9 more"):
        load(depth=9)
    with pytest.raises(UserError, match=r"class_embedding \(16,\) instead of \(32,\)"):
        load(depth=8, width=32)
    with pytest.raises(UserError, match=r"Expected a tower with 4 heads in '.*a.ckpt', got 2: set model.vision.heads"):
        load(depth=8, heads=4)
    write(tmp_path / "a.ckpt", state_dict=tiny_extraction(None).state_dict())
    with pytest.raises(UserError, match=r"Expected the training of a descendant in '.*', got an extraction"):
        load()
    write(tmp_path / "a.ckpt", state_dict={"student.text.weight": torch.zeros(1)})
    with pytest.raises(UserError, match="got no vision tower of open_clip's in"):
        load()
    (tmp_path / "a.ckpt").write_text("no checkpoint")
    with pytest.raises(RuntimeError, match="Expected a readable checkpoint"):
        load()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "Expected a width that 3 heads divide, got 16"),
        ({"image_size": 20}, "Expected an image size that patches of 8 pixels divide, got 20"),
    ],
)
def test_inconsistent_sizes_are_refused_with_one_sentence(options, message):
    with pytest.raises(UserError, match=message):
        tiny_classifier(**options)


def test_two_sources_of_weights_or_other_classes_are_refused(tmp_path):
    descendant(tmp_path / "a.ckpt")
    callback = LearngeneExpansionCallback("l.safetensors", "tower")
    with pytest.raises(UserError, match=r"got weights '.*a.ckpt' beside a LearngeneExpansionCallback"):
        fit(tiny_classifier(weights=str(tmp_path / "a.ckpt")), callback)
    with pytest.raises(UserError, match=r"as in the model, 7, got 40: set model\.num_classes"):
        fit(tiny_classifier(num_classes=7))


def test_a_resumed_run_does_not_need_the_initial_weights(tmp_path):
    descendant(tmp_path / "a.ckpt")
    first = tiny_classifier(weights=str(tmp_path / "a.ckpt"))
    fit(first, max_epochs=1).save_checkpoint(tmp_path / "b.ckpt")
    for weights in (str(tmp_path / "a.ckpt"), str(tmp_path / "gone")):
        start = Start()
        fit(tiny_classifier(1, weights=weights), start, max_epochs=2, ckpt_path=tmp_path / "b.ckpt")
        for name, tensor in first.state_dict().items():
            assert torch.equal(start.state[name], tensor), name


def test_weight_decay_spares_what_has_fewer_than_two_dimensions():
    module = tiny_classifier()
    module._trainer = None
    optimizer = module.configure_optimizers()["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW)
    decayed, spared = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert decayed == {id(p) for p in module.parameters() if p.dim() > 1}
    assert spared == {id(p) for p in module.parameters() if p.dim() < 2}
    assert len(spared) == 1 + 4 + 6 * 8 + 1  # class embedding, outer norms, layers, head
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.9, 0.98), 1e-6)


@pytest.mark.parametrize(("warmup", "used"), [(5000, 5000), (0, 0), (97_500, 9_750)])
def test_the_schedule_is_linear_then_a_cosine_to_zero(warmup, used):
    schedule, total = tiny_classifier(warmup_steps=warmup).paper_schedule(), 97_500  # 50,000 images in batches of 256
    for step in (1, 100, used - 1, used, 40_000, 97_499):
        if 0 < step < used:
            assert schedule.rate(step, total) == pytest.approx(1e-4 * (step + 1) / used)
        elif step > 0:
            share = (step - used) / (97_500 - used)
            assert schedule.rate(step, total) == pytest.approx(5e-5 * (1 + math.cos(math.pi * share)))
    assert schedule.rate(0, 2**62) == pytest.approx(1e-4 / max(warmup, 1))
    assert schedule.rate(total, total) == 0


def test_a_warm_up_longer_than_the_run_is_cut_with_a_warning():
    with pytest.warns(
        UserWarning, match="warmup_steps is 5000, but the run has 4 optimizer steps: the warm-up takes 0"
    ):
        fit(tiny_classifier(warmup_steps=5000))


def test_a_step_is_the_cross_entropy_of_the_labels_and_everything_trains():
    module, batch = tiny_classifier().double(), random_batch()
    module.log = lambda *_, **__: None
    loss = module.training_step(batch, 0)
    scores = class_token(module.tower, batch["image"]) @ module.head.weight.T + module.head.bias
    expected = -scores.log_softmax(1)[torch.arange(8), batch["label"]].mean()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    assert all(parameter.grad.any() for parameter in module.parameters())


def test_half_precision_trains():
    assert fit(tiny_classifier(), precision="bf16-mixed").callback_metrics["train/loss"].isfinite()


SMALL = {name: value for name, value in TOWER.items() if name != "image_size"}


def words(section, **options):
    return [word for name, value in options.items() for word in (f"--{section}.{name}", str(value))]


def test_the_classifier_learns_the_built_in_images_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = {"length": 40, "eval_length": 40, "batch_size": 20, "image_size": SIZE, "augment": False}
    model = {**SMALL, "num_classes": CLASSES, "width": 48, "depth": 2, "learning_rate": 5e-3, "warmup_steps": 5}
    rates = ["--trainer.max_epochs", "60", "--trainer.accelerator", "cpu", "--trainer.check_val_every_n_epoch", "60"]
    rates += ["--trainer.log_every_n_steps", "1"]
    ran = run(
        "fit",
        *("--model", "MMLGImageClassifierModule", *command_line(MMLGImageClassifierModule, model)),
        *("--data", "ShapeClassesDataModule", *words("data", **data), *rates, "--trainer.logger", "CSVLogger"),
        *("--trainer.logger.save_dir", "runs", "--trainer.logger.name", "x"),
    )
    assert ran.status == 0, ran.err
    (file,) = Path("runs").rglob("metrics.csv")
    rows = [line.split(",") for line in file.read_text().splitlines()]
    losses = [float(row[rows[0].index("train/loss")]) for row in rows[1:] if row[rows[0].index("train/loss")]]
    assert losses[0] == pytest.approx(math.log(CLASSES), rel=0.1)
    assert losses[-1] < 0.1


def _parquet(folder, name, count):
    rows = {
        "img": [{"bytes": encoded(draw_image(n)), "path": None} for n in range(count)],
        "fine_label": [n % 100 for n in range(count)],
    }
    features = datasets.Dataset.from_dict(rows).features.copy()
    features["img"] = datasets.Image()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / name)
    return str(folder / name)


def test_shipped_config_fits_tests_and_predicts_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    datasets.disable_progress_bars()
    descendant(tmp_path / "a.ckpt")
    train, other = _parquet(tmp_path, "train.parquet", 24), _parquet(tmp_path, "other.parquet", 6)
    files = {"train": train, "validation": other, "test": other, "predict": other, "cache_dir": "cache"}
    size = {"init_args": {"size": SIZE}}
    small = {
        "model": {"init_args": in_groups(MMLGImageClassifierModule, SMALL | {"weights": "a.ckpt"})},
        "data": {
            "init_args": {**files, "image_size": SIZE, "global_batch_size": 8, "num_workers": 0}
            | {"train_transform": size, "eval_transform": size}
        },
        "trainer": {"accelerator": "cpu", "max_epochs": 2, "precision": "32-true"},
    }
    Path("small.yaml").write_text(yaml.safe_dump(small))
    ran = run("fit", "--config", str(ROOT / "configs/mmlg/classify_cifar100.yaml"), "--config", "small.yaml")
    assert ran.status == 0, ran.err
    (last,) = Path("runs/mmlg_classify_cifar100_small").rglob("last.ckpt")
    ran = run("test", "--ckpt_path", str(last))
    assert ran.status == 0, ran.err
    assert "test/top1" in ran.out
    ran = run("predict", "--ckpt_path", str(last))
    assert ran.status == 0, ran.err
    (table,) = Path().rglob("predictions.parquet")
    probabilities = pq.read_table(table).column("probability").to_pylist()
    assert len(probabilities) == 6
    assert all(0 < probability < 1 for probability in probabilities)
    other = tiny_classifier(num_classes=100, weights=str(last))  # a checkpoint as the command line writes it
    other.load_initial_weights()
    saved = torch.load(last, weights_only=True)["state_dict"]
    assert torch.equal(other.tower.conv1.weight, saved["tower.conv1.weight"])
    with pytest.raises(UserError, match=r"Expected a tower with 4 heads"):
        tiny_classifier(heads=4, weights=str(last)).load_initial_weights()


def losses_and_gradients(index, world):
    module = tiny_classifier().double()
    module.log = lambda *_, **__: None
    own = slice(index * 8 // world, (index + 1) * 8 // world)
    loss = module.training_step({name: column[own] for name, column in random_batch().items()}, 0)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in module.named_parameters()}


def on_rank():
    return losses_and_gradients(rank(), 2)


def test_mean_of_two_halves_equals_the_whole_batch():
    loss, gradients = losses_and_gradients(0, 1)
    halves = run_distributed(on_rank)
    torch.testing.assert_close(sum(half[0] for half in halves) / 2, loss, rtol=1e-10, atol=0)
    for name, gradient in gradients.items():
        mean = sum(half[1][name] for half in halves) / 2
        torch.testing.assert_close(mean, gradient, rtol=1e-10, atol=1e-13, msg=name)


def module_and_data(weights, batch_size=4):
    return tiny_classifier(weights=weights, learning_rate=1e-3), shape_classes(batch_size=batch_size)


def saved(trainer):
    trainer.save_checkpoint(Path(trainer.default_root_dir) / f"{type(trainer.strategy).__name__}.ckpt")
    state = whole_state(trainer.lightning_module)
    return {"state": state, "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()}}


def test_two_processes_train_as_one_with_ddp_and_sharding_and_their_checkpoints_initialize(tmp_path):
    descendant(tmp_path / "a.ckpt")
    weights = str(tmp_path / "a.ckpt")
    module, data = module_and_data(weights, batch_size=8)
    one = fit(module, data=data, max_epochs=1, limit_val_batches=1.0)
    for run_fit in (run_ddp_fit, run_sharded_fit):
        options = {"max_epochs": 1, "default_root_dir": str(tmp_path)}
        (found, _) = run_fit(module_and_data, options, make_args=(weights,), collect=saved)
        for name, tensor in module.state_dict().items():
            torch.testing.assert_close(found["state"][name], tensor, rtol=1e-4, atol=1e-5, msg=name)
        for name in ("val/top1", "val/top5"):
            assert found["metrics"][name] == pytest.approx(one.callback_metrics[name].item()), name
    assert (tmp_path / "ShardedStrategy.ckpt").is_dir()
    again = tiny_classifier(1, weights=str(tmp_path / "ShardedStrategy.ckpt"))
    again.load_initial_weights()
    for name, tensor in again.tower.state_dict().items():
        assert torch.equal(tensor, found["state"][f"tower.{name}"]), name
