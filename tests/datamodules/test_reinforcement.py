import hashlib
import io
import json
import logging
import tarfile

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value
from PIL import Image as Pillow

from support.data.images import draw_image, encoded
from vlightning.common.errors import UserError
from vlightning.datamodules import ReinforcedImageTextDataModule, ReinforcementDataModule
from vlightning.datamodules.base.decode import image_suffix
from vlightning.datamodules.base.faults import BadDataError
from vlightning.datamodules.reading.shards import Shards
from vlightning.datamodules.reading.tar import tar_index
from vlightning.datamodules.reinforced.writer import ShardFile, write_shard
from vlightning.datamodules.transforms.replay import Augmentation, Box, replay

SIZE = (40, 32)
IMAGE = {"bytes": Value("binary"), "path": Value("string")}


@pytest.fixture
def pairs(tmp_path):
    """Writes pairs with synthetic captions; some rows can be replaced."""

    def write(count=10, replaced=None):
        def row(number):
            values = {
                "image": {"bytes": encoded(draw_image(number, SIZE), "JPEG", quality=90), "path": None},
                "caption": [f"image number {number}"],
                "made": [f"first of {number}", f"second of {number}"],
            }
            return values | (replaced or {}).get(number, {})

        features = {"image": IMAGE, "caption": List(Value("string")), "made": List(Value("string"))}
        path = tmp_path / "pairs.parquet"
        Dataset.from_list([row(number) for number in range(count)], features=Features(features)).to_parquet(path)
        return str(path)

    return write


@pytest.fixture
def module(tmp_path):
    def make(source, **options):
        defaults = {
            "folder": str(tmp_path / "shards"),
            "synthetic_column": "made",
            "augmentations": 3,
            "shard_size": 4,
            "batch_size": 3,
            "num_workers": 0,
            "image_size": 16,
            "seed": 5,
            "max_bad_share": 1.0,
            "cache_dir": str(tmp_path / "cache"),
        }
        return ReinforcementDataModule(source, **{**defaults, **options})

    return make


def batches(module):
    module.setup("predict")
    return list(module.predict_dataloader())


def embedded(batch, width=6):
    """What a module would make of a batch, with embeddings that tell row and place."""
    for pair in batch["originals"].pairs:
        count = len(pair.synthetic)
        image = torch.arange(float(len(pair.augmentations) * width)).reshape(-1, width) + 100 * pair.row
        text = -torch.arange(float((1 + count) * width)).reshape(-1, width) - 100 * pair.row
        yield pair.reinforced(pair.synthetic, image / 512, text[:1] / 512, text[1:] / 512)


def write_all(module, version=1, store="npz"):
    """Writes every shard as the writer does, without its thread; the records by row."""
    records = {}
    for batch in batches(module):
        records |= {int(record.key): record for record in embedded(batch)}
    for number in range(module.shards):
        mine = [records[row] for row in module.shard_rows(number) if row in records]
        write_shard(module.shard_path(number), mine, version, store)
    return records


def test_a_batch_holds_rows_of_one_shard_in_order(pairs, module):
    found = [batch["sample_index"].tolist() for batch in batches(module(pairs()))]
    assert found == [[0, 1, 2], [3], [4, 5, 6], [7], [8, 9]]


def test_views_are_the_recorded_augmentations_of_the_stored_image(pairs, module):
    class Wants:
        views = ((16, "bicubic"), (20, "bilinear"))
        caption_transform = None

    data = module(pairs())
    data.setup("predict")
    data.trainer = type("Trainer", (), {"lightning_module": Wants, "distributed_sampler_kwargs": None})()
    inputs = data._network_inputs()
    data.trainer = None
    assert inputs.views == [(16, "bicubic"), (20, "bilinear")]
    batch = next(iter(data.predict_dataloader()))
    for number, pair in enumerate(batch["originals"].pairs):
        stored = Pillow.open(io.BytesIO(pair.image))
        for place, augmentation in enumerate(pair.augmentations):
            expected = np.asarray(replay(stored, augmentation, 16, "bicubic"))
            assert np.array_equal(batch["views"][0][number, place].numpy(), expected)
    assert batch["views"][0].dtype == torch.uint8
    assert batch["views"][0].shape == (3, 3, 16, 16, 3)


