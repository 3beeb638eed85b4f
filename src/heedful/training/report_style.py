"""How a report looks: one style sheet for light and dark, wide and narrow, screen and paper."""

STYLE = """
:root {
  --page: #f6f7f9; --card: #ffffff; --ink: #16202c; --soft: #5b6878; --line: #e1e6ec;
  --s0: #2563c9; --s1: #d9640a; --good: #1a7f47; --bad: #b93a22; --good-bg: #e3f4ea;
  --bad-bg: #fbe5df; --warn: #8a5a00; --warn-bg: #fdf0d2; --mark: #ffd9cc; --code: #f0f3f7;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #10151c; --card: #181f29; --ink: #e4eaf1; --soft: #94a2b3; --line: #2b3543;
    --s0: #6ea8ff; --s1: #ffa25c; --good: #6fd69b; --bad: #ff9a84; --good-bg: #16382a;
    --bad-bg: #46231d; --warn: #f0c465; --warn-bg: #3d3115; --mark: #6b3023; --code: #121821;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans",
    "Noto Sans CJK SC", sans-serif;
  -webkit-text-size-adjust: 100%;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 72px; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -.015em; margin: 0; }
h2 { font-size: 1.15rem; margin: 44px 0 14px; letter-spacing: -.005em; }
.top { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: center; }
.lead, .nothing { color: var(--soft); margin: 6px 0 16px; }
.state { font-size: .82rem; font-weight: 600; padding: 3px 11px; border-radius: 99px; }
.state.done { color: var(--good); background: var(--good-bg); }
.state.open { color: var(--warn); background: var(--warn-bg); }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 12px; }
.tile, .chart, .sample, .scroll, pre {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
}
.tile { flex: 1 1 140px; padding: 12px 16px; display: flex; flex-direction: column; }
.tile span { color: var(--soft); font-size: .84rem; }
.tile b { font-size: 1.5rem; line-height: 1.3; font-weight: 650; letter-spacing: -.01em; }
.tile small { color: var(--soft); font-size: .78rem; min-height: 1.2em; }
.tile.main { border-color: var(--s0); box-shadow: inset 0 3px 0 var(--s0); }
.tile b, .n, svg text, .chart { font-variant-numeric: tabular-nums; }
.charts, .samples {
  display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr));
}
.chart { margin: 0; padding: 14px 14px 8px; }
figcaption {
  display: flex; flex-wrap: wrap; gap: 2px 10px; align-items: baseline; padding: 0 4px 6px;
}
figcaption b { font-weight: 620; }
.scale, .legend { color: var(--soft); font-size: .82rem; }
.legend { margin-left: auto; display: flex; gap: 14px; }
.key::before {
  content: ""; display: inline-block; width: 16px; height: 3px; border-radius: 2px;
  margin-right: 6px; vertical-align: middle; background: currentColor;
}
.key.s0::before { background: var(--s0); }
.key.s1::before { background: var(--s1); }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 12.5px; fill: var(--soft); }
.ty { text-anchor: end; dominant-baseline: central; }
.tx { text-anchor: middle; dominant-baseline: hanging; }
.grid { stroke: var(--line); }
.axis, .tick { stroke: var(--soft); }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
polyline.s0 { stroke: var(--s0); }
polyline.s1 { stroke: var(--s1); }
circle.s0 { fill: var(--s0); }
circle.s1 { fill: var(--s1); }
circle { opacity: 0; }
circle.on { opacity: 1; }
circle.best { fill: var(--card); stroke-width: 2.5; }
circle.best.s0 { stroke: var(--s0); }
circle.best.s1 { stroke: var(--s1); }
.p rect { fill: var(--soft); opacity: 0; }
.p:hover rect { opacity: .1; }
.p:hover circle { opacity: 1; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: 9px 16px; vertical-align: top; }
thead th { color: var(--soft); font-weight: 550; font-size: .82rem; white-space: nowrap; }
tbody tr { border-top: 1px solid var(--line); }
table > tbody:first-child > tr:first-child { border-top: 0; }
tbody th { font-weight: 600; white-space: nowrap; }
.n { text-align: right; white-space: nowrap; }
#scores td.n { font-size: 1.05rem; font-weight: 650; }
#facts th { width: 12em; color: var(--soft); font-weight: 500; }
#facts td, code { overflow-wrap: anywhere; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
code { font-size: .86em; }
td code { color: var(--soft); }
details { margin-top: 16px; }
summary { cursor: pointer; color: var(--s0); padding: 4px 0 10px; }
.sample { padding: 12px 16px; position: relative; border-left: 4px solid var(--good); }
.sample.wrong { border-left-color: var(--bad); }
.sample .mark {
  position: absolute; right: 12px; top: 11px; font-size: .76rem; font-weight: 600;
  padding: 1px 9px; border-radius: 99px;
}
.ok { color: var(--good); background: var(--good-bg); }
.off { color: var(--bad); background: var(--bad-bg); }
dl { margin: 0; display: grid; grid-template-columns: 5.4em 1fr; gap: 3px 8px; }
dt { color: var(--soft); font-size: .84rem; padding-top: 2px; }
dd { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; }
dd:first-of-type { padding-right: 4.5em; }
mark { background: var(--mark); color: inherit; border-radius: 3px; padding: 0 1px; }
pre { margin: 0; padding: 16px 18px; overflow-x: auto; line-height: 1.55; background: var(--code); }
.yk { color: var(--s0); }
.yc { color: var(--soft); }
@media (max-width: 620px) {
  main { padding: 22px 14px 48px; }
  h1 { font-size: 1.5rem; }
  .tiles { gap: 8px; margin-top: 8px; }
  .tile { flex-basis: 40%; padding: 9px 12px; }
  .tile b { font-size: 1.25rem; }
  .chart { padding: 10px 8px 6px; }
  svg text { font-size: 19px; }
  polyline { stroke-width: 3; }
  th, td { padding: 8px 11px; }
  #scores thead { display: none; }
  #scores tr { display: grid; grid-template-columns: 1fr auto; padding: 6px 0; }
  #scores th, #scores td { padding: 2px 12px; }
  #scores td + td { grid-column: 1 / -1; font-size: .86rem; }
  #facts th { width: 34%; white-space: normal; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: 5px; }
}
@media print { body { background: none; } section, .chart, .sample { break-inside: avoid; } }
"""
