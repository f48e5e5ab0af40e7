"""Samples of one measured thing, and how variants take turns: A B A B, so that a busy machine slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

Operation = Callable[[], Awaitable[object]]


@dataclass
class Samples:
    """What one variant took. `values`: seconds, unless the table says another unit. `error`: why there are no more."""

    values: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def summary(self) -> dict[str, object]:
        """For JSON: count, median, min, max, or the reason why it is left out."""
        found: dict[str, object] = {"count": len(self.values)}
        if self.values:
            found |= {"median": self.median, "min": min(self.values), "max": max(self.values)}
        return {**found, "error": self.error} if self.error else found


@dataclass(frozen=True)
class Variant:
    """`operation` is timed, unless it returns a float: then that is its sample. `batch`: how often it runs at a turn;
    of several the first is not counted, it wakes up what slept meanwhile. `before` runs ahead of each, untimed."""

    operation: Operation
    batch: int = 1
    before: Operation | None = None


async def take_turns(variants: Mapping[str, Variant], *, rounds: int, budget_s: float = 60.0) -> dict[str, Samples]:
    """`rounds` turns for each variant, or as many as the budget has time for, but one. A variant that fails is left out
    from there on, with what it failed of."""
    found = {name: Samples() for name in variants}
    for name, variant in variants.items():
        await _run(variant, found[name], variant.batch, skip=variant.batch)
    until = time.perf_counter() + budget_s
    for number in range(rounds):
        if number and time.perf_counter() > until:
            break
        for name, variant in variants.items():
            more = int(variant.batch > 1)
            await _run(variant, found[name], variant.batch + more, skip=more)
    return found


async def _run(variant: Variant, into: Samples, times: int, *, skip: int) -> None:
    for number in range(times):
        if into.error:
            return
        try:
            if variant.before is not None:
                await variant.before()
            began = time.perf_counter()
            own = await variant.operation()
        except Exception as error:  # noqa: BLE001 - whatever a variant fails of, the others go on
            into.error = f"{type(error).__name__}: {error}"[:300]
            return
        took = time.perf_counter() - began
        if number >= skip:
            into.values.append(own if isinstance(own, float) else took)
