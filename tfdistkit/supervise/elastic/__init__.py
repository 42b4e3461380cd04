"""Change the number of workers of a running job: available slots, preemption notices, and the change itself."""
