"""Runs cases under one engine and writes records: `python -m parity.run_cases ENGINE FOLDER [CASE ...]`.

Each rank writes `FOLDER/<case>.<rank>.json` and `.npz`. A case that fails has an "error" there, and the next
one runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

import keras
import numpy as np

from parity import models
from parity.case import Case
from parity.cases import CASES
from parity.making import make_strategy, own_rank
from parity.runs import RUNS, Record


def run_case(case: Case, strategy: Any, folder: str, rank: int) -> None:
    """Runs one case and writes its record."""
    keras.backend.clear_session()
    keras.config.set_dtype_policy(case.policy)
    keras.utils.set_random_seed(1234 + (rank if case.seed_of_its_own else 0))
    own_folder = os.path.join(folder, f"{case.name}.{rank}")
    os.makedirs(own_folder, exist_ok=True)
    record = Record(own_folder)
    record.values["keras"] = keras.__version__
    start = time.monotonic()
    try:
        RUNS[case.run](case, strategy, record)
    except Exception as error:
        record.values["error"] = f"{type(error).__name__}: {error}"[:3000]
        record.values["traceback"] = traceback.format_exc()[-6000:]
    record.values["seconds"] = round(time.monotonic() - start, 2)
    np.savez(f"{own_folder}.npz", **record.arrays)
    with open(f"{own_folder}.json", "w") as file:
        json.dump(record.values, file, indent=1)
    print(case.name, record.values["seconds"], record.values.get("error", "ok")[:200], flush=True)


def main(engine: str, folder: str, names: list[str]) -> None:
    """Runs the named cases; all by default."""
    keras.config.disable_traceback_filtering()
    strategy = make_strategy(engine)
    models.replicas_to_emulate = 2 if engine == "one" else 1
    for name in names or CASES:
        run_case(CASES[name], strategy, folder, own_rank())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
