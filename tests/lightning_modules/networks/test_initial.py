"""Random weights of transformers: at any width, outputs of a layer are as large as its inputs."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from vlightning.lightning_modules.albef.network import ALBEFNetwork
from vlightning.lightning_modules.albef.settings import TextSettings, VisionSettings
from vlightning.lightning_modules.albef.weights import load_bert
from vlightning.lightning_modules.networks.vit import named_vit
from vlightning.lightning_modules.shre.network import SHReNetwork
from vlightning.lightning_modules.shre.settings import TextSettings as SHReText
from vlightning.lightning_modules.shre.settings import ViTSettings


def albef(width):
    heads = width // 32
    vision = VisionSettings(image_size=32, patch_size=16, width=width, depth=1, heads=heads)
    text = TextSettings(200, 16, width, heads, 4 * width, depth=1, fusion_depth=1, dropout=0.0)
    network = ALBEFNetwork(vision, text, 16)
    return [
        network.visual_encoder.blocks,
        network.text_encoder.bert.encoder,
        network.text_encoder.cls.predictions.transform,
    ]


def shre(width):
    vision = ViTSettings(image_size=32, patch_size=16, width=width, depth=1, heads=width // 32)
    network = SHReNetwork(10, "mlp", vision, SHReText(vocab_size=200, depth=1, max_tokens=16))
    return [network.image_encoder.blocks, network.text_encoder.encoder]


def gains(networks):
    """Yield each matrix with the standard deviation of its outputs for inputs of 1."""
    matrices = [module for network in networks for module in network.modules() if isinstance(module, nn.Linear)]
    assert len(matrices) >= 10
    for matrix in matrices:
        yield matrix, matrix.weight.std().item() * matrix.in_features**0.5


@pytest.mark.parametrize("network", [albef, shre])
def test_outputs_of_a_layer_are_as_large_as_its_inputs(network):
    torch.manual_seed(0)
    for width in (64, 256):
        for matrix, gain in gains(network(width)):
            assert gain == pytest.approx(1, rel=0.06), matrix


def test_a_network_of_timm_starts_so_too():
    torch.manual_seed(0)
    for matrix, gain in gains([named_vit("vit_tiny_patch16_224", 32, "model.vision.name").blocks]):
        assert gain == pytest.approx(1, rel=0.03), matrix


def test_beside_a_trained_bert_cross_attention_starts_as_a_layer_of_bert(tmp_path):
    """The settings of the paper: a BERT has no cross-attention to fill it from."""
    torch.manual_seed(0)
    sizes = BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256
    )
    BertForMaskedLM(sizes).save_pretrained(tmp_path)
    vision = VisionSettings(image_size=32, patch_size=16, width=64, depth=1, heads=2)
    network = ALBEFNetwork(vision, TextSettings(200, 512, 64, 2, 256, depth=1, fusion_depth=1), 16)
    load_bert(network.text_encoder, str(tmp_path))
    attention = network.text_encoder.layers[1].crossattention
    for matrix, _ in gains([network.text_encoder.layers[1]]):
        assert matrix.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert all(linear.bias.eq(0).all() for linear in attention.self.values())
