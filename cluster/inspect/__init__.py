"""Commands on finished runs: audit, report, pictures, rollouts as data."""
