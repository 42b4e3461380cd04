"""What each rank of a shared job runs: `run_parts.py [--ends-job] ENGINE PART...`, in the folder of the job.

Runs `setup.py`, then each part in a copy of what that left, and writes what the part printed or how it failed.
"""

import contextlib
import io
import json
import os
import pathlib
import sys
import time
import traceback

# Longer than ranks take for what they do not do together, such as noticing that one is gone.
WAIT_S = 30.0


def execute(path, names):
    # From a file, so that AutoGraph finds the source.
    exec(compile(path.read_text(), str(path), "exec"), names)


def run(part, names):
    """Runs a part and returns whether it came to its end."""
    folder = pathlib.Path.cwd() / part
    folder.mkdir(exist_ok=True)
    os.environ["TFDISTKIT_OWN_MODELS"] = "1"  # Many parts train a model alone, to compare with.
    printed, error = io.StringIO(), None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            execute(folder.with_suffix(".py"), {**names, "__name__": part, "folder": folder})
        except (Exception, SystemExit):
            error = traceback.format_exc()
    if "keras" in sys.modules:
        sys.modules["keras"].backend.clear_session()  # The next part begins with names of its own.
    result = folder / f"result.{names['rank']}"
    result.write_text(json.dumps({"printed": printed.getvalue(), "error": error}))
    result.rename(f"{result}.json")
    return error is None


def wait_for_others(part, engine):
    """Waits a while until all ranks came to the end of a part: one that has not must not see this one leave."""
    ranks = 1 if engine == "parameter_server" else int(os.environ["TFDISTKIT_LOCAL_WORLD_SIZE"])
    deadline = time.monotonic() + WAIT_S
    while not all((pathlib.Path.cwd() / part / f"result.{rank}.json").exists() for rank in range(ranks)):
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def main():
    words = sys.argv[1:]
    ends_job = words[0] == "--ends-job"
    engine, *parts = words[ends_job:]
    names = {"engine": engine, "rank": int(os.environ["TFDISTKIT_RANK"])}
    execute(pathlib.Path("setup.py"), names)
    for part in parts:
        if not run(part, names):
            os._exit(1)  # Nobody who waits for this rank at its end shall wait.
    if ends_job:
        wait_for_others(parts[-1], names["engine"])
        os._exit(0)  # After the last part TensorFlow and Horovod would wait for each other.


if __name__ == "__main__":
    main()
