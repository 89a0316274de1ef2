"""The candidates of a region: generated, built, compared with its own operators, timed, and one of them chosen."""
