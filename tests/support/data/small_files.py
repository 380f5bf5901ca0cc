"""Small files of image-caption pairs in each of the supported forms."""

import io
import json
import tarfile
from pathlib import Path

import datasets

from support.data.images import draw_image, encoded


class Files:
    """Writes the same pairs in each of the supported forms."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def images(self, count):
        (self.folder / "images").mkdir(exist_ok=True)
        for number in range(count):
            draw_image(number).save(self.folder / "images" / f"{number}.png")
        return [f"images/{number}.png" for number in range(count)]

    def parquet(self, count, name="pairs.parquet", captions=None, **columns):
        rows = {
            "image": [{"bytes": encoded(draw_image(number)), "path": None} for number in range(count)],
            "caption": captions or [f"image number {number}" for number in range(count)],
            **columns,
        }
        features = datasets.Dataset.from_dict(rows).features.copy()
        features["image"] = datasets.Image()
        path = self.folder / name
        datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
        return str(path)

    def json(self, items, name="pairs.json"):
        path = self.folder / name
        if name.endswith(".jsonl"):
            path.write_text("".join(json.dumps(item) + "\n" for item in items))
        else:
            path.write_text(json.dumps(items))
        return str(path)

    def tar(self, members, name="shard.tar"):
        path = self.folder / name
        with tarfile.open(path, "w") as tar:
            for member, content in members:
                info = tarfile.TarInfo(member)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return str(path)
