"""Checks of sizes that have to divide into each other."""

from .errors import UserError


def check_heads(width: int, heads: int) -> None:
    """Check that the number of attention heads divides a width.

    Raises:
        UserError: If the heads do not divide the width.
    """
    if width % heads:
        raise UserError(f"Expected a width that {heads} heads divide, got {width}: change one of them.")


def check_patches(image_size: int, patch_size: int) -> None:
    """Check that a patch size divides an image size.

    Raises:
        UserError: If the patch size does not divide the image size.
    """
    if image_size % patch_size:
        raise UserError(
            f"Expected an image size that patches of {patch_size} pixels divide, got {image_size}: change one of them."
        )
