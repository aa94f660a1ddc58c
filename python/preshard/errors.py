"""What goes wrong, grouped by who must act.

Texts are those of the ``preshard`` command: one line each, the file or tensor first, then what was
found, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class Error(Exception):
    """Base class of every error of this package.

    ``problems`` holds one line per problem; ``str()`` joins them with newlines. When problems of
    several kinds come together, the class is ``Error`` itself.
    """

    problems: list[str]

    def __init__(self, text: str, problems: Sequence[str] | None = None) -> None:
        super().__init__(text)
        self.problems = list(problems) if problems is not None else [text]

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.args[0], self.problems))


class SourceError(Error):
    """The GGUF is damaged, of the wrong kind or not supported: get another file."""


class RequestError(Error, ValueError):
    """The options do not fit: change one."""


class MappingError(Error):
    """A mapping file is wrong: mend it."""


class OutputError(Error):
    """The output directory cannot be used: choose another, or make room."""


class ShardsError(Error):
    """A converted directory is damaged, incomplete or does not fit the engine: convert again."""


class DeviceError(Error):
    """The GPU or its driver cannot do it: mend the driver or use the CPU."""


class FileError(Error, OSError):
    """The operating system refused an operation on a file; ``errno`` and ``filename`` are set."""


class Interrupted(Error):
    """The work was asked to stop; the text says how to go on."""
