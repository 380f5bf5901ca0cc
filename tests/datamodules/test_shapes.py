import time

import numpy as np
import pytest
import torch

from vlightning.common.errors import UserError
from vlightning.datamodules import ShapesDataModule
from vlightning.datamodules.base.sampling import generator
from vlightning.datamodules.drawn.shapes import (
    COLORS,
    PAIRS,
    RELATIONS,
    SHAPES,
    SIZES,
    THINGS,
    Scene,
    ShapesTable,
    draw,
)


def table(split, **options):
    defaults = {"length": 3000, "eval_length": 512, "image_size": 64, "seed": 0}
    return ShapesTable(split, **{**defaults, **options})


def combination(scene):
    return frozenset((scene.first, scene.second))


def test_splits_share_no_combination_of_objects():
    parts = {split: table(split) for split in ("train", "validation", "test")}
    seen = {split: {combination(part.scene(row)) for row in range(len(part))} for split, part in parts.items()}
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]
    assert len(seen["validation"]) == len(seen["test"]) == 512


def test_evaluation_captions_are_all_different_and_made_of_training_words():
    train = {word for row in range(3000) for word in table("train").captions(row)[0].split()}
    for split in ("validation", "test"):
        captions = [table(split).captions(row)[0] for row in range(512)]
        assert len(set(captions)) == 512
        assert {word for caption in captions for word in caption.split()} <= train


def test_every_object_and_relation_occurs_in_training():
    scenes = [table("train").scene(row) for row in range(3000)]
    assert {thing for scene in scenes for thing in (scene.first, scene.second)} == set(THINGS)
    assert {scene.relation for scene in scenes} == set(RELATIONS)


def test_there_are_thousands_of_captions_each_the_only_one_for_its_scene():
    assert len({frozenset(pair) for pair in PAIRS}) == len(PAIRS) == len(THINGS) * (len(THINGS) - 1) // 2 == 3160
    named_first = np.bincount([first for first, _ in PAIRS])
    assert named_first.min() >= 39
    assert named_first.max() <= 40


def test_a_image_is_a_function_of_seed_and_number():
    one, again, other = table("train"), table("train"), table("train", seed=1)
    order = [5, 2, 5]
    images = [np.asarray(one.image(row)) for row in order]
    assert np.array_equal(images[0], images[2])
    assert np.array_equal(images[1], np.asarray(again.image(2)))
    assert not np.array_equal(images[1], np.asarray(other.image(2)))


def read(image):
    """Caption of an image, found by looking at its pixels only."""
    pixels = np.asarray(image.convert("RGB")).astype(int)
    height, width, _ = pixels.shape
    background = np.median(pixels.reshape(-1, 3), axis=0)
    front = np.abs(pixels - background).sum(-1) > 60
    labels, count = np.zeros((height, width), int), 0
    for start in zip(*np.nonzero(front), strict=True):
        if labels[start]:
            continue
        count += 1
        stack = [start]
        labels[start] = count
        while stack:
            y, x = stack.pop()
            for near in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if 0 <= near[0] < height and 0 <= near[1] < width and front[near] and not labels[near]:
                    labels[near] = count
                    stack.append(near)
    assert count == 2
    things = []
    for number in (1, 2):
        ys, xs = np.nonzero(labels == number)
        side = max(np.ptp(xs), np.ptp(ys)) + 1
        size = "large" if side > 0.265 * width else "small"
        core = pixels[ys, xs]
        strong = core[np.abs(core - background).sum(-1) >= np.quantile(np.abs(core - background).sum(-1), 0.5)].mean(0)
        color = min(COLORS, key=lambda name: np.abs(strong - np.array(COLORS[name])).sum())
        middle = labels[round(ys.min() + np.ptp(ys) / 2), round(xs.min() + np.ptp(xs) / 2)] == number
        share = len(ys) / ((np.ptp(xs) + 1) * (np.ptp(ys) + 1))
        top = (labels[ys.min() + 1] == number).sum() / side
        if not middle:
            shape = "ring"
        elif share > 0.93:
            shape = "square"
        elif top > 0.2 and share < 0.66 and (labels[ys.max() - 1] == number).sum() / side < 0.55:
            shape = "cross"
        elif share < 0.68:
            shape = "triangle"
        else:
            shape = "circle"
        things.append(((size, color, shape), ys.mean(), xs.mean()))
    return things


