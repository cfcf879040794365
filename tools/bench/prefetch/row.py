"""A policy as a row of native/core/prefetch.cc."""

from __future__ import annotations

from collections.abc import Collection

from prefetch.policy import (
    ACCUMULATORS,
    ALL_IN_ORDER,
    CLASSES,
    L1_AHEAD,
    PAGES_PRODUCTS,
    Fetch,
    Policy,
)


def instruction_sets(allowed: Collection[str]) -> str:
    """Return what a row asks of a CPU, so that one without AMX does not get that of one with it."""
    if "amx_int8" in allowed and "amx_bf16" in allowed:
        return "kAmx"
    sets = {"avx512": "KTK_ISA_AVX512", "neon": "KTK_ISA_NEON"}
    return next((bits for name, bits in sets.items() if name in allowed), "KTK_ISA_NONE")


def row(policy: Policy, cpu: tuple[str, int, int], isa: str, comment: list[str]) -> str:
    """Return the initializer, for clang-format to break into lines.

    Parameters
    ----------
    policy : Policy
    cpu : tuple of str, int, int
        Vendor, family and model, as `ktk._core.cpu_id` returns them.
    isa : str
        From `instruction_sets`.
    comment : list of str
        Lines that say what was measured.
    """
    vendor, family, model = cpu
    last_model = f"{model:#x}" if vendor else "kAnyModel"
    fetches = [_initializer(getattr(policy, name)) for name in CLASSES]
    lines = [f"    // {line}" for line in comment]
    lines += [
        f'    {{"NAME", "{vendor}", {family:#x}, {model:#x}, {last_model}, {isa},',
        f"     policy({policy.few_products}, {_in_order(policy)}, {_decode_rows(policy)}, "
        f"{', '.join(fetches)}{_last_numbers(policy)})}},",
    ]
    return "\n".join(lines)


def _in_order(policy: Policy) -> str:
    number = policy.in_order_products
    return "kAll" if number == ALL_IN_ORDER else str(number)


def _decode_rows(policy: Policy) -> str:
    return str(policy.decode_rows) if policy.decode_rows else "kNever"


def _last_numbers(policy: Policy) -> str:
    numbers = [policy.accumulators, policy.pages_products, policy.l1_ahead]
    usual = [ACCUMULATORS, PAGES_PRODUCTS, L1_AHEAD]
    while numbers and numbers[-1] == usual[len(numbers) - 1]:
        numbers.pop()
    return "".join(f", {number}" for number in numbers)


def _initializer(fetch: Fetch) -> str:
    order = "kByPages" if fetch.by_pages else "kInOrder"
    return f"{{{fetch.ahead}, {fetch.cache}, {order}}}"
