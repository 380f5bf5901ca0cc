"""Captions with cached attention equal open_clip's, and depend on image and seed alone."""

import copy
import functools
import json
import pickle
from unittest import mock

import numpy as np
import open_clip
import pytest
import torch
import transformers
from open_clip import CoCa, coca_model
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from support.methods.captioners import (
    COCA,
    DECODER,
    END,
    PADDING,
    START,
    STOP,
    TEXT,
    VISION,
    coca,
    flat,
    images,
)
from vlightning.common.errors import UserError
from vlightning.lightning_modules.mobileclip import coca_captioner
from vlightning.lightning_modules.mobileclip.caption_decoder import CachedDecoder, draw, top_p_filtered
from vlightning.lightning_modules.mobileclip.captioner import post_processed
from vlightning.lightning_modules.mobileclip.coca_captioner import CoCaCaptioner
from vlightning.lightning_modules.mobileclip.transformers_captioner import TransformersCaptioner
from vlightning.lightning_modules.networks.published_clip import load_published

SCALED = {"ls_init_value": 0.1}

OTHER = {  # no class token, another activation, layer scales, depths and widths, no attentional pooling
    "embed_dim": 16,
    "quick_gelu": True,
    "vision_cfg": VISION | {"width": 48} | SCALED,
    "text_cfg": TEXT | {"width": 48, "heads": 3, "layers": 3} | SCALED,
    "multimodal_cfg": DECODER | {"width": 48, "heads": 2, "layers": 1} | SCALED,
}


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


@functools.cache
def read(model, folder):
    return load_published(model, folder)


def published(model, folder):
    """Return what the files hold, which are read once; the network is a copy, which a test may change."""
    found = read(model, folder)
    return found._replace(network=copy.deepcopy(found.network))


def captioner(folder, **settings):
    """Load it in double precision, so that rounding changes no token."""
    loaded = CoCaCaptioner("tiny", folder, **({"captions": 3, "length": 12} | settings))
    with mock.patch.object(coca_captioner, "load_published", published):
        loaded.load()
    return loaded.double()


def whole_logits(network, images, text):
    """Next-token logits of open_clip for a whole text."""
    return network(images, text, output_labels=False)["logits"][:, -1]


def sequence_first(network):
    for part in (network.text, network.text_decoder):
        for module in part.modules():
            if hasattr(module, "batch_first"):
                module.batch_first = False


def correct_mask(network):
    network.text.correct_cls_mask = True


@pytest.mark.parametrize("config", [COCA, OTHER], ids=["coca", "other"])
@pytest.mark.parametrize("change", [nn.Identity(), sequence_first, correct_mask])
@torch.no_grad()
def test_cached_logits_equal_those_of_the_whole_text(config, change):
    network = coca(config).double()
    change(network)
    batch, captions = images(2), 3
    text = torch.randint(1, START, (2, captions, 12), generator=torch.Generator().manual_seed(1))
    decoder = CachedDecoder(network, network.visual(batch)[1])
    repeated = batch.repeat_interleave(captions, 0)
    for length in range(1, 13):
        found = decoder.step(text[..., length - 1])
        seen = text.flatten(0, 1)
        if config is COCA:
            expected = whole_logits(network, repeated, seen[:, :length])
        else:  # without a class token, open_clip's mask fits full texts only; what comes later makes no difference
            expected = network(repeated, seen, output_labels=False)["logits"][:, length - 1]
        assert expected.std() > 0.5
        assert torch.allclose(found, expected.view_as(found), rtol=0, atol=1e-10), length


def slow_caption(network, image, numbers, length, min_length, top_p, temperature):
    """Sample one caption without a cache."""
    ids = [START]
    while len(ids) < length and ids[-1] not in (END, PADDING):
        logits = whole_logits(network, image[None], torch.tensor([ids]))[0].numpy()
        if len(ids) + 1 == length:
            ids.append(END)
            break
        if len(ids) < min_length:
            logits[END] = -np.inf
        likeliest = np.argsort(-logits)
        weights = np.exp(logits - logits.max())
        above = np.cumsum(weights[likeliest] / weights.sum()) - weights[likeliest] / weights.sum()
        kept = likeliest[above < top_p]
        weights = np.zeros_like(logits)
        weights[kept] = np.exp((logits[kept] - logits.max()) / temperature)
        mass = np.cumsum(weights / weights.sum())
        ids.append(int(np.argmax(mass >= (1 - numbers[len(ids)]) * mass[-1])))
    return ids


