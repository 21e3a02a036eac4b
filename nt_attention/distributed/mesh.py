"""The check of a mesh, for all that takes one."""

from __future__ import annotations

from typing import Any


def check_mesh(mesh: Any, dimension: str) -> None:
    """Check that a mesh has one dimension. `dimension` is its usual name, for the message.

    Raises:
        TypeError: it is not a DeviceMesh.
        ValueError: it has several dimensions.
    """
    if getattr(mesh, "ndim", None) is None:
        raise TypeError(
            f"mesh must be a DeviceMesh with one dimension, got {type(mesh).__name__}: pass one, such as "
            f'mesh["{dimension}"] or init_device_mesh("cuda", (ranks,)).'
        )
    if mesh.ndim != 1:
        raise ValueError(
            f'the mesh must have one dimension, got {mesh.ndim}: pass one of them, such as mesh["{dimension}"].'
        )
