"""Budgets: how much a brick may cost, as time per token or bytes per second. They are never measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cbtop.protocol.attributes import MAX_QUANTITY

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Allows `us_per_token` microseconds per token at each place of the brick.

    A brick in 28 layers may take 28 times as much. Raises ValueError unless `us_per_token` is above zero.
    """

    us_per_token: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "us_per_token", _positive("us_per_token", self.us_per_token))

    @classmethod
    def from_throughput(cls, tokens_per_sec: float) -> TokenBudget:
        """Return the budget for at least `tokens_per_sec`."""
        _positive("tokens_per_sec", tokens_per_sec)
        return cls(1e6 / tokens_per_sec)

    @property
    def tokens_per_sec(self) -> float:
        """The rate that uses the whole budget."""
        return 1e6 / self.us_per_token

    def is_met(self, us_per_token: float) -> bool:
        """Return whether a measured time per token is within the budget."""
        return us_per_token <= self.us_per_token

    def utilization(self, us_per_token: float) -> float:
        """Return the fraction of the budget that a measured time uses. At 1.2, the brick takes a fifth too long."""
        return us_per_token / self.us_per_token


@dataclass(frozen=True, slots=True)
class ByteBudget:
    """Requires at least `gb_per_sec` (1e9 bytes a second). Raises ValueError unless the rate is above zero."""

    gb_per_sec: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "gb_per_sec", _positive("gb_per_sec", self.gb_per_sec))

    @classmethod
    def from_latency(cls, us_per_page: float, page_bytes: int = PAGE_BYTES) -> ByteBudget:
        """Return the budget for `us_per_page` microseconds per `page_bytes` bytes."""
        _positive("us_per_page", us_per_page)
        return cls(page_bytes / us_per_page / 1e3)

    def us_per_page(self, page_bytes: int = PAGE_BYTES) -> float:
        """Return the microseconds that `page_bytes` bytes take at the required rate."""
        return page_bytes / self.gb_per_sec / 1e3

    def is_met(self, gb_per_sec: float) -> bool:
        """Return whether a measured rate is within the budget."""
        return gb_per_sec >= self.gb_per_sec

    def utilization(self, gb_per_sec: float) -> float:
        """Return the fraction of the budget that a measured rate uses. At 1.2, the rate is 17 % too low."""
        return self.gb_per_sec / gb_per_sec

    def to_token_budget(self, bytes_per_token: float) -> TokenBudget:
        """Return the time per token that moving `bytes_per_token` at this rate takes."""
        _positive("bytes_per_token", bytes_per_token)
        return TokenBudget(bytes_per_token / self.gb_per_sec / 1e3)


def ceiling(budgets: Iterable[TokenBudget]) -> TokenBudget:
    """Return the budget of bricks that run one after another: the sum of their times per token.

    Raises ValueError without bricks.
    """
    return TokenBudget(sum(budget.us_per_token for budget in budgets))


def _positive(name: str, value: float) -> float:
    number = float(value)  # convert a NumPy number to a Python float
    if not 0 < number < MAX_QUANTITY:
        raise ValueError(f"{name} is {number}; a finite number above zero is wanted")
    return number