@pytest.mark.parametrize(
    "settings",
    [
        {"min_length": 0},
        {"min_length": 8, "top_p": 0.6, "temperature": 2.5},
        {"min_length": 5, "top_p": 1.0, "temperature": 0.7},
    ],
)
@torch.no_grad()
def test_captions_equal_those_of_a_plain_sampler(folder, settings):
    fast = captioner(folder, **settings)
    found = fast.sample(images(), range(4)).tolist()
    lengths = set()
    for seed, (image, captions) in enumerate(zip(images(), found, strict=True)):
        numbers = np.random.default_rng(seed).random((3, 12))
        for number, caption in enumerate(captions):
            expected = slow_caption(
                fast.network, image, numbers[number], 12, fast.min_length, fast.top_p, fast.temperature
            )
            assert caption == expected + [PADDING] * (len(caption) - len(expected))
            lengths.add(len(expected))
            assert END not in caption[: fast.min_length]
    assert len(lengths) > 2  # some ended early


@torch.no_grad()
def test_captions_equal_those_of_open_clip(folder, monkeypatch):
    """Patch `generate`: transformers 5 lacks a class of beam search, and the random numbers are ours."""
    fast = captioner(folder, min_length=5, temperature=1.3)
    numbers = torch.from_numpy(np.stack([np.random.default_rng(seed).random((3, 12)) for seed in range(4)])).flatten(
        0, 1
    )
    last = torch.full((12,), START)
    position = 0

    def multinomial(probabilities, count):
        nonlocal position
        position += 1
        going = (last != END) & (last != PADDING)
        mass = probabilities.cumsum(-1)
        drawn = (mass >= (1 - numbers[going, position])[:, None] * mass[:, -1:]).float().argmax(-1)
        last[going] = drawn
        return drawn[:, None]

    monkeypatch.setattr(coca_model, "_has_transformers", True)
    monkeypatch.setitem(coca_model.GENERATION_TYPES, "top_p", transformers.TopPLogitsWarper)
    monkeypatch.setattr(torch, "multinomial", multinomial)
    expected = fast.network.generate(
        images().repeat_interleave(3, 0),
        seq_len=12,
        min_seq_len=5,
        top_p=0.9,
        temperature=1.3,
        generation_type="top_p",
        fixed_output_length=True,
    )
    found = fast.sample(images(), range(4)).flatten(0, 1)
    assert position == 10
    assert torch.equal(found, expected[:, : found.shape[1]])
    assert (expected[:, found.shape[1] :] == PADDING).all()
    # Theirs ends a text that ended by padding with exclamation marks.
    texts = [
        open_clip.decode(row).split("<end_of_text>")[0].split("<start_of_text>")[-1].rstrip("!").split(".")[0].strip()
        for row in expected
    ]
    assert flat(fast(images(), range(4))) == texts
    assert len(set(texts)) > 6


def test_a_caption_depends_on_its_image_and_seed_alone(folder):
    fast = captioner(folder, length=10)
    together = fast(images(), [7, 8, 9, 10])
    assert all(len(captions) == 3 for captions in together)
    for number, order in enumerate(([2], [3, 2, 0], [1, 2, 2, 2, 2, 0])):
        mates = fast(images()[order], [7 + index for index in order])
        assert mates == [together[index] for index in order], number
    assert fast(images(), [7, 8, 9, 11])[:3] == together[:3]
    assert fast(images(), [7, 8, 9, 11])[3] != together[3]
    assert fast(images()[[1, 0, 2, 3]], [7, 8, 9, 10])[:2] != together[:2]
    assert len(set(together[0])) > 1


def test_each_image_is_encoded_once(folder):
    fast = captioner(folder, captions=4)
    seen, keys = [], []
    fast.network.visual.register_forward_hook(lambda module, arguments, output: seen.append(len(arguments[0])))
    for block in fast.network.text_decoder.cross_attn:
        block.ln_1_kv.register_forward_hook(lambda module, arguments, output: keys.append(len(arguments[0])))
    fast(images(3), [1, 2, 3])
    assert seen == [3]
    assert keys == [3, 3]  # a row of each image, in each of two blocks


def test_generation_ends_with_the_last_caption(folder):
    fast = captioner(folder, min_length=0)
    with torch.no_grad():
        fast.network.text_decoder.text_projection[:, END] *= 10
        fast.network.text_decoder.ln_final.weight.zero_()
    assert fast.sample(images(), range(4)).tolist() == [[[START, END, PADDING]] * 3] * 4
    assert fast(images(), range(4)) == [[""] * 3] * 4


