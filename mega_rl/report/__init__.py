"""A report of one or more runs: what is in their output directories, as one HTML file that needs nothing else."""
