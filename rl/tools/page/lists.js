// The held-out cards and the table of training groups, with filters, orders and pages. The hash
// holds the choices, so that a list can be linked like a sample.
page.order = [];  // hashes of the samples that were listed last, for "next" and "previous"

{
  const {el, isolated, num} = page;
  const CARDS = 24;
  const ROWS = 50;

  // A form of fields [{name, label, options: [[value, text]] | type}], filled from `state`.
  page.fill = (form, fields, state, change) => {
    const key = JSON.stringify(fields);
    if (form.dataset.key !== key) {
      form.dataset.key = key;
      form.replaceChildren(...fields.map((field) => {
        const input = field.options
          ? el("select", {name: field.name},
              field.options.map(([value, text]) => el("option", {value}, text)))
          : el("input", {name: field.name, type: field.type, step: "any",
              placeholder: field.placeholder});
        return el("label", {}, field.label, input);
      }));
    }
    for (const field of fields) {
      const input = form.elements[field.name];
      const value = state[field.name] ?? "";
      if (document.activeElement !== input || field.options) input.value = value;
      if (field.options && input.selectedIndex < 0) input.selectedIndex = 0;
    }
    const num = fields.filter((field) => state[field.name]).length;
    form.parentNode.firstElementChild.textContent = `${form.ariaLabel}${num ? ` (${num} set)` : ""}`;
    form.onsubmit = (event) => event.preventDefault();
    form.oninput = () => {
      const chosen = {view: state.view};
      for (const field of fields) {
        const value = form.elements[field.name].value;
        const first = field.options ? field.options[0][0] : "";
        if (value !== first) chosen[field.name] = value;
      }
      history.replaceState(null, "", page.hash(chosen));
      change();
    };
  };

  const choices = (label, values) => [["", label], ...[...values].sort().map((v) => [v, v])];

  // Whether `value` is between the values of two fields; without a value: only if both are empty.
  const within = (value, low, high) => {
    const least = low === undefined || low === "" ? null : Number(low);
    const most = high === undefined || high === "" ? null : Number(high);
    if (least === null && most === null) return true;
    if (value === null || value === undefined) return false;
    return (least === null || value >= least) && (most === null || value <= most);
  };

  // Compares rows by `value`; rows without a value come last in either direction.
  const by = (value, sign) => (one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1;
    if (b === null || b === undefined) return -1;
    return sign * (a - b);
  };

  const pager = (element, state, num, size, change) => {
    const last = Math.max(1, Math.ceil(num / size));
    const now = Math.min(last, Math.max(1, Number(state.page) || 1));
    const go = (to) => {
      history.replaceState(null, "", page.hash({...state, page: to > 1 ? to : ""}));
      change();
      window.scrollTo(0, 0);
    };
    element.replaceChildren(...(last === 1 ? [] : [
      el("button", {type: "button", disabled: now === 1, onclick: () => go(now - 1)}, "Previous page"),
      el("span", {}, `page ${now} of ${last}`),
      el("button", {type: "button", disabled: now === last, onclick: () => go(now + 1)}, "Next page"),
    ]));
    return (now - 1) * size;
  };

  const common = (categories, statuses, parts) => [
    {name: "q", label: "Search", type: "search", placeholder: "words, id"},
    {name: "cat", label: "Category", options: choices("all", categories)},
    {name: "st", label: "Status", options: choices("all", statuses)},
    {name: "min", label: "Reward from", type: "number"},
    {name: "max", label: "Reward to", type: "number"},
    {name: "part", label: "Part", options: choices("none", parts)},
    {name: "pmin", label: "Part from", type: "number"},
    {name: "pmax", label: "Part to", type: "number"},
  ];

  page.sets = (state) => {
    const {sets} = page.facts;
    const named = (name) => sets.find((set) => set.page === name);
    return [named(state.a) ?? sets[0], named(state.b) ?? sets.at(-1)];
  };

  page.heldOut = async (state) => {
    const section = document.getElementById("at-held-out");
    const count = section.querySelector(".count");
    const cards = section.querySelector(".cards");
    if (!page.facts.sets.length) {
      count.textContent = "No held-out evaluation is on record.";
      return;
    }
    const sets = page.sets(state);
    const [a, b] = await Promise.all(sets.map(page.evaluation));
    if (!a || !b) {
      count.textContent = "These evaluations are not in this file.";
      cards.replaceChildren();
    }
    const before = new Map((a?.rows ?? []).map((row) => [row.id, row]));
    const pairs = (b?.rows ?? []).map((after) => {
      const old = before.get(after.id) ?? null;
      const gain = old && old.r !== null && after.r !== null ? after.r - old.r : null;
      return {old, after, gain, part: state.part ? after.parts[b.parts.indexOf(state.part)] : null};
    });
    const redraw = () => page.heldOut(page.route());
    const options = page.facts.sets.map((set) => [set.page, page.setName(set)]);
    const first = (set) => [...options].sort((x, y) => (x[0] === set ? -1 : y[0] === set ? 1 : 0));
    const [firstA, firstB] = page.sets({});
    page.fill(section.querySelector("form"), [
      {name: "a", label: "A, before", options: first(firstA.page)},
      {name: "b", label: "B, after", options: first(firstB.page)},
      {name: "sort", label: "Order", options: [
        ["", "as in the data"], ["gain", "biggest gain first"], ["loss", "biggest loss first"],
        ["high", "highest reward first"], ["low", "lowest reward first"]]},
      ...common(new Set(pairs.map((p) => p.after.cat).filter(Boolean)),
        new Set(pairs.flatMap((p) => [p.after.st, p.old?.st].filter(Boolean))), b?.parts ?? []),
    ], state, redraw);
    if (!a || !b) return;
    const query = (state.q ?? "").toLowerCase();
    const matching = pairs.filter(({old, after, part}) =>
      (!state.cat || after.cat === state.cat) &&
      (!state.st || after.st === state.st || old?.st === state.st) &&
      within(after.r, state.min, state.max) && (!state.part || within(part, state.pmin, state.pmax)) &&
      (!query || [after.say, after.text, after.think, after.id, old?.text ?? "", old?.think ?? ""].some((t) => t.toLowerCase().includes(query))));
    const orders = {gain: [(p) => p.gain, -1], loss: [(p) => p.gain, 1],
      high: [(p) => p.after.r, -1], low: [(p) => p.after.r, 1]};
    if (orders[state.sort]) matching.sort(by(...orders[state.sort]));
    const better = matching.filter((p) => p.gain > 0).length;
    const worse = matching.filter((p) => p.gain < 0).length;
    const numNew = pairs.filter((p) => !p.old).length;
    count.textContent = `${matching.length} of ${pairs.length} samples; ${better} gained, ${worse} lost` +
      (numNew ? `; ${numNew} are not in A` : "") + ".";
    const start = pager(section.querySelector(".pager"), state, matching.length, CARDS, redraw);
    const link = (row) => page.hash({eval: b.set.it, id: row.id, a: a.set.page});
    page.order = matching.map((p) => link(p.after));
    cards.replaceChildren(...matching.slice(start, start + CARDS).map((p) => card(p, a.set, b.set, link)));
  };

  // The first held-out sample that was drawn, before and after, for the overview.
  page.firstSample = async (place) => {
    if (place.hasChildNodes() || page.facts.sets.length < 2) return;
    const sets = page.sets({});
    const [old, now] = await Promise.all(sets.map(page.evaluation));
    const beforeOf = (row) => old?.rows.find((one) => one.id === row.id);
    const after = now?.rows.find((row) => row.img && beforeOf(row));
    if (!after) return;
    const before = beforeOf(after);
    const drawn = (row, at, name) => page.figure(page.at(sets[at].base, row.img), `${row.say} (${name})`,
      `${name}: `, page.reward(row), ", ", isolated(row.text || "(no words)"));
    const link = page.hash({eval: sets[1].it, id: after.id, a: sets[0].page});
    place.replaceChildren(
      el("p", {class: "soft"}, "The first held-out sample: ", el("a", {href: link}, isolated(after.say || after.id))),
      el("div", {class: "tops"}, page.sources(sets[1].base, after), drawn(before, 0, "before"), drawn(after, 1, "after")));
  };

  const card = ({old, after, gain}, a, b, link) => {
    const names = [page.setName(a), page.setName(b)];
    const bareLabel = "the user's own words";
    const sources = page.sources(b.base, after);
    const sourcePictures = sources.length > 1 ? el("div", {class: "sources"}, sources)
      : sources[0] ?? (after.bimg ? page.figure(page.at(b.base, after.bimg), `${after.say} (${bareLabel})`, bareLabel) : null);
    const pictures = after.img || old?.img
      ? page.slider(page.at(a.base, old?.img), page.at(b.base, after.img), after.say, names) : null;
    const completion = (name, row, base) => row &&
      el("p", {class: "said"}, el("span", {class: "soft"}, `${name}: `), page.marked(row.text || "(no words)", base ?? row.text, "bdi"));
    return el("article", {class: "card"},
      el("h3", {}, el("a", {href: link(after)}, isolated(after.say || after.id))),
      sourcePictures || pictures ? el("div", {class: "row"}, sourcePictures ?? el("span"), pictures) : null,
      completion(names[0], old), completion(names[1], after, old?.text),
      el("p", {class: "meta"},
        el("span", {}, old ? page.reward(old) : "–", " → ", page.reward(after)),
        page.signed(gain, 2), after.cat ? isolated(after.cat) : null));
  };

  // A row of `find_*.js` (`finding_row` in `rl/tools/reading.py`) with its statistics.
  const group = (it, names, row, g) => {
    const num = row.rewards.length;
    const mean = num ? row.rewards.reduce((sum, reward) => sum + reward, 0) / num : null;
    const spread = num ? Math.sqrt(row.rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / num) : null;
    const st = {};
    for (const status of row.st) st[status] = (st[status] ?? 0) + 1;
    return {...row, it, names, g, mean, spread, st, low: row.rewards[0] ?? null, high: row.rewards.at(-1) ?? null};
  };
  let groups = null;
  const shows = {
    pictures: (one) => one.pictures.length, none: (one) => !one.pictures.length, failed: (one) => notScored(one.st),
    spread: (one) => one.spread, even: (one) => !one.spread,
  };

  const allGroups = async (count) => {
    if (groups) return groups;
    const all = [];
    const {chunks} = page.facts;
    for (let start = 0; start < chunks.length; start += 8) {
      count.textContent = `Reading ${start} of ${chunks.length} pages ...`;
      const names = chunks.slice(start, start + 8).map((chunk) => `find_${page.padded(chunk)}`);
      for (const chunk of await Promise.all(names.map(page.load))) {
        for (const [it, iteration] of Object.entries(chunk ?? {})) {
          all.push(...iteration.rows.map((row, g) => group(Number(it), iteration.parts, row, g)));
        }
      }
    }
    groups = all;
    return all;
  };

  page.training = async (state) => {
    const section = document.getElementById("at-training");
    const count = section.querySelector(".count");
    const all = await allGroups(count);
    const redraw = () => page.training(page.route());
    page.fill(section.querySelector("form"), [
      {name: "sort", label: "Order", options: [
        ["", "newest first"], ["old", "oldest first"], ["spread", "largest spread first"],
        ["even", "smallest spread first"], ["high", "highest reward first"],
        ["low", "lowest reward first"]]},
      {name: "only", label: "Show", options: [["", "all groups"], ["pictures", "with pictures"], ["none", "without pictures"],
        ["failed", "not all scored"], ["spread", "with spread"], ["even", "without spread"]]},
      ...common(new Set(all.map((one) => one.cat).filter(Boolean)),
        new Set(all.flatMap((one) => Object.keys(one.st))), new Set(all.flatMap((one) => one.names))),
    ], state, redraw);
    const query = (state.q ?? "").toLowerCase();
    const part = (one) => one.parts[one.names.indexOf(state.part)];
    const matching = all.filter((one) =>
      (shows[state.only]?.(one) ?? true) && (!state.cat || one.cat === state.cat) && (!state.st || one.st[state.st]) &&
      within(one.mean, state.min, state.max) && (!state.part || within(part(one), state.pmin, state.pmax)) &&
      (!query || one.say.toLowerCase().includes(query)));
    const orders = {"": [(one) => one.it, -1], old: [(one) => one.it, 1],
      spread: [(one) => one.spread, -1], even: [(one) => one.spread, 1],
      high: [(one) => one.mean, -1], low: [(one) => one.mean, 1]};
    matching.sort(by(...(orders[state.sort ?? ""] ?? orders[""])));
    count.textContent = `${matching.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} groups.`;
    const start = pager(section.querySelector(".pager"), state, matching.length, ROWS, redraw);
    page.order = matching.map((one) => `#it=${one.it}&g=${one.g}`);
    const head = [["Iteration", "n"], ["Pictures", "thumbs"], ["Instruction", "what"], ["Category", "wider"], ["Mean", "n"],
      ["Least", "n wider"], ["Largest", "n wider"], ["Spread", "n"], ...(state.part ? [[state.part, "n"]] : []), ["Not scored", "n wider"]];
    section.querySelector("table").replaceChildren(
      el("thead", {}, el("tr", {}, head.map(([text, kind]) => el("th", {scope: "col", class: kind}, isolated(text))))),
      el("tbody", {}, matching.slice(start, start + ROWS).map((one) => el("tr", {},
        el("td", {class: "n"}, String(one.it)),
        el("td", {class: "thumbs"}, one.pictures.map((place, at) => page.image(`../${place}`, `${one.say} (${["source", "best", "worst"][at]})`))),
        el("td", {class: "what"}, el("a", {href: `#it=${one.it}&g=${one.g}`}, isolated(one.say || `group ${one.g}`))),
        el("td", {class: "wider"}, isolated(one.cat)),
        ...[one.mean, one.low, one.high, one.spread, ...(state.part ? [part(one)] : [])]
          .map((value, at) => el("td", {class: at === 1 || at === 2 ? "n wider" : "n"}, num(value, 2))),
        el("td", {class: "n wider"}, notScored(one.st))))));
  };

  const notScored = (statuses) => Object.entries(statuses)
    .filter(([name]) => name !== "scored")
    .map(([name, number]) => `${number} ${name}`).join(", ");
}
