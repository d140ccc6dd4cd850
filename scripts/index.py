"""Makes of the files in a folder a package index that pip reads (PEP 503: FOLDER/simple).

python scripts/index.py dist
pip install c10d-custom --index-url file://$PWD/dist/simple
"""

import hashlib
import shutil
import sys
from pathlib import Path


def main(folder):
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz")))
    project = folder / "simple" / "c10d-custom"
    project.mkdir(parents=True, exist_ok=True)
    links = []
    for path in files:
        shutil.copy(path, project)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        links.append(f'<a href="{path.name}#sha256={digest}">{path.name}</a><br>')
    for at, lines in (project, links), (project.parent, ['<a href="c10d-custom/">c10d-custom</a>']):
        (at / "index.html").write_text("\n".join(["<!DOCTYPE html>", *lines, ""]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