def test_draws_are_a_function_of_seed_row_and_number(pairs, module):
    source = pairs()

    def drawn(**options):
        found = {}
        for batch in batches(module(source, **options)):
            found |= {pair.row: pair.augmentations for pair in batch["originals"].pairs}
        return found

    once = drawn()
    assert once == drawn(batch_size=1, shard_size=7, num_workers=2)
    more = drawn(augmentations=5)
    assert {row: some[:3] for row, some in more.items()} == once
    assert drawn(seed=6) != once
    assert len({some for row in once.values() for some in row}) > 25  # of 30


def test_released_defaults_are_the_specifications(tmp_path):
    data = ReinforcementDataModule("x", str(tmp_path))
    assert (data.augmentations, data.image_size) == (30, 224)
    assert (list(data.draw.crop.scale), list(data.draw.crop.ratio)) == ([0.08, 1.0], [3 / 4, 4 / 3])
    assert (data.draw.num_ops, len(data.draw.operations)) == (2, 14)
    assert data.draw.magnitudes[3] == pytest.approx(30.453, abs=1e-3)  # TranslateX, pixels


def test_finished_shards_are_left_out_and_processes_share_the_rest(pairs, module, monkeypatch):
    data = module(pairs())
    data.setup("predict")
    write_shard(data.shard_path(1), [])

    def of_rank(replicas, rank):
        again = module(data.hparams["pairs"])
        monkeypatch.setattr(type(again), "replicas", lambda _: (replicas, rank))
        again.setup("predict")
        return [batch["sample_index"].tolist() for batch in again.predict_dataloader()], again.missing_rows

    assert of_rank(1, 0) == ([[0, 1, 2], [3], [8, 9]], 6)
    assert of_rank(2, 0) == ([[0, 1, 2], [3]], 6)
    assert of_rank(2, 1) == ([[8, 9]], 6)
    assert of_rank(3, 2) == ([[]], 6)  # one batch of nothing, or what follows the last batch would not run


def test_unusable_rows_come_with_their_cause(pairs, module, caplog):
    bad = {
        1: {"image": {"bytes": encoded(draw_image(1), "JPEG")[:-40], "path": None}},
        2: {"image": {"bytes": b"no image at all", "path": None}},
        3: {"caption": ["  "]},
        4: {"made": []},
        5: {"image": {"bytes": None, "path": "/nowhere/at/all.jpg"}},
        6: {"caption": ["one", "another"]},
    }
    data = module(pairs(8, bad))
    found = batches(data)
    faults = {row: fault.cause for batch in found for row, fault in batch["originals"].faults}
    expected = {1: "truncated", 2: "not an image", 3: "empty caption", 4: "no synthetic caption", 5: "missing file"}
    assert faults == expected
    assert [row for batch in found for row in batch["sample_index"].tolist()] == [0, 6, 7]
    account = data.account("predict")
    assert account.num_read == 8
    assert account.causes.total() == 5
    assert dict(account.remarks) == {"further captions of a row skipped": 1}
    assert next(pair.caption for batch in found for pair in batch["originals"].pairs if pair.row == 6) == "one"


def test_too_many_unusable_rows_end_the_run(pairs, module):
    bad = {row: {"caption": [" "]} for row in range(4, 10)}
    with pytest.raises(BadDataError, match=r"6 of 10 \(empty caption: 6\)"):
        batches(module(pairs(10, bad), max_bad_share=0.5))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("store", ["npz", "pth.gz"])
def test_what_is_written_reads_back_bit_for_bit(pairs, module, version, store):
    data = module(pairs(), version=version, embeddings=store)
    records = write_all(data, version, store)
    loaded = {row: view for batch in data.predict_dataloader() for row, view in rows_and_views(batch)}
    seen = list(data.reread(100))
    assert len(seen) == 10
    for batch, written in seen:
        row = int(written.name.rpartition(" ")[2])
        record = records[row]
        assert torch.equal(batch["views"][0][0], loaded[row])
        assert torch.equal(written.image, stored(record.image_embeddings, store))
        text = torch.cat([record.text_embeddings, *record.synthetic_embeddings.values()])
        assert torch.equal(written.text, stored(text, store))
        (pair,) = batch["originals"].pairs
        assert (pair.caption, pair.synthetic) == (record.caption, list(record.synthetic["syn_text"]))
        assert pair.augmentations == record.augmentations


