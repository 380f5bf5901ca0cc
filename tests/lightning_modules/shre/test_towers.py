"""SHRe with encoders by name: an image network of timm and a text encoder of transformers, as a user types them."""

import shlex
import shutil

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModel

from support.methods.encoders import (
    IMAGES,
    trained_without_text,
    write_encoder,
    write_pair,
    write_tokenizer,
    write_towers,
)
from support.methods.shre import CLASSES, ready, write_teacher
from support.project.pages import commands
from support.runs.command_line import run
from vlightning.callbacks import AtomicCheckpointIO
from vlightning.commands.evaluate.model import load_model
from vlightning.common.errors import UserError
from vlightning.lightning_modules import SHReModule
from vlightning.lightning_modules.shre.network import encode_pairs
from vlightning.lightning_modules.shre.towers import NamedImageEncoder

SIDE, LENGTH, WIDTH = 64, 10, 8
SHOWN = shlex.split(*commands("vlightning fit --model SHReModule "))[1:]
"""The command of the page."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Towers, pairs and a teacher."""
    folder = write_towers(tmp_path_factory.mktemp("towers"))
    write_teacher(folder)
    return folder


def fit(files, *words, text="text"):
    model = {
        "num_classes": CLASSES,
        "teacher.name": "resnet8",
        "teacher.weights": write_teacher(files)["teacher"]["weights"],
        "vision.name": IMAGES,
        "vision.weights": f"{files}/image.safetensors",
        "vision.width": WIDTH,
        "vision.heads": 2,
        "text.name": f"{files}/{text}",
        "text.weights": "pretrained",
    }
    data = {"train": f"{files}/pairs.csv", "validation": f"{files}/held_out.csv", "num_workers": 0}
    small = {"max_tokens": LENGTH, "image_size": SIDE, "batch_size": 8}
    return run(
        *SHOWN,
        *(f"--model.{name}={value}" for name, value in model.items()),
        *(f"--data.{name}={value}" for name, value in (data | small).items()),
        "--trainer.accelerator=cpu",
        *words,
    )


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """A checkpoint of two epochs, whose text encoder has no file any more."""
    return trained_without_text(fit, files, tmp_path_factory.mktemp("run"), "--model.text.prefix=a ")


def named(files, **options):
    """A module, with its trained encoders."""
    torch.manual_seed(0)
    vision = {"name": IMAGES, "weights": f"{files}/image.safetensors", "width": WIDTH, "heads": 2, "image_size": SIDE}
    text = {"name": str(files / "text"), "weights": "pretrained", "max_tokens": LENGTH}
    module = SHReModule(
        **{"num_classes": CLASSES, "kl": {"weight": 0.0}}
        | options
        | {
            "vision": vision | options.get("vision", {}),
            "text": text | options.get("text", {}),
        }
    )
    module.load_initial_weights()
    return module


def batch(rows=4):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(110, 150, (rows, 6), generator=generator)
    ids[0, 3:] = 0
    image = torch.rand(rows, 3, SIDE, SIDE, generator=generator)
    return {"image": image, "input_ids": ids, "attention_mask": (ids != 0).long(), "image_id": torch.arange(rows)}


