"""Positions of a text tower for longer texts than its weights were trained with."""

import pytest
import torch

from support.methods.published import CONFIG, LENGTH, PREPROCESSING, WORDS, tiny_clip
from vlightning.common.errors import UserError
from vlightning.lightning_modules.networks.clip.files import save_open_clip
from vlightning.lightning_modules.networks.clip.models import build_model
from vlightning.lightning_modules.networks.clip.weights import more_positions


def of_long_clip(old):
    """Stretch 77 positions to 248 by the loops of section 3.1 of Long-CLIP: position p / 4 between two old ones."""
    new = torch.zeros(248, old.shape[1])
    new[:20] = old[:20]
    for position in range(20, 76):
        for quarter in range(4):
            mixed = (4 - quarter) / 4 * old[position] + quarter / 4 * old[position + 1]
            new[4 * position - 60 + quarter] = mixed
    for quarter in range(4):
        new[244 + quarter] = old[76] + quarter / 4 * (old[76] - old[75])
    return new


def test_positions_are_stretched_as_by_long_clip():
    table = torch.randn(77, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(more_positions(table, 248, "stretched"), of_long_clip(table))
    plain = more_positions(table, 248, "interpolated")
    torch.testing.assert_close(plain[[0, -1]], table[[0, -1]])
    line = torch.linspace(0, 1, 77)[:, None]
    torch.testing.assert_close(more_positions(line, 248, "interpolated"), torch.linspace(0, 1, 248)[:, None])


@torch.no_grad()
def test_features_of_short_texts_do_not_change(tmp_path):
    torch.manual_seed(7)
    save_open_clip(build_model(CONFIG, context_length=77), CONFIG, PREPROCESSING, tmp_path / "model")
    weights = str(tmp_path / "model")
    modules = {}
    for length, option in ((77, None), (248, "stretched"), (248, "interpolated")):
        module = tiny_clip(weights=weights, max_tokens=length, longer_texts=option)
        module.load_initial_weights()
        modules[length, option] = module.eval()

    def features(module, count):
        ids = torch.zeros(1, module.max_tokens, dtype=torch.long)
        ids[0, :count] = torch.arange(5, 5 + count)
        ids[0, count - 1] = WORDS - 1
        return module.encode_texts(ids, None)

    for count in (2, 20):
        expected = features(modules[77, None], count)
        torch.testing.assert_close(features(modules[248, "stretched"], count), expected)
        assert (features(modules[248, "interpolated"], count) - expected).abs().max() > 1e-4
    assert features(modules[248, "stretched"], 200).shape == (1, 16)
    refused = tiny_clip(weights=weights, max_tokens=248)
    with pytest.raises(UserError, match=r"set data\.max_tokens to 77, or model\.longer_texts to stretched"):
        refused.load_initial_weights()
    assert LENGTH < 77
