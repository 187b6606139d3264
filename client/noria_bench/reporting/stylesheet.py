"""The page's style sheet: one set of colours for light and one for dark, chosen by the system or by the reader.

No script: the choice is a radio button, which the page's root looks at.
"""

from __future__ import annotations

from noria_bench.reporting.palette import css_variables

_LIGHT = "color-scheme: light; --page: #f5f6f8; --raised: #eceff3; " + css_variables(is_dark=False)
_DARK = "color-scheme: dark; --page: #0f1217; --raised: #222831; " + css_variables(is_dark=True)

STYLESHEET = f"""
:root {{ {_LIGHT} --font: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
:root:has(#theme-light:checked) {{ {_LIGHT} }}
:root:has(#theme-dark:checked) {{ {_DARK} }}
@media print {{ :root, :root:has(#theme-dark:checked) {{ {_LIGHT} }} .theme, nav {{ display: none; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 var(--font); }}
header, main, footer {{ max-width: 76rem; margin: 0 auto; padding: 0 1.25rem; }}
header {{ padding-top: 1.5rem; }}
h1 {{ font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.3rem; margin: 2.4rem 0 .8rem; overflow-wrap: anywhere; }}
h3 {{ font-size: 1.05rem; margin: 1.6rem 0 .6rem; overflow-wrap: anywhere; }}
p {{ max-width: 46rem; margin: .5rem 0; }}
a {{ color: var(--inflight); }}
.note, figcaption {{ color: var(--muted); font-size: .875rem; }}
code, pre {{ font: .85em/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }}
pre {{ background: var(--surface); border: 1px solid var(--grid); border-radius: 6px; padding: .6rem .8rem;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0; }}
nav ul {{ display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; list-style: none; margin: .9rem 0 0; padding: 0; }}
.theme {{ border: 0; margin: .7rem 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem .9rem;
  font-size: .875rem; }}
.theme legend {{ float: left; padding: 0; margin-right: .8rem; color: var(--muted); }}
.alert {{ background: var(--surface); border: 1px solid var(--grid); border-left: 5px solid var(--alarm);
  border-radius: 6px; padding: .7rem 1rem; margin: 1.2rem 0; }}
.alert h2 {{ margin: 0 0 .3rem; color: var(--alarm); }}
.alert.fine {{ border-left-color: var(--dynamic); }}
.alert.mild {{ border-left-color: var(--muted); }}
.alert.mild h2 {{ color: var(--ink); }}
.alert ul {{ margin: .3rem 0; padding-left: 1.2rem; overflow-wrap: anywhere; }}
.kind {{ font-weight: 700; }}
.grave .kind {{ color: var(--alarm); }}
.scroll {{ overflow-x: auto; background: var(--surface); border: 1px solid var(--grid); border-radius: 6px;
  margin: .8rem 0; }}
.scroll:focus-visible, summary:focus-visible, input:focus-visible {{ outline: 2px solid var(--inflight);
  outline-offset: 2px; }}
table {{ border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; min-width: 100%; }}
caption.quiet {{ position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }}
caption {{ text-align: left; padding: .55rem .8rem; font-weight: 700; overflow-wrap: anywhere; }}
th, td {{ padding: .3rem .8rem; text-align: left; vertical-align: top; border-top: 1px solid var(--grid);
  white-space: nowrap; unicode-bidi: isolate; }}
thead th {{ background: var(--raised); vertical-align: bottom; white-space: normal; min-width: 4.6rem; }}
tbody th {{ font-weight: 500; }}
tbody th:first-child {{ position: sticky; left: 0; background: var(--surface); max-width: 22rem; white-space: normal;
  overflow-wrap: break-word; }}
td.figure, th.figure {{ text-align: right; }}
td.text {{ white-space: normal; min-width: 18rem; overflow-wrap: anywhere; }}
tr.unfit td, tr.unfit th {{ color: var(--alarm); }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(27rem, 100%), 1fr)); gap: 1rem; }}
figure {{ background: var(--surface); border: 1px solid var(--grid); border-radius: 6px; margin: 0; padding: .8rem;
  min-width: 0; }}
figure.wide {{ grid-column: 1 / -1; }}
figure .scroll {{ border: 0; margin: 0; }}
svg.chart {{ display: block; width: 100%; max-width: 36rem; height: auto; margin: 0 auto; }}
svg.chart * {{ stroke-linejoin: round; stroke-linecap: butt; }}
figure.wide svg.chart, figure.wide img {{ min-width: 42rem; max-width: 70rem; width: 100%; }}
figure img {{ display: block; background: #ffffff; border-radius: 4px; margin: 0 auto; }}
figcaption {{ margin-top: .5rem; }}
details {{ margin: .6rem 0; }}
summary {{ cursor: pointer; font-weight: 600; padding: .2rem 0; }}
footer {{ margin: 3rem auto 2rem; color: var(--muted); font-size: .875rem; }}
@media (max-width: 40rem) {{
  header, main, footer {{ padding-left: .7rem; padding-right: .7rem; }}
  tbody th:first-child {{ max-width: 9.5rem; }}
  th, td {{ padding: .3rem .5rem; }}
  figure {{ padding: .5rem; }}
}}
"""
