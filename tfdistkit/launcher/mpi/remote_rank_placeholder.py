"""Holds one place in MPI's world on another host: `mpirun` starts this text there once per rank, as `python -c`.

As `mpi_slot`, but there is no way to the launcher other than mpirun's: it prints the variables that mpirun gave it, in
one line that is short enough to stay in one piece, and waits to be ended with mpirun. Nothing has to be installed for
it; only the standard library is imported.
"""

import base64
import json
import os
import signal
import zlib

PREFIXES = ("OMPI_", "PMIX_", "ORTE_", "OPAL_", "PRTE_")

# Ctrl-C is the launcher's to pass on.
signal.signal(signal.SIGINT, signal.SIG_IGN)
told = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
os.write(1, b"tfdistkit-slot " + base64.b64encode(zlib.compress(json.dumps(told).encode(), 9)) + b"\n")
while True:
    signal.pause()
