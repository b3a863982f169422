"""The page at ``/``: two columns of answers over the same passages, in static files that load nothing from outside."""
