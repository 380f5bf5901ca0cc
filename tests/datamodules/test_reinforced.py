"""The datamodule over reinforced shards: layouts, draws, sizes, faults, the rules of sampling."""

import gzip
import io
import json
import pickle

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as vision

from support.data.images import draw_image
from support.data.reinforced_shards import COUNT, batches, module, record, shards
from support.methods import reinforced as made
from support.runs.distributed import run_distributed
from vlightning.common.errors import UserError
from vlightning.datamodules import ReinforcedImageTextDataModule
from vlightning.datamodules.base.faults import BadDataError, BadSample
from vlightning.datamodules.reinforced.rows import SampleEmbeddings
from vlightning.datamodules.reinforced.samples import ReinforcedDraws
from vlightning.datamodules.reinforced.writer import write_shard
from vlightning.datamodules.text.clip import CLIPTextEncoder

LAYOUTS = {
    "version 1, npz": {},
    "version 1, pth.gz": {"store": "pth.gz"},
    "version 1, param_aug as a string": {"as_string": True},
    "version 2, npz": {"version": 2, "kinds": ("syn_text", "syn_text_other")},
    "version 2, pth.gz": {"version": 2, "store": "pth.gz"},
}


def expected_rows(number, caption, layout):
    """Embedding of a synthetic caption, found by its text."""
    kind, owner, place = caption.rsplit(" ", 2)
    assert int(owner) == number
    index = layout.get("kinds", ("syn_text",)).index(kind)
    return made.embeddings(number, made.SYNTHETIC, 2 + index)[int(place)]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_batch_holds_what_belongs_together(tmp_path, layout):
    """Each row's image, captions and embeddings are compared with those that the test puts together itself."""
    data = module(tmp_path, shards(tmp_path / "data", **layout))
    assert data.teacher_width == made.WIDTH
    tolerance = 0.01 if layout.get("store") == "pth.gz" else 1e-7
    drawn = set()
    for batch in batches(data, epochs=4):
        texts = data.tokenizer
        for row, number in enumerate(batch["sample_index"].tolist()):
            real, synthetic = (
                texts.decode(batch[f"{kind}input_ids"][row][1 : batch[f"{kind}attention_mask"][row].sum() - 1].tolist())
                for kind in ("", "synthetic_")
            )
            assert "".join(real.split()) == f"imagenumber{number}"
            caption = next(
                text
                for texts in json.loads(made.sample(number, **layout)["syn.json"]).values()
                for text in texts
                if "".join(text.split()) == "".join(synthetic.split())
            )
            torch.testing.assert_close(
                batch["teacher_text"][row], made.embeddings(number, 1, 1)[0], rtol=0, atol=tolerance
            )
            torch.testing.assert_close(
                batch["teacher_synthetic"][row], expected_rows(number, caption, layout), rtol=0, atol=tolerance
            )
            images = made.embeddings(number, made.AUGMENTATIONS, 0)
            chosen = int((images @ batch["teacher_image"][row]).argmax())
            torch.testing.assert_close(batch["teacher_image"][row], images[chosen], rtol=0, atol=tolerance)
            assert torch.equal(batch["image"][row], replayed(number, made.augmentations(number)[chosen], 24))
            drawn.add((number, chosen, caption))
    assert len({(number, chosen) for number, chosen, _ in drawn}) > 2 * COUNT
    assert len({(number, caption) for number, _, caption in drawn}) > 2 * COUNT


def replayed(number, augmentation, size):
    """By torchvision: the box, then a rotation or a change of brightness."""
    image = Image.open(io.BytesIO(made.sample(number)["jpg"])).convert("RGB")
    image = vision.resized_crop(image, *augmentation[0], [size, size], InterpolationMode.BILINEAR)
    for operation in augmentation[1]:
        if operation is not None and operation[0] == 5:
            image = vision.rotate(image, operation[1])
        if operation is not None and operation[0] == 6:
            image = vision.adjust_brightness(image, 1 + operation[1])
    return vision.to_tensor(image)