@torch.no_grad()
def test_tokens_are_the_networks_outputs_with_the_pooled_one_first(files):
    student = named(files).eval().student
    image, ids, mask = (batch()[name] for name in ("image", "input_ids", "attention_mask"))
    published = timm.create_model(IMAGES, checkpoint_path=str(files / "image.safetensors")).eval()
    features = published.forward_features(image)
    outputs = torch.cat([features.mean((2, 3))[:, None], features.flatten(2).transpose(1, 2)], 1)
    projection = student.image_encoder.head.proj.weight
    assert_close(student.image_encoder(image), outputs @ projection.T, rtol=1e-4, atol=1e-5)

    states = AutoModel.from_pretrained(files / "text").eval()(ids, attention_mask=mask).last_hidden_state
    pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    expected = torch.cat([pooled[:, None], states[:, 1:]], 1) @ student.text_encoder.proj.weight.T
    assert_close(student.text_encoder(ids, mask)[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["test_vit", "test_mambaout", "test_resnet"])
@torch.no_grad()
def test_image_networks_of_all_layouts_give_tokens(name):
    torch.manual_seed(0)
    encoder = NamedImageEncoder(name, WIDTH, SIDE).eval()
    image = torch.rand(2, 3, SIDE, SIDE)
    tokens = encoder(image)
    assert_close(tokens[:, 0], encoder.head(encoder.trunk(image)))  # what the network pools
    positions = encoder.trunk.forward_features(image)
    if name == "test_mambaout":  # pools to another width
        assert tokens.shape == (2, 1, WIDTH)
        return
    fourfold = positions.ndim == 4
    positions = positions.flatten(2).transpose(1, 2) if fourfold else positions[:, encoder.trunk.num_prefix_tokens :]
    assert_close(tokens[:, 1:], encoder.head(positions))


@torch.no_grad()
def test_outputs_with_the_channels_last_give_the_same_tokens(monkeypatch):
    encoder = NamedImageEncoder("test_resnet", WIDTH, SIDE).eval()
    image = torch.rand(2, 3, SIDE, SIDE)
    expected = encoder(image)
    trunk = encoder.trunk
    features, head = trunk.forward_features, trunk.forward_head
    monkeypatch.setattr(trunk, "forward_features", lambda image: features(image).movedim(1, -1))
    monkeypatch.setattr(trunk, "forward_head", lambda outputs: head(outputs.movedim(-1, 1)))
    assert_close(encoder(image), expected)


@pytest.mark.parametrize("shared", ["mlp", "transformer"])
def test_all_that_the_shared_encoder_reads_has_a_gradient_in_slices_too(files, shared):
    losses = []
    for size in (None, 2):
        module = ready(named(files, shared=shared, memory={"micro_batch_size": size}, kl={"weight": 0.0})).float()
        module.eval()  # BatchNorm normalizes slices by themselves in training
        loss = module.training_step(batch(), 0)
        loss.backward()
        losses.append(loss.detach())
        without = [name for name, one in module.student.named_parameters() if one.requires_grad and one.grad is None]
        assert not without
    assert_close(*losses)


def test_slices_update_the_statistics_of_batch_norm_once(files):
    module = named(files).train()
    given = batch()
    images, _ = encode_pairs(module.student, given["image"], given["input_ids"], given["attention_mask"], 2)
    images["h2"].sum().backward()
    counts = [value for name, value in module.student.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts
    assert {int(count) for count in counts} == {1}


def test_padding_is_inert_and_an_empty_batch_stays_empty(files):
    student = named(files, shared="transformer").eval().student
    ids, mask = batch()["input_ids"], batch()["attention_mask"]
    longer = [torch.nn.functional.pad(each, (0, 3)) for each in (ids, mask)]
    for found, expected in zip(student.encode_text(*longer), student.encode_text(ids, mask), strict=True):
        assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert student.text_encoder(ids[:0], mask[:0]).shape == (0, 6, WIDTH)


def test_a_run_starts_with_the_networks_and_its_checkpoint_needs_no_file(files, trained):
    start = named(files).student.state_dict()
    given = load_file(files / "image.safetensors")
    assert torch.equal(start["image_encoder.trunk.conv_stem.weight"], given["conv_stem.weight"])
    state = AtomicCheckpointIO().load_checkpoint(trained)["state_dict"]
    changed = [name for name, value in start.items() if not torch.equal(state[f"student.{name}"], value)]
    assert {"text_encoder.proj.weight", "image_encoder.trunk.conv_stem.weight"} < set(changed)
    module = SHReModule.load_from_checkpoint(trained)
    assert module.text.vocab_size == 300
    assert module.text.special_token_ids == {"pad": 0}
    assert module.text_prefix == "a "


def test_a_resumed_run_is_the_uninterrupted_one(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (first,) = trained.parent.glob("best-step2*.ckpt")
    again = run("fit", f"--ckpt_path={first}", "--checkpoint.save_top_k=0", "--trainer.default_root_dir=again")
    assert again.status == 0, again.err
    contents = [AtomicCheckpointIO().load_checkpoint(path) for path in (trained, *tmp_path.rglob("last.ckpt"))]
    assert [content["global_step"] for content in contents] == [4, 4]
    states = [content["state_dict"] for content in contents]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


@pytest.mark.slow
@torch.no_grad()
def test_exports_compute_what_the_checkpoint_does(files, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for layout in ("vlightning", "torch_export"):
        done = run("export", "--layout", layout, str(trained), layout)
        assert done.status == 0, done.err
    texts, image = ["dark half", "full"], Image.open(files / "images/3.png")
    models = [load_model(str(source)) for source in (trained, "vlightning")]
    expected, found = (
        (model.encode_images(model.transform(image)[None]), model.encode_texts(texts)) for model in models
    )
    assert_close(found, expected)
    assert models[0].preprocessing.mean == tuple(timm.get_pretrained_cfg(IMAGES).mean)

    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    encoded = models[0].encoder(texts)
    ids[:, : encoded["input_ids"].shape[1]] = encoded["input_ids"]
    program = torch.export.load("torch_export/text.pt2").module()
    assert_close(program(ids, (ids != 0).long()), expected[1], rtol=1e-4, atol=1e-5)


def test_encoders_start_with_the_towers_of_another_method(files, tmp_path):
    clip = write_pair(tmp_path / "clip", files, LENGTH, width=WIDTH)
    source = {"weights": str(tmp_path / "clip")}
    module = named(files, vision=source, text=source)
    for encoder, published in (("image_encoder", "visual"), ("text_encoder", "text")):
        state = getattr(clip.student, published).state_dict()
        for name, tensor in getattr(module.student, encoder).state_dict().items():
            assert torch.equal(tensor, state[name]), name


def test_mistakes_are_one_sentence(files, tmp_path):
    shutil.copytree(write_encoder(tmp_path / "bare"), files / "bare", dirs_exist_ok=True)
    assert "Expected a tokenizer in the folder" in fit(files, text="bare").sentence
    other = write_tokenizer(write_encoder(tmp_path / "other"))  # of fewer words, with the same special ids
    vocabulary = tmp_path / "vocab.txt"
    words = [word for word, _ in sorted(_words(other).items(), key=lambda item: item[1])]
    vocabulary.write_text("\n".join(words[:104] + words[:103:-1]), encoding="utf-8")
    refused = fit(files, f"--data.tokenizer={vocabulary}")
    assert "Expected the tokenizer of the text tower" in refused.sentence
    assert "got one with another id for" in refused.sentence
    typed = fit(files, "--model.vision.name=test_efficientnett")
    assert "Expected an image network of timm as model.vision.name" in typed.sentence
    with pytest.raises(UserError, match="Expected texts of at most 40 tokens"):
        named(files, text={"max_tokens": 41})
    decoder = write_encoder(tmp_path / "gpt2", "gpt2", weights=False)
    with pytest.raises(UserError, match="Expected the pooling of the causal decoder"):
        named(files, text={"name": decoder})
    wrong = tmp_path / "wrong.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), wrong)
    with pytest.raises(UserError, match=r"weights of this tower as model\.vision\.weights, got \d+ missing"):
        named(files, vision={"weights": str(wrong)})


def _words(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).get_vocab()
