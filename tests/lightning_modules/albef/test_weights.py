import dataclasses
import logging

import pytest
import timm
import torch
from lightning import Trainer
from PIL import Image
from timm.layers import resample_abs_pos_embed
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

from support.methods.albef import pairs_loader, tiny_albef
from support.runs.command_line import run
from vlightning.common.errors import UserError
from vlightning.datamodules import ImageTextDataModule
from vlightning.lightning_modules import ALBEFModule
from vlightning.lightning_modules.albef.weights import load_bert
from vlightning.lightning_modules.networks.vit import load_vision_weights, resize_positions


def _bert(folder, layers=2, **changes):
    torch.manual_seed(3)
    config = BertConfig(
        **{
            "vocab_size": 120,
            "hidden_size": 16,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 16,
        }
        | changes
    )
    bert = BertForMaskedLM(config).eval()
    bert.save_pretrained(folder)
    return bert


def test_position_resize_is_bicubic_without_antialiasing():
    table = torch.randn(1, 1 + 14 * 14, 8)
    for side in (16, 24, 7):
        grid = table[:, 1:].unflatten(1, (14, 14)).permute(0, 3, 1, 2)
        expected = torch.nn.functional.interpolate(grid, (side, side), mode="bicubic", align_corners=False)
        resized = resize_positions(table, (side, side))
        assert torch.equal(resized[:, :1], table[:, :1])
        torch.testing.assert_close(resized[:, 1:], expected.flatten(2).transpose(1, 2))
    shrunk = resample_abs_pos_embed(table, [7, 7], num_prefix_tokens=1)
    assert (shrunk - resize_positions(table, (7, 7))).abs().max() > 0.05  # timm's default is another function


def test_image_encoder_is_initialized_from_a_timm_file_of_another_size(tmp_path):
    torch.manual_seed(1)
    source = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=5
    )
    torch.save(source.state_dict(), tmp_path / "vit.pth")
    module = tiny_albef(vision={"image_size": 48})
    line = load_vision_weights(module.student.visual_encoder, str(tmp_path / "vit.pth"))
    assert "positions resized from 16 to 36 patches" in line
    own = module.student.visual_encoder.state_dict()
    for name, value in source.state_dict().items():
        if name != "pos_embed" and not name.startswith("head."):
            assert torch.equal(own[name], value), name
    assert torch.equal(own["pos_embed"], resize_positions(source.pos_embed.detach(), (6, 6)))


def test_text_encoder_is_initialized_from_a_bert_folder(tmp_path):
    bert = _bert(tmp_path)
    module = tiny_albef().eval()
    load_bert(module.student.text_encoder, str(tmp_path))
    own = module.student.text_encoder.state_dict()
    cross = [value for name, value in own.items() if "crossattention" in name and value.ndim == 2]
    assert len(cross) == 4
    assert torch.cat([value.flatten() for value in cross]).std().item() == pytest.approx(0.02, rel=0.1)  # BERT's
    for name, value in bert.state_dict().items():
        assert torch.equal(own[name], value), name
    ids, mask = torch.randint(104, 120, (3, 7)), torch.ones(3, 7, dtype=torch.long)
    mask[1, 4:] = 0
    states = module.student.encode_text(ids, mask)
    expected = bert(ids, attention_mask=mask, output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(states[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-6)


def test_a_missing_or_damaged_bert_is_one_sentence(tmp_path):
    encoder = tiny_albef().student.text_encoder
    with pytest.raises(UserError, match=r"Expected the folder of a text encoder, found none at '.*none'"):
        load_bert(encoder, str(tmp_path / "none"))
    _bert(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"Expected a text encoder of transformers as a local folder or a hub name"):
        load_bert(encoder, str(tmp_path))


def test_misfitting_sizes_are_listed(tmp_path):
    _bert(tmp_path, intermediate_size=48)
    with pytest.raises(UserError, match=r"of another shape bert\.encoder.layer.0.intermediate.dense.bias"):
        load_bert(tiny_albef().student.text_encoder, str(tmp_path))
    _bert(tmp_path / "shallow", layers=1)
    with pytest.raises(UserError, match=r"missing bert\.encoder.layer.1"):
        load_bert(tiny_albef().student.text_encoder, str(tmp_path / "shallow"))


def test_fit_initializes_both_models_from_the_given_weights_and_logs_it(tmp_path, caplog):
    bert = _bert(tmp_path)
    module = tiny_albef(text={"weights": str(tmp_path)})
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        max_steps=0,
        default_root_dir=tmp_path,
    )
    with caplog.at_level(logging.INFO):
        trainer.fit(module, pairs_loader(8, 8))
    word = bert.bert.embeddings.word_embeddings.weight
    assert torch.equal(module.student.text_encoder.bert.embeddings.word_embeddings.weight, word)
    assert torch.equal(module.teacher.text_encoder.bert.embeddings.word_embeddings.weight, word)
    assert f"text and fusion encoder from '{tmp_path}'" in caplog.text


def _tokenized(folder, layers, **changes):
    """Write a BERT of other sizes with its tokenizer, whose special ids are the first ones."""
    sizes = {"vocab_size": 40, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 56}
    _bert(folder, layers, **sizes | {"max_position_embeddings": 20} | changes)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "square"]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)


