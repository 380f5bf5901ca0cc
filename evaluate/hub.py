"""Download of sets from the Hugging Face hub into the root folder."""

from collections.abc import Sequence
from pathlib import Path

from ..common.errors import UserError
from ..datamodules.sources.hub import hub_or_cache, reason_not_found
from .image_sets import is_image_set
from .row_sets import find_table
from .tasks import Task


def download(tasks: Sequence[Task], root: Path) -> None:
    """Download the sets that a folder lacks.

    Raises:
        UserError: If a set cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    for task in tasks:
        folder = root / task.folder
        if is_image_set(folder) or find_table(root, task.folder) is not None:
            continue
        try:
            with hub_or_cache():
                snapshot_download(task.hub_name, repo_type="dataset", local_dir=folder)
        except Exception as error:  # of the HTTP library, whose types depend on the version
            raise UserError(
                f"Expected the data set {task.hub_name} of {task.key} on the hub, got an error "
                f"({reason_not_found(error)}): put the set into {str(folder)!r}, or leave --download out."
            ) from error
