"""The verbs of the command line, a few to a module: each parses, calls and prints.

`options` holds the options that verbs share. Nothing here imports numpy, networkx, jinja2 or a backend before
a verb runs, so that `mhcgen --help` is fast.
"""
