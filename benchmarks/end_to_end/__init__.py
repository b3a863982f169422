"""From raw files to answers: files of many kinds and languages, questions about them, and what came of each."""
