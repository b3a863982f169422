"""Plans: what one generation does differently from the model as trained. Data and pure functions."""
