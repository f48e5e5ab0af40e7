"""Every backend keeps the contract, and what stands on it works with each."""

from sandboxes.testing.backend_suite import BackendSuite


class TestBackend(BackendSuite):
    """The suite, on each backend of `conftest`."""
