// Curves with bands, drawn by uPlot. Used by the page and, as it stands, by the offline report.

export const COLOURS = 10;

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function seriesColour(i) {
  return colour(`--s${i % COLOURS}`);
}

const short = (v) => {
  if (v === null || v === undefined) return "–";
  const size = Math.abs(v);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return v.toExponential(1);
  return String(+v.toPrecision(size >= 100 ? 5 : 4));
};

const joined = (curves) => (curves.length ? uPlot.join(curves.map((c) => [c.x, c.mean, c.low, c.high])) : [[0], []]);

/** One chart: `curves` as the server gives them, each with `place`, the number of its colour. */
export function chart(box, { title, curves, x = "step", height = 224, sync = "panoply" }) {
  let held = curves.filter((c) => c.x.length);
  const series = [{ label: x }];
  const bands = [];
  for (const c of held) {
    const stroke = seriesColour(c.place);
    const at = series.length;
    const lone = c.runs.length < 2;
    series.push({
      label: c.label,
      stroke,
      width: 1.8,
      spanGaps: true,
      dash: c.place >= COLOURS ? [6, 4] : undefined,
      points: { show: c.x.length < 40, size: 5, fill: stroke },
    });
    const edge = { show: !lone, stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
    series.push({ ...edge, label: `${c.label} lowest` }, { ...edge, label: `${c.label} highest` });
    if (!lone) bands.push({ series: [at + 2, at + 1], fill: stroke + "2b" });
  }
  const font = "11px system-ui";
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--quiet"), grid, ticks: { show: false }, font, values: (_, vs) => vs.map(short) };
  const label = (words, labelSize) => ({ label: words, labelSize, labelFont: font, labelGap: 2 });
  const note = document.createElement("div");
  note.className = "chart-note";
  note.hidden = true;
  const size = () => ({ width: Math.max(200, box.clientWidth), height });
  const options = {
    ...size(),
    series,
    bands,
    legend: { show: false },
    padding: [10, 12, 0, 0],
    scales: { x: { time: false } },
    axes: [
      { ...axis, size: 26, ...label(x === "seconds" ? "seconds of training" : x, 16) },
      { ...axis, size: 48, ...label(title, 18) },
    ],
    cursor: { sync: { key: sync }, points: { size: 7 }, drag: { x: true, y: false } },
    hooks: { setCursor: [(u) => tell(u, note, held, x)] },
  };
  const plot = new uPlot(options, joined(held), box);
  plot.over.append(note);
  plot.over.setAttribute("role", "img");
  const describe = () => {
    const ends = held.map((c) => `${c.label} ends at ${short(c.mean.at(-1))}`);
    plot.over.setAttribute("aria-label", `${title}: ${ends.join("; ")}`);
  };
  describe();
  const resize = new ResizeObserver(() => plot.setSize(size()));
  resize.observe(box);
  return {
    /** Draw the same curves with more points; false where they are not the same and a new chart is needed. */
    update(next) {
      const now = next.filter((c) => c.x.length);
      if (now.map((c) => c.label).join("\n") !== held.map((c) => c.label).join("\n")) return false;
      held = now;
      plot.setData(joined(held));
      describe();
      return true;
    },
    destroy() {
      resize.disconnect();
      plot.destroy();
    },
  };
}

function tell(u, note, held, x) {
  const { idx, left } = u.cursor;
  note.hidden = idx === null || idx === undefined || left < 0 || !held.length;
  if (note.hidden) return;
  note.replaceChildren();
  const place = document.createElement("b");
  place.textContent = `${x} ${short(u.data[0][idx])}`;
  note.append(place);
  held.forEach((c, i) => {
    const value = nearest(u.data[1 + 3 * i], idx);
    if (value === undefined) return;
    const line = document.createElement("span");
    const mark = document.createElement("i");
    mark.style.background = seriesColour(c.place);
    line.append(mark, ` ${short(value)}  ${c.label}`);
    note.append(line);
  });
  const wide = u.over.clientWidth;
  note.style.left = left > wide / 2 ? "auto" : `${left + 14}px`;
  note.style.right = left > wide / 2 ? `${wide - left + 14}px` : "auto";
}

function nearest(column, at) {
  for (let back = at; back >= 0; back--) if (column[back] !== null && column[back] !== undefined) return column[back];
  return undefined;
}
