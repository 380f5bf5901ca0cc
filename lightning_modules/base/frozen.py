"""A trained network from outside that a method learns from and never changes, such as a teacher."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


class FrozenTeacher(nn.Module, Generic[Network]):
    """A network without gradients, always in eval mode, and not in the checkpoint.

    The checkpoint of a distillation names its teacher and the fingerprint of its weights instead of repeating them. So
    the module that holds this one loads the weights from where they come from, and calls `record` then, `save_record`
    and `compare` in its hooks `on_save_checkpoint` and `on_load_checkpoint`.

    Args:
        network: the trained network.
        role: what it is to the method, for messages, and its entry in the checkpoint.
        argument: what names its weights, for messages.
    """

    def __init__(self, network: Network, role: str = "teacher", argument: str = "model.teacher_weights") -> None:
        super().__init__()
        self.network: Network = network.requires_grad_(False)
        self.role = role
        self.argument = argument
        self.origin: dict[str, str] | None = None
        self._expected: dict[str, str] | None = None
        self.register_load_state_dict_post_hook(_forgive_missing)
        self._prefix = ""
        self.train()

    def train(self, mode: bool = True) -> "FrozenTeacher[Network]":
        """Stay in eval mode: statistics of BatchNorm must not move, whatever Lightning calls."""
        return super().train(False)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Nothing."""
        return OrderedDict() if destination is None else destination

    def fingerprint(self) -> str:
        """SHA-256 of names, shapes and values of everything in the network."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.network.state_dict().items()):
            digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def record(self, name: str, weights: str) -> None:
        """Keep what was loaded.

        Args:
            name: of the network.
            weights: the file, or what else they come from.

        Raises:
            ValueError: if a checkpoint with other weights was restored before.
        """
        self.origin = {"name": name, "weights": weights, "sha256": self.fingerprint()}
        self._check()

    def save_record(self, checkpoint: dict[str, Any]) -> None:
        """Put into a checkpoint what was loaded, or is still expected."""
        if kept := self.origin or self._expected:
            checkpoint[self.role] = dict(kept)

    def compare(self, checkpoint: Mapping[str, Any]) -> None:
        """Compare with a checkpoint's record, now or once the weights are loaded.

        Raises:
            ValueError: if the weights are others.
        """
        self._expected = checkpoint.get(self.role)
        self._check()

    def _check(self) -> None:
        saved, own = self._expected, self.origin
        if saved is not None and own is not None and saved["sha256"] != own["sha256"]:
            raise ValueError(
                f"The checkpoint was trained with the {self.role} {saved['name']} of {saved['weights']!r} "
                f"(sha256 {saved['sha256'][:12]}), found {own['name']} of {own['weights']!r} "
                f"(sha256 {own['sha256'][:12]}): give that file as {self.argument}."
            )

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any) -> None:
        self._prefix = prefix
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _forgive_missing(frozen: nn.Module, incompatible: Any) -> None:
    """Take the network's keys off the list of those that a checkpoint lacks: it never has them."""
    prefix = str(frozen._prefix)
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if not name.startswith(prefix)]
