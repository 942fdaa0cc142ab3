"""The exception that is shown to users."""


class UserError(Exception):
    """A mistake that the user can fix: one sentence with the remedy, exit code 2, no traceback."""
