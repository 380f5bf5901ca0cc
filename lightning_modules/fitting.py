"""Weights that a network is filled with whole, or not at all."""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn


def load_fitting(module: nn.Module, state: Mapping[str, Tensor], what: str, say: Callable[[str], str] = str) -> None:
    """Load a state dict of which every key and every shape fits.

    Args:
        module: what to fill.
        state: its whole state.
        what: what is filled and where it is from, for the message.
        say: gives the name under which a key is reported.

    Raises:
        ValueError: if something does not fit; the sentence lists it. Nothing is loaded then.
    """
    own = module.state_dict()
    missing, unexpected = own.keys() - state.keys(), state.keys() - own.keys()
    misshapen = [
        f"{say(key)} {tuple(state[key].shape)} instead of {tuple(own[key].shape)}"
        for key in own.keys() & state.keys()
        if own[key].shape != state[key].shape
    ]
    if missing or unexpected or misshapen:
        raise ValueError(
            f"Cannot initialise {what}: missing {_some(map(say, missing))}, unknown {_some(map(say, unexpected))}, "
            f"of another shape {_some(misshapen)}; set the model's sizes to those of the source."
        )
    module.load_state_dict(state)


def _some(items: Iterable[str]) -> str:
    names = sorted(set(items))
    shown = ", ".join(names[:3]) or "nothing"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
