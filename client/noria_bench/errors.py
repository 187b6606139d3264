"""What is wrong with a measurement that somebody asked for."""


class BenchError(Exception):
    """A workload, a load or a result that cannot be used; the message names the field and what is valid."""
