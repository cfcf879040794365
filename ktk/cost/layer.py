"""What a layer says of the time of its calls."""

from __future__ import annotations

from typing import Any

from ktk import _core
from ktk.config import SIZES
from ktk.cost.table import CostTable, row_counts
from ktk.formats import label
from ktk.layer import PackedLayer


class PredictedLayer(PackedLayer):
    """The methods of :class:`ktk.MoE` that predict how long a call takes."""

    _cost_table: CostTable | None = None

    def cost(
        self,
        rows_per_expert: Any,
        *,
        tokens: int | None = None,
        memory_slowdown: float = 1.0,
    ) -> float:
        """Predict the seconds of a call, for hosts that divide work between CPU and GPU.

        From measured times, see :meth:`measure_cost`: nothing is computed, and nothing measured.

        Parameters
        ----------
        rows_per_expert : array or sequence of int [num_experts]
            Rows that each expert of this layer gets: tokens that choose it. 0 for experts that
            nobody chooses, or that are masked because a GPU has them.
        tokens : int, optional
            Tokens of the call. By default as few as have so many rows between them, which is right
            where this layer computes all experts of its tokens.
        memory_slowdown : float
            How much longer reading memory takes than when the table was measured, where that
            changes: from :meth:`ktk.cost.CostTable.memory_slowdown` of the last call with few rows.

        Returns
        -------
        float
            Seconds; docs/python.md says how far off they are.

        Raises
        ------
        RuntimeError
            There is no table yet.
        ValueError
            Rows are no integers from 0 on, one for each expert, or more than `tokens`.
        """
        if self._cost_table is None:
            raise RuntimeError(
                "nothing is known of this layer's times: call measure_cost() once, which takes "
                "seconds, or set cost_table to a ktk.cost.CostTable"
            )
        rows = row_counts(rows_per_expert)
        if len(rows) != self.config.num_experts:
            raise ValueError(
                f"rows_per_expert has {len(rows)} entries, and the layer "
                f"{self.config.num_experts} experts"
            )
        return self._cost_table.seconds(rows, tokens, memory_slowdown)

    def measure_cost(self) -> CostTable:
        """Measure how long calls take, and keep the table in this layer.

        Takes as long as some 12,000 rows of an expert: 1 s for a layer of Qwen3-30B-A3B with two
        threads of a Zen 4, ten times that for one of DeepSeek-V3. Other work should rest meanwhile,
        or is part of what is measured. Weights are read from memory, as in a model whose layers
        take each other's place in the cache: for a layer that is smaller than two last-level
        caches, as much memory is read ahead of each call, 9 s in all where these have 260 MiB. The
        calls count in `counts`, which `reset_counts` sets back.

        Returns
        -------
        CostTable
            Also for other layers of the model: ``other.cost_table = table``. Its `save` writes a
            file for the next process.

        Raises
        ------
        RuntimeError
            No expert is loaded.
        """
        from ktk.cost.measure import measure

        self._cost_table = measure(self, self._subject())  # type: ignore[arg-type]  # a MoE
        return self._cost_table

    @property
    def cost_table(self) -> CostTable | None:
        """What `cost` predicts from; None before `measure_cost`. May be set to a layer's like this.

        Setting raises a ValueError that says in what the layer that was measured differs.
        """
        return self._cost_table

    @cost_table.setter
    def cost_table(self, table: CostTable | None) -> None:
        if table is not None:
            if not isinstance(table, CostTable):
                raise TypeError(f"cost_table must be a ktk.cost.CostTable or None, got {table!r}")
            _check_alike(table.layer, self._subject())
        self._cost_table = table

    def _subject(self) -> dict[str, Any]:
        """Return what times depend on."""
        if not self.loaded:
            raise RuntimeError("no expert is loaded, and so there is nothing to measure")
        stored = (self.format, self.up_format, self.down_format)
        sizes = {name: getattr(self.config, name) for name in SIZES if name != "num_experts"}
        return {
            "backend": self.backend.name,
            "variant": self.variant,
            "formats": [label(one) for one in stored if one is not None],
            **sizes,
            "gated": self.config.gated,
            "threads": self.pool.size,
            "shards": self.shards,
            "cpu": _core.cpu_model(),
        }


def _check_alike(measured: Any, wanted: dict[str, Any]) -> None:
    different = [name for name, value in wanted.items() if measured.get(name) != value]
    if different:
        told = "; ".join(
            f"{name} {measured.get(name)!r}, not {wanted[name]!r}" for name in different
        )
        raise ValueError(f"these times are of another layer: {told}")
