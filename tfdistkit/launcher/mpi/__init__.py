"""Workers that mpirun places."""
