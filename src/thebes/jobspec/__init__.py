"""What a job is: its specification, job files in YAML, `#SBATCH` lines. Server, command line and client use it."""
