"""Tests of extras/. Run with: pytest -q extras/test_extras.py

What all methods share is tested by test_all.py's own tests: those imported here run over the methods of
extras/baselines.py.
"""

# -------------------------------------------------------------------------------------------- comparison rows

# ------------------------------------------------------------------------------------------------- GGUF files

# ------------------------------------------------------------------------------------- lm-evaluation-harness

# ------------------------------------------------------------------------------- speed, pictures (bench.py)

# -------------------------------------------------------------------------------------------------- hopper.py
