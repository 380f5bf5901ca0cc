"""Sources with weights, and epochs by image or by caption."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

from support.data.images import draw_image
from vlightning.common.errors import UserError
from vlightning.datamodules import ImageClassificationDataModule, Source
from vlightning.datamodules.base.mixing import Mix, tempered
from vlightning.datamodules.base.sampling import epoch_order, generator


def opened(module, **options):
    data = module(**options)
    data.prepare_data()
    data.setup("fit")
    return data


def test_weights_of_one_leave_the_permutation_of_all_rows():
    for weights in (None, [1.0, 1.0]):
        order = Mix([30, 20], weights).order(generator(0, 3, 1))
        assert np.array_equal(order, generator(0, 3, 1).permutation(50))


def test_an_epoch_reads_each_row_as_often_as_its_source_weighs():
    mix = Mix([10, 7, 8], [2.0, 1.0, 0.5])
    assert (len(mix), mix.rows) == (20 + 7 + 4, 25)
    halves = []
    for epoch in range(40):
        items = epoch_order(5, epoch, mix)
        assert len(items) == len(set(items.tolist())) == 31
        counts = Counter((items % 25).tolist())
        assert all(counts[row] == 2 for row in range(10))
        assert all(counts[row] == 1 for row in range(10, 17))
        halves.append(frozenset(row for row in counts if row >= 17))
        assert len(halves[-1]) == 4
    assert len(set(halves)) > 20  # of 70
    assert Counter(row for half in halves for row in half).keys() == set(range(17, 25))


@pytest.mark.parametrize("temperature", [1.5, 2, 5, math.inf])
@pytest.mark.parametrize("sizes", [[1000, 10], [7, 300, 41, 5], [50, 50, 50]])
def test_shares_at_a_temperature_are_powers_of_the_sizes(sizes, temperature):
    mix = tempered(Mix(sizes, [1.0] * len(sizes)), temperature)
    powers = [math.exp(math.log(size) / temperature) for size in sizes]
    for count, power in zip(mix.counts, powers, strict=True):
        assert abs(count - sum(sizes) * power / sum(powers)) < 1
    assert len(mix) == len(mix.order(generator(0, 3, 1))) == sum(sizes)


def test_an_epoch_at_a_temperature_reads_rows_of_a_source_equally_often():
    mix = tempered(Mix([900, 100]), math.inf)
    assert (mix.counts, tempered(Mix([3, 4]), 1)) == ([500, 500], Mix([3, 4]))
    for epoch in (0, 1):
        items = epoch_order(5, epoch, mix)
        assert np.array_equal(items, epoch_order(5, epoch, mix))
        counts = Counter((items % 1000).tolist())
        assert all(counts[row] == 5 for row in range(900, 1000))
        assert max(counts[row] for row in range(900)) == 1
    assert not np.array_equal(epoch_order(5, 0, mix), epoch_order(5, 1, mix))


def test_a_resumed_run_at_a_temperature_reads_the_batches_that_are_left(files, module):
    few, many = karpathy(files, 4, 1, "few.json", "few"), karpathy(files, 20, 1, "many.json", "many")
    data = opened(module, train=[few, many], mixing_temperature=math.inf)
    whole = [batch["sample_index"].tolist() for batch in data.train_dataloader()]
    assert sum(row < 4 for batch in whole for row in batch) == 12
    again = opened(module, train=[few, many], mixing_temperature=math.inf)
    sampler = again.row_loaders.training_loader(again._opened("train"), len(whole), None).batch_sampler
    left = [[item % 24 for _, item in batch] for batch in sampler.batches(0, done=2)]
    assert left == whole[2:]


def karpathy(files, count, captions=5, name="dataset_flickr30k.json", prefix="image"):
    images = [
        {
            "filename": path,
            "split": "train",
            "imgid": number,
            "sentences": [{"raw": f"{prefix} {number} caption {place}"} for place in range(captions)],
        }
        for number, path in enumerate(files.images(count))
    ]
    (files.folder / name).write_text(json.dumps({"images": images}))
    return str(files.folder / name)


def texts(data, batch):
    return data.tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)


def test_an_epoch_by_caption_reads_every_caption_once(files, module):
    data = opened(module, train=karpathy(files, 4), samples="captions")
    loader = data.train_dataloader()
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == 4 * 5 // 4
        read = [text for batch in batches for text in texts(data, batch)]
        assert sorted(read) == sorted(f"image {n} caption {c}" for n in range(4) for c in range(5))
        for batch in batches:
            owners = [int(text.split()[1]) for text in texts(data, batch)]
            same = [[a == b for b in owners] for a in owners]
            assert (batch["image_id"][:, None] == batch["image_id"][None]).tolist() == same
    assert len(opened(module, train=karpathy(files, 4)).train_dataloader()) == 1


def test_an_image_without_captions_is_one_unusable_row_of_an_epoch_by_caption(files, module):
    lists = [["a", "b", "c"], [], [None, "d"], ["e"]]
    items = [{"image": path, "caption": texts} for path, texts in zip(files.images(4), lists, strict=True)]
    data = opened(module, train=files.json(items), samples="captions", batch_size=1, max_bad_share=0.9)
    rows = data._opened("train")
    assert len(rows) == 3 + 1 + 1 + 1
    read = [text for batch in data.train_dataloader() for text in texts_of(rows, batch)]
    assert Counter(read)["d"] >= 1
    assert data.account("train").causes["empty caption"] >= 1
    assert data.captions("train", [0]) == [["a", "b", "c"]]


def texts_of(rows, batch):
    return [rows.caption(row) for row in batch["sample_index"].tolist()]


def test_a_row_of_weight_two_is_read_twice_with_different_augmentations(files, module):
    few = karpathy(files, 4, 1, "few.json", "few")
    many = karpathy(files, 8, 1, "many.json", "many")
    data = opened(module, train=[Source(few, weight=2), {"path": many, "weight": 0.5}], batch_size=12)
    (batch,) = data.train_dataloader()
    counts = Counter(batch["sample_index"].tolist())
    assert sum(counts.values()) == 8 + 4
    assert all(counts[row] == 2 for row in range(4))
    for row in range(4):
        first, second = batch["image"][batch["sample_index"] == row]
        assert not torch.equal(first, second)


def test_captions_and_weights_combine(files, module):
    two = karpathy(files, 3, 4, "two.json")
    one = karpathy(files, 6, 1, "one.json")
    data = opened(module, train=[Source(two, weight=1.5), one], samples="captions", batch_size=1)
    assert len(data.train_dataloader()) == 1.5 * 12 + 6


def test_labeled_images_take_weights_too(files, tmp_path):
    for number in range(6):
        folder = files.folder / ("ab"[number % 2])
        folder.mkdir(exist_ok=True)
        draw_image(number).save(folder / f"{number}.png")
    source = Source(str(files.folder), weight=3)
    data = ImageClassificationDataModule(
        train=source, image_size=16, batch_size=1, num_workers=0, cache_dir=str(tmp_path / "cache")
    )
    data.prepare_data()
    data.setup("fit")
    assert len(data.train_dataloader()) == 18


def test_a_pass_over_a_stream_reads_a_shard_as_often_as_its_source_weighs(files, module):
    def shard(name, count):
        members = []
        for number in range(count):
            path = files.folder / f"{number}.png"
            draw_image(number).save(path)
            members += [(f"{number}.png", path.read_bytes()), (f"{number}.txt", f"{name} {number}".encode())]
        return files.tar(members, f"{name}.tar")

    few, many = shard("few", 3), shard("many", 6)
    options = {"streaming": True, "tokenizer": None, "batch_size": 3}
    data = opened(module, train=[Source(few, weight=2), many], samples_per_epoch=12, **options)
    read = Counter(text.split()[0] for batch in data.train_dataloader() for text in texts(data, batch))
    assert read == {"few": 6, "many": 6}
    with pytest.raises(UserError, match=r"few.tar' that gives whole shards, of which it has 1, got 0.5"):
        opened(module, train=Source(few, weight=0.5), samples_per_epoch=3, **options)


def test_what_a_temperature_does_not_fit_is_refused(files, module):
    one, two = karpathy(files, 2, 1, "one.json"), karpathy(files, 4, 1, "two.json")
    with pytest.raises(UserError, match=r"mixing_temperature of at least 1, got 0.5"):
        module(train=[one, two], mixing_temperature=0.5)
    with pytest.raises(UserError, match=r"several training sources with data.mixing_temperature 5, got one"):
        opened(module, train=one, mixing_temperature=5)
    with pytest.raises(UserError, match=r"weights of the training sources or data.mixing_temperature, got both"):
        opened(module, train=[Source(one, weight=2), two], mixing_temperature=5)


def test_what_cannot_be_weighted_or_read_by_caption_is_refused(module):
    with pytest.raises(UserError, match=r"Expected weight of Source of more than 0, got 0"):
        Source("a.json", weight=0)
    with pytest.raises(UserError, match=r"Expected no weight of 'a.json' in the validation split, got 2"):
        module(validation=Source("a.json", weight=2))
    with pytest.raises(UserError, match=r"samples: images with data.streaming, got captions"):
        module(train="a.tar", streaming=True, samples_per_epoch=10, samples="captions")
