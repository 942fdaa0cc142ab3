"""Building blocks of the HTML pages: markup, number formats, SVG primitives and shared charts."""
