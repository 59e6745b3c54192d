"""Settings as they stand on the command line, and all that can be wrong with them."""
