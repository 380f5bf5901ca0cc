"""Captioning: loss, beam search, frozen parts, and a training that learns captions."""

import dataclasses
import itertools

import pyarrow.parquet as pq
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from support.methods.captioning import (
    CAPTIONS,
    EMBED_DIM,
    WIDTH,
    caption_data,
    caption_module,
    embedding,
    write_data,
    write_embeddings,
    write_language_model,
)
from support.methods.tiny_modules import trainer
from vlightning.common.errors import UserError
from vlightning.datamodules.stores.store import FeatureStore
from vlightning.lightning_modules import CaptioningModule
from vlightning.metrics.captions import caption_scores


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """With a language model that writes captions."""
    return write_data(tmp_path_factory.mktemp("captions") / "data", steps=150)


def loaded(arguments, **options):
    module = caption_module(arguments, **options)
    module.load()
    module.log = module.log_dict = lambda *_, **__: None
    return module.double()


def a_batch(arguments):
    data = caption_data(arguments, batch_size=18)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    return batch | {"embedding": batch["embedding"].double()}


def slow_losses(module, batch):
    """One caption at a time, nothing filled up."""
    network, losses = module.language_model.network, []
    words = network.get_input_embeddings()
    rows = zip(batch["embedding"], batch["input_ids"], batch["attention_mask"], strict=True)
    for features, ids, mask in rows:
        ids = ids[: int(mask.sum())]
        prefix = module.mapper(features[None])
        logits = network(inputs_embeds=torch.cat([prefix, words(ids[None])], 1)).logits[0]
        for place, token in enumerate(ids.tolist()):
            losses.append(-logits[prefix.shape[1] + place - 1].log_softmax(-1)[token])
    return torch.stack(losses)


def test_loss_is_the_mean_over_all_tokens_and_ends(arguments):
    module, batch = loaded(arguments), a_batch(arguments)
    tokenizer = module.tokenizer
    texts = [text for texts in CAPTIONS for text in texts]
    assert tokenizer("!")["input_ids"] == [0]  # a real token, though it is the number that pads elsewhere
    assert int(batch["attention_mask"].sum()) == sum(len(tokenizer(text)["input_ids"]) + 1 for text in texts)
    expected = slow_losses(module, batch)
    torch.testing.assert_close(module.training_step(batch, 0), expected.mean(), rtol=1e-9, atol=0)
    filled = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)
    torch.testing.assert_close(
        module.training_step(batch | {"input_ids": filled}, 0), expected.mean(), rtol=1e-12, atol=0
    )


def test_only_the_mapper_trains_and_is_saved(arguments):
    module, batch = loaded(arguments).train(), a_batch(arguments)
    assert not any(part.training for part in module.language_model.modules())
    module.training_step(batch, 0).backward()
    assert all(parameter.grad.any() for parameter in module.mapper.parameters())
    assert all(p.grad is None and not p.requires_grad for p in module.language_model.parameters())
    assert {name.split(".")[0] for name in module.state_dict()} == {"mapper"}
    groups = module.configure_optimizers()["optimizer"].param_groups
    optimized = {parameter for group in groups for parameter in group["params"]}
    assert optimized == set(module.mapper.parameters())


def distinct(module):
    """A mapper whose prefix is of the embedding alone, so that random weights write different captions."""
    module.mapper.prefix.zero_()
    for block in module.mapper.blocks:
        for layer in (block.qkv, block.proj, block.mlp.fc1, block.mlp.fc2):
            layer.weight.mul_(4)
    return module


