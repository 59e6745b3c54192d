"""The whole run in small before it is begun: random twins of its models, a death of each actor."""
