"""The project's own data: images of one color, with its name as label and in a text."""

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from torchvision.transforms.v2.functional import to_pil_image

COLORS = {"red": (0.8, 0.1, 0.1), "green": (0.1, 0.8, 0.1), "blue": (0.1, 0.1, 0.8)}


class Words:
    """The tokenizer."""

    names = ("[PAD]", "a", "photo", "of", *COLORS)
    all_special_tokens, pad_token_id = ("[PAD]",), 0

    def __call__(self, texts):
        ids = torch.tensor([[self.names.index(word) for word in text.split()] for text in texts])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def convert_ids_to_tokens(self, ids):
        return [self.names[number] for number in ids]

    def decode(self, ids):
        return " ".join(self.convert_ids_to_tokens(ids))


class Colors(LightningDataModule):
    class_names, tokenizer = tuple(COLORS), Words()

    def __init__(self, rows: int = 12, batch_size: int = 3) -> None:
        super().__init__()
        self.rows, self.batch_size = rows, batch_size

    def encoder(self):
        return self.tokenizer

    def caption(self, number):
        return f"a photo of {self.class_names[number % 3]}"

    def row(self, number):
        color = torch.tensor(COLORS[self.class_names[number % 3]])[:, None, None]
        noise = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(number))
        text = {name: ids[0] for name, ids in self.tokenizer([self.caption(number)]).items()}
        image = (color + 0.05 * noise).clamp(0, 1)
        return {"image": image, "label": number % 3, "sample_index": number, "image_id": number, **text}

    def loader(self):
        return DataLoader([self.row(number) for number in range(self.rows)], batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


class OpenedAgain(Colors):
    """Data whose images can be opened again, for figures."""

    def image(self, split, number):
        return to_pil_image(self.row(number)["image"])

    def eval_transform(self, image):
        return torch.tensor(list(image.getdata())).view(*image.size, 3).permute(2, 0, 1) / 255