def drawn(data, epochs):
    """Index of the augmentation and of the synthetic caption of each sample, by epoch and sample."""
    found = {}
    for number, batch in enumerate(batches(data, epochs)):
        for row, sample in enumerate(batch["sample_index"].tolist()):
            image = (made.embeddings(sample, made.AUGMENTATIONS, 0) @ batch["teacher_image"][row]).argmax()
            text = (made.embeddings(sample, made.SYNTHETIC, 2) @ batch["teacher_synthetic"][row]).argmax()
            found[number // (COUNT // 4), sample] = int(image), int(text)
    return found


def test_the_first_augmentations_and_captions_may_be_used_alone(tmp_path):
    data = module(tmp_path, shards(tmp_path / "data"), first_augmentations=3, first_synthetic=2)
    found = drawn(data, 4)
    assert {image for image, _ in found.values()} == {0, 1, 2}
    assert {text for _, text in found.values()} == {0, 1}
    other = module(tmp_path, str(tmp_path / "data"), first_augmentations=made.AUGMENTATIONS + 1)
    assert drawn(other, 2) == drawn(module(tmp_path, str(tmp_path / "data")), 2)


@pytest.mark.parametrize("first", [None, 2])
def test_sequential_draws_are_those_of_the_epoch(tmp_path, first):
    data = module(tmp_path, shards(tmp_path / "data"), sequential=True, first_synthetic=first)
    captions = first or made.SYNTHETIC
    for (epoch, _), (image, text) in drawn(data, 5).items():
        assert (image, text) == (epoch % made.AUGMENTATIONS, epoch % captions)


def test_sequential_draws_go_through_all_kinds_of_captions():
    draws = ReinforcedDraws(sequential=True, first_synthetic=2)
    found = [draws.synthetic([3, 1], (0, 0), epoch) for epoch in range(4)]
    assert found == [(0, 0), (0, 1), (1, 0), (0, 0)]


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_a_share_of_the_samples_has_a_synthetic_caption_instead(tmp_path, ratio):
    folder = shards(tmp_path / "data")
    both = {}
    for number, batch in enumerate(batches(module(tmp_path, folder), 4)):
        for row, sample in enumerate(batch["sample_index"].tolist()):
            both[number // (COUNT // 4), sample] = {key: column[row] for key, column in batch.items()}
    shares = []
    for number, batch in enumerate(batches(module(tmp_path, folder, synthetic_ratio=ratio), 4)):
        assert not any("synthetic" in key for key in batch)
        for row, sample in enumerate(batch["sample_index"].tolist()):
            whole = both[number // (COUNT // 4), sample]
            synthetic = torch.equal(batch["input_ids"][row], whole["synthetic_input_ids"])
            kind = ("synthetic_input_ids", "teacher_synthetic") if synthetic else ("input_ids", "teacher_text")
            for name, expected in zip(("input_ids", "teacher_text"), kind, strict=True):
                assert torch.equal(batch[name][row], whole[expected])
            assert torch.equal(batch["image"][row], whole["image"])
            shares.append(synthetic)
    assert len(shares) == 4 * COUNT
    assert abs(sum(shares) / len(shares) - ratio) < (0.2 if ratio == 0.5 else 1e-9)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"synthetic_ratio": 1.5}, "data.synthetic_ratio from 0 to 1, got 1.5"),
        ({"first_synthetic": 0}, "first_synthetic"),
        ({"first_augmentations": 0}, "first_augmentations"),
    ],
)
def test_draws_out_of_range_are_refused(option, message):
    with pytest.raises(UserError, match=message):
        ReinforcedImageTextDataModule(**option)


def test_only_three_rows_are_read(tmp_path, monkeypatch):
    reads = []
    whole = SampleEmbeddings.row
    monkeypatch.setattr(SampleEmbeddings, "row", lambda self, *place: reads.append(place) or whole(self, *place))
    data = module(tmp_path, shards(tmp_path / "data"))
    reads.clear()
    batches(data)
    assert len(reads) == 3 * COUNT