SMALL = {
    "vision": {"image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "heads": 2},
    "contrast": {"embed_dim": 8, "queue_size": 16},
}


@pytest.mark.parametrize(
    ("layers", "given", "depths"),
    [
        (4, {}, (2, 2)),
        (5, {}, (3, 2)),
        (2, {}, (1, 1)),
        (4, {"fusion_depth": 1}, (3, 1)),
        (4, {"depth": 1, "fusion_depth": 2}, (1, 2)),
    ],
)
def test_the_folder_of_a_bert_sets_the_sizes(tmp_path, layers, given, depths):
    _tokenized(tmp_path, layers)
    module = ALBEFModule(**SMALL, text={"weights": str(tmp_path), **given})
    text = module.text
    assert (text.width, text.heads, text.ffn_width, text.max_positions, text.vocab_size) == (24, 3, 56, 20, 40)
    assert (text.depth, text.fusion_depth) == depths
    assert text.special_token_ids == {"pad": 0, "cls": 2, "sep": 3, "mask": 4}
    assert module.hparams["text"]["width"] == 24
    assert "first" not in load_bert(module.student.text_encoder, str(tmp_path))
    # The settings in a checkpoint give the same module again, with the folder and without it.
    again = ALBEFModule(**SMALL, text=module.hparams["text"])
    assert again.text == text
    moved = ALBEFModule(**SMALL, text=module.hparams["text"] | {"weights": str(tmp_path / "gone")})
    assert dataclasses.replace(moved.text, weights=str(tmp_path)) == text


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"width": 48}, r"Expected text\.width 24, that of the BERT in '.*', got 48: leave it out"),
        ({"fusion_depth": 4}, r"Expected text\.fusion_depth from 1 to 3, below the layers of the BERT in .*, got 4"),
        ({"depth": 3}, r"text\.depth and text\.fusion_depth of at most 4 together, .*, got 3 and 6: decrease"),
    ],
)
def test_settings_that_do_not_fit_the_folder_of_a_bert_are_refused(tmp_path, given, sentence):
    _tokenized(tmp_path, 4)
    with pytest.raises(UserError, match=sentence):
        ALBEFModule(**SMALL, text={"weights": str(tmp_path), **given})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"Expected a BERT as text\.weights, got '.*' without config\.json"),
        ("{", "Expected JSON in .*config.json', got another format or a damaged file"),
        ('{"model_type": "gpt2"}', r"Expected a BERT as text\.weights, got 'gpt2' in '.*config\.json'"),
    ],
)
def test_a_folder_without_a_bert_is_refused(tmp_path, content, sentence):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=sentence):
        ALBEFModule(**SMALL, text={"weights": str(tmp_path)})


def test_the_command_line_trains_from_a_bert_in_one_setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _tokenized(tmp_path / "bert", 4)
    small = [f"--model.{group}.{name}={size}" for group, sizes in SMALL.items() for name, size in sizes.items()]
    data = {"length": 8, "eval_length": 4, "image_size": 16, "batch_size": 4, "tokenizer": "bert", "max_tokens": 12}
    ran = run(
        *("fit", "--model=ALBEFModule", "--model.text.weights=bert", *small[1:], "--data=ShapesDataModule"),
        *(f"--data.{name}={value}" for name, value in data.items()),
        *(
            "--trainer.max_steps=1",
            "--trainer.accelerator=cpu",
            "--trainer.limit_val_batches=0",
            "--trainer.logger=false",
        ),
    )
    assert ran.status == 0, ran.err
    (tmp_path / "bert").rename(tmp_path / "moved")  # the checkpoint holds the sizes
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    module = ALBEFModule.load_from_checkpoint(checkpoint)
    assert (module.text.width, module.text.depth, module.text.fusion_depth) == (24, 2, 2)


def test_python_states_the_image_size_once(tmp_path):
    """The data takes it from the module."""
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    (tmp_path / "pairs.csv").write_text("image,caption\n" + "a.png,a red square\n" * 4)
    data = ImageTextDataModule(
        train=str(tmp_path / "pairs.csv"), batch_size=4, num_workers=0, vocab_size=200, max_tokens=8
    )
    module = tiny_albef(text={"vocab_size": 200})
    limits = {"max_steps": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, **limits)
    trainer.fit(module, data)
    assert trainer.global_step == 1
    assert data.image_size == module.vision.image_size == 16
