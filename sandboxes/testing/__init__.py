"""Fakes behind the contracts, and the contract suites that every backend and every store runs."""
