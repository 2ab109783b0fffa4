"""Timing on a GPU: graph replay, back-to-back launches, floors and rivals."""
