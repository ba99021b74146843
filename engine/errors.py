"""The errors of users: data/errors.py defines them, because the commands of data/ need them too."""

from data.errors import command, require, user_errors

__all__ = ["command", "require", "user_errors"]
