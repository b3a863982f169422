"""What every route shares: authentication, errors, metrics, logs, middlewares. Knows no wire format."""
