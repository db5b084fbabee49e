// Finding: the held-out cards and the table of training groups, with filters, orders and pages.
// What is chosen stands in the hash, so that a list can be linked as a sample can.
page.order = [];  // hashes of what was listed last, for the next and the previous sample

{
  const {el, words, num} = page;
  const CARDS = 24;
  const ROWS = 50;

  // A form of fields [{name, label, options: [[value, text]] | type}], filled from `state`.
  const fill = (form, fields, state, change) => {
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

  // [lowest, highest] of two fields; a row without a number is out once either is given.
  const within = (value, low, high) => {
    const least = low === undefined || low === "" ? null : Number(low);
    const most = high === undefined || high === "" ? null : Number(high);
    if (least === null && most === null) return true;
    if (value === null || value === undefined) return false;
    return (least === null || value >= least) && (most === null || value <= most);
  };

  // Rows without a value come last whichever way.
  const by = (value, sign) => (one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1;
    if (b === null || b === undefined) return -1;
    return sign * (a - b);
  };

  const pager = (place, state, num, size, change) => {
    const last = Math.max(1, Math.ceil(num / size));
    const now = Math.min(last, Math.max(1, Number(state.page) || 1));
    const go = (to) => {
      history.replaceState(null, "", page.hash({...state, page: to > 1 ? to : ""}));
      change();
      window.scrollTo(0, 0);
    };
    place.replaceChildren(...(last === 1 ? [] : [
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
    const found = (name) => sets.find((set) => set.page === name);
    return [found(state.a) ?? sets[0], found(state.b) ?? sets.filter((set) => !set.run).at(-1) ?? sets.at(-1)];
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
    const again = () => page.heldOut(page.route());
    const options = page.facts.sets.map((set) => [set.page, page.setName(set)]);
    const first = (set) => [...options].sort((x, y) => (x[0] === set ? -1 : y[0] === set ? 1 : 0));
    const [firstA, firstB] = page.sets({});
    fill(section.querySelector("form"), [
      {name: "a", label: "A, before", options: first(firstA.page)},
      {name: "b", label: "B, after", options: first(firstB.page)},
      {name: "sort", label: "Order", options: [
        ["", "as in the data"], ["gain", "biggest gain first"], ["loss", "biggest loss first"],
        ["high", "highest reward first"], ["low", "lowest reward first"]]},
      ...common(new Set(pairs.map((p) => p.after.cat).filter(Boolean)),
        new Set(pairs.flatMap((p) => [p.after.st, p.old?.st].filter(Boolean))), b?.parts ?? []),
    ], state, again);
    if (!a || !b) return;
    const asked = (state.q ?? "").toLowerCase();
    const shown = pairs.filter(({old, after, part}) =>
      (!state.cat || after.cat === state.cat) &&
      (!state.st || after.st === state.st || old?.st === state.st) &&
      within(after.r, state.min, state.max) && (!state.part || within(part, state.pmin, state.pmax)) &&
      (!asked || [after.say, after.text, after.think, after.id, old?.text ?? "", old?.think ?? ""].some((t) => t.toLowerCase().includes(asked))));
    const orders = {gain: [(p) => p.gain, -1], loss: [(p) => p.gain, 1],
      high: [(p) => p.after.r, -1], low: [(p) => p.after.r, 1]};
    if (orders[state.sort]) shown.sort(by(...orders[state.sort]));
    const better = shown.filter((p) => p.gain > 0).length;
    const worse = shown.filter((p) => p.gain < 0).length;
    const alone = pairs.filter((p) => !p.old).length;
    count.textContent = `${shown.length} of ${pairs.length} samples; ${better} gained, ${worse} lost` +
      (alone ? `; ${alone} are not in A` : "") + ".";
    const start = pager(section.querySelector(".pager"), state, shown.length, CARDS, again);
    const link = (row) => page.hash({eval: b.set.it, id: row.id, run: b.set.run, a: a.set.page});
    page.order = shown.map((p) => link(p.after));
    cards.replaceChildren(...shown.slice(start, start + CARDS).map((p) => card(p, a.set, b.set, link)));
  };

  const card = ({old, after, gain}, a, b, link) => {
    const names = [page.setName(a), page.setName(b)];
    const own = "the user's own words";
    const sources = page.sources(b.base, after);
    const given = sources.length > 1 ? el("div", {class: "sources"}, sources)
      : sources[0] ?? (after.bimg ? page.figure(page.at(b.base, after.bimg), `${after.say} (${own})`, own) : null);
    const pictures = after.img || old?.img
      ? page.slider(page.at(a.base, old?.img), page.at(b.base, after.img), after.say, names) : null;
    const said = (name, row) => row &&
      el("p", {class: "said"}, el("span", {class: "soft"}, `${name}: `), words(row.text || "(no words)"));
    return el("article", {class: "card"},
      el("h3", {}, el("a", {href: link(after)}, words(after.say || after.id))),
      given || pictures ? el("div", {class: "row"}, given ?? el("span"), pictures) : null,
      said(names[0], old), said(names[1], after),
      el("p", {class: "meta"},
        el("span", {}, old ? page.reward(old) : "–", " → ", page.reward(after)),
        page.signed(gain, 2), after.cat ? words(after.cat) : null));
  };

  // Rows of `find_*.js`, as `rl/report/episode_rows.py: finding_row` orders them.
  const group = (it, names, row) => ({
    it, names, g: row[0], cat: row[1], say: row[2], mean: row[3], low: row[4], high: row[5],
    spread: row[6], st: row[7], parts: row[8],
  });
  let groups = null;

  const allGroups = async (count) => {
    if (groups) return groups;
    const found = [];
    const {chunks} = page.facts;
    for (let at = 0; at < chunks.length; at += 8) {
      count.textContent = `Reading ${at} of ${chunks.length} pages ...`;
      const names = chunks.slice(at, at + 8).map((chunk) => `find_${page.padded(chunk)}`);
      for (const chunk of await Promise.all(names.map(page.load))) {
        for (const [it, of] of Object.entries(chunk ?? {})) {
          for (const row of of.rows) found.push(group(Number(it), of.parts, row));
        }
      }
    }
    groups = found;
    return found;
  };

  page.training = async (state) => {
    const section = document.getElementById("at-training");
    const count = section.querySelector(".count");
    const all = await allGroups(count);
    const again = () => page.training(page.route());
    fill(section.querySelector("form"), [
      {name: "sort", label: "Order", options: [
        ["", "newest first"], ["old", "oldest first"], ["spread", "largest spread first"],
        ["even", "smallest spread first"], ["high", "highest reward first"],
        ["low", "lowest reward first"]]},
      ...common(new Set(all.map((one) => one.cat).filter(Boolean)),
        new Set(all.flatMap((one) => Object.keys(one.st))), new Set(all.flatMap((one) => one.names))),
    ], state, again);
    const asked = (state.q ?? "").toLowerCase();
    const part = (one) => one.parts[one.names.indexOf(state.part)];
    const shown = all.filter((one) =>
      (!state.cat || one.cat === state.cat) && (!state.st || one.st[state.st]) &&
      within(one.mean, state.min, state.max) && (!state.part || within(part(one), state.pmin, state.pmax)) &&
      (!asked || one.say.toLowerCase().includes(asked)));
    const orders = {"": [(one) => one.it, -1], old: [(one) => one.it, 1],
      spread: [(one) => one.spread, -1], even: [(one) => one.spread, 1],
      high: [(one) => one.mean, -1], low: [(one) => one.mean, 1]};
    shown.sort(by(...(orders[state.sort ?? ""] ?? orders[""])));
    count.textContent = `${shown.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} groups` +
      (page.facts.alone ? "; those whose samples are in this file." : ".");
    const start = pager(section.querySelector(".pager"), state, shown.length, ROWS, again);
    page.order = shown.map((one) => `#it=${one.it}&g=${one.g}`);
    const head = ["Iteration", "Instruction", "Category", "Mean", "Least", "Largest", "Spread",
      ...(state.part ? [state.part] : []), "Not scored"];
    const numeric = (at) => (at === 0 || at > 2 ? "n" : null);
    section.querySelector("table").replaceChildren(
      el("thead", {}, el("tr", {}, head.map((text, at) => el("th", {scope: "col", class: numeric(at)}, words(text))))),
      el("tbody", {}, shown.slice(start, start + ROWS).map((one) => el("tr", {},
        el("td", {class: "n"}, String(one.it)),
        el("td", {class: "what"}, el("a", {href: `#it=${one.it}&g=${one.g}`}, words(one.say || `group ${one.g}`))),
        el("td", {}, words(one.cat)),
        ...[one.mean, one.low, one.high, one.spread, ...(state.part ? [part(one)] : [])].map((value) => el("td", {class: "n"}, num(value, 2))),
        el("td", {class: "n"}, notScored(one.st))))));
  };

  const notScored = (statuses) => Object.entries(statuses)
    .filter(([name]) => name !== "scored")
    .map(([name, many]) => `${many} ${name}`).join(", ");
}
