"""Assembly: documents in, an ordered and tokenised prompt with an exact layout out."""
