"""`python -m tfdistkit.data.writing.command JSON`: the process that `tfdistkit data write` executes."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import tensorflow as tf

from tfdistkit.data.writing.csv_files import CsvOptions
from tfdistkit.data.writing.sources import open_source
from tfdistkit.data.writing.writer import write_shards
from tfdistkit.errors import OptionError, TfdistkitError

_USAGE_EXIT_CODE = 2


def main() -> int:
    """Writes a data set by the options in `sys.argv[1]` (JSON), and returns the exit code.

    For the options see `tfdistkit data write --help`.
    """
    signal.signal(signal.SIGTERM, _end)
    options = json.loads(sys.argv[1])
    out = Path(options["out"])
    try:
        csv = CsvOptions(options["header"], options["delimiter"])
        source = open_source(options["source"], options["split"], options["data_dir"], csv, options["label"])
        index = write_shards(source, out, options["shards"], _report)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (TfdistkitError, OSError, tf.errors.OpError) as error:
        print(f"tfdistkit data write: {error}", file=sys.stderr)
        return _USAGE_EXIT_CODE if isinstance(error, OptionError) else 1
    sizes = [file.elements for file in index.files]
    print(f"{out}: {index.elements} elements in {len(sizes)} files of {min(sizes)} to {max(sizes)}, verified")
    return 0


def _report(line: str) -> None:
    """Prints progress; on a terminal each line overwrites the one before."""
    end = "\r" if sys.stderr.isatty() and not line.startswith("verified") else "\n"
    print(line, end=end, file=sys.stderr, flush=True)


def _end(number: int, frame: Any) -> NoReturn:
    sys.exit(128 + number)  # SystemExit removes the unfinished folder


if __name__ == "__main__":
    sys.exit(main())
