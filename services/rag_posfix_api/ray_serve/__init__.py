"""Ray Serve: the service in front of replicas of the model, and the choice of the replica for a question."""