def test_rows_of_several_arrays_are_read_in_turn():
    draws = torch.Generator().manual_seed(0)
    stored = {name: torch.rand(64, 64, generator=draws) for name in ("image_emb", "text_emb")}  # more than a buffer
    for compressed in (False, True):
        arrays = SampleEmbeddings({"npz": made.npz(stored, compressed=compressed)}, "a sample")
        for number in (40, 0, 63):
            for name, rows in stored.items():
                assert torch.equal(arrays.row(name, number), rows[number]), (name, number)


def test_a_row_of_an_array_is_not_read_with_the_others():
    rows = torch.rand(36, 1536, generator=torch.Generator().manual_seed(0))
    content = made.npz({"image_emb": rows, "text_emb": rows[:6]}, compressed=False)
    arrays = SampleEmbeddings({"npz": content}, "a sample")
    for number in (0, 17, 35):
        assert torch.equal(arrays.row("image_emb", number), rows[number])
    later = rows[20:].numpy().tobytes()
    spoilt = SampleEmbeddings({"npz": content.replace(later, b"\xff" * len(later))}, "a sample")
    assert torch.equal(spoilt.row("image_emb", 17), rows[17])
    with pytest.raises(BadSample, match="unreadable image_emb"):
        spoilt.row("image_emb", 35)


@pytest.mark.parametrize("store", ["npz", "pth.gz"])
def test_nothing_is_unpickled(tmp_path, store):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "trap"), "w"))

    def set_trap(number, members):
        content = io.BytesIO()
        if store == "npz":
            del members["npz"]
            np.savez(content, image_emb=np.array([[Trap()]], dtype=object), text_emb=np.zeros((4, 3)))
            members["npz"] = content.getvalue()
        else:
            members["pth.gz"] = gzip.compress(pickle.dumps({"image_emb": Trap(), "text_emb": Trap()}))

    with pytest.raises(UserError, match=f"unreadable {store}: {COUNT}"):
        module(tmp_path, shards(tmp_path / "data", change=set_trap, store=store))
    assert not (tmp_path / "trap").exists()


def test_synthetic_captions_are_chosen_by_pattern(tmp_path):
    layout = {"version": 2, "kinds": ("syn_text_a", "syn_text_b")}
    data = module(tmp_path, shards(tmp_path / "data", **layout), synthetic_keys="syn_text_b")
    rows = torch.cat([batch["teacher_synthetic"] for batch in batches(data)])
    index = torch.cat([batch["sample_index"] for batch in batches(module(tmp_path, str(tmp_path / "data")))])
    for row, number in zip(rows, index.tolist(), strict=True):
        assert (made.embeddings(number, made.SYNTHETIC, 3) - row).abs().amax(1).min() < 1e-6


def remove(kind):
    return lambda members: members.pop(kind)


