"""Who is alive: failures understood, heartbeats, deaths and restarts."""
