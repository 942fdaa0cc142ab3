"""Validation of HTML pages."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

from arcuate.insight.render import page_script, vega_bundle

VOID = {"meta"}


class Outline(HTMLParser):
    """Checks the nesting of elements and collects ids, addresses, tags and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.scripts: list[str] = []  # that the browser executes
        self.specs: list[dict] = []  # charts, as data
        self._kind = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        named = dict(attrs)
        assert not [name for name in named if name.startswith("on")]
        self.ids += [str(named["id"])] if "id" in named else []
        self.addresses += [str(named[k]) for k in ("src", "href", "xlink:href") if k in named]
        self._kind = str(named.get("type") or "") if tag == "script" else self._kind
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            if self._kind == "application/json":
                self.specs.append(json.loads(data, parse_constant=_reject))
            else:
                assert self._kind == ""
                self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.words.append(data)


def _reject(name: str) -> None:
    raise AssertionError(f"{name} in a chart")


def check_page(page: str) -> Outline:
    """Check a page: nested elements, no external resources, no NaN, valid internal links, only its own scripts."""
    outline = Outline(page)
    assert all(a.startswith(("#", "data:image/png;base64,")) for a in outline.addresses)
    assert not outline.tags & {"link", "iframe", "object", "form"}
    own = [*([vega_bundle()] if outline.specs else []), page_script()]
    assert outline.scripts == own
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy and "unsafe-eval" not in policy[1] and policy[1].startswith("default-src 'none'; ")
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in own)
    assert f"script-src {hashes};" in policy[1]
    text = re.sub(
        r"base64,[^\"]*", "", re.sub(r"<script.*?</script>", "", page[page.index("<body>") :], flags=re.DOTALL)
    )
    assert not re.search(r"\b(nan|inf|None|NaN|undefined)\b", text)
    assert len(set(outline.ids)) == len(outline.ids)
    assert {a[1:] for a in outline.addresses if a.startswith("#")} <= set(outline.ids)
    assert len(page.encode("utf-8", "replace")) < 3_000_000
    return outline
