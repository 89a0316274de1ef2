"""The command line: ``python -m fusepass explain | profile | compare | check | extract | build | run | doctor | cache``."""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import fusepass
from fusepass.cli import compare, deploy, doctor, tools
from fusepass.cli.arguments import add_call, add_options, call_of, options_of
from fusepass.cli.compare import step
from fusepass.cli.model import Call, UsageError, attempt
from fusepass.codegen import cache, cache_archive, cache_folders, choices
from fusepass.config import current, override
from fusepass.report.report import Report, SourceFile
from fusepass.report.table import Column, human_bytes, table, terminal_width

_CACHE_COLUMNS = (
    Column("name", least=12),
    Column("target"),
    Column("arch"),
    Column("size", right=True),
    Column("built"),
    Column("key"),
)
_CHOICE_COLUMNS = (
    Column("region", least=12),
    Column("chosen"),
    Column("x eager", right=True),
    Column("effort"),
    Column("device", least=8),
    Column("key"),
)
_KEY_DIGITS = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit status: 0 for success, 1 for a fault it found, 2 for wrong usage.

    `argv` holds the arguments without the program's name; None takes them from ``sys.argv``.

    Raises:
        SystemExit: the arguments do not parse (status 2), or help was asked for (status 0).
    """
    debug = False
    try:
        debug = attempt("reading the options", current).debug
        arguments = _parser().parse_args(argv)
        command: Callable[[argparse.Namespace], int] = arguments.run
        status = command(arguments)
        sys.stdout.flush()  # here, not when the interpreter ends, a closed pipe can be told from a fault
        return status
    except BrokenPipeError:  # `fusepass explain ... | head`: who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UsageError as error:
        if debug:
            traceback.print_exc()
        print(f"fusepass: error: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Tells an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("fusepass", description="Fuses chains of PyTorch operators into a few kernels.")
    parser.add_argument("--version", action="version", version=f"fusepass {fusepass.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_explain(commands.add_parser("explain", help="show what of a model fuses, what does not, and why"))
    _add_profile(commands.add_parser("profile", help="show where the time of a call goes, beside the device's limits"))
    compare.add(commands.add_parser("compare", help="time eager, torch.compile and fusepass side by side"))
    tools.add_check(commands.add_parser("check", help="show how far each region is from float64, beside eager"))
    tools.add_extract(commands.add_parser("extract", help="write a region as a program that builds and times itself"))
    deploy.add_build(commands.add_parser("build", help="write a model as a file that runs without compilers"))
    deploy.add_run(commands.add_parser("run", help="run such a file on made-up inputs, and time it"))
    check = commands.add_parser("doctor", help="examine compilers, CUDA, torch and the cache")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.add_argument("--environment", action="store_true", help="add PyTorch's description of the machine")
    check.set_defaults(run=_doctor)
    actions = commands.add_parser("cache", help="look after the built libraries and measured choices on disk")
    names = actions.add_subparsers(required=True, metavar="ACTION")
    for name, run, text in (
        ("list", _cache_list, "show every library and measured choice"),
        ("verify", _cache_verify, "compare every library and measured choice with its checksum"),
        ("clear", _cache_clear, "delete every library, measured choice, lock and leftover"),
        ("export", _cache_export, "write every library and measured choice to FILE, for machines without compilers"),
        ("import", _cache_import, "take in what export wrote to FILE"),
        ("path", _cache_path, "print the cache directory"),
    ):
        action = names.add_parser(name, help=text)
        action.set_defaults(run=run)
        if name in ("export", "import"):
            action.add_argument("file", type=Path, metavar="FILE")
        elif name == "clear":
            action.add_argument("--choices", action="store_true", help="delete the measured choices alone")
    return parser


def _add_explain(parser: argparse.ArgumentParser) -> None:
    add_call(parser)
    add_options(parser, train=True)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON, which holds the sources too")
    output.add_argument("--show-sources", action="store_true", help="print the generated sources too")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="write the generated sources below DIR")
    parser.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    call = call_of(arguments)
    report = attempt(f"explaining {arguments.target}", lambda: _report(call, arguments))
    print(report.to_json() if arguments.json else report)
    if arguments.show_sources:
        for path, source in _sources(report):
            print(f"\n==> {path} <==\n{source.text.rstrip()}")
    if arguments.sources is not None:
        attempt("writing the sources", lambda: _write(report, arguments.sources))
    return 0


def _report(call: Call, arguments: argparse.Namespace) -> Report:
    """What fuses in a call without gradients, or in a step of training of a copy of the model."""
    options = options_of(arguments)
    if not arguments.train:
        with override(**options):
            return fusepass.explain(call.model, *call.args, **call.kwargs)
    optimised = fusepass.optimize(copy.deepcopy(call.model), **options)
    step(optimised, call)
    return optimised.report()


def _add_profile(parser: argparse.ArgumentParser) -> None:
    add_call(parser)
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, which holds the sources too")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write one page that shows the graph before and after"
    )
    parser.set_defaults(run=_profile)


def _profile(arguments: argparse.Namespace) -> int:
    call = call_of(arguments)
    optimised = fusepass.optimize(call.model, **options_of(arguments))
    profile = attempt(f"profiling {arguments.target}", lambda: optimised.profile(*call.args, **call.kwargs))
    if arguments.html is not None:
        attempt("writing the page", lambda: profile.save_html(arguments.html))
        print(f"wrote {arguments.html}", file=sys.stderr)
    print(profile.to_json() if arguments.json else profile)
    return 0


def _sources(report: Report) -> list[tuple[Path, SourceFile]]:
    """Every source with its own relative path: the region's name, numbered if it recurs, then the file's."""
    seen: Counter[str] = Counter()
    files = []
    for region in report.regions:
        folder = re.sub(r"[^\w.-]", "_", region.name)
        seen[folder] += 1
        number = f"_{seen[folder]}" if seen[folder] > 1 else ""
        files += [(Path(folder + number, source.name), source) for source in region.sources]
    return files


def _write(report: Report, directory: Path) -> None:
    files = _sources(report)
    for path, source in files:
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.text, encoding="utf-8")
    print(f"wrote {_counted(len(files), 'source')} below {directory}", file=sys.stderr)


def _doctor(arguments: argparse.Namespace) -> int:
    diagnosis = doctor.diagnose(environment=arguments.environment)
    print(diagnosis.to_json() if arguments.json else diagnosis)
    return 0 if diagnosis.ok else 1


def _cache_list(_: argparse.Namespace) -> int:
    entries, measured = cache.entries(), choices.entries()
    if not entries and not measured:
        return _empty()
    if entries:
        _print_entries(entries)
        print(f"{_counted(len(entries), 'library')}, {human_bytes(sum(entry.nbytes for entry in entries))}")
    if measured:
        _print_choices(measured)
        print(_counted(len(measured), "measured choice"))
    return 0


def _cache_verify(_: argparse.Namespace) -> int:
    entries, measured = len(cache.entries()), len(choices.entries())
    damaged, spoilt = cache.verify(), choices.verify()
    if damaged:
        _print_entries(damaged)
        print(f"{len(damaged)} of {_counted(entries, 'library')} damaged; each is rebuilt when it is needed")
    if spoilt:
        _print_choices(spoilt)
        print(f"{len(spoilt)} of {_counted(measured, 'measured choice')} damaged; each is measured again when needed")
    if damaged or spoilt:
        return 1
    if not entries and not measured:
        return _empty()
    parts = [_counted(entries, "library")] * bool(entries) + [_counted(measured, "measured choice")] * bool(measured)
    print(f"{' and '.join(parts)} intact")
    return 0


def _cache_clear(arguments: argparse.Namespace) -> int:
    print(f"freed {human_bytes(choices.clear() if arguments.choices else cache.clear())}")
    return 0


def _cache_export(arguments: argparse.Namespace) -> int:
    moved = attempt("exporting the cache", lambda: cache_archive.write(arguments.file))
    print(f"wrote {_moved(moved)} to {arguments.file}")
    return 0


def _cache_import(arguments: argparse.Namespace) -> int:
    moved = attempt("importing a cache", lambda: cache_archive.read(arguments.file))
    print(f"took in {_moved(moved)} that were not there yet")
    return 0


def _moved(moved: cache_archive.Moved) -> str:
    return f"{_counted(moved.libraries, 'library')} and {_counted(moved.choices, 'measured choice')}"


def _cache_path(_: argparse.Namespace) -> int:
    print(cache_folders.directory())
    return 0


def _empty() -> int:
    print(f"the cache is empty: {cache_folders.directory()}")
    return 0


def _print_entries(entries: Sequence[cache.CacheEntry]) -> None:
    rows = [
        (
            entry.name,
            entry.target.value,
            entry.arch,
            human_bytes(entry.nbytes),
            f"{entry.created:%Y-%m-%d %H:%M}",
            entry.key[:_KEY_DIGITS],
        )
        for entry in entries
    ]
    for block in table(_CACHE_COLUMNS, rows, terminal_width()):
        print(*block, sep="\n")


def _print_choices(entries: Sequence[choices.ChoiceEntry]) -> None:
    rows = [_choice_row(entry) for entry in entries]
    for block in table(_CHOICE_COLUMNS, rows, terminal_width()):
        print(*block, sep="\n")


def _choice_row(entry: choices.ChoiceEntry) -> tuple[str, ...]:
    key, record = entry.key[:_KEY_DIGITS], entry.record
    if record is None:
        return choices.UNREADABLE, "", "", "", "", key
    choice = record.choice
    speedup = f"{choice['speedup']:.2f}" if choice.get("speedup") else ""
    dropped = len(choice.get("dropped", ()))
    chosen = str(choice.get("chosen", "")) + (f" ({dropped} dropped)" if dropped else "")
    return record.region, chosen, speedup, record.effort, record.device, key


def _counted(count: int, noun: str) -> str:
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count} {noun if count == 1 else plural}"
