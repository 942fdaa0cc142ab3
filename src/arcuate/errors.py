"""The one exception a user is meant to see."""


class UserError(Exception):
    """A mistake the user can mend: one sentence that names the remedy, exit code 2, no traceback."""
