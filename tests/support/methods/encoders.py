"""Small towers with random weights: text encoders of transformers in folders, an image network of timm, and pairs."""

import csv
import random
import shutil

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from vlightning.common.tokenizers import special_tokens, tokenizer_from_json
from vlightning.datamodules.text.tokenizers import train_wordpiece
from vlightning.lightning_modules import CLIPModule
from vlightning.lightning_modules.networks.clip.pair import TowerPair

IMAGES = "test_efficientnet"
COLORS = ("dark", "half", "full")
GERMAN = {"dark": "dunkel", "half": "halb", "full": "voll"}
_SMALL = {"vocab_size": 300, "pad_token_id": 0}
_BERT = _SMALL | {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
CONFIGS = {
    "bert": _BERT,
    "distilbert": _SMALL | {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 40},
    "xlm-roberta": _BERT | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "mpnet": _BERT | {"pad_token_id": 1},
    "mt5": _SMALL | {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 2},
    "m2m_100": _SMALL
    | {
        "pad_token_id": 1,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 40,
    },
    "gpt2": {"vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40, "eos_token_id": 0}
    | {"bos_token_id": 0, "pad_token_id": 0},
}
"""Configuration of each kind: two blocks, 16 wide, 300 entries."""


def write_encoder(folder, kind="bert", seed=3, weights=True, **changes):
    """Write the folder of an encoder, and return its path."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **CONFIGS[kind] | changes)
    config.save_pretrained(folder)
    if weights:
        AutoModel.from_config(config).save_pretrained(folder)
    return str(folder)


def write_tokenizer(folder, texts=(*COLORS, "a photo of a color")):
    """Write a tokenizer of the words of texts into a folder, with BERT's special tokens; return the folder."""
    tokenizer = tokenizer_from_json(train_wordpiece(texts, 200))
    backend = tokenizer.backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens(backend)).save_pretrained(folder)
    return str(folder)


def write_towers(folder):
    """Write two towers and pairs of plain images and captions that say which color they have.

    The folder has `text`, `image.safetensors` of the network `IMAGES`, `pairs.csv` and `held_out.csv`.
    """
    write_tokenizer(write_encoder(folder / "text"))
    torch.manual_seed(5)
    save_file(timm.create_model(IMAGES).state_dict(), folder / "image.safetensors")
    (folder / "images").mkdir()
    draw, rows = random.Random(0), []
    for number in range(24):
        color = tuple(draw.choice((0, 120, 255)) for _ in range(3))
        Image.new("RGB", (40, 36), color).save(folder / f"images/{number}.png")
        rows.append((f"images/{number}.png", " ".join(COLORS[part // 100] for part in color)))
    for name, part in (("pairs", rows[:16]), ("held_out", rows[16:])):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("image", "caption"), *part])
    return folder


def write_pair(folder, files, max_tokens, seed=1, image=IMAGES, width=8, **vision):
    """Write the export of a pair of random towers, the text tower that of `write_towers` in a folder `files`."""
    torch.manual_seed(seed)
    pair = TowerPair({"name": image, "weights": "random"}, {"name": str(files / "text"), "weights": "random"}, width)
    module = CLIPModule(pair, max_tokens=max_tokens, vision=vision)
    module.save_pretrained(folder)
    return module.eval()


def trained_without_text(fit, files, work, *words):
    """Train for two epochs in a folder with a text tower whose folder is then removed; return the checkpoint.

    Args:
        fit: runs `vlightning fit` on the files of `write_towers`, with further words and the name of the text's folder.
        files: those files.
        work: folder to run in.
        words: further arguments of the training.
    """
    shutil.copytree(files / "text", files / "gone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        done = fit(files, "--trainer.max_epochs=2", "--checkpoint.save_top_k=2", *words, text="gone")
    assert done.status == 0, done.err
    shutil.rmtree(files / "gone")
    (checkpoint,) = work.rglob("last.ckpt")
    return checkpoint


def german(text):
    """Return a caption of `write_towers` in German."""
    return " ".join(GERMAN[word] for word in text.split())


def write_german(folder, parallel):
    """Write a German encoder, both tables of `write_towers` with German captions, and `parallel.csv`.

    Args:
        folder: that of `write_towers`.
        parallel: the table whose captions are the parallel texts, `pairs` or `held_out`.
    """
    write_tokenizer(write_encoder(folder / "german", seed=9), texts=list(GERMAN.values()))
    for name in ("pairs", "held_out"):
        with (folder / f"{name}.csv").open(newline="") as file:
            rows = [(row["image"], row["caption"], german(row["caption"])) for row in csv.DictReader(file)]
        with (folder / f"{name}_de.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("image", "english", "caption"), *rows])
        if name == parallel:
            with (folder / "parallel.csv").open("w", newline="") as file:
                csv.writer(file).writerows([("old", "new"), *((row[1], row[2]) for row in rows)])
