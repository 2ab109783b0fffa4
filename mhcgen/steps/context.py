"""What the expanders of one kernel share: names of things, and the steps collected so far."""

from __future__ import annotations

from typing import Any

from mhcgen.ir import Stage
from mhcgen.plan import Access, Buffer, Columns, Declare, Kernel, Node, Place, Plan, Step
from mhcgen.stages import STREAM_LAST

LANE_LAYOUTS = ("element", "row", "registers")


def identifier(name: str) -> str:
    """A tensor or stage name as a C identifier; `3.attn.y` is `layer3_attn_y`."""
    return ("layer" if name[:1].isdigit() else "") + name.replace(".", "_")


def arrivals_of(buffer: str) -> str:
    """The counter of what other blocks send into a shared buffer."""
    return f"{buffer}_arrived"


class Context:
    """Collects steps of one kernel, and answers how its text names a tensor."""

    def __init__(self, plan: Plan, kernel: Kernel) -> None:
        self.plan = plan
        self.program = plan.program
        self.kernel = kernel
        self.early: list[Node] = []
        self.body: list[Node] = []
        self.buffers: dict[str, Buffer] = {}
        #: layout of the mixes; empty where no stage of the kernel works on them
        self.layout = next((p.layout for p in kernel.places if p.layout), "")
        self.n = plan.program.dim("n")
        self.hidden = plan.program.dim("H")

    @property
    def columns(self) -> Columns:
        """The column map; only for kernels that have one."""
        assert self.kernel.columns is not None
        return self.kernel.columns

    # ---- places and names -----------------------------------------------------------------------
    def place(self, tensor: str) -> Place:
        """Where a tensor of this kernel lives."""
        place = self.kernel.place(tensor)
        assert place is not None, tensor
        return place

    def dtype(self, tensor: str) -> str:
        """dtype of a tensor."""
        return self.program.tensor(tensor).dtype

    def row(self, tensor: str) -> str:
        """Pointer to this token's part of a global tensor; parameters have no token."""
        name = identifier(tensor)
        return f"{name}_t" if "T" in self.program.tensor(tensor).shape else name

    def shared(self, tensor: str) -> str:
        """Name of the shared copy of a tensor."""
        return f"s_{identifier(tensor)}"

    def registers(self, tensor: str) -> str:
        """Name of the register copy of a tensor."""
        return f"r_{identifier(tensor)}"

    def gate_source(self, tensor: str) -> str:
        """Where column work reads a small per-token tensor from."""
        return self.shared(tensor) if self.place(tensor).space == "shared" else self.row(tensor)

    def small_targets(self, tensor: str) -> tuple[str, ...]:
        """Where mix work stores a small per-token tensor: shared, global or both."""
        place = self.place(tensor)
        targets: tuple[str, ...] = (self.shared(tensor),) if place.space == "shared" else ()
        if place.space == "global" or self.plan.escapes(self.kernel, tensor):
            targets += (self.row(tensor),)
        return targets

    def small_accesses(self, tensor: str, own: bool = False) -> tuple[Access, ...]:
        """Writes behind `small_targets`; `own` where lane i alone writes elements i, i + 32, ..."""
        if self.place(tensor).space == "shared":
            self.share(self.shared(tensor), "float", self.elements(tensor))
            return (Access(self.shared(tensor), True, own),)
        return ()

    def gate_accesses(self, tensor: str, own: bool = False) -> tuple[Access, ...]:
        """Reads behind `gate_source`; `own` where lane i alone reads elements i, i + 32, ..."""
        return (Access(self.shared(tensor), False, own),) if self.place(tensor).space == "shared" else ()

    def elements(self, tensor: str) -> int:
        """Elements per token of a tensor."""
        count = 1
        for size in self.program.shape(tensor, 1):
            count *= size
        return count

    def share(self, name: str, ctype: str, count: int) -> str:
        """Declare a shared buffer; declaring it twice is the same buffer."""
        self.buffers[name] = Buffer(name, ctype, count)
        return name

    # ---- steps ----------------------------------------------------------------------------------
    def step(
        self,
        stage: Stage,
        piece: str,
        template: str,
        team: str,
        accesses: tuple[Access, ...] = (),
        declares: tuple[Declare, ...] = (),
        early: bool = False,
        constant: bool = False,
        into: list[Node] | None = None,
        **fields: Any,
    ) -> Step:
        """Append a step; early steps go before everything that waits."""
        if "unroll" in fields and any(name in ("streams", "column") for name, _ in declares):
            fields["unroll"] = self.columns.chunks  # registers are indexed by constants only
        made = Step(
            name=f"{stage.name}.{piece}",
            stage=stage.name,
            template=template,
            team=team,
            accesses=accesses,
            fields=tuple(sorted(fields.items())),
            declares=declares,
            early=early or constant,
            constant=constant,
        )
        target = into if into is not None else (self.early if early or constant else self.body)
        target.append(made)
        return made

    def declare(self, template: str, **fields: Any) -> Declare:
        """A register declaration."""
        return (template, tuple(sorted(fields.items())))

    # ---- columns --------------------------------------------------------------------------------
    def column_fields(self) -> dict[str, Any]:
        """Fields every column step has."""
        c = self.columns
        return {
            "chunk": c.chunk,
            "chunks": c.chunks,
            "unroll": 1,
            "hidden": self.hidden,
            "first": "column_first",
        }

    def streams(
        self, tensor: str, *, once: bool = False
    ) -> tuple[dict[str, Any], tuple[Access, ...], tuple[Declare, ...]]:
        """Fields, accesses and declarations of a step that reads chunks of the streams.

        Args:
            tensor: the streams.
            once: nothing reads them after this step, in this kernel or a later one.
        """
        if self.place(tensor).space == "thread":
            fields: dict[str, Any] = {
                "streams_from": "columns/streams_from_registers.cu.j2",
                "streams": self.registers(tensor),
            }
            return fields, (), (self.declare_streams(tensor),)
        fields = {
            "streams_from": f"columns/streams{self.last(tensor)}_from_global_{self.dtype(tensor)}.cu.j2",
            "streams": self.row(tensor),
        }
        made_here = self.plan.made_in(self.kernel, tensor)
        if not self.last(tensor):
            fields["load_kind"] = self.load_kind("_once") if once and not made_here else ""
        return fields, (Access(f"global:{tensor}", False, own=True),) * made_here, ()

    def load_kind(self, kind: str) -> str:
        """A kind of `mhcgen.functions.LOADS`; plain in a dependent launch, whose wait orders plain loads alone."""
        return "" if self.plan.options.dependent else kind

    def last(self, tensor: str) -> str:
        """Part of the names of templates and functions for streams stored side by side; empty elsewhere."""
        return "_last" if self.program.tensor(tensor).shape == STREAM_LAST else ""

    def declare_streams(self, tensor: str) -> Declare:
        """Registers that hold a thread's run of all streams."""
        c = self.columns
        return self.declare("streams", name=self.registers(tensor), chunks=c.chunks, streams_n=self.n, chunk=c.chunk)

    def load_slab(self) -> None:
        """Load the streams that live in registers and come from global memory, before anything waits."""
        for place in self.kernel.places:
            tensor = place.tensor
            if place.space == "thread" and not self.plan.made_in(self.kernel, tensor):
                reader = next(s for s in self.plan.kernel_stages(self.kernel) if tensor in s.reads)
                self.step(
                    reader,
                    f"load_{identifier(tensor)}",
                    f"load_streams{self.last(tensor)}",
                    "data",
                    early=True,
                    declares=(self.declare_streams(tensor),),
                    target=self.registers(tensor),
                    source=self.row(tensor),
                    n=self.n,
                    load=f"mhc_load{self.last(tensor) or self.load_kind('_past_l1')}_{self.dtype(tensor)}",
                    **self.column_fields(),
                )

    def column_source(
        self, tensor: str, *, once: bool = False
    ) -> tuple[dict[str, Any], tuple[Access, ...], tuple[Declare, ...]]:
        """The same for a step that reads chunks of a [T, H] tensor."""
        if self.place(tensor).space == "thread":
            return (
                {"column_from": "columns/column_from_registers.cu.j2", "column": self.registers(tensor)},
                (),
                (self.declare_column(tensor),),
            )
        made_here = self.plan.made_in(self.kernel, tensor)
        return (
            {
                "column_from": f"columns/column_from_global_{self.dtype(tensor)}.cu.j2",
                "column": self.row(tensor),
                "column_kind": self.load_kind("_once") if once and not made_here else "",
            },
            (Access(f"global:{tensor}", False, own=True),) * made_here,
            (),
        )

    def declare_column(self, tensor: str) -> Declare:
        """Registers that hold a thread's run of one column tensor."""
        c = self.columns
        return self.declare("column", name=self.registers(tensor), chunks=c.chunks, chunk=c.chunk)

    def column_sinks(self, tensor: str) -> tuple[dict[str, Any], tuple[Access, ...], tuple[Declare, ...]]:
        """Fields, accesses and declarations of a step that writes chunks of a [T, H] tensor."""
        sinks: list[str] = []
        fields: dict[str, Any] = {"round": f"mhc_round_{self.dtype(tensor)}"}
        accesses: tuple[Access, ...] = ()
        declares: tuple[Declare, ...] = ()
        in_thread = self.place(tensor).space == "thread"
        if in_thread:
            sinks.append("columns/column_to_registers.cu.j2")
            fields["out_registers"] = self.registers(tensor)
            declares = (self.declare_column(tensor),)
        if not in_thread or self.plan.escapes(self.kernel, tensor):
            sinks.append("columns/column_to_global.cu.j2")
            fields |= {"store": f"mhc_store_{self.dtype(tensor)}", "out": self.row(tensor)}
            accesses = (Access(f"global:{tensor}", True, own=True),)
        return {"sinks": tuple(sinks), **fields}, accesses, declares
