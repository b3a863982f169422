"""The page at / in a real Chromium: no console errors and no request to another host in any test."""
