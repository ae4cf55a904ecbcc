"""Slurm's commands, as people type them, carried out by Thebes: sbatch, squeue, scancel, sinfo, scontrol.

`thebes shims install DIR` puts small programs of these names into a folder that the user then puts into the PATH; each
calls `thebes slurm-shim NAME`. What is printed has Slurm's columns and widths, exit codes are Slurm's. An option that
would change what runs and that is not supported stops the command with one line that names it; one that changes nothing
that matters here is accepted with a warning. All of this was compared with the commands of Slurm 22.05.
"""
