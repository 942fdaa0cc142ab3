"""Pages in tests: charts are built and embedded; their static drawings only where a test is about them."""

import pytest

from arcuate.insight import render


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A static drawing takes a tenth of a second, and a page has a dozen: only tests marked `drawn` make them."""
    if request.node.get_closest_marker("drawn") is None:
        monkeypatch.setattr(render, "static_svg", lambda figure, identifier="": "<svg></svg>")
