"""ALBEF from a text encoder's folder without a language-model head and from a vision transformer of timm by name."""

import shlex
import shutil

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from support.methods.encoders import trained_without_text, write_encoder, write_pair, write_towers
from support.project.pages import commands
from support.runs.command_line import run
from vlightning.callbacks import AtomicCheckpointIO
from vlightning.commands.evaluate.model import load_model
from vlightning.common.errors import UserError
from vlightning.lightning_modules import ALBEFModule

VIT, SIDE, LENGTH = "test_vit", 64, 10
SHOWN = shlex.split(*commands("vlightning fit --model ALBEFModule "))[1:]
"""The command of the page."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The folder of a BERT of two layers with its tokenizer, a file of a ViT's weights, and pairs."""
    folder = write_towers(tmp_path_factory.mktemp("encoders"))
    torch.manual_seed(5)
    save_file(timm.create_model(VIT).state_dict(), folder / "vit.safetensors")
    return folder


def fit(files, *words, text="text"):
    data = {"train": f"{files}/pairs.csv", "validation": f"{files}/held_out.csv", "num_workers": 0}
    small = {"max_tokens": LENGTH, "image_size": SIDE, "batch_size": 8}
    return run(
        *SHOWN,
        f"--model.vision.name={VIT}",
        f"--model.vision.weights={files}/vit.safetensors",
        f"--model.text.weights={files}/{text}",
        "--model.contrast.queue_size=16",
        *(f"--data.{name}={value}" for name, value in (data | small).items()),
        "--trainer.accelerator=cpu",
        *words,
    )


def albef(files, **vision):
    torch.manual_seed(0)
    module = ALBEFModule(
        vision={"name": VIT, "weights": str(files / "vit.safetensors"), "image_size": SIDE} | vision,
        text={"weights": str(files / "text")},
        contrast={"queue_size": 16},
    )
    module.load_initial_weights()
    return module.eval()


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """A checkpoint of two epochs, whose text encoder has no folder any more."""
    return trained_without_text(fit, files, tmp_path_factory.mktemp("run"))


def test_sizes_and_weights_are_those_of_the_networks(files, caplog):
    module = albef(files)
    vision, text = module.vision, module.text
    assert (vision.patch_size, vision.width, vision.depth, vision.heads, vision.mlp_ratio) == (16, 64, 6, 2, 3)
    assert (text.width, text.depth, text.fusion_depth, text.vocab_size) == (16, 1, 1, 300)
    assert "cross-attention and language-model head random" in caplog.text
    state, words = module.student.state_dict(), load_file(files / "text/model.safetensors")
    for name in ("embeddings.word_embeddings.weight", "encoder.layer.1.output.dense.weight"):
        assert torch.equal(state[f"text_encoder.bert.{name}"], words[name]), name
    assert torch.equal(state["text_encoder.cls.predictions.decoder.weight"], words["embeddings.word_embeddings.weight"])
    again = albef(files).student.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())  # what is random has the seed


@torch.no_grad()
def test_images_are_encoded_as_by_timm_and_from_any_block_on(files):
    student = albef(files).student
    image = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    published = timm.create_model(VIT, checkpoint_path=str(files / "vit.safetensors"), img_size=160).eval()
    expected = published.forward_features(torch.nn.functional.interpolate(image, 160))
    larger = albef(files, image_size=160).student
    assert_close(larger.encode_image(torch.nn.functional.interpolate(image, 160)), expected, rtol=1e-4, atol=1e-5)
    inputs = []
    student.visual_encoder.blocks[3].register_forward_pre_hook(lambda _, states: inputs.append(states[0]))
    tokens = student.encode_image(image)
    assert tokens.shape == (2, 1 + 16, 64)
    assert_close(student.finish_image(inputs[0], 3), tokens)


def test_a_resumed_run_is_the_uninterrupted_one_without_the_folder(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (first,) = trained.parent.glob("best-step2*.ckpt")
    again = run("fit", f"--ckpt_path={first}", "--checkpoint.save_top_k=0", "--trainer.default_root_dir=again")
    assert again.status == 0, again.err
    contents = [AtomicCheckpointIO().load_checkpoint(path) for path in (trained, *tmp_path.rglob("last.ckpt"))]
    assert [content["global_step"] for content in contents] == [4, 4]
    for name, tensor in contents[0]["state_dict"].items():
        assert torch.equal(tensor, contents[1]["state_dict"][name]), name


def test_an_export_needs_no_file_and_computes_the_same(files, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("export", str(trained), "exported")
    assert done.status == 0, done.err
    texts = ["dark half", "full"]
    expected, found = (load_model(str(source)).encode_texts(texts) for source in (trained, "exported"))
    assert_close(found, expected)
    assert ALBEFModule.from_pretrained("exported").vision.name == VIT


def test_the_image_encoder_starts_with_a_tower_of_another_method(files, tmp_path):
    clip = write_pair(tmp_path / "clip", files, LENGTH, image=VIT, image_size=SIDE)
    module = albef(files, weights=str(tmp_path / "clip"))
    state = clip.student.visual.trunk.state_dict()
    for name, tensor in module.student.visual_encoder.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    write_pair(tmp_path / "other", files, LENGTH)
    with pytest.raises(UserError, match="Expected the tensors of the image encoder from"):
        albef(files, weights=str(tmp_path / "other"))


def test_mistakes_are_one_sentence(files, tmp_path):
    for name, got in (
        ("test_efficientnet", "a EfficientNet"),
        ("vit_small_patch14_reg4_dinov2", "a VisionTransformer"),
    ):
        with pytest.raises(UserError, match=rf"one class token, .* as model\.vision\.name, got '{name}', {got}"):
            ALBEFModule(vision={"name": name})
    with pytest.raises(UserError, match=r"Expected vision\.width 64, that of test_vit, got 128: leave it out"):
        ALBEFModule(vision={"name": VIT, "width": 128})
    assert "Expected an image network of timm as model.vision.name" in fit(files, "--model.vision.name=vitt").sentence
    words = (files / "text/tokenizer.json").read_text().replace('"##d"', '"##q#"').replace('"##a"', '"##d"')
    (tmp_path / "tokenizer.json").write_text(words.replace('"##q#"', '"##a"'))
    shutil.copy(files / "text/tokenizer_config.json", tmp_path)
    other = fit(files, f"--data.tokenizer={tmp_path}")
    assert "Expected the tokenizer of the text tower" in other.sentence
    assert "got one with another id for '##" in other.sentence
    shutil.copytree(write_encoder(tmp_path / "bare"), files / "bare")
    assert "Expected a tokenizer in the folder" in fit(files, text="bare").sentence
