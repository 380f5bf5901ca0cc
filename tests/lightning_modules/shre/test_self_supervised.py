"""S-SMKE: a self-supervised teacher, its embeddings as targets, and the memory bank of them."""

from functools import partial

import open_clip
import pytest
import timm
import torch
import torch.nn.functional as F
from lightning import Trainer
from timm.models.beit import Block

from support.methods.groups import merged
from support.methods.shre import (
    EMBEDDING,
    SELF_SUPERVISED,
    WORDS,
    random_batch,
    ready,
    tiny_shre,
    write_self_supervised,
)
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapesDataModule
from vlightning.lightning_modules import SHReModule
from vlightning.lightning_modules.core.frozen import Frozen
from vlightning.lightning_modules.shre.network import encode_pairs
from vlightning.lightning_modules.shre.shared import SMKETransformer
from vlightning.lightning_modules.shre.teacher import load_class_token


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_self_supervised(tmp_path_factory.mktemp("teacher"))["teacher"]["weights"]


def tiny(source, seed=0, **options):
    return tiny_shre(None, seed, **merged(SELF_SUPERVISED, {"teacher": {"weights": source}}, options))


def class_tokens(weights, image):
    """The teacher written out: tokens of the last block, without the last norm."""
    network = timm.create_model("test_vit", num_classes=3).eval().to(image.dtype)
    network.load_state_dict(torch.load(weights, weights_only=True))
    tokens = []
    network.blocks.register_forward_hook(lambda *call: tokens.append(call[2]))
    network(F.interpolate(image, (160, 160), mode="bilinear", antialias=True))
    return tokens[0][:, 0].detach()


def slow_loss(module, batch, target, bank):
    """The thesis' losses, one row after another: distillation, and the mean contrast of h2 and h1."""
    image, text = encode_pairs(module.student, batch["image"], batch["input_ids"], batch["attention_mask"], None)
    columns = F.normalize(torch.cat([target, bank]), dim=1)
    distillation = 0.0
    for side in (image["h3"], text["h3"]):
        for row, embedding in enumerate(side):
            logits = torch.stack([F.cosine_similarity(embedding, column, dim=0) for column in columns]) / 0.07
            distillation = distillation + (logits.logsumexp(0) - logits[row]) / (2 * len(side))
    contrast = sum(
        open_clip.ClipLoss()(F.normalize(image[name]), F.normalize(text[name]), module.scales[name].exp()) / 2
        for name in ("h2", "h1")
    )
    return distillation + contrast


@pytest.mark.parametrize("options", [{}, {"memory": {"loss_rows": 2, "micro_batch_size": 4}}])
def test_a_step_is_the_contrast_with_the_teachers_embeddings_and_the_memory_bank(weights, options):
    module = ready(tiny(weights, teacher={"queue_size": 5}, contrast={"mask_same_image": False}, **options))
    batch = random_batch()
    batch["image_id"] = torch.tensor([0, 0, 1, 2, 3, 4])
    target = class_tokens(weights, batch["image"])
    bank = torch.randn(4, EMBEDDING, dtype=torch.float64)
    module.queues()["target"].enqueue(F.normalize(bank, dim=1), torch.arange(4))
    first = module.queues()["target"].features[-1:]  # the queue starts with random rows, which count
    found = module.training_step(batch, 0)
    expected = slow_loss(module, batch, target, torch.cat([bank, first]))
    torch.testing.assert_close(found["loss"], expected, rtol=1e-6, atol=0)
    found["loss"].backward()
    assert all(parameter.grad is None for parameter in module.teacher.parameters())
    torch.testing.assert_close(found["keys"]["target"], F.normalize(target, dim=1), rtol=1e-6, atol=1e-7)
    assert found["key_ids"]["target"].equal(batch["image_id"])
    assert found["keys_are_gathered"]


def test_embeddings_of_the_same_image_are_no_negatives_if_masked(weights):
    batch = random_batch() | {"image_id": torch.tensor([0, 0, 1, 2, 3, 4])}
    losses = {}
    for masked in (True, False):
        module = ready(tiny(weights, teacher={"queue_size": 4}, contrast={"weight": 0.0, "mask_same_image": masked}))
        target = class_tokens(weights, batch["image"])
        module.queues()["target"].enqueue(F.normalize(target[2:3], dim=1).repeat(4, 1), torch.tensor([1, 1, 1, 9]))
        losses[masked] = module.training_step(batch, 0)["loss"].item()
    assert losses[True] < losses[False]


def test_the_memory_bank_holds_the_latest_images_and_is_resumed_but_not_exported(weights, tmp_path):
    data = ShapesDataModule(
        image_size=16,
        max_tokens=8,
        length=12,
        eval_length=8,
        batch_size=4,
        num_workers=0,
        seed=0,
        vocab_size=320,
    )
    module = tiny(weights, teacher={"queue_size": 8}, **WORDS)
    shown = []
    forward = SHReModule._teacher_output
    module._teacher_output = lambda image: shown.append(forward(module, image)) or shown[-1]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(max_epochs=1, accelerator="cpu", limit_val_batches=0, **quiet)
    trainer.fit(module, data)
    expected = F.normalize(torch.cat(shown), dim=1)
    assert len(shown) == 3
    queue = module.queues()["target"]
    torch.testing.assert_close(queue.features, torch.cat([expected[8:], expected[4:8]]))
    assert "train/target_contrast" in trainer.callback_metrics
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = SHReModule.load_from_checkpoint(tmp_path / "last.ckpt")
    assert again.queues()["target"].features.equal(queue.features)
    module.save_pretrained(tmp_path / "export")
    rebuilt = SHReModule.from_pretrained(tmp_path / "export")
    assert not rebuilt.queues()["target"].features.equal(queue.features)
    assert all(
        torch.equal(tensor, rebuilt.student.state_dict()[name]) for name, tensor in module.student.state_dict().items()
    )


