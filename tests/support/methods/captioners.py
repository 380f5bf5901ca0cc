"""Small captioners with random weights."""

import torch
from open_clip import CoCa

START, END, PADDING, STOP = 49406, 49407, 0, 269  # STOP is a "." at the end of a word

VISION = {"image_size": 32, "patch_size": 16, "layers": 1, "width": 32, "head_width": 16, "output_tokens": True}

TEXT = {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2, "output_tokens": True}

DECODER = {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 2}

POOLED = {"attentional_pool": True, "attn_pooler_heads": 2}

COCA = {
    "embed_dim": 32,
    "vision_cfg": VISION | POOLED,
    "text_cfg": TEXT | {"embed_cls": True},
    "multimodal_cfg": DECODER,
}


def randomize(network, seed=0):
    """Give all parameters random values that favor a few dozen tokens, including those that end a text."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            normal = torch.randn(parameter.shape, generator=generator)
            around = 1 if parameter.dim() == 1 and name.endswith(("weight", "gamma")) else 0
            parameter.copy_(around + normal * (0.2 if parameter.dim() != 1 else 0.3))
        decoder = network.text_decoder
        likely = [END, PADDING, STOP, START, *range(1000, 1030)]
        bias = decoder.ln_final.bias
        decoder.text_projection[:, likely] += (13 * bias / bias.square().sum())[:, None]
    return network.eval()


def coca(config=COCA):
    return randomize(CoCa(**config))


def images(number=4):
    return torch.randn(number, 3, 32, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def flat(captions):
    return [text for texts in captions for text in texts]
