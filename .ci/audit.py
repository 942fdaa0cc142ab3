"""Known vulnerabilities (pip-audit) and licences of the installed dependencies of arcuate.

Exit code 1 for a vulnerability that a newer version fixes, or for a licence that the MIT licence of the project does not
allow to depend on. Where the database of vulnerabilities cannot be reached, that part is skipped with the reason.
"""

import json
import re
import subprocess
import sys
from importlib import metadata

# Copyleft that would extend to programs that import the package, and licences without the right to use it.
_REFUSED = re.compile(r"\b(A?GPL|GNU (Affero )?General Public|SSPL|Proprietary|Commercial|NonCommercial)", re.IGNORECASE)
_ALLOWED = re.compile(r"\b(LGPL|Lesser General Public|MIT|BSD|Apache|MPL|Mozilla|ISC|Python|PSF|Unlicense|0BSD|Zlib)")
_NAME = re.compile(r"^[A-Za-z0-9._-]+")


def dependencies(root: str = "arcuate") -> list[str]:
    """Installed packages that the project needs, with all extras, and those that they need."""
    found: dict[str, None] = {}
    waiting = [root]
    while waiting:
        name = waiting.pop()
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # of an extra that is not installed
        for requirement in requires:
            extra = "extra ==" in requirement
            needed = _NAME.match(requirement)
            if needed is None or (extra and name != root):
                continue
            key = re.sub(r"[-_.]+", "-", needed[0]).lower()
            if key not in found and key != root:
                found[key] = None
                waiting.append(key)
    return sorted(found)


def licence(name: str) -> str:
    about = metadata.metadata(name)
    stated = [about.get("License-Expression"), *(about.get_all("Classifier") or []), about.get("License")]
    texts = [t for t in stated if t and (t in (stated[0], stated[-1]) or t.startswith("License ::"))]
    return "; ".join(text.removeprefix("License :: ").split("\n")[0][:80] for text in texts)


def check_licences() -> bool:
    refused, unknown, n = [], [], 0
    for name in dependencies():
        try:
            text = licence(name)
        except metadata.PackageNotFoundError:
            continue
        n += 1
        if _ALLOWED.search(text):  # of several licences, one that is allowed can be chosen
            continue
        (refused if _REFUSED.search(text) else unknown).append(f"{name} ({text or 'not stated'})")
    print(f"licences: {n} packages, {len(refused)} refused, {len(unknown)} to be looked at")
    for line in (*(f"  refused: {item}" for item in refused), *(f"  to be looked at: {item}" for item in unknown)):
        print(line)
    return not refused


def check_vulnerabilities() -> bool:
    command = [sys.executable, "-m", "pip_audit", "--local", "--format", "json", "--progress-spinner", "off"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        rows = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        print(f"vulnerabilities: skipped, pip-audit or its database is not available ({reason[:200]})")
        return True
    audited = [row for row in rows if "vulns" in row]
    if not audited:
        print(f"vulnerabilities: skipped, the database that was reached knows none of the {len(rows)} packages")
        return True
    found = [(row, vulnerability) for row in audited for vulnerability in row["vulns"]]
    fixable = [pair for pair in found if pair[1]["fix_versions"]]
    print(f"vulnerabilities: {len(audited)} of {len(rows)} packages checked, {len(found)} found, {len(fixable)} with a fix")
    for row, vulnerability in found:
        fixes = ", ".join(vulnerability["fix_versions"]) or "none yet"
        print(f"  {row['name']} {row['version']}: {vulnerability['id']}, fixed in {fixes}")
    return not fixable


if __name__ == "__main__":
    sys.exit(0 if all([check_licences(), check_vulnerabilities()]) else 1)
