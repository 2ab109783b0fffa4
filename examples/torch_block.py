"""A two-layer toy transformer with hyper-connections learns to repeat a pattern, twice: once with mhcgen's operators
and once with DeepSeek-V4's formulas written out in plain torch. Both start from the same parameters and see the same
batches, so their loss curves must agree.

    python examples/torch_block.py                      # on a GPU if there is one, else on the CPU
    python examples/torch_block.py --device cpu --steps 20
    python examples/torch_block.py --dtype bf16 --compile

Exit code 0 if the curves agree within the tolerance, 1 if not.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn

import mhcgen.torch as mhc
from mhcgen.topology import Topology

VOCABULARY, STREAMS, HIDDEN, LAYERS = 16, 4, 32, 2
BATCH, LENGTH = 4, 8
ITERS, EPS = 20, 1e-6
#: Largest difference of two losses, relative; fp32 differs in the order of sums alone, bf16 in roundings too.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


class Attention(nn.Module):
    """Causal self-attention with one head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))


class Model(nn.Module):
    """Embedding, a trunk of hyper-connections, unembedding."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        topology = Topology("deepseek-v4", STREAMS, HIDDEN, LAYERS, ITERS, EPS, EPS, EPS, exit="head")
        branches = [(Attention(), feed_forward()) for _ in range(LAYERS)]
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.trunk = mhc.HyperConnectionStack(branches, topology, dtype=dtype, norm=True)
        self.unembed = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        # At their initial values the streams are copies of each other, and a wrong matrix would not show.
        with torch.no_grad():
            for name, parameter in self.trunk.named_parameters():
                if name.endswith("_base"):
                    parameter.add_(2 * torch.randn_like(parameter))
                if name.endswith("_scale"):
                    parameter.fill_(1.0)
            self.unembed.weight.mul_(4.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.unembed(self.trunk(self.embed(tokens)))


# ---- the same trunk in plain torch, for comparison: nothing of mhcgen but the parameters --------------------------
def gates(x: Tensor, fn: Tensor, rows: slice) -> Tensor:
    """Mixes, rescaled by the root mean square of the streams x [T, n, H]."""
    flat = x.float().flatten(1)
    return flat @ fn[rows].T * torch.rsqrt(flat.square().mean(1, keepdim=True) + EPS)


def sinkhorn(logits: Tensor) -> Tensor:
    comb = logits.softmax(-1) + EPS
    comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    for _ in range(ITERS - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + EPS)
        comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    return comb


def reference(model: Model, tokens: Tensor) -> Tensor:
    """What `Model` computes, by the formulas."""
    n, trunk = STREAMS, model.trunk
    dtype = trunk.stream_dtype()
    lead = tokens.shape
    x = model.embed(tokens).reshape(-1, 1, HIDDEN).to(dtype).repeat(1, n, 1)
    for layer in trunk.layers:
        for site, branch in (("attn", layer.attn), ("ffn", layer.ffn)):
            fn, base, scale = (getattr(layer, f"hc_{site}_{part}") for part in ("fn", "base", "scale"))
            mixes = gates(x, fn, slice(None))
            pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + EPS
            post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
            comb = sinkhorn((mixes[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n))
            y = torch.einsum("tc,tch->th", pre, x.float()).to(dtype).float()
            z = y * torch.rsqrt(y.square().mean(1, keepdim=True) + EPS)
            z = (z * getattr(layer, f"{site}_norm").weight).to(dtype)
            f = branch(z.reshape(*lead, HIDDEN)).reshape(-1, HIDDEN).to(dtype)
            mixed = torch.einsum("tjk,tjh->tkh", comb, x.float())
            x = (post[:, :, None] * f.float()[:, None, :] + mixed).to(dtype)
    scaled = gates(x, trunk.hc_head_fn, slice(None))
    pre = torch.sigmoid(scaled * trunk.hc_head_scale + trunk.hc_head_base) + EPS
    y = torch.einsum("tc,tch->th", pre, x.float()).to(dtype)
    return model.unembed(y.reshape(*lead, HIDDEN))


def train(model: Model, run: object, batches: list[Tensor]) -> list[float]:
    """Losses of a run of steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for tokens in batches:
        logits = run(tokens[:, :-1])  # type: ignore[operator]
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def make_batches(steps: int, device: torch.device) -> list[Tensor]:
    """Sequences that repeat a random pattern of three tokens."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(VOCABULARY, (steps, BATCH, 3), generator=generator)
    return list(patterns.repeat(1, 1, LENGTH)[:, :, : LENGTH + 1].to(device))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="fp32", help="of the streams")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--compile", action="store_true", help="compile mhcgen's model with torch.compile")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("torch has no CUDA device here: --device cpu", file=sys.stderr)
        return 4
    batches = make_batches(chosen.steps, device)
    curves = {}
    for name in ("mhcgen", "plain torch"):
        torch.manual_seed(0)
        model = Model(chosen.dtype)
        if chosen.dtype == "bf16":
            model.to(torch.bfloat16)  # parameters of hyper-connections stay fp32
        model.to(device)
        if name == "plain torch":
            run = lambda tokens, model=model: reference(model, tokens)  # noqa: E731
        else:
            run = torch.compile(model, fullgraph=True) if chosen.compile else model
        curves[name] = train(model, run, batches)
        if name == "mhcgen":
            print(f"device {device}, streams {chosen.dtype}, path {mhc.last_path()}")
    print(f"{'step':>5} {'mhcgen':>10} {'plain torch':>12} {'difference':>11}")
    worst = 0.0
    for step, (ours, theirs) in enumerate(zip(*curves.values(), strict=True)):
        difference = abs(ours - theirs) / abs(theirs)
        worst = max(worst, difference)
        if step % 5 == 0 or step == chosen.steps - 1:
            print(f"{step:>5} {ours:>10.6f} {theirs:>12.6f} {difference:>11.1e}")
    agrees = worst <= TOLERANCE[chosen.dtype]
    learnt = curves["mhcgen"][-1] < curves["mhcgen"][0]
    print(f"largest relative difference {worst:.1e}, tolerance {TOLERANCE[chosen.dtype]:.0e}: "
          f"{'the curves agree' if agrees else 'THE CURVES DIFFER'}")  # fmt: skip
    return 0 if agrees and (learnt or chosen.steps < 10) else 1


if __name__ == "__main__":
    sys.exit(main())