@torch.no_grad()
def test_half_precision(folder):
    half, exact = captioner(folder).float(), captioner(folder)
    batch, tokens = images().float(), torch.full((4, 3), START)
    expected = CachedDecoder(exact.network, exact.network.visual(images())[1]).step(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        found = CachedDecoder(half.network, half.network.visual(batch)[1]).step(tokens)
        captions = half(batch, range(4))
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())  # not rounded at the end
    assert (found - expected).abs().max() < 0.3 < expected.std()
    assert [len(texts) for texts in captions] == [3] * 4
    assert any(flat(captions))


def test_the_network_is_frozen(folder):
    fast = captioner(folder)
    assert not any(parameter.requires_grad for parameter in fast.parameters())
    assert not any(module.training for module in fast.train().modules())


@pytest.mark.parametrize("top_p", [1e-17, 1e-6, 0.2, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("scale", [0.01, 0.1, 3.0, 30.0])
@pytest.mark.parametrize("size", [500, 3000])  # the second is looked through in two ways, by how many are kept
def test_top_p_filter_equals_that_of_transformers(top_p, scale, size):
    logits = scale * torch.randn(20, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits[3, 7] = 100.0  # dominates
    logits[4, 8:] = -torch.inf
    expected = transformers.TopPLogitsWarper(top_p)(None, logits)
    found = top_p_filtered(logits.view(4, 5, size), top_p).view(20, size)
    assert torch.equal(found, expected)
    assert (found > -torch.inf).any(-1).all()


def test_top_p_filter_keeps_the_smallest_sufficient_set():
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log()
    kept = {
        top_p: (top_p_filtered(logits, top_p) > -torch.inf).nonzero()[:, 0].tolist() for top_p in (0.4, 0.6, 0.9, 1)
    }
    assert kept == {0.4: [1], 0.6: [1, 3], 0.9: [1, 2, 3], 1: [0, 1, 2, 3]}


def test_top_p_filter_breaks_ties():
    assert [int((top_p_filtered(torch.zeros(8), top_p) == 0).sum()) for top_p in (0.01, 0.25, 0.5, 1)] == [1, 2, 4, 8]


def test_draws_have_the_filtered_distribution():
    logits = torch.tensor([0.05, 0.4, 0.0, 0.3, 0.25]).log()
    uniform = (torch.arange(100_000, dtype=torch.float64) / 100_000).view(10, 10_000)
    drawn = draw(logits.expand(10, 10_000, 5), uniform, top_p=0.9, temperature=2.0)
    weights = torch.tensor([0, 0.4, 0, 0.3, 0.25]).sqrt()  # after the filter, temperature 2 takes the square root
    expected = weights / weights.sum()
    assert drawn.shape == (10, 10_000)
    assert torch.allclose(drawn.flatten().bincount(minlength=5) / 100_000, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 2**-53, 0.5, 1 - 2**-53])
def test_filtered_tokens_are_never_drawn(uniform):
    logits = 3 * torch.randn(300, 500, generator=torch.Generator().manual_seed(6))  # sums on both sides of 1
    tokens = draw(logits, torch.full((300,), uniform, dtype=torch.float64), top_p=0.5, temperature=1.0)
    assert (top_p_filtered(logits, 0.5).gather(1, tokens[:, None]) > -torch.inf).all()


@pytest.mark.parametrize(
    ("text", "whole", "sentence"),
    [
        ("<start_of_text>a cat on a mat . <end_of_text>!!!!", "a cat on a mat .", "a cat on a mat"),
        ("<start_of_text>a cat <start_of_text>two dogs . three . ", "two dogs . three .", "two dogs"),
        ("<start_of_text>a cat <end_of_text>then <end_of_text><start_of_text>a dog", "a cat", "a cat"),
        ("<start_of_text><end_of_text>", "", ""),
        ("<start_of_text>. a cat", ". a cat", ""),
        ("  no marks at 3.5 m  ", "no marks at 3.5 m", "no marks at 3"),
        ("", "", ""),
    ],
)
def test_post_processing(text, whole, sentence):
    assert post_processed(text) == post_processed(text, first_sentence=True) == sentence
    assert post_processed(text, first_sentence=False) == whole


def test_whole_texts(folder):
    cut, whole = captioner(folder), captioner(folder, first_sentence=False)
    ids = whole.sample(images(), range(4))
    assert (ids == STOP).any()
    assert (ids[..., 1:] == START).any()
    for caption, full, row in zip(
        flat(cut(images(), range(4))), flat(whole(images(), range(4))), ids.flatten(0, 1).tolist(), strict=True
    ):
        assert caption == full.split(".")[0].strip()
        assert ("." in full) == (STOP in row[max(place for place, token in enumerate(row) if token == START) :])


def test_transform_description_and_loading_once(folder):
    fast = CoCaCaptioner("tiny", folder, captions=2, length=9, min_length=3, top_p=0.8, temperature=1.5)
    with pytest.raises(RuntimeError, match=r"call load\(\) first"):
        _ = fast.transform
    fast.load()
    network = fast.network
    fast.load()
    assert fast.network is network
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8))
    found = pickle.loads(pickle.dumps(fast.transform))(image)
    expected = open_clip.create_model_from_pretrained(f"local-dir:{folder}")[1](image)
    assert found.shape == (3, 32, 32)
    assert torch.allclose(found, expected, atol=2e-2)
    description = fast.description()
    assert json.loads(json.dumps(description)) == description
    sha256 = description.pop("sha256")
    assert len(sha256) == 64
    preprocessing = description.pop("preprocessing")
    assert (preprocessing["mean"], preprocessing["image_size"]) == ([0.5, 0.4, 0.3], 32)
    assert description == {
        "class": "CoCaCaptioner",
        "model": "tiny",
        "weights": folder,
        "captions": 2,
        "top_p": 0.8,
        "temperature": 1.5,
        "first_sentence": True,
        "length": 9,
        "min_length": 3,
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"captions": 0}, "captions .*, got 0"),
        ({"top_p": 0.0}, "top_p .*, got 0.0"),
        ({"top_p": 1.1}, "top_p .*, got 1.1"),
        ({"temperature": 0.0}, "temperature .*, got 0.0"),
        ({"temperature": float("inf")}, "temperature .*, got inf"),
        ({"length": 2, "min_length": 0}, "length .*, got 2"),
        ({"length": 8, "min_length": 8}, "min_length .*, got 8"),
        ({"min_length": -1}, "min_length .*, got -1"),
    ],
)
def test_settings_out_of_range(settings, said):
    with pytest.raises(UserError, match=f"^Expected .*{said}"):
        CoCaCaptioner(**settings)


