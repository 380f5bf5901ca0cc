"""A language model, embeddings and captions small enough to overfit in a test."""

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from support.methods.groups import in_groups
from vlightning.common.manifest import MANIFEST, write_manifest
from vlightning.datamodules import EmbeddedCaptionsDataModule
from vlightning.datamodules.stores.shards import ShardRows, shard_path, write_shard
from vlightning.lightning_modules import CaptioningModule

EMBED_DIM, WIDTH = 12, 32
SIZES = {"embed_dim": EMBED_DIM, "width": WIDTH, "prefix_length": 3, "clip_length": 2, "depth": 2}
SIZES |= {"heads": 4, "warmup_steps": 2, "num_beams": 3, "max_new_tokens": 12}
TOWER = {"model": "tiny", "weights": "nowhere", "sha256": "0" * 64}
# Three captions an image, of which one starts with "!", the token of number 0, as in GPT-2.
CAPTIONS = [
    ["a man rides a wave", "! a surfer on a big wave", "a man surfing"],
    ["two dogs play with a ball", "dogs don't share the ball", "two dogs in the grass"],
    ["a plate of food on a table", "a white plate with food", "the table has a plate"],
    ["a red bus on the street", "the bus is red", "a bus is parked on a street"],
    ["a cat sleeps on a couch", "the cat is black and white", "a cat"],
    ["three giraffes near a tall tree", "giraffes stand in a field", "tall animals by a tree"],
]


def write_language_model(folder, seed=0, steps=0):
    """Write a GPT-2 with its byte-level tokenizer, and return the folder's name.

    Args:
        folder: where to.
        seed: of its random weights.
        steps: training steps in which it learns to continue the prefix of an image with a caption.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator((text for texts in CAPTIONS for text in texts), trainer)
    end = "<|endoftext|>"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end, unk_token=end)
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(fast),
        n_positions=32,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        bos_token_id=fast.eos_token_id,
        eos_token_id=fast.eos_token_id,
    )
    network = GPT2LMHeadModel(config)
    _train(network, fast, steps)
    network.save_pretrained(folder)
    return str(folder)


def _train(network, tokenizer, steps):
    rows = [(number, text) for number, texts in enumerate(CAPTIONS) for text in texts]
    ids = [torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]) for _, text in rows]
    labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    prefixes = torch.randn(len(CAPTIONS), SIZES["prefix_length"], WIDTH)[[number for number, _ in rows]]
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(steps):
        words = network.get_input_embeddings()(labels.clamp(min=0))
        logits = network(inputs_embeds=torch.cat([prefixes, words[:, :-1]], 1)).logits[:, prefixes.shape[1] - 1 :]
        torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def image_name(number):
    return f"{number}.jpg"


def embedding(number):
    """Of an image, of any length."""
    return 3 * torch.randn(EMBED_DIM, generator=torch.Generator().manual_seed(number))


def write_embeddings(folder, names, tower=TOWER, values=None, **images):
    """A store of the images' plain views, as `vlightning embed` writes it."""
    if values is None:
        values = torch.stack([embedding(number) for number in range(len(names))])
    nothing = [None] * len(names)
    rows = ShardRows(names, [100 + number for number in range(len(names))], nothing, nothing, values[:, None])
    folder.mkdir()
    write_shard(shard_path(folder, 0), rows)
    settings = {
        "model": {"name": tower["model"]} | tower,
        "data": {"rows": [len(names)], "shard_size": 1000},
        "images": {"views": 0, "projected": True, "width": values.shape[1]} | images,
        "texts": None,
    }
    write_manifest(folder / MANIFEST, settings, complete=True)
    return str(folder)


def write_karpathy(path):
    """The images' captions in Karpathy's form; there are no image files."""
    images = [
        {
            "filename": image_name(number),
            "cocoid": 100 + number,
            "split": "train",
            "sentences": [{"raw": text} for text in CAPTIONS[number]],
        }
        for number in range(len(CAPTIONS))
    ]
    path.write_text(json.dumps({"images": images}))
    return str(path)


def write_data(folder, steps=0):
    """Embeddings, captions and a language model in a folder: the arguments of data and module that name them."""
    folder.mkdir(exist_ok=True)
    names = [str(folder / image_name(number)) for number in range(len(CAPTIONS))]
    captions = write_karpathy(folder / "dataset.json")
    every = {"path": captions, "split": "train"}
    return {
        "embeddings": write_embeddings(folder / "embeddings", names),
        "train": captions,
        "validation": every,
        "test": every,
        "predict": every,
        "language_model": write_language_model(folder / "gpt2", steps=steps),
        "cache_dir": str(folder / "cache"),
    }


def caption_data(arguments, **options):
    return EmbeddedCaptionsDataModule(**{"batch_size": 6, "eval_batch_size": 4, "seed": 0, **arguments, **options})


def caption_module(arguments, seed=0, **options):
    torch.manual_seed(seed)
    return CaptioningModule(
        **in_groups(CaptioningModule, SIZES | {"language_model": arguments["language_model"]} | options)
    )
