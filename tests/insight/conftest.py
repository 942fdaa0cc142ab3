"""Pages in tests: charts are built and embedded; their static drawings only where a test is about them."""

from support.pages import drawings, undrawn

__all__ = ["drawings", "undrawn"]
