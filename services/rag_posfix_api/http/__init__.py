"""What every route shares: authentication, errors, metrics, logs, streaming. Knows no wire format."""
