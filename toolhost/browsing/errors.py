"""Errors of the text browser: each one's text is meant for the model and says what is valid instead."""


class BrowserError(Exception):
    """A refusal or a failure the model can read and correct; `str(error)` is the whole result text."""


class FetchError(Exception):
    """A page could not be fetched or rendered; `str(error)` is the reason alone, without the URL."""


class AddressRefused(FetchError, OSError):
    """The guard refused a URL or a socket address. An `OSError` too, so that a connector treats it as one."""

    def __init__(self, reason: str) -> None:
        OSError.__init__(self, reason)

    def __str__(self) -> str:
        return str(self.args[0])


class RenderTimeout(FetchError):
    """Turning a document into text took longer than its deadline."""
