"""Samples of one measured thing, and how variants take turns: A B A B, so that a busy machine slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

Operation = Callable[[], Awaitable[object]]


@dataclass
class Samples:
    """What one variant took. `values`: seconds, unless the case says another unit. `error`: why there are none."""

    values: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def summary(self) -> dict[str, object]:
        """For JSON: count, median, min, max; or the reason why it is left out."""
        if not self.values:
            return {"left_out": self.error or "not measured"}
        return {
            "count": len(self.values),
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            **({"error": self.error} if self.error else {}),
        }


async def take_turns(
    variants: Mapping[str, Operation], *, rounds: int, batch: int = 1, warm_up: int = 1, budget_s: float = 60.0
) -> dict[str, Samples]:
    """Each variant `batch` times in a row, one after the other, `rounds` times over, or until the budget is used up
    (each has had one round then). The first of a batch of several is not counted: it wakes up what slept meanwhile. An
    operation that returns a float timed itself, in its own unit. A variant that fails is left out from there on."""
    found = {name: Samples() for name in variants}
    for name, operation in variants.items():
        await _run(operation, found[name], warm_up, keep=False)
    until = time.perf_counter() + budget_s
    for number in range(rounds):
        if number and time.perf_counter() > until:
            break
        for name, operation in variants.items():
            if batch > 1:
                await _run(operation, found[name], 1, keep=False)
            await _run(operation, found[name], batch, keep=True)
    return found


async def _run(operation: Operation, into: Samples, times: int, *, keep: bool) -> None:
    for _ in range(times):
        if into.error:
            return
        began = time.perf_counter()
        try:
            own = await operation()
        except Exception as error:  # noqa: BLE001 - whatever a variant fails of, the others go on
            into.error = f"{type(error).__name__}: {error}"[:300]
            return
        took = time.perf_counter() - began
        if keep:
            into.values.append(own if isinstance(own, float) else took)
