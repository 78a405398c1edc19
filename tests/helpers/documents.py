"""The READMEs."""

READMES = [f"{folder}README.md" for folder in ("", "benchmarks/", "cocor/", "cocor/eval/", "loaders/")]
