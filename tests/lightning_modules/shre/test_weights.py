"""Encoders initialized from public models: a BERT, a timm ViT, Data2Vec 2.0's file."""

import pytest
import timm
import torch
from transformers import BertConfig, BertForMaskedLM

from support.methods.shre import random_batch, tiny_shre
from vlightning.common.errors import UserError
from vlightning.lightning_modules.shre.network import image_encoder
from vlightning.lightning_modules.shre.settings import ViTSettings


def bert(folder, layers=3):
    torch.manual_seed(3)
    sizes = {"hidden_size": 8, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForMaskedLM(BertConfig(vocab_size=120, **sizes)).eval()
    model.save_pretrained(folder)
    return model


def test_the_first_layers_of_a_bert_are_loaded(tmp_path, caplog):
    source = bert(tmp_path).bert
    module = tiny_shre(text={"weights": str(tmp_path)}).eval()
    module.load_initial_weights()
    assert "image encoder random; text encoder from" in caplog.text
    assert "its first 2 layers; shared encoder random" in caplog.text
    batch = random_batch(dtype=torch.float32)
    states = source(batch["input_ids"], batch["attention_mask"], output_hidden_states=True).hidden_states[2]
    found = module.student.text_encoder(batch["input_ids"], batch["attention_mask"])
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(found[kept], states[kept])


def test_the_first_blocks_of_a_timm_vit_are_loaded(tmp_path, caplog):
    torch.manual_seed(1)
    source = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=8, depth=4, num_heads=2, num_classes=5
    )
    torch.save(source.state_dict(), tmp_path / "vit.pth")
    module = tiny_shre(vision={"weights": str(tmp_path / "vit.pth"), "post_norm": False, "image_size": 32})
    module.load_initial_weights()
    assert "its first 2 blocks; text encoder random" in caplog.text
    image = torch.randn(2, 3, 32, 32)
    states = source.norm_pre(source._pos_embed(source.patch_embed(image)))
    expected = source.norm(source.blocks[1](source.blocks[0](states)))
    torch.testing.assert_close(module.student.image_encoder.eval()(image), expected, rtol=1e-4, atol=1e-5)


def test_data2vecs_file_of_fairseq_is_loaded(tmp_path):
    torch.manual_seed(1)
    source = image_encoder(ViTSettings(32, 8, 8, 4, 2))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_()
    own = source.state_dict()
    prefix, theirs = "modality_encoders.IMAGE.", {}
    for name, tensor in own.items():
        for ours, other in (
            ("patch_embed.proj.", "local_encoder.proj."),
            ("cls_token", "extra_tokens"),
            ("pos_embed", "fixed_positional_encoder.positions"),
            ("norm_pre.", "context_encoder.norm."),
        ):
            if name.startswith(ours):
                theirs[prefix + name.replace(ours, other)] = tensor
        if name.startswith("blocks."):
            theirs[name] = tensor
    theirs |= {f"{prefix}decoder.proj.weight": torch.randn(3, 3), "_ema": torch.randn(2)}
    torch.save({"cfg": {"model": {"depth": 4}}, "model": theirs}, tmp_path / "base_imagenet.pt")
    module = tiny_shre(vision={"weights": str(tmp_path / "base_imagenet.pt"), "image_size": 32})
    module.load_initial_weights()
    for name, tensor in module.student.image_encoder.state_dict().items():
        assert torch.equal(tensor, own[name]), name


def test_a_missing_bert_is_one_sentence(tmp_path):
    module = tiny_shre(text={"weights": str(tmp_path / "none")})
    with pytest.raises(UserError, match=r"Expected the folder of a text encoder, found none at '.*none'"):
        module.load_initial_weights()
