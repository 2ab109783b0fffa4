"""Where emitted text is compiled and run: `host` (CPU executor), `nvrtc` (compile only), `cuda` (CuPy)."""
