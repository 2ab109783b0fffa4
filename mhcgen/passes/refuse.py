"""`refuse`, where passes look for it; steps, which passes import, take it from `mhcgen.refusal`."""

from mhcgen.refusal import refuse

__all__ = ["refuse"]
