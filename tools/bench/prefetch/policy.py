"""A prefetch policy as `ktk._core.prefetch` writes it and `set_prefetch` reads it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

#: The classes of products that a policy has an entry for.
CLASSES = ("few", "one", "pair", "many", "decode")
NUMBERS = (
    "few_products",
    "in_order_products",
    "pages_products",
    "l1_ahead",
    "decode_rows",
    "accumulators",
)
#: `in_order_products` of a CPU that wants the order of memory wherever it can be had.
ALL_IN_ORDER = 64
#: `accumulators` of a CPU whose row does not say: four cycles for a product, two begun in a cycle.
ACCUMULATORS = 8
#: `pages_products` of a CPU whose row does not say.
PAGES_PRODUCTS = 30
#: `l1_ahead` of a CPU whose row does not say.
L1_AHEAD = 2048

#: `cache` of a Fetch: the last is into L2, and from there into L1, `l1_ahead` bytes before its use.
CACHES = {1: "l1", 2: "l2", 3: "l2+l1"}


@dataclass(frozen=True)
class Fetch:
    """How far ahead in bytes, into which cache, and whether one line of each page in turn."""

    ahead: int
    cache: int
    by_pages: bool = False

    @staticmethod
    def parse(text: str) -> Fetch:
        """Read ``4096:l1`` or ``32768:l2:pages``."""
        ahead, cache, *order = text.split(":")
        [number] = (number for number, name in CACHES.items() if name == cache)
        return Fetch(int(ahead), number, order == ["pages"])

    def __str__(self) -> str:
        return f"{self.ahead}:{CACHES[self.cache]}" + (":pages" if self.by_pages else "")


@dataclass(frozen=True)
class Policy:
    """An entry for every class, and six numbers.

    Up to `few_products` multiply instructions for a line of weights are few. Up to
    `in_order_products`, kernels that have a form for it use weights in the order of memory. Up to
    `pages_products`, vector kernels fetch by pages where an entry says so. What goes into L2 and
    then into L1 does the second `l1_ahead` bytes before its use. From `decode_rows` rows on,
    kernels that have a form for it decode weights once; 0: never. Tiles of rows that have fewer
    than `accumulators` independent sums are avoided.
    """

    few: Fetch
    one: Fetch
    pair: Fetch
    many: Fetch
    decode: Fetch
    few_products: int
    in_order_products: int
    pages_products: int
    l1_ahead: int
    decode_rows: int
    accumulators: int

    @staticmethod
    def parse(text: str) -> Policy:
        """Read a whole policy, as `ktk._core.prefetch` returns it."""
        entries = dict(part.split("=") for part in text.split(","))
        fetches = {name: Fetch.parse(entries[name]) for name in CLASSES}
        numbers = {name: int(entries[name]) for name in NUMBERS}
        return Policy(**fetches, **numbers)  # type: ignore[arg-type]

    def with_entry(self, name: str, fetch: Fetch) -> Policy:
        """Return the same policy with another entry for one class."""
        return replace(self, **{name: fetch})  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def candidates(*, amx: bool, l1_ahead: int) -> list[Fetch]:
    """Return what to try: none, and 512 B to 64 KiB ahead into either cache, or both.

    Into both from further ahead than `l1_ahead` of the policy in use.
    By pages, 32 KiB at a time, tiles of `amx` fetch into either cache, a tile of vectors into both,
    and two of them into L2: see `is_done`.
    """
    distances = [512 << i for i in range(8)]
    found = [Fetch(0, 2), *(Fetch(ahead, cache) for cache in (1, 2) for ahead in distances)]
    if not amx:
        found += [Fetch(ahead, 3) for ahead in distances if ahead > l1_ahead]
    caches = (1, 2, 3) if amx else (2, 3)
    return found + [Fetch(ahead, cache, True) for cache in caches for ahead in (32768, 65536)]


def is_done(name: str, fetch: Fetch, *, amx: bool) -> bool:
    """Return whether kernels do what a candidate says, or the same in order."""
    if amx or not fetch.by_pages:
        return True
    return fetch.cache == 3 if name in ("few", "one") else name == "pair" and fetch.cache == 2
