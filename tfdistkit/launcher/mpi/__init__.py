"""Workers in the MPI world of `mpirun`."""
