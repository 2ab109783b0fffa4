"""A whole trunk as one Program: expand, an attention and an FFN site for each layer, and the exit.

```
e ── expand ── x ──┬── 0.attn.project ... 0.attn.collapse ── 0.attn.branch ──┐
                   └───────────────────────────────────────── 0.attn.post ───┴── 0.attn.x_next ── 0.ffn. ...
                                                    ... ── exit.mean, or head.project ... head.collapse ── y
```
Stages and tensors of layer 3's attention site are `3.attn.rowsq`, `3.attn.y`; its parameters `3.attn.fn`,
`3.attn.base`, `3.attn.scale`. The residual of a site is the streams that the site read, so the FFN site mixes what
the attention site left. Mixes cannot be given from outside: each site projects streams that the trunk makes.
"""

from __future__ import annotations

from mhcgen.build import Config, origin
from mhcgen.chain import Builder, between, branch, head_chain, post, pre_chain, tail_results
from mhcgen.ir import Program
from mhcgen.models import model as find_model

#: The two sites of a layer, in the order they run.
SITES = ("attn", "ffn")


def site_names(layers: int) -> tuple[str, ...]:
    """Names of all sites in order: `0.attn`, `0.ffn`, `1.attn`, ..."""
    return tuple(f"{layer}.{site}" for layer in range(layers) for site in SITES)


def build_trunk(config: Config) -> Program:
    """The unfused Program of a trunk of `config.layers` layers; results are `y` and what quant, taps and
    iteration counts add.
    """
    b = Builder(config)
    b.add("expand", "expand", {"e": "e"}, {"x": "x"})
    x = "x"
    results: list[str] = []
    sites = site_names(config.layers)
    pre_prev = ""
    for site in sites:
        pre_chain(b, x, site=site, pre_prev=pre_prev)
        pre_prev = f"{site}.pre"
        branch(b, site)
        x = post(b, x, site=site)
        if site != sites[-1]:
            x, found = between(b, x, site=site)
            results += found
        results += [name for name in tail_results(config, site) if not name.endswith(".z")]
    if find_model(config.model).delayed_pre and config.exit != "pre":
        results.append(pre_prev)  # made for a site that does not come
    if config.exit in ("mean", "sum"):
        b.add(f"exit.{config.exit}", config.exit, {"x": x}, {"y": "y"})
    elif config.exit == "pre":
        b.add("exit.collapse", "collapse", {"x": x, "pre": pre_prev}, {"y": "y"})
    else:
        head_chain(b, x, site="head")
    return b.finish((*results, "y"), origin(config))
