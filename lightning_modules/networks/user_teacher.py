"""Teachers that a user defines: any `nn.Module` that states the normalization of its images.

It has the attributes `mean` and `std`, three numbers each on the 0-1 scale, and `image_size` where it takes one size.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...common.absent_network import AbsentNetwork
from ...common.errors import UserError
from ...common.preprocessing import Interpolation, Normalization, Three
from ..core.frozen import Frozen, reads_weights
from ..core.settings import class_path


class TeacherImages:
    """Convert images of the data to those that the teacher was trained with.

    Args:
        size: image size that the teacher requires, in pixels; None where it takes any.
        data: normalization of the data's images; None if the teacher accepts them unchanged.
        teacher: normalization of the teacher's images; None if the teacher accepts them unchanged.
        interpolation: interpolation of the resize.
    """

    def __init__(
        self,
        size: int | None,
        data: Normalization | None,
        teacher: Normalization | None,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.size = size
        self.interpolation = interpolation
        self.numbers = None if data is None or teacher is None or data == teacher else (*data, *teacher)
        # One copy per type and device: copying in each step would wait for the device.
        self._tensors: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def __call__(self, image: Tensor) -> Tensor:
        """Convert images [B, 3, S, S]."""
        if self.numbers is not None:
            key = image.dtype, image.device
            if key not in self._tensors:
                self._tensors[key] = [
                    torch.tensor(values, dtype=image.dtype)[:, None, None].to(image.device) for values in self.numbers
                ]
            data_mean, data_std, mean, std = self._tensors[key]
            image = (image * data_std + data_mean - mean) / std
        if self.size is not None and self.size != image.shape[-1]:
            # In float32 at least: on a CPU, torch resizes no bfloat16 with antialiasing.
            precise = image.to(torch.promote_types(image.dtype, torch.float32))
            resized = F.interpolate(precise, (self.size, self.size), mode=self.interpolation, antialias=True)
            image = resized.to(image.dtype)
        return image


def network_of_setting(network: Any, option: str, width: int = 1) -> nn.Module | None:
    """Return the network of a setting; None without one.

    Args:
        network: the setting: a network, the name of its class in a checkpoint, or None.
        option: its name, for the message.
        width: width of its output, in `without_weights`, where an absent network returns zeros.

    Raises:
        UserError: If the setting is the name of a class, from a checkpoint.
    """
    if isinstance(network, AbsentNetwork) and not reads_weights():
        network.width = width
    elif isinstance(network, (Mapping, AbsentNetwork)):
        name = network.name if isinstance(network, AbsentNetwork) else network.get("class_path")
        in_list = option.endswith("s.network")  # no option names an entry of a list
        raise UserError(
            f"Expected the teacher {name} for training, got its name from a checkpoint, which does not hold it: "
            f"{'' if in_list else f'type --{option} {name}, or '}give the config.yaml of its run with --config; in "
            "Python pass the setting with the network to load_from_checkpoint."
        )
    return network if isinstance(network, nn.Module) else None


def stated_normalization(network: nn.Module) -> Normalization:
    """Return the normalization that a network states.

    Raises:
        UserError: If the attributes `mean` and `std` are not three numbers each.
    """
    stated = {name: getattr(network, name, None) for name in ("mean", "std")}
    numbers = {name: _three(value) for name, value in stated.items()}
    if numbers["mean"] is None or numbers["std"] is None or min(numbers["std"]) <= 0:
        got = " and ".join(f"{name} {value}" for name, value in stated.items())
        raise UserError(
            f"Expected the attributes mean and std of {class_path(network)}, three numbers each, std above 0, got "
            f"{got}: set them in its constructor; (0, 0, 0) and (1, 1, 1) are images on the 0-1 scale."
        )
    return Normalization(numbers["mean"], numbers["std"])


def stated_size(network: nn.Module) -> int | None:
    """Return the side of the only images that a network takes, in pixels; None if it takes any."""
    size = getattr(network, "image_size", None)
    return None if size is None else int(size)


def teacher_images(network: nn.Module, data: Any) -> TeacherImages:
    """Return the conversion of a datamodule's images to those of a network.

    Args:
        network: the teacher's network.
        data: the run's datamodule, or None. Its property `preprocessing` holds the "mean" and "std" of its images.

    Raises:
        UserError: If one of both does not state its normalization.
    """
    record = getattr(data, "preprocessing", None) or {}
    if "mean" not in record or "std" not in record:
        raise UserError(
            "Expected the normalization of the images, which the teacher needs, got none from "
            f"{'the run, which has no datamodule' if data is None else type(data).__name__}: use a datamodule whose "
            "property `preprocessing` has a mean and a std."
        )
    data_normalization = Normalization(tuple(record["mean"]), tuple(record["std"]))
    return TeacherImages(stated_size(network), data_normalization, stated_normalization(network))


@torch.no_grad()
def checked_output(
    network: nn.Module, encode: Callable[[Any], Any], example: Any, width: int | None, remedy: str
) -> Tensor:
    """Run a network on an example, and return its output [1, E].

    Args:
        network: the teacher's network.
        encode: the network, or one of its methods.
        example: an image [1, 3, S, S], or token ids [1, L].
        width: expected width E; None for any.
        remedy: advice on another output, for the message.

    Raises:
        UserError: If the network fails on the example, or its output has another shape.
    """
    shape = list(example.shape)
    name = class_path(network)
    weight = next(network.parameters(), None)
    example = example if weight is None else example.to(weight.device)  # "meta" in a plan
    expected = f"Expected an output of shape [1, {width or 'E'}] of {name} for an input of shape {shape}"
    try:
        output = encode(example)
    except Exception as error:  # of the user's code
        reason = str(error).partition("\n")[0].removesuffix(".")
        raise UserError(f"{expected}, got an error ({type(error).__name__}: {reason}): {remedy}") from error
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != 1 or width not in (None, output.shape[1]):
        got = f"shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise UserError(f"{expected}, got {got}: {remedy}")
    return output


def record(frozen: Frozen[Any], network: nn.Module, option: str) -> None:
    """Record the class of the network in a `Frozen`, and the fingerprint of its weights."""
    frozen.requires_grad_(False)
    frozen.argument = option
    frozen.record(class_path(network), option)


def _three(value: Any) -> Three | None:
    try:
        red, green, blue = (float(number) for number in value)
    except (TypeError, ValueError):
        return None
    return red, green, blue
