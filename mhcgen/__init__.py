"""mhcgen: a compiler for hyper-connections."""

from mhcgen._version import __version__

__all__ = ["__version__"]