def test_fine_tuning_for_retrieval_contrasts_h2_alone_and_starts_from_the_students_weights(weights, tmp_path):
    module = tiny(weights, seed=3)
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "smke.ckpt", weights_only=True)
    tuned = tiny(None, kl={"weight": 0.0}, contrast={"layers": ["h2"]}, weights=str(tmp_path / "smke.ckpt"))
    assert not tuned.queues()
    tuned.load_initial_weights()
    tuned = ready(tuned)
    batch = random_batch()
    image, text = encode_pairs(tuned.student, batch["image"], batch["input_ids"], batch["attention_mask"], None)
    expected = open_clip.ClipLoss()(F.normalize(image["h2"]), F.normalize(text["h2"]), tuned.scales["h2"].exp())
    torch.testing.assert_close(tuned.training_step(batch, 0), expected, rtol=1e-11, atol=0)
    double = module.double().student.state_dict()
    assert all(torch.equal(tensor, double[name]) for name, tensor in tuned.student.state_dict().items())


def test_the_shared_encoder_adds_types_and_returns_the_values_of_the_first_linear_layer():
    torch.manual_seed(0)
    shared = SMKETransformer(8, 2, 5).double()
    with torch.no_grad():
        for parameter in shared.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    plain = Block(8, 2, qkv_bias=True, init_values=0.2, norm_layer=partial(torch.nn.LayerNorm, eps=1e-6)).double()
    plain.load_state_dict(shared.layer.state_dict())
    hidden = []
    plain.mlp.fc1.register_forward_hook(lambda *call: hidden.append(call[2]))
    tokens = torch.randn(3, 6, 8, dtype=torch.float64)
    found = {}
    for kind, mask in ((0, torch.ones(3, 6, dtype=torch.long)), (1, None)):
        after = plain(tokens + shared.type_scale * shared.type_embeddings.weight[kind])[:, 0]
        h2, h1, h3 = found[kind] = shared(tokens, mask)
        torch.testing.assert_close(h2, after)
        torch.testing.assert_close(h1, hidden.pop()[:, 0])
        torch.testing.assert_close(h3, shared.head(shared.norm(after)))
    assert not torch.allclose(found[0][0], found[1][0])
    mask = torch.tensor([1, 1, 1, 1, 0, 0]).expand(3, 6)
    padded = tokens.clone()
    padded[:, 4:] = 7.0
    torch.testing.assert_close(shared(padded, mask), shared(tokens, mask))


def test_the_thesis_sizes_have_117_million_parameters():
    with torch.device("meta"):
        module = SHReModule(num_classes=768, shared="s_smke", kl={"weight": 0.0})
    trained = sum(parameter.numel() for parameter in module.student.parameters())
    assert trained == pytest.approx(117e6, rel=0.005)
    assert module.student.shared_encoder.type_embeddings.weight.numel() == 1536  # thesis, Token-Type Embeddings


def test_beits_pretraining_file_shares_a_table_that_each_block_gets(tmp_path, monkeypatch):
    small = {"depth": 2, "embed_dim": 16, "num_heads": 2, "img_size": 32}
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, **small))
    torch.manual_seed(0)
    name = "beitv2_base_patch16_224"
    pretrained = timm.create_model(name, num_classes=0, use_rel_pos_bias=False, use_shared_rel_pos_bias=True)
    with torch.no_grad():
        for parameter in pretrained.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    extra = {"mask_token": torch.zeros(1, 1, 16), "lm_head.weight": torch.zeros(8, 16), "lm_head.bias": torch.zeros(8)}
    extra["rel_pos_bias.relative_position_index"] = torch.zeros(5, 5, dtype=torch.long)
    torch.save({"model": pretrained.state_dict() | extra}, tmp_path / "beit.pth")
    frozen = Frozen()
    load_class_token(frozen, f"timm/{name}", str(tmp_path / "beit.pth"), 16)
    image = torch.randn(2, 3, 32, 32)
    pretrained.norm = torch.nn.Identity()
    torch.testing.assert_close(frozen.network(image), pretrained.eval().forward_features(image)[:, 0])
    assert frozen.origin["name"] == f"timm/{name}"
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    torch.save({"model": {"cls_token": torch.zeros(1, 1, 16)}}, tmp_path / "part.pth")
    with pytest.raises(UserError, match=r"Expected the tensors of the teacher .* missing blocks"):
        load_class_token(Frozen(), name, str(tmp_path / "part.pth"), 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 7}, r"Expected the teacher's width in model.num_classes, 64 of 'timm/test_vit', got 7"),
        ({"teacher": {"weights": None}}, r"Expected weights of the teacher timm/test_vit, got none: set model.teacher"),
        ({"teacher": {"weights": "no/file.pth"}}, r"Expected a file with the teacher's weights, got 'no/file.pth'"),
        ({"teacher": {"name": "timm/resnet18"}}, r"Expected a (vision transformer|teacher with one token)"),
        ({"kl": {"image_share": 0.3}}, r"Expected kl.image_share 0.5 with embeddings"),
        ({"teacher": {"target": "posterior", "queue_size": 4}}, r"Expected teacher.target embedding with a queue"),
        ({"teacher": {"queue_size": -1}}, r"Expected teacher.queue_size of at least 0, got -1"),
        ({"teacher": {"temperature": 0.0}}, r"Expected teacher.temperature of more than 0, got 0.0"),
    ],
)
def test_misfitting_teachers_are_refused(weights, options, message):
    with pytest.raises(UserError, match=message):
        tiny(weights, **options).setup("fit")
