"""A trained network that a method uses and does not change: a teacher, a backbone, a language model."""

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from ...common.errors import UserError
from .counting import switched
from .towers import weights_digest

Network = TypeVar("Network", bound=nn.Module)
_READS_WEIGHTS = ContextVar("reads_weights", default=True)


def without_weights() -> AbstractContextManager[None]:
    """Let the functions that load frozen networks build them without weights, for their shapes."""
    return switched(_READS_WEIGHTS, False)


def reads_weights() -> bool:
    """Return whether frozen networks are loaded with their weights: always, except in `without_weights`."""
    return _READS_WEIGHTS.get()


class Frozen(nn.Module, Generic[Network]):
    """A network without gradients, always in eval mode, and not in the checkpoint.

    A checkpoint contains the name of the network and a fingerprint of its weights instead of the weights. The method
    loads the weights in `setup`, into `network`, and calls `record`; `Method` saves and compares the records.

    Args:
        network: the trained network; None until it is loaded.
        role: role in the method, such as "teacher": key in the checkpoint, and name in messages.
        argument: option with the path of the weights, for messages.
    """

    def __init__(
        self, network: Network | None = None, role: str = "teacher", argument: str = "model.teacher.weights"
    ) -> None:
        super().__init__()
        self.network: Network = (nn.Identity() if network is None else network).requires_grad_(False)  # type: ignore
        self.role = role
        self.argument = argument
        self.origin: dict[str, str] | None = None
        self._expected: dict[str, str] | None = None
        self.register_load_state_dict_post_hook(_ignore_network_keys)
        self._prefix = ""
        self.train()

    @property
    def loaded(self) -> bool:
        """Whether the weights are loaded and recorded."""
        return self.origin is not None

    def train(self, mode: bool = True) -> "Frozen[Network]":
        """Stay in eval mode: statistics of BatchNorm must not change when Lightning sets modes."""
        return super().train(False)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return nothing: the checkpoint holds the record instead."""
        return OrderedDict() if destination is None else destination

    def fingerprint(self) -> str:
        """Return the SHA-256 of names, shapes, types and values of the network's parameters and buffers.

        It is empty in `without_weights`.
        """
        if not reads_weights():
            return ""
        return weights_digest(self.network.state_dict().items())

    def record(self, name: str, weights: str) -> None:
        """Record which weights were loaded.

        Args:
            name: name of the network.
            weights: file, tag or folder of the weights.

        Raises:
            UserError: If a checkpoint with other weights was restored before.
        """
        self.origin = {"name": name, "weights": weights, "sha256": self.fingerprint()}
        self._check()

    def save_record(self, checkpoint: dict[str, Any]) -> None:
        """Write the record into a checkpoint: of the loaded weights, else of the expected ones."""
        if origin := self.origin or self._expected:
            checkpoint[self.role] = dict(origin)

    def compare(self, checkpoint: Mapping[str, Any]) -> None:
        """Compare with a checkpoint's record, now or when the weights are loaded.

        Raises:
            UserError: If the weights differ.
        """
        self._expected = checkpoint.get(self.role)
        self._check()

    def _check(self) -> None:
        saved = self._expected
        loaded = self.origin
        if saved is not None and loaded is not None and saved["sha256"] != loaded["sha256"]:
            raise UserError(
                f"Expected the {self.role} that the checkpoint was trained with, {saved['name']} of "
                f"{saved['weights']!r} (sha256 {saved['sha256'][:12]}), got {loaded['name']} of {loaded['weights']!r} "
                f"(sha256 {loaded['sha256'][:12]}): give that one as {self.argument}."
            )

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any) -> None:
        self._prefix = prefix
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _ignore_network_keys(frozen: nn.Module, incompatible: Any) -> None:
    """Remove the network's keys from the missing keys: checkpoints do not contain them."""
    prefix = str(frozen._prefix)
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if not name.startswith(prefix)]
