// The overview's charts: curves and histograms with the values under the pointer, and a search in
// all metrics. Their data is the page `metrics`, from `curve_data` in `rl/tools/reading.py`.
{
  const {el, svg, isolated} = page;
  const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [440, 150, 44, 8, 8, 20];
  const SMOOTHED_FROM = 100;  // a main line with more points is drawn smoothed, over its faint raw values
  const SMOOTHING = 5;
  const MAX_DOTS = 25;
  const MAX_FOUND = 24;
  const MAX_COLUMNS = 100;
  const AXES = {it: "iteration", pictures: "pictures", hours: "hours"};

  const short = (value) => {
    const size = Math.abs(value);
    const text = size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
    return text.replace(/^-/, "−");
  };

  // Two to five round numbers that span [low, high]; on a log axis, powers of ten.
  const ticks = (low, high, log) => {
    const rough = log ? Math.max(1, Math.ceil((Math.ceil(high) - Math.floor(low)) / 4)) : (high - low) / 3;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = log ? rough : [1, 2, 2.5, 5, 10].map((m) => m * power).find((size) => size >= rough * 0.999);
    const first = Math.floor(low / step + 1e-9);
    const last = Math.max(Math.ceil(high / step - 1e-9), first + 1);
    return Array.from({length: last - first + 1}, (_, at) => Number(((first + at) * step).toPrecision(6)));
  };

  // An svg of the frame with axes; `across` and `up` turn values into px. `name`: the text of a y tick.
  const frame = (label, xs, [low, high], marks, name) => {
    const [first, last] = [Math.min(...xs), Math.max(...xs)];
    const across = (x) => LEFT + (last > first ? (x - first) / (last - first) : 0.5) * (WIDTH - LEFT - RIGHT);
    const up = (y) => TOP + (1 - (y - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const graph = svg("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label},
      marks.flatMap((mark) => [
        svg("line", {class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: up(mark), y2: up(mark)}),
        svg("text", {class: "tick y", x: LEFT - 6, y: up(mark) + 3.5}, name(mark))]),
      (last > first ? [[first, "start"], [last, "end"]] : [[first, "middle"]]).map(([x, anchor]) =>
        svg("text", {class: `tick ${anchor}`, x: across(x), y: HEIGHT - 4}, short(x))));
    // Calls `show` with the place of the pointer in the frame: across and up, each from 0 to 1.
    const onPointer = (show, leave) => {
      for (const kind of ["pointermove", "pointerdown"]) graph.addEventListener(kind, (event) => {
        const box = graph.getBoundingClientRect();
        show(((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT),
          1 - ((event.clientY - box.top) / box.height * HEIGHT - TOP) / (HEIGHT - TOP - BOTTOM));
      });
      graph.addEventListener("pointerleave", leave);
    };
    return {graph, across, up, onPointer, first, last};
  };

  const smooth = (points) => points.map(([x], at) => {
    const window = points.slice(Math.max(0, at + 1 - SMOOTHING), at + 1);
    return [x, window.reduce((sum, [, y]) => sum + y, 0) / window.length];
  });

  const nearest = (points, x) =>
    points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));

  // A curve {title, top, lines: [[metric, label, style]]}; null if it has no points.
  page.chart = (curve, data, state) => {
    const axis = data[state.x] ? state.x : "it";
    const raw = curve.lines.map(([metric, label, style]) => ({metric, label, style,
      points: (data.of[metric] ?? []).flatMap((y, at) => (y === null ? [] : [[data[axis][at], y]]))}))
      .filter((line) => line.points.length);
    if (!raw.length) return null;
    const log = state.y === "log" && raw.some((line) => line.points.some(([, y]) => y > 0));
    const lines = raw.map((line) => ({...line, drawn: log
      ? line.points.filter(([, y]) => y > 0).map(([x, y]) => [x, Math.log10(y)]) : line.points}));
    const ys = lines.flatMap((line) => line.drawn.map(([, y]) => y));
    let [low, high] = [Math.min(...ys, log ? Infinity : 0), log ? Math.max(...ys) : curve.top ?? Math.max(...ys)];
    if (!log && high - low <= Math.max(1e-100, 1e-9 * Math.abs(low))) high = low + Math.max(1, Math.abs(low));
    const marks = ticks(low, high, log);
    const spans = lines.map(({label, points}) => `${label} from ${short(points[0][1])} to ${short(points.at(-1)[1])}`);
    const {graph, across, up, onPointer, first, last} = frame(`${curve.title}: ${spans.join("; ")}`,
      lines.flatMap((line) => line.points.map(([x]) => x)), [marks[0], marks.at(-1)], marks,
      (mark) => short(log ? 10 ** mark : mark));
    const path = (points, style) => svg("path", {class: style,
      d: `M${points.map(([x, y]) => `${across(x).toFixed(1)} ${up(y).toFixed(1)}`).join("L")}`});
    for (const {drawn, style} of lines) {
      if (!drawn.length) continue;
      const smoothed = style === "main" && drawn.length > SMOOTHED_FROM;
      graph.append(...(smoothed ? [path(drawn, "faint"), path(smooth(drawn), style)] : [path(drawn, style)]));
      if (drawn.length === 1 || (style === "main" && drawn.length <= MAX_DOTS)) {
        graph.append(...drawn.map(([x, y]) => svg("circle", {class: style, cx: across(x), cy: up(y), r: 2.5})));
      }
    }
    const values = lines.map(({points}) => el("span", {class: "n"},
      (points.length > 1 ? `${short(points[0][1])} → ` : "") + short(points.at(-1)[1])));
    const defaults = values.map((value) => value.textContent);
    const where = el("span", {class: "soft at"});
    const cursor = svg("line", {class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"});
    graph.append(cursor);
    onPointer((share) => {
      const all = lines.map(({points}) => nearest(points, first + share * (last - first)));
      const x = nearest(all, first + share * (last - first))[0];
      where.textContent = `${AXES[axis]} ${short(x)}`;
      all.forEach(([at, y], line) => { values[line].textContent = short(y) + (at === x ? "" : ` (at ${short(at)})`); });
      for (const [name, value] of [["x1", across(x)], ["x2", across(x)], ["visibility", "visible"]]) cursor.setAttribute(name, value);
    }, () => {
      where.textContent = "";
      values.forEach((value, line) => { value.textContent = defaults[line]; });
      cursor.setAttribute("visibility", "hidden");
    });
    const notes = [lines.some(({style, drawn}) => style === "main" && drawn.length > SMOOTHED_FROM)
      ? `strong: mean of the last ${SMOOTHING} points, faint: each` : null,
      data.span > 1 ? `a point is the mean of ${data.span} iterations` : null].filter(Boolean);
    return el("figure", {}, el("figcaption", {}, isolated(curve.title), where), graph,
      el("ul", {class: "legend"}, lines.map(({label, style}, line) => el("li", {},
        svg("svg", {class: "key", viewBox: "0 0 24 8", "aria-hidden": "true"}, svg("path", {class: style, d: "M0 4L24 4"})),
        isolated(label, "span"), values[line]))),
      el("details", {}, el("summary", {}, "what this is"),
        notes.length ? el("p", {class: "fine"}, `${notes.join("; ")}.`) : null,
        lines.map(({metric}) => el("p", {class: "fine"}, el("code", {}, isolated(metric)),
          data.docs[metric] ? ` (${data.docs[metric].join("): ")}` : ""))));
  };

  // Counts by bin (rows: [iteration, counts]) as a heat map; bin i is around `first` + i `step`.
  const histogram = (title, rows, first, step, data, state) => {
    const axis = data[state.x] ? state.x : "it";
    const width = Math.ceil(rows.length / MAX_COLUMNS);
    const columns = Array.from({length: Math.ceil(rows.length / width)}, (_, at) => rows.slice(at * width, (at + 1) * width))
      .map((span) => ({from: span[0][0], to: span.at(-1)[0],
        counts: span[0][1].map((_, bin) => span.reduce((sum, [, counts]) => sum + counts[bin], 0))}));
    const position = (it) => (axis === "it" ? it : data[axis][Math.max(0, data.it.findIndex((other) => other >= it))]);
    const xs = columns.map(({from}) => position(from));
    const num = columns[0].counts.length;
    const low = first - step / 2;
    const {graph, up, onPointer} = frame(title, [position(rows[0][0]), position(rows.at(-1)[0])], [low, low + num * step],
      [first, first + (num - 1) * step / 2, first + (num - 1) * step], short);
    const size = (WIDTH - LEFT - RIGHT) / columns.length;
    columns.forEach(({counts}, at) => {
      const total = counts.reduce((sum, count) => sum + count, 0);
      graph.append(...counts.flatMap((count, bin) => (count === 0 ? [] : [svg("rect", {class: "bin",
        x: LEFT + at * size, width: Math.max(0.5, size - (size > 4 ? 1 : 0)), y: up(first + (bin + 0.5) * step), height: up(0) - up(step),
        opacity: Math.sqrt(count / total).toFixed(3)})])));
    });
    const meaning = `A column is ${width === 1 ? "one iteration" : `${width} iterations`}; a stronger colour is a larger share of its completions.`;
    const text = el("p", {class: "fine"}, meaning);
    onPointer((right, above) => {
      const [at, bin] = [Math.floor(right * columns.length), Math.floor(above * num)];
      const column = columns[at];
      if (!column || !(bin >= 0 && bin < num)) return;
      const total = column.counts.reduce((sum, count) => sum + count, 0);
      text.textContent = `${AXES[axis]} ${short(xs[at])}: ${column.counts[bin]} of ${total} around ${short(first + bin * step)}`;
    }, () => { text.textContent = meaning; });
    return el("figure", {}, el("figcaption", {}, title), graph, text);
  };

  // The metrics with all words of the query, those with all in their name first.
  const found = (data, query) => {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    const names = words.length ? Object.keys(data.of) : [];
    const matching = (of) => names.filter((name) => words.every((word) => of(name).toLowerCase().includes(word)));
    return [...new Set([...matching((name) => name), ...matching((name) => `${name} ${data.docs[name]?.[1] ?? ""}`)])];
  };

  page.overview = async (state) => {
    const section = document.getElementById("at-overview");
    page.firstSample(section.querySelector(".first"));
    const data = await page.load("metrics");
    const view = (name) => section.querySelector(`.curves.${name}`);
    if (!data || !data.it.length) return;
    page.fill(section.querySelector("form"), [
      {name: "q", label: "Find a metric", type: "search", placeholder: `${Object.keys(data.of).length} on record`},
      {name: "x", label: "x axis", options: Object.entries(AXES).filter(([axis]) => data[axis])},
      {name: "y", label: "y axis", options: [["linear", "linear"], ["log", "logarithmic"]]},
    ], state, () => page.overview(page.route()));
    const names = found(data, state.q ?? "");
    const all = (curves) => curves.map((curve) => page.chart(curve, data, state)).filter(Boolean);
    section.querySelector(".count").textContent = state.q ? `${names.length} metrics match` +
      (names.length > MAX_FOUND ? `; the first ${MAX_FOUND}:` : names.length ? ":" : ".") : "";
    view("found").replaceChildren(...all(names.slice(0, MAX_FOUND).map((name) => ({title: name, top: null, lines: [[name, "value", "main"]]}))));
    const {curves} = page.facts;
    const parts = new Set(Object.keys(data.of).map((name) => /^(?:reward|eval)\/part\/(.*)/s.exec(name)?.[1]).filter(Boolean));
    const ofPart = (part) => ({title: part, top: null,
      lines: [[`reward/part/${part}`, "sampled", "main"], [`eval/part/${part}`, "held-out", "dash"],
        [`eval/gap/${part}`, "behind what the final reward's gain predicts", "dot"]]});
    view("main").replaceChildren(...all(curves.filter((curve) => curve.main)));
    view("histograms").replaceChildren(...(data.histograms.length ? [
      histogram("Rewards", data.histograms, 0, 0.05, data, state),
      histogram("Advantages", data.histograms.map(([it, , counts]) => [it, counts]), -3, 0.25, data, state)] : []));
    for (const [name, group] of [["parts", [...parts].sort().map(ofPart)], ["more", curves.filter((curve) => !curve.main)]]) {
      const folded = view(name).closest("details");
      const draw = () => folded.open && view(name).replaceChildren(...all(group));
      folded.ontoggle = draw;
      draw();
      folded.hidden = !group.some((curve) => curve.lines.some(([metric]) => data.of[metric]));
    }
    view("histograms").previousElementSibling.hidden = !data.histograms.length;
  };
}
