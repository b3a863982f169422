"""The files of an index: vectors, word statistics, documents, and how they are read and replaced."""
