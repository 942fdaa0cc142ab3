"""The exception whose message is shown to users, and escaping of text that is not safe to print."""


class UserError(Exception):
    """A mistake that the user can fix: one sentence with the remedy, exit code 2, no traceback.

    The message may quote a file, so control characters in it are escaped: a terminal would interpret them.
    """

    def __init__(self, message: str) -> None:
        super().__init__(escape_controls(" ".join(message.split("\n"))))


def escape_controls(text: str) -> str:
    """Text with everything that is not printable as an escape such as \\x1b; line breaks are kept."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def has_password(url: str) -> bool:
    return without_password(url) != url


def without_password(url: str) -> str:
    """A URL that is safe to print and store: without the password, whether before the host or in the query."""
    scheme, separator, rest = url.partition("://")
    credentials, at, location = rest.rpartition("@")
    path, question, query = location.partition("?")
    kept = "&".join(part for part in query.split("&") if "password" not in part.lower())
    return f"{scheme}{separator}{credentials.partition(':')[0]}{at}{path}{question if kept else ''}{kept}"
