"""Studies as SLURM job arrays: ``python -m bench.slurm submit|status|collect``."""
