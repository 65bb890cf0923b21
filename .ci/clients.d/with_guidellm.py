# /// script
# dependencies = ["guidellm==0.8.1"]
# ///
"""guidellm: a short benchmark, of which every request must succeed. Its torch makes it an environment of gigabytes."""
