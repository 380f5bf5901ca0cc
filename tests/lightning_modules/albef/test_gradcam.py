"""Grad-CAM against plain matrix products, without side effects."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from support.methods.albef import random_batch
from support.methods.gradcam import exact_inputs, reference_maps, spread_albef
from support.runs.distributed import run_distributed
from vlightning.common.errors import UserError
from vlightning.lightning_modules.albef.gradcam import word_maps


@pytest.mark.parametrize("layer", [1, 2])
def test_equals_the_plainreference_maps(layer):
    module = spread_albef()
    maps = word_maps(module.student, module.itm_head, *exact_inputs(), layer)
    expected = reference_maps(module, *exact_inputs(), layer)
    tokens = exact_inputs()[2].bool()
    assert (expected[tokens] > 1e-6).any(dim=(1, 2)).double().mean() > 0.5  # something to compare
    torch.testing.assert_close(maps, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(("fusion_layers", "middle"), [(2, 1), (3, 2), (6, 3)])
def test_the_middle_fusion_layer_is_the_default(fusion_layers, middle):
    """The third of six, as in the authors' code: number 8 above six text layers."""
    module = spread_albef(fusion_layers)
    assert torch.equal(
        module.word_maps(*exact_inputs()), word_maps(module.student, module.itm_head, *exact_inputs(), layer=middle)
    )


@pytest.mark.parametrize("layer", [0, 3, 4])
def test_a_layer_without_word_maps_is_refused(layer):
    """In the last layer the attention of words does not reach the matching head: the reference has no map there."""
    module = spread_albef()
    with pytest.raises(UserError, match=f"a fusion layer from 1 to 2, .*, got layer {layer}"):
        word_maps(module.student, module.itm_head, *exact_inputs(), layer)
    last = reference_maps(module, *exact_inputs(), layer=3)
    assert last[:, 0].any()
    assert not last[:, 1:].any()


def test_a_single_fusion_layer_has_no_word_maps():
    with pytest.raises(UserError, match="Expected two or more fusion layers for word maps, got one"):
        spread_albef(fusion_layers=1).word_maps(*exact_inputs())


def test_a_pair_has_the_same_map_in_any_batch_and_at_any_padding():
    module = spread_albef()
    image, input_ids, attention_mask = exact_inputs(4)
    together = module.word_maps(image, input_ids, attention_mask)
    for row in range(4):
        length = int(attention_mask[row].sum())
        text = (part[row : row + 1, :length] for part in (input_ids, attention_mask))
        alone = module.word_maps(image[row : row + 1], *text)
        torch.testing.assert_close(alone[0], together[row, :length])
        assert not together[row, length:].any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_works_in_any_mode_on_tensors_made_in_it(mode):
    module = spread_albef()
    expected = module.word_maps(*exact_inputs())
    with mode():
        torch.testing.assert_close(module.word_maps(*exact_inputs()), expected, rtol=1e-12, atol=0)
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)


def test_does_not_change_gradients_hooks_modes_and_the_generator():
    module = spread_albef()
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    module.itm_head.weight.grad = None
    state = torch.get_rng_state()
    maps = module.word_maps(*exact_inputs())
    assert not maps.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert module.itm_head.weight.grad is None
    assert all((p.grad == 1).all() for p in module.parameters() if p.grad is not None)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_activation_checkpointing_and_frozen_weights_change_nothing():
    module, frozen = spread_albef(), spread_albef(memory={"activation_checkpointing": True}).requires_grad_(False)
    expected = module.word_maps(*exact_inputs())
    torch.testing.assert_close(frozen.word_maps(*exact_inputs()), expected, rtol=1e-12, atol=0)
    checkpointed = spread_albef(memory={"activation_checkpointing": True})
    torch.testing.assert_close(checkpointed.word_maps(*exact_inputs()), expected, rtol=1e-12, atol=0)


def test_half_precision_gives_float32_maps_near_the_exact_ones():
    module = spread_albef()
    exact = module.word_maps(*exact_inputs()).float()
    image, *text = exact_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        maps = module.float().word_maps(image.float(), *text)
    assert maps.dtype == torch.float32
    similarity = F.cosine_similarity(maps.flatten(1), exact.flatten(1))
    assert (similarity > 0.98).all()


def _sharded(looks):
    """Word maps of a sharded model, computed `looks` times, and the gradients of a training step after them."""
    module = spread_albef(text={"dropout": 0.0})
    module._device_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    module.configure_model()
    module.current_alpha = lambda: 0.4
    module.log = module.log_dict = lambda *_, **__: None
    maps = []
    for _ in range(looks):
        with torch.no_grad():
            maps.append(module.word_maps(*exact_inputs()))
    assert all(parameter.grad is None for parameter in module.parameters())
    torch.manual_seed(0)
    module.training_step(random_batch(4, dtype=torch.float64), 0)["loss"].backward()
    return maps, {name: p.grad.full_tensor() for name, p in module.named_parameters() if p.requires_grad}


def _with_and_without():
    return _sharded(looks=2), _sharded(looks=0)


def test_a_sharded_model_gives_the_same_maps_and_trains_the_same():
    expected = spread_albef().word_maps(*exact_inputs())
    for (maps, gradients), (_, plain) in run_distributed(_with_and_without):
        for found in maps:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)
        assert all(torch.equal(gradient, plain[name]) for name, gradient in gradients.items())
