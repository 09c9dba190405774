"""`chronik pipeline run`: landings, sinks and audits of one file as a service that runs for months."""
