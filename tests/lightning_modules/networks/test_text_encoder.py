"""Text encoders of transformers as text towers, against the library and against open_clip."""

import json
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.hf_configs import arch_dict
from open_clip.hf_model import HFTextEncoder
from transformers import AutoModel

from support.methods.encoders import CONFIGS, write_encoder
from vlightning.common.errors import UserError
from vlightning.lightning_modules.networks.clip.lora import LoRASettings, add_adapters
from vlightning.lightning_modules.networks.clip.models import build_model, model_config
from vlightning.lightning_modules.networks.clip.pair import TextTower, TowerPair, load_towers
from vlightning.lightning_modules.networks.clip.shapes import OpenClipConfig
from vlightning.lightning_modules.networks.clip.text_encoder import OPEN_CLIP_POOLERS
from vlightning.lightning_modules.networks.clip.towers import layers_of


def pair(folder, **text):
    image = {"name": "test_efficientnet", "weights": "random"}
    return TowerPair(image, TextTower(folder, **text), projection_dim=8)


def built(folder, length=12, **text):
    given = pair(folder, **text)
    model = build_model(given, context_length=length)
    load_towers(model, given)
    return model.eval()


def texts(pad, rows=3, length=12):
    ids = torch.randint(3, 300, (rows, length), generator=torch.Generator().manual_seed(0))
    for row, end in enumerate((12, 7, 4)):
        ids[row, end:] = pad
    return ids


def library(folder, kind):
    network = AutoModel.from_pretrained(folder).eval()
    return network.get_encoder() if network.config.is_encoder_decoder else network


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_features_are_those_of_the_librarys_network_pooled_and_projected(kind, tmp_path):
    folder = write_encoder(tmp_path, kind)
    theirs = library(folder, kind)
    for pooling in ("mean", "cls", "last"):
        tower = built(folder, pooling=pooling).text
        ids = texts(tower.pad_token_id)
        for row, found in zip(ids, tower(ids), strict=True):
            alone = row[row != tower.pad_token_id][None]  # without padding, text by text
            hidden = theirs(input_ids=alone).last_hidden_state[0]
            pooled = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
            torch.testing.assert_close(found, tower.proj(pooled), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind in arch_dict])
@torch.no_grad()
def test_weights_have_open_clips_names_and_open_clip_computes_the_same(kind, tmp_path):
    folder = write_encoder(tmp_path, kind)
    for pooling, projection in (("mean", "linear"), ("pooler", "mlp"), ("cls", "linear")):
        tower = built(folder, pooling=pooling, projection=projection).text
        theirs = HFTextEncoder(folder, 8, None, OPEN_CLIP_POOLERS[pooling], projection, pretrained=False).eval()
        state = tower.state_dict()
        if pooling == "cls" and hasattr(theirs.transformer, "pooler"):
            theirs.transformer.pooler = None
        theirs.load_state_dict(state)
        ids = texts(tower.pad_token_id)
        torch.testing.assert_close(tower(ids), theirs(ids))


@pytest.mark.parametrize("kind", CONFIGS)
def test_locks_rates_and_adapters_find_the_blocks(kind, tmp_path):
    model = built(write_encoder(tmp_path, kind), pooling="mean")
    layers = layers_of(model.text)
    assert layers.blocks == 2
    assert set(layers.of.values()) == {0, 1, 2, 3}
    embeddings = [name for name, layer in layers.of.items() if layer == 0]
    assert any("embed" in name or "wte" in name for name in embeddings)
    assert layers.of["proj.weight"] == 3
    if kind == "gpt2":  # whose layers are not linear modules
        return
    add_adapters(model, LoRASettings())
    assert sum(".lora_A." in name and name.startswith("text.") for name, _ in model.named_parameters()) >= 12


def test_the_pooling_is_that_of_the_folder_and_a_causal_decoder_needs_one(tmp_path):
    folder = write_encoder(tmp_path / "bert")
    (tmp_path / "bert/1_Pooling").mkdir()
    modes = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (tmp_path / "bert/1_Pooling/config.json").write_text(json.dumps(modes))
    assert model_config(pair(folder))["text_cfg"]["hf_pooler_type"] == "cls_last_hidden_state_pooler"
    decoder = write_encoder(tmp_path / "gpt2", "gpt2", weights=False)
    with pytest.raises(UserError, match=r"pooling of the causal decoder .*set model\.text\.pooling to last"):
        model_config(pair(decoder))
    assert model_config(pair(decoder, pooling="last"))["text_cfg"]["hf_pooler_type"] == "last"


def test_weights_of_another_network_and_texts_beyond_the_positions_are_refused(tmp_path):
    folder = write_encoder(tmp_path / "one")
    other = write_encoder(tmp_path / "other", num_hidden_layers=1)
    model = build_model(pair(folder), context_length=12)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=r"none that fit for 16 of them \(encoder\.layer\.1"):
        load_towers(model, pair(folder, weights=other))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(UserError, match="at most 40 tokens"):
        build_model(pair(folder), context_length=41)
    roberta = write_encoder(tmp_path / "roberta", "xlm-roberta", weights=False)
    with pytest.raises(UserError, match="at most 38 tokens"):
        build_model(pair(roberta), context_length=39)
    with pytest.raises(UserError, match="Expected the folder of a text encoder"):
        build_model(pair("./nowhere"))


@pytest.mark.slow
def test_all_models_of_open_clip_build(tmp_path, monkeypatch):
    """Configurations of text encoders are read from folders of the hub's names."""
    monkeypatch.chdir(tmp_path)
    kinds = {"roberta": "xlm-roberta", "xlm": "xlm-roberta", "google": "mt5", "facebook": "m2m_100"}
    # Not `list_models`, to which other tests add models of their own.
    names = [file.stem for file in (Path(open_clip.__file__).parent / "model_configs").glob("*.json")]
    for name in names:
        text = open_clip.get_model_config(name)["text_cfg"]
        if "hf_model_name" in text:
            kind = next(kind for begin, kind in kinds.items() if text["hf_model_name"].startswith(begin))
            write_encoder(tmp_path / text["hf_model_name"], kind, weights=False)
    assert len(names) >= 144
    encoders = 0
    with torch.device("meta"):
        for name in names:
            config = model_config(name, context_length=None)
            for tower, layers in (("vision_cfg", "layers"), ("text_cfg", "layers")):
                if isinstance(config[tower].get(layers), int):  # the shapes do not depend on the depth
                    config[tower][layers] = 1
            model = build_model(OpenClipConfig(name, config), context_length=None)
            encoders += hasattr(model.text, "pad_token_id")
    assert encoders == 10


@pytest.mark.slow
@torch.no_grad()
def test_of_a_captioner_the_two_towers_are_built():
    torch.manual_seed(0)
    theirs = open_clip.create_model("coca_base").eval()
    model = build_model("coca_base", context_length=None).eval()
    state = {name: tensor for name, tensor in theirs.state_dict().items() if not name.startswith("text_decoder.")}
    model.load_state_dict(state | {"logit_scale": state["logit_scale"].reshape(1)})
    image = torch.randn(1, 3, 288, 288)
    ids = open_clip.get_tokenizer("coca_base")(["a photo"])
    torch.testing.assert_close(model.encode_image(image), theirs.encode_image(image, normalize=False))
    torch.testing.assert_close(model.encode_text(ids), theirs.encode_text(ids, normalize=False))
