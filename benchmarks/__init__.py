"""What we claim about speed, reproducible with one command: `make bench`. See README.md beside this file."""
