"""Commands on runs and machines: audit, report, forecast, doctor, rollouts as training data."""
