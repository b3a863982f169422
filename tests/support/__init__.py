"""What several tests share: builders, fakes and checkers. Holds no tests."""
