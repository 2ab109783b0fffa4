"""Checks of single values that a caller hands over in Python, where no parser has looked at them first.

The command line and files are checked where they are read; these hold for `mhcgen.configure`, `mhcgen.compile` and
everything that goes through them.
"""

from __future__ import annotations

from mhcgen.errors import UsageError


def plain(field: str, value: object) -> object:
    """numpy's scalars and 0-d arrays as Python's values; a narrow float as the shortest decimal that names it.

    Raises:
        UsageError: `U-OPTION`, an array of more than one value.
    """
    # Whoever passes one of numpy's scalars has imported it; the command line starts without.
    if type(value).__module__ != "numpy":
        return value
    import numpy as np

    if isinstance(value, np.ndarray):
        if value.ndim:
            raise wrong(field, "one value", f"an array of shape {list(value.shape)}")
        value = value[()]
    if isinstance(value, np.floating):
        return float(str(value))
    return value.item() if isinstance(value, np.generic) else value


def switch(field: str, value: object) -> None:
    """True or False, and nothing that is only taken for them: the text "no" would be true.

    Raises:
        UsageError: `U-OPTION`.
    """
    if not isinstance(value, bool):
        raise wrong(field, "true or false", repr(value))


def text(field: str, value: object) -> None:
    """A text.

    Raises:
        UsageError: `U-OPTION`.
    """
    if not isinstance(value, str):
        raise wrong(field, "a text", repr(value))


def member(field: str, value: object, allowed: tuple[str, ...], code: str = "U-OPTION") -> None:
    """One of the allowed texts.

    Raises:
        UsageError: with the code given.
    """
    if isinstance(value, str) and value in allowed:
        return
    raise UsageError(
        code,
        f"{field} must be one of {', '.join(allowed)}, got {value!r}",
        where=flag(field),
        hints=(f"choose one of {', '.join(allowed)}",),
    )


def flag(field: str) -> str:
    """The option of the command line that a field has: `mix_warp` is `--mix-warp`."""
    return f"--{field.replace('_', '-')}"


def wrong(field: str, wanted: str, got: str) -> UsageError:
    """The error of a value of another type than wanted."""
    what = f"{field} must be {wanted}, got {got}"
    return UsageError("U-OPTION", what, where=flag(field), hints=(f"give {wanted}",))
