"""Collections: documents that tenants keep in the service, in a folder each, safe from crashes and from each other."""
