"""Environments: what a policy acts in. Each is single use and lives for one episode."""
