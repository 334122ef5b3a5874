"""A parser with help in two layers: ``--help`` shows the usual options, ``--help-all`` all.

The parser gets a list of flags for the short help. Options are added with argparse as usual;
options that are not in the list are shown only by ``--help-all``.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from offramp import __version__
from offramp.commands.combinations import Illegal, IllegalCombinationError, refuse_illegal
from offramp.commands.completion import SHELLS, shell_code
from offramp.commands.nearest import nearest

_DEFAULT: Final = re.compile(r"\([^()]*default: [^()]*\)")
_INDENT: Final = "  "


class LayeredParser(argparse.ArgumentParser):
    """An argument parser with a short and a full help, and a table of illegal combinations.

    Args:
        short: Flags that ``--help`` shows, in this order. If empty, there is one layer, and
            ``--help`` shows all options.
        examples: Command lines, each with its purpose, which may be empty.
        commands: Other commands by name, each with a one-line description.
        illegal: Combinations of options that :meth:`parse_args` refuses.
        more: Further arguments of ``ArgumentParser``, such as ``prog`` and ``description``.
    """

    def __init__(
        self,
        *,
        short: Sequence[str] = (),
        examples: Mapping[str, str] | None = None,
        commands: Mapping[str, str] | None = None,
        illegal: Sequence[Illegal] = (),
        **more: Any,
    ) -> None:
        super().__init__(**{"formatter_class": HelpLines, "add_help": False, **more})
        self._short, self._illegal = tuple(short), tuple(illegal)
        self._examples, self._commands = dict(examples or {}), dict(commands or {})
        self.add_argument("-h", "--help", action="help", help="show this help and end")
        if short:
            self.add_argument(
                "--help-all",
                action=_ShowAll,
                nargs=0,
                default=argparse.SUPPRESS,
                help="show all options, by groups",
            )
        if " " not in self.prog:  # a command, not a subcommand
            self.add_argument("--version", action="version", version=f"offramp {__version__}",
                              help="show the version and end")  # fmt: skip
            self.add_argument("--completion", choices=SHELLS, action=_PrintCompletion,
                              default=argparse.SUPPRESS,
                              help="print the shell code that completes this command: "
                              f'eval "$({self.prog} --completion bash)"')  # fmt: skip

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line; errors and illegal combinations end the process with status 2.

        Subparsers are called by this method, so that each checks its own options.
        """
        options, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if word.startswith("-"):
                self.error(self._unknown(word.partition("=")[0]))
            if "--data" in self._option_string_actions:
                self.error(f"{word} is one argument too many; did you mean --data {word}?")
        if self._illegal:
            try:
                refuse_illegal(self._illegal, self.values(options), self.given(args))
            except IllegalCombinationError as error:
                self.error(str(error))
        return options, unknown

    def _unknown(self, flag: str) -> str:
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        known = {name.lstrip("-"): name for action in shown for name in action.option_strings}
        near = " or ".join(known[name] for name in nearest(flag.lstrip("-"), known))
        hint = f"; did you mean {near}?" if near else ""
        return f"there is no option {flag}{hint}"

    def options(self) -> Sequence[argparse.Action]:
        """Return the options, without positional arguments."""
        return [action for action in self._actions if action.option_strings]

    def values(self, options: argparse.Namespace) -> dict[str, object]:
        """Return the values of options by flag."""
        return {
            flag: getattr(options, action.dest)
            for action in self._actions
            for flag in action.option_strings
            if hasattr(options, action.dest)
        }

    def given(self, args: Sequence[str] | None = None) -> frozenset[str]:
        """Return the flags of the options that a command line names."""
        defaults = [(action, action.default) for action in self._actions]
        for action, _ in defaults:
            action.default = argparse.SUPPRESS  # absent from the namespace unless given
        try:
            options, _ = super().parse_known_args(args)
        finally:
            for action, default in defaults:
                action.default = default
        return frozenset(self.values(options))

    def error(self, message: str) -> NoReturn:
        """End the process with status 2; print the message and how to get help, but no usage."""
        self.exit(2, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")

    def format_usage(self) -> str:
        """Return one line: the required arguments, and a mark for the options."""
        needed = [a for a in self._actions if a.required or not a.option_strings]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, needed, [])
        usage = formatter.format_help().rstrip("\n")
        return f"{usage}\n" if self.usage else f"{usage} [options]\n"

    def format_help(self) -> str:
        """Return the short help, or the full one if there is one layer."""
        if not self._short:
            return self.format_help_all()
        by_flag = {flag: action for action in self._actions for flag in action.option_strings}
        places = [action for action in self._actions if not action.option_strings]
        shown = [*places, *(by_flag[flag] for flag in self._short)]
        groups = [("options that most people need", None, shown)]
        count = sum(bool(action.option_strings) for action in self._actions)
        return self._page(
            groups,
            first_lines=True,
            end=[f"All {count} options, by groups: {self.prog} --help-all"],
        )

    def format_help_all(self) -> str:
        """Return the help of all options, by group."""
        return self._page([
            (group.title, group.description, group._group_actions)  # noqa: SLF001 - as argparse
            for group in self._action_groups
        ])  # fmt: skip

    def _page(
        self,
        groups: Sequence[tuple[str | None, str | None, Sequence[argparse.Action]]],
        *,
        first_lines: bool = False,
        end: Sequence[str] = (),
    ) -> str:
        formatter = self._get_formatter()
        if isinstance(formatter, HelpLines):
            formatter.first_lines = first_lines
        formatter.add_text(self.description)
        for title, description, actions in groups:
            formatter.start_section(title)
            formatter.add_text(description)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        parts = [self.format_usage(), formatter.format_help()]
        parts += [
            f"{title}:\n" + textwrap.indent("\n".join(_columns(lines)), _INDENT) + "\n"
            for title, lines in (("examples", self._examples), ("other commands", self._commands))
            if lines
        ]
        parts += [f"{line}\n" for line in end]
        return "\n".join(part for part in parts if part)


