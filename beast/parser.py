# SPDX-License-Identifier: Apache-2.0
"""The parser of every program, and types of numbers for its `add_argument`. No torch here."""

import argparse
import difflib


class Parser(argparse.ArgumentParser):
    """An argument parser whose help shows defaults and whose errors are one line.

    Args:
      program: file name of the program, which its checkpoints are marked with.
    """

    def __init__(self, program, description):
        super().__init__(
            prog=program, description=description, formatter_class=_Formatter, allow_abbrev=False
        )
        self.set_defaults(program=program)

    def error(self, message):
        unknown = message.partition("unrecognized arguments: ")[2].split()
        options = [option for option in self._option_string_actions if option.startswith("--")]
        for word in unknown:
            similar = difflib.get_close_matches(word.partition("=")[0], options, 1)
            if similar:
                message += f"; did you mean {similar[0]}?"
        self.exit(2, f"{self.prog}: {message} (--help lists all flags)\n")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where they say something: not that a switch is off, or that None is None."""

    def _get_help_string(self, action):
        if action.default is None or isinstance(action.default, bool):
            return action.help
        return super()._get_help_string(action)


def positive(kind):
    """Return a type: an int or a float above 0."""
    return _checked(kind, lambda value: 0 < value < float("inf"), "must be positive")


def non_negative(kind):
    """Return a type: an int or a float of at least 0."""
    return _checked(kind, lambda value: 0 <= value < float("inf"), "must not be negative")


def fraction(text):
    """A type: a float from 0 to 1."""
    return _checked(float, lambda value: 0 <= value <= 1, "must be from 0 to 1")(text)


def _checked(kind, is_valid, rule):
    def parse(text):
        value = kind(text)
        if not is_valid(value):
            raise argparse.ArgumentTypeError(f"{text} is not valid: it {rule}")
        return value

    parse.__name__ = kind.__name__  # for the message where `kind` refuses the text
    return parse
