"""`python -m tests.fuzz --examples 5000 --strategy mirrored`: runs a given number of programs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from fuzz import hunting
from fuzz.generating import draw_programs
from fuzz.programs import Program

STRATEGIES = (
    "mirrored",
    "central_storage",
    "multiworker",
    "multiworker_ring",
    "multiworker_hierarchical",
    "one_device",
    "horovod",
    "parameter_server",
    "parameter_server:one",
)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=100, metavar="N", help="programs for each strategy")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first program")
    parser.add_argument("--strategy", action="append", choices=STRATEGIES, help="default: mirrored; may be repeated")
    parser.add_argument("--case", action="append", metavar="FILE", help="run case files, or programs as JSON")
    parser.add_argument(
        "--shrink", type=int, default=3, metavar="N", help="how many kinds of failures are shrunk and kept as cases"
    )
    parser.add_argument("--keep", type=Path, default=hunting.CASES, metavar="DIR", help="where cases are kept")
    parser.add_argument("--eager", action="store_true", help="run them all without `tf.function`")
    parser.add_argument("--fault", default="", help="a fault that is planted (fuzz/planted.py)")
    parser.add_argument("--horovod", default="", metavar="DIR", help="an entry for PYTHONPATH with Horovod in it")
    parser.add_argument("--quiet", action="store_true", help="no line for each program")
    return parser.parse_args()


def _program_of(text: str) -> Program:
    found = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    return Program.from_json(found.get("program", found))


def main() -> int:
    """Runs the programs and returns the exit code: 1 if one failed."""
    arguments = _arguments()
    engines = arguments.strategy or ["mirrored"]
    programs = [_program_of(text) for text in arguments.case or []]
    programs = programs or draw_programs(arguments.examples, arguments.first)
    programs = [one.changed(eager=True, execution=1) for one in programs] if arguments.eager else programs
    say = (lambda line: None) if arguments.quiet else (lambda line: print(line, flush=True))
    hunt = hunting.Hunt(engines, arguments.fault, arguments.horovod, stop_at_failure=bool(arguments.fault), say=say)
    try:
        report = hunt.run(dict.fromkeys(engines, programs))
        print(report, flush=True)
        shown = set()
        for failure in report.failures:
            if failure.verdict.what not in shown:
                shown.add(failure.verdict.what)
                print(f"\n{failure.engine}: {failure.verdict.what}\n{failure.program}\n{failure.details()}", flush=True)
        kinds = {}
        for failure in report.failures:
            kinds.setdefault((failure.engine, failure.verdict.what.partition(":")[0]), []).append(failure)
        for failures in list(kinds.values())[: arguments.shrink]:
            hunt.shrink(failures[0])
            print(f"{failures[0].engine}: {failures[0].verdict.what}\n  {failures[0].simplest}", flush=True)
            print("  kept:", failures[0].keep(arguments.keep), flush=True)
    finally:
        hunt.close()
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