def test_too_long_for_the_network(folder):
    with pytest.raises(UserError, match=r"length of at most 12, .*, got 13"):
        captioner(folder, length=13)


def test_seeds_for_other_images(folder):
    with pytest.raises(UserError, match="each of 4 images, got 3 seeds"):
        captioner(folder)(images(), [1, 2, 3])


BLOCKS = COCA | {"text_cfg": COCA["text_cfg"] | {"qk_norm": True}}
BIDIRECTIONAL = COCA | {"text_cfg": TEXT | {"no_causal_mask": True}}
CLIP = {"embed_dim": 32, "vision_cfg": VISION | {"output_tokens": False}, "text_cfg": TEXT | {"output_tokens": False}}


@pytest.mark.parametrize("config", [BLOCKS, BIDIRECTIONAL, CLIP], ids=["blocks", "bidirectional", "clip"])
def test_unsupported_networks_are_refused(tmp_path, config):
    make = CoCa if "multimodal_cfg" in config else open_clip.model.CLIP
    source = write(tmp_path / "other", config, make(**config))
    with pytest.raises(UserError, match="Expected a CoCa whose text tower is open_clip's plain causal transformer"):
        CoCaCaptioner("other", source).load()


def test_missing_folders(tmp_path):
    with pytest.raises(UserError, match="found no file"):
        CoCaCaptioner("coca_ViT-B-32", str(tmp_path / "none" / "weights.bin")).load()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="found no captioner"):
        TransformersCaptioner(str(tmp_path / "none")).load()
    with pytest.raises(UserError, match=r"image-to-text model .* found something else"):
        TransformersCaptioner(str(tmp_path / "empty")).load()


def test_non_finite_logits_raise_one_sentence(folder):
    loaded = captioner(folder)
    with torch.no_grad():
        loaded.network.text_decoder.text_projection.fill_(torch.nan)
    with pytest.raises(UserError, match="Expected finite logits from tiny, got non-finite ones"):
        loaded(images(), range(4))