def plain_beams(module, features, beams, longest, ends):
    """Beam search without cached keys: `beams` unfinished texts at a time, until as many have ended."""
    network = module.language_model.network
    words, prefix = network.get_input_embeddings(), module.mapper(features[None])
    running, finished = [(0.0, [])], []
    for length in range(1, longest + 1):
        texts = words(torch.tensor([ids for _, ids in running], dtype=torch.long))
        inputs = torch.cat([prefix.expand(len(running), -1, -1), texts], 1)
        logs = network(inputs_embeds=inputs).logits[:, -1].float().log_softmax(-1).tolist()
        candidates = [
            (score + log, [*ids, token])
            for (score, ids), row in zip(running, logs, strict=True)
            for token, log in enumerate(row)
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        best = candidates[: (1 + len(ends)) * beams]
        finished += [(s / length, ids) for s, ids in best[:beams] if ids[-1] in ends or length == longest]
        running = [(s, ids) for s, ids in best if ids[-1] not in ends][:beams]
        if len(finished) >= beams:
            break
    return max(finished, key=lambda candidate: candidate[0])[1]


@pytest.mark.parametrize(("beams", "longest", "period"), [(5, 12, False), (3, 5, False), (4, 12, True)])
@torch.no_grad()
def test_captions_equal_a_plain_beam_search(arguments, beams, longest, period):
    module = distinct(loaded(arguments, num_beams=beams, max_new_tokens=longest, stop_at_period=period))
    tokenizer, features = module.tokenizer, torch.stack([embedding(number) for number in range(20, 36)]).double()
    stops = [tokenizer.eos_token_id, *tokenizer(".")["input_ids"]] if period else [tokenizer.eos_token_id]
    assert len(stops) == 1 + period
    expected = [plain_beams(module, row, beams, longest, stops) for row in features]
    texts = [" ".join(tokenizer.decode(ids, skip_special_tokens=True).split()) for ids in expected]
    assert module(features) == texts
    assert len(set(texts)) > 3
    assert [module(row[None])[0] for row in features] == texts


class Numbers:
    """A tokenizer whose texts are the numbers."""

    eos_token_id = 0

    def batch_decode(self, ids, skip_special_tokens):
        return [" ".join(str(number) for number in row if number) for row in ids.tolist()]


@torch.no_grad()
def test_enough_beams_find_the_best_text(arguments):
    module = distinct(loaded(arguments, num_beams=8, max_new_tokens=2))
    torch.manual_seed(20)
    config = GPT2Config(vocab_size=8, n_positions=8, n_embd=WIDTH, n_layer=1, n_head=2)
    network = GPT2LMHeadModel(config).eval().double()
    for parameter in network.parameters():  # releases of transformers draw initial weights in different orders
        torch.nn.init.normal_(parameter, std=0.5)
    module.language_model.network, module.tokenizer = network, Numbers()
    features = torch.randn(24, EMBED_DIM, dtype=torch.float64)
    words, expected = network.get_input_embeddings(), []
    for prefix in module.mapper(features):
        texts = torch.cat([prefix.expand(7, -1, -1), words(torch.arange(1, 8))[:, None]], 1)
        logs = network(inputs_embeds=texts).logits[:, len(prefix) - 1 :].log_softmax(-1)  # [first token, place, token]
        scores = {(0,): logs[0, 0, 0]}
        for first, second in itertools.product(range(1, 8), range(8)):
            scores[first, second] = (logs[first - 1, 0, first] + logs[first - 1, 1, second]) / 2
        expected.append(" ".join(str(number) for number in max(scores, key=scores.get) if number))
    assert module(features) == expected
    assert {len(text.split()) for text in expected} == {0, 1, 2}


def test_a_full_stop_ends_a_caption_with_stop_at_period(arguments):
    module = loaded(arguments, num_beams=1)
    stop = module.tokenizer(".")["input_ids"]
    network = module.language_model.network
    forward, calls = network.forward, []

    def favors(*args, **options):
        out = forward(*args, **options)
        calls.append(None)
        out.logits[..., stop if len(calls) % 3 == 2 else [11]] += 1e4
        return out

    network.forward = favors
    with_stop = module(embedding(0)[None].double())[0]
    assert with_stop.count(".") == 4  # twelve tokens
    module.generation = dataclasses.replace(module.generation, stop_at_period=True)
    calls.clear()
    assert module(embedding(0)[None].double())[0] == with_stop[: with_stop.index(".") + 1]


def fitted(arguments, epochs, **options):
    module, data = caption_module(arguments, **options), caption_data(arguments)
    ran = trainer(max_epochs=epochs, num_sanity_val_steps=0, check_val_every_n_epoch=epochs)
    ran.fit(module, data)
    return ran, module, data


def test_captions_are_learned_scored_and_written(arguments, tmp_path):
    ran, module, data = fitted(arguments, 60, learning_rate=3e-3)
    assert ran.callback_metrics["train/loss"] < 0.5
    written = module(torch.stack([embedding(number) for number in range(len(CAPTIONS))]))
    for text, references in zip(written, CAPTIONS, strict=True):
        assert text in references
    expected = caption_scores(written, CAPTIONS)
    assert expected["cider_d"] > 300
    assert expected["bleu_4"] > 95
    for name, value in expected.items():
        assert ran.callback_metrics[f"val/{name}"].item() == pytest.approx(value, rel=1e-5), name
    (tested,) = ran.test(module, data, verbose=False)
    assert tested == {f"test/{name}": pytest.approx(value, rel=1e-5) for name, value in expected.items()}
    predicting = trainer(default_root_dir=tmp_path)
    predicting.predict(module, data)
    rows = pq.read_table(tmp_path / "predictions" / "captions.parquet").to_pylist()
    assert [row["caption"] for row in rows] == written
    assert [row["image_id"] for row in rows] == list(range(100, 106))
    assert [row["image"].rpartition("/")[2] for row in rows] == [f"{number}.jpg" for number in range(6)]


def test_learning_rate_rises_and_falls_linearly_and_a_long_warm_up_is_cut(arguments):
    module = caption_module(arguments, warmup_steps=5_000, learning_rate=1e-3)
    rates, step = [], CaptioningModule.optimizer_step

    def recorded(self, *args, **options):
        rates.append(self.optimizers().param_groups[0]["lr"])
        return step(self, *args, **options)

    module.optimizer_step = recorded.__get__(module)
    with pytest.warns(
        UserWarning, match="warmup_steps is 5000, but the run has 30 optimizer steps: the warm-up takes 3"
    ):
        trainer(max_epochs=10, limit_val_batches=0).fit(module, caption_data(arguments))
    # The rate of the first step is set before the length of the run is known.
    assert rates[1:3] == pytest.approx([2e-3 / 3, 1e-3])
    assert rates[3:] == pytest.approx([1e-3 * (30 - step) / 27 for step in range(3, 30)])


def saved(arguments, path, **options):
    ran, _, _ = fitted(arguments, 1, **options)
    ran.save_checkpoint(path)
    return torch.load(path, weights_only=True)


def test_checkpoint_names_language_model_and_tower_and_refuses_others(arguments, tmp_path):
    path = tmp_path / "run.ckpt"
    content = saved(arguments, path)
    assert set(content["language model"]) == {"name", "weights", "sha256"}
    assert content["tower"]["sha256"] == "0" * 64
    assert all(name.startswith("mapper.") for name in content["state_dict"])
    again = CaptioningModule.load_from_checkpoint(path)
    with torch.no_grad():
        assert len(again(embedding(0)[None])) == 1

    other = arguments | {"language_model": write_language_model(tmp_path / "other", seed=1)}
    with pytest.raises(UserError, match="language model that the checkpoint was trained with, GPT2LMHeadModel of"):
        trainer().test(caption_module(other), caption_data(other), ckpt_path=path, verbose=False)

    names = FeatureStore(arguments["embeddings"]).names()
    tower = {"model": "ViT", "weights": "elsewhere", "sha256": "1" * 64}
    other = arguments | {"embeddings": write_embeddings(tmp_path / "other_embeddings", names, tower)}
    message = r"Expected embeddings by tiny of 'nowhere'.*got those by ViT"
    with pytest.raises(UserError, match=message):
        trainer().test(caption_module(other), caption_data(other), ckpt_path=path, verbose=False)
    with pytest.raises(UserError, match=message):
        trainer().test(CaptioningModule.load_from_checkpoint(path), caption_data(other), verbose=False)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_learns_and_writes(arguments, precision):
    module, data = caption_module(arguments, learning_rate=3e-3), caption_data(arguments)
    ran = trainer(max_epochs=20, num_sanity_val_steps=0, check_val_every_n_epoch=20, precision=precision)
    ran.fit(module, data)
    assert ran.callback_metrics["train/loss"] < 2
    assert ran.callback_metrics["val/bleu_1"] > 30


def test_misfitting_models_are_refused(arguments, tmp_path):
    with pytest.raises(UserError, match=r"Expected mapper.width 32, .* got 16: set model.mapper.width"):
        loaded(arguments, width=16)
    with pytest.raises(
        UserError, match=r"at most 32 tokens, .* mapper.prefix_length 3 and generation.max_new_tokens 67"
    ):
        loaded(arguments, max_new_tokens=67)
    with pytest.raises(UserError, match=r"Expected embeddings of dimension 12, got 5: set model.embed_dim"):
        loaded(arguments)(torch.zeros(1, 5).double())
    with pytest.raises(UserError, match=r"Expected a language model on the hub, .* found none"):
        loaded({"language_model": str(tmp_path / "nothing")})
    with pytest.raises(UserError, match=r"Expected generation\.num_beams of at least 1, got 0"):
        CaptioningModule(generation={"num_beams": 0})


def test_defaults_are_the_papers():
    with torch.device("meta"):
        module = CaptioningModule()
    assert (module.optim.learning_rate, module.optim.warmup_steps) == (2e-5, 5000)
    assert (module.generation.num_beams, module.generation.max_new_tokens) == (5, 67)
    assert sum(parameter.numel() for parameter in module.mapper.parameters()) == 40_762_368
