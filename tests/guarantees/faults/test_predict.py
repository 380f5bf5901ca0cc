"""`predict` of every method of images and texts: of images alone, of texts alone, of both, and of empty batches."""

import pandas
import pytest
import torch

from support.data.images import draw_image
from support.methods.classifier import tiny_classifier
from support.methods.methods import METHODS, OTHERS
from support.methods.shre import tiny_shre
from support.methods.tiny_modules import trainer
from vlightning.callbacks import ClassPredictionWriter, TextClassPredictionWriter
from vlightning.datamodules import ImageTextDataModule

IMAGES, TEXTS = 5, ["red", "green ring", "blue"]
_TABLES = ("image_embeddings", "text_embeddings", "text_to_image", "image_to_text")


def shre(shared):
    def build(outside, seed, **data):
        _, rows = METHODS["shre"].build(outside, seed, **data)
        space = {"features": "h1" if shared == "mlp_in_order" else "h2"}
        return tiny_shre(None, seed, shared=shared, text={"vocab_size": 200}, evaluation=space), rows

    return METHODS["shre"]._replace(build=build)


CASES = {
    name: (METHODS | OTHERS)[name]
    for name in ("albef", "albef_fine_tuning", "mmlg", "mobileclip", "clip", "adapters", "towers")
}
CASES |= {f"shre, {shared}": shre(shared) for shared in ("mlp", "mlp_in_order", "transformer", "s_smke")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("files")
    (found / "images").mkdir()
    for number in range(IMAGES):
        draw_image(number).save(found / f"images/{number}.png")
    (found / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "green", "blue"]))
    return found


@pytest.fixture(scope="module", params=CASES)
def built(request, tmp_path_factory, folder):
    """A method, and a function from options of prediction to its data."""
    case = CASES[request.param]
    module, shapes = case.build(case.prepare(tmp_path_factory.mktemp("outside")), seed=0, num_workers=0)
    of_clip = shapes._tokenizer_name == "clip"

    def data(**options):
        return ImageTextDataModule(
            image_size=shapes.image_size,
            max_tokens=shapes.max_tokens,
            tokenizer="clip" if of_clip else str(folder / "vocab.txt"),
            vocab_size=49408 if of_clip else 200,
            batch_size=2,
            num_workers=0,
            cache_dir=str(folder / "cache"),
            **options,
        )

    return module, data


@pytest.mark.parametrize(("images", "texts"), [(True, False), (False, True), (True, True)])
def test_images_and_texts_are_predicted_alone_and_together(built, folder, tmp_path, images, texts):
    module, data = built
    options = ({"predict": str(folder / "images")} if images else {}) | ({"predict_texts": TEXTS} if texts else {})
    writers = (ClassPredictionWriter(), TextClassPredictionWriter()) if hasattr(module, "classify_texts") else ()
    trainer(*writers, default_root_dir=tmp_path).predict(module, data(**options), return_predictions=False)
    rows = [len(pandas.read_parquet(tmp_path / f"predictions/{name}.parquet")) for name in _TABLES]
    matches = IMAGES * len(TEXTS) * images * texts
    assert rows == [IMAGES * images, len(TEXTS) * texts, matches, matches]
    if writers:
        for file, count in (("predictions", IMAGES * images), ("text_predictions", len(TEXTS) * texts)):
            assert len(pandas.read_parquet(tmp_path / f"predictions/{file}.parquet")) == count


def test_empty_batches_which_processes_without_usable_samples_have_are_predicted(built, folder):
    module, data = built
    rows = data(predict=str(folder / "images"), predict_texts=TEXTS)
    rows.setup("predict")
    module.eval()
    none, side = torch.zeros(0, dtype=torch.long), rows.image_size
    images = {"image": torch.zeros(0, 3, side, side), "image_id": none, "sample_index": none}
    with torch.no_grad():
        for batch in (images, rows.encoder()([]) | {"text_index": none}):
            found = module.evaluation.predict(module, batch)
            assert [len(value) for name, value in found.items() if name.endswith("_features")] == [0]
    module.evaluation.start()


def test_an_empty_batch_is_classified():
    module = tiny_classifier().eval()
    side = module.data_sizes().image_size
    batch = {"image": torch.zeros(0, 3, side, side), "sample_index": torch.zeros(0, dtype=torch.long)}
    assert module.evaluation.predict(module, batch)["probabilities"].shape == (0, module.num_classes)
