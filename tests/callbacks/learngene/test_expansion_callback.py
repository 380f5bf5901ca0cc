"""A module that is independent of learngenes is initialized from one, once and never over a checkpoint."""

import json

import open_clip
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader

from support.methods.learngene import EMBED, LENGTH, PATCH, SIZE, WIDTH, WORDS, clip, learngene, random_images, timm_vit
from support.methods.tiny_modules import trainer
from support.runs.distributed import run_sharded_fit
from vlightning.callbacks import LearngeneExpansionCallback
from vlightning.callbacks.learngene.expansion import expand_learngene
from vlightning.callbacks.learngene.file import save_learngene
from vlightning.common.errors import UserError
from vlightning.lightning_modules import MobileCLIPModule
from vlightning.lightning_modules.base.sharding import shard


class Classifier(LightningModule):
    """A module of another project; with a learning rate of 0 its weights keep their initial values."""

    def __init__(self, network, rate=0.0):
        super().__init__()
        self.inside = torch.nn.ModuleDict({"backbone": network})
        self.rate = rate

    def configure_model(self):
        shard(self, [self.inside["backbone"]], ["encode_image"])

    def training_step(self, batch, batch_idx):
        network = self.inside["backbone"]
        return (network(batch) if not hasattr(network, "text_projection") else network.encode_image(batch)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def loader():
    return DataLoader(random_images(2, torch.float32), batch_size=2)


@pytest.fixture
def file(tmp_path):
    save_learngene(learngene(), tmp_path / "learngene.safetensors")
    return str(tmp_path / "learngene.safetensors")


def expanded(network, **options):
    expand_learngene(learngene(), network, **options)
    return network.state_dict()


def assert_equal(found, expected, but=()):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if not name.startswith(but):
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("make", "options"),
    [(timm_vit, {}), (lambda: clip(8), {}), (lambda: clip(8), {"tower": "vision", "components": "multimodal"})],
)
def test_a_fit_is_initialized_from_the_learngene(file, make, options):
    module = Classifier(make())
    before = {name: tensor.clone() for name, tensor in module.inside["backbone"].state_dict().items()}
    trainer(LearngeneExpansionCallback(file, "inside.backbone", **options), max_steps=1).fit(module, loader())
    found, other = module.inside["backbone"].state_dict(), make()
    other.load_state_dict(before)
    assert_equal(found, expanded(other, **options))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in found.items())


def test_several_networks_have_equal_initial_weights(file):
    module = Classifier(timm_vit(8))
    module.average = timm_vit(8)
    module.average.requires_grad_(False)
    callback = LearngeneExpansionCallback(file, ["inside.backbone", "average"])
    trainer(callback, max_steps=1).fit(module, loader())
    assert_equal(module.average.state_dict(), module.inside["backbone"].state_dict(), but="head.")


def test_a_module_and_its_average_are_initialized_from_the_learngene(file, tmp_path):
    sizes = {"width": WIDTH, "layers": 8}
    config = {
        "embed_dim": EMBED,
        "vision_cfg": {"image_size": SIZE, "head_width": WIDTH // 2, "patch_size": PATCH, **sizes},
        "text_cfg": {"context_length": LENGTH, "vocab_size": WORDS, "heads": 2, **sizes},
    }
    (tmp_path / "descendant-of-the-tests.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "descendant-of-the-tests.json")
    module = MobileCLIPModule("descendant-of-the-tests", max_tokens=LENGTH, teacher={"distillation_weight": 0.0})
    callback = LearngeneExpansionCallback(file, ["student", "average"])
    callback.setup(trainer(), module, "fit")
    expected = expanded(clip(8, custom=True))
    for network in (module.student, module.average):
        assert_equal(network.state_dict(), expected, but="logit_scale")
        assert network.logit_scale.item() == 2.5


def sharded(file):
    torch.manual_seed(0)
    return Classifier(timm_vit(8)), loader()


def test_a_sharded_fit_is_initialized_from_the_learngene(file):
    callback = LearngeneExpansionCallback(file, "inside.backbone")
    results = run_sharded_fit(sharded, {"max_steps": 1, "callbacks": [callback]}, make_args=(file,))
    expected = expanded(timm_vit(8))
    for result in results:
        found = {name.removeprefix("inside.backbone."): tensor for name, tensor in result["state_dict"].items()}
        assert_equal(found, expected, but="head.")


class Start(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.state = {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("kept", [True, False])
def test_a_resumed_run_continues_from_its_checkpoint_without_the_file(file, tmp_path, kept):
    first = trainer(LearngeneExpansionCallback(file, "inside.backbone"), max_epochs=1)
    trained = Classifier(timm_vit(), rate=0.1)
    first.fit(trained, loader())
    first.save_checkpoint(tmp_path / "a.ckpt")
    assert not torch.equal(trained.inside["backbone"].cls_token, expanded(timm_vit())["cls_token"])
    name = file if kept else str(tmp_path / "gone")
    resumed, start = Classifier(timm_vit(), rate=0.1), Start()
    second = trainer(LearngeneExpansionCallback(name, "inside.backbone"), start, max_epochs=2)
    second.fit(resumed, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert second.global_step == 2
    assert_equal(start.state, trained.state_dict())


def test_a_second_fit_continues_from_the_first(file):
    module, callback = Classifier(timm_vit(), rate=0.1), LearngeneExpansionCallback(file, "inside.backbone")
    trainer(callback, max_steps=1).fit(module, loader())
    trained = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.rate = 0.0
    trainer(callback, max_steps=1).fit(module, loader())
    assert_equal(module.state_dict(), trained)
    other = Classifier(timm_vit())
    trainer(callback, max_steps=1).fit(other, loader())
    assert_equal(other.inside["backbone"].state_dict(), expanded(timm_vit()), but="head.")


def test_misfitting_networks_are_refused_before_training(file, tmp_path):
    def fit(module, *arguments):
        trainer(LearngeneExpansionCallback(*arguments), max_steps=1).fit(module, loader())

    with pytest.raises(UserError, match=r"Expected a learngene file .* found none"):
        fit(Classifier(timm_vit()), str(tmp_path / "gone"), "inside.backbone")
    with pytest.raises(UserError, match=r"Expected a tower of 6 to 12 layers, .* got 5"):
        fit(Classifier(timm_vit(5)), file, "inside.backbone")
    with pytest.raises(UserError, match=r"path 'student' \(the target of the learngene\), got no 'student'"):
        fit(Classifier(timm_vit()), file, "student")
