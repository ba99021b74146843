"""The errors of users: data/errors.py defines them, because the commands of data/ need them too."""

from data.errors import command, fail, require, user_errors

__all__ = ["command", "fail", "require", "user_errors"]