class HelpLines(argparse.RawDescriptionHelpFormatter):
    """Wraps paragraphs of descriptions, and adds the default if an option's help lacks it.

    The help of an option may have several lines: the short layer shows the first line and the
    default.
    """

    def __init__(self, prog: str, **more: Any) -> None:
        super().__init__(prog, **{"max_help_position": 28, **more})
        self.first_lines = False

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap the paragraphs of a text; paragraphs with indented lines stay unchanged."""
        filled = (
            textwrap.indent(part, indent)
            if re.search(r"^\s", part, re.MULTILINE)
            else textwrap.fill(part, width, initial_indent=indent, subsequent_indent=indent)
            for part in re.split(r"\n\s*\n", text.strip("\n"))
        )
        return "\n\n".join(filled)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, text = action.default, action.help or ""
        told = _DEFAULT.search(text)
        if self.first_lines:
            text = text.partition("\n")[0].rstrip(".,;:")
            if told is not None and told[0] not in text:
                text = f"{text} {told[0]}"
        empty = default in (None, "", argparse.SUPPRESS) or default in ([], ())
        if told or empty or isinstance(default, bool):
            return text
        return f"{text} (default: %(default)s)"


class _ShowAll(argparse.Action):
    """Prints the full help, and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the full help, and end the process."""
        assert isinstance(parser, LayeredParser)
        sys.stdout.write(parser.format_help_all())
        parser.exit()


class _PrintCompletion(argparse.Action):
    """Prints the code for a shell, and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, *more: Any) -> None:
        """Print the code for the shell that the option names, and end the process."""
        _, shell, _ = more
        sys.stdout.write(shell_code(parser.prog, shell))
        parser.exit()


def _columns(lines: Mapping[str, str]) -> list[str]:
    """Return lines with a key and its text each; the texts are aligned."""
    width = max((len(key) for key, text in lines.items() if text), default=0)
    return [f"{key:<{width}}  {text}".rstrip() for key, text in lines.items()]