FAULTS = {
    "no image": remove("jpg"),
    "empty caption": remove("txt"),
    "no member npz or pth.gz": remove("npz"),
    "no member syn.json": remove("syn.json"),
    "no member paug.json": remove("paug.json"),
    "unreadable paug.json": lambda members: members.update({"paug.json": b'{"param_aug": "["}'}),
    "unreadable npz": lambda members: members.update(npz=members["npz"][:100]),
    "no synthetic caption": lambda members: members.update({"syn.json": b'{"syn_text": []}'}),
    "no embedding for each synthetic caption": lambda members: members.update(
        {"syn.json": json.dumps({"syn_text": ["a"] * 4}).encode()}
    ),
    "param_aug and image_emb differ in number": lambda members: members.update(
        {"paug.json": json.dumps({"param_aug": made.augmentations(0)[:3]}).encode()}
    ),
    "embedding of dimension 7 instead of 12": lambda members: members.update(
        npz=made.npz({"image_emb": torch.rand(4, 7), "text_emb": torch.rand(4, 7)})
    ),
    "truncated": lambda members: members.update(jpg=members["jpg"][:-100]),
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_faulty_sample_is_replaced_and_counted(tmp_path, cause, caplog):
    folder = shards(tmp_path / "data", change=lambda number, members: FAULTS[cause](members) if number == 7 else None)
    data = module(tmp_path, folder, max_bad_share=0.5)
    found = torch.cat([batch["sample_index"] for batch in batches(data)]).tolist()
    assert len(found) == COUNT
    assert 7 not in found
    assert data.account("train").causes == {cause: 1}
    assert f"00000001.tar, key7 is unusable ({cause}): replaced" in caplog.text


def test_past_the_share_the_run_stops(tmp_path):
    folder = shards(tmp_path / "data", change=lambda number, members: members.pop("npz") if number > 5 else None)
    with pytest.raises(BadDataError, match=r"max_bad_share.*no member npz or pth.gz: "):
        batches(module(tmp_path, folder))


@pytest.mark.parametrize("cause", ["no image", "empty caption", "no member npz or pth.gz"])
def test_where_nothing_is_usable_one_sentence_comes_before_training(tmp_path, cause):
    folder = shards(tmp_path / "data", change=lambda number, members: FAULTS[cause](members))
    with pytest.raises(UserError, match=f"no usable sample among 12 of 12 .*{cause}: 12.*00000000.tar, key0"):
        module(tmp_path, folder)


def beside(tmp_path, form, folder):
    """Moves images and captions out of the shards."""
    samples = {}

    def move(number, members):
        samples[number] = {kind: members.pop(kind) for kind in ("jpg", "txt")}
        if form == "tars, by uid":
            samples[number]["json"] = json.dumps({"uid": f"uid{number}"}).encode()

    source = shards(folder, change=move)
    images = tmp_path / "images"
    if form.startswith("tars"):
        # In another order, and with one that belongs to no sample.
        for half, numbers in enumerate((range(5, -1, -1), range(11, 5, -1))):
            key = "running{}" if form == "tars, by uid" else "key{}"
            named = {key.format(number): samples[number] for number in numbers}
            made.write_tar(images / f"{half:08d}.tar", {**named, "stranger": {"jpg": b"none"}})
    else:
        name = {"files": "key{}", "files, by uid": "uid{}", "files in folders": "{:08d}/key{}"}[form]
        for number, members in samples.items():
            arguments = (number // 6, number) if form == "files in folders" else (number,)
            for kind, content in members.items():
                path = images / f"{name.format(*arguments)}.{kind}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    return source, str(images)


@pytest.mark.parametrize("form", ["tars", "tars, by uid", "files", "files, by uid", "files in folders"])
def test_images_may_stand_beside_the_shards(tmp_path, form):
    source, images = beside(tmp_path, form, tmp_path / "data")
    inside = module(tmp_path, shards(tmp_path / "inside"))
    for one, other in zip(batches(module(tmp_path, source, images=images)), batches(inside), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_shard_without_images_is_one_sentence(tmp_path):
    source, images = beside(tmp_path, "tars", tmp_path / "data")
    (tmp_path / "images" / "00000001.tar").unlink()
    with pytest.raises(UserError, match=r"a tar file of images in .* got none for '00000001.tar'"):
        module(tmp_path, source, images=images)
    with pytest.raises(UserError, match="Expected the folder of the images"):
        module(tmp_path, source, images=str(tmp_path / "nowhere"))
    made.write_tar(tmp_path / "text" / "00000000.tar", {f"key{n}": {"txt": b"a"} for n in range(6)})
    made.write_tar(tmp_path / "text" / "00000001.tar", {f"key{n}": {"txt": b"a"} for n in range(6, 12)})
    with pytest.raises(UserError, match=r"no usable sample .*no image: 12"):
        module(tmp_path, source, images=str(tmp_path / "text"))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_the_batches(tmp_path, workers):
    folder = shards(tmp_path / "data")
    alone = batches(module(tmp_path, folder), epochs=2)
    together = module(tmp_path, folder, num_workers=workers)
    for one, other in zip(alone, batches(together, epochs=2), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    together.teardown()


def _draw_under_ddp(folder, cache, batch_size):
    data = ReinforcedImageTextDataModule(
        folder, batch_size=batch_size, num_workers=0, image_size=24, max_tokens=16, seed=5, cache_dir=cache
    )
    data.setup("fit")
    return batches(data)


def test_two_processes_read_what_one_does(tmp_path):
    folder, cache = shards(tmp_path / "data"), str(tmp_path / "cache")
    whole = _draw_under_ddp(folder, cache, 4)
    halves = run_distributed(_draw_under_ddp, folder, cache, 2)
    for batch, *parts in zip(whole, *halves, strict=True):
        for key, value in batch.items():
            assert torch.equal(value, torch.cat([part[key] for part in parts])), key


class Recorder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        return self.layer(batch["teacher_image"][:1, :1]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_resumed_run_reads_what_the_whole_one_would_have(tmp_path, step):
    folder = shards(tmp_path / "data")

    def fit(**options):
        recorder = Recorder()
        data = ReinforcedImageTextDataModule(
            folder, batch_size=4, num_workers=2, image_size=24, max_tokens=16, seed=5, cache_dir=str(tmp_path / "cache")
        )
        checkpoints = ModelCheckpoint(tmp_path / "kept", filename="{step}", every_n_train_steps=1, save_top_k=-1)
        silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(accelerator="cpu", max_epochs=3, callbacks=[checkpoints], **silent)
        trainer.fit(recorder, data, **options)
        return recorder.batches

    whole = fit()
    resumed = fit(ckpt_path=str(tmp_path / "kept" / f"step={step}.ckpt"))
    assert len(whole) == 9
    for one, other in zip(whole[step:], resumed, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("store", ["npz", "pth.gz"])
def test_what_is_written_is_read_as_the_vendors_shards_are(tmp_path, version, store):
    write_shard(tmp_path / "ours" / "00000000.tar", [record(number) for number in range(COUNT)], version, store)
    ours = batches(module(tmp_path, str(tmp_path / "ours")))
    theirs = batches(module(tmp_path, shards(tmp_path / "theirs", version=version, store=store)))
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_shard_is_written_whole_or_not_at_all(tmp_path):
    def records():
        yield record(0)
        raise RuntimeError("the teacher ran out of memory")

    with pytest.raises(RuntimeError, match="ran out"):
        write_shard(tmp_path / "00000000.tar", records())
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"got 2: write version 2"):
        write_shard(tmp_path / "00000000.tar", [record(0, ("syn_text", "syn_text_other"))])


def test_embeddings_may_come_in_half_precision(tmp_path):
    data = module(tmp_path, shards(tmp_path / "data", store="pth.gz"), teacher_dtype="bfloat16")
    (first, *_) = batches(data)
    number = int(first["sample_index"][0])
    assert first["teacher_text"].dtype == torch.bfloat16
    assert torch.equal(first["teacher_text"][0], made.embeddings(number, 1, 1)[0].to(torch.bfloat16))


def test_evaluation_takes_pairs_in_any_form(tmp_path, files):
    folder = shards(tmp_path / "shards")
    data = module(tmp_path, folder, validation=files.parquet(5), test=folder, image_mean=(0.5, 0.5, 0.5))
    (batch, *_) = data.val_dataloader()
    assert batch["image"].shape == (3, 3, 24, 24)
    expected = vision.to_tensor(vision.center_crop(vision.resize(draw_image(0), [24]), [24])) - 0.5
    torch.testing.assert_close(batch["image"][0], expected)
    assert torch.equal(batch["input_ids"], CLIPTextEncoder(16)([f"image number {n}" for n in range(3)])["input_ids"])
    data.setup("test")
    assert sum(len(batch["image"]) for batch in data.test_dataloader()) == COUNT


def test_captions_fill_the_context_and_keep_their_end():
    encoder = CLIPTextEncoder(8)
    found = encoder(["a dog!", "one two three four five six seven eight nine"])
    assert found["input_ids"].shape == (2, 8)
    assert found["input_ids"][0, [0, 4]].tolist() == [49406, 49407]
    assert found["attention_mask"].sum(1).tolist() == [5, 8]
    assert found["input_ids"][1, -1] == 49407
    assert encoder([])["input_ids"].shape == (0, 8)
    assert not encoder.usable("  ")
