"""An instance on this machine: up, down, status, doctor, and the process of the controller itself."""
