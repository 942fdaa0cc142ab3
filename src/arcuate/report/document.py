"""The frame of every page: one file, its styles within it, no scripts, nothing loaded."""

from importlib.resources import files

from arcuate.report.markup import Html, escape

# Even if markup slipped through somewhere, a browser would neither run it nor fetch anything for it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def document(title: str, body: Html, *styles: str) -> str:
    """A whole page; `styles` are further style files beside the common one."""
    style = "".join(read_style(name) for name in ("style.css", *styles))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def read_style(name: str) -> str:
    return (files("arcuate") / "report" / name).read_text("utf-8")
