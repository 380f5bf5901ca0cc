import logging

import pytest
import timm
import torch
from lightning import Trainer
from timm.layers import resample_abs_pos_embed
from transformers import BertConfig, BertForMaskedLM

from support.albef import pairs_loader, tiny_albef
from vlightning.common.errors import UserError
from vlightning.lightning_modules.albef.weights import load_bert
from vlightning.lightning_modules.networks.vit_weights import load_vision_weights, resize_positions


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
    cross = {k: v.clone() for k, v in module.student.text_encoder.state_dict().items() if "crossattention" in k}
    load_bert(module.student.text_encoder, str(tmp_path))
    own = module.student.text_encoder.state_dict()
    assert cross
    assert all(torch.equal(own[name], value) for name, value in cross.items())
    for name, value in bert.state_dict().items():
        assert torch.equal(own[name], value), name
    ids, mask = torch.randint(104, 120, (3, 7)), torch.ones(3, 7, dtype=torch.long)
    mask[1, 4:] = 0
    states = module.student.encode_text(ids, mask)
    expected = bert(ids, attention_mask=mask, output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(states[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-6)


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
