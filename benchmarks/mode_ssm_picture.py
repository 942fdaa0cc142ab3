"""The picture of MODE-SSM for `pictures.py`: its components and the stages in which they are trained."""

from arcuate.experiments.recipe import load_recipe

# name, text, component, x, y, width
BOXES = [
    ("bins", "bins\n20 ms each", None, 10, 90, 80),
    ("front", "session layer\nchannel gate, stem", "front_end", 120, 90, 130),
    ("mode", "speaking mode\nsilent or vocalised?", "mode", 120, 10, 130),
    ("gains", "gains by mode", "mode", 280, 90, 100),
    ("encoder", "patches\nSSM blocks", "encoder", 410, 90, 100),
    ("bridge", "flow bridge\nnoisy to clean", "denoiser", 540, 90, 110),
    ("ctc", "linear\nCTC scores", "ctc", 690, 50, 110),
    ("joiner", "joiner\ntransducer scores", "transducer", 690, 130, 120),
    ("predictor", "predictor\ntokens so far", "transducer", 540, 190, 110),
]
ARROWS = [
    ("bins", "front"), ("bins", "mode"), ("front", "gains"), ("mode", "gains"), ("gains", "encoder"),
    ("encoder", "bridge"), ("bridge", "ctc"), ("bridge", "joiner"), ("predictor", "joiner"),
]  # fmt: skip
COLOURS = {
    "front_end": "#dbe7f4", "encoder": "#c4d8ee", "ctc": "#d9ead3", "transducer": "#fce5cd",
    "mode": "#ead1dc", "denoiser": "#d9d2e9", None: "#f3f3f3",
}  # fmt: skip
HEIGHT = 44


def box(text: str, component: str | None, x: int, y: int, width: int) -> list[str]:
    lines = text.split("\n")
    first = y + HEIGHT / 2 + 4 - 7 * (len(lines) - 1)
    drawn = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="6" fill="{COLOURS[component]}" stroke="#555"/>'
    ]
    for i, line in enumerate(lines):
        weight = ' font-weight="bold"' if i == 0 else ""
        drawn.append(f'<text x="{x + width / 2}" y="{first + 14 * i}" text-anchor="middle"{weight}>{line}</text>')
    return drawn


def arrow(a: tuple, b: tuple) -> str:
    """From right edge to left edge, or upwards between boxes on top of each other."""
    ax, ay, aw = a[3:]
    bx, by, _ = b[3:]
    start = (ax + aw, ay + HEIGHT / 2)
    end = (bx - 4, by + HEIGHT / 2)
    return f'<line x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}" stroke="#555" marker-end="url(#tip)"/>'


def stages() -> list[str]:
    """One row per stage of the recipe: its losses, and a block for every trained component."""
    recipe = load_recipe("mode-ssm")
    drawn, y = (
        ['<text x="10" y="278" font-weight="bold">stages of the recipe: losses and trained components</text>'],
        290,
    )
    for number, stage in enumerate(recipe.stages, start=1):
        weights = " + ".join(f"{weight:g} {name}" for name, weight in stage.losses.active.items())
        drawn.append(f'<text x="10" y="{y + 16}">{number}  {stage.name}: {weights}</text>')
        for i, component in enumerate(recipe.components):
            if component in (stage.train or recipe.components):
                x = 350 + 78 * i
                drawn.append(
                    f'<rect x="{x}" y="{y}" width="74" height="22" rx="4" fill="{COLOURS[component]}" stroke="#999"/>'
                )
                drawn.append(f'<text x="{x + 37}" y="{y + 15}" text-anchor="middle">{component}</text>')
        y += 28
    return drawn


def draw() -> str:
    found = {name: entry for entry in BOXES for name in entry[:1]}
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 830 410" font-family="sans-serif" font-size="11">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>',
        '<rect width="830" height="410" fill="white"/>',
    ]
    parts += [arrow(found[a], found[b]) for a, b in ARROWS]
    for _, text, component, x, y, width in BOXES:
        parts += box(text, component, x, y, width)
    return "\n".join([*parts, *stages(), "</svg>"]) + "\n"
