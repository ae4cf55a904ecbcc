"""The engine of a Ray cluster. Ray's own library is loaded in a child process alone (`driver`)."""