def rows_and_views(batch):
    return zip(batch["sample_index"].tolist(), batch["views"][0] if batch["views"] else [], strict=True)


def stored(rows, store):
    return rows.to(torch.bfloat16).float() if store == "pth.gz" else rows


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("store", ["npz", "pth.gz"])
def test_students_read_the_shards(pairs, module, version, store, tmp_path):
    data = module(pairs(), version=version, embeddings=store)
    records = write_all(data, version, store)
    student = ReinforcedImageTextDataModule(
        str(data.folder), batch_size=10, num_workers=0, image_size=16, other_sizes="refuse", cache_dir=str(tmp_path)
    )
    student.setup("fit")
    (batch,) = student.train_dataloader()
    assert sorted(batch["sample_index"].tolist()) == list(range(10))
    for number, row in enumerate(batch["sample_index"].tolist()):
        image = stored(records[row].image_embeddings, store)
        synthetic = stored(records[row].synthetic_embeddings["syn_text"], store)
        assert (image == batch["teacher_image"][number]).all(1).any()
        assert (synthetic == batch["teacher_synthetic"][number]).all(1).any()
        assert torch.equal(batch["teacher_text"][number], stored(records[row].text_embeddings, store)[0])


def vendors_reader(path):
    """Samples of a shard as the vendor's trainer sees them: its own way of reading, in few words.

    WebDataset groups members by what stands before the first dot; JSON is parsed, arrays are loaded; augmentations are
    indexed as lists; the real caption is row 0 of `text_emb`, the synthetic ones follow, unless each kind has an array.
    """
    samples = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, _, kind = member.name.partition(".")
            samples.setdefault(key, {})[kind] = tar.extractfile(member).read()
    for key, members in samples.items():
        image = Pillow.open(io.BytesIO(members["jpg"])).convert("RGB")
        syn, paug = json.loads(members["syn.json"]), json.loads(members["paug.json"])["param_aug"]
        if "npz" in members:
            arrays = {name: torch.from_numpy(rows) for name, rows in np.load(io.BytesIO(members["npz"])).items()}
        else:
            import gzip

            arrays = torch.load(io.BytesIO(gzip.decompress(members["pth.gz"])), weights_only=True)
        texts = [members["txt"].decode()]
        old = len(arrays["text_emb"]) > len(texts)
        synthetic = arrays["text_emb"][len(texts) :] if old else arrays["syn_text_emb"]
        first = paug[1]
        replayed = replay(image, Augmentation(Box(*first[0]), tuple(map(tuple, first[1]))), 16, "bicubic")
        yield key, texts[0], syn["syn_text"], arrays["image_emb"], arrays["text_emb"][0], synthetic, replayed, members


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("store", ["npz", "pth.gz"])
def test_the_vendors_way_of_reading_finds_everything(pairs, module, version, store):
    data = module(pairs(), version=version, embeddings=store)
    records = write_all(data, version, store)
    count = 0
    for path in sorted(data.folder.glob("*.tar")):
        for key, caption, made, image, text, synthetic, replayed, members in vendors_reader(path):
            record = records[int(key)]
            assert (caption, made) == (record.caption, list(record.synthetic["syn_text"]))
            assert torch.equal(image.float(), stored(record.image_embeddings, store))
            assert torch.equal(text.float(), stored(record.text_embeddings, store)[0])
            assert torch.equal(synthetic.float(), stored(record.synthetic_embeddings["syn_text"], store))
            assert image.dtype == (torch.float32 if store == "npz" else torch.bfloat16)
            assert replayed.size == (16, 16)
            identity = json.loads(members["json"])
            assert identity["sha256"] == hashlib.sha256(members["jpg"]).hexdigest()
            assert (identity["original_height"], identity["original_width"]) == (SIZE[1], SIZE[0])
            assert len(identity["uid"]) == 32
            count += 1
    assert count == 10


def test_the_index_beside_a_shard_is_that_of_its_headers(pairs, module, tmp_path):
    data = module(pairs())
    write_all(data)
    path = data.shard_path(0)
    beside = tar_index(str(path), tmp_path / "one")
    assert not (tmp_path / "one").exists()  # nothing had to be made
    path.with_suffix(".index.json").unlink()
    made = tar_index(str(path), tmp_path / "two")
    assert all(np.array_equal(one, other) for one, other in zip(beside, made, strict=True))
    assert Shards([str(path)], tmp_path / "two").members(2)["txt"] == b"image number 2"


