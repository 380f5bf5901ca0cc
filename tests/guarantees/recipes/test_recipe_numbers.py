"""The first lines of each recipe state the number that its paper reaches and where, or that the paper gives none."""

import re
from pathlib import Path

import pytest

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
WITHOUT = {
    "albef/base": "a model without data",
    "albef/official": "differences to other configs",
    "albef/official_retrieval": "differences to other configs",
    "albef/official_tasks": "differences to other configs",
    "albef/tiny": "not a model of the paper",
    "clip/new_from_pair": "no paper has this training",
    "clip/new_image": "no paper has this training",
    "clip/new_text": "no paper has this training",
    "clip/new_text_any": "no paper has this training",
    "clip/small": "no paper has this training",
    "cocord/base": "each pair has its number",
    "cocord/imagenet": "each pair has its number",
    "mobileclip/reinforce_10_5": "a preset of reinforce",
    "mobileclip/reinforce_2_2": "a preset of reinforce",
    "mobileclip/reinforce_5_5": "a preset of reinforce",
}
NUMBER = re.compile(r"(Paper|Thesis), [^:]*\b([Tt]ables?|[Ff]igure|[Ss]ection|Appendix|page)\b[^:]*: .*?\d+\.\d")
NONE = re.compile(r"The (paper|thesis) gives no number for this recipe\b")
METHODS = ("albef", "clip", "cocord", "mmlg", "mobileclip", "shre")
FILES = [path for method in METHODS for path in sorted((CONFIGS / method).rglob("*.yaml"))]
NAMES = [path.relative_to(CONFIGS).with_suffix("").as_posix() for path in FILES if "quickstart" not in path.name]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT])
def test_a_recipe_states_the_number_of_its_paper(name):
    head = re.match(r"(?:#.*\n)+", (CONFIGS / f"{name}.yaml").read_text())
    assert head, name
    text = head[0].replace("\n# ", " ")
    assert NUMBER.search(text) or NONE.search(text), text


def test_every_exception_is_a_config():
    assert set(WITHOUT) <= set(NAMES)
