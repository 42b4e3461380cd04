"""Change the number of workers while a job runs: what there is, what announces a change, how the job takes it."""