def test_images_tell_their_captions_apart():
    part = table("validation", image_size=96)
    right = 0
    for row in range(200):
        scene = part.scene(row)
        (one, y1, x1), (two, y2, x2) = read(part.image(row))
        if one != tuple(scene.first):
            (one, y1, x1), (two, y2, x2) = (two, y2, x2), (one, y1, x1)
        across = abs(x1 - x2) > abs(y1 - y2)
        relation = RELATIONS[int(x1 > x2)] if across else RELATIONS[2 + int(y1 > y2)]
        right += (one, two, relation) == (tuple(scene.first), tuple(scene.second), scene.relation)
    assert right >= 195  # the reader above is rough


@pytest.mark.parametrize("relation", RELATIONS)
def test_objects_stay_apart_and_inside_the_smallest_crop(relation):
    large = [thing for thing in THINGS if thing.size == "large" and thing.shape == "square"]
    for row in range(40):
        pixels = np.asarray(draw(Scene(large[0], large[1], relation), 64, generator(9, row))).astype(int)
        front = np.abs(pixels - pixels[0, 0]).sum(-1) > 60
        assert not front[:3].any()
        assert not front[-3:].any()
        assert not front[:, :3].any()
        assert not front[:, -3:].any()
        middle = front[:, 30:34] if "to the" in relation else front[30:34]
        assert not middle.all(axis=(0 if "to the" in relation else 1)).any()


def test_drawing_is_fast():
    part = table("train")
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for row in range(100):
            part.image(row)
        best = min(best, time.perf_counter() - start)
    assert 100 / best > 1000


def test_the_datamodule_trains_a_tiny_tokenizer_and_gives_batches_of_the_contract():
    module = ShapesDataModule(batch_size=8, length=20, eval_length=12, image_size=32)
    module.setup("fit")
    assert len(module.tokenizer) < 256
    assert module.special_token_ids == {"pad": 0, "cls": 101, "sep": 102, "mask": 103}
    batches = list(module.train_dataloader())
    assert len(batches) == 2
    assert {
        key: tuple(value.shape) for key, value in batches[0].items() if key not in ("input_ids", "attention_mask")
    } == {
        "image": (8, 3, 32, 32),
        "image_id": (8,),
        "sample_index": (8,),
    }
    captions = [module._rows["train"].captions(int(row))[0] for row in batches[0]["sample_index"]]
    assert module.tokenizer.batch_decode(batches[0]["input_ids"], skip_special_tokens=True) == captions
    held_out = list(module.val_dataloader())
    assert torch.cat([batch["image_id"] for batch in held_out]).tolist() == list(range(12))


def test_every_word_is_one_token_with_the_default_vocabulary():
    module = ShapesDataModule(length=4)
    module.setup("fit")
    words = [*SIZES, *COLORS, *SHAPES, "a", *["to", "the", "left", "of", "right", "above", "below"]]
    assert [module.tokenizer.tokenize(word) for word in words] == [[word] for word in words]


def test_wrong_lengths_are_named():
    with pytest.raises(UserError, match=r"data.eval_length from 1 to 1579, got 1580"):
        table("train", eval_length=1580)
    with pytest.raises(UserError, match=r"data.length of at least 1, got 0"):
        ShapesDataModule(length=0)


def test_the_docstring_says_what_it_is_for():
    assert "not a benchmark" in ShapesDataModule.__doc__


def test_texts_are_predicted_beside_the_test_splits_images():
    module = ShapesDataModule(eval_length=3, image_size=16, predict_texts=["a red circle", "a blue ring"])
    module.setup("predict")
    images, texts = (list(loader) for loader in module.predict_dataloader())
    assert torch.cat([batch["sample_index"] for batch in images]).tolist() == [0, 1, 2]
    assert torch.cat([batch["text_index"] for batch in texts]).tolist() == [0, 1]
    assert module.image_name("predict", 2) == "shape image 2"
    module.setup("test")
    assert module.image("predict", 2) == module.image("test", 2)