def test_an_index_of_another_file_is_not_believed(pairs, module, tmp_path):
    data = module(pairs())
    write_all(data)
    path, other = data.shard_path(0), data.shard_path(2)
    path.with_suffix(".index.json").write_bytes(other.with_suffix(".index.json").read_bytes())
    assert len(tar_index(str(path), tmp_path / "cache").keys) == 4
    path.with_suffix(".index.json").write_text("{")
    assert len(tar_index(str(path), tmp_path / "cache").keys) == 4


def test_a_shard_that_is_not_finished_leaves_nothing(tmp_path):
    with ShardFile(tmp_path / "0.tar") as shard:
        shard.add("a", {"txt": b"word"})
    assert list(tmp_path.iterdir()) == []


def test_equal_content_is_equal_bytes(pairs, module):
    source = pairs()
    one, other = (module(source, folder=name, embeddings="pth.gz") for name in (source + "a", source + "b"))
    for data in (one, other):
        write_all(data, store="pth.gz")
    assert one.shard_path(0).read_bytes() == other.shard_path(0).read_bytes()


@pytest.mark.parametrize("store", ["npz", "pth.gz"])
def test_the_size_is_predicted(tmp_path, module, store):
    noise = np.random.default_rng(0).integers(0, 256, (20, 60, 60, 3), dtype=np.uint8)
    rows = [
        {"image": {"bytes": encoded(Pillow.fromarray(one), "PNG"), "path": None}, "caption": ["x"], "made": ["y", "z"]}
        for one in noise
    ]
    features = {"image": IMAGE, "caption": List(Value("string")), "made": List(Value("string"))}
    Dataset.from_list(rows, features=Features(features)).to_parquet(tmp_path / "noise.parquet")
    data = module(str(tmp_path / "noise.parquet"), shard_size=20, embeddings=store)
    data.setup("predict")
    predicted = 20 * data.bytes_per_sample(256, None)
    records = []
    for batch in data.predict_dataloader():
        for pair in batch["originals"].pairs:
            records.append(pair.reinforced(pair.synthetic, torch.randn(3, 256), *torch.randn(3, 256).split([1, 2])))
    write_shard(data.shard_path(0), records, embeddings=store)
    assert data.shard_path(0).stat().st_size == pytest.approx(predicted, rel=0.15)


def test_each_format_keeps_its_name(tmp_path):
    for kind, suffix in (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("BMP", "bmp"), ("GIF", "gif")):
        assert image_suffix(encoded(draw_image(0), kind)) == suffix


def test_images_are_not_turned(tmp_path, pairs, module):
    turned = draw_image(0, SIZE)
    exif = Pillow.Exif()
    exif[0x0112] = 6  # lies on its side
    data = module(pairs(4, {0: {"image": {"bytes": encoded(turned, "JPEG", exif=exif), "path": None}}}))
    first = batches(data)[0]["originals"].pairs[0]
    assert first.size == (SIZE[1], SIZE[0])


def test_only_predict(pairs, module):
    with pytest.raises(UserError, match="Expected the command 'predict'"):
        module(pairs()).setup("fit")


@pytest.mark.parametrize("options", [{"augmentations": 0}, {"shard_size": 0}, {"operations": ["Flip"]}])
def test_wrong_arguments(options, module):
    with pytest.raises(UserError, match=r"got .*: (increase it|correct the names)"):
        module("x", **options)


def test_no_source(module):
    with pytest.raises(UserError, match=r"data\.pairs"):
        module(None).setup("predict")


def test_a_column_that_is_not_there(pairs, module):
    with pytest.raises(UserError, match="'synth'"):
        module(pairs(), synthetic_column="synth").setup("predict")


def test_rows_without_synthetic_captions_need_no_column(pairs, module, caplog):
    caplog.set_level(logging.WARNING)
    data = module(pairs(), synthetic_column=None)
    assert [pair.synthetic for batch in batches(data) for pair in batch["originals"].pairs] == [[]] * 10
    assert not data.has_synthetic
