"""The ordinary CLIP that a learngene is expanded into: open_clip's own, counted, and what He-LG cuts out of it."""

import pytest
import torch

from support.methods.clip import randomized
from support.methods.learngene import EMBED, SIZES, clip, random_images, texts
from vlightning.callbacks.learngene.expansion import expand_learngene
from vlightning.callbacks.learngene.file import Learngene, load_learngene, save_learngene
from vlightning.callbacks.learngene.sizes import LearngeneSizes
from vlightning.common.errors import UserError
from vlightning.lightning_modules.mmlg.students import PlainCLIP

COUNTS = {6: 40_963_969, 7: 44_512_897, 8: 48_061_825, 9: 51_610_753, 10: 55_159_681, 11: 58_708_609, 12: 62_257_537}


@pytest.mark.parametrize("depth", COUNTS)
def test_the_descendant_has_the_papers_size_at_every_depth(depth):
    with torch.device("meta"):
        network = PlainCLIP(LearngeneSizes(layers=depth))
    assert sum(parameter.numel() for parameter in network.parameters()) == COUNTS[depth]


@pytest.mark.parametrize(
    ("depth", "vision", "text"),
    [(6, 11_166_720, 29_797_248), (8, 14_715_648, 33_346_176), (12, 21_813_504, 40_444_032)],
)
def test_the_descendants_towers_have_the_papers_sizes(depth, vision, text):
    with torch.device("meta"):
        network = PlainCLIP(LearngeneSizes(layers=depth))
    assert sum(parameter.numel() for parameter in network.visual.parameters()) == vision
    assert vision + text + 1 == COUNTS[depth]


@pytest.mark.parametrize("size", [None, 2])
def test_the_descendant_equals_open_clip_in_features_and_gradients(size):
    theirs = randomized(clip()).double()
    network = PlainCLIP(SIZES).double()
    state = theirs.state_dict()
    network.load_state_dict(state | {"logit_scale": state["logit_scale"].reshape(1)})
    image, ids = random_images(), texts()
    expected = theirs.encode_image(image), theirs.encode_text(ids)
    found = network.encode_pairs(image, ids, size)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    weight = torch.randn(3, EMBED, dtype=torch.float64)
    names = [name for name, _ in theirs.named_parameters() if name != "logit_scale"]
    wanted, gradients = (
        torch.autograd.grad(
            sum((weight * part).sum() for part in parts), [dict(model.named_parameters())[n] for n in names]
        )
        for parts, model in ((expected, theirs), (found, network))
    )
    for name, one, other in zip(names, gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12, msg=name)


def test_the_last_layers_are_the_learngene_of_he_lg(tmp_path):
    network = randomized(PlainCLIP(SIZES))
    tensors = network.learngene_tensors(dict(network.state_dict()))
    save_learngene(Learngene(tensors, SIZES, network.method), tmp_path / "file")
    descendant = clip(4)
    expand_learngene(load_learngene(tmp_path / "file"), descendant)
    for mine, theirs in ((network.visual, descendant.visual), (network, descendant)):
        for layer in (9, 10, 11):
            one, other = mine.transformer.resblocks[layer], theirs.transformer.resblocks[layer - 8]
            for name, tensor in one.state_dict().items():
                assert torch.equal(tensor, other.state_dict()[name]), name


def test_a_shallow_descendant_has_no_learngene():
    network = PlainCLIP(LearngeneSizes(width=8, heads=1, layers=2, image_size=16, patch_size=8, vocab_size=9))
    with pytest.raises(UserError, match="Expected towers of at least the 3 layers of He-LG, got 2"):
        network.learngene_tensors(dict(network.state_dict()))
