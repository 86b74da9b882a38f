"""What all other packages build on: processes, files, types of flags, metrics, row blocks."""
