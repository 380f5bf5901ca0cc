"""Two towers of one's own with locked encoders that are read from a store, in one process and in two."""

import json

import pytest
import timm
import torch
from lightning import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file

from support.data.colors import write_colors
from support.methods.encoders import write_encoder, write_tokenizer
from support.runs.command_line import run
from support.runs.distributed import run_ddp_fit
from support.runs.stored import Encodings, Losses, fit_with_losses
from vlightning.common.errors import UserError
from vlightning.datamodules import ImageTextDataModule
from vlightning.datamodules.stores.store import FeatureStore
from vlightning.lightning_modules import CLIPModule, MobileCLIPModule

IMAGES, WIDTH, LENGTH, SIDE = "test_efficientnet", 256, 10, 64
EPOCHS, SEED = 2, 5
LIT, TEXT = {"lock_image": "all"}, {"lock_text": "all"}
BOTH = LIT | TEXT


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = write_colors(tmp_path_factory.mktemp("pair"))
    write_tokenizer(write_encoder(folder / "text"))
    torch.manual_seed(5)
    save_file(timm.create_model(IMAGES).state_dict(), folder / "image.safetensors")
    assert embed(folder, folder / "store", BOTH).status == 0
    return folder


def pair_of(files, **changes):
    image = {"name": IMAGES, "weights": f"{files}/image.safetensors"}
    return {"image": image, "text": {"name": f"{files}/text"}, "projection_dim": 8} | changes


def embed(files, store, tuning, *more):
    config = ["--model=CLIPModule", f"--model.model={json.dumps(pair_of(files))}", f"--model.max_tokens={LENGTH}"]
    config += [f"--model.tuning={json.dumps(tuning)}", "--data=ImageTextDataModule", f"--data.train={files}/pairs.csv"]
    config += [f"--data.max_tokens={LENGTH}", f"--data.image_size={SIDE}", f"--model.vision.image_size={SIDE}"]
    views = [f"--views={EPOCHS}", f"--seed={SEED}", "--num_workers=0", "--accelerator=cpu", f"--output={store}"]
    return run("embed", *config, *views, *more)


def built(files, tuning, store=None, pair=None, **options):
    """Return the module and the data of a training."""
    seed_everything(SEED, verbose=False)
    module = CLIPModule(
        model=pair or pair_of(files),
        max_tokens=LENGTH,
        vision={"image_size": SIDE},
        tuning=tuning,
        optim={"learning_rate": 1e-3},
    )
    given = {"train": f"{files}/pairs.csv", "image_size": SIDE, "max_tokens": LENGTH, "batch_size": 8, "num_workers": 0}
    return module, ImageTextDataModule(**given | {"store": store and str(store)} | options)


def trained(files, tuning, store=None, more=(), resumed=None, **options):
    """Fit, and return the losses and the module."""
    module, data = built(files, tuning, store, **options)
    kept, _ = fit_with_losses(module, data, EPOCHS, more, resumed)
    return kept, module


def assert_equal_weights(one, other, **tolerance):
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, **tolerance, msg=lambda text, name=name: name)


def test_the_store_has_the_features_before_both_projections(files):
    store = FeatureStore(files / "store")
    assert (store.width("image"), store.width("text"), store.views) == (WIDTH, 16, EPOCHS)
    assert not store.sides["image"]["projected"]
    assert not store.sides["text"]["projected"]


@pytest.mark.parametrize(
    ("tuning", "running"), [(LIT, {"text"}), (TEXT, {"image"}), (BOTH, set())], ids=["image", "text", "both"]
)
def test_losses_are_those_without_a_store_and_a_locked_encoder_does_not_run(files, tuning, running):
    plain, uncached = trained(files, tuning)
    watch = Encodings()
    cached, module = trained(files, tuning, files / "store", more=[watch])
    assert watch.ran == running
    assert len(plain.losses) == EPOCHS * 4
    assert cached.samples == plain.samples
    assert cached.losses == pytest.approx(plain.losses, abs=1e-5)
    assert_equal_weights(uncached, module, atol=1e-5, rtol=1e-4)
    start, _ = built(files, tuning)
    for projection in ("visual.head.proj.weight", "text.proj.weight"):
        assert not torch.equal(start.student.get_parameter(projection), module.student.get_parameter(projection))


def test_a_multilayer_projection_trains_from_the_same_store(files):
    pair = pair_of(files, image=pair_of(files)["image"] | {"projection": "mlp"})
    plain, uncached = trained(files, BOTH, pair=pair)
    cached, module = trained(files, BOTH, files / "store", pair=pair)
    assert cached.losses == pytest.approx(plain.losses, abs=1e-5)
    assert_equal_weights(uncached, module, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tuning", [LIT, BOTH], ids=["image", "both"])
def test_a_resumed_run_is_the_uninterrupted_one(files, tmp_path, tuning):
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=6, save_top_k=-1)  # in the middle of an epoch
    whole, module = trained(files, tuning, files / "store", more=[save])
    rest, again = trained(files, tuning, files / "store", resumed=str(tmp_path / "step=6.ckpt"))
    assert whole.samples[6:] == rest.samples
    assert whole.losses[6:] == rest.losses
    assert_equal_weights(module, again, atol=0, rtol=0)


def losses_of(trainer):
    (kept,) = (callback for callback in trainer.callbacks if isinstance(callback, Losses))
    return kept.losses, kept.samples


def test_two_processes_have_the_losses_of_the_uncached_run(files):
    runs = {}
    for name, store in (("plain", None), ("cached", files / "store")):
        options = {"max_epochs": EPOCHS, "callbacks": [Losses()]}
        runs[name] = run_ddp_fit(built, options, make_args=(files, BOTH, store), collect=losses_of)
    for (cached, samples), (plain, wanted) in zip(runs["cached"], runs["plain"], strict=True):
        assert samples == wanted
        assert len(plain) == EPOCHS * 2
        assert cached == pytest.approx(plain, abs=1e-5)
    (_, first), (_, second) = runs["cached"]
    assert not set(first[0]) & set(second[0])  # each process reads its own rows


def test_stores_of_other_towers_or_projections_are_refused_in_a_sentence(files, tmp_path):
    torch.manual_seed(6)
    save_file(timm.create_model(IMAGES).state_dict(), tmp_path / "image.safetensors")
    image = {"name": IMAGES, "weights": f"{tmp_path}/image.safetensors"}
    with pytest.raises(UserError, match="Expected a store of this image tower"):
        trained(files, LIT, files / "store", pair=pair_of(files, image=image))
    write_tokenizer(write_encoder(tmp_path / "text", seed=4))
    text = {"name": f"{tmp_path}/text"}
    with pytest.raises(UserError, match="Expected a store of this text tower"):
        trained(files, BOTH, files / "store", pair=pair_of(files, text=text))
    with pytest.raises(UserError, match="got none locked"):
        trained(files, {"lock_image": 2}, files / "store")
    with pytest.raises(UserError, match="another tokenizer, length or cleaning"):
        trained(files, TEXT, files / "store", clean_captions=True)
    student = MobileCLIPModule(pair_of(files), max_tokens=LENGTH, teacher={"distillation_weight": 0.0})
    _, data = built(files, LIT, files / "store")
    with pytest.raises(UserError, match=r"got none locked: .* which CLIPModule has"):
        fit_with_losses(student, data, 1)
    assert "got --of images: lock that tower" in embed(files, tmp_path / "none", TEXT, "--of=images").sentence
