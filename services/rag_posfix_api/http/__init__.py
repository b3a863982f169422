"""What every route shares: authentication, errors, metrics, logs, middlewares. Independent of the API formats."""
