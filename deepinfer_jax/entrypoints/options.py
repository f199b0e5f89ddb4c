"""The options that every command shares, each as the annotation of a parameter."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE|NAME", help="Engine config: a packaged name or a file."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Change one key of the config; repeatable."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Folder for what the command writes."),
]
OutFile = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE.json", help="File that gets the result as JSON too."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on standard error.")]
