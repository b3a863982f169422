"""Keys and values of passages, kept between questions in memory, on disk and in Redis. A failing store is a miss."""
