"""Captions of transformers' models: images, seeds, settings and refusals."""

import json
import pickle

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from support.methods.captioners import (
    COCA,
    coca,
    flat,
)
from vlightning.common.errors import UserError
from vlightning.lightning_modules.mobileclip.transformers_captioner import TransformersCaptioner


def write(folder, config, network):
    folder.mkdir()
    preprocess = {"size": 32, "mean": [0.5, 0.4, 0.3], "interpolation": "bicubic"}
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config | {"custom_text": True}, "preprocess_cfg": preprocess})
    )
    save_file(
        {key: value.contiguous() for key, value in network.state_dict().items()}, folder / "open_clip_model.safetensors"
    )
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("coca") / "tiny", COCA, coca())


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(90)), "."]
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.4,
}
VIT = {"image_size": 32, "patch_size": 16}
LANGUAGE = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}


def encoder_decoder():
    decoder = transformers.BertConfig(**TINY, **LANGUAGE, is_decoder=True, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**TINY, **VIT), decoder
    )
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 0, 3
    return transformers.VisionEncoderDecoderModel(config)


def blip():
    text = TINY | LANGUAGE | {"sep_token_id": 3, "encoder_hidden_size": 32}
    return transformers.BlipForConditionalGeneration(
        transformers.BlipConfig(text_config=text, vision_config=TINY | VIT)
    )


def git():
    return transformers.GitForCausalLM(transformers.GitConfig(vision_config=TINY | VIT, **TINY, **LANGUAGE))


@pytest.fixture(scope="module", params=[encoder_decoder, blip, git])
def saved(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("transformers"))
    torch.manual_seed(0)
    request.param().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": token for name, token in special.items()}
    ).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def test_models_of_transformers(saved):
    settings = {"captions": 3, "max_new_tokens": 8, "top_p": 0.95}
    model = TransformersCaptioner(saved, **settings, first_sentence=False)
    model.load()
    network = model.network
    model.load()
    assert model.network is network
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (40, 50, 3), np.uint8)) for _ in range(2)]
    batch = torch.stack([pickle.loads(pickle.dumps(model.transform))(image) for image in images])
    assert batch.shape == (2, 3, 32, 32)
    assert -1.01 < batch.min() < -0.5 < 0.5 < batch.max() < 1.01  # normalized

    torch.manual_seed(3)
    found = model(batch, [1, 2])
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), after)  # other random draws are not affected
    assert [len(texts) for texts in found] == [3, 3]
    assert len(set(flat(found))) > 3
    for text in flat(found):
        assert set(text.split()) <= set(WORDS[5:])  # no marks
        assert len(text.split()) <= 8
    torch.manual_seed(4)
    assert model(batch, [1, 2]) == found
    assert model(batch, [1, 3]) != found
    cut = TransformersCaptioner(saved, **settings)
    cut.load()
    assert cut(batch, [1, 2]) == [[text.split(".")[0].strip() for text in texts] for texts in found]
    with pytest.raises(UserError, match="each of 2 images, got 1 seeds"):
        model(batch, [1])

    description = model.description()
    assert json.loads(json.dumps(description)) == description
    assert len(description.pop("sha256")) == 64
    assert description == settings | {
        "class": "TransformersCaptioner",
        "model": saved,
        "weights": saved,
        "temperature": 1.0,
        "first_sentence": False,
        "min_new_tokens": 0,
    }


def test_transformers_draws_all_tokens_within_top_p(saved):
    model = TransformersCaptioner(saved, captions=400, max_new_tokens=1, top_p=1.0, temperature=100.0)
    model.load()
    assert len(set(model(torch.zeros(1, 3, 32, 32), [1])[0])) > 80  # transformers' default keeps 50


def test_minimum_length_of_transformers(saved):
    """The end token is the only likely one, and such a small `top_p` leaves no other."""
    model = TransformersCaptioner(saved, captions=2, max_new_tokens=6, min_new_tokens=4, top_p=1e-6)
    model.load()
    with torch.no_grad():
        head = model.network.get_output_embeddings() or model.network.text_decoder.cls.predictions.decoder
        head.bias = nn.Parameter(torch.zeros(len(WORDS)).index_fill(0, torch.tensor([3]), 1000.0))
    texts = flat(model(torch.zeros(1, 3, 32, 32), [1]))
    assert texts[0] == texts[1]
    ids = []
    model._tokenizer.batch_decode = lambda rows, **_: ids.extend(rows.tolist()) or [""] * len(rows)
    model(torch.zeros(1, 3, 32, 32), [1])
    assert ids[0].index(3) == 5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens .*, got 0"),
        ({"min_new_tokens": 31}, "min_new_tokens .*, got 31"),
        ({"top_p": -0.1}, "top_p .*, got -0.1"),
    ],
)
def test_settings_of_transformers_out_of_range(settings, said):
    with pytest.raises(UserError, match=f"^Expected .*{said}"):
        TransformersCaptioner("any", **settings)


def test_a_model_of_transformers_without_captions_is_refused(tmp_path):
    transformers.BertModel(transformers.BertConfig(**TINY, vocab_size=10)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"image-to-text model .* found something else"):
        TransformersCaptioner(str(tmp_path)).load()
