"""Hold one rank in MPI's world on another host: `mpirun` starts this source once per rank, as `python -c`.

Unlike `rank_placeholder`, it reaches the launcher only through mpirun: it prints the variables that mpirun set, in one
line short enough for an atomic write, and waits until mpirun ends it. It needs no installation: imports only the
standard library.
"""

import base64
import json
import os
import signal
import zlib

PREFIXES = ("OMPI_", "PMIX_", "ORTE_", "OPAL_", "PRTE_")

# The launcher handles Ctrl-C.
signal.signal(signal.SIGINT, signal.SIG_IGN)
variables = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
os.write(1, b"tfdistkit-slot " + base64.b64encode(zlib.compress(json.dumps(variables).encode(), 9)) + b"\n")
while True:
    signal.pause()
