"""How long a call of a layer of experts takes, predicted from measured times.

    table = moe.measure_cost()     # takes seconds; nothing else should compute meanwhile
    table.save("cost.json")        # the next time: moe.cost_table = CostTable.load("cost.json")
    moe.cost([0, 3, 1, ...])       # seconds of a call that gives so many rows to each expert

For hosts that divide experts between CPU and GPU: `CostTable` says what is predicted, and how.
"""

from ktk.cost.table import CostTable

__all__ = ["CostTable"]
